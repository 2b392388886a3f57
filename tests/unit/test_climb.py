"""What a held node does next, read as sentences: from its reason, its record and what is known, to one step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpuhealth.config.settings import Ladder, Reboot, Repair, Reset, Settings
from slurm_gpuhealth.findings import RUNGS, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import climb, rungs
from slurm_gpuhealth.ladder.climb import Known, Open, Step
from slurm_gpuhealth.ladder.rungs import Result
from slurm_gpuhealth.slurm.node import NodeRecord
from slurm_gpuhealth.slurm.reason import STATES, Reason, parse, write

TESTS = Settings()
"""As installed: the tests are on, what changes the node is off."""
ALL = Settings(reset=Reset(enabled=True), reboot=Reboot(enabled=True), repair=Repair(command=("/bin/true",)))
NONE = Settings(ladder=Ladder(tests=False))
KEPT = Settings(ladder=Ladder(give_back=False))
IDLE = NodeRecord("n1", "IDLE", frozenset({"DRAIN"}))
HOUR = TESTS.ladder.retry


def reason(words):
    """`L3 queued by=x` of a fault, or `asked L3 queued`, as in `sinfo -R`."""
    first = words.split()[0]
    fact, rest = ("Xid79", words) if first in RUNGS else (first, words.partition(" ")[2])
    found = parse(f"gpuhealth:{fact} GPU3 {rest}")
    assert found, words
    return found


def said(step):
    return f"{step.do} {step.rung}".strip() + (f" try={step.attempt}" if step.attempt > 1 else "")


@pytest.mark.parametrize(
    ("words", "known", "settings", "then"),
    [
        ("L3 claim", Known(), TESTS, "settle"),
        ("L3 claim", Known(worker=True), TESTS, "settle"),
        ("L3 queued", Known(), TESTS, "run L3"),
        ("L3 queued", Known(worker=True), TESTS, "wait"),
        ("L3 queued", Known(), NONE, "manual L3"),
        ("asked L3 queued", Known(), NONE, "run L3"),
        ("sweep L2 queued", Known(), NONE, "run L2"),
        ("asked reset queued", Known(), TESTS, "manual reset"),
        ("reset queued", Known(), TESTS, "manual reset"),
        ("reset queued", Known(), ALL, "run reset"),
        ("repair queued", Known(), TESTS, "manual repair"),
        ("repair queued", Known(), ALL, "run repair"),
        ("RMA queued", Known(), NONE, "run RMA"),
        # A check in the prolog found it and names what follows.
        ("L1 fail next=L3", Known(), TESTS, "run L3"),
        ("L2 fail next=reset", Known(), TESTS, "manual reset"),
        # The end: its evidence is gathered once.
        ("L4 fail next=RMA", Known(bundled=False), TESTS, "run RMA"),
        ("L4 fail next=RMA", Known(bundled=True), TESTS, "wait"),
        ("RMA fail", Known(bundled=True), TESTS, "wait"),
        # Cut short: once more, then no more.
        ("L3 running", Known(worker=True), TESTS, "wait"),
        ("L3 running", Known(), TESTS, "run L3 try=2"),
        ("L3 running try=2", Known(), TESTS, "untested L3 try=2"),
        ("reboot running", Known(), ALL, "run reboot try=2"),
        ("reboot running", Known(), TESTS, "manual reboot"),
        ("reboot running", Known(rebooted=True), TESTS, "run reboot"),
        ("reboot running", Known(rebooted=True), ALL, "run reboot"),
        ("reboot running try=2", Known(rebooted=True), ALL, "run reboot try=2"),
        # What could not be tested is tried again after an hour, 24 times.
        ("L3 untested", Known(age=HOUR - 1), TESTS, "wait"),
        ("L3 untested", Known(age=HOUR), TESTS, "run L3 try=2"),
        ("L3 untested", Known(age=HOUR), NONE, "wait"),
        ("L3 untested try=23", Known(age=HOUR), TESTS, "run L3 try=24"),
        ("L3 untested try=24", Known(age=HOUR), TESTS, "wait"),
        # By hand: until somebody did something.
        ("reset manual", Known(), TESTS, "wait"),
        ("reset manual", Known(rebooted=True), TESTS, "run L3"),
        ("reset manual", Known(mended=True), TESTS, "run L3"),
        ("reset manual", Known(mended=True), NONE, "wait"),
        ("reset manual", Known(), ALL, "wait"),
        # Fit, and still here: an admin wanted it so, or slurmd was away when it passed.
        ("L3 pass", Known(rebooted=True, mended=True, age=1e9), KEPT, "wait"),
        ("L3 pass", Known(), TESTS, "run L3"),
        ("reset pass", Known(), ALL, "run L3"),
        ("L3 pass", Known(), NONE, "wait"),
    ],
)
def test_what_is_due(words, known, settings, then):
    assert said(climb.due(reason(words), IDLE, known, settings)) == then


@pytest.mark.parametrize(
    ("record", "way"),
    [
        (IDLE, ""),
        (NodeRecord("n1", "DOWN", frozenset({"DRAIN"})), ""),
        (NodeRecord("n1", "MIXED", frozenset({"DRAIN"}), alloc_cpus=1), "a job is here"),
        (NodeRecord("n1", "IDLE", frozenset({"DRAIN", "COMPLETING"})), "a job is here"),
        (NodeRecord("n1", "IDLE", frozenset({"DRAIN"}), alloc_tres="cpu=1"), "a job is here"),
        (NodeRecord("n1", "MIXED", frozenset({"DRAIN"})), "its state is MIXED"),
        (NodeRecord("n1", "UNKNOWN", frozenset({"DRAIN"})), "its state is UNKNOWN"),
        (NodeRecord("n1", "IDLE", frozenset({"DRAIN", "PLANNED"})), "PLANNED"),
        (NodeRecord("n1", "IDLE", frozenset({"DRAIN", "MAINTENANCE"})), "MAINTENANCE"),
        (NodeRecord("n1", "IDLE", frozenset({"DRAIN", "POWERING_DOWN"})), "POWERING_DOWN"),
        (NodeRecord("n1", "DOWN", frozenset({"DRAIN", "REBOOT_ISSUED"})), "REBOOT_ISSUED"),
        (NodeRecord("n1", "IDLE", frozenset({"DRAIN", "SHINY"})), "SHINY: not a flag that we know"),
        (NodeRecord("n1", "IDLE", frozenset({"DRAIN", "INVALID_REG", "NOT_RESPONDING"})), ""),
    ],
)
def test_what_keeps_a_node_from_being_tested(record, way):
    found = climb.in_the_way(record)
    assert found.startswith(way)
    assert bool(found) == bool(way)
    assert climb.due(reason("L3 queued"), record, Known(), TESTS).do == ("wait" if way else "run")


def test_what_proved_fit_while_slurmd_was_away_waits_for_it():
    down = replace(IDLE, base="DOWN")
    assert climb.due(reason("L3 pass"), down, Known(), TESTS).do == "wait"


def test_a_sweep_gives_way_to_a_job_and_nothing_else_does():
    busy = NodeRecord("n1", "MIXED", frozenset({"DRAIN"}), alloc_cpus=1)
    for words, then in {"sweep L2 queued": "back L2", "asked L3 queued": "wait", "L3 queued": "wait"}.items():
        assert said(climb.due(reason(words), busy, Known(), TESTS)) == then


@pytest.mark.parametrize(
    ("words", "rung", "outcome", "open_", "settings", "then"),
    [
        ("L3 running", "L3", "pass", (), TESTS, "back L3"),
        ("L3 running", "L3", "fail", (), TESTS, "queue L4"),
        ("L4 running", "L4", "pass", (), TESTS, "back L4"),
        ("L4 running", "L4", "fail", (), TESTS, "queue RMA"),
        ("L1 running", "L1", "fail", (), TESTS, "queue L3"),
        ("L2 running", "L2", "fail", (), TESTS, "queue L3"),
        ("reset running", "reset", "pass", (), ALL, "back reset"),
        ("reset running", "reset", "fail", (), ALL, "queue reboot"),
        ("reboot running", "reboot", "pass", (), ALL, "back reboot"),
        ("reboot running", "reboot", "fail", (), ALL, "queue repair"),
        ("repair running", "repair", "pass", (), ALL, "back repair"),
        ("repair running", "repair", "fail", (), ALL, "queue RMA"),
        ("RMA queued", "RMA", "fail", (), ALL, "end RMA"),
        ("RMA queued", "RMA", "pass", (Open("L3"),), ALL, "end RMA"),
        # A rung that is off is by hand; a site's program that there is not, no human can run.
        ("L4 running", "reset", "fail", (), TESTS, "manual reboot"),
        ("reboot running", "reboot", "fail", (), TESTS, "queue RMA"),
        # Rebooted often enough.
        ("reset running boots=2", "reset", "fail", (), ALL, "queue repair"),
        ("reset running boots=1", "reset", "fail", (), ALL, "queue reboot"),
        ("reset running boots=2", "reset", "fail", (), TESTS, "manual reboot"),
        # Done by hand, and it stands all the same: the rung above.
        ("L3 running done=reset", "L3", "fail", (Open("reset"),), TESTS, "manual reboot"),
        ("L3 running done=reset", "L3", "fail", (Open("L3", failed="reboot"),), TESTS, "manual reboot"),
        ("L3 running done=reboot", "L3", "fail", (Open("L3", failed="reboot"),), TESTS, "queue RMA"),
        ("L3 running done=reboot", "L3", "fail", (Open("reset"),), ALL, "queue repair"),
        ("L3 running done=reboot", "L3", "fail", (Open("repair"),), TESTS, "manual repair"),
        ("L3 running done=repair", "L3", "fail", (Open("repair"),), TESTS, "queue RMA"),
        ("L3 running done=reboot", "L3", "fail", (), TESTS, "queue L4"),
        ("L3 running done=reboot", "L3", "pass", (), TESTS, "back L3"),
        # What the policy itself wants mended by hand, a cable, is no GPU to be returned.
        ("L3 running", "L3", "pass", (Open("repair"),), TESTS, "manual repair"),
        ("L3 running", "L3", "pass", (Open("repair"),), ALL, "queue repair"),
        # A pass beside a fault that is true is none; the fault says what may help.
        ("L3 running", "L3", "pass", (Open("L3"),), ALL, "queue L4"),
        ("L3 running", "L3", "pass", (Open("L3", failed="reboot"),), ALL, "queue reboot"),
        ("L3 running", "L3", "pass", (Open("reset"),), ALL, "queue reset"),
        ("L3 running", "L3", "fail", (Open("RMA"), Open("reset")), ALL, "queue RMA"),
        ("reboot running", "reboot", "pass", (Open("L3"),), ALL, "queue repair"),
        # Not to be tested: it stays; somebody's request ends where nothing is found.
        ("L3 running", "L3", "untested", (), TESTS, "untested L3"),
        ("asked L3 running", "L3", "untested", (), TESTS, "back L3"),
        ("asked L3 running", "L3", "untested", (Open("L3"),), TESTS, "untested L3"),
        ("sweep L2 running", "L2", "untested", (), TESTS, "back L2"),
        ("asked L3 running", "L3", "fail", (), NONE, "queue L4"),
        # Asked for more than one.
        ("asked L3 running to=L4", "L3", "pass", (), NONE, "queue L4"),
        ("asked L4 running to=L4", "L4", "pass", (), NONE, "back L4"),
    ],
)
def test_what_follows_a_rung(words, rung, outcome, open_, settings, then):
    assert said(climb.after(reason(words), rung, Result(outcome), open_, settings)) == then


def test_what_the_policy_wants_after_a_pass_comes_before_the_give_back():
    ours = reason("L3 running")
    assert said(climb.after(ours, "L3", Result("pass"), (), TESTS, passed="L4")) == "queue L4"
    assert said(climb.after(ours, "L4", Result("pass"), (), TESTS, passed="L4")) == "back L4"


def test_what_the_policy_wants_after_a_failure_goes_past_the_rungs_between():
    assert said(climb.after(reason("L3 running"), "L3", Result("fail"), (), ALL, failed="reboot")) == "queue reboot"


@pytest.mark.parametrize(
    ("rung", "returns", "enters"),
    [
        *(("L3", 0, "L3"), ("L3", 1, "L4"), ("L3", 2, "RMA"), ("L3", 9, "RMA")),
        *(("L4", 1, "reset"), ("reboot", 1, "repair"), ("repair", 1, "RMA"), ("RMA", 1, "RMA")),
    ],
)
def test_a_fault_that_comes_back_enters_a_rung_higher_and_two_returns_end_at_rma(rung, returns, enters):
    assert climb.entry(rung, returns) == enters


@pytest.mark.parametrize(
    ("words", "known", "done"),
    [
        ("reset manual", Known(mended=True), "reset"),
        ("reset manual", Known(rebooted=True), "reboot"),
        ("reboot manual", Known(rebooted=True), "reboot"),
        ("reboot manual", Known(mended=True), "reset"),
        ("reboot manual done=reset", Known(mended=True), "reboot"),
        ("reboot manual", Known(rebooted=True, mended=True), "reboot"),
        ("repair manual", Known(mended=True), "repair"),
        ("repair manual", Known(rebooted=True), "reboot"),
        ("repair manual done=reboot", Known(mended=True), "repair"),
        ("L3 manual", Known(mended=True), ""),
    ],
)
def test_what_hands_have_done_is_seen_by_a_boot_or_by_what_is_gone(words, known, done):
    assert climb.due(reason(words), IDLE, known, TESTS).done == done


@pytest.mark.parametrize(
    ("words", "rebooted", "done"),
    [
        *(("reset manual", False, "reset"), ("reset manual", True, "reboot"), ("repair manual", False, "repair")),
        *(
            ("reboot manual", True, "reboot"),
            ("reboot manual", False, ""),
            ("reboot manual done=reset", False, "reset"),
        ),
    ],
)
def test_who_asks_for_a_test_says_that_it_is_done_but_a_reboot_would_be_seen(words, rebooted, done):
    assert climb.asked_after(reason(words), rebooted) == done


REASONS = st.builds(
    Reason,
    *(st.sampled_from(["Xid79", "asked", "sweep", "lost"]), st.sampled_from([None, 3])),
    *(st.sampled_from(RUNGS), st.sampled_from(STATES)),
    next=st.sampled_from(["", *RUNGS]),
    to=st.sampled_from(["", "L3", "L4"]),
    attempt=st.integers(1, 3),
    boots=st.integers(0, 3),
)
OPEN = st.lists(st.builds(Open, *[st.sampled_from(["L3", "L4", "reset", "reboot", "RMA"])] * 1), max_size=2)
SWITCHES = st.sampled_from([TESTS, ALL, NONE])


@given(REASONS, st.sampled_from(["pass", "fail", "untested"]), OPEN, SWITCHES, *[st.sampled_from(["", *RUNGS])] * 2)
def test_every_way_up_leads_higher_and_fit_is_only_what_has_no_fault(ours, outcome, open_, settings, passed, failed):
    rung = ours.rung
    step = climb.after(ours, rung, Result(outcome), open_, settings, passed, failed)
    if step.do in ("queue", "manual"):
        assert RUNGS.index(step.rung) > RUNGS.index(rung)
    if step.do == "back":
        assert not open_
        assert outcome != "fail"
    if outcome == "pass" and rung != "RMA":
        assert step.do != "untested"


@given(REASONS, SWITCHES, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_what_is_due_can_be_written_and_read(ours, settings, worker, rebooted, mended, bundled):
    step = climb.due(ours, IDLE, Known(worker, rebooted, mended, bundled, 1e6), settings)
    assert step.do in ("wait", "settle", "run", "manual", "untested")
    if step.do in ("run", "manual", "untested"):
        assert step.rung in rungs.LADDER
        assert parse(write(replace(ours, rung=step.rung, attempt=step.attempt))) is not None


def test_who_fails_every_rung_is_at_its_end_in_a_few_steps():
    for settings in (TESTS, ALL, NONE):
        for first in RUNGS:
            ours, climbed = Reason("Xid79", 3, first, "queued"), 0
            step = climb.due(ours, IDLE, Known(bundled=False), settings)
            while step.do in ("run", "queue"):
                climbed += 1
                assert climbed <= len(RUNGS)
                step = climb.after(replace(ours, state="running"), step.rung, Result("fail"), (), settings)
            assert step.do in ("end", "manual"), (first, step)


CHANCE = st.tuples(
    *(st.sampled_from(["pass", "fail", "fail", "untested"]), st.lists(st.sampled_from(RUNGS), max_size=2)),
    *(st.sampled_from(["", *RUNGS]), st.sampled_from(["boots", "mended", "asks"])),
)


@given(st.sampled_from(RUNGS), SWITCHES, st.lists(CHANCE, min_size=30, max_size=30))
def test_with_hands_that_do_what_is_asked_every_climb_ends(first, settings, chances):
    """Back, RMA or untested, whatever the rungs say; no rung is asked for by hand twice."""
    ours, asked = Reason("Xid79", 3, first, "queued"), []
    for outcome, stands, failed, how in chances:
        known = Known(bundled=ours.rung == "RMA")
        if ours.state == "manual":
            if ours.rung not in climb.BY_HAND:  # tests are off: nothing to do by hand
                return
            asked.append(ours.rung)
            if how == "asks" and ours.rung != "reboot":
                ours = replace(ours, rung="L3", state="queued", done=climb.asked_after(ours, False))
            else:
                known = Known(
                    rebooted=ours.rung == "reboot" or how == "boots", mended=ours.rung == "repair" or how == "mended"
                )
        if ours.state == "untested" or (climb.is_end(ours) and known.bundled):
            break
        step = climb.due(ours, IDLE, known, settings)
        if step.do == "wait":  # tests are off
            assert settings is NONE
            return
        if step.do == "run":
            ours = replace(ours, rung=step.rung, state="running", done=step.done or ours.done)
            open_ = [Open(rung, failed=failed) for rung in stands] if outcome != "untested" else []
            step = climb.after(ours, step.rung, Result(outcome), open_, settings, failed=failed)
        if step.do == "back":
            break
        state = {"queue": "queued", "end": "fail"}.get(step.do, step.do)
        ours = replace(ours, rung=step.rung, state=state)
    else:
        raise AssertionError(f"no end: {ours}, by hand: {asked}")
    assert len(asked) == len(set(asked))


def test_steps_say_why_a_node_waits():
    assert climb.due(reason("reset manual"), IDLE, Known(), TESTS) == Step("wait", why="reset must be done by hand")


@pytest.mark.parametrize(("gpu", "step"), [(None, ("manual", "repair")), (Gpu("GPU-3"), ("queue", "RMA"))])
def test_a_tool_that_blames_no_gpu_returns_none(gpu, step):
    ours = Reason("nccl", None, "L4", "running", tests="nccl")
    found = climb.after(ours, "L4", Result("fail", "slow", gpu, "tool:nccl"), [], Settings())
    assert (found.do, found.rung) == step
