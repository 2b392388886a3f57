"""Drains a node and gives it back. Reads it just before and just after each change, and leaves an admin's node alone.

    read ──▶ plan ──▶ note (caller's journal and budget) ──▶ read again ──▶ write ──▶ read back ──▶ put back

Slurm has no compare-and-set: between the last read and the write are some milliseconds. If somebody changes the node in
that time, that change is put back (`_order`), from slurmdbd's record of the node's states. On a node that we hold we
write only the text: if somebody has just resumed the node, Slurm drops it, and the record shows whose drain was last.
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
"""Without FUTURE (no node yet) and UNKNOWN (slurmctld has just started: the next check asks again)."""
HARMLESS = {
    # A node with these flags may be drained for a fault; the text says why. With any other flag, even one that a later
    # Slurm adds, the node is left alone: somebody is working with it, and the effect of a drain is not known.
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
    # What the admin is told. The table above is the rule.
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
"""Seconds between looks at slurmdbd: slurmctld informs it with a delay. We wait until it has the end of our hold."""


@frozen
class Plan:
    action: Action
    why: str = ""
    """For `leave` and `adopt`: one line for the journal."""


@frozen
class Change:
    """What was done to a node. `done`: afterwards the record says what we wanted."""

    plan: Plan
    before: NodeRecord
    after: NodeRecord
    done: bool


def plan_drain(record: NodeRecord) -> Plan:
    """What we may do to a node in this state for a fault. Pure."""
    whose = record.owner
    if whose == "us":
        return Plan("ours")
    if whose == "admin":
        state = "+".join([record.base, *sorted(record.flags)])
        return Plan("leave", f"an admin owns the node: {state} {record.reason!r}")
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

    `note` gets the record with its old reason and the plan just before the write, and may stop it with False.
    """
    before = control.show_node(slurm, name)
    plan = plan_drain(before)
    if plan.action not in ("drain", "adopt"):
        return Change(plan, before, before, done=plan.action == "ours")
    if not note(before, plan):
        return Change(Plan("leave", "the caller said no"), before, before, done=False)
    return seize(slurm, name, reason, before, plan)


def seize(slurm: settings.Slurm, name: str, reason: Reason, before: NodeRecord, plan: Plan) -> Change:
    """Drain the node if it still is as in `before`, which may be seconds old. A change by an admin since stands."""
    latest = control.show_node(slurm, name)
    if plan_drain(latest) == plan:
        latest = _keep_text(slurm, latest, "")  # in service: an old text is from an earlier hold
    if (latest.reason, plan_drain(latest)) != (before.reason, plan):
        plan = plan_drain(latest)
        if plan.action != "ours":
            plan = Plan("leave", f"it was changed while we looked: {latest.reason!r}")
        return Change(plan, before, latest, done=plan.action == "ours")
    after = _order(slurm, latest, lambda: control.drain(slurm, name, reason), reasons.write(reason))
    return Change(plan, before, after, done=_says(after, reason))


def take_over(slurm: settings.Slurm, name: str, reason: Reason, text: str) -> Change:
    """On an admin's order, replace the reason `text` of a drained node by ours. `give_back` restores it."""
    before = control.show_node(slurm, name)
    latest = _keep_text(slurm, before, text) if _is_anothers(before, text) else before
    if not _is_anothers(latest, text):
        return Change(Plan("leave", f"it was changed while we looked: {latest.reason!r}"), before, latest, done=False)
    after = _order(slurm, latest, lambda: control.drain(slurm, name, reason), reasons.write(reason))
    return Change(Plan("adopt", f"{text!r} is put back afterwards"), before, after, done=_says(after, reason))


def reword(slurm: settings.Slurm, name: str, reason: Reason) -> Change:
    """Replace our reason by one with another rung or state. Each change is a row in slurmdbd, so change it rarely."""
    before = control.show_node(slurm, name)
    if before.ours is None:
        return Change(Plan("leave", f"the hold is no longer ours: {before.reason!r}"), before, before, done=False)
    if _says(before, reason):
        return Change(Plan("ours"), before, before, done=True)
    after = put(slurm, before, reason)
    return Change(Plan("ours"), before, after, done=_says(after, reason))


def put(slurm: settings.Slurm, before: NodeRecord, reason: Reason) -> NodeRecord:
    """Write our new reason on a node that we hold; returns the record after it, not ours if somebody came first. A
    reboot leaves the node DOWN without its drain, ours only by Slurm's ` : reboot complete`: then drain it again."""
    without = before.base == "DOWN" and "DRAIN" not in before.flags
    write = control.drain if without else control.set_reason
    after = _order(slurm, before, lambda: write(slurm, before.name, reason), reasons.write(reason))
    return _unless_resumed(slurm, after) if without and _says(after, reason) else after


def restore(slurm: settings.Slurm, before: NodeRecord, text: str) -> NodeRecord:
    """Put our reason `text` back where Slurm has written over it, and the drain after a reboot; the record after it."""
    if "DRAIN" in before.flags:
        return put_text(slurm, before, text)
    after = _order(slurm, before, lambda: control.put_out(slurm, before.name, "DRAIN", text), text)
    return _unless_resumed(slurm, after) if after.reason == text else after


def _unless_resumed(slurm: settings.Slurm, after: NodeRecord) -> NodeRecord:
    """Give a node back that was DOWN before our order, and is not DOWN after it: an admin resumed it in between."""
    if after.base == "DOWN":
        return after
    say(f"{after.name}: somebody resumed it just before our order: it is given back", error=True)
    control.undrain(slurm, after.name)
    return control.show_node(slurm, after.name)


def put_text(slurm: settings.Slurm, before: NodeRecord, text: str) -> NodeRecord:
    """Replace our reason by somebody's own; returns the record after it."""
    return _order(slurm, before, lambda: control.set_text(slurm, before.name, text), text)


def end(slurm: settings.Slurm, before: NodeRecord, down: bool) -> NodeRecord:
    """End the drain of the node `before`; with `down` also its DOWN. Returns the record after it."""
    write = control.resume if down else control.undrain
    return _order(slurm, before, lambda: write(slurm, before.name), "")


def _order(slurm: settings.Slurm, before: NodeRecord, write: Callable[[], None], text: str) -> NodeRecord:
    """Give the order, look again, and put back what somebody changed in between. Returns the record after it.

    `text`: the reason that we write; "" ends the hold.
    """
    write()
    after = control.show_node(slurm, before.name)
    if after.reason == text and before.owner != "none":  # otherwise somebody changed it after our order
        after = put_back(slurm, [before], [after], text)[0]
    return after


def put_back(
    slurm: settings.Slurm, before: Sequence[NodeRecord], after: Sequence[NodeRecord], text: str = ""
) -> list[NodeRecord]:
    """Put back what others changed between `before` and our order; returns the records `after` it."""
    names = [one.name for one in after]
    for pause in PAUSES:
        events = control.events(slurm, names) if names else []
        last = {one.node: one for one in events if one.state != "BOOT"}
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
    """Whether somebody else made this change after the record `before`; both times are slurmctld's."""
    known = any(_is_kept_of(said.reason, text) for text in (before.reason, remark.read_said(before.comment).was))
    ours_or_slurms = said.reason.startswith(reasons.PREFIX) or reasons.is_slurms(said.reason)
    return said.start >= before.reason_time > 0 and bool(said.reason) and not known and not ours_or_slurms


def _is_kept_of(kept: str, text: str) -> bool:
    """Whether slurmdbd keeps `text` as `kept`: the first 255 bytes, with `?` for letters that its database lacks."""
    short, whole = ("".join(c for c in one if c.isascii() and c != "?") for one in (kept, text))
    return short == whole or (len(text.encode("utf-8", "replace")) > reasons.MAX_BYTES and whole.startswith(short))


def give_back(slurm: settings.Slurm, name: str) -> Change:
    """End our hold: undrain the node; if we took a drain over, put its reason back.

    A DOWN stays with its reason, unless our own reboot caused it.
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
    # After a reboot the drain is gone; Slurm's words after our reason show that the DOWN is ours.
    ours = before.base == "DOWN" and (
        "DRAIN" not in before.flags or (before.ours.boots and before.ours.state != "claim")
    )
    after = end(slurm, before, down=bool(ours))
    return Change(Plan("ours"), before, after, done="DRAIN" not in after.flags)


def _is_anothers(record: NodeRecord, text: str) -> bool:
    return record.owner in ("admin", "slurm") and "DRAIN" in record.flags and record.reason == text


def _keep_text(slurm: settings.Slurm, record: NodeRecord, text: str) -> NodeRecord:
    """Keep somebody's reason in the node's Comment; "" removes the one there. Returns the record after it."""
    said = remark.read_said(record.comment)
    if said.was == text:
        return record
    comment = remark.write_said(record.comment, replace(said, was=text))
    control.set_remarks(slurm, record.name, comment=comment)
    return control.show_node(slurm, record.name)


def _says(record: NodeRecord, reason: Reason) -> bool:
    """Whether we hold the node with this reason. Compares the texts, because a long user name is cut there."""
    return record.ours is not None and reasons.write(record.ours) == reasons.write(reason)
