"""A child of root becomes a user for ever. If somebody makes it misbehave, it has no rights of root left.

All imports are at the top: the user may be unable to enter Python's folder.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_NEW_PRIVS, DUMPABLE = 38, 4
"""prctl's numbers. If it is not dumpable, other processes of the user can't trace it or read its memory."""
CAPABILITIES = (b"CapPrm:", b"CapEff:", b"CapAmb:")


class NotDropped(Exception):
    """A right of root would be left; the text says which."""


def groups_of(user: str, uid: int, gid: int) -> list[int]:
    """The groups that the user has after a login. May ask LDAP and hang, so call it in the child."""
    try:
        known = pwd.getpwnam(user).pw_uid == uid
    except (KeyError, ValueError):
        known = False
    return os.getgrouplist(user, gid) if known else [gid]


def become(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Take the user's rights, and prove that there is no way back. Raises NotDropped or OSError."""
    if uid <= 0 or gid < 0:
        raise NotDropped(f"uid {uid}, gid {gid}: not an ordinary user")
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)  # from here on the kernel treats it as not dumpable
    for option, value in ((NO_NEW_PRIVS, 1), (DUMPABLE, 0)):
        if prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
            raise NotDropped(f"prctl({option}): {os.strerror(ctypes.get_errno())}")
    _prove(uid, gid, groups)


def limit(seconds: int, memory: int, descriptors: int = 16) -> None:
    """Limit the process: CPU seconds, bytes of memory, descriptors; it can write no file and start no child."""
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, descriptors),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _prove(uid: int, gid: int, groups: Sequence[int]) -> None:
    if (os.getresuid(), os.getresgid()) != ((uid,) * 3, (gid,) * 3) or set(os.getgroups()) != set(groups):
        raise NotDropped(f"still {os.getresuid()}, {os.getresgid()}, {os.getgroups()}")
    ways: tuple[Callable[[], None], ...] = (
        lambda: os.setresuid(-1, 0, -1),
        lambda: os.setuid(0),
        lambda: os.setgroups([0]),
    )
    for back in ways:
        try:
            back()
        except PermissionError:
            continue
        raise NotDropped("there is a way back to root")
    with open(
        "/proc/self/status", "rb"
    ) as file:  # opening it as text might import a codec, which the user may be unable to read
        held = {key: int(value, 16) for key, value in (line.split()[:2] for line in file if line[:3] == b"Cap")}
    if any(held.get(one) for one in CAPABILITIES) or b"CapEff:" not in held:
        raise NotDropped(f"capabilities are left: {held}")
