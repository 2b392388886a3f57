"""When the journal fails: sets a corrupt file aside, uses a copy in `paths.run` while the disk is bad, carries it back.

paths.state ──full, read-only, gone──▶ paths.run ──full as well──▶ memory
     ▲  └──corrupt──▶ set aside, new file        │
     └───────────carried over once───────────────┘
"""

from __future__ import annotations

import _sqlite3 as sqlite3
import fcntl
import os
import shutil
import time

from slurm_gpuhealth import deadline
from slurm_gpuhealth.node.journal_file import NAME, make_private, memory, open_file, seal, undo, unseal
from slurm_gpuhealth.node.journal_sound import dump, is_sound, of_the_disk, salvage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.node.journal_sound import Tables

NUMBERED = ("finding", "diagnostic", "decision", "step", "figure")
LEAP = 1 << 24
"""A new journal adds this to the last number it knows as shipped: the old one may have shipped more than it noted."""

WAIT = 10.0
"""Seconds to wait while another program of ours reads a corrupt file; as long as SQLite waits for a lock."""
ASIDES = 4
"""Corrupt files that are kept: a disk that damages every file must not fill up."""


def fall_back(
    db: sqlite3.Connection, error: Exception, folder: str, run: str, again: bool
) -> tuple[sqlite3.Connection, str, str]:
    """Where to continue after `error` in `folder`, with all rows that can be read: connection, folder ("" in memory),
    and why it is another one. `again`: the file was opened again already, and did not cause the error."""
    undo(db)
    tables, _ = dump(db)
    db.close()
    path = os.path.join(folder, NAME)
    try:
        if set_aside(path, error) or not (again or of_the_disk(error)):
            return open_file(path), folder, ""
    except Exception:  # noqa: S110 - not here
        pass
    try:
        if folder != run:
            return begin(connect(run), tables), run, f"journal: {error}"
    except Exception:  # noqa: S110 - not there either
        pass
    return _filled(memory(), tables), "", f"journal: {error}"


def begin_copy(folder: str, run: str) -> sqlite3.Connection:
    """The fallback in `run` for a journal that can't be opened. On a read-only disk SQLite can't read a journal before
    its log (WAL) is merged into it, so both files are copied and merged in `run`."""
    if os.path.exists(os.path.join(run, NAME)) or not _trusted(folder):
        return begin(connect(run))
    make_private(run)
    copy = os.path.join(run, f"copy-{os.getpid()}")
    try:
        for suffix in ("", "-wal"):
            if os.path.exists(os.path.join(folder, NAME + suffix)):
                shutil.copyfile(os.path.join(folder, NAME + suffix), copy + suffix)
        old = sqlite3.connect(copy, isolation_level=None)
        tables, _ = dump(old)
        old.close()
    except (OSError, sqlite3.Error):
        tables = {}
    finally:
        _unlink(copy)
    return begin(connect(run), tables if tables.get("state") else None)


def begin(db: sqlite3.Connection, tables: Tables | None = None) -> sqlite3.Connection:
    """`db` as the fallback, with the journal's rows if they could be read. A fallback in use is newer, and stays."""
    db.execute("BEGIN IMMEDIATE")
    if db.execute("SELECT 1 FROM state WHERE name = 'fallback'").fetchone() is None:
        _fill(db, tables or {})
        copied = {table: max((row[0] for row in (tables or {}).get(table, ())), default=0) for table in NUMBERED}
        mark = seal("fallback", (time.time(), os.getpid(), tables is not None, copied))
        db.execute("INSERT OR REPLACE INTO state VALUES ('fallback', ?)", (mark,))
    db.execute("COMMIT")
    return db


def come_back(db: sqlite3.Connection, run: str) -> None:
    """Carry the fallback back into the journal `db`, which can be written again, and remove it. Only once."""
    path = os.path.join(run, NAME)
    sound = is_sound(path)
    old = sqlite3.connect(path, timeout=10, isolation_level=None)
    tables, _ = dump(old)
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
    if not sound:
        _move(path)
    _unlink(path)


def connect(folder: str) -> sqlite3.Connection:
    """The journal in `folder`; a corrupt file is set aside first."""
    make_private(folder)
    path = os.path.join(folder, NAME)
    try:
        return open_file(path)
    except Exception as error:  # a scribbled file may raise anything
        set_aside(path, error)
        return open_file(path)


def set_aside(path: str, error: Exception) -> bool:
    """Set a corrupt file aside and begin a new one with its good rows. False: the file is sound, or another program has
    replaced it meanwhile. Raises if that can't be known: a good file must stay, whatever the error was."""
    if isinstance(error, sqlite3.OperationalError) and str(error).startswith(("database is locked", "disk I/O error")):
        raise error
    lock = _alone(os.path.dirname(path))
    try:
        if is_sound(path):
            return False
        found = [os.stat(path + suffix) for suffix in ("", "-wal") if os.path.exists(path + suffix)]
        # An empty log is our own, from opening the file.
        written = max((one.st_mtime for one in found if one.st_size), default=time.time())
        aside = _move(path)
        tables, whole = salvage(aside)
        state: dict[str, bytes] = dict(tables["state"])
        if not whole or "kernel" not in state:  # see kernel_cursor.py
            cursor = state.pop("kernel", None)
            lost = (unseal("kernel", cursor) if cursor else None, min(written, time.time()))
            state["kernel-lost"] = seal("kernel-lost", lost)
        state["corrupt"] = seal("corrupt", f"{error}; set aside as {aside} and begun anew")
        _filled(open_file(path), {**tables, "state": list(state.items())}).close()
        return True
    finally:
        os.close(lock)


def _alone(folder: str) -> int:
    """The folder, open and locked. Raises if the program with the lock does not end: its disk may hang."""
    until = min(time.monotonic() + WAIT, deadline.ends)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= until:
                os.close(lock)
                raise
            time.sleep(0.05)


def _move(path: str) -> str:
    """Rename the file and its log; keep the last `ASIDES` of them."""
    aside = f"{path}.corrupt-{int(time.time())}"
    os.rename(path, aside)
    for suffix in ("-wal", "-shm"):
        if os.path.exists(path + suffix):
            os.rename(path + suffix, aside + suffix)
    folder, name = os.path.split(path)
    all_ = {one.partition("-wal")[0].partition("-shm")[0] for one in os.listdir(folder) if f"{name}.corrupt-" in one}
    for old in sorted(all_)[:-ASIDES]:
        _unlink(os.path.join(folder, old))
    return aside


def _unlink(path: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(path + suffix):
            os.unlink(path + suffix)


def _trusted(folder: str) -> bool:
    """Whether the folder is ours: a file that somebody else put there is not used."""
    try:
        return os.lstat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def _merge(db: sqlite3.Connection, tables: Tables, mark: bytes) -> None:
    _, _, whole, copied = unseal("fallback", mark)
    if whole:  # the fallback began as a copy: a value that is missing there was removed
        db.execute("DELETE FROM state")
        db.execute("DELETE FROM retest")
        _fill(db, {"state": tables.pop("state")})  # first: it decides whether the next rows are shipped
    for table, last in copied.items():
        new = [row for row in tables[table] if row[0] > last]
        tables[table] = tables[table][: -len(new)] if new else tables[table]
        for row in new:  # a program that could still write here may have taken its number
            marks = ", ".join("?" * len(row))
            if not db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row).rowcount:  # noqa: S608
                db.execute(f"INSERT INTO {table} VALUES ({marks})", (None, *row[1:]))  # noqa: S608
    _fill(db, tables)


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
    """Set the outbox's next number beyond all that this journal has ever shipped."""
    row = db.execute("SELECT value FROM state WHERE name = 'shipped'").fetchone()
    if row:
        last = unseal("shipped", row[0])["seq"] + LEAP
        if not db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'outbox'", (last,)).rowcount:
            db.execute("INSERT INTO sqlite_sequence VALUES ('outbox', ?)", (last,))
