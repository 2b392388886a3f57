"""CPU of one NVML reading of 8 GPUs, judged: a program that does nothing else, against `/usr/bin/python3 -c pass`."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests/fakes"))
LIMIT = 4.0  # of the 8 that the whole check may take
ROUNDS = 25
READ = """
import sys
sys.path.insert(0, {root!r})
from slurm_gpuhealth.evidence import nvml
from slurm_gpuhealth.config.settings import Nvml, Settings
settings = Settings(nvml=Nvml(library={library!r}))
probed = nvml.read(settings, baseline={baseline!r})
findings, baseline = nvml.judge_probed(probed, None, {baseline!r}, [], settings, 0.0)
assert len(probed.value["gpus"]) == 8 and not findings, (probed, findings)
"""


def main() -> None:
    """Print one line a measurement; exit 1 where one is short."""
    import node

    sys.path.insert(0, ROOT)
    from slurm_gpuhealth.config.settings import Nvml, Settings
    from slurm_gpuhealth.evidence import nvml

    with tempfile.TemporaryDirectory() as folder:
        node.make_node(folder, "bench")
        library = os.path.join(folder, node.LIBRARY)
        settings = Settings(nvml=Nvml(library=library))
        first = nvml.read(settings)
        _, baseline = nvml.judge_probed(first, None, {}, [], settings, 0.0)
        # As installed: with byte code, wherever this tree lies, and without what our caller's environment says of it.
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPYCACHEPREFIX": os.path.join(folder, "pyc")}
        program = READ.format(root=ROOT, library=library, baseline=baseline)
        nothing, reading = [], []
        cpu(environment, sys.executable, "-c", program)
        for _ in range(ROUNDS):  # in turns: another load on the machine falls on both
            nothing.append(cpu({"PATH": "/usr/bin:/bin"}, "/usr/bin/python3", "-c", "pass"))
            reading.append(cpu(environment, sys.executable, "-c", program))
    ratio = statistics.median(reading) / statistics.median(nothing)
    print(f"bench: nvml-read-cpu {ratio:.2f} x-python bar {LIMIT:g} {'ok' if ratio <= LIMIT else 'SHORT'}")
    sys.exit(ratio > LIMIT)


def cpu(environment: dict[str, str], *argv: str) -> float:
    """User and system seconds of one run of `argv`, its children included."""
    pid = os.posix_spawn(argv[0], argv, environment)
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"bench: {argv[0]} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
