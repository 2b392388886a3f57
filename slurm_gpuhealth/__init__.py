"""Prolog, Epilog and HealthCheckProgram for Slurm GPU clusters: bad GPU nodes are drained, good ones left alone."""

__version__ = "0.1.0"
