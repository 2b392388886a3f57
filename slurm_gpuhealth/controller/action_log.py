"""The table `action`: each action is written there before it is done, so that a kill in between is visible."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import sqlalchemy as sql

from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings


@frozen
class Act:
    """The store, its settings, and the time."""

    settings: Settings
    engine: sql.Engine
    now: float


def mend(act: Act) -> None:
    """Mark actions that a kill has interrupted."""
    table = schema.action
    with act.engine.begin() as db:
        db.execute(sql.update(table).where(table.c.result == "begun").values(result="begun, and cut short"))


def begin(act: Act, kind: str, detail: dict[str, Any], job: int | None, attempt: int | None, node: str | None) -> int:
    row = {"time": act.now, "kind": kind, "job": job, "attempt": attempt, "node": node}
    with act.engine.begin() as db:
        done = db.execute(sql.insert(schema.action).values(**row, detail=json.dumps(detail), result="begun"))
    assert done.inserted_primary_key is not None  # noqa: S101 - for the type checker
    return int(done.inserted_primary_key[0])


def end(act: Act, number: int, result: str) -> None:
    with act.engine.begin() as db:
        db.execute(sql.update(schema.action).where(schema.action.c.id == number).values(result=result))


def past(act: Act, kind: str, **where: Any) -> list[Any]:
    table = schema.action
    query = sql.select(table).where(table.c.kind == kind, *(table.c[key] == value for key, value in where.items()))
    with act.engine.connect() as db:
        return list(db.execute(query.order_by(table.c.id)))


def forget(act: Act, number: int) -> None:
    with act.engine.begin() as db:
        db.execute(sql.delete(schema.action).where(schema.action.c.id == number))
