"""What the cluster's record knows of its nodes, for the commands. Times are the store's: a node's clock is corrected.

Of a node whose journal was lost, only what its newest journal has is shown: the older one's conditions never end.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from sqlalchemy import and_, or_, select, text, true

from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from sqlalchemy import ColumnElement, Connection, Table

    Row = dict[str, Any]

FINDING = (
    *("id", "time", "seen", "source", "code", "severity", "rung", "mode", "uuid", "pci", "gpu", "serial", "message"),
    *("standing", "count", "details", "job", "uid", "cleared", "acted"),
)
"""Columns, as the node's own journal shows them."""
TIMES = ("time", "seen", "cleared", "started", "ended")


def heads(db: Connection) -> dict[str, Row]:
    """Node → its newest journal, when it was `heard` last (None: not yet), and the columns of `schema.ABOUT`."""
    table = schema.node
    found: dict[str, Row] = {}
    wanted = [table.c[name] for name in ("node", "journal", "last_shipped", *schema.ABOUT)]
    for row in db.execute(select(*wanted).order_by(table.c.last_shipped.is_not(None), table.c.last_shipped)):
        found[row.node] = {
            "journal": row.journal,
            "heard": row.last_shipped,
            **{name: row._mapping[name] for name in schema.ABOUT},
        }
    return found


def suspects(db: Connection) -> dict[str, float]:
    """Node → its probability of being a lemon, as of the last run of gpuhealth correlate."""
    return {row.node: row.p_lemon for row in db.execute(select(schema.suspicion.c.node, schema.suspicion.c.p_lemon))}


def still_open(db: Connection, journals: dict[str, Row], since: float, names: Collection[str] = ()) -> list[Row]:
    """Warnings and faults that stand, and events since then that nobody has ended: the worst first, then the newest."""
    table = schema.finding
    where: list[Any] = [text(schema.OPEN)]  # word for word: then the index is used
    where += [table.c.mode != "old", or_(table.c.standing == 1, table.c.time >= since)]
    found = _findings(db, where, names)
    mine = [one for one in found if journals.get(one["node"], {}).get("journal") == one.pop("journal")]
    return sorted(mine, key=lambda one: (one["severity"], -one["time"]))


def findings(db: Connection, names: Collection[str], since: float, until: float = math.inf, **wanted: Any) -> list[Row]:
    """Findings of these nodes (none: of all), newest first. `wanted`: `gpu`, `source`, `severities`, `job`, `mode`."""
    table = schema.finding
    where = [or_(table.c.seen >= since, and_(table.c.standing == 1, table.c.cleared.is_(None)))]
    where += [table.c.time <= until] if until < math.inf else []
    where += [table.c[name] == wanted[name] for name in ("source", "job", "mode") if wanted.get(name) is not None]
    if wanted.get("severities"):
        where.append(table.c.severity.in_(wanted["severities"]))
    if (gpu := wanted.get("gpu")) is not None:
        same = [table.c.uuid == gpu, table.c.pci == gpu]
        where.append(or_(*same, table.c.gpu == int(gpu)) if gpu.isdecimal() and len(gpu) < 9 else or_(*same))
    found = _findings(db, where, names)
    for one in found:
        del one["journal"]
    return sorted(found, key=lambda one: (one["seen"] or one["time"], one["id"]), reverse=True)


def past(db: Connection, name: str, since: float) -> dict[str, list[Row]]:
    """The faults, decisions and steps of the ladder of one node since then, by time."""
    tables = {"fault": schema.finding, "decision": schema.decision, "step": schema.step}
    return {
        kind: _rows(
            db, table, [table.c.node == name, table.c.time >= since], ("severity", "fault") if kind == "fault" else None
        )
        for kind, table in tables.items()
    }


def gpus(db: Connection, name: str) -> list[Row]:
    """The GPUs of the node's last list, with the UUID that each one `replaces` and its `first` time."""
    table = schema.gpu
    found = [row._asdict() for row in db.execute(select(table).where(table.c.node == name).order_by(table.c.gpu))]
    last = max((one["last"] for one in found), default=0.0)
    return [one for one in found if one["last"] == last]


def tests(db: Connection, name: str) -> dict[str, Row]:
    """UUID → the last shipped test of the GPU: level 2 and deeper, and failures."""
    table = schema.diagnostic
    return {one["uuid"]: one for one in _rows(db, table, [table.c.node == name])}


def running(db: Connection, name: str, since: float) -> list[Row]:
    """The jobs with GPUs that began since then and have not ended."""
    table = schema.run
    return _rows(db, table, [table.c.node == name, table.c.ended.is_(None), table.c.started >= since])


def _findings(db: Connection, where: list[ColumnElement[bool]], names: Collection[str]) -> list[Row]:
    table, decided = schema.finding, schema.decision
    few = 0 < len(names) <= schema.IN_SQL
    same = and_(*(table.c[name] == decided.c[name] for name in ("node", "journal")), table.c.acted == decided.c.id)
    columns = [table.c[name] for name in ("node", "journal", "clock", *FINDING)]
    query = select(*columns, decided.c.action, decided.c.result).join_from(table, decided, same, isouter=True)
    chosen = frozenset(names)
    found = []
    for row in db.execute(query.where(*where, table.c.node.in_(names) if few else true())).mappings():
        if names and row["node"] not in chosen:
            continue
        one = _corrected(dict(row))
        one |= {"details": _details(one["details"]), "standing": bool(one["standing"])}
        told = {"action": one.pop("action"), "result": one.pop("result")}
        found.append({**one, "decision": told if told["action"] else None})
    return found


def _rows(
    db: Connection, table: Table, where: list[ColumnElement[bool]], only: tuple[str, str] | None = None
) -> list[Row]:
    more = [table.c[only[0]] == only[1]] if only else []
    when = table.c.started if "started" in table.c else table.c.time
    return [_corrected(dict(row)) for row in db.execute(select(table).where(*where, *more).order_by(when)).mappings()]


def _corrected(row: Row) -> Row:
    clock = row.pop("clock") or 0.0
    return row | {name: row[name] - clock for name in TIMES if row.get(name) is not None}


def _details(given: str) -> Any:
    try:
        return json.loads(given or "{}")
    except (ValueError, RecursionError):  # a node may write anything
        return {}
