"""Which known failure a line of a log speaks of: patterns.toml, indexed so that most lines cost one look-up."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slurm_gpuhealth.outcomes import Cause

WORD = re.compile(rb"[a-z]{3,}")
AROUND = 160
ROLES = {"noise": 4, "first": 3, "cascade": 2, "confirm": 1, "weak": 0}
# What stands around a phrase when it is no report: "0 failed GPUs", "no uncorrectable ECC", "gpu_lost=0", "fabric
# manager: running".
NOT = re.compile(
    rb"(?:\b(?:no|without|zero)(?:\s+[\w-]+){0,2}|[,:;(\[|]\s*0%?|\b0/\d+"
    rb"|\b(?:and|with|found|had|has|were|skipped)\s+0"
    rb"|\b(?:can happen if|(?:possible|common|likely|probable) (?:reasons?|causes?))\b.*)\s*$"
)
# A counter in nvidia-smi's table ("Double Bit ECC      : 2") counts the card's life, not this job.
IS_NOT = re.compile(
    rb"[a-z]?[\"')\]]{0,2}"
    rb"(?:[a-z_ -]*\s{3}: \d+\s*$|(?:[\s-]+[a-z_]+){1,2}\s*[:=]\s*0(?![\w.:-]|,\s?\d)"
    rb"|(?: (?:count|counter|list|status|state|time|errors?|iterations?|steps?|values?|detected))?"
    rb"(?:\s*[:=?]\s*|\s+i[sn]\s+|\s*\(|\s+)[\"']?"
    rb"(?:0(?![\w.:-]|,\s?\d)|\[\]|\{\}|not active"
    rb"|(?:no|none|false|inactive|ok|passed|disabled|running|active|ready|empty)\b|n/a))"
)
# And of a node more: what a program is ready for, looks for, or explains, and why Slurm drained some node.
MIGHT = re.compile(
    rb"(?:^\s*(?:#(?:sbatch|pbs|bsub)\b|# [a-z]|--?[a-z][\w-]*[ ,<]|reason=).*"
    rb"|\b(?:previous|earlier|last|prior)(?:ly)? (?:run|job|attempt)\b.*"
    rb"|(?:^|[.,;:#>\]])\s*(?:if|in case|when|whenever|unless|on|upon|case|raise)\b[^.;:]{0,40}"
    rb"|\b(?:will|would) \w+ (?:on|when|if)\b[^.;:]{0,40}"
    rb"|\b(?:check|look|watch|monitor)\w*\s+for\b[^;]{0,40}"
    rb"|\b(?:exclud|skipp|avoid|explain|simulat|inject)\w*\s+(?:[\w-]+\s+){0,3}"
    rb"|\bto (?:detect|avoid|prevent|find|handle|survive)\s+"
    rb"|\b(?:resume|restart|recover|continue)\w*\s+(?:after|from|on)\s+(?:an? )?"
    rb"|\b(?:may|might|could) (?:be|indicate|mean|point to)\s+(?:[\w-]+\s+){0,3}"
    rb"|\b(?:probably|possibly|perhaps|presumably|likely|suspect\w*)\b[^.;:]{0,30}"
    rb"|\b(?:how|what|whether)\b[^.;:]{0,40})[\"']?$"
)
MIGHT_BE = re.compile(
    rb"[a-z]?[\"')]{0,2}\s*(?:errors?|failures?)?\s*"
    rb"(?:check|test\b|detect(?:ion|or)|monitor|handl|callback|toleran|thresh|polic|recover|counter|simulat|track|list\b"
    rb"|-> )"
    rb"|\s+\w+\s+\d{4}-\d\d-\d\dt\d"
)


class Known(NamedTuple):
    """A known failure; the fields are explained at the head of patterns.toml."""

    error: str
    cause: Cause
    kind: str
    role: str
    confidence: float
    advice: str
    source: str


class Pattern(NamedTuple):
    first: bytes
    others: tuple[bytes, ...]
    ordered: bool
    known: Known


class Table(NamedTuple):
    lines: dict[bytes, list[Pattern]]
    """By a word that the line must hold."""
    anchors: tuple[bytes, ...]
    advice: dict[str, str]


@functools.lru_cache(1)
def table() -> Table:
    with open(os.path.join(os.path.dirname(__file__), "patterns.toml"), "rb") as file:
        told = tomllib.load(file)
    common = {word.encode() for word in told["common"]}
    lines: dict[bytes, list[Pattern]] = {}
    for row in told["known"]:
        patterns = row.pop("lines")
        known = Known(**row)
        for pattern in patterns:
            ordered = " & " not in pattern
            for pieces, source in expanded(pattern.split(" * " if ordered else " & "), told["words"]):
                first, *others = (piece.encode() for piece in pieces)
                word = max(WORD.findall(source.encode()), key=lambda one: (one not in common, len(one)))
                lines.setdefault(word, []).append(Pattern(first, tuple(others), ordered, known))
    return Table(lines, tuple(anchor.encode() for anchor in told["anchors"]), told["advice"])


def expanded(pieces: list[str], sets: dict[str, list[str]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """`pieces` with each word of a set in the place of the set's `?name`; and what a line is found by: rather a word of
    a set than those beside it, which are in every other line."""
    choices = [sets[piece[1:]] if piece[0] == "?" else [piece] for piece in pieces]
    named = [number for number, piece in enumerate(pieces) if piece[0] == "?"] or range(len(pieces))
    for one in itertools.product(*choices):
        yield one, " ".join(one[number] for number in named)


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
        for pattern in lines[word]:
            begin = low.find(pattern.first) if pattern.ordered else word_at(low, pattern.first)
            if begin < 0:
                continue
            end = begin + len(pattern.first)
            length = len(pattern.first)
            for piece in pattern.others:
                at = low.find(piece, end) if pattern.ordered else word_at(low, piece)
                if at < 0:
                    break
                end = at + len(piece) if pattern.ordered else end
                length += len(piece)
            else:
                known = pattern.known
                mine = (ROLES[known.role], known.confidence, length)
                if mine > rank and not denied(low, begin, end, known):
                    best, rank = known, mine
    return best


def word_at(low: bytes, piece: bytes) -> int:
    """Where a piece stands without letters of another word before or after it; -1 nowhere."""
    at = low.find(piece)
    while at >= 0:
        end = at + len(piece)
        if not (piece[:1].isalpha() and low[at - 1 : at].isalpha()) and not (
            piece[-1:].isalpha() and low[end : end + 1].isalpha()
        ):
            return at
        at = low.find(piece, end)
    return -1


def denied(low: bytes, begin: int, end: int, known: Known) -> bool:
    """Whether the line says of the phrase between `begin` and `end` that it is not so, or only could be."""
    if known.role not in ("first", "weak") or (known.cause == "application" and known.kind != "numeric"):
        return False  # what follows the name of an exception is its message
    before, after = b"x" * (begin > AROUND) + low[max(0, begin - AROUND) : begin], low[end : end + 40]
    if NOT.search(before) or IS_NOT.match(after):
        return True
    return known.cause == "node" and bool(MIGHT.search(before) or MIGHT_BE.match(after))
