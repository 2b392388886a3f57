"""How likely a node is of each level: its evidence, taken together. Pure: from a node's state to numbers and sentences.

    log weight of level i = prior_i - (hazard_i - hazard_0) * days in jobs + log(1 - start_i) * starts
                            + sum over its incidents of log(likelihood at level i / at level 0)

All but the prior is halved every `half_life`. One failure of the node shows in many ways, an Xid, a job, another job:
they are one incident, and its strongest evidence counts. What one user's jobs say again within days counts less and
less: it is the word of other users that makes a node suspect.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate.weights import DAY, growth, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_gpuhealth.correlate.model import GpuName
    from slurm_gpuhealth.correlate.state import Incident, NodeState, Record, Weights
    from slurm_gpuhealth.correlate.weights import Grid
    from slurm_gpuhealth.settings import Suspicion

HARMLESS = 0.15  # what is left of a hard event through which a job went on, and completed
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
    tally = tally_of(node, grid, s, without)
    if tally.last and tally.last.until > time:
        time = tally.last.until
    shrink = 1.0 / growth(time, grid.half_life)
    days, starts = node.exposure * shrink, node.starts * shrink
    tested = _tests(node, time, grid, s) if node.tests else 0.0
    logs = [
        prior + survive * starts - worse * days + said * shrink + tested
        for prior, survive, worse, said in zip(_prior(node, time, grid, s), grid.survive, grid.worse, tally.said())
    ]
    logs[0] -= tested
    highest = max(logs)
    weights = [math.exp(one - highest) for one in logs]
    total = sum(weights)
    return [one / total for one in weights]


def hazard(found: list[float], grid: Grid) -> float:
    """Failures a day, as expected of a node of these levels."""
    return sum(weight * one for weight, one in zip(found, grid.hazard))


def _prior(node: NodeState, time: float, grid: Grid, s: Suspicion) -> tuple[float, ...]:
    """A node fresh from a repair fails again sooner than others do: no prior of a good one."""
    if not node.repaired and not node.changed:
        return grid.prior
    latest = max((node.repaired, *node.changed.values()))
    if not 0 <= time - latest < s.repaired_for:
        return grid.prior
    more = math.log(s.repaired / (1 - math.exp(grid.prior[0])))
    return (math.log(1 - s.repaired), *(one + more for one in grid.prior[1:]))


def _tests(node: NodeState, time: float, grid: Grid, s: Suspicion) -> float:
    """Log likelihood ratio of the tests. Passes are not independent: what one level misses it misses again, so that
    only the most telling pass counts; and only what is newer than the last repair."""
    passed = failed = 0.0
    for level, (when, good) in node.tests.items():
        if when < node.repaired or not level.isdigit():
            continue
        recall = s.recall[min(max(int(level), 1), 4) - 1]
        worth = 2.0 ** (-abs(time - when) / grid.half_life)
        if good:
            passed = min(passed, worth * math.log((1 - recall) / s.specificity))
        else:
            failed = max(failed, worth * math.log(max(recall, 0.01) / (1 - s.specificity)))
    return passed + failed


def groups(node: NodeState, grid: Grid, s: Suspicion) -> list[Group]:
    """The node's incidents, by time."""
    tally = tally_of(node, grid, s)
    return [*tally.closed, *([tally.counted()] if tally.last else [])]


def tally_of(node: NodeState, grid: Grid, s: Suspicion, without: Without | None = None) -> Tally:
    """What the node's evidence comes to. Kept at the node, and built anew when something else than new was added."""
    if without and without.key not in node.records and not incidents_in(node, without.start, without.end):
        without = None
    known: Tally | None = node._tally
    if without is None and known is not None:
        return known
    tally = Tally(grid, s)
    for item in sorted(_items(node, grid, without), key=lambda one: (one.end, one.what)):
        tally.add(item)
    if without is None:
        node._tally = tally
    return tally


class Item(NamedTuple):
    """One piece of evidence: a job (`start` is known) or an event."""

    start: float | None
    end: float
    weights: Weights
    user: str
    hard: bool
    gpu: GpuName | None
    what: str


class Tally:
    """Evidence in the order of its time, added up by incident."""

    def __init__(self, grid: Grid, s: Suspicion) -> None:
        self.grid, self.settings = grid, s
        self.closed: list[Group] = []
        self.last: Group | None = None
        self.load: dict[str, tuple[float, float]] = {}
        self.sums = [0.0] * len(grid.prior)
        self._said: list[float] | None = self.sums

    def add(self, item: Item) -> bool:
        """False where `item` is older than what was added before."""
        last = self.last
        if last and item.end < last.until:
            return False
        self._said = None
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
            counted = self.counted()
            self.closed.append(counted)
            worth = counted.share * growth(counted.until, self.grid.half_life)
            self.sums = [one + worth * more for one, more in zip(self.sums, counted.weights)]
            if last.user and not last.hard:
                self.load[last.user] = (last.time, self._load(last) + 1)
        self.last = Group(item.end, item.end, item.weights, 1.0, item.user, item.hard, item.gpu, item.what)
        return True

    def said(self) -> list[float]:
        """The log weight of each level, in units of EPOCH."""
        if self._said is None:
            counted = self.counted()
            worth = counted.share * growth(counted.until, self.grid.half_life)
            self._said = [one + worth * more for one, more in zip(self.sums, counted.weights)]
        return self._said

    def counted(self) -> Group:
        """The last incident, with the share that counts."""
        last = self.last
        assert last is not None  # noqa: S101 - callers have looked
        return last._replace(share=0.5 ** self._load(last)) if last.user and not last.hard else last

    def _load(self, group: Group) -> float:
        when, much = self.load.get(group.user, (group.time, 0.0))
        return much * float(2.0 ** (-(group.time - when) / self.settings.same_user))


def _same_incident(last: Group, item: Item, s: Suspicion) -> bool:
    """An event joins what came shortly before; a job that already ran then, what ended it, or what it has claimed."""
    if item.start is None:
        return item.end - last.until <= s.storm
    return item.start - s.before <= last.until and (item.end - last.until <= s.incident or item.hard)


def item_of(record: Record, key: str) -> Item | None:
    """What a failed attempt says of a node; None where that is nothing."""
    if not record.weights:
        return None
    return Item(record.start, record.end, record.weights, record.user, record.hard, None, key)


def _items(node: NodeState, grid: Grid, without: Without | None) -> Iterator[Item]:
    for key, record in node.records.items():
        item = item_of(record, key) if record.end > node.repaired and (not without or key != without.key) else None
        if item:
            yield item
    weak: dict[str, list[float]] = {}
    for event in node.events:
        if event.kind not in ("hard", "weak", "link") or event.time <= forgotten(node, event.gpu):
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
        yield Item(None, event.time, tuple(strength * one for one in grid.seen), "", hard, event.gpu, event.code)


def forgotten(node: NodeState, gpu: GpuName | None) -> float:
    """Since when what is told of this GPU counts."""
    return max(node.repaired, node.changed.get(plain(gpu), 0.0) if gpu is not None else 0.0)


def incidents_in(node: NodeState, start: float, end: float) -> list[Incident]:
    """The node's events that overlap a time."""
    return [one for one in node.events if one.time <= end and one.until >= start]


def tied(found: list[Group], time: float, grid: Grid) -> dict[str, float]:
    """GPU → share of the evidence that is tied to it."""
    shares: dict[str, float] = {}
    total = 0.0
    for group in found:
        much = max(group.weights) * group.share * 2.0 ** (-abs(time - group.until) / grid.half_life)
        total += max(0.0, much)
        if group.gpu is not None:
            shares[str(group.gpu)] = shares.get(str(group.gpu), 0.0) + max(0.0, much)
    return {gpu: much / total for gpu, much in shares.items() if much > 0.01 * total}
