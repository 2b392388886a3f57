"""Slurm writes over a drained node's reason when slurmd registers with fewer GPUs; ours comes back, an admin's stands.

With slurmdbd, which tells who drained last, and without it.
"""

import contextlib
import fcntl
import subprocess

import pytest

from tests.cluster import release
from tests.daemons import PATIENCE
from tests.fakes import node as fakes
from tests.lab import BIN, Lab, fresh, running

pytestmark = pytest.mark.skipif(release() < (23, 2), reason="from 23.02 on Slurm writes over reasons")
GPUS = 4
SLURMS = f"gres/gpu count reported lower than configured ({GPUS - 1} < {GPUS})"


@pytest.fixture(scope="module", params=["slurmdbd", "alone"])
def shared_lab(request):
    made = Lab(
        fresh(f"registered-{request.param}"),
        nodes=2,
        gpus=GPUS,
        floor=2,
        dbd=request.param == "slurmdbd",
        extra="ResumeTimeout=15",
    )
    with running(made) as lab:
        lab.whole = (lab.lab / "etc/gres.conf").read_text()
        yield lab


@pytest.fixture
def lab(shared_lab):
    register(shared_lab, GPUS)
    shared_lab.touched.add("n1")
    shared_lab.heal()
    return shared_lab


def gres(lab, count):
    """The node's part of gres.conf has so many GPUs from slurmd's next start on."""
    lines = lab.whole.splitlines(keepends=True)
    gone = [line for line in lines if line.startswith("NodeName=n1 ")][count:]
    (lab.lab / "etc/gres.conf").write_text("".join(line for line in lines if line not in gone))


def register(lab, count, begun=lambda: True):
    """slurmd starts anew and reports so many GPUs; if fewer than configured, Slurm writes its reason."""
    gres(lab, count)
    lab.daemons.stop("slurmd-n1")  # not the host engine: a rung may be running
    lab.daemons.start("slurmd-n1", "slurmd", "-D", "-f", str(lab.conf), "-N", "n1")
    lab.until(lambda: ("INVALID_REG" in lab.state("n1")) == (count < GPUS) and begun(), f"{count} GPUs", "n2")


def over(lab):
    """The same with a GPU less, while no check and no worker runs."""
    register(lab, GPUS - 1)
    if (
        lab.reason("n1") != SLURMS
    ):  # 23.11 to 25.11 without accounting keep an earlier drain's reason until the next time
        register(lab, GPUS - 1, lambda: lab.reason("n1") == SLURMS)


def admin(lab, *words):
    lab.run("scontrol", "update", "NodeName=n1", *words)


def held(lab, number=79):
    """n1 is held for a lost GPU, and no worker runs: our reason, which waits for somebody."""
    lab.inject("n1", "xid", number, "--gpu", 3)
    return lab.until_reason("n1", "manual")


@contextlib.contextmanager
def quiet(lab):
    """Neither a check nor a worker runs on n1."""
    with lab.unchecked("n1"), (lab.lab / "nodes/n1/run/worker.lock").open("a") as lock:
        lab.until(lambda: not taken(lock), "the worker's end", "n2")
        yield


def taken(lock):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def recorded(lab, text):
    """Wait until slurmdbd has this as the node's last order, if there is a slurmdbd."""
    ask = ("sacctmgr", "-n", "-P", "show", "event", "nodes=n1", "end=now+1hour", "format=TimeEnd,Reason")
    lab.until(lambda: not lab.dbd or f"Unknown|{text}" in lab.run(*ask), f"an event with {text!r}", "n2")


def checked(lab):
    """The node's state and reason after two checks of its own."""
    for _ in range(2):
        lab.check("n1")
    return lab.state("n1"), lab.reason("n1")


def modes(lab):
    """What is thought of the faults of the hold."""
    found = lab.rows("n1", "SELECT DISTINCT mode FROM finding WHERE severity = 'fault' AND acted > 0 AND code = '79'")
    return [row[0] for row in found]


def login(lab, *argv):
    """Exit code and words of a gpuhealth command on another host."""
    env = {**lab.env, "SLURMD_NODENAME": "login1", "GPUHEALTH_CONFIG": "/nowhere", "COLUMNS": "200"}
    argv = [str(BIN / argv[0]), *argv[1:]]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_our_reason_comes_back_each_time_and_the_ladder_goes_on(lab):
    ours = held(lab)
    for _ in range(2):
        with quiet(lab):
            over(lab)
        assert checked(lab) == ("IDLE+DRAIN+INVALID_REG", ours)
    with quiet(lab):
        lab.inject("n1", "reboot")  # by hand: the GPU is there again
        register(lab, GPUS)
    lab.until(lambda: lab.state("n1") == "IDLE", "n1 tested and given back", "n1")
    assert lab.rows("n1", "SELECT outcome, follows FROM step ORDER BY id DESC LIMIT 1") == [("pass", "back")]


def test_it_comes_back_after_restarts_of_slurmctld_and_slurmd_too(lab):
    ours = held(lab)
    with quiet(lab):
        over(lab)
        lab.stop_controller()
        lab.start_controller()
        over(lab)
    assert checked(lab)[1] == ours


def test_while_a_rung_runs_it_goes_on(lab):
    lab.touched.add("n1")
    admin(lab, "State=DRAIN", "Reason=gpuhealth:Xid94 GPU3 L3 queued")
    lab.until_reason("n1", "L3 running")
    register(lab, GPUS - 1)
    lab.until(lambda: steps(lab) and "running" not in steps(lab), "the rung's end", "n1")
    assert steps(lab)[0] == "fail"  # the GPU that slurmd lacks; "cancelled" would be a hold that was lost
    lab.until_reason("n1", "gpuhealth:")


def steps(lab):
    return [row[0] for row in lab.rows("n1", "SELECT outcome FROM step ORDER BY id")]


def test_a_node_without_its_gpu_after_our_reboot_ends_at_rma(lab):
    lab.configure(reboot="true")
    lab.inject("n1", "xid", 79, "--gpu", 3, "--for-good")
    gres(lab, GPUS - 1)
    assert lab.until_reason("n1", "next=RMA").startswith("gpuhealth:Xid79 GPU3 ")
    assert "DRAIN" in lab.state("n1")


def test_a_drain_of_slurms_own_is_taken_over_and_ours_comes_back(lab):
    with quiet(lab):
        over(lab)
    ours = held(lab)
    with quiet(lab):
        over(lab)
    assert checked(lab)[1] == ours


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("state", ["DRAIN", "DOWN", "FAIL"])
def test_an_admins_order_is_left_alone_where_slurmdbd_knows_of_it(lab, state, when):
    """Without slurmdbd our reason comes back, as docs/how-it-decides.md says; the node stays out."""
    ours = held(lab)
    with quiet(lab):
        if when == "between":
            over(lab)
        admin(lab, f"State={state}", "Reason=PSU, JD | bay 7")
        recorded(lab, "PSU, JD | bay 7")
        over(lab)
    flags, reason = checked(lab)
    assert state in flags
    known = lab.dbd or state == "FAIL"
    assert (reason, modes(lab)) == ((SLURMS, ["acked"]) if known else (ours, ["enforce"]))


@pytest.mark.parametrize("words", [["State=DRAIN", "Reason=PSU, JD"], ["Reason=PSU, JD"]])
def test_an_admins_words_that_a_check_has_seen_are_not_taken_over_by_a_new_fault_either(lab, words):
    held(lab)
    admin(lab, *words)
    assert checked(lab)[1] == "PSU, JD"
    with quiet(lab):
        over(lab)
    lab.inject("n1", "row-remap-failed", "--gpu", 1)
    lab.until(lambda: lab.rows("n1", "SELECT 1 FROM decision WHERE action = 'admin'"), "the decision", "n1")
    assert checked(lab)[1] == SLURMS
    register(lab, GPUS)
    admin(lab, "State=RESUME")
    lab.until_reason("n1", "gpuhealth:remap-fail GPU1")


def test_an_admins_words_over_slurms_reason_stand(lab):
    held(lab)
    with quiet(lab):
        over(lab)
        admin(lab, "Reason=PSU, JD")
    assert checked(lab)[1] == "PSU, JD"


def test_an_admins_resume_is_an_ack_also_if_slurm_drains_the_node_anew(lab):
    """Without slurmdbd our reason comes back: what Slurm wrote over and what it wrote anew look the same."""
    ours = held(lab)
    with quiet(lab):
        admin(lab, "State=RESUME")
        over(lab)
        recorded(lab, SLURMS)
    assert checked(lab)[1] == (SLURMS if lab.dbd else ours)
    assert modes(lab) == (["acked"] if lab.dbd else ["enforce"])


def test_slurm_itself_refuses_a_resume_and_each_command_says_why(lab):
    ours = held(lab)
    with quiet(lab):
        over(lab)
    lab.until_reason("n1", "gpuhealth:")
    lab.inject("n2", "xid", 79, "--gpu", 3)
    lab.until_reason("n2", "manual")
    code, text = login(lab, "gpuhealth", "resume", "n1")
    assert (code, "slurmd reports fewer GPUs than configured" in text) == (1, True), text
    code, text = login(lab, "gpuhealth", "undrain", "--fact", "*", "--yes")
    assert (code, "1 of 2 nodes are back in service" in text, "n1: still drained" in text) == (1, True, True), text
    assert (lab.reason("n2"), lab.reason("n1")) == ("", ours)
    assert "FAIL  slurmd reports less than slurm.conf has" in lab.gpuhealth("n1", "doctor")


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_undrain_has_acknowledged_does_not_come_back(lab, when):
    held(lab)
    if when == "after":
        with quiet(lab):
            over(lab)
        lab.until_reason("n1", "manual")
    with quiet(lab):
        login(lab, "gpuhealth", "undrain", "--fact", "*", "--yes")
        over(lab)
    assert checked(lab)[1] == SLURMS
    assert modes(lab) == ["acked"]


def asked(lab):
    """Somebody asks for a test of n1; our reason, once the node knows of it."""
    code, text = login(lab, "gpuhealth-escalate", "n1", "--no-wait")
    assert code == 0, text
    lab.touched.add("n1")
    lab.until(lambda: is_kept(lab, "asked GPU* L3") and not is_kept(lab, "claim"), "the request", "n1")
    return lab.until_reason("n1", "asked GPU* L3")


def is_kept(lab, text):
    return text in (lab.journal("n1", "hold") or {}).get("reason", "")


@pytest.fixture
def slow(lab):
    """Level 3 goes on for 15 minutes."""
    scale(lab, 1)
    yield
    scale(lab, 0.01)


def scale(lab, factor):
    folder = str(lab.lab / "nodes/n1")
    scenario = fakes.load(folder)
    scenario["dcgm"]["time_scale"] = factor
    fakes.save(folder, scenario)


@pytest.fixture
def job(lab):
    """A job runs on n1: what somebody asks for waits."""
    lab.until_begun(lab.submit("echo begun; sleep 600", nodelist="n1"))


def test_a_request_comes_back_where_slurmdbd_knows_that_it_stands(lab, slow):
    """Without slurmdbd it may have been cancelled: Slurm's drain stays."""
    asked(lab)
    lab.until_reason("n1", "L3 running")
    lab.until(lambda: is_kept(lab, "running"), "it", "n1")
    recorded(lab, "gpuhealth:asked")
    register(lab, GPUS - 1)
    if not lab.dbd:
        assert checked(lab)[1] == SLURMS
        return
    lab.until_reason("n1", "asked GPU* L3 running")
    assert steps(lab) == ["running"]
    code, text = login(lab, "gpuhealth", "ladder", "cancel", "n1")
    assert (code, "slurmd reports fewer GPUs than configured" in text) == (1, True), text
    register(lab, GPUS)
    assert login(lab, "gpuhealth", "ladder", "cancel", "n1")[0] == 0
    assert checked(lab)[1] == ""


def test_a_cancelled_request_stays_cancelled(lab, slow):
    asked(lab)
    with lab.unchecked("n1"):
        code, text = login(lab, "gpuhealth", "ladder", "cancel", "n1")
        assert code == 0, text
        over(lab)
        recorded(lab, SLURMS)
    assert checked(lab)[1] == SLURMS


def test_a_hold_on_a_node_with_a_job_of_which_slurmdbd_does_not_know_yet_comes_back(lab, job):
    admin(lab, "State=DRAIN", "Reason=PSU, JD")
    admin(lab, "State=RESUME")
    lab.inject("n1", "xid", 79, "--gpu", 3)
    ours = lab.until_reason("n1", "gpuhealth:Xid79 GPU3 L3 queued")
    lab.until(lambda: is_kept(lab, "queued"), "it", "n1")
    with quiet(lab):
        over(lab)
    assert checked(lab)[1] == ours


def test_a_test_of_what_slurm_drained_comes_back_until_it_is_cancelled(lab, job):
    with quiet(lab):
        over(lab)
    ours = asked(lab)
    with quiet(lab):
        over(lab)
    assert checked(lab)[1] == ours
    with quiet(lab):
        code, text = login(lab, "gpuhealth", "ladder", "cancel", "n1")
        assert code == 0, text
    assert checked(lab)[1] == SLURMS


def test_a_test_of_what_slurm_drained_that_found_a_fault_is_resumed_to_slurms_reason(lab):
    with quiet(lab):
        over(lab)
    lab.inject("n1", "dcgm", "memory", 45, "--gpu", 2, "--level", 3)
    asked(lab)
    lab.until_reason("n1", "gpuhealth:memory GPU2 ")
    lab.until(lambda: is_kept(lab, "memory") and "running" not in steps(lab), "it", "n1")
    with quiet(lab):
        code, text = login(lab, "gpuhealth", "resume", "n1")
        assert (code, "drained as it was" in text) == (1, True), text
    assert checked(lab)[1] == SLURMS
