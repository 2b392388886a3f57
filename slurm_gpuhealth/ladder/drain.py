"""From faults that wait for a decision to the node's state in Slurm: the one place that decides to change it.

no fault waits ──▶ nothing                       a fault in shadow ──▶ would-drain (recorded, said once)
a fault waits ──▶ the node's record in Slurm
                    its Comment acks it       ──▶ acked         (until the time that stands there)
                    in service, room left     ──▶ claimed ─2 s─▶ drained, or undone: over-budget  (ladder/claim.py)
                    in service, no room       ──▶ over-budget   (asked again each `slurm.request_poll`)
                    drained by us             ──▶ held          (reworded when the rung is higher)
                    our hold is gone          ──▶ acked         (an admin resumed it: what stood then is left alone)
                      slurmctld may have lost it: it asks again, once
                    an admin's, or Slurm's    ──▶ admin, left   (events are done with; what still stands asks again)
                    controller silent         ──▶ undecided     (the next check asks again; a claim stays claimed)
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.frozen import frozen, replace
from slurm_gpuhealth.node import decisions, record
from slurm_gpuhealth.node.held import follow_hold, heed, show, turn
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
class Outcome:
    word: str
    detail: str = ""
    """For people."""
    held: dict[str, Any] | None = None
    """Our hold after it, where it is not written down yet."""
    noted: bool = False
    """The decision is in the journal already."""


def act(settings: Settings, journal: Journal, program: str, node: str, now: float, job: int | None = None) -> str:
    """Do what the waiting faults call for; the outcome as in the picture above. Never raises for Slurm's sake."""
    _tell_shadow(journal, program, now, job)
    if judge.worst(record.waiting(journal).values()) is None:
        return "nothing"
    if program == "check" and not journal.get("hold"):
        _spread(node)
    lane = turn(settings)
    if lane is None:
        say(f"{node}: another program of ours waits for Slurm; undecided", error=True)
        return "undecided"
    try:
        for _ in range(4):  # an admin knew of some of it, a claim was settled: what is left?
            outcome = _decide(settings, journal, program, node, now, job)
            if outcome not in ("acked", "settled"):
                break
        return outcome
    finally:
        os.close(lane)


def _spread(node: str) -> None:
    """A check has time: of many nodes with one fault the later ones then find the budget spent, and write nothing."""
    import zlib

    from slurm_gpuhealth.ladder import budget

    time.sleep(zlib.crc32(node.encode()) % 1000 / 1000 * budget.SPLAY)


def _decide(settings: Settings, journal: Journal, program: str, node: str, now: float, job: int | None) -> str:
    """Ask Slurm, act, and write down at once what became of it."""
    faults = record.waiting(journal)
    worst = judge.worst(faults.values())
    if worst is None:
        return "nothing"
    was = ""
    try:
        before = show(settings, journal, node)
        was = before.reason
        if journal.get("hold") and not before.ours:
            follow_hold(settings, journal, before, now)
            return "acked"
        if heed(journal, program, before, now, job):
            return "acked"
        outcome = _try(settings, journal, program, before, faults, now, job)
    except control.ControllerDown as error:
        outcome = Outcome("undecided", str(error))
    except (control.SlurmError, ValueError) as error:
        outcome = Outcome("refused", str(error))
    if outcome.word in ("acked", "settled"):
        return outcome.word
    words = decisions.of_fault(worst)

    def conclude() -> None:
        if outcome.held:
            journal.put("hold", outcome.held)
        number = decisions.note(
            journal, now, program, outcome.word, decisions.of_fault(worst), outcome.detail, was, job
        )
        if outcome.word in ("drained", "held"):
            record.settle(journal, faults, number)
        elif outcome.word in ("admin", "left"):
            record.settle(journal, (row for row, one in faults.items() if not one.finding.standing), number)
        if outcome.word not in ("drained", "held", "undecided"):
            journal.put("put-off", now)

    if not outcome.noted:
        journal.together(conclude)
    detail = f" ({outcome.detail})" if outcome.detail else ""
    say(f"{node}: {outcome.word}: {words} {worst.finding.message}{detail}", error=True)
    return outcome.word


def _try(
    settings: Settings, journal: Journal, program: str, before: NodeRecord, faults: Faults, now: float, job: int | None
) -> Outcome:
    """One attempt on the node whose record is `before`. Raises control.SlurmError."""
    from slurm_gpuhealth.ladder import entry

    plan, ours, worst = hold.plan_drain(before), before.ours, judge.worst(faults.values())
    assert worst is not None  # noqa: S101 - for the type checker
    if ours and ours.state == "claim":
        return _settle(settings, journal, before)
    wanted = entry.reason(settings, journal, before, worst, now, job)
    if ours and entry.is_higher(wanted, ours):
        higher = replace(wanted, since=ours.since, by=ours.by, to=ours.to, boots=max(wanted.boots, ours.boots))
        if len({ours.gpu, wanted.gpu, None}) < 3:  # what hands have done to one GPU is not done to another
            higher = replace(higher, done=ours.done)
        return _became(hold.reword(settings.slurm, before.name, higher), higher, now)
    if plan.action in ("ours", "leave"):
        return _became(hold.Change(plan, before, before, done=bool(ours)), wanted, now)
    return _claim(settings, journal, program, before, faults, wanted, now)


def _became(change: hold.Change, wanted: Reason, now: float) -> Outcome:
    """What a change that is no claim has become."""
    if change.plan.action == "leave":
        passing = change.after.base == "UNKNOWN" or change.after != change.before  # soon, it is something else
        word = "admin" if change.after.owner == "admin" else "undecided" if passing else "left"
        return Outcome(word, change.plan.why)
    if change.after.ours and change.after.ours.state == "claim":  # it may be undone yet: no answer to a fault
        return Outcome("undecided", f"somebody is just taking it: {change.after.reason!r}")
    held = {"reason": change.after.reason, "since": change.after.reason_time or now, "seen": now}
    if change.done:
        return Outcome("held", change.plan.why, held)
    # Slurm took it, and somebody changed it since: `follow_hold` finds out what it means.
    held = {"reason": reason.write(wanted), "since": now}
    return Outcome("held", f"changed at once by somebody: {change.after.reason!r}", held)


def _settle(settings: Settings, journal: Journal, before: NodeRecord) -> Outcome:
    """A claim that nobody has settled: a program of ours was killed over it, or somebody asks for a test just now."""
    from slurm_gpuhealth.ladder import claim

    if claim.is_elsewhere(before, time.time()):
        return Outcome("undecided", f"somebody is just taking it: {before.reason!r}")
    outcome, why = claim.finish(settings, journal, before.name)
    if outcome in ("drained", "gone"):
        return Outcome("settled")
    return Outcome(outcome, why, noted=True)


def _claim(
    settings: Settings,
    journal: Journal,
    program: str,
    before: NodeRecord,
    faults: Faults,
    wanted: Reason,
    now: float,
) -> Outcome:
    """Drain the node if the budget has room, also 2 s later. Raises control.SlurmError where nothing was written."""
    from slurm_gpuhealth.ladder import claim

    plan, began = hold.plan_drain(before), time.monotonic()
    written: hold.Change | None = None

    def write() -> bool:
        nonlocal written
        adopted = {"fact": wanted.fact, "was": before.reason}  # to be put back, should we be killed after the write
        journal.put("adopted", adopted if plan.action == "adopt" else None)
        written = hold.seize(settings.slurm, before.name, replace(wanted, state="claim"), before, plan)
        if written.plan.action in ("drain", "adopt"):
            stands = written.done
            journal.together(lambda: _claimed(journal, program, wanted, before.reason, faults, now, stands))
        in_time = time.monotonic() - began < settings.slurm.timeout  # who waits for us has no more
        return written.done and written.plan.action != "ours" and in_time

    try:
        outcome, why = claim.take(settings, journal, before.name, wanted, write)
    except control.SlurmError as error:
        if written is None:
            raise
        return Outcome("claimed", str(error), noted=True)
    if outcome == "gone":
        follow_hold(settings, journal, control.show_node(settings.slurm, before.name), now)
        return Outcome("settled")
    if outcome != "stopped" or written is None:
        return Outcome(outcome, why or plan.why, noted=written is not None)
    if written.plan.action in ("ours", "leave"):
        return _became(written, wanted, now)
    if written.done:
        return Outcome("claimed", "slurmctld is slow: the next check settles it", noted=True)
    return Outcome("drained", f"changed at once by somebody: {written.after.reason!r}", noted=True)


def _claimed(
    journal: Journal, program: str, wanted: Reason, was: str, faults: Faults, now: float, stands: bool
) -> None:
    """The faults have their decision, which ladder/claim.py confirms or takes back."""
    number = decisions.note(journal, now, program, "claimed", decisions.of_reason(wanted), "", was, wanted.job)
    seen = {"seen": now} if stands else {}
    kept = {"reason": reason.write(replace(wanted, state="claim")), "since": now, "decision": number, **seen}
    journal.put("hold", kept)
    record.settle(journal, faults, number)


def _tell_shadow(journal: Journal, program: str, now: float, job: int | None) -> None:
    """Faults that may not act yet: what would have been done, once."""
    faults = record.waiting(journal, "shadow")
    worst = judge.worst(faults.values())
    if worst:
        number = decisions.note(journal, now, program, "would-drain", decisions.of_fault(worst), "shadow mode", "", job)
        record.settle(journal, faults, number)
        say(f"shadow mode: would drain: {decisions.of_fault(worst)} {worst.finding.message}")
