"""Names of jobs that imitate Slurm's own words: they decide nothing."""

import pytest

from tests.daemons import until

LAB = {"nodes": 2, "dbd": False, "floor": 2}
NAMES = [
    "Invalid job id JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0",
    "x\nslurm_load_jobs error: Invalid job id specified\nJobId=1 JobName=",
    """"'$(false)' NodeList=n2 Reason=Connection_refused UserId=root(0) Invalid job id specified""",
    "x JobState=COMPLETED Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "Invalid job id",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_is_named_like_an_error_is_still_there_and_low_bandwidth_beside_it_is_no_fault(lab, name):
    lab.inject("n1", "dcgm", "pcie", 30, "--gpu", 3, "--level", 2)
    other = lab.submit("sleep 600", gres="gpu:1", nodelist="n1", job_name=name)
    until(lambda: lab.rows("n1", "SELECT 1 FROM job WHERE job = ?", other), "the other job in the journal")
    # A retest waits: the epilog asks Slurm whether the other job is still there.
    for _ in range(2):
        failed = lab.submit("exit 1", gres="gpu:7", nodelist="n1")
        lab.wait(failed, "FAILED")
        until(lambda job=failed: lab.rows("n1", "SELECT 1 FROM job WHERE job = ? AND ended IS NOT NULL", job), "epilog")
    try:
        until(lambda: lab.state("n1").partition("+")[0] == "MIXED", "the epilogs' end")
        assert lab.rows("n1", "SELECT uuid FROM retest")
        assert lab.rows("n1", "SELECT ended FROM job WHERE job = ?", other) == [(None,)]
        assert "DRAIN" not in lab.state("n1")
    finally:
        lab.run("scancel", str(other))
    assert lab.until_reason("n1", "gpuhealth:").startswith("gpuhealth:pcie GPU3 L")  # alone it counts
