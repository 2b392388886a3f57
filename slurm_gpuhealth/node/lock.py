"""One at a time on this node: locks that end when the program that holds them ends, however it ends."""

from __future__ import annotations

import os
import time

from slurm_gpuhealth import deadline as own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal

ROOM = 0.1
"""With fewer seconds left, no child is started: it could not answer in time."""
SETTLE = 20.0
"""Seconds after its deadline in which a killed child may still be ending."""


def take(settings: Settings, name: str, deadline: float = 0.0, real: bool = False) -> int | None:
    """The lock `name` as a descriptor to close, or None if another program holds it until `deadline` (monotonic).

    If neither `paths.run` nor `paths.state` can be written, the descriptor locks nothing: a check without a lock is
    better than no check. With `real`: None then.
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
        except OSError:  # a file system without locks
            if real:
                os.close(fd)
                return None
            return fd


def guarded(settings: Settings, journal: Journal, name: str, seconds: float, start: Callable[[float], Any]) -> Any:
    """`start(seconds)`, which returns a value with `.stuck`; None if an earlier child can't be killed: nothing starts.

    One child at a time: otherwise several would get stuck. TimeoutError if another program's child does not end, or was
    killed so recently that the driver may still be cleaning up: that proves no hang yet.
    """
    from slurm_gpuhealth.child import Child, Ended, age, alive
    from slurm_gpuhealth.node.identity import boot_id

    seconds = min(seconds, own.left() - 2.0)  # ending a child that ignores signals takes so long
    if seconds < ROOM:
        raise TimeoutError("no time left for it")
    deadline = time.monotonic() + seconds
    turn = take(settings, name, deadline)
    if turn is None:
        raise TimeoutError(f"another program of gpuhealth is doing it, and was not done in {seconds:.0f} s")
    boot, stuck = boot_id(settings), journal.get("stuck", {})
    old, child = stuck.get(name), None
    try:
        if old and old[0] == boot and alive(Child(old[1], old[2])):
            child = Child(old[1], old[2])
            if age(child) < settings.nvml.timeout + SETTLE:
                raise TimeoutError("an earlier child was killed and has not ended yet")
            return None
        result = start(max(0.1, deadline - time.monotonic()))
        child = result.stuck
        return result
    except Ended as end:  # slurmd ends us; the next program sees whether the child died too
        child = end.child
        raise
    finally:
        new = (boot, child.pid, child.start) if child else None
        if new != old:
            rest = {other: value for other, value in stuck.items() if other != name}
            journal.put("stuck", {**rest, name: new} if new else rest)
        os.close(turn)


def _open(settings: Settings, name: str) -> int:
    from slurm_gpuhealth.node.journal_file import make_private

    for folder in (settings.paths.run, settings.paths.state):
        try:
            make_private(folder)
            return os.open(os.path.join(folder, name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            from slurm_gpuhealth.say import say

            say(f"no lock in {folder}: {error}", error=True)
    return os.open("/dev/null", os.O_PATH)
