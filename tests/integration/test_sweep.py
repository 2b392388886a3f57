"""The sweep on real Slurm: an idle node tests itself and comes back; a job that could start there comes first."""

import sqlite3
import time

import pytest

from slurm_gpuhealth.node.journal_file import seal
from slurm_gpuhealth.slurm import remark
from tests.fakes import node as fakes

LAB = {"nodes": 3, "gpus": 4, "dbd": False, "floor": 2}

SWEEP = '\n[sweep]\nenabled = true\ninterval = "1h"\n[[ladder.model]]\ngpu = "*"\nl3 = "10min"\nl4 = "30min"\n'


@pytest.fixture
def lab(lab):
    for name in lab.names:
        folder = str(lab.lab / "nodes" / name)
        scenario = fakes.load(folder)
        scenario["dcgm"]["time_scale"] = 0.03  # level 2 takes some seconds
        fakes.save(folder, scenario)
    lab.touched.update(lab.names)
    return lab


def steps(lab, node):
    return lab.rows(node, "SELECT rung, outcome, follows FROM step WHERE fact = 'sweep' ORDER BY id")


def is_due(lab, node):
    """As if the first interval were over, and nobody had ever tested the node."""
    lab.run("scontrol", "update", f"NodeName={node}", "Extra=")
    with sqlite3.connect(lab.lab / "nodes" / node / "state/journal.db", timeout=10) as db:
        began = seal("sweep", {"from": time.time() - 7200})
        db.execute("INSERT OR REPLACE INTO state VALUES ('sweep', ?)", (began,))
        db.execute("DELETE FROM diagnostic WHERE level > 1")
        db.execute("DELETE FROM step")


def result(lab, node):
    return remark.read_result(lab.node(node).partition(" Extra=")[2])


def test_nodes_sweep_one_at_a_time_and_come_back(lab):
    for node in lab.names:
        is_due(lab, node)
    lab.configure(SWEEP)
    held = 0

    def all_done():
        nonlocal held
        reasons = [lab.reason(node) for node in lab.names]
        held = max(held, sum(reason.startswith("gpuhealth:sweep") and " claim" not in reason for reason in reasons))
        for node in lab.names:  # who found no room would ask again after a quarter of an hour
            kept = lab.journal(node, "sweep", {})
            if kept.get("asked") and not steps(lab, node) and not lab.reason(node).startswith("gpuhealth"):
                is_due(lab, node)
        return all(steps(lab, node) == [("L2", "pass", "back")] for node in lab.names)

    lab.until(all_done, "each node swept")
    assert held == 1  # 2 % of three nodes is none; one may always be
    lab.until(lambda: all(lab.state(node) == "IDLE" for node in lab.names), "all in service")
    assert result(lab, "n1").outcome == "pass"
    for _ in range(3):
        lab.check(*lab.names)
    assert all(len(steps(lab, node)) == 1 for node in lab.names), "once an interval"


def test_a_pending_job_that_could_start_there_comes_first(lab):
    first = lab.submit("sleep 600", gres="gpu:4", nodelist="n1")
    lab.wait(first, "RUNNING")
    waits = lab.submit("sleep 1", gres="gpu:4", nodelist="n1")
    lab.wait(waits, "PENDING")
    for node in lab.names:  # only now: a check that read the configuration of the test before may still run
        is_due(lab, node)
    lab.configure(SWEEP)
    lab.until(lambda: all(lab.journal(node, "sweep", {}).get("asked") for node in ("n2", "n3")), "both have asked")
    lab.check(*lab.names)
    lab.check(*lab.names)
    assert [lab.state(node) for node in ("n2", "n3")] == ["IDLE", "IDLE"]
    assert [steps(lab, node) for node in lab.names] == [[], [], []]
    lab.run("scancel", str(waits), str(first))


def test_a_job_that_is_held_is_in_nobodys_way_and_a_fault_that_the_sweep_finds_stays(lab):
    lab.submit("sleep 1", hold=True)
    lab.inject("n2", "dcgm", "memory", 45, "--gpu", 1, "--level", 2)
    for node in lab.names:
        is_due(lab, node)
    lab.configure(SWEEP)

    def found():
        if lab.journal("n2", "sweep", {}).get("asked") and not steps(lab, "n2") and lab.state("n2") == "IDLE":
            is_due(lab, "n2")
        return "memory" in lab.reason("n2")

    lab.until(found, "a fault")
    assert steps(lab, "n2")[0][1] == "fail"
