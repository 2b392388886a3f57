"""How harmless an event's code is on this cluster: jobs that held the GPU ran on through it, and completed.

A single node, or somebody whose jobs hide their errors, must not teach it: each node teaches a code once a day, three
nodes are needed, and what says that a GPU is gone is never taken for harmless.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate import memory
from slurm_gpuhealth.correlate.weights import DAY, GONE, growth, same_gpu

if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import FleetState, Incident, NodeState, State

LUCKY = 2.0
"""So many jobs may have run on by luck."""
LESS = 0.7
"""A code is weighed anew on all nodes when it is worth so much less."""
TEACHERS = 3
"""Nodes."""
NEVER = frozenset((*(f"xid {code}" for code in (48, 79, 95)), *(f"nvml {code}" for code in GONE)))


def learn(state: State, name: str, s: Suspicion) -> None:
    """Note which events of that node did no harm, and weigh their codes by that, on all nodes."""
    node = state.node(name)
    spared = memory.spare(node, s.spared)
    if not spared:
        return
    node.touched()
    for one in spared:
        day = int(one.time / DAY)
        if one.code in NEVER or node.taught.get(one.code) == day or not _held(node, one):
            continue
        node.taught[one.code] = day
        state.fleet.lived[one.code] = state.fleet.lived.get(one.code, 0.0) + growth(one.time, s.half_life)
        teachers = state.fleet.teachers.setdefault(one.code, [])
        if name not in teachers and len(teachers) < TEACHERS:
            teachers.append(name)
        _reconsider(state, one.code, s)


def _held(node: NodeState, event: Incident) -> bool:
    """Whether a job that completed held the event's GPU: it names it, or held all. A record without GPUs can't tell."""
    return any(
        start <= event.time <= end and (gpus is None or same_gpu(event.gpu, gpus) or len(gpus) >= node.width)
        for start, end, gpus in node.completed
    )


def _reconsider(state: State, code: str, s: Suspicion) -> None:
    before, now = state.fleet.worths.get(code, 1.0), worth(state.fleet, code, s)
    if now >= before * LESS:
        return
    state.fleet.worths[code] = now
    for name in list(state.nodes):
        node = state.nodes[name]
        for place, one in enumerate(node.events):
            if one.code == code and one.kind == "hard":
                node.events[place] = one._replace(strength=one.strength * now / before)
                node.touched()


def rate(fleet: FleetState, code: str, s: Suspicion) -> float:
    """How often an event of this code comes without harm, a day in jobs of a node."""
    lived = fleet.lived.get(code, 0.0)
    if not lived or fleet.exposure <= 0 or len(fleet.teachers.get(code, ())) < TEACHERS:
        return s.benign
    return s.benign + max(0.0, lived - growth(fleet.last, s.half_life) * LUCKY) / fleet.exposure


def worth(fleet: FleetState, code: str, s: Suspicion) -> float:
    """How much an event of this code says of a node, over one that is as rarely harmless as the settings have it."""
    benign = rate(fleet, code, s)
    worst, good = (s.seen_by_xid * one for one in (max(s.hazards), s.hazards[0]))
    return math.log((benign + worst) / (benign + good)) / math.log((s.benign + worst) / (s.benign + good))
