"""Recorded outcomes and events, in any order, given to the correlator by time: the files of `gpuhealth replay`.

A file is read twice: for the time of each line, then line by line in that order. So a year of jobs needs a few bytes
a line, and not the jobs themselves, in memory.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from array import array
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, TypeVar

from slurm_gpuhealth.correlate.lines import read_attempt, read_event
from slurm_gpuhealth.outcomes import Attempt, Event, Suspicion, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from slurm_gpuhealth.correlate.engine import Correlator

T = TypeVar("T")
# A key is told from a user's text by its quotes: within a JSON string they have a backslash before them.
NUMBER = rb"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*[,}]"
TIME = {key: re.compile(rb'"%s"\s*:\s*' % key.encode() + NUMBER) for key in ("end", "time")}
BACKSLASH = ord("\\")
LONGEST = 64 << 20
LOT = 200
DECODE = json.JSONDecoder().raw_decode


class HistoryError(Exception):
    """A file can't be used: the text names file, line and key."""


class Index(NamedTuple):
    """Where the lines of a file are, in the order of their time."""

    order: array[int]
    times: array[float]
    offsets: array[int]
    lines: array[int]
    sorted: bool


def run(
    jobs: str, events: str, correlator: Correlator, every: float | None = None, above: float = 0.05
) -> Iterator[Verdict | Suspicion]:
    """Each verdict when `horizon` has passed and nothing can change it, or at the end. Suspicions above `above` every
    `every` seconds of recorded time and at the end. Raises HistoryError."""
    horizon = correlator.settings.horizon
    waiting: dict[tuple[int, int], Verdict] = {}
    ends: deque[tuple[float, tuple[int, int]]] = deque()
    due = now = None
    for now, one in _lots(_merged(jobs, events, correlator.settings.after)):
        if due is None:
            due = now + (every or float("inf"))
        while now >= due:
            _rescored(correlator, waiting)
            yield from correlator.suspicions(due, above)
            due += every or float("inf")
        if isinstance(one, Event):
            correlator.event(one)
            continue
        verdict = correlator.attempt(one)
        if verdict is None:
            continue
        key = verdict.job, verdict.attempt
        waiting[key] = _brief(verdict)
        ends.append((now, key))
        if ends[0][0] < now - horizon:
            _rescored(correlator, waiting)
            while ends[0][0] < now - horizon:
                old = waiting.pop(ends.popleft()[1], None)
                yield from [old] if old else []
    _rescored(correlator, waiting)
    yield from waiting.values()
    yield from correlator.suspicions(now, above) if now is not None else []


def _rescored(correlator: Correlator, waiting: dict[tuple[int, int], Verdict]) -> None:
    for verdict in correlator.rescored():
        key = verdict.job, verdict.attempt
        if key in waiting:
            waiting[key] = _brief(verdict)


def _brief(verdict: Verdict) -> Verdict:
    """Only what is printed: a year of verdicts is kept."""
    return Verdict(verdict.job, verdict.attempt, verdict.cause, verdict.confidence, verdict.node, verdict.gpu)


def topology(path: str) -> dict[str, list[str]]:
    """Leaf switch → its nodes. Raises HistoryError."""
    try:
        with open(path, "rb") as file:
            leaves = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise HistoryError(f"{path}: {error}") from None
    if not isinstance(leaves, dict) or not all(
        isinstance(nodes, list) and all(isinstance(node, str) for node in nodes) for nodes in leaves.values()
    ):
        raise HistoryError(f'{path}: expected {{"leaf": ["node", ...], ...}}')
    return leaves


def _lots(found: Iterator[T]) -> Iterator[T]:
    """Some are read, then judged: what either needs stays in the processor's cache."""
    while some := list(islice(found, LOT)):
        yield from some


def _merged(jobs: str, events: str, after: float) -> Iterator[tuple[float, Attempt | Event]]:
    """Events by their time, attempts when the time has passed in which an event may still be theirs."""
    attempts = _in_order(jobs, "end", _attempt)
    told = _in_order(events, "time", read_event)
    event = next(told, None)
    for end, attempt in attempts:
        while event is not None and event[0] <= end + after:
            yield event
            event = next(told, None)
        yield end + after, attempt
    while event is not None:
        yield event
        event = next(told, None)


def _attempt(row: dict[str, Any]) -> Attempt:
    """The attempt with what its log says instead of the log."""
    attempt = read_attempt(row)
    if attempt.log is None or attempt.log_class is not None:
        return attempt
    from slurm_gpuhealth.logs.read import read_text

    return attempt._replace(log=None, reading=read_text(attempt.log))


def _in_order(path: str, key: str, read: Callable[[Any], T]) -> Iterator[tuple[float, T]]:
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):  # of a pipe nothing would be left, or one would wait for ever
            raise HistoryError(f"{path}: is a pipe, and is read twice: write it into a file first")
        with open(path, "rb", buffering=1 << 20) as file:
            index = _index(file, path, key)
        with open(path, "rb", buffering=1 << (20 if index.sorted else 14)) as file:
            place, last = 0, b""
            for one in index.order:
                if index.offsets[one] != place:
                    file.seek(index.offsets[one])
                line = file.readline(LONGEST)
                place = index.offsets[one] + len(line)
                if line == last:  # the same again: equal lines are neighbours in this order
                    continue
                last = line
                yield index.times[one], _read(line, path, index.lines[one], read)
    except OSError as error:
        raise HistoryError(f"{path}: {error.strerror}") from None


def _index(file: BinaryIO, path: str, key: str) -> Index:
    """Lines of equal times are ordered by what they say, so that the order of the file does not matter."""
    times, offsets, lines = array("d"), array("q"), array("l")
    rank = array("q")
    offset, sorts = 0, True
    find = TIME[key].search
    for number, line in enumerate(file, 1):
        if not line.isspace():
            found = find(line)
            known = found and line[found.start() - 1] != BACKSLASH
            time = float(found[1]) if found and known else _time(line, path, number, key)
            sorts = sorts and (not times or time > times[-1])
            times.append(time)
            offsets.append(offset)
            lines.append(number)
            rank.append(zlib.crc32(line))
        offset += len(line)
    order = list(range(len(times)))
    if not sorts:
        order.sort(key=lambda one: (times[one], rank[one]))
    return Index(array("l", order), times, offsets, lines, sorts)


def _time(line: bytes, path: str, number: int, key: str) -> float:
    row = _object(line, path, number)
    try:
        return float(row[key])
    except KeyError:
        raise HistoryError(f"{path}:{number}: no key {key!r}") from None
    except (TypeError, ValueError):
        raise HistoryError(f"{path}:{number}: {key!r} is {row[key]!r}, not a number of seconds") from None


def _read(line: bytes, path: str, number: int, read: Callable[[Any], T]) -> T:
    try:
        return read(_object(line, path, number))
    except ValueError as error:
        raise HistoryError(f"{path}:{number}: {error}") from None


def _object(line: bytes, path: str, number: int) -> dict[str, Any]:
    try:
        text = line.decode("utf-8", "surrogatepass").strip("\ufeff \t\r\n")
        row, end = DECODE(text)  # json.loads looks for the encoding first, and twice for blanks
        if end < len(text):
            raise ValueError(f"Extra data: column {end + 1}")
    except (ValueError, RecursionError) as error:
        raise HistoryError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise HistoryError(f"{path}:{number}: not a JSON object")
    return row
