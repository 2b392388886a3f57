"""PySlurm as the back end, against a stand-in with its API and its oddities."""

import json
from pathlib import Path

import pytest

from slurm_gpuhealth.config.settings import Accounting, Slurm
from slurm_gpuhealth.controller import accounting
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import accounting_pyslurm, control, sacct

FAKES = Path(__file__).resolve().parent.parent / "fakes"


@pytest.fixture
def settings(settings, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setattr(sacct, "noted", lambda *_: [])
    conf = tmp_path / "slurm.conf"
    conf.touch()
    return replace(settings, slurm=Slurm(conf=str(conf)), accounting=Accounting(backend="pyslurm", timeout=20.0))


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    def write(*rows):
        base = {
            "cluster": "c", "partition": "gpu", "user_name": "ann", "user_id": 5, "account": "lab", "name": "x",
            "state": "FAILED", "exit_code": 1, "exit_code_signal": 0, "derived_exit_code": 0, "array_id": None,
            "derived_exit_code_signal": 0, "start_time": 1000, "end_time": 2000, "nodelist": "n[1-2]",
        }  # fmt: skip
        (tmp_path / "jobs.json").write_text(json.dumps([{**base, **row} for row in rows]))
        monkeypatch.setenv("PYSLURM_JOBS", str(tmp_path / "jobs.json"))

    return write


def test_jobs_are_the_same_values_as_from_sacct(settings, jobs):
    jobs(
        {"id": 1, "exit_code": 137, "derived_exit_code_signal": 9, "array_id": 7, "submit_command": "sbatch x"},
        {"id": 2, "state": "NODE_FAIL", "failed_node": "n2", "requeue_count": 3, "start_time": 900},
        {"id": 3, "state": "CANCELLED", "user_name": None},
    )
    two, one, three = accounting.finished(settings, 0, 3000)
    assert (one.attempt.exit_code, one.attempt.array, one.attempt.nodes) == (137, 7, ("n1", "n2"))
    assert len(one.attempt.submit) == 16
    assert (two.attempt.failed_node, two.attempt.attempt, two.attempt.state) == ("n2", 3, "NODE_FAIL")
    assert (three.attempt.user, three.attempt.state) == ("5", "CANCELLED")
    assert (one.cluster, one.partition) == ("c", "gpu")


def test_what_runs_or_never_began_or_ended_before_is_no_attempt(settings, jobs):
    jobs(
        {"id": 1, "state": "RUNNING", "end_time": None}, {"id": 2, "nodelist": None, "start_time": None},
        {"id": 3, "end_time": 500}, {"id": 4, "end_time": 3000}, {"id": 5},
    )  # fmt: skip
    assert [one.attempt.job for one in accounting_pyslurm.ended(settings, 1500, 3000)] == [5]


def test_an_odd_job_is_left_out_and_said(settings, jobs, capsys):
    jobs({"id": 1, "nodelist": "n[1-"}, {"id": 2})
    assert [one.attempt.job for one in accounting_pyslurm.ended(settings, 0, 3000)] == [2]
    assert "1 jobs can't be read" in capsys.readouterr().err


def test_an_interpreter_that_is_ended_at_import_is_not_ours(settings, jobs, monkeypatch):
    jobs({"id": 1})
    monkeypatch.setenv("PYSLURM_FATAL", "1")  # a slurm.conf that it can't process
    with pytest.raises(control.Refused, match=r"is /.*/slurm\.conf there, and PySlurm of this"):
        accounting_pyslurm.ended(settings, 0, 3000)


def test_a_missing_slurm_conf_is_said_at_once(settings, monkeypatch):
    monkeypatch.setattr(accounting_pyslurm.child, "probe", None)  # libslurm would wait a minute for it
    gone = replace(settings, slurm=Slurm(conf="/nonexistent/slurm.conf"))
    with pytest.raises(control.Refused, match=r"/nonexistent/slurm\.conf \(slurm\.conf\) is not there"):
        accounting_pyslurm.ended(gone, 0, 3000)


def test_slurmdbd_that_is_away_is_an_error_of_slurm(settings, monkeypatch):
    monkeypatch.delenv("PYSLURM_JOBS", raising=False)
    with pytest.raises(control.SlurmError, match="Failed to get Jobs"):
        accounting_pyslurm.ended(settings, 0, 3000)
    monkeypatch.setenv("PYSLURM_JOBS", "hang")
    with pytest.raises(control.ControllerDown, match="slurmdbd"):
        accounting_pyslurm.ended(replace(settings, accounting=Accounting(backend="pyslurm", timeout=0.5)), 0, 3000)


def test_without_pyslurm_the_error_says_what_to_do(settings, monkeypatch):
    monkeypatch.syspath_prepend("/nonexistent")
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path != str(FAKES)])
    with pytest.raises(control.Refused, match='backend = "sacct"'):
        accounting_pyslurm.ended(settings, 0, 3000)
