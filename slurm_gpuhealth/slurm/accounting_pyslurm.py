"""How jobs ended, by PySlurm and sacct: the same values as `sacct.ended`, if PySlurm fits the site's Slurm release.

PySlurm (25.11) knows only the last run of a requeued job, and only seven bits of an exit code: 137 becomes 9, and 128
becomes 0. So it is used only for jobs that ran once and completed; sacct is asked for the others. Without a slurm.conf
its import ends the interpreter, so everything runs in a child.
"""

from __future__ import annotations

import os
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING

from slurm_gpuhealth import child
from slurm_gpuhealth.outcomes import Attempt
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import sacct
from slurm_gpuhealth.slurm.control import ControllerDown, Refused
from slurm_gpuhealth.slurm.sacct import MAX_NAME, MAX_WORD, Ended, hashed, limit_of, nodes_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings

NAMES = (
    *("id", "array_id", "cluster", "partition", "user_name", "user_id", "account", "name", "state", "start_time"),
    *("end_time", "nodelist", "qos", "reservation", "time_limit", "constraints", "submit_command", "requeue_count"),
)
"""Attributes of pyslurm.db.Job. The last two came with 25.11."""
TOLD = ("COMPLETED", "PENDING", "RUNNING", "SUSPENDED")
"""In these states PySlurm tells everything about a job, unless it was requeued."""
MANY = 500
"""Jobs in one call of sacct."""


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
    rows, rest, bad = [], set(), []
    for job in asked.value:
        try:
            if job["requeue_count"] != 0 or job["state"] not in TOLD:
                rest.add(int(job["id"]))
                continue
            row = _completed(job)
        except (ValueError, TypeError) as error:
            bad.append(f"{error}: {job!r:.200}")
            continue
        if row and since <= row.attempt.end < until:
            rows.append(row)
    if bad:
        say(f"pyslurm: {len(bad)} jobs can't be read and are left out; the first: {bad[0]}")
    numbers = iter(sorted(rest))
    while some := tuple(islice(numbers, MANY)):
        rows += [row for row in sacct.ended(settings, since, until, some) if row.attempt.job in some]
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


def _completed(job: Mapping[str, Any]) -> Ended | None:
    """None if the job has not completed, or had no node. Raises ValueError, TypeError."""
    nodes = nodes_of(job["nodelist"] or "")
    if job["state"] != "COMPLETED" or not nodes or not job["start_time"] or not job["end_time"]:
        return None
    start, end = float(job["start_time"]), float(job["end_time"])
    attempt = Attempt(
        int(job["id"]), 0, job["user_name"] or str(job["user_id"]), job["account"] or "",
        (job["name"] or "")[:MAX_NAME], job["array_id"] or None, "COMPLETED", 0, 0, min(start, end), end, nodes,
        submit=hashed(job["submit_command"] or ""), partition=job["partition"] or "", qos=job["qos"] or "",
        reservation=(job["reservation"] or "")[:MAX_WORD], timelimit=limit_of(str(job["time_limit"])),
        constraint=",".join(job["constraints"] or ())[:MAX_WORD],
    )  # fmt: skip
    return Ended(attempt, job["cluster"] or "", job["gpus"], 0)
