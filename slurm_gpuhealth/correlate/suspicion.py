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
    from slurm_gpuhealth.correlate.state import Incident, NodeState, Weights
    from slurm_gpuhealth.correlate.weights import Grid
    from slurm_gpuhealth.settings import Suspicion

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
    if not without and node._cache and abs(node._cache[0] - time) < s.incident:
        return node._cache[1]
    logs = list(_prior(node, time, grid, s))
    shrink = 1.0 / growth(time, grid.half_life)
    days, starts = node.exposure * shrink, node.starts * shrink
    good = grid.hazard[0]
    for level in grid.bad:
        logs[level] += grid.survive[level] * starts - (grid.hazard[level] - good) * days
    for group in groups(node, grid, s, without):
        worth = group.share * 2.0 ** (-abs(time - group.until) / grid.half_life)
        for level in grid.bad:
            logs[level] += worth * group.weights[level]
    tested = _tests(node, time, grid, s)
    for level in grid.bad:
        logs[level] += tested
    highest = max(logs)
    weights = [math.exp(one - highest) for one in logs]
    total = sum(weights)
    found = [one / total for one in weights]
    if not without:
        node._cache = (time, found)
    return found


def hazard(found: list[float], grid: Grid) -> float:
    """Failures a day, as expected of a node of these levels."""
    return sum(weight * one for weight, one in zip(found, grid.hazard))


def _prior(node: NodeState, time: float, grid: Grid, s: Suspicion) -> Iterator[float]:
    """A node fresh from a repair fails again sooner than others do: no prior of a good one."""
    latest = max((node.repaired, *node.changed.values()))
    if not latest or not 0 <= time - latest < s.repaired_for:
        yield from grid.prior
        return
    bad = 1 - math.exp(grid.prior[0])
    yield math.log(1 - s.repaired)
    yield from (one + math.log(s.repaired / bad) for one in grid.prior[1:])


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


def groups(node: NodeState, grid: Grid, s: Suspicion, without: Without | None = None) -> list[Group]:
    """The node's incidents, by time."""
    if not without and node._groups is not None:
        return node._groups
    found: list[Group] = []
    for start, end, weights, user, hard, gpu, what in sorted(_items(node, grid, without), key=lambda one: one[1::5]):
        last = found[-1] if found else None
        if last and _same_incident(last, start, end, hard, what, s):
            stronger = max(weights) > max(last.weights)
            found[-1] = last._replace(
                until=max(last.until, end),
                weights=weights if stronger else last.weights,
                user=user if stronger and user else last.user,
                hard=last.hard or hard,
                gpu=last.gpu if last.gpu is not None else gpu,
                what=what if stronger else last.what,
            )
        else:
            found.append(Group(end, end, weights, 1.0, user, hard, gpu, what))
    found = _by_user(found, s)
    if not without:
        node._groups = found
    return found


def _same_incident(last: Group, start: float | None, end: float, hard: bool, what: str, s: Suspicion) -> bool:
    """An event joins what came shortly before; a job that already ran then, what ended it, or what it has claimed."""
    if start is None:
        return end - last.until <= s.storm
    return start - s.before <= last.until and (end - last.until <= s.incident or hard)


def _by_user(found: list[Group], s: Suspicion) -> list[Group]:
    load: dict[str, tuple[float, float]] = {}
    counted = []
    for group in found:
        if group.user and not group.hard:
            when, much = load.get(group.user, (group.time, 0.0))
            much *= 2.0 ** (-(group.time - when) / s.same_user)
            load[group.user] = (group.time, much + 1)
            group = group._replace(share=0.5**much)
        counted.append(group)
    return counted


def _items(
    node: NodeState, grid: Grid, without: Without | None
) -> Iterator[tuple[float | None, float, Weights, str, bool, GpuName | None, str]]:
    for key, record in node.records.items():
        if record.weights and record.end > node.repaired and (without is None or key != without.key):
            yield record.start, record.end, record.weights, record.user, record.hard, None, key
    weak: dict[str, list[float]] = {}
    for event in node.events:
        if event.kind not in ("hard", "weak", "link") or event.time <= forgotten(node, event.gpu):
            continue
        if without and event.time <= without.end and event.until >= without.start:
            continue
        strength = event.strength
        if event.kind != "hard":
            earlier = weak.setdefault(f"{event.gpu}", [])
            earlier[:] = [one for one in earlier if event.time - one < REPEATED]
            earlier += [event.time] if not earlier or event.time - earlier[-1] > 3600 else []
            strength = max(strength, 0.7) if len(earlier) >= 3 else strength
        hard = event.kind == "hard" or strength >= 0.7
        yield None, event.time, tuple(strength * one for one in grid.seen), "", hard, event.gpu, event.code


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
