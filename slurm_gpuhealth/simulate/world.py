"""Some weeks of a cluster: which jobs ran where, which failed and why, and what is reported of it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from itertools import count
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.simulate import load, signs
from slurm_gpuhealth.simulate.cases import DAY, Case, Lemon
from slurm_gpuhealth.simulate.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from slurm_gpuhealth.outcomes import Attempt, Event
    from slurm_gpuhealth.simulate.load import Job

EPOCH = 1_750_000_000.0
PEEK = 50
"""So many waiting jobs are tried when something becomes free, as Slurm's backfill does."""


class Truth(NamedTuple):
    """The true cause of an attempt that did not complete."""

    job: int
    attempt: int
    cause: str
    accepted: tuple[str, ...]
    """The causes that count as right if a judge names them."""
    node: str | None = None
    gpu: int | None = None
    lemon: bool = False


class World(NamedTuple):
    case: Case
    seed: int
    leaves: Mapping[str, Sequence[str]]
    stream: list[tuple[float, Attempt | Event]]
    """What is reported, in order: attempts at their end, events when they arrive."""
    truth: dict[tuple[int, int], Truth]
    lemons: tuple[Lemon, ...]
    faults: dict[str, list[tuple[float, bool]]]
    """Node → when it really killed a job, and whether as a lemon."""

    def lemon(self, node: str, time: float) -> bool:
        return any(one.since <= time < one.until and name(one.node) == node for one in self.lemons)


def name(node: int) -> str:
    return f"gpu{node:04d}"


def make(case: Case, seed: int) -> World:
    """The same seed, the same world."""
    return _Weeks(case, seed).run()


class _Weeks:
    """The clock: jobs arrive and start where there is room; how they end is drawn when they start."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed, self.rng = case, seed, Random(seed)  # noqa: S311 - a simulation must be repeatable
        rng = self.rng
        self.end = EPOCH + case.days * DAY
        spread = 0.5
        self.rate = [case.fault_rate / DAY * rng.lognormvariate(0, spread) for _ in range(case.nodes)]
        self.lemons = _lemons(case, rng, self.end)
        self.bad: dict[int, list[Lemon]] = {}
        for lemon in self.lemons:
            self.bad.setdefault(lemon.node, []).append(lemon)
        self.pins = _pins(case, self.lemons, rng)
        self.jobs = load.jobs(case, rng, EPOCH, self.end, self.pins)
        self.cluster = Cluster(case.nodes, case.pod, case.gpus, self.pins, rng)
        self.names = [name(node) for node in range(case.nodes)]
        self.outages = _outages(case, rng, self.end)
        self.storms = sorted(_times(rng, case.storms / DAY, self.end))
        self.signs = signs.Signs(case, rng, self.names, self.end)
        self.truth: dict[tuple[int, int], Truth] = {}
        self.faults: dict[str, list[tuple[float, bool]]] = {}
        self.told: list[tuple[float, int, Attempt | Event]] = []
        self.turn = count()

    def run(self) -> World:
        waiting: deque[tuple[Job, int]] = deque()
        running: list[tuple[float, int, dict[int, tuple[int, ...]], tuple[Job, int] | None]] = []
        arriving = iter(self.jobs)
        nxt = next(arriving, None)
        while nxt or running:
            if nxt and (not running or nxt.submit <= running[0][0]):
                now = nxt.submit
                waiting.append((nxt, 0))
                nxt = next(arriving, None)
                fresh = len(waiting) - 1
            else:
                now, _, freed, again = heapq.heappop(running)
                self.cluster.give(freed)
                if again:
                    waiting.appendleft(again)
                fresh = 0
            if now >= self.end:
                break
            for job, attempt in self._startable(waiting, fresh):
                got = self.cluster.take(job.nodes, job.gpus, job.node)
                if got is None:
                    continue
                taken = dict(sorted(got.items()))  # as Slurm lists them
                waiting.remove((job, attempt))
                until, requeued = self._live(job, attempt, taken, now)
                heapq.heappush(
                    running, (until, next(self.turn), taken, (job, attempt + 1) if requeued and attempt < 3 else None)
                )
        self.told += [(when, next(self.turn), event) for when, event in self.signs.beside(self.lemons)]
        leaves = {f"leaf{at // self.case.pod:02d}": self.names[at : at + self.case.pod] for at in self._pods()}
        stream = [(when, item) for when, _, item in sorted(self.told, key=lambda one: one[:2]) if when < self.end]
        return World(self.case, self.seed, leaves, stream, self.truth, self.lemons, self.faults)

    def _pods(self) -> range:
        return range(0, self.case.nodes, self.case.pod)

    @staticmethod
    def _startable(waiting: deque[tuple[Job, int]], fresh: int) -> list[tuple[Job, int]]:
        """Which jobs may start now: only the one that just arrived, or the first waiting ones."""
        if fresh:
            return [waiting[-1]]
        return [waiting[at] for at in range(min(PEEK, len(waiting)))]

    def _live(self, job: Job, attempt: int, taken: dict[int, tuple[int, ...]], start: float) -> tuple[float, bool]:
        """Draws how the attempt ends and reports it. Returns when its nodes are free, and if it is requeued."""
        fates = [
            (start + job.seconds, "done", -1, None),
            self._node_fault(taken, start, start + job.seconds),
            self._outage(taken, start, start + job.seconds),
            self._storm(start, start + job.seconds),
            self._own(job, start),
        ]
        end, cause, node, lemon = min(fates, key=lambda fate: fate[0])
        sign = self.signs.of(job, attempt, taken, start, end, cause, node, lemon)
        for when, item in sign.told:
            self.told.append((when, next(self.turn), item))
        if cause != "done":
            known = self.names[node] if node >= 0 and cause == "node" else None
            self.truth[job.id, attempt] = Truth(
                job.id, attempt, ACCEPTED[cause][0], ACCEPTED[cause], known, sign.gpu, lemon is not None
            )
            if known:
                self.faults.setdefault(known, []).append((end, lemon is not None))
        lost = sign.state == "NODE_FAIL"
        return sign.attempt_end + (self.rng.uniform(600, 3600) if lost else 5), lost

    def _node_fault(
        self, taken: dict[int, tuple[int, ...]], start: float, end: float
    ) -> tuple[float, str, int, Lemon | None]:
        rng, gpus = self.rng, self.case.gpus
        weights = [self.rate[node] * len(held) / gpus for node, held in taken.items()]
        when = start + rng.expovariate(sum(weights))
        first: tuple[float, str, int, Lemon | None] = (math.inf, "node", -1, None)
        if when < end:
            first = (when, "node", rng.choices(list(taken), weights)[0], None)
        if self.bad.keys().isdisjoint(taken) or len(taken) < self.case.large:
            return first
        for node in taken.keys() & self.bad.keys():
            for lemon in self.bad[node]:
                if lemon.gpu is not None and lemon.gpu not in taken[node]:
                    continue
                when = max(start, lemon.since) + rng.expovariate(lemon.rate)
                if when < min(end, lemon.until, first[0]):
                    first = (when, "node", node, lemon)
        return first

    def _outage(
        self, taken: dict[int, tuple[int, ...]], start: float, end: float
    ) -> tuple[float, str, int, Lemon | None]:
        if len(taken) > 1:
            for when, pod in self.outages:
                if start < when < end and any(node // self.case.pod == pod for node in taken):
                    return when + self.rng.uniform(0, 60), "fabric", -1, None
        return math.inf, "fabric", -1, None

    def _storm(self, start: float, end: float) -> tuple[float, str, int, Lemon | None]:
        for when in self.storms:
            if start < when < end and self.rng.random() < 1 / 3:
                return when + self.rng.uniform(0, 240), "infrastructure", -1, None
        return math.inf, "infrastructure", -1, None

    def _own(self, job: Job, start: float) -> tuple[float, str, int, Lemon | None]:
        """Failures caused by the application, its image or its user."""
        rng, day = self.rng, self.case.image_day
        if day is not None and 0 <= start - EPOCH - day * DAY < DAY / 2 and rng.random() < 0.5:
            return start + rng.uniform(5, 60), "image", -1, None
        if rng.random() < job.failing:
            # Aegis (NSDI'25): three quarters of what fails does so in its first ten minutes.
            early = rng.expovariate(1 / 240) + 10
            after = early if rng.random() < 0.6 and early < job.seconds else rng.random() * job.seconds
            return start + after, "application", -1, None
        if rng.random() < self.case.ended:
            return start + rng.random() * job.seconds, "user", -1, None
        return math.inf, "user", -1, None


ACCEPTED = {
    "node": ("node",),
    "fabric": ("fabric",),
    "infrastructure": ("infrastructure",),
    "application": ("application",),
    "image": ("application", "infrastructure"),
    "user": ("user",),
}


def _lemons(case: Case, rng: Random, end: float) -> tuple[Lemon, ...]:
    found = []
    nodes = rng.sample(range(case.nodes), round(case.lemons * case.nodes))
    for node in sorted(nodes):
        since = EPOCH + rng.random() * case.days * DAY
        rate = case.lemon_rate / DAY * rng.lognormvariate(0, 0.7)
        gpu = rng.randrange(case.gpus) if case.one_gpu else None
        until = end
        if rng.random() < case.repaired:
            repaired = since + rng.expovariate(1 / (10 * DAY))
            # A repair that does not help: the lemon goes on (in InfiniteHBD's trace 26 % fault again within 7 days).
            until = min(end, repaired) if rng.random() > 1 / 3 else end
            found.append(Lemon(node, since, min(end, repaired), rate, gpu))
            if until == end and repaired < end:
                found.append(Lemon(node, repaired, end, rate, gpu))
            continue
        found.append(Lemon(node, since, until, rate, gpu))
    return tuple(found)


def _pins(case: Case, lemons: tuple[Lemon, ...], rng: Random) -> list[int]:
    if not case.pinned:
        return []
    good = sorted(set(range(case.nodes)) - {lemon.node for lemon in lemons})
    return [*(lemon.node for lemon in lemons[:1]), *rng.sample(good, case.pinned - len(lemons[:1]))]


def _outages(case: Case, rng: Random, end: float) -> list[tuple[float, int]]:
    found = []
    for pod in range((case.nodes + case.pod - 1) // case.pod):
        for when in _times(rng, case.leaf_rate / DAY, end):
            found += [(when + rng.random() * 2 * DAY * (nth > 0), pod) for nth in range(case.leaf_repeats)]
    return sorted(found)


def _times(rng: Random, rate: float, end: float) -> Iterator[float]:
    when = EPOCH
    while rate and (when := when + rng.expovariate(rate)) < end:
        yield when
