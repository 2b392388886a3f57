"""How jobs ended, by PySlurm: the same values as `sacct.ended`, if the site has PySlurm of its Slurm's release.

What it can't tell (25.11): the earlier runs of a requeued job, because its collection has one job per id; and codes
above 127 (137 becomes 9). Without a slurm.conf its import ends the interpreter, so everything runs in a child.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from slurm_gpuhealth import child
from slurm_gpuhealth.outcomes import Attempt
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm.control import ControllerDown, Refused
from slurm_gpuhealth.slurm.sacct import MAX_NAME, Ended, hashed, job_state, nodes_of, unmasked

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings

NAMES = (
    *("id", "array_id", "cluster", "partition", "user_name", "user_id", "account", "name", "state", "exit_code"),
    *("exit_code_signal", "derived_exit_code", "derived_exit_code_signal", "start_time", "end_time", "nodelist"),
    *("failed_node", "submit_command", "requeue_count"),
)
"""Attributes of pyslurm.db.Job. The last three came with 25.11."""
ENDS = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REQUEUED", "TIMEOUT")  # fmt: skip


def ended(settings: Settings, since: float, until: float) -> list[Ended]:
    """The runs that ended in since ≤ t < until and had begun, by their start. Raises control.SlurmError."""
    if not os.path.isfile(settings.slurm.conf):  # libslurm itself would end the interpreter after a minute
        what = f"{settings.slurm.conf} (slurm.conf) is not there"
        raise Refused("pyslurm.db.Jobs.load", 1, f'{what}: correct [slurm] conf, or [accounting] backend = "sacct"')
    asked = child.probe(lambda: _load(settings.slurm.conf, since, until), timeout=settings.accounting.timeout)
    if asked.timed_out:
        raise ControllerDown(f"pyslurm.db.Jobs.load: {asked.error}: is slurmdbd up ([accounting] timeout)?")
    if asked.error is not None:
        advice = f"is {settings.slurm.conf} there, and PySlurm of this Slurm's release? Else [accounting] backend"
        raise Refused("pyslurm.db.Jobs.load", 1, f'{asked.error}: {advice} = "sacct"')
    rows, bad = [], []
    for job in asked.value:
        try:
            row = _ended(job)
        except (ValueError, TypeError) as error:
            bad.append(f"{error}: {job!r:.200}")
            continue
        if row and since <= row.attempt.end < until:
            rows.append(row)
    if bad:
        say(f"pyslurm: {len(bad)} jobs can't be read and are left out; the first: {bad[0]}")
    return sorted(rows, key=lambda row: row.attempt.start)


def _load(conf: str, since: float, until: float) -> list[dict[str, Any]]:
    """In a child."""
    os.environ.update(SLURM_CONF=conf, TZ="UTC")
    pyslurm = import_module("pyslurm")
    jobs = pyslurm.db.Jobs.load(pyslurm.db.JobFilter(start_time=int(since), end_time=int(until) + 1))
    found = jobs.values() if hasattr(jobs, "values") else jobs  # a list before 23.2
    return [{**{name: getattr(job, name, None) for name in NAMES}, "gpus": _gpus(job)} for job in found]


def _gpus(job: Any) -> int:
    gpus = getattr(job, "gpus", None)
    return sum(int(getattr(gpu, "count", 0) or 0) for gpu in gpus.values()) if isinstance(gpus, dict) else 0


def _ended(job: Mapping[str, Any]) -> Ended | None:
    """None if it never began or has not ended. Raises ValueError, TypeError."""
    derived = (job["derived_exit_code"] or 0, job["derived_exit_code_signal"] or 0)
    state = job_state(job["state"] or "", derived)
    nodes = nodes_of(job["nodelist"] or "")
    if not nodes or state not in ENDS or not job["start_time"] or not job["end_time"]:
        return None
    start, end = float(job["start_time"]), float(job["end_time"])
    code, signal = unmasked((job["exit_code"] or 0, job["exit_code_signal"] or 0), derived)
    attempt = Attempt(
        int(job["id"]), 0, job["user_name"] or str(job["user_id"]), job["account"] or "",
        (job["name"] or "")[:MAX_NAME], job["array_id"] or None, state, code, signal, min(start, end), end, nodes,
        failed_node=job["failed_node"] if job["failed_node"] in nodes else None,
        submit=hashed(job["submit_command"] or ""),
    )  # fmt: skip
    return Ended(attempt, job["cluster"] or "", job["partition"] or "", job["gpus"], job["requeue_count"])
