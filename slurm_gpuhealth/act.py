"""From faults that wait for a decision to the node's state in Slurm: the one place that decides to change it.

no fault waits ──▶ nothing                       a fault in shadow ──▶ would-drain (recorded, said once)
a fault waits ──▶ the node's record in Slurm
                    in service, budget left   ──▶ drained
                    in service, budget spent  ──▶ over-budget   (asked again each `slurm.request_poll`)
                    drained by us             ──▶ held          (reworded when the rung is higher)
                    our hold is gone          ──▶ acked         (an admin resumed it: what stood then is left alone)
                    an admin's, or Slurm's    ──▶ admin, left   (events are done with; what still stands asks again)
                    controller silent         ──▶ undecided     (the next check asks again)
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth import judge, lock, record
from slurm_gpuhealth.findings import RUNGS, Gpu
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, hold, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.journal import Journal
    from slurm_gpuhealth.judge import Judged
    from slurm_gpuhealth.settings import Settings
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

OUT = ("drained", "held", "admin")
"""Outcomes after which no new job comes to the node."""


def act(settings: Settings, journal: Journal, program: str, node: str, now: float, job: int | None = None) -> str:
    """Do what the waiting faults call for; the outcome as in the picture above. Never raises for Slurm's sake."""
    _tell_shadow(journal, program, now, job)
    if judge.worst(record.waiting(journal).values()) is None:
        return "nothing"
    turn = _turn(settings)
    if turn is None:
        say(f"{node}: another program of ours waits for Slurm; undecided", error=True)
        return "undecided"
    try:
        outcome = _decide(settings, journal, program, node, now, job)
        if outcome == "acked":  # the admin knew of some of it: what is left?
            outcome = _decide(settings, journal, program, node, now, job)
        return outcome
    finally:
        os.close(turn)


def look_at_hold(settings: Settings, journal: Journal, node: str, now: float) -> NodeRecord | None:
    """Read the node's record and take note of what became of our hold; None, said, when Slurm gives no answer."""
    turn = _turn(settings)
    try:
        found = control.show_node(settings.slurm, node)
        if turn is not None:  # else what we read may be older than what another program of ours is doing
            follow_hold(settings, journal, found, now)
        return found
    except (control.SlurmError, ValueError) as error:
        say(f"{node}: {error}")
        return None
    finally:
        if turn is not None:
            os.close(turn)


def follow_hold(settings: Settings, journal: Journal, found: NodeRecord, now: float) -> None:
    """Take note of what became of our hold, or find it again when the journal was lost."""
    ours, kept = found.ours, journal.get("hold")
    if ours and not kept:
        journal.put("hold", {"reason": found.reason, "since": found.reason_time or now})
    elif kept and not ours:
        journal.together(lambda: _hold_gone(settings, journal, found, kept, now))


def _hold_gone(settings: Settings, journal: Journal, found: NodeRecord, kept: dict[str, Any], now: float) -> None:
    journal.put("hold", None)
    if found.owner == "admin":
        detail = "an admin holds the node now"
        _note(journal, now, "check", "taken over", kept["reason"], detail, found.reason, None)
        return
    count = record.acknowledge(journal, now + settings.drain.ack)
    detail = f"resumed by an admin: what stands (findings: {count}) is left alone until it is mended"
    _note(journal, now, "check", "acked", kept["reason"], detail, found.reason, None)
    say(f"{found.name}: our hold is gone: {detail}")


def _turn(settings: Settings) -> int | None:
    """The lock under which we ask Slurm and believe the answer: fifty prologs that see one fault are one drain."""
    return lock.take(settings, "slurm", time.monotonic() + 2 * settings.slurm.timeout)


def _decide(settings: Settings, journal: Journal, program: str, node: str, now: float, job: int | None) -> str:
    """Ask Slurm, act, and write down at once what became of it."""
    faults = record.waiting(journal)
    worst = judge.worst(faults.values())
    if worst is None:
        return "nothing"
    outcome, detail, was, held = _try(settings, journal, node, worst, now, job)
    if outcome == "acked":
        return outcome

    def conclude() -> None:
        if held:
            journal.put("hold", held)
        number = _note(journal, now, program, outcome, _words(worst), detail, was, job)
        if outcome in ("drained", "held"):
            record.settle(journal, faults, number)
        elif outcome in ("admin", "left"):
            record.settle(journal, (row for row, one in faults.items() if not one.finding.standing), number)
        if outcome not in ("drained", "held", "undecided"):
            journal.put("put-off", now)

    journal.together(conclude)
    say(f"{node}: {outcome}: {_words(worst)} {worst.finding.message}" + (f" ({detail})" if detail else ""), error=True)
    return outcome


def _try(
    settings: Settings, journal: Journal, node: str, worst: Judged, now: float, job: int | None
) -> tuple[str, str, str, dict[str, Any] | None]:
    """One attempt: outcome, detail for people, Slurm's reason before it, our hold after it."""
    stopped = ("", "")

    def may_write(before: NodeRecord, plan: hold.Plan) -> bool:
        nonlocal stopped
        if journal.get("hold"):
            follow_hold(settings, journal, before, now)
            stopped = ("acked", "")
            return False
        held, total = control.holds(settings.slurm, settings.drain.nodes)
        if not hold.within_budget(len(held - {node}), total, settings.drain):
            stopped = ("over-budget", f"{len(held)} of {total} nodes are held already")
            return False
        return True

    try:
        wanted = _reason(worst, now, job)
        change = hold.take(settings.slurm, node, wanted, may_write)
        if change.plan.action == "ours" and change.before.ours and _rank(wanted) > _rank(change.before.ours):
            change = hold.reword(settings.slurm, node, wanted)
    except control.ControllerDown as error:
        return "undecided", str(error), "", None
    except (control.SlurmError, ValueError) as error:
        return "refused", str(error), "", None
    was = change.before.reason
    if stopped[0]:
        return *stopped, was, None
    if change.plan.action == "leave":
        passing = change.after.base == "UNKNOWN" or change.after != change.before  # soon, it is something else
        return (
            "admin" if change.after.owner == "admin" else "undecided" if passing else "left",
            change.plan.why,
            was,
            None,
        )
    if not change.done:  # Slurm took it, and somebody changed it since: `follow_hold` finds out what it means
        held = {"reason": reason.write(wanted), "since": now}
        return "drained", f"changed at once by somebody: {change.after.reason!r}", was, held
    held = {"reason": change.after.reason, "since": change.after.reason_time or now}
    return "held" if change.plan.action == "ours" else "drained", change.plan.why, was, held


def _tell_shadow(journal: Journal, program: str, now: float, job: int | None) -> None:
    """Faults that may not act yet: what would have been done, once."""
    faults = record.waiting(journal, "shadow")
    worst = judge.worst(faults.values())
    if worst:
        number = _note(journal, now, program, "would-drain", _words(worst), "shadow mode", "", job)
        record.settle(journal, faults, number)
        say(f"shadow mode: would drain: {_words(worst)} {worst.finding.message}")


def _reason(worst: Judged, now: float, job: int | None) -> Reason:
    finding, gpu = worst.finding, worst.finding.gpu or Gpu()
    level = finding.details.get("level") if finding.source == "dcgm" else None
    serial = "".join(c for c in gpu.serial or "" if c in reason.WORD)[:32]
    return reason.Reason(
        fact=reason.fact(finding.source, finding.code),
        gpu=gpu.index,
        rung=f"L{level}" if level else worst.rung or "L3",
        state="fail" if level else "queued",
        pci=gpu.pci or "" if worst.rung == "RMA" else "",
        serial=serial if worst.rung == "RMA" else "",
        since=reason.stamp(now),
        job=job,
        next=worst.rung if level else "",
    )


def _words(worst: Judged) -> str:
    """The beginning of the reason, for the decision table and syslog."""
    gpu = worst.finding.gpu
    index = "*" if gpu is None or gpu.index is None else gpu.index
    return f"{reason.fact(worst.finding.source, worst.finding.code)} GPU{index} {worst.rung}".strip()


def _rank(one: Reason) -> int:
    return RUNGS.index(one.next or one.rung)


def _note(
    journal: Journal, now: float, program: str, action: str, words: str, detail: str, was: str, job: int | None
) -> int:
    """A row in the decision table; the same decision again and again is one row."""
    last = journal.one("SELECT id, action, reason, result, was FROM decision ORDER BY id DESC LIMIT 1")
    if last and last[1:] == (action, words, detail, was) and action != "drained":
        journal.write("UPDATE decision SET time = ? WHERE id = ?", now, last[0])
        return int(last[0])
    return journal.write(
        "INSERT INTO decision (time, program, action, reason, result, was, job) VALUES (?, ?, ?, ?, ?, ?, ?)",
        *(now, program, action, words, detail, was, job),
    )
