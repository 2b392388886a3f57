"""Simple policies that ours is measured against: each is a function from the reports to the nodes it would drain.

A node starts afresh after it was flagged. The stream has tuples (time of the report, attempt or event).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING

from slurm_gpuhealth.outcomes import Attempt
from slurm_gpuhealth.simulate.cases import DAY, HARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from slurm_gpuhealth.outcomes import Event

    Stream = Iterable[tuple[float, Attempt | Event]]
    Flags = Iterator[tuple[float, str]]

FAILED = ("FAILED", "NODE_FAIL")
MONTH = 28 * DAY


def any_failure(stream: Stream) -> Flags:
    """Each node of each failed job."""
    return _failures(stream)


def failures_in_a_day(stream: Stream) -> Flags:
    """Three failed jobs within a day."""
    return _repeated(_failures(stream), 3, DAY)


def _failure_rate(window: float, deviations: float, stream: Stream) -> Flags:
    """So many more of the node's jobs failed within the window than at the fleet's rate, in standard deviations."""
    of: dict[str, deque[tuple[float, bool]]] = defaultdict(deque)
    all_runs = all_failed = 0
    for when, item in stream:
        if not isinstance(item, Attempt):
            continue
        failed = item.state in FAILED
        all_runs, all_failed = all_runs + 1, all_failed + failed
        rate = (all_failed + 3) / (all_runs + 20)
        for node in item.nodes:
            runs = of[node]
            runs.append((when, failed))
            if not failed:
                continue
            while runs[0][0] < when - window:
                runs.popleft()
            mean = len(runs) * rate
            if len(runs) >= 5 and sum(bad for _, bad in runs) > mean + deviations * math.sqrt(mean * (1 - rate)):
                runs.clear()
                yield when, node


def one_xid(stream: Stream) -> Flags:
    """Each Xid of broken hardware."""
    return _xids(stream)


def two_xids(stream: Stream) -> Flags:
    """Two Xids of broken hardware within 28 days."""
    return _repeated(_xids(stream), 2, MONTH)


def any_node_fail(stream: Stream) -> Flags:
    """Each node that Slurm says failed."""
    for when, item in stream:
        if isinstance(item, Attempt) and item.state == "NODE_FAIL":
            for node in _failed(item):
                yield when, node


def _lemon_rule(needed: int, xids: int, stream: Stream) -> Flags:
    """Counts over 28 days as in Meta's study (arXiv 2410.21680), with those of its seven signals that a scheduler has.

    The paper prints no thresholds. Both sets of thresholds here are near the best that such counts can reach.
    """
    seen: dict[str, deque[tuple[float, str]]] = defaultdict(deque)
    for when, item in stream:
        nodes: tuple[str, ...] = ()
        if isinstance(item, Attempt):
            if item.state == "NODE_FAIL":
                nodes, what = _failed(item), "single" if len(item.nodes) == 1 else "multi"
        elif item.source == "xid" and item.code in HARD:
            nodes, what = (item.node,), "xid"
        for node in nodes:
            of = seen[node]
            of.append((when, what))
            while of[0][0] < when - MONTH:
                of.popleft()
            count = {key: sum(one == key for _, one in of) for key in ("xid", "single", "multi")}
            out = count["single"] + count["multi"]
            signals = count["xid"] >= xids, count["xid"] > xids, count["single"] >= 1, count["multi"] >= 1, out >= 2
            if sum(signals) >= needed:
                of.clear()
                yield when, node


def _repeated(flags: Flags, times: int, window: float) -> Flags:
    seen: dict[str, list[float]] = defaultdict(list)
    for when, node in flags:
        recent = [one for one in seen[node] if one > when - window] + [when]
        if len(recent) >= times:
            recent = []
            yield when, node
        seen[node] = recent


def _failures(stream: Stream) -> Flags:
    for when, item in stream:
        if isinstance(item, Attempt) and item.state in FAILED:
            for node in item.nodes:
                yield when, node


def _xids(stream: Stream) -> Flags:
    for when, item in stream:
        if not isinstance(item, Attempt) and item.source == "xid" and item.code in HARD:
            yield when, item.node


def _failed(attempt: Attempt) -> tuple[str, ...]:
    if attempt.failed_node:
        return (attempt.failed_node,)
    return attempt.nodes if len(attempt.nodes) == 1 else ()


RIVALS: dict[str, Callable[[Stream], Flags]] = {
    "any failure": any_failure,
    "3 failures in 1 d": failures_in_a_day,
    "failure rate z>3": partial(_failure_rate, 14 * DAY, 3),
    "failures z>4 in 28 d": partial(_failure_rate, MONTH, 4),
    "1 hard Xid": one_xid,
    "2 hard Xids in 28 d": two_xids,
    "any NODE_FAIL": any_node_fail,
    "lemon rule 2 of 5": partial(_lemon_rule, 2, 1),
    "lemon rule 3 of 5": partial(_lemon_rule, 3, 1),
    "strict rule 2 of 5": partial(_lemon_rule, 2, 2),
    "strict rule 3 of 5": partial(_lemon_rule, 3, 2),
}
PUBLISHED = tuple(name for name in RIVALS if " rule " in name)
"""The lemon rule of the published study, in four forms."""
