"""New records in the store are judged once, even if some come late or a run is cut short."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Correlate, Place, Sources, Store
from slurm_gpuhealth.controller import run
from slurm_gpuhealth.controller.accounting import Taken
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import lock
from slurm_gpuhealth.store import judged, schema
from slurm_gpuhealth.store.open import open_store, reading

NOW = 1_795_220_000.0
ATTEMPT = {
    **{
        "cluster": "lab",
        "job": 7,
        "attempt": 0,
        "user": "alice",
        "account": "lab",
        "partition": "gpu",
        "name": "train",
    },
    **{"state": "FAILED", "exit_code": 1, "signal": 0, "start": NOW - 7200, "end": NOW - 3600, "nodes": '["n1"]'},
    **{"submit": "", "gpu_seconds": 8 * 3600.0},
}
FINDING = {
    **{"node": "n1", "journal": "j", "id": 1, "sub": 1, "seq": 1, "clock": 0.0, "time": NOW - 3601, "source": "xid"},
    **{"code": "79", "severity": "fault", "rung": "L3", "mode": "enforce", "uuid": "GPU-3", "gpu": 3, "details": "{}"},
}


@pytest.fixture
def given(settings, tmp_path):
    store = Store(database=str(tmp_path / "store/cluster.db"))
    return replace(settings, store=store, correlate=Correlate(settle=0.0))


@pytest.fixture
def engine(given):
    return open_store(given)


def add(engine, table, **values):
    with engine.begin() as db:
        db.execute(sql.insert(table).values(**values))


def see(engine, number=1, **changes):
    """A finding that has just been taken in."""
    add(engine, schema.finding, **{**FINDING, "id": number, "taken": number, **changes})
    with engine.begin() as db:
        judged.put_cursor(db, "taken", str(number))


def rows(engine, table):
    with reading(engine) as db:
        return [row._asdict() for row in db.execute(sql.select(table))]


def test_a_failed_attempt_with_a_lost_gpu_died_of_its_node_and_is_judged_once(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    see(engine)
    new, _, suspects = run.judge(engine, given, {}, NOW)
    assert [(one.job, one.cause, one.node, one.gpu) for one in new] == [(7, "node", "n1", "GPU-3")]
    assert [one.node for one in suspects] == ["n1"]
    assert run.judge(engine, given, {}, NOW)[:2] == ([], [])
    with reading(engine) as db:
        assert judged.explained(db, 7)[0]["verdict"]["cause"] == "node"
        assert [one.node for one in judged.suspicions(db)] == ["n1"]


def test_a_fault_that_is_shipped_after_the_verdict_changes_it(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    assert run.judge(engine, given, {}, NOW)[0][0].cause != "node"
    see(engine)
    new, again, _ = run.judge(engine, given, {}, NOW + 900)
    assert (new, [(one.job, one.cause) for one in again]) == ([], [(7, "node")])
    assert [row["cause"] for row in rows(engine, schema.verdict)] == ["node"]


def test_what_has_not_settled_waits_for_the_next_run(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    waiting = replace(given, correlate=Correlate(settle=7200.0))
    assert run.judge(engine, waiting, {}, NOW)[0] == []
    assert len(run.judge(engine, waiting, {}, NOW + 3600)[0]) == 1


def test_a_job_that_was_judged_and_put_back_into_the_queue_keeps_its_verdict(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    see(engine)
    run.judge(engine, given, {}, NOW)
    with engine.begin() as db:
        db.execute(sql.update(schema.attempt).values(state="REQUEUED", fed=None))
    run.judge(engine, given, {}, NOW + 900)
    assert [row["cause"] for row in rows(engine, schema.verdict)] == ["node"]


def test_a_row_that_is_corrected_when_its_attempt_is_forgotten_is_not_counted_again(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    run.judge(engine, given, {}, NOW)
    for job in range(100, 260):  # so many on that node that it forgets which it has seen
        add(engine, schema.attempt, **{**ATTEMPT, "job": job, "end": NOW - 3000 + job, "state": "COMPLETED"})
    run.judge(engine, given, {}, NOW + 900)

    def counted():
        return {row["key"]: row["data"] for row in rows(engine, schema.state)}

    before = counted()
    with engine.begin() as db:
        db.execute(sql.update(schema.attempt).where(schema.attempt.c.job == 7).values(exit_code=2, fed=None))
    assert run.judge(engine, given, {}, NOW + 120)[:2] == ([], [])
    assert counted() == before
    assert rows(engine, schema.verdict)[0]["cause"] == "application"


def brown_out(engine):
    """Three times, another two nodes of n1 to n4 lose a GPU in the same seconds, and with it their jobs."""
    for nth, (one, other) in enumerate((("n1", "n2"), ("n3", "n4"), ("n1", "n4"))):
        when = NOW - (9 - 3 * nth) * 86400
        for number, node in enumerate((one, other), 2 * nth + 1):
            ran = {"job": number, "nodes": json.dumps([node]), "start": when - 3600, "end": when + 5}
            add(engine, schema.attempt, **{**ATTEMPT, **ran})
            see(engine, number, node=node, time=when + number)


def bad_places(engine):
    with reading(engine) as db:
        return json.loads(judged.get_cursor(db, "places"))


@pytest.mark.parametrize(
    ("leaves", "place"), [({}, (Place("rack r7", "n[1-8]"),)), ({"rack r7": [f"n{nth}" for nth in range(1, 9)]}, ())]
)
def test_events_at_once_in_a_rack_or_below_a_switch_are_kept_as_the_places_and_count_against_no_node(
    given, engine, leaves, place
):
    brown_out(engine)
    run.judge(engine, replace(given, place=place), leaves, NOW)
    (bad,) = bad_places(engine)
    assert (bad["place"], bad["nodes"]) == ("rack r7", ["n1", "n2", "n3", "n4"])
    assert [moment["nodes"] for moment in bad["moments"]] == [["n1", "n2"], ["n3", "n4"], ["n1", "n4"]]
    with reading(engine) as db:
        assert [one.hard for one in judged.suspicions(db) if one.hard] == []


def test_nodes_without_a_common_place_are_a_place_if_three_or_more_come_together_again(given, engine):
    brown_out(engine)
    run.judge(engine, replace(given, place=(Place("rack r9", "n9"),)), {}, NOW)
    assert bad_places(engine) == []
    for number, day in ((11, 12), (21, 11)):
        for nth in range(3):
            see(engine, number + nth, node=f"x{number + nth}", time=NOW - day * 86400 + nth)
    run.judge(engine, replace(given, place=(Place("rack r9", "n9"),)), {}, NOW + 900)
    assert [one["place"] for one in bad_places(engine)] == [""]


def test_a_partition_that_only_one_node_serves_is_kept_as_what_can_not_be_told(given, engine):
    for number in range(1, 31):
        ran = {"job": number, "start": NOW - number * 7200, "end": NOW - number * 7200 + 600, "partition": "debug"}
        add(engine, schema.attempt, **{**ATTEMPT, **ran})
    run.judge(engine, given, {}, NOW + 120)
    with reading(engine) as db:
        (row,) = json.loads(judged.get_cursor(db, "untold"))
    assert (row["node"], row["where"]) == ("n1", "debug|||")
    assert row["failed"] > 29


def test_a_moment_elsewhere_leaves_the_rack_what_is_the_racks(given, engine):
    brown_out(engine)
    for number in (7, 8):
        see(engine, number, node=f"x{number}", time=NOW - 86400 + number)
    run.judge(engine, replace(given, place=(Place("rack r7", "n[1-8]"),)), {}, NOW)
    assert {one["place"]: one["nodes"] for one in bad_places(engine)} == {"rack r7": ["n1", "n2", "n3", "n4"]}


def test_killed_before_the_end_nothing_has_happened_and_the_next_run_does_it(given, engine, monkeypatch):
    add(engine, schema.attempt, **ATTEMPT)
    see(engine)
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(judged, "put_cursor", lambda *_: os._exit(9))
        run.judge(open_store(given), given, {}, NOW)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert (rows(engine, schema.verdict), rows(engine, schema.state)) == ([], [])
    assert [one.cause for one in run.judge(engine, given, {}, NOW)[0]] == ["node"]


def test_runs_one_job_at_a_time_say_what_one_run_over_all_says(given, engine, tmp_path):
    jobs = [{**ATTEMPT, "job": 10 + n, "end": NOW - 3600 + n, "nodes": json.dumps([f"n{n % 3}"])} for n in range(12)]
    other = replace(given, store=Store(database=str(tmp_path / "other/cluster.db")))
    whole = open_store(other)
    for number, job in enumerate(jobs):
        add(whole, schema.attempt, **job)
        add(engine, schema.attempt, **job)
        run.judge(engine, given, {}, NOW - 3600 + number)
    run.judge(whole, other, {}, NOW)

    def said(of):
        return sorted((row["job"], row["cause"], round(row["confidence"], 6)) for row in rows(of, schema.verdict))

    assert said(engine) == said(whole)
    assert len(said(engine)) == 12


def test_jobs_without_gpus_say_nothing_of_a_node_where_accounting_counts_gpus(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    add(engine, schema.attempt, **{**ATTEMPT, "job": 8, "gpu_seconds": 0.0})
    add(
        engine, schema.attempt, **{**ATTEMPT, "job": 9, "gpu_seconds": 0.0, "start": ATTEMPT["end"]}
    )  # too short to tell
    assert sorted(one.job for one in run.judge(engine, given, {}, NOW)[0]) == [7, 9]


def test_an_attempt_whose_record_has_grown_since_is_judged_again_in_its_place(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    run.judge(engine, given, {}, NOW)
    with engine.begin() as db:
        db.execute(sql.update(schema.attempt).values(submit="6dfd7e08", state="TIMEOUT", fed=None))
    assert [one.cause for one in run.judge(engine, given, {}, NOW + 60)[0]] == ["user"]
    assert [row["cause"] for row in rows(engine, schema.verdict)] == ["user"]


@pytest.mark.parametrize("broken", ["newer", "garbage", "folder"])
def test_a_store_that_cannot_be_used_is_said_without_a_traceback(given, engine, monkeypatch, broken):
    monkeypatch.setattr(common, "settings_of", lambda _: given)
    if broken == "newer":
        with engine.begin() as db:
            db.execute(schema.version.update().values(version=99))
    engine.dispose()
    if broken != "newer":
        os.replace(given.store.database, given.store.database + ".old")
    if broken == "garbage":
        Path(given.store.database).write_bytes(b"no database" * 1000)
    if broken == "folder":
        os.mkdir(given.store.database)
    done = CliRunner().invoke(main, ["correlate"], env={"GPUHEALTH_CONFIG": "/nowhere"})
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert done.output.startswith("Error: the cluster's record")


@pytest.mark.parametrize("time", [NOW + 4e8, 1e18, -1e18])
@pytest.mark.parametrize("table", [schema.finding, schema.diagnostic, schema.step])
def test_what_a_node_with_a_wrong_clock_says_outdates_nothing_that_happens_to_it(given, engine, table, time):
    more = {"test": {"level": 3, "outcome": "pass"}, "repair": {"rung": "repair", "outcome": "pass"}}
    kinds = {"diagnostic": more["test"], "step": more["repair"]}
    key = {name: FINDING[name] for name in ("node", "journal", "sub", "seq", "clock")}
    values = {**FINDING, "id": 9} if table is schema.finding else {**key, "id": 9, **kinds[table.name]}
    add(engine, table, **{**values, "time": time, "taken": 1})
    with engine.begin() as db:
        judged.put_cursor(db, "taken", "1")
    run.judge(engine, given, {}, NOW - 10 * 86400)
    for number in range(4):
        end = NOW - 3600 - number * 86400
        add(engine, schema.attempt, **{**ATTEMPT, "job": number, "user": f"u{number}", "start": end - 9000, "end": end})
        see(engine, number=number + 2, time=end - 1)
    run.judge(engine, given, {}, NOW)
    with reading(engine) as db:
        assert [one.p_lemon > 0.9 for one in judged.suspicions(db)] == [True]


@pytest.mark.parametrize("now", [NOW + 4e8, 1000.0])
def test_a_controller_whose_clock_jumps_forgets_nothing(given, engine, monkeypatch, now):
    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: {})
    add(engine, schema.attempt, **ATTEMPT)
    see(engine)
    run.once(given, now)
    run.once(given, NOW)
    with reading(engine) as db:
        assert [one["verdict"]["cause"] for one in judged.explained(db, 7)] == ["node"]


def test_what_is_too_old_is_forgotten_once_a_day_also_after_a_jump(given, engine, monkeypatch):
    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: {})
    run.once(given, NOW + 4e8)
    add(engine, schema.attempt, **{**ATTEMPT, "job": 6, "end": NOW - 400 * 86400, "submit": "6dfd7e08"})
    run.once(given, NOW - 400 * 86400)
    add(engine, schema.attempt, **ATTEMPT)
    run.once(given, NOW)
    assert [row["job"] for row in rows(engine, schema.attempt)] == [7]
    assert [row["key"] for row in rows(engine, schema.state) if row["kind"] == "application"] == ["alice|lab|train|"]


@pytest.mark.parametrize(("age", "code"), [(60, 0), (7200, 1)])
def test_a_run_that_hangs_for_hours_is_no_success_of_those_that_find_it(given, monkeypatch, age, code):
    monkeypatch.setattr(common, "settings_of", lambda _: given)
    turn = lock.take(given, "correlate", real=True)
    os.utime(turn, (time.time() - age,) * 2)
    done = CliRunner().invoke(main, ["correlate"], env={"GPUHEALTH_CONFIG": "/nowhere"})
    os.close(turn)
    assert (done.exit_code, "2 h ago and hangs" in done.output) == (code, bool(code))


def test_who_finds_another_run_at_it_imports_no_database(given, monkeypatch, tmp_path):
    turn = lock.take(given, "correlate", real=True)
    script = "import sys; from slurm_gpuhealth.commands.gpuhealth import main; main(standalone_mode=False)"
    check = "assert 'sqlalchemy' not in sys.modules"
    paths = given.paths
    (tmp_path / "g.toml").write_text(f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n')
    env = {**os.environ, "GPUHEALTH_CONFIG": str(tmp_path / "g.toml")}
    argv = [sys.executable, "-c", f"{script}; {check}", "correlate"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    os.close(turn)
    assert (done.returncode, done.stderr) == (0, "another run is active\n")


READING = {
    **{"verdict": "application", "confidence": 0.9, "kind": "application", "cause": None, "collateral": []},
    **{"error": "KeyError", "fingerprint": "KeyError | train.py:forward | labels"},
}
SHIPPED = {"node": "n1", "journal": "j", "id": 7, "sub": 0, "seq": 2, "clock": 0.0}


def test_a_log_that_is_shipped_after_the_verdict_is_heard_and_once(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    (before,) = run.judge(engine, given, {}, NOW)[0]
    add(engine, schema.joblog, **SHIPPED, taken=1, time=NOW - 3600, reading=json.dumps(READING))
    add(engine, schema.run, **SHIPPED, taken=2, started=NOW - 7200, ended=NOW - 3600, exit_code=137)
    with engine.begin() as db:
        judged.put_cursor(db, "taken", "2")
    ((after,), again, _) = run.judge(engine, given, {}, NOW + 900)
    assert (before.fingerprint, after.fingerprint, again) == ("", READING["fingerprint"], [])
    assert "its log shows an error of the program itself" in {term.text for term in after.terms}
    assert run.judge(engine, given, {}, NOW + 120)[:2] == ([], [])
    (state,) = (json.loads(row["data"]) for row in rows(engine, schema.state) if row["kind"] == "node")
    assert state[2] == 1, "the job is counted once"


def test_of_logs_that_come_late_together_each_is_heard(given, engine):
    hardware = json.dumps({"verdict": "node", "confidence": 0.85, "kind": "hardware"})
    for job in (7, 8, 9):
        add(
            engine,
            schema.attempt,
            **{**ATTEMPT, "job": job, "user": f"u{job}", "start": NOW - 4001 + job, "end": NOW - 4000 + job},
        )
    run.judge(engine, given, {}, NOW)
    for job in (7, 8, 9):
        add(engine, schema.joblog, **{**SHIPPED, "id": job}, taken=job, time=NOW - 4000 + job, reading=hardware)
    with engine.begin() as db:
        judged.put_cursor(db, "taken", "9")
    run.judge(engine, given, {}, NOW + 900)
    for row in rows(engine, schema.verdict):
        assert "its log shows a hardware error" in row["data"], row["job"]


def test_a_record_of_its_node_that_says_nothing_new_leaves_the_verdict_as_it_is(given, engine):
    add(engine, schema.attempt, **ATTEMPT)
    run.judge(engine, given, {}, NOW)
    add(engine, schema.run, **SHIPPED, taken=1, started=NOW - 7200, ended=NOW - 3600, exit_code=1)
    with engine.begin() as db:
        judged.put_cursor(db, "taken", "1")
    assert run.judge(engine, given, {}, NOW + 60)[:2] == ([], [])


def test_what_a_killed_run_had_judged_and_not_acted_upon_the_next_one_acts_upon(given, engine, monkeypatch):
    add(engine, schema.attempt, **ATTEMPT)
    told = []
    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: {})

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.actions, "after", die)
    with pytest.raises(KeyboardInterrupt):
        run.once(given, NOW)
    monkeypatch.setattr(run.actions, "after", lambda _, verdicts, *__: told.append([one.job for one in verdicts]))
    for later in (60, 120):
        run.once(given, NOW + later)
    assert told == [[7], []]


@pytest.mark.parametrize("which", ["slow", "clocks"])
def test_speeds_that_can_not_be_compared_are_trouble_and_stop_nothing(given, engine, monkeypatch, which):
    acted, told = [], []
    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: {})
    monkeypatch.setattr(run.actions, "after", lambda *_: acted.append(True))
    monkeypatch.setattr(run.slow, "tell", lambda *_: told.append(True))

    def fail(*_):
        raise OverflowError("too large")

    monkeypatch.setattr(getattr(run, which), "look", fail)
    said = run.once(replace(given, mode="enforce", sources=Sources(tools="enforce")), NOW).trouble
    assert (acted, "OverflowError: too large" in " ".join(said)) == ([True], True)
    assert told == ([True] if which == "clocks" else [])  # else each node's Extra would be emptied


@pytest.mark.parametrize(("cluster", "acts"), [("lab", True), ("other", False)])
def test_where_two_clusters_share_a_store_by_mistake_nothing_is_done(given, engine, monkeypatch, cluster, acts):
    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: {})
    acted = []
    monkeypatch.setattr(run.actions, "after", lambda *_: acted.append(True))
    add(engine, schema.attempt, **ATTEMPT)
    add(engine, schema.attempt, **{**ATTEMPT, "job": 8, "cluster": cluster})
    said = run.once(given, NOW).trouble
    assert (acted, "several clusters (lab, other)" in " ".join(said)) == ([True] if acts else [], not acts)


def test_after_an_upgrade_that_remembers_other_things_all_is_judged_anew_and_acted_upon_no_second_time(
    given, engine, monkeypatch
):
    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: {})
    acted = []
    monkeypatch.setattr(run.actions, "after", lambda _, verdicts, *__: acted.append(len(verdicts)))
    add(engine, schema.attempt, **ATTEMPT)
    see(engine)
    run.once(given, NOW)
    before = rows(engine, schema.state), rows(engine, schema.verdict)[0]["data"]
    with engine.begin() as db:
        db.execute(sql.update(schema.state).values(data="[1, 2, [3]]"))
        judged.put_cursor(db, "layout", "older")
    for later in (0, 60):
        run.once(given, NOW + later)
    assert (rows(engine, schema.state), rows(engine, schema.verdict)[0]["data"]) == before
    assert acted == [1, 0, 0]


@pytest.mark.parametrize("away", ["accounting", "topology"])
def test_while_slurm_is_away_the_switches_are_still_known(given, engine, monkeypatch, away):
    leaves, seen = {"s1": ["n1", "n2"]}, []

    def gone(*_):
        raise run.control.ControllerDown("no answer")

    monkeypatch.setattr(run.accounting, "take_in", lambda *_: Taken())
    monkeypatch.setattr(run.topology, "leaves", lambda _: leaves)
    monkeypatch.setattr(run, "judge", lambda _, __, leaves, now: seen.append(leaves) or ([], [], []))
    run.once(given, NOW)
    monkeypatch.setattr(*((run.accounting, "take_in") if away == "accounting" else (run.topology, "leaves")), gone)
    assert "no answer" in " ".join(run.once(given, NOW + 60).trouble)
    assert seen == [leaves, leaves]


@pytest.mark.parametrize(
    ("table", "odd"),
    [
        *((schema.joblog, {"reading": text}) for text in ("[" * 100_000, "null", "[5]")),
        *(
            (schema.joblog, {"reading": json.dumps({**READING, key: value})})
            for key, value in (
                ("fingerprint", 5),
                ("fingerprint", "\ud800"),
                ("hosts", [5]),
                ("kind", []),
                ("rank", "x"),
            )
        ),
        (schema.finding, {"details": '{"a":' * 20_000}),
        (schema.finding, {"code": "9" * 5000}),
        (schema.finding, {"source": "test", "code": "L3", "details": '{"level": "²", "passed": true}'}),
        (schema.finding, {"source": "repair", "code": "repair"}),
    ],
)
def test_an_odd_row_of_one_node_is_no_evidence_and_does_not_end_every_run(given, engine, table, odd):
    add(engine, schema.attempt, **ATTEMPT)
    see(engine)
    key = FINDING if table is schema.finding else {**SHIPPED, "time": NOW - 3600}
    add(engine, table, **{**key, "id": 7, "taken": 2, **odd})
    with engine.begin() as db:
        judged.put_cursor(db, "taken", "2")
    assert [one.cause for one in run.judge(engine, given, {}, NOW)[0]] == ["node"]
    with reading(engine) as db:
        assert judged.explained(db, 7)[0]["verdict"]["node"] == "n1"
        assert judged.suspicions(db)[0].last_test == ""
