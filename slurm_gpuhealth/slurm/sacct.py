"""Reads Slurm's accounting through its own programs: `sacct` for jobs that ended, `sacctmgr` for drains and downs.

Users choose job names and submit lines, admins reasons: they may have newlines, `|` or a text like a row. So a row
begins and ends with its job's number, and a random word, new for each question, separates its fields. Measured on 22.05
to 26.05; samples: tests/corpus/slurm.
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
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.control import NO_ANSWER, ControllerDown, NoProgram, Refused, SlurmError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from slurm_gpuhealth.config.settings import Settings

STATES = "BF,CA,CD,DL,F,NF,OOM,PR,RQ,TO"
"""All states in which a run has ended. Not RS: a job that changes its size continues."""
FIELDS = (
    *("JobIDRaw", "JobID", "Cluster", "Partition", "User", "UID", "Account", "State", "ExitCode", "DerivedExitCode"),
    *("Start", "End", "AllocTRES", "NodeList", "QOS", "Reservation", "TimelimitRaw", "Constraints"),
)
NEWER = ("FailedNode", "Restarts")
"""From 24.11 on; an older sacct gives an error for them."""
HOSTILE = ("JobName", "SubmitLine")
EVENT_FIELDS = ("Cluster", "TimeStart", "TimeEnd", "State", "User", "Reason", "NodeName")
"""sacctmgr prints a field only once, even if it is asked for twice: so only the node's name marks the end of a row."""
EVENT = re.compile(r"([^|\s]*)\|(\d+)\|(\d+|Unknown)\|([A-Z_+]*)[^|A-Z]*\|([^|\n]*)\|")
NODE = re.compile(r"\|([\w.-]{0,64})\n?\Z", re.ASCII)
LIMIT = 64 << 20
"""The most bytes of one answer: 200,000 jobs. If there are more, we ask for each half of the time."""
MAX_NAME = 256
MAX_WORD = 64
"""The most characters of a reservation or a constraint."""
ENDLESS = 365 * 1440
"""Minutes. Slurm prints a year for a requeued job without a limit (22.05, 25.11, 26.05); sbatch takes 4,000 years."""
LONGEST = 2048
"""The most characters of an event's row: a broken row must not swallow the next ones."""
SIGNALS = frozenset({4, 6, 7, 8, 9, 11, 15})
"""22.05 and 24.11 print only the last seven bits of an exit code: a shell's 128 + n becomes n."""
OOM = 125
"""Slurm's "signal" of a step whose memory ran out."""


class Ended(NamedTuple):
    """A run of a job that has ended, as accounting has it."""

    attempt: Attempt
    """Its number is 0; `accounting.py` numbers the attempts."""
    cluster: str
    gpus: int
    """How many GPUs it held on all its nodes; also 0 if AccountingStorageTRES lacks gres/gpu."""
    restarts: int | None
    """Slurm's count of restarts, if it gives one."""


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
    """The runs that ended in since ≤ t < until and had begun, by their start. Unreadable rows are logged and left out.

    `jobs`: only these jobs, and the arrays with these numbers; (): all jobs. Raises control.SlurmError.
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
    if any(map(_has_failed, rows)) and _has_expedited(settings):
        rows = [one._replace(attempt=one.attempt._replace(state="FAILED")) if _has_failed(one) else one for one in rows]
    return sorted((row for row in rows if since <= row.attempt.end < until), key=lambda row: row.attempt.start)


def _has_failed(row: Ended) -> bool:
    """Whether a REQUEUED run has failed first, if nothing but --requeue=expedite requeues for an exit code."""
    return row.attempt.state == "REQUEUED" and row.attempt.exit_code != 0


def _has_expedited(settings: Settings) -> bool:
    """Whether Slurm has jobs of --requeue=expedite: it calls each of their failed runs REQUEUED (26.05)."""
    try:
        config = control.config(settings.slurm)
    except SlurmError:
        return False
    codes = config.get("RequeueExit", ()) + config.get("RequeueExitHold", ())  # these codes ask to be requeued
    return "enable_expedited_requeue" in ",".join(config.get("SlurmctldParameters", ())) and not any(codes)


def noted(settings: Settings, since: float, until: float) -> list[Noted]:
    """Drains, downs and fails of nodes that had not ended before `since`. Raises control.SlurmError."""
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
    """The output of `sacct -D -X -P` for `fields` and JobIDRaw once more: jobs, and what is wrong with other rows."""
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
    """The output of `sacctmgr -n -P show event` for EVENT_FIELDS, and unreadable rows. The cluster's own events, which
    name no node, are left out. A reason may have newlines, but only admins write reasons, so forgery is no concern.
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
    """A hostlist's nodes; empty for `None assigned`."""
    if not text or " " in text:
        return ()
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # type: ignore[import-untyped]

    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ValueError(f"nodes: {error}") from None


def job_state(text: str, derived: tuple[int, int]) -> str:
    """Slurm's state in one word; a job that failed because a step ran out of memory is OUT_OF_MEMORY."""
    state = text.split()[0] if text.split() else ""
    return "OUT_OF_MEMORY" if state == "FAILED" and derived[1] == OOM else state


def unmasked(code: tuple[int, int], derived: tuple[int, int]) -> tuple[int, int]:
    """Exit code and signal. 11:0 becomes 139:0 if a step died of signal 11: the script returned the step's code."""
    if code[0] in SIGNALS and not code[1] and derived[1] == code[0]:
        return 128 + code[0], 0
    return code


def stamp(when: float) -> str:
    """A time as sacct and sacctmgr take it, under TZ=UTC, in which no hour comes twice."""
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
    if any(words in error for words in (*NO_ANSWER, "slurmdbd")):  # then sacctmgr exits 0 without output
        raise ControllerDown(f"{what}: {error}")
    if done.rc:
        raise Refused(what, done.rc, error)
    if len(done.stdout) >= LIMIT:
        raise TooMuch(what)
    return done.stdout.decode("utf-8", "replace").replace("\0", "?")  # PostgreSQL refuses NUL


def _fields(settings: Settings, sacct: str) -> frozenset[str]:
    """The fields that this sacct knows; it is asked once."""
    if sacct not in _known:
        _known[sacct] = frozenset(ask(settings, [sacct, "-e"]).split())
    return _known[sacct]


_known: dict[str, frozenset[str]] = {}


def _ended(cell: Mapping[str, str]) -> Ended | None:
    """A row's job; None if it never began. Raises ValueError."""
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
        int(array) if task else None, job_state(cell["State"], derived), code, signal,
        min(start, end), end, nodes, failed_node=failed if failed in nodes else None, submit=hashed(line),
        partition=cell["Partition"], qos=cell["QOS"], reservation=cell["Reservation"][:MAX_WORD],
        timelimit=limit_of(cell["TimelimitRaw"]), constraint=cell["Constraints"][:MAX_WORD],
    )  # fmt: skip
    restarts = cell.get("Restarts", "")
    return Ended(attempt, cell["Cluster"], gpus_of(cell["AllocTRES"]), int(restarts) if restarts.isdigit() else None)


def limit_of(minutes: str) -> float | None:
    """A time limit in seconds; None for `UNLIMITED` and `Partition_Limit`."""
    limit = int(minutes) if minutes.isdigit() else 0
    return limit * 60.0 if 0 < limit < ENDLESS else None


def hashed(line: str) -> str:
    """A submit line as 16 characters; "" stays."""
    return hashlib.sha256(line.encode("utf-8", "replace")).hexdigest()[:16] if line else ""


def _code(text: str) -> tuple[int, int]:
    """`3:0` → (3, 0); (0, 0) if there is none."""
    code, _, signal = text.partition(":")
    return int(code or 0), int(signal or 0)


def _pieces(text: str) -> Iterator[str]:
    """The rows of sacctmgr. A row has several lines if its reason has newlines. All rows are of one cluster."""
    cluster, piece = text.partition("|")[0] + "|", ""
    for line in text.splitlines(keepends=True):
        if line.startswith(cluster) and EVENT.match(line) and (NODE.search(piece) or len(piece) > LONGEST):
            yield piece
            piece = line
        else:
            piece += line
    if piece.strip():
        yield piece
