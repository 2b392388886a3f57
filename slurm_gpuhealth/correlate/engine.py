"""The correlator: attempts and events in, verdicts and suspicions out. `State` is what it knows in between.

    event ───▶ its node's incidents ──▶ attempts of that time are judged again
    attempt ─▶ exposure ─▶ failed? ─▶ judge ─▶ records at its nodes ─▶ a node rises? its attempts are judged again

The order in which attempts and events arrive matters little, and what arrives twice counts once: each attempt and each
event has one place at its node, and what an attempt said before is taken out before the new evidence is put in.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from slurm_gpuhealth.correlate import fleet, memory, suspects, suspicion
from slurm_gpuhealth.correlate.cases import application, case_of, same_evidence
from slurm_gpuhealth.correlate.state import (
    COMPLETED,
    RAN,
    SEEN,
    AppState,
    Case,
    FleetState,
    Known,
    Leaves,
    NodeState,
    Record,
    State,
)
from slurm_gpuhealth.correlate.verdict import LEAST, STATES, Judged, judge
from slurm_gpuhealth.correlate.weights import DAY, grid, growth, weigh

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slurm_gpuhealth.config import settings as settings_module
    from slurm_gpuhealth.correlate.state import Ratios
    from slurm_gpuhealth.outcomes import Attempt, Event, Suspicion, Verdict

__all__ = ["AppState", "Case", "Correlator", "FleetState", "NodeState", "State"]

OPEN = frozenset(
    ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "RESIZING", "STAGE_OUT", "SIGNALING", "STOPPED")
)
CHANGED = 0.1  # a verdict whose confidence moves by less is not told again
OFTEN = 1.5  # an application that turns out to fail so much more often, or less, has its last failures judged again
RISE = 3.0  # a node whose odds of being bad change by this factor has its attempts judged again
BURST = 6 * 3600.0  # a program with a new bug fails again and again until it is mended
LATELY = 0.3  # the weight of an application's last run in its rate of late
PRINTS = 8
LOT = 32  # keys that are forgotten at once: to find the oldest key of a dict takes longer the more were deleted


class Correlator:
    """`leaves`: leaf switch → its nodes. `explained`: verdicts have their terms."""

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
        self.known = Known(self.state, self.leaves, self.settings, self.grid)
        self._rescored: dict[str, Verdict] = {}
        memory.convert(self.state, settings.half_life)

    def attempt(self, attempt: Attempt) -> Verdict | None:
        """Book an attempt that has ended. Returns its verdict; None if there is nothing to explain."""
        if attempt.state in OPEN or not attempt.nodes:
            return None
        key = f"{attempt.job}.{attempt.attempt}"
        home = self._node(attempt.nodes[0])
        if key in home.seen:
            return None if attempt.state == "COMPLETED" else self._told_again(attempt, home, key)
        home.seen[key] = attempt.end
        if len(home.seen) > SEEN + LOT:
            for old in list(islice(home.seen, LOT)):
                del home.seen[old]
        name = application(attempt.user, attempt.account, attempt.name, attempt.submit)
        unit = growth(attempt.end, self.settings.half_life)
        self._expose(attempt, unit, self._count(attempt, name, unit))
        return None if attempt.state == "COMPLETED" else self._failed(attempt, name, home, key)

    def event(self, event: Event) -> None:
        """Take in what a node reported. Attempts of that time are judged again: they were judged without it."""
        kind, strength = weigh(event)
        if not kind:
            return
        node = self._node(event.node)
        if kind == "test":
            self._test(node, event)
            return
        if kind == "repair":
            memory.repair(node, event)
            return
        if not memory.keep(node, event, kind, strength, self.settings.horizon):
            return
        if kind in suspicion.COUNTED:
            if memory.spare(node, self.settings.spared):
                node.touched()
            suspicion.take_in(node, event.time, self.grid, self.settings)
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

    def suspicions(self, time: float, above: float = 0.05, among: Iterable[str] | None = None) -> list[Suspicion]:
        """All nodes whose p_lemon is above `above`, the worst first, each with the rung that is due.

        `among`: who else is above is known not to be.
        """
        return suspects.suspicions(self.state, time, above, self.settings, among)

    def rescored(self) -> list[Verdict]:
        """The verdicts that later evidence has changed since the last call."""
        changed, self._rescored = list(self._rescored.values()), {}
        return changed

    def _node(self, name: str) -> NodeState:
        known = self.state.nodes.get(name)
        if known is None:
            known = self.state.nodes[name] = NodeState()
        return known

    def _count(self, attempt: Attempt, name: str, unit: float) -> float:
        """Add a run to its application and to the fleet. Returns how many failures to expect of such a run, decayed."""
        s, end = self.settings, attempt.end
        app = self.state.applications.get(name)
        if app is None:
            app = self.state.applications[name] = AppState()
        app.runs += unit
        if attempt.state == "COMPLETED":
            app.lately *= 1 - LATELY
            memory.mark(app.well, attempt.nodes[:1], end)
            if end > app.ended:
                app.ended = end
        everywhere = self.state.fleet
        everywhere.runs += unit
        if end > everywhere.last:
            everywhere.last = end
        everywhere.exposure += max(0.0, end - attempt.start) / DAY * unit * len(attempt.nodes)
        return (app.failed + s.runs * s.failing * unit) / (app.runs + s.runs * unit) * unit

    def _expose(self, attempt: Attempt, unit: float, expected: float) -> None:
        """Add a run to each of its nodes. A success costs this too: so it is a handful of additions."""
        start, end, gpus = attempt.start, attempt.end, attempt.gpus
        spared, known = self.settings.spared, self.state.nodes.get
        days = max(0.0, end - start) / DAY
        decayed = days * unit
        completed = attempt.state == "COMPLETED" and end - start > spared
        run: tuple[float, float, Any] = start, end, None
        for name in attempt.nodes:
            node = known(name) or self._node(name)
            if end <= node.repaired:
                continue
            share = 1.0
            if gpus:
                held = gpus.get(name)
                if held is not run[2]:  # most of its nodes have the same, and share what is kept
                    run = start, end, held
                width = len(held) if held else node.width
                if width < node.width:
                    share = width / node.width
                else:
                    node.width = width
            node.exposure += decayed * share
            node.days += days * share
            node.jobs += share
            node.failing += expected
            if not node.since or start < node.since:
                node.since = start
            ran = node.ran
            ran.append(run)
            if len(ran) > 2 * RAN:  # to tidy up each time would cost more
                del ran[:RAN]
            if completed:
                ran = node.completed
                ran.append(run)
                if len(ran) > 2 * COMPLETED:
                    del ran[:COMPLETED]
            if node.events and node.events[-1].until >= start:
                if completed and memory.spare(node, spared):
                    node.touched()
                self._hand_on(node, start)

    def _hand_on(self, node: NodeState, start: float) -> None:
        """A job that began at `start` has become known: an event after an earlier job's end may belong to it."""
        for key, record in list(node.records.items()):
            if record.end <= start < record.end + self.settings.after and record.hard:
                self._again(key, record.home)

    def _failed(self, attempt: Attempt, name: str, home: NodeState, key: str) -> Verdict:
        """Judge a failure that is new."""
        case = home.cases[key] = case_of(attempt, name)
        app, by_itself = self.state.applications[name], attempt.state not in STATES
        case.lately = app.lately if attempt.end - app.ended < BURST else 0.0
        if by_itself:
            fleet.remember(self.state.fleet, case, key, self.leaves.above(attempt.nodes), self.settings.half_life)
            _remember_print(app, case, key)
            case.apart = memory.only_here(app, attempt)
            app.alone = max(app.alone, attempt.end) if case.apart else app.alone
            memory.mark(app.died, attempt.nodes, attempt.end)
        judged = self._judge(case, key, fresh=True)
        self._rescored.pop(key, None)
        if by_itself:
            app.lately += (case.own - app.lately) * LATELY
            app.ended = max(app.ended, attempt.end)
        self._ripples(case, key, judged.failing)
        return judged.verdict

    def _told_again(self, attempt: Attempt, home: NodeState, key: str) -> Verdict | None:
        """Judge a failure again of which more may be known since; it stays the application that it was."""
        before = home.cases.get(key)
        if before is None:
            return None  # so long ago that it is forgotten
        case = case_of(attempt, before.application)
        case.own, case.lately = before.own, before.lately
        case.shared, case.leaves, case.apart = before.shared, before.leaves, before.apart
        if same_evidence(case, before):
            return judge(before, key, self.known, self.explained).verdict
        home.cases[key] = case
        judged = self._judge(case, key)
        self._rescored.pop(key, None)
        self._ripples(case, key, judged.failing)
        return judged.verdict

    def _judge(self, case: Case, key: str, fresh: bool = False) -> Judged:
        """Judge a case, and replace what it said of its nodes before."""
        self._look_around(case)
        judged = judge(case, key, self.known, self.explained)
        unit = growth(case.attempt.end, self.settings.half_life)
        if case.attempt.state not in STATES:
            self._learn(case, judged.own, unit, fresh)
        case.cause, case.confidence, case.node = judged.verdict.cause, judged.verdict.confidence, judged.verdict.node
        case.blame = judged.verdict.masses["node"]
        unexplained = fleet.unexplained(case)
        for name in case.attempt.nodes:
            node = self._node(name)
            # What a node has forgotten stays so: it could not say any more how many jobs it had by then.
            if case.attempt.end > node.repaired and (fresh or key in node.records):
                self._record(node, name, case, key, judged, unexplained)
        return judged

    def _look_around(self, case: Case) -> None:
        """Note in the case what failed at the same time: the fleet forgets that after some hours."""
        if not fleet.unexplained(case) or case.attempt.state in STATES:
            case.shared, case.leaves = 0.0, ()  # its log has come since, and says why it failed
            return
        s, widths = self.settings, self.leaves.width
        for leaf in self.leaves.above(case.attempt.nodes) - {*case.leaves}:
            if fleet.co_failing(self.state.fleet, case, leaf, widths[leaf], len(widths), s) < s.leaf_alarm:
                case.leaves = *case.leaves, leaf
        shared = fleet.surge(self.state.fleet, case)
        case.shared = shared if case.leaves else max(case.shared, shared)  # before the alarm, it was the leaf's

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

    def _record(self, node: NodeState, name: str, case: Case, key: str, judged: Judged, unexplained: bool) -> None:
        ratios: Ratios | None = judged.ratios.get(name) or None
        attempt, old = case.attempt, node.records.get(key)
        hard = name in judged.hard
        if old and not (ratios or old.ratios) and (old.hard, old.unexplained) == (hard, unexplained):
            return
        node.records[key] = Record(
            start=attempt.start,
            end=attempt.end,
            home=attempt.nodes[0],
            user=attempt.user,
            application=case.application,
            ratios=ratios,
            blame=round(judged.verdict.responsible.get(name, 0.0), 5) if ratios else 0.0,
            hard=hard,
            unexplained=unexplained,
            days=old.days if old else node.days,
            jobs=old.jobs if old else node.jobs,
            apart=case.apart,
        )
        same = old and (old.hard, old.apart) == (hard, case.apart)
        if same and old and ratios and old.ratios and _alike(node, old.ratios, ratios):
            return  # what the node's evidence comes to stays as it is
        suspicion.put(node, key, old)
        if old is None and len(node.records) > node._limit:
            memory.prune(node, attempt.end, self.settings.horizon)

    def _again(self, key: str, home: str) -> None:
        """Judge a case again. If the verdict has changed, `rescored` tells it."""
        at = self.state.nodes.get(home)
        case = at.cases.get(key) if at else None
        if case is None:
            return
        before = case.cause, case.confidence, case.node
        verdict = self._judge(case, key).verdict
        if (verdict.cause, verdict.node) != before[::2] or abs(verdict.confidence - before[1]) > CHANGED:
            self._rescored[key] = verdict

    def _ripples(self, case: Case, key: str, rate: float) -> None:
        """Judge earlier failures again if a new one matters to them: of its nodes, application and leaf switches."""
        for name in case.attempt.nodes:
            record = self.state.nodes[name].records.get(key)
            if record and (record.blame > 0.01 or record.hard):
                self._ripple(name, case.attempt.end)
        if case.attempt.state in STATES:
            return
        app = self.state.applications[case.application]
        if not case.apart and case.attempt.end - app.alone < DAY:
            self._not_only_there(case, app)
        if not 1 / OFTEN < rate / (app.judged or self.settings.failing) < OFTEN:
            app.judged = rate
            self._as_often(app, case)
        if not fleet.unexplained(case):
            return
        if case.shared:
            for other, home in fleet.beside(self.state.fleet, case):
                before = self.state.nodes[home].cases.get(other) if home in self.state.nodes else None
                if before and before.shared + CHANGED < case.shared:
                    self._again(other, home)
        for leaf in case.leaves:
            for other, home in fleet.under(self.state.fleet, case, leaf, self.settings.leaf_window):
                if other != key:
                    self._again(other, home)

    def _not_only_there(self, newer: Case, app: AppState) -> None:
        """An application fails on another node too: that it failed on one alone is no more a sign of that node."""
        known, failed = self.state.nodes.get, newer.attempt.nodes
        for key, home, _, _, _, _ in app.prints:
            if home in failed:
                continue
            node = known(home)
            earlier = node.cases.get(key) if node else None
            if earlier and earlier.apart and newer.attempt.end - earlier.attempt.end < DAY:
                earlier.apart = False
                self._again(key, home)

    def _as_often(self, app: AppState, newer: Case) -> None:
        """Judge earlier failures of an application by how often it fails now."""
        known = self.state.nodes.get
        for key, home, *_ in app.prints:
            node = known(home)
            record = node.records.get(key) if node else None
            if not node or not record or not (record.blame > 0.02 or record.hard):
                continue
            earlier = node.cases.get(key)
            if not earlier or earlier is newer:
                continue
            if newer.attempt.end - earlier.attempt.end < BURST:
                earlier.lately = max(earlier.lately, app.lately - earlier.own * LATELY * (1 - LATELY))
            self._again(key, home)

    def _ripple(self, name: str, time: float) -> None:
        """If a node has become a suspect, or no longer is, judge its earlier failures again."""
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

    def _test(self, node: NodeState, event: Event) -> None:
        level = str(event.detail.get("level") or re.sub(r"\D", "", event.code) or "2")
        passed = event.detail.get("passed")
        if not isinstance(passed, bool) or event.time < node.tests.get(level, (0.0, True))[0]:
            return
        node.tests[level] = event.time, passed
        node.touched()
        self._ripple(event.node, event.time)


def _odds(p: float) -> float:
    """Between 1 and 50 to 1: beyond these nothing would be judged differently."""
    return min(50.0, max(0.02, p / max(1 - p, 1e-9)))


def _alike(node: NodeState, one: Sequence[float], other: Sequence[float]) -> bool:
    factors = [b / a for a, b in zip(one, other)]
    if all(abs(factor - 1) < LEAST for factor in factors):
        return True
    return node._tally is not None and suspicion.matter(node._tally, factors) < suspicion.TRIFLE / 5


def _remember_print(app: AppState, case: Case, key: str) -> None:
    nodes = case.attempt.nodes
    app.prints.append([key, nodes[0], case.fingerprint, case.rank, case.iteration, list(nodes[:64])])
    del app.prints[:-PRINTS]
