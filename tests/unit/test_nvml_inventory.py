"""Inventory and leftovers on the stand-in node."""

import os
import subprocess

import pytest

from slurm_gpuhealth.config.settings import Gpus, Nvml, Paths, Settings
from slurm_gpuhealth.evidence import inventory, leftovers, nvml
from tests.fakes import node
from tests.fakes.node import inject


@pytest.fixture
def settings(folder):
    return settings_of(folder)


def settings_of(folder, **gpus):
    paths = Paths(proc=str(folder / "proc"), sys=str(folder / "sys"), dev=str(folder / "dev"))
    return Settings(paths=paths, nvml=Nvml(library=str(folder / node.LIBRARY)), gpus=Gpus(**gpus))


def baseline_of(settings):
    return nvml.judge_probed(nvml.read(settings), None, {}, [], settings, 1.0)[1]


def collect(settings, gres=8):
    return inventory.collect(settings, inventory.identities(settings), baseline_of(settings), gres, 1.0)


def test_identities_are_the_drivers_own_list_in_nvmls_order(folder, settings):
    wanted = [{k: gpu[k] for k in ("index", "uuid", "pci", "minor", "name")} for gpu in node.load(folder)["gpus"]]
    found = inventory.identities(settings)
    assert [{k: gpu[k] for k in wanted[0]} for gpu in found] == wanted


def test_a_gpu_that_was_never_started_has_no_uuid_and_an_excluded_one_is_not_listed(folder, settings):
    gpus = node.load(folder)["gpus"]
    for gpu, old, new in (
        (gpus[0], gpus[0]["uuid"], "GPU-????????-????"),
        (gpus[1], "Excluded:\t No", "Excluded:\t Yes"),
    ):
        path = folder / f"proc/driver/nvidia/gpus/{gpu['pci']}.0/information"
        path.write_text(path.read_text().replace(old, new))
    found = inventory.identities(settings)
    assert [gpu["uuid"] for gpu in found] == [None, *(gpu["uuid"] for gpu in gpus[2:])]


def test_a_node_without_a_driver_has_no_identities_and_no_findings(tmp_path):
    for name in ("proc", "sys", "dev"):
        (tmp_path / name).mkdir()
    settings = settings_of(tmp_path)
    assert inventory.identities(settings) == []
    assert inventory.collect(settings, [], {}, 8, 1.0) == []


def test_a_complete_node_has_no_findings(settings):
    assert collect(settings) == []


def test_slurm_that_offers_other_gpus_than_there_are_is_configuration(settings):
    (finding,) = collect(settings, gres=7)
    assert (finding.key, finding.severity, finding.details["class"]) == ("inventory:gres-count", "warning", "config")
    assert collect(settings, gres=None) == []


def test_the_fabric_manager_is_needed_where_there_are_nvswitches(folder, settings):
    (folder / "proc/1501/comm").write_text("bash\n")
    (finding,) = collect(settings)
    assert (finding.code, finding.details["switches"]) == ("fabric-mgr", 4)
    assert collect(settings_of(folder, fabric_manager="off")) == []
    for link in (folder / "sys/bus/pci/devices").iterdir():
        if (link / "class").read_text().startswith("0x0680"):
            link.unlink()
    assert collect(settings) == []
    assert [f.code for f in collect(settings_of(folder, fabric_manager="required"))] == ["fabric-mgr"]


def test_a_vbios_that_the_other_gpus_do_not_have_is_told_of_the_odd_one(folder, settings):
    inject(folder, "vbios", "96.00.00.00.00", "--gpu", 5)
    (finding,) = collect(settings)
    assert (finding.code, finding.gpu.index) == ("vbios-mix", 5)


def test_a_gpu_on_the_bus_that_the_driver_left_out_is_named(folder, settings):
    gpu = node.load(folder)["gpus"][6]
    for name in ("information",):
        (folder / f"proc/driver/nvidia/gpus/{gpu['pci']}.0" / name).unlink()
    (folder / f"proc/driver/nvidia/gpus/{gpu['pci']}.0").rmdir()
    (finding,) = collect(settings, gres=7)
    assert (finding.code, finding.gpu.pci) == ("not-driven", gpu["pci"])
    (folder / f"sys/bus/pci/devices/{gpu['pci']}.0/driver").symlink_to("/drivers/vfio-pci")
    assert collect(settings, gres=7) == [], "it was given to a virtual machine"


def test_a_missing_device_file_is_configuration(folder, settings):
    gpu = node.load(folder)["gpus"][4]
    (folder / f"dev/nvidia{gpu['minor']}").unlink()
    (finding,) = collect(settings)
    assert (finding.code, finding.gpu.uuid) == ("dev-file", gpu["uuid"])


def test_the_known_gpus_hold_the_lost_one_and_the_one_just_found(settings):
    listed = inventory.identities(settings)
    baseline = baseline_of(settings)
    lost = {**baseline["gpus"][listed[0]["uuid"]]}
    without = {"gpus": {uuid: gpu for uuid, gpu in baseline["gpus"].items() if uuid != listed[7]["uuid"]}}
    found = inventory.known(listed[1:], without)
    assert [gpu["uuid"] for gpu in found] == [gpu["uuid"] for gpu in listed]
    assert found[0]["serial"] == lost["serial"]


def left(folder, settings, gpus, uid):
    uuids = [node.load(folder)["gpus"][index]["uuid"] for index in gpus]
    probed = leftovers.read(settings, uuids, 5.0)
    assert probed.error is None, probed.error
    return probed.value, leftovers.judge_leftovers(probed.value, inventory.identities(settings), uid, 1.0)


def test_a_clean_job_leaves_nothing(folder, settings):
    assert left(folder, settings, range(8), 1000)[1] == []


def test_settings_that_a_job_left_are_reported_and_can_be_put_back(folder, settings):
    inject(folder, "compute-mode", 3, "--gpu", 2)
    inject(folder, "power-limit", 300000, "--gpu", 2)
    inject(folder, "app-clock", 900, "--gpu", 3)
    inject(folder, "nvml", "event_reasons", 2, "--gpu", 4)
    reading, findings = left(folder, settings, range(8), 1000)
    assert {(f.code, f.gpu.index) for f in findings} == {("mode", 2), ("power", 2), ("app-clocks", 3), ("locked", 4)}
    assert all(f.source == "leftover" and f.severity == "info" for f in findings)
    assert leftovers.restore(settings, reading, 5.0).value == {}
    assert left(folder, settings, range(8), 1000)[1] == []


def test_only_the_jobs_gpus_are_looked_at(folder, settings):
    inject(folder, "compute-mode", 3, "--gpu", 2)
    assert left(folder, settings, [0, 1], 1000)[1] == []


@pytest.fixture
def sleeper():
    """A process of user 12345."""
    if os.geteuid() != 0:
        pytest.skip("needs root to be another user")
    process = subprocess.Popen(["sleep", "60"], user=12345, stdin=subprocess.DEVNULL)
    yield process
    process.kill()
    process.wait()


def test_a_process_of_the_jobs_user_is_reported_and_killed_only_when_it_is_theirs(folder, settings, sleeper):
    inject(folder, "process", sleeper.pid, "--gpu", 1)
    reading, (finding,) = left(folder, settings, [1], 12345)
    assert (finding.code, finding.severity) == ("process", "warning")
    assert (finding.details["pid"], finding.details["uid"], finding.details["process"]) == (sleeper.pid, 12345, "sleep")
    assert leftovers.kill(settings, reading, 999) == []
    assert leftovers.kill(settings, reading, 0) == []
    assert sleeper.poll() is None
    assert leftovers.kill(settings, reading, 12345) == [sleeper.pid]
    assert sleeper.wait(5) == -9


def test_a_pid_that_is_another_process_by_now_is_not_killed(folder, settings, sleeper):
    inject(folder, "process", sleeper.pid, "--gpu", 1)
    reading, _ = left(folder, settings, [1], 12345)
    reading["processes"][sleeper.pid][1] -= 1  # its start time
    assert leftovers.kill(settings, reading, 12345) == []


def test_roots_processes_and_a_process_that_is_gone(folder, settings):
    node.process(str(folder), 1502, "nv-hostengine")
    inject(folder, "nvml", "processes", "1502:4096,4194303:1", "--gpu", 1)
    _, (finding,) = left(folder, settings, [1], 1000)
    assert (finding.details["pid"], finding.details["uid"], finding.severity) == (4194303, None, "info")


def test_an_mps_daemon_of_a_user_is_reported_and_roots_is_not(folder, settings):
    node.process(str(folder), 2001, "nvidia-cuda-mps", uid=0)
    assert left(folder, settings, [0], 1000)[1] == []
    node.process(str(folder), 2002, "nvidia-cuda-mps", uid=1000)
    _, (finding,) = left(folder, settings, [0], 1000)
    assert (finding.key, finding.details["pid"]) == ("leftover:mps", 2002)


def test_a_hostile_process_name_does_not_break_the_message(folder, settings):
    node.process(str(folder), 2003, "x) R\n1 Uid:\t0", uid=1000)
    (folder / "proc/2003/status").write_text("Name:\tx\\n1\nUid:\t1000\t1000\t1000\t1000\n")
    inject(folder, "nvml", "processes", "2003:1", "--gpu", 1)
    _, (finding,) = left(folder, settings, [1], 1000)
    assert "\n" not in finding.message
    assert finding.details["uid"] == 1000
