"""PySlurm as the back end, against a stand-in with its API and its oddities."""

import json
from pathlib import Path

import pytest

from slurm_gpuhealth.config.settings import Accounting, Slurm
from slurm_gpuhealth.controller import accounting
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.outcomes import Attempt
from slurm_gpuhealth.slurm import accounting_pyslurm, control, sacct
from slurm_gpuhealth.slurm.sacct import Ended

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
            "state": "COMPLETED", "array_id": None, "start_time": 1000, "end_time": 2000, "nodelist": "n[1-2]",
            "requeue_count": 0, "qos": "normal", "reservation": "", "time_limit": 90, "constraints": [],
        }  # fmt: skip
        (tmp_path / "jobs.json").write_text(json.dumps([{**base, **row} for row in rows]))
        monkeypatch.setenv("PYSLURM_JOBS", str(tmp_path / "jobs.json"))

    return write


@pytest.fixture(autouse=True)
def slurmdbd(monkeypatch):
    """What sacct would say: attempts; and of which jobs it was asked."""

    class Slurmdbd:
        runs, asked = [], []

        def ended(self, settings, since, until, jobs):
            self.asked.append(jobs)
            return [Ended(one, "c", 0, one.attempt) for one in self.runs if since <= one.end < until]

    it = Slurmdbd()
    monkeypatch.setattr(sacct, "ended", it.ended)
    return it


def run(job, state, code=0, attempt=0, start=1000.0):
    return Attempt(job, attempt, "ann", "lab", "x", None, state, code, 0, start, start + 500, ("n1",))


def test_a_job_that_ran_once_and_completed_is_the_same_value_as_from_sacct(settings, jobs, slurmdbd):
    jobs({"id": 1, "array_id": 7, "submit_command": "sbatch x"}, {"id": 3, "user_name": None, "start_time": 900})
    three, one = accounting.finished(settings, 0, 3000)
    assert (one.attempt.state, one.attempt.exit_code, one.attempt.array) == ("COMPLETED", 0, 7)
    assert (one.attempt.nodes, len(one.attempt.submit)) == (("n1", "n2"), 16)
    assert one.cluster == "c"
    assert three.attempt.user == "5"
    assert slurmdbd.asked == []


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, ("gpu", "normal", "", 5400.0, "")),
        (
            {"reservation": "r" * 99, "constraints": ["a100", "[b|c]"], "time_limit": None},
            ("gpu", "normal", "r" * 64, None, "a100,[b|c]"),
        ),
        (
            {"qos": None, "reservation": None, "constraints": None, "time_limit": "PartitionLimit"},
            ("gpu", "", "", None, ""),
        ),
        ({"partition": None, "time_limit": 2**31 - 1, "constraints": ["c" * 99]}, ("", "normal", "", None, "c" * 64)),
    ],
)
def test_where_a_job_was_sent_and_what_it_asked_for(settings, jobs, asked, sent):
    jobs({"id": 1, **asked})
    (one,) = accounting_pyslurm.ended(settings, 0, 3000)
    assert tuple(getattr(one.attempt, name) for name in accounting.SENT) == sent


def test_what_pyslurm_can_not_tell_is_fetched_from_sacct(settings, jobs, slurmdbd):
    jobs(
        {"id": 1}, {"id": 2, "state": "FAILED", "exit_code": 137}, {"id": 3, "requeue_count": 1, "start_time": 1600},
        {"id": 4, "state": "RUNNING", "requeue_count": 1, "end_time": None}, {"id": 5, "state": "RUNNING"},
        {"id": 6, "state": "FAILED", "exit_code": 128},
    )  # fmt: skip
    slurmdbd.runs = [
        run(2, "FAILED", 137), run(3, "NODE_FAIL"), run(3, "COMPLETED", attempt=1, start=1600.0), run(4, "FAILED", 3),
        run(6, "FAILED", 128), run(9, "FAILED", 1),  # a task of the array 6
    ]  # fmt: skip
    found = {(one.attempt.job, one.attempt.attempt): one.attempt for one in accounting.finished(settings, 0, 3000)}
    assert slurmdbd.asked == [(2, 3, 4, 6)]
    assert {key: (one.state, one.exit_code) for key, one in found.items()} == {
        (1, 0): ("COMPLETED", 0),
        (2, 0): ("FAILED", 137),
        (3, 0): ("NODE_FAIL", 0),
        (3, 1): ("COMPLETED", 0),
        (4, 0): ("FAILED", 3),
        (6, 0): ("FAILED", 128),
    }


def test_an_older_pyslurm_that_does_not_count_requeues_leaves_all_to_sacct(settings, jobs, slurmdbd):
    jobs(*({"id": number, "requeue_count": None} for number in range(1, 502)))
    slurmdbd.runs = [run(7, "NODE_FAIL"), run(7, "COMPLETED", attempt=1, start=1600.0)]
    assert [one.attempt.state for one in accounting.finished(settings, 0, 3000)] == ["NODE_FAIL", "COMPLETED"]
    assert [len(jobs) for jobs in slurmdbd.asked] == [500, 1]


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
