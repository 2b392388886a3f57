"""The site's own checks: a hostile or broken check never reports a hardware fault by mistake."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpuhealth.child import Child, Completed
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.config.settings import Check, Command, Settings
from slurm_gpuhealth.evidence import site
from slurm_gpuhealth.findings import Gpu
from slurm_gpuhealth.frozen import replace

NOW = 1_800_000_000.0


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """`program` writes a check, `look` runs those that are due."""
    monkeypatch.setattr(configuration, "unsafe", lambda *_, **__: [])

    def program(body: str, name: str = "check", **keys) -> Command:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        return Command(name, (str(file), "argument"), **keys)

    def look(*commands, last=None, now=NOW, **keys):
        return site.collect(replace(Settings(), check=Check(command=commands, **keys)), last or {}, now)

    return SimpleNamespace(program=program, look=look, path=tmp_path)


def said(found):
    return [(one.severity, one.message) for one in found[0]]


def test_no_commands_no_state(shop):
    assert shop.look() == ([], {})


@pytest.mark.parametrize(("rc", "severity"), [(1, "warning"), (2, "fault")])
def test_the_exit_code_is_the_severity_and_the_first_line_the_message(shop, rc, severity):
    (finding,), _ = shop.look(shop.program(f"echo; echo disk $1; echo more; exit {rc}", "nvme"))
    assert (finding.source, finding.code, finding.severity, finding.standing) == ("site", "nvme", severity, True)
    assert finding.message == "nvme: disk argument"
    assert (finding.details, finding.about_gpus) == ({"check": "nvme", "says": severity, "gpu": False}, False)


def test_all_well_says_nothing(shop):
    assert said(shop.look(shop.program("echo fine"))) == []


def test_a_fault_without_a_word_is_a_fault(shop):
    assert said(shop.look(shop.program("exit 2"))) == [("fault", "check: exit 2 without a message")]
    assert said(shop.look(shop.program("echo []; exit 2"))) == [("fault", "check: exit 2 without a message")]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("exit 3", "exit 3"),
        ("echo usage; exit 64", "exit 64: usage"),
        ("echo no python >&2; exit 127", "exit 127: no python"),
        ("kill -SEGV $$", "signal 11"),
        ('echo \'{"severity": "fatal", "message": "m"}\'; exit 2', "needs"),
        ("echo '{not json'; exit 2", "JSON"),
        ("echo '[1]'", "needs"),
        ('echo \'[{"severity": "fault", "message": "m", "gpu": true}]\'', "an index"),
        ("head -c 60000 /dev/zero | tr '\\0' '['", "JSON"),
    ],
)
def test_a_check_that_is_broken_is_told_and_no_fault(shop, body, part):
    ((severity, message),) = said(shop.look(shop.program(body)))
    assert severity == "info"
    assert message.startswith("check: the check itself is broken: ")
    assert part in message


def test_a_program_that_is_not_there_is_no_fault(shop):
    command = replace(shop.program(""), argv=(str(shop.path / "none"),))
    assert said(shop.look(command))[0][0] == "info"


def test_a_check_that_does_not_end_is_ended_and_no_fault(shop, monkeypatch):
    monkeypatch.setattr(site, "GRACE", 0.2)
    ((severity, message),) = said(shop.look(shop.program("echo bad; exec sleep 60", timeout=0.3)))
    assert (severity, message) == ("info", "check: the check itself is broken: no end in 0.3 s")


def test_a_check_that_can_not_be_killed_is_not_started_again(shop, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "slurm_gpuhealth.child.run",
        lambda *_, **__: asked.append(1) or Completed(None, b"", b"", 1.0, True, Child(5, 6)),
    )
    monkeypatch.setattr("slurm_gpuhealth.child.alive", lambda one: one == Child(5, 6))
    command = shop.program("")
    _, state = shop.look(command)
    found = shop.look(command, last=state, now=NOW + 999)
    assert len(asked) == 1
    assert said(found)[0][0] == "info"


def test_json_findings_name_gpus_and_severities(shop):
    lines = (
        '{"code": "nvme", "severity": "warning", "message": "old", "gpu": 3}\n\n'
        '{"severity": "fault", "message": "dead", "gpu": "GPU-12"}\n{"severity": "info", "message": "x"}\n'
        '{"severity": "info", "message": "y", "gpu": "00000000:3B:00.0"}\n'
    )
    (shop.path / "lines").write_text(lines)
    findings, _ = shop.look(shop.program(f"cat {shop.path}/lines"))
    assert [(one.severity, one.message, one.gpu) for one in findings] == [
        ("warning", "check: nvme: old", Gpu(index=3)),
        ("fault", "check: dead", Gpu(uuid="GPU-12")),
        ("info", "check: x", None),
        ("info", "check: y", Gpu(pci="0000:3b:00")),
    ]


def test_json_findings_on_one_gpu_are_one_with_the_worst_severity(shop):
    body = """echo '[{"severity":"fault","message":"a"},{"severity":"warning","message":"b"}]'"""
    assert said(shop.look(shop.program(body))) == [("fault", "check: a; b")]


def test_output_is_bounded_and_cleared_of_what_a_terminal_would_obey(shop):
    body = r"printf '\033[2J\a'; head -c 9000000 /dev/zero | tr '\0' x; exit 1"
    ((severity, message),) = said(shop.look(shop.program(body)))
    assert severity == "warning"
    assert message.isprintable()
    assert len(message) < 400


def test_between_its_runs_what_a_check_said_still_stands(shop):
    command = shop.program(f"echo x >> {shop.path}/runs; echo bad; exit 1", every=600.0)
    first, state = shop.look(command)
    again, state = shop.look(command, last=state, now=NOW + 599)
    assert again == first
    assert (shop.path / "runs").read_text() == "x\n"
    later, _ = shop.look(command, last=state, now=NOW + 600)
    assert later[0].time == NOW + 600
    assert (shop.path / "runs").read_text() == "x\nx\n"


def test_a_clock_set_back_keeps_no_check_from_running(shop):
    command = shop.program("echo bad; exit 1", every=600.0)
    _, state = shop.look(command)
    assert shop.look(command, last=state, now=NOW - 9999)[1]["check"]["time"] == NOW - 9999


def test_what_was_mended_or_taken_out_is_gone(shop):
    command = shop.program("exit 1")
    _, state = shop.look(command)
    assert shop.look(shop.program("exit 0"), last=state, now=NOW + 60)[0] == []
    assert shop.look(replace(command, mode="off"), last=state) == ([], {})


def test_checks_that_do_not_fit_come_first_the_next_time(shop):
    slow = shop.program("sleep 0.6; exit 1", "slow", timeout=1.0)
    other = shop.program("exit 1", "other", timeout=1.0)
    found, state = shop.look(slow, other, timeout=3.0)
    assert [one.code for one in found] == ["slow"]
    _, state = shop.look(slow, other, timeout=3.0, last=state, now=NOW + 60)
    assert state["other"]["time"] == NOW + 60


def test_a_program_that_others_can_change_is_not_run(shop, monkeypatch):
    monkeypatch.undo()
    command = shop.program(f"touch {shop.path}/ran; exit 2")
    os.chmod(command.argv[0], 0o777)
    ((severity, message),) = said(shop.look(command))
    assert severity == "info"
    assert "not run: " in message
    assert not (shop.path / "ran").exists()


def test_a_program_whose_script_others_can_change_is_not_run(shop, monkeypatch):
    script = shop.program(f"touch {shop.path}/ran; exit 2").argv[0]
    monkeypatch.setattr(configuration, "unsafe", lambda path, *_, **__: ["writable"] * (path == script))
    ((severity, message),) = said(shop.look(Command("own", ("/bin/sh", script))))
    assert (severity, message.endswith("not run: writable"), (shop.path / "ran").exists()) == ("info", True, False)


def test_the_node_s_name_is_all_that_a_check_gets_of_our_environment(shop, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("LD_PRELOAD_NOT", "x")
    ((_, message),) = said(shop.look(shop.program("echo $SLURMD_NODENAME${LD_PRELOAD_NOT}; exit 1")))
    assert message == "check: n1"


@given(st.binary(max_size=60), st.sampled_from([0, 1, 2, 3, None, -9]))
def test_no_output_makes_it_raise(output, rc):
    for severity, message, _, _ in site.read(Completed(rc, output, b"", 0.0), 1.0):
        assert severity in ("info", "warning", "fault")
        assert message.isprintable()
