"""What a request and its cancellation do to a node, and what they do not touch."""

import pytest

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import ask, budget
from slurm_gpuhealth.slurm import control, hold, remark
from tests.unit.slurm_nodes import FAULT, L3, NOW, Slurm


@pytest.fixture
def slurm(monkeypatch):
    return Slurm(monkeypatch)


def test_a_node_in_service_is_drained_with_the_request_as_a_claim(settings, slurm):
    slurm.add("n1", "MIXED")
    slurm.ask(settings, request=ask.Request("L3", "L4", 5, "alice: fan"))
    ours = slurm.nodes["n1"].ours
    assert (ours.fact, ours.gpu, ours.rung, ours.state, ours.to, ours.by) == (
        *("asked", 5, "L3", "claim", "L4", "alice: fan"),
    )
    assert slurm.orders == ["drain"]


def test_a_suspect_of_the_correlator_says_so_in_its_reason(settings, slurm):
    slurm.add("n1", "IDLE")
    slurm.ask(settings, request=ask.Request("L3", by="correlate", fact="suspect"))
    assert slurm.nodes["n1"].reason.startswith("gpuhealth:suspect GPU* L3 claim")


@pytest.mark.parametrize(
    ("node", "request_", "words"),
    [
        ({"flags": "DRAIN", "reason": "PSU, JD"}, L3, "an admin drained it: 'PSU, JD' by root; --take-over"),
        ({"base": "DOWN", "reason": "Not responding"}, L3, "it is DOWN: 'Not responding'"),
        ({"base": "DOWN", "flags": "DRAIN", "reason": "PSU"}, replace(L3, take_over=True), "it is DOWN"),
        ({"flags": "FAIL", "reason": "PSU"}, replace(L3, take_over=True), "FAIL"),
        ({"flags": "MAINTENANCE"}, L3, "an admin is working on it"),
        ({"flags": "POWERED_DOWN"}, L3, "it is powered down"),
        ({"base": "FUTURE"}, L3, "its state is FUTURE"),
        ({"gres": ""}, L3, "it has no GPUs"),
        ({"gres": "gpu:2,gpu:a100:4(S:0-1)"}, replace(L3, gpu=6), "only 0 to 5"),
        ({"flags": "DRAIN", "reason": '"PSU"'}, replace(L3, take_over=True), "could not be put back"),
        ({"flags": "DRAIN", "reason": "PSU\n of it"}, replace(L3, take_over=True), "could not be put back"),
        ({"flags": "DRAIN", "reason": ""}, replace(L3, take_over=True), "could not be put back"),
    ],
)
def test_what_is_not_ours_to_take_is_left_as_it_is_and_said(settings, slurm, node, request_, words):
    slurm.add("n1", **node)
    with pytest.raises(ask.Unchanged, match=words):
        slurm.ask(settings, request=request_)
    assert slurm.orders == []


def test_more_than_the_budget_allows_are_not_asked_and_those_just_asked_count(settings, slurm):
    for name in ("n1", "n2", "n3"):
        slurm.add(name)
    small = replace(settings, drain=replace(settings.drain, budget=0.0, floor=2))
    held, total = [], 3
    ask.ask(small, "n1", L3, held, total, NOW)
    ask.ask(small, "n2", L3, held, total, NOW)
    with pytest.raises(ask.Unchanged, match="over budget: 2 of 3 nodes"):
        ask.ask(small, "n3", L3, held, total, NOW)
    assert slurm.orders == ["drain", "drain"]


def test_an_admins_text_is_kept_before_it_is_replaced_and_put_back_by_give_back(settings, slurm):
    slurm.add("n1", flags="DRAIN", reason="PSU, JD; 50%", comment="rack 7")
    slurm.ask(settings, request=replace(L3, take_over=True))
    assert slurm.orders == ["remarks", "drain"]
    assert slurm.nodes["n1"].ours.fact == "asked"
    assert hold.give_back(None, "n1").done
    assert (slurm.nodes["n1"].reason, slurm.nodes["n1"].comment) == ("PSU, JD; 50%", "rack 7")
    assert "DRAIN" in slurm.nodes["n1"].flags
    assert "undrain" not in slurm.orders


def test_killed_over_a_take_over_the_admin_still_has_his_node(settings, slurm, monkeypatch):
    slurm.add("n1", flags="DRAIN", reason="PSU, JD")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "drain", killed)
    with pytest.raises(KeyboardInterrupt):
        slurm.ask(settings, request=replace(L3, take_over=True))
    assert (slurm.nodes["n1"].reason, slurm.nodes["n1"].owner) == ("PSU, JD", "admin")


def test_an_admin_who_changes_his_text_meanwhile_is_not_taken_over(settings, slurm, monkeypatch):
    slurm.add("n1", flags="DRAIN", reason="PSU, JD")
    keep = slurm.set_remarks

    def meanwhile(s, name, **texts):
        keep(s, name, **texts)
        slurm.change(name, reason="PSU is here, JD")

    monkeypatch.setattr(control, "set_remarks", meanwhile)
    with pytest.raises(ask.Unchanged, match="changed while we looked"):
        slurm.ask(settings, request=replace(L3, take_over=True))
    assert slurm.nodes["n1"].reason == "PSU is here, JD"


def test_an_old_text_in_the_comment_does_not_drain_a_node_that_was_in_service(settings, slurm):
    slurm.add("n1", comment=remark.write_said("rack 7", remark.Said(was="PSU, JD")))
    slurm.ask(settings)
    hold.give_back(None, "n1")
    assert (slurm.nodes["n1"].flags, slurm.nodes["n1"].comment) == (frozenset(), "rack 7")


def test_what_slurm_drained_goes_back_to_slurm(settings, slurm):
    slurm.add("n1", flags="DRAIN", reason="Kill task failed")
    _, text = slurm.ask(settings)
    assert "'Kill task failed' put back afterwards" in text
    hold.give_back(None, "n1")
    assert slurm.nodes["n1"].reason == "Kill task failed"


@pytest.mark.parametrize(
    ("ours", "request_", "after"),
    [
        (replace(FAULT, rung="L4", state="fail", next="RMA"), L3, ("L3", "queued", "")),
        (replace(FAULT, rung="RMA", state="fail"), replace(L3, rung="L4"), ("L4", "queued", "")),
        (replace(FAULT, rung="reset", state="manual"), L3, ("L3", "queued", "")),
        (replace(FAULT, state="untested", attempt=2), L3, ("L3", "queued", "")),
        (replace(FAULT, state="pass"), replace(L3, through="L4"), ("L3", "queued", "L4")),
        (FAULT, L3, ("L3", "queued", "")),
        (FAULT, replace(L3, rung="L4"), ("L4", "queued", "")),
        (FAULT, replace(L3, through="L4"), ("L3", "queued", "L4")),
        (replace(FAULT, rung="reset"), L3, ("reset", "queued", "")),
        (replace(FAULT, state="running"), L3, ("L3", "running", "")),
        (replace(FAULT, rung="reset", state="running"), replace(L3, rung="L4"), ("reset", "running", "")),
        (replace(FAULT, state="claim"), L3, ("L3", "claim", "")),
        (replace(FAULT, rung="L1", state="fail", next="L3"), L3, ("L1", "fail", "")),
        (replace(FAULT, rung="L1", state="fail", next="L3"), replace(L3, rung="L4"), ("L4", "queued", "")),
    ],
)
def test_a_node_that_we_hold_is_asked_for_what_does_not_come_anyway(settings, slurm, ours, request_, after):
    slurm.add("n1", flags="DRAIN", reason=ours)
    slurm.ask(settings, request=request_)
    found = slurm.nodes["n1"].ours
    assert (found.rung, found.state, found.to) == after
    assert (found.fact, found.gpu, found.since) == ("Xid79", 3, "11-20T12:03Z")
    assert (found.attempt, found.by) == ((1, "alice") if slurm.orders else (ours.attempt, ""))


@pytest.mark.parametrize("state", ["claim", "running"])
@pytest.mark.parametrize("more", [{"rung": "L4"}, {"through": "L4"}])
def test_level_3_under_way_is_no_answer_to_who_asked_for_level_4(settings, slurm, state, more):
    slurm.add("n1", flags="DRAIN", reason=replace(FAULT, state=state))
    with pytest.raises(ask.Unchanged, match="L3 is under way, which is less than you ask for"):
        slurm.ask(settings, request=replace(L3, **more))
    assert slurm.orders == []


def test_of_two_who_ask_in_the_same_moment_the_one_overwritten_is_told(settings, slurm, monkeypatch):
    slurm.add("n1")

    def and_another(s, name, reason):
        slurm.drain(s, name, reason)
        slurm.drain(s, name, replace(reason, rung="L4", by="bob"))

    monkeypatch.setattr(control, "drain", and_another)
    with pytest.raises(ask.Unchanged, match=r"changed while we looked: .*by=bob"):
        slurm.ask(settings)


# ---- cancelling


@pytest.mark.parametrize(
    ("ours", "extra", "words", "reason"),
    [
        (replace(FAULT, fact="asked"), "", "given back", ""),
        (replace(FAULT, fact="asked", state="claim"), "", "given back", ""),
        (replace(FAULT, fact="sweep", state="running"), "", "given back", ""),
        (replace(FAULT, fact="asked", rung="L4"), "fail", "stays drained", "L4 manual"),
        (FAULT, "", "stays drained", "L3 manual"),
        (replace(FAULT, state="running", attempt=2), "", "stays drained", "L3 manual"),
        (replace(FAULT, rung="L1", state="fail", next="L3"), "", "stays drained", "L3 manual"),
    ],
)
def test_a_request_is_given_back_and_a_fault_stays_drained_and_still(settings, slurm, ours, extra, words, reason):
    last = remark.write_result("", remark.Result("L3", "fail", budget.began(ours, NOW) + 60)) if extra else ""
    slurm.add("n1", flags="DRAIN", reason=ours, extra=last)
    assert words in ask.cancel(settings, slurm.nodes["n1"], ours)
    assert reason in slurm.nodes["n1"].reason
    assert bool(reason) == ("DRAIN" in slurm.nodes["n1"].flags)


@pytest.mark.parametrize(
    ("ours", "flags", "words"),
    [
        (replace(FAULT, state="claim"), "", "not confirmed yet"),
        (replace(FAULT, rung="RMA", state="fail"), "", "nothing to cancel"),
        (replace(FAULT, rung="reset", state="manual"), "", "nothing to cancel"),
        (replace(FAULT, rung="reboot", state="running"), "REBOOT_ISSUED", "it is rebooting"),
    ],
)
def test_what_can_not_be_cancelled_is_said(settings, slurm, ours, flags, words):
    slurm.add("n1", flags=f"DRAIN {flags}", reason=ours)
    with pytest.raises(ask.Unchanged, match=words):
        ask.cancel(settings, slurm.nodes["n1"], ours)
    assert slurm.orders == []


def test_a_request_for_tests_travels_in_the_reason_and_a_second_one_joins_it(settings, slurm):
    slurm.add("n1")
    slurm.ask(settings, request=ask.Request("L1", tests="nccl", by="alice"))
    assert slurm.nodes["n1"].reason.split(" ", 3)[3].startswith("claim since=")
    assert "tests=nccl by=alice" in slurm.nodes["n1"].reason
    for state, wanted, tests in (
        ("queued", "nvbandwidth", "nccl,nvbandwidth"),
        ("queued", "all", "all"),
        ("queued", "gpu-burn-of-the-longest-name", "all"),
        ("fail next=L4", "nvbandwidth", "nccl,nvbandwidth"),
    ):
        slurm.add("n1", flags="DRAIN", reason=f"gpuhealth:asked GPU* L1 {state} tests=nccl by=alice")
        slurm.ask(settings, request=ask.Request("L1", tests=wanted, by="bob"))
        assert (slurm.nodes["n1"].ours.tests, slurm.nodes["n1"].ours.state) == (tests, "queued")


def test_a_running_test_is_not_given_more_to_do_but_the_same_again_is_no_error(settings, slurm):
    slurm.add("n1", flags="DRAIN", reason="gpuhealth:asked GPU* L1 running tests=nccl by=alice")
    with pytest.raises(ask.Unchanged, match="less than you ask for"):
        slurm.ask(settings, request=ask.Request("L1", tests="nvbandwidth"))
    slurm.ask(settings, request=ask.Request("L1", tests="nccl"))
    assert slurm.orders == []
