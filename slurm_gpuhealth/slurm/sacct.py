"""Slurm's accounting read through its own programs: `sacct` for jobs that ended, `sacctmgr` for drains and downs.

Job names and submit lines are the users', reasons the admins': newlines, `|` and imitations of a row included. A row
begins and ends with its own number, and its fields are parted by a word that is drawn anew for each question. Measured
on 22.05 to 26.05; samples: tests/corpus/slurm.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth import child
from slurm_gpuhealth.outcomes import Attempt
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm.control import NO_ANSWER, ControllerDown, NoProgram, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from slurm_gpuhealth.config.settings import Settings

STATES = "BF,CA,CD,DL,F,NF,OOM,PR,RQ,TO"
"""All ends of a run. Not RS: a job that changes its size goes on."""
FIELDS = (
    *("JobIDRaw", "JobID", "Cluster", "Partition", "User", "UID", "Account", "State", "ExitCode", "DerivedExitCode"),
    *("Start", "End", "AllocTRES", "NodeList"),
)
NEWER = ("FailedNode", "Restarts")
"""From 24.11 on; asking an older sacct for them is an error."""
HOSTILE = ("JobName", "SubmitLine")
EVENT_FIELDS = ("Cluster", "TimeStart", "TimeEnd", "State", "User", "Reason", "NodeName")
"""sacctmgr prints a field that is named twice but once: the node's name at the end alone has to close the row."""
EVENT = re.compile(r"([^|\s]*)\|(\d+)\|(\d+|Unknown)\|([A-Z_+]*)[^|A-Z]*\|([^|\n]*)\|")
NODE = re.compile(r"\|([\w.-]{0,64})\n?\Z", re.ASCII)
LIMIT = 64 << 20
"""Bytes of one answer that we hold: 200,000 jobs. A longer one is asked for in halves."""
MAX_NAME = 256
LONGEST = 2048
"""Characters of an event's row: a broken one must not swallow those that follow."""
SIGNALS = frozenset({4, 6, 7, 8, 9, 11, 15})
"""What a shell's exit code of 128 + n looks like in 22.05 and 24.11, which print only its last seven bits."""
OOM = 125
"""Slurm's "signal" of a step whose memory ran out."""


class Ended(NamedTuple):
    """A run of a job that has ended, as accounting has it."""

    attempt: Attempt
    """Its number is 0: `accounting.py` counts."""
    cluster: str
    partition: str
    gpus: int
    """How many it held, over all its nodes; 0 too where AccountingStorageTRES lacks gres/gpu."""
    restarts: int | None
    """What Slurm calls it, where it says so."""


class Noted(NamedTuple):
    """A node's drain, down or fail."""

    cluster: str
    node: str
    start: float
    end: float | None
    """None: it lasts."""
    state: str
    """`DRAIN`, `DOWN`, `FAIL`, without Slurm's marks."""
    user: str
    reason: str
    """slurmdbd keeps 255 bytes."""


class TooMuch(Exception):
    """The answer is longer than LIMIT."""


def ended(settings: Settings, since: float, until: float, jobs: Sequence[int] = ()) -> list[Ended]:
    """What ended in since ≤ t < until and had begun, by its start. A row that can't be read is said and left out.

    Of `jobs`, and of the arrays whose number that is; (): of all. Raises control.SlurmError.
    """
    sacct = settings.accounting.sacct
    known = _fields(settings, sacct)
    fields = [*FIELDS, *(name for name in NEWER if name in known), *(name for name in HOSTILE if name in known)]
    delimiter = secrets.token_hex(8)
    argv = [sacct, "--local", "-a", "-D", "-X", "-P", "-n", f"--delimiter={delimiter}", "-s", STATES]
    argv += ["-j", ",".join(map(str, jobs))] if jobs else []
    argv += ["-S", stamp(math.floor(since)), "-E", stamp(math.ceil(until)), "-o", ",".join([*fields, "JobIDRaw"])]
    try:
        text = ask(settings, argv)
    except TooMuch:
        if until - since < 2:
            raise Refused(" ".join(argv), 0, f"more than {LIMIT} bytes for one second") from None
        middle = math.floor((since + until) / 2)
        return ended(settings, since, middle, jobs) + ended(settings, middle, until, jobs)
    rows, bad = read_jobs(text, delimiter, fields)
    if bad:
        say(f"sacct: {len(bad)} of the jobs of {stamp(since)} can't be read and are left out; the first: {bad[0]}")
    return sorted((row for row in rows if since <= row.attempt.end < until), key=lambda row: row.attempt.start)


def noted(settings: Settings, since: float, until: float) -> list[Noted]:
    """What was noted of nodes and had not ended before `since`. Raises control.SlurmError."""
    argv = [settings.accounting.sacctmgr, "-n", "-P", "show", "event", f"Start={stamp(since)}", f"End={stamp(until)}"]
    try:
        text = ask(settings, [*argv, f"format={','.join(EVENT_FIELDS)}"])
    except TooMuch:
        middle = math.floor((since + until) / 2)
        both = noted(settings, since, middle) + noted(settings, middle, until) if until - since >= 2 else []
        return list(dict.fromkeys(both))
    rows, bad = read_events(text)
    if bad:
        say(f"sacctmgr: {len(bad)} events of nodes can't be read and are left out; the first: {bad[0]}")
    return rows


def read_jobs(text: str, delimiter: str, fields: Sequence[str]) -> tuple[list[Ended], list[str]]:
    """What `sacct -D -X -P` printed of `fields` and JobIDRaw once more: jobs, and what is wrong with the others."""
    rows, bad = [], []
    begin = re.compile(rf"^(?=\d+{re.escape(delimiter)})", re.MULTILINE)
    for piece in filter(None, begin.split(text)):
        cells = piece.split(delimiter)
        try:
            if len(cells) != len(fields) + 1 or cells[-1].strip() != cells[0]:
                raise ValueError("not one row")
            row = _ended(dict(zip(fields, cells)))
        except ValueError as error:
            bad.append(f"{error}: {piece.replace(delimiter, '|')[:200]!r}")
            continue
        if row:
            rows.append(row)
    return rows, bad


def read_events(text: str) -> tuple[list[Noted], list[str]]:
    """What `sacctmgr -n -P show event` printed of EVENT_FIELDS, and what can't be read; the cluster's own events, which
    name no node, are left out. A reason may hold newlines, and only an admin's can: it is not worth a forger's while.
    """
    rows, bad = [], []
    for piece in _pieces(text):
        match, node = EVENT.match(piece), NODE.search(piece)
        if not match or not node or node.start() < match.end() - 1:
            bad.append(repr(piece[:200]))
        elif node[1]:
            end = None if match[3] == "Unknown" else float(match[3])
            user, reason = match[5].partition("(")[0], piece[match.end() : node.start()]
            rows.append(Noted(match[1], node[1], float(match[2]), end, match[4], user, reason))
    return rows, bad


def gpus_of(tres: str) -> int:
    """`cpu=2,gres/gpu:h100=4,gres/gpu=4` → 4."""
    counts = [word.partition("=")[::2] for word in tres.split(",") if word.startswith("gres/gpu")]
    whole = [count for name, count in counts if name == "gres/gpu"]
    typed = [count for name, count in counts if name.startswith("gres/gpu:")]
    return sum(int(count) for count in whole or typed if count.isdigit())


@lru_cache(maxsize=1 << 14)
def nodes_of(text: str) -> tuple[str, ...]:
    """A hostlist's nodes; none for `None assigned`."""
    if not text or " " in text:
        return ()
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # type: ignore[import-untyped]

    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ValueError(f"nodes: {error}") from None


def job_state(text: str, code: tuple[int, int], derived: tuple[int, int]) -> str:
    """Slurm's state in one word; a job that failed for a step's memory is OUT_OF_MEMORY, as one of the script's is.

    REQUEUED with an exit code has FAILED first: so is every failed run of --requeue=expedite (26.05).
    """
    state = text.split()[0] if text.split() else ""
    if state == "REQUEUED" and code[0]:
        state = "FAILED"
    return "OUT_OF_MEMORY" if state == "FAILED" and derived[1] == OOM else state


def unmasked(code: tuple[int, int], derived: tuple[int, int]) -> tuple[int, int]:
    """Exit code and signal, 11:0 read as 139:0 where a step died of signal 11: the script handed its code on."""
    if code[0] in SIGNALS and not code[1] and derived[1] == code[0]:
        return 128 + code[0], 0
    return code


def stamp(when: float) -> str:
    """What sacct and sacctmgr take for a time, under TZ=UTC: no hour comes twice."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when))


def ask(settings: Settings, argv: Sequence[str]) -> str:
    """The program's standard output. Raises control.SlurmError, or TooMuch."""
    timeout = settings.accounting.timeout
    env = {"SLURM_CONF": settings.slurm.conf, "SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}
    done = child.run(argv, timeout=timeout, env=env, limit=LIMIT)
    what, error = " ".join(argv), done.stderr.decode("utf-8", "replace").strip()
    if done.timed_out or done.rc is None:
        whose = "slurmctld" if argv[0] == settings.slurm.scontrol else "slurmdbd"
        raise ControllerDown(
            f"{what}: no answer in {timeout:g} s: is {whose} up ([accounting] timeout)? {error}".strip()
        )
    if done.rc in (126, 127):
        table = "slurm" if argv[0] == settings.slurm.scontrol else "accounting"
        raise NoProgram(f"{error}: set its path in the table [{table}] of gpuhealth.toml")
    if any(words in error for words in (*NO_ANSWER, "slurmdbd")):  # sacctmgr then exits 0 with nothing
        raise ControllerDown(f"{what}: {error}")
    if done.rc:
        raise Refused(what, done.rc, error)
    if len(done.stdout) >= LIMIT:
        raise TooMuch(what)
    return done.stdout.decode("utf-8", "replace").replace("\0", "?")  # which PostgreSQL would refuse


def _fields(settings: Settings, sacct: str) -> frozenset[str]:
    """The fields that this sacct knows; asked once."""
    if sacct not in _known:
        _known[sacct] = frozenset(ask(settings, [sacct, "-e"]).split())
    return _known[sacct]


_known: dict[str, frozenset[str]] = {}


def _ended(cell: Mapping[str, str]) -> Ended | None:
    """A row's job; None for one that never began. Raises ValueError."""
    nodes = nodes_of(cell["NodeList"])
    if not nodes or not cell["Start"].isdigit() or not cell["End"].isdigit():
        return None
    start, end = float(cell["Start"]), float(cell["End"])
    derived = _code(cell["DerivedExitCode"])
    code, signal = unmasked(_code(cell["ExitCode"]), derived)
    array, task, _ = cell["JobID"].partition("_")
    failed, line = cell.get("FailedNode", ""), cell.get("SubmitLine", "")
    attempt = Attempt(
        int(cell["JobIDRaw"]), 0, cell["User"] or cell["UID"], cell["Account"], cell["JobName"][:MAX_NAME],
        int(array) if task else None, job_state(cell["State"], (code, signal), derived), code, signal,
        min(start, end), end, nodes, failed_node=failed if failed in nodes else None, submit=hashed(line),
    )  # fmt: skip
    restarts = cell.get("Restarts", "")
    return Ended(
        attempt, cell["Cluster"], cell["Partition"], gpus_of(cell["AllocTRES"]),
        int(restarts) if restarts.isdigit() else None,
    )  # fmt: skip


def hashed(line: str) -> str:
    """A submit line as 16 characters; "" stays."""
    return hashlib.sha256(line.encode("utf-8", "replace")).hexdigest()[:16] if line else ""


def _code(text: str) -> tuple[int, int]:
    """`3:0` → (3, 0); a step's or job's that has none: (0, 0)."""
    code, _, signal = text.partition(":")
    return int(code or 0), int(signal or 0)


def _pieces(text: str) -> Iterator[str]:
    """The rows of sacctmgr, each with the lines that a reason's newlines made of it. All are of one cluster."""
    cluster, piece = text.partition("|")[0] + "|", ""
    for line in text.splitlines(keepends=True):
        if line.startswith(cluster) and EVENT.match(line) and (NODE.search(piece) or len(piece) > LONGEST):
            yield piece
            piece = line
        else:
            piece += line
    if piece.strip():
        yield piece
