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


def look_at_hold(settings: Settings, journal: Journal, node: str, now: float) -> NodeRecord | None:
    """Read the node's record and take note of what became of our hold; None, said, when Slurm gives no answer."""
    lane = turn(settings)
    try:
        found = control.show_node(settings.slurm, node)
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


def follow_hold(settings: Settings, journal: Journal, found: NodeRecord, now: float) -> None:
    """Take note of what became of our hold, or find it again when the journal was lost."""
    ours, kept = found.ours, journal.get("hold")
    if kept and (not ours or _is_later(ours, kept["reason"])):
        before = kept
        journal.together(lambda: _hold_gone(settings, journal, found, before, now))
        kept = None
    if ours and (not kept or kept["reason"] != found.reason):
        if ours.state != "claim":
            decisions.confirmed(journal, kept)
        journal.put("hold", {**(kept or {"since": found.reason_time or now}), "reason": found.reason})


def _is_later(ours: Reason, kept: str) -> bool:
    """Whether somebody asked for a test after our hold for a fault had been ended: a hold of its own."""
    was = reason.parse(kept)
    return ours.fact in reason.ON_REQUEST and was is not None and was.fact not in reason.ON_REQUEST


def _hold_gone(settings: Settings, journal: Journal, found: NodeRecord, kept: dict[str, Any], now: float) -> None:
    decisions.confirmed(journal, kept)
    journal.put("hold", None)
    acks = remark.read_said(found.comment).acks
    count = record.acknowledge(journal, now + settings.drain.ack, acks)
    if found.owner == "admin":  # and knows what it was about
        detail = "an admin holds the node now"
        decisions.note(journal, now, "check", "taken over", kept["reason"], detail, found.reason, None)
        return
    detail = f"resumed by an admin: what stands (findings: {count}) is left alone until it is mended"
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
