"""A cluster with faults whose truth is known: to judge policies, ours among them, before one is let loose on nodes."""
