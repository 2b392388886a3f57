"""How likely a node is at each level, by all of its evidence (tally.py). From a node's state to numbers."""

from __future__ import annotations

import math
from math import exp
from operator import mul
from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate.tally import BY_END, Group, Item, Tally, Without
from slurm_gpuhealth.correlate.weights import DAY, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import Incident, NodeState, Record
    from slurm_gpuhealth.correlate.weights import Grid
    from slurm_gpuhealth.outcomes import GpuName

COUNTED = ("hard", "weak", "link")  # events that say something of the node by themselves
HARMLESS = 0.15  # what is left of a hard event through which a job went on, and completed
TRIFLE = 0.001  # what moves a node's probabilities by less is not worked out
REPEATED = 7 * DAY  # a contained error is harmless, the third on a GPU within a week is not
OFTEN = 3


def levels(
    node: NodeState,
    time: float,
    grid: Grid,
    s: Suspicion,
    without: Without | None = None,
    near: Sequence[Incident] | None = None,
) -> list[float]:
    """The probability of each level at `time`. `without`: a case, whose own evidence is left out; `near`: the node's
    events of its time, where they are known already."""
    tally = tally_of(node, grid, s)
    least: Sequence[float] = ()
    if without:
        record = node.records.get(without.key)
        near = incidents_in(node, without.start, without.end) if near is None else near
        events = [one for one in near if one.kind in COUNTED] if near else []
        if record and record.ratios and not events:
            least = [1 / one for one in record.ratios]
        if events or (least and matter(tally, least) >= TRIFLE):
            tally, least = _apart(node, tally, grid, s, without, events), ()
    found = tally.at(time, node.days, node.jobs)
    if least:
        found = list(map(mul, found, least))
    if node.tests:
        tested = exp(_tests(node, time, grid, s))
        found = [found[0], *[tested * one for one in found[1:]]]
    total = sum(found)
    return [one / total for one in found]


def hazard(found: list[float], grid: Grid) -> float:
    """Failures a day, as expected of a node of these levels."""
    return sum(weight * one for weight, one in zip(found, grid.hazard))


def prior(node: NodeState, grid: Grid, s: Suspicion) -> list[float]:
    """A node that was just repaired fails sooner than others. A new node has passed a test, and would show at once what
    kills jobs at their start."""
    if node.repaired:
        more = s.repaired / (1 - grid.prior[0])
        return [1 - s.repaired, *(one * more for one in grid.prior[1:])]
    bad = [one if start else one * s.fresh for one, start in zip(grid.prior[1:], grid.start[1:])]
    return [1 - sum(bad), *bad]


def _tests(node: NodeState, time: float, grid: Grid, s: Suspicion) -> float:
    """Log likelihood ratio of the tests. Passes are not independent: what one level misses it misses again, so that
    only the most telling pass counts; and only what is newer than the last repair."""
    passed = failed = 0.0
    for level, (when, good) in node.tests.items():
        if when < node.repaired or level not in ("1", "2", "3", "4"):
            continue
        recall = s.recall[int(level) - 1]
        worth = math.exp(-abs(time - when) * grid.change)
        if good:
            passed = min(passed, worth * math.log((1 - recall) / s.specificity))
        else:
            failed = max(failed, worth * math.log(max(recall, 0.01) / (1 - s.specificity)))
    return passed + failed


def groups(node: NodeState, grid: Grid, s: Suspicion) -> list[Group]:
    """The node's incidents, by time."""
    return tally_of(node, grid, s).incidents()


def take_in(node: NodeState, time: float, grid: Grid, s: Suspicion) -> None:
    """Count an event of that time. If it is the newest evidence, it is added; else all is worked out anew."""
    if node._tally:
        last = next(iter([*events(node, grid, s, None)][-1:]), None)
        if not (last and last.end == time == node.events[-1].until and node._tally.add(last)):
            node.touched()


def trifle(tally: Tally, gone: list[Record]) -> bool:
    """Whether it makes no difference that all this is forgotten."""
    return matter(tally, [1 / math.prod(one) for one in zip(*(record.ratios or () for record in gone))]) < TRIFLE


def matter(tally: Tally, factors: Sequence[float]) -> float:
    """How much of the node's probabilities these factors move."""
    return sum([one * abs(1 - factor) for one, factor in zip(tally.now()[0], factors)])


def tally_of(node: NodeState, grid: Grid, s: Suspicion) -> Tally:
    """What the node's evidence comes to. It is kept at the node, and built anew if older evidence has changed."""
    known: Tally | None = node._tally
    if known is None:
        known = node._tally = _anew(node, grid, s, None)
    return known


def _apart(node: NodeState, tally: Tally, grid: Grid, s: Suspicion, without: Without, events: list[Incident]) -> Tally:
    """The node's tally without that case and the events of its time."""
    for one in events:
        if one.time < without.start or (one.kind != "hard" and _repeats(node, one.gpu)):
            return _anew(node, grid, s, without)  # without one of them, others may count less
    return tally.branch(without)


def _repeats(node: NodeState, gpu: GpuName | None) -> bool:
    """Whether contained errors of that GPU may count for more, as there are others."""
    return sum(one.gpu == gpu and one.kind in COUNTED and one.kind != "hard" for one in node.events) >= OFTEN


def _anew(node: NodeState, grid: Grid, s: Suspicion, without: Without | None) -> Tally:
    tally = Tally(grid, s, prior(node, grid, s), node.repaired or node.since)
    for item in sorted(_items(node, grid, s, without), key=BY_END):
        tally.add(item)
    return tally


def put(node: NodeState, key: str, old: Record | None) -> None:
    """Count the record of that key instead of `old`."""
    tally, item = node._tally, item_of(node.records[key], key)
    if tally and not (tally.replace(key, item) if old and old.ratios else item is None or tally.add(item)):
        node.touched()


def item_of(record: Record, key: str) -> Item | None:
    """What a failed attempt says of a node; None: nothing."""
    if not record.ratios:
        return None
    user = "" if record.apart and not record.hung else record.user
    return Item(record.start, record.end, record.ratios, user, record.hard, None, key, record.days, record.jobs)


def _items(node: NodeState, grid: Grid, s: Suspicion, without: Without | None) -> Iterator[Item]:
    for gpu, (when, days, jobs) in node.changed.items():
        more = max(1.0, s.repaired / (1 - s.repaired) * grid.prior[0] / (1 - grid.prior[0]))
        yield Item(when, when, [1.0, *(more for _ in grid.prior[1:])], "", False, gpu, "replaced", days, jobs)
    for key, record in node.records.items():
        item = item_of(record, key) if record.end > node.repaired and (not without or key != without.key) else None
        if item:
            yield item
    yield from events(node, grid, s, without)


def events(node: NodeState, grid: Grid, s: Suspicion, without: Without | None) -> Iterator[Item]:
    weak: dict[str, list[float]] = {}
    for event in node.events:
        if event.kind not in COUNTED or event.time <= forgotten(node, event.gpu):
            continue
        if without and event.time <= without.end and event.until >= without.start:
            continue
        strength = event.strength * (HARMLESS if event.spared else 1.0)
        if event.kind != "hard":
            earlier = weak.setdefault(f"{event.gpu}", [])
            earlier[:] = [one for one in earlier if event.time - one < REPEATED]
            earlier += [event.time] if not earlier or event.time - earlier[-1] > 3600 else []
            strength = max(strength, 0.7) if len(earlier) >= OFTEN else strength
        hard = strength >= 0.7
        ratios = [exp(strength * one) for one in grid.seen]
        yield Item(None, event.time, ratios, "", hard, event.gpu, event.code, event.days, event.jobs)


def forgotten(node: NodeState, gpu: GpuName | None) -> float:
    """Events of this GPU up to this time do not count: the GPU or the node was replaced or repaired then."""
    return max(node.repaired, node.changed.get(plain(gpu), (0.0,))[0] if gpu is not None else 0.0)


def incidents_in(node: NodeState, start: float, end: float) -> list[Incident]:
    """The node's events that overlap a time."""
    return [one for one in node.events if one.time <= end and one.until >= start] if node._quiet >= start else []


def tied(found: list[Group], time: float, grid: Grid) -> dict[str, float]:
    """GPU → share of the evidence that is tied to it."""
    shares: dict[str, float] = {}
    total = 0.0
    for group in found:
        much = math.log(max(group.ratios)) * group.share * math.exp(-abs(time - group.until) * grid.change)
        total += max(0.0, much)
        if group.gpu is not None:
            shares[str(group.gpu)] = shares.get(str(group.gpu), 0.0) + max(0.0, much)
    return {gpu: much / total for gpu, much in shares.items() if much > 0.01 * total}
