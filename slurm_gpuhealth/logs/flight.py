"""Reads dumps of PyTorch's flight recorder: the last calls of each rank. hang.py judges them.

A dump does not have its rank: the file's name ends with it. Fields: PyTorch's FlightRecorder.hpp, versions 2.0 to 2.10.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.logs import pickled, python
from slurm_gpuhealth.logs.pickled import Refused

if TYPE_CHECKING:
    from typing import Any

    Key = tuple[str, str, int]
    """A group's name, its ranks as PyTorch writes them, a call's number: the same on all ranks of the group."""

LARGEST = 16 << 20
"""Bytes of a dump: 20,000 calls have 4 MiB."""
HEAD = 64
"""Bytes that tell a dump from a text."""
PICKLE = re.compile(rb"\x80[\x02-\x05]")
JSON = re.compile(
    rb'\s*\{\s*"(?:comm_lib_version|entries|nccl_comm_state|nccl_version|pg_config|pg_status|version)"\s*:'
)
RANK = re.compile(r"(\d{1,6})(?:\.\w{1,8})?$")
RANKS = re.compile(r"\[(\d{1,6}(?:, ?\d{1,6}){0,16383})\]")
PEERS = re.compile(r"(?:send (\d{1,6})->(\d{1,6})|recv (\d{1,6})<-(\d{1,6}))$")
WINDOW = 64
"""A rank's newest calls that are looked at, and as many more as long as one of WINDOW still waits."""
FARTHEST = 1024
"""CUDA queues so many launches; then the program itself waits."""
SAME = frozenset(("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base"))
"""Calls in which all ranks must pass the same number of elements."""


class Call(NamedTuple):
    """A rank's call of a collective, or of a send or receive."""

    key: Key
    name: str
    size: int | None
    """Elements that the rank passed, where all must pass as many."""
    created: int
    """Nanoseconds since the epoch, by the rank's clock."""
    waits: bool
    number: int
    frame: str = ""
    peers: tuple[int, int] | None = None
    """Of a send or receive: the sender's rank and the receiver's."""


class Dump(NamedTuple):
    """What one rank's file says of its last calls."""

    rank: int
    calls: dict[Key, Call]
    reach: dict[tuple[str, str], int]
    """Group → the highest number among `calls`."""
    names: dict[str, str]
    """Group → its description."""
    since: int
    """When the oldest of the calls was made; 0 if they go back to the program's begin."""
    until: int
    host: str


class Dumps:
    """The dumps of one job."""

    def __init__(self) -> None:
        self.of: dict[int, Dump] = {}
        self.unread: dict[str, str] = {}
        """File → why it was not read."""

    def take(self, path: str, fd: int, size: int) -> bool:
        """Take in the regular file `fd` if it is a dump."""
        head = os.pread(fd, HEAD, 0)
        if not PICKLE.match(head) and (size > LARGEST or not JSON.match(head)):
            return False
        if size <= LARGEST:
            return self.add(path, _whole(fd, size))
        self.unread[os.path.basename(path)] = f"has {size >> 20} MiB; a dump has {LARGEST >> 20} MiB at most"
        return True

    def add(self, path: str, data: bytes) -> bool:
        """Take in a dump. False: it is none, but some other text in JSON."""
        name = os.path.basename(path)
        try:
            found = read(name, data)
        except Refused as error:
            self.unread[name] = f"{error}"
            return True
        if found is None:
            return False
        before = self.of.get(found.rank)
        if before is None or before.until <= found.until:
            self.of[found.rank] = found
        return True

    def __bool__(self) -> bool:
        return bool(self.of or self.unread)


def _whole(fd: int, size: int) -> bytes:
    """The first `size` bytes; less if the file was truncated meanwhile."""
    data = bytearray()
    while len(data) < size and (piece := os.pread(fd, size - len(data), len(data))):
        data += piece
    return bytes(data)


def read(name: str, data: bytes) -> Dump | None:
    """One dump; None for a text that is no dump. Raises Refused for a damaged or hostile file, or an unknown form."""
    memo: dict[int, Any] = {}
    if PICKLE.match(data):
        value, memo = pickled.load(data)
    else:
        try:
            value = json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or "pg_config" not in value:
            return None
    version = value.get("version") if isinstance(value, dict) else None
    entries = value.get("entries", []) if isinstance(value, dict) else None
    if type(entries) is not list or type(version) is not str:
        raise Refused("is no dump of PyTorch's flight recorder")
    if not re.fullmatch(r"2\.\d{1,3}", version):
        raise Refused(f"has version {shown(version)} of the flight recorder; 2.0 to 2.10 are known")
    rank = RANK.search(name)
    if not rank:
        raise Refused("does not tell its rank: the name must end with it, as in nccl_trace_rank_17")
    host = next((one for one in (value.get("hostname"), value.get("host_name")) if type(one) is str), "")
    return _dump(int(rank[1]), entries, memo, _groups(value.get("pg_config")), shown(host, 63))


def _groups(config: Any) -> dict[str, str]:
    """Group → its ranks, as text."""
    found = {}
    for name, row in config.items() if type(config) is dict else ():
        ranks = row.get("ranks") if type(row) is dict else None
        if type(ranks) is list and len(ranks) <= 1 << 14 and all(type(one) is int for one in ranks):
            ranks = str(ranks)
        if type(name) is str and type(ranks) is str:
            found[name] = ranks
    return found


def _dump(rank: int, entries: list[Any], memo: dict[int, Any], groups: dict[str, str], host: str) -> Dump:
    calls: dict[Key, Call] = {}
    reach: dict[tuple[str, str], int] = {}
    names: dict[str, str] = {}
    covers: dict[Key, bool] = {}
    oldest, newest, left, looked = 0, 0, WINDOW, 0
    known: dict[int, Any] = {}  # a hostile file names a row many times
    row: Any = None
    for row in reversed(entries):
        if type(row) is bytes:
            if id(row) not in known:
                known[id(row)] = pickled.unpacked(row, memo)
            row = known[id(row)]
        call = _call(row, groups, names, covers, rank)
        looked, left = looked + 1, left - 1
        if call is not None:
            oldest, newest = call.created, newest or call.created
            if call.waits:
                left = WINDOW
            if call.peers is None or call.waits:
                calls[call.key] = call
            if call.peers is None:
                group = call.key[:2]
                reach[group] = max(reach.get(group, 0), call.key[2])
        if left <= 0 or looked >= FARTHEST:
            break
    begin = not entries or (type(row) is dict and row.get("record_id") == 0)
    return Dump(rank, calls, reach, names, 0 if begin else oldest, newest, host)


def _call(row: Any, groups: dict[str, str], names: dict[str, str], covers: dict[Key, bool], rank: int) -> Call | None:
    """One entry, the newest first; None for what is not one, or is a part of a coalesced call that is known."""
    if type(row) is not dict:
        return None
    told, title, state = row.get("process_group"), row.get("profiling_name"), row.get("state")
    p2p = row.get("is_p2p") is True
    seq, created = row.get("p2p_seq_id" if p2p else "collective_seq_id"), row.get("time_created_ns")
    if type(told) not in (list, tuple) or not told or type(told[0]) is not str or type(title) is not str:
        return None
    if type(seq) is not int or type(created) is not int or not (0 <= seq < 1 << 53 and 0 <= created < 1 << 63):
        return None
    group = told[0]
    names[group] = told[1] if len(told) > 1 and type(told[1]) is str else ""
    backend, _, name = title.rpartition(":")
    # Gloo has no CUDA events: it retires what has completed. With NCCL a call that timed out is retired too.
    waits = state != "completed" and not (backend == "gloo" and row.get("retired") is True)
    ranks = groups.get(group, "")
    cover = group, ranks, -seq - 1 if p2p else seq
    if name.endswith("coalesced"):
        covers[cover] = waits
        if p2p:
            return None
    elif cover in covers:  # the parts of a coalesced call keep the state that they began with
        waits = covers[cover]
        if not p2p:
            return None
    peers = PEERS.search(name) if p2p else None
    if p2p and not peers:
        return None
    frame = _frame(row.get("frames")) if waits else ""
    if peers:
        among = members(ranks)
        places = int(peers[1] or peers[4]), int(peers[2] or peers[3])
        source, target = (among[place] if place < len(among) else place for place in places)
        title = f"send/recv {source}->{target}"
        return Call((group, title, 0), title, None, created, waits, seq, frame, (source, target))
    size = _size(row.get("input_sizes")) if name in SAME else None
    return Call((group, ranks, seq), shown(name), size, created, waits, seq, frame)


@functools.lru_cache(4096)
def members(ranks: str) -> tuple[int, ...]:
    """`[0, 1, 7]` as numbers, in order; none if a dump does not tell the group's ranks."""
    found = RANKS.fullmatch(ranks)
    return tuple(sorted(map(int, found[1].split(",")))) if found else ()


def _size(tensors: Any) -> int | None:
    """Elements in all tensors."""
    if type(tensors) is not list or len(tensors) > 256:
        return None
    if not all(type(one) is list and len(one) <= 16 and all(type(n) is int for n in one) for one in tensors):
        return None
    return sum(map(math.prod, tensors))


def _frame(frames: Any) -> str:
    """The innermost frame of the user's own code."""
    for one in frames[:200] if type(frames) is list else ():
        if type(one) is dict and type(one.get("filename")) is str and type(one.get("name")) is str:
            file = one["filename"][:400]
            if not python.LIBRARY.search(file) and not file.endswith("/threading.py"):
                return shown(f"{file.rpartition('/')[2]}:{one['name']}", 200)
    return ""


def shown(text: str, most: int = 80) -> str:
    """A user's text without control characters."""
    return "".join(one if one.isprintable() else "?" for one in text[:most])
