"""Jobs of --requeue=expedite on real Slurm: a broken GPU starts them elsewhere at once, and nothing else does."""

import pytest

from tests.cluster import release
from tests.daemons import until

pytestmark = pytest.mark.skipif(release() < (25, 11), reason="Slurm knows --requeue=expedite from 25.11 on")
LAB = {"dbd": False, "extra": "SlurmctldParameters=enable_expedited_requeue"}
ONCE = "[ $SLURM_RESTART_COUNT ] && { sleep 600; }; sleep 3; exit 3"
"""Fails at its first run, and then goes on running."""


def elsewhere(lab, job):
    """The node on which the job's second run is."""
    until(lambda: lab.job(job)["Restarts"] == "1" and lab.job(job)["JobState"] == "RUNNING", f"job {job} elsewhere")
    return lab.job(job)["NodeList"]


def held(lab, job):
    """Slurm's own way with a job of this kind that failed on good nodes."""
    return lab.wait(job, "REQUEUE_HOLD")


def test_a_job_whose_gpu_fails_the_epilogs_test_starts_elsewhere_and_our_reason_stays(lab):
    lab.inject("n1", "dcgm", "memory", 45, "--gpu", 2, "--level", 2)
    job = lab.submit(ONCE, gres="gpu:8", exclude="n3,n4", requeue="expedite")
    assert elsewhere(lab, job) == "n2"
    assert lab.reason("n1").startswith("gpuhealth:")
    assert "DRAIN" in lab.state("n1")
    assert "DRAIN" not in lab.state("n2")


def test_also_one_whose_node_a_check_has_drained_while_it_ran(lab):
    job = lab.submit(ONCE.replace("sleep 3", "sleep 15"), gres="gpu:8", exclude="n3,n4", requeue="expedite")
    lab.wait(job, "RUNNING")
    first = lab.job(job)["NodeList"]
    lab.inject(first, "xid", 79, "--gpu", 3)
    lab.until_reason(first, "gpuhealth:Xid79 GPU3")
    assert elsewhere(lab, job) != first
    assert lab.reason(first).startswith("gpuhealth:Xid79 GPU3 ")


def test_of_a_job_on_two_nodes_only_the_broken_one_is_drained(lab):
    lab.inject("n1", "dcgm", "memory", 45, "--gpu", 2, "--level", 2)
    job = lab.submit(ONCE, gres="gpu:8", nodes=2, exclude="n3,n4", requeue="expedite")
    until(lambda: lab.job(job)["Restarts"] == "1", f"job {job} to be handed back")
    assert lab.job(job)["JobState"] == "EXPEDITING"  # until two nodes are free
    assert lab.reason("n1").startswith("gpuhealth:")
    assert "DRAIN" not in lab.state("n2")
    lab.run("scontrol", "update", f"JobId={job}", "ExcNodeList=n4")
    assert elsewhere(lab, job) == "n[2-3]"


def test_an_applications_bug_on_a_good_node_is_left_to_slurm(lab):
    job = lab.submit(ONCE, gres="gpu:1", nodelist="n1", requeue="expedite")
    held(lab, job)
    assert (lab.state("n1"), lab.reason("n1")) == ("IDLE", "")


def test_without_room_in_the_budget_no_exit_code_drains_the_node(lab):
    lab.configure(floor=0)
    lab.inject("n1", "dcgm", "memory", 45, "--gpu", 2, "--level", 2)
    job = lab.submit(ONCE, gres="gpu:8", nodelist="n1", requeue="expedite")
    held(lab, job)
    assert (lab.state("n1"), lab.reason("n1")) == ("IDLE", "")


def test_an_ordinary_job_on_a_broken_gpu_fails_as_ever(lab):
    lab.inject("n1", "dcgm", "memory", 45, "--gpu", 2, "--level", 2)
    forged = "x ExpeditedRequeue=Yes"
    job = lab.submit("exit 3", gres="gpu:8", nodelist="n1", job_name=forged, comment=forged)
    lab.wait(job, "FAILED")
    assert lab.reason("n1").startswith("gpuhealth:")
