"""Finds the running jobs that stand still on all their nodes, from what the nodes have shipped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import sqlalchemy as sql

from slurm_gpuhealth.correlate import hung
from slurm_gpuhealth.logs.reading import read_reading
from slurm_gpuhealth.outcomes import Event
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store import judged, schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings

SILENT = 3.0
"""A node that has shipped nothing for so many check intervals is silent: with a job of several nodes it ships more
often (hooks/check.py)."""
NEAR = 60.0
"""A node's clock may be so many seconds behind when its prolog notes a job's begin; and the processes of a job that is
ended are gone so many seconds before its end."""
LATEST = 1e12
"""A time beyond this is none of ours: Python's floats end, too."""
PROLOGS = 3600.0
"""The prologs of a job's nodes begin within so many seconds; an older record is of another job with this number."""


def look(engine: sql.Engine, settings: Settings, now: float, trouble: list[str]) -> list[dict[str, Any]]:
    """The running jobs that stand still, the most GPU-hours first; kept for `gpuhealth hung`."""
    with engine.connect() as db:
        found = [one for job, restart in _told(db) if (one := of(db, settings, job, restart, now, now))]
    running = [one for one in found if _is_running(settings, one, trouble)]
    running.sort(key=lambda one: -float(one["gpu_hours"]))
    with engine.begin() as db:
        judged.put_cursor(db, "hung", json.dumps({"time": now, "jobs": running}))
    return running


def before_end(db: sql.Connection, settings: Settings, job: int, restart: int, end: float) -> dict[str, Any] | None:
    """How a run that ended then had stood still, as `of` has it."""
    return of(db, settings, job, restart, end, end - NEAR)


def of(
    db: sql.Connection, settings: Settings, job: int, restart: int, now: float, until: float
) -> dict[str, Any] | None:
    """How the job's run stands still `now`, by what stood `until` then: the fields of correlate's `Hung`, and `job`,
    `attempt`, `user`, `nodes`, `began`, `gpu_hours`, `gpu_index`. None: it works."""
    rows = _runs(db, job, restart, now)
    if not rows:
        return None
    began = min(row.started - (row.clock or 0.0) for row in rows)
    late = SILENT * settings.check.interval
    numbers = {
        row.uuid: row.gpu
        for row in db.execute(sql.select(schema.gpu).where(schema.gpu.c.node.in_([row.node for row in rows])))
    }
    findings = list(_findings(db, [row.node for row in rows], began))
    stands = _stands(findings, job, restart, until)
    heard = _heard(db, [row.node for row in rows])
    parts = [
        hung.Part(
            row.node,
            {uuid: numbers.get(uuid) for uuid in row.gpus.split(",")},
            stands.get(row.node, {}),
            now - heard.get(row.node, 0.0) <= late,
        )
        for row in rows
    ]
    events = [_event(row) for row in findings if row.source != "job" and row.time - (row.clock or 0.0) <= now + NEAR]
    missing = max(0, max(row.nodes or 0 for row in rows) - len(rows))
    told = hung.judge(parts, events, _flight(db, job, restart, began), missing)
    if told is None:
        return None
    whose = {"job": job, "attempt": restart, "user": rows[0].user, "nodes": [row.node for row in rows], "began": began}
    hours = told.gpus * max(0.0, now - told.since) / 3600
    return {
        **whose,
        **told._asdict(),
        "different": [{"node": node, "uuid": uuid, "gpu": numbers.get(uuid)} for node, uuid in told.different],
        "gpu_hours": round(hours, 2),
        "gpu_index": numbers.get(told.gpu) if told.gpu else None,
    }


def _runs(db: sql.Connection, job: int, restart: int, now: float) -> list[Any]:
    """The nodes' records of the run, one of each."""
    run = schema.run
    began = run.c.started - sql.func.coalesce(run.c.clock, 0.0)
    query = sql.select(run).where(run.c.id == job, run.c.sub == restart, run.c.gpus != "", began <= now + NEAR)
    rows = {row.node: row for row in db.execute(query.order_by(run.c.started))}
    times = {node: row.started - (row.clock or 0.0) for node, row in rows.items()}
    return [row for node, row in rows.items() if times[node] >= max(times.values()) - PROLOGS]


def _told(db: sql.Connection) -> list[tuple[int, int]]:
    """The running jobs of which a node says that they stand still."""
    run, finding = schema.run, schema.finding
    query = (
        sql.select(run.c.id, run.c.sub)
        .join_from(run, finding, sql.and_(finding.c.node == run.c.node, finding.c.time >= run.c.started))
        .where(run.c.ended.is_(None), finding.c.source == "job", finding.c.cleared.is_(None))
        .distinct()
        .order_by(run.c.id, run.c.sub)
    )
    return [(job, restart) for job, restart in db.execute(query)]


def _findings(db: sql.Connection, nodes: Sequence[str], began: float) -> Iterable[Any]:
    table = schema.finding
    since = began - hung.BEFORE
    return db.execute(sql.select(table).where(table.c.node.in_(nodes), table.c.time >= since).order_by(table.c.time))


def _stands(findings: Iterable[Any], job: int, restart: int, until: float) -> dict[str, dict[str, tuple[str, float]]]:
    """Node → the GPUs that stand still for this run, and did so until then."""
    found: dict[str, dict[str, tuple[str, float]]] = {}
    for row in findings:
        clock = row.clock or 0.0
        if row.source != "job" or not row.uuid or (row.cleared is not None and row.cleared - clock < until):
            continue
        details = _object(row.details)
        kind, since = details.get("kind"), details.get("since")
        # A job that has never worked and does not spin may not have begun.
        said = kind in ("spinning", "idle") if row.code == "stalled" else kind == "spinning"
        ours = said and (details.get("job"), details.get("restart")) == (job, restart)
        if ours and isinstance(since, (int, float)) and 0 <= since < LATEST:
            found.setdefault(row.node, {})[row.uuid] = str(kind), float(since) - clock
    return found


def _heard(db: sql.Connection, nodes: Sequence[str]) -> dict[str, float]:
    table = schema.node
    last = sql.func.max(table.c.last_shipped)
    rows = db.execute(sql.select(table.c.node, last).where(table.c.node.in_(nodes)).group_by(table.c.node))
    return {node: when for node, when in rows if when is not None}


def _event(row: Any) -> Event:
    detail = {**_object(row.details), "message": row.message}
    return Event(row.time - (row.clock or 0.0), row.node, row.uuid, row.source, row.code, row.severity, detail)


def _flight(db: sql.Connection, job: int, restart: int, began: float) -> Any:
    table = schema.joblog
    query = sql.select(table.c.reading).where(table.c.id == job, table.c.sub == restart, table.c.time >= began)
    readings = [read_reading(text) for text in db.execute(query.order_by(table.c.time)).scalars()]
    return next((one.flight for one in readings if one and one.flight), None)


def _is_running(settings: Settings, one: dict[str, Any], trouble: list[str]) -> bool:
    """Whether Slurm says that this run of the job runs: a node that died leaves its record open. A suspended job stands
    still because somebody wants that."""
    try:
        job = control.show_job(settings.slurm, one["job"])
    except control.NoSuchJob:
        return False
    except control.SlurmError as error:
        trouble.append(f"job {one['job']}, which stands still: {error}")
        return True
    return job.state == "RUNNING" and job.restarts == one["attempt"] and one["began"] >= job.start - NEAR


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
