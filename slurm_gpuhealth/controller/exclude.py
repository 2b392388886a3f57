"""The suspects as a file for `sbatch --exclude=$(cat FILE)`.

If the file has a name that Slurm does not know, Slurm refuses each job that uses it. If it names the whole cluster,
each such job waits. So it has only nodes that Slurm has now, and at most as many as may be held for new faults.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from slurm_gpuhealth.ladder import budget
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from slurm_gpuhealth.config.settings import Settings

MOST = 1 << 16
"""The most bytes of the old file that are compared."""


def publish(settings: Settings, nodes: Sequence[str]) -> None:
    """Write `nodes`, the worst first, which Slurm has. If that fails, it is logged, and the file stays as it was."""
    try:
        _, total = control.holds(settings.slurm, settings.drain.nodes)
        most = budget.most(total, settings.drain.budget, settings.drain.floor)
        if len(nodes) > most:
            say(f"{len(nodes)} suspects: the worst {most} are in {settings.correlate.exclude} (drain.budget)")
        write(settings.correlate.exclude, nodes[:most])
    except (control.SlurmError, OSError) as error:
        say(f"{settings.correlate.exclude}: stays as it was: {error}", error=True)


def write(path: str, nodes: Iterable[str]) -> None:
    """Write the nodes as a hostlist, one line; replaces the file as a whole. Raises OSError."""
    from ClusterShell.NodeSet import NodeSet  # type: ignore[import-untyped]

    data = f"{NodeSet.fromlist(sorted(nodes))}\n".encode()
    if _read(path) == data:
        return
    fd, name = tempfile.mkstemp(dir=os.path.dirname(path) or "/", prefix=".exclude-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
            os.fchmod(fd, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: str) -> bytes:
    """The old content; b"" if it is not our file: a link, or a FIFO, which could block us."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read(MOST) or b""
