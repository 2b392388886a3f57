"""Finds the lines of a log that report a failure, at the speed of memory: bytes in, hits out.

A pass over a block costs one search for each anchor (known.py). If an anchor is in very many lines (a flood, or an
ordinary line that contains it), lines are told apart by their shape: the line without its digits.

Users control these lines. So that no line costs more than its length, each is read once and as a whole; of a very
long line only both ends are read (`shortened`).
"""

from __future__ import annotations

import bisect
import re
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.logs import known as logs_known
from slurm_gpuhealth.logs import line as logs_line
from slurm_gpuhealth.logs import python
from slurm_gpuhealth.logs.known import Known
from slurm_gpuhealth.xid import advise, catalog

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

WINDOW = 2048
"""Bytes of an ordinary line."""
LONG = 8192
"""Bytes of a line that are read; a longer line is read only at both ends."""
CUT = b" ... "
MANY = 64
"""Up to this number of anchors it is faster to search for each than to read every line."""
SMALL = 1 << 16
"""A block of at most so many bytes is searched for any number of anchors."""
PROGRESS = re.compile(rb"\b(?:iteration|iter|global_step|step|epoch)\b[^\n]{0,40}\d")
WENT_ON = 10
"""So many lines of progress within LATER bytes after an error mean that the job survived it. A few mean nothing: ranks
that do not know yet that another has died print them."""
LATER = 65536
FLOOD = 300
"""Lines with one anchor in a block that are read one by one."""
VARIED = 2000
"""A block with more shapes than this is not read by shape."""
MOST = 5000
"""Lines of a file that are read one by one."""
WHO = re.compile(rb"\brank[ :=_]?\d+|^\[?\d+[\]:]|^\[\d+,\d+\]|\b[a-z][a-z._-]*\d+(?=:)")
DIGITS = b"0123456789"
XID = re.compile(rb"\bxid\b[ :=#]{0,3}(?:\((?:pci:)?[^)\n]{0,40}\):? )?(?:error |code |is ){0,2}(\d{1,3})\b(.{0,200})")
WORDS = "words of "
KILLED = "killed"
"""The error of lines that only say that a process has ended."""
MILD = re.compile(rb"(?:\b|user)(?:warn(?:ing)?|info|debug|deprecated|retrying|skipping)\b")
"""What such a line reports did not end a job."""
FIGURE = re.compile(rb"\berror: {0,4}[-+]?[\d.]")
"""`test error: 0.12` measures."""
EXCEPTION = re.compile(rb"(?:error|exception|interrupt|exit|timeout|abort)(?::|\(|\s*$)")
FRAME = re.compile(rb'file "[^"\n]{1,400}", line \d{1,9}(?:, in \S{1,80})?\s*$')
SAYS = re.compile(rb"\s{0,80}[\w.]{1,80}: ")
"""`RuntimeError: ...`, `NVRM: Xid ...`: a message, not code, though it is indented below a frame."""
QUOTED = 4
"""Lines of a statement that Python 3.13 and later quote; earlier ones quote its first."""
ROOT = re.compile(rb"host +: ([A-Za-z][\w.-]{0,62})\s{1,40}rank +: (\d{1,6})")
OWN_CODE = re.compile(
    rb"(?:exit ?|return |exited with )(?:code|status)[ :=]{1,4}(?:[1-9]\d?|1[01]\d|12[0-7]|255)(?![\d.])"
)
"""Codes that a program, or the shell that did not find it, ends with by itself."""
SOME_XID = Known("Xid", "node", "hardware", "first", 0.85, "gpu", "")
MENDED = (63, 92)
"""Xids of hardware that programs survive."""
PROGRAM = Known("exception", "application", "application", "first", 0.65, "code", "CPython")

GENERAL = ("RuntimeError", "OSError", "IOError", "ConnectionError", "TimeoutError", "Exception", "SystemError")
"""Exceptions that do not tell whose fault it is: their message decides."""


class Hit(NamedTuple):
    """A line that speaks of a failure."""

    at: int
    """First the offset in the block, later the line's number."""
    known: Known
    error: str
    frame: str
    said: logs_line.Line
    survived: bool = False
    """The job went on after it, or a library only warns of it."""
    file: int = 0
    dead: bool = False
    """Its rank and host are those of the one that died; another says so."""


def shortened(block: bytes) -> bytes:
    """`block` without the middle of its very long lines. The number of lines stays the same."""
    pieces, done, at = [], 0, 0
    while at + LONG < len(block):
        start = max(block.rfind(b"\n", at, at + LONG), block.rfind(b"\r", at, at + LONG)) + 1
        if start:  # a line ends within reach: go on after it
            at = start
            continue
        end = min(place if place >= 0 else len(block) for place in _ends(block, at + LONG))
        pieces += [block[done : at + LONG // 2], CUT]
        done = at = end - LONG // 2
        at = end
    return b"".join((*pieces, block[done:])) if pieces else block


def hits(block: bytes, low: bytes, begin: int, anchors: Collection[bytes]) -> list[Hit]:
    """Hits at `begin` or later, in order; their `at` is an offset in `block`. `low`: `block` in lower case."""
    frames = python.Frames(len(block))
    if len(anchors) > MANY and len(low) - begin > SMALL:
        return _every(block, low, begin, frames)
    seen: dict[int, Hit | None] = {}
    lines: list[bytes] = []
    for anchor in anchors:
        looked, at = 0, low.find(anchor, begin)
        while at >= 0:
            start, end = _bounds(low, at)
            if start not in seen and (start >= begin or not begin):
                looked += 1
                seen[start] = hit(block, low, start, end, frames)
            if looked >= FLOOD:
                lines = lines or low[begin:].split(b"\n")
                for first, last in _shapes(low, anchor, end, begin, lines):
                    if first not in seen:
                        seen[first] = hit(block, low, first, last, frames)
                break
            at = low.find(anchor, max(end, at + 1))
    return [found for _, found in sorted(seen.items()) if found is not None]


def _every(block: bytes, low: bytes, begin: int, frames: python.Frames) -> list[Hit]:
    """The same for a block with very many anchors: each line is read."""
    found, at = [], begin
    for text in low[begin:].split(b"\n"):
        for line in text.split(b"\r") if b"\r" in text else (text,):
            # a line belongs to the block in which it begins
            if line and (at > begin or not begin or low[begin - 1 : begin] in b"\n\r"):
                found.append(hit(block, low, at, at + len(line), frames))
            at += len(line) + 1
    return [one for one in found if one is not None]


def alike(block: bytes, low: bytes, begin: int, seen: set[tuple[bytes, bytes]]) -> list[Hit] | None:
    """The same as `hits` with every pattern, if the lines differ in little but their digits; None if they don't.

    One line of each shape is read; for shapes that report a failure, one line for each rank or host. `seen` keeps
    the shapes from block to block.
    """
    if begin and low[begin - 1 : begin] != b"\n":  # a line belongs to the block in which it begins
        begin = low.find(b"\n", begin) + 1 or len(low)
    shapes = low[begin:].translate(None, DIGITS).split(b"\n")
    if len(shapes) < 2 or len(first := dict(zip(reversed(shapes), reversed(range(len(shapes)))))) > VARIED:
        return None
    lines = low[begin:].split(b"\n")
    if max(map(len, first)) > WINDOW:
        return None
    bad = {shape for shape, number in first.items() if speaks(lines[number])}
    if not bad:
        return []
    frames = python.Frames(len(block))
    found, at = [], begin
    for line, shape in zip(lines, shapes):
        if shape in bad:
            who = WHO.search(line)
            key = shape, who[0] if who else b""
            if key not in seen and len(seen) < MOST:
                seen.add(key)
                found.append(hit(block, low, at, at + len(line), frames))
        at += len(line) + 1
    return [one for one in found if one is not None]


def speaks(line: bytes) -> bool:
    known = logs_known.recognise(line)
    return b"xid" in line or EXCEPTION.search(line) is not None or (known is not None and known.role != "noise")


def _bounds(low: bytes, at: int) -> tuple[int, int]:
    """Where the line around `at` begins and ends: at a newline, a carriage return, or LONG away."""
    first = max(0, at - LONG)
    start = max(low.rfind(b"\n", first, at), low.rfind(b"\r", first, at)) + 1 or first
    last = min(len(low), at + LONG)
    return start, min(place if place >= 0 else last for place in _ends(low, at, last))


def _ends(text: bytes, at: int, last: int | None = None) -> tuple[int, int]:
    """The next newline, and the next carriage return before it; -1: none."""
    newline = text.find(b"\n", at, last)
    return newline, text.find(b"\r", at, newline if newline >= 0 else last)


def _shapes(low: bytes, anchor: bytes, begin: int, at: int, lines: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """The first line of each shape with `anchor`, at or after `begin`, for at most FLOOD shapes. `at`: where the first
    of `lines` begins."""
    known: set[bytes] = set()
    for line in lines:
        if at + len(line) > begin and anchor in line:
            shape = line[:WINDOW].translate(None, DIGITS)
            if shape not in known:
                known.add(shape)
                yield _bounds(low, at + line.find(anchor))
                if len(known) > FLOOD:
                    return
        at += len(line) + 1


def hit(block: bytes, low: bytes, start: int, end: int, frames: python.Frames) -> Hit | None:
    """What one line says; None if it reports no failure."""
    line = low[start:end]
    known = xid(line) if b"xid" in line else None
    known = known or logs_known.recognise(line)
    if known is not None and (known.role == "noise" or (known.error.startswith(WORDS) and _mild(line))):
        return None
    name = ""
    said = None
    if EXCEPTION.search(line):
        said = logs_line.read(block[start:end])
        name = python.exception(said.message)
        if name.endswith("Warning"):
            name = ""
        elif name and (known is None or known.role == "weak"):
            known = PROGRAM if known is None or known.cause == "application" or name not in GENERAL else _surely(known)
    if known is None or quoted(low, start, line):
        return None
    said = said or logs_line.read(block[start:end])
    root = ROOT.search(block, start, end + 600) if b"root cause (first" in line else None
    if root:
        said = said._replace(host=root[1].decode(), rank=int(root[2]))
    died = logs_line.dead(block, start, end + 200) if known.role == "cascade" else None
    if died:
        said = said._replace(host=died[0], rank=died[1])
    if known.error == KILLED and known.cause == "unknown" and OWN_CODE.search(line):
        known = known._replace(cause="application")
    where = ""
    if name and known.role != "cascade":
        where = frames.innermost(block, start)
        if where and known.cause == "application" and known.role == "first":
            known = known._replace(confidence=min(0.95, known.confidence + 0.1))
    general = known.error in ("program error", "exception") or known.error.startswith(WORDS)
    warned = known.cause in ("fabric", "infrastructure") and MILD.search(line) is not None and b"nccl warn" not in line
    return Hit(start, known, name if general and name else known.error, where, said, warned, dead=died is not None)


def _mild(line: bytes) -> bool:
    return MILD.search(line) is not None or FIGURE.search(line) is not None


def quoted(low: bytes, start: int, line: bytes) -> bool:
    """Whether the line is the program's, quoted below a frame of a traceback: the error itself follows."""
    quote = [line]
    while start > 0 and len(quote) <= QUOTED:
        above = low[max(0, start - LONG) : start - 1].rpartition(b"\n")[2]
        frame = FRAME.search(above)
        if frame:
            code = all(one.startswith(above[: frame.start()] + b"  ") for one in quote)
            return code and not SAYS.match(line, frame.start())
        quote.append(above)
        start -= len(above) + 1
    return False


def _surely(known: Known) -> Known:
    return known._replace(role="first", confidence=0.5)


class Progress:
    """The lines of progress in a block, searched for once."""

    def __init__(self, low: bytes) -> None:
        self.low = low
        self.ends: list[int] | None = None

    def survived(self, at: int) -> bool:
        """Whether the job went on after the line at `at`."""
        if self.ends is None:
            self.ends = [found.end() for found in PROGRESS.finditer(self.low)]
        after = self.low.find(b"\n", at, at + LONG) + 1 or len(self.low)
        enough = bisect.bisect_right(self.ends, after) + WENT_ON - 1
        return enough < len(self.ends) and self.ends[enough] <= at + LATER


def xid(line: bytes) -> Known | None:
    """An Xid in a line, by the catalogue: hardware blames the node, application the program, else nobody."""
    found = XID.search(line)
    if not found or logs_known.denied(line, found.start(), found.end(1), SOME_XID):
        return None
    code = int(found[1])
    before = re.search(rb"caused by previous xid (\d{1,3})", line) if code == 45 else None
    if before:
        code = int(before[1])
    cls, _, meaning, _ = advise.on_xid(code, found[2].decode("ascii", "replace") if not before else "", None)
    error, source = f"Xid {code}: {meaning}"[:120], "NVIDIA's catalogue of Xids"
    if cls == "hardware" and code not in MENDED:
        return Known(error, "node", "hardware", "first", 0.85, "gpu", source)
    if cls == "application":
        return Known(error, "application", "application", "first", 0.6, "kernel", source)
    return Known(error, "unknown", "crash", "confirm", 0.4, "again", source)


def ready() -> None:
    """Loads the tables now, for a process that may not open files later."""
    logs_known.table()
    for name in ("xids", "nvlink5"):
        catalog.load(name)
