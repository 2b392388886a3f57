"""The journal's file: opened, its tables made or brought up to date, in a folder that is ours alone."""

from __future__ import annotations

import _sqlite3 as sqlite3  # `sqlite3` is the same and brings `datetime`: 2 ms of each start
import os

NAME = "journal.db"
VERSION = 3


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


def open_file(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=10, isolation_level=None)
    # NORMAL: no fsync for each commit; a power cut may lose the last seconds, never the file.
    db.execute("PRAGMA synchronous = NORMAL")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version < VERSION:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version < VERSION:  # nobody else was first
            from slurm_gpuhealth.node.journal_schema import statements

            for statement in statements(version):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    return db


def memory() -> sqlite3.Connection:
    from slurm_gpuhealth.node.journal_schema import statements

    db = sqlite3.connect(":memory:", isolation_level=None)
    for statement in statements(0):
        db.execute(statement)
    return db


def undo(db: sqlite3.Connection) -> None:
    try:
        if db.in_transaction:
            db.execute("ROLLBACK")
    except sqlite3.Error:  # what ends with the connection is undone too
        pass
