"""Programs and probes that may hang, run and ended: NVML, dcgmi and scontrol hang exactly on the nodes that matter.

A child runs in a session of its own, with our pipes and /dev/null as its only descriptors, and has a deadline, which is
never later than the program's own (deadline.py); when that is too near it is not started, and reads as timed out:

    start ──▶ done
      │ deadline
      ▼
    SIGTERM to its process group ──▶ done in time: timed_out
      │ grace
      ▼
    SIGKILL ──▶ timed_out
      │ KILL_WAIT
      ▼
    stuck: in D state. Nobody waits for it; whoever asks next finds it with `alive` and starts no second one.
"""

from __future__ import annotations

import errno
import os
import select
import time
from fcntl import F_DUPFD, fcntl

from slurm_gpuhealth import deadline
from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from signal import SIG_DFL, SIGALRM, SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM, alarm
    from signal import signal as set_handler
    from typing import Any, NoReturn
else:  # the `signal` module only adds names to these numbers, with `enum`: a third of what Python's start costs
    from _signal import SIG_DFL, SIGALRM, SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM, alarm
    from _signal import signal as set_handler

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
KILL_WAIT = 1.0
"""Seconds between SIGKILL and calling a child stuck. A task that is not in D state dies in milliseconds."""


watcher: Callable[[Child], None] | None = None
"""Of a program whose children run for minutes: called with each child at its start and every WATCH seconds after it.
What it raises ends the child."""
WATCH = 20.0


@frozen
class Child:
    """A process told apart from a later one with the same pid: `start` is field 22 of /proc/PID/stat."""

    pid: int
    start: int


class Ended(SystemExit):
    """We were ended (SIGTERM) while a child ran. It was told to end too; whether it can is not known."""

    child: Child | None = None


@frozen
class Completed:
    """How a program ended. `rc` is None when it was never reaped; negative for a signal, as in `subprocess`."""

    rc: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    stuck: Child | None = None


@frozen
class Probed:
    """What a probe returned, or why it did not (`error` is set whenever there is no value)."""

    value: Any
    error: str | None
    seconds: float
    timed_out: bool = False
    stuck: Child | None = None


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    grace: float = 5.0,
    limit: int = 16 << 20,
    cpus: set[int] | None = None,
) -> Completed:
    """Run the program `argv` (absolute path) with the environment `env` over a fixed PATH; raises nothing.

    Output beyond `limit` bytes a stream is read and thrown away. `cpus` replaces our CPU affinity in the child. A
    program that can't be started gives rc 127 (not there) or 126 and the system's words in `stderr`.
    """
    environment = {"PATH": PATH, "LC_ALL": "C.UTF-8", **(env or {})}

    def execute(_: int) -> NoReturn:
        if cpus:
            os.sched_setaffinity(0, cpus)
        try:
            os.execve(argv[0], list(argv), environment)  # noqa: S606 - no shell is what we want
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}".encode())
            os._exit(127 if error.errno == errno.ENOENT else 126)

    rc, (out, err, _), seconds, timed_out, stuck = _supervise(execute, timeout, grace, limit)
    return Completed(rc, out, err, seconds, timed_out, stuck)


def probe(function: Callable[[], Any], *, timeout: float, grace: float = 1.0) -> Probed:
    """Call `function` in a forked child; its result must be of `marshal`'s types. Costs no second interpreter start."""
    import marshal

    def answer() -> bytes:
        try:
            return marshal.dumps((function(), None))
        except Exception as error:
            return marshal.dumps((None, f"{type(error).__name__}: {error}"))

    done = told(answer, timeout=timeout, grace=grace)
    rc, seconds, timed_out, stuck = done.rc, done.seconds, done.timed_out, done.stuck
    if stuck or timed_out:
        error = f"no answer in {min(timeout, round(seconds, 1)):g} s" + (", and can't be killed" if stuck else "")
        return Probed(None, error, seconds, timed_out, stuck)
    if rc != 0:
        return Probed(None, f"the probe died ({f'signal {-rc}' if rc and rc < 0 else f'exit {rc}'})", seconds)
    value, error_text = marshal.loads(done.stdout)  # noqa: S302 - our own child wrote it
    return Probed(value, error_text, seconds)


def told(function: Callable[[], bytes], *, timeout: float, grace: float = 1.0, limit: int = 64 << 20) -> Completed:
    """Call `function` in a forked child: what it returns is `stdout`, cut to `limit` bytes; rc 125: it raised."""

    def call(result: int) -> NoReturn:
        data = function()
        while data:
            data = data[os.write(result, data) :]
        os._exit(0)

    rc, (_, err, data), seconds, timed_out, stuck = _supervise(call, timeout, grace, limit)
    return Completed(rc, data, err, seconds, timed_out, stuck)


def alive(child: Child) -> bool:
    """Whether exactly this child is still a process (a zombie is not)."""
    state, start = _stat(child.pid)
    return start == child.start and state != "Z"


def terminate(child: Child) -> None:
    """SIGTERM to the process group of a child that another program of ours left behind."""
    if alive(child):
        _signal_group(child.pid, SIGTERM)


def age(child: Child) -> float:
    """Seconds since it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - child.start / os.sysconf("SC_CLK_TCK")


def _supervise(
    body: Callable[[int], NoReturn], timeout: float, grace: float, limit: int
) -> tuple[int | None, list[bytes], float, bool, Child | None]:
    """Fork, run `body(result fd)` in the child, see it to its end: rc, [stdout, stderr, result], seconds, …"""
    began = time.monotonic()
    timeout = min(timeout, deadline.left() - grace - KILL_WAIT)
    if timeout <= 0:
        return None, [b"", b"no time left", b""], 0.0, True, None
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        # Should we be killed ourselves: the kernel ends it then (alarm(2) outlives exec).
        _become_child([write for _, write in pipes], body, int(timeout + grace + KILL_WAIT) + 1)
    for _, write in pipes:
        os.close(write)
    readers = [read for read, _ in pipes]
    data = [bytearray() for _ in pipes]
    rc: int | None = None
    timed_out = False
    child = Child(pid, _stat(pid)[1])
    # slurmd ends a program that takes too long with SIGTERM: then our child has to go too.
    before = set_handler(SIGTERM, _terminated)
    try:
        for sign, seconds in ((0, timeout), (SIGTERM, grace), (SIGKILL, KILL_WAIT)):
            if sign:
                timed_out = True
                _signal_group(pid, sign)
            rc = _follow(child, readers, data, time.monotonic() + seconds, limit, watched=not sign)
            if rc is not None:
                break
    except BaseException as end:  # our own end (SIGTERM by slurmd, Ctrl-C): leave no child behind
        # Not SIGKILL: of dcgmi that leaves the diagnostic running. Who is deaf to SIGTERM has the alarm.
        _signal_group(pid, SIGTERM)
        if isinstance(end, Ended):
            end.child = child
        raise
    finally:
        set_handler(SIGTERM, before)
        for read in readers:
            os.close(read)
    return rc, [bytes(part) for part in data], time.monotonic() - began, timed_out, child if rc is None else None


def _terminated(*_: object) -> NoReturn:
    raise Ended(128 + SIGTERM)


def _become_child(ends: Sequence[int], body: Callable[[int], NoReturn], seconds: int) -> NoReturn:
    """In the child: own session, fds 0-2 on /dev/null and our pipes, 3 the result pipe (closed by exec), no others."""
    try:
        os.setsid()
        for number in (SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGALRM):
            set_handler(number, SIG_DFL)
        alarm(seconds)
        null = os.open("/dev/null", os.O_RDWR)
        # Out of the way of 0-3 first: a hook may have been started with some of those closed.
        sources = [fcntl(fd, F_DUPFD, 4) for fd in (null, *ends)]
        for target, source in enumerate(sources):
            os.dup2(source, target, inheritable=target < 3)
        close_from(4)
        body(3)
    finally:
        os._exit(125)


def close_from(first: int) -> None:
    """Close all descriptors from `first` on. Not up to SC_OPEN_MAX: with LimitNOFILE=infinity that is a billion, which
    Python 3.9 closes one by one, for minutes."""
    try:
        last = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # no /proc
        last = os.sysconf("SC_OPEN_MAX")
    os.closerange(first, last + 1)


def _follow(
    child: Child, readers: Sequence[int], data: Sequence[bytearray], until: float, limit: int, watched: bool
) -> int | None:
    """Read the child's pipes until it exits: its exit code, or None at the time `until`.

    The end is the child's exit, not end-of-file: a grandchild that kept our pipe (nvvs does) must not hold us up.
    """
    poll = select.poll()
    for read in readers:
        os.set_blocking(read, False)
        poll.register(read, select.POLLIN)
    try:
        exit_fd = os.pidfd_open(child.pid)
        poll.register(exit_fd, select.POLLIN)
    except (AttributeError, OSError):  # Linux before 5.3: look for its exit every 20 ms
        exit_fd = -1
    look = time.monotonic()
    try:
        while True:
            if watcher and watched and time.monotonic() >= look:
                _watch(child)
                look = time.monotonic() + WATCH
            left = until - time.monotonic()
            if watcher and watched:
                left = min(left, look - time.monotonic())
            for fd, _ in poll.poll(max(0.0, left if exit_fd >= 0 else min(left, 0.02)) * 1000):
                if fd != exit_fd and not _drain(fd, readers.index(fd), data, limit):
                    poll.unregister(fd)
            done, status = os.waitpid(child.pid, os.WNOHANG)
            if done:
                for index, read in enumerate(readers):
                    while _drain(read, index, data, limit):
                        pass
                return os.waitstatus_to_exitcode(status)
            if until <= time.monotonic():
                return None
    finally:
        if exit_fd >= 0:
            os.close(exit_fd)


def _watch(child: Child) -> None:
    """One call of the watcher, whose own children are not watched."""
    global watcher
    call, watcher = watcher, None
    try:
        if call:
            call(child)
    finally:
        watcher = call


def _drain(fd: int, index: int, data: Sequence[bytearray], limit: int) -> bool:
    """One read of `fd` into `data[index]`, keeping `limit` bytes in all; False when there was nothing to read."""
    try:
        chunk = os.read(fd, 1 << 16)
    except BlockingIOError:
        return False
    data[index] += chunk[: limit - len(data[index])]
    return bool(chunk)


def _signal_group(pid: int, number: int) -> None:
    """Signal the child's process group; before its setsid took effect, the child itself."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
            return
        except (ProcessLookupError, PermissionError):
            continue


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of `pid`; ("", 0) when it is gone. The name may hold spaces and parentheses."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0
    return fields[0].decode(), int(fields[19])
