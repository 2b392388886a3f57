"""The correlator's values: an attempt of a job, an event on a node, what a log says, a verdict, a suspicion.

`read_attempt` and `read_event` take the lines of the files of `gpuhealth replay`, of which docs/replay.md is the page.
"""

from __future__ import annotations

from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal

    Cause = Literal["application", "node", "fabric", "infrastructure", "user", "unknown"]
    GpuName = str | int
    """A GPU's UUID, or its index where nothing better is known."""

LATEST = 4_102_444_800.0
"""The year 2100."""
CAUSES = ("application", "node", "fabric", "infrastructure", "user", "unknown")


class Cited(NamedTuple):
    """A line of a log."""

    line: int
    """1-based."""
    text: str
    """At most 500 characters, control characters as `?`."""
    rank: int | None = None
    host: str | None = None
    gpu: int | None = None
    """Local index."""
    time: float | None = None
    """Seconds since the epoch, UTC, where the line has a full date; the clock is the job's."""


class Reading(NamedTuple):
    """What a job's log says by itself. Users write their logs: `node` here never means more than "test it"."""

    verdict: Cause = "unknown"
    confidence: float = 0.0
    kind: str = ""
    """The likelihood table's row: `hardware`, `application`, `communication`, `infrastructure`, `user`, `memory` (host
    OOM), `crash` (a signal without a traceback), `numeric` (NaN or inf), `thermal`; "" nothing useful."""
    cause: Cited | None = None
    collateral: tuple[Cited, ...] = ()
    """Victims: what followed from the first cause, one each rank at most, cut to 20."""
    hosts: tuple[str, ...] = ()
    """What the log singles out, as written there: first to die, missing from a collective, both ends of a reset."""
    rank: int | None = None
    iteration: int | None = None
    error: str = ""
    """The error class: `RuntimeError`, `CUDA error: an illegal memory access`, `NCCL watchdog`."""
    frame: str = ""
    """The innermost frame in the user's own code, `train.py:forward`."""
    fingerprint: str = ""
    """error | frame | message without numbers, addresses, paths, hosts and pids; "" without a cause."""
    evidence: tuple[str, ...] = ()
    """Sentences."""
    advice: str = ""


def to_dict(reading: Reading) -> dict[str, Any]:
    """As JSON has it."""
    cause = reading.cause and reading.cause._asdict()
    return {**reading._asdict(), "cause": cause, "collateral": [one._asdict() for one in reading.collateral]}


def from_dict(row: dict[str, Any]) -> Reading:
    """What to_dict gave. Raises TypeError where it is something else."""
    reading = Reading(**row)
    return reading._replace(
        cause=Cited(**row["cause"]) if row.get("cause") else None,
        collateral=tuple(Cited(**one) for one in row.get("collateral") or ()),
        hosts=tuple(reading.hosts),
        evidence=tuple(reading.evidence),
    )


class Attempt(NamedTuple):
    """One run of a job: a requeued job is several."""

    job: int
    attempt: int
    """Slurm's restart count: 0 first."""
    user: str
    account: str
    name: str
    array: int | None
    state: str
    """Slurm's, its first word: `COMPLETED`, `FAILED`, `TIMEOUT`, `CANCELLED`, `NODE_FAIL`, `OUT_OF_MEMORY`, …"""
    exit_code: int
    signal: int
    start: float
    end: float
    nodes: tuple[str, ...]
    gpus: Mapping[str, tuple[GpuName, ...]] | None = None
    failed_node: str | None = None
    log: str | None = None
    """An excerpt; `log_class` and `reading` say the same in fewer words."""
    log_class: str | None = None
    reading: Reading | None = None
    submit: str = ""
    """A hash of the submit line; "" unknown."""


class Event(NamedTuple):
    """Something that a node said, or that was done to it."""

    time: float
    node: str
    gpu: GpuName | None
    source: str
    """`xid`, `sxid`, `dcgm`, `nvml`, `ib`, `aer`, `host`; `drain` (not ours), `repair`; `test` (`level`, `passed`)."""
    code: str
    severity: str = "info"
    detail: Mapping[str, Any] = {}


class Term(NamedTuple):
    """One piece of evidence in a verdict: a sentence, and its log likelihood under each cause."""

    text: str
    weights: Mapping[str, float]
    """Cause → natural log of the likelihood; of `node` that of the node which the verdict names or would name."""


class Verdict(NamedTuple):
    """What one attempt died of."""

    job: int
    attempt: int
    cause: Cause
    confidence: float
    """The posterior of `cause`; of `unknown`: of the likeliest."""
    node: str | None = None
    gpu: GpuName | None = None
    masses: Mapping[str, float] = {}
    """Cause → posterior, their sum 1."""
    responsible: Mapping[str, float] = {}
    """Node → its share of the blame; what is below .001 is left out."""
    terms: tuple[Term, ...] = ()
    """The strongest first."""
    fingerprint: str = ""
    advice: str = ""


class Suspicion(NamedTuple):
    """How much worse than its peers a node has been for the jobs that ran on it."""

    node: str
    time: float
    p_lemon: float
    hazard_per_day: float
    """Expected failures a day of allocated time."""
    observed: float
    """Failures that are its, by responsibility, decayed."""
    expected: float
    """What a good node would have had in the same time, decayed."""
    rung: str = ""
    """The rung that is due: `L2`, `L3`, `L4`, `RMA`; "" none."""
    users: int = 0
    applications: int = 0
    hard: int = 0
    """Hard events of the node itself (Xid, failed test), not decayed, of the last 28 days."""
    last_test: str = ""
    """`L3 pass 2026-11-20`; "" none known."""
    gpus: Mapping[str, float] = {}
    """GPU → share of the node's suspicion that is tied to it."""
    terms: tuple[str, ...] = ()
    """Sentences."""


CUT = ("CANCELLED", "OUT_OF_MEMORY", "COMPLETED", "COMPLETING", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "DEADLINE")
"""Those that sacct cuts in a narrow column: `CANCELLED+`, `OUT_OF_ME+`."""


def read_attempt(row: Mapping[str, Any]) -> Attempt:
    """A line of JOBS. Raises ValueError, which names the key. Equal names become one object."""
    try:
        gpus = row.get("gpus")
        if gpus is not None and not isinstance(gpus, dict):
            raise TypeError(f"'gpus' is {str(gpus)[:80]!r}, where {{node: [UUID or index, ...]}} belongs")
        return Attempt(
            _whole(row, "job"),
            _whole(row, "attempt", 0),
            intern(str(row.get("user") or "")),
            intern(str(row.get("account") or "")),
            intern(str(row.get("name") or "")),
            _whole(row, "array") if row.get("array") is not None else None,
            _state(row["state"]),
            _whole(row, "exit_code", 0),
            _whole(row, "signal", 0),
            _seconds(row, "start"),
            _seconds(row, "end"),
            tuple(dict.fromkeys(map(_node, _list(row["nodes"])))),
            {node: _one(tuple(map(_gpu, _list(one)))) for node, one in gpus.items()} if gpus else None,
            _text(row.get("failed_node")),
            _text(row.get("log")),
            _text(row.get("log_class")),
            None,
            str(row.get("submit") or ""),
        )
    except KeyError as error:
        raise ValueError(f"no key {error}") from None
    except TypeError as error:
        raise ValueError(f"a value of the wrong kind: {error}") from None


def read_event(row: Mapping[str, Any]) -> Event:
    """A line of EVENTS. Raises ValueError, which names the key."""
    try:
        detail = row.get("detail") or {}
        if not isinstance(detail, dict):
            raise TypeError(f"'detail' is {str(detail)[:80]!r}, where an object belongs")
        if row["source"] == "test" and not (
            detail.get("level") in (1, 2, 3, 4) and isinstance(detail.get("passed"), bool)
        ):
            raise TypeError("'detail' of a test: its 'level' (1 to 4) and 'passed' (true or false) belong there")
        return Event(
            _seconds(row, "time"),
            _node(row["node"]),
            None if row.get("gpu") is None else _gpu(row["gpu"]),
            _node(row["source"]),
            str(row.get("code", ""))[:100],
            str(row.get("severity") or "info"),
            dict(detail),
        )
    except KeyError as error:
        raise ValueError(f"no key {error}") from None
    except TypeError as error:
        raise ValueError(f"a value of the wrong kind: {error}") from None


def _whole(row: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Not what int() takes for one: of an array's task `123_4` it would make job 1234."""
    value = row[key] if default is None else row.get(key)
    if type(value) is int:
        return value
    if value is None and default is not None:
        return default
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    raise TypeError(f"{key!r} is {str(value)[:80]!r}, where a whole number belongs")


def _state(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"'state' is {str(value)[:80]!r}, where Slurm's word belongs")
    word = value.split()[0].upper()
    return next((one for one in CUT if one.startswith(word[:-1])), word) if word.endswith("+") else word


def _seconds(row: Mapping[str, Any], key: str) -> float:
    try:
        time = float(row[key])
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{key!r} is {str(row[key])[:80]!r}, not a number of seconds") from None
    if not -LATEST < time < LATEST:  # nor is NaN; milliseconds are far away
        raise TypeError(f"{key!r}: {time:g} are not the seconds since 1970")
    return time


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:80]!r}, where a list belongs")
    return value


def _node(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{str(value)[:80]!r}, where a name belongs")
    return intern(value)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r}, where a text belongs")
    return value


@lru_cache(maxsize=16384)
def _one(gpus: tuple[GpuName, ...]) -> tuple[GpuName, ...]:
    """The same object for equal ones."""
    return gpus


def _gpu(value: Any) -> Any:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise TypeError(f"{str(value)[:80]!r}, where a GPU's UUID or index belongs")
    return value
