"""A node's evidence as it is folded: from a mark on it must come to the same as from the beginning."""

from __future__ import annotations

import random

import pytest

from slurm_gpuhealth.config.settings import Suspicion
from slurm_gpuhealth.correlate import memory, suspicion
from slurm_gpuhealth.correlate.state import NodeState
from slurm_gpuhealth.correlate.tally import OWN, STEP, Item, Tally, Without
from slurm_gpuhealth.correlate.weights import grid
from slurm_gpuhealth.outcomes import Event

S = Suspicion()
GRID = grid(S)
BAD = len(GRID.prior) - 1
START = 1_760_000_000.0
HOUR = 3600.0


def some(rng, count=50):
    """Jobs of few users, so that they count less and less, and events that join them."""
    items, time, days = [], START, 0.0
    for job in range(count):
        time += rng.choice((60.0, 2 * HOUR, 30 * HOUR))
        days += rng.random()
        hard = rng.random() < 0.2
        event = rng.random() < 0.25
        ratios = (1.0, *sorted(round(rng.uniform(1, rng.choice((1.2, 5, 150))), 4) for _ in GRID.prior[1:]))
        user = "" if event else rng.choice(("ann", "bob", "cyd", ""))
        start, gpu, what = (None, rng.choice((None, 0, 1)), "xid 79") if event else (time - HOUR, None, f"{job}.0")
        items.append(Item(start, time, ratios, user, hard, gpu, what, days, float(job)))
    return items


def folded(items):
    tally = Tally(GRID, S, list(GRID.prior), START - HOUR)
    for one in items:
        assert tally.add(one)
    return tally


def same(tally, other):
    time = START + 5000 * HOUR
    assert tally.at(time, 90.0, 90.0) == pytest.approx(other.at(time, 90.0, 90.0), abs=1e-12)
    assert tally.now()[0] == pytest.approx(other.now()[0], abs=1e-12)
    assert tally.load == other.load


def test_to_replace_a_job_comes_to_the_same_as_to_begin_anew():
    rng = random.Random(1)  # noqa: S311 - the same every time
    for _ in range(60):
        items = some(rng)
        tally = folded(items)
        for _ in range(4):
            place = rng.choice([place for place, one in enumerate(items) if one.start is not None])
            new = None if rng.random() < 0.3 else items[place]._replace(ratios=(1.0, *[9.0] * BAD), user="dan")
            assert tally.replace(items[place].what, new)
            items[place : place + 1] = [new] if new else []
            same(tally, folded(items))
            assert tally.items == items
            assert (tally.marks, tally.told) == (folded(items).marks, folded(items).told)
            assert tally.incidents() == folded(items).incidents()


def test_to_leave_out_a_case_and_the_events_of_its_time_comes_to_the_same_as_to_begin_without_them():
    rng = random.Random(2)  # noqa: S311 - the same every time
    for _ in range(200):
        items = some(rng)
        one = rng.choice([one for one in items if one.start is not None])
        without = Without(one.what, one.start - 60, one.end + 120)
        left = [
            item
            for item in items
            if (item.what != one.what if item.start is not None else not without.start <= item.end <= without.end)
        ]
        tally = folded(items)
        same(tally.branch(without), folded(left))
        same(tally, folded(items))


def test_an_incident_that_is_seen_often_is_its_strongest_evidence():
    items = [
        Item(START - HOUR, START, (1.0, *[4.0] * BAD), "ann", False, None, "1.0", 1.0, 1.0),
        Item(None, START + 10, (1.0, *[9.0] * BAD), "", True, 3, "xid 79", 1.0, 1.0),
        Item(START - HOUR, START + 20, (1.0, *[5.0] * BAD), "bob", False, None, "2.0", 1.0, 1.0),
        Item(START + 40 * HOUR, START + 50 * HOUR, (1.0, *[2.0] * BAD), "ann", False, None, "3.0", 2.0, 2.0),
    ]
    first, second = folded(items).incidents()
    assert (first.what, first.gpu, first.hard, first.until, first.share) == ("xid 79", 3, True, START + 20, 1.0)
    assert (second.what, second.gpu, second.hard) == ("3.0", None, False)
    assert second.share > 0.9


def test_what_a_user_says_again_counts_less():
    again = [
        Item(end - HOUR, end, (1.0, *[3.0] * BAD), "ann", False, None, f"{end}", 1.0, 1.0)
        for end in (START + day * 24 * HOUR for day in range(3 * STEP))
    ]
    shares = [one.share for one in folded(again).incidents()]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.3


@pytest.mark.parametrize("ratio", [1.5, 4.0, 50.0])
def test_a_single_user_makes_a_node_no_more_suspicious_than_the_users_own_troubles_are_rare(ratio):
    again = [
        Item(end - 60, end, (1.0, *[ratio] * BAD), "ann", False, None, f"{nth}", 0.0, float(nth))
        for nth, end in enumerate(START + quarter * HOUR / 4 for quarter in range(30))
    ]
    good, *bad = folded(again).now()[0]
    assert sum(bad) / good == pytest.approx((1 - GRID.prior[0]) / GRID.prior[0] / OWN, rel=0.3)
    bob = [one._replace(end=one.end + 300, start=one.end + 240, user="bob", what=f"b{one.what}") for one in again]
    good, *bad = folded(sorted([*again, *bob], key=lambda one: one.end)).now()[0]
    assert sum(bad) / good > 5 * (1 - GRID.prior[0]) / OWN


def test_what_speaks_of_another_level_than_the_node_shows_does_not_use_up_a_users_word():
    own = [
        Item(end - HOUR, end, (*[1.0] * BAD, 5.0), "ann", False, None, f"{nth}", 0.0, 10.0 * nth)
        for nth, end in enumerate(START + hour * HOUR for hour in range(0, 60, 2))
    ]
    end = START + 61 * HOUR
    last = Item(end - 0.5 * HOUR, end, (1.0, *[9.0] * BAD), "ann", False, None, "last", 0.0, 310.0)
    assert folded([*own, last]).incidents()[-1].share > 0.7


def test_the_events_of_a_time_are_found_whatever_order_they_came_in_and_however_long_they_lasted():
    rng = random.Random(3)  # noqa: S311 - the same every time
    for _ in range(50):
        node = NodeState()
        for _ in range(40):
            time = START + rng.choice((rng.randrange(3000), rng.randrange(300_000)))
            memory.keep(node, Event(time, "n1", rng.choice((0, 1)), "xid", "79"), "hard", 1.0, 28 * 24 * HOUR)
        for _ in range(20):
            start = START + rng.randrange(-1000, 320_000)
            end = start + rng.randrange(20_000)
            overlap = [one for one in node.events if one.time <= end and one.until >= start]
            assert suspicion.incidents_in(node, start, end) == overlap
            assert suspicion.incidents_in(NodeState.from_json(node.to_json()), start, end) == overlap
