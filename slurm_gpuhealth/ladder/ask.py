"""Asks a node for tests, and cancels. A request is a drain with its own reason; the node does the rest."""

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


class Unchanged(Exception):
    """Why nothing was done. The node was not changed."""


@frozen
class Request:
    rung: str
    """`L3`, `L4`; for a suspect also `RMA`."""
    through: str = ""
    """Test up to this rung even if nothing is found."""
    gpu: int | None = None
    by: str = ""
    take_over: bool = False
    """Also test a node that an admin drained."""
    fact: str = "asked"
    """`asked` by somebody, or `suspect` by the correlator."""
    tests: str = ""
    """Other tools' tests, as in the reason: `nccl,nvbandwidth` or `all`."""


def ask(
    settings: Settings, name: str, request: Request, holds: list[Hold], total: int, now: float
) -> tuple[NodeRecord, str]:
    """Ask one node; returns its record before, and what was done in words. Raises Unchanged and control.SlurmError.

    We hold `holds` of `total` nodes. A drain is written as a claim, which is confirmed later, and is added to `holds`.
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
        fact=request.fact,
        gpu=request.gpu,
        rung=request.rung,
        state="claim",
        since=reasons.stamp(now),
        to=request.through,
        tests=request.tests,
        by=request.by,
    )
    place = budget.place(Hold(name, wanted, math.inf), holds, total, settings, now)
    if not place.fits:
        fault = waits.of(record)
        raise Unchanged(f"over budget: {place.why}{fault and f'; its own fault waits too, {fault}'}")
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
    """Stop the climb of a node that we hold; returns what was done in words. Raises Unchanged and control.SlurmError.

    If somebody asked for the test, the node goes back to its state before. A node with a fault stays drained and waits
    for an admin. A running worker sees that the reason has changed, and ends.
    """
    if rung_reboot.is_underway(record):
        raise Unchanged("it is rebooting: try again once it is back")
    if ours.fact in reasons.ON_REQUEST and not has_failed(record, ours):
        change = hold.give_back(settings.slurm, record.name)
        back = "drained as before, " + repr(change.after.reason) if "DRAIN" in change.after.flags else "given back"
        return f"{back} (was {change.before.reason!r})"
    if ours.state == "claim":
        raise Unchanged("the drain is not confirmed yet: try again in some seconds")
    if ours.state in ("manual", "pass") or climb.is_end(ours):
        raise Unchanged(f"nothing to cancel: {climb.due(ours, record, climb.Known(), settings).why}")
    rest = replace(ours, rung=ours.next or ours.rung, state="manual", next="", tail=())
    change = hold.reword(settings.slurm, record.name, rest)
    if not change.done:
        raise Unchanged(f"it was changed while we looked: {change.after.reason!r}")
    return f"stays drained and waits for an admin: {change.after.reason}"


def has_failed(record: NodeRecord, ours: Reason) -> bool:
    """Whether a test of this hold has failed."""
    last = remark.read_result(record.extra)
    return last is not None and last.outcome == "fail" and last.at >= budget.began(ours, time.time())


def _again(settings: Settings, record: NodeRecord, ours: Reason, request: Request) -> str:
    """Ask a node that we hold already: queue the rung, unless it is running or comes anyway."""
    coming = ours.rung if ours.state == "queued" else "" if climb.is_end(ours) else ours.next
    rung, to = (max(pair, key=rank) for pair in ((coming, request.rung), (ours.to, request.through)))
    tests = _both(ours.tests, request.tests)
    under_way = ours.state in ("claim", "running")
    deeper = rank(max(request.rung, request.through, key=rank)) > rank(max(ours.rung, ours.to, key=rank))
    if under_way and (deeper or tests != ours.tests):
        raise Unchanged(
            f"{ours.rung} is under way, which is less than you ask for: ask again after it: {record.reason}"
        )
    if under_way or (rung == coming and rank(to) <= rank(max(coming, ours.to, key=rank)) and tests == ours.tests):
        return f"held already: {record.reason}"
    queued = replace(ours, rung=rung, state="queued", next="", to=to, tests=tests, attempt=1, by=request.by, tail=())
    if ours.state == "manual":
        queued = replace(queued, done=climb.asked_after(ours, rung_reboot.slurm_says(record, ours)))
    change = hold.reword(settings.slurm, record.name, queued)
    if not change.done:
        raise Unchanged(f"it was changed while we looked: {change.after.reason!r}")
    return f"was {record.reason!r}, now {change.after.reason!r}"


def _both(some: str, more: str) -> str:
    """The tests of two requests; `all` if the reason has no room for them."""
    names = dict.fromkeys(one for one in f"{some},{more}".split(",") if one)
    joined = ",".join(names)
    return "all" if "all" in names or len(joined) > reasons.MAX_TESTS else joined


def _is_free(record: NodeRecord, request: Request) -> None:
    """Raises Unchanged unless we may drain the node for a request."""
    _has_gpu(record, request)
    if record.base == "DOWN":
        said = f": {record.reason!r}" if record.reason else ""
        raise Unchanged(f"it is DOWN{said}; only a node that is up can be tested")
    others = record.owner in ("admin", "slurm") and "DRAIN" in record.flags
    # Apart from somebody's drain: does anything else prevent ours?
    plan = hold.plan_drain(replace(record, flags=record.flags - {"DRAIN"}, reason="") if others else record)
    if plan.action != "drain":
        raise Unchanged(plan.why)
    if record.owner == "admin" and not request.take_over:
        by = f"{record.reason!r} by {record.reason_user or 'unknown'}"
        raise Unchanged(f"an admin drained it: {by}; --take-over tests it all the same, and puts the drain back")
    if others and not _can_be_put_back(record):
        raise Unchanged(f"its reason could not be put back unchanged afterwards: {record.reason!r}")


def _has_gpu(record: NodeRecord, request: Request) -> None:
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", record.gres)
    count = sum(int(one) for one in counts)
    if not count:
        raise Unchanged("it has no GPUs (Gres in slurm.conf)")
    if request.gpu is not None and request.gpu >= count:
        raise Unchanged(f"it has no GPU {request.gpu}, only 0 to {count - 1}")


def _can_be_put_back(record: NodeRecord) -> bool:
    """Whether Slurm and the Comment keep this text: it has no line break and no quotes around it."""
    text = record.reason
    kept = remark.read_said(remark.write_said(record.comment, remark.Said(was=text))).was
    return (
        bool(text) and kept == text and text.isprintable() and text.strip(' "') == text and "\n" not in record.comment
    )


def rank(rung: str) -> int:
    return RUNGS.index(rung) if rung else -1
