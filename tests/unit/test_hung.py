"""Jobs that stand still on all their nodes: when that is said, who is different, and that no good node is blamed."""

import json

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands import hung as command
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Store
from slurm_gpuhealth.controller import hung as looking
from slurm_gpuhealth.correlate import hung
from slurm_gpuhealth.correlate.hung import Part, judge
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.outcomes import Event, Flight
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import JobRecord
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store

T = 1_795_220_000.0


def part(node, does, gpus=4, heard=True, since=T):
    """A node of the job; `does`: what each GPU does, a letter each: s(pinning), i(dle), - (not said to stand still)."""
    does = does * gpus if len(does) == 1 else does
    kinds = {"s": "spinning", "i": "idle"}
    stands = {f"{node}-{n}": (kinds[one], since) for n, one in enumerate(does) if one != "-"}
    return Part(node, {f"{node}-{n}": n for n in range(len(does))}, stands, heard)


def event(key, node, gpu=None, at=0.0, severity="fault", **detail):
    source, _, code = key.partition(":")
    return Event(T + at, node, gpu if gpu is None else f"{node}-{gpu}", source, code, severity, detail)


ALL = [part("n1", "s"), part("n2", "s")]
IDLE = [part("n1", "s"), part("n2", "siss")]
XID = {"class": "hardware"}
ABSENT = Flight("absent", "all_reduce", ranks=(5,), hosts=("n2",))
SITUATIONS = {
    "all spin and nothing is known": (ALL, [], None, ("unknown", None, None)),
    "one is idle and nothing is known": (IDLE, [], None, ("unknown", "n2", "n2-1")),
    "the idle GPU had an Xid": (IDLE, [event("xid:119", "n2", 1, -30)], None, ("node", "n2", "n2-1")),
    "the idle GPU grew ECC errors": (IDLE, [event("nvml:ecc", "n2", 1, 20, "warning")], None, ("node", "n2", "n2-1")),
    "a GPU is lost": ([ALL[0], part("n2", "sss-")], [event("nvml:lost", "n2", 3, 30)], None, ("node", "n2", "n2-3")),
    "an NVLink failed, all spin": (ALL, [event("xid:74", "n1", 2, 0, "warning", **XID)], None, ("node", "n1", "n1-2")),
    "a port is down on one node": (ALL, [event("ib:port-down", "n2", at=40)], None, ("node", "n2", None)),
    "ports are down on two nodes": (
        *(ALL, [event("ib:port-down", "n2", at=40), event("ib:port-down", "n1", at=45)], None),
        ("fabric", None, None),
    ),
    "the driver hangs and its GPUs say nothing": (
        *([*ALL, part("n3", "-")], [event("driver:hung", "n3", at=60)], None),
        ("node", "n3", None),
    ),
    "tasks hang in D state on one node": (
        IDLE,
        [event("host:hung", "n2", at=90)],
        None,
        ("infrastructure", "n2", None),
    ),
    "tasks hang in D state on all nodes": (
        *([part("n1", "i"), part("n2", "i")], [event("host:hung", one, at=90) for one in ("n1", "n2")], None),
        ("infrastructure", None, None),
    ),
    "one node lost its mount": (IDLE, [event("host:mount", "n2", at=-60)], None, ("infrastructure", "n2", None)),
    "a file server is gone, and one node's check saw it first": (
        ALL,
        [event("host:mount", "n2", at=-60), event("host:mount", "n1", at=90)],
        None,
        ("infrastructure", None, None),
    ),
    "two nodes see faults of one cause at their next checks": (
        ALL,
        [event("nvml:recovery", "n2", 0, at=-10), event("nvml:recovery", "n1", 0, at=70)],
        None,
        ("unknown", None, None),
    ),
    "a rank was killed for memory": (
        IDLE,
        [event("host:oom", "n2", at=-5, severity="info")],
        None,
        ("application", "n2", None),
    ),
    "all are idle": ([part("n1", "i"), part("n2", "i")], [], None, ("application", None, None)),
    "the recorder names the idle rank's host": (IDLE, [], ABSENT, ("unknown", "n2", "n2-1")),
    "the recorder names a host, all spin": (ALL, [], ABSENT, ("unknown", "n2", None)),
    "the recorder names the host with the Xid": (ALL, [event("xid:79", "n2", 0)], ABSENT, ("node", "n2", "n2-0")),
    "the recorder names another host than the Xid": (ALL, [event("xid:79", "n1", 0)], ABSENT, ("unknown", "n2", None)),
    "ranks call different collectives": (
        *(ALL, [event("xid:79", "n1", 0)], Flight("mismatch", "all_reduce", "broadcast", ranks=(1,), hosts=("n1",))),
        ("application", None, None),
    ),
    "the Xid is on another node than the idle GPU": (IDLE, [event("xid:79", "n1", 0)], None, ("unknown", "n2", "n2-1")),
    "two nodes have faults at once": (
        *(ALL, [event("xid:79", "n1", 0, -20), event("xid:79", "n2", 3, -10)], None),
        ("unknown", None, None),
    ),
    "the first fault came long before the other": (
        *(ALL, [event("xid:79", "n1", 0, -120), event("xid:74", "n2", 3, 10, **XID)], None),
        ("node", "n1", "n1-0"),
    ),
    "the Xid is an hour old": (ALL, [event("xid:79", "n1", 0, -3600)], None, ("unknown", None, None)),
    "the Xid came an hour later": (ALL, [event("xid:79", "n1", 0, 3600)], None, ("unknown", None, None)),
    "the Xid is history of the kernel log": (ALL, [event("xid:79", "n1", 0, old=True)], None, ("unknown", None, None)),
    "the Xid is on a GPU of another job": (ALL, [event("xid:79", "n1", 9)], None, ("unknown", None, None)),
    "the Xid is on a node of another job": (ALL, [event("xid:79", "n8", 0)], None, ("unknown", None, None)),
    "the Xid is the program's": (
        *(IDLE, [event("xid:31", "n2", 1, **{"class": "application"})], None),
        ("unknown", "n2", "n2-1"),
    ),
    "a row was remapped": (ALL, [event("xid:63", "n1", 0, severity="warning", **XID)], None, ("unknown", None, None)),
    "a link of the adapter changed": (ALL, [event("ib:link", "n1", severity="info")], None, ("unknown", None, None)),
    "one node is silent": ([*ALL, part("n3", "-", heard=False)], [], None, ("unknown", "n3", None)),
    "idle GPUs on two nodes": ([part("n1", "issss"), part("n2", "sisss")], [], None, ("unknown", None, None)),
    "all of a node is idle": ([*ALL, part("n3", "i")], [], None, ("unknown", "n3", None)),
    "one node, one GPU idle": ([part("n1", "ssis")], [], None, ("unknown", "n1", "n1-2")),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_who_is_blamed(name):
    parts, events, flight, expected = SITUATIONS[name]
    told = judge(parts, events, flight)
    assert (told.cause, told.node, told.gpu) == expected
    assert told.since == T
    assert told.advice


WORKS = {
    "nobody says that it stands still": ([part("n1", "-"), part("n2", "-")], []),
    "a node works": ([*ALL, part("n3", "-")], []),
    "a node works, another is silent": ([*ALL, part("n3", "-"), part("n4", "-", heard=False)], []),
    "a node works, and another has an Xid": ([*ALL, part("n3", "-")], [event("xid:79", "n1", 0)]),
    "two nodes work, one of them has an Xid": ([*ALL, part("n3", "-"), part("n4", "-")], [event("xid:79", "n3", 0)]),
    "a node with an Xid works, and a GPU of another one is idle": (
        [*IDLE, part("n3", "-")],
        [event("xid:79", "n3", 0)],
    ),
    "a single GPU": ([part("n1", "s", gpus=1)], []),
    "most nodes are silent": ([part("n1", "s"), *(part(f"n{n}", "-", heard=False) for n in (2, 3, 4))], []),
    "the nodes stopped one after the other": ([part(f"n{n}", "i", since=T + 3600 * n) for n in range(4)], []),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_job_of_which_this_can_t_be_told_is_not_said_to_stand_still(name):
    assert judge(*WORKS[name]) is None


def test_nodes_without_any_record_count_as_the_others_do():
    assert judge(ALL, (), missing=1)
    assert judge(ALL, (), missing=2) is None


def test_a_node_that_is_silent_is_said_to_be_and_not_that_it_works():
    told = judge([*ALL, part("n3", "-", heard=False)], [])
    assert (told.waiting, told.gpus, told.different, told.silent) == (8, 12, (), ("n3",))
    assert told.why == ("n3 has not been heard of lately",)


def test_it_is_said_how_many_wait_and_who_does_not():
    told = judge(IDLE, [event("nvml:ecc", "n2", 1, 70, "warning", message="2 more errors")])
    assert (told.kind, told.waiting, told.gpus, told.different) == ("spinning", 7, 8, (("n2", "n2-1"),))
    assert told.why == (
        "n2 GPU1: nvml:ecc (2 more errors), 1 min after it stopped",
        "1 GPU does not wait as the others do: n2 GPU1",
    )
    assert told.advice == "requeue the job away from n2, and test the node: gpuhealth-escalate n2"


JOB = JobRecord("RUNNING", "None", True, 0, True, 0, 0, 2, "7", start=T - 7200)


@pytest.fixture
def cluster(settings, tmp_path, monkeypatch):
    """Job 7 on n1 and n2, of 2 GPUs each, stands still since T; and what Slurm says of it."""
    given = replace(settings, store=Store(database=str(tmp_path / "store/cluster.db")))
    monkeypatch.setattr(command.common, "settings_of", lambda _: given)
    jobs = {7: JOB}

    def show_job(_, job):
        if job not in jobs:
            raise control.NoSuchJob("scontrol show job", 1, "gone")
        return jobs[job]

    monkeypatch.setattr(looking.control, "show_job", show_job)
    with open_store(given).begin() as db:
        for node in ("n1", "n2"):
            key = {"node": node, "journal": "a", "seq": 1, "taken": 1}
            db.execute(sql.insert(schema.node).values(node=node, journal="a", last_shipped=T + 3500))
            run = {"user": "alice", "nodes": 2, "gpus": f"{node}-0,{node}-1", "started": T - 7199}
            db.execute(sql.insert(schema.run).values(**key, id=7, sub=0, **run))
            for number in (0, 1):
                uuid = f"{node}-{number}"
                details = {"kind": "spinning", "since": T, "job": 7, "restart": 0}
                found = {
                    "time": T + 600,
                    "source": "job",
                    "code": "stalled",
                    "uuid": uuid,
                    "details": json.dumps(details),
                }
                db.execute(sql.insert(schema.finding).values(**key, id=number, sub=0, **found))
                gpu = {"node": node, "uuid": uuid, "gpu": number, "first": 1.0, "last": 2.0, "taken": 1}
                db.execute(sql.insert(schema.gpu).values(**gpu))

    class Made:
        settings = given

        def look(self, now=T + 3600):
            self.trouble = []
            return looking.look(open_store(given), given, now, self.trouble)

        def change(self, table, *where, **values):
            with open_store(given).begin() as db:
                db.execute(sql.update(table).where(*where).values(**values))

        def say(self, *argv):
            return CliRunner().invoke(main, ["hung", *argv], catch_exceptions=False).output

    made = Made()
    made.jobs = jobs
    return made


def test_a_running_job_that_stands_still_is_listed_with_what_it_has_cost(cluster):
    (one,) = cluster.look()
    assert (one["job"], one["since"], one["gpu_hours"], one["waiting"], one["cause"]) == (7, T, 4.0, 4, "unknown")
    said = cluster.say()
    assert "4 of 4  spinning  4.0    unknown" in said
    assert "what to do: see where its ranks are" in said
    assert "That is old" in said  # it is long ago
    assert json.loads(cluster.say("--json"))["gpu_hours"] == 4.0


def test_that_none_stands_still_is_said_and_that_nobody_looked(cluster):
    assert "Not looked for yet" in cluster.say()
    cluster.change(schema.finding, cleared=T + 700)
    assert cluster.look() == []
    assert "No running job of several GPUs stands still, as of 2026-11-21 01:13:20 UTC." in cluster.say()
    assert cluster.say("--json") == ""


@pytest.mark.parametrize(
    "job",
    [
        None,
        replace(JOB, state="COMPLETING"),
        replace(JOB, state="SUSPENDED"),
        replace(JOB, restarts=1),
        replace(JOB, start=T - 600),
    ],
)
def test_a_run_that_slurm_does_not_have_running_is_not_listed(cluster, job):
    cluster.jobs.pop(7)
    cluster.jobs.update({7: job} if job else {})
    assert cluster.look() == []


def test_if_slurm_does_not_answer_the_job_is_listed_and_the_trouble_told(cluster, monkeypatch):
    def silent(*_):
        raise control.ControllerDown("slurmctld does not answer")

    monkeypatch.setattr(looking.control, "show_job", silent)
    assert len(cluster.look()) == 1
    assert "job 7, which stands still" in cluster.trouble[0]


def test_a_node_on_which_it_works_and_one_that_is_silent_are_told_apart(cluster):
    cluster.change(schema.finding, schema.finding.c.node == "n2", cleared=T + 700)
    cluster.change(schema.run, schema.run.c.node == "n2", gpus="n2-0")
    cluster.change(schema.node, schema.node.c.node == "n2", clock_offset=5000.0)  # the times are the controller's
    assert cluster.look() == []
    cluster.change(schema.node, schema.node.c.node == "n2", last_shipped=T + 3300, clock_offset=-5000.0)
    (one,) = cluster.look()
    assert (one["silent"], one["node"], one["waiting"], one["gpus"]) == (("n2",), "n2", 2, 3)


def test_a_gpu_that_is_not_said_to_stand_still_beside_others_that_are_is_the_different_one(cluster):
    cluster.change(schema.finding, schema.finding.c.node == "n2", schema.finding.c.id == 1, cleared=T + 700)
    (one,) = cluster.look()
    assert one["different"] == [{"node": "n2", "uuid": "n2-1", "gpu": 1}]


@pytest.mark.parametrize(("kind", "count"), [("spinning", 1), ("idle", 0), ("empty", 0)])
def test_a_job_that_has_never_worked_counts_only_if_it_spins(cluster, kind, count):
    details = {"kind": kind, "since": T, "job": 7, "restart": 0}
    cluster.change(schema.finding, code="never-started", details=json.dumps(details))
    assert len(cluster.look()) == count


def test_an_old_record_of_another_job_with_this_number_is_not_taken_for_a_part_of_it(cluster):
    key = {"node": "n9", "journal": "a", "seq": 1, "taken": 1, "id": 7, "sub": 0}
    run = {"user": "bob", "nodes": 1, "gpus": "n9-0,n9-1", "started": T - 90000}
    with open_store(cluster.settings).begin() as db:
        db.execute(sql.insert(schema.run).values(**key, **run))
    (one,) = cluster.look()
    assert (one["nodes"], one["user"], one["gpus"]) == (["n1", "n2"], "alice", 4)


def test_the_clocks_of_the_nodes_may_differ(cluster):
    for table, names in ((schema.run, ("started",)), (schema.finding, ("time",))):
        ahead = {name: table.c[name] + 5000 for name in names}
        cluster.change(table, table.c.node == "n2", clock=5000.0, **ahead)
    cluster.change(schema.node, schema.node.c.node == "n2", clock_offset=5000.0)
    details = {"kind": "spinning", "since": T + 5000, "job": 7, "restart": 0}
    cluster.change(schema.finding, schema.finding.c.node == "n2", details=json.dumps(details))
    (one,) = cluster.look()
    assert (one["since"], one["waiting"]) == (T, 4)


def test_what_an_earlier_run_of_the_job_left_does_not_count(cluster):
    details = {"kind": "spinning", "since": T, "job": 7, "restart": 1}
    cluster.change(schema.finding, schema.finding.c.node == "n2", details=json.dumps(details))
    assert cluster.look() == []


HUGE = '{"kind": "spinning", "job": 7, "restart": 0, "since": 1' + 400 * "0" + "}"


@pytest.mark.parametrize(
    "details", ["[", "[]", "{}", '{"kind": "spinning", "job": 7, "restart": 0, "since": "x"}', HUGE]
)
def test_details_that_no_node_of_ours_wrote_do_no_harm(cluster, details):
    cluster.change(schema.finding, details=details)
    assert cluster.look() == []


def test_evidence_of_the_store_names_the_node(cluster):
    key = {"node": "n2", "journal": "a", "seq": 1, "taken": 1, "id": 5, "sub": 0}
    xid = {"time": T - 20, "source": "xid", "code": "79", "severity": "fault", "uuid": "n2-1", "message": "bus"}
    with open_store(cluster.settings).begin() as db:
        db.execute(sql.insert(schema.finding).values(**key, **xid))
    (one,) = cluster.look()
    assert (one["cause"], one["node"], one["gpu_index"]) == ("node", "n2", 1)
    assert "node   n2 GPU1" in cluster.say()
    assert hung.ADVICE["node"].format(node="n2") in cluster.say()
