"""The state of the host: memory controllers, file systems, mounts, units, killed and hung tasks.

Sources: proc(5); Linux Documentation/admin-guide/ras.rst (EDAC), filesystems/proc.rst; systemctl(1).
"""

from __future__ import annotations

import os

from slurm_gpuhealth.findings import Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Severity

SYSTEMCTL = "/usr/bin/systemctl"
UNIT_TIMEOUT = 5.0
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs")
"""statvfs on these asks no server. On NFS, Lustre or FUSE it may never return."""
PASSABLE = (*LOCAL, "tmpfs", "devtmpfs", "ramfs", "rootfs", "overlay", "squashfs", "erofs", "zfs")
"""A path may lead through these. Below the mount of a file server that hangs, even a local mount can't be reached."""
ERRORS = (  # EDAC's counter → severity, what it counts
    ("ue_count", "warning", "uncorrectable"),
    ("ce_count", "info", "corrected"),
)
SHOWN = 5
"""The most names in a message."""


def collect(settings: Settings, previous: dict[str, Any], now: float) -> tuple[list[Finding], dict[str, Any]]:
    """Findings about the host, and the state for the next call's `previous` ({} at first).

    Counters are judged by their growth, so errors from before the first look don't count. Never blocks: it does not
    touch remote file systems, and systemctl has a deadline. Raises nothing.
    """
    findings: list[Finding] = []
    state = dict(previous)

    def found(code: str, severity: Severity, message: str, standing: bool = False, count: int = 1) -> None:
        findings.append(Finding(now, "host", code, message, None, severity, standing, count))

    for part in (_memory, _killed, _file_systems, _units, _hung):
        try:
            for one in part(settings, previous, state):
                found(*one)
        except (OSError, ValueError, IndexError) as error:
            found("unreadable", "info", f"{part.__name__.strip('_')} could not be read: {error}", True)
    return findings, state


def _memory(settings: Settings, previous: dict[str, Any], state: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Growth of the memory controllers' error counts since the last look."""
    root = f"{settings.paths.sys}/devices/system/edac/mc"
    if not os.path.isdir(root):
        return
    before = previous.get("edac")
    counts = {
        f"{controller}/{name}": int(_read(f"{root}/{controller}/{name}"))
        for controller in sorted(os.listdir(root))
        for name, _, _ in ERRORS
        if os.path.exists(f"{root}/{controller}/{name}")
    }
    state["edac"] = counts
    if before is None:
        return
    for name, severity, word in ERRORS:
        grown = {key: _growth(before.get(key, 0), value) for key, value in counts.items() if key.endswith(name)}
        where = ", ".join(key.partition("/")[0] for key, more in grown.items() if more)
        if where:
            total = sum(grown.values())
            errors = f"{total} {word} memory error{'s' * (total > 1)}"
            code = "memory" if name == "ue_count" else "memory-corrected"
            yield (
                code,
                severity,
                f"{errors} since the last look ({where}); find the DIMM with `edac-util -v`",
                False,
                total,
            )


def _killed(settings: Settings, previous: dict[str, Any], state: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Tasks that the kernel ended for lack of memory. Its counter includes jobs that reached their own limit."""
    for line in _read(f"{settings.paths.proc}/vmstat").splitlines():
        if line.startswith("oom_kill "):
            state["oom_kill"] = int(line.split()[1])
            grown = _growth(previous.get("oom_kill", state["oom_kill"]), state["oom_kill"])
            if grown:
                message = f"{grown} task{'s' * (grown > 1)} killed for lack of memory, the host's or a job's own limit"
                yield "oom", "info", f"{message}; see dmesg for 'Out of memory'", False, grown


def _growth(before: int, value: int) -> int:
    """A counter that is smaller than before has restarted at a boot."""
    return value - before if value >= before else value


def _file_systems(settings: Settings, previous: dict[str, Any], state: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Local file systems that turned read-only or are nearly full; required mounts that are missing."""
    mounts = _mounts(settings)
    missing = [path for path in settings.host.mounts if (os.path.normpath(path)) not in mounts]
    if missing:
        yield "mount", "warning", f"not mounted: {_some(missing)} (host.mounts)", True
    local = {path: one for path, one in mounts.items() if one[0].startswith("/dev/") and _is_local(path, mounts)}
    # Only if it was writable before: others are read-only on purpose.
    writable = {path for path, (_, _, options) in local.items() if "rw" in options.split(",")}
    turned = sorted(local.keys() & set(previous.get("writable", ())) - writable)
    state["writable"] = sorted(writable | set(turned))
    if turned:
        yield "read-only", "warning", f"turned read-only: {_some(turned)}; see dmesg for the disk's errors", True
    full: list[str] = []
    for path in {device: path for path, (device, _, _) in reversed(local.items())}.values():
        try:
            full += _fullness(path, settings.host.full)
        except OSError:  # covered by a later mount, or just unmounted
            continue
    if full:
        yield "full", "warning", f"nearly full: {_some(full)} (host.full)", True


def _mounts(settings: Settings) -> dict[str, tuple[str, str, str]]:
    """Mount point → (device, type, options); the last mount on a point counts."""
    mounts = {}
    for line in _read(f"{settings.paths.proc}/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) >= 4:
            mounts[_unescape(fields[1])] = (_unescape(fields[0]), fields[2], fields[3])
    return mounts


def _is_local(path: str, mounts: dict[str, tuple[str, str, str]]) -> bool:
    if mounts[path][1] not in LOCAL:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if path in mounts and mounts[path][1] not in PASSABLE:
            return False
    return True


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as \\040, \\011, \\012 and \\134."""
    for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, plain)
    return text


def _fullness(path: str, limit: float) -> Iterator[str]:
    """Space and inodes that are fuller than `limit` there, counted as df does: of what users may use."""
    values = os.statvfs(path)
    used = values.f_blocks - values.f_bfree
    for name, part, whole in (
        ("", used, used + values.f_bavail),
        (" of inodes", values.f_files - values.f_ffree, values.f_files),
    ):
        if whole > 0 and part / whole > limit:
            yield f"{path} {100 * part // whole}%{name}"


def _units(settings: Settings, previous: dict[str, Any], state: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """systemd units that are not active; asked only if the configuration names some."""
    if not settings.host.units:
        return
    from slurm_gpuhealth import child

    stuck = state.pop("stuck", None)
    if stuck and child.alive(child.Child(*stuck)):
        state["stuck"] = stuck
        yield "unreadable", "info", "units could not be read: an earlier systemctl hangs, no other is started", True
        return
    done = child.run(
        [SYSTEMCTL, "is-active", "--", *settings.host.units], timeout=UNIT_TIMEOUT, grace=1.0, limit=1 << 16
    )
    if done.stuck:
        state["stuck"] = [done.stuck.pid, done.stuck.start]
    states = done.stdout.decode("utf-8", "replace").split()
    if done.timed_out or len(states) != len(settings.host.units):
        said = done.stderr.decode("utf-8", "replace").strip() or f"no answer in {UNIT_TIMEOUT:g} s"
        yield "unreadable", "info", f"units could not be read: {_plain(said)[:200]}", True
        return
    # A unit that is starting is not down.
    down = [
        f"{unit} ({_plain(word)})"
        for unit, word in zip(settings.host.units, states)
        if word not in ("active", "reloading", "activating", "refreshing")
    ]
    if down:
        yield "unit", "warning", f"not active: {_some(down)} (host.units)", True


def _hung(settings: Settings, previous: dict[str, Any], state: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Tasks in uninterruptible sleep, if there are many. They count as load but are not runnable. So the process table
    is read only if the load exceeds the number of runnable tasks by that much: on a busy node this costs nothing.
    """
    fields = _read(f"{settings.paths.proc}/loadavg").split()
    limit = settings.host.d_state_tasks
    if float(fields[0]) - int(fields[3].partition("/")[0]) < limit:
        return
    names = []
    for pid in os.listdir(settings.paths.proc):
        if pid.isdigit():
            try:
                text = _read(f"{settings.paths.proc}/{pid}/stat")
            except OSError:  # it has ended
                continue
            head, _, rest = text.rpartition(")")  # a name may hold parentheses
            if rest.split()[:1] == ["D"]:
                names.append(_plain(head.partition("(")[2]))
    if len(names) >= limit:
        common = sorted(set(names), key=lambda name: (-names.count(name), name))
        message = (
            f"{len(names)} tasks in uninterruptible sleep ({_some(common)}): a disk, a file server or the driver hangs"
        )
        yield "hung", "warning", message, True


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(_plain(name) for name in names[:SHOWN]) + more


def _plain(text: str) -> str:
    """Names come from users: control characters become `?`."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
