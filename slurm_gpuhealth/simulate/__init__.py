"""Simulates a cluster whose true faults are known, to judge policies, ours included, before they act on real nodes."""
