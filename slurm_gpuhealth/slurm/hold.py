"""Taking a node out and giving it back: looked at just before the change, read back after it, an admin's left alone.

    read ──▶ plan ──▶ note (caller's journal and budget) ──▶ read again ──▶ write ──▶ read back ──▶ put back

Slurm has no compare-and-set: between the last read and the write are some milliseconds. What somebody said in them is
put back (`_order`), from slurmdbd's record of the node's states. Of a hold of ours only the text is written anew: Slurm
drops it where somebody has just resumed the node, and that record keeps whose drain was the last.
"""

from __future__ import annotations

import time

from slurm_gpuhealth.frozen import frozen, replace
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, remark
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from slurm_gpuhealth.config import settings
    from slurm_gpuhealth.slurm.node import Event, NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

    Action = Literal["drain", "adopt", "ours", "leave"]

IN_SERVICE = ("IDLE", "MIXED", "ALLOCATED", "DOWN")
"""Not FUTURE (no node yet) and UNKNOWN (slurmctld has just started: the next check asks again)."""
HARMLESS = {
    # Flags with which a confirmed fault may still be drained, and why. Any other, also one that a later Slurm brings,
    # is left alone: the node is in somebody's hands, and what a drain would do to it there is not known.
    "DRAIN": "its reason says whose",
    "COMPLETING": "a job is ending; a drain lets it",
    "NOT_RESPONDING": "slurmd is silent or just told to resume; the node itself runs us",
    "INVALID_REG": "slurmd reports less than configured, often a lost GPU",
    "PLANNED": "the scheduler has a job in mind for it; the drain makes it think again",
    "RESERVED": "a reservation with jobs of its users, which a bad GPU kills as any",
    "BLOCKED": "another job's exclusive topology keeps jobs off for now",
    "CLOUD": "says where the node lives",
    "DYNAMIC_NORM": "says how the node registered",
    "DYNAMIC_FUTURE": "says how the node registered",
    "EXTERNAL": "says how the node registered",
    "PERFCTRS": "its network counters are in use",
}
LEFT_ALONE = {
    # Said to the admin; the rule is the table above.
    "MAINTENANCE": "an admin is working on it under a maintenance reservation",
    "POWER_DOWN": "Slurm is about to power it down",
    "POWER_UP": "Slurm is about to power it up",
    "POWERED_DOWN": "it is powered down",
    "POWERING_DOWN": "it is being powered down",
    "POWERING_UP": "it is being powered up",
    "POWER_DRAIN": "it is powered down once idle",
    "REBOOT_REQUESTED": "a reboot is asked for",
    "REBOOT_ISSUED": "it is being rebooted",
    "REBOOT_CANCEL": "a reboot is being cancelled",
    "FAIL": "it is set to FAIL, which is an admin's doing",
}

PAUSES = (0.2, 0.6, 1.2, 0.0)
"""Seconds between looks at slurmdbd. slurmctld tells it in its own time: it has the end of a hold that we ended."""


@frozen
class Plan:
    action: Action
    why: str = ""
    """For `leave` and `adopt`: one line for the journal."""


@frozen
class Change:
    """What was done to a node. `done`: the record says afterwards what we wanted."""

    plan: Plan
    before: NodeRecord
    after: NodeRecord
    done: bool


def plan_drain(record: NodeRecord) -> Plan:
    """What may be done to a node in this state for a fault of ours. Pure."""
    whose = record.owner
    if whose == "us":
        return Plan("ours")
    if whose == "admin":
        return Plan("leave", f"it is an admin's: {'+'.join([record.base, *sorted(record.flags)])} {record.reason!r}")
    if record.base not in IN_SERVICE:
        return Plan("leave", f"its state is {record.base}")
    for flag in sorted(record.flags - HARMLESS.keys()):
        return Plan("leave", f"{flag}: {LEFT_ALONE.get(flag, 'not a flag that we know')}")
    if whose == "slurm" and not reasons.explains(record.reason):
        return Plan("leave", f"Slurm took it out for something else: {record.reason!r}")
    return Plan("adopt", f"Slurm's {record.reason!r} is explained by this fault") if whose == "slurm" else Plan("drain")


def take(
    slurm: settings.Slurm, name: str, reason: Reason, note: Callable[[NodeRecord, Plan], bool] = lambda *_: True
) -> Change:
    """Drain the node with our reason if `plan_drain` allows it. Raises control.SlurmError.

    `note` gets the record (old reason included) and the plan just before the write, and may stop it with False.
    """
    before = control.show_node(slurm, name)
    plan = plan_drain(before)
    if plan.action not in ("drain", "adopt"):
        return Change(plan, before, before, done=plan.action == "ours")
    if not note(before, plan):
        return Change(Plan("leave", "the caller said no"), before, before, done=False)
    return seize(slurm, name, reason, before, plan)


def seize(slurm: settings.Slurm, name: str, reason: Reason, before: NodeRecord, plan: Plan) -> Change:
    """Drain the node if it still is as in `before`, which may be seconds old: an admin's change of that time stands."""
    latest = control.show_node(slurm, name)
    if plan_drain(latest) == plan:
        latest = _keep_text(slurm, latest, "")  # of a node in service it would be another hold's
    if (latest.reason, plan_drain(latest)) != (before.reason, plan):
        plan = plan_drain(latest)
        if plan.action != "ours":
            plan = Plan("leave", f"it was changed while we looked: {latest.reason!r}")
        return Change(plan, before, latest, done=plan.action == "ours")
    after = _order(slurm, latest, lambda: control.drain(slurm, name, reason), reasons.write(reason))
    return Change(plan, before, after, done=_says(after, reason))


def take_over(slurm: settings.Slurm, name: str, reason: Reason, text: str) -> Change:
    """Replace another's reason `text` on a drained node by ours, when an admin says so. `give_back` restores it."""
    before = control.show_node(slurm, name)
    latest = _keep_text(slurm, before, text) if _is_anothers(before, text) else before
    if not _is_anothers(latest, text):
        return Change(Plan("leave", f"it was changed while we looked: {latest.reason!r}"), before, latest, done=False)
    after = _order(slurm, latest, lambda: control.drain(slurm, name, reason), reasons.write(reason))
    return Change(Plan("adopt", f"{text!r} is put back afterwards"), before, after, done=_says(after, reason))


def reword(slurm: settings.Slurm, name: str, reason: Reason) -> Change:
    """Replace our reason by that of another rung or state. Each is a row in slurmdbd: not for every sign of life."""
    before = control.show_node(slurm, name)
    if before.ours is None:
        return Change(Plan("leave", f"the hold is no longer ours: {before.reason!r}"), before, before, done=False)
    if _says(before, reason):
        return Change(Plan("ours"), before, before, done=True)
    after = put(slurm, before, reason)
    return Change(Plan("ours"), before, after, done=_says(after, reason))


def put(slurm: settings.Slurm, before: NodeRecord, reason: Reason) -> NodeRecord:
    """Our new reason on a node that we hold; the record after it, which is not ours when somebody came first. A reboot
    leaves the node DOWN without its drain, ours only by Slurm's ` : reboot complete`: then the drain comes with it."""
    without = before.base == "DOWN" and "DRAIN" not in before.flags
    write = control.drain if without else control.set_reason
    after = _order(slurm, before, lambda: write(slurm, before.name, reason), reasons.write(reason))
    if without and after.base != "DOWN" and _says(after, reason):
        say(f"{before.name}: somebody resumed it just before our order: given back", error=True)
        control.undrain(slurm, before.name)
        return control.show_node(slurm, before.name)
    return after


def put_text(slurm: settings.Slurm, before: NodeRecord, text: str) -> NodeRecord:
    """Somebody's own reason in place of ours; the record after it."""
    return _order(slurm, before, lambda: control.set_text(slurm, before.name, text), text)


def end(slurm: settings.Slurm, before: NodeRecord, down: bool) -> NodeRecord:
    """End the drain of a node that was `before`; with `down` also its DOWN. The record after it."""
    write = control.resume if down else control.undrain
    return _order(slurm, before, lambda: write(slurm, before.name), "")


def _order(slurm: settings.Slurm, before: NodeRecord, write: Callable[[], None], text: str) -> NodeRecord:
    """Give the order, look again, and put back what somebody said in between. The record after it.

    `text`: the reason that we write; "" ends the hold.
    """
    write()
    after = control.show_node(slurm, before.name)
    if after.reason == text and before.owner != "none":  # else a later word than ours stands there
        after = put_back(slurm, [before], [after], text)[0]
    return after


def put_back(
    slurm: settings.Slurm, before: Sequence[NodeRecord], after: Sequence[NodeRecord], text: str = ""
) -> list[NodeRecord]:
    """The records `after` our order, with what others said between it and `before` put back."""
    names = [one.name for one in after]
    for pause in PAUSES:
        events = control.events(slurm, names) if names else []
        last = {one.node: one for one in events}
        if text or not any(one.end == 0.0 for one in last.values()):
            break
        time.sleep(pause)
    now = []
    for old, new in zip(before, after):
        said = last.get(new.name)
        if said and _came_between(old, said) and (said.end == 0.0) == bool(text):
            say(f"{new.name}: somebody set it {said.state} {said.reason!r} just before our order: put back", error=True)
            control.put_out(slurm, new.name, said.state, said.reason)
            new = control.show_node(slurm, new.name)
        now.append(new)
    return now


def _came_between(before: NodeRecord, said: Event) -> bool:
    """Whether this is a word of another's since the record `before`, whose times are slurmctld's too."""
    known = any(_is_kept_of(said.reason, text) for text in (before.reason, remark.read_said(before.comment).was))
    ours_or_slurms = said.reason.startswith(reasons.PREFIX) or reasons.is_slurms(said.reason)
    return said.start >= before.reason_time > 0 and bool(said.reason) and not known and not ours_or_slurms


def _is_kept_of(kept: str, text: str) -> bool:
    """Whether slurmdbd keeps `text` so: its first 255 bytes, and of letters that its database lacks, `?`."""
    short, whole = ("".join(c for c in one if c.isascii() and c != "?") for one in (kept, text))
    return short == whole or (len(text.encode("utf-8", "replace")) > reasons.MAX_BYTES and whole.startswith(short))


def give_back(slurm: settings.Slurm, name: str) -> Change:
    """End our hold: undrain the node, or put back the text of whoever had it drained when we took it over.

    A DOWN stays DOWN, and its reason with it, unless our own reboot made it.
    """
    before = control.show_node(slurm, name)
    if before.ours is None:
        return Change(Plan("leave", f"the hold is not ours: {before.reason!r}"), before, before, done=False)
    was = remark.read_said(before.comment).was
    if was:
        after = put_text(slurm, before, was)
        if after.reason == was:
            after = _keep_text(slurm, before, "")
        return Change(Plan("ours"), before, after, done=after.reason == was)
    # After a reboot the drain is gone, and Slurm's words behind ours are what makes the DOWN ours.
    ours = before.base == "DOWN" and (
        "DRAIN" not in before.flags or (before.ours.boots and before.ours.state != "claim")
    )
    after = end(slurm, before, down=bool(ours))
    return Change(Plan("ours"), before, after, done="DRAIN" not in after.flags)


def _is_anothers(record: NodeRecord, text: str) -> bool:
    return record.owner in ("admin", "slurm") and "DRAIN" in record.flags and record.reason == text


def _keep_text(slurm: settings.Slurm, record: NodeRecord, text: str) -> NodeRecord:
    """Keep another's reason in the node's Comment, or forget the one there; the record after it."""
    said = remark.read_said(record.comment)
    if said.was == text:
        return record
    comment = remark.write_said(record.comment, replace(said, was=text))
    control.set_remarks(slurm, record.name, comment=comment)
    return control.show_node(slurm, record.name)


def _says(record: NodeRecord, reason: Reason) -> bool:
    """Whether the hold is ours with this reason; a long user name is cut in Slurm, so the texts are compared."""
    return record.ours is not None and reasons.write(record.ours) == reasons.write(reason)
