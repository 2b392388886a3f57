"""How often jobs fail by themselves where they are sent: partition, QOS, reservation, constraint.

Jobs are not sent at random: those of a debug partition fail more, on each of its nodes. So a node is compared with the
other nodes of the same context. Where there are none, what fails there is taken for usual: it can't be told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate.fleet import poisson_tail
from slurm_gpuhealth.correlate.weights import growth

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import AppState, State
    from slurm_gpuhealth.outcomes import Attempt

    Sums = MutableMapping[str, list[float]]

COLUMN = {"TIMEOUT": 2, "CANCELLED": 3}
NEITHER = ("COMPLETED", "PREEMPTED", "DEADLINE", "REQUEUED", "REVOKED", "BOOT_FAIL", "OUT_OF_MEMORY")
"""Ends that say nothing of a node, and are no failures by themselves."""
NONE = (0.0, 0.0, 0.0, 0.0)
MOST, MOST_OF_ALL = 32, 512
"""Contexts that are kept of a node and of an application, and of the fleet: those with the most runs of late."""
FEW = 8
"""A larger job says nothing of a single node."""
RUNS = 10.0
"""So many runs on other nodes tell as much of what is usual in a context as what its own nodes show."""
FIRST = 3.0
"""A context's rate begins as if so many of its runs had ended as often in that way as the fleet's."""

CHANCE = 0.001
"""So improbable are a context's failures on a node before it is told that nobody can tell."""


def of(attempt: Attempt) -> str:
    """ "" if it is not known where the attempt was sent."""
    if not (attempt.partition or attempt.qos or attempt.reservation or attempt.constraint):
        return ""
    return f"{attempt.partition}|{attempt.qos}|{attempt.reservation}|{attempt.constraint}"


def book(state: State, attempt: Attempt, where: str, unit: float) -> None:
    """Count an attempt in its context: the fleet's and, of a small job, its nodes'."""
    column = column_of(attempt.state)
    if where != _coarse(where):
        book(state, attempt, _coarse(where), unit)
    _add(state.fleet.contexts, where, unit, column, MOST_OF_ALL)
    if len(attempt.nodes) <= FEW:
        for name in attempt.nodes:
            _add(state.nodes[name].contexts, where, unit, column)


def run(app: AppState, where: str, unit: float) -> None:
    """Count a run of the application in that context."""
    _add(app.contexts, where, unit, 0)


def learn(app: AppState, attempt: Attempt, more: float) -> None:
    """An application's share in how an attempt ended has changed."""
    sums = app.contexts.get(of(attempt))
    if sums is not None:
        sums[column_of(attempt.state)] += more


def column_of(state: str) -> int:
    """Where an end of that kind is counted in a context's sums; 0: with the runs alone."""
    return COLUMN.get(state, 0 if state in NEITHER else 1)


def _add(sums: Sums, where: str, unit: float, column: int, most: int = MOST) -> None:
    known = sums.get(where)
    if known is None:
        if len(sums) >= most:  # a user can make up constraints
            del sums[min(sums, key=lambda one: sums[one][0])]
        known = sums[where] = [0.0, 0.0, 0.0, 0.0]
    known[0] += unit
    if column:
        known[column] += unit


def _coarse(where: str) -> str:
    """Without the constraint, which is the user's word."""
    return where[: where.rindex("|") + 1]


def rate(state: State, attempt: Attempt, where: str, column: int, mean: float, shrink: float) -> float:
    """How often jobs of that context end so on other nodes than the attempt's. `mean`: the whole fleet's rate;
    `shrink`: what a unit is worth now."""
    known = state.fleet.contexts.get(where, NONE)
    runs, ended = known[0] * shrink, known[column] * shrink
    apart_runs, apart_ended = apart(state, attempt.nodes, where, column, shrink)
    if apart_runs < RUNS and where != _coarse(where):
        return rate(state, attempt, _coarse(where), column, mean, shrink)
    elsewhere = (min(apart_ended, apart_runs) + FIRST * mean) / (apart_runs + FIRST)
    all_of = (min(ended, runs) + FIRST * mean) / (runs + FIRST)  # with the attempt: nobody knows yet what is usual
    known_apart = apart_runs / (apart_runs + RUNS)
    return known_apart * elsewhere + (1 - known_apart) * max(elsewhere, all_of)


def apart(state: State, nodes: Sequence[str], where: str, column: int, shrink: float) -> tuple[float, float]:
    """Runs of that context on other nodes, and how many ended so."""
    known = state.fleet.contexts.get(where, NONE)
    runs, ended = known[0] * shrink, known[column] * shrink
    if len(nodes) <= FEW:
        for name in nodes:
            node = state.nodes.get(name)
            known = node.contexts.get(where, NONE) if node else NONE
            runs, ended = runs - known[0] * shrink, ended - known[column] * shrink
    return max(0.0, runs), max(0.0, ended)


class Untold(NamedTuple):
    """A node on which far more jobs of a context fail than in the rest of the fleet; no other node runs such jobs."""

    node: str
    where: str
    runs: float
    failed: float
    expected: float


def untold(state: State, time: float, s: Suspicion) -> list[Untold]:
    """Where it can't be told whether a node or its users are at fault. All counts are decayed."""
    shrink = 1.0 / growth(time, s.half_life)
    whole = {where: sums for where, sums in state.fleet.contexts.items() if where == _coarse(where)}
    runs, failed = sum(one[0] for one in whole.values()), sum(one[1] for one in whole.values())
    usual = {
        where: (max(0.0, failed - ended) * shrink + RUNS * s.failing) / (max(0.0, runs - had) * shrink + RUNS)
        for where, (had, ended, *_) in whole.items()
    }
    found = []
    for name in state.nodes:
        for where, (had, ended, *_) in state.nodes[name].contexts.items():
            one = Untold(name, where, had * shrink, ended * shrink, had * shrink * usual.get(where, 1.0))
            if (
                one.failed >= FIRST
                and poisson_tail(int(one.failed), one.expected) < CHANCE
                and apart(state, (name,), where, 1, shrink)[0] < RUNS
            ):
                found.append(one)
    return sorted(found, key=lambda one: (one.expected - one.failed, one))


def words(where: str) -> str:
    """`partition debug, QOS high`."""
    labels = zip(("partition", "QOS", "reservation", "constraint"), where.split("|", 3))
    return ", ".join(f"{label} {value}" for label, value in labels if value)
