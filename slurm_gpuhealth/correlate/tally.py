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

from collections.abc import Sequence
from math import exp, inf, log
from operator import itemgetter, mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.weights import Grid
    from slurm_gpuhealth.outcomes import GpuName

STEP = 8  # items between two places from which a node's evidence can be worked out again
OWN = 0.03
"""How often a user's jobs fail on some good node, and not elsewhere, for a reason of the user's own."""


class Without(NamedTuple):
    """A case, and the time whose events it has for itself."""

    key: str
    start: float
    end: float


class Item(NamedTuple):
    """One piece of evidence: a job (`start` is known) or an event."""

    start: float | None
    end: float
    ratios: Sequence[float]
    """The likelihood of each level, over that of level 0."""
    user: str
    hard: bool
    gpu: GpuName | None
    what: str
    """The case, or the event's code."""
    days: float
    """`NodeState.days` and `jobs` at that time."""
    jobs: float


BY_END = itemgetter(Item._fields.index("end"), Item._fields.index("what"))


class Group(NamedTuple):
    """An incident: one failure of a node, however often it was seen."""

    until: float
    ratios: Sequence[float]
    share: float
    """How much of it counts."""
    hard: bool
    gpu: GpuName | None
    what: str
    """The strongest evidence: a case, or an event's code."""


At = tuple[list[float], float, float, float]
"""The probabilities of the levels at a time: then that time, and `NodeState.days` and `jobs` of it."""
Told = tuple[str, tuple[float, float]]
"""A user, when it told of an incident, and how much it had told by then."""


Last = tuple[float, float, Sequence[float], str, bool]
"""The incident that may not be over: its begin and end, ratios and user of its strongest evidence, and whether hard."""
Mark = tuple[Last, At, int]
"""`Tally.last`, `before` and the length of `told`."""
NONE: Last = -inf, -inf, (), "", False


class Tally:
    """Evidence in the order of its time, incident by incident."""

    __slots__ = (
        *("ahead", "before", "grid", "items", "known", "last", "load", "marks", "much", "settings", "share", "told"),
    )

    def __init__(self, grid: Grid, s: Suspicion, prior: list[float], since: float) -> None:
        self.grid, self.settings = grid, s
        self.last = NONE
        self.before: At = prior, since, 0.0, 0.0
        """What was known without the last incident."""
        self.known: At | None = self.before
        """What is known with it; None: not worked out yet."""
        self.share = 1.0
        self.much = 0.0
        """How much of the last incident counts, and how much it says of the node; where `known` is worked out."""
        self.ahead: tuple[tuple[float, float, float], At] | None = None
        """What was known at a later time, as it was last asked: mostly that of the item which is added next."""
        self.told: list[Told] = []
        """Of the incidents before the last."""
        self.load: dict[str, tuple[float, float]] = {}
        """The same, the newest of each user."""
        self.items: list[Item] = []
        self.marks: list[Mark] = []
        """Before each STEP-th item."""

    def add(self, item: Item) -> bool:
        """False where `item` is older than what was added before."""
        start, end, ratios, user, hard, _, _, days, jobs = item
        begun, until, strongest, told, sure = last = self.last
        if end < until:
            return False
        if not len(self.items) % STEP:
            self.marks.append((last, self.before, len(self.told)))
        self.items.append(item)
        ahead, self.ahead = self.ahead, None
        if _same_incident(until, start, end, hard, self.settings):
            stronger = max(ratios) > max(strongest)
            self.last = (
                begun,
                end,
                ratios if stronger else strongest,
                user if stronger and user else told,
                sure or hard,
            )
        else:
            self.before = ahead[1] if ahead and ahead[0] == (end, days, jobs) else self._carried(end, days, jobs)
            if told and not sure:
                self.load[told] = much = begun, max(0.0, self._load(told, begun) + self.much)
                self.told.append((told, much))
            self.last = end, end, ratios, user, hard
        self.known = None
        return True

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
        step = first // STEP
        tally = Tally(self.grid, self.settings, *self.before[:2])
        tally._begin(self.marks[step], self.told)
        for place in range(step * STEP, len(self.items)):
            if place not in out:
                tally.add(self.items[place])
        return tally

    def replace(self, key: str, item: Item | None) -> bool:
        """Replace a job's item. False if that can't be done here."""
        items = self.items
        at = range(len(items) - 1, -1, -1)
        place = next((one for one in at if items[one].what == key and items[one].start is not None), None)
        if place is None or (item and item.end != items[place].end):
            return False
        step = place // STEP
        again = items[step * STEP : place] + ([item] if item else []) + items[place + 1 :]
        self._begin(self.marks[step], self.told)
        del items[step * STEP :], self.marks[step:]
        for one in again:
            self.add(one)
        return True

    def _begin(self, mark: Mark, told: list[Told]) -> None:
        """Go back to a mark. Items and marks are left to the caller."""
        self.last, self.before, length = mark
        self.known, self.ahead, self.told = None, None, told[:length]
        self.load = dict(self.told)

    def at(self, time: float, days: float, jobs: float) -> list[float]:
        """The probabilities at a later time; not yet adding up to 1."""
        found = self._carried(time, days, jobs)
        self.ahead = (time, days, jobs), found
        return found[0]

    def now(self) -> At:
        """After the last incident."""
        if self.known is None:
            begun, until, ratios, user, hard = self.last
            if not ratios:
                self.known = self.before
                return self.known
            levels, _, days, jobs = self.before
            self.share, self.much = share, much = 1.0, 0.0
            if user and not hard:
                good, all_of = levels[0], sum(levels)
                self.much = much = log((sum(map(mul, levels, ratios)) - good) / (all_of - good))
                if much > 0.02 or (much > 0.0 and user in self.load):
                    told = self._load(user, begun)
                    self.share = share = (_counted(told + much) - _counted(told)) / much
            if share != 1:  # a job whose word counts less is, as much less, one that the node let live
                drift, less = self.grid.drift, share - 1
                ratios = [one**share * exp(less * alive) for one, (_, _, alive) in zip(ratios, drift)]
            levels = list(map(mul, levels, ratios))
            total = sum(levels)
            self.known = [one / total for one in levels], until, days, jobs
        return self.known

    def _carried(self, time: float, days: float, jobs: float) -> At:
        """To a later time, through the days and jobs in between, in which nothing happened."""
        levels, since, past, had = self.known or self.now()
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

    def _load(self, user: str, time: float) -> float:
        """How much the user had told by then, of late."""
        if user not in self.load:
            return 0.0
        when, much = self.load[user]
        return much * float(2.0 ** ((when - time) / self.settings.same_user))

    def incidents(self) -> list[Group]:
        """What it is made of, by time."""
        if not self.items:
            return []
        tally = Tally(self.grid, self.settings, *self.marks[0][1][:2])
        found: list[Group] = []
        together: list[Item] = []
        for one in self.items:
            if together and not _same_incident(tally.last[1], one.start, one.end, one.hard, self.settings):
                found.append(tally._group(together))
                together = []
            together.append(one)
            tally.add(one)
        return [*found, tally._group(together)]

    def _group(self, items: list[Item]) -> Group:
        """The last incident, which is made of these."""

        def strength(item: Item) -> float:
            return max(item.ratios)

        self.now()
        strongest = max(items, key=strength)
        names = max((one for one in items if one.gpu is not None), key=strength, default=strongest)
        hard = any(one.hard for one in items)
        return Group(self.last[1], strongest.ratios, self.share, hard, names.gpu, strongest.what)


def _counted(told: float) -> float:
    """How much counts of what a user has told of a node, both as log likelihood ratios."""
    return -log((1 - OWN) * exp(-told) + OWN)


def _same_incident(until: float, start: float | None, end: float, hard: bool, s: Suspicion) -> bool:
    """An event belongs to the incident shortly before it; a job to the incident that ended it."""
    if start is None:
        return end - until <= s.storm
    if hard:
        return start - s.before <= until
    return start < until and end - until <= s.incident
