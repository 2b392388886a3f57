"""What the doctor says about the store: each thing that would keep a node's records from arriving."""

import os
from pathlib import Path

import pytest
import sqlalchemy as sql

from slurm_gpuhealth.config.settings import Correlate, Paths, Settings, Store
from slurm_gpuhealth.doctor import store
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import parse_config
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store

FILES = Settings(store=Store(url="file:///shared"))
DATABASE = Settings(store=Store(url="postgresql://me@db/x"))
NOW = 1e6
CORPUS = Path(__file__).parents[1] / "corpus/slurm"
ACCOUNTING = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageTRES": "cpu,mem,gres/gpu",
    "GresTypes": "gpu",
}


def bad(settings, facts, error=""):
    lines = list(store.judge(settings, facts, error, NOW))
    assert all(line.remedy for line in lines if line.level != "ok")
    return {line.check: line.level for line in lines if line.level != "ok"}


@pytest.mark.parametrize(
    ("settings", "facts", "error", "expected"),
    [
        (Settings(), {}, "", {}),
        (FILES, {"refused": "", "writable": True, "complete": 3}, "", {}),
        (FILES, {"refused": "/shared belongs to uid 5; chown root /shared", "writable": True}, "", {"store": "FAIL"}),
        (FILES, {"writable": False}, "", {"store": "FAIL"}),
        (FILES, {"writable": True, "complete": 1000}, "", {"store": "warn"}),
        (FILES, {}, "no answer in 10 s", {"store": "FAIL"}),
        (DATABASE, {"writable": True}, "", {}),
        (DATABASE, {"writable": False}, "", {"store": "FAIL"}),
        (DATABASE, {"writable": True, "waits": 5, "oldest": NOW - 60, "time": NOW - 60}, "", {}),
        (DATABASE, {"writable": True, "waits": 5, "oldest": 1.0, "time": NOW - 9999}, "", {"outbox": "warn"}),
        (DATABASE, {"writable": True, "waits": 5, "oldest": 1.0, "time": NOW - 60}, "", {}),
        (DATABASE, {"writable": True, "dropped": (5, 1.0, 2.0)}, "", {"dropped": "warn"}),
    ],
)
def test_what_keeps_a_node_from_shipping_is_told(settings, facts, error, expected):
    assert bad(settings, facts, error) == expected


def test_a_password_file_that_others_can_read_is_told_with_its_remedy(tmp_path):
    path = tmp_path / "pgpass"
    path.write_text("")
    path.chmod(0o644)
    settings = replace(DATABASE, store=replace(DATABASE.store, password_file=str(path)))
    (line,) = store.examine(settings, None, NOW)
    assert (line.level, line.remedy) == ("FAIL", f"chmod 600 {path}")


def test_a_shared_directory_is_looked_at_and_the_outbox_counted(tmp_path, journal):
    settings = replace(FILES, store=replace(FILES.store, url=f"file://{tmp_path}/shared"))
    (line,) = store.examine(settings, journal, NOW)
    assert "No such file" in line.what
    os.mkdir(tmp_path / "shared", 0o700)
    journal.write("INSERT INTO outbox (kind, id, sub, time, bytes) VALUES ('finding', 1, 1, 5.0, 400)")
    told = {line.check: line.level for line in store.examine(settings, journal, NOW)}
    assert told == {"store": "ok", "outbox": "warn"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_a_shared_directory_or_a_file_in_it_that_is_not_roots_is_told(tmp_path):
    settings = replace(FILES, store=replace(FILES.store, url=f"file://{tmp_path}/shared"))
    folder = tmp_path / "shared"
    folder.mkdir(0o755)

    def told():
        (line,) = store.examine(settings, None, NOW)
        assert line.level == "ok" or line.remedy
        return line.level, line.what

    assert told()[0] == "ok"
    (folder / "n1.jsonl").write_text("")
    os.chmod(folder / "n1.jsonl", 0o600)
    assert told()[0] == "ok"
    os.chown(folder / "n1.jsonl", 5, 5)
    assert told()[0] == "FAIL"
    assert "'n1.jsonl' belongs to uid 5" in told()[1]
    os.unlink(folder / "n1.jsonl")
    os.chown(folder, 5, 5)
    assert told()[0] == "FAIL"
    assert "belongs to uid 5" in told()[1]


@pytest.mark.parametrize("version", ["22.05", "24.11", "25.11", "26.05"])
def test_real_configurations_count_gpus(version):
    config = parse_config((CORPUS / version / "scontrol_show_config.txt").read_text())
    assert [line.level for line in store.judge_slurm_conf(config, FILES)] == ["ok"]


@pytest.mark.parametrize(
    ("changes", "settings", "level"),
    [
        ({}, FILES, "ok"),
        ({"AccountingStorageTRES": "cpu,gres/gpu:h100"}, FILES, "ok"),
        ({"AccountingStorageTRES": "cpu,mem,license/x,gres/gpumem"}, FILES, "warn"),
        ({"AccountingStorageType": "accounting_storage/none"}, FILES, "warn"),
        ({"AccountingStorageType": "accounting_storage/none"}, Settings(), ""),
        ({"AccountingStorageTRES": "cpu", "GresTypes": "nic"}, FILES, ""),
    ],
)
def test_accounting_that_does_not_tell_who_held_gpus_is_told(changes, settings, level):
    config = {**ACCOUNTING, **changes}
    lines = list(store.judge_slurm_conf({key: (value,) for key, value in config.items()}, settings))
    assert [line.level for line in lines] == [level][: bool(level)]
    if "license/x" in config["AccountingStorageTRES"]:
        assert "AccountingStorageTRES=license/x,gres/gpumem,gres/gpu;" in lines[0].remedy


@pytest.mark.parametrize(
    ("config", "correlate", "checks"),
    [
        ({"MinJobAge": "300 sec"}, {"requeue": True}, ["min-job-age"]),
        ({"MinJobAge": "300 sec"}, {"requeue": True, "settle": 60.0}, []),
        ({"MinJobAge": "900 sec"}, {"requeue": True}, []),
        ({"MinJobAge": "0 sec"}, {"requeue": True}, []),  # never forgets
        ({"MinJobAge": "300 sec"}, {}, []),
        ({"EpilogSlurmctld": "/opt/gpuhealth/bin/gpuhealth correlate"}, {}, ["epilog-slurmctld"]),
        ({"EpilogSlurmctld": "/etc/slurm/gpuhealth-correlate"}, {}, []),
        ({"EpilogSlurmctld": "(null)"}, {}, []),
    ],
)
def test_what_keeps_correlate_from_what_it_is_to_do_is_told(config, correlate, checks):
    settings = Settings(correlate=Correlate(**correlate))
    lines = store.judge_slurm_conf({key: (value,) for key, value in config.items()}, settings)
    assert [line.check for line in lines] == checks


@pytest.mark.parametrize(
    ("ran", "facts", "error", "levels"),
    [
        (NOW - 70, {"nodes": 4, "silent": []}, "", {"correlate": "ok", "shipping": "ok"}),
        (NOW - 9999, {"nodes": 4, "silent": []}, "", {"correlate": "warn", "shipping": "ok"}),
        (0.0, {}, "", {"correlate": "warn"}),
        (NOW - 70, {"nodes": 4, "silent": ["n3"]}, "", {"correlate": "ok", "shipping": "warn"}),
        (NOW - 70, {}, "locked", {"correlate": "ok", "shipping": "warn"}),
    ],
)
def test_on_the_controller_it_is_told_whether_correlate_runs_and_hears_of_the_nodes(ran, facts, error, levels):
    lines = list(store.judge_controller(ran, facts, error, NOW))
    assert {line.check: line.level for line in lines} == levels
    assert all(line.remedy for line in lines if line.level == "warn")


@pytest.fixture
def there(monkeypatch):
    """Slurm's nodes; it does not answer until a test sets them."""
    found = []

    def counted(*_):
        if not found:
            raise control.ControllerDown("no answer")
        return frozenset(found)

    monkeypatch.setattr(control, "counted", counted)
    return found


def test_a_node_that_tells_nothing_of_the_gpu_jobs_that_ended_there_is_named(tmp_path, there):
    now = 1_795_220_000.0
    settings = replace(FILES, store=replace(FILES.store, database=str(tmp_path / "store/cluster.db")))
    with open_store(settings).begin() as db:
        for number, (name, ago, gpus) in enumerate((("n1", 7200, 9), ("n2", 7200, 9), ("n3", 7200, 0), ("n4", 60, 9))):
            key = {"cluster": "lab", "job": number, "attempt": 0}
            db.execute(sql.insert(schema.attempt).values(**key, start=now - 9000, end=now - ago, gpu_seconds=gpus))
            db.execute(sql.insert(schema.attempt_node).values(**key, node=name, start=now - 9000, end=now - ago))
        for name, ago in (("n1", 7000), ("n2", 8000)):
            db.execute(sql.insert(schema.node).values(node=name, journal="j", last_shipped=now - ago))
    assert store.silent(settings, now) == {"nodes": 2, "silent": ["n2"]}


def test_a_node_that_missed_three_heartbeats_is_named_until_it_is_taken_for_removed(tmp_path, there):
    now = 1_795_220_000.0
    settings = replace(FILES, store=replace(FILES.store, database=str(tmp_path / "store/cluster.db"), heartbeat=600))
    with open_store(settings).begin() as db:
        for name, version, ago in (("n1", "0.1", 1700), ("n2", "0.1", 1900), ("n3", "", 1900), ("n4", "0.1", 700000)):
            row = {"node": name, "journal": "j", "last_shipped": now - ago, "gpuhealth": version}
            db.execute(sql.insert(schema.node).values(**row))
    assert store.silent(settings, now) == {"nodes": 4, "silent": ["n2"]}
    there += ["n1", "n3", "n4", "n5"]
    assert store.silent(settings, now) == {"nodes": 4, "silent": ["n4", "n5"]}


def test_a_node_where_correlate_does_not_run_and_a_cluster_without_a_store_hear_nothing_of_it(tmp_path):
    settings = replace(FILES, paths=Paths(run=str(tmp_path)))
    assert list(store.examine_controller(settings, True, NOW)) == []
    assert list(store.examine_controller(replace(settings, store=Store()), False, NOW)) == []
    (line,) = store.examine_controller(settings, False, NOW)
    assert (line.level, "never ran" in line.what) == ("warn", True)
