"""Whether a journal's file is sound, page by page and row by row, and what can be read of a damaged file.

A damaged file can make SQLite or Python raise anything: for text that is not UTF-8, a missing table, a wrong number. So
we judge the file, not the error. Imported only when something went wrong.
"""

from __future__ import annotations

import _sqlite3 as sqlite3
import json
import os

from slurm_gpuhealth.findings import SEVERITIES
from slurm_gpuhealth.node import journal_schema
from slurm_gpuhealth.node.journal_file import VERSION, unseal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Tables = dict[str, list[tuple[Any, ...]]]

TABLES = ("state", "finding", "job", "diagnostic", "decision", "retest", "step", "joblog", "figure", "jobuse")
TYPES: dict[str, Any] = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}
MOST = {"INTEGER": 1 << 53, "REAL": 253402300800.0, "value": 1e12}
"""Larger than all our numbers; for times, the year 9999; for a figure, what `outputs.number` reads."""
DOCUMENTS = ("details", "detail")
"""Columns that hold a JSON object."""
DISK = (
    "database is locked", "database table is locked", "database schema is locked", "locking protocol",
    "attempt to write a readonly database", "disk I/O error", "database or disk is full", "interrupted",
    "unable to open database file", "access permission denied", "out of memory",
)  # fmt: skip
"""How SQLite's messages begin when the file is not the cause (sqlite3ErrStr in its main.c)."""
LARGEST = 256 << 20
"""Rows are rescued from files up to this many bytes."""


def of_the_disk(error: BaseException) -> bool:
    """Whether the error says that the file can't be used now, but nothing about its content."""
    if isinstance(error, sqlite3.OperationalError):
        return str(error).startswith(DISK)
    return isinstance(error, (OSError, MemoryError))


def is_sound(path: str) -> bool:
    """Whether the file is a journal as we make it, or still empty. Raises errors of the disk: then it is not known.

    This process may have no other connection: closing the file would drop all its locks (sqlite.org/howtocorrupt, 2.2).
    """
    if os.path.exists(path):
        with open(path, "rb") as file:
            head = file.read(20)
        # With another number there SQLite treats the file as read-only.
        if len(head) == 20 and not (head[18] in (1, 2) and head[19] in (1, 2)):
            return False
    db = sqlite3.connect(path, timeout=10, isolation_level=None)
    try:
        db.execute("BEGIN")  # all that follows sees one state of the file
        return _is_ours(db) and _is_good(db)
    except Exception as error:
        if of_the_disk(error):
            raise
        return False
    finally:
        db.close()


def salvage(path: str) -> tuple[Tables, bool]:
    """The good rows of a file that nobody writes any more, and whether all findings are among them."""
    tables: Tables = {table: [] for table in TABLES}
    whole = False
    try:
        if os.path.getsize(path) <= LARGEST:
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
            try:
                tables, missing = dump(db)
                whole = "finding" not in missing
            finally:
                db.close()
    except Exception:  # noqa: S110 - what can't be read is lost; the caller reports that
        pass
    return tables, whole


def dump(db: sqlite3.Connection) -> tuple[Tables, set[str]]:
    """The good rows, and the tables that have lost some."""
    tables: Tables = {table: [] for table in TABLES}
    missing = set()
    for table, rows in tables.items():
        found = 0
        try:
            for row in db.execute(f"SELECT * FROM {table}"):  # noqa: S608 - a constant
                found += 1
                if good(table, row):
                    rows.append(row)
        except Exception:  # a damaged file may raise anything
            missing.add(table)
        if len(rows) != found:
            missing.add(table)
    return tables, missing


def good(table: str, row: tuple[Any, ...]) -> bool:
    """Whether we could have written this row into that table."""
    columns = _columns()[table]
    if len(row) != len(columns) or not all(_fits(value, *column) for value, column in zip(row, columns)):
        return False
    if table == "state":
        try:
            unseal(*row)
        except sqlite3.DatabaseError:
            return False
    return True


def _is_ours(db: sqlite3.Connection) -> bool:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if db.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
        return False
    there = {row[0]: row[1] for row in db.execute("SELECT name, sql FROM sqlite_master")}
    if VERSION < version < 1000:  # a newer program's
        return True
    wanted, later = _schema(version), _schema(VERSION)
    return all(there.get(name) == sql for name, sql in wanted.items()) and not (later.keys() - wanted) & there.keys()


def _is_good(db: sqlite3.Connection) -> bool:
    """Whether we could have written each row. Rows of another version are not checked."""
    if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
        return True
    return all(
        good(table, row)
        for table in _columns()
        for row in db.execute(f"SELECT * FROM {table}")  # noqa: S608 - ours
    )


def _schema(version: int) -> dict[str, str]:
    """Name → SQL of all tables, indices and triggers of this version."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    for statement in journal_schema.statements(0, version):
        db.execute(statement)
    return dict(db.execute("SELECT name, sql FROM sqlite_master"))


def _columns() -> dict[str, list[tuple[str, str, bool]]]:
    """Table → (name, type, whether it may be null) of its columns."""
    if not _KNOWN:
        db = sqlite3.connect(":memory:", isolation_level=None)
        for statement in journal_schema.statements(0):
            db.execute(statement)
        for table in (*TABLES, "outbox"):
            info: Iterable[Any] = db.execute(f"PRAGMA table_info({table})")
            _KNOWN[table] = [(row[1], row[2], not row[3] and not row[5]) for row in info]
        _KNOWN["sqlite_sequence"] = [("name", "TEXT", False), ("seq", "INTEGER", False)]
    return _KNOWN


_KNOWN: dict[str, list[tuple[str, str, bool]]] = {}


def _fits(value: Any, name: str, kind: str, may_be_null: bool) -> bool:
    if value is None:
        return may_be_null
    if not isinstance(value, TYPES[kind]):
        return False
    if kind in MOST:
        most = MOST.get(name, MOST[kind])
        return bool(-most <= value <= most)
    if name == "severity":
        return value in SEVERITIES
    if name in DOCUMENTS:
        try:
            return isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            return False
    return True
