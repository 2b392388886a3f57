"""The ladder: what a drained node does by itself to prove that it is fit, or broken."""
