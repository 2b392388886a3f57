"""gpuhealth-escalate and gpuhealth ladder on a real cluster: each answer that an admin can get, and what it does."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from slurm_gpuhealth.slurm.reason import Reason, write
from tests.cluster import USER
from tests.daemons import PATIENCE
from tests.fakes import node as fakes
from tests.lab import BIN

LAB = {"floor": 4}

ADMIN = "mail"
"""A Slurm administrator (an operator may not change nodes), who is not root and can read no node's journal."""
BROKEN = write(Reason("Xid79", 3, "L4", "fail", since="11-20T12:03Z", next="RMA"))


@pytest.fixture(scope="module")
def shared_lab(shared_lab):
    shared_lab.run("sacctmgr", "-i", "add", "user", ADMIN, "Account=lab", "AdminLevel=Admin")
    return shared_lab


@pytest.fixture
def lab(lab):
    for node in lab.names:
        lab.run("scontrol", "update", f"nodename={node}", "comment=", "extra=")
        scale(lab, node, 0.002)
    return lab


def scale(lab, node, factor):
    """Level 3 takes 900 s, level 4 3600 s, times `factor`."""
    folder = str(lab.lab / "nodes" / node)
    scenario = fakes.load(folder)
    scenario["dcgm"]["time_scale"] = factor
    fakes.save(folder, scenario)


def start(lab, *argv, program="gpuhealth-escalate", config="/nowhere", here="login1", **options):
    """By default as on a login node without a configuration."""
    return subprocess.Popen(
        [str(BIN / program), *argv],
        env={**lab.env, "GPUHEALTH_CONFIG": str(config), "SLURMD_NODENAME": here, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where a shell runs us behind
        **{"stderr": subprocess.PIPE, **options},
    )


def escalate(lab, *argv, **options):
    """Exit code, standard output and error."""
    child = start(lab, *argv, **options)
    out, err = ended(lab, child)
    assert "Traceback" not in err
    return child.returncode, out, err


def ended(lab, child):
    """What the program has said when it has ended, while the nodes go on checking."""
    lab.until(lambda: child.poll() is not None, "the command's end", *lab.names)
    return child.communicate()


def ladder(lab, *argv, **options):
    return escalate(lab, "ladder", *argv, program="gpuhealth", **options)


def update(lab, node, *words):
    lab.run("scontrol", "update", f"nodename={node}", *words)


def test_an_admin_who_can_read_no_journal_learns_that_a_node_is_fit(lab):
    scale(lab, "n1", 0.01)
    code, out, err = escalate(lab, "n1", "--json", "--reason", 'fan "noise"', user=ADMIN)
    assert code == 0, out + err
    end = json.loads(out)
    assert (end["outcome"], end["rung"], end["next"], end["exit"]) == ("fit", "L3", "back", 0)
    assert "by=mail%3A%20fan%20%22noise%22" in err
    assert ["n1: L3 is running" in err, "n1: waits for the budget's decision" in err] == [True, True]
    lab.until(lambda: lab.state("n1") == "IDLE", "n1 in service")
    code, out, _ = ladder(lab, "n1", user=ADMIN)
    assert [words in out for words in ("last result: L3 pass; back follows", "as root on n1")] == [True, True]


def test_a_busy_node_is_waited_for_and_its_job_ends_as_it_would(lab):
    job = lab.submit("echo begun; sleep 20", gres="gpu:1", nodelist="n1", time=5)
    lab.until_begun(job)
    code, out, err = escalate(lab, "n1", "--through", "4")
    assert f"L3 waits for job {job} of {USER} (until " in err
    assert "L3 pass; L4 follows" in err
    assert (code, "n1: fit: L4 pass; it is in service" in out) == (0, True)
    assert lab.job(job)["JobState"] == "COMPLETED"


def test_a_bad_gpu_is_named_with_its_test_dcgms_error_and_what_to_do(lab):
    lab.inject("n2", "dcgm", "memory", 80, "--gpu", 5, "--level", 2)
    code, out, err = escalate(lab, "n2")
    assert code == 1
    assert "n2: not fit: L4 fail: GPU5 memory, DCGM error 80" in out
    assert "  1. " in out
    assert "L3 fail: GPU5 memory" in err
    assert "GPU5 L4 fail" in lab.reason("n2")
    assert "next=RMA" in lab.reason("n2")

    def failed():
        past = lab.gpuhealth("n2", "ladder", "n2")
        rows = [line.split() for line in past.splitlines() if line[:2] == "20"]
        return "dcgm:memory GPU5" in past and [row[2] for row in rows if row[3] == "fail"]

    lab.until(lambda: failed() == ["L3", "L4", "RMA"], "the row of the RMA, which follows its reason")


def record(lab, node):
    """The node's record, but for what changes by itself."""
    return {word for word in lab.node(node).split() if not word.startswith(("CPULoad=", "FreeMem=", "LastBusyTime="))}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("drain", "an admin drained it: 'PSU, JD' by root"),
        ("down", "it is DOWN: 'PSU, JD'"),
        ("fail", "FAIL"),
    ],
)
def test_what_an_admin_did_is_left_as_it_is(lab, state, words):
    update(lab, "n1", f"state={state}", "reason=PSU, JD")
    before = record(lab, "n1"), lab.reason("n1")
    code, out, _ = escalate(lab, "n1", *(["--take-over"] if state != "drain" else []))
    assert (code, words in out) == (3, True)
    assert (record(lab, "n1"), lab.reason("n1")) == before
    assert "gpuhealth" not in lab.node("n1")


def test_a_node_that_is_taken_over_is_tested_and_goes_back_to_its_admin(lab):
    update(lab, "n1", "state=drain", "reason=PSU, JD; 50% of it", "comment=rack 7")
    code, out, _ = escalate(lab, "n1", "--take-over")
    assert (code, "'PSU, JD; 50% of it'" in out) == (0, True)
    assert (lab.state("n1"), lab.reason("n1")) == ("IDLE+DRAIN", "PSU, JD; 50% of it")
    lab.until(lambda: " Comment=rack 7 " in lab.node("n1"), "the site's own comment alone")
    assert escalate(lab, "n1")[0] == 3


def test_a_node_that_is_taken_over_and_broken_goes_back_to_its_admin_by_resume(lab):
    update(lab, "n1", "state=drain", "reason=PSU, JD")
    lab.inject("n1", "dcgm", "memory", 80, "--gpu", 5, "--level", 2)
    code, out, err = escalate(lab, "n1", "--take-over")
    assert code == 1, out + err
    assert "next=RMA" in lab.reason("n1")
    text = lab.gpuhealth("n1", "resume", "n1")
    assert "drained as it was before gpuhealth tested it: 'PSU, JD'" in text
    assert (lab.state("n1"), lab.reason("n1")) == ("IDLE+DRAIN", "PSU, JD")


def test_what_slurm_drained_is_tested_and_left_drained(lab):
    update(lab, "n1", "state=drain", "reason=Kill task failed")
    code, out, _ = escalate(lab, "n1")
    assert (code, "'Kill task failed'" in out) == (0, True)
    assert (lab.state("n1"), lab.reason("n1")) == ("IDLE+DRAIN", "Kill task failed")


def test_a_node_at_the_end_of_the_ladder_may_prove_itself_again(lab):
    update(lab, "n1", "state=drain", f"reason={BROKEN}")
    code, out, err = escalate(lab, "n1", "--level", "3")
    assert (code, "n1: fit" in out) == (0, True)
    assert "now 'gpuhealth:Xid79 GPU3 L3 queued since=11-20T12:03Z by=root'" in err
    lab.until(lambda: lab.state("n1") == "IDLE", "n1 in service")


def test_nodes_that_can_not_be_asked_and_wrong_calls_exit_with_3_and_change_nothing(lab):
    for argv, options, words in (
        (["n9"], {}, "n9 not found"),
        (["n1"], {"user": USER}, "Slurm does not let you change nodes"),
        (["n1", "--gpu", "8"], {}, "it has no GPU 8, only 0 to 7"),
        (["ALL"], {}, "is not the name of one node"),
        (["n[1-2000]"], {}, "not a hostlist of 1 to 1000 nodes"),
        (["n1", "--level", "5"], {}, "5"),
        ([], {}, "which node?"),
        (["--here"], {"user": USER}, "--here is for root"),
        (["n2", "--here"], {"here": "n1"}, "--here is for root, and for this node only: n1"),
    ):
        code, out, err = escalate(lab, *argv, **options)
        assert (code, words in out + err) == (3, True), (argv, out, err)
    assert [lab.state(node) for node in lab.names] == ["IDLE"] * 4
    assert "gpuhealth" not in lab.node("n1")


def test_of_a_hostlist_as_many_are_asked_as_the_budget_allows(lab):
    code, out, _ = escalate(lab, "n[1-4]")  # by the defaults: two
    assert code == 3
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows if row[0] in lab.names][:2] == [["n1", "fit"], ["n2", "fit"]]
    assert out.count("over budget: 2 of 4 nodes are held already") == 2
    lab.until(lambda: [lab.state(node) for node in lab.names] == ["IDLE"] * 4, "all in service")


def test_ctrl_c_leaves_the_ladder_at_it_and_cancel_ends_it(lab):
    scale(lab, "n1", 0.1)
    child = start(lab, "n1")
    lab.until_reason("n1", "L3 running")
    child.send_signal(signal.SIGINT)
    _, err = ended(lab, child)
    assert child.returncode == 130
    assert "the ladder goes on without you: n1" in err
    lab.check("n1")
    assert "L3 running" in lab.reason("n1")
    code, out, _ = ladder(lab)
    assert (code, "L3 is running" in out) == (0, True)
    child = start(lab, "n1")  # look again
    lab.until(lambda: "L3 is running" in (child.stderr.readline() or "L3 is running"), "that it is followed")
    code, out, _ = ladder(lab, "cancel", "n1")
    assert (code, "n1: given back (was 'gpuhealth:asked GPU* L3 running" in out) == (0, True)
    assert child.wait(PATIENCE) == 3
    lab.until(lambda: lab.rows("n1", "SELECT 1 FROM step WHERE outcome = 'cancelled'"), "the worker's end")
    assert lab.state("n1") == "IDLE"


def test_a_cancelled_climb_for_a_fault_stays_drained_and_still(lab):
    scale(lab, "n1", 0.1)
    lab.configure('[[policy]]\nfinding = "xid:119"\nseverity = "fault"\nrung = "L3"\n')
    lab.inject("n1", "xid", 119, "--gpu", 3)
    lab.until_reason("n1", "L3 running")
    code, out, _ = ladder(lab, "cancel", "n1")
    assert (code, "stays drained" in out) == (0, True)
    lab.check("n1")
    lab.check("n1")
    assert "manual" in lab.reason("n1")
    assert ladder(lab, "cancel", "n1")[0] == 1


def test_here_it_begins_at_once(lab):
    lab.configure(poll="300s")
    began = time.time()
    code, out, err = escalate(lab, "--here", "--level", "4", "--gpu", "3", config=lab.config, here="n1")
    assert (code, "n1: fit: L4 pass" in out) == (0, True)
    assert time.time() - began < PATIENCE, err
    assert "GPU3 L4 claim" in err


def test_killed_over_its_request_the_node_goes_on_alone(lab):
    scale(lab, "n1", 0.02)
    child = start(lab, "n1")
    lab.until(lambda: "gpuhealth:asked" in lab.reason("n1"), "the request")
    child.kill()
    child.communicate()
    lab.until(lambda: "L3 pass" in lab.node("n1") and lab.state("n1") == "IDLE", "n1 tested and back")


def test_on_a_terminal_one_line_is_rewritten(lab):
    scale(lab, "n1", 0.01)
    main, terminal = os.openpty()
    child = start(lab, "n1", stderr=terminal)
    os.close(terminal)
    lab.until(lambda: child.poll() is not None, "the command's end", "n1")
    assert child.returncode == 0
    shown = os.read(main, 1 << 16).decode()
    assert re.search(r"\r\x1b\[Kn1: L3 is running, \d+ s, usually 15 min, at most 35 min", shown)


def test_no_wait_asks_and_leaves(lab):
    code, out, _ = escalate(lab, "n1", "--no-wait")
    assert (code, "n1: asked" in out) == (0, True)
    lab.until(lambda: "L3 pass" in lab.node("n1"), "the result")


def test_without_a_controller_nothing_is_asked_and_one_that_goes_is_waited_for(lab):
    scale(lab, "n1", 0.02)
    said = lab.lab / "said"
    with said.open("w") as stderr:
        child = start(lab, "n1", stderr=stderr)
    lab.until_reason("n1", "L3 running")
    lab.stop_controller()
    try:
        code, out, _ = escalate(lab, "n2")
        assert (code, "slurmctld does not answer" in out) == (3, True)
        lab.until(
            lambda: "no answer from Slurm" in said.read_text(), "what it says"
        )  # 24.11's scontrol asks for longer
    finally:
        lab.start_controller()
    out, _ = ended(lab, child)
    assert (child.returncode, "n1: fit" in out) == (0, True)
