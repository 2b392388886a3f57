"""gpuhealth import writes the files for replay, from accounting with or without the store; all of them or none."""

import json
import os
import re
import stat

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.load import load
from slurm_gpuhealth.correlate.cases import application
from slurm_gpuhealth.correlate.lines import read_attempt, read_event
from slurm_gpuhealth.outcomes import Attempt, Cited, Reading
from slurm_gpuhealth.slurm import control, sacct, topology
from slurm_gpuhealth.slurm.sacct import Ended, Noted
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store

NOW = 1_795_300_000.0
SENT = {
    "partition": "annlab", "qos": "annlab", "reservation": "course", "timelimit": 5400.0, "constraint": "a100&nvme",
}  # fmt: skip


def ended(job, **more):
    values = {"user": "ann", "account": "lab", "name": "train\n|x", "array": None, "state": "FAILED", **more}
    attempt = Attempt(job=job, attempt=0, exit_code=9, signal=0, start=NOW - 90, end=NOW - 50, nodes=("n1",), **values)
    return Ended(attempt._replace(submit="of-ann", **SENT), "c", 1, None)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(sacct, "ended", lambda *_: [ended(1), ended(2, user="bob", state="COMPLETED")])
    drain = {"cluster": "c", "start": NOW - 60, "end": None, "state": "DRAIN"}
    notes = [
        Noted(node="n1", user="carol", reason="ann broke it", **drain),
        Noted(node="n2", user="root", reason="Not responding", **drain),
    ]
    monkeypatch.setattr(sacct, "noted", lambda *_: notes)
    monkeypatch.setattr(topology, "leaves", lambda _: {"s0": ["n1", "n2"]})
    monkeypatch.setattr("time.time", lambda: NOW)
    path = tmp_path / "gpuhealth.toml"
    path.write_text(f'[store]\ndatabase = "{tmp_path}/store/cluster.db"\n')
    path.chmod(0o600)
    monkeypatch.setenv("GPUHEALTH_CONFIG", str(path))
    return path


@pytest.fixture
def store(config):
    """With what n1 recorded of job 1, and a finding."""
    engine = open_store(load(node="n1"))
    key = {"node": "n1", "journal": "j", "sub": 0, "seq": 1, "taken": 1}
    reading = Reading("application", 0.9, "application", hosts=("n1",))._asdict()
    reading["cause"] = Cited(3, "ValueError: ann's secret")._asdict()
    with engine.begin() as db:
        record = {"gpus": "GPU-a", "started": NOW - 89, "exit_code": 137, "signal": 0}
        db.execute(sql.insert(schema.run).values(**key, id=1, **record))
        db.execute(sql.insert(schema.joblog).values(**key, id=1, time=NOW - 49, reading=json.dumps(reading)))
        details = json.dumps({"process": "train.py"})
        found = {"time": NOW - 55, "source": "xid", "code": "79", "severity": "fault", "uuid": "GPU-a"}
        db.execute(sql.insert(schema.finding).values(**key, id=5, details=details, **found))
        db.execute(sql.insert(schema.cursor).values(name="taken", value="1"))


def run(tmp_path, *options):
    options = options if "--since" in options else (*options, "--since", "1d")
    argv = ["import", "--jobs", str(tmp_path / "J"), "--events", str(tmp_path / "E"), *options]
    return CliRunner().invoke(main, argv)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_accounting_alone_is_enough(config, tmp_path):
    done = run(tmp_path, "--topology", str(tmp_path / "T"), "--since", "1d")
    assert done.exit_code == 0, done.output
    assert "2 attempts, 2 events, 1 leaves, from accounting alone" in done.output
    jobs = [read_attempt(row) for row in lines(tmp_path / "J")]
    assert [(one.job, one.user, one.name, one.nodes) for one in jobs] == [
        (1, "ann", "train\n|x", ("n1",)),
        (2, "bob", "train\n|x", ("n1",)),
    ]
    assert [read_event(row).source for row in lines(tmp_path / "E")] == ["drain", "drain"]
    assert lines(tmp_path / "T") == [{"s0": ["n1", "n2"]}]
    assert not (tmp_path / "store").exists()
    assert lines(tmp_path / "J")[0].items() >= SENT.items()
    keys = "job attempt user account name array state exit_code signal start end nodes gpus failed_node log log_class"
    assert set(keys.split()) <= set(lines(tmp_path / "J")[0])


def test_the_record_adds_gpus_true_codes_logs_and_findings(store, tmp_path):
    done = run(tmp_path)
    assert done.exit_code == 0, done.output
    first, second = lines(tmp_path / "J")
    assert (first["gpus"], first["exit_code"]) == ({"n1": ["GPU-a"]}, 137)
    assert (first["log"], first["log_class"]) == ("ValueError: ann's secret", "application")
    assert (second["gpus"], second["exit_code"]) == (None, 9)
    assert {row["source"] for row in lines(tmp_path / "E")} == {"drain", "xid"}


def test_anonymous_files_name_nobody(store, tmp_path):
    done = run(tmp_path, "--anonymous")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "J").read_text() + (tmp_path / "E").read_text()
    words = set(re.findall(r"[A-Za-z]+", text))  # whole ones: in what stands for a name, "ann" is there by chance
    assert not words & {"ann", "bob", "carol", "lab", "train", "secret", "annlab", "course"}
    first, second = lines(tmp_path / "J")
    assert first["user"] != second["user"]
    assert first["account"] == second["account"]
    assert (first["timelimit"], first["constraint"]) == (SENT["timelimit"], SENT["constraint"])
    events = {row["node"]: row["detail"] for row in lines(tmp_path / "E") if row["source"] == "drain"}
    assert events["n2"]["reason"] == "Not responding"
    run(tmp_path, "--anonymous")
    assert lines(tmp_path / "J")[0]["user"] != first["user"]  # a new salt each time


def test_hashed_names_tell_the_same_applications_apart_as_the_names_do(store, tmp_path, monkeypatch):
    names = ["run1", "run22", "walk1", *(f"step {'abcdefghij'[n]}" for n in range(10))]
    monkeypatch.setattr(sacct, "ended", lambda *_: [ended(job, name=name) for job, name in enumerate(names, 1)])
    assert run(tmp_path, "--anonymous").exit_code == 0
    found = [application("", "", row["name"], "") for row in lines(tmp_path / "J")][: len(names)]
    assert found[0] == found[1]
    assert len(set(found)) == len(names) - 1


def test_the_files_are_for_their_owner_alone(config, tmp_path):
    run(tmp_path)
    assert stat.S_IMODE(os.stat(tmp_path / "J").st_mode) == 0o600


def test_an_error_leaves_the_old_file_and_no_other(config, tmp_path, monkeypatch):
    (tmp_path / "J").write_text("old")

    def away(*_):
        yield ended(1)
        raise control.ControllerDown("slurmdbd is away")

    monkeypatch.setattr(sacct, "ended", away)
    done = run(tmp_path)
    assert done.exit_code == 1
    assert "slurmdbd is away" in done.output
    assert (tmp_path / "J").read_text() == "old"
    assert [name for name in os.listdir(tmp_path) if "gpuhealth.toml" not in name] == ["J"]


@pytest.mark.parametrize("since", ["7", "d", "-1d", "7 moons"])
def test_an_age_without_a_unit_is_refused(config, tmp_path, since):
    done = run(tmp_path, "--since", since)
    assert done.exit_code == 2
    assert "an age, 30min, 6h or 7d" in done.output
