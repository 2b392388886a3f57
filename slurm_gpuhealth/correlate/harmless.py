"""How harmless an event's code is on this cluster: jobs that held the GPU ran on through it, and completed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate import memory
from slurm_gpuhealth.correlate.weights import growth

if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import FleetState, NodeState, State

LUCKY = 2.0
"""So many jobs may have run on by luck."""
LESS = 0.7
"""A code is weighed anew when it is worth so much less."""


def learn(state: State, node: NodeState, s: Suspicion) -> None:
    """Note which of the node's events did no harm, and weigh their codes by that, on all nodes."""
    spared = memory.spare(node, s.spared)
    if not spared:
        return
    node.touched()
    lived = state.fleet.lived
    for one in spared:
        lived[one.code] = lived.get(one.code, 0.0) + growth(one.time, s.half_life)
    for code in {one.code for one in spared}:
        before, now = state.fleet.worths.get(code, 1.0), _worth(rate(state.fleet, code, s), s)
        if now < before * LESS:
            state.fleet.worths[code] = now
            _weigh_anew(state, code, now / before)


def _weigh_anew(state: State, code: str, factor: float) -> None:
    for name in list(state.nodes):
        node = state.nodes[name]
        for place, one in enumerate(node.events):
            if one.code == code and one.kind == "hard":
                node.events[place] = one._replace(strength=one.strength * factor)
                node.touched()


def rate(fleet: FleetState, code: str, s: Suspicion) -> float:
    """How often an event of this code comes without harm, a day in jobs of a node."""
    lived = fleet.lived.get(code, 0.0)
    if not lived or fleet.exposure <= 0:
        return s.benign
    return s.benign + max(0.0, lived - growth(fleet.last, s.half_life) * LUCKY) / fleet.exposure


def _worth(benign: float, s: Suspicion) -> float:
    """How much an event says of a node that comes `benign` times a day without harm, over one as rare as the settings
    have it."""
    worst, good = (s.seen_by_xid * one for one in (max(s.hazards), s.hazards[0]))
    return math.log((benign + worst) / (benign + good)) / math.log((s.benign + worst) / (s.benign + good))
