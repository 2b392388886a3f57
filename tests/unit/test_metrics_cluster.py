"""The cluster's metrics: what they count, over which window, and what is left out when something does not answer."""

import subprocess
import time

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.controller import run
from slurm_gpuhealth.controller.accounting import Taken
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.metrics import cluster
from slurm_gpuhealth.metrics.table import CLUSTER
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store import judged, schema
from slurm_gpuhealth.store.open import open_store, reading
from tests.unit import metered

NOW = 1_795_220_000.0
OF_THE_RUN = {f"gpuhealth_cluster_correlate_{name}" for name in ("timestamp_seconds", "duration_seconds", "troubles")}


@pytest.fixture
def given(settings, tmp_path):
    return metered.stored(settings, tmp_path)


@pytest.fixture
def engine(given):
    return open_store(given)


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(control, "holds", lambda *_: metered.holds(NOW))
    monkeypatch.setattr(control, "counted", lambda *_: frozenset(("n1", "n2", "n3")))


def told(given, engine, now=NOW):
    """What is written, without the metrics' prefix."""
    cluster.publish(given, engine, now, 1.5, 2)
    with open(given.metrics.cluster) as file:
        found = metered.values(file.read())
    return {name[len("gpuhealth_cluster_") :]: value for name, value in found.items()}


def test_what_the_store_has_of_the_last_day_is_counted(given, engine, held):
    metered.filled(given, engine, NOW)
    found = told(given, engine)
    assert found['failed_jobs_1d{cause="node"}'] == 2
    assert found['failed_jobs_1d{cause="application"}'] == found['failed_jobs_1d{cause="unknown"}'] == 1
    assert found['lost_gpu_seconds_1d{cause="node"}'] == 2000
    assert found["gpu_seconds_1d"] == 8000  # one attempt did not fail
    assert found['findings_1d{source="xid",code="79",severity="fault",mode="shadow"}'] == 3
    assert found['rungs_1d{rung="L3",outcome="pass"}'] == found['decisions_1d{action="drained"}'] == 3
    assert (found["reporting_nodes"], found["silent_nodes"]) == (3, 1)
    assert found['suspect_nodes{rung="L4"}'] == found['suspect_nodes{rung="none"}'] == 1
    assert found['lemon_probability{node="n1"}'] == 0.91
    assert (found["correlate_timestamp_seconds"], found["correlate_troubles"]) == (NOW + 1.5, 2)


def test_what_ended_before_the_last_day_is_not_counted(given, engine, held):
    metered.filled(given, engine, NOW)
    with engine.begin() as db:
        db.execute(sql.update(schema.attempt).where(schema.attempt.c.job == 0).values(end=NOW - 86401))
    found = told(given, engine)
    assert (found['failed_jobs_1d{cause="application"}'], found["gpu_seconds_1d"]) == (0, 7000)


def test_what_we_hold_is_counted_by_kind_and_what_is_left_follows(given, engine, held):
    found = told(given, engine)
    kinds = ("new", "lost", "confirmed", "sweep", "hour")
    assert [found.get(f'held_nodes{{kind="{kind}"}}') for kind in kinds] == [1, 0, 1, 1, None]
    assert [found[f'held_nodes_limit{{kind="{kind}"}}'] for kind in kinds] == [2, 2, 8, 1, 4]
    assert [found[f'budget_left_nodes{{kind="{kind}"}}'] for kind in kinds] == [1, 2, 7, 0, 3]
    assert (found["nodes"], found["rma_nodes"], found["slurmctld_up"]) == (40, 1, 1)
    assert found['held_rung_nodes{rung="L4",state="fail",next="RMA"}'] == 1


def test_without_slurmctld_the_rest_is_told(given, engine, monkeypatch):
    found = told(given, engine)
    assert found["slurmctld_up"] == 0
    assert "nodes" not in found
    assert found['failed_jobs_1d{cause="node"}'] == 0


def test_the_mtbf_counts_a_node_once_an_hour_and_has_an_interval(given, engine, held):
    metered.filled(given, engine, NOW)
    found = told(given, engine)
    assert found["node_failures_28d"] == 2  # two hours
    seconds = 8 * 2 * 7200.0 - 2 * 4000  # two nodes each
    assert found['node_mtbf_seconds{bound="estimate"}'] == pytest.approx(seconds / 2)
    assert found['node_mtbf_seconds{bound="lower"}'] < seconds / 2 < found['node_mtbf_seconds{bound="upper"}']
    with engine.begin() as db:
        db.execute(sql.update(schema.attempt).where(schema.attempt.c.job == 6).values(end=NOW - 7210))
    assert told(given, engine)["node_failures_28d"] == 1
    seconds += 2 * 3990
    with engine.begin() as db:
        db.execute(sql.update(schema.verdict).where(schema.verdict.c.job == 6).values(cause="user"))
        db.execute(sql.update(schema.attempt).where(schema.attempt.c.job == 1).values(gpu_seconds=0.0))
    assert told(given, engine)['node_mtbf_seconds{bound="estimate"}'] == pytest.approx(seconds - 2 * 7200)


def test_without_failures_only_the_least_mtbf_is_known(given, engine, held):
    metered.filled(given, engine, NOW)
    with engine.begin() as db:
        db.execute(sql.delete(schema.verdict))
    assert [name for name in told(given, engine) if "mtbf" in name] == ['node_mtbf_seconds{bound="lower"}']


@pytest.mark.parametrize(("count", "least", "most"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.39)])
def test_the_interval_is_poissons(count, least, most):
    found = cluster.bounds(count)  # by Garwood's tables
    assert found["upper"] == pytest.approx(least, rel=0.001)
    assert found["lower"] == pytest.approx(most, rel=0.001)


def test_days_that_are_over_are_read_once(given, engine, held):
    metered.filled(given, engine, NOW)
    for days in (1, 5):
        with engine.begin() as db:
            row = {"cluster": "c", "job": 100 + days, "attempt": 0, "nodes": '["n1"]', "gpu_seconds": 1.0}
            db.execute(sql.insert(schema.attempt).values(**row, start=NOW - days * 86400 - 100, end=NOW - days * 86400))
    before = told(given, engine)['node_mtbf_seconds{bound="lower"}']
    with engine.begin() as db:
        kept = judged.get_cursor(db, "node-time")
        assert "100.0" in kept
        assert kept.count(":") == cluster.AT_ONCE - 2  # today and yesterday may change
        db.execute(sql.delete(schema.attempt).where(schema.attempt.c.job == 105))
    assert told(given, engine)['node_mtbf_seconds{bound="lower"}'] == before
    assert told(given, engine, NOW + 30 * 86400).get('node_mtbf_seconds{bound="lower"}') is None


def test_the_first_runs_look_back_further_and_further(given, engine, held):
    metered.filled(given, engine, NOW)
    with engine.begin() as db:
        row = {"cluster": "c", "job": 100, "attempt": 0, "nodes": '["n1"]', "gpu_seconds": 1.0}
        db.execute(sql.insert(schema.attempt).values(**row, start=NOW - 27 * 86400 - 5e6, end=NOW - 27 * 86400))
        db.execute(sql.delete(schema.verdict))
    seen = [told(given, engine)['node_mtbf_seconds{bound="lower"}'] for _ in range(6)]
    assert [one == seen[0] for one in seen] == [True, True, True, False, False, False]
    with reading(engine) as db:
        assert judged.get_cursor(db, "node-time").count(":") == cluster.DAYS - 2


def test_each_value_has_the_labels_of_its_metric_and_each_metric_a_value(given, engine, held):
    metered.filled(given, engine, NOW)
    with reading(engine) as db:
        found, _ = cluster.gather(db, given, NOW)
    assert found.keys() == CLUSTER.keys() - OF_THE_RUN
    assert not [name for name, rows in found.items() for labels in rows if len(labels) != len(CLUSTER[name][1])]


def test_no_query_reads_a_whole_table(given, engine, held):
    metered.filled(given, engine, NOW)
    asked = []
    sql.event.listen(engine, "before_cursor_execute", lambda db, cursor, text, values, *_: asked.append((text, values)))
    with reading(engine) as db:
        cluster.gather(db, given, NOW)
    with engine.connect() as db:
        plans = [row[3] for one in list(asked) for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {one[0]}", one[1])]
    assert len(asked) > 10
    assert {plan.split(" ")[1] for plan in plans if plan.startswith("SCAN")} <= {"suspicion", "node"}, plans


def test_promtool_finds_nothing_to_say_about_it(given, engine, held):
    metered.filled(given, engine, NOW)
    told(given, engine)
    with open(given.metrics.cluster) as file:
        done = subprocess.run(["promtool", "check", "metrics"], stdin=file, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_correlate_writes_it_and_a_folder_that_is_missing_is_trouble(given, monkeypatch, tmp_path):
    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: {})
    assert run.once(given, NOW, act=False).trouble == ()
    with open(given.metrics.cluster) as file:
        assert metered.values(file.read())["gpuhealth_cluster_correlate_troubles"] == 0
    there = replace(given, metrics=replace(given.metrics, cluster=f"{tmp_path}/no/cluster.prom"))
    assert run.once(there, NOW, act=False).trouble == (
        f"metrics.cluster {tmp_path}/no/cluster.prom: No such file or directory",
    )


def test_the_command_prints_what_the_file_has_without_the_run(given, engine, held, monkeypatch):
    metered.filled(given, engine, time.time())
    monkeypatch.setattr(common, "settings_of", lambda _: given)
    done = CliRunner().invoke(main, ["metrics"])
    assert done.exit_code == 0, done.output
    found = {name.partition("{")[0] for name in metered.values(done.output)}
    assert found == CLUSTER.keys() - OF_THE_RUN
    with reading(engine) as db:
        assert judged.get_cursor(db, "node-time") == ""  # it only reads
