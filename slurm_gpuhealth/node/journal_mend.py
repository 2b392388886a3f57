"""The journal on a bad day: a corrupt file set aside, a copy in `paths.run` while the disk is full, and back again.

paths.state ──full, read-only, gone──▶ paths.run ──full as well──▶ memory
     ▲  └──corrupt──▶ set aside, begun anew      │
     └───────────carried over once───────────────┘
"""

from __future__ import annotations

import _sqlite3 as sqlite3
import fcntl
import marshal
import os
import shutil
import time

from slurm_gpuhealth.node.journal_file import NAME, make_private, memory, open_file, undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Tables = dict[str, list[tuple[Any, ...]]]

TABLES = ("state", "finding", "job", "diagnostic", "decision", "retest", "step", "joblog")
NUMBERED = ("finding", "diagnostic", "decision", "step")
LEAP = 1 << 24
"""A journal begun anew numbers what it ships from here on: the old one may have shipped more than it could note."""


def fall_back(
    db: sqlite3.Connection, error: sqlite3.DatabaseError, folder: str, run: str
) -> tuple[sqlite3.Connection, str]:
    """Where to go on after `error` in `folder`, with all that can still be read: connection, folder ("" in memory)."""
    tables = _dump(db)
    db.close()
    if type(error) is sqlite3.DatabaseError:  # corrupt; full, locked and read-only are OperationalError
        try:
            set_aside(os.path.join(folder, NAME), error)
            return _filled(connect(folder), tables), folder
        except (OSError, sqlite3.Error):
            pass
    try:
        if folder != run:
            return begin(connect(run), tables), run
    except (OSError, sqlite3.Error):
        pass
    return _filled(memory(), tables), ""


def begin_copy(folder: str, run: str) -> sqlite3.Connection:
    """The fallback in `run` for a journal that can't be opened. On a read-only disk SQLite can't read one whose log
    (WAL) is to be worked in first: so that is done on a copy of both files."""
    if os.path.exists(os.path.join(run, NAME)) or not _trusted(folder):
        return begin(connect(run))
    make_private(run)
    copy = os.path.join(run, f"copy-{os.getpid()}")
    try:
        for suffix in ("", "-wal"):
            if os.path.exists(os.path.join(folder, NAME + suffix)):
                shutil.copyfile(os.path.join(folder, NAME + suffix), copy + suffix)
        old = sqlite3.connect(copy, isolation_level=None)
        tables = _dump(old)
        old.close()
    except (OSError, sqlite3.Error):
        tables = {}
    finally:
        _unlink(copy)
    return begin(connect(run), tables if tables.get("state") else None)


def begin(db: sqlite3.Connection, tables: Tables | None = None) -> sqlite3.Connection:
    """`db` as the fallback, with what the journal held, if it could be read. One in use is newer, and stays."""
    db.execute("BEGIN IMMEDIATE")
    if db.execute("SELECT 1 FROM state WHERE name = 'fallback'").fetchone() is None:
        _fill(db, tables or {})
        copied = {table: max((row[0] for row in (tables or {}).get(table, ())), default=0) for table in NUMBERED}
        mark = marshal.dumps((time.time(), os.getpid(), tables is not None, copied), 4)
        db.execute("INSERT OR REPLACE INTO state VALUES ('fallback', ?)", (mark,))
    db.execute("COMMIT")
    return db


def come_back(db: sqlite3.Connection, run: str) -> None:
    """Carry the fallback over to the journal `db`, which can be written again, once, and remove it."""
    path = os.path.join(run, NAME)
    old = sqlite3.connect(path, timeout=10, isolation_level=None)
    tables = _dump(old)
    old.close()
    mark = next((value for name, value in tables["state"] if name == "fallback"), None)
    db.execute("BEGIN IMMEDIATE")
    try:
        # Not if it was carried over already, by another program or by one that was killed before it removed the file.
        if mark and db.execute("SELECT value FROM state WHERE name = 'fallback'").fetchone() != (mark,):
            _merge(db, tables, mark)
        db.execute("COMMIT")
    finally:
        undo(db)
    _unlink(path)


def connect(folder: str) -> sqlite3.Connection:
    """The journal in `folder`; a corrupt file is set aside first."""
    make_private(folder)
    path = os.path.join(folder, NAME)
    try:
        return open_file(path)
    except sqlite3.OperationalError:  # locked, full, read-only: not the file's fault
        raise
    except sqlite3.DatabaseError as error:
        set_aside(path, error)
        return open_file(path)


def set_aside(path: str, error: sqlite3.DatabaseError) -> None:
    """Out of the way with a corrupt file; a good one that another program has begun meanwhile stays."""
    lock = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _sound(path):
            return
        aside = f"{path}.corrupt-{int(time.time())}"
        os.rename(path, aside)
        for suffix in ("-wal", "-shm"):
            if os.path.exists(path + suffix):
                os.unlink(path + suffix)
        note = marshal.dumps(f"{error}; set aside as {aside} and begun anew", 4)
        open_file(path).execute("INSERT OR REPLACE INTO state VALUES ('corrupt', ?)", (note,))
    finally:
        os.close(lock)


def _unlink(path: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(path + suffix):
            os.unlink(path + suffix)


def _trusted(folder: str) -> bool:
    """Whether the folder is ours: what somebody else put there is not believed."""
    try:
        return os.lstat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def _sound(path: str) -> bool:
    try:
        return bool(open_file(path).execute("PRAGMA quick_check").fetchone()[0] == "ok")
    except sqlite3.DatabaseError:
        return False


def _merge(db: sqlite3.Connection, tables: Tables, mark: bytes) -> None:
    _, _, whole, copied = marshal.loads(mark)  # noqa: S302 - our own file
    if whole:  # the fallback began as a copy: what is not there any more was removed
        db.execute("DELETE FROM state")
        db.execute("DELETE FROM retest")
        _fill(db, {"state": tables.pop("state")})  # first: it says whether what follows is to be shipped
    for table, last in copied.items():
        new = [row for row in tables[table] if row[0] > last]
        tables[table] = tables[table][: -len(new)] if new else tables[table]
        for row in new:  # its number may have been taken by a program that could still write here
            marks = ", ".join("?" * len(row))
            if not db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row).rowcount:  # noqa: S608
                db.execute(f"INSERT INTO {table} VALUES ({marks})", (None, *row[1:]))  # noqa: S608
    _fill(db, tables)


def _dump(db: sqlite3.Connection) -> Tables:
    """All rows that can be read."""
    tables: Tables = {table: [] for table in TABLES}
    undo(db)
    for table, rows in tables.items():
        try:
            rows += db.execute(f"SELECT * FROM {table}")  # noqa: S608 - a constant
        except sqlite3.Error:
            continue
    return tables


def _filled(db: sqlite3.Connection, tables: Tables) -> sqlite3.Connection:
    try:
        db.execute("BEGIN IMMEDIATE")
        _fill(db, tables)
        db.execute("COMMIT")
    finally:
        undo(db)
    return db


def _fill(db: sqlite3.Connection, tables: Tables) -> None:
    for table, rows in tables.items():
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)  # noqa: S608
        if table == "state":
            _leap(db)


def _leap(db: sqlite3.Connection) -> None:
    """The outbox's next number is beyond all that this journal has ever shipped."""
    row = db.execute("SELECT value FROM state WHERE name = 'shipped'").fetchone()
    if row:
        last = marshal.loads(row[0])["seq"] + LEAP  # noqa: S302 - our own file
        if not db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'outbox'", (last,)).rowcount:
            db.execute("INSERT INTO sqlite_sequence VALUES ('outbox', ?)", (last,))
