"""The ladder on real Slurm: a drained node proves itself fit or broken, by itself."""

import os
import signal
import time
from pathlib import Path

import pytest

from slurm_gpuhealth.slurm import remark
from tests.daemons import MARK
from tests.fakes import node as fakes

LAB = {"nodes": 3, "dbd": False}

TO_LEVEL_3 = """
[[policy]]
finding = "xid:119"
severity = "fault"
rung = "L3"
"""


@pytest.fixture
def lab(lab):
    for node in lab.names:
        scale(lab, node, 0.004)  # level 3 takes 3.6 s, level 4 14 s
    return lab


def scale(lab, node, factor):
    folder = str(lab.lab / "nodes" / node)
    scenario = fakes.load(folder)
    scenario["dcgm"]["time_scale"] = factor
    fakes.save(folder, scenario)


def fault(lab, node):
    """An event that the policy here sends to level 3."""
    lab.configure(TO_LEVEL_3)
    lab.inject(node, "xid", 119, "--gpu", 3)


def result(lab, node):
    """Our line in the node's Extra."""
    return remark.read_result(lab.node(node).partition(" Extra=")[2])


def steps(lab, node):
    return lab.rows(node, "SELECT rung, outcome, follows FROM step ORDER BY id")


def until_back(lab, node):
    lab.until(lambda: lab.state(node) == "IDLE" and result(lab, node), f"{node} back in service")


def worker(lab, node):
    """The pid of the node's worker; 0 without one."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            ours = {f"SLURMD_NODENAME={node}".encode(), f"{MARK}={lab.lab}".encode()} <= set(environ)
            if ours and b"slurm_gpuhealth.ladder.worker" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    return 0


def test_a_fault_that_level_3_does_not_confirm_ends_in_service_again(lab):
    fault(lab, "n1")
    lab.until_reason("n1", "gpuhealth:Xid119 GPU3 L3")
    until_back(lab, "n1")
    assert steps(lab, "n1") == [("L3", "pass", "back")]
    found = result(lab, "n1")
    assert (found.rung, found.outcome, found.fact, found.gpu, found.next, found.backs) == (
        *("L3", "pass", "Xid119", 3, "back", 1),
    )
    job = lab.submit("sleep 1", gres="gpu:8", nodelist="n1")
    lab.wait(job, "COMPLETED")
    assert lab.state("n1") == "IDLE"
    assert "acked" not in {row[0] for row in lab.rows("n1", "SELECT mode FROM finding")}


def test_a_gpu_that_fails_level_3_and_4_ends_at_rma_with_its_address_and_serial(lab):
    lab.inject("n2", "dcgm", "memory", 80, "--gpu", 5, "--level", 2)
    gpu = fakes.load(str(lab.lab / "nodes/n2"))["gpus"][5]
    job = lab.submit("exit 1", gres="gpu:8", nodelist="n2")
    lab.wait(job, "FAILED")
    text = lab.until_reason("n2", "next=RMA")
    assert f"GPU5 L4 fail {gpu['pci']}.0 serial={gpu['serial']}" in text
    lab.until(lambda: lab.rows("n2", "SELECT bundle FROM step WHERE rung = 'RMA' AND bundle != ''"), "the evidence")
    assert [row[:2] for row in steps(lab, "n2")][-3:] == [("L3", "fail"), ("L4", "fail"), ("RMA", "fail")]
    assert result(lab, "n2").test == "memory"
    assert "DRAIN" in lab.state("n2")


def test_the_worker_killed_in_mid_rung_is_followed_by_another_which_runs_the_rung_once_more(lab):
    scale(lab, "n1", 0.02)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 running")
    lab.until(lambda: lab.journal("n1", "ladder-child"), "a diagnostic that runs")
    os.kill(worker(lab, "n1"), signal.SIGKILL)
    lab.until_reason("n1", "L3 running since")
    lab.until_reason("n1", "try=2")
    until_back(lab, "n1")
    assert [row[:2] for row in steps(lab, "n1")] == [("L3", "cut short"), ("L3", "pass")]


def test_a_lost_journal_does_not_lose_the_way(lab):
    scale(lab, "n1", 0.02)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 running")
    os.kill(worker(lab, "n1"), signal.SIGKILL)
    lab.forget("n1", "state")
    until_back(lab, "n1")
    assert result(lab, "n1").outcome == "pass"


def test_an_admins_resume_ends_a_running_diagnostic_and_is_an_ack(lab):
    scale(lab, "n1", 1)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 running")
    lab.until(lambda: lab.journal("n1", "ladder-child"), "a diagnostic that runs")
    lab.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    began = time.monotonic()
    lab.until(lambda: not worker(lab, "n1"), "the end of the worker")
    print(f"worker ended {time.monotonic() - began:.1f} s after the resume")
    assert steps(lab, "n1") == [("L3", "cancelled", "")]
    assert lab.state("n1") == "IDLE"
    lab.check("n1")
    assert lab.state("n1") == "IDLE"


@pytest.mark.parametrize(
    "words",
    [
        ["State=DRAIN", "Reason=PSU, JD"],
        ["State=DOWN", "Reason=PSU, JD"],
        ["Reason=gpuhealth:Xid119 GPU3 L3 running please wait for JD"],
    ],
)
def test_an_admin_who_takes_the_node_over_in_mid_rung_keeps_it(lab, words):
    scale(lab, "n1", 0.02)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 running")
    lab.run("scontrol", "update", "NodeName=n1", *words)
    mine = lab.reason("n1")
    lab.until(lambda: not worker(lab, "n1"), "the end of the worker")
    lab.check("n1")
    lab.check("n1")
    assert lab.reason("n1") == mine
    assert "DRAIN" in lab.state("n1") or "DOWN" in lab.state("n1")


def test_with_the_controller_down_in_mid_rung_the_result_waits_for_it(lab):
    scale(lab, "n1", 0.02)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 running")
    lab.until(lambda: lab.journal("n1", "ladder-child"), "a diagnostic that runs")
    lab.stop_controller()
    try:
        lab.until(lambda: not lab.journal("n1", "ladder-child"), "the diagnostic's end", "n2")
    finally:
        lab.start_controller()
    until_back(lab, "n1")
    assert [row[:2] for row in steps(lab, "n1")] == [("L3", "pass")]


def test_slurmd_restarted_in_mid_rung_changes_nothing(lab):
    scale(lab, "n1", 0.02)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 running")
    mine = worker(lab, "n1")
    restart(lab, "n1")
    assert worker(lab, "n1") == mine
    until_back(lab, "n1")
    assert steps(lab, "n1") == [("L3", "pass", "back")]


def test_a_job_on_the_node_ends_first(lab):
    job = lab.submit("echo begun; sleep 600", gres="gpu:1", nodelist="n1")
    lab.until_begun(job)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 queued")
    lab.check("n1")
    assert steps(lab, "n1") == []
    lab.run("scancel", str(job))
    lab.wait(job, "CANCELLED")
    ended = time.time()
    until_back(lab, "n1")
    assert lab.rows("n1", "SELECT min(time) FROM step")[0][0] >= ended - 1


def test_a_node_whose_slurmd_reports_a_gpu_less_than_configured_is_not_fit_whatever_passes(lab):
    scale(lab, "n1", 0.02)
    fault(lab, "n1")
    lab.until_reason("n1", "L3 running")
    conf = lab.lab / "etc/gres.conf"
    whole = conf.read_text()
    try:
        conf.write_text("".join(whole.splitlines(True)[1:]))  # n1's first
        restart(lab, "n1")
        text = lab.until_reason("n1", "reboot manual")
        assert "INVALID_REG" in lab.state("n1")
        assert "GPU3 reboot manual" in text
        assert steps(lab, "n1") == [("L3", "fail", "reboot")]
    finally:
        conf.write_text(whole)
        restart(lab, "n1")
        lab.until(lambda: "INVALID_REG" not in lab.state("n1"), "a whole registration")


def restart(lab, node):
    """slurmd alone, not the node's host engine."""
    lab.daemons.stop(f"slurmd-{node}")
    lab.daemons.start(f"slurmd-{node}", "slurmd", "-D", "-f", str(lab.conf), "-N", node)
