"""What a node knows about its own climb: `climb`'s values from the journal, the locks and the node's record."""

from __future__ import annotations

import os

from slurm_gpuhealth.ladder.climb import Known, Open
from slurm_gpuhealth.node import lock
from slurm_gpuhealth.slurm.reason import fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Finding, Gpu
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

LOCK = "worker"
TRUE_NOW = "severity = 'fault' AND mode = 'enforce' AND cleared IS NULL AND (standing OR seen >= ?)"
"""Conditions that stand, and events since a time; not what an admin acknowledged, or a source in shadow mode saw."""
EVERY_TIME = 1 << 30
"""A count for the policy's repetition rules: it is a fault already, so its row's count was reached."""


def known(settings: Settings, journal: Journal, record: NodeRecord, now: float) -> Known:
    """What `climb.due` must know in addition to the record."""
    from slurm_gpuhealth.ladder import rung_reboot

    began = began_at(journal, record)
    return Known(
        worker=at_work(settings),
        rebooted=rung_reboot.rebooted(settings, journal, record),
        mended=_mended(journal, began),
        bundled=journal.one("SELECT 1 FROM step WHERE rung = 'RMA' AND time >= ? AND outcome != 'running'", began)
        is not None,
        age=now - record.reason_time if record.reason_time else 0.0,
    )


def at_work(settings: Settings) -> bool:
    """Whether a worker runs on this node, or may run."""
    turn = lock.take(settings, LOCK, real=True)
    if turn is None:
        return True
    os.close(turn)
    return False


def began_at(journal: Journal, record: NodeRecord) -> float:
    """When this hold began; at most a minute too early."""
    from slurm_gpuhealth.ladder import budget

    ours = record.ours
    said = budget.began(ours, record.reason_time + 60) if ours else 0.0
    hold = journal.get("hold")
    return min(said or record.reason_time, hold["since"] if hold else record.reason_time)


def open_faults(settings: Settings, journal: Journal, since: float) -> list[Open]:
    """The faults that are true now: conditions that stand, and events since the rung began."""
    return [_open(settings, one) for one in faults(journal, since)]


def faults(journal: Journal, since: float) -> list[Finding]:
    """The findings of `open_faults`, the highest rung first."""
    from slurm_gpuhealth.node import record

    return [one.finding for one in record.select(journal, TRUE_NOW, since)]


def causes(settings: Settings, journal: Journal, since: float) -> list[Open]:
    """The faults that this hold is about: acted on since shortly before it began, mended or not."""
    from slurm_gpuhealth.node import record

    which = (
        "severity = 'fault' AND mode = 'enforce' AND acted > 0"
        " AND (seen >= ? OR acted IN (SELECT id FROM decision WHERE time >= ?))"  # over budget it may wait for hours
    )
    return [_open(settings, one.finding) for one in record.select(journal, which, since - 600, since - 600)]


def blamed(journal: Journal, ours: Reason) -> Gpu | None:
    """The GPU of our reason, with its address and serial. If it was lost at a boot, another GPU may have its number, so
    the findings decide which GPU it was, then the reason's PCI address, and only then the number."""
    from slurm_gpuhealth.findings import Gpu
    from slurm_gpuhealth.node import record

    if ours.gpu is None:
        return None
    found = record.select(journal, "severity = 'fault' AND mode = 'enforce' AND gpu = ? AND uuid IS NOT NULL", ours.gpu)
    mine = [one.finding for one in found if fact(one.finding.source, one.finding.code) == ours.fact]
    if mine:
        return max(mine, key=lambda one: one.time).gpu
    key, value = ("pci", ours.pci) if ours.pci else ("index", ours.gpu)
    known = next((one for one in journal.get("gpus", []) if one[key] == value), None)
    if known:
        return Gpu(known["uuid"], known.get("pci"), ours.gpu, known.get("serial"))
    return Gpu(None, ours.pci or None, ours.gpu, ours.serial or None)


def history(journal: Journal, ours: Reason, since: float) -> tuple[int, int]:
    """How often since then the node was given back for this fact on this GPU, and how often we rebooted it."""
    backs = journal.one(
        "SELECT count(*) FROM step WHERE follows = 'back' AND outcome = 'pass' AND fact = ? AND gpu IS ? AND time >= ?",
        ours.fact,
        ours.gpu,
        since,
    )
    boots = journal.one(
        "SELECT count(*) FROM step WHERE rung = 'reboot' AND outcome IN ('pass', 'fail') AND time >= ?", since
    )
    return int(backs[0]), int(boots[0])


def _mended(journal: Journal, since: float) -> bool:
    """Whether this hold's conditions have cleared since its last test, and no fault stands."""
    tested = journal.one(
        "SELECT max(time + seconds) FROM step WHERE rung LIKE 'L%' AND outcome IN ('pass', 'fail') AND time >= ?", since
    )[0]
    gone = journal.one(
        "SELECT 1 FROM finding WHERE severity = 'fault' AND mode = 'enforce' AND standing AND acted > 0"
        " AND cleared >= ? LIMIT 1",
        tested or since,
    )
    return gone is not None and journal.one(f"SELECT 1 FROM finding WHERE {TRUE_NOW} LIMIT 1", 1e12) is None  # noqa: S608


def _open(settings: Settings, finding: Finding) -> Open:
    from slurm_gpuhealth.policy import judge

    row = judge.match(settings.policy, finding, lambda *_: EVERY_TIME)
    return Open(row.rung or "repair", row.passed, row.failed) if row else Open("L3")


def pointless(found: Sequence[Finding]) -> Finding | None:
    """A condition that no diagnostic can clear. While it stands, a test proves nothing."""
    return next((one for one in found if one.standing and one.source not in ("dcgm", "tool")), None)
