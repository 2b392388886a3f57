"""What the doctor says about the ladder: each thing that would keep a drained node from testing itself."""

import pytest

from slurm_gpuhealth.config.settings import Dcgm, Ladder, Model, Reboot, Repair, Reset, Settings, Sources, Sweep
from slurm_gpuhealth.doctor import ladder
from slurm_gpuhealth.doctor.slurm_conf import Entry
from slurm_gpuhealth.frozen import replace

REBOOTS = Settings(reboot=Reboot(enabled=True))


def bad(lines):
    lines = list(lines)
    assert all(line.remedy for line in lines if line.level != "ok")
    return {line.check: line.level for line in lines if line.level != "ok"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"reboot": "FAIL"}),
        ({"RebootProgram": ("/sbin/reboot",)}, {"reboot": "warn"}),
        ({"RebootProgram": ("/sbin/reboot",), "ResumeTimeout": ("60 sec",)}, {"reboot": "warn"}),
        (
            {"RebootProgram": ("/sbin/reboot",), "ResumeTimeout": ("1200 sec",), "ReturnToService": ("2",)},
            {"reboot": "FAIL"},
        ),
        ({"RebootProgram": ("/sbin/reboot",), "ResumeTimeout": ("1200 sec",)}, {}),
    ],
)
def test_a_reboot_needs_a_program_and_time(config, expected):
    assert bad(ladder.judge_slurm_conf(config, REBOOTS)) == expected
    assert bad(ladder.judge_slurm_conf(config, Settings())) == {}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (Entry("/sbin/reboot"), {}),
        (Entry("/sbin/reboot", "missing"), {"reboot": "FAIL"}),
        (Entry("/sbin/reboot", runs=False), {"reboot": "FAIL"}),
        (Entry("/r", unsafe=["/r can be written by others (mode 0775): chmod go-w /r"]), {"reboot": "FAIL"}),
    ],
)
def test_a_program_that_slurmd_does_not_start_reboots_nothing(entry, expected):
    config = {"RebootProgram": (f"{entry.path} -f",), "ResumeTimeout": ("1200 sec",)}
    assert bad(ladder.judge_slurm_conf(config, REBOOTS, entry)) == expected


def test_a_scheduler_that_reads_extra_itself_is_told():
    config = {"SchedulerParameters": ("bf_continue,extra_constraints",)}
    (line,) = ladder.judge_slurm_conf(config, Settings())
    assert (line.level, line.remedy) == ("warn", "in slurm.conf: SchedulerParameters=bf_continue")


def test_what_is_on_and_off_by_default_is_said():
    (line,) = ladder.judge_settings(Settings(), "")
    assert (line.level, "off: reset, reboot, repair, sweep" in line.what) == ("ok", True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(ladder=Ladder(tests=False)), {"ladder": "warn"}),
        (Settings(sources=Sources(dcgm="off")), {"ladder": "warn"}),
        (Settings(dcgm=Dcgm(backend="off")), {"ladder": "warn"}),
        (Settings(ladder=Ladder(l3=600.0)), {"limits": "warn"}),
        (Settings(ladder=Ladder(l4=2400.0)), {"limits": "warn"}),
        (Settings(ladder=Ladder(model=(Model("*H100*", 600.0, 7200.0),))), {"limits": "warn"}),
        (Settings(ladder=Ladder(model=(Model("*B200*", 600.0, 7200.0),))), {}),
        (Settings(mode="enforce", sweep=Sweep(enabled=True)), {}),
        (Settings(mode="enforce", sweep=Sweep(enabled=True), sources=Sources(dcgm="shadow")), {"sweep": "warn"}),
    ],
)
def test_settings_with_which_nothing_can_be_proven(settings, expected):
    assert bad(ladder.judge_settings(settings, "NVIDIA H100 80GB HBM3")) == expected


NO_PROGRAM = {"/usr/bin/nvidia-smi": False, "/usr/bin/systemctl": False, "/opt/mend": False}
ALL = dict.fromkeys(NO_PROGRAM, True)


def test_programs_of_rungs_that_are_on_must_be_there():
    assert bad(ladder.judge_programs(Settings(), NO_PROGRAM, [])) == {}
    resets = Settings(reset=Reset(enabled=True))
    assert [line.level for line in ladder.judge_programs(resets, NO_PROGRAM, [])] == ["FAIL", "FAIL"]
    assert bad(ladder.judge_programs(resets, ALL, [])) == {}


def test_a_repair_program_must_be_there_and_roots_alone():
    repairs = Settings(repair=Repair(command=("/opt/mend", "-x")))
    assert bad(ladder.judge_programs(repairs, ALL, [])) == {}
    assert bad(ladder.judge_programs(repairs, NO_PROGRAM, [])) == {"repair": "FAIL"}
    unsafe = ["/opt can be written by others (mode 0777): chmod go-w /opt"]
    (line,) = ladder.judge_programs(repairs, ALL, unsafe)
    assert (line.level, line.remedy) == ("FAIL", "chmod go-w /opt")


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ({}, []),
        ({"LoadState": "not-found", "KillMode": "control-group"}, []),
        ({"LoadState": "loaded", "KillMode": "process"}, ["ok"]),
        ({"LoadState": "loaded", "KillMode": "control-group"}, ["FAIL"]),
        ({"LoadState": "loaded", "KillMode": "mixed"}, ["FAIL"]),
    ],
)
def test_a_restart_of_slurmd_must_leave_the_worker_alive(unit, expected):
    assert [line.level for line in ladder.judge_unit(unit)] == expected


def test_a_comment_beside_which_ours_has_no_place():
    assert bad(ladder.judge_remarks('rack "7"', "", "n1")) == {}
    assert bad(ladder.judge_remarks("rack\n7", "", "n1")) == {"remarks": "warn"}
    assert bad(ladder.judge_remarks("", "rack\n7", "n1")) == {"remarks": "warn"}


def test_sweeps_in_shadow_are_not_complained_of_twice():
    settings = replace(Settings(sweep=Sweep(enabled=True)), mode="shadow")
    assert bad(ladder.judge_settings(settings, "")) == {}
