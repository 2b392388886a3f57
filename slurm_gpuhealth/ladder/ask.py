"""Asking a node for tests, and taking that back: the request is the reason of a drain, and the node does the rest."""

from __future__ import annotations

import math
import re
import time

from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import frozen, replace
from slurm_gpuhealth.ladder import budget, climb, rung_reboot, waits
from slurm_gpuhealth.slurm import control, hold, remark
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm.node import Hold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

REBOOTS = {"REBOOT_REQUESTED", "REBOOT_ISSUED"}


class Unchanged(Exception):
    """Why nothing was done: the node is as it was."""


@frozen
class Request:
    rung: str
    """`L3`, `L4`; of a suspect also `RMA`."""
    through: str = ""
    """How far to go on although nothing is found."""
    gpu: int | None = None
    by: str = ""
    take_over: bool = False
    """Also of a node that an admin has drained."""
    fact: str = "asked"
    """`asked` by somebody, or `suspect` by the correlator."""


def ask(
    settings: Settings, name: str, request: Request, holds: list[Hold], total: int, now: float
) -> tuple[NodeRecord, str]:
    """Ask one node: its record before, and what was done, for people. Raises Unchanged and control.SlurmError.

    `holds` of `total` nodes are ours; a drain is written as a claim, confirmed later, and added to them.
    """
    try:
        record = control.show_node(settings.slurm, name)
    except ValueError as error:
        raise Unchanged(str(error)) from None
    if record.ours:
        _has_gpu(record, request)
        return record, _again(settings, record, record.ours, request)
    _is_free(record, request)
    wanted = reasons.Reason(
        request.fact, request.gpu, request.rung, "claim", since=reasons.stamp(now), to=request.through, by=request.by
    )
    place = budget.place(Hold(name, wanted, math.inf), holds, total, settings, now)
    if not place.fits:
        fault = waits.of(record)
        raise Unchanged(f"over budget: {place.why}{fault and f'; so does a fault of its own wait, {fault}'}")
    if record.owner == "none":
        change = hold.take(settings.slurm, name, wanted, lambda _, plan: plan.action == "drain")
    else:
        change = hold.take_over(settings.slurm, name, wanted, record.reason)
    if change.plan.action == "leave":
        raise Unchanged(change.plan.why)
    if not change.done:  # somebody else asked, or drained it, in the same moment
        raise Unchanged(f"it was changed while we looked: {change.after.reason!r}")
    holds.append(Hold(name, wanted, now))
    whose = f", {record.reason!r} put back afterwards" if record.owner != "none" else ""
    return record, f"drained{whose}: {reasons.write(wanted)}"


def cancel(settings: Settings, record: NodeRecord, ours: Reason) -> str:
    """Stop the climb of a node that we hold: what was done, for people. Raises Unchanged and control.SlurmError.

    What somebody asked for goes back to where it was; a node with a fault stays drained, and nothing more happens to it
    by itself. A worker that runs finds its reason changed, and ends.
    """
    if record.flags & REBOOTS:
        raise Unchanged("it is being rebooted: once it is back")
    if ours.fact in reasons.ON_REQUEST and not has_failed(record, ours):
        change = hold.give_back(settings.slurm, record.name)
        back = "drained as before, " + repr(change.after.reason) if "DRAIN" in change.after.flags else "given back"
        return f"{back} (was {change.before.reason!r})"
    if ours.state == "claim":
        raise Unchanged("the drain is not confirmed yet: again in some seconds")
    if ours.state in ("manual", "pass") or climb.is_end(ours):
        raise Unchanged(f"nothing to cancel: {climb.due(ours, record, climb.Known(), settings).why}")
    rest = replace(ours, rung=ours.next or ours.rung, state="manual", next="", tail=())
    change = hold.reword(settings.slurm, record.name, rest)
    if not change.done:
        raise Unchanged(f"it was changed while we looked: {change.after.reason!r}")
    return f"stays drained, nothing more happens by itself: {change.after.reason}"


def has_failed(record: NodeRecord, ours: Reason) -> bool:
    """Whether a test of this hold has failed."""
    last = remark.read_result(record.extra)
    return last is not None and last.outcome == "fail" and last.at >= budget.began(ours, time.time())


def _again(settings: Settings, record: NodeRecord, ours: Reason, request: Request) -> str:
    """A node that we hold already: the rung asked for is queued, unless it is under way or comes anyway."""
    coming = ours.rung if ours.state == "queued" else "" if climb.is_end(ours) else ours.next
    rung, to = (max(pair, key=rank) for pair in ((coming, request.rung), (ours.to, request.through)))
    under_way = ours.state in ("claim", "running")
    if under_way and rank(max(request.rung, request.through, key=rank)) > rank(max(ours.rung, ours.to, key=rank)):
        raise Unchanged(f"{ours.rung} is under way, and less than was asked for: again after it: {record.reason}")
    if under_way or (rung == coming and rank(to) <= rank(max(coming, ours.to, key=rank))):
        return f"held already: {record.reason}"
    queued = replace(ours, rung=rung, state="queued", next="", to=to, attempt=1, by=request.by, tail=())
    if ours.state == "manual":
        queued = replace(queued, done=climb.asked_after(ours, rung_reboot.slurm_says(record, ours)))
    change = hold.reword(settings.slurm, record.name, queued)
    if not change.done:
        raise Unchanged(f"it was changed while we looked: {change.after.reason!r}")
    return f"was {record.reason!r}, now {change.after.reason!r}"


def _is_free(record: NodeRecord, request: Request) -> None:
    """Raises Unchanged unless the node may be taken out for a request."""
    _has_gpu(record, request)
    if record.base == "DOWN":
        said = f": {record.reason!r}" if record.reason else ""
        raise Unchanged(f"it is DOWN{said}; a node that is not up can't be tested")
    others = record.owner in ("admin", "slurm") and "DRAIN" in record.flags
    # What else is in the way: as if nobody had drained it.
    plan = hold.plan_drain(replace(record, flags=record.flags - {"DRAIN"}, reason="") if others else record)
    if plan.action != "drain":
        raise Unchanged(plan.why)
    if record.owner == "admin" and not request.take_over:
        by = f"{record.reason!r} by {record.reason_user or 'unknown'}"
        raise Unchanged(f"an admin has it drained: {by}; --take-over tests it all the same, and puts that text back")
    if others and not _can_be_put_back(record):
        raise Unchanged(f"its reason could not be put back as it is: {record.reason!r}")


def _has_gpu(record: NodeRecord, request: Request) -> None:
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", record.gres)
    count = sum(int(one) for one in counts)
    if not count:
        raise Unchanged("it has no GPUs (Gres in slurm.conf)")
    if request.gpu is not None and request.gpu >= count:
        raise Unchanged(f"it has no GPU {request.gpu}: they are 0 to {count - 1}")


def _can_be_put_back(record: NodeRecord) -> bool:
    """Whether Slurm and the Comment keep this text: not over lines, not in quotes."""
    text = record.reason
    kept = remark.read_said(remark.write_said(record.comment, remark.Said(was=text))).was
    return (
        bool(text) and kept == text and text.isprintable() and text.strip(' "') == text and "\n" not in record.comment
    )


def rank(rung: str) -> int:
    return RUNGS.index(rung) if rung else -1
