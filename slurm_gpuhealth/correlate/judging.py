"""Judging a case and what follows: what it says of its nodes is replaced, and what it changes is judged again.

a node rises or falls        its failures
its application              its last failures: it fails more often, or not on that node alone
many failures at once        those beside, and under the same leaf switches
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate import context, fleet, memory, suspicion, verdict
from slurm_gpuhealth.correlate.state import Record
from slurm_gpuhealth.correlate.verdict import LEAST, STATES
from slurm_gpuhealth.correlate.weights import DAY, HANGS, growth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.correlate.state import AppState, Case, Known, NodeState, Ratios
    from slurm_gpuhealth.correlate.verdict import Judged
    from slurm_gpuhealth.outcomes import Verdict

CHANGED = 0.1  # a verdict whose confidence moves by less is not told again
OFTEN = 1.5  # an application that turns out to fail so much more often, or less, has its last failures judged again
RISE = 3.0  # a node whose odds of being bad change by this factor has its attempts judged again
BURST = 6 * 3600.0  # a program with a new bug fails again and again until it is mended
LATELY = 0.3  # the weight of an application's last run in its rate of late


class Judging:
    def __init__(self, known: Known, explained: bool) -> None:
        self.known, self.explained = known, explained
        self.state, self.leaves, self.settings, self.grid = known
        self.rescored: dict[str, Verdict] = {}
        """Case → its verdict, where later evidence has changed it."""

    def judge(self, case: Case, key: str, fresh: bool = False) -> Judged:
        """Judge a case, and replace what it said of its nodes before."""
        self._look_around(case)
        judged = verdict.judge(case, key, self.known, self.explained)
        unit = growth(case.attempt.end, self.settings.half_life)
        if case.attempt.state not in STATES:
            self._learn(case, judged.own, unit)
        elif case.attempt.state in HANGS:
            self._learn_cut(case, judged.own, unit)
        case.cause, case.confidence, case.node = judged.verdict.cause, judged.verdict.confidence, judged.verdict.node
        case.blame = judged.verdict.masses["node"]
        unexplained = fleet.unexplained(case)
        for name in case.attempt.nodes:
            node = self.state.node(name)
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

    def _learn(self, case: Case, own: float, unit: float) -> None:
        more = (own - case.own) * unit
        app = self.state.applications.get(case.application)
        if app is not None:
            app.failed += more
            context.learn(app, case.attempt, more)
        kinds = self.state.fleet.kinds
        self.state.fleet.failed += more
        if case.kind is not None:
            kinds[case.kind] = kinds.get(case.kind, 0.0) + more
        case.own = own

    def _learn_cut(self, case: Case, own: float, unit: float) -> None:
        """How often the application, and all, reach their time limit or are cancelled, and no node hangs."""
        word, more = case.attempt.state, (own - case.own) * unit
        app, everywhere = self.state.applications.get(case.application), self.state.fleet.cut
        everywhere[word] = everywhere.get(word, 0.0) + more
        if app is not None:
            app.cut[word] = app.cut.get(word, 0.0) + more
            context.learn(app, case.attempt, more)
        case.own = own

    def unlearn(self, case: Case) -> None:
        """Take out what a case taught: its state, or where it was sent, was another."""
        unit = growth(case.attempt.end, self.settings.half_life)
        if case.attempt.state not in STATES:
            self._learn(case, 0.0, unit)
        elif case.attempt.state in HANGS:
            self._learn_cut(case, 0.0, unit)

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
            gpus=attempt.gpus.get(name) if attempt.gpus else None,
            hung=attempt.state in HANGS,
        )
        same = old and (old.hard, old.apart) == (hard, case.apart)
        if same and old and ratios and old.ratios and _alike(node, old.ratios, ratios):
            return  # what the node's evidence comes to stays as it is
        suspicion.put(node, key, old)
        if old is None and len(node.records) > node._limit:
            memory.prune(node, attempt.end, self.settings.horizon)

    def again(self, key: str, home: str) -> None:
        """Judge a case again. If the verdict has changed, `rescored` tells it."""
        at = self.state.nodes.get(home)
        case = at.cases.get(key) if at else None
        if case is None:
            return
        before = case.cause, case.confidence, case.node
        said = self.judge(case, key).verdict
        if (said.cause, said.node) != before[::2] or abs(said.confidence - before[1]) > CHANGED:
            self.rescored[key] = said

    def ripples(self, case: Case, key: str, rate: float) -> None:
        """Judge earlier failures again if a new one matters to them: of its nodes, application and leaf switches."""
        for name in case.attempt.nodes:
            record = self.state.nodes[name].records.get(key)
            if record and (record.blame > 0.01 or record.hard):
                self.ripple(name, case.attempt.end)
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
                    self.again(other, home)
        for leaf in case.leaves:
            for other, home in fleet.under(self.state.fleet, case, leaf, self.settings.leaf_window):
                if other != key:
                    self.again(other, home)

    def _not_only_there(self, newer: Case, app: AppState) -> None:
        """An application fails on another node too: that it failed on one alone is no more a sign of that node."""
        known, failed, left = self.state.nodes.get, newer.attempt.nodes, 0.0
        for key, home, _, _, _, _ in app.prints:
            node = known(home)
            earlier = node.cases.get(key) if node else None
            if not earlier or not earlier.apart:
                continue
            if home not in failed and newer.attempt.end - earlier.attempt.end < DAY:
                earlier.apart = False
                self.again(key, home)
            else:
                left = app.alone
        app.alone = left

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
            self.again(key, home)

    def ripple(self, name: str, time: float) -> None:
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
                self.again(key, record.home)


def _odds(p: float) -> float:
    """Between 1 and 50 to 1: beyond these nothing would be judged differently."""
    return min(50.0, max(0.02, p / max(1 - p, 1e-9)))


def _alike(node: NodeState, one: Sequence[float], other: Sequence[float]) -> bool:
    factors = [b / a for a, b in zip(one, other)]
    if all(abs(factor - 1) < LEAST for factor in factors):
        return True
    return node._tally is not None and suspicion.matter(node._tally, factors) < suspicion.TRIFLE / 5
