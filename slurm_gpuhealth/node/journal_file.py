"""The journal's file: opens it, makes or upgrades its tables, in a folder that only we can use."""

from __future__ import annotations

import _sqlite3 as sqlite3  # the same as `sqlite3`, which also imports `datetime`: 2 ms of each start
import marshal
import os
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "journal.db"
VERSION = 5
CURSOR = "kernel.seen"
"""In `paths.run`: how far the kernel log was read while no fault waited, in case the journal is lost."""


def make_private(folder: str) -> None:
    """Create `folder` with mode 0700, or give it that mode; OSError if it belongs to somebody else."""
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
    try:
        # NORMAL: no fsync for each commit; a power cut may lose the last seconds, never the file.
        db.execute("PRAGMA synchronous = NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version < VERSION:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version < VERSION:  # no other program was first
                from slurm_gpuhealth.node.journal_schema import statements

                for statement in statements(version):
                    db.execute(statement)
                if version < 4:
                    db.create_function("sealed", 2, sealed)
                    db.execute("UPDATE state SET value = sealed(name, value)")
                db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
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
    except Exception:  # noqa: S110 - closing the connection undoes it too
        pass


def seal(name: str, value: Any) -> bytes:
    """`value` with a checksum. Every Python that we support reads marshal's format 4."""
    return sealed(name, marshal.dumps(value, 4))


def sealed(name: str, data: bytes) -> bytes:
    return data + zlib.crc32(data, zlib.crc32(name.encode())).to_bytes(4, "little")


def unseal(name: str, blob: bytes) -> Any:
    """The value that `seal` took. Damaged bytes, on which marshal may crash, raise sqlite3.DatabaseError before."""
    if type(blob) is bytes and sealed(name, blob[:-4]) == blob:
        try:
            return marshal.loads(blob)  # noqa: S302 - our own file, with the right checksum; marshal ignores the checksum's bytes
        except (ValueError, EOFError, TypeError):
            pass
    raise sqlite3.DatabaseError(f"the value of {name!r} is damaged")
