"""The sweep: an idle node that was last tested long ago drains itself, tests itself, and comes back.

tested long ago ──▶ idle ──▶ no pending job could start here ──▶ claim `sweep L2` ──budget──▶ the ladder's worker
      ▲                                                                                            │
      └──────────────────────── given back; or DCGM finds a fault, treated like any other ◀────────┘
"""

from __future__ import annotations

import os
import zlib

from slurm_gpuhealth.node import run_level
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, hold
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord

RETRY = 900.0
"""Seconds until a node asks again after a no, or after it found no room in the budget: squeue reads all jobs."""
IN_PLACE = {"CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE", "EXTERNAL"}
"""Flags that an idle node may have while nobody has plans for it."""
NOT_FOR_A_NODE = (
    # Jobs whose reason (squeue %r; slurm.schedmd.com/job_reason_codes.html) begins like this wait for something other
    # than a node. A job with any other reason, even one that a later Slurm adds, may wait for this node.
    *("Dependency", "BeginTime", "JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "JobArrayTaskLimit"),
    *("Assoc", "QOS", "MaxJobs", "MaxCpu", "MaxNode", "InvalidAccount", "InvalidQOS", "AccountNotAllowed"),
    *("PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit", "ReservationDeleted"),
    *("BadConstraints", "DeadLine", "launch failed requeued held", "launch_failed_requeued_held"),
    "job requeued in held state",
)


def due(settings: Settings, journal: Journal, node: str, record: NodeRecord, now: float) -> bool:
    """Whether this node should test itself now. Asks Slurm once at most, and only if everything else says yes."""
    if not on(settings) or not _idle(journal, record) or not _long_ago(settings, journal, node, record, now):
        return False
    notes = journal.get("sweep", {})
    if 0 <= now - notes.get("asked", 0) < RETRY:
        return False
    journal.put("sweep", {**notes, "asked": now})
    try:
        return not wanted(record, control.pending(settings.slurm))
    except control.SlurmError:
        return False


def begin(settings: Settings, journal: Journal, node: str, record: NodeRecord, now: float) -> str:
    """Drain the node for its test; returns `drained`, or in a word why not. `record`: as `due` saw it."""
    from slurm_gpuhealth.ladder import claim
    from slurm_gpuhealth.node import held

    wanted = reasons.Reason("sweep", None, f"L{settings.sweep.level}", "claim", since=reasons.stamp(now))

    def write() -> bool:
        change = hold.seize(settings.slurm, node, wanted, record, hold.Plan("drain"))
        if change.done and change.plan.action == "drain":
            journal.put("hold", {"reason": change.after.reason, "since": change.after.reason_time or now})
        return change.done and change.plan.action == "drain"

    turn = held.turn(settings)
    if turn is None:
        return "undecided"
    try:
        outcome, why = claim.take(settings, journal, node, wanted, write)
        if outcome == "drained" and control.show_node(settings.slurm, node).has_job:
            journal.put("hold", None)  # it came in the last moment: the job goes first
            hold.give_back(settings.slurm, node)
            outcome, why = "given back", "a job has just come"
    except (control.SlurmError, ValueError) as error:
        outcome, why = "undecided", str(error)
    finally:
        os.close(turn)
    say(f"{node}: sweep L{settings.sweep.level}: {outcome}" + (f" ({why})" if why else ""))
    return outcome


def on(settings: Settings) -> bool:
    """Whether the configuration wants sweeps, and a failed test could drain."""
    tests = settings.sources.dcgm == "enforce" and settings.dcgm.backend != "off"
    return settings.sweep.enabled and settings.mode == "enforce" and tests


def wanted(record: NodeRecord, pending: list[tuple[tuple[str, ...], str]]) -> bool:
    """Whether one of these jobs might start on this node now. Pure."""
    here = set(record.partitions)
    return any(here.intersection(where) and not why.startswith(NOT_FOR_A_NODE) for where, why in pending)


def _idle(journal: Journal, record: NodeRecord) -> bool:
    """In service, without a job, not reserved or scheduled; no finding waits."""
    free = record.base == "IDLE" and record.owner == "none" and record.partitions and record.flags <= IN_PLACE
    if not free or record.has_job or journal.get("hold"):
        return False
    return not journal.one("SELECT 1 FROM finding WHERE severity = 'fault' AND acted IS NULL AND cleared IS NULL")


def _long_ago(settings: Settings, journal: Journal, node: str, record: NodeRecord, now: float) -> bool:
    """Whether the last test of that level is an interval ago. A node without a test gets its turn within the first."""
    every, level = settings.sweep.interval, settings.sweep.level
    uuids = [gpu["uuid"] for gpu in journal.get("gpus", [])]
    if not uuids:
        return False
    notes: dict[str, Any] = journal.get("sweep", {})
    if "from" not in notes:
        notes = {**notes, "from": now - zlib.crc32(node.encode()) % int(every)}
        journal.put("sweep", notes)
    tests = (notes["from"], _on_all(journal, uuids, level, now), _swept(journal, now), _said(record, level))
    last = max((when for when in tests if when <= now), default=0.0)  # a later time: the clock was set back
    return now - last >= every


def _on_all(journal: Journal, uuids: list[str], level: int, now: float) -> float:
    """The oldest of the GPUs' last results; 0 if a GPU has none."""
    sql = "SELECT max(time) FROM diagnostic WHERE uuid = ? AND level >= ? AND time <= ? AND outcome IN (?, ?, ?, ?)"
    return float(min(journal.one(sql, uuid, level, now, *run_level.SETTLED)[0] or 0 for uuid in uuids))


def _swept(journal: Journal, now: float) -> float:
    """When the last sweep began here, whatever its result: a layout that can't be tested is not tried each hour."""
    return float(journal.one("SELECT max(time) FROM step WHERE fact = 'sweep' AND time <= ?", now)[0] or 0)


def _said(record: NodeRecord, level: int) -> float:
    """When the ladder last tested the node, by its record in Slurm: a node without a disk has no other."""
    from slurm_gpuhealth.slurm import remark

    result = remark.read_result(record.extra)
    deep = result and result.rung in [f"L{one}" for one in range(level, 5)]
    return result.at if result and deep and result.outcome in ("pass", "untested") else 0.0
