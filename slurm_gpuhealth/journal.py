"""The node's own record: one SQLite file, the only place that this suite writes on a node.

    state        small values by name: cursors, baselines, last readings, the hold, children that can't be killed
    finding      what was seen, and what the policy made of it; a fault waits for a decision until `acted` names one
    job          what ran here, on which GPUs, and how it ended
    diagnostic   DCGM results, one row a GPU
    decision     each change of the node that was made, refused, put off, or would have been made (shadow)
    retest       GPUs whose bandwidth was low while other jobs ran: to be tested again when the node is idle

Killed at any instruction it is good on the next run (WAL). A corrupt file is set aside and begun anew. When the disk
is full or read-only the journal goes on in `paths.run` (a tmpfs) and comes back with its state when the disk does.
"""

from __future__ import annotations

import marshal
import os
import sqlite3
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.settings import Paths

VERSION = 1
SCHEMA = """
CREATE TABLE state (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE finding (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, seen REAL NOT NULL, source TEXT NOT NULL, code TEXT NOT NULL,
  severity TEXT NOT NULL, rung TEXT NOT NULL, mode TEXT NOT NULL, uuid TEXT, pci TEXT, gpu INTEGER, serial TEXT,
  message TEXT NOT NULL, standing INTEGER NOT NULL, count INTEGER NOT NULL, details TEXT NOT NULL,
  job INTEGER, uid INTEGER, cleared REAL, acted INTEGER, acked REAL);
CREATE INDEX finding_time ON finding (time);
CREATE INDEX finding_key ON finding (source, code, time);
CREATE INDEX finding_open ON finding (severity) WHERE acted IS NULL AND cleared IS NULL;
CREATE TABLE job (
  job INTEGER NOT NULL, restart INTEGER NOT NULL, uid INTEGER NOT NULL, user TEXT NOT NULL, nodes INTEGER NOT NULL,
  gpus TEXT NOT NULL, started REAL NOT NULL, ended REAL, exit_code INTEGER, signal INTEGER, derived INTEGER,
  outcome TEXT, PRIMARY KEY (job, restart)) WITHOUT ROWID;
CREATE INDEX job_running ON job (ended, started);
CREATE TABLE diagnostic (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, level INTEGER NOT NULL, uuid TEXT, outcome TEXT NOT NULL,
  seconds REAL NOT NULL, program TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX diagnostic_uuid ON diagnostic (uuid, level, time);
CREATE TABLE decision (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, program TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL,
  result TEXT NOT NULL, was TEXT NOT NULL, job INTEGER);
CREATE TABLE retest (uuid TEXT PRIMARY KEY, time REAL NOT NULL, job INTEGER) WITHOUT ROWID;
"""


def open_journal(paths: Paths) -> Journal:
    """The journal in `paths.state`; in `paths.run`, or in memory, when that can't be written (`.trouble` says why)."""
    fallback = os.path.join(paths.run, "journal.db")
    trouble = ""
    try:
        journal = Journal(_connect(paths.state), fallback)
        if os.path.exists(fallback):  # an earlier run could not write: can we now?
            _come_back(journal, fallback)
        return journal
    except (OSError, sqlite3.Error) as error:
        trouble = f"journal in {paths.state}: {error}"
    try:
        return Journal(_connect(paths.run), fallback, trouble)
    except (OSError, sqlite3.Error) as error:
        return Journal(_memory(), fallback, f"{trouble}; in {paths.run}: {error}")


class Journal:
    """An open journal. No method raises for a bad disk: it goes on in the fallback and `trouble` says why."""

    def __init__(self, db: sqlite3.Connection, fallback: str, trouble: str = "") -> None:
        self.db = db
        self.fallback = fallback
        self.trouble = trouble

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, of marshal's types; `default` when absent or unreadable."""
        row = self.one("SELECT value FROM state WHERE name = ?", name)
        try:
            return marshal.loads(row[0]) if row else default  # noqa: S302 - our own file in a 0700 folder
        except (ValueError, EOFError, TypeError):
            return default

    def put(self, name: str, value: Any) -> None:
        """Keep `value` under `name`; None removes it."""
        if value is None:
            self.write("DELETE FROM state WHERE name = ?", name)
        else:
            # marshal format 4 is read by every Python that we support
            self.write("INSERT OR REPLACE INTO state VALUES (?, ?)", name, marshal.dumps(value, 4))

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        return next(self.rows(sql, *values), None)

    def rows(self, sql: str, *values: Any) -> Iterator[Any]:
        try:
            yield from self.db.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            self._fall_back(error)
            yield from self.db.execute(sql, values).fetchall()

    def write(self, sql: str, *values: Any) -> int:
        """Run one INSERT, UPDATE or DELETE: the new row's id."""
        try:
            return self.db.execute(sql, values).lastrowid or 0
        except sqlite3.DatabaseError as error:
            self._fall_back(error)
            return self.db.execute(sql, values).lastrowid or 0

    def begin(self) -> None:
        """Take the write lock: what is read from here on stays so until `commit`."""
        try:
            self.db.execute("BEGIN IMMEDIATE")
        except sqlite3.DatabaseError as error:
            self._fall_back(error)
            self.db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        try:
            if self.db.in_transaction:
                self.db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            self._fall_back(error)

    def prune(self, before: float) -> None:
        """Forget what is older than `before`: findings that still stand and jobs that still run are kept."""
        self.write("DELETE FROM finding WHERE seen < ? AND (NOT standing OR cleared IS NOT NULL)", before)
        self.write("DELETE FROM job WHERE coalesce(ended, started) < ?", before)
        self.write("DELETE FROM diagnostic WHERE time < ?", before)
        self.write("DELETE FROM decision WHERE time < ?", before)

    def _fall_back(self, error: sqlite3.DatabaseError) -> None:
        """Go on in `paths.run` with the state as it was; in memory when that fails too."""
        state: Sequence[Any] = []
        try:
            state = self.db.execute("SELECT name, value FROM state").fetchall()
            self.db.close()
        except sqlite3.Error:
            pass
        if self.trouble:
            self.db = _memory()
        else:
            try:
                self.db = _connect(os.path.dirname(self.fallback))
            except (OSError, sqlite3.Error):
                self.db = _memory()
        self.trouble = self.trouble or f"journal: {error}"
        try:
            self.db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", state)
        except sqlite3.Error:
            self.db = _memory()


def make_private(folder: str) -> None:
    """Create `folder` with mode 0700; OSError when it is not ours or others can write it."""
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(20, "is not a folder", folder) from None
    found = os.lstat(folder)
    if found.st_uid != os.geteuid():
        raise PermissionError(1, f"is owned by uid {found.st_uid}; chown it to {os.geteuid()}", folder)
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)


def _connect(folder: str) -> sqlite3.Connection:
    make_private(folder)
    path = os.path.join(folder, "journal.db")
    try:
        return _open(path)
    except sqlite3.OperationalError:  # locked, full, read-only: not the file's fault
        raise
    except sqlite3.DatabaseError as error:
        aside = f"{path}.corrupt-{int(time.time())}"
        os.rename(path, aside)
        for suffix in ("-wal", "-shm"):
            if os.path.exists(path + suffix):
                os.unlink(path + suffix)
        db = _open(path)
        note = marshal.dumps(f"{error}; set aside as {aside} and begun anew", 4)
        db.execute("INSERT OR REPLACE INTO state VALUES ('corrupt', ?)", (note,))
        return db


def _open(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=10, isolation_level=None)
    # NORMAL: no fsync for each commit; a power cut may lose the last seconds, never the file.
    db.execute("PRAGMA synchronous = NORMAL")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version < VERSION:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] < VERSION:  # nobody else was first
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    return db


def _memory() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(SCHEMA)
    return db


def _come_back(journal: Journal, fallback: str) -> None:
    """Carry the state of the fallback over to the journal that can be written again, and remove the fallback."""
    with sqlite3.connect(fallback) as old:
        state: Sequence[Mapping[str, bytes]] = old.execute("SELECT name, value FROM state").fetchall()
    journal.db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", state)
    old.close()
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(fallback + suffix):
            os.unlink(fallback + suffix)
