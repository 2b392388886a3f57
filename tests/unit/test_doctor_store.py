"""What the doctor says of the store: each thing that would keep what a node saw from arriving."""

import os
from pathlib import Path

import pytest

from slurm_gpuhealth.config.settings import Correlate, Settings, Store
from slurm_gpuhealth.doctor import store
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm.node import parse_config

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
        (FILES, {"mode": 0o40700, "writable": True, "complete": 3}, "", {}),
        (FILES, {"mode": 0o40777, "writable": True}, "", {"store": "FAIL"}),
        (FILES, {"mode": 0o40755, "writable": False}, "", {"store": "FAIL"}),
        (FILES, {"mode": 0o40700, "writable": True, "complete": 1000}, "", {"store": "warn"}),
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
