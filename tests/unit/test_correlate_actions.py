"""What verdicts and suspicion lead to: each once, within its bounds, and never over somebody else's words."""

import pytest
import sqlalchemy as sql

from slurm_gpuhealth.child import Completed
from slurm_gpuhealth.correlate import actions
from slurm_gpuhealth.correlate.model import Suspicion, Term, Verdict
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import claim
from slurm_gpuhealth.settings import Correlate, Store
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import JobRecord, parse_excluded
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store, reading
from tests.unit.slurm_nodes import Slurm

NOW = 1_795_220_000.0
WHY = (Term("Xid 79 on n1", {"node": -0.1, "application": -5.0}),)
DIED = Verdict(7, 0, "node", 0.95, "n1", "GPU-3", {}, {}, WHY)
LEMON = Suspicion("n1", NOW, 0.6, 0.2, 2.0, 0.1, "L3", terms=("3 users' jobs failed on it",))
FAILED = JobRecord("FAILED", "NonZeroExitCode", True, 0, True, 1, 0, 1, "7")


@pytest.fixture
def slurm(monkeypatch):
    monkeypatch.setattr(claim, "settle", lambda *_, **__: "drained")
    monkeypatch.setattr(actions.time, "sleep", lambda _: None)
    made = Slurm(monkeypatch)
    made.add("n1")
    return made


@pytest.fixture
def act(settings, tmp_path):
    """Act with `correlate` settings given by name."""

    def make(now=NOW, **wanted):
        store = Store(database=str(tmp_path / "store/cluster.db"))
        given = replace(settings, store=store, correlate=Correlate(**{"rungs": "off", **wanted}))
        return actions.Act(given, open_store(given), now)

    return make


@pytest.fixture
def jobs(monkeypatch):
    """The job as slurmctld knows it, and what was ordered."""
    known, orders = {7: FAILED}, []
    monkeypatch.setattr(control, "show_job", lambda _, job: known[job])
    monkeypatch.setattr(control, "requeue", lambda _, job: orders.append(f"requeue {job.name}"))
    monkeypatch.setattr(control, "keep_off", lambda _, job, node: orders.append(f"off {node}"))
    known["orders"] = orders
    return known


@pytest.fixture
def accounting(monkeypatch):
    """The job's AdminComment, in a list of one."""
    kept = [""]

    def run(argv, **_):
        if argv[0].endswith("sacctmgr"):
            kept[0] = argv[-1].partition("=")[2]
        return Completed(0, kept[0].encode(), b"", 0.0)

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
    assert accounting == ["gpuhealth: node n1 GPU GPU-3 (0.95): Xid 79 on n1"]
    actions.after(one, [DIED], [])
    actions.after(one, [DIED._replace(cause="application", node=None, gpu=None)], [])
    assert len(done(one, "comment")) == 2
    assert accounting[0].startswith("gpuhealth: application (0.95)")


def test_somebody_elses_admin_comment_stays(act, accounting):
    accounting[0] = "billing: waived"
    actions.after(act(comment=True), [DIED], [])
    assert accounting == ["billing: waived"]


def test_the_comment_can_break_out_of_nothing(act, accounting):
    evil = (Term('a"b\n`c` |x=\x1b[1m', {"node": 0.0}),)
    actions.after(act(comment=True), [DIED._replace(terms=evil)], [])
    assert accounting[0].isprintable()
    assert not set(accounting[0]) & set("\"'`\\|=")


def test_the_exclude_list_is_one_line_of_suspects_and_empty_without(act, tmp_path):
    path = tmp_path / "exclude"
    actions.after(act(exclude=str(path)), [], [LEMON, LEMON._replace(node="n2"), LEMON._replace(node="n9", rung="L2")])
    assert path.read_text() == "n[1-2]\n"
    actions.after(act(exclude=str(path)), [], [])
    assert path.read_text() == "\n"
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".exclude")] == []


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
