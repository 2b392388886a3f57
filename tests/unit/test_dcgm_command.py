"""gpuhealth diag show, and its table of classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.diag import diag
from slurm_gpuhealth.diagnose import catalogue

CORPUS = Path(__file__).parents[1] / "corpus" / "dcgm"
PACKAGE = Path(catalogue.__file__).parent


def show(*arguments, stdin=b""):
    done = CliRunner().invoke(diag, ["show", *map(str, arguments)], input=stdin)
    assert done.exit_code == 0, done.output
    return done.output


def test_json_has_exactly_the_promised_keys():
    value = json.loads(show(CORPUS / "diag_r2_memory_fail_isolate.json", "--json", "--exit-code", 205))
    assert list(value) == ["outcome", "level", "dcgm_version", "gpus", "tests", "next", "advice"]
    assert (value["outcome"], value["level"], value["dcgm_version"], value["next"]) == ("fail", 2, "4.6.0", "L3")
    assert list(value["gpus"][1]) == ["entity_id", "uuid", "serial", "outcome", "errors"]
    assert value["gpus"][1]["errors"] == [
        {
            "test": "memory",
            "id": 52,
            "name": "DCGM_FR_FAULTY_MEMORY",
            "class": "ISOLATE",
            "message": "Memory test found 3 bad addresses on GPU 1",
        }
    ]


@pytest.mark.parametrize("file", sorted(path.name for path in CORPUS.iterdir() if path.is_file()))
def test_every_sample_is_shown_both_ways(file):
    value = json.loads(show(CORPUS / file, "--json"))
    assert show(CORPUS / file).startswith(value["outcome"] + ": ")
    assert value["advice"].endswith(".")


def test_it_reads_standard_input():
    text = (CORPUS / "diag_r1_pass.json").read_bytes()
    assert show("-", stdin=text).startswith("pass: software passed on 4 GPUs")


def test_a_level_makes_a_missing_test_count():
    assert json.loads(show(CORPUS / "diag_r2_no_plugins.json", "--json", "--level", 2))["outcome"] == "not-testable"


def test_the_gpu_its_serial_and_its_error_can_be_read():
    text = show(CORPUS / "diag_r4_memtest_fail.json")
    assert "GPU 2  fail  serial 1651230000002" in text
    assert "memtest: memory error [DCGM_FR_MEMORY_MISMATCH (58), ISOLATE]" in text


# classes.json

REVIEWED = {
    "CONFIG": {18, 20, 22, 23, 24, 25, 26, 27, 28, 29, 32, 37, 46, 47, 48, 53, 55, 60, 64, 65, 67, 68, 72, 73, 78, 82}
    | {89, 90, 91, 96, 97, 108, 124},
    "MONITOR": {44, 49, 54, 56, 59, 66, 77, 92, 93, 94, 122, 130},
}


def test_each_row_over_nvidias_classes_was_reviewed_and_says_why():
    rows = json.loads((PACKAGE / "classes.json").read_text())
    ours = {cls: {row["code"] for row in rows if row["class"] == cls} for cls in ("CONFIG", "MONITOR")}
    assert ours == REVIEWED
    assert len(rows) == sum(map(len, REVIEWED.values()))
    assert all(len(row["why"]) > 15 and catalogue.name(row["code"]) for row in rows)


@pytest.mark.parametrize(
    "code", [3, 4, 7, 8, 9, 30, 33, 45, 52, 57, 58, 62, 70, 79, 80, 81, 86, 95, 101, 103, 118, 120, 125, 126]
)
def test_what_is_hardware_stays_hardware(code):
    assert catalogue.class_of(code, "4.6.0") in {"ISOLATE", "TRIAGE", "RESET"}


def test_what_dcgm_files_as_configuration_is_never_hardware_in_any_version():
    errors = json.loads((PACKAGE / "errors.json").read_text())["errors"]
    for code, (_, _, _, classes) in errors.items():
        if "CONFIG" in classes.values():
            for version in ("2.4.7", "3.1.3", "3.3.1", "4.6.0"):
                assert catalogue.class_of(int(code), version) == "CONFIG", code
