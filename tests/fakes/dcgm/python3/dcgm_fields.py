"""Stand-in for NVIDIA's module of the same name."""

DCGM_FE_NONE = 0
DCGM_FE_GPU = 1
