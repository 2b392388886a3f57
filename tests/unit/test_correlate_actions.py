"""The actions for verdicts and suspicion: each only once, within its limits, and never overwriting others' text."""

import contextlib
import os

import pytest
import sqlalchemy as sql

from slurm_gpuhealth.child import Completed
from slurm_gpuhealth.config.settings import Correlate, Store
from slurm_gpuhealth.controller import action_log, actions, lemons
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import claim
from slurm_gpuhealth.outcomes import Suspicion, Term, Verdict
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import JobRecord, parse_excluded
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store, reading
from tests.unit.slurm_nodes import Slurm

NOW = 1_795_220_000.0
WHY = (Term("Xid 79 on n1", {"node": -0.1, "application": -5.0}),)
DIED = Verdict(7, 0, "node", 0.95, "n1", "GPU-3", {}, {}, WHY)
LEMON = Suspicion("n1", NOW, 0.6, 0.2, 2.0, 0.1, "L3", terms=("3 users' jobs failed on it",))
FAILED = JobRecord("FAILED", "NonZeroExitCode", True, 0, True, 1, 0, 1, "7", start=NOW - 7200)


@pytest.fixture
def slurm(monkeypatch):
    monkeypatch.setattr(claim, "settle", lambda *_, **__: "drained")
    monkeypatch.setattr(lemons.time, "sleep", lambda _: None)
    made = Slurm(monkeypatch)
    made.add("n1")
    return made


@pytest.fixture
def act(settings, tmp_path):
    """Act with `correlate` settings given by name."""

    def make(now=NOW, **wanted):
        store = Store(database=str(tmp_path / "store/cluster.db"))
        given = replace(settings, store=store, correlate=Correlate(**{"rungs": "off", **wanted}))
        return action_log.Act(given, open_store(given), now)

    return make


@pytest.fixture
def jobs(act, monkeypatch):
    """The job as slurmctld and accounting know it, and what was ordered."""
    known, orders = {7: FAILED}, []
    with act().engine.begin() as db:
        for attempt in range(4):
            key = {"cluster": "lab", "job": 7, "attempt": attempt}
            db.execute(sql.insert(schema.attempt).values(**key, start=NOW - 7200.4, end=NOW))
    monkeypatch.setattr(control, "show_job", lambda _, job: known[job])
    monkeypatch.setattr(control, "requeue", lambda _, job: orders.append(f"requeue {job.name}"))
    monkeypatch.setattr(control, "asks_by_name", lambda *_: False)
    monkeypatch.setattr(control, "keep_off", lambda _, job, node: orders.append(f"off {node}"))
    known["orders"] = orders
    return known


@pytest.fixture
def accounting(monkeypatch):
    """The AdminComments of job 7, the last task of an array, and of its first task."""
    kept = {"7_0": "", "7_1": ""}

    def run(argv, **_):
        if argv[0].endswith("sacctmgr"):
            job, text = argv[4].partition("=")[2], argv[-1].partition("=")[2]
            kept.update({job: text} if job in kept else dict.fromkeys(kept, text))
        return Completed(0, f"8|7_0|{kept['7_0']}\n7|7_1|{kept['7_1']}\n".encode(), b"", 0.0)

    monkeypatch.setattr(actions.child, "run", run)
    return kept


def done(act_, kind):
    with reading(act_.engine) as db:
        return [row.result for row in db.execute(sql.select(schema.action).where(schema.action.c.kind == kind))]


def test_a_lemon_in_service_is_asked_for_its_rung_once(slurm, act):
    one = act(rungs="enforce")
    actions.after(one, [], [LEMON])
    assert slurm.nodes["n1"].reason.startswith("gpuhealth:suspect GPU* L3 claim")
    slurm.undrain(None, "n1")  # tested, fit, given back
    actions.after(one, [], [LEMON])
    assert slurm.orders == ["drain", "undrain"]


def test_the_reason_names_the_suspect_gpu_by_its_number(slurm, act):
    one = act(rungs="enforce")
    with one.engine.begin() as db:
        db.execute(sql.insert(schema.gpu).values(node="n1", uuid="GPU-7f", gpu=3, first=1.0, last=2.0, taken=1))
    actions.after(one, [], [LEMON._replace(gpus={"GPU-7f": 0.8, "GPU-11": 0.1})])
    assert slurm.nodes["n1"].reason.startswith("gpuhealth:suspect GPU3 L3 claim")


@pytest.mark.parametrize(
    ("changes", "asked"),
    [({"observed": 3.0}, True), ({"rung": "L4"}, True), ({"observed": 2.2}, False), ({"time": NOW + 60}, False)],
)
def test_it_is_asked_again_for_new_failures_or_a_deeper_rung(slurm, act, changes, asked):
    actions.after(act(rungs="enforce"), [], [LEMON])
    slurm.undrain(None, "n1")
    actions.after(act(NOW + 3600, rungs="enforce"), [], [LEMON._replace(**changes)])
    assert (slurm.orders == ["drain", "undrain", "drain"]) is asked


def test_in_shadow_mode_no_node_is_asked_and_what_would_be_is_written_down(slurm, act):
    one = act(rungs="shadow")
    actions.after(one, [], [LEMON])
    actions.after(one, [], [LEMON])
    assert (slurm.orders, done(one, "rung")) == ([], ["shadow: would be asked for"])


@pytest.mark.parametrize(
    "node", [{"flags": "DRAIN", "reason": "PSU, JD"}, {"base": "DOWN", "reason": "Not responding"}]
)
def test_a_node_that_an_admin_or_slurm_has_out_is_left_alone_and_asked_later(slurm, act, node):
    slurm.add("n1", **node)
    one = act(rungs="enforce")
    actions.after(one, [], [LEMON])
    assert (slurm.orders, done(one, "rung")) == ([], [])


@pytest.mark.parametrize(("hard", "rung"), [(0, "L4"), (1, "RMA")])
def test_rma_is_asked_for_on_hard_evidence_alone(slurm, act, hard, rung):
    actions.after(act(rungs="enforce"), [], [LEMON._replace(rung="RMA", hard=hard)])
    assert slurm.nodes["n1"].reason.startswith(f"gpuhealth:suspect GPU* {rung} claim")


def test_with_the_whole_suite_in_shadow_mode_no_node_is_drained_for_its_jobs(slurm, act):
    one = act(rungs="enforce")
    one = replace(one, settings=replace(one.settings, mode="shadow"))
    actions.after(one, [], [LEMON])
    assert (slurm.orders, done(one, "rung")) == ([], ["shadow: would be asked for"])


def test_what_shadow_mode_wrote_down_does_not_keep_a_lemon_from_being_asked_when_it_is_turned_on(slurm, act):
    actions.after(act(rungs="shadow"), [], [LEMON])
    actions.after(act(NOW + 60, rungs="enforce"), [], [LEMON])
    assert slurm.orders == ["drain"]


@pytest.mark.parametrize("error", [control.ControllerDown("no answer"), KeyboardInterrupt()])
def test_a_lemon_that_could_not_be_asked_is_asked_by_the_next_run(slurm, act, monkeypatch, error):
    one, ask = act(rungs="enforce"), lemons.asking.ask
    monkeypatch.setattr(lemons.asking, "ask", lambda *_: (_ for _ in ()).throw(error))
    with contextlib.suppress(KeyboardInterrupt):
        actions.after(one, [], [LEMON])
    monkeypatch.setattr(lemons.asking, "ask", ask)
    actions.after(one, [], [LEMON])
    assert slurm.orders == ["drain"]


def test_a_lemon_whose_claim_was_taken_back_for_the_budget_is_asked_again(slurm, act, monkeypatch):
    monkeypatch.setattr(claim, "settle", lambda *_, **__: slurm.undrain(None, "n1") or "over-budget")
    one = act(rungs="enforce")
    actions.after(one, [], [LEMON])
    actions.after(one, [], [LEMON])
    assert slurm.orders == ["drain", "undrain"] * 2


def test_an_asking_that_a_kill_cut_short_is_done_again(slurm, act):
    one = act(rungs="enforce")
    action_log.begin(one, "rung", lemons._detail(LEMON), None, None, "n1")
    actions.after(one, [], [LEMON])
    assert slurm.orders == ["drain"]


def test_an_asking_of_a_clock_that_was_years_ahead_does_not_count(slurm, act):
    one = act(NOW + 9e8, rungs="enforce")
    action_log.end(one, action_log.begin(one, "rung", lemons._detail(LEMON), None, None, "n1"), "drained")
    actions.after(act(rungs="enforce"), [], [LEMON])
    assert slurm.orders == ["drain"]


def test_with_all_turned_off_slurm_is_not_asked(act, monkeypatch, capfd):
    monkeypatch.setattr(control, "_ask", lambda *_: pytest.fail("Slurm was asked"))
    actions.after(act(), [DIED], [LEMON])
    assert capfd.readouterr().err == ""


def test_level_2_is_the_epilogs_and_is_not_asked_for(slurm, act):
    actions.after(act(rungs="enforce"), [], [LEMON._replace(rung="L2")])
    assert slurm.orders == []


def test_a_job_that_died_of_its_node_is_requeued_away_from_it_once_an_attempt(act, jobs):
    one = act(requeue=True)
    actions.after(one, [DIED], [])
    actions.after(one, [DIED], [])
    assert jobs["orders"] == ["requeue 7", "off n1"]


@pytest.mark.parametrize(
    ("job", "verdict"),
    [
        ({"requeue": False}, {}),
        ({"batch": False}, {}),
        ({"het": True}, {}),
        ({"restarts": 1}, {}),
        ({"state": "RUNNING"}, {}),
        ({"start": NOW - 60}, {}),  # another job: slurmctld began to count anew
        ({}, {"cause": "application"}),
        ({}, {"confidence": 0.6}),
    ],
)
def test_what_is_not_to_be_requeued_is_not(act, jobs, job, verdict):
    jobs[7] = replace(FAILED, **job)
    actions.after(act(requeue=True), [DIED._replace(**verdict)], [])
    assert jobs["orders"] == []


def test_a_job_is_not_requeued_for_ever(act, jobs):
    one = act(requeue=True, requeue_most=2)
    for attempt in range(4):
        jobs[7] = replace(FAILED, restarts=attempt)
        actions.after(one, [DIED._replace(attempt=attempt)], [])
    assert jobs["orders"].count("requeue 7") == 2


def test_hundreds_of_jobs_are_not_requeued_at_once(act, jobs, monkeypatch):
    monkeypatch.setattr(actions, "AN_HOUR", 2)
    for attempt in range(3):
        jobs[7] = replace(FAILED, restarts=attempt)
        actions.after(act(requeue=True, requeue_most=9), [DIED._replace(attempt=attempt)], [])
    assert jobs["orders"].count("requeue 7") == 2
    jobs[7] = replace(FAILED, restarts=3)
    actions.after(act(NOW + 3600, requeue=True, requeue_most=9), [DIED._replace(attempt=3)], [])
    assert jobs["orders"].count("requeue 7") == 3


def test_a_job_that_asks_for_nodes_by_name_is_not_sent_back_to_the_node_that_it_died_of(act, jobs, monkeypatch):
    one = act(requeue=True)
    monkeypatch.setattr(control, "asks_by_name", lambda *_: True)
    actions.after(one, [DIED], [])
    actions.after(one, [DIED], [])
    assert (jobs["orders"], done(one, "requeue")) == (
        [],
        ["not requeued: it asks for nodes by name, and might die of n1 again"],
    )


def test_a_requeue_that_was_cut_short_counts_as_done(act, jobs, monkeypatch):
    one = act(requeue=True)
    monkeypatch.setattr(control, "requeue", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        actions.after(one, [DIED], [])
    monkeypatch.setattr(control, "requeue", lambda _, job: jobs["orders"].append("requeue"))
    actions.after(one, [DIED], [])
    assert (jobs["orders"], done(one, "requeue")) == ([], ["begun, and cut short"])


def test_the_verdict_is_written_where_the_user_looks_and_again_only_when_it_changes(act, accounting):
    one = act(comment=True)
    actions.after(one, [DIED], [])
    assert accounting["7_1"] == "gpuhealth: node n1 GPU GPU-3 (0.95): Xid 79 on n1"
    actions.after(one, [DIED], [])
    actions.after(one, [DIED._replace(cause="application", node=None, gpu=None)], [])
    assert len(done(one, "comment")) == 2
    assert accounting["7_1"].startswith("gpuhealth: application (0.95)")


@pytest.mark.parametrize(
    "other",
    [
        DIED._replace(confidence=0.8),
        DIED._replace(cause="application", node=None, gpu=None, confidence=0.6),
        DIED._replace(cause="unknown", node=None, gpu=None, confidence=0.49),
    ],
    ids=["less sure", "another, and not sure", "nothing"],
)
def test_what_a_user_was_told_stands_until_something_else_is_sure(act, accounting, other):
    one = act(comment=True)
    actions.after(one, [DIED], [])
    actions.after(one, [other], [])
    assert accounting["7_1"].startswith("gpuhealth: node n1 GPU GPU-3 (0.95)")
    assert len(done(one, "comment")) == 1


def test_a_user_is_not_told_now_the_one_and_now_the_other(act, accounting):
    one, bug = act(comment=True), DIED._replace(cause="application", node=None, gpu=None)
    for verdict in (bug, DIED, bug, DIED):
        actions.after(one, [verdict], [])
    assert (accounting["7_1"][:19], len(done(one, "comment"))) == ("gpuhealth: node n1 ", 2)


@pytest.mark.parametrize(("age", "comments"), [(3600, 1), (3 * 86400, 0)])
def test_the_jobs_of_long_ago_get_no_comment_but_one_that_has_one_keeps_it_true(act, accounting, age, comments):
    one = act(comment=True)
    with one.engine.begin() as db:
        db.execute(sql.insert(schema.attempt).values(cluster="lab", job=7, attempt=0, end=NOW - age))
    actions.after(one, [DIED], [])
    assert len(done(one, "comment")) == comments
    actions.after(act(NOW + 5 * 86400, comment=True), [DIED._replace(cause="application", node=None, gpu=None)], [])
    assert len(done(one, "comment")) == 2 * comments


def test_somebody_elses_admin_comment_stays(act, accounting):
    accounting["7_1"] = "billing: waived"
    actions.after(act(comment=True), [DIED], [])
    assert accounting["7_1"] == "billing: waived"


def test_the_last_task_of_an_array_has_its_number_and_the_other_tasks_are_not_told_its_verdict(act, accounting):
    accounting["7_0"] = "billing: waived"
    actions.after(act(comment=True), [DIED], [])
    assert accounting["7_0"] == "billing: waived"
    assert accounting["7_1"].startswith("gpuhealth: node n1")


def test_the_comment_can_break_out_of_nothing(act, accounting):
    evil = (Term('a"b\n`c` |x=\x1b[1m', {"node": 0.0}),)
    actions.after(act(comment=True), [DIED._replace(terms=evil)], [])
    assert accounting["7_1"].isprintable()
    assert not set(accounting["7_1"]) & set("\"'`\\|=")


def test_the_exclude_list_is_one_line_of_suspects_and_empty_without(slurm, act, tmp_path):
    for node in ("n2", "n9"):
        slurm.add(node)
    path = tmp_path / "exclude"
    actions.after(act(exclude=str(path)), [], [LEMON, LEMON._replace(node="n2"), LEMON._replace(node="n9", rung="L2")])
    assert path.read_text() == "n[1-2]\n"
    actions.after(act(exclude=str(path)), [], [])
    assert path.read_text() == "\n"
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".exclude")] == []


def test_a_node_that_slurm_no_longer_has_is_not_on_the_exclude_list_which_would_stop_every_sbatch(slurm, act, tmp_path):
    path = tmp_path / "exclude"
    actions.after(act(exclude=str(path), rungs="enforce"), [], [LEMON, LEMON._replace(node="renamed")])
    assert path.read_text() == "n1\n"


def test_not_the_whole_cluster_is_excluded_however_many_are_suspects(slurm, act, tmp_path):
    path = tmp_path / "exclude"
    many = [LEMON._replace(node=f"m{n}") for n in range(50)]
    for one in many:
        slurm.add(one.node)
    actions.after(act(exclude=str(path)), [], many)  # drain.budget: 5 of 100
    assert path.read_text() == "m[0-4]\n"


@pytest.mark.parametrize("there", ["binary", "fifo", "link", "no folder"])
def test_an_exclude_list_that_cannot_be_read_or_written_holds_up_nothing(slurm, act, tmp_path, there):
    path = tmp_path / "exclude"
    if there == "binary":
        path.write_bytes(b"\xff\xfe")
    elif there == "fifo":
        os.mkfifo(path)
    elif there == "link":
        path.symlink_to("/etc/passwd")
    else:
        path = tmp_path / "none/exclude"
    actions.after(act(exclude=str(path), rungs="enforce"), [], [LEMON])
    assert "drain" in slurm.orders
    assert there == "no folder" or (path.is_file() and not path.is_symlink() and path.read_text() == "n1\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" ReqNodeList=(null) ExcNodeList=(null) NodeList=", ()),
        (" ReqNodeList=(null) ExcNodeList=n[1-2],n7 NodeList=", ("n[1-2],n7",)),
        (" ReqNodeList=n1 ExcNodeList=(null) NodeList=", None),
        (" ReqNodeList=(null) ExcNodeList=n1 x ReqNodeList=(null) ExcNodeList=n2 ", None),
    ],
)
def test_what_a_job_excludes_is_read_or_the_job_is_left_as_it_is(text, found):
    assert parse_excluded(text) == found


@pytest.fixture
def gone(act, jobs):
    """A job on n1 since two hours, whose GPU is gone since one."""
    jobs[7] = replace(FAILED, state="RUNNING")
    key = {"node": "n1", "journal": "a", "id": 7, "sub": 0, "seq": 1, "taken": 1, "clock": 0.0}
    lost = {"id": 1, "time": NOW - 3600, "source": "xid", "code": "79", "uuid": "GPU-3", "gpu": 3}
    with act().engine.begin() as db:
        db.execute(sql.insert(schema.run).values(**key, started=NOW - 7199, gpus="GPU-1,GPU-3"))
        db.execute(sql.insert(schema.finding).values(**{**key, **lost}))
    return jobs


def change(act_, table, **values):
    with act_.engine.begin() as db:
        db.execute(sql.update(table).values(**values))


def test_a_job_that_runs_on_with_a_gpu_that_is_gone_is_told_of_or_requeued_once_if_that_is_wanted(act, gone):
    actions.after(act(), [], [])
    assert done(act(), "hung") == []
    actions.after(act(hung="requeue"), [], [])
    actions.after(act(hung="requeue"), [], [])
    assert (gone["orders"], done(act(), "hung")) == (["requeue 7"], ["requeued"])


@pytest.mark.parametrize(
    ("run", "finding", "job"),
    [
        ({"ended": NOW}, {}, {}),
        ({}, {"cleared": NOW}, {}),
        ({}, {"uuid": "GPU-2"}, {}),
        ({}, {"code": "94"}, {}),
        ({}, {"time": NOW - 300}, {}),
        ({"clock": -7200.0}, {"clock": -7200.0, "time": NOW - 300 - 7200}, {}),
        ({}, {}, {"restarts": 1}),
        ({}, {}, {"state": "COMPLETING"}),
        ({}, {}, {"start": NOW - 600}),  # slurmctld began to count anew: another job
        ({}, {}, {"start": 0.0}),
    ],
)
def test_no_other_job_is_taken_for_hung(act, gone, run, finding, job):
    one = act(hung="requeue")
    for table, values in ((schema.run, run), (schema.finding, finding)):
        if values:
            change(one, table, **values)
    gone[7] = replace(gone[7], **job)
    actions.after(one, [], [])
    assert (gone["orders"], done(one, "hung")) == ([], [])


STANDS = {
    **{"job": 7, "attempt": 0, "began": NOW - 7200, "since": NOW - 1800, "kind": "spinning", "waiting": 15, "gpus": 16},
    **{"cause": "node", "node": "n1", "gpu": "GPU-3", "gpu_index": 3, "why": ("n1 GPU3: xid:119, when it stopped",)},
}


@pytest.fixture
def standing(jobs):
    """A running job; `standing` (STANDS) says that it stands still."""
    jobs[7] = replace(FAILED, state="RUNNING")
    return jobs


def test_a_job_that_stands_still_is_reported_once_a_run(act, standing, capsys):
    actions.after(act(), [], [], [STANDS])
    assert done(act(), "hung") == []
    for _ in range(2):
        actions.after(act(hung="notify"), [], [], [{**STANDS, "cause": "unknown"}])
    assert (standing["orders"], done(act(), "hung")) == ([], ["notified"])
    assert "job 7 stands still, 15 of 16 GPUs spinning for 30 min, cause unknown, n1 GPU3: " in capsys.readouterr().err
    standing[7] = replace(standing[7], restarts=1)
    actions.after(act(hung="notify"), [], [], [{**STANDS, "attempt": 1}])
    assert done(act(), "hung") == ["notified", "notified"]


def test_it_is_requeued_away_from_the_node_once_there_is_evidence_and_never_twice(act, standing):
    one = act(hung="requeue")
    actions.after(one, [], [], [{**STANDS, "cause": "unknown"}])
    assert standing["orders"] == []
    actions.after(one, [], [], [STANDS])
    actions.after(one, [], [], [STANDS])
    assert (standing["orders"], done(one, "hung")) == (["requeue 7", "off n1"], ["notified", "requeued"])
    standing[7] = replace(standing[7], restarts=1)
    actions.after(one, [], [], [{**STANDS, "attempt": 1}])
    assert (standing["orders"][2:], done(one, "hung")[2:]) == ([], ["notified"])


@pytest.mark.parametrize("cause", ["unknown", "application", "fabric", "infrastructure"])
def test_a_job_that_stands_still_without_a_bad_node_is_only_reported(act, standing, cause):
    one = act(hung="requeue")
    actions.after(one, [], [], [{**STANDS, "cause": cause}])
    assert (standing["orders"], done(one, "hung")) == ([], ["notified"])


@pytest.mark.parametrize("job", [{"requeue": False}, {"batch": False}, {"het": True}])
def test_a_job_that_stands_still_and_can_t_be_requeued_is_only_reported_and_only_once(act, standing, job):
    standing[7] = replace(standing[7], **job)
    one = act(hung="requeue")
    actions.after(one, [], [], [STANDS])
    actions.after(one, [], [], [STANDS])
    assert (standing["orders"], done(one, "hung")) == ([], ["notified"])


@pytest.mark.parametrize("job", [{"state": "COMPLETING"}, {"restarts": 1}, {"start": NOW - 600}, {"start": 0.0}])
def test_another_run_than_the_one_that_stands_still_is_left_alone(act, standing, job):
    standing[7] = replace(standing[7], **job)
    one = act(hung="requeue")
    actions.after(one, [], [], [STANDS])
    assert (standing["orders"], done(one, "hung")) == ([], [])


def test_a_job_that_asks_for_its_node_by_name_or_is_one_of_too_many_is_only_reported(act, standing, monkeypatch):
    one = act(hung="requeue")
    monkeypatch.setattr(control, "asks_by_name", lambda *_: True)
    actions.after(one, [], [], [STANDS])
    monkeypatch.setattr(control, "asks_by_name", lambda *_: False)
    monkeypatch.setattr(actions, "AN_HOUR", 0)
    actions.after(one, [], [], [STANDS])
    assert (standing["orders"], done(one, "hung")) == ([], ["notified"])


def test_a_requeue_that_slurm_refuses_is_not_tried_again(act, standing, monkeypatch):
    def refuse(*_):
        raise control.SlurmError("no")

    monkeypatch.setattr(control, "requeue", refuse)
    one = act(hung="requeue")
    actions.after(one, [], [], [STANDS])
    actions.after(one, [], [], [STANDS])
    assert done(one, "hung") == ["refused: no"]
