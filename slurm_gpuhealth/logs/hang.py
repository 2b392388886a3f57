"""What a job hangs in, from its ranks' dumps of PyTorch's flight recorder: the call that some rank never made.

```
Dumps (flight.py) ──judge──▶ Flight ──joined──▶ Reading, with what the text of the job's logs says
```

No rank is guilty by its absence: its program may have failed, or its GPU, or its node.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.logs import judge as logs_judge
from slurm_gpuhealth.logs import known, python
from slurm_gpuhealth.logs.flight import RANK, members, shown
from slurm_gpuhealth.outcomes import Flight, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from slurm_gpuhealth.logs.flight import Call, Dump, Dumps, Key
    from slurm_gpuhealth.logs.judge import Map

STUCK = 1000
"""Calls that are judged, the oldest first."""
FEW = 16
"""Ranks are singled out if they are a single one or at most one of so many; on one host: a quarter. Otherwise dumps are
elsewhere, or the program has a branch that the others took."""
NAMED = 64
SAID = 8
WRONG = 0.75
"""How sure it is that a program is wrong which calls one thing here and another there."""
UNSURE = 0.5
ORDER = ("mismatch", "absent", "stuck", "unclear", "circle")
"""A program's mistake explains all; then who is missing without being held up elsewhere; then what all wait in."""


class Stuck(NamedTuple):
    """A call in which at least one rank waits."""

    call: Call
    found: str
    """As in `Flight`."""
    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    size: int
    waiting: int
    since: int
    other: str = ""


def judge(dumps: Dumps, told: Map, hosts: Sequence[str] = ()) -> Flight:
    """The call that a job hangs in. `told`: which host a rank is on, by the job's log; `hosts`: its nodes, in order."""
    by_rank = dumps.of
    waiting: dict[Key, dict[int, Call]] = {}
    for rank, dump in by_rank.items():
        for key, call in dump.calls.items():
            if call.waits:
                waiting.setdefault(key, {})[rank] = call
    oldest = sorted(waiting, key=lambda key: min(call.created for call in waiting[key].values()))[:STUCK]
    busy = {rank: sum(call.waits for call in dump.calls.values()) for rank, dump in by_rank.items()}
    groups = {group[1] for dump in by_rank.values() for group in dump.reach}
    world = len(by_rank.keys() | {rank for ranks in groups for rank in members(ranks)})
    unread = tuple(f"{shown(name)}: {why}" for name, why in list(dumps.unread.items())[:SAID])
    counts = Flight(dumps=len(by_rank), world=world, unread=unread)
    known_hosts = {**{str(rank): dump.host for rank, dump in by_rank.items() if dump.host}, **told}
    known_hosts.setdefault("world", str(world))

    def host(rank: int) -> str:
        return logs_judge.host_of(rank, known_hosts, hosts) or ""

    found = [_stuck(key, waiting[key], dumps, busy, host) for key in oldest]
    one = min(found, key=lambda one: (ORDER.index(one.found), one.since), default=None)
    if one is None:
        return counts
    group = one.call.key[0]
    desc = next((dump.names[group] for dump in by_rank.values() if dump.names.get(group)), "")
    places = tuple(map(host, (*one.ranks, *one.silent)[:NAMED]))
    return counts._replace(
        found=one.found,
        op=one.call.name,
        other=one.other,
        group=f"{shown(group)} ({shown(desc)})" if desc not in ("", "undefined") else shown(group),
        seq=one.call.number,
        size=one.size,
        waiting=one.waiting,
        since=one.since / 1e9,
        ranks=one.ranks[:NAMED],
        silent=one.silent[:NAMED],
        hosts=places,
        frame=one.call.frame,
    )


def _stuck(key: Key, waits: dict[int, Call], dumps: Dumps, busy: dict[int, int], host: Callable[[int], str]) -> Stuck:
    by_rank = dumps.of
    since = min(call.created for call in waits.values())
    call = next(call for call in waits.values() if call.created == since)
    entered = {rank: dump.calls[key] for rank, dump in by_rank.items() if key in dump.calls}
    told = call.peers or members(key[1]) or (rank for rank, dump in by_rank.items() if key[:2] in dump.reach)
    group = frozenset(told)
    absent = [rank for rank in sorted((group & by_rank.keys()) - entered.keys()) if _never(by_rank[rank], call, since)]
    unread = {int(found[1]) for found in map(RANK.search, dumps.unread) if found}
    silent = sorted(group - by_rank.keys() - unread)
    free = [rank for rank in absent if not busy[rank]]
    few = _few(len(silent), len(group), map(host, silent))
    found, ranks, other = "stuck", absent, ""
    odd = _odd(entered)
    if odd:
        found, ranks, other = "mismatch", *odd
        call = next(one for rank, one in entered.items() if rank not in ranks)
    elif free or (silent and few):
        found, ranks = "absent", free
    elif absent:
        found = "circle"
    elif silent or group - entered.keys() or not (call.peers or members(key[1])):
        found = "unclear"
    return Stuck(call, found, tuple(ranks), tuple(silent if few else ()), len(group), len(waits), since, other)


def _few(count: int, of: int, hosts: Iterable[str]) -> bool:
    """Whether so many ranks, on `hosts`, can be singled out."""
    return count <= max(1, of // FEW) or (count <= of // 4 and len(there := set(hosts)) == 1 and "" not in there)


def _never(dump: Dump, call: Call, since: int) -> bool:
    """Whether a rank without this call has never made it: the ring forgets old calls."""
    if call.peers:
        return True
    last = dump.reach.get(call.key[:2], -1)
    return last < call.key[2] if last >= 0 else dump.since < since


def _odd(entered: dict[int, Call]) -> tuple[list[int], str] | None:
    """The ranks, fewer than the rest, that made another call under this number, and that call."""
    calls: dict[tuple[str, int | None], list[int]] = {}
    for rank, call in entered.items():
        calls.setdefault((call.name, call.size), []).append(rank)
    if len(calls) < 2:
        return None
    most = max(calls, key=lambda one: len(calls[one]))
    (name, size), ranks = min(
        ((one, ranks) for one, ranks in calls.items() if one != most), key=lambda one: len(one[1])
    )
    return sorted(ranks), name if name != most[0] else f"{name} of {size} elements instead of {most[1]}"


def sentences(flight: Flight) -> Iterator[str]:
    """What the dumps say, for people."""
    at = f"{flight.op} #{flight.seq} of group {flight.group}"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(flight.since)) if flight.since else ""
    wait = f"{flight.waiting} rank{'s wait' if flight.waiting != 1 else ' waits'} since {since}"
    who = _ranks(flight.ranks, flight.hosts)
    if flight.found == "mismatch":
        verb = "calls" if len(flight.ranks) == 1 else "call"
        yield f"{who} {verb} {flight.other} where others call {at}; {wait}"
    elif flight.found == "absent" and flight.ranks:
        yield f"{who} never entered {at}; {wait}"
    elif flight.found == "stuck":
        waiting = f"{flight.waiting} of them wait since {since}"
        yield f"all {flight.size} ranks entered {at}, {waiting}: the network, or a kernel that is stuck"
    elif flight.found == "circle":
        yield f"{who} never entered {at} but wait elsewhere: the ranks' calls are in another order; {wait}"
    elif flight.found:
        yield f"in {at} {wait}"
    else:
        yield "no rank waits in a collective" if flight.dumps else "no dump of the flight recorder could be read"
    if flight.silent:
        left = "leaves" if len(flight.silent) == 1 else "leave"
        died = _ranks(flight.silent, flight.hosts[len(flight.ranks) :])
        yield f"{died} {left} no dump, and may have died"
    elif flight.dumps < flight.world:
        yield f"{flight.dumps} of {flight.world} ranks have left a dump here"
    for one in flight.unread:
        yield f"not read: {one}"


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = [f"{rank} ({host})" if host else f"{rank}" for rank, host in zip(ranks, (*hosts, *[""] * SAID))][:SAID]
    more = f" and {len(ranks) - SAID} more" if len(ranks) > SAID else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(shown)}{more}"


def joined(reading: Reading, flight: Flight) -> Reading:
    """What text and dumps say together. A first cause that the text shows stays; a hang without one is the dumps'."""
    said = (*sentences(flight), *reading.evidence)[:20]
    clear = reading.verdict not in ("unknown", "user") or reading.kind not in ("", "communication", "user")
    named = tuple(dict.fromkeys(filter(None, flight.hosts)))
    named = named if _few(len(flight.hosts), flight.size, flight.hosts) else ()
    wrong = flight.found in ("mismatch", "circle")
    if flight.found in ("", "unclear") or (clear and (not wrong or reading.confidence >= logs_judge.SURE)):
        return reading._replace(evidence=said, flight=flight)
    error = f"collective {flight.found}"
    what = re.sub(r"\d+", "#", f"{flight.op} {flight.group}")
    advice = known.table().advice
    return reading._replace(
        verdict="application" if wrong else "unknown",
        confidence=WRONG if wrong else UNSURE,
        kind="application" if wrong else "communication",
        hosts=() if wrong else named[:SAID] or reading.hosts,
        rank=flight.ranks[0] if len(flight.ranks) == 1 and not wrong else reading.rank,
        error=error,
        frame=flight.frame or reading.frame,
        fingerprint=python.fingerprint(error, flight.frame, what),
        evidence=said,
        advice=advice["desync" if wrong else "absent" if flight.found == "absent" else "stuck"],
        flight=flight,
    )
