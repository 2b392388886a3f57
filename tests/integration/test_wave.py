"""A bad roll-out on a real cluster of many nodes: every node fails at once, and the cluster goes on."""

import os
import time

from slurm_gpuhealth.ladder import budget
from tests.daemons import until

NODES = 200 if os.environ.get("GPUHEALTH_SOAK") else 60
LAB = {"nodes": NODES, "gpus": 1, "dbd": False, "health_interval": 60, "poll": "10s", "floor": 2}
ROLLOUT = """
[[check.command]]
name = "rollout"
argv = ["/bin/sh", "-c", "test -e {lab}/bad && echo the new image has no licence && exit 2; exit 0"]
mode = "enforce"
every = "1s"
"""


def held(lab):
    """node → our reason, of those that are drained."""
    lines = lab.run("sinfo", "-h", "-N", "-p", "gpu", "-t", "drain", "-o", "%N|%E").splitlines()
    return {name: text for name, text in (line.split("|", 1) for line in lines) if text.startswith("gpuhealth:")}


def until_all_checked(lab, since):
    until(lambda: all(lab.journal(name, "checked", 0) > since for name in lab.names), "a check of every node")


def test_when_every_node_fails_at_once_the_budget_is_held_and_one_undrain_brings_them_back(lab):
    until_all_checked(lab, 0)
    lab.configure(ROLLOUT.format(lab=lab.lab), floor=2)
    (lab.lab / "bad").touch()
    began, most = time.time(), 0

    def all_checked():
        nonlocal most
        most = max(most, sum(" claim" not in text for text in held(lab).values()))
        time.sleep(1)
        return all(lab.journal(name, "checked", 0) > began for name in lab.names)

    until(all_checked, "a check of every node")
    until(lambda: not any(" claim" in text for text in held(lab).values()), "no claim")
    limit = budget.most(NODES, 0.05, 2)
    print(f"{len(held(lab))} of {NODES} held, {most} at most, {time.time() - began:.0f} s after the roll-out")
    assert most <= limit
    assert 1 <= len(held(lab)) <= limit
    assert all(text.startswith("gpuhealth:") and " claim" not in text for text in held(lab).values())
    out = lab.gpuhealth("n1", "undrain", "--since", "1h", "--fact", "rollout", "--everywhere", "--yes")
    assert not held(lab), out
    since = time.time()
    until_all_checked(lab, since)
    assert not held(lab)
