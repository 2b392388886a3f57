"""Findings into the journal and out again: completed with GPU and job, judged, and kept until they are acted on.

A program may be killed between seeing a fault and draining the node. So a finding is first written into the journal, in
one transaction with the cursor that it came from; `act` then works from the rows without a decision.
"""

from __future__ import annotations

import json

from slurm_gpuhealth.findings import RUNGS, Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import jobs
from slurm_gpuhealth.policy.judge import Judged, identity, judge
from slurm_gpuhealth.slurm.reason import fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Row, Settings
    from slurm_gpuhealth.node.journal import Journal

COLUMNS = (
    "id, time, source, code, severity, rung, mode, uuid, pci, gpu, serial, message, standing, count, details, job, uid"
)

NO_ACKS: Mapping[str, float] = {}


def keep(journal: Journal, settings: Settings, findings: Iterable[Finding], now: float) -> list[Judged]:
    """Judge `findings` and write them down: each event as a new row, a condition as one row while it stands."""
    known = journal.get("gpus", [])
    complete = [replace(one, gpu=identify(one.gpu, known)) if one.gpu else one for one in findings]
    judged = judge(complete, settings, lambda finding, row: _repeats(journal, finding, row))
    for one in judged:
        _store(journal, one, settings, now)
    return judged


def waiting(journal: Journal, mode: str = "enforce") -> dict[int, Judged]:
    """Faults without a decision, by row id."""
    rows = journal.rows(
        f"SELECT {COLUMNS} FROM finding"  # noqa: S608 - a constant
        " WHERE severity = 'fault' AND mode = ? AND acted IS NULL AND cleared IS NULL ORDER BY time",
        mode,
    )
    return {row[0]: _judged(row) for row in rows}


def select(journal: Journal, where: str, *values: Any) -> list[Judged]:
    """Findings that meet an SQL condition: the highest rung first, then the oldest."""
    rows = journal.rows(
        f"SELECT {COLUMNS} FROM finding WHERE {where} ORDER BY time",  # noqa: S608 - ours
        *values,
    )
    rank = {rung: place for place, rung in enumerate(RUNGS)}
    return sorted((_judged(row) for row in rows), key=lambda one: -rank.get(one.rung, -1))


def settle(journal: Journal, ids: Iterable[int], decision: int) -> None:
    """Note the decision on these findings."""
    for number in ids:
        journal.write("UPDATE finding SET acted = ? WHERE id = ?", decision, number)
    journal.settled()


def clear(
    journal: Journal,
    sources: Sequence[str],
    judged: Iterable[Judged],
    now: float,
    uuids: Sequence[str] | None = None,
    level: int | None = None,
) -> None:
    """Mark standing findings as mended if `sources` were just read in full and did not show them again.

    With `uuids` and `level`, after a diagnostic: only on those GPUs, and only if no deeper level had found them.
    """
    seen = {identity(one.finding) for one in judged}
    marks = ", ".join("?" * len(sources))
    for row in journal.rows(
        f"SELECT {COLUMNS} FROM finding WHERE standing AND cleared IS NULL AND source IN ({marks})",  # noqa: S608
        *sources,
    ):
        finding = _judged(row).finding
        covered = uuids is None or finding.gpu is None or finding.gpu.uuid in uuids
        depth = finding.details.get("level")
        if level is not None and isinstance(depth, int) and depth > level:
            covered = False
        if covered and identity(finding) not in seen:
            journal.write("UPDATE finding SET cleared = ? WHERE id = ?", now, row[0])


def reopen(journal: Journal, decision: int) -> None:
    """A decision was taken back: its findings wait again."""
    journal.write("UPDATE finding SET acted = NULL WHERE acted = ?", decision)


def reopen_standing(journal: Journal) -> None:
    """The hold has ended without a result: each of its conditions that still stands waits again."""
    journal.write(
        "UPDATE finding SET acted = NULL WHERE standing AND cleared IS NULL AND mode = 'enforce' AND acted > 0"
    )


def reopen_since(journal: Journal, since: float) -> int:
    """Faults that still stand, and events decided on since then, wait again; returns how many."""
    which = (
        "severity = 'fault' AND mode = 'enforce' AND acted > 0 AND cleared IS NULL"
        " AND (standing OR acted IN (SELECT id FROM decision WHERE time >= ?))"
    )
    rows = list(journal.rows(f"SELECT id FROM finding WHERE {which}", since))  # noqa: S608 - a constant
    for (row,) in rows:
        journal.write("UPDATE finding SET acted = NULL WHERE id = ?", row)
    return len(rows)


def acknowledge(journal: Journal, until: float, acks: Mapping[str, float] = NO_ACKS) -> int:
    """An admin ended our hold: leave its faults alone until they are mended or `until`. Returns how many still stand.

    `acks`: a fact → its own time.
    """
    which = "acted > 0 AND mode = 'enforce' AND cleared IS NULL"
    rows = list(journal.rows(f"SELECT id, source, code, standing FROM finding WHERE {which}"))  # noqa: S608 - a constant
    leave(journal, {row[0]: acks.get(fact(row[1], row[2]), until) for row in rows})
    return sum(row[3] for row in rows)


def acked(journal: Journal, acks: Mapping[str, float], now: float) -> dict[int, float]:
    """The waiting faults that an admin has acknowledged: row id → until when."""
    facts = {row: fact(one.finding.source, one.finding.code) for row, one in waiting(journal).items()}
    return {row: acks[name] for row, name in facts.items() if acks.get(name, 0) > now}


def leave(journal: Journal, until: Mapping[int, float]) -> None:
    """Leave these findings alone until their time."""
    for row, when in until.items():
        journal.write("UPDATE finding SET acked = ?, mode = 'acked' WHERE id = ?", when, row)


def identify(gpu: Gpu, known: Sequence[dict[str, Any]]) -> Gpu:
    """`gpu` completed from the inventory: an Xid knows only the PCI address, DCGM only the UUID."""
    for other in known:
        name = "uuid" if gpu.uuid else "pci" if gpu.pci else "index"  # a site's check may know only the index
        if getattr(gpu, name) is not None and getattr(gpu, name) == other[name]:
            return Gpu(other["uuid"], other["pci"], other["index"], other.get("serial"))
    return gpu


def _store(journal: Journal, one: Judged, settings: Settings, now: float) -> None:
    finding, gpu = one.finding, one.finding.gpu or Gpu()
    if finding.standing:
        row = journal.one(
            "SELECT id, acked, mode, severity FROM finding"
            " WHERE source = ? AND code = ? AND standing AND cleared IS NULL AND coalesce(uuid, pci, '') = ?",
            finding.source,
            finding.code,
            gpu.uuid or gpu.pci or "",
        )
        if row:
            number, acked, mode, severity = row
            journal.write(
                "UPDATE finding SET seen = ?, count = count + 1, message = ? WHERE id = ?", now, finding.message, number
            )
            expired = acked is not None and acked < now
            if expired or severity != one.severity or (mode not in (one.mode, "acked")):
                # The ack expired, the policy's repetition was reached, or the configuration changed: decide again.
                journal.write(
                    "UPDATE finding SET severity = ?, rung = ?, mode = ?, acted = NULL, acked = NULL WHERE id = ?",
                    one.severity,
                    one.rung,
                    one.mode,
                    number,
                )
            return
    held_by = jobs.holder(journal, gpu.uuid, finding.time) if gpu.uuid else None
    job, uid = held_by or (None, None)
    journal.write(
        "INSERT INTO finding (time, seen, source, code, severity, rung, mode, uuid, pci, gpu, serial, message,"
        " standing, count, details, job, uid, acted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        finding.time,
        now,
        finding.source,
        finding.code,
        one.severity,
        one.rung,
        one.mode,
        gpu.uuid,
        gpu.pci,
        gpu.index,
        gpu.serial,
        finding.message,
        finding.standing,
        finding.count,
        json.dumps(dict(finding.details)),
        job,
        uid,
        0 if one.mode == "old" else None,  # 0: nothing to decide
    )


def _repeats(journal: Journal, finding: Finding, row: Row) -> int:
    """How often this was seen on this GPU in the row's window, including now (see `judge.Repeats`)."""
    gpu = finding.gpu or Gpu()
    mine = jobs.holder(journal, gpu.uuid, finding.time) if gpu.uuid else None
    earlier = list(
        journal.rows(
            "SELECT count, job, uid FROM finding WHERE source = ? AND code = ? AND seen > ? AND mode != 'old'"
            " AND coalesce(uuid, pci, '') = ?",
            finding.source,
            finding.code,
            finding.time - row.window,
            gpu.uuid or gpu.pci or "",
        )
    )
    if row.distinct:
        which = 1 if row.distinct == "job" else 2
        return len(
            {seen[which] for seen in earlier if seen[which] is not None} | ({mine[which - 1]} if mine else set())
        )
    return int(sum(seen[0] for seen in earlier)) + finding.count


def _judged(row: Sequence[Any]) -> Judged:
    """A row of COLUMNS as it was judged."""
    _, when, source, code, severity, rung, mode, uuid, pci, index, serial, message, standing, count, details = row[:15]
    gpu = Gpu(uuid, pci, index, serial) if uuid or pci or index is not None else None
    finding = Finding(when, source, code, message, gpu, severity, bool(standing), count, json.loads(details))
    return Judged(finding, severity, rung, mode)
