"""Reads from a job's own log what the job died of: the first cause, its victims, the rank and the host it names.

Dumps of PyTorch's flight recorder (flight.py, hang.py) are told apart from text by how they begin.

Users control what their logs say: the verdict `node` here never means more than "test it".

```
bytes ──scan───────▶ hits: lines that speak of a known failure (patterns.toml) or end a traceback
hits  ──judge──────▶ Reading ◀──hang── dumps
```
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.logs import hang, judge, known, scan
from slurm_gpuhealth.logs.flight import Dumps
from slurm_gpuhealth.outcomes import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from slurm_gpuhealth.logs.judge import Map
    from slurm_gpuhealth.logs.scan import Hit

CHUNK = 4 << 20
BEFORE = scan.LONG + 16384
"""Bytes of the previous block that are kept, to find the frames of a traceback that ends in this block."""
WHOLE = 1 << 20
"""Bytes at both ends of a file that are searched for every pattern. The middle is searched so only if its lines are
much alike; otherwise only for lines with one of a few words, and near those lines."""
AROUND = 4096
"""In the middle of a long file: bytes before and after a hit that are searched for every pattern."""
PARALLEL = 64 << 20
KEPT = 2000
"""Hits of one file."""
ALWAYS = (b"error", b"exception", b"xid", b"nranks")


class Found(NamedTuple):
    """What a stretch of a file says."""

    hits: list[Hit]
    lines: int
    ranks: Map


def read_text(text: str, hosts: Sequence[str] = (), dumps: Dumps | None = None) -> Reading:
    """What an excerpt says. `hosts`: the job's nodes, in Slurm's order. An empty excerpt only loads the tables."""
    if not text:
        scan.ready()
    block = _plain(text.encode("utf-8", "replace"))
    low = block.lower()
    among = known.words(low)
    if not among and not any(one in low for one in ALWAYS) and not dumps:
        return Reading()
    seen = scan.hits(block, low, 0, (*among, *ALWAYS))
    return _judged(_numbered(seen, block, low, 1), judge.ranks(low, block), hosts, (), dumps)


def _judged(hits: list[Hit], told: Map, hosts: Sequence[str], paths: Sequence[str], dumps: Dumps | None) -> Reading:
    reading = judge.judge(hits, told, hosts, paths) if hits else Reading()
    return hang.joined(reading, hang.judge(dumps, told, hosts)) if dumps else reading


def read_files(
    paths: Sequence[str], *, head: int | None = None, tail: int | None = None, hosts: Sequence[str] = ()
) -> Reading:
    """What the files of one job say: one file for each stream, or for each rank.

    Reads the whole file, or its first `head` and last `tail` bytes; lines after a part that was not read have the
    number 0. `-` is standard input. Raises OSError.
    """
    every: list[Hit] = []
    ranks: Map = {}
    dumps = Dumps()
    for number, path in enumerate(paths):
        found = _file(path, head, tail, dumps)
        every += [hit._replace(file=number) for hit in found.hits]
        ranks.update(found.ranks)
    return _judged(every, ranks, hosts, paths, dumps)


def _file(path: str, head: int | None, tail: int | None, dumps: Dumps) -> Found:
    """What a file says as text; nothing if it is a dump, which is added to `dumps`."""
    fd = 0 if path == "-" else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size if os.path.isfile(f"/proc/self/fd/{fd}") else -1
        if size < 0:
            return _stretch(_pieces(fd), 1, size)
        if dumps.take(path, fd, size):
            return Found([], 0, {})
        if head is not None and tail is not None and size > head + tail:
            first = _stretch(_pieces(fd, 0, head), 1, head)
            last = _stretch(_pieces(fd, size - tail, size), 0, tail)
            return Found(first.hits + [hit._replace(at=0) for hit in last.hits], 0, {**first.ranks, **last.ranks})
        if size >= PARALLEL and path != "-":
            return _halves(path, size)
        return _stretch(_pieces(fd, 0, size), 1, size)
    finally:
        if fd:
            os.close(fd)


def _halves(path: str, size: int) -> Found:
    """Scans both halves at the same time, in two processes."""
    from concurrent.futures import ProcessPoolExecutor

    middle = size // 2
    with ProcessPoolExecutor(2) as pool:
        first, second = pool.map(half, (path, path), (0, middle), (middle, size), (size, size))
    kept = {_key(hit): hit for hit in first.hits}
    for hit in second.hits:
        kept.setdefault(_key(hit), hit._replace(at=hit.at + first.lines))
    return Found(list(kept.values()), first.lines + second.lines, {**second.ranks, **first.ranks})


def half(path: str, begin: int, end: int, size: int) -> Found:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _stretch(_pieces(fd, begin, end), 1, size, begin)
    finally:
        os.close(fd)


def _pieces(fd: int, begin: int = 0, end: int = -1) -> Iterator[tuple[bytes, bytes]]:
    """Blocks of a file from `begin` to `end`, or of a pipe to its end; each with some bytes from before it."""
    before = b""
    if end >= 0 and begin:
        before = os.pread(fd, min(begin, BEFORE), max(0, begin - BEFORE))
    while begin < end:
        block = os.pread(fd, min(CHUNK, end - begin), begin)
        if not block:  # the file has been truncated meanwhile
            return
        begin += len(block)
        # A line belongs to the block in which it begins.
        yield before, block + os.pread(fd, scan.LONG, begin).partition(b"\n")[0] * (block[-1:] != b"\n")
        before = block[-BEFORE:]
    rest = b""
    while end < 0 and (block := _filled(fd)):
        block = rest + block
        cut = block.rfind(b"\n", max(0, len(block) - scan.LONG)) + 1 or len(block)
        block, rest = block[:cut], block[cut:]
        yield before, block
        before = block[-BEFORE:]
    if rest:
        yield before, rest


def _filled(fd: int) -> bytes:
    data = bytearray()
    while len(data) < CHUNK and (piece := os.read(fd, CHUNK - len(data))):
        data += piece
    return bytes(data)


def _stretch(pieces: Iterator[tuple[bytes, bytes]], line: int, size: int, done: int = 0) -> Found:
    kept: dict[Any, Hit] = {}
    seen: set[tuple[bytes, bytes]] = set()
    ranks: Map = {}
    begun = line
    for before, block in pieces:
        if b"\n" not in before[-scan.LONG :]:
            before = b""  # a line that does not end: this part of it is read like a line of its own
        before, block = _plain(before), _plain(block)
        whole = before + block
        low = whole.lower()
        ends = size < 0 or done < WHOLE or done + len(block) > size - WHOLE
        by_shape = None if b"\r" in block else scan.alike(whole, low, len(before), seen)
        if by_shape is not None:
            found = by_shape
        elif ends:
            found = scan.hits(whole, low, len(before), (*known.words(low), *ALWAYS))
        else:
            found = _around(whole, low, len(before), scan.hits(whole, low, len(before), known.table().anchors))
        if done < WHOLE or b" nranks " in low[: 1 << 16]:
            ranks.update(judge.ranks(low, whole))
        for hit in _numbered(found, whole, low, line - before.count(b"\n")):
            if len(kept) < KEPT:
                kept.setdefault(_key(hit), hit)
        line += block.count(b"\n")
        done += len(block)
    return Found(list(kept.values()), line - begun, ranks)


def _key(hit: Hit) -> Any:
    """Keeps the first of the hits that have the same key in one file."""
    return hit.error, hit.said.rank, hit.frame


def _plain(block: bytes) -> bytes:
    """The block without zero bytes (UTF-16, holes in files) and without the middle of very long lines."""
    return scan.shortened(block.replace(b"\0", b"") if b"\0" in block else block)


def _around(whole: bytes, low: bytes, begin: int, found: list[Hit]) -> list[Hit]:
    """`found`, and what all patterns find near those hits."""
    more = {hit.at: hit for hit in found}
    last = begin
    for hit in found[:50]:
        start, end = max(last, hit.at - AROUND), hit.at + AROUND
        if end <= last:
            continue
        start = max(begin, low.rfind(b"\n", 0, start) + 1)
        near = low[:end]
        for one in scan.hits(whole, near, start, (*known.words(near[start:]), *ALWAYS)):
            more.setdefault(one.at, one)
        last = end
    return [more[at] for at in sorted(more)]


def _numbered(found: list[Hit], block: bytes, low: bytes, line: int) -> list[Hit]:
    """`found`, in order, with line numbers instead of offsets. `line`: the number of the block's first line."""
    numbered, last = [], 0
    several = len(found) > 1 or line > 1
    progress = scan.Progress(low)
    for hit in found:
        line += block.count(b"\n", last, hit.at)
        last = hit.at
        went_on = hit.known.role == "first" and several and progress.survived(hit.at)
        numbered.append(hit._replace(at=line, survived=hit.survived or went_on))
    return numbered
