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

from slurm_gpuhealth.correlate import context, fleet, harmless, memory, place, suspects, suspicion
from slurm_gpuhealth.correlate.cases import application, case_of, same_evidence
from slurm_gpuhealth.correlate.judging import BURST, LATELY, Judging
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
    State,
)
from slurm_gpuhealth.correlate.verdict import STATES, judge
from slurm_gpuhealth.correlate.weights import DAY, HANGS, grid, growth, plain, weigh

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slurm_gpuhealth.config import settings as settings_module
    from slurm_gpuhealth.outcomes import Attempt, Event, Suspicion, Verdict

__all__ = ["AppState", "Case", "Correlator", "FleetState", "NodeState", "State"]

OPEN = frozenset(
    ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "RESIZING", "STAGE_OUT", "SIGNALING", "STOPPED")
)
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
        places: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.settings, self.grid = settings, grid(settings)
        self.state = state if state is not None else State()
        under = {node: leaf for leaf, nodes in (leaves or {}).items() for node in nodes}
        self.leaves = Leaves(under, {leaf: len(nodes) for leaf, nodes in (leaves or {}).items()})
        self.places = place.places(leaves or {}, places or {})
        self.judging = Judging(Known(self.state, self.leaves, self.settings, self.grid), explained)
        memory.convert(self.state, settings.half_life)

    def attempt(self, attempt: Attempt) -> Verdict | None:
        """Book an attempt that has ended. Returns its verdict; None if there is nothing to explain."""
        if attempt.state in OPEN or not attempt.nodes:
            return None
        key = f"{attempt.job}.{attempt.attempt}"
        home = self.state.node(attempt.nodes[0])
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
        node = self.state.node(event.node)
        if kind == "test":
            self._test(node, event)
            return
        if kind == "repair":
            memory.repair(node, event)
            return
        if kind == "hard":
            code = f"{event.source} {event.code}"[:60]
            strength *= harmless.worth(self.state.fleet, code, self.settings)
        if not memory.keep(node, event, kind, strength, self.settings.horizon):
            return
        if kind in suspicion.COUNTED:
            harmless.learn(self.state, event.node, self.settings)
            suspicion.take_in(node, event.time, self.grid, self.settings)
        self.state.fleet.events += kind == "hard"
        if kind == "hard" and event.source in ("xid", "sxid"):  # other findings have the time of a check
            self._shared(event)
        before, after = self.settings.before, self.settings.after
        again = [
            (key, record.home)
            for key, record in node.records.items()
            if record.end + after >= event.time >= record.start - before  # nearly all ended long before
        ]
        for key, home in again:
            self.judging.again(key, home)
        self.judging.ripple(event.node, event.time)

    def _shared(self, event: Event) -> None:
        """If several nodes of a rack or switch report at once, it is not their fault: their cases are judged again."""
        horizon = self.settings.horizon
        place.remember(self.state.fleet, event.time, event.node, horizon)
        for name, when in place.forgive(self.state, self.places, event.time, event.node, horizon):
            for key, record in list(self.state.node(name).records.items()):
                if record.start - self.settings.before <= when <= record.end + self.settings.after:
                    self.judging.again(key, record.home)

    def suspicion(self, node: str, time: float) -> Suspicion:
        return suspects.of(node, self.state.nodes.get(node) or NodeState(), time, self.settings)

    def suspicions(self, time: float, above: float = 0.05, among: Iterable[str] | None = None) -> list[Suspicion]:
        """All nodes whose p_lemon is above `above`, the worst first, each with the rung that is due.

        `among`: who else is above is known not to be.
        """
        return suspects.suspicions(self.state, time, above, self.settings, among)

    def rescored(self) -> list[Verdict]:
        """The verdicts that later evidence has changed since the last call."""
        changed, self.judging.rescored = list(self.judging.rescored.values()), {}
        return changed

    def _count(self, attempt: Attempt, name: str, unit: float) -> float:
        """Add a run to its application and to the fleet. Returns how many failures to expect of such a run, decayed."""
        s, end = self.settings, attempt.end
        app = self.state.applications.get(name)
        if app is None:
            app = self.state.applications[name] = AppState()
        app.runs += unit
        if where := context.of(attempt):
            for node in attempt.nodes:
                self.state.node(node)
            context.book(self.state, attempt, where, unit)
            context.run(app, where, unit)
            shrink = 1 / unit
            app.expected += context.rate(self.state, attempt, where, 1, self._mean(shrink), shrink) * unit
        elif app.expected:
            app.expected += self._mean(1 / unit) * unit
        if attempt.state == "COMPLETED":
            app.lately *= 1 - LATELY
            memory.mark(app.well, attempt.nodes[:1], end)
            if end > app.ended:
                app.ended = end
        elif attempt.state in HANGS and end > app.ended:
            app.ended = end
        everywhere = self.state.fleet
        everywhere.runs += unit
        if end > everywhere.last:
            everywhere.last = end
        everywhere.exposure += max(0.0, end - attempt.start) / DAY * unit * len(attempt.nodes)
        return (app.failed + s.runs * s.failing * unit) / (app.runs + s.runs * unit) * unit

    def _mean(self, shrink: float) -> float:
        everywhere, s = self.state.fleet, self.settings
        return (everywhere.failed * shrink + 50 * s.failing) / (everywhere.runs * shrink + 50)

    def _expose(self, attempt: Attempt, unit: float, expected: float) -> None:
        """Add a run to each of its nodes. A success costs this too: so it is a handful of additions."""
        start, end, gpus = attempt.start, attempt.end, attempt.gpus
        spared, known = self.settings.spared, self.state.nodes.get
        lived = attempt.state not in HANGS  # a job that hung did not live through it
        days = max(0.0, end - start) / DAY * lived
        decayed = days * unit
        completed = attempt.state == "COMPLETED" and end - start > spared
        run: tuple[float, float, Any] = start, end, None
        width = 0
        for name in attempt.nodes:
            node = known(name) or self.state.node(name)
            if end <= node.repaired:
                continue
            share = 1.0
            if gpus:
                held = gpus.get(name)
                if held is not run[2]:  # most of its nodes have the same, and share what is kept
                    run, width = (start, end, held), len(held) if held else 0
                if width > node.width:
                    node.width = width
                elif 0 < width < node.width:
                    share = width / node.width
                    for gpu in held or ():
                        slot = node.slots.setdefault(plain(gpu), [0.0, 0.0])
                        if len(node.slots) > max(16, 2 * node.width):  # MIG instances come and go
                            del node.slots[min(node.slots, key=lambda one: node.slots[one][0])]
                        slot[0] += days
                        slot[1] += 1
            if share == 1.0:
                full = node.full
                full[0] += days
                full[1] += 1
            node.exposure += decayed * share
            node.days += days * share
            node.jobs += share
            node.failing += expected
            if start < node.since or not node.since:
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
            if node._quiet >= start and node.events and node.events[-1].until >= start:
                if completed:
                    harmless.learn(self.state, name, self.settings)
                self._hand_on(node, start)

    def _hand_on(self, node: NodeState, start: float) -> None:
        """A job that began at `start` has become known: an event after an earlier job's end may belong to it."""
        for key, record in list(node.records.items()):
            if record.end <= start < record.end + self.settings.after and record.hard:
                self.judging.again(key, record.home)

    def _failed(self, attempt: Attempt, name: str, home: NodeState, key: str) -> Verdict:
        """Judge a failure that is new."""
        case = home.cases[key] = case_of(attempt, name)
        app, by_itself = self.state.applications[name], attempt.state not in STATES
        case.lately = app.lately if attempt.end - app.ended < BURST else 0.0
        if by_itself:
            fleet.remember(self.state.fleet, case, key, self.leaves.above(attempt.nodes), self.settings.half_life)
            _remember_print(app, case, key)
            case.apart = memory.only_here(app, attempt, app.died)
            app.alone = max(app.alone, attempt.end) if case.apart else app.alone
            memory.mark(app.died, attempt.nodes, attempt.end)
        elif attempt.state in HANGS:
            case.apart = memory.only_here(app, attempt, app.stuck)
            memory.mark(app.stuck, attempt.nodes, attempt.end)
        judged = self.judging.judge(case, key, fresh=True)
        self.judging.rescored.pop(key, None)
        if by_itself:
            app.lately += (case.own - app.lately) * LATELY
            app.ended = max(app.ended, attempt.end)
        self.judging.ripples(case, key, judged.failing)
        return judged.verdict

    def _told_again(self, attempt: Attempt, home: NodeState, key: str) -> Verdict | None:
        """Judge a failure again of which more may be known since; it stays the application that it was."""
        before = home.cases.get(key)
        if before is None:
            return None  # so long ago that it is forgotten
        case = case_of(attempt, before.application)
        if (attempt.state, context.of(attempt)) != (before.attempt.state, context.of(before.attempt)):
            self.judging.unlearn(before)
        case.own, case.lately = before.own, before.lately
        case.shared, case.leaves, case.apart = before.shared, before.leaves, before.apart
        if same_evidence(case, before):
            return judge(before, key, self.judging.known, self.judging.explained).verdict
        home.cases[key] = case
        judged = self.judging.judge(case, key)
        self.judging.rescored.pop(key, None)
        self.judging.ripples(case, key, judged.failing)
        return judged.verdict

    def _test(self, node: NodeState, event: Event) -> None:
        level = str(event.detail.get("level") or re.sub(r"\D", "", event.code) or "2")
        passed = event.detail.get("passed")
        if not isinstance(passed, bool) or event.time < node.tests.get(level, (0.0, True))[0]:
            return
        node.tests[level] = event.time, passed
        node.touched()
        self.judging.ripple(event.node, event.time)


def _remember_print(app: AppState, case: Case, key: str) -> None:
    nodes = case.attempt.nodes
    app.prints.append([key, nodes[0], case.fingerprint, case.rank, case.iteration, list(nodes[:64])])
    del app.prints[:-PRINTS]
