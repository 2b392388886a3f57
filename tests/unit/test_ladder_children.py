"""The worker's children end with a lost hold and after a kill. Which tests run, for how long, what raises a rung."""

import subprocess
import time

import pytest

from slurm_gpuhealth import child
from slurm_gpuhealth.config.settings import Ladder, Model
from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import conclude, entry, rung_test, rungs, state, worker
from slurm_gpuhealth.ladder.rungs import Climb, HoldLost, Result
from slurm_gpuhealth.node import identity
from slurm_gpuhealth.slurm.reason import Reason


@pytest.fixture
def sleeper(settings, journal):
    """What a killed worker has left running."""
    process = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    journal.put("ladder-child", (identity.boot_id(settings), process.pid, child._stat(process.pid)[1]))
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


def test_a_test_that_somebody_asked_for_is_run_whatever_stands(settings, journal, monkeypatch):
    stands = Finding(0.0, "nvml", "x", "a remap", None, "fault", True)
    monkeypatch.setattr(conclude, "look", lambda *_: None)
    monkeypatch.setattr(state, "faults", lambda *_: [stands])
    monkeypatch.setattr(rung_test, "run", lambda climb: Result("pass", "level 3"))
    for fact, outcome in {"asked": "pass", "remap": "fail"}.items():
        given = Climb(settings, journal, "n1", Reason(fact, 3, "L3", "running"), "L3", 60.0, lambda: None)
        assert worker._run(given).outcome == outcome


def test_a_reason_is_raised_by_what_is_worse_and_not_under_a_rung_that_runs():
    worse, held = Reason("remap", 3, "reset", "queued"), Reason("Xid79", 3, "L3", "queued")
    assert entry.is_higher(worse, held)
    assert not entry.is_higher(held, worse)
    assert not entry.is_higher(worse, replace(held, state="running"))
    assert not entry.is_higher(worse, replace(held, state="fail", next="RMA"))


def test_each_level_has_its_own_limit_on_a_model(settings):
    settings = replace(settings, ladder=Ladder(model=(Model("*H100*", 60.0, 120.0),)))
    limits = [rungs.seconds(settings, rung, "NVIDIA H100 80GB") for rung in ("L3", "L4")]
    assert (limits, rungs.seconds(settings, "L4", "A100")) == ([60.0, 120.0], settings.ladder.l4)


def test_no_test_beside_a_condition_that_none_can_clear():
    def finding(source, standing):
        return Finding(0.0, source, "x", "", None, "fault", standing)

    assert state.pointless([finding("xid", False), finding("dcgm", True)]) is None
    assert state.pointless([finding("dcgm", True), finding("nvml", True)]) == finding("nvml", True)
