"""The worker on a modelled slurmctld: what happens to a held node, whoever or whatever intervenes."""

import time

import pytest

from slurm_gpuhealth.config.check import built_in
from slurm_gpuhealth.config.settings import (
    Check,
    Command,
    Drain,
    Ladder,
    Paths,
    Reboot,
    Repair,
    Reset,
    Row,
    Settings,
)
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.hooks import check
from slurm_gpuhealth.ladder import ask as asking
from slurm_gpuhealth.ladder import climb as core
from slurm_gpuhealth.ladder import rungs, state
from slurm_gpuhealth.node import record
from slurm_gpuhealth.slurm import remark
from tests import model
from tests.model_slurm import SITE

DAY = 86400
SAYS_FAULT = {"check": "scratch", "says": "fault", "gpu": False}


@pytest.fixture
def settings(tmp_path):
    return Settings(
        *("enforce", Paths(state=str(tmp_path / "s/n1"), run=str(tmp_path / "r/n1"))),
        policy=model.POLICY,
        drain=Drain(floor=1),
        reset=Reset(enabled=True),
        reboot=Reboot(enabled=True),
        repair=Repair(command=("/bin/true",)),
    )


@pytest.fixture
def world(settings):
    world = model.Cluster([settings])
    with world.playing():
        yield world
    assert not world.broken


@pytest.fixture
def node(world):
    world.check(world.nodes["n1"])
    return world.nodes["n1"]


def checks(world, node, minutes=3, every=61):
    for _ in range(int(minutes)):
        world.pass_time(every)
        world.check(node)


def words(node):
    """The reason without prefix, time, serial and pci: `lost GPU3 L3 running`."""
    kept = [
        word for word in node.reason.removeprefix("gpuhealth:").split() if not word.startswith(("since=", "serial="))
    ]
    return " ".join(word for word in kept if "0000:" not in word)


def steps(node):
    return [tuple(row) for row in node.journal.rows("SELECT rung, outcome, follows FROM step ORDER BY id")]


def hold(world, node, text="Xid79 GPU3 L3 queued"):
    """A hold of ours that nobody has decided here: the journal knows of none."""
    world.set_drain(node, f"gpuhealth:{text}")


def cut(monkeypatch, world, node, what):
    """`what(node)` happens in the middle of the first rung."""
    left = [what]

    def sleep(seconds):
        if seconds > 60 and world.running[-1].name == "worker" and "running" in node.reason and left:
            left.pop()(node)
        model.Cluster.sleep(world, seconds)

    monkeypatch.setattr(world, "sleep", sleep)  # not time.sleep: monkeypatch would undo that after the model has


# ---- up, and back


def test_what_a_reset_mends_is_reset_and_comes_back(world, node):
    node.standing["remap"] = "reset"
    checks(world, node)
    assert repr(node) == "n1 IDLE ''"
    assert steps(node) == [("reset", "pass", "back")]
    result = remark.read_result(node.extra)
    assert (result.rung, result.outcome, result.fact, result.next, result.backs) == (
        "reset",
        "pass",
        "remap",
        "back",
        1,
    )


def test_the_last_decision_on_a_node_that_came_back_is_that_it_did(world, node):
    node.standing["remap"] = "reset"
    checks(world, node)
    last = node.journal.one("SELECT action, reason, was FROM decision ORDER BY id DESC LIMIT 1")
    assert (last[:2], "reset" in last[2]) == (("given back", "remap GPU3 reset"), True)


def test_a_lost_gpu_that_a_reboot_brings_back_is_rebooted_once_and_resumed(world, node):
    node.standing["lost"] = "reboot"
    checks(world, node, 6)
    assert (repr(node), node.boots) == ("n1 IDLE ''", 1)
    assert steps(node) == [("L3", "fail", "reboot"), ("reboot", "pass", "back")]
    assert [order.split()[3] for order in world.orders][-1] == "resume"


def test_a_lost_gpu_that_nothing_brings_back_ends_at_rma_with_its_address_and_serial(world, node):
    node.standing["lost"] = ""
    checks(world, node, 8)
    assert steps(node)[-1] == ("RMA", "fail", "RMA")
    ours = node.record.ours
    assert (ours.state, ours.next, ours.pci, ours.serial) == ("fail", "RMA", "0000:5d:00", "1652823055571")
    assert core.is_end(ours)
    result = remark.read_result(node.extra)
    assert (result.rung, result.test, result.bundle) == ("repair", "nvml-lost", "rma.tar.gz")
    orders = len(world.orders)
    checks(world, node, 10, 4000)
    assert len(world.orders) == orders


def test_what_only_a_test_sees_is_named_and_goes_up(world, node):
    node.weak = "never"
    hold(world, node, "asked GPU* L3 queued by=alice")
    checks(world, node, 10)
    assert steps(node)[:2] == [("L3", "fail", "L4"), ("L4", "fail", "RMA")]
    assert words(node) == "memory GPU3 L4 fail next=RMA by=alice"


def test_a_test_that_finds_another_gpu_than_the_suspect_one_names_what_it_found(world, node):
    node.weak = "never"
    hold(world, node, "suspect GPU5 L3 queued by=correlate")
    checks(world, node, 10)
    assert words(node) == "memory GPU3 L4 fail next=RMA by=correlate"
    gpus = {row[0] for row in node.journal.rows("SELECT gpu FROM step WHERE rung = 'L3'")}
    assert gpus == {3}


def test_who_asked_for_level_4_too_gets_both_and_the_node_comes_back(world, node):
    hold(world, node, "asked GPU* L3 queued to=L4 by=alice")
    checks(world, node, 6)
    assert steps(node) == [("L3", "pass", "L4"), ("L4", "pass", "back")]
    assert repr(node) == "n1 IDLE ''"


def test_a_fault_that_was_given_back_twice_goes_to_rma(world, node):
    entered = []
    for _ in range(3):
        node.log.append("79")
        checks(world, node, 6)
        entered.append(next(o for o in reversed(world.orders) if " drain " in o).split()[6])
    assert entered == ["L3", "L4", "RMA"]
    assert core.is_end(node.record.ours)


def test_with_give_back_off_a_fit_node_says_so_and_waits_for_an_admin(world, node):
    node.settings = replace(node.settings, ladder=Ladder(give_back=False))
    node.log.append("48")
    checks(world, node, 4)
    assert words(node) == "Xid48 GPU3 reset pass"


def test_a_rung_that_is_off_waits_and_what_somebody_mended_by_hand_is_proven(world, node):
    node.settings = replace(node.settings, reset=Reset())
    node.standing["remap"] = "hand"
    checks(world, node, 3)
    assert words(node) == "remap GPU3 reset manual"
    node.standing.clear()
    checks(world, node, 10)
    assert (steps(node), repr(node)) == ([("L3", "pass", "back")], "n1 IDLE ''")


@pytest.mark.parametrize("command", [(), ("/bin/true",)], ids=["by hands", "a program that does not help"])
def test_what_concerns_no_gpu_gets_no_deep_test_and_no_rma_and_the_node_is_back_once_it_is_mended(
    world, node, settings, command
):
    site = Check(command=(Command("scratch", ("/bin/true",), mode="enforce"),))
    policy = tuple(Row(**row) for row in built_in())
    node.settings = settings = replace(settings, policy=policy, check=site, repair=Repair(command=command))
    full = Finding(time.time(), "site", "scratch", "no /scratch", None, "fault", True, details=SAYS_FAULT)
    record.keep(node.journal, settings, [full], time.time())
    checks(world, node, 8)
    assert words(node) == "scratch node repair manual"
    record.clear(node.journal, ("site",), [], time.time())
    checks(world, node, 7)
    assert repr(node) == "n1 IDLE ''"
    assert {rung for rung, _, _ in steps(node)} <= {"L1", "repair"}


def test_a_pass_beside_a_fault_that_stands_is_none(world, node, monkeypatch):
    hold(world, node, "asked GPU* L3 queued")
    cut(monkeypatch, world, node, lambda one: one.standing.update(remap=""))
    checks(world, node, 6)
    assert steps(node)[0] == ("L3", "fail", "reset")


def test_slurmd_reporting_too_few_gpus_is_not_fit(world, node):
    node.flags.add("INVALID_REG")
    hold(world, node, "asked GPU* L3 queued")
    checks(world, node, 3)
    assert steps(node)[0] == ("L3", "fail", "reboot")
    assert "fewer GPUs" in node.journal.one("SELECT message FROM step")[0]


def test_what_could_not_be_looked_at_after_a_pass_is_not_given_back(world, node, monkeypatch):
    hold(world, node)
    cut(monkeypatch, world, node, lambda one: setattr(one, "blind", True))
    checks(world, node, 6)
    assert (steps(node), words(node)) == ([("L3", "untested", "")], "Xid79 GPU3 L3 untested")
    node.blind = False
    checks(world, node, 3, 3700)
    assert (steps(node)[1:], repr(node)) == ([("L3", "pass", "back")], "n1 IDLE ''")


@pytest.mark.parametrize("what", [lambda one: one.standing.update(lost="reboot"), lambda one: one.log.append("48")])
def test_what_a_check_finds_between_the_pass_and_the_give_back_bars_it(world, node, monkeypatch, what):
    """It is held for it, so that nobody would decide on it again."""
    hold(world, node)

    left = [what]

    def check_sees(world, one, verb, _):
        if verb == "remarks" and left:
            left.pop()(one)
            world.run(one, "check", check.check)

    monkeypatch.setattr(world, "on_write", check_sees)
    checks(world, node, 6)
    assert steps(node)[1] in [("reboot", "pass", "back"), ("reset", "pass", "back")]
    assert repr(node) == "n1 IDLE ''"


def test_what_its_policy_row_says_of_a_pass_holds_also_for_an_event_that_waited_over_budget(world, node):
    node.settings = replace(node.settings, drain=Drain(floor=0, budget=0.0, lost=0.0))
    node.log.append("63")
    checks(world, node, 60)
    node.settings = replace(node.settings, drain=Drain(floor=1))
    checks(world, node, 12)
    assert steps(node) == [("L3", "pass", "L4"), ("L4", "pass", "back")]


def test_what_was_mended_by_hand_and_fails_all_the_same_is_not_tested_for_ever(world, node):
    node.settings = replace(node.settings, reset=Reset(), reboot=Reboot(), repair=Repair())
    node.standing["lost"] = "hand"
    checks(world, node, 3)
    assert words(node) == "lost GPU3 reboot manual"
    node.standing.clear()
    node.plans.extend(["together"] * 9)
    checks(world, node, 30)
    assert steps(node) == [("L3", "fail", "reboot")] * 2


@pytest.mark.parametrize("lost", ["", "journal"])
@pytest.mark.parametrize("asks", [False, True])
def test_a_gpu_that_is_gone_for_good_goes_on_to_rma_after_one_reboot_by_hand(world, node, lost, asks):
    node.settings = replace(node.settings, reset=Reset(), reboot=Reboot(), repair=Repair())
    node.standing["lost"] = "hand"
    checks(world, node, 3)
    assert words(node) == "lost GPU3 reboot manual"
    world.pass_time(120)
    world.boot(node)
    if lost:
        node.forget()
    if asks:
        ask(world, node)
    checks(world, node, 30)
    assert words(node) == "lost GPU3 L3 fail next=RMA done=reboot" + " by=alice" * asks
    assert "0000:5d:00.0 serial=1652823055571" in node.reason
    assert remark.read_result(node.extra).bundle == "rma.tar.gz"
    ask(world, node)
    checks(world, node, 30)
    assert "next=RMA" in node.reason


def ask(world, node):
    """`gpuhealth-escalate n1` on an admin's host."""
    request = asking.Request("L3", by="alice")
    world.run(node, "escalate", lambda: asking.ask(node.settings, "n1", request, [], 1, time.time()))


def test_a_reset_by_hand_that_did_not_help_leads_to_the_reboot_and_that_to_rma(world, node):
    node.settings = replace(node.settings, reset=Reset(), reboot=Reboot(), repair=Repair())
    node.standing["remap"] = "hand"
    checks(world, node, 3)
    assert words(node) == "remap GPU3 reset manual"
    ask(world, node)
    checks(world, node, 30)
    assert words(node) == "remap GPU3 reboot manual done=reset by=alice"
    ask(world, node)  # a test is no reboot
    checks(world, node, 30)
    assert words(node) == "remap GPU3 reboot manual done=reset by=alice"
    world.boot(node)
    checks(world, node, 30)
    assert words(node) == "remap GPU3 L3 fail next=RMA done=reboot by=alice"


def test_a_reboot_where_a_reset_was_asked_for_counts_as_more(world, node):
    node.settings = replace(node.settings, reset=Reset(), reboot=Reboot(), repair=Repair())
    node.standing["remap"] = "hand"
    checks(world, node, 3)
    world.boot(node)
    checks(world, node, 30)
    assert words(node) == "remap GPU3 L3 fail next=RMA done=reboot"


def test_a_repair_that_waits_for_hands_is_not_tested_again_and_again_after_a_reboot(world, node):
    row = replace(model.POLICY[0], failed="repair")
    node.settings = replace(node.settings, policy=(row,), reset=Reset(), reboot=Reboot(), repair=Repair())
    node.standing["lost"] = "hand"
    checks(world, node, 3)
    assert words(node) == "lost GPU3 repair manual"
    world.pass_time(120)
    world.boot(node)
    checks(world, node, 30)
    assert words(node) == "lost GPU3 repair manual done=reboot"
    assert len(steps(node)) == 2
    node.standing.clear()
    checks(world, node, 30)
    assert steps(node)[-1] == ("L3", "pass", "back")


# ---- cut short


def test_an_event_in_a_rung_that_was_cut_short_counts_in_its_second_attempt(world, node, monkeypatch):
    hold(world, node, "Xid79 GPU3 L4 queued")

    def seen_and_killed(one):
        one.log.append("48")
        world.run(one, "check", check.check)
        world.running[-1].dead = True
        raise model.Killed

    cut(monkeypatch, world, node, seen_and_killed)
    world.pass_time(400)
    world.check(node)
    assert (words(node), steps(node)) == ("Xid79 GPU3 L4 running", [("L4", "running", "")])
    checks(world, node, 6)
    assert steps(node)[1:] == [("L4", "fail", "reset"), ("reset", "pass", "back")]


def test_killed_in_mid_rung_it_is_run_again_once_and_then_said_to_be_untested(world, node):
    hold(world, node)
    world.pass_time(400)
    outcomes = []
    for _ in range(3):
        world.check(node, worker_plan=[(20, "kill")])
        outcomes.append(words(node))
        world.pass_time(61)
    assert outcomes == ["Xid79 GPU3 L3 running", "Xid79 GPU3 L3 running try=2", "Xid79 GPU3 L3 untested try=2"]
    assert [row[1] for row in steps(node)] == ["cut short", "running"]


@pytest.mark.parametrize("step", range(1, 60))
def test_killed_at_any_step_the_climb_ends_as_it_would_have(world, node, step):
    node.log.append("48")
    world.pass_time(61)
    world.check(node, worker_plan=[(step, "kill")])
    checks(world, node, 8)
    assert repr(node) == "n1 IDLE ''"
    assert steps(node)[-1] == ("reset", "pass", "back")
    assert node.journal.one("SELECT 1 FROM decision WHERE action = 'acked'") is None


def test_without_a_journal_it_goes_on_where_the_reason_says(world, node):
    node.standing["lost"] = ""
    world.pass_time(61)
    world.check(node, worker_plan=[(60, "kill")])
    was = words(node)
    assert "running" in was
    node.forget()
    checks(world, node, 9)
    assert words(node) == "lost GPU3 repair fail next=RMA boots=1"


def test_a_second_worker_ends_at_once(world, node, monkeypatch):
    hold(world, node)
    cut(monkeypatch, world, node, lambda _: world.worker(node))
    checks(world, node, 6)
    assert steps(node) == [("L3", "pass", "back")]


def test_a_controller_that_is_silent_for_an_hour_is_waited_for_with_the_result(world, node, monkeypatch):
    hold(world, node)
    cut(monkeypatch, world, node, lambda _: setattr(world, "down_until", world.now + 5000))
    checks(world, node, 6)
    assert (steps(node), repr(node)) == ([("L3", "pass", "back")], "n1 IDLE ''")


@pytest.mark.parametrize("step", range(1, 40))
def test_an_order_whose_answer_is_lost_is_not_given_twice(world, node, step):
    hold(world, node)
    world.pass_time(400)
    world.check(node, worker_plan=[(step, "lost")])
    checks(world, node, 6)
    assert repr(node) == "n1 IDLE ''"
    orders = [order.split(" ", 1)[1] for order in world.orders if " remarks " not in order]
    assert len(set(orders)) == len(orders)


def test_a_fault_in_a_rungs_own_code_ends_that_worker_and_the_second_says_untested(world, node):
    node.plans.extend(["raise", "raise"])
    hold(world, node)
    checks(world, node, 9)
    assert words(node) == "Xid79 GPU3 L3 untested try=2"


# ---- an admin


def test_an_admins_resume_ends_the_rung_and_what_stands_is_left_alone(world, node, monkeypatch):
    node.standing["lost"] = ""
    cut(monkeypatch, world, node, world.end_down)
    checks(world, node, 8)
    assert repr(node) == "n1 IDLE ''"
    assert ("cancelled", "") in [row[1:] for row in steps(node)]
    assert [mode for (mode,) in node.journal.rows("SELECT mode FROM finding")] == ["acked"]


@pytest.mark.parametrize("text", ["PSU, JD", "gpuhealth:lost GPU3 L3 running -- JD: leave it"])
def test_an_admins_reason_in_mid_rung_stands(world, node, monkeypatch, text):
    hold(world, node)
    cut(monkeypatch, world, node, lambda one: world.set_text_of(one, text))
    checks(world, node, 8)
    assert repr(node) == f"n1 IDLE+DRAIN {text!r}"
    assert steps(node)[0][1] == "cancelled"


def test_what_an_admin_took_over_is_left_alone_after_his_resume_and_for_so_long_only(world, node):
    node.settings = replace(node.settings, reset=Reset())
    node.standing["remap"] = ""
    checks(world, node, 3)
    world.set_text_of(node, "PSU, JD")
    checks(world, node, 8)
    world.end_down(node)
    checks(world, node, 8)
    assert repr(node) == "n1 IDLE ''"
    checks(world, node, 9, DAY)
    assert words(node) == "remap GPU3 reset manual"


def test_a_test_asked_for_right_after_an_undrain_is_a_hold_of_its_own(world, node):
    node.settings = replace(node.settings, reset=Reset())
    node.standing["remap"] = ""
    checks(world, node, 3)
    world.end_drain(node)
    hold(world, node, "asked GPU* L3 queued")
    checks(world, node, 8)
    assert (steps(node)[-1], repr(node)) == (("L3", "pass", "back"), "n1 IDLE ''")


@pytest.mark.parametrize("step", range(1, 36))
def test_an_admins_drain_at_any_step_of_ours_stands(world, node, step):
    node.comment = remark.write_said(node.comment, remark.Said(was="of an earlier take-over"))
    node.standing["remap"] = ""
    world.pass_time(61)
    world.check(node, [(step, lambda _, one: world.set_drain(one, "PSU, JD"))], [(1, "kill")])
    assert node.reason == "PSU, JD" or "PSU, JD" not in world.texts


@pytest.mark.parametrize("step", range(1, 40))
def test_what_an_admin_does_while_slurmctld_is_silent_stands(world, node, step):
    def silence(_, one):
        world.down_until = world.now + 40
        world.due.append((world.now + 20, one, lambda _: world.set_text_of(one, "PSU, JD")))

    silence.anywhere = True
    hold(world, node)
    world.pass_time(400)
    world.check(node, worker_plan=[(step, silence)])
    checks(world, node, 6)
    assert node.reason == "PSU, JD" or "PSU, JD" not in world.texts


def test_a_taken_over_node_gets_its_admins_reason_back(world, node):
    world.set_drain(node, "PSU, JD")
    node.comment = remark.write_said(node.comment, remark.Said(was="PSU, JD"))
    world.set_text_of(node, "gpuhealth:asked GPU* L3 queued by=alice")
    checks(world, node, 6)
    assert (repr(node), node.comment) == ("n1 IDLE+DRAIN 'PSU, JD'", SITE)


def test_the_down_of_a_silent_slurmd_is_not_ended_by_us(world, node, monkeypatch):
    hold(world, node)
    cut(monkeypatch, world, node, lambda one: world.set_down(one, one.reason, "slurm"))
    checks(world, node, 8)
    assert (node.base, words(node)) == ("DOWN", "Xid79 GPU3 L3 pass")


def test_a_reboot_that_never_comes_leaves_the_node_ours_and_untested(world, node):
    node.returns = False
    hold(world, node, "lost GPU3 reboot queued")
    checks(world, node, 8)
    assert words(node) == "lost GPU3 reboot untested"
    assert "DRAIN" in node.flags


def test_an_end_has_no_worker_and_costs_no_more_than_any_idle_node(world, node):
    hold(world, node, "Xid79 GPU3 RMA queued")
    checks(world, node, 6)
    asked = world.asked
    checks(world, node, 10, 61)
    assert world.asked - asked <= 3


# ---- what is known


def test_an_old_event_is_no_bar_and_one_during_the_rung_is(world, node):
    node.log.append("48")
    checks(world, node, 2)
    now = world.now
    assert state.open_faults(node.settings, node.journal, now) == []
    record.keep(node.journal, node.settings, [Finding(now, "xid", "48", "", Gpu())], now)
    assert state.open_faults(node.settings, node.journal, now) == [core.Open("reset")]


def test_every_rung_has_its_module():
    for rung in rungs.LADDER.values():
        assert callable(__import__(f"slurm_gpuhealth.ladder.{rung.module}", fromlist=["run"]).run)
