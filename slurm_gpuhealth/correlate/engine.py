"""The correlator: attempts and events in, verdicts and suspicions out. `State` is what it knows in between.

    event ───▶ its node's incidents ──▶ attempts of that time are judged again
    attempt ─▶ exposure ─▶ failed? ─▶ judge ─▶ records at its nodes ─▶ a node rises? its attempts are judged again

The order in which attempts and events arrive matters little, and what arrives twice not at all: each attempt and each
event has one place at its node, and an attempt's old say is taken out before the new one is put in.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate import fleet, suspects, suspicion
from slurm_gpuhealth.correlate.state import (
    COMPLETED,
    EVENTS,
    RECORDS,
    SEEN,
    SHORT,
    AppState,
    Case,
    FleetState,
    Incident,
    NodeState,
    Record,
    State,
)
from slurm_gpuhealth.correlate.verdict import LEAST, STATES, Judged, Leaves, failing, judge
from slurm_gpuhealth.correlate.weights import DAY, grid, growth, kind_of, plain, same_gpu, weigh

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slurm_gpuhealth import settings as settings_module
    from slurm_gpuhealth.correlate.model import Attempt, Event, GpuName, Reading, Suspicion, Verdict

__all__ = ["AppState", "Case", "Correlator", "FleetState", "NodeState", "State"]

OPEN = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "RESIZING", "STAGE_OUT", "SIGNALING", "STOPPED")
CHANGED = 0.1  # a verdict whose confidence moves by less is not told again
OFTEN = 1.5  # an application that turns out to fail so much more often, or less, has its last failures judged again
RISE = 2.0  # a node whose odds of being bad change by this factor has its attempts judged again
SAME = 60.0  # seconds within which one event on one GPU is told once
PRINTS = 8
HOPELESS = 0.002  # the nodes' share of the blame that not even a proven lemon, 200 times as bad, would raise to a half


class Correlator:
    """`leaves`: leaf switch → its nodes. `explained`: verdicts with their terms."""

    def __init__(
        self,
        settings: settings_module.Suspicion,
        leaves: Mapping[str, Sequence[str]] | None = None,
        state: State | None = None,
        explained: bool = True,
    ) -> None:
        self.settings, self.grid, self.explained = settings, grid(settings), explained
        self.state = state if state is not None else State()
        under = {node: leaf for leaf, nodes in (leaves or {}).items() for node in nodes}
        self.leaves = Leaves(under, {leaf: len(nodes) for leaf, nodes in (leaves or {}).items()})
        self._rescored: dict[str, Verdict] = {}
        _half_life(self.state, settings.half_life)

    def attempt(self, attempt: Attempt) -> Verdict | None:
        """Book one ended attempt; its verdict, or None where there is nothing to explain."""
        if attempt.state in OPEN or not attempt.nodes:
            return None
        key = f"{attempt.job}.{attempt.attempt}"
        home = self._node(attempt.nodes[0])
        name = application(attempt.user, attempt.account, attempt.name, attempt.submit)
        again = key in home.seen
        if not again:
            self._expose(attempt, home, key, name)
        if attempt.state == "COMPLETED":
            return None
        if again and key not in home.cases:
            return None  # so long ago that it is forgotten
        case = _case(attempt, name)
        if again:
            before = home.cases[key]
            case.own = before.own
            if _same_evidence(case, before):
                return judge(before, key, self.state, self.leaves, self.settings, self.explained).verdict
        home.cases[key] = case
        if not again and attempt.state not in STATES:
            under = {self.leaves.of[node] for node in attempt.nodes if node in self.leaves.of}
            fleet.remember(self.state.fleet, case, key, under, self.settings.half_life)
            self._remember_print(case, key)
        verdict = self._judge(case, key, fresh=not again)
        self._ripples(case, key)
        return verdict

    def event(self, event: Event) -> None:
        """Take in what a node said; attempts of that time that were judged without it are judged again."""
        kind, strength = weigh(event)
        if not kind:
            return
        node = self._node(event.node)
        if kind == "test":
            self._test(node, event)
            return
        if kind == "repair":
            _repair(node, event)
            return
        if not _keep(node, event, kind, strength, self.settings.horizon):
            return
        _spared(node, self.settings.spared)
        node.touched()
        self.state.fleet.events += kind == "hard"
        again = [
            (key, record.home)
            for key, record in node.records.items()
            if record.start - self.settings.before <= event.time <= record.end + self.settings.after
        ]
        for key, home in again:
            self._again(key, home)
        self._ripple(event.node, event.time)

    def suspicion(self, node: str, time: float) -> Suspicion:
        return suspects.of(node, self.state.nodes.get(node) or NodeState(), time, self.settings)

    def suspicions(self, time: float, above: float = 0.05) -> list[Suspicion]:
        """All nodes above that, the worst first, each with the rung that is due: decided over the whole fleet."""
        return suspects.suspicions(self.state, time, above, self.settings)

    def rescored(self) -> list[Verdict]:
        """The verdicts that later evidence has changed since the last call."""
        changed, self._rescored = list(self._rescored.values()), {}
        return changed

    def _node(self, name: str) -> NodeState:
        known = self.state.nodes.get(name)
        if known is None:
            known = self.state.nodes[name] = NodeState()
        return known

    def _expose(self, attempt: Attempt, home: NodeState, key: str, name: str) -> None:
        """What each attempt costs, a success too: so it is a handful of additions."""
        end = attempt.end
        home.seen[key] = end
        if len(home.seen) > SEEN:
            del home.seen[next(iter(home.seen))]
        unit = growth(end, self.settings.half_life)
        raw = max(0.0, end - attempt.start) / DAY
        days = raw * unit
        app = self.state.applications.get(name)
        if app is None:
            app = self.state.applications[name] = AppState()
        app.runs += unit
        all_of = self.state.fleet
        all_of.runs += unit
        all_of.last = max(all_of.last, end)
        all_of.exposure += days * len(attempt.nodes)
        runs, mean = self.settings.runs, self.settings.failing
        expected = (app.failed + runs * mean * unit) / (app.runs + runs * unit) * unit
        get, gpus = self.state.nodes.get, attempt.gpus
        fine = attempt.state == "COMPLETED" and end - attempt.start > self.settings.spared
        for one in attempt.nodes:
            node = get(one) or self._node(one)
            if end <= node.repaired:
                continue
            if gpus:
                held = len(gpus.get(one) or ()) or node.width
                node.width = max(node.width, held)
                share = held / node.width
                node.exposure += days * share
                node.days += raw * share
                node.jobs += share
            else:
                node.exposure += days
                node.days += raw
                node.jobs += 1
            node.failing += expected
            if not node.since or attempt.start < node.since:
                node.since = attempt.start
            if fine:
                self._spare(node, attempt, gpus.get(one) if gpus else None)

    def _spare(self, node: NodeState, attempt: Attempt, gpus: tuple[GpuName, ...] | None) -> None:
        node.completed.append((attempt.start, attempt.end, gpus))
        del node.completed[:-COMPLETED]
        if node.events and _spared(node, self.settings.spared):
            node.touched()

    def _judge(self, case: Case, key: str, fresh: bool = False) -> Verdict:
        """Judge a case and put its say in the place of its old one."""
        judged = judge(case, key, self.state, self.leaves, self.settings, self.explained)
        unit = growth(case.attempt.end, self.settings.half_life)
        if case.attempt.state not in STATES:
            self._learn(case, judged.own, unit, fresh)
        case.cause, case.confidence, case.node = judged.verdict.cause, judged.verdict.confidence, judged.verdict.node
        case.blame = judged.verdict.masses["node"]
        for name in case.attempt.nodes:
            node = self._node(name)
            if case.attempt.end > node.repaired:
                self._record(node, name, case, key, judged)
        return judged.verdict

    def _learn(self, case: Case, own: float, unit: float, fresh: bool) -> None:
        more = (own - case.own) * unit
        app = self.state.applications.get(case.application)
        if app is not None:
            app.failed += more
        kinds = self.state.fleet.kinds
        self.state.fleet.failed += more
        if case.kind is not None:
            kinds[case.kind] = kinds.get(case.kind, 0.0) + more
        case.own = own

    def _record(self, node: NodeState, name: str, case: Case, key: str, judged: Judged) -> None:
        weights = judged.weights.get(name)
        if weights is not None and max(map(abs, weights)) < LEAST:
            weights = None
        attempt = case.attempt
        old = node.records.get(key)
        blame = round(judged.verdict.responsible.get(name, 0.0), 5) if weights else 0.0
        hard = name in judged.hard
        node.records[key] = Record(
            attempt.start,
            attempt.end,
            attempt.nodes[0],
            attempt.user,
            case.application,
            weights,
            blame,
            hard,
            fleet.unexplained(case),
            *((old.days, old.jobs) if old else (round(node.days, 3), round(node.jobs, 3))),
        )
        if old and weights and old.weights and _close(old.weights, weights) and old.hard == hard:
            return  # what the node's evidence comes to stays as it is
        item = suspicion.item_of(node.records[key], key)
        if (old and old.weights) or (item and node._tally and not node._tally.add(item)):
            node.touched()
        if old is None and len(node.records) > node._limit:
            _prune(node, attempt.end, self.settings.horizon)

    def _again(self, key: str, home: str) -> None:
        """Judge a case again; where it now says something else, that is told."""
        at = self.state.nodes.get(home)
        case = at.cases.get(key) if at else None
        if case is None:
            return
        before = case.cause, case.confidence, case.node
        verdict = self._judge(case, key)
        if (verdict.cause, verdict.node) != before[::2] or abs(verdict.confidence - before[1]) > CHANGED:
            self._rescored[key] = verdict

    def _ripples(self, case: Case, key: str) -> None:
        """What a new failure changes for earlier ones: of its nodes, of its leaf switches."""
        for name in case.attempt.nodes:
            record = self.state.nodes[name].records.get(key)
            if record and (record.blame > 0.01 or record.hard):
                self._ripple(name, case.attempt.end)
        if case.attempt.state in STATES:
            return
        app = self.state.applications[case.application]
        rate = failing(case, self.state, self.settings)
        if not 1 / OFTEN < rate / (app.judged or self.settings.failing) < OFTEN:
            app.judged = rate
            for other, home, *_ in app.prints:
                record = self._record_of(other, home)
                if other != key and record and (record.blame > 0.02 or record.hard):
                    self._again(other, home)
        if not fleet.unexplained(case):
            return
        for leaf in {self.leaves.of[node] for node in case.attempt.nodes if node in self.leaves.of}:
            chance, others = fleet.co_failing(
                self.state.fleet, case, leaf, self.leaves.width[leaf], len(self.leaves.width), self.settings
            )
            if chance < self.settings.leaf_alarm:
                homes = {one[5]: one[3] for one in self.state.fleet.recent}
                for other in others:
                    if other != key:
                        self._again(other, homes[other])

    def _record_of(self, key: str, home: str) -> Record | None:
        node = self.state.nodes.get(home)
        return node.records.get(key) if node else None

    def _ripple(self, name: str, time: float) -> None:
        """A node that has become a suspect, or no longer is one: what it was acquitted of is looked at again."""
        node = self.state.nodes[name]
        good = suspicion.levels(node, time, self.grid, self.settings)[0]
        now, then = _odds(1 - good), _odds(node.judged or 1 - self.grid.prior[0])
        times = now / then
        if max(now, then) < _odds(self.settings.l2) or 1 / RISE < times < RISE:
            return
        node.judged = 1 - good
        for key, record in list(node.records.items()):
            blame = record.blame * times / (1 - record.blame + record.blame * times)
            if abs(blame - record.blame) > CHANGED / 2 and record.end > time - self.settings.horizon:
                self._again(key, record.home)

    def _remember_print(self, case: Case, key: str) -> None:
        app, attempt = self.state.applications[case.application], case.attempt
        app.prints.append(
            [key, attempt.nodes[0], case.fingerprint, case.rank, case.iteration, list(attempt.nodes[:64])]
        )
        del app.prints[:-PRINTS]

    def _test(self, node: NodeState, event: Event) -> None:
        level = str(event.detail.get("level") or re.sub(r"\D", "", event.code) or "2")
        passed = event.detail.get("passed")
        if not isinstance(passed, bool) or event.time < node.tests.get(level, (0.0, True))[0]:
            return
        node.tests[level] = event.time, passed
        node.touched()
        self._ripple(event.node, event.time)


def _odds(p: float) -> float:
    """Bounded: beyond 50 to 1 nothing is judged another way."""
    return min(50.0, max(0.02, p / max(1 - p, 1e-9)))


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) < LEAST for a, b in zip(one, other))


def _repair(node: NodeState, event: Event) -> None:
    """What was repaired starts anew: the whole node, or one GPU (its slot's past stays)."""
    if event.gpu is not None:
        gpu = plain(event.gpu)
        if event.time > node.changed.get(gpu, (0.0,))[0]:
            node.changed[gpu] = event.time, node.days, node.jobs
            node.changed = dict(sorted(node.changed.items(), key=lambda one: -one[1][0])[:16])
    elif event.time > node.repaired:
        node.repaired = event.time
        node.exposure = node.days = node.jobs = node.failing = node.judged = 0.0
        node.records = {key: one for key, one in node.records.items() if one.end > event.time}
        node.events = [one for one in node.events if one.until > event.time]
        node.tests = {level: one for level, one in node.tests.items() if one[0] > event.time}
    node.touched()


def _keep(node: NodeState, event: Event, kind: str, strength: float, horizon: float) -> bool:
    """Put an event in its place by time; False where it is there already, or forgotten."""
    time, code = event.time, f"{event.source} {event.code}"[:60]
    if time <= node.repaired:
        return False
    for place, one in enumerate(node.events):
        near = one.time - SAME <= time <= one.until + SAME
        if near and (one.kind, one.code, one.gpu) == (kind, code, event.gpu):
            if one.time <= time <= one.until:
                return False
            node.events[place] = one._replace(time=min(one.time, time), until=max(one.until, time))
            return True
    node.events.append(Incident(time, time, event.gpu, kind, strength, code, node.days, node.jobs))
    node.events.sort(key=lambda one: (one.time, one.code, str(one.gpu)))
    if len(node.events) > EVENTS or node.events[0].until < time - 2 * horizon:
        node.events[:] = [one for one in node.events if one.until >= time - 2 * horizon][-EVENTS:]
    return True


def _spared(node: NodeState, least: float) -> bool:
    """Note the events that did no harm: a job of their GPU went on, and completed. True where there is a new one."""
    found = False
    for place, one in enumerate(node.events):
        if one.kind != "hard" or one.spared:
            continue
        for start, end, gpus in node.completed:
            if start <= one.time <= end - least and same_gpu(one.gpu, gpus) is not False:
                node.events[place] = one._replace(spared=True)
                found = True
                break
    return found


def _prune(node: NodeState, time: float, horizon: float) -> None:
    """Forget attempts that say nothing and are too old for an event to come late; then the lightest and oldest."""
    kept = {key: one for key, one in node.records.items() if one.end > time - (2 * horizon if one.weights else SHORT)}
    if len(kept) > RECORDS:
        light = sorted(kept, key=lambda key: (kept[key].hard or kept[key].blame > HOPELESS, kept[key].end))
        kept = {key: kept[key] for key in light[-RECORDS:]}
    if any(one.weights for key, one in node.records.items() if key not in kept):
        node.touched()
    node.records = kept
    node.cases = {
        key: case
        for key, case in node.cases.items()
        if case.attempt.end > time - (horizon if case.blame > HOPELESS else SHORT)
    }
    if len(node.cases) > RECORDS:
        node.cases = dict(list(node.cases.items())[-RECORDS:])
    node._limit = max(32, len(kept) + 16)


def _case(attempt: Attempt, name: str) -> Case:
    reading = attempt.reading
    if reading is None and attempt.log is not None and attempt.log_class is None:
        from slurm_gpuhealth.correlate.logs import read_text

        reading = read_text(attempt.log)
    few = len(attempt.nodes) <= 8  # a larger job holds whole nodes
    lean = attempt._replace(log=None, reading=None, gpus=attempt.gpus if few else None)
    case = Case(lean, name, kind_of(attempt, reading))
    if reading is not None:
        case.hosts = tuple(sorted(hosts(reading, attempt.nodes)))
        case.fingerprint, case.rank, case.iteration = reading.fingerprint[:200], reading.rank, reading.iteration
        case.gpu = reading.cause.gpu if reading.cause else None
    return case


def _same_evidence(case: Case, other: Case) -> bool:
    names = ("attempt", "application", "kind", "hosts", "fingerprint", "rank", "iteration", "gpu")
    return all(getattr(case, name) == getattr(other, name) for name in names)


def hosts(reading: Reading, nodes: Iterable[str]) -> set[str]:
    """Those of the job's nodes that a log singles out: as written, with a domain, or by the name of an adapter."""
    short = {node.partition(".")[0].lower(): node for node in nodes}
    found = set()
    for host in reading.hosts:
        name = host.partition(".")[0].lower()
        cut = re.sub(r"[-_](?:ib|hsn|eth|bond|opa|roce|mlx|en|data|mgmt)\w*$", "", name)
        node = short.get(name) or short.get(cut)
        if node:
            found.add(node)
    return found


@lru_cache(maxsize=16384)
def application(user: str, account: str, name: str, submit: str) -> str:
    """The key of a user's application: its name without numbers, and its submit line where that is known."""
    shown = re.sub(r"\d+", "#", name)[:64]
    return f"{user}|{account}|{shown}|{submit}"[:200]


def _half_life(state: State, half_life: float) -> None:
    """What is kept in units of EPOCH depends on the half-life: another one in the settings converts it."""
    old, state.fleet.half_life = state.fleet.half_life, half_life
    if not old or old == half_life or not state.fleet.last:
        return
    factor = growth(state.fleet.last, half_life) / growth(state.fleet.last, old)
    for node in (state.nodes[name] for name in list(state.nodes)):
        node.touched()
        node.exposure, node.failing = node.exposure * factor, node.failing * factor
    for app in (state.applications[name] for name in list(state.applications)):
        app.runs, app.failed = app.runs * factor, app.failed * factor
    all_of = state.fleet
    for name in ("runs", "failed", "exposure", "unexplained"):
        setattr(all_of, name, getattr(all_of, name) * factor)
    all_of.kinds = {kind: one * factor for kind, one in all_of.kinds.items()}
