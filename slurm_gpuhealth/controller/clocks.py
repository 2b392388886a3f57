"""Compares the clocks at load of each job's GPUs, on all its nodes: which GPUs were slow in two jobs in a row."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING

import sqlalchemy as sql

from slurm_gpuhealth.controller.slow import RECENT
from slurm_gpuhealth.measure import clocks, picture
from slurm_gpuhealth.store import judged, schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Slow

    Behind = dict[str, list[dict[str, Any]]]
    """Node and UUID → its last jobs in which it was slow, with none between them in which it was not; two at most."""

NAME = "clock in jobs"


def look(engine: sql.Engine, slow: Slow, now: float) -> None:
    """Add the attempts that `judge` has fed at `now`; what is found is kept for `gpuhealth lemons`."""
    with engine.begin() as db:
        before = judged.get_cursor(db, "clocks")
        behind: Behind = json.loads(before or "{}")
        for rows in groupby(_uses(db, now), key=lambda row: (row.end, row.job, row.attempt)):
            _enter(behind, list(rows[1]), slow)
        behind = {gpu: jobs for gpu, jobs in behind.items() if jobs and jobs[-1]["time"] >= now - RECENT}
        after = json.dumps(behind)
        if after != before:
            judged.put_cursor(db, "clocks", after)


def found(db: sql.Connection) -> list[dict[str, Any]]:
    """The GPUs that were slow in their last two jobs, the worst first; the keys are those of correlate.slow.Slow."""
    behind: Behind = json.loads(judged.get_cursor(db, "clocks") or "{}")
    rows = []
    for gpu, jobs in behind.items():
        if len(jobs) == 2:
            node, _, uuid = gpu.partition(" ")
            last = jobs[-1]
            whose = {"node": node, "uuid": uuid, "gpu": judged.gpu_index(db, node, uuid), "model": last["model"]}
            values = {"name": NAME, "value": last["clock"], "unit": "MHz", "median": last["median"]}
            percent = round(100 * (last["clock"] / last["median"] - 1))
            numbers = [one["job"] for one in jobs]
            rows.append({**whose, **values, "time": last["time"], "percent": percent, "jobs": numbers})
    return sorted(rows, key=lambda one: (one["percent"], one["node"], one["uuid"]))


def _uses(db: sql.Connection, now: float) -> Iterable[Any]:
    """A row for each attempt and node."""
    attempt, use = schema.attempt, schema.jobuse
    time = use.c.time - sql.func.coalesce(use.c.clock, 0.0)
    return db.execute(
        sql.select(attempt.c.job, attempt.c.attempt, attempt.c.end, use.c.node, use.c.gpus)
        .join(use, sql.and_(use.c.id == attempt.c.job, use.c.sub == attempt.c.attempt))
        .where(attempt.c.fed == now, attempt.c.end >= now - RECENT)
        .where(time >= attempt.c.start, time <= attempt.c.end + schema.END_NEAR)  # numbers are used again one day
        .order_by(attempt.c.end, attempt.c.job, attempt.c.attempt)
    )


def _enter(behind: Behind, rows: Sequence[Any], slow: Slow) -> None:
    """One attempt's GPUs. A GPU whose application clocks were lowered is left out: that is no sign of its own."""
    own, last = {}, rows[0]
    for row in rows:
        for uuid, one in picture.read(row.gpus).items():
            lowered = one.get("slow", {}).get("reason") == "application clocks"
            if one.get("clock") and one.get("load", 0) >= slow.after and not lowered:
                own[f"{row.node} {uuid}"] = (one.get("model", ""), one["clock"])
    for gpu, (middle, is_slow) in clocks.compare(own, slow.clock).items():
        jobs = [one for one in behind.get(gpu, []) if one["job"] != last.job]
        if is_slow:
            model, clock = own[gpu]
            new = {"job": last.job, "time": last.end, "model": model, "clock": clock, "median": middle}
            jobs = sorted([*jobs, new], key=lambda one: one["time"])[-2:]
        else:
            jobs = [one for one in jobs if one["time"] > last.end]
        behind[gpu] = jobs
