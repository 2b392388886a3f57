"""The check on a node of 8 busy GPUs: its CPU over that of a Python that does nothing, and how its journal grows."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests/fakes")]
CPU = 4.0
ROUNDS = 25
CONFIG = """
[paths]
{paths}
[slurm]
slurmd = "/bin/true"
scontrol = "/bin/false"
[nvml]
library = "{folder}/libnvidia-ml.so.1"
[dcgm]
backend = "off"
[sources]
dcgm_health = "off"
"""
JOB = "INSERT INTO job (job, restart, uid, user, nodes, gpus, started) VALUES (7, 0, 5, 'games', 1, ?, ?)"


def main() -> None:
    """Print one line a measurement; exit 1 where one is short."""
    from slurm_gpuhealth.config.load import load
    from slurm_gpuhealth.node.journal import open_journal
    from tests.lab import LABS

    LABS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=LABS) as folder:  # not in /tmp: its configuration would be refused
        config = make(folder)
        journal = open_journal(load(config, "bench").paths)
        program = [sys.executable, "-c", "from slurm_gpuhealth.hooks.check import main; main()"]
        environment = {"GPUHEALTH_CONFIG": config, "SLURMD_NODENAME": "bench", "PYTHONPATH": ROOT}
        environment |= {"PYTHONPYCACHEPREFIX": os.path.join(folder, "pyc")}
        time.sleep(2.5)  # so that the configuration is cached
        cpu(environment, *program)
        cpu(environment, *program)
        idle = ratio(environment, program)
        uuids = [gpu["uuid"] for gpu in journal.get("gpus")]
        journal.write(JOB, ",".join(uuids), time.time())
        cpu(environment, *program)
        busy = ratio(environment, program)
    short = [bench("check-without-job-cpu", idle, "x-python", CPU), bench("check-with-job-cpu", busy, "x-python", CPU)]
    sys.exit(any(short))


def make(folder: str) -> str:
    """A stand-in node, and its configuration's path."""
    import node

    node.make_node(folder, "bench")
    names = {"state": "state", "run": "run", "kernel_log": "kmsg", "proc": "proc", "sys": "sys", "dev": "dev"}
    paths = "\n".join(f'{key} = "{folder}/{name}"' for key, name in names.items())
    config = os.path.join(folder, "gpuhealth.toml")
    with open(config, "w") as file:
        file.write(CONFIG.format(folder=folder, paths=paths))
    os.chmod(config, 0o600)
    return config


def ratio(environment: dict[str, str], program: list[str]) -> float:
    nothing, checks = [], []
    for _ in range(ROUNDS):  # in turns: another load on the machine falls on both
        nothing.append(cpu({"PATH": "/usr/bin:/bin"}, "/usr/bin/python3", "-c", "pass"))
        checks.append(cpu(environment, *program))
    return statistics.median(checks) / statistics.median(nothing)


def cpu(environment: dict[str, str], *argv: str) -> float:
    """User and system seconds of one run of `argv`, its children included."""
    pid = os.posix_spawn(argv[0], argv, environment)
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"bench: {argv[0]} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


def bench(name: str, value: float, unit: str, bar: float) -> bool:
    print(f"bench: {name} {value:.2f} {unit} bar {bar} {'ok' if value <= bar else 'SHORT'}")
    return value > bar


if __name__ == "__main__":
    main()
