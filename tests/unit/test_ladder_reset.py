"""Rung reset: what holds the driver is stopped and comes back whatever happens; each way in which a reset can fail."""

import os
import time

import pytest

from slurm_gpuhealth.config.settings import Nvml, Paths, Reset, Settings, Slurm
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.hooks import check
from slurm_gpuhealth.ladder import rung_reset, rung_test, state
from slurm_gpuhealth.ladder.rungs import Climb, HoldLost, Result
from slurm_gpuhealth.node import identity, lock, record, watch
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm.reason import Reason
from tests.fakes import node

HELD = ["nvidia-persistenced", "nvidia-dcgm"]


@pytest.fixture
def climb(folder, monkeypatch):
    """On a stand-in node whose GPU 3 waits for a reset; level 1 passes."""
    node.inject(folder, "row-remap-pending", "--gpu", 3)
    paths = Paths(*(str(folder / name) for name in ("state", "run", "kmsg", "proc", "sys", "dev")))
    own = Reset(nvidia_smi=str(folder / "nvidia-smi"), systemctl=str(folder / "systemctl"))
    settings = Settings(paths=paths, reset=own, nvml=Nvml(library=str(folder / "libnvidia-ml.so.1")))
    journal = open_journal(paths)
    watch.source(settings, journal, "nvml", time.time(), 15)
    monkeypatch.setattr(rung_test, "levels", lambda *_: Result("pass", "level 1: pass"))
    ours = Reason("row-remap", 3, "reset", "running")
    return Climb(settings, journal, "n1", ours, "reset", 300.0, lambda: None)


def change(folder, **values):
    node.save(str(folder), {**node.load(str(folder)), **values})


def services(folder):
    return node.load(str(folder))["services"]


def orders(folder):
    log = folder / "services.log"
    return log.read_text().splitlines() if log.exists() else []


def pending(folder, index):
    return "remap_pending" in node.load(str(folder))["gpus"][index].get("nvml", {})


def with_reset(climb, **values):
    return replace(climb, settings=replace(climb.settings, reset=replace(climb.settings.reset, **values)))


def test_a_pending_row_remap_is_made_and_what_was_stopped_runs_again(climb, folder):
    assert rung_reset.run(climb) == Result("pass", "level 1: pass")
    assert not pending(folder, 3)
    assert orders(folder) == [f"{verb} {unit}" for verb in ("stop", "start") for unit in HELD]
    assert climb.journal.get("stopped") is None


def test_only_the_gpu_that_needs_it_is_reset(climb, folder):
    node.inject(folder, "row-remap-pending", "--gpu", 5)
    rung_reset.run(climb)
    assert (pending(folder, 3), pending(folder, 5)) == (False, True)


def test_after_a_boot_without_the_gpu_its_neighbour_that_now_has_its_number_is_not_reset(climb, folder):
    known = climb.journal.get("gpus")
    lost = known[5]
    gpu = Gpu(lost["uuid"], lost["pci"], lost["index"], lost["serial"])
    enforced = replace(climb.settings, mode="enforce")
    record.keep(climb.journal, enforced, [Finding(time.time(), "xid", "119", "gone", gpu, "fault")], time.time())
    climb.journal.put("gpus", known[:5] + [{**gpu, "index": gpu["index"] - 1} for gpu in known[6:]])
    after = rung_reset._which(replace(climb, ours=Reason("Xid119", 5, "reset", "running")))
    assert after == [f"{lost['pci']}.0"]


def test_of_a_model_before_ampere_all_are_reset(climb, folder):
    node.inject(folder, "row-remap-pending", "--gpu", 5)
    rung_reset.run(with_reset(climb, together=("*H100*",)))
    assert (pending(folder, 3), pending(folder, 5)) == (False, False)


def test_a_refusal_that_wants_the_nvlink_peers_too_gets_them(climb, folder):
    change(folder, reset="peers")
    assert rung_reset.run(climb).outcome == "pass"
    assert not pending(folder, 3)


def test_a_service_that_did_not_run_is_not_started(climb, folder):
    change(folder, services={"nvidia-persistenced": "inactive", "nvidia-dcgm": "active"})
    rung_reset.run(climb)
    assert orders(folder) == ["stop nvidia-dcgm", "start nvidia-dcgm"]


def test_the_list_is_in_the_journal_before_the_first_stop_and_mend_starts_what_a_kill_left(climb, folder, monkeypatch):
    monkeypatch.setattr(rung_reset, "_systemctl", killed_at("stop", rung_reset._systemctl))
    with pytest.raises(KeyboardInterrupt):
        rung_reset.run(climb)
    assert climb.journal.get("stopped") == HELD
    monkeypatch.undo()
    assert rung_reset.mend(climb.settings, climb.journal) == ""
    assert services(folder) == dict.fromkeys(HELD, "active")
    assert climb.journal.get("stopped") is None


def test_a_check_leaves_the_services_stopped_while_the_worker_is_at_it_and_starts_what_a_kill_left(climb, folder):
    settings = replace(climb.settings, slurm=Slurm(slurmd="/nowhere"))
    climb.journal.put("stopped", HELD)
    change(folder, services=dict.fromkeys(HELD, "inactive"))
    climb.journal.put("inventory-boot", identity.boot_id(settings))
    climb.journal.put("polled", time.time())
    worker = lock.take(settings, state.LOCK)
    check.look(settings, climb.journal, "n1", time.monotonic() + 15)
    assert (services(folder), climb.journal.get("stopped")) == (dict.fromkeys(HELD, "inactive"), HELD)
    os.close(worker)
    check.look(settings, climb.journal, "n1", time.monotonic() + 15)
    assert (services(folder), climb.journal.get("stopped")) == (dict.fromkeys(HELD, "active"), None)


def test_what_an_earlier_reset_could_not_start_is_started_after_this_one(climb, folder):
    climb.journal.put("stopped", ["nvidia-dcgm"])
    change(folder, services={"nvidia-persistenced": "active", "nvidia-dcgm": "inactive"})
    rung_reset.run(climb)
    assert services(folder) == dict.fromkeys(HELD, "active")


def killed_at(verb, really):
    def systemctl(settings, asked, unit):
        if asked == verb:
            raise KeyboardInterrupt
        return really(settings, asked, unit)

    return systemctl


def test_a_hold_that_is_lost_during_the_reset_starts_the_services_again(climb, folder, monkeypatch):
    def lost(*_):
        raise HoldLost("resumed")

    monkeypatch.setattr(rung_reset, "_smi", lost)
    with pytest.raises(HoldLost):
        rung_reset.run(climb)
    assert services(folder) == dict.fromkeys(HELD, "active")


def test_a_hold_that_is_gone_before_it_stops_nothing(climb, folder):
    def lost():
        raise HoldLost("resumed")

    with pytest.raises(HoldLost):
        rung_reset.run(replace(climb, check_hold=lost))
    assert orders(folder) == []


def test_a_service_that_does_not_start_again_is_said_and_tried_again_by_the_next_check(climb, folder):
    change(folder, broken=["nvidia-dcgm"])
    result = rung_reset.run(climb)
    assert (result.outcome, "nvidia-dcgm does not start again" in result.message) == ("untested", True)
    assert climb.journal.get("stopped") == ["nvidia-dcgm"]
    change(folder, broken=[])
    assert rung_reset.mend(climb.settings, climb.journal) == ""
    assert climb.journal.get("stopped") is None


def test_who_holds_the_gpu_is_named_and_no_fault_of_it(climb, folder):
    node.inject(folder, "process", os.getpid(), "--gpu", 3)
    with open(folder / "dev" / f"nvidia{node.load(str(folder))['gpus'][3]['minor']}"):
        result = rung_reset.run(climb)
    assert result.outcome == "untested"
    assert "In use by another client" in result.message
    assert f"({os.getpid()})" in result.message
    assert services(folder) == dict.fromkeys(HELD, "active")


def test_persistence_mode_that_no_daemon_set_is_taken_off_for_the_reset_and_put_back(climb, folder):
    node.inject(folder, "persistence", 1, "--gpu", 3)
    assert rung_reset.run(climb).outcome == "pass"
    gpu = node.load(str(folder))["gpus"][3]["nvml"]
    assert ("remap_pending" in gpu, gpu["persistence"]) == (False, 1)
    assert climb.journal.get("stopped") is None


def test_mig_slices_are_not_taken_away(climb, folder):
    node.inject(folder, "mig", 1, "--gpu", 0)
    watch.source(climb.settings, climb.journal, "nvml", time.time(), 15)
    result = rung_reset.run(climb)
    assert (result.outcome, "MIG" in result.message) == ("untested", True)
    assert orders(folder) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (["lost"], "exit 15: Unable to determine the device handle"),
        (["absent"], "exit 6: No devices were found"),
    ],
)
def test_a_lost_gpu_can_not_be_reset_which_is_a_failure(climb, folder, fault, words):
    node.inject(folder, *fault, "--gpu", 3)
    result = rung_reset.run(climb)
    assert (result.outcome, words in result.message) == ("fail", True)


def test_an_unsupported_reset_is_a_failure(climb, folder):
    change(folder, reset="unsupported")
    result = rung_reset.run(climb)
    assert (result.outcome, "is not supported" in result.message) == ("fail", True)


def test_a_hung_nvidia_smi_is_ended_and_the_services_come_back(climb, folder):
    change(folder, reset="hang")
    began = time.monotonic()
    result = rung_reset.run(with_reset(climb, timeout=2.0))
    assert (result.outcome, "the driver hangs" in result.message) == ("fail", True)
    assert time.monotonic() - began < 60
    assert services(folder) == dict.fromkeys(HELD, "active")


def test_a_hung_program_of_ours_is_not_joined_by_a_reset(climb, folder, monkeypatch):
    monkeypatch.setattr(lock, "guarded", lambda *_: None)
    result = rung_reset.run(climb)
    assert (result.outcome, "can't be killed" in result.message) == ("fail", True)


def test_without_systemd_it_does_without(climb, folder):
    change(folder, services={})
    assert rung_reset.run(with_reset(climb, systemctl="/nowhere/systemctl")).outcome == "pass"


def test_without_nvidia_smi_nothing_was_tried(climb):
    result = rung_reset.run(with_reset(climb, nvidia_smi="/nowhere/nvidia-smi"))
    assert (result.outcome, "reset.nvidia_smi" in result.message) == ("untested", True)


def test_dcgm_may_take_its_time_to_be_there_again(climb, monkeypatch):
    answers = [Result("untested", "no host engine"), Result("pass")]
    monkeypatch.setattr(rung_test, "levels", lambda *_: answers.pop(0))
    monkeypatch.setattr(rung_reset.time, "sleep", lambda _: None)
    assert rung_reset.run(climb).outcome == "pass"
