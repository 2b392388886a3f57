"""Runs a correlator through a simulated world and records what it says about jobs and nodes, and when."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slurm_gpuhealth.outcomes import Attempt, Event
from slurm_gpuhealth.simulate.cases import DAY
from slurm_gpuhealth.simulate.world import EPOCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_gpuhealth.outcomes import Suspicion, Verdict
    from slurm_gpuhealth.simulate.world import World

LOOK = 3600.0
"""How often the nodes of failed jobs and of events are judged, in seconds."""
SAMPLE = 2 * DAY
"""How often all nodes are judged, for the calibration."""


class Judge(Protocol):
    """What is watched; slurm_gpuhealth.correlate.engine.Correlator is one."""

    def event(self, event: Event) -> None: ...
    def attempt(self, attempt: Attempt) -> Verdict | None: ...
    def suspicion(self, node: str, time: float) -> Suspicion: ...
    def suspicions(self, time: float, above: float = 0.05) -> list[Suspicion]: ...
    def rescored(self) -> list[Verdict]: ...


class Watched(NamedTuple):
    first: dict[tuple[int, int], Verdict]
    last: dict[tuple[int, int], Verdict]
    """The first judgement, and the one after everything that came later."""
    start: float
    """p_lemon of a node about which nothing is known."""
    looks: dict[str, list[tuple[float, float, bool]]]
    """Node → (time, p_lemon, whether something had happened to it)."""
    peaks: dict[str, float]
    """Node → the highest p_lemon of these."""
    sampled: list[tuple[float, str, float]]
    """p_lemon, node, time: of all nodes."""
    rungs: list[tuple[float, str, str, bool]]
    """Time, node, its new rung, whether there was hard evidence."""

    def flags(self, threshold: float) -> Iterator[tuple[float, str]]:
        """A node starts afresh after it was flagged, as with the rivals: from then on only new evidence counts."""
        start, limit = _odds(self.start), _odds(threshold)
        for node, looks in self.looks.items():
            if self.peaks[node] <= threshold:
                continue
            lowest = 0.0  # since it was flagged
            for when, p, touched in looks:
                if not lowest and (p <= threshold or not touched):  # most are
                    continue
                odds = _odds(p)
                anew = start * odds / lowest if lowest else odds
                if touched and anew > limit:
                    lowest = odds
                    yield when, node
                elif lowest:
                    lowest = min(lowest, odds)


def _odds(p: float) -> float:
    return max(1e-9, p) / max(1e-9, 1 - p)


def watch(world: World, judge: Judge) -> Watched:
    seen = Watched({}, {}, judge.suspicion("", EPOCH).p_lemon, defaultdict(list), defaultdict(float), [], [])
    touched: set[str] = set()
    due: dict[str, str] = {}
    look, sample = EPOCH + LOOK, EPOCH + SAMPLE
    for when, item in world.stream:
        while when >= look:
            _look(judge, seen, touched, due, look, round((look - EPOCH) / LOOK) % 6 == 0)
            look += LOOK
        if when >= sample:
            seen.sampled.extend((judge.suspicion(node, when).p_lemon, node, when) for node in _nodes(world))
            sample += SAMPLE
        if isinstance(item, Event):
            judge.event(item)
            touched.add(item.node)
            continue
        verdict = judge.attempt(item)
        if verdict:
            touched.update(item.nodes)
            seen.first.setdefault((item.job, item.attempt), verdict)
            seen.last[item.job, item.attempt] = verdict
    _look(judge, seen, touched, due, look, True)
    return seen


def _nodes(world: World) -> Iterator[str]:
    for nodes in world.leaves.values():
        yield from nodes


def _look(judge: Judge, seen: Watched, touched: set[str], due: dict[str, str], when: float, fleet: bool) -> None:
    for verdict in judge.rescored():
        seen.last[verdict.job, verdict.attempt] = verdict
    for node in touched:
        p = judge.suspicion(node, when).p_lemon
        seen.looks[node].append((when, p, True))
        seen.peaks[node] = max(seen.peaks[node], p)
    if fleet:  # four times a day: which rungs are due, and what has decayed
        now = {}
        for one in judge.suspicions(when, 0.02):
            if one.node not in touched:
                seen.looks[one.node].append((when, one.p_lemon, False))
            now[one.node] = one.rung
            if one.rung and due.get(one.node) != one.rung:
                seen.rungs.append((when, one.node, one.rung, bool(one.hard or "fail" in one.last_test)))
        due.clear()
        due.update(now)
    touched.clear()
