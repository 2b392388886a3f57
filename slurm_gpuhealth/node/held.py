"""Our hold on this node as the journal has it. Follows the node's record in Slurm, which others may change."""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.node import decisions, lock, record
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, reason, remark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

MEANWHILE = 2.0
"""Seconds of tolerance: slurmctld's times are whole seconds."""
SETTLING = 2.0
"""Seconds that a claim waits before it counts the held nodes again."""
REGISTERED = ("gres/", "Low ")
"""How Slurm's reason begins if slurmd registers with less than configured. From 23.02 on it replaces any other."""
BEFORE = 600.0
"""A hold's faults were decided on at most so many seconds before it began by slurmctld's clock."""


def look_at_hold(settings: Settings, journal: Journal, node: str, now: float) -> NodeRecord | None:
    """Read the node's record and note what became of our hold. If Slurm gives no answer: None, and it is logged."""
    lane = turn(settings)
    try:
        found = control.show_node(settings.slurm, node)
        if lane is not None:  # otherwise another program of ours may be changing it just now
            found = restored(settings, journal, found)
            follow_hold(settings, journal, found, now)
            note_owner(journal, found)
            heed(journal, "check", found, now, None)
            slow = remark.slow_text(found.extra)
            if slow != journal.get("slow", ""):
                from slurm_gpuhealth.node.slow import note

                note(settings, journal, slow, now)
        return found
    except (control.SlurmError, ValueError) as error:
        say(f"{node}: {error}")
        return None
    finally:
        if lane is not None:
            os.close(lane)


def show(settings: Settings, journal: Journal, node: str) -> NodeRecord:
    """The node's record, with our reason put back if Slurm has written over it. Raises control.SlurmError."""
    return restored(settings, journal, control.show_node(settings.slurm, node))


def restored(settings: Settings, journal: Journal, found: NodeRecord) -> NodeRecord:
    """The record after our reason was put back, or `found` if Slurm has not written over it. Raises control.SlurmError.

    From 23.02 on Slurm does so each time that slurmd registers with fewer GPUs than configured.
    """
    kept = journal.get("hold")
    if not kept or not _is_written_over(found) or not reason.explains(found.reason):
        return found
    ours, said = reason.parse(kept["reason"]), remark.read_said(found.comment)
    if ours is None or ours.state == "claim":
        return found
    acked = said.acks.get(ours.fact, 0.0) > kept.get("seen", kept["since"])  # resumed by an admin, however long ago
    put_back = kept.get("was") and not said.was  # Slurm's reason is from before our hold
    # DOWN without a drain is ours only by our reboot.
    elsewhere = "DRAIN" not in found.flags and " reboot running" not in kept["reason"]
    if acked or put_back or elsewhere or _has_ended(settings, found, kept):
        return found
    from slurm_gpuhealth.slurm import hold

    return hold.restore(settings.slurm, found, kept["reason"])


def _is_written_over(found: NodeRecord) -> bool:
    return found.owner == "slurm" and found.reason.startswith(REGISTERED)


def _has_ended(settings: Settings, found: NodeRecord, kept: dict[str, Any]) -> bool:
    """Whether somebody ended our hold, or drained the node anew, by slurmdbd's record.

    Slurm leaves no row there when it writes over a reason. While a job is still here, or without slurmdbd, the drain
    has none either: then only a request counts as ended, which its user may have cancelled.
    """
    events = control.events(settings.slurm, [found.name])
    last = next((one.reason for one in reversed(events) if not one.end), "")
    if last:
        return last.startswith(REGISTERED) or not (last.startswith(reason.PREFIX) or reason.is_slurms(last))
    if any(one.reason.startswith(reason.PREFIX) and one.end > kept["since"] + MEANWHILE for one in events):
        return True
    return _is_request(reason.parse(kept["reason"])) and not remark.read_said(found.comment).was


def note_owner(journal: Journal, found: NodeRecord) -> None:
    """Note whether an admin owns the node. Slurm may then write over the admin's reason: the node stays the admin's."""
    admins = found.owner == "admin" or None
    if not _is_written_over(found) and journal.get("admins") != admins:
        journal.put("admins", admins)


def follow_hold(settings: Settings, journal: Journal, found: NodeRecord, now: float) -> None:
    """Note what became of our hold; if the journal was lost, find the hold again."""
    ours, kept = found.ours, journal.get("hold")
    if kept and (not ours or _is_later(ours, kept["reason"])):
        before, lost = kept, _how_lost(settings, found, kept)
        again = journal.get("lost")
        if lost and not (again and again["fact"] == _fact(before) and 0 <= now - again["time"] < settings.drain.ack):
            journal.together(lambda: _lost(journal, found, before, lost, now))
        else:
            journal.together(lambda: _hold_gone(settings, journal, found, before, now, lost))
        kept = None
    if ours:
        if (not kept or kept["reason"] != found.reason) and ours.state != "claim":
            decisions.confirmed(journal, kept)
        kept = kept or {"since": found.reason_time or now}
        was = remark.read_said(found.comment).was
        journal.put("hold", {**kept, "reason": found.reason, "seen": now, "was": was})


def _fact(kept: dict[str, Any]) -> str:
    """`gpuhealth:Xid79 GPU3`: what a hold was about, whatever its rung."""
    return " ".join(kept["reason"].split(" ")[:2])


def _how_lost(settings: Settings, found: NodeRecord, kept: dict[str, Any]) -> str:
    """How slurmctld may have lost a hold that is gone; "" if an admin ended it. Raises control.SlurmError."""
    if found.owner == "admin":  # the reason is the admin's own
        return ""
    if _is_written_over(found) and _is_unsaid(settings, found, kept):
        return "Slurm wrote over our reason"
    if "seen" not in kept:
        return "nobody saw it stand after it was written"
    up = control.up(settings.slurm)
    if time.time() - up >= kept["seen"] - MEANWHILE:  # not `now`: our program may have run a test since then
        return f"slurmctld restarted {up:.0f} s ago, and may have lost it"
    return ""


def _is_unsaid(settings: Settings, found: NodeRecord, kept: dict[str, Any]) -> bool:
    """Whether our reason, which is not put back over this one of Slurm's, was nobody's to end: a claim, or a node that
    also lacks memory or cores."""
    if " claim " in f"{kept['reason']} ":
        return True
    return not (reason.explains(found.reason) or _has_ended(settings, found, kept))


def _lost(journal: Journal, found: NodeRecord, kept: dict[str, Any], how: str, now: float) -> None:
    """The hold's faults wait again. Only once: if the next hold is gone too, somebody does not want it."""
    decisions.confirmed(journal, kept)
    journal.put("hold", None)
    journal.put("put-off", None)
    journal.put("lost", {"fact": _fact(kept), "time": now})
    count = record.reopen_since(journal, kept["since"] - BEFORE)
    detail = f"{how}: its faults (findings: {count}) ask again, once"
    decisions.note(journal, now, "check", "lost", kept["reason"], detail, found.reason, None)
    say(f"{found.name}: our hold is gone: {detail}", error=True)


def _is_later(ours: Reason, kept: str) -> bool:
    """Whether this is a new hold: somebody asked for a test after our hold for a fault had ended."""
    return _is_request(ours) and not _is_request(reason.parse(kept))


def _is_request(ours: Reason | None) -> bool:
    return ours is None or ours.fact in reason.ON_REQUEST


def _hold_gone(
    settings: Settings, journal: Journal, found: NodeRecord, kept: dict[str, Any], now: float, lost: str
) -> None:
    decisions.confirmed(journal, kept)
    journal.put("hold", None)
    if _is_request(reason.parse(kept["reason"])):  # cancelled, or undone from another host: it was about no fault
        record.reopen_standing(journal)
    acks = remark.read_said(found.comment).acks
    count = record.acknowledge(journal, now + settings.drain.ack, acks)
    if found.owner == "admin":  # the admin knows what it was about
        detail = "an admin holds the node now"
        decisions.note(journal, now, "check", "taken over", kept["reason"], detail, found.reason, None)
        return
    whose = f"gone a second time ({lost})" if lost else "resumed by an admin"
    detail = f"{whose}: its standing faults (findings: {count}) are left alone until they are mended"
    decisions.note(journal, now, "check", "acked", kept["reason"], detail, found.reason, None)
    say(f"{found.name}: our hold is gone: {detail}")


def turn(settings: Settings) -> int | None:
    """The lock for reading and changing the node in Slurm: if fifty prologs see one fault, they drain once.

    The limit is the time that the holder of the lock usually needs, with a claim's wait.
    """
    return lock.take(settings, "slurm", time.monotonic() + 2 * settings.slurm.timeout + SETTLING)


def heed(journal: Journal, program: str, found: NodeRecord, now: float, job: int | None) -> bool:
    """Leave alone the waiting faults that the node's Comment acknowledges. Returns whether there are any."""
    acks = remark.read_said(found.comment).acks
    until = record.acked(journal, acks, now) if acks else {}

    def leave() -> None:
        words = ", ".join(f"{fact} until {remark.stamp(when)}" for fact, when in acks.items())
        number = decisions.note(journal, now, program, "acked", words, "acknowledged in the node's Comment", "", job)
        record.leave(journal, until)
        record.settle(journal, until, number)

    if until:
        journal.together(leave)
    return bool(until)
