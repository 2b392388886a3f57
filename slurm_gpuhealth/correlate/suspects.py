"""Which nodes of the fleet are suspects, and the rung that is due for each."""

from __future__ import annotations

import math
import time as clock
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate import fleet, slots, suspicion
from slurm_gpuhealth.correlate.state import State
from slurm_gpuhealth.correlate.verdict import STATES
from slurm_gpuhealth.correlate.weights import COLUMNS, DAY, grid, growth
from slurm_gpuhealth.outcomes import Suspicion

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slurm_gpuhealth.config import settings
    from slurm_gpuhealth.correlate.state import FleetState, NodeState, Record

STRONG = 0.5  # of a hard event: jobs here do not run on through it all the time
TIED = 0.5  # so much of the evidence names a GPU by itself
WAVE = 0.05  # more of the fleet than this is not suspected by its own fault
WAVE_LEAST = 4
SPANS = (1, 3, 7, 28)  # days in which failures that no program explains may have come together


NOTHING = State()


def suspicions(
    state: State, time: float, above: float, s: settings.Suspicion, among: Iterable[str] | None = None
) -> list[Suspicion]:
    """All nodes whose p_lemon is above `above`, the worst first. `among`: looks at these only."""
    found: list[Suspicion] = []
    chances: dict[str, float] = {}
    every = len(state.nodes)
    for name in state.nodes if among is None else among:
        node = state.nodes.get(name)
        if node is None:
            continue
        # A node without evidence of its own is at its prior, or below.
        if not node.records and not node.events and not node.tests and not node.repaired and not node.changed:
            continue
        levels = suspicion.levels(node, time, grid(s), s)
        slot = slots.worst(node, time, grid(s), s)
        if slot and slot.levels[0] < levels[0]:
            levels = slot.levels
        if 1 - levels[0] > above:
            levels = _without_hangs(node, levels, time, s)
            cluster = _cluster(node, time, state, s)
            one = _suspicion(name, node, levels, cluster, time, s)
            if slot and slot.alone and 1 - slot.levels[0] >= s.l2 and max(one.gpus.values(), default=0.0) < TIED:
                one = one._replace(gpus={slot.gpu: 1.0})
            found.append(one)
            chances[name] = cluster.chance
    sure = fleet.discoveries(chances, every, s.false_discoveries)
    soft = [one for one in found if one.p_lemon >= s.l3 and not one.hard]
    wave = len(soft) > max(WAVE_LEAST, WAVE * every)
    ranked = [_with_rung(one, state, one.node in sure, wave, time, s) for one in found]
    return sorted(ranked, key=lambda one: (-one.p_lemon, one.node))


def _without_hangs(node: NodeState, levels: list[float], time: float, s: settings.Suspicion) -> list[float]:
    """Whoever cancels jobs, or lets them run into their limit, could accuse a node: that takes several users."""
    users = {one.user for one in node.records.values() if one.hung and one.ratios}
    if not 0 < len(users) < s.clusters:
        return levels
    rest = {key: one for key, one in node.records.items() if not one.hung}
    without = suspicion.levels(replace(node, records=rest, _tally=None), time, grid(s), s)
    return max(levels, without, key=lambda one: one[0])


def of(name: str, node: NodeState, time: float, s: settings.Suspicion, state: State = NOTHING) -> Suspicion:
    """The suspicion of one node, without its rung: that depends on the whole fleet."""
    levels = suspicion.levels(node, time, grid(s), s)
    return _suspicion(name, node, levels, _cluster(node, time, state, s), time, s)


def _suspicion(
    name: str, node: NodeState, levels: list[float], cluster: Cluster, time: float, s: settings.Suspicion
) -> Suspicion:
    g = grid(s)
    groups = suspicion.groups(node, g, s)
    shrink = 1.0 / growth(time, s.half_life)
    blamed = [one for one in node.records.values() if one.blame >= 0.1]
    alone = [one for one in groups if one.hard and one.what not in node.records]
    observed = sum(one.blame * 2.0 ** (-abs(time - one.end) / s.half_life) for one in node.records.values())
    observed += sum(2.0 ** (-abs(time - one.until) / s.half_life) for one in alone)
    expected = node.exposure * shrink * g.hazard[0]
    hard = _hard(node, time, s)
    return Suspicion(
        node=name,
        time=time,
        p_lemon=1 - levels[0],
        hazard_per_day=suspicion.hazard(levels, g),
        observed=observed,
        expected=expected,
        users=len({one.user for one in blamed}),
        applications=len({one.application for one in blamed}),
        hard=hard,
        last_test=_last_test(node),
        gpus=suspicion.tied(groups, time, g),
        terms=(
            f"{observed:.1f} failures are its{_without_jobs(len(alone))}; a good node would have had {expected:.1f}",
            *_terms(node, blamed, hard, cluster, s),
        ),
    )


def _without_jobs(count: int) -> str:
    """The events that killed no job: they count no user and no application."""
    return f" ({count} of them seen by the node itself, no job died of it)" if count else ""


def _hard(node: NodeState, time: float, s: settings.Suspicion) -> int:
    since = time - s.horizon
    events = [one for one in node.events if one.kind == "hard" and one.until >= since and one.strength >= STRONG]
    events = [one for one in events if one.time > suspicion.forgotten(node, one.gpu)]
    failed = [when for when, passed in node.tests.values() if not passed and when >= since and when > node.repaired]
    return len(events) + len(failed)


def _last_test(node: NodeState) -> str:
    if not node.tests:
        return ""
    level, (when, passed) = max(node.tests.items(), key=lambda one: one[1][0])
    return f"L{level} {'pass' if passed else 'fail'} {clock.strftime('%Y-%m-%d', clock.gmtime(when))}"


def _unexplained(node: NodeState, time: float, state: State, s: settings.Suspicion) -> Iterator[tuple[Record, bool]]:
    """Failures for which the node has most of the blame, and whether their logs speak of hardware. Left out: failures
    that the program itself explains, and jobs that Slurm or the user ended."""
    for key, one in node.records.items():
        if one.end >= time - s.horizon and one.blame >= 0.5:
            home = state.nodes.get(one.home)
            case = home.cases.get(key) if home else None
            if case is None or (case.kind != "application" and case.attempt.state not in STATES):
                yield one, bool(case and case.kind == "hardware")


class Cluster(NamedTuple):
    """Failures of different applications that no log explains, on one node within some days."""

    chance: float
    """P(so many applications fail there, or more), if the node is good."""
    applications: int
    expected: float


def _cluster(node: NodeState, time: float, state: State, s: settings.Suspicion) -> Cluster:
    """The most telling of SPANS up to the newest failure; that each was looked at makes it less telling.

    A past in which the node was good, and failures that their own logs explain, are no excuse. Failures whose logs
    speak of hardware are also looked at by themselves: programs rarely leave such logs.
    """
    told = sorted(_unexplained(node, time, state, s), key=lambda one: one[0].end)
    best = Cluster(1.0, len({one.application for one, _ in told}), 0.0)
    g, usual = grid(s), _usual(node, time, state.fleet, s)
    rare = g.rows["hardware"][COLUMNS.index("application")] / g.programs
    for rate, failed in ((usual, [one for one, _ in told]), (usual * rare, [one for one, hard in told if hard])):
        for span in SPANS if failed else ():
            first: dict[str, float] = {}  # application → jobs that the node had had by its first failure in the span
            for one in failed:
                if one.end > failed[-1].end - span * DAY:
                    first.setdefault(one.application, one.jobs)
            count, expected = len(first), (max(first.values()) - min(first.values())) * rate
            # The stretch begins with a failure: it is those after it that are counted.
            chance = min(1.0, len(SPANS) * fleet.poisson_tail(count - 1, expected))
            best = min(best, Cluster(chance, count, expected))
    return best


def _usual(node: NodeState, time: float, everywhere: FleetState, s: settings.Suspicion) -> float:
    """How many failures that no log explains to expect of each of the node's jobs."""
    age = max(1.0, time - node.since)
    decayed = s.half_life / math.log(2) * -math.expm1(-age / s.half_life * math.log(2)) / age
    a_job = node.failing / growth(time, s.half_life) / max(1.0, node.jobs * decayed)
    share = min(1.0, everywhere.unexplained / everywhere.failed) if everywhere.failed > 0 else 1.0
    return a_job * share + node.days / max(1.0, node.jobs) * s.hazards[0]


def _terms(node: NodeState, blamed: list[Record], hard: int, cluster: Cluster, s: settings.Suspicion) -> list[str]:
    said = []
    if blamed:
        users, apps = {one.user for one in blamed}, {one.application for one in blamed}
        said.append(f"it is blamed for {len(blamed)} failed jobs of {len(users)} users and {len(apps)} applications")
    if cluster.chance < 0.05:
        usual, chance = f"{cluster.expected:.1f}", f"{cluster.chance:.1g}"
        said.append(f"{cluster.applications} applications failed here unexplained; {usual} expected (chance {chance})")
    if hard:
        said.append(f"{hard} hard events of its own in {s.horizon / 86400:.0f} days")
    if node.tests:
        said.append(f"last test: {_last_test(node)}")
    return said


def _with_rung(one: Suspicion, state: State, sure: bool, wave: bool, time: float, s: settings.Suspicion) -> Suspicion:
    """The rung by the probability. A suspicion without a hard event only tests; if many nodes are suspected at once,
    the test is light."""
    p, node = one.p_lemon, state.nodes[one.node]
    blamed = [record for record in node.records.values() if record.blame >= 0.1]
    # Without a hard event L3 and L4 take the node out at one rung's more suspicion, and for failures of three users
    # whose programs complete elsewhere: a course with a broken module on its reserved nodes looks like bad nodes.
    users = {record.user for record in blamed if _elsewhere(state, record, one.node)}
    firm = one.hard or any(record.hard and record.blame >= 0.5 for record in blamed)
    l3, l4 = (s.l3, s.l4) if firm else (s.l4, s.rma) if sure and len(users) >= s.clusters else (2.0, 2.0)
    rung = ""
    if p >= s.rma and one.hard:
        rung = "RMA"
    elif p >= l4:
        rung = "L4"
    elif p >= l3:
        rung = "L3"
    elif p >= s.l2 or one.hard:
        rung = "L2"
    terms = one.terms
    if wave and not one.hard and rung in ("L3", "L4"):
        rung = "L2"
        terms = (*terms, "so many nodes are suspected at once that the cause lies outside of them: tested lightly")
    return one._replace(rung=_after_tests(rung, node), terms=terms)


def _elsewhere(state: State, record: Record, node: str) -> bool:
    """Whether the application has completed on another node."""
    app = state.applications.get(record.application)
    return app is not None and any(name != node for name in app.well)


def _after_tests(rung: str, node: NodeState) -> str:
    """A level that the node has passed since the last evidence is not due again. If level 3 passed and the node is
    soon suspected again, level 4 is due."""
    if rung not in ("L2", "L3", "L4"):
        return rung
    newest = max([one.end for one in node.records.values() if one.ratios] + [one.until for one in node.events] + [0.0])
    for level, (when, passed) in node.tests.items():
        if not passed or not level.isdigit():
            continue
        if when >= newest and int(level) >= int(rung[1]):
            return ""
        if level == "3" and rung == "L3" and when < newest <= when + suspicion.REPEATED:
            return "L4"
    return rung
