"""Reads the log of a failed job in its epilog, with the user's rights, and writes what it says into the journal.

parent (root)                         child (the job's user, docs/reading-job-logs.md)
where is it? (node/output.py)    ──▶  opens it, reads head and tail, classifies (logs/read.py)
checks each value, writes it down ◀── a Reading, as JSON
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections import deque
from itertools import islice

from slurm_gpuhealth import child
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.logs.reading import NotALog, to_dict, validated
from slurm_gpuhealth.node import lock, output, rights
from slurm_gpuhealth.outcomes import Cited, Reading
from slurm_gpuhealth.say import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.config.settings import JobLog, Settings
    from slurm_gpuhealth.logs.flight import Dumps
    from slurm_gpuhealth.node.environment import Job
    from slurm_gpuhealth.node.journal import Journal

    Part = tuple[int, str]
    """The number of its first line, 0 if not known; its text."""

MIB = 1 << 20
ANSWER = 256 << 10
"""The most bytes that the child may answer: the largest Reading has 180 KiB."""
MEMORY = 1 << 30
"""Bytes for Python and the classifier, in addition to 24 for each byte of the log."""
LEAST = 0.5
"""With fewer seconds left, the log is not read."""
SKEW = 60.0
"""Seconds by which a file server's clock may be behind ours."""
ENDED = r"\*\*\* JOB {} ON \S{{1,255}} CANCELLED AT (\S{{1,40}}) "
"""slurmstepd writes this line after the output of a run that was requeued, preempted or lost its node."""
RUNS = 1000
"""How many such lines are looked at, from the end; a user may print more of them."""
NAMES = 100_000
"""Names that are looked at in the folder of a flight recorder's dumps."""
DUMPS = 8192
SHARE = 0.6
"""Of the time: after that no other dump is read."""


def read(settings: Settings, journal: Journal, job: Job, deadline: float) -> Reading | None:
    """Read the failed `job`'s log until `deadline` (monotonic) at most; the Reading is also in the journal.

    None: there is no log here, or it could not be read, which is logged. Never raises: the epilog has more to do.
    """
    try:
        return _read(settings, journal, job, min(deadline, time.monotonic() + settings.joblog.timeout))
    except Exception as error:
        what = "" if isinstance(error, (NotALog, TimeoutError)) else f"{type(error).__name__}: "
        say(f"{job.node}: job {job.job_id}: its log was not read: {what}{str(error)[:300]}")
        return None


def _read(settings: Settings, journal: Journal, job: Job, deadline: float) -> Reading | None:
    if not job.uid or job.gid is None:  # a job of root: there is no other user to become
        return None
    if deadline - time.monotonic() < LEAST:
        raise TimeoutError("no time is left for it")
    slurm = replace(settings.slurm, timeout=min(settings.slurm.timeout, settings.joblog.timeout / 2))
    paths = output.paths(slurm, job)
    flight = settings.joblog.flight
    prefixes = output.filled(slurm, job, (flight,)) if flight and output.runs_here(job) else ()
    if not paths and not prefixes:
        return None
    restart, started, ended = journal.one(
        "SELECT restart, started, ended FROM job WHERE job = ? AND ended IS NOT NULL ORDER BY ended DESC", job.job_id
    ) or (job.restart, 0.0, 0.0)
    since = started if started < ended else 0.0  # equal: our prolog did not run

    def start(left: float) -> child.Completed:
        return child.told(
            lambda: as_user(job, paths, settings.joblog, since, restart > 0, left, prefixes), timeout=left, limit=ANSWER
        )

    done = lock.guarded(settings, journal, "joblog", deadline - time.monotonic(), start)
    if done is None:
        raise TimeoutError("an earlier child can't be killed: a file system hangs")
    if done.timed_out:
        raise TimeoutError(f"no answer in {done.seconds:.0f} s")
    if done.rc != 0:
        raise OSError(f"its reader died (exit {done.rc})")
    reading = validated(done.stdout)
    if reading:
        journal.write(
            "INSERT OR REPLACE INTO joblog (job, restart, time, reading) VALUES (?, ?, ?, ?)",
            job.job_id,
            restart,
            time.time(),
            json.dumps(to_dict(reading)),
        )
    return reading


def as_user(
    job: Job,
    paths: Sequence[str],
    limits: JobLog,
    since: float,
    again: bool,
    seconds: float,
    prefixes: Sequence[str] = (),
) -> bytes:
    """In the child: become the user, read, classify. The Reading as JSON, `null` without a log, or `{"error": …}`.

    `since`: when the job began, 0 if not known; `again`: the job ran before, maybe with the same file; `prefixes`: of
    its flight recorder's dumps.
    """
    try:
        until = time.monotonic() + SHARE * seconds
        from slurm_gpuhealth.logs import read as logs

        # Load what these need now: as the user we may be unable to enter Python's folder.
        logs.read_text("")
        time.strptime("1", "%d")
        groups = rights.groups_of(job.user, job.uid or 0, job.gid or 0)
        for stream in (1, 2):
            os.dup2(0, stream)
        os.chdir("/")
        rights.become(job.uid or 0, -1 if job.gid is None else job.gid, groups)
        most = (limits.head_mib + limits.tail_mib) * MIB * len(paths)
        rights.limit(int(seconds) + 1, MEMORY + 24 * most)
        parts, wrong = [], ""
        for path in paths:
            try:
                found = read_file(path, limits.head_mib * MIB, limits.tail_mib * MIB, since)
                parts += this_attempt(found, job.job_id, since) if again and since else found
            except (FileNotFoundError, NotADirectoryError):  # a job without an output file
                continue
            except (OSError, NotALog) as error:
                wrong = f"{path!r}: {error.strerror if isinstance(error, OSError) else error}"
        dumps = read_dumps(prefixes, since, until) if prefixes else None
        if wrong and not parts and not dumps:
            raise NotALog(wrong)
        text, starts = joined(parts)
        reading = logs.read_text(text, output.hosts(job), dumps) if dumps else logs.read_text(text)
        said = to_dict(numbered(reading, starts)) if parts or dumps else None
        return json.dumps(said, ensure_ascii=False).encode("utf-8", "replace")
    except NotALog as error:
        return json.dumps({"error": str(error)}).encode()
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def read_dumps(prefixes: Sequence[str], since: float, until: float) -> Dumps:
    """The dumps `<prefix><rank>` that the user wrote after `since`, read until `until` (monotonic)."""
    from slurm_gpuhealth.logs.flight import Dumps

    dumps = Dumps()
    for prefix in prefixes:
        folder, _, stem = prefix.rpartition("/")
        try:
            with os.scandir(folder or "/") as there:
                names = [one.name for one in islice(there, NAMES) if one.name.startswith(stem)]
        except OSError:
            continue
        names = [name for name in names if re.fullmatch(r"\d{1,6}", name[len(stem) :])]
        for name in sorted(names, key=lambda name: int(name[len(stem) :]))[:DUMPS]:
            why = "no time was left for it" if time.monotonic() > until else _dump(f"{folder}/{name}", since, dumps)
            if why:
                dumps.unread[name] = why
    return dumps


def _dump(path: str, since: float, dumps: Dumps) -> str:
    """Add one dump; or why not."""
    try:
        fd = opened(path)
    except (OSError, NotALog) as error:
        return str(error.strerror if isinstance(error, OSError) else error)
    try:
        found = os.fstat(fd)
        if since and found.st_mtime < since - SKEW:  # an earlier job's
            return ""
        if found.st_uid != os.getuid():
            return "another user wrote it"
        return "" if dumps.take(path, fd, found.st_size) else "is no dump of PyTorch's flight recorder"
    finally:
        os.close(fd)


def read_file(path: str, head: int, tail: int, since: float) -> list[Part]:
    """The first `head` and the last `tail` bytes of a regular file, and of nothing else."""
    fd = opened(path)
    try:
        found = os.fstat(fd)
        if since and found.st_mtime < since - SKEW:
            raise NotALog("older than the job")
        size = found.st_size  # 0 for files in /proc, which may never end
        if size <= head + tail:
            return [(1, _text(fd, 0, size))] if size else []
        last = _text(fd, size - tail, tail)
        return [(1, _text(fd, 0, head)), (0, last.partition("\n")[2] or last)]  # it begins in the middle of a line
    finally:
        os.close(fd)


def opened(path: str) -> int:
    """A regular file, and nothing else, opened for reading. Raises NotALog or OSError."""
    # O_PATH does not open the file itself: a device would notice that, and a FIFO would wait.
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise NotALog("not a regular file" if not stat.S_ISLNK(os.fstat(place).st_mode) else "a symbolic link")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _text(fd: int, offset: int, length: int) -> str:
    """`length` bytes, fewer if the file was truncated meanwhile, and without the zeros of its holes."""
    data = bytearray()
    while len(data) < length:
        piece = os.pread(fd, length - len(data), offset + len(data))
        if not piece:
            break
        data += piece
    return data.replace(b"\0", b"").decode("utf-8", "replace")


def this_attempt(parts: list[Part], job_id: int, after: float) -> list[Part]:
    """The text after the last run that ended before `after`: with --open-mode=append the file has all runs."""
    for place in reversed(range(len(parts))):
        first, text = parts[place]
        last = text.rfind("\n")
        for found in reversed(deque(re.finditer(ENDED.format(job_id), text), RUNS)):
            if found.end() > last:  # still being written
                continue
            try:
                ended = time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))
            except (ValueError, OverflowError):
                continue
            if ended <= after:
                end = text.index("\n", found.end()) + 1
                skipped = text.count("\n", 0, end)
                return [(first and first + skipped, text[end:]), *parts[place + 1 :]]
    return parts


def joined(parts: Sequence[Part]) -> tuple[str, list[tuple[int, int]]]:
    """All parts as one text, and for each part its first line there and in its file."""
    text, starts, line = "", [], 1
    for first, part in parts:
        starts.append((line, first))
        part += "" if part.endswith("\n") else "\n"
        line += part.count("\n")
        text += part
    return text, starts


def numbered(reading: Reading, starts: Sequence[tuple[int, int]]) -> Reading:
    """`reading` with line numbers of the files; 0 after a part of the file that was not read."""

    def moved(cited: Cited) -> Cited:
        at, first = max((one for one in starts if one[0] <= cited.line), default=(1, 0))
        return cited._replace(line=first + cited.line - at if first else 0)

    cause = reading.cause and moved(reading.cause)
    return reading._replace(cause=cause, collateral=tuple(map(moved, reading.collateral)))
