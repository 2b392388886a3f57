"""Rung repair: the site's program, its input, and the meaning of its exit."""

import time

import pytest

from slurm_gpuhealth.config.settings import Repair
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import rung_repair, rung_test
from slurm_gpuhealth.ladder.rungs import Climb, HoldLost, Result
from slurm_gpuhealth.node import record
from slurm_gpuhealth.slurm.reason import Reason

KNOWN = {"uuid": "GPU-3", "pci": "0000:5d:00", "index": 3, "serial": "1652", "minor": 3, "name": "H100"}


@pytest.fixture
def climb(settings, journal, tmp_path, monkeypatch):
    """`climb(script)`: with this program; level 3 passes."""
    monkeypatch.setattr(rung_repair.configuration, "unsafe", lambda *_, **__: [])
    monkeypatch.setattr(rung_test, "levels", lambda climb, level: Result("pass", f"level {level}"))
    journal.put("gpus", [KNOWN])

    def make(script, **values):
        program = tmp_path / "mend"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        own = replace(settings, repair=Repair(command=(str(program),), **values))
        ours = Reason("Xid79", 3, "repair", "running", job=12)
        return Climb(own, journal, "n1", ours, "repair", 60.0, lambda: None)

    return make


def test_what_says_done_is_proven_by_level_3(climb):
    assert rung_repair.run(climb("exit 0")) == Result("pass", "level 3")


def test_it_is_told_what_for_in_one_printable_line_each_and_nothing_else(climb, journal, settings, tmp_path):
    gpu = Gpu("GPU-3", "0000:5d:00", 3, "1652")
    found = Finding(time.time(), "nvml", "lost", "gone\x1b[2J\nGPUHEALTH_NODE=evil", gpu, "fault", standing=True)
    record.keep(journal, settings, [found], time.time())
    rung_repair.run(
        climb(f"/usr/bin/env | /usr/bin/grep -v ^PWD | /usr/bin/sort >{tmp_path}/out; echo $# >>{tmp_path}/out")
    )
    assert (tmp_path / "out").read_text().splitlines() == [
        "GPUHEALTH_FACT=Xid79",
        "GPUHEALTH_GPU=3",
        "GPUHEALTH_JOB=12",
        "GPUHEALTH_MESSAGE=gone [2J GPUHEALTH_NODE=evil",
        "GPUHEALTH_NODE=n1",
        "GPUHEALTH_PCI=0000:5d:00",
        "GPUHEALTH_SERIAL=1652",
        "GPUHEALTH_UUID=GPU-3",
        "LC_ALL=C.UTF-8",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        "0",
    ]


def test_after_a_boot_without_the_gpu_its_neighbour_that_now_has_its_number_is_not_named(
    climb, journal, settings, tmp_path
):
    gpu = Gpu("GPU-3", "0000:5d:00", 3, "1652")
    record.keep(journal, settings, [Finding(time.time(), "xid", "79", "off the bus", gpu, "fault")], time.time())
    journal.put("gpus", [{**KNOWN, "uuid": "GPU-4", "pci": "0000:8c:00", "serial": "1653"}])
    rung_repair.run(climb(f"/usr/bin/env >{tmp_path}/out"))
    told = (tmp_path / "out").read_text().splitlines()
    assert {"GPUHEALTH_PCI=0000:5d:00", "GPUHEALTH_UUID=GPU-3", "GPUHEALTH_SERIAL=1652"} <= set(told)


def test_what_says_no_is_a_failure_with_its_first_line(climb, tmp_path):
    result = rung_repair.run(climb("echo; echo 'ticket 4711 opened' >&2; exit 3"))
    assert result == Result("fail", f"{tmp_path}/mend: exit 3: ticket 4711 opened")


def test_what_does_not_end_is_ended_and_a_failure(climb):
    result = rung_repair.run(climb("exec sleep 100", timeout=0.5))
    assert (result.outcome, "did not end in 0.5 s" in result.message) == ("fail", True)


def test_a_program_that_is_not_there_is_no_failure_of_the_node(climb):
    given = climb("")
    gone = replace(given, settings=replace(given.settings, repair=Repair(command=("/nowhere/mend",))))
    assert rung_repair.run(gone).outcome == "untested"


def test_a_program_that_others_can_write_is_not_run(climb, monkeypatch, tmp_path):
    monkeypatch.setattr(
        rung_repair.configuration, "unsafe", lambda path, *_, **__: [f"{path} can be written by others"]
    )
    result = rung_repair.run(climb(f"touch {tmp_path}/ran"))
    assert (result.outcome, (tmp_path / "ran").exists()) == ("untested", False)


def test_a_program_whose_script_others_can_write_is_not_run(climb, monkeypatch, tmp_path):
    given = climb(f"touch {tmp_path}/ran")
    script = given.settings.repair.command[0]
    monkeypatch.setattr(rung_repair.configuration, "unsafe", lambda path, *_, **__: ["writable"] * (path == script))
    given = replace(given, settings=replace(given.settings, repair=Repair(command=("/bin/sh", script))))
    assert (rung_repair.run(given).outcome, (tmp_path / "ran").exists()) == ("untested", False)


def test_a_hold_that_is_gone_by_its_end_is_not_tested(climb):
    holds = [None, HoldLost("resumed")]

    def check():
        one = holds.pop(0)
        if one:
            raise one

    with pytest.raises(HoldLost):
        rung_repair.run(replace(climb("exit 0"), check_hold=check))
