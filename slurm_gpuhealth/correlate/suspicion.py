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
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate.weights import DAY, plain

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
    found = tally_of(node, grid, s, without).at(time, node.days, node.jobs)
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


def tally_of(node: NodeState, grid: Grid, s: Suspicion, without: Without | None = None) -> Tally:
    """What the node's evidence comes to. Kept at the node, and built anew when something else than new was added."""
    if without and without.key not in node.records and not incidents_in(node, without.start, without.end):
        without = None
    known: Tally | None = node._tally
    if without is None and known is not None:
        return known
    tally = Tally(grid, s, _prior(node, grid, s), node.repaired or node.since)
    for item in sorted(_items(node, grid, s, without), key=lambda one: (one.end, one.what)):
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
    days: float
    """`NodeState.days` and `jobs` at that time."""
    jobs: float


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

    def add(self, item: Item) -> bool:
        """False where `item` is older than what was added before."""
        last = self.last
        if last and item.end < last.until:
            return False
        before = self.now()
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
            self.closed.append(self.counted())
            if last.user and not last.hard:
                self.load[last.user] = (last.time, self._load(last) + 1)
        self.last = Group(item.end, item.end, item.weights, 1.0, item.user, item.hard, item.gpu, item.what)
        self.before = self._carried(before, item.end, item.days, item.jobs)
        return True

    def at(self, time: float, days: float, jobs: float) -> list[float]:
        return self._carried(self.now(), time, days, jobs).levels

    def now(self) -> At:
        """After the last incident."""
        if self.known is None:
            counted, start = self.counted(), self.before
            levels = [one * math.exp(counted.share * said) for one, said in zip(start.levels, counted.weights)]
            total = sum(levels)
            self.known = At([one / total for one in levels], counted.until, start.days, start.jobs)
        return self.known

    def _carried(self, start: At, time: float, days: float, jobs: float) -> At:
        """To a later time, through the days and jobs in between, in which nothing happened; not yet adding up to 1."""
        g, levels = self.grid, []
        span = max(0.0, time - start.time) * g.change if start.time else 0.0
        more, runs = max(0.0, days - start.days), max(0.0, jobs - start.jobs)
        for one, prior, worse, survive in zip(start.levels, g.prior, g.worse, g.survive):
            rate = span + worse * more - survive * runs
            if rate > 1e-12:
                stays = math.exp(-rate)
                levels.append(one * stays + prior * span * (1 - stays) / rate)
            else:
                levels.append(one)
        return At(levels, max(time, start.time), start.days + more, start.jobs + runs)

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
        weights = tuple(strength * one for one in grid.seen)
        yield Item(None, event.time, weights, "", hard, event.gpu, event.code, event.days, event.jobs)


def forgotten(node: NodeState, gpu: GpuName | None) -> float:
    """Since when what is told of this GPU counts."""
    return max(node.repaired, node.changed.get(plain(gpu), (0.0,))[0] if gpu is not None else 0.0)


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
