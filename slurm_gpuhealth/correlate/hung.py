"""Whether a job of several GPUs stands still as a whole, since when, and who is different: from what its nodes say.

A node says of its own GPUs that they stand still (measure/hang.py), and can't know whether the job works elsewhere.
Only evidence on a node blames it: the GPU that does not wait with the others may as well
have a program that fell behind.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate import words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slurm_gpuhealth.outcomes import Cause, Event, Flight

TOGETHER = 600.0
"""GPUs that stopped within so many seconds of the median stopped together: checks, and pauses, differ by minutes."""
BEFORE, AFTER = 300.0, 600.0
"""Evidence belongs to the stop if it came so many seconds before or after it. What comes later may be a consequence."""
FIRST = 120.0
"""What came so many seconds before all else came first: checks of one cause on several nodes differ by an interval."""
HARD = frozenset(
    (
        *("nvml:lost", "nvml:count", "nvml:irq", "nvml:power", "nvml:ecc", "nvml:recovery", "nvml:nvlink"),
        *("nvml:remap-fail", "nvml:remap-pend", "driver:hung", "aer:fatal", "aer:nonfatal", "host:memory"),
    )
)
FAULTS = ("xid", "sxid", "nvrm", "site")
"""Sources whose findings speak against the node if policy calls them faults, or if their class is hardware."""
REMAPPED = "xid:63"
"""Of class hardware, but nothing has failed."""
LINK = ("ib:port-down", "ib:port-missing")
SHARED = ("host:hung", "host:mount", "host:read-only")
"""Many tasks in uninterruptible sleep, a mount that is gone: mostly a file system that others wait for too."""
KILLED = "host:oom"
SOFT: Mapping[str, Cause] = {"waits": "infrastructure", "killed": "application"}
SAID = 4
ADVICE: Mapping[str, str] = {
    "node": "requeue the job away from {node}, and test the node: gpuhealth-escalate {node}",
    "fabric": "look at the switch and the cables between its nodes; the job will not go on: end or requeue it",
    "infrastructure": "look at the file systems and services that its nodes share; it may go on once they are back",
    "application": "tell its user: ps, py-spy or gdb show where its ranks are; it holds its GPUs until it is ended",
    "unknown": "see where its ranks are (py-spy dump, gdb, PyTorch's flight recorder){first}; then end or requeue it",
}


class Part(NamedTuple):
    """A node of the job."""

    node: str
    gpus: Mapping[str, int | None]
    """The job's GPUs here: UUID → NVML's index."""
    stands: Mapping[str, tuple[str, float]] = {}
    """Those that stand still: UUID → `spinning` or `idle`, since when."""
    heard: bool = True
    """Its last checks have arrived: if it reports no stop, its GPUs work."""


class Hung(NamedTuple):
    since: float
    kind: str
    """What most of its GPUs do: `spinning` or `idle`."""
    waiting: int
    """GPUs that do that."""
    gpus: int
    different: tuple[tuple[str, str], ...] = ()
    """(node, UUID) of the others."""
    cause: Cause = "unknown"
    node: str | None = None
    """`cause` is `node`: to blame. Otherwise: where to look first."""
    gpu: str | None = None
    why: tuple[str, ...] = ()
    advice: str = ""
    silent: tuple[str, ...] = ()
    """Nodes that have not been heard of lately."""


class Sign(NamedTuple):
    """Evidence on a node."""

    kind: str
    """`hard`, `link`, `waits` or `killed`."""
    node: str
    gpu: str | None
    time: float
    text: str


def judge(
    parts: Sequence[Part], events: Iterable[Event], flight: Flight | None = None, missing: int = 0
) -> Hung | None:
    """None: it works, or that can't be told. `events`: what its nodes found; `missing`: nodes without any record."""
    stands = {(part.node, uuid): told for part in parts for uuid, told in part.stands.items()}
    everyone = [(part.node, uuid) for part in parts for uuid in part.gpus]
    if len(everyone) < 2 or not stands:
        return None
    since = median(when for _, when in stands.values())
    together = sum(abs(when - since) <= TOGETHER for _, when in stands.values())
    if 2 * together * len(parts) <= len(everyone) * (len(parts) + missing):  # as many GPUs on the missing nodes
        return None
    spins = sum(kind == "spinning" for kind, _ in stands.values())
    kind = "spinning" if 2 * spins > len(stands) else "idle"
    signs = sorted(_signs(parts, events, since), key=lambda one: one.time)
    works = [part.node for part in parts if not part.stands and part.heard]
    waiting = [one for one, (does, _) in stands.items() if does == kind]
    silent = tuple(part.node for part in parts if not part.stands and not part.heard)
    different = tuple(one for one in everyone if one not in waiting and one[0] not in silent)
    blamed = [one.node for one in signs if one.kind == "hard"][:1]
    if works and not {node for node, _ in different} == {*works} == {*blamed}:
        return None  # an evaluation or a checkpoint there keeps the others waiting
    told = Hung(since, kind, len(waiting), len(everyone), different, silent=silent)
    return _verdict(told, signs, flight, {uuid: index for part in parts for uuid, index in part.gpus.items()}, missing)


def _verdict(
    told: Hung, signs: Sequence[Sign], flight: Flight | None, numbers: Mapping[str, int | None], missing: int
) -> Hung:
    odd = {node for node, _ in told.different}
    lone = told.different[0][1] if len(told.different) == 1 else None
    said = [f"{_place(one.node, one.gpu, numbers)}: {one.text}, {_when(one.time - told.since)}" for one in signs[:SAID]]
    if told.different and told.kind == "spinning":
        where = _place(told.different[0][0], lone, numbers) if len(odd) == 1 else f"{len(odd)} nodes"
        count = "1 GPU does" if lone else f"{len(told.different)} GPUs do"
        said.append(f"{count} not wait as the others do: {where}")
    named = _named(flight) if flight else None
    if flight and flight.found:
        said.append(f"flight recorder: {flight.found} in {flight.op}" + (f", {named}" if named else ""))
    said += [f"{node} has not been heard of lately" for node in told.silent[:SAID]]
    said += [f"{missing} of its nodes have shipped nothing about it"] if missing else []
    cause, node, gpu = _blame(told, signs, flight, odd)
    if cause == "unknown":
        places = odd if odd and told.kind == "spinning" else {*told.silent} or {*filter(None, (named,))}
        node = next(iter(places)) if len(places) == 1 else None
        gpu = lone if node in odd else None
    elif cause == "application" and not signs and not flight:
        said.append("all its GPUs are idle, and no node reports trouble: it waits for itself, for data or for its user")
    advice = ADVICE[cause].format(node=node, first=f", first on {_place(node, gpu, numbers)}" if node else "")
    return told._replace(cause=cause, node=node, gpu=gpu, why=tuple(said), advice=advice)


def _blame(
    told: Hung, signs: Sequence[Sign], flight: Flight | None, odd: set[str]
) -> tuple[Cause, str | None, str | None]:
    """The cause; the node, and its GPU, that the evidence names."""
    found = flight.found if flight else ""
    if found in ("mismatch", "circle"):
        return "application", None, None
    hard = [one for one in signs if one.kind in ("hard", "link")]
    linked = {one.node for one in hard if one.kind == "link"}
    if len(linked) > 1 and linked == {one.node for one in hard}:
        return "fabric", None, None
    if hard:
        first = hard[0]
        others = [one.time for one in hard if one.node != first.node]
        named = _named(flight) if flight else None
        # Who is different, or never entered the collective, contradicts evidence on another node.
        against = (odd and first.node not in odd) or (named and named != _short(first.node))
        if against or (others and others[0] - first.time < FIRST):
            return "unknown", None, None
        return "node", first.node, next((one.gpu for one in hard if one.node == first.node and one.gpu), None)
    for kind, cause in SOFT.items():
        nodes = {one.node for one in signs if one.kind == kind}
        if nodes:
            return cause, next(iter(nodes)) if len(nodes) == 1 else None, None
    if told.kind == "idle" and told.waiting == told.gpus and not found:
        return "application", None, None
    return "unknown", None, None


def _signs(parts: Sequence[Part], events: Iterable[Event], since: float) -> Iterable[Sign]:
    held = {part.node: part.gpus for part in parts}
    for one in events:
        ours = one.node in held and (one.gpu is None or one.gpu in held[one.node])
        if ours and -BEFORE <= one.time - since <= AFTER and not one.detail.get("old") and (kind := _kind(one)):
            gpu = None if one.gpu is None else str(one.gpu)
            text = str(one.detail.get("message") or "")[:120]
            yield Sign(kind, one.node, gpu, one.time, f"{one.source}:{one.code}" + (f" ({text})" if text else ""))


def _kind(one: Event) -> str:
    key = f"{one.source}:{one.code}"
    if key in LINK:
        return "link"
    if key in HARD:
        return "hard"
    if one.source in FAULTS and key != REMAPPED:
        class_ = one.detail.get("class")
        if class_ != "application" and (
            one.severity == "fault" or (class_ == "hardware" and one.severity == "warning")
        ):
            return "hard"
    return "waits" if key in SHARED else "killed" if key == KILLED else ""


def _named(flight: Flight) -> str | None:
    """The host of the ranks that never entered the collective."""
    hosts = {_short(host) for host in flight.hosts}
    return next(iter(hosts)) or None if flight.found == "absent" and len(hosts) == 1 else None


def _short(host: str) -> str:
    return host.partition(".")[0]


def _place(node: str | None, gpu: str | None, numbers: Mapping[str, int | None]) -> str:
    return words.place(node, gpu, numbers.get(gpu) if gpu else None)


def _when(seconds: float) -> str:
    minutes = round(abs(seconds) / 60)
    return "when it stopped" if not minutes else f"{minutes} min {'before' if seconds < 0 else 'after'} it stopped"
