"""How good a policy is on clusters whose true faults are known: which lemons it finds, which good nodes it drains,
and whether its probabilities are right.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.outcomes import Attempt
from slurm_gpuhealth.simulate import texts
from slurm_gpuhealth.simulate.cases import DAY
from slurm_gpuhealth.simulate.rivals import RIVALS
from slurm_gpuhealth.simulate.watch import Watched, watch
from slurm_gpuhealth.simulate.world import World, make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.outcomes import Event
    from slurm_gpuhealth.simulate.cases import Case

    Each = Callable[[Iterator[Any]], Iterable[Any]]

OURS = "ours"
THRESHOLDS = tuple(step / 100 for step in (0.2, 0.4, 0.6, 1, 2, 3, 4, 5, 6, 8, *range(10, 100, 2), 95, 99))
POLICIES = (*RIVALS, OURS)
ONE_OFF = 14 * DAY
"""A flag within this time after a true fault of a good node is a one-off: a test was right, a repair would not be."""
MINUTE = 60.0
"""A fault's Xid comes some seconds before its job ends."""
EDGES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Result(NamedTuple):
    """One policy over all seeds. Only lemons that failed at least one job count."""

    policy: str
    precision: float
    """Lemons found, divided by lemons found plus wrong flags."""
    recall: float
    clean: float
    """Flags per 1000 node-days on nodes without a fault in 14 days: good nodes wrongly drained."""
    one_off: float
    """The same for good nodes that did have a fault."""
    days: float
    """From a lemon's first failed job to its flag, on average over those found."""
    suffered: float
    """Jobs failed by then."""
    avoided: float
    """Share of the lemons' failed jobs that came after their flag."""


class Bin(NamedTuple):
    """Predictions with about the same probability."""

    number: int
    said: float
    true: float


class Calibration(NamedTuple):
    bins: tuple[Bin, ...]
    brier: float
    error: float
    """Expected calibration error: |said - true| over all bins, by their counts."""
    error_above: float
    """The same for predictions of at least .05: most nodes are at 0, which is easy to predict."""


class Report(NamedTuple):
    seeds: int
    attempts: int
    results: tuple[Result, ...]
    verdicts: Mapping[str, Mapping[str, int]]
    """True cause → verdict → number of attempts, by the last judgement."""
    right: float
    """Share of the failures with an accepted verdict."""
    right_node: float
    """Share of the `node` verdicts that name the guilty node."""
    calibration: Mapping[str, Calibration]
    """`suspicion`: p_lemon; `verdict`: confidence; `node`: the first verdict's probability for the node."""
    rungs: Mapping[str, float]
    """Rungs due on nodes that are not lemons, per 1000 node-days; `RMA soft`: without hard evidence, and so on."""


def run(
    case: Case, seeds: Sequence[int], policies: Sequence[str] = POLICIES, logs: bool = False, each: Each = iter
) -> Report:
    """All policies over the worlds of these seeds, with one process per core. `each` sees each result as it comes."""
    one = partial(seed, case, tuple(policies), logs)
    workers = min(len(seeds), len(os.sched_getaffinity(0)))
    if workers < 2:
        return report(each(map(one, seeds)))
    with ProcessPoolExecutor(workers) as pool:
        return report(each(pool.map(one, seeds)))


def seed(case: Case, policies: tuple[str, ...], logs: bool, number: int) -> Counter[tuple[str, ...]]:
    """All counts of one world; the counts of several worlds can be added."""
    world = make(case, number)
    counted: Counter[tuple[str, ...]] = Counter()
    counted["seeds",] += 1
    counted["attempts",] += sum(isinstance(item, Attempt) for _, item in world.stream)
    for name in policies:
        if name != OURS:
            _flags(counted, world, name, RIVALS[name](world.stream))
    if OURS in policies:
        from slurm_gpuhealth.config.settings import Suspicion
        from slurm_gpuhealth.correlate.engine import Correlator

        if logs:
            world = world._replace(stream=[(when, _told(item)) for when, item in world.stream])
        count_ours(counted, world, watch(world, Correlator(Suspicion(), world.leaves)))
    return counted


def count_ours(counted: Counter[tuple[str, ...]], world: World, watched: Watched) -> None:
    for threshold in THRESHOLDS:
        _flags(counted, world, f"{OURS} p>{threshold:.{2 if threshold >= 0.01 else 3}f}", watched.flags(threshold))
    for said, node, when in watched.sampled:
        _predict(counted, "suspicion", said, world.lemon(node, when))
    for key, verdict in watched.last.items():
        truth = world.truth.get(key)
        if truth is None:
            continue
        counted["verdict", truth.cause, verdict.cause] += 1
        counted["right",] += verdict.cause in truth.accepted
        counted["node named",] += verdict.cause == "node"
        named = verdict.cause == "node" and truth.node is not None and verdict.node == truth.node
        counted["node right",] += named
        if truth.cause != "user" and verdict.cause != "unknown":
            _predict(counted, "verdict", verdict.confidence, verdict.cause in truth.accepted)
        if truth.cause != "user":
            _predict(counted, "node", watched.first[key].masses.get("node", 0.0), truth.cause == "node")
    for when, node, rung, hard in watched.rungs:
        if not world.lemon(node, when):
            fault = any(when - 2 * ONE_OFF < at <= when for at, _ in world.faults.get(node, ()))
            counted["rung", f"{rung} {'hard' if hard else 'one-off' if fault else 'soft'}"] += 1


def behind(found: Report, rival: str) -> float:
    """How far our best threshold is behind a rival, in precision or recall, whichever is worse. Below 0: ahead."""
    other = next(one for one in found.results if one.policy == rival)
    ours = [one for one in found.results if one.policy.startswith(OURS)]
    if math.isnan(other.precision):
        return -1.0  # it flags nothing
    worse = [max(other.precision - one.precision, other.recall - one.recall) for one in ours]
    return min((one for one in worse if not math.isnan(one)), default=math.nan)


def report(counts: Iterable[Counter[tuple[str, ...]]]) -> Report:
    total: Counter[tuple[str, ...]] = Counter()
    for one in counts:
        total.update(one)
    names = [key[1] for key in total if key[0] == "node days"]
    verdicts: dict[str, dict[str, int]] = {}
    for key, number in sorted(total.items()):
        if key[0] == "verdict":
            verdicts.setdefault(key[1], {})[key[2]] = number
    failures = sum(sum(row.values()) for row in verdicts.values())
    node_days = max((total["node days", name] for name in names), default=0) / 1000
    return Report(
        total["seeds",],
        total["attempts",],
        tuple(_result(total, name) for name in names),
        verdicts,
        _share(total["right",], failures),
        _share(total["node right",], total["node named",]),
        {what: _calibration(total, what) for what in ("suspicion", "verdict", "node")},
        {key[1]: number / node_days for key, number in sorted(total.items()) if key[0] == "rung"},
    )


def _told(item: Attempt | Event) -> Attempt | Event:
    return item._replace(reading=None, log=texts.text(item)) if isinstance(item, Attempt) else item


def _flags(counted: Counter[tuple[str, ...]], world: World, policy: str, flags: Iterable[tuple[float, str]]) -> None:
    found: dict[str, float] = {}
    for when, node in flags:
        if world.lemon(node, when):
            found.setdefault(node, when)
        elif any(when - ONE_OFF < at < when + MINUTE for at, _ in world.faults.get(node, ())):
            counted["one-off", policy] += 1
        else:
            counted["clean", policy] += 1
    counted["node days", policy] += round(world.case.nodes * world.case.days)
    for node, faults in world.faults.items():
        times = sorted(at for at, lemon in faults if lemon)
        if not times:
            continue
        counted["lemons", policy] += 1
        counted["failed", policy] += len(times)
        if node in found:
            counted["found", policy] += 1
            counted["seconds", policy] += round(found[node] - times[0])
            counted["suffered", policy] += bisect_right(times, found[node])
            counted["avoided", policy] += len(times) - bisect_right(times, found[node])


def _predict(counted: Counter[tuple[str, ...]], what: str, said: float, true: bool) -> None:
    at = str(min(bisect_left(EDGES, said), len(EDGES) - 1))
    counted["bin", what, at, "count"] += 1
    counted["bin", what, at, "true"] += true
    counted["bin", what, at, "said"] += said  # type: ignore[assignment]
    counted["bin", what, at, "brier"] += (said - true) ** 2  # type: ignore[assignment]


def _result(total: Counter[tuple[str, ...]], policy: str) -> Result:
    def of(key: str) -> int:
        return total[key, policy]

    thousand = of("node days") / 1000
    return Result(
        policy,
        _share(of("found"), of("found") + of("clean") + of("one-off")),
        _share(of("found"), of("lemons")),
        _share(of("clean"), thousand),
        _share(of("one-off"), thousand),
        _share(of("seconds") / DAY, of("found")),
        _share(of("suffered"), of("found")),
        _share(of("avoided"), of("failed")),
    )


def _calibration(total: Counter[tuple[str, ...]], what: str) -> Calibration:
    bins, brier = [], 0.0
    for at in range(len(EDGES)):
        count, said, true, square = (total["bin", what, str(at), key] for key in ("count", "said", "true", "brier"))
        bins.append(Bin(count, _share(said, count), _share(true, count)))
        brier += square
    return Calibration(
        tuple(bins),
        _share(brier, sum(one.number for one in bins)),
        _error(bins),
        _error(bins[bisect_right(EDGES, 0.05) :]),
    )


def _error(bins: Sequence[Bin]) -> float:
    apart = sum(one.number * abs(one.said - one.true) for one in bins if one.number)
    return _share(apart, sum(one.number for one in bins))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
