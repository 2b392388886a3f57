"""One DCGM diagnostic at a time on this node: a second program waits within its deadline and takes the result."""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import jobs, lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.diagnose.model import Diagnosis
    from slurm_gpuhealth.node.journal import Journal

SETTLED = ("pass", "fail", "warn", "config")
"""Outcomes that say something about the GPUs; the others mean that they were not tested."""


def run_level(
    settings: Settings,
    journal: Journal,
    program: str,
    level: int,
    uuids: Sequence[str],
    *,
    deadline: float,
    reuse: float,
    everything: bool = False,
    others: bool = False,
) -> str:
    """The worst outcome of run level `level` for the GPUs `uuids`, or why they could not be tested.

    A pass younger than `reuse` seconds, with nothing new since, is used again; so is any result that came while we
    waited for our turn. `everything`: run the level on all GPUs of the node. `others`: other jobs run here, and their
    traffic lowers the bandwidth. `deadline` is monotonic time.
    """
    if settings.sources.dcgm == "off" or settings.dcgm.backend == "off":
        return "off"
    began = time.time()
    turn = lock.take(settings, "diagnostic", deadline)
    if turn is None:
        return "not-testable"
    try:
        if jobs.fresh_pass(journal, uuids, level, began - reuse):
            return "pass"
        taken = _result_since(journal, uuids, level, began)
        if taken:
            return taken
        left = deadline - time.monotonic()
        if left < 1:
            return "not-testable"
        return _run(settings, journal, program, level, [] if everything else uuids, left, others)
    finally:
        os.close(turn)


def _run(
    settings: Settings,
    journal: Journal,
    program: str,
    level: int,
    uuids: Sequence[str],
    timeout: float,
    others: bool,
) -> str:
    """Run the level, write a row for each GPU and the findings, and return the outcome."""
    from slurm_gpuhealth import diagnose
    from slurm_gpuhealth.diagnose import models
    from slurm_gpuhealth.node import record

    now = time.time()
    try:
        diagnosis = lock.guarded(
            settings, journal, "dcgm", timeout, lambda left: _not_busy(settings, level, uuids, left)
        )
    except TimeoutError:
        return "not-testable"
    if diagnosis is None:
        return "not-testable"
    asked = uuids or [gpu["uuid"] for gpu in journal.get("gpus", [])]
    _store(journal, program, diagnosis, level, asked, now)
    if not others:  # other jobs slow the GPUs down
        from slurm_gpuhealth.node import figures

        own = {gpu.entity_id: gpu.uuid for gpu in diagnosis.gpus}
        measured = [(uuid, one) for one in diagnosis.figures if (uuid := own.get(one.device or 0))]
        figures.keep(journal, "dcgm", diagnosis.dcgm_version or "", measured, now)
    shown = models.seen(diagnosis, settings.dcgm)
    if shown:  # for the doctor: which tests run here
        journal.put("levels", {**journal.get("levels", {}), str(level): shown})
    findings = diagnose.findings(diagnosis, now)
    if others:  # a row of the policy turns this into a retest instead of a fault
        findings = [replace(one, details={**one.details, "busy": True}) for one in findings]
        for one in findings:
            if one.details.get("bandwidth") and one.gpu and one.gpu.uuid:
                journal.write("INSERT OR REPLACE INTO retest VALUES (?, ?, NULL)", one.gpu.uuid, now)
    judged = record.keep(journal, settings, findings, now)
    if diagnosis.outcome in SETTLED:
        record.clear(journal, ("dcgm",), judged, now, asked, level)
    return str(diagnosis.outcome)


def _not_busy(settings: Settings, level: int, uuids: Sequence[str], timeout: float) -> Diagnosis:
    """The diagnosis. DCGM runs one diagnostic at a time: if another one runs, wait while there is time."""
    from slurm_gpuhealth.diagnose import diagnose

    deadline = time.monotonic() + timeout
    while True:
        diagnosis = diagnose(level, uuids, settings, deadline - time.monotonic())
        if not diagnosis.busy or deadline - time.monotonic() < timeout / 2:
            return diagnosis
        time.sleep(1)


def _store(journal: Journal, program: str, diagnosis: Diagnosis, level: int, uuids: Sequence[str], now: float) -> None:
    """A row for each GPU that was asked for: its own result, or that of the whole run if it has none."""
    import json

    own = {gpu.uuid: gpu for gpu in diagnosis.gpus}
    for uuid in uuids:
        gpu = own.get(uuid)
        detail = {
            "message": diagnosis.message,
            "version": diagnosis.dcgm_version,
            "errors": [error.__dict__ for error in gpu.errors] if gpu else [],
        }
        missing = "not-testable" if diagnosis.outcome == "pass" else diagnosis.outcome
        journal.write(
            "INSERT INTO diagnostic (time, level, uuid, outcome, seconds, program, detail)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            now,
            level,
            uuid,
            gpu.outcome if gpu else missing,
            diagnosis.seconds or 0,
            program,
            json.dumps(detail),
        )


def _result_since(journal: Journal, uuids: Sequence[str], level: int, since: float) -> str:
    """The worst of the results that ended after `since`, if each GPU has one; else ""."""
    worst = ""
    for uuid in uuids:
        row = journal.one(
            "SELECT outcome, time + seconds FROM diagnostic WHERE uuid = ? AND level >= ? ORDER BY id DESC LIMIT 1",
            uuid,
            level,
        )
        if row is None or not since <= row[1] <= time.time() + 1:  # a later time: the clock was set back
            return ""
        order = ("", "pass", "warn", "config", "not-testable", "tool-error", "fail")
        worst = max(worst, row[0], key=order.index)
    return worst
