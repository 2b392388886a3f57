"""Reads from Slurm's accounting how jobs ended, joins it with the nodes' own records, and keeps it in the store.

    sacct or PySlurm ─▶ Ended ─▶ numbered by job and start ─▶ attempt, attempt_node ┐
    sacctmgr         ─▶ Noted ─▶ not ours                  ─▶ outside               ├ one transaction a day read
                                                              cursor                ┘

A row may come late (slurmdbd was down) or change (a corrected end). So each run reads everything since `settled` again;
`settled` is how far an earlier run, at least an hour ago, had read. Once a day the last week is read again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import sqlalchemy as sql

from slurm_gpuhealth.logs.reading import read_reading
from slurm_gpuhealth.outcomes import Attempt, Event
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm import sacct
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import lock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.slurm.sacct import Ended, Noted

DAY = 86400.0
LATE = 3600.0
"""Seconds for which a row may be missing although slurmdbd answers: slurmctld has not sent it yet."""
WEEK = 7 * DAY
DOWN_NEAR = 30.0
"""The most seconds between a NODE_FAIL and the DOWN of its node. Measured in 22.05: the same second."""
MANY = 500
"""Rows per query to the store."""
KEYS = ("cluster", "job", "attempt")
SENT = ("partition", "qos", "reservation", "timelimit", "constraint")
"""If only these change, the attempt is not judged again: an upgrade fills them for jobs that are long counted."""
TOLD = ("user", "account", "name", "array", "state", "exit_code", "signal", "failed_node", "submit", *SENT)


class Taken(NamedTuple):
    """How many rows are new or have changed."""

    attempts: int = 0
    outside: int = 0


def finished(settings: Settings, since: float, until: float) -> Iterator[Ended]:
    """The runs that ended in since ≤ t < until, day by day, numbered from 0 for each job. Raises control.SlurmError."""
    last: dict[int, int] = {}
    for begin, end in windows(since, until):
        for one in _ended(settings, begin, end):
            job = one.attempt.job
            last[job] = max(last.get(job, -1) + 1, one.restarts or 0)  # Slurm uses job numbers again
            yield one._replace(attempt=one.attempt._replace(attempt=last[job]))


def outside(settings: Settings, since: float, until: float) -> list[Event]:
    """Drains, downs and fails that are not ours and had not ended before `since`. Raises control.SlurmError."""
    return [event_of(one) for one in sacct.noted(settings, since, until) if not is_ours(one)]


def take_in(engine: sql.Engine, settings: Settings, now: float) -> Taken:
    """Update the store. The correlator judges a changed row again (`fed`).

    If it is killed, the next run continues after the last finished day. Raises control.SlurmError; what was read until
    then is kept.
    """
    with engine.connect() as db:
        row = db.execute(sql.select(schema.cursor.c.value).where(schema.cursor.c.name == "accounting")).scalar()
    marks = {"settled": now - settings.accounting.first, "read": now, "to": 0.0, "week": now}
    marks.update(json.loads(row) if row else {})
    since = min(marks["settled"], now - LATE)
    weekly = abs(now - marks["week"]) >= DAY
    taken = Taken()
    for begin, end in windows(min(since, now - WEEK) if weekly else since, now):
        ends, notes = _ended(settings, begin, end), sacct.noted(settings, begin, end)
        with engine.begin() as db:
            lock(db)  # rows that come while another program judges would count as judged
            taken = Taken(taken.attempts + _keep_attempts(db, ends), taken.outside + _keep_outside(db, notes))
            marks["settled"] = max(marks["settled"], min(end, now - DAY))
            _keep_marks(db, marks)
    if abs(now - marks["read"]) >= LATE or not marks["to"]:
        marks.update(settled=max(marks["settled"], marks["to"]), read=now, to=now)
    with engine.begin() as db:
        _keep_marks(db, {**marks, "week": now} if weekly else marks)
    return taken


def joined(db: sql.Connection, job: int, attempt: int) -> Attempt:
    """An attempt in the store, with its nodes' records. Raises KeyError. For many at once: `join`."""
    table = schema.attempt
    rows = db.execute(sql.select(table).where(table.c.job == job, table.c.attempt == attempt))
    for found in join(db, map(attempt_of, rows.mappings())):
        return found
    raise KeyError(f"job {job}, attempt {attempt}")


def join(db: sql.Connection, attempts: Iterable[Attempt]) -> Iterator[Attempt]:
    """Attempts with their nodes' records: which GPUs, the true exit codes, what the log said.

    The epilog sees 137 where accounting has 9. For jobs that somebody ended it sees 0:0: then accounting's code counts.
    """
    rest = iter(attempts)
    while some := list(islice(rest, MANY)):
        runs, logs = _of_jobs(db, schema.run, some), _of_jobs(db, schema.joblog, some)
        for one in some:
            own = _nearest(one, runs[one.job])
            gpus = {node: tuple(run["gpus"].split(",")) for node, run in own.items() if run["gpus"]}
            codes = [(run["exit_code"] or 0, run["signal"] or 0) for run in own.values()]
            code, signal = next((each for each in codes if any(each)), (one.exit_code, one.signal))
            said = [log for log in logs[one.job] if one.start <= log["time"] - _ahead(log) <= one.end + schema.END_NEAR]
            yield one._replace(
                exit_code=code,
                signal=signal,
                gpus={**(one.gpus or {}), **gpus} or None,
                reading=read_reading(said[-1]["reading"]) if said else one.reading,
            )


def attempt_of(row: Any) -> Attempt:
    """A row of the table `attempt` as a value."""
    values = {name: row[name] for name in Attempt._fields if name in row}
    values["nodes"] = tuple(json.loads(row["nodes"]))
    values["gpus"] = {node: tuple(one) for node, one in json.loads(row["gpus"]).items()} if row["gpus"] else None
    values["reading"] = read_reading(row["reading"]) if row["reading"] else None
    return Attempt(**values)


def event_of(one: Noted) -> Event:
    """A drain that is not ours, as an event."""
    detail = {"reason": one.reason, "user": one.user, "until": one.end}
    return Event(one.start, one.node, None, "drain", _code(one), "info" if _code(one) == "drain" else "warning", detail)


def is_ours(one: Noted) -> bool:
    """Whether the drain is ours, or it is not a drain. Our own holds must not count as evidence, even if an admin has
    changed their text."""
    return not _code(one) or one.reason.startswith(reasons.PREFIX)


def windows(since: float, until: float) -> Iterator[tuple[float, float]]:
    """since … until in steps of at most a day."""
    while since < until:
        yield since, min(since + DAY, until)
        since += DAY


def _code(one: Noted) -> str:
    return next((code for code in ("down", "fail", "drain") if one.state.startswith(code.upper())), "")


def _ended(settings: Settings, since: float, until: float) -> list[Ended]:
    """The ended runs from the configured back end, with the node that caused each NODE_FAIL."""
    if settings.accounting.backend == "pyslurm":
        from slurm_gpuhealth.slurm import accounting_pyslurm

        ends = accounting_pyslurm.ended(settings, since, until)
    else:
        ends = sacct.ended(settings, since, until)
    return _failed_nodes(settings, ends)


def _failed_nodes(settings: Settings, ends: list[Ended]) -> list[Ended]:
    """Before 24.11 accounting does not say which node failed: it is the job's only node that went down then.

    No release says that somebody set the node DOWN: Slurm calls that a NODE_FAIL too, but for us it is a cancellation.
    """
    lost = [one.attempt for one in ends if one.attempt.state == "NODE_FAIL"]
    if not lost:
        return ends
    begin, end = min(one.end for one in lost), max(one.end for one in lost)
    downs = [one for one in sacct.noted(settings, begin - DOWN_NEAR, end + DOWN_NEAR) if _code(one) == "down"]

    def known(one: Ended) -> Ended:
        attempt = one.attempt
        if attempt.state != "NODE_FAIL":
            return one
        near = [down for down in downs if down.node in attempt.nodes and abs(down.start - attempt.end) <= DOWN_NEAR]
        if near and all(map(_by_hand, near)):
            return one._replace(attempt=attempt._replace(state="CANCELLED", failed_node=None))
        nodes = attempt.nodes if len(attempt.nodes) == 1 else tuple({down.node for down in near})
        named = attempt.failed_node or (nodes[0] if len(nodes) == 1 else None)
        return one._replace(attempt=attempt._replace(failed_node=named))

    return [known(one) for one in ends]


def _by_hand(down: Noted) -> bool:
    """Whether an admin set the node DOWN: its reason is an admin's. Such a reason stays even if the node dies later."""
    return bool(down.reason) and not is_ours(down) and not reasons.is_slurms(down.reason)


def _keep_attempts(db: sql.Connection, ends: Sequence[Ended]) -> int:
    """Number the runs and write them; returns how many are new or have changed."""
    changed, numbered = 0, _numbered(db, ends)
    while some := list(islice(numbered, MANY)):
        rows, places = [], []
        for one in some:
            attempt = one.attempt
            key = {"cluster": one.cluster, "job": attempt.job, "attempt": attempt.attempt}
            took = {"start": attempt.start, "end": attempt.end}
            rows.append({
                **key, **took, **{name: getattr(attempt, name) for name in TOLD}, "nodes": json.dumps(attempt.nodes),
                "gpu_seconds": one.gpus * (attempt.end - attempt.start), "fed": None,
            })  # fmt: skip
            places += [{**key, **took, "node": node} for node in attempt.nodes]
        _upsert(db, schema.attempt_node, (*KEYS, "node"), places)
        changed += _upsert(db, schema.attempt, KEYS, rows)
    return changed


def _numbered(db: sql.Connection, ends: Sequence[Ended]) -> Iterator[Ended]:
    """Each run with its number in the store; a new run gets Slurm's number, or the next one."""
    table = schema.attempt.c
    known: dict[tuple[str, int], dict[float, int]] = defaultdict(dict)
    for some in _chunks(sorted({one.attempt.job for one in ends})):
        asked = sql.select(table.cluster, table.job, table.start, table.attempt).where(table.job.in_(some))
        for cluster, job, start, number in db.execute(asked):
            known[cluster, job][start] = number
    for one in sorted(ends, key=lambda one: one.attempt.start):
        mine = known[one.cluster, one.attempt.job]
        number = mine.get(one.attempt.start)
        if number is None:
            next_one = max(mine.values(), default=-1) + 1
            number = next_one if one.restarts is None or one.restarts in mine.values() else one.restarts
            mine[one.attempt.start] = number
        yield one._replace(attempt=one.attempt._replace(attempt=number))


def _keep_outside(db: sql.Connection, notes: Sequence[Noted]) -> int:
    rows = [
        {"cluster": one.cluster, "node": one.node, "time": one.start, "code": _code(one), "until": one.end,
         "reason": one.reason, "user": one.user}
        for one in notes if not is_ours(one)
    ]  # fmt: skip
    return _upsert(db, schema.outside, ("cluster", "node", "time", "code"), rows)


def _keep_marks(db: sql.Connection, marks: Mapping[str, float]) -> None:
    _upsert(db, schema.cursor, ("name",), [{"name": "accounting", "value": json.dumps(marks)}])


def _upsert(db: sql.Connection, table: sql.Table, keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> int:
    """Insert rows, or replace rows of the same key that differ; returns how many. `fed` stays if only SENT differs."""
    if not rows:
        return 0
    if db.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    asked = insert(table)
    values: dict[str, Any] = {name: asked.excluded[name] for name in rows[0] if name not in keys}
    differ = {name: table.c[name].is_distinct_from(value) for name, value in values.items() if name != "fed"}
    if "fed" in values:
        ours = sql.or_(*(one for name, one in differ.items() if name not in SENT))
        values["fed"] = sql.case((ours, values["fed"]), else_=table.c.fed)
    asked = asked.on_conflict_do_update(index_elements=list(keys), set_=values, where=sql.or_(*differ.values()))
    done = db.execute(asked, list(rows), execution_options={"preserve_rowcount": True})
    return max(0, done.rowcount)


def _of_jobs(db: sql.Connection, table: sql.Table, attempts: Sequence[Attempt]) -> dict[int, list[Any]]:
    """What nodes shipped about these jobs, by job, in order of time."""
    found: dict[int, list[Any]] = defaultdict(list)
    time = table.c.started if "started" in table.c else table.c.time
    jobs = sorted({one.job for one in attempts})
    for row in db.execute(sql.select(table).where(table.c.id.in_(jobs)).order_by(time)).mappings():
        found[row["id"]].append(row)
    return found


def _nearest(attempt: Attempt, runs: Sequence[Any]) -> dict[str, Any]:
    """For each of the attempt's nodes the record of this run: the record whose begin is nearest."""
    own: dict[str, Any] = {}
    away: dict[str, float] = {}
    for run in runs:
        node, began = run["node"], run["started"] - _ahead(run)
        far = abs(began - attempt.start)
        if node not in attempt.nodes or not attempt.start - schema.BEGIN_NEAR <= began <= attempt.end + schema.END_NEAR:
            continue
        if far < away.get(node, float("inf")):
            own[node], away[node] = run, far
    return {node: own[node] for node in attempt.nodes if node in own}


def _ahead(row: Any) -> float:
    """Seconds by which the node's clock was ahead when it shipped the row."""
    return float(row["clock"] or 0.0)


def _chunks(values: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(values), MANY):
        yield values[begin : begin + MANY]
