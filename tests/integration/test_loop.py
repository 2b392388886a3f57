"""The loop on real Slurm: bad GPU nodes are drained with a reason, good ones are left alone."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.daemons import until

LAB = {"dbd": False}
GPU_UUIDS = "SELECT DISTINCT uuid FROM diagnostic WHERE level = ? AND time > ?"


def job_uuids(lab, node, job):
    found = lab.until(lambda: lab.rows(node, "SELECT gpus FROM job WHERE job = ?", job), f"job {job} in the journal")
    return set(found[0][0].split(","))


def test_a_good_job_runs_and_asks_the_controller_nothing(lab):
    lab.configure(poll="1h")
    lab.check("n1")
    lab.calls("n1")
    job = lab.submit("sleep 8", gres="gpu:2", nodelist="n1")
    lab.wait(job, "COMPLETED")
    lab.until(
        lambda: lab.rows("n1", "SELECT outcome FROM job WHERE job = ? AND ended IS NOT NULL", job) == [("ok",)], "end"
    )
    assert lab.calls("n1") == []
    assert "DRAIN" not in lab.state("n1")


def test_an_idle_node_reads_its_own_record_once_a_poll(lab):
    lab.configure(poll="12s")
    lab.check("n1")
    began, calls = time.monotonic(), lab.calls("n1") and []
    lab.until(lambda: calls.extend(lab.calls("n1")) or len(calls) >= 2, "two looks", "n1")
    assert len(calls) <= 1 + (time.monotonic() - began) / 12
    assert set(calls) == {"scontrol -o show node n1"}


def test_a_job_with_a_bug_has_its_own_gpus_tested_and_the_node_stays(lab):
    began = time.time()
    job = lab.submit("exit 3", gres="gpu:2", nodelist="n1")
    lab.wait(job, "FAILED")
    tested = lab.until(lambda: lab.rows("n1", GPU_UUIDS, 2, began), "level 2 on n1")
    assert {row[0] for row in tested} == job_uuids(lab, "n1", job)
    assert len(tested) == 2
    assert "DRAIN" not in lab.state("n1")


def test_a_lost_gpu_drains_the_node_before_the_job_and_the_job_goes_on_elsewhere(lab):
    lab.inject("n2", "xid", 79, "--gpu", 3)
    job = lab.submit("sleep 1; echo ran on $SLURMD_NODENAME", gres="gpu:8", exclude="n1,n3")
    lab.until_reason("n2", "gpuhealth:Xid79 GPU3")
    lab.wait(job, "COMPLETED")
    assert lab.output(job) == "ran on n4\n"
    assert lab.run("sinfo", "-R", "-h", "-p", "gpu").startswith("gpuhealth:Xid79 GPU3")


def test_a_fault_in_the_kernel_log_is_in_sinfo_within_one_check(lab):
    lab.inject("n3", "xid", 48, "--gpu", 5)
    lab.check("n3")
    assert lab.reason("n3").startswith("gpuhealth:Xid48 GPU5")
    assert lab.state("n3") == "IDLE+DRAIN"


def test_slurmd_starts_the_check_by_itself(lab):
    lab.inject("n3", "xid", 48, "--gpu", 5)
    until(lambda: lab.reason("n3").startswith("gpuhealth:Xid48 GPU5"), "the drain, by slurmd's own check")


def test_an_old_xid_does_not_drain_a_resumed_node_and_a_new_one_does(lab):
    lab.inject("n1", "xid", 48, "--gpu", 0)
    lab.until_reason("n1", "Xid48 GPU0")
    lab.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    for _ in range(3):
        lab.check("n1")
    assert "DRAIN" not in lab.state("n1")
    lab.inject("n1", "xid", 48, "--gpu", 1)
    lab.until_reason("n1", "Xid48 GPU1")


def test_an_admins_resume_while_the_condition_stands_is_an_ack(lab):
    lab.inject("n1", "row-remap-failed", "--gpu", 2)
    lab.until_reason("n1", "gpuhealth:remap-fail GPU2")
    lab.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    for _ in range(3):
        lab.check("n1")
    assert "DRAIN" not in lab.state("n1")
    job = lab.submit("true", gres="gpu:8", nodelist="n1")
    lab.wait(job, "COMPLETED")
    assert "acked" in lab.gpuhealth("n1", "status")
    lab.inject("n1", "row-remap-failed", "--gpu", 3)
    assert "GPU3" in lab.until_reason("n1", "gpuhealth:remap-fail")


def test_an_admins_drain_is_neither_overwritten_nor_extended_nor_resumed(lab):
    lab.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=fan replacement, Bob")
    lab.inject("n1", "xid", 79, "--gpu", 3)
    for _ in range(3):
        lab.check("n1")
    assert lab.reason("n1") == "fan replacement, Bob"
    assert lab.rows("n1", "SELECT count(*) FROM finding WHERE code = '79' AND cleared IS NULL")[0][0] >= 1
    assert "an admin owns the node" in lab.rows("n1", "SELECT result FROM decision ORDER BY id DESC")[0][0]


def test_an_admin_who_takes_over_our_hold_keeps_it(lab):
    lab.inject("n1", "xid", 48, "--gpu", 3)
    lab.until_reason("n1", "reset manual")  # from here on we write nothing: words alone leave no trace to put back
    lab.run("scontrol", "update", "NodeName=n1", "Reason=RMA ticket 4711")
    lab.inject("n1", "xid", 79, "--gpu", 4)
    for _ in range(3):
        lab.check("n1")
    assert lab.reason("n1") == "RMA ticket 4711"


def test_level_1_in_the_prolog_names_the_gpu_and_moves_the_job(lab):
    lab.inject("n2", "dcgm", "software", 95, "--gpu", 6, "--level", 1)
    forget_passes(lab, "n2")
    job = lab.submit("echo ran on $SLURMD_NODENAME", gres="gpu:8", exclude="n1,n3")
    reason = lab.until_reason("n2", "gpuhealth:")
    assert reason.startswith("gpuhealth:software GPU6 L")  # L1 fail, or the ladder has begun
    assert f"job={job}" in reason
    first_decision(lab, "n2", ("drained", "software GPU6 L3"))
    lab.wait(job, "COMPLETED")
    assert lab.output(job) == "ran on n4\n"


def first_decision(lab, node, wanted):
    """The journal is told after Slurm."""
    until(lambda: lab.rows(node, "SELECT action, reason FROM decision")[:1] == [wanted], f"{node}: {wanted}")


def test_level_2_after_a_failed_job_drains_the_node_with_the_test_and_the_gpu(lab):
    lab.inject("n1", "dcgm", "memory", 45, "--gpu", 3, "--level", 2)
    failed = lab.submit("exit 1", gres="gpu:8", nodelist="n1")
    reason = lab.until_reason("n1", "gpuhealth:")
    assert reason.startswith("gpuhealth:memory GPU3 L")
    assert f"job={failed}" in reason
    first_decision(lab, "n1", ("drained", "memory GPU3 L3"))


def test_a_job_that_is_not_to_be_requeued_is_not_lost_either(lab):
    with lab.unchecked("n2"):
        lab.inject("n2", "xid", 79, "--gpu", 3)
        job = lab.submit("echo ran on $SLURMD_NODENAME", gres="gpu:8", exclude="n1,n3", no_requeue=True)
        lab.until_reason("n2", "gpuhealth:Xid79 GPU3")
    lab.wait(job, "COMPLETED")
    assert (lab.output(job), lab.job(job)["Requeue"]) == ("ran on n4\n", "0")
    ended = "SELECT outcome FROM job WHERE job = ? AND ended IS NOT NULL"
    assert lab.rows("n2", ended, job) == [("moved",)]
    assert lab.rows("n2", "SELECT * FROM diagnostic WHERE level = 2") == []


def test_a_job_that_is_no_batch_job_is_moved_on_by_slurm_and_our_reason_stays(lab):
    with lab.unchecked("n2"):
        lab.inject("n2", "xid", 79, "--gpu", 3)
        said = lab.run("srun", "-w", "n2", "--gres=gpu:8", "hostname", check=False)
    assert said == ""
    assert lab.until_reason("n2", "gpuhealth:").startswith("gpuhealth:Xid79 GPU3")
    lab.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    until(lambda: not lab.run("squeue", "-h"), "the job's end")
    lab.check("n2")
    assert "Prolog error" not in lab.reason("n2")


def test_over_budget_a_node_is_not_drained_and_its_job_starts(lab):
    lab.configure(floor=1)
    lab.inject("n1", "xid", 48, "--gpu", 3)
    lab.until_reason("n1", "gpuhealth:Xid48")
    lab.inject("n2", "xid", 48, "--gpu", 3)
    job = lab.submit("sleep 1", gres="gpu:8", nodelist="n2")
    lab.wait(job, "COMPLETED")
    for _ in range(2):
        lab.check("n2")
    assert "DRAIN" not in lab.state("n2")
    assert lab.rows("n2", "SELECT action FROM decision ORDER BY id DESC")[0] == ("over-budget",)
    lab.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    lab.until_reason("n2", "gpuhealth:Xid48")


def test_in_shadow_mode_nothing_is_drained_and_what_would_be_is_shown(lab):
    lab.config.write_text(lab.config.read_text().replace('mode = "enforce"', 'mode = "shadow"', 1))
    lab.check("n1")
    lab.inject("n1", "xid", 79, "--gpu", 3)
    job = lab.submit("sleep 1", gres="gpu:8", nodelist="n1")
    lab.wait(job, "COMPLETED")
    for _ in range(2):
        lab.check("n1")
    assert "DRAIN" not in lab.state("n1")
    assert "xid:79" in lab.gpuhealth("n1", "findings", "--shadow")
    assert ("would-drain",) in lab.rows("n1", "SELECT action FROM decision")


def test_with_the_controller_down_nothing_hangs_and_the_fault_waits_for_it(lab):
    lab.stop_controller()
    try:
        lab.inject("n1", "xid", 79, "--gpu", 3)
        until(lambda: "undecided" in lab.hook("check", "n1").stderr, "a check that nobody else was at")
    finally:
        lab.start_controller()
    lab.until_reason("n1", "gpuhealth:Xid79 GPU3")


def test_programs_that_see_one_fault_at_once_are_one_drain(lab):
    lab.inject("n1", "xid", 48, "--gpu", 3)
    lab.calls("n1")
    job = {"SLURM_JOB_UID": "5", "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7", "SLURM_JOB_EXIT_CODE2": "1:0"}
    programs = ["prolog", "epilog", "check"] * 4
    with ThreadPoolExecutor(len(programs)) as pool:
        done = list(pool.map(lambda n: lab.hook(programs[n], "n1", SLURM_JOB_ID=str(90000 + n), **job), range(12)))
    assert {one.returncode for one in done if "Traceback" not in one.stderr} <= {0, 1}
    assert sum("State=DRAIN" in call for call in lab.calls("n1")) == 1
    # What NVML says of the same GPU may come to one of them after the drain: one more decision, and the same hold.
    actions = [row[0] for row in lab.rows("n1", "SELECT action FROM decision")]
    assert (actions.count("drained"), set(actions) - {"drained"}) in ((1, set()), (1, {"held"})), actions
    assert "acked" not in {row[0] for row in lab.rows("n1", "SELECT mode FROM finding")}


def test_a_prolog_that_slurmd_ends_for_its_time_is_no_verdict(lab):
    conf = lab.conf.read_text()
    try:
        lab.conf.write_text(f"{conf}PrologEpilogTimeout=2\n")
        lab.run("scontrol", "reconfigure")
        lab.inject("n1", "hang")
        forget_passes(lab, "n1")
        until(lambda: time.time() - lab.journal("n1", "checked") > lab.values["interval"], "an old reading")
        lab.submit("sleep 1", gres="gpu:1", nodelist="n1")
        log = lab.lab / "log/slurmd-n1.log"
        until(lambda: "prolog poll timeout" in log.read_text(), "the end of its time")
        lab.cancel_all()
        lab.inject("n1", "clear")
        lab.check("n1")
        # slurmd gives it 10 ms to end well; if that was not enough, Slurm has drained the node in its own words.
        assert lab.reason("n1") in ("", "Prolog error", "prolog or job env setup failure"), lab.reason("n1")
        assert lab.rows("n1", "SELECT action FROM decision") == []
    finally:
        lab.inject("n1", "clear")
        lab.conf.write_text(conf)
        lab.run("scontrol", "reconfigure")


def test_without_a_host_engine_the_job_starts_and_it_is_said(lab, no_engine):
    job = lab.submit("sleep 1", gres="gpu:8", nodelist="n1")
    lab.wait(job, "COMPLETED")
    assert "DRAIN" not in lab.state("n1")
    assert "no host engine" in lab.gpuhealth("n1", "findings")


def test_a_site_may_want_untested_gpus_out_of_service(lab, no_engine):
    lab.configure('[prolog]\non_untestable = "drain"\n')
    lab.submit("sleep 1", gres="gpu:8", nodelist="n1")
    assert lab.until_reason("n1", "gpuhealth:").startswith("gpuhealth:untestable GPU*")


@pytest.fixture
def no_engine(lab):
    lab.daemons.stop("hostengine-n1")
    forget_passes(lab, "n1")
    yield
    folder = lab.lab / "nodes/n1"
    lab.daemons.start("hostengine-n1", str(folder / "hostengine"), str(folder / "hostengine.sock"))
    lab.touched.add("n1")


@pytest.mark.parametrize("how", ["hang", "hang-unkillable"])
def test_a_driver_that_hangs_does_not_hold_up_the_job(lab, how):
    lab.config.write_text(lab.config.read_text().replace("[nvml]\n", '[nvml]\ntimeout = "2s"\n'))
    lab.check("n1")
    lab.inject("n1", how)
    job = lab.submit("sleep 1", gres="gpu:8", nodelist="n1")
    lab.wait(job, "COMPLETED")
    if how == "hang":
        assert "DRAIN" not in lab.state("n1")
        lab.until(lambda: "nvml:timeout" in lab.gpuhealth("n1", "findings"), "the finding")
    else:
        lab.until_reason("n1", "gpuhealth:hung GPU*")
    lab.inject("n1", "clear")


def test_a_broken_configuration_stops_no_job_and_changes_nothing(lab):
    lab.config.write_text("mode = 'enforced'\n")
    lab.stale.clear()  # no check would end
    lab.inject("n1", "xid", 79, "--gpu", 3)
    job = lab.submit("exit 1", gres="gpu:8", nodelist="n1")
    lab.wait(job, "FAILED")
    assert "configuration not used" in lab.hook("check", "n1").stderr
    assert "DRAIN" not in lab.state("n1")


def test_slurms_own_drain_is_taken_over_when_a_finding_explains_it(lab):
    lab.run(
        "scontrol",
        "update",
        "NodeName=n1",
        "State=DRAIN",
        "Reason=gres/gpu count reported lower than configured (7 < 8)",
    )
    for _ in range(2):
        lab.check("n1")
    assert lab.reason("n1").startswith("gres/gpu")
    lab.inject("n1", "xid", 79, "--gpu", 3)
    lab.until_reason("n1", "gpuhealth:Xid79 GPU3")


def test_a_job_without_gpus_is_none_of_our_business(lab):
    lab.inject("n1", "hang")
    job = lab.submit("exit 1", nodelist="n1")
    lab.wait(job, "FAILED")
    assert lab.rows("n1", "SELECT * FROM job WHERE job = ?", job) == []
    lab.inject("n1", "clear")


def test_names_and_comments_of_users_do_nothing(lab):
    evil = "x Reason=none State=IDLE $(touch /tmp/gpuhealth-evil) `id` \n gpuhealth:"
    job = lab.submit("exit 1", gres="gpu:1", nodelist="n1", job_name=evil, comment="skip_checks " + evil)
    lab.wait(job, "FAILED")
    lab.until(lambda: lab.rows("n1", "SELECT outcome FROM job WHERE job = ? AND ended IS NOT NULL", job), "end")
    lab.inject("n2", "xid", 79, "--gpu", 3)
    forget_passes(lab, "n2")
    moved = lab.submit("true", gres="gpu:8", exclude="n1,n3", job_name=evil, comment=evil)
    assert lab.until_reason("n2", "gpuhealth:").isprintable()
    lab.wait(moved, {"COMPLETED", "PENDING"})


def forget_passes(lab, node):
    """As if the last diagnostics had been long ago."""
    lab.change(node, "DELETE FROM diagnostic")


def test_no_node_of_a_job_starts_before_all_are_fit(lab):
    lab.inject("n2", "xid", 79, "--gpu", 3)
    forget_passes(lab, "n2")
    job = lab.submit("echo ran on $SLURM_JOB_NODELIST", gres="gpu:8", nodes=2, exclude="n4")
    lab.until_reason("n2", "gpuhealth:Xid79 GPU3")
    lab.wait(job, "COMPLETED")
    assert lab.output(job) == "ran on n[1,3]\n"


def test_low_bandwidth_beside_another_job_is_tested_again_when_the_node_is_idle(lab):
    lab.inject("n1", "dcgm", "pcie", 30, "--gpu", 3, "--level", 2)
    other = lab.submit("sleep 60", gres="gpu:1", nodelist="n1")
    lab.wait(other, "RUNNING")
    failed = lab.submit("exit 1", gres="gpu:7", nodelist="n1")
    lab.wait(failed, "FAILED")
    if not (mine := job_uuids(lab, "n1", failed)) >= {gpu_3(lab, "n1")}:
        pytest.skip(f"Slurm gave GPU 3 to the other job: {mine}")
    lab.until(lambda: lab.rows("n1", "SELECT uuid FROM retest"), "a retest")
    assert lab.state("n1").partition("+")[0] in ("MIXED", "IDLE")
    assert "DRAIN" not in lab.state("n1")
    lab.run("scancel", str(other))
    assert lab.until_reason("n1", "gpuhealth:").startswith("gpuhealth:pcie GPU3 L")
    assert lab.rows("n1", "SELECT uuid FROM retest") == []


def test_cancelled_and_timed_out_jobs_are_told_apart_when_slurm_may_be_asked(lab):
    lab.configure("[epilog]\nask_slurm = true\n")
    ended = "SELECT outcome FROM job WHERE job = ? AND ended IS NOT NULL"

    def cancelled() -> str:
        job = lab.submit("echo begun; sleep 60", gres="gpu:1", nodelist="n1")
        lab.until_begun(job)
        lab.run("scancel", str(job))
        return lab.until(lambda: lab.rows("n1", ended, job), "the end")[0][0]

    # slurmd may begin an epilog before slurmctld knows which signal ended the script: then it looks like a success.
    assert "cancelled" in (cancelled() for _ in range(5))
    late = lab.submit("sleep 300", gres="gpu:1", nodelist="n1")
    lab.wait(late, "RUNNING")
    lab.run("scontrol", "update", f"JobId={late}", "TimeLimit=0:01")
    assert lab.until(lambda: lab.rows("n1", ended, late), "the end") == [("timeout",)]


def gpu_3(lab, node):
    return next(gpu["uuid"] for gpu in lab.journal(node, "gpus") if gpu["index"] == 3)


def test_of_an_array_only_the_task_on_the_bad_node_is_moved(lab):
    lab.inject("n2", "xid", 79, "--gpu", 3)
    array = lab.submit("sleep 8; echo ran on $SLURMD_NODENAME", gres="gpu:8", exclude="n3,n4", array="0-1")
    lab.until_reason("n2", "gpuhealth:Xid79 GPU3")

    def states() -> dict[str, str]:
        return dict(row.split() for row in lab.run("squeue", "-h", "-r", "-j", str(array), "-o", "%K %t").splitlines())

    lab.until(lambda: "PD" in states().values(), "the task that was moved")
    moved = {task: state == "PD" for task, state in states().items()}
    assert sorted(states().values()) == ["PD", "R"]  # the one on n1 goes on
    lab.until(lambda: not lab.run("squeue", "-h", "-j", str(array), check=False), "the array")
    for task in (0, 1):
        record = lab.run("scontrol", "-o", "show", "job", f"{array}_{task}")
        assert "JobState=COMPLETED" in record
        assert moved[str(task)] or "Restarts=0" in record
