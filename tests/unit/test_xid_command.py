"""gpuhealth xid: codes explained, logs decoded, broken input refused in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.xid import xid
from slurm_gpuhealth.xid import catalog

LINE = b"[ 1.0] NVRM: Xid (PCI:0000:3B:00 GPU-I:05): 31, pid=7, name=a\x1b[2J, Ch 8\n"


def ask(*arguments: str, stdin: bytes | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(xid, list(arguments), input=stdin)
    return result.exit_code, result.output


@pytest.mark.parametrize("code", ["79", "xid79", "Xid 79", "XID:79"])
def test_a_code_is_explained(code: str) -> None:
    status, text = ask(code)
    assert status == 0
    assert text.startswith("Xid 79: ")
    assert "RESTART_BM" in text
    assert "nverror.h" in text


def test_a_large_number_is_an_sxid() -> None:
    assert ask("20034")[1] == ask("sxid20034")[1]
    assert ask("20034")[1].startswith("SXid 20034: ")


def test_every_code_of_the_catalogue_is_explained_and_sourced() -> None:
    for kind in ("xid", "sxid"):
        table = catalog.load(f"{kind}s")
        for code, row in table[f"{kind}s"].items():
            status, text = ask(f"{kind}{code}", "--json")
            told = json.loads(text)
            assert (status, told["meaning"] > "", len(told["sources"]) > 0) == (0, True, True), code
            assert set(row["sources"]) <= set(table["sources"])
            assert row.get("action") is None or row["action"] in catalog.load("xids")["actions"], code
            assert row.get("investigate") is None or row["investigate"] in catalog.load("xids")["actions"], code


def test_an_unknown_code_is_an_error() -> None:
    status, text = ask("999")
    assert status == 1
    assert "not in the catalogue" in text


def test_a_log_is_decoded_to_stable_json(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"nothing\r\n" + LINE)
    status, text = ask(str(log), "--json")
    assert status == 0
    assert json.loads(text) == {
        "line": 2,
        "kind": "xid",
        "code": 31,
        "pci": "0000:3b:00",
        "pid": 7,
        "process": "a\x1b[2J",
        "mig": 5,
        "fatal": None,
        "link": None,
        "previous": None,
        "class": "application",
        "action": "RESTART_APP",
        "meaning": json.loads(ask("31", "--json")[1])["meaning"],
    }


def test_a_table_for_people_sends_no_control_characters(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(LINE)
    status, text = ask(str(log))
    assert status == 0
    assert "xid 31" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"", 0, "no event"),
        (b"hello", 0, "no event"),
        (b"\xff\xfe\n" + LINE.rstrip(), 0, "xid 31"),
        (b"\x7fELF\0\0" + LINE, 1, "is not text"),
        (b"x" * 300_000 + b"\n" + LINE, 0, "xid 31"),
    ],
)
def test_broken_input_is_answered_clearly(tmp_path: Path, content: bytes, status: int, says: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    assert ask(str(log))[0] == status
    assert says in ask(str(log))[1]


@pytest.mark.parametrize("path", ["/nonexistent", "/tmp"])
def test_a_file_that_cannot_be_read_is_an_error(path: str) -> None:
    status, text = ask(path)
    assert status == 1
    assert "can't be read" in text


def test_standard_input_is_read() -> None:
    program = "from slurm_gpuhealth.commands.xid import xid; xid()"
    done = subprocess.run([sys.executable, "-c", program, "-", "--json"], input=LINE, capture_output=True, check=True)
    assert json.loads(done.stdout)["code"] == 31
