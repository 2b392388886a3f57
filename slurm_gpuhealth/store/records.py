"""Checks a node's records and writes them into their tables: one line per record, see docs/store.md.

A record that comes twice, or an older state of a row after a newer one, changes nothing. So the program may be killed
anywhere and start again, and files may be read in any order.
"""

from __future__ import annotations

import json
import math
import re
from statistics import median
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Float, Integer, case, select, update
from sqlalchemy.dialects import postgresql, sqlite

from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from typing import Any

    from sqlalchemy import Column, Connection, Table

    Row = dict[str, Any]

LONGEST = 4 << 20
"""The most bytes of a line."""
TEXT = 1 << 18
"""The most characters of one value."""
KEYED = 500
"""The most bytes of a text in a key or an index: PostgreSQL's take 2704."""
WORD = 64
"""The most characters of a version and its like."""
TIME = 0.0, 4102444800.0
"""The least and the most of a time: 1970 to 2100."""
CLOCK = -TIME[1], TIME[1]
"""Of how many seconds a clock is ahead, and a test takes. A host whose clock was never set begins in 1970."""
BOUNDS = {"clock": CLOCK, "seconds": CLOCK} | dict.fromkeys(("value", "acked"), (-math.inf, math.inf))
"""The least and the most of a column of floats; others are times. An admin may acknowledge until the year 9999."""
CLOCKS = 9
"""How many measurements of a node's clock are kept; their median counts."""
RENEWS = {"finding": "severity", "diagnostic": "outcome", "step": "outcome", "run": "ended"}
"""Kind → the column; if it changes, the row is new to the correlator again."""
KEY = ("node", "journal", "id", "sub")
NODE = re.compile(r"[A-Za-z0-9_.-]{1,255}")
"""One node's name; later, `n[1-9]` would mean nine nodes."""
INDEXED = frozenset(
    column
    for table in (*schema.SHIPPED.values(), schema.gpu)
    for columns in (table.primary_key.columns, *(index.columns for index in table.indexes))
    for column in columns
)


class Batch:
    """Records that go into the database in one transaction."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[tuple[object, ...], Row]] = {kind: {} for kind in schema.SHIPPED}
        self.heads: list[Row] = []
        self.last: dict[tuple[str, str], int] = {}
        """(node, journal) → the highest number."""
        self.size = 0
        """Records."""

    def add(self, line: bytes, node: str) -> None:
        """Add a line of this node. Raises ValueError, which says what is wrong; then nothing is added."""
        record = _parsed(line)
        if not NODE.fullmatch(node):
            raise ValueError("it belongs to no node")
        if record.get("node") != node:
            raise ValueError(f"it names another node, {str(record.get('node'))[:80]!r}")
        journal, seq, kind = record.get("journal"), _integer(record, "seq", BigInteger), record.get("kind")
        if not isinstance(journal, str) or not re.fullmatch(r"[0-9a-f]{1,32}", journal):
            raise ValueError("journal is not an id")
        whose = {"node": node, "journal": journal}
        if kind == "ship":
            self.heads.append({**whose, **_head(record)})
        elif isinstance(kind, str) and kind in schema.SHIPPED:
            row = {**whose, **_row(schema.SHIPPED[kind], record, str(kind)), "seq": seq}
            self._keep(str(kind), row)
        else:
            raise ValueError(f"kind {str(kind)[:80]!r} is unknown")
        self.last[node, journal] = max(seq, self.last.get((node, journal), 0))
        self.size += 1

    def _keep(self, kind: str, row: Row) -> None:
        key = tuple(row[name] for name in KEY)
        known = self.rows[kind].get(key)
        if known is None or known["seq"] < row["seq"]:
            self.rows[kind][key] = row

    def save(self, db: Connection, now: float) -> None:
        """`now`: the controller's."""
        taken = _numbers(db, sum(map(len, self.rows.values())) + sum(len(head["gpus"]) for head in self.heads))
        for kind, rows in self.rows.items():
            for row in rows.values():
                row["taken"] = taken = taken + 1
            if rows:
                db.execute(_upsert(db, schema.SHIPPED[kind], RENEWS.get(kind)), list(rows.values()))
        for (node, journal), seq in self.last.items():
            _position(db, node, journal, seq)
        for head in self.heads:
            taken = _save_head(db, head, taken, now)


def _parsed(line: bytes) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError("not an object")
    return record


def _row(table: Table, record: Row, kind: str) -> Row:
    """The columns of `table` from the record; unknown ones are left out."""
    given = record.get("row")
    if not isinstance(given, dict):
        raise ValueError("row is not an object")
    row = {"id": _integer(record, "id", BigInteger), "sub": _integer(record, "sub", BigInteger)}
    row["clock"] = _value(table.c.clock, record.get("clock"), kind)
    for column in table.c:
        if column.name not in row and column.name not in (*KEY, "seq", "taken"):
            row[column.name] = _value(column, given.get(column.name), kind)
    return row


def _value(column: Column[Any], value: Any, kind: str) -> Any:
    """`value` in a form that the column takes on every database."""
    wrong = ValueError(f"{kind}.{column.name} can't be {str(value)[:80]!r}")
    if value is None:
        if column.nullable or column.server_default is not None:
            return None if column.nullable else ""
        raise wrong
    if isinstance(column.type, Float):
        return _float(value, wrong, *BOUNDS.get(column.name, TIME))
    if isinstance(column.type, (Integer, BigInteger)):
        return _integer({column.name: value}, column.name, type(column.type))
    if not isinstance(value, str):
        raise wrong
    value = text(value)
    if column in INDEXED and len(value.encode()) > KEYED:
        raise ValueError(f"{kind}.{column.name} is longer than {KEYED} bytes")
    return value


def text(value: str) -> str:
    """`value` in a form that PostgreSQL takes too: no NUL, no half of a surrogate pair."""
    return value[:TEXT].replace("\0", "?").encode("utf-8", "replace").decode()


def _float(value: Any, wrong: ValueError, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong
    try:
        number = float(value)
    except OverflowError:
        raise wrong from None
    if not math.isfinite(number) or not least <= number <= most:
        raise wrong
    return number


def _integer(record: Row, name: str, kind: type) -> int:
    value = record.get(name)
    most = 1 << (63 if issubclass(kind, BigInteger) else 31)
    if not isinstance(value, int) or not -most <= value < most:
        raise ValueError(f"{name} can't be {str(value)[:80]!r}")
    return int(value)


def _head(record: Row) -> Row:
    """The head of a shipment: the node's clock, what it dropped, its GPUs and versions if they have changed."""
    wrong = ValueError("the head of a shipment is malformed")
    dropped, gpus, about = record.get("dropped"), record.get("gpus"), record.get("about")
    if dropped is not None and (not isinstance(dropped, list) or len(dropped) != 3):
        raise wrong
    if gpus is not None and (not isinstance(gpus, list) or len(gpus) > 256):
        raise wrong
    if about is not None and not isinstance(about, dict):
        raise wrong
    return {
        "time": _float(record.get("time"), wrong, *TIME),
        "clock": _float(record.get("clock"), wrong, *CLOCK),
        "dropped": [
            _integer({"dropped": dropped[0]}, "dropped", BigInteger),
            *(_float(one, wrong, *TIME) for one in dropped[1:]),
        ]
        if dropped
        else None,
        "gpus": [_gpu(one, wrong) for one in gpus or ()],
        "about": {name: _value(schema.node.c[name], about.get(name), "about")[:WORD] for name in schema.ABOUT}
        if about
        else {},
    }


def _gpu(one: Any, wrong: ValueError) -> Row:
    names = ("uuid", "gpu", "pci", "serial")
    if not isinstance(one, list) or len(one) != len(names) or not isinstance(one[0], str):
        raise wrong
    return {name: _value(schema.gpu.c[name], value, "gpu") for name, value in zip(names, one)}


def _numbers(db: Connection, count: int) -> int:
    """Reserve `count` numbers of arrival; returns the number before the first of them."""
    table = schema.cursor
    last = db.execute(select(table.c.value).where(table.c.name == "taken")).scalar()
    if last is None:
        db.execute(table.insert().values(name="taken", value=str(count)))
        return 0
    db.execute(update(table).where(table.c.name == "taken").values(value=str(int(last) + count)))
    return int(last)


def insert(db: Connection, table: Table) -> Any:
    """INSERT, with the database's own ON CONFLICT."""
    return (postgresql if db.dialect.name == "postgresql" else sqlite).insert(table)


def _upsert(db: Connection, table: Table, renews: str | None) -> Any:
    statement = insert(db, table)
    new = statement.excluded
    values = {column.name: new[column.name] for column in table.c if column.name not in (*KEY, "taken", "clock")}
    if renews:
        values["taken"] = case((new[renews].is_distinct_from(table.c[renews]), new["taken"]), else_=table.c.taken)
    return statement.on_conflict_do_update(index_elements=KEY, set_=values, where=new["seq"] > table.c.seq)


def _position(db: Connection, node: str, journal: str, seq: int) -> None:
    table = schema.node
    row = insert(db, table).values(node=node, journal=journal, position=seq)
    new = row.excluded.position
    db.execute(
        row.on_conflict_do_update(
            index_elements=("node", "journal"), set_={"position": new}, where=new > table.c.position
        )
    )


def _save_head(db: Connection, head: Row, taken: int, now: float) -> int:
    """Returns the last number of arrival that was used. A head was sent at the latest `now`, whatever its node's clock
    said: else it would hide every later head for years."""
    table = schema.node
    mine = (table.c.node == head["node"], table.c.journal == head["journal"])
    known = db.execute(select(table.c.clocks, table.c.last_shipped).where(*mine)).one()
    sent, last = head["time"] - head["clock"], known.last_shipped
    if last is None or last > now or sent > last:
        clocks = [*json.loads(known.clocks), head["clock"]][-CLOCKS:]
        values = {"clocks": json.dumps(clocks), "clock_offset": median(clocks), "last_shipped": min(sent, now)}
        values |= head["about"]
        if head["dropped"]:
            values |= dict(zip(("dropped", "dropped_from", "dropped_to"), head["dropped"]))
        db.execute(update(table).where(*mine).values(**values))
    for gpu in head["gpus"]:
        taken += _save_gpu(db, head, gpu, taken + 1, min(sent, now))
    return taken


def _save_gpu(db: Connection, head: Row, gpu: Row, taken: int, when: float) -> int:
    """Returns 1 if the GPU is new here; its row then names the GPU that it replaced in its slot."""
    table = schema.gpu
    mine = (table.c.node == head["node"], table.c.uuid == gpu["uuid"])
    first = db.execute(select(table.c.first).where(*mine)).scalar()
    if first is not None:
        last = case((table.c.last > when, table.c.last), else_=when)
        db.execute(update(table).where(*mine).values(**{**gpu, "last": last}))
        return 0
    there = select(table.c.uuid).where(table.c.node == head["node"], table.c.pci == gpu["pci"], table.c.last <= when)
    there = there.where(
        table.c.uuid.not_in([one["uuid"] for one in head["gpus"]])
    )  # a GPU that is still there was not replaced
    before = db.execute(there.order_by(table.c.last.desc()).limit(1)).scalar() if gpu["pci"] else None
    new = {**gpu, "node": head["node"], "first": when, "last": when, "taken": taken, "replaces": before or ""}
    db.execute(table.insert().values(**new))
    return 1
