"""Rung RMA: the evidence is complete and private, and is written even if half of it can't be collected."""

import errno
import json
import os
import tarfile
import time

import pytest

from slurm_gpuhealth.config.settings import Ladder, Nvml, Paths, Row, Settings
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import rung_rma
from slurm_gpuhealth.ladder.rungs import Climb, HoldLost
from slurm_gpuhealth.node import identity, record, watch
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm.reason import Reason
from tests.fakes import node

STEP = (
    "INSERT INTO step (time, fact, gpu, uuid, rung, attempt, outcome, follows, test, code, message, bundle)"
    " VALUES (?, 'Xid79', ?, ?, 'L4', 1, 'fail', 'RMA', 'memory', '46', 'GPU 3 has failed', '')"
)


@pytest.fixture
def climb(folder):
    """GPU 3 fell off the bus, and level 4 failed on it."""
    node.inject(folder, "xid", 79, "--gpu", 3)
    paths = Paths(*(str(folder / name) for name in ("state", "run", "kmsg", "proc", "sys", "dev")))
    ladder = Ladder(bug_report=str(folder / "nvidia-bug-report.sh"))
    nvml = Nvml(library=str(folder / "libnvidia-ml.so.1"))
    settings = Settings(paths=paths, ladder=ladder, nvml=nvml, policy=(Row("*", "fault", rung="L3"),))
    journal = open_journal(paths)
    known = [
        {key: gpu.get(key) for key in ("uuid", "pci", "index", "serial")} for gpu in node.load(str(folder))["gpus"]
    ]
    journal.put("gpus", known)
    watch.source(settings, journal, "nvml", time.time(), 15)
    gpu = Gpu(known[3]["uuid"], known[3]["pci"], 3, known[3]["serial"])
    record.keep(journal, settings, [Finding(time.time(), "xid", "79", "gone", gpu, "fault")], time.time())
    journal.write(STEP, time.time(), 3, gpu.uuid)
    return Climb(settings, journal, "n1", Reason("Xid79", 3, "RMA", "fail", next="RMA"), "RMA", 900.0, lambda: None)


def inside(path):
    with tarfile.open(path) as tar:
        return {name.rpartition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}


def card(climb, index=3):
    return node.load(os.path.dirname(climb.settings.paths.state))["gpus"][index]


def test_the_result_blames_the_gpu_and_names_the_file(climb):
    result = rung_rma.run(climb)
    assert (result.outcome, result.gpu.index, result.gpu.serial) == ("fail", 3, card(climb)["serial"])
    assert (result.test, result.code) == ("memory", "46")
    assert result.message == f"GPU 3 has failed; evidence: {result.bundle}"
    assert os.stat(result.bundle).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(result.bundle)).st_mode & 0o777 == 0o700


def test_all_that_is_known_is_in_it(climb):
    parts = inside(rung_rma.run(climb).bundle)
    assert parts["missing.txt"] == b""
    assert json.loads(parts["findings.json"])[0]["code"] == "79"
    assert json.loads(parts["steps.json"])[0]["test"] == "memory"
    blamed = json.loads(parts["gpus.json"])
    assert (blamed["blamed"]["pci"], blamed["driver"]) == (card(climb)["pci"], node.DRIVER)
    assert blamed["gpus"][card(climb, 2)["uuid"]]["vbios"] == "96.00.99.00.01"
    assert json.loads(parts["config.json"])["paths"]["state"] == climb.settings.paths.state
    assert b"GPU has fallen off the bus." in parts["kernel.log"]
    assert b"Command line" not in parts["kernel.log"]
    assert len(parts["nvidia-bug-report.log.gz"]) > 20


def test_where_the_reason_names_no_gpu_the_failing_one_is_blamed(climb):
    result = rung_rma.run(replace(climb, ours=replace(climb.ours, gpu=None)))
    assert (result.gpu.index, result.gpu.uuid) == (3, card(climb)["uuid"])


def test_a_bug_report_that_hangs_is_made_in_safe_mode(climb, folder, monkeypatch):
    monkeypatch.setattr(rung_rma, "REPORT_SECONDS", 1.0)
    node.save(str(folder), {**node.load(str(folder)), "bug_report": "hang"})
    import gzip

    assert b"--safe-mode" in gzip.decompress(inside(rung_rma.run(climb).bundle)["nvidia-bug-report.log.gz"])


def test_where_a_child_hangs_in_the_driver_it_is_safe_mode_at_once(climb):
    climb.journal.put("stuck", {"nvml": (identity.boot_id(climb.settings), 1, 1)})
    import gzip

    assert b"--safe-mode" in gzip.decompress(inside(rung_rma.run(climb).bundle)["nvidia-bug-report.log.gz"])


def test_what_is_missing_is_named_and_the_rest_is_there(climb):
    settings = replace(climb.settings, ladder=Ladder(bug_report="/nowhere/nvidia-bug-report.sh"))
    settings = replace(settings, paths=replace(settings.paths, kernel_log="/nowhere/kmsg"))
    result = rung_rma.run(replace(climb, settings=settings))
    assert "without kernel.log, nvidia-bug-report.log.gz" in result.message
    parts = inside(result.bundle)
    assert b"kernel.log: FileNotFoundError" in parts["missing.txt"]
    assert b'"79"' in parts["findings.json"]


def test_a_full_disk_is_said_and_leaves_nothing_behind(climb, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    result = rung_rma.run(climb)
    assert (result.outcome, result.bundle, result.gpu.index) == ("fail", "", 3)
    assert "No space left on device" in result.message
    assert os.listdir(os.path.join(climb.settings.paths.state, "bundles")) == []


def test_what_a_killed_one_left_goes_and_the_last_five_stay(climb):
    folder = os.path.join(climb.settings.paths.state, "bundles")
    os.mkdir(folder)
    for number in range(8):
        with open(os.path.join(folder, f"n1-2026010{number}T000000Z.tar.gz"), "w"):
            pass
    for name in (".new", ".report.log.gz"):
        with open(os.path.join(folder, name), "w"):
            pass
    newest = os.path.basename(rung_rma.run(climb).bundle)
    left = sorted(os.listdir(folder))
    assert (len(left), left[-1], left[0]) == (5, newest, "n1-20260104T000000Z.tar.gz")


def test_what_an_admin_unpacked_beside_them_is_left_alone(climb):
    folder = os.path.join(climb.settings.paths.state, "bundles")
    for number in range(6):
        path = rung_rma.run(replace(climb, node=f"n{number}")).bundle
        os.mkdir(path.removesuffix(".tar.gz"))
    result = rung_rma.run(climb)
    assert result.message.endswith(f"; evidence: {result.bundle}")
    assert len([name for name in os.listdir(folder) if name.endswith("Z")]) == 6


def test_a_hold_that_is_lost_ends_it_without_a_file(climb, monkeypatch):
    def lost(*_):
        raise HoldLost("resumed")

    monkeypatch.setitem(rung_rma.PARTS, "kernel.log", lost)
    with pytest.raises(HoldLost):
        rung_rma.run(climb)
    assert os.listdir(os.path.join(climb.settings.paths.state, "bundles")) == []


def test_of_a_flooded_kernel_log_the_end_is_kept(climb, monkeypatch):
    monkeypatch.setattr(rung_rma, "PART", 500)
    with open(climb.settings.paths.kernel_log, "a") as log:
        log.writelines(f"4,{number},1,-;NVRM: {number}\n" for number in range(100, 999))
    kernel = inside(rung_rma.run(climb).bundle)["kernel.log"]
    assert kernel.endswith(b"NVRM: 998\n")
    assert len(kernel) <= 500
