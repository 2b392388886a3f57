"""What the hooks cost on a healthy node, and how fast and how often they do what: on real Slurm, in one run."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.daemons import until
from tests.lab import BIN, Lab, fresh

RUNS = 40
BASE = ["/usr/bin/python3", "-c", "pass"]
JOB = {"SLURM_JOB_UID": "5", "SLURM_JOB_USER": "games", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_GPUS": "0,1,2,3"}


def main() -> int:
    lab = Lab(fresh("bench"), nodes=1, gpus=8, dbd=False, health_interval=10, poll="1h")
    short = []
    with lab:
        until(lambda: lab.journal("n1", "checked"), "the first check")
        lab.configure(interval=600)
        for line in [*cpu(lab), *calls(lab), *together(lab), *latency(lab)]:
            print(line, flush=True)
            short += [line] if line.endswith("SHORT") else []
    return 1 if short else 0


def cpu(lab: Lab):
    """CPU (user and system) of each program over that of a Python that does nothing, and the largest peak memory."""
    config = {"GPUHEALTH_CONFIG": str(lab.config), "SLURMD_NODENAME": "n1"}
    time.sleep(2.5)  # so that the configuration is cached
    lab.hook("check", "n1")
    begun, ended = (iter(range(1000, 1000 + RUNS)) for _ in range(2))

    def prolog() -> dict[str, str]:
        return {**config, **JOB, "SLURM_JOB_ID": str(next(begun)), "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}

    def epilog() -> dict[str, str]:
        end = {"SLURM_JOB_EXIT_CODE2": "0:0", "SLURM_JOB_DERIVED_EC": "0", "SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}
        return {**config, **JOB, "SLURM_JOB_ID": str(next(ended)), **end}

    peak = 0
    for program, env, bar in (("prolog", prolog, 5.0), ("epilog", epilog, 5.0), ("check", lambda: config, 8.0)):
        spent, base = [], []
        for _ in range(RUNS):
            seconds, _ = run(BASE, {})
            base.append(seconds)
            seconds, memory = run([str(BIN / f"gpuhealth-{program}")], env())
            spent.append(seconds)
            peak = max(peak, memory)
        yield bench(f"{program}-cpu", statistics.median(spent) / statistics.median(base), "x", bar)
    recorded = lab.rows("n1", "SELECT count(*), count(outcome) FROM job WHERE job >= 1000")
    assert recorded == [(RUNS, RUNS)], recorded  # they did do their work
    yield bench("peak-memory", peak / 1024, "MiB", 40)


def calls(lab: Lab):
    """Questions to the controller while a job runs through prolog, three checks and epilog."""
    lab.calls("n1")
    job = lab.submit("sleep 30", gres="gpu:2")
    lab.wait(job, "RUNNING")
    for _ in range(3):
        lab.hook("check", "n1")
    lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    lab.run("scancel", str(job))
    lab.wait(job, "CANCELLED")
    yield bench("controller-calls-healthy-job", len(lab.calls("n1")), "calls", 0)
    lab.configure(poll="20s")
    until(lambda: lab.calls("n1"), "the first poll", 60)
    time.sleep(60)
    yield bench("controller-calls-idle", len(lab.calls("n1")) / 3, "calls/poll", 1)


def together(lab: Lab):
    """50 prologs at once without a fresh pass: how many diagnostics run, and how long does the last one wait?"""
    diagnostics = lab.lab / "nodes/n1/diags.jsonl"
    before = len(diagnostics.read_text().splitlines())
    lab.inject("n1", "xid", 43, "--gpu", 0)  # something new: every pass is void
    with contextlib.closing(sqlite3.connect(lab.lab / "nodes/n1/state/journal.db", timeout=10)) as db:
        db.execute("DELETE FROM diagnostic")
        db.commit()
    codes, times = [], []

    def one(number: int) -> None:
        began = time.monotonic()
        env = {**JOB, "SLURM_JOB_ID": str(20000 + number), "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}
        codes.append(lab.hook("prolog", "n1", **env).returncode)
        times.append(time.monotonic() - began)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 50, codes
    yield bench("50-prologs-diagnostics", len(diagnostics.read_text().splitlines()) - before, "runs", 1)
    yield bench("50-prologs-slowest", max(times), "s", 30)


def latency(lab: Lab):
    """From a fault in the kernel log to `sinfo -R`, over the health check's interval."""
    lab.configure(interval=10)
    lab.inject("n1", "xid", 79, "--gpu", 3)
    began = time.monotonic()
    until(lambda: lab.reason("n1").startswith("gpuhealth:Xid79 GPU3"), "the reason", 60)
    yield bench("fault-to-sinfo", time.monotonic() - began, "s", lab.health_interval + 1)


def run(argv: list[str], env: dict[str, str]) -> tuple[float, int]:
    """CPU seconds and peak KiB of a program and of the children that it waited for."""
    null = os.open("/dev/null", os.O_RDWR)
    child = subprocess.Popen(argv, env=env, stdin=null, stdout=null, stderr=null)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = status
    os.close(null)
    if status:
        raise RuntimeError(f"{argv[0]}: wait status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss


def bench(name: str, value: float, unit: str, bar: float) -> str:
    return f"bench: {name} {value:.3g} {unit} bar {bar:g} {'ok' if value <= bar else 'SHORT'}"


if __name__ == "__main__":
    sys.exit(main())
