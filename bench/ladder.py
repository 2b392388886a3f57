"""How long a drained node waits on the ladder: from its last job's end to the rung, from an admin's word to its end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.daemons import until
from tests.fakes import node as fakes
from tests.lab import BIN, Lab, fresh

INTERVAL, POLL = 10, 20
START = 2
"""Seconds that the check and the worker need beside: Python twice, and four questions to Slurm."""


def main() -> int:
    lab = Lab(fresh("bench-ladder"), nodes=2, gpus=8, dbd=False, health_interval=INTERVAL, floor=2, poll=f"{POLL}s")
    short = []
    with lab:
        for node in lab.names:
            until(lambda: lab.journal(node, "checked"), f"the first check of {node}")  # noqa: B023
        for line in [local(lab), remote(lab), ended(lab)]:
            print(line, flush=True)
            short += [line] if line.endswith("SHORT") else []
    return 1 if short else 0


def local(lab: Lab) -> str:
    """The node found the fault itself while a job ran on it: one check after the job."""
    job = lab.submit("sleep 25", gres="gpu:1", nodelist="n1")
    lab.wait(job, "RUNNING")
    lab.configure('[[policy]]\nfinding = "xid:119"\nseverity = "fault"\nrung = "L3"\n')
    lab.inject("n1", "xid", 119, "--gpu", 3)
    until(lambda: "L3 queued" in lab.reason("n1"), "the hold")  # by slurmd's own checks alone
    lab.wait(job, "COMPLETED")
    return bench("ladder-start-local", seconds_until_running(lab, "n1"), INTERVAL + START)


def remote(lab: Lab) -> str:
    """Somebody asks from elsewhere while a job runs there: one poll and one check after the job."""
    slower(lab, "n2")
    job = lab.submit("sleep 15", gres="gpu:1", nodelist="n2")
    lab.wait(job, "RUNNING")
    env = {**lab.env, "GPUHEALTH_CONFIG": str(lab.config), "SLURMD_NODENAME": "n1"}
    lab.run(
        "env", *(f"{key}={value}" for key, value in env.items()), str(BIN / "gpuhealth-escalate"), "--no-wait", "n2"
    )
    lab.wait(job, "COMPLETED")
    return bench("ladder-start-remote", seconds_until_running(lab, "n2"), POLL + INTERVAL + START)


def ended(lab: Lab) -> str:
    """An admin resumes a node whose diagnostic runs: when it is gone."""
    child = until(lambda: lab.journal("n2", "ladder-child"), "a diagnostic that runs")
    lab.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    began = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() - began < 120:
            os.kill(child[1], 0)
            time.sleep(0.2)
    return bench("ladder-end-after-resume", time.monotonic() - began, 60)


def seconds_until_running(lab: Lab, node: str) -> float:
    until(lambda: "CPUAlloc=0" in lab.node(node), f"{node} without a job")
    began = time.monotonic()
    until(lambda: "L3 running" in lab.reason(node), "level 3", 120)
    return time.monotonic() - began


def slower(lab: Lab, node: str) -> None:
    """A level 3 that would take its 15 min."""
    folder = str(lab.lab / "nodes" / node)
    scenario = fakes.load(folder)
    scenario["dcgm"]["time_scale"] = 1
    fakes.save(folder, scenario)


def bench(name: str, value: float, bar: float) -> str:
    return f"bench: {name} {value:.1f} s bar {bar:g} {'ok' if value <= bar else 'SHORT'}"


if __name__ == "__main__":
    sys.exit(main())
