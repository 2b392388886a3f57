"""Log files: of any size and content, through gpuhealth explain --log."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.explain import explain
from slurm_gpuhealth.logs import read as logs
from slurm_gpuhealth.logs.read import read_files, read_text

ECC = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
PLAIN = "iteration {}/9000 | lm loss: 2.31 | grad norm: 0.7 | number of nan iterations: 0 |\n"
VICTIM = "[rank{}]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited\n"


def ask(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(explain, ["--log", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The first cause in the middle of a file of several blocks, its victims after it."""
    path = tmp_path / "train.err"
    plain = "".join(PLAIN.format(number) for number in range(60_000))
    path.write_text(plain + ECC + "".join(VICTIM.format(rank) for rank in range(64) if rank != 3) + plain)
    assert path.stat().st_size > 2 * logs.CHUNK
    return path


def test_json_has_the_keys_that_tools_are_built_on(log: Path) -> None:
    status, text = ask(str(log), "--json")
    told = json.loads(text)
    assert status == 0
    assert {"verdict", "confidence", "cause", "collateral", "evidence", "advice"} <= set(told)
    assert told["verdict"] == "node"
    cause = told["cause"]
    assert (cause["line"], cause["rank"], cause["host"], cause["gpu"]) == (60_001, 3, None, None)
    assert cause["text"] == ECC.strip()
    assert len(told["collateral"]) == 20
    assert any("63 other ranks" in sentence for sentence in told["evidence"])


def test_people_read_the_verdict_the_line_the_victims_and_what_to_do(log: Path) -> None:
    status, text = ask(str(log))
    assert status == 0
    assert text.startswith("The log points to hardware. It can't prove it")
    assert f"line 60001 of {log}: {ECC}" in text
    assert "victims" in text
    assert "What to do: Test the node" in text


def test_two_processes_read_the_same_as_one(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = read_files([str(log)])
    monkeypatch.setattr(logs, "PARALLEL", 1)
    assert read_files([str(log)]) == alone


def test_wherever_a_block_ends_the_line_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK", 1000)
    monkeypatch.setattr(logs, "WHOLE", 0)
    path = tmp_path / "log"
    for shift in range(0, 160, 7):
        path.write_text("x" * shift + "\n" + PLAIN.format(1) * 11 + ECC + PLAIN.format(1) * 30)
        reading = read_files([str(path)])
        assert reading.cause is not None
        assert (reading.cause.line, reading.cause.text) == (13, ECC.strip())
        assert reading.collateral == ()


def test_frames_are_found_across_the_end_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK", 512)
    path = tmp_path / "log"
    frames = "".join(f'  File "/h/a{number}.py", line 1, in f{number}\n' for number in range(40))
    path.write_text(f"Traceback (most recent call last):\n{frames}KeyError: 'a'\n")
    assert read_files([str(path)]).frame == "a39.py:f39"


def test_head_and_tail_bound_what_is_read_and_lines_after_the_gap_have_no_number(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("fine\n" * 1000 + "KeyError: 'middle'\n" + "fine\n" * 1000 + "ValueError: end\n")
    reading = read_files([str(path)], head=2000, tail=2000)
    assert reading.error == "ValueError"
    assert reading.cause is not None
    assert reading.cause.line == 0
    assert read_files([str(path)]).error == "KeyError"


def test_the_earliest_of_several_files_by_their_clocks_is_the_cause(tmp_path: Path) -> None:
    for rank in range(4):
        second = 30 - rank
        (tmp_path / str(rank)).write_text(f"2026-01-01 10:00:{second},000 RuntimeError: rank {rank} broke\n")
    paths = [str(tmp_path / str(rank)) for rank in range(4)]
    reading = read_files(paths)
    assert reading.rank == 3
    assert any(paths[3] in sentence for sentence in reading.evidence)


def test_standard_input_is_read_to_its_end() -> None:
    ask_child = [
        sys.executable,
        "-c",
        "from slurm_gpuhealth.commands.explain import explain; explain()",
        "--log",
        "-",
        "--json",
    ]
    done = subprocess.run(
        ask_child, input=(PLAIN.format(1) * 100_000 + ECC).encode(), stdout=subprocess.PIPE, check=True
    )
    assert json.loads(done.stdout)["cause"]["line"] == 100_001


def test_a_fifo_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(PLAIN.format(1) * 100_000 + ECC,))
    writer.start()
    assert read_files([str(path)]).verdict == "node"
    writer.join(10)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    status, text = ask(str(tmp_path / name))
    assert status == 1
    assert str(tmp_path / name).rstrip("/.") in text
    assert "can't be read" in text


def test_a_job_and_a_log_are_not_mixed_up() -> None:
    assert CliRunner().invoke(explain, []).exit_code == 2
    assert CliRunner().invoke(explain, ["train.err"]).exit_code == 2
    assert ask()[0] == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_other_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "log"
    path.write_text("größe\n" * 5 + ECC, encoding=encoding)
    reading = read_files([str(path)])
    assert reading.verdict == "node"
    assert reading.cause is not None
    assert reading.cause.line == 6


def test_progress_bars_and_colours_hide_nothing() -> None:
    bar = "".join(f"\r{number}%|###| {number}/100 [00:01, loss=2.3]" for number in range(100))
    reading = read_text(f"{bar}\r\x1b[31m[rank3]: ValueError: \x1b[1mbad\x1b[0m row\x1b[0m\n")
    assert (reading.error, reading.rank) == ("ValueError", 3)
    assert reading.cause is not None
    assert reading.cause.text == "[rank3]: ValueError: bad row"


HOSTILE = {
    "one line": "error " * 500_000,
    "no newline": "a" * 3_000_000 + ECC,
    "carriage returns": "step 1 error\r" * 250_000,
    "brackets": "[[[[" * 700_000,
    "ranks": "[rank1]: " * 350_000,
    "frames": '  File "' * 350_000,
    "quotes": "Error: " + "x." * 1_500_000 + "Error",
    "numbers": "missing ranks " + "1," * 1_500_000,
    "zeros": "\0" * 3_000_000,
    "escapes": "\x1b[" * 1_500_000,
    "paths": "KeyError: " + "/a" * 1_500_000,
    "xids": "xid (" * 600_000,
    "hosts": "n1:1:1 [0] NCCL INFO " * 150_000,
    "peers": "connection to a1" * 200_000,
    "garbage": random.Random(4).randbytes(3_000_000).decode("latin-1"),  # noqa: S311 - the same each time
    "errors": "".join(f"{number:x} error {'abcdef'[number % 6]}\n" for number in range(200_000)),
    "tracebacks": 'Traceback (most recent call last):\n  File "a", line 1\nKeyError: 1\n' * 45_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_three_hostile_megabytes_take_no_more_than_a_second_or_two(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(HOSTILE[name])
    begun = time.process_time()
    for reading in (read_text(HOSTILE[name]), read_files([str(path)])):
        assert len(reading.fingerprint) < 400
        assert reading.cause is None or (len(reading.cause.text) <= 500 and reading.cause.text.isprintable())
    assert time.process_time() - begun < 4


def test_a_flood_does_not_hide_the_one_line_that_matters(tmp_path: Path) -> None:
    path = tmp_path / "log"
    flood = "".join(f"worker {number}: error_rate 0.{number} is fine\n" for number in range(100_000))
    path.write_text(flood + ECC + flood)
    begun = time.process_time()
    reading = read_files([str(path)])
    assert reading.verdict == "node"
    assert reading.cause is not None
    assert reading.cause.line == 100_001
    assert time.process_time() - begun < 4


def test_a_pipe_that_nobody_writes_to_is_not_waited_for_beyond_the_deadline() -> None:
    ask_child = [
        sys.executable,
        "-c",
        "from slurm_gpuhealth.commands.explain import explain; explain()",
        *("--log", "-", "--timeout", "0.3"),
    ]
    with subprocess.Popen(ask_child, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.wait(60) == 1
        assert child.stderr is not None
        said = child.stderr.read().decode()
    assert "not read to the end in 0.3 s" in said
    assert "--timeout" in said


def test_the_end_of_a_line_longer_than_a_block_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK", 100_000)
    path = tmp_path / "log"
    path.write_text("fine\n" + "a" * 350_000 + " " + ECC + VICTIM.format(1))
    reading = read_files([str(path)])
    assert reading.verdict == "node"
    assert reading.cause is not None
    assert reading.cause.line == 2
