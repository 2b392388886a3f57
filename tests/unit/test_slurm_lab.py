"""The test lab ends every process that it started, also after a crash, and no other."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.daemons import Daemons, free_ports, until
from tests.demo import left, stop
from tests.lab import Lab


@pytest.fixture
def lab(tmp_path):
    for folder in ("run", "log"):
        (tmp_path / folder).mkdir()
    return tmp_path


def daemons(lab):
    return Daemons(lab, {"PATH": "/usr/bin:/bin"})


def test_a_later_run_stops_what_a_crashed_one_left(lab):
    daemons(lab).start("sleeper", "sleep", "600")
    later = daemons(lab)
    assert later.alive("sleeper")
    later.stop(*later.names())
    assert not later.alive("sleeper")
    assert later.names() == []


def test_a_pid_that_now_belongs_to_another_is_not_signalled(lab):
    with subprocess.Popen(["sleep", "600"]) as other:
        (lab / "run/sleeper.pid").write_text(f"{other.pid} 1\n")
        daemons(lab).stop("sleeper")
        assert other.poll() is None
        other.kill()


def test_a_daemon_that_ignores_sigterm_is_killed(lab):
    mine = daemons(lab)
    mine.start("stubborn", "sh", "-c", "trap '' TERM; while :; do sleep 1; done")
    status = Path(f"/proc/{mine.pid('stubborn')}/status")
    until(lambda: "SigIgn:\t0000000000000000" not in status.read_text(), "its trap")
    mine.stop("stubborn", timeout=0.3)
    assert not mine.alive("stubborn")
    mine.kill_strays()


def test_strays_are_known_by_their_lab_alone(lab):
    mine, other = daemons(lab), subprocess.Popen(["sleep", "600"], env={"GPUHEALTH_LAB": "/another"})
    mine.start("sleeper", "sleep", "600")
    # A moment after exec() the kernel does not know the environment yet.
    until(lambda: mine.kill_strays() or not mine.alive("sleeper"), "the stray's end")
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_missing_program_says_how_to_install_it(lab):
    with pytest.raises(FileNotFoundError, match="scripts/setup"):
        daemons(lab).start("x", "no-such-slurm")


def test_ports_differ_and_lie_below_the_kernels_own():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < 32768


@pytest.mark.skipif(os.geteuid() == 0, reason="we are root")
def test_without_root_it_says_so(tmp_path):
    with pytest.raises(PermissionError, match="root"):
        Cluster(tmp_path).start()


def test_a_lab_whose_configuration_is_refused_says_why_at_once(tmp_path):
    open_to_all = tmp_path / "labs"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{open_to_all} can be written by others.*\n(.*\n)*.*GPUHEALTH_LABS="):
        Lab(open_to_all / "demo", nodes=1).start()
    assert time.monotonic() - began < 30
    assert not (open_to_all / "demo/nodes").exists()


def test_a_failed_demo_names_only_folders_that_are_there(tmp_path):
    lab = Lab(tmp_path / "demo", nodes=2)
    lab.lab.mkdir()
    assert left(lab) == [tmp_path / "demo"]
    (tmp_path / "demo/log").mkdir()
    (tmp_path / "demo/nodes/n2/state").mkdir(parents=True)
    assert left(lab) == [tmp_path / "demo/log", tmp_path / "demo/nodes/n2/state"]


def test_a_kept_demo_is_stopped_where_it_is_and_no_other_folder_is_removed(tmp_path):
    lab = tmp_path / "elsewhere/demo"
    (lab / "etc").mkdir(parents=True)
    assert (stop(lab), lab.exists()) == (1, True)
    (lab / "etc/slurm.conf").touch()
    assert (stop(lab), lab.exists()) == (0, False)
