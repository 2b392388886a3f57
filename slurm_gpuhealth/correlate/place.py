"""Hard events that come at once on several nodes of a rack, a PDU, a chassis or a leaf switch: the place's, not theirs.

A rack whose power browns out loses a few GPUs at a time, each time on others of its nodes. So many nodes at once, more
than chance explains, make a ticket for the place; its nodes' events of these moments count against no node.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate.fleet import poisson_tail
from slurm_gpuhealth.correlate.memory import SHARED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slurm_gpuhealth.correlate.state import FleetState, NodeState, State

AT_ONCE = 120.0
"""Seconds."""
ANYWHERE = ""
"""Nodes that no known place has in common."""
ONE = 3600.0
"""What a node reports again within these seconds belongs to its first event."""
CHANCE = 1e-4
MOST = 2000
"""Events."""
LEAST = 4
"""In a smaller place, nodes that fail together may all be bad."""
END = "\U0010ffff"


class Shared(NamedTuple):
    """Moments at which several nodes of a place had hard events."""

    place: str
    moments: tuple[tuple[float, tuple[str, ...]], ...]
    """Time of the first event, and the nodes."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({node for _, nodes in self.moments for node in nodes}))


class Places(NamedTuple):
    of: Mapping[str, Sequence[str]]
    """Node → its places."""
    nodes: Mapping[str, Sequence[str]]
    """Place → its nodes."""


def places(*tables: Mapping[str, Sequence[str]]) -> Places:
    nodes = {place: tuple(names) for table in tables for place, names in table.items()}
    of: dict[str, list[str]] = {}
    for place, names in nodes.items():
        for name in names:
            of.setdefault(name, []).append(place)
    return Places(of, nodes)


def remember(everywhere: FleetState, time: float, node: str, horizon: float) -> None:
    hard = everywhere.hard
    at = bisect_left(hard, [time - ONE, ""])
    if any(one[1] == node for one in hard[at : bisect_right(hard, [time + ONE, END])]):
        return
    insort(hard, [time, node])
    del hard[: bisect_left(hard, [min(hard[-1][0], everywhere.last + horizon) - horizon, ""])]
    del hard[:-MOST]


def forgive(state: State, known: Places, time: float, node: str, horizon: float) -> list[tuple[str, float]]:
    """Take the events of bad places' moments from their nodes. Returns the nodes that had such, and when."""
    found = []
    for one in _shared(state.fleet, known, time, node, horizon):
        for moment, names in one.moments:
            found += [(name, moment) for name in names if _taken(state.node(name), moment)]
    return found


def _taken(node: NodeState, moment: float) -> bool:
    found = False
    for at, one in enumerate(node.events):
        if one.kind == "hard" and abs(one.time - moment) <= AT_ONCE:
            node.events[at], found = one._replace(kind=SHARED), True
    if found:
        node.touched()
    return found


def _shared(everywhere: FleetState, known: Places, time: float, node: str, horizon: float) -> Iterable[Shared]:
    """The places of `node` that its event of that time shows to be bad."""
    hard = everywhere.hard
    at = {one[1] for one in hard[bisect_left(hard, [time - AT_ONCE, ""]) : bisect_right(hard, [time + AT_ONCE, END])]}
    if len(at) < 2:
        return
    for place in (*known.of.get(node, ()), ANYWHERE):
        if one := _look(everywhere, known, place, horizon):
            yield one
            return


def all_shared(state: State, known: Places, time: float, horizon: float) -> list[Shared]:
    """Every place that is bad at that time, those with the most moments first. A moment that a known place explains
    needs no unknown one."""
    some = sorted({place for _, node in state.fleet.hard for place in known.of.get(node, ())})
    found = [one for place in some if (one := _look(state.fleet, known, place, horizon))]
    explained = [when for one in found for when, _ in one.moments]
    anywhere = _look(state.fleet, known, ANYWHERE, horizon)
    if anywhere:
        left = [one for one in anywhere.moments if not any(abs(one[0] - when) <= AT_ONCE for when in explained)]
        found += [anywhere._replace(moments=tuple(left))] if left else []
    return sorted((one for one in found if one.moments[-1][0] >= time - horizon), key=lambda one: -len(one.moments))


def _look(everywhere: FleetState, known: Places, place: str, horizon: float) -> Shared | None:
    mine = frozenset(known.nodes[place]) if place != ANYWHERE else None
    events = [(time, node) for time, node in everywhere.hard if mine is None or node in mine]
    moments: list[tuple[float, list[str]]] = []
    for time, node in events:
        if moments and time - moments[-1][0] <= AT_ONCE:
            moments[-1][1].append(node)
        else:
            moments.append((time, [node]))
    at_once = [(time, tuple(nodes)) for time, nodes in moments if len(nodes) > 1]
    beside = sum(len(nodes) - 1 for _, nodes in at_once)
    expected = len(events) ** 2 * AT_ONCE / horizon
    if not at_once or poisson_tail(beside, expected) > CHANCE or (mine is not None and len(mine) < LEAST):
        return None
    found = Shared(place, tuple(at_once))
    largest = max(len(nodes) for _, nodes in at_once)
    if len(at_once) > 1 and len(found.nodes) <= largest < 3:
        return None  # the same two each time: one may harm the other
    if place == ANYWHERE and sum(len(nodes) > 2 for _, nodes in at_once) < 2:
        return None  # once may be a maintenance
    return found
