"""One at a time on this node: locks that end with the program that holds them, however it ends."""

from __future__ import annotations

import os
import time

from slurm_gpuhealth import deadline as own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings


def take(settings: Settings, name: str, deadline: float = 0.0, real: bool = False) -> int | None:
    """The lock `name` as a descriptor to close, or None when another program holds it until `deadline` (monotonic).

    Where neither `paths.run` nor `paths.state` can be written it is no lock at all: better that than no look. But for
    `real` ones: None then.
    """
    import fcntl

    fd = _open(settings, name)
    deadline = min(deadline, own.ends)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(0.05)
        except OSError:  # a file system that knows no locks
            if real:
                os.close(fd)
                return None
            return fd


def _open(settings: Settings, name: str) -> int:
    from slurm_gpuhealth.node.journal import make_private

    for folder in (settings.paths.run, settings.paths.state):
        try:
            make_private(folder)
            return os.open(os.path.join(folder, name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            from slurm_gpuhealth.say import say

            say(f"no lock in {folder}: {error}", error=True)
    return os.open("/dev/null", os.O_PATH)
