"""A node's metrics, from its journal, as a textfile for node_exporter. Each health check renews it, if it is on."""

from __future__ import annotations

import time

import slurm_gpuhealth
from slurm_gpuhealth.metrics import text
from slurm_gpuhealth.metrics.table import NODE
from slurm_gpuhealth.node import identity, jobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal

    Values = dict[tuple[object, ...], float]

GPUS = 64
"""The most GPUs that have series of their own."""
CODES = 200
"""The most combinations of source, code, severity and mode; further codes are counted as `other`."""
LEVELS = (1, 2, 3, 4)
CONDITIONS = (
    *("dcgm", "dcgm-health", "driver", "gpu", "host", "ib", "inventory", "job", "kernel", "leftover", "nvml", "site"),
    "tool",
)
"""The sources whose findings may stand. The others have the most rows, and these are found by an index."""


def publish(settings: Settings, journal: Journal, now: float, took: float) -> None:
    """Write the textfile. If that fails, syslog says so once."""
    error, kept = "", journal.get("metrics", {})
    new = remember(settings, journal, kept, now)
    try:
        text.write(settings.metrics.textfile, text.render(NODE, gather(settings, journal, new, now, took)))
    except OSError as failure:
        error = f"metrics.textfile {settings.metrics.textfile}: {failure.strerror}"
    if error != kept.get("error", ""):
        from slurm_gpuhealth.say import say

        say(error or "metrics.textfile: written again", error=bool(error))
        new["error"] = error
    if new != kept:
        journal.put("metrics", new)


def remember(settings: Settings, journal: Journal, kept: dict[str, Any], now: float) -> dict[str, Any]:
    """`kept`, brought up to date: findings since the boot (rows are pruned), since when the rung is what it is."""
    boot = identity.boot_id(settings)
    top = journal.one("SELECT coalesce(max(id), 0) FROM finding")[0]
    new = {**kept, "last": top}
    if kept.get("boot") != boot:
        new |= {"boot": boot, "totals": {}}
    if not kept:  # metrics were just turned on, or the journal is new
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        new["totals"] = _sum(_new(journal, "time >= ?", top, booted), {})
    elif top > kept["last"]:  # if the last row was pruned, its number is used again
        new["totals"] = _sum(_new(journal, "id > ?", top, kept["last"]), new["totals"])
    reason = (journal.get("hold") or {}).get("reason", "")
    rung = tuple(reason.split(" ")[2:4])
    if rung != kept.get("rung", ()):
        new |= {"rung": rung, "since": now}
    return new


def gather(settings: Settings, journal: Journal, kept: dict[str, Any], now: float, took: float) -> text.Samples:
    """The values of NODE; `kept` is what `remember` returns, `took` the check's seconds."""
    on = settings.sources
    sources = {name: one for name, one in journal.get("sources", {}).items() if getattr(on, name, "") != "off"}
    success: Values = {(name,): int(not one["error"]) for name, one in sources.items()}
    if on.kernel != "off":
        success["kernel",] = int(not journal.get("kernel-trouble"))
    standing = _standing(journal)
    waiting = journal.one("SELECT count(*), coalesce(sum(bytes), 0) FROM outbox")
    found: dict[str, Values] = {
        "gpuhealth_build_info": {(slurm_gpuhealth.__version__,): 1},
        "gpuhealth_enforcing": {(): int(settings.mode == "enforce")},
        "gpuhealth_check_timestamp_seconds": {(): now},
        "gpuhealth_check_duration_seconds": {(): round(took, 4)},
        "gpuhealth_source_duration_seconds": {(name,): one["seconds"] for name, one in sources.items()},
        "gpuhealth_source_success": success,
        "gpuhealth_source_timestamp_seconds": {(name,): one["time"] for name, one in sources.items()},
        "gpuhealth_journal_writable": {(): int(not journal.trouble)},
        "gpuhealth_standing_findings": _sum(standing, {}),
        "gpuhealth_findings_total": kept["totals"],
        "gpuhealth_hold": {(): 0},
        "gpuhealth_budget_waits": {(): int(bool(journal.get("waits")))},
        "gpuhealth_outbox_records": {(): waiting[0]},
        "gpuhealth_outbox_bytes": {(): waiting[1]},
    }
    found.update(_gpus(settings, journal, standing))
    if hold := journal.get("hold"):
        found.update(_hold(journal, hold, kept.get("since", now)))
    return found


def _new(journal: Journal, where: str, *values: Any) -> list[Any]:
    """The findings that came, whatever became of them since; a condition counts once, however often it was seen."""
    how = "SELECT source, code, severity, mode, sum(CASE WHEN standing THEN 1 ELSE count END) FROM finding"
    return list(journal.rows(f"{how} WHERE mode != 'old' AND id <= ? AND {where} GROUP BY 1, 2, 3, 4", *values))


def _standing(journal: Journal) -> list[Any]:
    """Source, code, severity, mode and GPU of what stands now, and how often."""
    marks = ", ".join("?" * len(CONDITIONS))
    how = "SELECT source, code, severity, mode, coalesce(uuid, ''), count(*) FROM finding"
    which = f"source IN ({marks}) AND standing AND cleared IS NULL AND mode != 'old'"
    return list(journal.rows(f"{how} WHERE {which} GROUP BY 1, 2, 3, 4, 5", *CONDITIONS))


def _sum(rows: list[Any], before: Values) -> Values:
    """`before` and the rows, by source, code, severity and mode."""
    found = dict(before)
    for row in rows:
        key = tuple(row[:4])
        if key not in found and len(found) >= CODES:
            key = (row[0], "other", *row[2:4])
        found[key] = found.get(key, 0) + row[-1]
    return found


def _gpus(settings: Settings, journal: Journal, standing: list[Any]) -> dict[str, Values]:
    gpus, gres, seen = journal.get("gpus", [])[:GPUS], journal.get("gres") or {"error": "", "uuids": ()}, None
    expected = settings.gpus.count or (0 if gres["error"] else len(gres["uuids"])) or len(gpus)
    found: dict[str, Values] = {"gpuhealth_gpus_expected": {(): expected}}
    reading = journal.get("nvml")
    if reading is not None:
        seen = {one.get("uuid") for one in reading["gpus"]} - {None}
        found["gpuhealth_gpus_present"] = {(): len(seen)}
    info: Values = {}
    present: Values = {}
    mine: Values = {}
    last: Values = {}
    times: Values = {}
    for gpu in gpus:
        uuid, index = gpu["uuid"], "" if gpu.get("index") is None else gpu["index"]
        info[index, uuid, gpu.get("pci") or "", gpu.get("serial") or "", gpu.get("name") or ""] = 1
        if seen is not None:
            present[index, uuid] = int(uuid in seen)
        for severity in ("warning", "fault"):
            mine[index, uuid, severity] = sum(row[5] for row in standing if (row[4], row[2]) == (uuid, severity))
        for level in LEVELS:
            row = journal.one(
                "SELECT outcome, time FROM diagnostic WHERE uuid = ? AND level = ? ORDER BY time DESC LIMIT 1",
                uuid,
                level,
            )
            if row:
                last[index, uuid, level, row[0]], times[index, uuid, level] = 1, row[1]
    return {
        **found,
        "gpuhealth_gpu_info": info,
        "gpuhealth_gpu_present": present,
        "gpuhealth_gpu_standing_findings": mine,
        "gpuhealth_gpu_diagnostic_info": last,
        "gpuhealth_gpu_diagnostic_timestamp_seconds": times,
    }


def _hold(journal: Journal, hold: dict[str, Any], since: float) -> dict[str, Values]:
    from slurm_gpuhealth.slurm import reason

    ours = reason.parse(hold["reason"])
    info: Values = {}
    if ours:
        info[ours.fact, "" if ours.gpu is None else ours.gpu, ours.rung, ours.state, ours.next] = 1
    return {
        "gpuhealth_hold": {(): 1},
        "gpuhealth_hold_info": info,
        "gpuhealth_hold_timestamp_seconds": {(): hold["since"]},
        "gpuhealth_hold_rung_timestamp_seconds": {(): since},
        "gpuhealth_hold_waits_for_jobs": {(): int(bool(jobs.running(journal)))},
    }
