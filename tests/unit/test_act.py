"""What happens to faults that wait, when other programs, an admin or a kill intervene."""

import os
import signal
import threading
import time

import pytest

from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.hooks import fitness
from slurm_gpuhealth.ladder import budget
from slurm_gpuhealth.ladder import drain as act
from slurm_gpuhealth.node import held, jobs, record
from slurm_gpuhealth.node.environment import Job
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm import control, reason, remark
from slurm_gpuhealth.slurm.node import Event, Hold, NodeRecord
from slurm_gpuhealth.slurm.reason import Reason

NOW = time.time()


class Slurm:
    """One node's record, the orders given, and the holds of other nodes. Claims don't wait here."""

    def __init__(self, monkeypatch):
        self.base = "IDLE"
        self.flags, self.reason, self.time, self.drains, self.meanwhile = frozenset(), "", 0.0, 0, lambda: None
        self.comment, self.extra, self.age = "", "", 0.01
        self.others, self.orders = [], []
        self.upsince = 0.0
        for name in (
            "show_node",
            "drain",
            "set_reason",
            "set_text",
            "put_out",
            "undrain",
            "holds",
            "set_remarks",
            "up",
        ):
            monkeypatch.setattr(control, name, getattr(self, name))
        monkeypatch.setattr(budget, "SETTLE", 0.01)
        monkeypatch.setattr(budget, "SPLAY", 0.01)

    def show_node(self, slurm, name):
        record = NodeRecord(
            *(name, self.base, self.flags, self.reason),
            reason_time=self.time,
            comment=self.comment,
            extra=self.extra,
        )
        time.sleep(self.age)  # what is answered is old when it arrives
        return record

    def drain(self, slurm, name, wanted):
        self.flags, self.drains = frozenset({"DRAIN"}), self.drains + 1
        self.say(reason.write(wanted))
        self.meanwhile()

    def set_reason(self, slurm, name, wanted):
        self.set_text(slurm, name, reason.write(wanted))

    def set_text(self, slurm, name, text):
        if "DRAIN" in self.flags:
            self.say(text)

    def put_out(self, slurm, name, state, text):
        self.flags |= {state}
        self.say(text)

    def undrain(self, slurm, name):
        self.orders.append("undrain")
        self.resume()

    def set_remarks(self, slurm, name, comment):
        self.comment = comment

    def holds(self, slurm, group, name):
        mine = reason.parse(self.reason) if "DRAIN" in self.flags else None
        return [*self.others, *([Hold(name, mine, self.time)] if mine else [])], 100

    def say(self, text):
        if text != self.reason:
            self.orders.append(text)
            self.reason, self.time = text, float(int(time.time()))

    def resume(self):
        self.flags, self.reason, self.time = frozenset(), "", 0.0

    def up(self, slurm):
        return time.time() - self.upsince

    def hold_others(self, count, state="queued", when=1.0):
        self.others = [Hold(f"m{i}", Reason("row-remap", 0, "L3", state), when) for i in range(count)]


@pytest.fixture
def slurm(monkeypatch):
    return Slurm(monkeypatch)


def fault(journal, settings, number=48):
    record.keep(journal, settings, [Finding(NOW, "xid", str(number), "", Gpu(uuid="GPU-3"))], NOW)


def modes(journal):
    return [row[0] for row in journal.rows("SELECT mode FROM finding ORDER BY id")]


def test_programs_that_see_a_fault_at_once_drain_once_and_take_no_drain_for_an_ack(settings, journal, slurm):
    fault(journal, settings)
    outcomes = []

    def one(number):
        mine = open_journal(settings.paths)
        outcome = act.act(settings, mine, "prolog", "n1", NOW, number)
        if outcome == "nothing":
            outcome = fitness._held_still(settings, mine, "n1", NOW)
        outcomes.append(outcome)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slurm.drains == 1
    assert sorted(outcomes) == ["drained"] + ["held"] * 9
    assert modes(journal) == ["enforce"]
    assert [row[0] for row in journal.rows("SELECT action FROM decision")] == ["drained"]


def test_a_program_that_is_killed_over_its_bookkeeping_leaves_all_of_it_undone(settings, journal, slurm, monkeypatch):
    fault(journal, settings)
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(record, "settle", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        act.act(settings, open_journal(settings.paths), "check", "n1", NOW)
        os._exit(1)
    os.waitpid(pid, 0)
    assert (journal.get("hold"), len(record.waiting(journal))) == (None, 1)
    assert journal.one("SELECT * FROM decision") is None
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"


def test_an_admin_who_resumes_the_node_before_anyone_saw_it_drained_says_so_twice_and_slurm_drains_nothing(
    settings, journal, slurm, monkeypatch
):
    settings = replace(settings, prolog=replace(settings.prolog, move_job="exit"))
    slurm.meanwhile = slurm.resume
    fault(journal, settings)
    monkeypatch.setattr(fitness, "_gpus", lambda *_: ["GPU-3"])
    monkeypatch.setattr(fitness, "_read_nvml", lambda *_: None)
    monkeypatch.setattr(fitness.run_level, "run_level", lambda *_, **__: "pass")
    job = Job(7, "n1")
    for drains, mode in ((1, "enforce"), (2, "acked")):  # the first might have been an order without effect
        assert fitness.before_job(settings, journal, job, time.monotonic() + 5) == 0
        held.look_at_hold(settings, journal, "n1", NOW)
        assert (modes(journal), slurm.drains) == ([mode], drains)
    slurm.meanwhile = lambda: None
    fault(journal, settings, 79)
    assert fitness.before_job(settings, journal, job, time.monotonic() + 5) == 1
    assert (slurm.flags, slurm.drains) == ({"DRAIN"}, 3)


def test_who_finds_another_program_waiting_for_a_silent_controller_does_not_queue_behind_it_for_ever(
    settings, journal, slurm, monkeypatch
):
    monkeypatch.setattr(held, "SETTLING", 0.0)
    settings = replace(settings, slurm=replace(settings.slurm, timeout=0.1))
    fault(journal, settings)
    turn = held.turn(settings)
    began = time.monotonic()
    assert act.act(settings, journal, "prolog", "n1", NOW) == "undecided"
    assert time.monotonic() - began < 60
    os.close(turn)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"


def test_each_drain_is_a_decision_of_its_own_with_the_reason_that_was_there(settings, journal, slurm):
    for before in ("Prolog error", "Epilog error"):
        slurm.flags, slurm.reason = frozenset({"DRAIN"}), before
        fault(journal, settings)
        assert act.act(settings, journal, "check", "n1", NOW) == "drained"
        slurm.resume()
        held.look_at_hold(settings, journal, "n1", NOW)
    was = "SELECT was FROM decision WHERE action = 'drained' ORDER BY id"
    assert [row[0] for row in journal.rows(was)] == ["Prolog error", "Epilog error"]


def test_an_admin_who_is_faster_than_our_order_has_the_node_and_the_job_moves_on(settings, journal, slurm, monkeypatch):
    def count(asked, group, name):
        slurm.flags, slurm.reason = frozenset({"DRAIN"}), "fan, Bob"
        return [], 100

    monkeypatch.setattr(control, "holds", count)
    fault(journal, settings)
    assert act.act(settings, journal, "prolog", "n1", NOW) == "admin"
    assert (slurm.drains, slurm.reason) == (0, "fan, Bob")


def test_a_fault_is_not_done_with_while_slurm_is_starting_or_takes_the_node_out_by_itself(
    settings, journal, slurm, monkeypatch
):
    def count(asked, group, name):
        slurm.flags, slurm.reason = frozenset({"DRAIN"}), "Kill task failed"
        return [], 100

    fault(journal, settings)
    slurm.base = "UNKNOWN"
    assert act.act(settings, journal, "check", "n1", NOW) == "undecided"
    slurm.base = "IDLE"
    monkeypatch.setattr(control, "holds", count)
    assert act.act(settings, journal, "check", "n1", NOW) == "undecided"
    monkeypatch.setattr(control, "holds", slurm.holds)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"


def test_a_hold_that_slurmctld_lost_in_a_restart_is_drained_again_once_and_it_is_said_why(
    settings, journal, slurm, capsys
):
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"
    for outcome, word, drains in (("drained", "slurmctld restarted", 2), ("nothing", "a second time", 2)):
        slurm.resume()
        slurm.upsince = time.time()
        held.look_at_hold(settings, journal, "n1", time.time())
        assert word in capsys.readouterr().err
        assert act.act(settings, journal, "check", "n1", time.time()) == outcome
        assert slurm.drains == drains
    assert modes(journal) == ["acked"]


def test_a_restart_before_the_hold_was_last_seen_to_stand_loses_nothing(settings, journal, slurm, monkeypatch):
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"
    held.look_at_hold(settings, journal, "n1", time.time() + 20)
    slurm.resume()
    monkeypatch.setattr(control, "up", lambda _: 300 - 10)
    held.look_at_hold(settings, journal, "n1", time.time() + 300)
    assert (modes(journal), slurm.drains) == (["acked"], 1)


def test_a_hold_that_was_lost_while_our_program_ran_is_no_admins_resume(settings, journal, slurm):
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"
    slurm.resume()
    slurm.upsince = time.time()
    began = time.time() - 60  # and level 1 took that long
    held.look_at_hold(settings, journal, "n1", began)
    assert act.act(settings, journal, "prolog", "n1", began) == "drained"
    assert slurm.drains == 2


def test_a_drain_that_slurm_said_yes_to_and_did_not_make_is_made_again(settings, journal, slurm, monkeypatch, capsys):
    fault(journal, settings)
    monkeypatch.setattr(control, "drain", lambda *_: None)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"  # as far as Slurm says
    monkeypatch.setattr(control, "drain", slurm.drain)
    held.look_at_hold(settings, journal, "n1", time.time())
    assert "nobody saw it stand" in capsys.readouterr().err
    assert act.act(settings, journal, "check", "n1", time.time()) == "drained"
    assert slurm.drains == 1


def test_a_prolog_that_finds_the_hold_lost_keeps_the_job_off_the_bad_gpu(settings, journal, slurm, monkeypatch):
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"
    slurm.resume()
    slurm.upsince = time.time()
    monkeypatch.setattr(fitness, "_gpus", lambda *_: ["GPU-3"])
    monkeypatch.setattr(fitness, "_read_nvml", lambda *_: None)
    monkeypatch.setattr(fitness.run_level, "run_level", lambda *_, **__: "pass")
    monkeypatch.setattr(fitness, "move_on", lambda *_: 1)
    assert fitness.before_job(settings, journal, Job(8, "n1"), time.monotonic() + 30) == 1
    assert slurm.drains == 2


FEWER = "gres/gpu count reported lower than configured (7 < 8)"


def test_where_slurm_has_written_over_our_reason_it_is_put_back(settings, journal, slurm):
    """From 23.02 on, each time that a slurmd registers with fewer GPUs than configured."""
    fault(journal, settings)
    act.act(settings, journal, "check", "n1", NOW)
    ours = slurm.reason
    slurm.reason, slurm.flags = FEWER, frozenset({"DRAIN", "INVALID_REG"})
    assert held.look_at_hold(settings, journal, "n1", NOW).ours == reason.parse(ours)
    assert (slurm.reason, modes(journal)) == (ours, ["enforce"])
    slurm.reason, slurm.comment = FEWER, remark.write_said("", remark.Said({"Xid48": NOW + 86400}))
    assert held.look_at_hold(settings, journal, "n1", NOW).ours is None  # undone, and drained by Slurm at once


def test_also_after_our_reboot_which_leaves_the_node_down(settings, journal, slurm):
    ours = "gpuhealth:Xid79 GPU3 reboot running since=11-20T12:03Z boots=1"
    for kept, wanted in ((ours, ours), (ours.replace("running", "queued"), FEWER)):
        slurm.base, slurm.reason, slurm.flags = "DOWN", FEWER, frozenset({"INVALID_REG"})
        journal.put("hold", {"reason": kept, "since": NOW, "seen": NOW})
        assert held.show(settings, journal, "n1").reason == wanted


@pytest.mark.parametrize(
    ("kept", "text", "comment", "events"),
    [
        ("Xid48 GPU* L3 queued", "Low RealMemory (reported:3 < 80.00% of configured:8)", "", ()),
        ("asked GPU* L3 queued by=root", FEWER, "", ()),  # perhaps cancelled: without slurmdbd nobody knows
        ("asked GPU* L3 queued by=root", FEWER, "", ("gpuhealth:asked GPU* L3 claim by=root",)),  # ended since
        ("Xid48 GPU* L3 claim", FEWER, "", ()),
        ("Xid48 GPU* L3 queued", FEWER, "ack", ()),
        ("Xid48 GPU* L3 queued", FEWER, "", ("RMA ticket: chassis open",)),
    ],
)
def test_what_slurm_may_not_have_written_over_our_reason_stays(
    settings, journal, slurm, monkeypatch, kept, text, comment, events
):
    journal.put("hold", {"reason": f"gpuhealth:{kept}", "since": NOW - 60, "seen": NOW - 30})
    slurm.reason, slurm.flags = text, frozenset({"DRAIN", "INVALID_REG"})
    if comment:
        slurm.comment = remark.write_said("", remark.Said({"Xid48": NOW + 86400}))
    said = [Event("n1", NOW - 20, 0.0, "DRAIN", one) for one in (*events, FEWER)]
    monkeypatch.setattr(control, "events", lambda *_: said if events else [])
    assert held.show(settings, journal, "n1").reason == text
    assert slurm.orders == []


@pytest.mark.parametrize("kept", ["Xid48 GPU* L3 queued", "asked GPU* L3 queued by=root"])
def test_where_slurmdbd_has_our_drain_as_the_last_our_reason_comes_back_also_a_request(
    settings, journal, slurm, monkeypatch, kept
):
    journal.put("hold", {"reason": f"gpuhealth:{kept}", "since": NOW - 60, "seen": NOW - 30})
    slurm.reason, slurm.flags = FEWER, frozenset({"DRAIN", "INVALID_REG"})
    said = ["PSU, JD", f"gpuhealth:{kept.replace('queued', 'claim')}", "Not responding"]
    for count in (2, 3):
        slurm.reason = FEWER
        rows = [Event("n1", NOW - 20, 0.0, "DRAIN", one) for one in said[:count]]
        monkeypatch.setattr(control, "events", lambda *_, rows=rows: rows)
        assert held.show(settings, journal, "n1").reason == f"gpuhealth:{kept}"


@pytest.mark.parametrize(
    ("kept", "text", "ago", "back"),
    [
        ("Xid48 GPU* L3 queued", "PSU, JD", 90, True),  # an earlier drain: a job keeps ours from slurmdbd
        ("asked GPU* L3 queued by=root", "PSU, JD", 90, False),
        ("Xid48 GPU* L3 queued", "gpuhealth:Xid48 GPU* L3 claim", 90, True),
        ("Xid48 GPU* L3 queued", "gpuhealth:Xid48 GPU* L3 claim", 10, False),  # resumed
    ],
)
def test_what_slurmdbd_knows_of_drains_that_have_ended(settings, journal, slurm, monkeypatch, kept, text, ago, back):
    journal.put("hold", {"reason": f"gpuhealth:{kept}", "since": NOW - 60, "seen": NOW - 30})
    slurm.reason, slurm.flags = FEWER, frozenset({"DRAIN", "INVALID_REG"})
    monkeypatch.setattr(control, "events", lambda *_: [Event("n1", NOW - 300, NOW - ago, "DRAIN", text)])
    assert held.show(settings, journal, "n1").reason == (f"gpuhealth:{kept}" if back else FEWER)


def test_who_resumed_a_node_that_slurm_then_drained_anew_has_acknowledged_its_fault(
    settings, journal, slurm, monkeypatch
):
    fault(journal, settings)
    act.act(settings, journal, "check", "n1", NOW)
    monkeypatch.setattr(control, "events", lambda *_: [Event("n1", NOW, 0.0, "DRAIN", FEWER)])
    slurm.reason, slurm.flags = FEWER, frozenset({"DRAIN", "INVALID_REG"})
    held.look_at_hold(settings, journal, "n1", time.time())
    assert (slurm.reason, modes(journal)) == (FEWER, ["acked"])


def test_a_node_that_lacks_memory_too_keeps_slurms_reason_and_its_fault_is_not_acknowledged(settings, journal, slurm):
    found = Finding(NOW, "nvml", "lost", "", Gpu(uuid="GPU-3"), standing=True)
    record.keep(journal, settings, [found], NOW)
    act.act(settings, journal, "check", "n1", NOW)
    slurm.reason = "Low RealMemory (reported:3 < 80.00% of configured:8)"
    held.look_at_hold(settings, journal, "n1", time.time())
    assert act.act(settings, journal, "check", "n1", time.time()) == "left"
    assert (modes(journal), slurm.drains) == (["enforce"], 1)
    slurm.resume()
    assert act.act(settings, journal, "check", "n1", time.time()) == "drained"


def test_a_drain_of_slurms_that_we_tested_and_put_back_stays(settings, journal, slurm):
    ours = "gpuhealth:count GPU* L3 fail next=reboot by=root"
    slurm.reason, slurm.flags = ours, frozenset({"DRAIN", "INVALID_REG"})
    slurm.comment = remark.write_said("", remark.Said(was=FEWER))
    held.look_at_hold(settings, journal, "n1", time.time())
    slurm.reason = FEWER
    assert held.show(settings, journal, "n1").reason == ours
    slurm.reason, slurm.comment = FEWER, ""
    assert held.show(settings, journal, "n1").reason == FEWER


def test_an_old_ack_or_that_of_another_fault_does_not_keep_our_reason_away(settings, journal, slurm):
    ours = "gpuhealth:Xid48 GPU* L3 queued"
    for said in ({"Xid48": NOW - 60}, {"remap": NOW + 86400}):
        journal.put("hold", {"reason": ours, "since": NOW, "seen": NOW})
        slurm.reason, slurm.flags = FEWER, frozenset({"DRAIN"})
        slurm.comment = remark.write_said("", remark.Said(said))
        assert held.show(settings, journal, "n1").reason == ours


def test_an_admins_order_just_before_ours_is_put_back(settings, journal, slurm, monkeypatch):
    journal.put("hold", {"reason": "gpuhealth:Xid48 GPU* L3 queued", "since": NOW - 60, "seen": NOW - 30})
    slurm.reason, slurm.flags, slurm.time = FEWER, frozenset({"DRAIN"}), NOW - 20
    said = [[], [Event("n1", NOW - 10, 0.0, "DRAIN", "PSU, JD")]]
    monkeypatch.setattr(control, "events", lambda *_: said.pop(0))
    assert held.show(settings, journal, "n1").reason == "PSU, JD"


def test_a_claim_that_slurm_has_written_over_is_no_resume(settings, journal, slurm):
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"
    kept = journal.get("hold")
    journal.put("hold", {**kept, "reason": "gpuhealth:Xid48 GPU* L3 claim since=11-20T12:03Z", "seen": time.time()})
    slurm.reason = FEWER
    held.look_at_hold(settings, journal, "n1", time.time())
    assert modes(journal) == ["enforce"]


def test_who_resumes_the_node_just_before_our_reason_comes_back_has_it_in_service(
    settings, journal, slurm, monkeypatch
):
    slurm.base, slurm.reason, slurm.flags = "DOWN", FEWER, frozenset({"INVALID_REG"})
    ours = "gpuhealth:Xid79 GPU3 reboot running since=11-20T12:03Z boots=1"
    journal.put("hold", {"reason": ours, "since": NOW, "seen": NOW})

    def resumed_first(settings, name, state, text):
        slurm.base = "IDLE"
        slurm.put_out(settings, name, state, text)

    monkeypatch.setattr(control, "put_out", resumed_first)
    assert held.show(settings, journal, "n1").reason == ""
    assert slurm.orders[-1] == "undrain"


def test_an_admins_drain_seen_before_the_fault_is_the_admins_still(settings, journal, slurm):
    slurm.reason, slurm.flags = "disk swap, do not touch", frozenset({"DRAIN"})
    held.look_at_hold(settings, journal, "n1", NOW)
    slurm.reason = FEWER
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "admin"
    slurm.reason = "Prolog error"  # Slurm writes this on a node in service only: the admin's drain has ended
    fault(journal, settings, 79)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"


def test_an_admins_drain_that_slurm_has_written_over_is_not_taken_over(settings, journal, slurm):
    slurm.reason, slurm.flags = "disk swap, do not touch", frozenset({"DRAIN"})
    found = Finding(NOW, "nvml", "lost", "", Gpu(uuid="GPU-3"), standing=True)
    record.keep(journal, settings, [found], NOW)
    assert act.act(settings, journal, "check", "n1", NOW) == "admin"
    slurm.reason = FEWER
    assert act.act(settings, journal, "check", "n1", NOW) == "admin"
    assert slurm.orders == []
    slurm.resume()
    held.look_at_hold(settings, journal, "n1", NOW)
    slurm.reason, slurm.flags = FEWER, frozenset({"DRAIN"})
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"


def test_what_an_admin_holds_now_was_never_lost(settings, journal, slurm):
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"
    slurm.say("RMA ticket 4711")
    slurm.upsince = time.time()
    held.look_at_hold(settings, journal, "n1", time.time())
    assert (modes(journal), slurm.drains, slurm.reason) == (["acked"], 1, "RMA ticket 4711")


@pytest.fixture
def expedited(settings, journal, slurm, monkeypatch):
    """The exit code of the epilog of a failed job of --requeue=expedite on GPU-3, whatever it tests; who was asked."""
    slurm.asked = []
    monkeypatch.setattr(control, "is_expedited", lambda _, job: slurm.asked.append(job) or True)
    monkeypatch.setattr(fitness, "_test", lambda *_: None)
    journal.put("gres", {"boot": "boot", "uuids": [f"GPU-{n}" for n in range(8)], "error": ""})
    jobs.started(journal, Job(7, "n1", gpus=(3,)), ["GPU-3"], NOW - 60)

    def epilog(outcome="exit 1", settings=settings, **job):
        it = Job(7, "n1", **{"gpus": (3,), "exit_code": 1, **job})
        return fitness.after_job(settings, journal, it, outcome, time.monotonic() + 30)

    return epilog


def test_an_expedited_job_whose_gpu_is_broken_is_handed_back_once_the_hold_stands(settings, journal, slurm, expedited):
    fault(journal, settings)
    assert expedited() == 1
    assert (slurm.drains, slurm.asked) == (1, [7])
    assert slurm.reason.startswith("gpuhealth:Xid48 ")


def test_also_where_a_check_has_drained_the_node_while_the_job_ran(settings, journal, slurm, expedited):
    fault(journal, settings)
    assert act.act(settings, journal, "check", "n1", NOW) == "drained"
    assert expedited() == 1


def test_of_a_job_that_is_not_to_be_handed_back_slurm_is_not_asked(settings, journal, slurm, expedited):
    assert expedited() == 0  # an application's bug on a good node
    fault(journal, settings)
    assert expedited(exit_code=0) == expedited(outcome="cancelled") == expedited(outcome="moved") == 0
    assert expedited(gpus=(2,)) == 0  # another job's GPU
    assert expedited(settings=replace(settings, epilog=replace(settings.epilog, expedite=False))) == 0
    journal.write("UPDATE finding SET time = ? WHERE code = '48'", NOW - 61)
    assert expedited() == 0  # what an earlier job met
    assert (slurm.drains, slurm.asked) == (1, [])


def test_without_a_hold_an_expedited_job_drains_nothing_by_its_epilogs_exit_code(settings, journal, slurm, expedited):
    slurm.hold_others(5)
    fault(journal, settings)
    assert expedited() == 0  # the budget has no room
    assert (slurm.flags, slurm.asked) == (frozenset(), [])


@pytest.mark.parametrize(
    ("base", "flags", "text"),
    [
        ("IDLE", (), ""),
        ("IDLE", ("DRAIN",), "admin: disk"),
        ("IDLE", ("DRAIN",), "gpuhealth:Xid48 GPU3 L3 claim"),
        ("IDLE", ("DRAIN",), "Epilog error"),
        ("DOWN", (), "gpuhealth:Xid48 GPU3 reboot running : reboot complete"),
    ],
)
def test_a_hold_that_is_gone_or_not_yet_counted_at_the_last_look_hands_nothing_back(
    settings, journal, slurm, expedited, monkeypatch, base, flags, text
):
    def changed(_, job):
        slurm.base, slurm.flags, slurm.reason = base, frozenset(flags), text
        return True

    fault(journal, settings)
    monkeypatch.setattr(control, "is_expedited", changed)
    assert expedited() == 0


@pytest.mark.parametrize(
    "error", [control.ControllerDown("x"), control.Unreadable("x", 0, "y"), control.Refused("x", 1, "no --json")]
)
def test_on_any_doubt_an_expedited_job_is_not_handed_back(settings, journal, slurm, expedited, monkeypatch, error):
    def refuse(*_):
        raise error

    fault(journal, settings)
    monkeypatch.setattr(control, "is_expedited", refuse)
    assert (expedited(), slurm.drains) == (0, 1)
    monkeypatch.setattr(control, "is_expedited", lambda *_: monkeypatch.setattr(control, "show_node", refuse) or True)
    assert expedited() == 0
