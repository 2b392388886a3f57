"""How likely a node is of each level: its evidence, taken together. Pure: from a node's state to numbers and sentences.

A node changes its level now and then (half are at their prior again after `half_life`), and from each level it fails at
that level's rate. So the probabilities are carried forward from incident to incident, as in a hidden Markov model:

    between incidents   the level's own failures did not happen: exp(-hazard * days in jobs) * (1 - start) ^ jobs, and
                        some nodes have become bad, or good again
    an incident         times the likelihood of what was seen

One failure of the node shows in many ways, an Xid, a job, another job: they are one incident, and its strongest
evidence counts. What one user's jobs say again within days counts less and less: it is the word of other users that
makes a node suspect.
"""

from __future__ import annotations

import math
from math import exp
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate.weights import DAY, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_gpuhealth.correlate.model import GpuName
    from slurm_gpuhealth.correlate.state import Incident, NodeState, Record, Weights
    from slurm_gpuhealth.correlate.weights import Grid
    from slurm_gpuhealth.settings import Suspicion

COUNTED = ("hard", "weak", "link")  # events that say something of the node by themselves
HARMLESS = 0.15  # what is left of a hard event through which a job went on, and completed
STEP = 8  # items between two places from which a node's evidence can be worked out again
TRIFLE = 0.001  # what moves a node's probabilities by less is not worked out
REPEATED = 7 * DAY  # a contained error is harmless, the third on a GPU within a week is not


class Without(NamedTuple):
    """A case, and the time whose events it has for itself."""

    key: str
    start: float
    end: float


class Group(NamedTuple):
    """One failure of a node, however often it was seen."""

    time: float
    until: float
    weights: Weights
    share: float
    """How much of it counts."""
    user: str
    hard: bool
    gpu: GpuName | None
    what: str
    """The case, or the event's code."""


def levels(node: NodeState, time: float, grid: Grid, s: Suspicion, without: Without | None = None) -> list[float]:
    """The probability of each level at `time`. `without`: a case, whose own evidence is left out."""
    least = _light(node, grid, s, without) if without else None
    found = tally_of(node, grid, s, None if least else without).at(time, node.days, node.jobs)
    if least:
        found = [one * rest for one, rest in zip(found, least)]
    tested = math.exp(_tests(node, time, grid, s)) if node.tests else 1.0
    total = found[0] + tested * sum(found[1:])
    return [found[0] / total, *(tested * one / total for one in found[1:])]


def hazard(found: list[float], grid: Grid) -> float:
    """Failures a day, as expected of a node of these levels."""
    return sum(weight * one for weight, one in zip(found, grid.hazard))


def _prior(node: NodeState, grid: Grid, s: Suspicion) -> list[float]:
    """A node fresh from a repair fails again sooner than others do; one that is new has passed a test, or would show at
    once what kills jobs at their start."""
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
        if when < node.repaired or not level.isdigit():
            continue
        recall = s.recall[min(max(int(level), 1), 4) - 1]
        worth = math.exp(-abs(time - when) * grid.change)
        if good:
            passed = min(passed, worth * math.log((1 - recall) / s.specificity))
        else:
            failed = max(failed, worth * math.log(max(recall, 0.01) / (1 - s.specificity)))
    return passed + failed


def groups(node: NodeState, grid: Grid, s: Suspicion) -> list[Group]:
    """The node's incidents, by time."""
    tally = tally_of(node, grid, s)
    return [*tally.closed, *([tally.counted()] if tally.last else [])]


def take_in(node: NodeState, time: float, grid: Grid, s: Suspicion) -> None:
    """Let an event of that time count; if it is the newest evidence, without working all out anew."""
    if node._tally:
        last = next(iter([*_events(node, grid, s, None)][-1:]), None)
        if not (last and last.end == time == node.events[-1].until and node._tally.add(last)):
            node.touched()


def _light(node: NodeState, grid: Grid, s: Suspicion, without: Without) -> list[float] | None:
    """What leaving the case out takes from each level, where that is a trifle; None: to be worked out without it."""
    record = node.records.get(without.key)
    if record is None or not record.weights or incidents_in(node, without.start, without.end):
        return None
    rest = [math.exp(-one) for one in record.weights]
    return rest if matter(tally_of(node, grid, s), rest) < TRIFLE else None


def trifle(tally: Tally, gone: list[Record]) -> bool:
    """Whether it makes no difference that all this is forgotten."""
    return matter(tally, [exp(-sum(one)) for one in zip(*(record.weights or () for record in gone))]) < TRIFLE


def matter(tally: Tally, factors: list[float]) -> float:
    """How much of the node's probabilities these factors move."""
    return sum(one * abs(1 - factor) for one, factor in zip(tally.now().levels, factors))


def tally_of(node: NodeState, grid: Grid, s: Suspicion, without: Without | None = None) -> Tally:
    """What the node's evidence comes to. Kept at the node, and built anew when something else than new was added."""
    if without and not _weighty(node, without.key) and not incidents_in(node, without.start, without.end):
        without = None
    known: Tally | None = node._tally
    if known is None:
        known = node._tally = _anew(node, grid, s, None)
    if without is None:
        return known
    for one in incidents_in(node, without.start, without.end):
        if one.kind != "hard" or one.time < without.start:
            return _anew(node, grid, s, without)  # without one of them, other contained errors may count less
    return known.branch(without)


def _anew(node: NodeState, grid: Grid, s: Suspicion, without: Without | None) -> Tally:
    tally = Tally(grid, s, _prior(node, grid, s), node.repaired or node.since)
    for item in sorted(_items(node, grid, s, without), key=BY_END):
        tally.add(item)
    return tally


def put(node: NodeState, key: str, old: Record | None) -> None:
    """Let the record of that key count, in the place of `old`."""
    tally, item = node._tally, item_of(node.records[key], key)
    if tally and not (tally.replace(key, item) if old and old.weights else item is None or tally.add(item)):
        node.touched()


class Item(NamedTuple):
    """One piece of evidence: a job (`start` is known) or an event."""

    start: float | None
    end: float
    weights: Weights
    user: str
    hard: bool
    gpu: GpuName | None
    what: str
    days: float
    """`NodeState.days` and `jobs` at that time."""
    jobs: float


BY_END = itemgetter(Item._fields.index("end"), Item._fields.index("what"))


class At(NamedTuple):
    """The probabilities at a time."""

    levels: list[float]
    time: float
    days: float
    jobs: float


class Tally:
    """Evidence in the order of its time, incident by incident."""

    def __init__(self, grid: Grid, s: Suspicion, prior: list[float], since: float) -> None:
        self.grid, self.settings = grid, s
        self.closed: list[Group] = []
        self.last: Group | None = None
        self.load: dict[str, tuple[float, float]] = {}
        self.before = At(prior, since, 0.0, 0.0)
        """What was known without the last incident."""
        self.known: At | None = self.before
        """What is known with it; None: not worked out yet."""
        self.items: list[Item] = []
        self.marks: list[tuple[Group | None, At, At | None, int]] = []
        """Before each STEP-th item: `last`, `before`, `known` and the length of `closed`."""

    def add(self, item: Item) -> bool:
        """False where `item` is older than what was added before."""
        last = self.last
        if last and item.end < last.until:
            return False
        before = self.now()
        if len(self.items) % STEP == 0:
            self.marks.append((last, self.before, before, len(self.closed)))
        self.items.append(item)
        self.known = None
        if last and _same_incident(last, item, self.settings):
            stronger = max(item.weights) > max(last.weights)
            self.last = last._replace(
                until=item.end,
                weights=item.weights if stronger else last.weights,
                user=item.user if stronger and item.user else last.user,
                hard=last.hard or item.hard,
                gpu=last.gpu if last.gpu is not None else item.gpu,
                what=item.what if stronger else last.what,
            )
            return True
        if last:
            self._close(self.counted())
        self.last = Group(item.end, item.end, item.weights, 1.0, item.user, item.hard, item.gpu, item.what)
        self.before = self._carried(before, item.end, item.days, item.jobs)
        return True

    def _close(self, group: Group) -> None:
        self.closed.append(group)
        if group.user and not group.hard:
            self.load[group.user] = (group.time, self._load(group) + 1)

    def branch(self, without: Without) -> Tally:
        """The same without that case, and without the events of its time."""
        out = [
            one.what == without.key if one.start is not None else without.start <= one.end <= without.end
            for one in self.items
        ]
        if True not in out:
            return self
        first = out.index(True)
        tally = self._until(first)
        for item, left_out in zip(self.items[first:], out[first:]):
            if not left_out:
                tally.add(item)
        return tally

    def replace(self, key: str, item: Item | None) -> bool:
        """Put a job's item in the place of its old one; False where that can't be done."""
        place = next((at for at, one in enumerate(self.items) if one.what == key and one.start is not None), None)
        if place is None or not self.marks or (item and item.end != self.items[place].end):
            return False
        tally = self._until(place)
        for one in ([item] if item else []) + self.items[place + 1 :]:
            tally.add(one)
        kept = place // STEP
        tally.items, tally.marks = self.items[: kept * STEP] + tally.items, self.marks[:kept] + tally.marks
        self.__dict__ = tally.__dict__
        return True

    def _until(self, place: int) -> Tally:
        """As it was before that item; its own items and marks begin at the last mark."""
        tally = Tally(self.grid, self.settings, [], 0.0)
        step = min(place // STEP, len(self.marks) - 1)
        tally.last, tally.before, tally.known, closed = self.marks[step]
        for group in self.closed[:closed]:
            tally._close(group)
        for item in self.items[step * STEP : place]:
            tally.add(item)
        return tally

    def at(self, time: float, days: float, jobs: float) -> list[float]:
        return self._drifted(self.now(), time, days, jobs)

    def now(self) -> At:
        """After the last incident."""
        if self.known is None:
            counted, start = self.counted(), self.before
            share = counted.share
            levels = [one * exp(share * said) for one, said in zip(start.levels, counted.weights)]
            total = sum(levels)
            self.known = At([one / total for one in levels], counted.until, start.days, start.jobs)
        return self.known

    def _carried(self, start: At, time: float, days: float, jobs: float) -> At:
        levels = self._drifted(start, time, days, jobs)
        return At(levels, max(time, start.time), max(days, start.days), max(jobs, start.jobs))

    def _drifted(self, start: At, time: float, days: float, jobs: float) -> list[float]:
        """To a later time, through the days and jobs in between, in which nothing happened; not yet adding up to 1."""
        levels, since, past, had = start
        span = (time - since) * self.grid.change if 0 < since < time else 0.0
        more, runs = days - past if days > past else 0.0, jobs - had if jobs > had else 0.0
        if not (span or more or runs):
            return levels
        return [
            one * (stays := exp(-rate)) + prior * span * (1 - stays) / rate
            for one, (prior, worse, survive) in zip(levels, self.grid.drift)
            if (rate := span + worse * more - survive * runs + 1e-12)
        ]

    def counted(self) -> Group:
        """The last incident, with the share that counts."""
        last = self.last
        assert last is not None  # noqa: S101 - callers have looked
        if not last.user or last.hard or last.user not in self.load:
            return last
        return last._replace(share=0.5 ** self._load(last))

    def _load(self, group: Group) -> float:
        when, much = self.load.get(group.user, (group.time, 0.0))
        return much * float(2.0 ** (-(group.time - when) / self.settings.same_user))


def _same_incident(last: Group, item: Item, s: Suspicion) -> bool:
    """An event joins what came shortly before; a job that already ran then, what ended it, or what it has claimed."""
    if item.start is None:
        return item.end - last.until <= s.storm
    if item.hard:
        return item.start - s.before <= last.until
    return item.start < last.until and item.end - last.until <= s.incident


def item_of(record: Record, key: str) -> Item | None:
    """What a failed attempt says of a node; None where that is nothing."""
    if not record.weights:
        return None
    return Item(
        *(record.start, record.end, record.weights, record.user, record.hard, None, key), record.days, record.jobs
    )


def _items(node: NodeState, grid: Grid, s: Suspicion, without: Without | None) -> Iterator[Item]:
    for gpu, (when, days, jobs) in node.changed.items():
        more = math.log(s.repaired / (1 - s.repaired) * grid.prior[0] / (1 - grid.prior[0]))
        weights = (0.0, *(max(0.0, more) for _ in grid.prior[1:]))
        yield Item(when, when, weights, "", False, gpu, "replaced", days, jobs)
    for key, record in node.records.items():
        item = item_of(record, key) if record.end > node.repaired and (not without or key != without.key) else None
        if item:
            yield item
    yield from _events(node, grid, s, without)


def _events(node: NodeState, grid: Grid, s: Suspicion, without: Without | None) -> Iterator[Item]:
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
            strength = max(strength, 0.7) if len(earlier) >= 3 else strength
        hard = strength >= 0.7
        weights = tuple(strength * one for one in grid.seen)
        yield Item(None, event.time, weights, "", hard, event.gpu, event.code, event.days, event.jobs)


def forgotten(node: NodeState, gpu: GpuName | None) -> float:
    """Since when what is told of this GPU counts."""
    return max(node.repaired, node.changed.get(plain(gpu), (0.0,))[0] if gpu is not None else 0.0)


def _weighty(node: NodeState, key: str) -> bool:
    record = node.records.get(key)
    return record is not None and record.weights is not None


def incidents_in(node: NodeState, start: float, end: float) -> list[Incident]:
    """The node's events that overlap a time."""
    return [one for one in node.events if one.time <= end and one.until >= start]


def tied(found: list[Group], time: float, grid: Grid) -> dict[str, float]:
    """GPU → share of the evidence that is tied to it."""
    shares: dict[str, float] = {}
    total = 0.0
    for group in found:
        much = max(group.weights) * group.share * math.exp(-abs(time - group.until) * grid.change)
        total += max(0.0, much)
        if group.gpu is not None:
            shares[str(group.gpu)] = shares.get(str(group.gpu), 0.0) + max(0.0, much)
    return {gpu: much / total for gpu, much in shares.items() if much > 0.01 * total}
