"""Rung reboot: it is ordered once and waited for, a missing one is noticed, and no node serves untested after it."""

import time

import pytest

from slurm_gpuhealth.config.settings import Reboot
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import climb as core
from slurm_gpuhealth.ladder import rung_reboot as reboot
from slurm_gpuhealth.ladder import rung_test
from slurm_gpuhealth.ladder.rungs import Climb, HoldLost, Result
from slurm_gpuhealth.slurm import remark
from slurm_gpuhealth.slurm.node import NodeRecord
from slurm_gpuhealth.slurm.reason import Reason, parse, stamp, write

OURS = Reason("Xid79", 3, "reboot", "running", since="11-20T12:03Z")
ASKED = replace(OURS, boots=1)
CONFIG = {"RebootProgram": ("/sbin/reboot",), "ReturnToService": ("1",), "ResumeTimeout": ("60 sec",)}


class Slurm:
    """slurmctld as far as the rung asks it. After the order each look at the node is the next of `then`."""

    def __init__(self):
        self.record = NodeRecord("n1", "IDLE", frozenset({"DRAIN"}), write(OURS), reason_time=1000.0, boot_time=500.0)
        self.then, self.orders, self.config, self.heard = [], [], dict(CONFIG), True

    def show_node(self, _, name):
        if self.orders and self.then:
            after = self.then.pop(0)
            if isinstance(after, Exception):
                raise after
            self.record = after
        return self.record

    def reboot(self, _, name, reason):
        self.orders.append(("reboot", reason))
        if self.heard:
            self.record = replace(self.record, flags=frozenset({"DRAIN", "REBOOT_REQUESTED"}), reason=write(reason))
        else:
            raise reboot.control.ControllerDown("no answer")

    def put(self, slurm, before, reason):
        self.orders.append(("put", reason))

    def cancel(self, slurm, name):
        self.orders.append(("cancel", name))

    def after(self, *tail, base="DOWN", flags=(), boot=500.0, when=1100.0):
        """The record after the order, with Slurm's words behind our reason."""
        text = " : ".join([write(ASKED), *tail])
        return NodeRecord("n1", base, frozenset(flags), text, reason_time=when, boot_time=boot)


@pytest.fixture
def slurm(monkeypatch):
    slurm = Slurm()
    for name, function in {"show_node": slurm.show_node, "reboot": slurm.reboot, "cancel_reboot": slurm.cancel}.items():
        monkeypatch.setattr(reboot.control, name, function)
    monkeypatch.setattr(reboot.control, "config", lambda _: slurm.config)
    monkeypatch.setattr(reboot.hold, "put", slurm.put)
    monkeypatch.setattr(rung_test, "levels", lambda climb, level: Result("pass", f"level {level}"))
    monkeypatch.setattr(reboot, "POLL", 0.0)
    return slurm


@pytest.fixture
def climb(settings, journal):
    return Climb(settings, journal, "n1", OURS, "reboot", 900.0, lambda: None)


def new_boot(settings):
    with open(f"{settings.paths.proc}/sys/kernel/random/boot_id", "w") as file:
        file.write("another\n")


def reboots(slurm):
    return [reason for order, reason in slurm.orders if order == "reboot"]


def test_it_is_asked_for_with_the_count_one_higher_and_written_down_first(slurm, climb, monkeypatch):
    def written_down(*arguments):
        assert climb.journal.get(reboot.NOTE) == ["boot", write(ASKED)]
        slurm.reboot(*arguments)

    monkeypatch.setattr(reboot.control, "reboot", written_down)
    slurm.then = [slurm.record, HoldLost()]
    with pytest.raises(HoldLost):
        reboot.run(climb)
    assert reboots(slurm) == [ASKED]
    assert climb.journal.get("hold")["reason"] == write(ASKED)  # what is put back if Slurm writes over it


def test_after_it_level_2_is_run_and_no_second_one_asked_for(slurm, climb, settings):
    climb.journal.put(reboot.NOTE, ["boot", write(ASKED)])
    slurm.record = slurm.after("reboot issued", "reboot complete")
    new_boot(settings)
    assert reboot.run(climb) == Result("pass", "level 2")
    assert reboots(slurm) == []


@pytest.mark.parametrize(
    ("tail", "boot", "yes"),
    [
        (["reboot issued", "reboot complete"], 1099.0, True),
        (["reboot complete"], 0.0, True),  # an admin's new text in between, and it is not answering just now
        (["reboot issued", "reboot timed out"], 1200.0, True),  # late
        (["reboot issued", "reboot timed out"], 500.0, False),  # not at all
        ([], 500.0, False),
        ([], 0.0, False),
    ],
)
def test_without_the_journal_slurm_knows_whether_it_has_booted(slurm, settings, journal, tail, boot, yes):
    assert reboot.rebooted(settings, journal, slurm.after(*tail, boot=boot)) is yes


def test_with_the_journal_it_is_the_boot_id_that_tells(slurm, settings, journal):
    journal.put(reboot.NOTE, ["boot", write(ASKED)])
    late = slurm.after("reboot issued", "reboot timed out", boot=1050.0)  # it booted before the time was over
    assert reboot.rebooted(settings, journal, late) is False
    new_boot(settings)
    assert reboot.rebooted(settings, journal, late) is True


def test_an_earlier_reboot_is_not_taken_for_this_one(slurm, settings, journal):
    journal.put(reboot.NOTE, ["an earlier boot", write(ASKED)])
    second = NodeRecord(
        "n1", "IDLE", frozenset({"DRAIN"}), write(replace(OURS, boots=1, attempt=2)), reason_time=1000.0
    )
    assert reboot.rebooted(settings, journal, replace(second, boot_time=900.0)) is False


@pytest.mark.parametrize("flag", ["REBOOT_REQUESTED", "REBOOT_ISSUED"])
def test_while_slurm_is_at_it_it_has_not_happened(slurm, settings, journal, flag):
    assert reboot.rebooted(settings, journal, slurm.after(flags=["DRAIN", flag], boot=1200.0)) is False


def test_a_reboot_by_hand_is_noticed_by_the_boot_id(settings, journal):
    manual = Reason("Xid79", 3, "reboot", "manual", since="11-20T12:03Z", boots=2)
    record = NodeRecord("n1", "IDLE", frozenset({"DRAIN"}), write(manual), reason_time=1000.0, boot_time=500.0)
    assert reboot.rebooted(settings, journal, record) is False
    new_boot(settings)
    again = replace(record, base="DOWN", reason_time=1200.0, boot_time=1100.0)  # slurmctld sets both times anew
    assert reboot.rebooted(settings, journal, again) is True


@pytest.mark.parametrize(("after", "yes"), [(-86400, False), (30, False), (90, True)])
def test_a_reboot_by_hand_is_noticed_without_the_journal(settings, journal, after, yes):
    hold = time.time() - 3600
    manual = Reason("Xid79", 3, "reboot", "manual", since=stamp(hold))
    record = NodeRecord("n1", "DOWN", frozenset({"DRAIN"}), write(manual), reason_time=hold + 200)
    assert reboot.rebooted(settings, journal, replace(record, boot_time=hold // 60 * 60 + after)) is yes


def test_one_that_does_not_come_is_no_fault_and_the_hold_stays_ours(slurm, climb):
    issued = slurm.after("reboot issued", flags=["DRAIN", "REBOOT_ISSUED"])
    slurm.then = [issued, reboot.control.ControllerDown("away"), slurm.after("reboot issued", "reboot timed out")]
    result = reboot.run(climb)
    assert (result.outcome, "ResumeTimeout (60 s)" in result.message) == ("untested", True)
    assert slurm.orders[-1] == ("put", OURS)  # with the count as it was


def test_one_that_slurm_never_sends_is_taken_back(slurm, climb, monkeypatch):
    monkeypatch.setattr(reboot, "REQUESTED", 0.0)
    result = reboot.run(climb)
    assert (result.outcome, "did not order" in result.message) == ("untested", True)
    assert slurm.orders[1:] == [("cancel", "n1"), ("put", OURS)]


def test_one_that_an_admin_cancels_is_cancelled(slurm, climb):
    slurm.then = [slurm.after(base="IDLE", flags=["DRAIN"])]
    assert reboot.run(climb) == Result("untested", "the reboot was cancelled")


def test_an_admin_who_takes_the_node_over_has_it(slurm, climb):
    slurm.then = [replace(slurm.record, reason="PSU, JD")]
    with pytest.raises(HoldLost):
        reboot.run(climb)
    assert [order for order, _ in slurm.orders] == ["reboot"]


def test_a_controller_that_heard_us_and_did_not_say_so_is_not_asked_twice(slurm, climb, monkeypatch):
    def heard(*arguments):
        slurm.reboot(*arguments)
        raise reboot.control.ControllerDown("no answer in 10 s")

    monkeypatch.setattr(reboot.control, "reboot", heard)
    asked = slurm.after(base="IDLE", flags=["DRAIN", "REBOOT_REQUESTED"])
    slurm.then = [asked, slurm.after("reboot issued", "reboot timed out")]
    assert reboot.run(climb).outcome == "untested"
    assert len(reboots(slurm)) == 1


def test_a_controller_that_did_not_hear_us_is_said(slurm, climb):
    slurm.heard = False
    result = reboot.run(climb)
    assert (result.outcome, "could not be asked for" in result.message) == ("untested", True)


@pytest.mark.parametrize(
    ("key", "value", "word"), [("RebootProgram", (), "RebootProgram"), ("ReturnToService", ("2",), "ReturnToService=2")]
)
def test_a_slurm_that_can_not_or_would_serve_it_untested_is_not_asked(slurm, climb, key, value, word):
    slurm.config[key] = value
    result = reboot.run(climb)
    assert (result.outcome, word in result.message, slurm.orders) == ("untested", True, [])


def test_a_job_that_is_here_is_not_killed(slurm, climb):
    slurm.record = replace(slurm.record, base="MIXED", alloc_cpus=1)
    assert (reboot.run(climb).outcome, slurm.orders) == ("untested", [])


def test_what_is_no_longer_ours_is_not_rebooted(slurm, climb):
    slurm.record = replace(slurm.record, reason="PSU, JD")
    with pytest.raises(HoldLost):
        reboot.run(climb)
    slurm.record = replace(slurm.record, reason=write(replace(OURS, state="queued")))
    with pytest.raises(HoldLost):
        reboot.run(climb)
    assert slurm.orders == []


@pytest.mark.parametrize("where", ["reason", "extra", "journal"])
def test_after_two_within_the_window_no_third_is_asked_for(slurm, climb, where):
    now = time.time()
    row = "INSERT INTO step (time, fact, rung, attempt, outcome, follows, test, code, message, bundle)"
    if where == "reason":
        climb = replace(climb, ours=replace(OURS, boots=2))
    elif where == "extra":
        line = remark.Result("reboot", "pass", now, "Xid79", 3, boots=2)
        slurm.record = replace(slurm.record, extra=remark.write_result("", line))
    else:
        for _ in range(2):
            climb.journal.write(f"{row} VALUES (?, 'Xid79', 'reboot', 1, 'fail', '', '', '', '', '')", now)
    result = reboot.run(climb)
    assert (result.outcome, "rebooted 2 times" in result.message, slurm.orders) == ("fail", True, [])


def test_reboots_before_the_window_and_ones_that_did_not_come_do_not_count(slurm, climb):
    row = "INSERT INTO step (time, fact, rung, attempt, outcome, follows, test, code, message, bundle)"
    for when, outcome in ((time.time() - 8 * 86400, "fail"), (time.time(), "untested")):
        climb.journal.write(f"{row} VALUES (?, 'Xid79', 'reboot', 1, ?, '', '', '', '', '')", when, outcome)
    climb = replace(climb, settings=replace(climb.settings, reboot=Reboot(most=1)))
    slurm.then = [slurm.record, slurm.after("reboot issued", "reboot timed out")]
    reboot.run(climb)
    assert [parse(write(one)).boots for one in reboots(slurm)] == [1]


def test_a_node_with_a_job_is_not_rebooted_also_one_that_came_just_now(slurm, climb, monkeypatch):
    idle, busy = slurm.record, replace(slurm.record, alloc_cpus=1)
    slurm.record = busy
    assert reboot.run(climb) == Result("untested", "a job is here")
    slurm.record = idle
    looks = [idle, busy]
    monkeypatch.setattr(reboot.control, "show_node", lambda *_: looks.pop(0))
    result = reboot.run(climb)
    assert (result.outcome, "a job is here" in result.message, reboots(slurm)) == ("untested", True, [])


def test_slurm_goes_on_waiting_for_a_node_that_comes_back_with_fewer_gpus_and_we_do_not(settings, journal, slurm):
    flags = ["DRAIN", "REBOOT_ISSUED"]
    fewer = slurm.after("reboot issued", flags=[*flags, "INVALID_REG"])
    assert not reboot.rebooted(settings, journal, fewer)  # so before the boot, and slurmd had fewer then already
    new_boot(settings)
    assert not reboot.rebooted(settings, journal, slurm.after("reboot issued", flags=flags))
    assert reboot.rebooted(settings, journal, fewer)
    step = core.due(ASKED, fewer, core.Known(rebooted=True), settings)
    assert (step.do, step.rung) == ("run", "reboot")
    assert core.due(ASKED, fewer, core.Known(), settings).do == "wait"
