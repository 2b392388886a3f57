"""One bad GPU of eight: each GPU of a node by itself, from the jobs that held some of the node's GPUs and not all.

What completes on the other seven says nothing of the eighth. A GPU's evidence are the failures of jobs that held it and
the events that name it; its time without failure is that of these jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate import suspicion
from slurm_gpuhealth.correlate.tally import BY_END, Tally
from slurm_gpuhealth.correlate.weights import plain

if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import NodeState, Record
    from slurm_gpuhealth.correlate.tally import Item
    from slurm_gpuhealth.correlate.weights import Grid


class Slot(NamedTuple):
    gpu: str
    levels: list[float]
    alone: bool
    """If a single GPU of the node is bad, it is this one with a probability of two thirds or more."""


def worst(node: NodeState, time: float, grid: Grid, s: Suspicion) -> Slot | None:
    """The node's most suspicious GPU, if jobs have shown them apart."""
    narrow = [one for one in node.records.values() if one.gpus and len(one.gpus) < node.width and one.ratios]
    if len(narrow) < 2 or not node.slots:
        return None
    named = {plain(gpu): str(gpu) for one in narrow for gpu in one.gpus or ()}
    found = [(_slot(node, gpu, time, grid, s), gpu) for gpu in sorted(named.keys() & node.slots.keys())]
    if not found:
        return None
    found.sort(key=lambda one: one[0][0])
    levels, gpu = found[0]
    first, *others = ((1 - one[0]) / max(one[0], 1e-12) for one, _ in found)
    return Slot(named[gpu], levels, first >= 2 * sum(others))


def _slot(node: NodeState, gpu: str, time: float, grid: Grid, s: Suspicion) -> list[float]:
    days, jobs = node.slots[gpu]
    days, jobs = days + node.full[0], jobs + node.full[1]
    by_days, by_jobs = days / max(node.days, 1e-9), jobs / max(node.jobs, 1e-9)
    prior = suspicion.prior(node, grid, s)
    bad = [one / max(1, node.width) for one in prior[1:]]
    tally = Tally(grid, s, [1 - sum(bad), *bad], node.repaired or node.since)
    for item in sorted(_items(node, gpu, by_days, by_jobs, grid, s), key=BY_END):
        tally.add(item)
    levels = tally.at(time, days, jobs)
    total = sum(levels)
    return [one / total for one in levels]


def _items(node: NodeState, gpu: str, by_days: float, by_jobs: float, grid: Grid, s: Suspicion) -> list[Item]:
    """What speaks of that GPU, with the days and jobs that it had by then."""
    records = {
        key: _of_gpu(one, node.width, s)
        for key, one in node.records.items()
        if one.gpus and one.end > suspicion.forgotten(node, gpu) and gpu in map(plain, one.gpus)
    }
    found = [suspicion.item_of(one, key) for key, one in records.items()]
    found += [one for one in suspicion.events(node, grid, s, None) if one.gpu is not None and plain(one.gpu) == gpu]
    return [one._replace(days=one.days * by_days, jobs=one.jobs * by_jobs) for one in found if one]


def _of_gpu(record: Record, width: int, s: Suspicion) -> Record:
    """What the record says of one of its GPUs: the node's hazard was divided among all of the node's GPUs."""
    more = width / len(record.gpus or (0,))
    ratios = tuple(min(s.most, max(0.01, 1 + (one - 1) * more)) for one in record.ratios or ())
    return record._replace(ratios=ratios or None)
