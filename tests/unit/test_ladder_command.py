"""gpuhealth ladder: the state of nodes, how they got there, and cancel."""

import json

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import common, ladder
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import control, remark
from tests.unit.slurm_nodes import FAULT, NOW, Slurm


@pytest.fixture
def slurm(monkeypatch):
    return Slurm(monkeypatch)


@pytest.fixture
def run(settings, slurm, monkeypatch):
    """`gpuhealth --node n1 ladder ...`: exit code and output."""
    monkeypatch.setattr(ladder, "settings_or_defaults", lambda node: (settings, []))
    monkeypatch.setattr(common, "own_journal", lambda settings: None)

    def call(*argv):
        done = CliRunner().invoke(ladder.ladder, argv, obj="n1")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    return call


def test_all_held_nodes_are_a_table_and_the_others_are_not_in_it(slurm, run):
    slurm.add("n1", flags="DRAIN", reason=replace(FAULT, by="bob\x1b[2J"))
    slurm.add("n2", flags="DRAIN", reason=replace(FAULT, rung="RMA", gpu=None, state="fail"))
    slurm.add("n3")
    code, text = run()
    rows = [line.split() for line in text.splitlines()]
    assert (code, text.splitlines()[0]) == (0, "2 of 100 nodes are held by gpuhealth")
    assert [row[:5] for row in rows[2:]] == [["n1", "Xid79", "3", "L3", "queued"], ["n2", "Xid79", "*", "RMA", "fail"]]
    assert "\x1b" not in text
    facts = [json.loads(line) for line in run("--json")[1].splitlines()]
    assert [(one["node"], one["gpu"], one["owner"]) for one in facts] == [("n1", 3, "us"), ("n2", None, "us")]


def test_a_node_that_is_down_with_our_reason_left_on_it_is_not_held_and_gpu_0_is_a_gpu(slurm, run):
    slurm.add("n1", flags="DRAIN", reason=replace(FAULT, gpu=0))
    slurm.add("n2", base="DOWN", reason=FAULT)  # after our give-back, while its slurmd was away
    code, text = run()
    rows = [line.split() for line in text.splitlines()]
    assert (code, text.splitlines()[0]) == (0, "1 of 100 nodes are held by gpuhealth")
    assert text.splitlines()[1].endswith(" budget, by gpuhealth's reason, until they are in service again: n2 (DOWN)")
    assert [row[:3] for row in rows[3:]] == [["n1", "Xid79", "0"]]
    assert [json.loads(line)["node"] for line in run("--json")[1].splitlines()] == ["n1"]


def test_nothing_held_is_said(run):
    assert run() == (0, "0 of 100 nodes are held by gpuhealth\n")


def test_a_node_of_another_is_told_with_whose_it_is_and_its_last_result(slurm, run):
    last = remark.write_result("", remark.Result("L3", "pass", NOW, next="back"))
    slurm.add("n2", flags="DRAIN", reason="PSU", extra=last)
    code, text = run("n2")
    assert (code, "an admin drained it: 'PSU' by root" in text) == (0, True)
    assert "last result: L3 pass; back follows" in text
    assert "gpuhealth ladder n2, as root on n2" in text


def test_on_the_node_the_faults_the_decisions_and_the_rungs_are_one_story(slurm, run, journal, monkeypatch):
    slurm.add("n1", flags="DRAIN", reason=FAULT)
    monkeypatch.setattr(common, "own_journal", lambda settings: journal)
    monkeypatch.setattr(ladder.time, "time", lambda: NOW)
    journal.write(
        "INSERT INTO finding (time, seen, source, code, severity, rung, mode, gpu, message, standing, count, details)"
        " VALUES (?, ?, 'xid', '79', 'fault', 'L3', 'enforce', 3, 'fallen', 0, 1, '{}')",
        *(NOW - 50, NOW - 50),
    )
    journal.write(
        "INSERT INTO decision (time, program, action, reason, result, was)"
        " VALUES (?, 'check', 'drained', 'Xid79', '', '')",
        NOW - 40,
    )
    for age, attempt, outcome, follows in ((30, 1, "cut short", ""), (20, 2, "fail", "L4")):
        journal.write(
            "INSERT INTO step (time, seconds, fact, gpu, rung, attempt, outcome, follows, test, code, message, bundle)"
            " VALUES (?, 9, 'Xid79', 3, 'L3', ?, ?, ?, '', '', 'memory', '')",
            *(NOW - age, attempt, outcome, follows),
        )
    _, text = run("n1")
    lines = [line[21:] for line in text.splitlines() if line[:2] == "20"]
    assert [" ".join(line.split()) for line in lines] == [
        "fault xid:79 GPU3: fallen",
        "drained Xid79",
        "L3 cut short after 9 s GPU3; memory",
        "L3 fail after 9 s GPU3, try 2; memory; L4 follows",
    ]
    past = json.loads(run("n1", "--json")[1])["past"]
    assert [len(past[kind]) for kind in ("fault", "decision", "step")] == [1, 1, 2]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("cancel", "n1"), 0, "n1: stays drained"),
        (("cancel", "n2"), 1, "n2: left alone, an admin drained it"),
        (("cancel", "n9"), 1, "n9 not found"),
        (("cancel",), 2, "one node"),
        (("n1", "n2"), 2, "one node"),
        (("n9",), 1, "n9 not found"),
    ],
)
def test_cancel_and_what_is_no_node(slurm, run, argv, code, words):
    slurm.add("n1", flags="DRAIN", reason=FAULT)
    slurm.add("n2", flags="DRAIN", reason="PSU")
    found, text = run(*argv)
    assert (found, words in text) == (code, True), text
    assert slurm.nodes["n2"].reason == "PSU"


def test_a_silent_controller_is_said(run, monkeypatch):
    def silent(*_):
        raise control.ControllerDown("no answer in 10 s")

    monkeypatch.setattr(control, "holds", silent)
    assert run() == (1, "Error: slurmctld does not answer: no answer in 10 s\n")
