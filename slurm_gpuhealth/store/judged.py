"""The correlator's part of the cluster's record, written here and read by the commands: verdicts, suspicion, state."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sql

from slurm_gpuhealth.outcomes import CAUSES, Suspicion, Term, Verdict
from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy import Connection, Table


class Rows(MutableMapping[str, Any]):
    """The engine's values of one kind as rows: read on demand; `save` writes those that have changed."""

    def __init__(self, db: Connection, kind: str, read: Any) -> None:
        self.db, self.kind, self.read = db, kind, read
        self.known: dict[str, Any] = {}
        self.stored: dict[str, str] = {}
        """As they are in the database."""

    def __getitem__(self, key: str) -> Any:
        if key not in self.known:
            row = self.db.execute(
                sql.select(schema.state.c.data).where(schema.state.c.kind == self.kind, schema.state.c.key == key)
            ).scalar()
            if row is None:
                raise KeyError(key)
            self._learn(key, row)
        return self.known[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.known[key] = value

    def __delitem__(self, key: str) -> None:
        self.known.pop(key, None)
        self.stored.pop(key, None)
        self.db.execute(sql.delete(schema.state).where(schema.state.c.kind == self.kind, schema.state.c.key == key))

    def __iter__(self) -> Iterator[str]:
        """Reads all of them with one query."""
        for key, row in self.db.execute(
            sql.select(schema.state.c.key, schema.state.c.data).where(schema.state.c.kind == self.kind)
        ):
            if key not in self.known:
                self._learn(key, row)
        return iter(sorted(self.known))

    def __len__(self) -> int:
        table = schema.state
        stored = self.db.execute(sql.select(sql.func.count()).where(table.c.kind == self.kind)).scalar() or 0
        return int(stored) + len(self.known.keys() - self.stored.keys())

    def _learn(self, key: str, row: str) -> None:
        self.stored[key] = row
        self.known[key] = self.read(json.loads(row))

    def save(self) -> None:
        for key, value in self.known.items():
            text = json.dumps(value.to_json(), separators=(",", ":"))
            if text != self.stored.get(key):
                put(self.db, schema.state, {"kind": self.kind, "key": key}, {"data": text})
                self.stored[key] = text


def put(db: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Insert the row, or update it if its key exists."""
    where = [table.c[name] == value for name, value in key.items()]
    if not db.execute(sql.update(table).where(*where).values(**values)).rowcount:
        db.execute(sql.insert(table).values(**key, **values))


def get_cursor(db: Connection, name: str) -> str:
    return str(db.execute(sql.select(schema.cursor.c.value).where(schema.cursor.c.name == name)).scalar() or "")


def put_cursor(db: Connection, name: str, value: str) -> None:
    put(db, schema.cursor, {"name": name}, {"value": value})


def keep_verdict(db: Connection, verdict: Verdict, now: float) -> None:
    table = schema.attempt
    of = sql.select(table.c.cluster).where(table.c.job == verdict.job, table.c.attempt == verdict.attempt)
    cluster = str(db.execute(of).scalar() or "")
    data = {**verdict._asdict(), "terms": [term._asdict() for term in verdict.terms]}
    put(
        db,
        schema.verdict,
        {"cluster": cluster, "job": verdict.job, "attempt": verdict.attempt},
        {
            **{"cause": verdict.cause, "confidence": verdict.confidence, "node": verdict.node},
            **{"gpu": None if verdict.gpu is None else str(verdict.gpu), "scored": now},
            **{"fingerprint": verdict.fingerprint, "data": json.dumps(data)},
        },
    )


def scored_since(db: Connection, time: float) -> list[Verdict]:
    """The verdicts that are new or have changed since then."""
    table = schema.verdict
    rows = db.execute(sql.select(table.c.data).where(table.c.cause.in_(CAUSES), table.c.scored >= time)).scalars()
    found = [json.loads(row) for row in rows]
    return [Verdict(**{**row, "terms": tuple(Term(**term) for term in row["terms"])}) for row in found]


def keep_suspicions(db: Connection, found: Iterable[Suspicion], now: float) -> None:
    """Replace the table: it has only the suspects of the last run."""
    db.execute(sql.delete(schema.suspicion))
    for one in found:
        data = json.dumps(one._asdict())
        db.execute(sql.insert(schema.suspicion).values(node=one.node, time=now, p_lemon=one.p_lemon, data=data))


def suspicions(db: Connection) -> list[Suspicion]:
    """As of the last run, the worst first."""
    table = schema.suspicion
    rows = db.execute(sql.select(table.c.data).order_by(table.c.p_lemon.desc(), table.c.node)).scalars()
    return [Suspicion(**{**json.loads(row), "terms": tuple(json.loads(row)["terms"])}) for row in rows]


def verdicts(
    db: Connection,
    since: float,
    until: float | None = None,
    cause: str | None = None,
    user: str | None = None,
    nodes: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Judged attempts that ended from `since` to `until`, on one of `nodes` (none: any), newest first: the verdict's
    fields and the attempt's."""
    attempt, judged, there = schema.attempt, schema.verdict, schema.attempt_node
    query = sql.select(attempt, judged.c.data, judged.c.scored).where(*_same(attempt, judged), attempt.c.end >= since)
    if until is not None:
        query = query.where(attempt.c.end <= until)
    if cause:
        query = query.where(judged.c.cause == cause)
    if user:
        query = query.where(attempt.c.user == user)
    if 0 < len(nodes) <= schema.IN_SQL:
        query = query.where(sql.exists().where(*_same(attempt, there), there.c.node.in_(nodes)))
    rows = [row._asdict() for row in db.execute(query.order_by(attempt.c.end.desc(), attempt.c.job))]
    if len(nodes) > schema.IN_SQL:
        chosen = frozenset(nodes)
        rows = [row for row in rows if not chosen.isdisjoint(json.loads(row["nodes"]))]
    return [_verdict(row) for row in rows]


def explained(db: Connection, job: int) -> list[dict[str, Any]]:
    """Each attempt of the job with its verdict (None: not failed, or not judged yet), its log's reading, and how it
    used the GPUs (`uses`: node → measure.use.summary of each GPU, as JSON)."""
    from slurm_gpuhealth.logs.reading import read_reading

    attempt, judged, log, use = schema.attempt, schema.verdict, schema.joblog, schema.jobuse
    query = (
        sql.select(attempt, judged.c.data, judged.c.scored)
        .join_from(attempt, judged, sql.and_(*_same(attempt, judged)), isouter=True)
        .where(attempt.c.job == job)
        .order_by(attempt.c.attempt)
    )
    found = [_explained(row._asdict()) for row in db.execute(query)]
    readings = list(db.execute(sql.select(log.c.time, log.c.clock, log.c.reading).where(log.c.id == job)))
    uses = list(db.execute(sql.select(use).where(use.c.id == job).order_by(use.c.time)))
    for one in found:
        # By time, not by number: Slurm uses numbers again one day, and a log must not go to another user.
        near = (row for row in readings if _within(one, row))
        texts = [row.reading for row in sorted(near, key=lambda row: row.time) if read_reading(row.reading)]
        one["reading"] = one["reading"] or (json.loads(texts[-1]) if texts else None)
        one["uses"] = {row.node: row.gpus for row in uses if row.sub == one["attempt"] and _within(one, row)}
        judged_ = one["verdict"]
        one["gpu_index"] = gpu_index(db, judged_["node"], judged_["gpu"]) if judged_ else None
    return found


def _within(attempt: Mapping[str, Any], row: Any) -> bool:
    """Whether the node wrote this row during the attempt or soon after."""
    return bool(attempt["start"] <= row.time - (row.clock or 0.0) <= attempt["end"] + schema.END_NEAR)


def gpu_index(db: Connection, node: str | None, gpu: object) -> int | None:
    """NVML's index of a GPU of this node, by its UUID; None if the node has not shipped it."""
    if isinstance(gpu, int) or (str(gpu).isdecimal() and len(str(gpu)) < 9):
        return int(str(gpu))
    table = schema.gpu
    found = db.execute(sql.select(table.c.gpu).where(table.c.node == node, table.c.uuid == gpu)).scalar()
    return None if found is None else int(found)


def actions(db: Connection, job: int) -> list[dict[str, Any]]:
    """What was done about a job, the oldest first."""
    table = schema.action
    return [row._asdict() for row in db.execute(sql.select(table).where(table.c.job == job).order_by(table.c.id))]


def _same(one: Table, other: Table) -> list[Any]:
    return [one.c[name] == other.c[name] for name in ("cluster", "job", "attempt")]


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("job", "attempt", "user", "account", "name", "array", "state", "start", "end")
    own = {name: row[name] for name in kept}
    return {**own, "gpu_hours": (row["gpu_seconds"] or 0) / 3600, **json.loads(row["data"]), "scored": row["scored"]}


def _explained(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("job", "attempt", "user", "account", "name", "array", "state", "exit_code", "signal", "start", "end")
    reading = json.loads(row["reading"]) if row["reading"] else None
    verdict = json.loads(row["data"]) if row["data"] else None
    return {**{name: row[name] for name in kept}, "nodes": json.loads(row["nodes"]), "reading": reading} | {
        "verdict": verdict
    }
