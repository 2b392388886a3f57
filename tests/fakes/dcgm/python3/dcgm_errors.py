"""Stand-in for NVIDIA's module of the same name."""
