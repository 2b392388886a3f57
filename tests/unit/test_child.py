import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from slurm_gpuhealth import child

HOLD_OUTPUT = "sleep 5 & echo started"


def test_a_program_gives_its_code_and_both_outputs():
    done = child.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], timeout=5)
    assert (done.rc, done.stdout, done.stderr, done.timed_out, done.stuck) == (3, b"out\n", b"err\n", False, None)


def test_a_program_that_is_not_there_is_127_with_the_systems_words():
    done = child.run(["/nowhere/dcgmi"], timeout=5)
    assert done.rc == 127
    assert b"/nowhere/dcgmi: No such file" in done.stderr


def test_a_program_gets_a_fixed_path_and_nothing_of_our_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    done = child.run(["/usr/bin/env"], timeout=5, env={"SLURM_CONF": "/x"})
    assert set(done.stdout.decode().split()) == {f"PATH={child.PATH}", "LC_ALL=C.UTF-8", "SLURM_CONF=/x"}


def test_a_program_holds_no_descriptor_of_ours(tmp_path):
    with open(tmp_path / "held", "w") as held:
        os.set_inheritable(held.fileno(), True)
        done = child.run(["/bin/ls", "-l", "/proc/self/fd"], timeout=5)
    assert b"held" not in done.stdout
    assert b"0 -> /dev/null" in done.stdout


def test_a_grandchild_that_keeps_our_pipe_does_not_hold_us_up():
    done = child.run(["/bin/sh", "-c", HOLD_OUTPUT], timeout=5)
    assert done.stdout == b"started\n"
    assert done.seconds < 2


def test_a_program_at_its_deadline_is_asked_first_and_killed_after_the_grace():
    asked = child.run(["/bin/sleep", "60"], timeout=0.1, grace=5)
    assert (asked.rc, asked.timed_out) == (-signal.SIGTERM, True)
    deaf = child.run(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], timeout=0.2, grace=0.2)
    assert (deaf.rc, deaf.timed_out) == (-signal.SIGKILL, True)


def test_output_beyond_the_limit_is_thrown_away():
    done = child.run(["/usr/bin/head", "-c", "3000000", "/dev/zero"], timeout=10, limit=1000)
    assert (done.rc, len(done.stdout)) == (0, 1000)


def test_the_cpu_affinity_can_be_given_back():
    everything = os.sched_getaffinity(0)
    one = {min(everything)}
    os.sched_setaffinity(0, one)
    try:
        done = child.run(["/usr/bin/nproc"], timeout=5, cpus=everything)
    finally:
        os.sched_setaffinity(0, everything)
    assert int(done.stdout) == len(everything)


def test_a_probe_returns_its_value_and_says_its_error():
    assert child.probe(lambda: {"gpus": [1, 2.5, None]}, timeout=5).value == {"gpus": [1, 2.5, None]}
    failed = child.probe(lambda: int("x"), timeout=5)
    assert (failed.value, failed.error) == (None, "ValueError: invalid literal for int() with base 10: 'x'")
    assert "died" in child.probe(lambda: os.kill(os.getpid(), signal.SIGSEGV), timeout=5).error


def test_a_probe_that_hangs_is_left_at_its_deadline():
    probed = child.probe(lambda: time.sleep(60), timeout=0.1)
    assert probed.timed_out
    assert probed.stuck is None
    assert probed.seconds < 2


@pytest.fixture
def frozen_group():
    """A frozen cgroup-v1 freezer: what is in it is in D state and does not die by SIGKILL, like a hung driver call."""
    folder = f"/sys/fs/cgroup/freezer/gpuhealth-test-{os.getpid()}"
    try:
        os.mkdir(folder)
    except OSError as error:
        pytest.skip(f"no cgroup-v1 freezer: {error}")
    yield folder
    with open(folder + "/freezer.state", "w") as file:
        file.write("THAWED")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.rmdir(folder)
            break
        except OSError:
            time.sleep(0.05)


def test_a_child_that_can_not_be_killed_is_left_and_known_again(frozen_group, monkeypatch):
    monkeypatch.setattr(child, "KILL_WAIT", 0.2)

    def freeze() -> None:
        with open(frozen_group + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        with open(frozen_group + "/freezer.state", "w") as file:
            file.write("FROZEN")
        time.sleep(60)

    probed = child.probe(freeze, timeout=0.3, grace=0.2)
    assert probed.stuck is not None
    assert "can't be killed" in probed.error
    assert probed.seconds < 3
    assert child.alive(probed.stuck)
    with open(frozen_group + "/freezer.state", "w") as file:
        file.write("THAWED")
    os.waitpid(probed.stuck.pid, 0)
    assert not child.alive(probed.stuck)


def test_another_process_with_the_same_pid_is_not_the_stuck_child():
    assert child.alive(child.Child(os.getpid(), child._stat(os.getpid())[1]))
    assert not child.alive(child.Child(os.getpid(), 1))


def test_when_we_are_ended_our_child_ends_too():
    code = "from slurm_gpuhealth import child; child.run(['/bin/sleep', '60'], timeout=60)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 10
    while not (children := _children(parent.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    parent.terminate()
    assert parent.wait(10) == 128 + signal.SIGTERM
    while child._stat(children[0])[0] not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert child._stat(children[0])[0] in ("", "Z")


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_a_child_has_no_descriptor_of_ours_and_no_limit_on_them_makes_it_slow(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: pytest.fail("a billion, where the limit is infinity"))
    far = fcntl.fcntl(0, fcntl.F_DUPFD, 500)
    os.set_inheritable(far, True)
    try:
        done = child.run(["/bin/ls", "/proc/self/fd"], timeout=10)
    finally:
        os.close(far)
    assert done.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3: the folder that ls reads
