"""Appends a node's records to its own file in a shared directory. Safe on NFS: one writer per file, fsync after each.

    FOLDER/NODE.jsonl            the node appends to it, and renames it at ROTATE bytes
    FOLDER/NODE@TIME.jsonl       complete; the controller reads it, then removes it

A kill or a full disk can tear only the last line of a file. The next append cuts that off.
"""

from __future__ import annotations

import os
import stat
import time

from slurm_gpuhealth.config.load import unsafe
from slurm_gpuhealth.ship.line import lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.ship.line import Record

ROTATE = 4 << 20
END = ".jsonl"
BEFORE_TIME = "@"
"""Slurm's node names can't have it."""


def append(folder: str, node: str, batch: list[Record], size: int) -> int | None:
    """See `ship.write`. Raises OSError; then nothing of the batch counts."""
    os.umask(0o077)
    there = open_folder(folder)
    if "/" in node or BEFORE_TIME in node:
        raise ValueError(f"{node!r} is not a node's name")
    name = node + END
    fd = _open(name, there)
    found = os.fstat(fd).st_size
    if found < size < ROTATE:
        return None
    if found >= ROTATE:
        os.rename(name, f"{node}{BEFORE_TIME}{time.time_ns()}{END}", src_dir_fd=there, dst_dir_fd=there)
        os.close(fd)
        fd = _open(name, there)
    _cut_torn_line(fd)
    before = time.time()
    os.utime(fd)  # the file server's clock, not ours (SET_TO_SERVER_TIME in RFC 1813)
    data = memoryview(b"".join(lines(batch, before, os.fstat(fd).st_mtime, time.time())))
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    except OSError:
        _cut_torn_line(fd)  # complete lines stay: the controller may have read them
        raise
    os.fsync(there)
    return os.fstat(fd).st_size


def open_folder(folder: str) -> int:
    """The shared directory, open. If anybody but root and us could write there or in a folder above it, and so in a
    node's name: raises OSError, which says how to mend that."""
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    found = os.fstat(there)
    wrong = unsafe(os.path.abspath(folder), sticky=True)
    if not wrong and found.st_mode & 0o022:  # sticky: its names could be taken first
        wrong = [f"{folder} can be written by others (mode {found.st_mode & 0o7777:04o}): chmod go-w {folder}"]
    if not wrong and not os.path.samestat(found, os.stat(folder)):
        wrong = [f"{folder} was replaced while it was opened: find out by whom"]
    if wrong:
        os.close(there)
        raise PermissionError(1, "; ".join(wrong[0].rsplit(": ", 1)), folder)
    return there


def refuse_unless_ours(fd: int, name: str) -> None:
    """Raise OSError unless only a node of ours can have written the open file."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, "is not a regular file; remove it", name)
    if found.st_uid not in (0, os.geteuid()):
        why = f"belongs to uid {found.st_uid}; find out who wrote it, and remove it (if nobody is root: no_root_squash)"
        raise PermissionError(1, why, name)
    if found.st_mode & 0o022:
        raise PermissionError(1, f"can be written by others (mode {found.st_mode & 0o7777:04o}); chmod go-w it", name)
    if found.st_nlink > 1:
        raise PermissionError(1, f"has {found.st_nlink} names (hard links): it may be another file; remove it", name)


def _open(name: str, there: int) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=there)
    try:
        refuse_unless_ours(fd, name)
    except OSError:
        os.close(fd)
        raise
    return fd


def _cut_torn_line(fd: int) -> None:
    """Cut the file after its last complete line."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        begin = max(0, end - (1 << 16))
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        os.ftruncate(fd, end)
