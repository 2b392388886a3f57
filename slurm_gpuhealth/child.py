"""Runs programs and probes that may hang, and ends them: NVML, dcgmi and scontrol hang on the nodes that matter most.

A child runs in its own session, and has only our pipes and /dev/null open. Its deadline is never later than the
program's own (deadline.py). If that is too near, the child is not started, and counts as timed out:

    start ──▶ done
      │ deadline
      ▼
    SIGTERM to its process group ──▶ done in time: timed_out
      │ grace
      ▼
    SIGKILL ──▶ timed_out
      │ KILL_WAIT
      ▼
    stuck: in D state. Nobody waits for it; the next program finds it with `alive` and starts no second one.
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
else:  # the `signal` module only adds names, but imports `enum`: a third of Python's start
    from _signal import SIG_DFL, SIGALRM, SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM, alarm
    from _signal import signal as set_handler

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
KILL_WAIT = 1.0
"""Seconds after SIGKILL until a child counts as stuck. A task that is not in D state dies within milliseconds."""


watcher: Callable[[Child], None] | None = None
"""For a program whose children run for minutes: called with each child at its start and every WATCH seconds after that.
If it raises, the child is ended."""
WATCH = 20.0


@frozen
class Child:
    """A process, distinguished from a later one with the same pid by `start`, field 22 of /proc/PID/stat."""

    pid: int
    start: int


class Ended(SystemExit):
    """SIGTERM ended us while a child ran. The child got SIGTERM too, but may be unable to end."""

    child: Child | None = None


@frozen
class Completed:
    """How a program ended. `rc` is None if it was never reaped; negative for a signal, as in `subprocess`."""

    rc: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    stuck: Child | None = None


@frozen
class Probed:
    """What a probe returned, or why it returned nothing (`error` is set if there is no value)."""

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
    first: Callable[[], None] | None = None,
) -> Completed:
    """Run the program `argv` (absolute path) with a fixed PATH and the environment `env`; raises nothing.

    Output beyond `limit` bytes per stream is read and thrown away. `cpus` replaces our CPU affinity in the child, and
    `first` is called there before the program starts. If a program can't be started, rc is 127 (it does not exist) or
    126, and `stderr` has the system's message.
    """
    environment = {"PATH": PATH, "LC_ALL": "C.UTF-8", **(env or {})}

    def execute(_: int) -> NoReturn:
        if cpus:
            os.sched_setaffinity(0, cpus)
        try:
            if first:
                first()
            os.execve(argv[0], list(argv), environment)  # noqa: S606 - no shell is what we want
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}".encode())
            os._exit(127 if error.errno == errno.ENOENT else 126)

    rc, (out, err, _), seconds, timed_out, stuck = _supervise(execute, timeout, grace, limit)
    return Completed(rc, out, err, seconds, timed_out, stuck)


def probe(function: Callable[[], Any], *, timeout: float, grace: float = 1.0) -> Probed:
    """Call `function` in a forked child; its result must have `marshal`'s types. Saves a second start of Python."""
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
    """Call `function` in a forked child: `stdout` is what it returns, cut to `limit` bytes; rc 125 if it raised."""

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
    """Fork, run `body(result fd)` in the child, follow it until it ends: rc, [stdout, stderr, result], seconds, …"""
    began = time.monotonic()
    timeout = min(timeout, deadline.left() - grace - KILL_WAIT)
    if timeout <= 0:
        return None, [b"", b"no time left", b""], 0.0, True, None
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        # If we are killed ourselves, the kernel ends the child (alarm(2) survives exec).
        _become_child([write for _, write in pipes], body, int(timeout + grace + KILL_WAIT) + 1)
    for _, write in pipes:
        os.close(write)
    readers = [read for read, _ in pipes]
    data = [bytearray() for _ in pipes]
    rc: int | None = None
    timed_out = False
    child = Child(pid, _stat(pid)[1])
    # slurmd ends a program that takes too long with SIGTERM: then our child must end too.
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
        # Not SIGKILL: if dcgmi gets it, the diagnostic goes on. A child that ignores SIGTERM is ended by the alarm.
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
    """In the child: its own session; fds 0-2 are /dev/null and our pipes, 3 the result pipe (closed by exec)."""
    try:
        os.setsid()
        for number in (SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGALRM):
            set_handler(number, SIG_DFL)
        alarm(seconds)
        null = os.open("/dev/null", os.O_RDWR)
        # First move them beyond 0-3: a hook may have been started with some of those closed.
        sources = [fcntl(fd, F_DUPFD, 4) for fd in (null, *ends)]
        for target, source in enumerate(sources):
            os.dup2(source, target, inheritable=target < 3)
        close_from(4)
        body(3)
    finally:
        os._exit(125)


def close_from(first: int) -> None:
    """Close all descriptors from `first` on. Not up to SC_OPEN_MAX: with LimitNOFILE=infinity that is a billion, and
    Python 3.9 would take minutes to close them one by one."""
    try:
        last = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # no /proc
        last = os.sysconf("SC_OPEN_MAX")
    os.closerange(first, last + 1)


def _follow(
    child: Child, readers: Sequence[int], data: Sequence[bytearray], until: float, limit: int, watched: bool
) -> int | None:
    """Read the child's pipes until it exits. Returns its exit code, or None at the time `until`.

    Waits for the child's exit, not for end-of-file: a grandchild may keep our pipe open (nvvs does).
    """
    poll = select.poll()
    for read in readers:
        os.set_blocking(read, False)
        poll.register(read, select.POLLIN)
    try:
        exit_fd = os.pidfd_open(child.pid)
        poll.register(exit_fd, select.POLLIN)
    except (AttributeError, OSError):  # Linux before 5.3: check for its exit every 20 ms
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
    """Call the watcher once; its own children are not watched."""
    global watcher
    call, watcher = watcher, None
    try:
        if call:
            call(child)
    finally:
        watcher = call


def _drain(fd: int, index: int, data: Sequence[bytearray], limit: int) -> bool:
    """Read `fd` once into `data[index]`, which keeps `limit` bytes at most; False if there was nothing to read."""
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
    """State letter and start time of `pid`; ("", 0) if it has ended. The name may have spaces and parentheses."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0
    return fields[0].decode(), int(fields[19])
