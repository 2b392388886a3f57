"""Where to begin in the kernel log if the journal does not know. Imported only then."""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.node.journal_file import CURSOR, make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.evidence.kernel import Cursor
    from slurm_gpuhealth.node.journal import Journal

LOGGED = ("xid", "sxid", "aer", "nvrm", "kernel")
"""Sources of findings that come only from the kernel log."""
SLACK = 60.0
"""Seconds by which the clock may have been set since the boot."""


def begin(journal: Journal, boot: str, now: float) -> Cursor | None:
    """Where to begin in the kernel log, if the journal was lost or has lost this value.

    1. A lost fault may have been read but never decided on. So read again from the place up to which every fault had
       its decision: `Journal.settled` noted that in `paths.run`, for this boot.
    2. Without that note: from where the lost journal had read, if it could be read there.
    3. Otherwise, if the lost journal was written before this boot: everything of this boot is new.
    4. Otherwise nothing is new. An old fault must not drain a node again after an admin resumed it.
    """
    cursor, written = journal.get("kernel-lost") or (None, None)
    journal.put("kernel-lost", None)
    noted = _noted(journal.run, boot)
    if noted:
        marks = ", ".join("?" * len(LOGGED))  # these are read again, and must not count twice
        which = f"NOT standing AND seen > ? AND source IN ({marks})"
        journal.write(f"DELETE FROM finding WHERE {which}", noted[3], *LOGGED)  # noqa: S608 - ours
        return noted
    if cursor:
        return cursor  # type: ignore[no-any-return]
    if written is not None and written < now - time.clock_gettime(time.CLOCK_BOOTTIME) - SLACK:
        return "", -1, 0, written
    return None


def _noted(run: str, boot: str) -> Cursor | None:
    try:
        make_private(run)
        fd = os.open(os.path.join(run, CURSOR), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found, last, offset, seen = os.read(fd, 256).decode().partition("\n")[0].split()
        finally:
            os.close(fd)
        return (boot, int(last), int(offset), float(seen)) if found == boot else None
    except (OSError, ValueError):
        return None
