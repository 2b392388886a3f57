"""gpuhealth-escalate follows nodes up the ladder by their records: what it prints."""

import json
import sys

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import escalate
from slurm_gpuhealth.config import settings as config
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import claim, follow
from slurm_gpuhealth.slurm import control, remark
from slurm_gpuhealth.slurm.reason import write
from tests.unit.slurm_nodes import FAULT, NOW, Slurm


class Heard:
    """What was told."""

    def __init__(self):
        self.lines = []

    def say(self, node, text):
        self.lines.append(f"{node}: {text}")

    def now(self, text):
        pass


@pytest.fixture
def slurm(monkeypatch):
    return Slurm(monkeypatch)


@pytest.fixture
def at_once(monkeypatch):
    """Claims are confirmed at the first look."""

    def finish(settings, journal, name, wait):
        control.set_reason(None, name, replace(control.show_node(None, name).ours, state="queued"))
        return "drained", ""

    monkeypatch.setattr(claim, "finish", finish)


# ---- following


def ran(outcome="pass", next_="back", at=NOW, **more):
    return remark.write_result("site", remark.Result("L3", outcome, at, fact="asked", next=next_, **more))


@pytest.mark.parametrize(
    ("after", "outcome", "words"),
    [
        ({"reason": FAULT, "flags": "DRAIN"}, None, ""),
        ({"reason": replace(FAULT, state="fail", next="L4"), "flags": "DRAIN", "extra": ran("fail", "L4")}, None, ""),
        ({"extra": ran()}, "fit", "L3 pass; it is in service"),
        ({"extra": ran(), "flags": "DRAIN", "reason": "PSU"}, "fit", "it is IDLE+DRAIN, 'PSU'"),
        ({"extra": ran(), "reason": replace(FAULT, state="pass"), "flags": "DRAIN"}, "fit", "gpuhealth resume n1"),
        (
            {"extra": ran("fail", "RMA", gpu=3, test="memory", code="80"), "flags": "DRAIN"}
            | {"reason": replace(FAULT, rung="L4", state="fail", next="RMA")},
            *("not fit", "GPU3 memory, DCGM error 80 Row remapping failed"),
        ),
        (
            {"extra": ran("fail", "reset"), "reason": replace(FAULT, rung="reset", state="manual"), "flags": "DRAIN"},
            *("not fit", "reset must be done by hand"),
        ),
        ({"extra": ran("fail", "L4")}, "not fit", "L3 fail; it is in service"),
        ({"extra": ran("untested")}, "not testable", "L3 untested; it is in service"),
        (
            {"reason": replace(FAULT, state="untested"), "flags": "DRAIN", "extra": ran("untested")},
            "not testable",
            "stays",
        ),
        ({"reason": replace(FAULT, state="manual"), "flags": "DRAIN"}, "not run", "cancelled"),
        ({}, "not run", "before there was a result"),
        ({"extra": ran(at=NOW - 600)}, "not run", "before there was a result"),  # of an earlier time
    ],
)
def test_how_it_ended_is_in_the_record(slurm, after, outcome, words):
    slurm.add("n1", extra=ran(at=NOW - 600))
    was = slurm.nodes["n1"]
    slurm.add("n1", **{"extra": was.extra, **after})
    end = follow.end(slurm.nodes["n1"], was, NOW)
    assert (end and end.outcome) == outcome
    assert words in (end.message if end else "")


@pytest.mark.parametrize(
    ("node", "ours", "words"),
    [
        ({}, replace(FAULT, state="claim"), "waits for the budget"),
        ({}, replace(FAULT, state="running"), "L3 is running, 2 min, usually 15 min, at most 35 min"),
        ({"alloc_cpus": 4}, FAULT, "L3 waits for job 7 of bob (until 11-21 "),
        ({"flags": "DRAIN MAINTENANCE"}, FAULT, "L3 waits: MAINTENANCE: an admin is working on it"),
        ({"flags": "DRAIN NOT_RESPONDING"}, FAULT, "L3 waits: slurmd does not answer"),
        ({}, FAULT, "L3 begins when the node sees it, 2 min of at most 6 min"),
        ({"reason_time": NOW - 3600}, FAULT, "L3 has not begun: does the node's health check run?"),
        ({}, replace(FAULT, rung="L1", state="fail", next="L4"), "L4 begins"),
        ({}, replace(FAULT, rung="L4", state="fail", next="RMA"), "an admin must act"),
    ],
)
def test_where_it_stands_is_in_the_record(settings, slurm, node, ours, words):
    slurm.add("n1", flags="DRAIN", reason=ours)
    slurm.change("n1", **{**node, **({"flags": frozenset(node["flags"].split())} if "flags" in node else {})})
    record = slurm.nodes["n1"]
    now = follow.progress(record, ours, slurm.jobs(None, "n1") if record.has_job else [], settings, NOW + 125)
    assert words in f"{now.what}, {now.time}"


@pytest.mark.parametrize(("gpu", "seconds"), [("*H100*", 600.0), ("*A100*", 0.0)])
def test_the_time_of_a_rung_has_room_for_the_tests_of_the_nodes_gpu_model(settings, slurm, gpu, seconds):
    slurm.add("n1", gres="gpu:h100:8")
    test = config.Test("own", ("/x",), gpu=gpu, rung="L3", timeout=600.0)
    own = replace(settings, test=(test,), sources=replace(settings.sources, tools="shadow"))
    without = follow.limit(replace(own, test=()), slurm.nodes["n1"], "L3")
    assert follow.limit(own, slurm.nodes["n1"], "L3") - without == seconds


def test_a_node_is_followed_through_a_silent_controller_to_its_result(settings, slurm, at_once, monkeypatch):
    slurm.add("n1")
    before = {"n1": slurm.nodes["n1"]}
    slurm.ask(settings)
    show, ends, heard = slurm.show_node, {}, Heard()

    def silent(*_):
        raise control.ControllerDown("no answer")

    slurm.then = [
        lambda: None,  # confirmed
        lambda: slurm.change("n1", reason=write(replace(slurm.nodes["n1"].ours, state="running"))),
        lambda: monkeypatch.setattr(control, "show_node", silent),
        lambda: monkeypatch.setattr(control, "show_node", show),
        lambda: slurm.change("n1", flags=frozenset(), reason="", extra=ran(at=NOW + 9e7)),
    ]
    follow.until_end(settings, before, ends, heard)
    assert (ends["n1"].outcome, slurm.then) == ("fit", [])
    assert any("L3 is running" in line for line in heard.lines)
    assert any("no answer from Slurm" in line for line in heard.lines)


def test_a_claim_without_room_ends_as_it_was(settings, slurm, monkeypatch):
    slurm.add("n1")
    before, ends = {"n1": slurm.nodes["n1"]}, {}
    slurm.ask(settings)
    monkeypatch.setattr(claim, "finish", lambda *_, **__: ("over-budget", "9 of 100 nodes are held already"))
    follow.until_end(settings, before, ends, Heard())
    assert (ends["n1"].outcome, "over-budget: 9 of 100" in ends["n1"].message) == ("not run", True)


def test_many_nodes_are_followed_with_one_question_and_read_only_when_something_happened(
    settings, slurm, at_once, monkeypatch
):
    names = [f"n{number}" for number in range(1, 9)]
    for name in names:
        slurm.add(name, flags="DRAIN", reason=FAULT)
    before, reads, ends, show = dict(slurm.nodes), [], {}, slurm.show_node
    monkeypatch.setattr(control, "show_node", lambda s, name: reads.append(name) or show(s, name))
    slurm.then = [
        lambda: None,
        lambda: None,
        lambda: slurm.change("n5", flags=frozenset(), reason="", extra=ran()),
        lambda: [slurm.change(name, flags=frozenset(), reason="", extra=ran()) for name in names],
    ]
    follow.until_end(settings, before, ends, Heard())
    assert sorted(ends) == names
    assert len(reads) == 2 * len(names)


# ---- the command


@pytest.fixture
def run(settings, slurm, at_once, monkeypatch):
    monkeypatch.setattr(escalate, "settings_or_defaults", lambda node: (settings, []))
    monkeypatch.setattr(control, "hostnames", lambda s, text: [f"n{number}" for number in range(1, 4)])
    monkeypatch.setattr(follow.time, "sleep", lambda _: slurm.then.pop(0)())
    return lambda *argv: CliRunner().invoke(escalate.command, argv)


def test_the_result_is_one_json_object_a_node_and_the_exit_code_that_of_the_worst(slurm, run):
    for name in ("n1", "n2"):
        slurm.add(name)
    slurm.add("n3", flags="DRAIN", reason="PSU\x1b[2J")
    bad = replace(FAULT, fact="memory", rung="L4", state="fail", next="RMA", pci="0000:5d:00")

    def over():
        slurm.change("n1", flags=frozenset(), reason="", extra=ran(at=NOW + 9e7))
        slurm.change("n2", reason=write(bad), extra=ran("fail", "RMA", NOW + 9e7, gpu=3, test="memory", code="80"))

    slurm.then = [lambda: None, over]
    done = run("n[1-3]", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["node"], row["outcome"], row["exit"]) for row in rows] == [
        *(("n1", "fit", 0), ("n2", "not fit", 1), ("n3", "not run", 3)),
    ]
    assert rows[1].keys() == set(follow.End.__annotations__) | {"exit", "advice"}
    assert any("0000:5d:00.0" in step for step in rows[1]["advice"])
    assert "NODE" not in "".join(rows[1]["advice"])
    assert done.exit_code == 1


def test_what_comes_from_a_reason_reaches_no_terminal_unescaped(slurm, run):
    slurm.add("n1", flags="DRAIN", reason="PSU\x1b[2J")
    done = run("n1")
    assert (done.exit_code, "\x1b" in done.output) == (3, False)


def test_a_wrong_call_is_no_verdict_on_a_node(monkeypatch, capsys):
    for argv in (["n1", "--level", "9"], ["--nonsense"], []):
        monkeypatch.setattr(sys, "argv", ["gpuhealth-escalate", *argv])
        with pytest.raises(SystemExit) as end:
            escalate.main()
        assert end.value.code == 3


def test_ctrl_c_in_the_middle_of_an_order_does_not_say_that_nothing_was_asked(slurm, run, monkeypatch):
    slurm.add("n1")

    def stopped(s, name, reason):
        slurm.drain(s, name, reason)
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "drain", stopped)
    done = run("n1")
    assert done.exit_code == 130
    assert "without you: perhaps n1 (its order was being sent)\nLook again: gpuhealth ladder n1 " in done.output


def test_level_4_asked_for_is_not_proven_by_the_level_3_that_another_asked_for(slurm, run):
    slurm.add("n1")
    slurm.then = [lambda: slurm.change("n1", flags=frozenset(), reason="", extra=ran(at=NOW + 9e7))]
    done = run("n1", "--level", "4")
    assert (done.exit_code, "not run: L4 did not run" in done.output) == (3, True)


def test_named_tests_are_asked_for_alone_unless_a_level_is_named_too(slurm, run):
    slurm.add("n1")
    slurm.then = [lambda: None] * 3
    assert run("n1", "--test", "nccl,nvbandwidth", "--no-wait").exit_code == 0
    assert slurm.nodes["n1"].reason.startswith("gpuhealth:asked GPU* L1 queued since=")
    assert " tests=nccl,nvbandwidth by=" in slurm.nodes["n1"].reason
    slurm.add("n2")
    run("n2", "--test", "all", "--level", "4", "--no-wait")
    assert " L4 queued " in slurm.nodes["n2"].reason


def test_a_test_that_nobody_knows_is_not_asked_for(slurm, run, settings, monkeypatch):
    slurm.add("n1")
    known = replace(settings, test=(config.Test("nccl", ("/x",)),))
    monkeypatch.setattr(escalate, "settings_or_defaults", lambda node: (known, []))
    for argv, words in (
        (("--test", "ncl"), "'ncl' is no [[test]] here; known: nccl, all"),
        (("--test", "nccl", "--gpu", "3"), "leave out --gpu"),
        (("--test", ","), "which tests?"),
        (("--test", "nccl;x=y"), "is no [[test]]"),
    ):
        done = run("n1", *argv)
        assert (done.exit_code, words in done.output) == (2, True), done.output
    assert slurm.orders == []
