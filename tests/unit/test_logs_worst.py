"""Logs made to be expensive: for each pattern, lines of its own pieces; the time grows no faster than the lines."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from slurm_gpuhealth.logs import known, scan
from slurm_gpuhealth.logs.known import tomllib
from slurm_gpuhealth.logs.read import read_text
from slurm_gpuhealth.node import joblog

ROOT = Path(__file__).parents[2]
PATTERNS = tomllib.loads((ROOT / "slurm_gpuhealth/logs/patterns.toml").read_text())
WORDS = [word.decode() for word in sorted(known.table().lines)]
KIB = 1024
MIB = 1 << 20
LENGTHS = (8 * KIB, 64 * KIB, MIB)
SOAK = os.environ.get("GPUHEALTH_SOAK")
SLACK = 0.05
"""Seconds: below that a ratio says nothing."""


def of(text: str, length: int) -> str:
    return (text * (length // len(text) + 1))[:length]


def spent(text: str) -> float:
    """Seconds of our own, whatever else runs on the machine."""
    begun = time.process_time()
    read_text(text)
    return time.process_time() - begun


def pieces(pattern: str) -> list[str]:
    """The pieces of a pattern, with each set's name replaced by a word of the set."""
    parts = pattern.split(" & " if " & " in pattern else " * ")
    return [PATTERNS["words"][part[1:]][0] if part[0] == "?" else part for part in parts]


def against(pattern: str) -> dict[str, str]:
    """What is repeated in a line to make it dear: near misses, and what stands around a phrase that is denied."""
    parts = pieces(pattern)
    whole = " ".join(parts)
    return {
        "whole": f"{whole} ",
        "all but the last letter": f"{whole[:-1]} ",
        "first piece": f"{parts[0]} ",
        "pieces backwards": " ".join(reversed(parts)) + " ",
        "inside other words": f"x{whole}x",
        "denied": f"no {whole} 0 ",
        "in spaces": f"{whole:<200}",
        "in digits": f"{whole}{'7' * 50}",
        "as an exception": f"{whole} error ",
    }


def row_name(row: dict) -> str:
    return str(row["error"]).replace(" ", "-")


@pytest.mark.parametrize("row", PATTERNS["known"], ids=row_name)
def test_every_pattern_costs_no_more_than_its_text_is_long(row: dict) -> None:
    """All patterns, each in one of the ways (`make soak`: in every) in a line of 8 KiB; of each row the dearest also in
    64 KiB and 1 MiB."""
    read_text("")
    costs = {}
    for number, pattern in enumerate(row["lines"]):
        ways = list(against(pattern).items())
        for how, text in ways if SOAK else [ways[number % len(ways)]]:
            costs[pattern, how] = spent(of(text, LENGTHS[0]))
    assert sum(costs.values()) < 0.05 * len(costs)
    pattern, how = max(costs, key=costs.__getitem__)
    text = against(pattern)[how]
    for length in LENGTHS:
        took = spent(of(text, length))
        assert took < SLACK + length / MIB, (pattern, how, length)
        if length < MIB or SOAK:  # the same in lines
            lines = "\n".join([of(text, 500)] * (length // 500))
            assert spent(lines) < SLACK + 4 * length / MIB, (pattern, how, length, "lines")


@pytest.mark.parametrize(
    "text",
    ["this is usually ", "task died. this ", "located on node: hostname: ", "sending heartbeats): /job:a/replica:1/",
     "and address: 10.0.0.1 has been marked ", "Remote daemon: [[1,2],3] on node ", "exited with exit code : "],
)  # fmt: skip
def test_imitations_of_who_died_and_of_guesses(text: str) -> None:
    for length in LENGTHS:
        assert spent(of(f"node lost: marked dead {text}", length)) < SLACK + length / MIB
    assert spent("\n".join([of(f"marked dead {text}", 500)] * (MIB // 500))) < SLACK + 4


@pytest.mark.parametrize("length", LENGTHS)
def test_all_words_of_the_table_in_one_line(length: int) -> None:
    words = list(WORDS)
    random.Random(1).shuffle(words)  # noqa: S311 - the same each time
    assert spent(of(" ".join(words) + " ", length)) < SLACK + length / MIB


@pytest.mark.parametrize("wide", [60, 500, 2000, 8000])
def test_all_words_of_the_table_in_lines_of_any_width(wide: int) -> None:
    draw = random.Random(2)  # noqa: S311 - the same each time

    def text(length: int) -> str:
        return "\n".join(" ".join(draw.choices(WORDS, k=wide // 9)) for _ in range(length // wide))

    size = MIB if SOAK or wide == 60 else MIB // 4  # most lines show best what grows with their number
    small, large = min(spent(text(size // 8)) for _ in range(3)), spent(text(size))
    assert large < 5
    assert large < 3 * 8 * (small + SLACK * size / MIB)


def test_errors_with_frames_of_other_ranks_before_each(tmp_path: Path) -> None:
    text = "".join(f'[rank{number % 7}]: File "{number}"\nKeyError: {number}\n' for number in range(30_000))
    assert spent(text) < 5


def test_the_ends_of_a_long_line_are_read_and_its_lines_are_still_counted() -> None:
    ecc = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    for text in (f"{ecc} {'a' * MIB}", f"{'a ' * MIB}{ecc}", f"{'a' * MIB}\r{ecc}"):
        reading = read_text(f"fine\n{text}\nKeyError: 1\n")
        assert reading.verdict == "node"
        assert reading.cause is not None
        assert reading.cause.line == 2


def test_shortening_keeps_short_lines_and_every_newline() -> None:
    draw = random.Random(3)  # noqa: S311 - the same each time
    for _ in range(200):
        widths = (draw.choice((0, 1, 50, 8191, 8192, 8193, 9000, 40_000)) for _ in range(8))
        lines = [bytes([draw.randrange(97, 123)]) * width for width in widths]
        ends = [draw.choice((b"\n", b"\r", b"\r\n")) for _ in lines]
        block = b"".join(line + end for line, end in zip(lines, ends)).rstrip(draw.choice((b"", b"\n")))
        short = scan.shortened(block)
        assert short.count(b"\n") == block.count(b"\n")
        assert short.count(b"\r") == block.count(b"\r")
        assert max(map(len, short.replace(b"\r", b"\n").split(b"\n"))) <= scan.LONG + len(scan.CUT)
        if max(map(len, block.replace(b"\r", b"\n").split(b"\n"))) < scan.LONG:
            assert short == block


@pytest.mark.parametrize(
    "text", ["*** JOB 7 ON n1 CANCELLED AT x ", "*** JOB 7 ON ", "*** JOB 7 ON n CANCELLED AT 2026-01-01T00:00:00 x\n"]
)
def test_imitations_of_slurms_last_line_cost_no_more_than_they_are_long(text: str) -> None:
    begun = time.process_time()
    joblog.this_attempt([(1, of(text, 4 * MIB))], 7, 1.0)
    assert time.process_time() - begun < 2
