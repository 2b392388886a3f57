"""Which known failure a line of a log speaks of: patterns.toml, indexed so that most lines cost one look-up."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_gpuhealth.correlate.model import Cause

WORD = re.compile(rb"[a-z]{3,}")
ROLES = {"noise": 3, "first": 2, "cascade": 1, "confirm": 0}


class Known(NamedTuple):
    """A known failure; the fields are explained at the head of patterns.toml."""

    error: str
    cause: Cause
    kind: str
    role: str
    confidence: float
    advice: str
    source: str


class Table(NamedTuple):
    lines: dict[bytes, list[tuple[bytes, tuple[bytes, ...], Known]]]
    """Word → (first piece, the other pieces, what it means)."""
    anchors: tuple[bytes, ...]
    advice: dict[str, str]


@functools.lru_cache(1)
def table() -> Table:
    with open(os.path.join(os.path.dirname(__file__), "patterns.toml"), "rb") as file:
        told = tomllib.load(file)
    common = {word.encode() for word in told["common"]}
    lines: dict[bytes, list[tuple[bytes, tuple[bytes, ...], Known]]] = {}
    for row in told["known"]:
        patterns = row.pop("lines")
        known = Known(**row)
        for pattern in patterns:
            first, *others = pattern.encode().split(b" * ")
            word = max(WORD.findall(pattern.encode()), key=lambda one: (one not in common, len(one)))
            lines.setdefault(word, []).append((first, tuple(others), known))
    return Table(lines, tuple(anchor.encode() for anchor in told["anchors"]), told["advice"])


def words(low: bytes) -> set[bytes]:
    """Those words of a text in lower case by which there may be patterns."""
    return table().lines.keys() & WORD.findall(low)


def recognise(low: bytes, among: Iterable[bytes]) -> Known | None:
    """What a line in lower case speaks of, by the words that may be in it: what ranks highest, noise above all."""
    best, rank = None, (-1, 0.0, 0)
    lines = table().lines
    for word in among:
        if word not in low:
            continue
        for first, others, known in lines[word]:
            at = low.find(first)
            if at < 0:
                continue
            size = length = len(first)
            for piece in others:
                at = low.find(piece, at + size)
                if at < 0:
                    break
                size = len(piece)
                length += size
            else:
                mine = (ROLES[known.role], known.confidence, length)
                if mine > rank:
                    best, rank = known, mine
    return best
