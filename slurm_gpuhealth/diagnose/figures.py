"""What DCGM's diagnostics measured, from their remarks (`info`): the same words from DCGM 3.0 to 4.6. Pure.

DCGM 3 writes all of a GPU's remarks as one text, DCGM 4 as a list, of which it keeps 16 in all (NVIDIA/DCGM#215): then
most figures of a node with eight GPUs are missing. DCGM's auxiliary data has none: dcgmi prints only EUD's version.
"""

from __future__ import annotations

import re

from slurm_gpuhealth.diagnose.outputs import Figure, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slurm_gpuhealth.diagnose.documents import Test

REMARKS = (  # nvvs/plugin_src: PcieMain.cpp, DiagnosticPlugin.cpp, TargetedStress_, TargetedPower_wrapper.cpp
    (r"GPU to Host bandwidth:\s*([\d.]+) GB/s", "dcgm.d2h", "GB/s"),
    (r"Host to GPU bandwidth:\s*([\d.]+) GB/s", "dcgm.h2d", "GB/s"),
    (r"bidirectional bandwidth:\s*([\d.]+) GB/s", "dcgm.bidir", "GB/s"),
    (r"GPU to Host latency:\s*([\d.]+) us", "dcgm.d2h-latency", "us"),
    (r"Host to GPU latency:\s*([\d.]+) us", "dcgm.h2d-latency", "us"),
    (r"bidirectional latency:\s*([\d.]+) us", "dcgm.bidir-latency", "us"),
    (r"calculated at approximately ([\d.]+) gigaflops", "dcgm.gflops", "GFLOPS"),
    (r"relative stress level:?\s*([\d.]+)", "dcgm.stress", "GFLOPS"),
    (r"max power: ([\d.]+) W", "dcgm.power-max", "W"),
    (r"average power usage: ([\d.]+) W", "dcgm.power", "W"),
    (r"temperature average:\s*([\d.]+) C", "dcgm.celsius", "C"),
)
"""Pattern of a remark, the figure's name and unit."""


def of(tests: Sequence[Test]) -> tuple[Figure, ...]:
    """The figures of all tests; `device` is DCGM's entity id. The last one of a name counts."""
    found: dict[tuple[int, str], Figure] = {}
    for test in tests:
        for gpu, text in (*((result.gpu, result.info) for result in test.results), (None, test.info)):
            found |= {(one.device or 0, one.name): one for one in _in(text, gpu)}
    return tuple(found.values())


def _in(text: str, gpu: int | None) -> Iterator[Figure]:
    """A remark may begin with its GPU's number, which counts where the result names no GPU."""
    for pattern, name, unit in REMARKS:
        for match in re.finditer(rf"(?:\bGPU (\d{{1,4}}) )?{pattern}", text):
            device = gpu if gpu is not None else int(match[1]) if match[1] else None
            value = number(match[2])
            if device is not None and value is not None:
                yield Figure(name, value, unit, device)
