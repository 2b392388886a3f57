"""Accounting of a real Slurm: every way for a job to end, hostile names, a node that dies, slurmdbd away, kill -9."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Settings, Slurm, Store
from slurm_gpuhealth.controller import accounting
from slurm_gpuhealth.slurm import accounting_pyslurm, control, sacct, topology
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store
from tests.cluster import USER, Cluster
from tests.daemons import until
from tests.lab import ROOT, fresh, running

OTHER = "news"
KILLS = 20 if os.environ.get("GPUHEALTH_SOAK") else 5
TREE = "SwitchName=s0 Nodes=n[1-2]\nSwitchName=s1 Nodes=n[3-4]\nSwitchName=top Switches=s[0-1]\n"
EXTRA = "TopologyPlugin=topology/tree\nNodeName=DEFAULT Features=a100,nvme"
FORGED = "a|b\n99|99|lab|gpu|root|0|lab|NODE_FAIL|0:0|0:0|5|6||n1|x"
SENT = {"partition": "all", "qos": "long", "reservation": "course", "constraint": "a100&nvme"}
HET = "#!/bin/sh\n#SBATCH --job-name=het --gres=gpu:1 -x n3,n4\n#SBATCH hetjob\n#SBATCH --gres=gpu:2 -x n3,n4\nexit 4"
AGAIN = '[ "$SLURM_RESTART_COUNT" = 1 ] && exit 0; sleep 300'
TAKE_IN = """\
import time
from slurm_gpuhealth.config import settings
from slurm_gpuhealth.controller import accounting
from slurm_gpuhealth.store.open import open_store
it = settings.Settings(slurm=settings.Slurm(conf={conf!r}), store=settings.Store(database={database!r}))
print("up", flush=True)
accounting.take_in(open_store(it), it, time.time())
"""


@pytest.fixture(scope="module")
def lab():
    folder = fresh("accounting")
    (folder / "etc").mkdir()
    (folder / "etc/topology.conf").write_text(TREE)
    with running(Cluster(folder, nodes=4, gpus=4, extra=EXTRA)) as lab:
        lab.run("sacctmgr", "-i", "add", "user", OTHER, "Account=lab")
        lab.run("sacctmgr", "-i", "add", "qos", "long")
        place = ("nodes=n1", "corecnt=1", "partitionname=all", "starttime=now-5minutes", "duration=120")
        lab.run("scontrol", "create", "reservation", "reservationname=course", f"users={USER}", *place)
        # slurmdbd names a job's reservation if that began before the job: by then it must know of it.
        ask = ("sacctmgr", "-n", "show", "reservation", "names=course", "format=name", "start=now-1hour")
        until(lambda: "course" in lab.run(*ask), "slurmdbd to know the reservation")
        yield lab


def settings_of(lab, name="cluster"):
    return Settings(slurm=Slurm(conf=str(lab.conf)), store=Store(database=str(lab.lab / f"store/{name}.db")))


@pytest.fixture(scope="module")
def settings(lab):
    return settings_of(lab)


def srun_fails_on_one_of_two(lab):
    script = "srun sh -c 'sleep 1; [ $SLURM_NODEID = 0 ] || exit 7'; sleep 1; exit 0"
    return lab.submit(script, nodes=2, ntasks_per_node=1, nodelist="n1,n2", job_name="step")


@pytest.fixture(scope="module")
def jobs(lab):
    """The jobs by what became of them, all ended."""
    dies = lab.submit(AGAIN, nodes=2, nodelist="n3,n4", requeue=True, gres="gpu:1", job_name="dies")
    requeued = lab.submit(AGAIN, nodelist="n2", requeue=True, job_name="requeued")
    cancelled = lab.submit("sleep 300", nodelist="n1", user=OTHER, job_name="cancelled")
    jobs = {
        "dies": dies, "requeued": requeued, "cancelled": cancelled,
        "late": lab.submit("sleep 300", nodelist="n1", time=1, job_name="late"),
        "ok": lab.submit("true", nodelist="n1,n2", gres="gpu:2", comment="x|y\nz", job_name="ok"),
        "sent": lab.submit("true", nodelist="n1", time=90, job_name="sent", **SENT),
        "exit3": lab.submit("exit 3", nodelist="n1", user=OTHER, job_name="exit3"),
        "exit137": lab.submit("exit 137", nodelist="n1", job_name="exit137"),
        "killed": lab.submit("kill -9 $$", nodelist="n1", job_name="killed"),
        "step": srun_fails_on_one_of_two(lab),
        "forged": lab.submit("exit 1", nodelist="n2", job_name=FORGED, comment=FORGED),
        "bytes": lab.submit("exit 1", nodelist="n2", job_name=b"inv\xff\xfealid".decode("utf-8", "surrogateescape")),
        "long": lab.submit("exit 1", nodelist="n2", job_name="n" * 1024),
        "array": lab.submit("exit $SLURM_ARRAY_TASK_ID", array="0-2", nodelist="n1", job_name="array"),
        "het": lab.submit(HET),
        "never": lab.submit("true", begin="now+1day", job_name="never"),
    }  # fmt: skip
    for job in (dies, requeued, cancelled):
        lab.wait(job, "RUNNING")
    lab.run("scancel", str(cancelled), str(jobs["never"]))
    lab.run("scontrol", "requeue", str(requeued))
    lab.stop_node("n4", signal.SIGKILL)
    until(lambda: "Restarts=1" in lab.run("scontrol", "-o", "show", "job", str(dies)), "a NODE_FAIL")
    lab.start_node("n4")
    until(lambda: not lab.run("squeue", "-h"), "every job to end")
    until(lambda: "RUNNING" not in lab.run("sacct", "-a", "-X", "-n", "-S", "now-1hour", "-o", "State"), "accounting")
    return jobs


def number(one):
    return one.attempt.job, one.attempt.start


def attempts(settings, jobs):
    """(state, exit code, signal, nodes, user, gpus) by job's name and attempt."""
    names = {job: name for name, job in jobs.items()}
    found = {}
    for one in accounting.finished(settings, time.time() - 3600, time.time() + 1):
        it = one.attempt
        assert it.end - 600 < it.start <= it.end <= time.time()
        assert it.account == "lab"
        assert one.cluster == "lab"
        key = (names.get(it.job) or names.get(it.array) or "het", it.attempt, it.job)
        found[key] = (it.state, it.exit_code, it.signal, it.nodes, it.user, one.gpus)
    return found


def test_each_attempt_is_exactly_what_happened(settings, jobs):
    found = attempts(settings, jobs)
    of = {(name, number): value for (name, number, _), value in found.items() if name not in ("array", "het")}
    assert of == {
        ("dies", 0): ("NODE_FAIL", of["dies", 0][1], 0, ("n3", "n4"), USER, 2),  # 22.05: 0, 24.11: 1
        ("dies", 1): ("COMPLETED", 0, 0, ("n3", "n4"), USER, 2),
        ("requeued", 0): ("REQUEUED", 0, 0, ("n2",), USER, 0),
        ("requeued", 1): ("COMPLETED", 0, 0, ("n2",), USER, 0),
        ("cancelled", 0): ("CANCELLED", 0, 0, ("n1",), OTHER, 0),
        ("late", 0): ("TIMEOUT", 0, 0, ("n1",), USER, 0),
        ("ok", 0): ("COMPLETED", 0, 0, ("n1", "n2"), USER, 4),
        ("sent", 0): ("COMPLETED", 0, 0, ("n1",), USER, 0),
        ("exit3", 0): ("FAILED", 3, 0, ("n1",), OTHER, 0),
        ("exit137", 0): ("FAILED", of["exit137", 0][1], 0, ("n1",), USER, 0),
        ("killed", 0): ("FAILED", 0, 9, ("n1",), USER, 0),
        ("step", 0): ("COMPLETED", 0, 0, of["step", 0][3], USER, 0),
        ("forged", 0): ("FAILED", 1, 0, ("n2",), USER, 0),
        ("bytes", 0): ("FAILED", 1, 0, ("n2",), USER, 0),
        ("long", 0): ("FAILED", 1, 0, ("n2",), USER, 0),
    }
    assert of["exit137", 0][1] in (9, 137)  # 9: 22.05 and 24.11, where the epilog knows better
    assert len(of["step", 0][3]) == 2
    arrays = sorted(value[:3] for (name, _, _), value in found.items() if name == "array")
    assert arrays == [("COMPLETED", 0, 0), ("FAILED", 1, 0), ("FAILED", 2, 0)]
    hets = sorted((value[0], value[1], value[5]) for (name, _, _), value in found.items() if name == "het")
    assert hets == [("FAILED", 4, 1), ("FAILED", 4, 2)]


def test_where_each_job_was_sent_and_what_it_asked_for(settings, jobs):
    told = [one.attempt for one in accounting.finished(settings, time.time() - 3600, time.time() + 1)]
    sent = {(one.job, one.attempt): {name: getattr(one, name) for name in accounting.SENT} for one in told}
    usual = {"partition": "gpu", "qos": "normal", "reservation": "", "timelimit": None, "constraint": ""}
    assert sent.pop((jobs["sent"], 0)) == {**SENT, "timelimit": 5400.0}
    assert sent.pop((jobs["late"], 0)) == {**usual, "timelimit": 60.0}
    assert len(sent) > 10
    assert {key: one for key, one in sent.items() if one != usual} == {}


def test_runs_asked_for_by_number_are_those_found_among_all(settings, jobs):
    when = time.time() - 3600, time.time() + 1
    every = sacct.ended(settings, *when)
    for wanted in ({jobs["dies"], jobs["requeued"], jobs["exit137"]}, {one.attempt.job for one in every}):
        found = [one for one in sacct.ended(settings, *when, tuple(wanted)) if one.attempt.job in wanted]
        assert found == [one for one in every if one.attempt.job in wanted]
        assert len(found) > len(wanted)


@pytest.mark.skipif(not find_spec("pyslurm"), reason="PySlurm of this Slurm's release is not installed")
def test_by_pyslurm_the_runs_are_those_of_sacct(settings, jobs):
    when = time.time() - 3600, time.time() + 1
    found, told = accounting_pyslurm.ended(settings, *when), sacct.ended(settings, *when)
    assert sorted(found, key=number) == sorted(told, key=number)


def test_names_are_kept_and_forge_nothing(settings, jobs):
    names = {
        one.attempt.job: one.attempt.name for one in accounting.finished(settings, time.time() - 3600, time.time())
    }
    assert names[jobs["forged"]] == FORGED
    assert names[jobs["long"]] == "n" * 255  # slurmdbd keeps no more
    assert names[jobs["bytes"]].startswith("inv")
    assert 99 not in names


def test_the_node_that_died_is_named(settings, jobs):
    failed = {
        one.attempt.job: one.attempt.failed_node
        for one in accounting.finished(settings, 0 + time.time() - 3600, time.time())
        if one.attempt.failed_node
    }
    assert failed == {jobs["dies"]: "n4"}


def test_drains_that_are_not_ours_are_told(lab, settings, jobs):
    ours, theirs = "gpuhealth:asked GPU* L3 queued by=alice", "fan|loud\nit|5|6|DRAIN|root(0)|x|n9"
    for node, reason in (("n1", theirs), ("n2", ours)):  # idle ones: of a busy one slurmdbd hears when it is empty
        lab.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")
    until(lambda: ours in lab.run("sacctmgr", "-n", "-P", "show", "event", "Start=now-1hour"), "slurmdbd to know")
    time.sleep(1)  # events have whole seconds
    lab.run("scontrol", "update", "nodename=n[1-2]", "state=undrain")
    found = {(one.node, one.code): one for one in accounting.outside(settings, time.time() - 3600, time.time())}
    assert set(found) == {("n1", "drain"), ("n4", "down")}
    assert found["n1", "drain"].detail["reason"] == theirs
    assert found["n1", "drain"].detail["until"] > found["n1", "drain"].time
    assert found["n4", "down"].detail["reason"] == "Not responding"


def test_the_leaf_switches_are_read(settings):
    assert topology.leaves(settings) == {"s0": ["n1", "n2"], "s1": ["n3", "n4"]}


def content(settings):
    with open_store(settings).connect() as db:
        return [
            sorted(map(repr, db.execute(sql.select(table))))
            for table in (schema.attempt, schema.attempt_node, schema.outside)
        ]


def test_taken_in_twice_nothing_is_doubled(settings, jobs):
    engine = open_store(settings)
    taken = accounting.take_in(engine, settings, time.time())
    assert taken.attempts == len(attempts(settings, jobs))
    assert taken.outside == 2
    before = content(settings)
    assert accounting.take_in(engine, settings, time.time()) == (0, 0)
    assert content(settings) == before
    with engine.connect() as db:
        assert accounting.joined(db, jobs["dies"], 0).failed_node == "n4"
        kept = accounting.joined(db, jobs["sent"], 0)
    assert {name: getattr(kept, name) for name in accounting.SENT} == {**SENT, "timelimit": 5400.0}


def test_killed_at_any_point_the_next_run_mends_it(lab, settings, jobs):
    other = settings_of(lab, "killed")
    program = [sys.executable, "-c", TAKE_IN.format(conf=str(lab.conf), database=other.store.database)]
    chance = random.Random(4)  # noqa: S311 - no secret
    for _ in range(KILLS):
        child = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(chance.uniform(0, 0.6))
        child.kill()
        child.wait()
        child.stdout.close()
    accounting.take_in(open_store(other), other, time.time())
    accounting.take_in(open_store(settings), settings, time.time())
    assert content(other) == content(settings)


def test_what_ended_while_slurmdbd_was_away_is_not_lost(lab, settings, jobs):
    engine = open_store(settings)
    accounting.take_in(engine, settings, time.time())
    lab.daemons.stop("slurmdbd")
    job = lab.submit("exit 5", nodelist="n1", job_name="meanwhile")
    lab.wait(job, "FAILED")
    with pytest.raises(control.ControllerDown):
        accounting.take_in(engine, settings, time.time())
    lab.daemons.start("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=f"{lab.lab}/mysql/sock")

    def taken():
        try:
            return accounting.take_in(engine, settings, time.time()).attempts
        except control.ControllerDown:
            return 0

    until(taken, "the job in the store")
    with engine.connect() as db:
        assert accounting.joined(db, job, 0).exit_code == 5


def test_import_writes_what_replay_reads(lab, settings, jobs, tmp_path, monkeypatch):
    config = tmp_path / "gpuhealth.toml"
    config.write_text(f'[slurm]\nconf = "{lab.conf}"\n[store]\ndatabase = "{tmp_path}/none.db"\n')
    config.chmod(0o600)
    monkeypatch.setenv("GPUHEALTH_CONFIG", str(config))
    files = [str(tmp_path / name) for name in "JET"]
    done = CliRunner().invoke(
        main, ["import", "--jobs", files[0], "--events", files[1], "--topology", files[2], "--since", "1h"]
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "J").read_text().splitlines()]
    assert len(rows) >= len(attempts(settings, jobs))
    assert {row["job"] for row in rows} >= {job for name, job in jobs.items() if name != "never"}
    assert next(row for row in rows if row["job"] == jobs["sent"]).items() >= {**SENT, "timelimit": 5400.0}.items()
    assert json.loads((tmp_path / "T").read_text()) == topology.leaves(settings)
