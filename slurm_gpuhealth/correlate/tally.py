"""A node's evidence in the order of its time, folded into the probabilities of its levels: a hidden Markov model.

A node changes its level now and then (half are at their prior again after `half_life`), and from each level it fails at
that level's rate. So the probabilities are carried forward from incident to incident:

    between incidents   the level's own failures did not happen: exp(-hazard * days in jobs) * (1 - start) ^ jobs, and
                        some nodes have become bad, or good again
    an incident         times the likelihood of what was seen

One failure of the node shows in many ways, an Xid, a job, another job: they are one incident, and its strongest
evidence counts. What one user's jobs say again within days counts less and less: it is the word of other users that
makes a node suspect.
"""

from __future__ import annotations

from math import exp
from operator import itemgetter, mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.weights import Grid
    from slurm_gpuhealth.outcomes import GpuName

STEP = 8  # items between two places from which a node's evidence can be worked out again


class Without(NamedTuple):
    """A case, and the time whose events it has for itself."""

    key: str
    start: float
    end: float


class Group(NamedTuple):
    """One failure of a node, however often it was seen."""

    time: float
    until: float
    ratios: list[float]
    share: float
    """How much of it counts."""
    user: str
    hard: bool
    gpu: GpuName | None
    what: str
    """The case, or the event's code."""
    told: float = 0.0
    """How strong the evidence is that names the GPU."""


class Item(NamedTuple):
    """One piece of evidence: a job (`start` is known) or an event."""

    start: float | None
    end: float
    ratios: list[float]
    """The likelihood of each level, over that of level 0."""
    user: str
    hard: bool
    gpu: GpuName | None
    what: str
    days: float
    """`NodeState.days` and `jobs` at that time."""
    jobs: float


BY_END = itemgetter(Item._fields.index("end"), Item._fields.index("what"))


At = tuple[list[float], float, float, float]
"""The probabilities of the levels at a time: then that time, and `NodeState.days` and `jobs` of it."""


class Tally:
    """Evidence in the order of its time, incident by incident."""

    def __init__(self, grid: Grid, s: Suspicion, prior: list[float], since: float) -> None:
        self.grid, self.settings = grid, s
        self.closed: list[Group] = []
        self.last: Group | None = None
        self.load: dict[str, tuple[float, float]] = {}
        self.before: At = prior, since, 0.0, 0.0
        """What was known without the last incident."""
        self.known: At | None = self.before
        """What is known with it; None: not worked out yet."""
        self.share = 1.0
        """How much of the last incident counts, where `known` is worked out."""
        self.ahead: tuple[tuple[float, float, float], At] | None = None
        """What was known at a later time, as it was last asked: mostly that of the item which is added next."""
        self.items: list[Item] = []
        self.marks: list[tuple[Group | None, At, At | None, float, int, dict[str, tuple[float, float]]]] = []
        """Before each STEP-th item: `last`, `before`, `known`, `share`, the length of `closed`, and `load`."""

    def add(self, item: Item) -> bool:
        """False where `item` is older than what was added before."""
        last = self.last
        if last and item.end < last.until:
            return False
        before = self.known or self.now()
        if len(self.items) % STEP == 0:
            self.marks.append((last, self.before, before, self.share, len(self.closed), dict(self.load)))
        self.items.append(item)
        ahead, self.ahead, self.known = self.ahead, None, None
        if last and _same_incident(last, item, self.settings):
            strength = max(item.ratios)
            stronger, names = strength > max(last.ratios), item.gpu is not None and strength > last.told
            self.last = last._replace(
                until=item.end,
                ratios=item.ratios if stronger else last.ratios,
                user=item.user if stronger and item.user else last.user,
                hard=last.hard or item.hard,
                gpu=item.gpu if names else last.gpu,
                what=item.what if stronger else last.what,
                told=strength if names else last.told,
            )
            return True
        if last:
            self._close(last if self.share == 1 else last._replace(share=self.share))
        told = max(item.ratios) if item.gpu is not None else 0.0
        self.last = Group(item.end, item.end, item.ratios, 1.0, item.user, item.hard, item.gpu, item.what, told)
        if ahead and ahead[0] == (item.end, item.days, item.jobs):
            self.before = ahead[1]
        else:
            self.before = self._carried(before, item.end, item.days, item.jobs)
        return True

    def _close(self, group: Group) -> None:
        self.closed.append(group)
        if group.user and not group.hard:
            self.load[group.user] = (group.time, self._load(group) + 1)

    def branch(self, without: Without) -> Tally:
        """The tally without that case and the events of its time."""
        first = place = len(self.items)
        out = set()
        while place and self.items[place - 1].end >= without.start:
            place -= 1
            one = self.items[place]
            if one.what == without.key if one.start is not None else one.end <= without.end:
                out.add(first := place)
        if not out:
            return self
        tally = self._until(first)
        for place in range(first + 1, len(self.items)):
            if place not in out:
                tally.add(self.items[place])
        return tally

    def replace(self, key: str, item: Item | None) -> bool:
        """Replace a job's item. False if that can't be done here."""
        at = range(len(self.items) - 1, -1, -1)
        place = next((one for one in at if self.items[one].what == key and self.items[one].start is not None), None)
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
        tally.last, tally.before, tally.known, tally.share, closed, load = self.marks[step]
        tally.closed, tally.load = self.closed[:closed], dict(load)
        for item in self.items[step * STEP : place]:
            tally.add(item)
        return tally

    def at(self, time: float, days: float, jobs: float) -> list[float]:
        """The probabilities at a later time; not yet adding up to 1."""
        found = self._carried(self.known or self.now(), time, days, jobs)
        self.ahead = (time, days, jobs), found
        return found[0]

    def now(self) -> At:
        """After the last incident."""
        if self.known is None:
            last = self.last
            assert last is not None  # noqa: S101 - before the first, `known` is the prior
            levels, _, days, jobs = self.before
            self.share = share = 1.0 if last.hard or last.user not in self.load else 0.5 ** self._load(last)
            ratios = last.ratios
            if share != 1:  # a job whose word counts less is, as much less, one that the node let live
                drift = self.grid.drift
                ratios = [one**share * exp((share - 1) * alive) for one, (_, _, alive) in zip(ratios, drift)]
            levels = list(map(mul, levels, ratios))
            total = sum(levels)
            self.known = [one / total for one in levels], last.until, days, jobs
        return self.known

    def _carried(self, start: At, time: float, days: float, jobs: float) -> At:
        """To a later time, through the days and jobs in between, in which nothing happened."""
        levels, since, past, had = start
        grid = self.grid
        span = (time - since) * grid.change if 0 < since < time else 0.0
        if days < past:
            days = past
        if jobs < had:
            jobs = had
        more, runs = days - past, jobs - had
        if span or more or runs:
            levels = [
                one * (stays := exp(-rate)) + prior * span * (1 - stays) / rate
                for one, (prior, worse, survive) in zip(levels, grid.drift)
                if (rate := span + worse * more - survive * runs + 1e-12)
            ]
        return levels, time if time > since else since, days, jobs

    def counted(self) -> Group:
        """The last incident, with the share that counts."""
        self.now()
        assert self.last is not None  # noqa: S101 - callers have looked
        return self.last._replace(share=self.share)

    def _load(self, group: Group) -> float:
        when, much = self.load.get(group.user, (group.time, 0.0))
        return much * float(2.0 ** (-(group.time - when) / self.settings.same_user))


def _same_incident(last: Group, item: Item, s: Suspicion) -> bool:
    """An event belongs to the incident shortly before it; a job to the incident that ended it."""
    if item.start is None:
        return item.end - last.until <= s.storm
    if item.hard:
        return item.start - s.before <= last.until
    return item.start < last.until and item.end - last.until <= s.incident
