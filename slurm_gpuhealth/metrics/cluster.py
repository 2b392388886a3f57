"""The cluster's metrics, from the store and from slurmctld, as each run of gpuhealth correlate writes them.

Each query reads a window through an index: its cost grows with what happened of late, not with the store.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING

import sqlalchemy as sql

import slurm_gpuhealth
from slurm_gpuhealth.ladder import budget, climb
from slurm_gpuhealth.metrics import text
from slurm_gpuhealth.metrics.table import CLUSTER
from slurm_gpuhealth.outcomes import CAUSES
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store import judged, query, schema
from slurm_gpuhealth.store.open import reading

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from slurm_gpuhealth.config.settings import Settings

    Values = dict[tuple[object, ...], float]

DAY = 86400.0
DAYS = 28
"""How far back the MTBF looks."""
AT_ONCE = 9
"""Days that a run reads at most; the last two are read each time."""
WORST = 20
"""Nodes whose probability has a series of its own."""
CODES = 500
"""The most series of findings."""
DUE = ("none", "L2", "L3", "L4", "RMA")
"""The rungs that may be due for a suspect."""


def publish(settings: Settings, engine: Engine, now: float, took: float, troubles: int) -> None:
    """Write `metrics.cluster`; `took` and `troubles` are the run's. Raises OSError."""
    with reading(engine) as db:
        found, days = gather(db, settings, now)
        kept = judged.get_cursor(db, "node-time")
    if json.dumps(days) != kept:
        with engine.begin() as db:
            judged.put_cursor(db, "node-time", json.dumps(days))
    found["gpuhealth_cluster_correlate_timestamp_seconds"] = {(): now + took}
    found["gpuhealth_cluster_correlate_duration_seconds"] = {(): round(took, 3)}
    found["gpuhealth_cluster_correlate_troubles"] = {(): troubles}
    text.write(settings.metrics.cluster, text.render(CLUSTER, found))


def gather(db: Connection, settings: Settings, now: float) -> tuple[dict[str, Values], dict[str, float]]:
    """The values of CLUSTER but those of the run; and the node time of the days that are over, to be kept."""
    began = time.monotonic()
    days = _node_time(db, now)
    of_slurm = _slurm(settings, now)
    there = _there(settings) if len(of_slurm) > 1 else None  # slurmctld answers
    silent = query.silent(db, now, settings.store.heartbeat, there)
    found: dict[str, Values] = {
        "gpuhealth_cluster_build_info": {(slurm_gpuhealth.__version__,): 1},
        "gpuhealth_cluster_reporting_nodes": {(): silent["nodes"]},
        "gpuhealth_cluster_silent_nodes": {(): len(silent["silent"])},
        **of_slurm,
        **_suspects(db, there),
        **_verdicts(db, now),
        **_mtbf(db, days),
        **{
            f"gpuhealth_cluster_{name}_1d": _last_day(db, table, names, now) for name, (table, names) in COUNTED.items()
        },
    }
    found["gpuhealth_cluster_metrics_duration_seconds"] = {(): round(time.monotonic() - began, 3)}
    today = str(int(now // DAY))
    return found, {day: seconds for day, seconds in days.items() if int(day) < int(today) - 1}


def _slurm(settings: Settings, now: float) -> dict[str, Values]:
    """What we hold, by slurmctld."""
    try:
        holds, total = control.holds(settings.slurm, settings.drain.nodes)
    except control.SlurmError:
        return {"gpuhealth_cluster_slurmctld_up": {(): 0}}
    limits = budget.limits(total, settings)
    kinds = [budget.kind(hold.ours) for hold in holds]
    held: dict[str, int] = {kind: kinds.count(kind) for kind in budget.WORDS}
    used = {**held, "hour": budget.in_last_hour(holds, now)}
    rungs: Values = {}
    for hold in holds:
        key = (hold.ours.rung, hold.ours.state, hold.ours.next)
        rungs[key] = rungs.get(key, 0) + 1
    return {
        "gpuhealth_cluster_slurmctld_up": {(): 1},
        "gpuhealth_cluster_nodes": {(): total},
        "gpuhealth_cluster_held_nodes": {(kind,): number for kind, number in held.items()},
        "gpuhealth_cluster_held_nodes_limit": {(kind,): number for kind, number in limits.items()},
        "gpuhealth_cluster_budget_left_nodes": {(kind,): max(0, limits[kind] - used[kind]) for kind in limits},
        "gpuhealth_cluster_held_rung_nodes": rungs,
        "gpuhealth_cluster_rma_nodes": {(): sum(climb.is_end(hold.ours) for hold in holds)},
    }


def _there(settings: Settings) -> frozenset[str] | None:
    try:
        return control.counted(settings.slurm, settings.drain.nodes)
    except control.SlurmError:
        return None


def _suspects(db: Connection, there: frozenset[str] | None) -> dict[str, Values]:
    found = [one for one in judged.suspicions(db) if there is None or one.node in there]
    due = [one.rung or "none" for one in found]
    return {
        "gpuhealth_cluster_suspect_nodes": {(rung,): due.count(rung) for rung in DUE},
        "gpuhealth_cluster_lemon_probability": {(one.node,): round(one.p_lemon, 4) for one in found[:WORST]},
    }


def _verdicts(db: Connection, now: float) -> dict[str, Values]:
    """All attempts that ended in the last day by cause; without a cause: it did not fail."""
    attempt, verdict = schema.attempt, schema.verdict
    rows = db.execute(
        sql.select(verdict.c.cause, sql.func.count(), sql.func.coalesce(sql.func.sum(attempt.c.gpu_seconds), 0))
        .select_from(attempt.outerjoin(verdict, sql.and_(*_same(attempt, verdict))))
        .where(attempt.c.end >= now - DAY)
        .group_by(verdict.c.cause)
    ).all()
    jobs = {cause: number for cause, number, _ in rows}
    used = {cause: seconds for cause, _, seconds in rows}
    return {
        "gpuhealth_cluster_failed_jobs_1d": {(cause,): jobs.get(cause, 0) for cause in CAUSES},
        "gpuhealth_cluster_lost_gpu_seconds_1d": {(cause,): used.get(cause, 0) for cause in CAUSES},
        "gpuhealth_cluster_gpu_seconds_1d": {(): sum(used.values())},
    }


def _same(attempt: sql.Table, verdict: sql.Table) -> list[sql.ColumnElement[bool]]:
    return [attempt.c[name] == verdict.c[name] for name in ("cluster", "job", "attempt")]


def _node_time(db: Connection, now: float) -> dict[str, float]:
    """Day → node-seconds of the GPU attempts that ended then, the last days first. Days that are over for a day are
    remembered; a run reads AT_ONCE others, so the first runs know fewer days."""
    known, today = json.loads(judged.get_cursor(db, "node-time") or "{}"), int(now // DAY)
    days: dict[str, float] = {}
    unread = AT_ONCE
    for day in range(today, today - DAYS, -1):
        if str(day) not in known:
            unread -= 1
            if unread < 0:
                break
        days[str(day)] = known[str(day)] if str(day) in known else _of_day(db, day)
    return days


def _of_day(db: Connection, day: int) -> float:
    one = schema.attempt.c
    nodes = sql.func.length(one.nodes) - sql.func.length(sql.func.replace(one.nodes, ",", "")) + 1
    which = one.end >= day * DAY, one.end < (day + 1) * DAY, one.gpu_seconds > 0
    return float(db.execute(sql.select(sql.func.sum((one.end - one.start) * nodes)).where(*which)).scalar() or 0.0)


def _mtbf(db: Connection, days: dict[str, float]) -> dict[str, Values]:
    attempt, verdict = schema.attempt, schema.verdict
    seconds, since = sum(days.values()), min(map(int, days)) * DAY
    rows = db.execute(
        sql.select(verdict.c.node, attempt.c.end)
        .where(*_same(attempt, verdict), verdict.c.cause == "node")
        .where(verdict.c.scored >= since, attempt.c.end >= since)
    )
    count = len({(node, end // 3600) for node, end in rows})
    mtbf: Values = {(name,): seconds / number for name, number in bounds(count).items() if seconds and number}
    return {"gpuhealth_cluster_node_failures_28d": {(): count}, "gpuhealth_cluster_node_mtbf_seconds": mtbf}


def bounds(count: int) -> dict[str, float]:
    """`count` failures, and how many are at the ends of the 95 % interval of the mean time between them (Poisson's)."""
    return {
        "lower": _expected(count, 0.025),
        "estimate": float(count),
        "upper": _expected(count - 1, 0.975) if count else 0.0,
    }


def _expected(most: int, share: float) -> float:
    """How many must be expected for `most` or fewer to come with this probability."""
    low, high = 0.0, most + 10 + 10 * math.sqrt(most + 1)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        likely = sum(math.exp(k * math.log(middle) - middle - math.lgamma(k + 1)) for k in range(most + 1))
        low, high = (middle, high) if likely > share else (low, middle)
    return low


COUNTED = {
    # gpuhealth_cluster_NAME_1d → its table, and the columns that are its labels
    "decisions": (schema.decision, ("action",)),
    "rungs": (schema.step, ("rung", "outcome")),
    "findings": (schema.finding, ("source", "code", "severity", "mode")),
}


def _last_day(db: Connection, table: sql.Table, names: tuple[str, ...], now: float) -> Values:
    """Rows of the last day by their labels, the most frequent first; node by node, as (node, time) has an index."""
    labels = [table.c[name] for name in names]
    number = sql.func.count()
    rows = db.execute(
        sql.select(*labels, number)
        .where(table.c.node.in_(sql.select(schema.node.c.node)), table.c.time >= now - DAY)
        .group_by(*labels)
        .order_by(number.desc(), *labels)
        .limit(CODES)
    )
    return {tuple(row[:-1]): row[-1] for row in rows}
