"""Diagnostics end to end: our back ends and the stand-in host engine, where a second of DCGM lasts 1 ms."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slurm_gpuhealth import diagnose
from slurm_gpuhealth.config.settings import Dcgm, Gpus, Settings
from slurm_gpuhealth.diagnose import dcgmi, engine, model
from slurm_gpuhealth.frozen import replace

FAKES = Path(__file__).parents[1] / "fakes" / "dcgm"
UUIDS = [f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in range(4)]
ORDER = [2, 0, 3, 1]  # DCGM's entity 0 is UUIDS[2]


class Node:
    """A folder with the stand-ins, and its engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("dcgmi", "hostengine"):
            (folder / name).symlink_to(FAKES / name)
        self.gpus = [
            {"uuid": uuid, "pci": f"0000:{0x1B + n:02x}:00", "serial": f"165{n}", "minor": n, "name": "NVIDIA H100"}
            for n, uuid in enumerate(UUIDS)
        ]
        self.dcgm = {"version": "4.6.0", "order": [UUIDS[n] for n in ORDER], "time_scale": 0.001}
        self.settings = Dcgm(
            dcgmi=str(folder / "dcgmi"), host=f"unix://{folder}/hostengine.sock", pydcgm=str(FAKES / "python3")
        )
        self.save()

    def save(self, **dcgm: object) -> None:
        self.dcgm.update(dcgm)
        new = self.folder / "scenario.new"
        new.write_text(json.dumps({"gpus": self.gpus, "dcgm": self.dcgm}))
        new.rename(self.folder / "scenario.json")

    def start(self) -> None:
        subprocess.run([self.folder / "hostengine", "--daemon"], check=True)

    def stop(self) -> None:
        pid = self.folder / "hostengine.pid"
        if pid.exists():
            try:
                os.kill(int(pid.read_text()), signal.SIGTERM)
            except ProcessLookupError:
                pass
            pid.unlink()
            until(lambda: not engine.answers(self.settings.host))

    def dcgmi(self, level: int) -> subprocess.Popen[bytes]:
        """A diagnostic of somebody else, once it runs."""
        before = len(self.lines())
        argv = dcgmi.command(level, [], self.settings, 3600, 0, self.dcgm["version"])
        client = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        until(lambda: len(self.lines()) > before)
        return client

    def lines(self, name: str = "diags.jsonl") -> list[dict]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(self, level: int, gpus: tuple[str, ...] = (), timeout: float = 300, **more: object) -> model.Diagnosis:
        return dcgmi.run(level, gpus, self.settings, timeout, **more)


def until(true, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def node(tmp_path):
    dcgmi.program_version.cache_clear()
    made = Node(tmp_path)
    made.start()
    yield made
    made.stop()


def outcomes(diagnosis):
    return {gpu.uuid: gpu.outcome for gpu in diagnosis.gpus}


@pytest.mark.parametrize("version", ["4.6.0", "4.4.1", "3.3.9", "3.1.8"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_good_node_passes(node, version, level):
    node.save(version=version)
    diagnosis = node.run(level)
    assert (diagnosis.outcome, diagnosis.level, diagnosis.dcgm_version) == ("pass", level, version), diagnosis.message
    assert outcomes(diagnosis) == dict.fromkeys(UUIDS, "pass")


@pytest.mark.parametrize("version", ["4.6.0", "3.3.9"])
def test_the_guilty_gpu_is_named_by_its_uuid(node, version):
    node.save(version=version, faults={UUIDS[0]: {"level": 2, "test": "memory", "code": 52}})
    assert node.run(1).outcome == "pass"
    diagnosis = node.run(2)
    assert (diagnosis.outcome, diagnosis.next, diagnosis.exit_code) == ("fail", "L3", 205)
    assert outcomes(diagnosis) == {**dict.fromkeys(UUIDS, "pass"), UUIDS[0]: "fail"}
    assert diagnosis.gpus[1].entity_id == 1  # UUIDS[0] is DCGM's GPU 1
    (finding,) = model.findings(diagnosis, 1.0)
    assert (finding.gpu.uuid, finding.gpu.serial, finding.code, finding.severity) == (
        UUIDS[0],
        "1650",
        "memory",
        "fault",
    )


@pytest.mark.parametrize("version", ["4.6.0", "3.3.9"])
def test_gpus_are_asked_for_by_uuid_or_entity_id_on_every_version(node, version):
    node.save(version=version)
    assert outcomes(node.run(1, (UUIDS[3], "1"))) == {UUIDS[3]: "pass", UUIDS[0]: "pass"}
    assert node.lines()[-1]["gpus"] == [2, 1]


def test_persistence_mode_off_on_one_gpu_is_configuration_and_no_fail_on_all(node):
    node.save(config=[{"uuid": UUIDS[1], "code": 29}])
    diagnosis = node.run(1)
    assert (diagnosis.outcome, diagnosis.exit_code) == ("config", 226)
    assert outcomes(diagnosis) == {**dict.fromkeys(UUIDS, "pass"), UUIDS[1]: "config"}


def test_without_an_engine_dcgmi_is_not_even_started(node):
    node.stop()
    diagnosis = node.run(1)
    assert (diagnosis.outcome, "no host engine" in diagnosis.message) == ("tool-error", True)
    assert node.lines("embedded.jsonl") == []
    done = subprocess.run(
        [node.settings.dcgmi, "diag", "--host", node.settings.host, "-r", "1", "-j"], capture_output=True, check=False
    )
    assert done.stdout.startswith(b"Error: unable to establish")
    assert len(node.lines("embedded.jsonl")) == 1  # what we would have caused


def test_a_second_diagnostic_is_told_busy_at_once(node):
    node.save(seconds={"2": 600_000})  # whatever else this machine does, the first one lasts longer
    with node.dcgmi(2) as first:
        diagnosis = node.run(1)
        first.kill()
    assert (diagnosis.outcome, diagnosis.busy) == ("not-testable", True)
    assert [line["level"] for line in node.lines()] == [2]


def test_a_lost_gpu_is_no_pass_where_it_was_asked_for(node):
    node.gpus[0]["lost"] = "handle"
    node.save()
    assert node.run(1, tuple(UUIDS)).outcome == "not-testable"
    assert UUIDS[0] in node.run(1, tuple(UUIDS)).message
    assert node.run(1, (UUIDS[0],)).outcome == "not-testable"
    assert node.run(1, (UUIDS[1],)).outcome == "pass"


@pytest.mark.parametrize(("expected", "outcome"), [(4, "pass"), (8, "not-testable")])
def test_the_number_of_gpus_is_checked_by_dcgm(node, expected, outcome):
    diagnosis = node.run(1, expected=expected)
    assert diagnosis.outcome == outcome
    if expected == 8:
        assert (diagnosis.exit_code, "4 GPUs, not the 8" in diagnosis.message) == (255, True)


def test_mig_is_not_testable_and_no_fault(node):
    node.gpus[2]["nvml"] = {"mig": 1}
    node.save()
    diagnosis = node.run(1)
    assert (diagnosis.outcome, "MIG" in diagnosis.message) == ("not-testable", True)


def test_a_level_2_without_plugins_is_no_pass(node):
    node.save(plugins=False)
    assert (node.run(1).outcome, node.run(2).outcome) == ("pass", "not-testable")


def test_dcgms_own_time_limit_ends_a_long_diagnostic(node):
    node.save(seconds={"3": 5000})
    began = time.monotonic()
    diagnosis = node.run(3, timeout=20)  # -t 7, of which each lasts 1 ms here
    assert (diagnosis.outcome, diagnosis.exit_code) == ("tool-error", 245)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("hang", "timeout"), [("term", 2.0), ("kill", 2.0)])
def test_a_dcgmi_that_hangs_is_ended_by_us(node, monkeypatch, hang, timeout):
    monkeypatch.setattr(engine, "STOP", 0.3)
    node.save(hang=hang)
    began = time.monotonic()
    diagnosis = node.run(1, timeout=timeout)
    assert diagnosis.outcome == "tool-error"
    assert time.monotonic() - began < 60
    assert re.search("did not end within [01] s and was stopped", diagnosis.message)  # 0: the machine is busy
    assert diagnosis.exit_code == (203 if hang == "term" else -9)


def test_an_engine_that_dies_mid_run_hangs_dcgmi_but_not_us(node, monkeypatch):
    monkeypatch.setattr(engine, "STOP", 0.3)
    node.save(kill_engine=True)
    assert node.run(1, timeout=2).outcome == "tool-error"


@pytest.mark.parametrize(("version", "left_running"), [("4.6.0", False), ("4.4.1", True)])
def test_sigkill_stops_the_diagnostic_only_with_a_heartbeat(node, version, left_running):
    node.save(version=version, seconds={"2": 2000})
    with node.dcgmi(2) as client:
        client.kill()
    assert node.lines()[-1]["heartbeat"] is not left_running
    time.sleep(0.2)
    assert node.run(1).busy is left_running


def test_options_that_a_version_does_not_know_are_not_given():
    old = dcgmi.command(1, [], Dcgm(), 9, 8, "3.3.7")
    assert not {"-n", "-t", "--enable-heartbeat"} & set(old)
    assert dcgmi.command(1, [], Dcgm(), 9, 8, "3.3.8")[-4:] == ["-n", "gpu:8", "-t", "9"]
    assert "-n" not in dcgmi.command(1, [0], Dcgm(), 9, 8, "4.6.0")  # dcgmi refuses it beside -i
    assert dcgmi.command(1, [], Dcgm(), 9, 8, None)[-1] == "-j"


def test_a_job_affinity_is_not_handed_down(node):
    here = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(here)})
        node.run(1)
    finally:
        os.sched_setaffinity(0, here)
    assert node.lines()[-1]["cpus"] == len(here)


def test_a_missing_dcgmi_is_said(node):
    missing = replace(node.settings, dcgmi="/nonexistent/dcgmi")
    diagnosis = dcgmi.run(1, (), missing, 10)
    assert diagnosis.outcome == "tool-error"
    assert "/nonexistent/dcgmi" in diagnosis.message


@pytest.mark.parametrize("host", ["unix:///nonexistent", "127.0.0.1:1", "no such host", "127.0.0.1", "[::1]:1", ""])
def test_where_nobody_listens_nobody_answers(host):
    began = time.monotonic()
    assert not engine.answers(host, 0.5) or host == "127.0.0.1"
    assert time.monotonic() - began < 60


def test_discovery_is_read_as_dcgmi_prints_it():
    corpus = FAKES.parents[1] / "corpus" / "dcgm"
    assert dcgmi.gpus_of((corpus / "discovery_l_gpu_removed.txt").read_text()) == {
        0: "GPU-b5c159ed-97ef-523e-9b2f-dbcfee495f3b",
        1: "GPU-2e874132-ed8c-5cfa-9c14-0af00919ae11",
        3: "GPU-ce87eeeb-fd5c-52e7-a1c0-8d0b1f5b66f3",
    }
    assert dcgmi.gpus_of((corpus / "discovery_l_no_nvml.txt").read_text()) == {}


def test_gpus_are_tested_where_dcgm_can_list_them_but_not_the_switches(node):
    node.save(nvswitch_module=False)
    seen = dcgmi.discovered(node.settings)
    assert seen.gpus == {entity: UUIDS[number] for entity, number in enumerate(ORDER)}
    assert seen.model([]) == "NVIDIA H100"
    assert "exit code 223" in seen.trouble
    assert "not currently loaded" in seen.trouble
    assert node.run(1).outcome == "pass"


def test_a_list_of_gpus_that_was_cut_off_does_not_count(tmp_path):
    program = tmp_path / "dcgmi"
    table = "2 GPUs found.\n| 0      | Device UUID: GPU-0000 |\n"
    for end in ("exit 223", "kill -9 $$"):
        program.write_text(f"#!/bin/sh\nprintf '{table}'\n{end}\n")
        program.chmod(0o755)
        with pytest.raises(dcgmi.DcgmError):
            dcgmi.discover(Dcgm(dcgmi=str(program)))


# pydcgm


def with_bindings(node, **gpus):
    return Settings(dcgm=replace(node.settings, backend="pydcgm"), gpus=Gpus(**gpus))


def test_the_bindings_give_the_same_diagnosis_as_the_program(node):
    fault = {"level": 2, "test": "pcie", "code": 30}
    node.save(faults={UUIDS[3]: fault}, config=[{"code": 22}], skip={UUIDS[1]: ["memory"]})
    settings = with_bindings(node)
    for gpus in ((), (UUIDS[3], UUIDS[1])):
        ours, theirs = node.run(2, gpus), diagnose.diagnose(2, gpus, settings, 300)
        assert outcomes(ours) == outcomes(theirs)
        assert (ours.outcome, ours.next, ours.gpus, ours.tests) == (
            theirs.outcome,
            theirs.next,
            theirs.gpus,
            theirs.tests,
        )
    assert [line["client"] for line in node.lines()] == ["dcgmi", "pydcgm"] * 2


def test_a_time_out_of_the_bindings_leaves_nothing_running(node):
    node.save(seconds={"2": 5000})
    diagnosis = diagnose.diagnose(2, (), with_bindings(node), 20)
    assert (diagnosis.outcome, diagnosis.exit_code) == ("tool-error", 245)
    time.sleep(0.1)
    assert node.run(1).outcome == "pass"


def test_bindings_that_hang_are_ended_and_so_is_the_diagnostic(node, monkeypatch):
    monkeypatch.setattr(engine, "STOP", 0.2)
    node.save(seconds={"2": 50000}, time_scale=0.5)
    began = time.monotonic()
    assert diagnose.diagnose(2, (), with_bindings(node), 1.0).outcome == "tool-error"
    assert time.monotonic() - began < 60
    node.save(time_scale=0.001)
    time.sleep(0.2)
    assert node.run(1).outcome == "pass"


def test_the_bindings_tell_busy_lost_and_missing(node):
    node.gpus[0]["lost"] = "handle"
    node.save(seconds={"2": 600})
    settings = with_bindings(node, count=4)
    assert diagnose.diagnose(1, (), settings, 300).outcome == "not-testable"
    assert diagnose.diagnose(1, (UUIDS[0],), settings, 300).outcome == "not-testable"
    with node.dcgmi(2):
        busy = diagnose.diagnose(1, (UUIDS[1],), settings, 300)
    assert (busy.outcome, busy.busy) == ("not-testable", True)


def test_without_bindings_or_engine_it_is_said_and_nothing_embedded(node, tmp_path):
    settings = with_bindings(node)
    missing = replace(settings, dcgm=replace(settings.dcgm, pydcgm=str(tmp_path)))
    assert "pydcgm" in diagnose.diagnose(1, (), missing, 5).message
    node.stop()
    assert "no host engine" in diagnose.diagnose(1, (), settings, 5).message


def test_dcgm_switched_off_is_not_testable(node):
    settings = Settings(dcgm=replace(node.settings, backend="off"))
    assert diagnose.diagnose(1, (), settings, 5).outcome == "not-testable"
    assert node.lines() == []
