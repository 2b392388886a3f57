"""The command gpuhealth simulate."""

from __future__ import annotations

import json

from click.testing import CliRunner

from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.simulate.cases import CASES

SMALL = ("--nodes", "64", "--days", "10", "--seeds", "1")


def simulate(*argv: str):
    return CliRunner().invoke(main, ["simulate", *argv])


def test_the_policies_are_compared_one_a_line():
    result = simulate(*SMALL, "--policy", "any failure", "--policy", "1 hard Xid")
    assert result.exit_code == 0, result.output
    assert "base: 1 clusters of 64 nodes, 10 days" in result.output
    rows = [line.split("  ")[0] for line in result.output.splitlines()]
    assert "any failure" in rows
    assert "1 hard Xid" in rows


def test_ours_comes_with_its_verdicts_and_its_calibration():
    result = simulate(*SMALL, "--policy", "ours")
    assert result.exit_code == 0, result.output
    for words in ("ours p>0.30", "Verdicts right", "expected calibration error", "p_lemon"):
        assert words in result.output


def test_what_no_job_has_shown_is_null_in_json_and_not_nan():
    result = simulate("--nodes", "4", "--days", "1", "--seeds", "1", "--setting", "none", "--policy", "ours", "--json")
    assert '"right_node": null' in result.output
    assert "NaN" not in result.output


def test_json_has_one_object_for_each_setting_and_policy():
    result = simulate(*SMALL, "--setting", "base", "--setting", "none", "--policy", "any NODE_FAIL", "--json")
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [(row["setting"], row["policy"]) for row in rows] == [("base", "any NODE_FAIL"), ("none", "any NODE_FAIL")]
    assert rows[1]["recall"] is None


def test_the_settings_are_listed_with_what_they_change():
    lines = simulate("--list").output.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)
    assert "arrays=8" in next(line for line in lines if line.startswith("arrays "))


def test_a_wrong_name_is_told_with_the_right_ones():
    for argv, names in (("--setting", "silent"), ("--policy", "any failure")):
        result = simulate(argv, "nonsense")
        assert result.exit_code == 2
        assert "'nonsense'" in result.output
        assert names in result.output


def test_only_the_files_are_written(tmp_path):
    result = simulate(*SMALL, "--setting", "silent-named", "--logs", "--write", str(tmp_path / "w"))
    assert result.exit_code == 0, result.output
    assert sorted(one.name for one in (tmp_path / "w").iterdir()) == [
        "EVENTS.jsonl",
        "JOBS.jsonl",
        "TOPOLOGY.json",
        "TRUTH.jsonl",
    ]
    rows = [json.loads(line) for line in (tmp_path / "w" / "JOBS.jsonl").open()]
    assert all((row["log"] is None) == (row["state"] == "COMPLETED") for row in rows)
    (tmp_path / "file").write_text("")
    assert simulate(*SMALL, "--write", str(tmp_path / "file" / "w")).exit_code == 1
