"""Rungs reset, reboot and RMA on real Slurm: what Slurm makes of our reboot, and what the ladder makes of that."""

import tarfile
import time

import pytest

from slurm_gpuhealth.slurm import remark
from slurm_gpuhealth.slurm.reason import Reason, parse, write
from tests.fakes import node as fakes

LAB = {"nodes": 3, "gpus": 4, "dbd": False, "floor": 2, "extra": "ResumeTimeout=12\n"}

OURS = Reason("Xid79", 3, "reboot", "running", since="11-20T12:03Z", boots=1)
TO_REBOOT = '\n[[policy]]\nfinding = "xid:119"\nseverity = "fault"\nrung = "reboot"\n'
ON = {"reset": "true", "reboot": "true"}


def boot(lab, node, **how):
    """How the node's next boots go: see tests/fakes/reboot."""
    folder = str(lab.lab / "nodes" / node)
    fakes.save(folder, {**fakes.load(folder), "boot": how})
    lab.touched.add(node)


def order(lab, node, reason=OURS):
    """Drain the node as ours, and have it rebooted as our rung does."""
    lab.touched.add(node)
    lab.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={write(reason)}")
    lab.run("scontrol", "reboot", "ASAP", "nextstate=DOWN", f"reason={write(reason)}", node)
    lab.until(lambda: "REBOOT_ISSUED" in lab.state(node), "the order")


def booted(lab, node):
    """Seconds since the epoch, slurmctld's."""
    text = lab.node(node).partition(" BootTime=")[2].split()[0]
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) if text != "None" else 0.0


def steps(lab, node):
    return lab.rows(node, "SELECT rung, outcome, follows FROM step ORDER BY id")


def message(lab, node, rung):
    return lab.rows(node, "SELECT message FROM step WHERE rung = ? ORDER BY id DESC LIMIT 1", rung)[0][0]


def result(lab, node):
    return remark.read_result(lab.node(node).partition(" Extra=")[2])


def test_our_reboot_leaves_the_node_down_without_the_drain_and_resume_ends_that(lab):
    lab.configure(poll="1h")
    boot(lab, "n1", seconds=6)
    began = time.time()
    lab.forget("n1", "state")  # so that it does not know of a hold, and does not climb
    order(lab, "n1")
    assert lab.state("n1") == "DOWN+DRAIN+REBOOT_ISSUED"
    assert lab.reason("n1") == f"{write(OURS)} : reboot issued"
    lab.until(lambda: lab.state("n1") == "DOWN", "its return")
    assert lab.reason("n1") == f"{write(OURS)} : reboot issued : reboot complete"
    assert booted(lab, "n1") >= began - 1
    lab.run("scontrol", "update", "nodename=n1", "state=resume")
    lab.until(lambda: lab.state("n1") == "IDLE", "service")


def test_what_an_admin_writes_during_our_reboot_stays(lab):
    boot(lab, "n1", seconds=8)
    order(lab, "n1")
    lab.run("scontrol", "update", "nodename=n1", "reason=PSU, JD")
    lab.until(lambda: lab.state("n1") == "DOWN", "its return")
    assert lab.reason("n1") == "PSU, JD : reboot complete"
    lab.check("n1")
    assert (lab.state("n1"), lab.reason("n1")) == ("DOWN", "PSU, JD : reboot complete")


def test_a_fault_that_a_reboot_heals_ends_in_service_again(lab):
    lab.configure(TO_REBOOT, **ON)
    boot(lab, "n2", seconds=6)
    lab.inject("n2", "xid", 119, "--gpu", 3)
    lab.until_reason("n2", "boots=1 : reboot issued")
    lab.until(lambda: lab.state("n2") == "IDLE" and result(lab, "n2"), "service")
    assert steps(lab, "n2") == [("reboot", "pass", "back")]
    found = result(lab, "n2")
    assert (found.rung, found.outcome, found.next, found.boots) == ("reboot", "pass", "back", 1)
    assert lab.rows("n2", "SELECT DISTINCT level FROM diagnostic WHERE program = 'ladder'") == [(2,)]


@pytest.mark.parametrize("seconds", [6, 25])
def test_without_its_journal_a_node_knows_that_it_has_rebooted_also_when_it_was_late(lab, seconds):
    lab.configure(TO_REBOOT, **ON)
    boot(lab, "n2", seconds=seconds)
    lab.inject("n2", "xid", 119, "--gpu", 3)
    lab.until_reason("n2", "boots=1 : reboot issued")
    lab.forget("n2", "state")
    lab.until(lambda: lab.state("n2") == "IDLE" and result(lab, "n2"), "service")
    assert steps(lab, "n2")[-1:] == [("reboot", "pass", "back")]
    assert result(lab, "n2").boots in (1, 2)  # the order may be given again by a node that lost its journal before it


def test_a_reboot_that_does_not_come_is_said_and_not_counted(lab):
    lab.configure(TO_REBOOT, **ON)
    boot(lab, "n3", fails=True)
    lab.inject("n3", "xid", 119, "--gpu", 3)
    lab.until_reason("n3", "reboot untested")
    assert lab.state("n3") == "DOWN+DRAIN"
    ours = parse(lab.reason("n3"))
    assert (ours.fact, ours.boots, ours.tail) == ("Xid119", 0, ())
    assert "RebootProgram" in message(lab, "n3", "reboot")


def test_a_gpu_that_is_gone_after_the_reboot_too_ends_at_rma_with_its_evidence(lab):
    lab.configure(TO_REBOOT.replace("119", "79"), **ON)
    lab.inject("n1", "xid", 79, "--gpu", 2, "--for-good")
    lab.until(lambda: (last := result(lab, "n1")) and last.bundle, "the evidence")
    reason = lab.reason("n1")
    assert reason.startswith("gpuhealth:Xid79 GPU2 ")
    assert "next=RMA" in reason
    assert [(rung, outcome) for rung, outcome, _ in steps(lab, "n1")] == [("reboot", "fail"), ("RMA", "fail")]
    with tarfile.open(lab.lab / "nodes/n1/state/bundles" / result(lab, "n1").bundle) as tar:
        inside = {name.rpartition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}
    gone = fakes.load(str(lab.lab / "nodes/n1"))["gpus"][2]
    assert gone["serial"].encode() in inside["gpus.json"]
    assert inside["missing.txt"] == b""
    assert inside["nvidia-bug-report.log.gz"]


def test_a_pending_row_remap_is_reset_and_the_node_comes_back(lab):
    lab.configure(**ON)
    lab.inject("n3", "xid", 63, "--gpu", 1)
    lab.inject("n3", "row-remap-pending", "--gpu", 1)
    lab.until(lambda: lab.state("n3") == "IDLE" and result(lab, "n3"), "service")
    assert ("reset", "pass", "back") in steps(lab, "n3")
    log = (lab.lab / "nodes/n3/services.log").read_text().split("\n")
    assert log[-5:-1] == [
        "stop nvidia-persistenced",
        "stop nvidia-dcgm",
        "start nvidia-persistenced",
        "start nvidia-dcgm",
    ]


def test_where_reboots_are_off_one_by_hand_is_noticed_and_proven(lab):
    lab.configure(TO_REBOOT)
    lab.inject("n1", "xid", 119, "--gpu", 3)
    lab.until_reason("n1", "reboot manual")
    lab.check("n1")  # which notes the boot that this was asked in
    lab.stop_node("n1")
    lab.inject("n1", "reboot")
    lab.start_node("n1", "-b")
    lab.until(lambda: result(lab, "n1") and result(lab, "n1").rung == "L3", "level 3")
    assert steps(lab, "n1")[-1] == ("L3", "pass", "back")
    # slurmctld may have set it DOWN for a boot that nobody ordered: that is an admin's to end.
    lab.until(
        lambda: lab.state("n1") == "IDLE" or ("DOWN" in lab.state("n1") and "L3 pass" in lab.reason("n1")), "rest"
    )
