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
    from collections.abc import Iterator

    from slurm_gpuhealth.outcomes import Cause

WORD = re.compile(rb"[a-z]{3,}")
AROUND = 160
ROLES = {"noise": 4, "first": 3, "cascade": 2, "confirm": 1, "weak": 0}
DENIABLE = ("first", "weak")
# Words around a phrase that show it reports no failure: "0 failed GPUs", "no uncorrectable ECC", "gpu_lost=0",
# "fabric manager: running".
NOT = re.compile(
    rb"(?:\b(?:no|without|zero)(?:\s+[\w-]+){0,2}|[,:;(\[|]\s*0%?|\b0/\d+"
    rb"|\b(?:and|with|found|had|has|were|skipped)\s+0"
    rb"|\b(?:can happen if|(?:possible|common|likely|probable) (?:reasons?|causes?))\b.*)\s*$"
)
# A counter in nvidia-smi's table ("Double Bit ECC      : 2") counts over the card's lifetime, not over this job.
IS_NOT = re.compile(
    rb"[a-z]?[\"')\]]{0,2}"
    rb"(?:[a-z_ -]*\s{3}: \d+\s*$|(?:[\s-]+[a-z_]+){1,2}\s*[:=]\s*0(?![\w.:-]|,\s?\d)"
    rb"|(?: (?:count|counter|list|status|state|time|errors?|iterations?|steps?|values?|detected))?"
    rb"(?:\s*[:=?]\s*|\s+i[sn]\s+|\s*\(|\s+)[\"']?"
    rb"(?:0(?![\w.:-]|,\s?\d)|\[\]|\{\}|not active"
    rb"|(?:no|none|false|inactive|ok|passed|disabled|running|active|ready|empty)\b|n/a))"
)
# More such words, for causes on a node: a program is prepared for the failure, looks for it or explains it; or the
# line is the reason why Slurm drained some node.
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


# What a message only guesses, after what it knows: "heartbeat timeout. This indicates that the task was preempted".
GUESS = re.compile(
    rb"\b(?:this (?:can happen|(?:most likely |usually |often )?(?:indicates|means)|is (?:usually|(?:most )?likely)"
    rb"|(?:may|might|could) (?:be|mean|indicate))|(?:potential|possible|common|likely) (?:root )?(?:causes|reasons)"
    rb"|either the leader task)\b"
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
    rank: tuple[int, float, int]
    """If several patterns fit, the one with the highest rank counts: role, then confidence, then length."""


class Table(NamedTuple):
    lines: dict[bytes, dict[bytes, list[Pattern]]]
    """Patterns by a word that the line must contain and by a second such word (b"": one is enough); highest rank
    first."""
    anchors: tuple[bytes, ...]
    advice: dict[str, str]


@functools.lru_cache(1)
def table() -> Table:
    with open(os.path.join(os.path.dirname(__file__), "patterns.toml"), "rb") as file:
        told = tomllib.load(file)
    common = {word.encode() for word in told["common"]}
    lines: dict[bytes, dict[bytes, list[Pattern]]] = {}
    for row in told["known"]:
        rows = row.pop("lines")
        known = Known(**row)
        for written in rows:
            ordered = " & " not in written
            for pieces, source in expanded(written.split(" * " if ordered else " & "), told["words"]):
                first, *others = (piece.encode() for piece in pieces)
                word = max(WORD.findall(source.encode()), key=lambda one: (one not in common, len(one)))
                rank = ROLES[known.role], known.confidence, len(first) + sum(map(len, others))
                # Pieces in any order must be whole words, so the line must contain each of their words.
                second = max({b"", *(() if ordered else WORD.findall(" ".join(pieces).encode()))} - {word}, key=len)
                pattern = Pattern(first, tuple(others), ordered, known, rank)
                lines.setdefault(word, {}).setdefault(second, []).append(pattern)
    for by_second in lines.values():
        for patterns in by_second.values():
            patterns.sort(key=lambda pattern: pattern.rank, reverse=True)
    return Table(lines, tuple(anchor.encode() for anchor in told["anchors"]), told["advice"])


def expanded(pieces: list[str], sets: dict[str, list[str]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """`pieces` with `?name` replaced by each word of that set; and the words that lines are found by.

    Words of a set are preferred: the words beside them are in very many lines.
    """
    choices = [sets[piece[1:]] if piece[0] == "?" else [piece] for piece in pieces]
    named = [number for number, piece in enumerate(pieces) if piece[0] == "?"] or range(len(pieces))
    for one in itertools.product(*choices):
        yield one, " ".join(one[number] for number in named)


def words(low: bytes) -> set[bytes]:
    """The words of a lower-case text that patterns may be indexed by."""
    return table().lines.keys() & WORD.findall(low)


def recognise(low: bytes) -> Known | None:
    """The known failure of a lower-case line: of what it says, else of what it guesses."""
    best = _best(low)
    guess = GUESS.search(low) if best is not None else None
    said = _best(low[: guess.start()]) if guess else None
    return best if said is None or said.role == "weak" else said


def _best(low: bytes) -> Known | None:
    """The known failure that ranks highest; noise ranks above all."""
    best, rank = None, (-1, 0.0, 0)
    lines = table().lines
    every = {b"", *WORD.findall(low)}
    # Many patterns share a piece, and many fit the same place: each piece is searched for and judged only once.
    places: dict[bytes, int] = {}
    refused: dict[tuple[int, int, bool], bool] = {}
    for word in lines.keys() & every:
        by_second = lines[word]
        for second in by_second.keys() & every:
            for pattern in by_second[second]:
                if pattern.rank <= rank:
                    break
                found = _ordered(low, pattern) if pattern.ordered else _together(low, pattern, places)
                if found and not _refused(low, *found, pattern.known, refused):
                    best, rank = pattern.known, pattern.rank
                    break
    return best


def _refused(low: bytes, begin: int, end: int, known: Known, judged: dict[tuple[int, int, bool], bool]) -> bool:
    """`denied`, once for each place."""
    if known.role not in DENIABLE or (known.cause == "application" and known.kind != "numeric"):
        return False
    key = begin, end, known.cause == "node"
    if key not in judged:
        judged[key] = denied(low, begin, end, known)
    return judged[key]


def _ordered(low: bytes, pattern: Pattern) -> tuple[int, int] | None:
    """Where the pieces of a pattern follow each other."""
    begin = low.find(pattern.first)
    end = begin + len(pattern.first)
    for piece in pattern.others if begin >= 0 else ():
        at = low.find(piece, end)
        if at < 0:
            return None
        end = at + len(piece)
    return (begin, end) if begin >= 0 else None


def _together(low: bytes, pattern: Pattern, places: dict[bytes, int]) -> tuple[int, int] | None:
    """Where the first piece of a pattern stands, if the line contains all others too."""
    begin = -1
    for piece in (*pattern.others, pattern.first):
        begin = places.get(piece, -2)
        if begin == -2:
            begin = places[piece] = word_at(low, piece)
        if begin < 0:
            return None
    return begin, begin + len(pattern.first)


def word_at(low: bytes, piece: bytes) -> int:
    """Where a piece stands as a word of its own, with no letters before or after it; -1: nowhere."""
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
    """Whether the line says that the phrase between `begin` and `end` is not so, or only possible."""
    if known.role not in DENIABLE or (known.cause == "application" and known.kind != "numeric"):
        return False  # what follows the name of an exception is its message
    before, after = b"x" * (begin > AROUND) + low[max(0, begin - AROUND) : begin], low[end : end + 40]
    if NOT.search(before) or IS_NOT.match(after):
        return True
    return known.cause == "node" and bool(MIGHT.search(before) or MIGHT_BE.match(after))
