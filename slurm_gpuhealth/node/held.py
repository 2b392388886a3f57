"""Our hold on this node as the journal has it: kept in step with the node's record in Slurm, whoever changes that."""

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
"""Seconds: slurmctld's times are whole ones."""
REGISTERED = ("gres/", "Low ")
"""How Slurm's reason begins where slurmd has less than is configured."""
BEFORE = 600.0
"""Seconds before a hold's beginning, by slurmctld's clock, in which its faults were decided on."""


def look_at_hold(settings: Settings, journal: Journal, node: str, now: float) -> NodeRecord | None:
    """Read the node's record and take note of what became of our hold; None, said, when Slurm gives no answer."""
    lane = turn(settings)
    try:
        found = show(settings, journal, node)
        if lane is not None:  # else what we read may be older than what another program of ours is doing
            follow_hold(settings, journal, found, now)
            heed(journal, "check", found, now, None)
        return found
    except (control.SlurmError, ValueError) as error:
        say(f"{node}: {error}")
        return None
    finally:
        if lane is not None:
            os.close(lane)


def show(settings: Settings, journal: Journal, node: str) -> NodeRecord:
    """The node's record, with our reason put back where Slurm has written over it. Raises control.SlurmError.

    From 23.02 on it does so each time that slurmd registers with fewer GPUs than configured. An admin's resume looks
    the same where Slurm then drains the node again at once: it was never in service.
    """
    found, kept = control.show_node(settings.slurm, node), journal.get("hold")
    if not kept or found.owner != "slurm" or not found.reason.startswith(REGISTERED):
        return found
    if remark.read_said(found.comment).acks:  # undone
        return found
    if "DRAIN" in found.flags:
        control.set_text(settings.slurm, node, kept["reason"])
    elif " reboot running" in kept["reason"]:  # ours, DOWN without a drain
        control.put_out(settings.slurm, node, "DRAIN", kept["reason"])
    else:
        return found
    return control.show_node(settings.slurm, node)


def follow_hold(settings: Settings, journal: Journal, found: NodeRecord, now: float) -> None:
    """Take note of what became of our hold, or find it again when the journal was lost."""
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
        journal.put("hold", {**kept, "reason": found.reason, "seen": now})


def _fact(kept: dict[str, Any]) -> str:
    """`gpuhealth:Xid79 GPU3`: what a hold was about, however far its ladder was climbed."""
    return " ".join(kept["reason"].split(" ")[:2])


def _how_lost(settings: Settings, found: NodeRecord, kept: dict[str, Any]) -> str:
    """How a hold that is gone may have been lost by slurmctld; "" where it was an admin. Raises control.SlurmError."""
    if found.owner == "admin":  # the admin's own text stands there
        return ""
    if "seen" not in kept:
        return "nobody saw it stand after it was written"
    up = control.up(settings.slurm)
    if time.time() - up >= kept["seen"] - MEANWHILE:  # not the time when our program began: it may have tested since
        return f"slurmctld has started anew {up:.0f} s ago, and may have lost it"
    return ""


def _lost(journal: Journal, found: NodeRecord, kept: dict[str, Any], how: str, now: float) -> None:
    """What the hold was about waits again. Once: if that is lost too, somebody or something does not want it."""
    decisions.confirmed(journal, kept)
    journal.put("hold", None)
    journal.put("put-off", None)
    journal.put("lost", {"fact": _fact(kept), "time": now})
    count = record.reopen_since(journal, kept["since"] - BEFORE)
    detail = f"{how}: what stands (findings: {count}) asks again, once"
    decisions.note(journal, now, "check", "lost", kept["reason"], detail, found.reason, None)
    say(f"{found.name}: our hold is gone: {detail}", error=True)


def _is_later(ours: Reason, kept: str) -> bool:
    """Whether somebody asked for a test after our hold for a fault had been ended: a hold of its own."""
    return _is_request(ours) and not _is_request(reason.parse(kept))


def _is_request(ours: Reason | None) -> bool:
    return ours is None or ours.fact in reason.ON_REQUEST


def _hold_gone(
    settings: Settings, journal: Journal, found: NodeRecord, kept: dict[str, Any], now: float, lost: str
) -> None:
    decisions.confirmed(journal, kept)
    journal.put("hold", None)
    if _is_request(reason.parse(kept["reason"])):  # cancelled, or undone from afar: it spoke of no fault
        record.reopen_standing(journal)
    acks = remark.read_said(found.comment).acks
    count = record.acknowledge(journal, now + settings.drain.ack, acks)
    if found.owner == "admin":  # and knows what it was about
        detail = "an admin holds the node now"
        decisions.note(journal, now, "check", "taken over", kept["reason"], detail, found.reason, None)
        return
    whose = f"gone a second time ({lost})" if lost else "resumed by an admin"
    detail = f"{whose}: what stands (findings: {count}) is left alone until it is mended"
    decisions.note(journal, now, "check", "acked", kept["reason"], detail, found.reason, None)
    say(f"{found.name}: our hold is gone: {detail}")


def turn(settings: Settings) -> int | None:
    """The lock under which we ask Slurm and believe the answer: fifty prologs that see one fault are one drain.

    Who has it needs that long, and what a claim waits, unless slurmctld answers again and again, and each time late.
    """
    return lock.take(settings, "slurm", time.monotonic() + 2 * settings.slurm.timeout + 2.0)


def heed(journal: Journal, program: str, found: NodeRecord, now: float, job: int | None) -> bool:
    """Whether the node's Comment acknowledges faults that wait: those are left alone."""
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
