"""How a correlator does on the small worlds: which bad nodes it finds, which good nodes it would take out of service,
and which failed jobs it puts down to a good node.

A bad node counts as found if L2 or a deeper rung is asked for it on some day on which it is bad, or within 7 days
after. A good node counts as wronged if L3 or a deeper rung is asked for it on any day on which it is not bad, nor was
within 7 days before. A job counts as put down to a good node if its last verdict is `node`, the node that it names
was not bad when the job ended (or it names none, and none of the job's was), and this is not the truth.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slurm_gpuhealth.outcomes import Event
from slurm_gpuhealth.simulate.worlds import every
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.outcomes import Attempt, Suspicion, Verdict
    from slurm_gpuhealth.simulate.worlds.world import Bad

    Each = Callable[[Iterator[Any]], Iterable[Any]]
    Asked = Mapping[str, Sequence[tuple[float, Suspicion]]]
    """Node → on which days a rung was due."""

LIGHT, DEEP = ("L2", "L3", "L4", "RMA"), ("L3", "L4", "RMA")
AFTER = 7 * DAY
BARS = {"found": 0.85, "wronged": 1 / 60, "blamed": 0.005}
"""At least; at most, for each world; at most."""


class Judge(Protocol):
    """What is scored; slurm_gpuhealth.correlate.engine.Correlator is one."""

    def event(self, event: Event) -> None: ...
    def attempt(self, attempt: Attempt) -> Verdict | None: ...
    def suspicions(self, time: float, above: float = 0.05) -> list[Suspicion]: ...
    def rescored(self) -> list[Verdict]: ...


class Score(NamedTuple):
    """Of one world."""

    name: str
    seed: int
    attempts: int
    failed: int
    """Attempts that did not complete."""
    bad: Mapping[str, float | None]
    """Bad node, since its day → days from then until it was found; None: not found."""
    deep: int
    """Bad nodes for which L3 or a deeper rung was asked for while they were bad, or within 7 days after."""
    gpus: Mapping[str, bool]
    """Bad node of which single GPUs are bad → whether one of them had the largest share when it was last asked for."""
    wronged: Mapping[str, str]
    """Good node → the deepest rung that was asked for."""
    blamed: int
    """Failed jobs put down to a good node."""
    verdicts: Mapping[tuple[str, str], int]
    """True cause, verdict → attempts."""
    right: int
    """Verdicts that are accepted."""


class Summary(NamedTuple):
    """Of many worlds."""

    worlds: int
    bad: int
    found: int
    deep: int
    days: float
    """From a bad node's first day to its first rung: the median."""
    gpus: int
    gpus_right: int
    wronged: int
    failed: int
    blamed: int
    right: int
    verdicts: Mapping[tuple[str, str], int]

    def short(self) -> list[str]:
        """The bars that are not reached."""
        return [
            name
            for name, ok in (
                ("found", self.found >= BARS["found"] * self.bad),
                ("wronged", self.wronged <= max(1.0, BARS["wronged"] * self.worlds)),
                ("blamed", self.blamed <= BARS["blamed"] * self.failed),
            )
            if not ok
        ]


def run(names: Sequence[str], seeds: Sequence[int] = (1,), each: Each = iter) -> list[Score]:
    """All these worlds, with one process per core. `each` sees each result as it comes."""
    asked = [(name, seed) for name in names for seed in seeds]
    workers = min(len(asked), len(os.sched_getaffinity(0)))
    if workers < 2:
        return list(each(starmap(one, asked)))
    with ProcessPoolExecutor(workers) as pool:
        return list(each(pool.map(one, *zip(*asked), chunksize=1)))


def one(name: str, seed: int) -> Score:
    from slurm_gpuhealth.config.settings import Suspicion as Settings
    from slurm_gpuhealth.correlate.engine import Correlator

    made = every.build(name, seed)
    return judge(
        name, seed, made, Correlator(Settings(), made.leaves, explained=False, places=made.places), Settings().after
    )


def judge(name: str, seed: int, made: World, correlator: Judge, after: float) -> Score:
    """Feeds the world in the order of time, as `gpuhealth replay` does, and asks for all suspicions once a day."""
    last: dict[tuple[int, int], Verdict] = {}
    asked: dict[str, list[tuple[float, Suspicion]]] = {}

    def ask(when: float) -> None:
        last.update(((said.job, said.attempt), said) for said in correlator.rescored())
        for suspect in correlator.suspicions(when):
            if suspect.rung:
                asked.setdefault(suspect.node, []).append((when, suspect))

    day = EPOCH + DAY
    for when, item in merged(made, after):
        while when >= day:
            ask(day)
            day += DAY
        if isinstance(item, Event):
            correlator.event(item)
        elif verdict := correlator.attempt(item):
            last[verdict.job, verdict.attempt] = verdict
    ask(day)
    truth = made.truth
    told: Counter[tuple[str, str]] = Counter(
        (truth[key].cause, last[key].cause if key in last else "none") for key in truth
    )
    return Score(
        name,
        seed,
        len(made.attempts),
        len(truth),
        dict(_until_asked(made, asked, LIGHT)),
        sum(day is not None for _, day in _until_asked(made, asked, DEEP)),
        dict(_gpus(made, asked)),
        dict(_wronged(made, asked)),
        sum(_put_down(made, attempt, last.get((attempt.job, attempt.attempt))) for attempt in made.attempts),
        told,
        sum(last[key].cause in truth[key].accepted for key in truth if key in last),
    )


def summary(scores: Iterable[Score]) -> Summary:
    some = list(scores)
    days = sorted(day for score in some for day in score.bad.values() if day is not None)
    verdicts: Counter[tuple[str, str]] = Counter()
    for score in some:
        verdicts.update(score.verdicts)
    return Summary(
        len(some),
        sum(len(score.bad) for score in some),
        len(days),
        sum(score.deep for score in some),
        days[len(days) // 2] if days else float("nan"),
        sum(len(score.gpus) for score in some),
        sum(sum(score.gpus.values()) for score in some),
        sum(len(score.wronged) for score in some),
        sum(score.failed for score in some),
        sum(score.blamed for score in some),
        sum(score.right for score in some),
        dict(sorted(verdicts.items())),
    )


def merged(made: World, after: float) -> Iterator[tuple[float, Attempt | Event]]:
    """Attempts when the time has passed in which an event may still be theirs; an event of the same time first."""
    both: list[tuple[float, int, Attempt | Event]] = [(one.time, 0, one) for one in made.events]
    both += [(one.end + after, 1, one) for one in made.attempts]
    for when, _, item in sorted(both, key=lambda one: one[:2]):
        yield when, item


def _until_asked(made: World, asked: Asked, rungs: Sequence[str]) -> Iterator[tuple[str, float | None]]:
    for bad in made.bad:
        times = [when for when, one in _while(bad, asked) if one.rung in rungs]
        day = (bad.since - EPOCH) / DAY
        yield f"{bad.node}, day {day:.0f}", (times[0] - bad.since) / DAY if times else None


def _while(bad: Bad, asked: Asked) -> list[tuple[float, Suspicion]]:
    return [(when, one) for when, one in asked.get(bad.node, ()) if bad.since <= when <= bad.until + AFTER]


def _gpus(made: World, asked: Asked) -> Iterator[tuple[str, bool]]:
    for bad in made.bad:
        if bad.gpus:
            said = _while(bad, asked)
            shares = said[-1][1].gpus if said else {}
            likeliest = max(shares, key=shares.__getitem__, default=None)
            yield bad.node, likeliest in {name for gpu in bad.gpus for name in gpu}


def _wronged(made: World, asked: Asked) -> Iterator[tuple[str, str]]:
    for node, said in asked.items():
        rungs = [one.rung for when, one in said if one.rung in DEEP and not made.is_bad(node, when, AFTER)]
        if rungs:
            yield node, max(rungs, key=DEEP.index)


def _put_down(made: World, attempt: Attempt, verdict: Verdict | None) -> bool:
    if verdict is None or verdict.cause != "node":
        return False
    truth = made.truth[attempt.job, attempt.attempt]
    if truth.node is not None and verdict.node in (truth.node, None):
        return False
    named = (verdict.node,) if verdict.node else attempt.nodes
    return not any(made.is_bad(node, attempt.end) for node in named)
