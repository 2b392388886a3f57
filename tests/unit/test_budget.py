"""How many nodes may be held: each limit by itself, and the order of claims."""

import math

import pytest

from slurm_gpuhealth.config.settings import Drain, Settings, Sweep
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import budget
from slurm_gpuhealth.slurm.node import Hold
from slurm_gpuhealth.slurm.reason import Reason, stamp

NOW = 1795176000.0
NEW = Reason("Xid48", 3, "L3", "queued")
LOST = replace(NEW, fact="lost", rung="reboot")
RMA = replace(NEW, fact="dead", rung="RMA")
SWEEP = Reason("sweep", None, "L2", "running")
WIDE = Drain(budget=0.05, floor=2, per_hour=1.0, lost=0.05, confirmed=0.2)


def held(count, ours=NEW, when=NOW - 86400, name="m"):
    return [Hold(f"{name}{number}", ours, when) for number in range(count)]


def place(holds, ours=NEW, when=math.inf, total=100, limits=WIDE):
    mine = Hold("n1", replace(ours, state="claim"), when)
    return budget.place(mine, holds, total, Settings(drain=limits, sweep=Sweep(budget=0.02)), NOW)


@pytest.mark.parametrize(
    ("total", "share", "floor", "found"),
    [
        (4, 0.05, 2, 2),  # 5 % of 4 is less than one: the floor
        (100, 0.05, 2, 5),
        (39, 0.05, 1, 1),  # rounded down
        (100, 0.29, 0, 29),  # 0.29 * 100 is 28.999999999999996
        (100, 0.0, 0, 0),
    ],
)
def test_the_budget_is_a_share_with_a_floor(total, share, floor, found):
    assert budget.most(total, share, floor) == found


@pytest.mark.parametrize(
    ("ours", "kind"),
    [
        (NEW, "new"),
        (replace(NEW, rung="L1", state="fail", next="L3"), "new"),
        (replace(NEW, rung="L1", state="claim", next="RMA"), "new"),
        (replace(NEW, rung="L3", state="fail", next="L4"), "confirmed"),
        (RMA, "confirmed"),
        (LOST, "lost"),
        (replace(LOST, rung="L4", state="fail", next="RMA"), "confirmed"),
        (SWEEP, "sweep"),
        (replace(SWEEP, fact="suspect", rung="L3"), "sweep"),
        (replace(SWEEP, fact="suspect", rung="RMA"), "confirmed"),
        (Reason("asked", None, "L3", "queued", by="alice"), "new"),
    ],
)
def test_a_hold_counts_against_one_limit(ours, kind):
    assert budget.kind(ours) == kind


@pytest.mark.parametrize(("ours", "most"), [(NEW, 5), (LOST, 5), (RMA, 20), (SWEEP, 2)])
def test_each_kind_has_its_own_limit(ours, most):
    assert place(held(most - 1, ours), ours).fits
    full = place(held(most, ours), ours)
    assert (full.fits, f"{most} of 100" in full.why) == (False, True)


def test_lost_gpus_do_not_use_up_what_waits_for_a_diagnosis():
    assert place(held(5, LOST), NEW).fits
    assert place(held(5, NEW), LOST).fits


def test_many_confirmed_faults_stop_everything_else():
    assert not place(held(20, RMA), NEW).fits
    assert "look at them" in place(held(20, RMA), LOST).why


def test_new_holds_of_an_hour_are_limited_and_older_ones_and_sweeps_are_not_among_them():
    limits = replace(WIDE, per_hour=0.04)
    recent = held(4, LOST, NOW - 60)
    assert "in the last hour" in place(recent, limits=limits).why
    assert place(held(4, LOST, NOW - 4000), limits=limits).fits
    assert place(held(4, replace(SWEEP), NOW - 60), limits=limits).fits
    assert place(recent, SWEEP, limits=limits).fits
    began = held(4, replace(LOST, since=stamp(NOW - 7200)), NOW - 60)  # reworded a minute ago
    assert place(began, limits=limits).fits


@pytest.mark.parametrize(
    ("state", "when", "name", "counts"),
    [
        ("queued", NOW + 99, "z", True),
        ("claim", NOW - 11, "z", True),
        ("claim", NOW - 10, "a", True),
        ("claim", NOW - 10, "z", False),
        ("claim", NOW - 9, "a", False),
        ("claim", NOW - budget.ABANDONED - 1, "a", False),
        ("claim", 0.0, "z", True),  # a time that could not be read
    ],
)
def test_before_a_claim_are_all_confirmed_holds_and_the_older_claims(state, when, name, counts):
    others = held(5, replace(NEW, state=state), when, name)
    assert place(others, when=NOW - 10).fits == (not counts)


def test_a_claim_whose_own_time_could_not_be_read_comes_last():
    assert not place(held(5, replace(NEW, state="claim"), NOW), when=0.0).fits


def test_a_node_is_not_in_its_own_way():
    others = held(4)
    assert place([*others, Hold("n1", NEW, NOW - 99)], when=NOW - 10).fits


@pytest.mark.parametrize(
    ("since", "now", "began"),
    [
        ("11-20T12:03Z", NOW + 600, 1795176180.0),
        ("12-31T23:59Z", 1798761600.0 + 60, 1798761540.0),  # last year's
        ("99-99T99:99Z", NOW, 0.0),
        ("", NOW, 0.0),
    ],
)
def test_a_since_has_no_year(since, now, began):
    assert budget.began(replace(NEW, since=since), now) == began
