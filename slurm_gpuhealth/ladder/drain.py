"""From the faults that wait for a decision to the node's state in Slurm. Only this file decides to change it.

no fault waits ──▶ nothing                       a fault in shadow ──▶ would-drain (recorded and reported once)
a fault waits ──▶ the node's record in Slurm
                    its Comment acks it       ──▶ acked         (until the time in the Comment)
                    in service, room left     ──▶ claimed ─2 s─▶ drained, or undone: over-budget  (ladder/claim.py)
                    in service, no room       ──▶ over-budget   (asked again each `slurm.request_poll`)
                    drained by us             ──▶ held          (reworded when the rung is higher)
                    our hold is gone          ──▶ acked         (an admin resumed the node: its faults are left alone)
                      if slurmctld may have lost it: asked again, once
                    an admin's, or Slurm's    ──▶ admin, left   (events are settled; a standing fault asks again)
                    controller silent         ──▶ undecided     (the next check asks again; a claim stays claimed)
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.frozen import frozen, replace
from slurm_gpuhealth.node import decisions, record
from slurm_gpuhealth.node.held import follow_hold, heed, note_owner, show, turn
from slurm_gpuhealth.policy import judge
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, hold, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.policy.judge import Judged
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

    Faults = dict[int, Judged]
    """By row id, as `record.waiting` has them."""

OUT = ("drained", "held", "claimed", "admin")
"""Outcomes after which no new job comes to the node."""


@frozen
class Run:
    """A program of ours that found faults on its node."""

    settings: Settings
    journal: Journal
    program: str
    node: str
    now: float
    job: int | None


@frozen
class Outcome:
    word: str
    detail: str = ""
    """For people."""
    held: dict[str, Any] | None = None
    """Our hold after it, if it is not in the journal yet."""
    noted: bool = False
    """The decision is in the journal already."""
    again: bool = False
    """The node has changed and nothing is decided: look at it once more."""


def act(settings: Settings, journal: Journal, program: str, node: str, now: float, job: int | None = None) -> str:
    """Act on the waiting faults; returns the outcome as in the picture above. Never raises because of Slurm."""
    _tell_shadow(journal, program, now, job)
    if judge.worst(record.waiting(journal).values()) is None:
        return "nothing"
    if program == "check" and not journal.get("hold"):
        _spread(node)
    lane = turn(settings)
    if lane is None:
        say(f"{node}: another program of ours waits for Slurm; undecided", error=True)
        return "undecided"
    run = Run(settings, journal, program, node, now, job)
    try:
        for _ in range(4):  # some faults were acked, or a claim was settled: look at what is left
            outcome = _decide(run)
            if not outcome.again:
                break
        return outcome.word
    finally:
        os.close(lane)


def _spread(node: str) -> None:
    """Wait a little: a check has time. If many nodes see a fault, the later nodes find the budget full."""
    import zlib

    from slurm_gpuhealth.ladder import budget

    time.sleep(zlib.crc32(node.encode()) % 1000 / 1000 * budget.SPLAY)


def _decide(run: Run) -> Outcome:
    """Ask Slurm, act, and write the outcome into the journal at once."""
    faults, before = record.waiting(run.journal), None
    worst = judge.worst(faults.values())
    if worst is None:
        return Outcome("nothing")
    try:
        before = show(run.settings, run.journal, run.node)
        outcome = _try(run, before, faults, worst)
    except control.ControllerDown as error:
        outcome = Outcome("undecided", str(error))
    except (control.SlurmError, ValueError) as error:
        outcome = Outcome("refused", str(error))
    if not outcome.again:
        _conclude(run, faults, worst, outcome, before.reason if before else "")
    return outcome


def _try(run: Run, before: NodeRecord, faults: Faults, worst: Judged) -> Outcome:
    """One attempt on the node whose record is `before`. Raises control.SlurmError."""
    from slurm_gpuhealth.ladder import entry

    settings, journal, ours = run.settings, run.journal, before.ours
    if journal.get("hold") and not ours:
        follow_hold(settings, journal, before, run.now)
        return Outcome("acked", again=True)
    if heed(journal, run.program, before, run.now, run.job):
        return Outcome("acked", again=True)
    if ours and ours.state == "claim":
        return _settle(run, before)
    note_owner(journal, before)
    plan, wanted = hold.plan_drain(before), entry.reason(settings, journal, before, worst, run.now, run.job)
    if ours and entry.is_higher(wanted, ours):
        higher = replace(wanted, since=ours.since, by=ours.by, to=ours.to, boots=max(wanted.boots, ours.boots))
        if len({ours.gpu, wanted.gpu, None}) < 3:  # what hands have done to one GPU is not done to another
            higher = replace(higher, done=ours.done)
        return _became(hold.reword(settings.slurm, before.name, higher), higher, run.now)
    if plan.action == "adopt" and journal.get("admins"):
        return Outcome("admin", f"an admin owned the node, and Slurm has written over the reason: {before.reason!r}")
    if plan.action in ("ours", "leave"):
        return _became(hold.Change(plan, before, before, done=bool(ours)), wanted, run.now)
    return _claim(run, before, faults, wanted)


def _conclude(run: Run, faults: Faults, worst: Judged, outcome: Outcome, was: str) -> None:
    """Write the outcome into the journal, and say it. `was`: the node's reason before."""
    journal, words = run.journal, decisions.of_fault(worst)

    def write() -> None:
        if outcome.held:
            journal.put("hold", outcome.held)
        number = decisions.note(journal, run.now, run.program, outcome.word, words, outcome.detail, was, run.job)
        if outcome.word in ("drained", "held"):
            record.settle(journal, faults, number)
        elif outcome.word in ("admin", "left"):
            record.settle(journal, (row for row, one in faults.items() if not one.finding.standing), number)
        if outcome.word not in ("drained", "held", "undecided"):
            journal.put("put-off", run.now)

    if not outcome.noted:
        journal.together(write)
    detail = f" ({outcome.detail})" if outcome.detail else ""
    say(f"{run.node}: {outcome.word}: {words} {worst.finding.message}{detail}", error=True)


def _became(change: hold.Change, wanted: Reason, now: float) -> Outcome:
    """The outcome of a change that is not a claim."""
    if change.plan.action == "leave":
        passing = change.after.base == "UNKNOWN" or change.after != change.before  # will be something else soon
        word = "admin" if change.after.owner == "admin" else "undecided" if passing else "left"
        return Outcome(word, change.plan.why)
    if change.after.ours and change.after.ours.state == "claim":  # it may still be undone: it settles no fault
        return Outcome("undecided", f"somebody is draining it just now: {change.after.reason!r}")
    held = {"reason": change.after.reason, "since": change.after.reason_time or now, "seen": now}
    if change.done:
        return Outcome("held", change.plan.why, held)
    # Slurm accepted it, and somebody changed it since: `follow_hold` finds out what that means.
    held = {"reason": reason.write(wanted), "since": now}
    return Outcome("held", f"changed at once by somebody: {change.after.reason!r}", held)


def _settle(run: Run, before: NodeRecord) -> Outcome:
    """Settle a claim: our program was killed before it did, or somebody is asking for a test just now."""
    from slurm_gpuhealth.ladder import claim

    if claim.is_elsewhere(before, time.time()):
        return Outcome("undecided", f"somebody is draining it just now: {before.reason!r}")
    outcome, why = claim.finish(run.settings, run.journal, before.name)
    if outcome in ("drained", "gone"):
        return Outcome("settled", again=True)
    return Outcome(outcome, why, noted=True)


def _claim(run: Run, before: NodeRecord, faults: Faults, wanted: Reason) -> Outcome:
    """Drain the node if the budget has room, now and 2 s later. Raises control.SlurmError if nothing was written."""
    from slurm_gpuhealth.ladder import claim

    seizure = _Seizure(run, before, faults, wanted)
    try:
        outcome, why = claim.take(run.settings, run.journal, before.name, wanted, seizure.write)
    except control.SlurmError as error:
        if seizure.change is None:
            raise
        return Outcome("claimed", str(error), noted=True)
    change = seizure.change
    if outcome == "gone":
        follow_hold(run.settings, run.journal, control.show_node(run.settings.slurm, before.name), run.now)
        return Outcome("settled", again=True)
    if outcome != "stopped" or change is None:
        return Outcome(outcome, why or seizure.plan.why, noted=change is not None)
    if change.plan.action in ("ours", "leave"):
        return _became(change, wanted, run.now)
    if change.done:
        return Outcome("claimed", "slurmctld is slow: the next check settles it", noted=True)
    return Outcome("drained", f"changed at once by somebody: {change.after.reason!r}", noted=True)


class _Seizure:
    """Writes a claim. `change` is its result, None before the write."""

    def __init__(self, run: Run, before: NodeRecord, faults: Faults, wanted: Reason) -> None:
        self.run, self.before, self.faults, self.wanted = run, before, faults, wanted
        self.plan, self.began = hold.plan_drain(before), time.monotonic()
        self.change: hold.Change | None = None

    def write(self) -> bool:
        """Whether it stands, and was written in time."""
        settings, journal, before = self.run.settings, self.run.journal, self.before
        # If we are killed after the write, this is put back.
        adopted = {"fact": self.wanted.fact, "was": before.reason}
        journal.put("adopted", adopted if self.plan.action == "adopt" else None)
        claimed = replace(self.wanted, state="claim")
        self.change = change = hold.seize(settings.slurm, before.name, claimed, before, self.plan)
        if change.plan.action in ("drain", "adopt"):
            journal.together(lambda: self._note(claimed, change.done))
        in_time = time.monotonic() - self.began < settings.slurm.timeout  # who waits for us has no more
        return change.done and change.plan.action != "ours" and in_time

    def _note(self, claimed: Reason, stands: bool) -> None:
        """Note the decision on the faults; ladder/claim.py confirms it or takes it back."""
        run, words = self.run, decisions.of_reason(self.wanted)
        number = decisions.note(
            run.journal, run.now, run.program, "claimed", words, "", self.before.reason, self.wanted.job
        )
        seen = {"seen": run.now} if stands else {}
        run.journal.put("hold", {"reason": reason.write(claimed), "since": run.now, "decision": number, **seen})
        record.settle(run.journal, self.faults, number)


def _tell_shadow(journal: Journal, program: str, now: float, job: int | None) -> None:
    """Record and report, once, faults in shadow mode that would have drained the node."""
    faults = record.waiting(journal, "shadow")
    worst = judge.worst(faults.values())
    if worst:
        number = decisions.note(journal, now, program, "would-drain", decisions.of_fault(worst), "shadow mode", "", job)
        record.settle(journal, faults, number)
        say(f"shadow mode: would drain: {decisions.of_fault(worst)} {worst.finding.message}")
