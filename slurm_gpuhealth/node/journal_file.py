"""The journal's file: opened, its tables made or brought up to date, in a folder that is ours alone."""

from __future__ import annotations

import _sqlite3 as sqlite3  # `sqlite3` is the same and brings `datetime`: 2 ms of each start
import marshal
import os
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "journal.db"
VERSION = 4
CURSOR = "kernel.seen"
"""In `paths.run`: up to where the kernel log was read and nothing of it waits. For who finds no journal any more."""


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
    try:
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
                db.create_function("sealed", 2, sealed)  # since version 4
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
    except Exception:  # noqa: S110 - what ends with the connection is undone too
        pass


def seal(name: str, value: Any) -> bytes:
    """`value` with a checksum. marshal's format 4 is read by every Python that we support."""
    return sealed(name, marshal.dumps(value, 4))


def sealed(name: str, data: bytes) -> bytes:
    return data + zlib.crc32(data, zlib.crc32(name.encode())).to_bytes(4, "little")


def unseal(name: str, blob: bytes) -> Any:
    """What `seal` took. Raises sqlite3.DatabaseError: marshal may crash on damaged bytes, so none reach it unproven."""
    if type(blob) is bytes and sealed(name, blob[:-4]) == blob:
        try:
            return marshal.loads(blob)  # noqa: S302 - our own file, with the right checksum; what follows is not read
        except (ValueError, EOFError, TypeError):
            pass
    raise sqlite3.DatabaseError(f"the value of {name!r} is damaged")
