"""Readings by the real nvidia-ml-py, in a child, of the stand-in library."""

import subprocess
import sys
import time

import pytest

from slurm_gpuhealth.config.settings import Nvml, Settings
from slurm_gpuhealth.evidence import nvml, nvml_probe
from tests.fakes import node
from tests.fakes.node import inject


@pytest.fixture
def settings(folder):
    return Settings(nvml=Nvml(library=str(folder / node.LIBRARY), timeout=5.0))


def look(settings, baseline=None, known=(), previous=None):
    return nvml.judge_probed(nvml.read(settings, baseline=baseline), previous, baseline or {}, known, settings, 1000.0)


def test_a_healthy_node_yields_no_finding_and_a_baseline_that_names_each_gpu(folder, settings):
    findings, baseline = look(settings)
    assert findings == []
    for gpu in node.load(folder)["gpus"]:
        kept = baseline["gpus"][gpu["uuid"]]
        assert {key: kept[key] for key in ("pci", "index", "serial", "minor")} == {
            key: gpu[key] for key in ("pci", "index", "serial", "minor")
        }


def test_unchanging_facts_are_asked_for_once(settings):
    _, baseline = look(settings)
    quick, full = nvml.read(settings, baseline=baseline).value, nvml.read(settings, baseline=baseline, full=True).value
    assert not any("serial" in gpu or "max_width" in gpu for gpu in quick["gpus"])
    assert all(gpu["max_width"] == 16 and gpu["slowdown"] == 89 for gpu in full["gpus"])
    assert look(settings, baseline)[1] == baseline


def test_a_gpu_off_the_bus_is_named_from_what_was_known(folder, settings):
    _, baseline = look(settings)
    inject(folder, "xid", 79, "--gpu", 3)
    (finding,), after = look(settings, baseline)
    gpu = node.load(folder)["gpus"][3]
    assert (finding.key, finding.severity, finding.standing) == ("nvml:lost", "fault", True)
    assert (finding.gpu.uuid, finding.gpu.pci, finding.gpu.index) == (gpu["uuid"], gpu["pci"], 3)
    assert finding.gpu.serial == gpu["serial"]
    assert after == baseline


def test_a_gpu_that_is_not_listed_any_more_stays_lost_on_every_look(folder, settings):
    _, baseline = look(settings)
    inject(folder, "absent", "--gpu", 2)
    for _ in range(2):
        (finding,), baseline = look(settings, baseline)
        assert (finding.code, finding.gpu.uuid) == ("lost", node.load(folder)["gpus"][2]["uuid"])


def test_what_a_model_does_not_have_is_no_finding(folder, settings):
    scenario = node.load(folder)
    missing = ("temperature", "ecc.volatile", "ecc_mode", "remap_pending", "mig", "utilization", "threshold.1")
    for gpu in scenario["gpus"]:
        gpu["nvml"] = dict.fromkeys(missing, "unsupported") | {"nvmlDeviceGetFieldValues": "error 13"}
    node.save(folder, scenario)
    probed = nvml.read(settings)
    assert "temperature" not in probed.value["gpus"][0]
    assert nvml.judge_probed(probed, None, {}, [], settings, 1.0)[0] == []


def test_a_driver_without_the_link_state_field_is_asked_link_by_link(folder, settings, monkeypatch):
    monkeypatch.setattr(nvml_probe, "LINK_STATE", 4711)
    inject(folder, "nvlink-down", "--gpu", 5)
    links = nvml.read(settings).value["gpus"][5]["links"]
    assert (len(links), links.count(0)) == (18, 1)


def test_the_pcie_link_is_looked_at_under_load_only(folder, settings):
    inject(folder, "nvml", "pcie_width", 8, "--gpu", 0)
    assert look(settings)[0] == []
    inject(folder, "pcie-width", 8, "--gpu", 0)
    (finding,), baseline = look(settings)
    assert finding.code == "pcie-width"
    inject(folder, "nvml", "utilization", 0, "--gpu", 0)
    (finding,), _ = look(settings, baseline)
    assert finding.code == "pcie-width", "a condition does not go away because the job ended"


@pytest.mark.parametrize(
    ("code", "key"),
    [(9, "driver:not-loaded"), (18, "driver:mismatch"), (4, "driver:permission"), (999, "nvml:init")],
)
def test_a_driver_that_does_not_start_is_no_broken_gpu(folder, settings, code, key):
    _, baseline = look(settings)
    inject(folder, "nvml", "driver.nvmlInitWithFlags", "error", code)
    (finding,), after = look(settings, baseline)
    assert (finding.key, finding.gpu, finding.details["class"]) == (key, None, "tool")
    assert finding.severity != "fault"
    assert after == baseline


def test_a_library_that_is_not_there_is_said_so(tmp_path):
    settings = Settings(nvml=Nvml(library=str(tmp_path / "none.so")))
    (finding,), _ = look(settings)
    assert finding.key == "driver:no-library"
    assert "none.so" in finding.message


def test_a_hanging_driver_costs_the_deadline_and_is_a_tool_error(folder, settings):
    inject(folder, "hang", "--gpu", 4)
    began = time.monotonic()
    probed = nvml.read(settings, timeout=0.3)
    assert time.monotonic() - began < 60
    assert probed.timed_out
    ((finding,), _) = nvml.judge_probed(probed, None, {}, [], settings, 1.0)
    assert (finding.key, finding.severity) == ("nvml:timeout", "warning")


def test_bindings_that_are_not_installed_are_a_tool_error(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (finding,), _ = look(settings)
    assert finding.key == "nvml:probe"
    assert "pynvml" in finding.message


def test_the_bindings_load_without_the_modules_that_cost_most():
    code = (
        "import sys; from slurm_gpuhealth.evidence.nvml_probe import import_pynvml; n = import_pynvml();"
        "assert issubclass(n.NVMLError_GpuIsLost, n.NVMLError);"
        "print({'re', 'subprocess', 'tempfile', 'ctypes.util', 'string'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_answer_that_makes_no_sense_hides_no_other_answer():
    class Library:
        class NVMLError(Exception):
            value = 2

        nvmlDeviceGetPciInfo = staticmethod(lambda handle: type("Pci", (), {"busId": "?"}))
        nvmlDeviceGetSerial = staticmethod(lambda handle: b"\xff".decode())
        nvmlDeviceGetMinorNumber = staticmethod(lambda handle: 3)

    gpu = {"errors": {}}
    nvml_probe.ask(Library, None, gpu, nvml_probe.ONCE[:3])
    assert gpu == {"errors": {"GetPciInfo": 999, "GetSerial": 999}, "minor": 3}
