"""How jobs end, and why: an attempt of a job, an event on a node, what a log says, a verdict, a suspicion."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal

    Cause = Literal["application", "node", "fabric", "infrastructure", "user", "unknown"]
    GpuName = str | int
    """A GPU's UUID, or its index if the UUID is not known."""

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
    """Seconds since the epoch, UTC, if the line has a full date; by the job's clock."""


class Flight(NamedTuple):
    """What dumps of PyTorch's flight recorder say together: the call that a job hangs in."""

    found: str = ""
    """`absent`: `ranks` never made it. `mismatch`: `ranks` made another call. `stuck`: all made it. `circle`: `ranks`
    never made it and wait in another call. `unclear`: dumps are missing. "": no rank waits."""
    op: str = ""
    """`all_reduce`; `send/recv 3->4` with the job's ranks."""
    other: str = ""
    """What `ranks` called instead."""
    group: str = ""
    """The process group, `0 (default_pg)`."""
    seq: int | None = None
    size: int = 0
    """Ranks of the group."""
    waiting: int = 0
    since: float | None = None
    """Seconds since the epoch: the first rank entered it, by its own clock."""
    ranks: tuple[int, ...] = ()
    """At most 64."""
    silent: tuple[int, ...] = ()
    """Ranks of the group without a dump, if they are few."""
    hosts: tuple[str, ...] = ()
    """Of each of `ranks` and then `silent`; "": not known."""
    frame: str = ""
    """Where the user's own code made the call, `train.py:forward`."""
    dumps: int = 0
    world: int = 0
    """Ranks that the dumps know of."""
    unread: tuple[str, ...] = ()
    """`NAME: why`, the first 8."""


class Reading(NamedTuple):
    """What a job's log says by itself. Users write their logs, so `node` here never means more than "test it"."""

    verdict: Cause = "unknown"
    confidence: float = 0.0
    kind: str = ""
    """The likelihood table's row: `hardware`, `application`, `communication`, `infrastructure`, `user`, `memory` (host
    OOM), `crash` (a signal without a traceback), `numeric` (NaN or inf), `thermal`; "" nothing useful."""
    cause: Cited | None = None
    collateral: tuple[Cited, ...] = ()
    """Victims: consequences of the first cause, at most one per rank, at most 20."""
    hosts: tuple[str, ...] = ()
    """Hosts that the log singles out, as written there: first to die, missing from a collective, ends of a reset."""
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
    flight: Flight | None = None


class Attempt(NamedTuple):
    """One run of a job; a requeued job has several."""

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
    """An excerpt; `log_class` and `reading` are shorter forms of it."""
    log_class: str | None = None
    reading: Reading | None = None
    submit: str = ""
    """A hash of the submit line; "" unknown."""
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    timelimit: float | None = None
    """In seconds; None: unknown, or none."""
    constraint: str = ""
    """What the user asked of a node, as `--constraint` has it."""


class Event(NamedTuple):
    """Something that a node reported, or that was done to it."""

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
    """Cause → natural log of the likelihood; for `node`: of the node that the verdict names or would name."""


class Verdict(NamedTuple):
    """What one attempt died of."""

    job: int
    attempt: int
    cause: Cause
    confidence: float
    """The posterior probability of `cause`; for `unknown`, of the likeliest cause."""
    node: str | None = None
    gpu: GpuName | None = None
    masses: Mapping[str, float] = {}
    """Cause → posterior probability; their sum is 1."""
    responsible: Mapping[str, float] = {}
    """Node → its share of the blame; shares below .001 are left out."""
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
    """The node's failures, weighted by its share of the blame, decayed."""
    expected: float
    """The failures that a good node would have had in the same time, decayed."""
    rung: str = ""
    """The rung that is due: `L2`, `L3`, `L4`, `RMA`; "" none."""
    users: int = 0
    applications: int = 0
    hard: int = 0
    """Hard events of the node itself (Xid, failed test) in the last 28 days, not decayed."""
    last_test: str = ""
    """`L3 pass 2026-11-20`; "" none known."""
    gpus: Mapping[str, float] = {}
    """GPU → its share of the node's suspicion."""
    terms: tuple[str, ...] = ()
    """Sentences."""
