"""A claim: written, confirmed or undone; killed over it, changed under it, refused; and where a fault enters."""

import time

import pytest
from test_act import NOW, Slurm, fault, modes

from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import budget, claim, drain
from slurm_gpuhealth.node import held, record
from slurm_gpuhealth.node.journal import Journal
from slurm_gpuhealth.node.journal_file import memory
from slurm_gpuhealth.slurm import control, reason, remark
from slurm_gpuhealth.slurm.node import Hold
from slurm_gpuhealth.slurm.reason import Reason

CALLS = ("show_node", "holds", "drain", "set_reason", "set_text", "undrain")


class Killed(BaseException):
    """As by kill -9: nothing of ours runs any more."""


@pytest.fixture
def slurm(monkeypatch):
    found = Slurm(monkeypatch)
    found.age = 0.0
    monkeypatch.setattr(budget, "SETTLE", 0.001)
    return found


def next_check(settings, journal, slurm):
    """What a later check does about faults that wait and about a claim."""
    journal.put("put-off", None)
    if record.waiting(journal):
        drain.act(settings, journal, "check", "n1", NOW)
    if journal.get("hold") or slurm.reason:
        found = held.look_at_hold(settings, journal, "n1", NOW)
        if found.ours and found.ours.state == "claim":
            claim.settle(settings, journal, "n1", found, NOW)


def decisions(journal):
    return [row[0] for row in journal.rows("SELECT action FROM decision ORDER BY id")]


def test_a_drain_is_a_claim_until_it_is_confirmed_with_the_claims_time(settings, journal, slurm):
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "drained"
    first, last = (reason.parse(text) for text in slurm.orders)
    assert (first.state, last.state) == ("claim", "queued")
    assert last == replace(first, state="queued", since=reason.stamp(slurm.time))
    assert (journal.get("hold")["reason"], decisions(journal)) == (slurm.reason, ["drained"])


def test_what_dcgm_found_is_confirmed_as_a_failure_with_the_rung_that_follows(settings, journal, slurm):
    found = Finding(NOW, "dcgm", "memory", "", Gpu(uuid="GPU-3", index=3), standing=True, details={"level": 1})
    record.keep(journal, settings, [found], NOW)
    assert drain.act(settings, journal, "prolog", "n1", NOW, 7) == "drained"
    ours = reason.parse(slurm.reason)
    assert (ours.rung, ours.state, ours.next, ours.job) == ("L1", "fail", "L3", 7)


def test_who_finds_the_budget_spent_writes_nothing(settings, journal, slurm):
    slurm.hold_others(5)
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "over-budget"
    assert (slurm.orders, decisions(journal), len(record.waiting(journal))) == ([], ["over-budget"], 1)


def test_of_claims_at_the_same_time_the_one_that_does_not_fit_is_undone_and_its_fault_waits(settings, journal, slurm):
    slurm.meanwhile = lambda: slurm.hold_others(5, "claim", when=1.0 + time.time() // 1 - 2)
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "over-budget"
    assert (slurm.flags, decisions(journal)) == (frozenset(), ["over-budget"])
    assert (journal.get("hold"), len(record.waiting(journal))) == (None, 1)
    held.look_at_hold(settings, journal, "n1", NOW)
    assert modes(journal) == ["enforce"]  # our own undo is no admin's ack
    slurm.meanwhile, slurm.others = lambda: None, []
    next_check(settings, journal, slurm)
    assert decisions(journal) == ["over-budget", "drained"]


def test_younger_claims_do_not_count(settings, journal, slurm):
    slurm.meanwhile = lambda: slurm.hold_others(50, "claim", when=time.time() + 10)
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "drained"


def test_an_undo_gives_slurm_its_own_words_back(settings, journal, slurm):
    slurm.flags, slurm.reason = frozenset({"DRAIN"}), "Prolog error"
    slurm.meanwhile = lambda: slurm.hold_others(5)
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "over-budget"
    assert (slurm.flags, slurm.reason) == ({"DRAIN"}, "Prolog error")


@pytest.mark.parametrize("before", ["", "Prolog error"])
@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_killed_at_any_call_the_next_check_ends_as_if_nothing_had_been(
    settings, slurm, monkeypatch, before, room, late
):
    for number in range(1, 13):
        slurm.resume()
        slurm.others = []
        slurm.flags, slurm.reason = frozenset({"DRAIN"} if before else ()), before
        slurm.meanwhile = lambda: None if room else slurm.hold_others(5)
        journal = Journal(memory(), "", settings.paths.run)
        fault(journal, settings)
        die_at(slurm, monkeypatch, number, late)
        try:
            drain.act(settings, journal, "check", "n1", NOW)
        except Killed:
            pass
        die_at(slurm, monkeypatch, 0, late)
        next_check(settings, journal, slurm)
        assert modes(journal) == ["enforce"]
        if room or not slurm.others:
            assert reason.parse(slurm.reason).state == "queued"
            assert (journal.get("hold")["reason"], record.waiting(journal)) == (slurm.reason, {})
            assert decisions(journal)[-1] in ("drained", "held")
        else:
            assert (slurm.flags, slurm.reason) == ({"DRAIN"} if before else frozenset(), before)
            assert (journal.get("hold"), len(record.waiting(journal))) == (None, 1)
            assert decisions(journal)[-1] == "over-budget"
        assert "claimed" not in decisions(journal)


def die_at(slurm, monkeypatch, number, late):
    """Be killed at that call to Slurm, before or after it takes effect; 0: never."""
    calls = []

    def dying(name):
        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == number and not late:
                raise Killed
            answer = getattr(slurm, name)(*args, **kwargs)
            if len(calls) == number:
                raise Killed
            return answer

        return call

    for name in CALLS:
        monkeypatch.setattr(control, name, dying(name))


def test_an_admin_who_resumes_the_claim_is_not_overruled(settings, journal, slurm, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: slurm.resume() if slurm.drains else None)
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "nothing"
    assert (slurm.flags, modes(journal), decisions(journal)) == (frozenset(), ["acked"], ["drained", "acked"])


def test_an_admin_who_takes_the_claim_over_has_the_node(settings, journal, slurm, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: setattr(slurm, "reason", "PSU, JD") if slurm.drains else None)
    fault(journal, settings)
    drain.act(settings, journal, "check", "n1", NOW)
    assert (slurm.flags, slurm.reason, slurm.drains) == ({"DRAIN"}, "PSU, JD", 1)


def test_a_controller_that_falls_silent_leaves_a_claim_and_no_job_comes(settings, journal, slurm, monkeypatch):
    counts = []

    def count(*args):
        counts.append(args)
        if len(counts) == 2:
            raise control.ControllerDown("no answer")
        return slurm.holds(*args)

    monkeypatch.setattr(control, "holds", count)
    fault(journal, settings)
    outcome = drain.act(settings, journal, "prolog", "n1", NOW, 7)
    assert (outcome, outcome in drain.OUT, reason.parse(slurm.reason).state) == ("claimed", True, "claim")
    next_check(settings, journal, slurm)
    assert (reason.parse(slurm.reason).state, decisions(journal)) == ("queued", ["drained"])


def test_a_slow_controller_does_not_keep_who_waits_for_the_lock(settings, journal, slurm, monkeypatch):
    settings = replace(settings, slurm=replace(settings.slurm, timeout=0.0001))
    fault(journal, settings)
    assert drain.act(settings, journal, "prolog", "n1", NOW, 7) == "claimed"
    next_check(settings, journal, slurm)
    assert reason.parse(slurm.reason).state == "queued"


def test_a_claim_that_is_found_without_a_journal_is_settled(settings, journal, slurm):
    slurm.drain(None, "n1", Reason("Xid48", 3, "L3", "claim"))
    found = held.look_at_hold(settings, journal, "n1", NOW)
    assert claim.settle(settings, journal, "n1", found, NOW) == "drained"
    assert (reason.parse(slurm.reason).state, decisions(journal)) == ("queued", ["drained"])


def test_from_another_host_a_claim_is_settled_without_a_journal(settings, slurm):
    for room, outcome in ((True, "drained"), (False, "over-budget")):
        slurm.resume()
        slurm.hold_others(0 if room else 5)
        slurm.drain(None, "n1", Reason("asked", None, "L3", "claim", by="alice"))
        found = control.show_node(None, "n1")
        assert claim.settle(settings, None, "n1", found, time.time()) == outcome
        assert slurm.flags == ({"DRAIN"} if room else frozenset())


def test_a_claim_that_somebody_asked_for_a_moment_ago_is_his_to_settle(settings, journal, slurm):
    slurm.drain(None, "n1", Reason("asked", None, "L3", "claim", by="alice"))
    found = control.show_node(None, "n1")
    assert claim.settle(settings, journal, "n1", found, slurm.time + 5) == "undecided"
    assert claim.settle(settings, journal, "n1", found, slurm.time + 60) == "drained"


def test_an_old_claim_is_made_anew_before_it_has_a_place(settings, journal, slurm):
    slurm.drain(None, "n1", Reason("Xid48", 3, "L3", "claim", since="11-20T12:03Z"))
    slurm.time -= 3600
    slurm.hold_others(
        5, "claim", when=slurm.time + 1800
    )  # younger than the old time, older than the new one: abandoned
    slurm.others += [Hold(f"k{i}", Reason("Xid48", 0, "L3", "claim"), time.time() - 60) for i in range(5)]
    found = held.look_at_hold(settings, journal, "n1", NOW)
    assert claim.settle(settings, journal, "n1", found, NOW) == "over-budget"
    assert [reason.parse(text).state for text in slurm.orders[:2]] == ["claim", "claim"]


def test_a_node_that_the_budget_does_not_count_is_not_drained(settings, journal, slurm, monkeypatch):
    def count(*_):
        raise control.Refused("drain.nodes", 0, "n1 is not among the nodes")

    monkeypatch.setattr(control, "holds", count)
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "refused"
    assert slurm.orders == []
    slurm.drain(None, "n1", Reason("asked", None, "L3", "claim"))
    found = held.look_at_hold(settings, journal, "n1", NOW)
    assert (claim.settle(settings, journal, "n1", found, NOW), slurm.flags) == ("refused", frozenset())


def test_a_fault_that_the_nodes_comment_acknowledges_does_not_drain_and_another_does(settings, journal, slurm):
    slurm.comment = remark.write_said("rack 7", remark.Said({"Xid48": NOW + 600, "Xid79": NOW - 60}))
    fault(journal, settings)
    assert drain.act(settings, journal, "check", "n1", NOW) == "nothing"
    assert (slurm.orders, modes(journal), decisions(journal)) == ([], ["acked"], ["acked"])
    fault(journal, settings, 79)  # its ack is over
    assert drain.act(settings, journal, "check", "n1", NOW) == "drained"
    assert "Xid79" in slurm.reason


def test_a_condition_that_is_acknowledged_in_the_comment_drains_when_that_time_is_over(settings, journal, slurm):
    lost = Finding(NOW, "nvml", "lost", "", Gpu(uuid="GPU-3"), standing=True)
    slurm.comment = remark.write_said("", remark.Said({"lost": NOW + 600}))
    record.keep(journal, settings, [lost], NOW)
    drain.act(settings, journal, "check", "n1", NOW)
    record.keep(journal, settings, [lost], NOW + 300)
    assert drain.act(settings, journal, "check", "n1", NOW + 300) == "nothing"
    record.keep(journal, settings, [lost], NOW + 700)
    assert drain.act(settings, journal, "check", "n1", NOW + 700) == "drained"


def test_an_undrain_from_afar_is_known_with_its_own_time(settings, journal, slurm):
    lost = Finding(NOW, "nvml", "lost", "", Gpu(uuid="GPU-3"), standing=True)
    record.keep(journal, settings, [lost], NOW)
    drain.act(settings, journal, "check", "n1", NOW)
    slurm.comment = remark.write_said("", remark.Said({"lost": NOW // 60 * 60 + 600}))
    slurm.resume()
    held.look_at_hold(settings, journal, "n1", NOW)
    assert journal.one("SELECT mode, acked FROM finding") == ("acked", NOW // 60 * 60 + 600)


def step(journal, when, fact="Xid48", gpu=None, rung="L3", follows="back"):
    journal.write(
        "INSERT INTO step (time, seconds, fact, gpu, rung, attempt, outcome, follows, test, code, message, bundle)"
        " VALUES (?, 9, ?, ?, ?, 1, 'pass', ?, '', '', '', '')",
        *(when, fact, gpu, rung, follows),
    )


@pytest.mark.parametrize(("returns", "rung"), [(0, "L3"), (1, "L4"), (2, "RMA"), (5, "RMA")])
@pytest.mark.parametrize("kept", ["journal", "extra"])
def test_a_fault_that_comes_back_enters_higher_and_the_second_return_is_the_end(
    settings, journal, slurm, returns, rung, kept
):
    if kept == "journal":
        for number in range(returns):
            step(journal, NOW - 3600 * number - 60)
        step(journal, NOW - 60, fact="Xid79")
        step(journal, NOW - 60, gpu=5)
        step(journal, NOW - settings.ladder.window - 60)
    else:
        slurm.extra = remark.write_result("", remark.Result("L3", "pass", NOW - 60, fact="Xid48", backs=returns))
    fault(journal, settings)
    drain.act(settings, journal, "check", "n1", NOW)
    assert reason.parse(slurm.reason).rung == rung


def test_how_often_the_node_was_rebooted_survives_a_lost_journal(settings, journal, slurm):
    slurm.extra = remark.write_result("", remark.Result("reboot", "pass", NOW - 60, fact="Xid79", boots=2))
    fault(journal, settings)
    drain.act(settings, journal, "check", "n1", NOW)
    assert reason.parse(slurm.reason).boots == 2


def test_a_higher_fault_raises_a_hold_and_keeps_who_asked_and_since_but_not_a_rung_that_runs(settings, journal, slurm):
    asked = Reason("asked", None, "L3", "queued", since="11-20T12:03Z", to="L4", by="alice", boots=1)
    slurm.drain(None, "n1", asked)
    worse = replace(settings, policy=(replace(settings.policy[0], rung="reboot"),))
    fault(journal, worse)
    assert drain.act(worse, journal, "check", "n1", NOW) == "held"
    ours = reason.parse(slurm.reason)
    assert (ours.fact, ours.rung, ours.to, ours.by, ours.boots) == ("Xid48", "reboot", "L4", "alice", 1)
    assert ours.since == asked.since
    slurm.say(reason.write(replace(asked, state="running")))
    fault(journal, worse, 79)
    assert drain.act(worse, journal, "check", "n1", NOW) == "held"
    assert reason.parse(slurm.reason).state == "running"


@pytest.mark.parametrize(("gpu", "done"), [(3, "reset"), (5, ""), (None, "reset")])
def test_what_was_done_by_hand_counts_for_that_gpu_alone(settings, journal, slurm, gpu, done):
    slurm.drain(None, "n1", Reason("row-remap", gpu, "L3", "queued", done="reset", by="alice"))
    worse = replace(settings, policy=(replace(settings.policy[0], rung="reboot"),))
    found = Finding(NOW, "xid", "48", "", Gpu("GPU-3", "0000:5d:00", 3, "1652"), "fault")
    record.keep(journal, worse, [found], NOW)
    drain.act(worse, journal, "check", "n1", NOW)
    ours = reason.parse(slurm.reason)
    assert (ours.fact, ours.gpu, ours.rung, ours.done) == ("Xid48", 3, "reboot", done)


def test_checks_spread_their_claims_and_prologs_do_not(settings, journal, slurm, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(budget, "SPLAY", 2.0)
    for program in ("prolog", "check"):
        for number in range(3):
            journal.put("hold", None)
            slurm.resume()
            fault(journal, settings, 100 + number)
            drain.act(settings, journal, program, f"n{number}", NOW)
        if program == "prolog":
            assert set(slept) <= {0.0, 0.001}  # a claim's wait
            slept.clear()
    spread = [one for one in slept if one not in (0.0, 0.001)]
    assert len(set(spread)) == 3
    assert 0 <= min(spread) <= max(spread) < 2
