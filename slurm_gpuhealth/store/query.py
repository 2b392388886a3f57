"""What the correlator reads from the cluster's record: events in order of arrival, and the runs and logs of a job."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from sqlalchemy import delete, func, or_, select, tuple_

from slurm_gpuhealth.outcomes import Event
from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

    from sqlalchemy import Connection, Engine, Row, Table

OF_INTEREST = ("xid", "sxid", "aer", "ib")
"""Sources whose findings are evidence about a job even if they are not a fault of the node."""
ELSEWHERE = ("test", "repair", "drain", "gpu")
"""Sources of events with their own tables, and gpu:slow, which says nothing about a job's end: not events."""
BEATS = 3
"""A node that missed so many heartbeats is silent; one of an older version sends none."""
CODE = 100
"""The most characters of a code: Python refuses numbers with thousands of digits."""


def events(db: Connection, position: str = "", now: float = math.inf) -> tuple[str, list[Event]]:
    """The events that came after `position` ("": all), in that order, and the next position.

    Times are the store's: each node's clock offset is subtracted. If a finding's severity changes, it comes again. No
    event is later than `now`: if a node started with a wrong clock that was corrected before it shipped, a repair or a
    test from the future would hide everything that happens to it for years.
    """
    begin = int(position or 0)
    end = int(db.execute(select(schema.cursor.c.value).where(schema.cursor.c.name == "taken")).scalar() or 0)
    found: list[tuple[int, Event]] = []
    for read in (_findings, _tests, _repairs, _swaps):
        found += read(db, begin, end)
    found.sort(key=lambda one: one[0])
    return str(max(begin, end)), [event._replace(time=min(max(event.time, 0.0), now)) for _, event in found]


def runs(db: Connection, job: int) -> list[dict[str, Any]]:
    """The records of the job's nodes: `node`, `attempt`, `gpus` (UUIDs), `started`, `ended` (the store's time),
    `exit_code`, `signal`, `derived`, `outcome` (None: it runs)."""
    table, found = schema.run, []
    for row in db.execute(select(table).where(table.c.id == job).order_by(table.c.sub, table.c.started, table.c.node)):
        one = row._asdict()
        clock = one["clock"] or 0.0
        one |= {"attempt": one["sub"], "gpus": [uuid for uuid in one["gpus"].split(",") if uuid]}
        one |= {name: one[name] - clock for name in ("started", "ended") if one[name] is not None}
        found.append(one)
    return found


def logs(db: Connection, job: int, attempt: int) -> dict[str, Any] | None:
    """What the epilog read in the job's log: the fields of `outcomes.Reading`, or None."""
    table = schema.joblog
    rows = db.execute(select(table.c.reading).where(table.c.id == job, table.c.sub == attempt).order_by(table.c.time))
    for text in rows.scalars():
        reading = _object(text)
        if reading:
            return dict(reading)
    return None


def newest(db: Connection) -> float:
    """The newest time in the record: if the clock jumps years ahead, nothing may be forgotten."""
    ends = [func.max(column) for column in (schema.attempt.c.end, schema.node.c.last_shipped)]
    return max(db.execute(select(one)).scalar() or 0.0 for one in ends)


def clusters(db: Connection, since: float) -> list[str]:
    """The clusters whose jobs ended since then; more than one if two controllers share a store by mistake."""
    table = schema.attempt
    return sorted(db.execute(select(table.c.cluster).where(table.c.end >= since).distinct()).scalars())


def silent(db: Connection, now: float, heartbeat: float, there: Collection[str] | None) -> dict[str, Any]:
    """The number of `nodes` in the store, and the `silent` nodes: they missed three heartbeats, or shipped nothing for
    an hour after a GPU job.

    `there`: Slurm's nodes; also those that never shipped are silent. None: it does not answer; then a node that said
    nothing for a week is taken for removed.
    """
    node, job, of = schema.node.c, schema.attempt_node.c, schema.attempt.c
    same = [job[name] == of[name] for name in ("cluster", "job", "attempt")]
    last = select(node.node, func.max(node.last_shipped)).group_by(node.node)
    heard = {name: when or 0.0 for name, when in db.execute(last)}
    ended = of.end > now - 86400, of.end < now - 3600, of.gpu_seconds > 0
    ends = db.execute(select(job.node, func.max(job.end)).where(*same, *ended).group_by(job.node))
    older = heard.keys() - set(db.execute(select(node.node).where(node.gpuhealth != "")).scalars())
    begin, end = now - 7 * 86400, now - BEATS * heartbeat
    expected = [name for name in heard if heard[name] > begin] if there is None else there
    missed = {name for name in expected if name not in older and heard.get(name, 0.0) < end}
    owing = {name for name, ended in ends if heard.get(name, 0.0) < ended and (there is None or name in there)}
    return {"nodes": len(heard), "silent": sorted(missed | owing)}


def prune(engine: Engine, before: float) -> None:
    """Delete what is older than `before`, in small steps, so that other programs can write in between."""
    for table, when in (
        *(
            (one, one.c.time)
            for one in (
                *(schema.finding, schema.diagnostic, schema.decision, schema.step),
                *(schema.figure, schema.joblog, schema.jobuse),
            )
        ),
        *((schema.run, schema.run.c.started), (schema.skipped, schema.skipped.c.time)),
        *((schema.attempt, schema.attempt.c.end), (schema.attempt_node, schema.attempt_node.c.end)),
        *((schema.outside, schema.outside.c.time), (schema.verdict, schema.verdict.c.scored)),
        *((schema.suspicion, schema.suspicion.c.time), (schema.action, schema.action.c.time)),
        *((schema.gpu, schema.gpu.c.last), (schema.node, schema.node.c.last_shipped)),
    ):
        key = tuple_(*table.primary_key.columns)
        old = select(*table.primary_key.columns).where(when < before).limit(5000)
        while True:
            with engine.begin() as db:
                if db.execute(delete(table).where(key.in_(old))).rowcount < 5000:
                    break


def _new(db: Connection, table: Table, begin: int, end: int) -> Iterator[Row[Any]]:
    return iter(db.execute(select(table).where(table.c.taken > begin, table.c.taken <= end).order_by(table.c.taken)))


def _findings(db: Connection, begin: int, end: int) -> Iterator[tuple[int, Event]]:
    table = schema.finding
    which = or_(table.c.severity != "info", table.c.source.in_(OF_INTEREST)), table.c.source.not_in(ELSEWHERE)
    query = select(table).where(table.c.taken > begin, table.c.taken <= end, *which).order_by(table.c.taken)
    for row in db.execute(query):
        detail = dict(_object(row.details))
        more = {"pci": row.pci, "job": row.job, "count": row._mapping["count"]}
        detail |= {key: value for key, value in more.items() if value is not None and (key, value) != ("count", 1)}
        gpu = row.uuid or row.gpu
        time = row.time - (row.clock or 0.0)
        yield row.taken, Event(time, row.node, gpu, row.source, row.code[:CODE], row.severity or "info", detail)


def _tests(db: Connection, begin: int, end: int) -> Iterator[tuple[int, Event]]:
    """A diagnostic has a row for each GPU: one event if all passed, else an event for each GPU that failed."""
    tests: dict[tuple[str, str, float, int], list[Row[Any]]] = {}
    for row in _new(db, schema.diagnostic, begin, end):
        tests.setdefault((row.node, row.journal, row.time, row.level), []).append(row)
    for (node, _, time, level), rows in tests.items():
        first = rows[0]
        when = time + (first.seconds or 0.0) - (first.clock or 0.0)
        failed = [row for row in rows if row.outcome == "fail"]
        for row in failed:
            detail = {"level": level, "passed": False, "gpus": [row.uuid]}
            yield row.taken, Event(when, node, row.uuid, "test", f"L{level}", "fault", detail)
        if not failed and all(row.outcome == "pass" for row in rows):
            detail = {"level": level, "passed": True, "gpus": [row.uuid for row in rows]}
            uuid = first.uuid if len(rows) == 1 else None
            yield rows[-1].taken, Event(when, node, uuid, "test", f"L{level}", "info", detail)


def _repairs(db: Connection, begin: int, end: int) -> Iterator[tuple[int, Event]]:
    """The site's own repairs (`repair.command`) that succeeded."""
    for row in _new(db, schema.step, begin, end):
        if row.rung == "repair" and row.outcome == "pass":
            when = row.time + (row.seconds or 0.0) - (row.clock or 0.0)
            yield row.taken, Event(when, row.node, row.uuid or row.gpu, "repair", "repair", "info", {"fact": row.fact})


def _swaps(db: Connection, begin: int, end: int) -> Iterator[tuple[int, Event]]:
    """A new GPU in the slot of another: `gpu` is the GPU that was taken out."""
    for row in _new(db, schema.gpu, begin, end):
        if row.replaces:
            detail = {"new": row.uuid, "pci": row.pci, "serial": row.serial}
            yield row.taken, Event(row.first, row.node, row.replaces, "repair", "gpu", "info", detail)


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
