"""Which of DCGM's tests belong to which run level."""

from __future__ import annotations

from slurm_gpuhealth.diagnose.documents import SOFTWARE

REQUIRED = {
    1: {SOFTWARE},
    2: {"memory", "pcie"},
    3: {"diagnostic", "memory_bandwidth", "targeted_stress", "targeted_power"},
    4: {"memtest"},
}
"""The tests that a level adds in every DCGM from 2 to 4. Other tests come with further packages or hardware."""
OPTIONAL = {"eud", "cpu_eud", "nvbandwidth", "nccl_tests", "pulse_test", "context_create", "sm_stress"}
"""May be missing or skipped in a pass."""
LEVEL_OF = {"nvbandwidth": 3, "nccl_tests": 3, "eud": 3, "cpu_eud": 3, "sm_stress": 3, "pulse_test": 4} | {
    test: level for level, tests in REQUIRED.items() for test in tests
}
