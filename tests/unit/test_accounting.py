"""Attempts in the store: numbered, stored once, updated on change, with what nodes saw; drains that are not ours."""

import itertools
import json

import pytest
import sqlalchemy as sql

from slurm_gpuhealth.config.settings import Store
from slurm_gpuhealth.controller import accounting
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.logs.reading import read_reading
from slurm_gpuhealth.outcomes import Attempt, Cited, Reading
from slurm_gpuhealth.slurm import control, sacct
from slurm_gpuhealth.slurm.sacct import Ended, Noted
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store
from tests.older import older

NOW = 1_795_300_000.0
HOUR = 3600.0
DAY = 86400.0


@pytest.fixture
def settings(settings, tmp_path):
    return replace(settings, store=Store(database=str(tmp_path / "store/cluster.db")))


@pytest.fixture
def engine(settings):
    return open_store(settings)


class Slurm:
    """The answers of accounting, and the questions it got."""

    def __init__(self):
        self.jobs, self.events, self.asked, self.away = [], [], [], False

    def ended(self, _, since, until):
        if self.away:
            raise control.ControllerDown("slurmdbd is away")
        self.asked.append((since, until))
        return sorted((one for one in self.jobs if since <= one.attempt.end < until), key=lambda one: one.attempt.start)

    def noted(self, _, since, until):
        return [one for one in self.events if one.start < until and (one.end is None or one.end >= since)]


@pytest.fixture
def slurm(monkeypatch):
    fake = Slurm()
    monkeypatch.setattr(sacct, "ended", fake.ended)
    monkeypatch.setattr(sacct, "noted", fake.noted)
    return fake


def ended(job=1, end=NOW - 100, start=None, state="COMPLETED", nodes=("n1",), restarts=None, **more):
    start = end - 50 if start is None else start
    values = {"user": "ann", "account": "lab", "name": "x", "array": None, "exit_code": 0, "signal": 0, **more}
    attempt = Attempt(job=job, attempt=0, state=state, start=start, end=end, nodes=nodes, **values)
    return Ended(attempt, "c", 2, restarts)


def rows(engine, table=schema.attempt):
    with engine.connect() as db:
        return [dict(row) for row in db.execute(sql.select(table)).mappings()]


def numbers(engine):
    return sorted((row["job"], row["attempt"], row["start"]) for row in rows(engine))


def test_an_end_is_taken_in_once(settings, engine, slurm):
    slurm.jobs = [ended(1, nodes=("n1", "n2")), ended(2)]
    assert accounting.take_in(engine, settings, NOW).attempts == 2
    before = rows(engine), rows(engine, schema.attempt_node)
    for later in (1, 60, 2 * HOUR, 30 * HOUR):
        assert accounting.take_in(engine, settings, NOW + later) == (0, 0)
    assert (rows(engine), rows(engine, schema.attempt_node)) == before
    assert len(before[1]) == 3
    assert before[0][0]["gpu_seconds"] == 100


def test_the_first_run_looks_back_as_far_as_it_is_told_and_later_ones_an_hour_or_two(settings, engine, slurm):
    accounting.take_in(engine, settings, NOW)
    assert slurm.asked[0][0] == NOW - settings.accounting.first
    assert all(until - since <= DAY for since, until in slurm.asked)
    now = NOW
    for _ in range(60):
        now += 600
        slurm.asked.clear()
        accounting.take_in(engine, settings, now)
        assert slurm.asked[-1][1] == now
    assert HOUR <= now - slurm.asked[0][0] <= 2 * HOUR + 600


def test_a_row_that_comes_late_is_taken_in(settings, engine, slurm):
    accounting.take_in(engine, settings, NOW)
    accounting.take_in(engine, settings, NOW + 600)
    slurm.jobs = [ended(1, NOW + 10)]
    assert accounting.take_in(engine, settings, NOW + HOUR).attempts == 1


def test_what_ended_while_slurmdbd_was_away_may_come_within_the_hour_after(settings, engine, slurm):
    accounting.take_in(engine, settings, NOW)
    slurm.away = True
    with pytest.raises(control.ControllerDown):
        accounting.take_in(engine, settings, NOW + 3 * HOUR)
    slurm.away = False
    accounting.take_in(engine, settings, NOW + 9 * HOUR)
    slurm.jobs = [ended(1, NOW + HOUR)]  # slurmctld kept it until now
    assert accounting.take_in(engine, settings, NOW + 9 * HOUR + 1800).attempts == 1


def test_once_a_day_the_last_week_is_read_again(settings, engine, slurm):
    for hour in range(30):
        accounting.take_in(engine, settings, NOW + hour * HOUR)
    slurm.jobs = [ended(1, NOW - 2 * DAY)]
    taken = [accounting.take_in(engine, settings, NOW + (30 + hour) * HOUR).attempts for hour in range(25)]
    assert sum(taken) == 1


def test_a_row_that_changed_is_the_correlators_again_and_one_that_did_not_is_not(settings, engine, slurm):
    slurm.jobs = [ended(1, state="CANCELLED"), ended(2)]
    accounting.take_in(engine, settings, NOW)
    with engine.begin() as db:
        db.execute(sql.update(schema.attempt).values(fed=NOW))
    slurm.jobs[0] = ended(1, state="CANCELLED", signal=15)
    assert accounting.take_in(engine, settings, NOW + 60).attempts == 1
    assert [(row["job"], row["signal"], row["fed"]) for row in rows(engine)] == [(1, 15, None), (2, 0, NOW)]


SENT = {"qos": "long", "reservation": "course", "timelimit": 5400.0, "constraint": "a100&nvme"}


def test_where_a_job_was_sent_comes_back_from_the_store(settings, engine, slurm):
    slurm.jobs = [ended(1, partition="gpu", **SENT), ended(2)]
    accounting.take_in(engine, settings, NOW)
    with engine.connect() as db:
        told, silent = (accounting.joined(db, job, 0) for job in (1, 2))
    assert {name: getattr(told, name) for name in accounting.SENT} == {"partition": "gpu", **SENT}
    assert [getattr(silent, name) for name in accounting.SENT] == ["", "", "", None, ""]


def test_an_older_store_learns_where_jobs_were_sent_and_counts_none_of_them_again(settings, engine, slurm):
    slurm.jobs = [ended(job, NOW - 20 * DAY, partition="gpu") for job in (1, 2)]
    accounting.take_in(engine, settings, NOW)
    with engine.begin() as db:
        db.execute(sql.update(schema.attempt).values(fed=NOW))
        older(db, 2)
    engine.dispose()
    upgraded = open_store(settings)
    slurm.jobs = [ended(1, NOW - 20 * DAY, partition="gpu", **SENT), ended(2, NOW - 20 * DAY, signal=9, **SENT)]
    assert accounting.take_in(upgraded, settings, NOW + 60).attempts == 2
    assert [(row["qos"], row["timelimit"], row["fed"]) for row in rows(upgraded)] == [
        ("long", 5400.0, NOW),
        ("long", 5400.0, None),  # this one has changed in how it ended, too
    ]
    assert accounting.take_in(upgraded, settings, NOW + 120).attempts == 0


def test_the_runs_of_a_job_are_numbered_by_their_start(settings, engine, slurm):
    slurm.jobs = [ended(1, NOW - 50), ended(1, NOW - 2 * DAY, state="REQUEUED"), ended(1, NOW - DAY, state="NODE_FAIL")]
    accounting.take_in(engine, settings, NOW)
    expected = [(1, 0, NOW - 2 * DAY - 50), (1, 1, NOW - DAY - 50), (1, 2, NOW - 100)]
    assert numbers(engine) == expected
    slurm.jobs = [slurm.jobs[0], ended(1, NOW + 100)]  # the first ones are out of the window
    accounting.take_in(engine, settings, NOW + 1000)
    assert numbers(engine) == [*expected, (1, 3, NOW + 50)]


def test_slurms_own_count_goes_before_ours(settings, engine, slurm):
    slurm.jobs = [ended(1, NOW - 50, restarts=4)]
    accounting.take_in(engine, settings, NOW)
    assert numbers(engine) == [(1, 4, NOW - 100)]


def test_a_slurm_that_learns_to_count_doubles_no_run(settings, engine, slurm):
    slurm.jobs = [ended(1, NOW - 50)]
    accounting.take_in(engine, settings, NOW)
    slurm.jobs = [ended(1, NOW - 50, restarts=3), ended(1, NOW + 60, restarts=0)]
    accounting.take_in(engine, settings, NOW + 100)
    assert numbers(engine) == [(1, 0, NOW - 100), (1, 1, NOW + 10)]


def test_an_earlier_run_that_comes_late_replaces_none(settings, engine, slurm):
    slurm.jobs = [ended(1, NOW - 50)]
    accounting.take_in(engine, settings, NOW)
    slurm.jobs.append(ended(1, NOW - 500, state="REQUEUED"))
    accounting.take_in(engine, settings, NOW + 10)
    assert numbers(engine) == [(1, 0, NOW - 100), (1, 1, NOW - 550)]


def test_without_a_store_runs_are_numbered_too(settings, slurm):
    slurm.jobs = [ended(1, NOW - 50), ended(1, NOW - 2 * DAY), ended(2), ended(3, restarts=7)]
    found = [one.attempt for one in accounting.finished(settings, NOW - 7 * DAY, NOW)]
    assert [(one.job, one.attempt) for one in found] == [(1, 0), (2, 0), (3, 7), (1, 1)]


def test_a_number_that_slurm_gives_anew_is_another_run(settings, engine, slurm):
    slurm.jobs = [ended(1, NOW - 2 * DAY, restarts=0), ended(1, NOW - 50, restarts=0, user="bob")]
    found = [one.attempt for one in accounting.finished(settings, NOW - 7 * DAY, NOW)]
    assert [(one.user, one.attempt) for one in found] == [("ann", 0), ("bob", 1)]


class Killed(BaseException):
    pass


def test_killed_anywhere_in_the_first_run_the_next_goes_on_and_doubles_nothing(settings, engine, slurm, monkeypatch):
    slurm.jobs = [ended(job, NOW - DAY * job - 10, nodes=("n1", "n2")) for job in range(1, 20)]
    real, kills = accounting._upsert, 0
    for limit in itertools.cycle((1, 4, 7, 10)):
        left = iter(range(limit))

        def upsert(*values, left=left):
            if next(left, None) is None:
                raise Killed
            return real(*values)

        monkeypatch.setattr(accounting, "_upsert", upsert)
        slurm.asked.clear()
        try:
            accounting.take_in(engine, settings, NOW)
            break
        except Killed:
            kills += 1
    assert kills > 5
    assert slurm.asked[0][0] > NOW - settings.accounting.first
    assert sorted(row["job"] for row in rows(engine)) == list(range(1, 20))
    assert len(rows(engine, schema.attempt_node)) == 38


def test_the_node_of_a_node_fail_is_the_only_one_that_went_down_then(settings, slurm):
    slurm.jobs = [
        ended(1, NOW - 500, state="NODE_FAIL", nodes=("n1", "n2", "n3")),
        ended(2, NOW - 900, state="NODE_FAIL", nodes=("n1", "n2")),
        ended(3, NOW - 900, state="NODE_FAIL", nodes=("n7",)),
        ended(4, NOW - 500, state="FAILED", nodes=("n2", "n3")),
        ended(5, NOW - 500, state="NODE_FAIL", nodes=("n2", "n3"), failed_node="n3"),
    ]
    down = {"state": "DOWN", "user": "root", "reason": "Not responding", "cluster": "c", "end": None}
    slurm.events = [
        Noted(node="n2", start=NOW - 501, **down), Noted(node="n9", start=NOW - 500, **down),
        Noted(node="n1", start=NOW - 900, **down), Noted(node="n2", start=NOW - 900, **down),
        Noted(node="n3", start=NOW - 500, **{**down, "state": "DRAIN"}),
    ]  # fmt: skip
    found = {one.attempt.job: one.attempt.failed_node for one in accounting.finished(settings, NOW - DAY, NOW)}
    assert found == {1: "n2", 2: None, 3: "n7", 4: None, 5: "n3"}


@pytest.mark.parametrize(
    ("reason", "other", "state"),
    [
        ("cooling, JD", None, "CANCELLED"),
        ("cooling, JD", "cooling, JD", "CANCELLED"),
        ("cooling, JD", "Not responding", "NODE_FAIL"),
        ("Not responding", None, "NODE_FAIL"),
        ("gpuhealth:Xid79 GPU3 L3 queued", None, "NODE_FAIL"),  # held by us, and died while it was drained
    ],
)
@pytest.mark.parametrize("named", [None, "n1"])
def test_a_job_whose_node_somebody_set_down_did_not_die_of_its_node(settings, slurm, reason, other, state, named):
    slurm.jobs = [ended(1, NOW - 500, state="NODE_FAIL", nodes=("n1", "n2"), failed_node=named)]
    slurm.events = [
        note(why, "DOWN", start=NOW - 500, node=node) for node, why in (("n1", reason), ("n2", other)) if why
    ]
    (found,) = accounting.finished(settings, NOW - DAY, NOW)
    assert found.attempt.state == state
    assert state == "NODE_FAIL" or found.attempt.failed_node is None


def note(reason, state="DRAIN", **more):
    return Noted(
        **{"cluster": "c", "node": "n1", "start": NOW - 50, "end": None, "user": "bob"} | more,
        state=state,
        reason=reason,
    )


@pytest.mark.parametrize(
    "reason",
    [
        "gpuhealth:Xid79 GPU3 L1 fail job=1842 next=L3",
        "gpuhealth:Xid79 GPU3 reboot running : reboot issued : reboot complete",
        "gpuhealth:sweep GPU* L2 queued",
        "gpuhealth:memory GPU3 L4 fail, and I have ordered a new one",
        "gpuhealth:" + "x" * 245,
    ],
)
def test_what_we_did_is_no_event_from_outside(settings, engine, slurm, reason):
    slurm.events = [note(reason), note(reason, state="DOWN")]
    assert accounting.outside(settings, NOW - DAY, NOW) == []
    assert accounting.take_in(engine, settings, NOW).outside == 0


def test_others_drains_are_kept_with_their_end(settings, engine, slurm):
    slurm.events = [note("fan|loud\nvery"), note("", state="DOWN", node="n2"), note("x", state="BOOT", node="n3")]
    assert accounting.take_in(engine, settings, NOW).outside == 2
    slurm.events[0] = note("fan|loud\nvery", end=NOW + 30)
    assert accounting.take_in(engine, settings, NOW + 60).outside == 1
    found = sorted((row["node"], row["code"], row["until"], row["reason"]) for row in rows(engine, schema.outside))
    assert found == [("n1", "drain", NOW + 30, "fan|loud\nvery"), ("n2", "down", None, "")]
    event = accounting.outside(settings, NOW - DAY, NOW)[0]
    assert (event.source, event.code, event.node, event.time) == ("drain", "drain", "n1", NOW - 50)
    assert event.detail == {"reason": "fan|loud\nvery", "user": "bob", "until": NOW + 30}


def record(engine, table, node, job, restart=0, clock=0.0, **values):
    key = {"node": node, "journal": "j", "id": job, "sub": restart, "seq": 1, "taken": 1, "clock": clock}
    with engine.begin() as db:
        db.execute(sql.insert(table).values(**key, **values))


def joined(engine, job, attempt):
    with engine.connect() as db:
        return accounting.joined(db, job, attempt)


def test_the_nodes_record_gives_gpus_and_the_true_exit_code(settings, engine, slurm):
    slurm.jobs = [ended(1, state="FAILED", exit_code=9, nodes=("n1", "n2", "n3"))]
    accounting.take_in(engine, settings, NOW)
    begun = NOW - 149
    record(engine, schema.run, "n1", 1, gpus="GPU-a,GPU-b", started=begun, exit_code=137, signal=0)
    record(engine, schema.run, "n2", 1, gpus="GPU-c", started=begun + 500, clock=500.0, exit_code=137, signal=0)
    record(engine, schema.run, "n8", 1, gpus="GPU-x", started=begun, exit_code=1, signal=0)
    found = joined(engine, 1, 0)
    assert found.gpus == {"n1": ("GPU-a", "GPU-b"), "n2": ("GPU-c",)}
    assert (found.exit_code, found.signal) == (137, 0)


def test_the_epilogs_zero_does_not_hide_what_accounting_saw(settings, engine, slurm):
    slurm.jobs = [ended(1, state="TIMEOUT", signal=15)]
    accounting.take_in(engine, settings, NOW)
    record(engine, schema.run, "n1", 1, gpus="", started=NOW - 150, exit_code=0, signal=0)
    assert joined(engine, 1, 0).signal == 15
    assert joined(engine, 1, 0).gpus is None


def test_each_run_of_a_requeued_job_has_its_own_record_and_log(settings, engine, slurm):
    slurm.jobs = [ended(1, NOW - 5000, state="REQUEUED"), ended(1, NOW - 100, state="FAILED", exit_code=1)]
    accounting.take_in(engine, settings, NOW)
    for restart, end in ((3, NOW - 5000), (4, NOW - 100)):  # the node may count otherwise
        record(
            engine, schema.run, "n1", 1, restart, gpus=f"GPU-{restart}", started=end - 49, exit_code=restart, signal=0
        )
        reading = Reading("application", 0.8, "application", hosts=("n1",), error=f"E{restart}")
        record(engine, schema.joblog, "n1", 1, restart, time=end + 2, reading=json.dumps(reading._asdict()))
    assert [joined(engine, 1, number).gpus for number in (0, 1)] == [{"n1": ("GPU-3",)}, {"n1": ("GPU-4",)}]
    assert joined(engine, 1, 1).reading == Reading("application", 0.8, "application", hosts=("n1",), error="E4")
    assert joined(engine, 1, 1).exit_code == 4


def test_a_reading_with_lines_comes_back_whole():
    reading = Reading("node", 0.5, "hardware", Cited(7, "x", rank=3), (Cited(9, "y"),), ("n1",), evidence=("a", "b"))
    lines = {"cause": reading.cause._asdict(), "collateral": [reading.collateral[0]._asdict()]}
    assert read_reading(json.dumps(reading._asdict() | lines)) == reading
    for text in ("", "[]", "7", '{"no": 1}', '{"cause": {"x": 1}}', '{"collateral": 7}'):
        assert read_reading(text) is None


def test_an_attempt_that_the_store_does_not_know_is_an_error(engine):
    with pytest.raises(KeyError, match="job 7, attempt 0"):
        joined(engine, 7, 0)
