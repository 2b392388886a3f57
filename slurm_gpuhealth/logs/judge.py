"""Judges a log as a whole from its lines that report failures: first cause, victims, rank and host."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from slurm_gpuhealth.logs import known as logs_known
from slurm_gpuhealth.logs import line, python
from slurm_gpuhealth.logs.scan import KILLED
from slurm_gpuhealth.outcomes import Cited, Reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from slurm_gpuhealth.logs.scan import Hit

    Map = dict[str, str]
    """Rank → host, IP → host (what a log says of itself), and `world` → number of ranks."""

SURE = 0.8
"""A failure of at least this confidence outranks less certain ones, wherever it stands in the log."""
BAND = 0.2
"""Among less certain failures, the earliest whose confidence is this close to the highest is taken."""
CAP = {"node": 0.85}
FAINT = 0.2
"""Words of this confidence say only that something failed."""
COLLATERAL = 20
SHORTLY = 8
"""Lines."""
LISTED = r"[\[{(]?(\d{1,6}(?: ?, ?\d{1,6}){0,200})[\]})]?"
MISSING = re.compile(
    rf"[Mm]issing [Rr]anks?:? {LISTED}"
    rf"|[Rr]anks? {LISTED} (?:did not (?:join|call|enter|respond)|didn't join|(?:has|have) not joined"
    rf"|failed to (?:pass|join)|never (?:joined|entered)|(?:is|are) missing)"
    rf"|(?:[Ww]aiting for|did not hear from|no response from)[\w /]{{0,20}} ranks? {LISTED}"
)
NRANKS = re.compile(rb"([A-Za-z][\w.-]{0,62}):\d+:\d+ \[\d+\] NCCL INFO [^\n]{0,200}?\brank (\d+) nranks (\d+)")
OWN_IP = re.compile(
    rb"([A-Za-z][\w.-]{0,62}):\d+:\d+ \[\d+\] NCCL INFO (?:Bootstrap : Using|NET/(?:IB|Socket) :)"
    rb"[^\n]{0,300}?[\w.]+:(\d+\.\d+\.\d+\.\d+)<"
)
HOSTRANK = re.compile(rb"host +: ([A-Za-z][\w.-]{0,62})\s{1,40}rank +: (\d+)")
NODERANK = re.compile(rb"Rank (\d+), node ([A-Za-z][\w.-]{0,62}), device")
WORLD = re.compile(rb"world[_ ]size[=: ]{1,3}(\d+)", re.I)
WAITED = ("NCCL watchdog", "coordination service")
WORDS = {
    "application": "the program or its input",
    "node": "a node's hardware",
    "fabric": "the network between nodes",
    "infrastructure": "something that the cluster provides",
    "user": "a cancellation, a time limit or preemption",
    "unknown": "something that the log does not tell",
}


def ranks(low: bytes, block: bytes) -> Map:
    """Which host a rank or an address is on, if the log says so."""
    told: Map = {}
    if b"nranks" in low:
        for host, rank, world in NRANKS.findall(block):
            told[rank.decode()], told["world"] = host.decode(), world.decode()
    if b"nccl info" in low:
        told.update((ip.decode(), host.decode()) for host, ip in OWN_IP.findall(block))
    if b"host " in low and b"rank " in low:
        told.update((rank.decode(), host.decode()) for host, rank in HOSTRANK.findall(block))
    if b", node " in low:
        told.update((rank.decode(), host.decode()) for rank, host in NODERANK.findall(block))
    if b"world" in low and "world" not in told:
        found = WORLD.search(block)
        told.update({"world": found[1].decode()} if found else {})
    return told


def judge(hits: Sequence[Hit], told: Map, hosts: Sequence[str] = (), files: Sequence[str] = ()) -> Reading:
    """What all hits of a job say together. There is at least one hit."""
    cause = first_cause(hits)
    known = cause.known
    named, why = culprits(cause, hits, told, hosts)
    victims = _victims(cause, hits)
    rank = cause.said.rank
    iteration = line.ITERATION.search(cause.said.shown)
    confidence = min(known.confidence + _agreement(cause, hits), CAP.get(known.cause, 0.95))
    if known.cause == "unknown":
        confidence = min(confidence, 0.5)
    where = f" of {files[cause.file]}" if len(files) > 1 else ""
    evidence = [f"line {cause.at}{where} is the first cause: {cause.error} ({known.source})"] if cause.at else []
    evidence += [f"the innermost frame of the user's code is {cause.frame}"] if cause.frame else []
    evidence += why
    if known.role == "weak":
        evidence = ["no known failure, only a hint; good runs can print it too"]
    if known.role == "cascade":
        evidence.append("the log does not say what came first: ranks print this when another rank has died")
    away = len({victim.said.rank for victim in victims if victim.said.rank is not None} - {rank})
    if victims:
        whom = f"{away} other rank{'s' * (away != 1)} and {len(victims)} lines" if away else f"{len(victims)} lines"
        evidence.append(f"{whom} are taken as its consequences")
    return Reading(
        known.cause,
        round(confidence, 2),
        known.kind,
        _cited(cause, told),
        tuple(_cited(victim, told) for victim in _each_rank(victims)),
        tuple(named),
        rank,
        int(iteration[1]) if iteration else None,
        cause.error,
        cause.frame,
        python.fingerprint(cause.error, cause.frame, cause.said.message),
        tuple(evidence),
        logs_known.table().advice[known.advice],
    )


def first_cause(hits: Sequence[Hit]) -> Hit:
    """The hit that the job died of: the earliest certain one, else the earliest possible cause, else the earliest
    message of a surviving rank. If there is none of these: words that hint at a cause.

    A failure that the job survived counts only if there is nothing else.
    A stop by Slurm or by the user counts only if nothing had gone wrong before.
    """
    cascade = [hit for hit in hits if hit.known.role == "cascade"]
    first = [hit for hit in hits if hit.known.role == "first"]
    stopped = any(hit.known.cause == "user" for hit in cascade)
    first = [hit for hit in first if not hit.survived] or ([] if stopped else first)
    if not first:
        weak = _hints(hits)
        if weak and not cascade:
            return _by_words(weak)
        said = [hit for hit in cascade if hit.known.cause != "user"] or _killed_before(cascade, hits) or cascade
        said = said or [hit for hit in hits if hit.known.role != "weak"] or list(hits)
        best = max(hit.known.confidence for hit in said)
        return _earliest(hit for hit in said if hit.known.confidence >= best)
    sure = [hit for hit in first if hit.known.confidence >= SURE]
    best = max(hit.known.confidence for hit in first)
    cause = _earliest(sure or [hit for hit in first if hit.known.confidence > best - BAND])
    if cause.known.cause == "user":
        before = [hit for hit in first if hit.known.cause != "user" and hit.known.confidence > _doubt(hit)]
        before = [hit for hit in before if _order(hit) < _order(cause)]
        cause = _earliest(before) if before else cause
    return cause


def _killed_before(stops: Sequence[Hit], hits: Sequence[Hit]) -> list[Hit]:
    """Processes that had ended before Slurm or a launcher stopped the rest."""
    first = min(map(_order, stops), default=(False, -1, 0))
    return [hit for hit in hits if hit.error == KILLED and _order(hit) < first]


def _doubt(hit: Hit) -> float:
    """Heat, or what people write about a machine, does not explain why a job was stopped."""
    return 0.65 if hit.known.cause == "node" else 0.5


def _hints(hits: Sequence[Hit]) -> list[Hit]:
    """Words that hint at a cause. If the log tells of the job's end: only those shortly before it or after it. The
    faintest only if neither others nor the end tell a cause."""
    ends = [hit for hit in hits if hit.error == KILLED]
    end = min(ends, key=_order) if ends else None
    hints = [
        hit
        for hit in hits
        if hit.known.role == "weak" and (end is None or hit.file != end.file or hit.at >= end.at - SHORTLY)
    ]
    told = [hit for hit in hints if hit.known.confidence > FAINT]
    return told if told or any(hit.known.cause != "unknown" for hit in ends) else hints


def _by_words(hits: Sequence[Hit]) -> Hit:
    """The last line of the cause that most of the last lines point to. Used when there is nothing better."""
    end = max(hits, key=_order)
    hits = [hit for hit in hits if hit.file == end.file and hit.at >= end.at - SHORTLY]
    votes = Counter(hit.known.cause for hit in hits)
    most = max(votes.values())
    return max((hit for hit in hits if votes[hit.known.cause] == most), key=_order)


def _earliest(hits: Iterable[Hit]) -> Hit:
    """By the lines' own timestamps if all have one, else by their order in the files."""
    some = list(hits)
    if all(hit.said.time is not None for hit in some):
        return min(some, key=lambda hit: (hit.said.time, hit.file, hit.at))
    return min(some, key=_order)


def _order(hit: Hit) -> tuple[bool, int, int]:
    return hit.at == 0, hit.file, hit.at  # at 0: the line stands after a part that was not read


def _agreement(cause: Hit, hits: Sequence[Hit]) -> float:
    """More confidence if other messages say the same, less if another cause is as likely."""
    others = {hit.known.error: hit.known for hit in hits if hit.known.error != cause.known.error}
    same = any(one.cause == cause.known.cause and one.role == "first" for one in others.values())
    rival = any(
        one.role == "first"
        and one.cause not in (cause.known.cause, "unknown")
        and one.confidence >= cause.known.confidence
        for one in others.values()
    )
    return 0.05 * same - 0.1 * rival


def culprits(cause: Hit, hits: Sequence[Hit], told: Map, hosts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The hosts that the log singles out, and sentences that say why."""
    waiting = cause.known.kind == "communication"
    missing = _missing(hits, told) if waiting else []
    if missing:
        names = [host for host in (host_of(rank, told, hosts) for rank in missing) if host]
        said = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:8]))}"
        verb = "is" if len(missing) == 1 else "are"
        return list(dict.fromkeys(names))[:8], [f"{said} {verb} missing where the others wait"]
    ends = _ends(hits, told) if waiting else None
    if ends is not None:
        return ends, [f"the connections that broke single out {' and '.join(ends)}"] if ends else []
    dead = [hit for hit in hits if hit.dead and (waiting or hit is cause)]
    died = _earliest(dead) if dead else _first_to_die(hits) if waiting or cause.known.role == "confirm" else None
    if cause.known.cause == "user" or (died is None and cause.known.role == "cascade"):
        return [], []  # who reports that another has died is a bystander
    hit = died or cause
    host = hit.said.host or host_of(hit.said.rank, told, hosts)
    if not host:
        return [], []
    host = told.get(host, host)
    return [host], [f"{'what died first ran' if died else 'it was'} on {host}"]


def _missing(hits: Sequence[Hit], told: Map) -> list[int]:
    """Ranks that did not join a collective: the log names them, or theirs are the few without a watchdog message."""
    for hit in hits:
        found = MISSING.search(hit.said.shown)
        if found:
            listed = next(group for group in found.groups() if group)
            return [int(rank) for rank in listed.split(",")][:8]
    waited = {hit.said.rank for hit in hits if hit.error in WAITED and hit.said.rank is not None}
    world = int(told.get("world", "0")[:7])
    absent = sorted(set(range(world)) - waited) if 2 < world <= 1 << 20 and len(waited) > world // 2 else []
    return absent if len(absent) <= max(1, world // 16) else []


def _ends(hits: Sequence[Hit], told: Map) -> list[str] | None:
    """The rule of two ends: if only two hosts see broken connections, both are singled out; if all broken connections
    lead to one peer, that peer; else nobody. None if the log names no connection."""
    pairs = set()
    for hit in hits:
        if hit.known.kind == "communication" and hit.said.peer:
            peer = told.get(hit.said.peer, hit.said.peer)
            pairs.add((hit.said.host or "", peer.partition("<")[0]))
    if not pairs:
        return None
    ends = {end for pair in pairs for end in pair if end}
    peers = {peer for _, peer in pairs}
    if len(ends) == 2 and len(peers) <= 2:
        return sorted(ends)
    return sorted(peers) if len(peers) == 1 and len(pairs) > 1 else []


def _first_to_die(hits: Sequence[Hit]) -> Hit | None:
    """The first process that a launcher reports as ended, with its host or rank."""
    ended = [hit for hit in hits if hit.error == KILLED]
    died = [hit for hit in ended if hit.said.host or hit.said.rank is not None]
    return _earliest(died) if died else None


def host_of(rank: int | None, told: Map, hosts: Sequence[str]) -> str | None:
    """The host of a rank: as the log has it, or by its place among `hosts`."""
    if rank is None:
        return None
    if str(rank) in told:
        return told[str(rank)]
    world = int(told.get("world", "0")[:7])
    if hosts and world and world % len(hosts) == 0 and rank < world:  # in blocks, as srun and torchrun place them
        return hosts[rank // (world // len(hosts))]
    return None


def _victims(cause: Hit, hits: Sequence[Hit]) -> list[Hit]:
    return [
        hit
        for hit in hits
        if hit is not cause
        and hit.known.role != "weak"
        and (hit.said.rank is None or (hit.said.rank, hit.error) != (cause.said.rank, cause.error))
    ]


def _each_rank(victims: Sequence[Hit]) -> list[Hit]:
    """At most one victim for each rank, consequences before the rest, and at most COLLATERAL in all."""
    one: dict[Any, Hit] = {}
    for hit in sorted(victims, key=lambda hit: hit.known.role == "confirm"):
        one.setdefault(hit.error if hit.said.rank is None else hit.said.rank, hit)
    return sorted(one.values(), key=_order)[:COLLATERAL]


def _cited(hit: Hit, told: Map) -> Cited:
    host = hit.said.host or told.get(str(hit.said.rank))
    host = told.get(host, host) if host else None
    return Cited(hit.at, hit.said.shown, hit.said.rank, host, hit.said.gpu, hit.said.time)
