"""GPUs that ran slower than the other GPUs of their jobs, on all nodes of the jobs, twice in a row."""

import json

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Correlate, Store
from slurm_gpuhealth.controller import accounting, clocks, run
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.measure import use
from slurm_gpuhealth.slurm import control, topology
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store, reading

NOW = 1_795_220_000.0
WORK = {"utilization": 98, "power": 610_000, "limit": 700_000, "processes": 1}
ATTEMPT = {
    **{"cluster": "lab", "attempt": 0, "user": "alice", "account": "lab", "partition": "gpu", "name": "train"},
    **{"state": "COMPLETED", "exit_code": 0, "signal": 0, "nodes": "[]", "submit": "", "gpu_seconds": 8 * 3600.0},
}


@pytest.fixture
def cluster(settings, tmp_path, monkeypatch):
    """`cluster.job(7, n1=(1755, 1755), n2=(1110,))`: a job that has ended, with the clocks of its GPUs by node;
    `cluster.found()`: what a run of correlate makes of the new jobs."""
    store = Store(database=str(tmp_path / "store/cluster.db"))
    given = replace(settings, store=store, correlate=Correlate(settle=0.0), mode="shadow")
    monkeypatch.setattr(accounting, "take_in", lambda *_: accounting.Taken())
    monkeypatch.setattr(topology, "leaves", lambda _: {})
    monkeypatch.setattr(common, "settings_of", lambda _: given)
    monkeypatch.setattr(control, "show_nodes", lambda *_: [])
    return Cluster(given, open_store(given))


class Cluster:
    def __init__(self, settings, engine):
        self.settings, self.engine, self.rows, self.runs = settings, engine, 0, 0

    def job(self, number, late=30.0, **nodes):
        end = NOW + 100 * number
        with self.engine.begin() as db:
            db.execute(sql.insert(schema.attempt).values(**ATTEMPT, job=number, start=end - 7200, end=end))
            for node, all_ in nodes.items():
                gpus = {f"GPU-{node}-{at}": summary(one) for at, one in enumerate(all_)}
                self.rows += 1
                key = {"node": node, "journal": "j", "id": number, "sub": 0, "seq": self.rows, "taken": self.rows}
                db.execute(sql.insert(schema.jobuse).values(**key, time=end + late, gpus=json.dumps(gpus)))

    def found(self):
        self.runs += 1
        assert run.once(self.settings, NOW + 50_000 + self.runs, act=False).trouble == ()
        with reading(self.engine) as db:
            return [(one["uuid"], one["value"], one["median"], one["percent"]) for one in clocks.found(db)]


def summary(what):
    clock, more = what if isinstance(what, tuple) else (what, {})
    one = use.add(use.begin(0.0), 0.0, WORK, 0.5, 600.0)
    return {**use.summary(one), "clock": clock, "load": 7000, "model": "H100", **more}


GOOD = {"n1": (1755, 1740), "n2": (1755, 1755)}
SLOW = {"n1": (1755, 1740), "n2": (1755, 1110)}


def test_a_gpu_is_named_after_two_jobs_in_a_row(cluster):
    cluster.job(1, **SLOW)
    assert cluster.found() == []
    cluster.job(2, **SLOW)
    assert cluster.found() == [("GPU-n2-1", 1110, 1747.5, -36)]
    assert cluster.found() == [("GPU-n2-1", 1110, 1747.5, -36)]
    cluster.job(3, **GOOD)
    assert cluster.found() == []


def test_the_nodes_alone_would_not_tell_and_two_jobs_of_one_run_are_enough(cluster):
    for number in (1, 2):
        cluster.job(number, n1=(1755,), n2=(1755,), n3=(1110,))
    assert [one[0] for one in cluster.found()] == ["GPU-n3-0"]


OTHERWISE = {
    "a good job in between": [SLOW, GOOD, SLOW],
    "another GPU each time": [SLOW, {"n1": (1755, 1740), "n2": (1110, 1755)}],
    "all GPUs at the same clock": [{"n1": (1110, 1110, 1110)}] * 2,
    "only two GPUs": [{"n1": (1755,), "n2": (1110,)}] * 2,
    "another model": [{"n1": (1755, 1755, 1755), "n2": ((1095, {"model": "A100"}),)}] * 2,
    "not long enough at load": [{"n1": (1755, 1755, 1755), "n2": ((1110, {"load": 1000}),)}] * 2,
    "application clocks": [
        {
            "n1": (1755, 1755, 1755),
            "n2": ((1110, {"slow": {"seconds": 1, "percent": 9, "reason": "application clocks"}}),),
        }
    ]
    * 2,
    "a node of another version": [{"n1": (1755, 1755, 1755), "n2": ((1110, {"clock": "slow"}),)}] * 2,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_nothing_is_said_of_gpus_that_are_not_slow_twice_in_a_row(cluster, name):
    for number, nodes in enumerate(OTHERWISE[name], start=1):
        cluster.job(number, **nodes)
        assert cluster.found() == []


def test_a_good_job_between_two_that_is_known_late_counts_in_its_place(cluster):
    cluster.job(1, **SLOW)
    cluster.job(3, **SLOW)
    assert len(cluster.found()) == 1
    cluster.job(2, **GOOD)
    assert cluster.found() == []
    cluster.job(4, **SLOW)
    assert len(cluster.found()) == 1


def test_a_job_is_one_however_often_it_is_judged(cluster):
    cluster.job(1, **SLOW)
    for _ in range(2):
        with cluster.engine.begin() as db:
            db.execute(sql.update(schema.attempt).values(fed=None))
        assert cluster.found() == []


def test_a_run_reads_only_the_jobs_that_are_new(cluster, monkeypatch):
    cluster.job(1, **SLOW)
    cluster.found()
    monkeypatch.setattr(clocks.picture, "read", lambda _: pytest.fail("read again"))
    assert cluster.found() == []


def test_another_job_of_the_same_number_long_ago_does_not_count(cluster):
    cluster.job(1, **SLOW)
    cluster.job(2, late=86400.0, **SLOW)
    assert cluster.found() == []


def test_lemons_shows_it_as_a_weak_sign_and_the_node_is_not_told(cluster, monkeypatch):
    monkeypatch.setattr(control, "set_remarks", lambda *_, **__: pytest.fail("the node was told"))
    cluster.job(1, **SLOW)
    cluster.job(2, **SLOW)
    cluster.found()
    said = CliRunner().invoke(main, ["lemons"]).output.splitlines()
    row = next(line for line in said if line.startswith("n2 "))
    assert row.split()[:10] == ["n2", "-", "H100", "clock", "in", "jobs", "1110", "MHz", "1748", "-36"]
    assert "n2 GPU GPU-n2-1: slow in jobs 1 and 2. Their work may be unequal: a weak sign" in said
    (shown,) = map(json.loads, CliRunner().invoke(main, ["lemons", "--json"]).output.splitlines())
    assert (shown["node"], shown["name"], shown["jobs"]) == ("n2", "clock in jobs", [1, 2])


def test_jobs_of_long_ago_are_forgotten(cluster):
    for number in (1, 2):
        cluster.job(number, **SLOW)
    assert len(cluster.found()) == 1
    clocks.look(cluster.engine, cluster.settings.slow, NOW + 91 * 86400)
    with reading(cluster.engine) as db:
        assert clocks.found(db) == []
