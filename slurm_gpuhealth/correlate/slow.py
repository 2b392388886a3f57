"""Which GPUs are slower than the same model elsewhere, from the figures of tests. Pure.

A figure is compared with figures of the same name, GPU model and version of the tool: another version may count in
another way. The newest values of the fleet fall into crowds, apart by a gap; a partition with a power cap is a crowd of
its own. A GPU is judged by its own crowd, or if it is in none by the next better one. It is slow if its last two values
are both worse than that crowd's median by more than the spread explains. But GPUs that are slow alike on many nodes, or
all GPUs of several nodes, are another kind of nodes.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeVar

    Item = TypeVar("Item")

LEAST_GPUS = 8
LEAST_NODES = 5
"""A crowd counts if it has so many GPUs on so many other nodes than the judged GPU's."""
GAP = 0.05
"""Neighbouring values further apart than this share are in different crowds."""
LEAST = 0.05
"""A GPU that is nearer to the median than this share is not slow, however small the spread: values may be identical."""
SPREAD = 5 * 1.4826
"""How many median absolute deviations are the spread: five standard deviations, if the values were normal."""
TINY, HUGE = 1e-12, 1e12
"""Values beyond are nonsense, and would overflow."""
MORE = {"GFLOPS": 1.0, "TFLOPS": 1e3, "GB/s": 1.0, "MB/s": 1e-3, "TB/s": 1e3, "GiB/s": 1.073741824, "Gb/s": 0.125}
LESS = {"us": 1.0, "ms": 1e3, "ns": 1e-3, "s": 1e6}
"""Units of which more, or less, is better, and their size in GFLOPS, GB/s and us. Others (W, C) are not compared."""


class Measured(NamedTuple):
    """One figure of one GPU."""

    node: str
    uuid: str
    """Empty: the node's own figure."""
    gpu: int | None
    model: str
    name: str
    value: float
    unit: str
    time: float
    version: str


class Slow(NamedTuple):
    """A GPU that is slow by this figure; `value` and `median` in its unit."""

    node: str
    uuid: str
    gpu: int | None
    model: str
    name: str
    value: float
    unit: str
    median: float
    time: float

    @property
    def percent(self) -> int:
        """How far from the median: -21, or for a latency +40."""
        return round(100 * (self.value / self.median - 1))


class Crowd(NamedTuple):
    """Values that lie together; more is better."""

    best: float
    middle: float
    least: float
    """Below it a GPU is slow."""
    size: int
    gpus: Counter[str]
    """How many GPUs of each node are in it."""

    def counts_for(self, node: str) -> bool:
        """Whether it is large enough to judge a GPU of this node."""
        here = self.gpus[node]
        return self.size - here >= LEAST_GPUS and len(self.gpus) - bool(here) >= LEAST_NODES


def compare(figures: Iterable[Measured]) -> list[Slow]:
    """The slow GPUs, worst first; one row for each figure."""
    groups: dict[tuple[str, ...], dict[str, list[Measured]]] = {}
    for one in figures:
        kind = "more" if one.unit in MORE else "less"
        if (one.unit in MORE or one.unit in LESS) and TINY < one.value < HUGE:
            group = groups.setdefault((one.name, one.model, one.version, kind), {})
            group.setdefault(one.uuid or f"node {one.node}", []).append(one)
    found = [slow for group in groups.values() for slow in _slow(list(group.values()))]
    return sorted(found, key=lambda one: (-abs(one.percent), one.node, one.gpu or 0, one.name))


def _slow(gpus: Sequence[Sequence[Measured]]) -> Iterator[Slow]:
    """The slow ones of a group: each item has one GPU's values."""
    histories = [sorted(one, key=lambda each: each.time)[-2:] for one in gpus]
    crowds = [_crowd(part) for part in _apart((_good(one[-1]), one[-1].node) for one in histories)]
    judged: Counter[str] = Counter()
    found: list[tuple[float, Slow]] = []
    for history in histories:
        last = history[-1]
        if len(history) < 2 or history[0].time == last.time:
            continue
        judged[last.node] += 1
        # Its own crowd, else the next better one.
        crowd = next((one for one in crowds if _good(last) <= one.best and one.counts_for(last.node)), None)
        if crowd and all(_good(one) < crowd.least for one in history):
            size = MORE.get(last.unit) or LESS[last.unit]
            shown = crowd.middle / size if last.unit in MORE else 1 / crowd.middle / size
            found.append((_good(last), Slow(*last[:7], shown, last.time)))
    for part in _apart(found):
        yield from _no_partition([slow for _, slow in part], judged)


def _no_partition(alike: Sequence[Slow], judged: Counter[str]) -> Iterator[Slow]:
    """Those of GPUs that are slow alike that are no partition with a power cap, which a single value between may have
    joined to a better crowd: not GPUs of as many nodes as make a crowd, nor all GPUs of several nodes."""
    nodes = Counter(one.node for one in alike)
    whole = {node for node, number in nodes.items() if number == judged[node] > 1}
    if len(nodes) <= LEAST_NODES:
        yield from (one for one in alike if len(whole) < 2 or one.node not in whole)


def _good(one: Measured) -> float:
    """The value in the unit of its kind, and so that more is better."""
    return one.value * MORE[one.unit] if one.unit in MORE else 1 / (one.value * LESS[one.unit])


def _apart(values: Iterable[tuple[float, Item]]) -> list[list[tuple[float, Item]]]:
    """The values in parts with gaps between them, ascending."""
    parts: list[list[tuple[float, Item]]] = []
    for one in sorted(values, key=lambda one: one[0]):
        if not parts or one[0] > parts[-1][-1][0] * (1 + GAP):
            parts.append([])
        parts[-1].append(one)
    return parts


def _crowd(part: Sequence[tuple[float, str]]) -> Crowd:
    values = [value for value, _ in part]
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    least = middle - max(LEAST * middle, SPREAD * spread)
    return Crowd(values[-1], middle, least, len(values), Counter(node for _, node in part))
