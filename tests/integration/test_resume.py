"""gpuhealth resume on a real cluster: our nodes come back; what others drained is left alone, and it says who did."""

import os
import subprocess

import pytest

from slurm_gpuhealth.slurm.reason import Reason, write
from tests.cluster import USER
from tests.daemons import PATIENCE
from tests.lab import BIN

# slurmd's own check would climb from the holds that the tests write.
LAB = {"nodes": 2, "dbd": False, "floor": 2, "health_interval": 600}

OURS = write(Reason("Xid79", 3, "L3", "queued", since="11-20T12:03Z"))


def resume(lab, *nodes, here="login1", config="/nowhere", **options):
    """Exit code and all that it says; by default as on a login node without a configuration."""
    env = {**lab.env, "GPUHEALTH_CONFIG": str(config)}
    argv = [str(BIN / "gpuhealth"), "--node", here, "resume", *nodes]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE, **options)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def admin(lab, node, *words):
    lab.run("scontrol", "update", f"nodename={node}", *words)


def test_nodes_of_ours_come_back(lab):
    for node in lab.names:
        admin(lab, node, "state=drain", f"reason={OURS}")
    code, text = resume(lab, "n1", "n2")
    assert code == 0
    assert [f"n{i}: back in service (was {OURS!r})" in text for i in (1, 2)] == [True, True]
    lab.until(lambda: lab.state("n1") == lab.state("n2") == "IDLE", "both in service")


def test_a_node_in_service_is_no_error(lab):
    code, text = resume(lab, "n1")
    assert (code, "nothing to give back" in text) == (0, True)


@pytest.mark.parametrize("state", ["drain", "down", "fail"])
def test_an_admins_is_left_alone_and_the_command_is_told(lab, state):
    admin(lab, "n1", f"state={state}", "reason=PSU, JD")
    before = lab.node("n1")
    code, text = resume(lab, "n1", "n2")
    assert code == 1
    assert "'PSU, JD' by root" in text
    assert "scontrol update NodeName=n1 State=RESUME" in text
    assert "n2: nothing to give back" in text
    assert lab.state("n1") == before.partition(" State=")[2].split()[0]
    assert lab.reason("n1") == "PSU, JD"


def test_slurms_own_is_told_apart_from_an_admins(lab):
    admin(lab, "n1", "state=drain", "reason=Prolog error")
    code, text = resume(lab, "n1")
    assert (code, "Slurm drained it: 'Prolog error'" in text) == (1, True)


def test_our_reason_with_an_admins_words_behind_it_is_an_admins(lab):
    admin(lab, "n1", "state=drain", f"reason={OURS} -- JD: leave it")
    code, text = resume(lab, "n1")
    assert (code, "an admin drained it" in text) == (1, True)


def test_a_node_that_is_down_besides_is_not_called_back(lab):
    admin(lab, "n1", "state=drain", f"reason={OURS}")
    admin(lab, "n1", "state=down", f"reason={OURS}")
    code, text = resume(lab, "n1")
    assert (code, "but DOWN" in text) == (1, True)
    assert lab.state("n1").startswith("DOWN")


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("n9", 1, "n9 not found"),
        ("ALL", 1, "is not the name of one node"),
        ("n[1-", 2, "is no host list"),
        ("n1;reboot", 2, "is not a host list"),
    ],
)
def test_a_name_that_is_no_node(lab, name, found, words):
    admin(lab, "n2", "state=drain", f"reason={OURS}")
    code, text = resume(lab, name)
    assert code == found
    assert words in text
    assert lab.reason("n2") == OURS


def test_an_ordinary_user_is_told_that_slurm_says_no(lab):
    admin(lab, "n1", "state=drain", f"reason={OURS}")
    code, text = resume(lab, "n1", user=USER)
    assert (code, "Slurm does not let you change nodes" in text) == (1, True)
    assert lab.reason("n1") == OURS


def test_a_dead_controller_is_said_once(lab):
    lab.stop_controller()
    try:
        code, text = resume(lab, "n1", "n2")
    finally:
        lab.start_controller()
    assert (code, "slurmctld does not answer, n1 is as it was" in text) == (1, True)


def test_a_resume_stands_although_the_gpu_is_still_gone(lab):
    lab.inject("n1", "xid", 79, "--gpu", 3)
    lab.until_reason("n1", "gpuhealth:")
    lab.until(lambda: lab.rows("n1", "SELECT 1 FROM finding WHERE code = 'lost'"), "NVML to miss it too")
    code, text = resume(lab, "n1", here="n1", config=lab.config)
    assert code == 0
    assert "still there: nvml:lost GPU3" in text
    assert "do not drain it again until they are mended" in text
    lab.check("n1")
    lab.check("n1")
    assert lab.reason("n1") == ""
    lab.inject("n1", "xid", 79, "--gpu", 5)  # news is news
    lab.until_reason("n1", "GPU5")


def test_from_another_host_the_node_itself_takes_note_later(lab):
    lab.inject("n2", "xid", 79, "--gpu", 3)
    lab.until_reason("n2", "gpuhealth:")
    assert resume(lab, "n2")[0] == 0
    lab.until(lambda: lab.journal("n2", "hold") is None, "the journal's note")
    assert lab.reason("n2") == ""


def test_a_configuration_that_others_can_write_is_not_obeyed_by_root(lab):
    evil = lab.lab / "evil.toml"
    program = lab.lab / "evil"
    program.write_text(f"#!/bin/sh\ntouch {lab.lab}/obeyed\n")
    program.chmod(0o755)
    evil.write_text(f'[slurm]\nscontrol = "{program}"\n')
    evil.chmod(0o666)
    admin(lab, "n1", "state=drain", f"reason={OURS}")
    code, text = resume(lab, "n1", config=evil)
    assert (code, "can be written by others" in text) == (0, True)
    assert not os.path.exists(lab.lab / "obeyed")
