"""The worker's children: ended with a hold that is lost, and by the next worker after a kill; what is worth a test."""

import subprocess
import time

import pytest

from slurm_gpuhealth import child, watch
from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.ladder import state, worker
from slurm_gpuhealth.ladder.rungs import HoldLost


@pytest.fixture
def sleeper(settings, journal):
    """What a killed worker has left running."""
    process = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    journal.put("ladder-child", (watch.boot_id(settings), process.pid, child._stat(process.pid)[1]))
    yield process
    process.kill()
    process.wait()


def test_what_a_killed_worker_left_running_is_ended_by_the_next(settings, journal, sleeper):
    worker._end_orphan(settings, journal)
    assert not child.alive(child.Child(sleeper.pid, child._stat(sleeper.pid)[1]))
    assert journal.get("ladder-child") is None


def test_after_a_boot_whoever_has_that_number_now_is_left_alone(settings, journal, sleeper):
    _, pid, start = journal.get("ladder-child")
    journal.put("ladder-child", ("another boot", pid, start))
    worker._end_orphan(settings, journal)
    assert child.alive(child.Child(pid, start))
    assert journal.get("ladder-child") is None


def test_a_child_is_written_down_first_and_the_hold_is_asked_for_while_it_runs(settings, journal, monkeypatch):
    def lost():
        assert journal.get("ladder-child")
        raise HoldLost("resumed")

    monkeypatch.setattr(child, "WATCH", 0.1)
    monkeypatch.setattr(child, "watcher", worker._watcher(settings, journal, lost))
    began = time.monotonic()
    with pytest.raises(HoldLost):
        child.run(["/bin/sleep", "60"], timeout=60)
    assert time.monotonic() - began < 30
    _, pid, start = journal.get("ladder-child")
    for _ in range(100):
        if not child.alive(child.Child(pid, start)):
            break
        time.sleep(0.1)
    assert not child.alive(child.Child(pid, start))


def test_no_test_beside_a_condition_that_none_can_clear():
    def finding(source, standing):
        return Finding(0.0, source, "x", "", None, "fault", standing)

    assert state.pointless([finding("xid", False), finding("dcgm", True)]) is None
    assert state.pointless([finding("dcgm", True), finding("nvml", True)]) == finding("nvml", True)
