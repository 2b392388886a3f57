"""The correlator on real Slurm: real jobs of two users, accounting on MariaDB, and each died of what we say."""

import json
import os
import signal

import pytest

from tests.daemons import until
from tests.fakes import node as fakes
from tests.lab import Lab, fresh, running

MORE = """
[store]
url = "file://{lab}/shared"
database = "{lab}/controller/cluster.db"
[joblog]
enabled = true
[accounting]
first = "1d"
[correlate]
settle = "0s"
"""
BUG = """
python3 - <<'END'
def forward(batch):
    return batch["labels"]
forward({})
END
"""
ECC = "echo 'RuntimeError: CUDA error: uncorrectable ECC error encountered'; exit 1"
TOLD = "echo begun; until test -e {lab}/out/$SLURM_JOB_ID.go; do sleep 0.2; done; exit 1"
"""It fails when told to."""
LARGE = """python3 -c "b'x' * (300 << 20)" """
OTHER, THIRD = "news", "man"
"""The second and the third user."""
LIMITED = os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK)
"""Only with cgroups does Slurm see that a job was killed for its memory; these are of version 1."""


@pytest.fixture(scope="module")
def lab():
    folder = fresh("correlate")
    (folder / "etc").mkdir()
    # Jobs are cgroups of one kernel for all labs: so no two labs may have a job of the same number.
    extra = f"SlurmdTimeout=15\nFirstJobId={os.getpid()}"
    if LIMITED:
        (folder / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n")
        extra += "\nTaskPlugin=task/cgroup"
    with running(Lab(folder, nodes=5, gpus=8, extra=extra)) as lab:
        (lab.lab / "shared").mkdir()
        lab.configure(MORE.format(lab=lab.lab))
        lab.run("sacctmgr", "-i", "add", "user", OTHER, THIRD, "Account=lab")
        lab.late = lab.submit("sleep 200", gres="gpu:1", nodelist="n3", time=1)
        yield lab


def correlate(lab, **more):
    """One run, with other settings in [correlate]."""
    extra = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
    lab.configure(MORE.format(lab=lab.lab) + extra)
    said = lab.gpuhealth("n5", "correlate", "--wait", "--json").splitlines()
    done = [line for line in said if line.startswith("{")]
    assert done, "\n".join(said)[-3000:]
    return json.loads(done[0])


def verdict(lab, job, attempt=-1, **more):
    """The verdict on the job, once the store has the attempt."""

    def judged():
        correlate(lab, **more)
        found = attempts(lab, job)
        return found and found[attempt]["verdict"]

    return until(judged, f"a verdict on job {job}")


def attempts(lab, job):
    lines = lab.gpuhealth("n5", "explain", "--json", str(job), check=False).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def lemons(lab):
    rows = map(json.loads, lab.gpuhealth("n5", "lemons", "--json").splitlines())
    return {row["node"]: row for row in rows if "node" in row}


def drained(lab):
    return {name for name in lab.names if "DRAIN" in lab.state(name)}


def told(lab, job):
    """Let the job's script (TOLD) go on."""
    (lab.lab / f"out/{job}.go").touch()


def ended(lab, job, states="FAILED"):
    lab.wait(job, states)
    return job


def test_a_bug_follows_its_user_over_the_nodes_and_the_nodes_are_left_alone(lab):
    jobs = [lab.submit(BUG, gres="gpu:1", nodelist=node, job_name="train-1") for node in ("n1", "n2", "n3", "n4")]
    for job in jobs:
        ended(lab, job)
    found = [verdict(lab, job) for job in jobs]
    assert {one["cause"] for one in found} == {"application"}
    assert lemons(lab) == {}
    said = lab.gpuhealth("n5", "explain", str(jobs[0]))
    assert "It died of the application" in said
    assert "KeyError: 'labels'" in said


def test_a_bad_node_that_kills_the_jobs_of_both_users_is_found_tested_and_the_others_untouched(lab):
    jobs = []
    for user in ("games", OTHER):
        script = TOLD.format(lab=lab.lab)
        job = lab.submit(script, user=user, gres="gpu:8", nodelist="n2", job_name=f"{user}-run")
        lab.until_begun(job)
        lab.inject("n2", "xid", 119, "--gpu", 3)
        told(lab, job)
        jobs.append(ended(lab, job))
        lab.until_reason("n2", "gpuhealth:Xid119 GPU3")
        lab.check("n2")
        lab.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
    found = [verdict(lab, job, comment=True) for job in jobs]
    assert [(one["cause"], one["node"]) for one in found] == [("node", "n2")] * 2
    correlate(lab, rungs="enforce")
    assert set(lemons(lab)) <= {"n2"}
    assert drained(lab) <= {"n2"}
    said = lab.run("sacct", "-X", "-n", "-P", "-j", str(jobs[1]), "-o", "AdminComment")
    assert said.startswith("gpuhealth: node n2")


@pytest.mark.skipif(not LIMITED, reason="no memory cgroups of version 1 that root may make here")
@pytest.mark.parametrize(("script", "state"), [(LARGE, "OUT_OF_MEMORY"), (f"srun {LARGE}", "FAILED")])
def test_a_job_whose_memory_ran_out_died_of_itself(lab, script, state):
    job = ended(lab, lab.submit(script, gres="gpu:1", nodelist="n3", mem=50), state)
    found = verdict(lab, job)
    assert (found["cause"], found["node"]) == ("application", None)
    assert "it reached its own memory limit" in {term["text"] for term in found["terms"]}
    assert "n3" not in lemons(lab)
    assert "DRAIN" not in lab.state("n3")


def test_of_a_job_on_two_nodes_one_died_and_the_job_succeeds_elsewhere(lab):
    """The slurmd of n5 is killed: Slurm ends the job as NODE_FAIL and puts it back into the queue."""
    script = "test $SLURM_RESTART_COUNT && exit 0; echo begun; sleep 600"
    job = lab.submit(script, gres="gpu:1", nodes=2, nodelist="n4,n5", requeue=True)
    lab.until_begun(job)
    lab.stop_node("n5", signal.SIGKILL)
    try:
        until(lambda: "DOWN" in lab.state("n5"), "n5 down")
        lab.run("scontrol", "update", f"JobId={job}", "ReqNodeList=", "NumNodes=1", check=False)
        lab.wait(job, "COMPLETED")
    finally:
        lab.start_node("n5")
        until(lambda: lab.run("scontrol", "update", "NodeName=n5", "State=RESUME", check=False) == "", "resumed")
    found = verdict(lab, job, 0)
    assert (found["cause"], found["node"]) == ("node", "n5")
    assert [row["node"] for row in lemons(lab).values() if row["rung"] and row["node"] == "n4"] == []


def test_what_its_user_or_the_time_limit_ended_is_nobodys_fault(lab):
    job = lab.submit("sleep 60", gres="gpu:1", nodelist="n3")
    lab.wait(job, "RUNNING")
    lab.run("scancel", str(job))
    ended(lab, job, "CANCELLED")
    lab.wait(lab.late, "TIMEOUT")
    assert [verdict(lab, one)["cause"] for one in (job, lab.late)] == ["user"] * 2
    assert "n3" not in lemons(lab)


def test_a_job_that_died_of_its_node_is_put_back_and_ends_well_elsewhere(lab):
    script = f"test $SLURM_RESTART_COUNT && exit 0; {TOLD.format(lab=lab.lab)}"
    job = lab.submit(script, gres="gpu:8", nodes=1, exclude="n2,n3,n4,n5")
    lab.until_begun(job)
    lab.inject("n1", "xid", 79, "--gpu", 5)
    told(lab, job)
    ended(lab, job)
    lab.run("scontrol", "update", f"JobId={job}", "ExcNodeList=", check=False)

    def requeued():
        correlate(lab, requeue=True)
        return lab.job(job)["JobState"] != "FAILED"

    until(requeued, "the requeue")
    lab.run("scontrol", "update", f"JobId={job}", "ExcNodeList=n1", check=False)
    lab.wait(job, "COMPLETED")
    assert verdict(lab, job, 0)["cause"] == "node"
    said = lab.gpuhealth("n5", "explain", str(job))
    assert "attempt 1 of 2" in said
    assert "requeue: requeued" in said
    assert "It ended well." in said


def test_a_node_that_kills_the_jobs_of_three_users_without_a_word_is_tested_and_comes_back(lab):
    users = ("games", OTHER, THIRD)
    fine = [
        lab.submit("true", user=user, gres="gpu:1", nodelist=node, job_name=f"{user}-run")
        for user in users
        for node in ("n3", "n5")
    ]
    jobs = [lab.submit(ECC, user=user, gres="gpu:8", nodelist="n4", job_name=f"{user}-run") for user in users]
    for job in fine:
        lab.wait(job, "COMPLETED")
    for job in jobs:
        ended(lab, job)

    def blamed():
        correlate(lab)
        found = [attempts(lab, job)[-1] for job in jobs]
        return all(one["reading"] for one in found) and [one["verdict"] for one in found]

    found = until(blamed, "the three logs in the store")
    assert [(one["cause"], one["node"]) for one in found] == [("node", "n4")] * 3
    suspect = lemons(lab)["n4"]
    assert (suspect["users"], suspect["hard"]) == (3, 0)
    assert suspect["rung"] in ("L3", "L4")
    before = drained(lab)
    scenario = fakes.load(f"{lab.lab}/nodes/n4")
    scenario["dcgm"]["time_scale"] = 0.002  # level 4 takes 7 s
    fakes.save(f"{lab.lab}/nodes/n4", scenario)
    correlate(lab, rungs="enforce")
    assert lab.reason("n4").startswith(f"gpuhealth:suspect GPU* {suspect['rung']} ")
    assert lab.reason("n4").endswith("by=correlate")
    assert drained(lab) - before == {"n4"}
    lab.until(lambda: "DRAIN" not in lab.state("n4"), "n4 tested and given back", "n4")
    steps = lab.rows("n4", "SELECT fact, rung, outcome FROM step ORDER BY id")
    assert ("suspect", suspect["rung"], "pass") in steps

    def passed():
        correlate(lab, rungs="enforce")
        return lemons(lab)["n4"]["last_test"].startswith(f"{suspect['rung']} pass")

    until(passed, "the test in the store")
    assert lemons(lab)["n4"]["rung"] not in ("L3", "L4", "RMA"), "it is not tested again for the same failures"
    assert "DRAIN" not in lab.state("n4")
