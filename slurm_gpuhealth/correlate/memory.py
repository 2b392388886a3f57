"""What a node remembers, and when it forgets: its events, repairs, tests, and the jobs that an event did not harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate import suspicion
from slurm_gpuhealth.correlate.state import EVENTS, RECORDS, SHORT, Incident, State
from slurm_gpuhealth.correlate.weights import DAY, growth, plain, same_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.correlate.state import AppState, NodeState
    from slurm_gpuhealth.outcomes import Attempt, Event

NODES = 4  # on which an application last completed, or failed
SHARED = "shared"  # the kind of an event that is its place's
SAME = 60.0  # seconds within which one event on one GPU is told once
HOPELESS = 0.002  # the nodes' share of the blame that not even a proven lemon, 200 times as bad, would raise to a half


def keep(node: NodeState, event: Event, kind: str, strength: float, horizon: float) -> bool:
    """Put an event in its place by time. False if it is there already, or from before the last repair."""
    time, code = event.time, f"{event.source} {event.code}"[:60]
    if time <= node.repaired:
        return False
    for place, one in enumerate(node.events):
        near = one.time - SAME <= time <= one.until + SAME
        if near and (one.code, one.gpu) == (code, event.gpu) and one.kind in (kind, SHARED):
            if one.time <= time <= one.until:
                return False
            node.events[place] = one._replace(time=min(one.time, time), until=max(one.until, time))
            node._quiet = max(one.until for one in node.events)
            return True
    node.events.append(Incident(time, time, event.gpu, kind, strength, code, node.days, node.jobs))
    if len(node.events) > 1 and node.events[-2].time >= time:
        node.events.sort(key=lambda one: (one.time, one.code, str(one.gpu)))
    if len(node.events) > EVENTS or node.events[0].until < time - 2 * horizon:
        node.events[:] = [one for one in node.events if one.until >= time - 2 * horizon][-EVENTS:]
    node._quiet = max((one.until for one in node.events), default=time)
    return True


def repair(node: NodeState, event: Event) -> None:
    """Forget the past of what was repaired: the whole node, or one GPU. The past of the GPU's slot stays."""
    if event.gpu is not None:
        gpu = plain(event.gpu)
        if event.time > node.changed.get(gpu, (0.0,))[0]:
            node.changed[gpu] = event.time, node.days, node.jobs
            node.slots.pop(gpu, None)
            node.changed = dict(sorted(node.changed.items(), key=lambda one: -one[1][0])[:16])
    elif event.time > node.repaired:
        node.repaired = event.time
        node.exposure = node.days = node.jobs = node.failing = node.judged = 0.0
        node.slots, node.full = {}, [0.0, 0.0]
        node.records = {key: one for key, one in node.records.items() if one.end > event.time}
        node.events = [one for one in node.events if one.until > event.time]
        node.tests = {level: one for level, one in node.tests.items() if one[0] > event.time}
    node.touched()


def spare(node: NodeState, least: float) -> list[Incident]:
    """Note which events did no harm: a job on their GPU went on, and completed. Returns the new ones."""
    found = []
    for place, one in enumerate(node.events):
        if one.kind != "hard" or one.spared:
            continue
        for start, end, gpus in node.completed:
            if start <= one.time <= end - least and same_gpu(one.gpu, gpus) is not False:
                node.events[place] = one._replace(spared=True)
                found.append(one)
                break
    return found


def prune(node: NodeState, time: float, horizon: float) -> None:
    """Forget attempts that say nothing, once no late event can come; then the least telling and oldest."""
    weighty, light = time - 2 * horizon, time - SHORT
    rows = [
        (one.hard or one.blame > HOPELESS, one.end, place, key)
        for place, (key, one) in enumerate(node.records.items())
        if one.end > (weighty if one.ratios else light)
    ]
    rows.sort()
    left = {key for _, _, _, key in rows[-RECORDS:]}
    gone = [one for key, one in node.records.items() if key not in left and one.ratios]
    if gone and node._tally and (any(one.hard for one in gone) or not suspicion.trifle(node._tally, gone)):
        node.touched()
    node.records = {key: one for key, one in node.records.items() if key in left}
    if node.cases:
        node.cases = {
            key: case
            for key, case in node.cases.items()
            if case.attempt.end > time - (horizon if case.blame > HOPELESS else SHORT)
        }
        if len(node.cases) > RECORDS:
            node.cases = dict(list(node.cases.items())[-RECORDS:])
    node._limit = max(32, len(left) + 16)


def mark(when: dict[str, float], nodes: Sequence[str], time: float) -> None:
    """Note the time of the first of `nodes`; the newest last, and no more than NODES."""
    for node in nodes[:NODES]:
        when.pop(node, None)
        when[node] = time
    while len(when) > NODES:
        del when[next(iter(when))]


def only_here(app: AppState, attempt: Attempt, ends: dict[str, float]) -> bool:
    """Whether the application, within a day, ended so (`ends`: node → when last) on no other node, and completed on one
    since it last did here."""
    (node, *others), time = attempt.nodes, attempt.end
    last = ends.get(node, time - DAY)
    elsewhere = others or any(one != node and when > time - DAY for one, when in ends.items())
    return not elsewhere and any(one != node and when > last for one, when in app.well.items())


def convert(state: State, half_life: float) -> None:
    """Sums in units of EPOCH depend on the half-life: if the settings have another one, convert them."""
    old, state.fleet.half_life = state.fleet.half_life, half_life
    if not old or old == half_life or not state.fleet.last:
        return
    factor = growth(state.fleet.last, half_life) / growth(state.fleet.last, old)
    for node in (state.nodes[name] for name in list(state.nodes)):
        node.touched()
        node.exposure, node.failing = node.exposure * factor, node.failing * factor
        node.contexts = _scaled(node.contexts, factor)
    for app in (state.applications[name] for name in list(state.applications)):
        app.runs, app.failed, app.expected = app.runs * factor, app.failed * factor, app.expected * factor
        app.cut, app.contexts = {word: one * factor for word, one in app.cut.items()}, _scaled(app.contexts, factor)
    all_of = state.fleet
    for name in ("runs", "failed", "exposure", "unexplained"):
        setattr(all_of, name, getattr(all_of, name) * factor)
    all_of.kinds = {kind: one * factor for kind, one in all_of.kinds.items()}
    all_of.lived = {code: one * factor for code, one in all_of.lived.items()}
    all_of.cut = {word: one * factor for word, one in all_of.cut.items()}
    all_of.contexts = _scaled(all_of.contexts, factor)


def _scaled(contexts: dict[str, list[float]], factor: float) -> dict[str, list[float]]:
    return {where: [one * factor for one in sums] for where, sums in contexts.items()}
