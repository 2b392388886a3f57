"""Other tools' tests on a stand-in node: what is run, what it means, what is kept."""

import os
import signal
import subprocess
import sys
import time

import pytest

from slurm_gpuhealth import child
from slurm_gpuhealth.config import settings as config
from slurm_gpuhealth.config.check import parse
from slurm_gpuhealth.config.load import build
from slurm_gpuhealth.config.settings import Limit, Paths
from slurm_gpuhealth.diagnose import tools
from slurm_gpuhealth.findings import Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import rung_test
from slurm_gpuhealth.ladder.rungs import Climb, HoldLost
from slurm_gpuhealth.node import record, run_level
from slurm_gpuhealth.node import tools as node_tools
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm import reason as reasons
from tests.fakes import node as fakes

PLACES = {"nccl": "all_reduce_perf", "nccl-net": "all_reduce_perf", "nvbandwidth": "nvbandwidth"}
PLACES |= {"ib-write": "ib_write_bw", "ib-lat": "ib_read_lat", "gpu-burn": "gpu_burn"}


@pytest.fixture
def settings(folder, tmp_path, monkeypatch):
    """The built-in tests with the stand-ins of the node in `folder`; every test file may be run."""
    monkeypatch.setattr(tools.configuration, "unsafe", lambda *_, **__: [])
    file = tmp_path / "gpuhealth.toml"
    file.write_text('mode = "enforce"\n[sources]\ntools = "enforce"\n')
    built_in = build(parse(str(file)), str(file), "n1")
    here = [replace(one, command=(str(folder / PLACES[one.name]), *one.command[1:])) for one in built_in.test]
    paths = Paths(
        state=str(tmp_path / "s"), run=str(tmp_path / "r"), proc=str(folder / "proc"), sys=str(folder / "sys")
    )
    return replace(built_in, paths=paths, test=tuple(here))


@pytest.fixture
def journal(settings, folder):
    journal = open_journal(settings.paths)
    keep = ("uuid", "pci", "index", "serial", "name")
    journal.put("gpus", [{key: gpu[key] for key in keep} for gpu in fakes.load(str(folder))["gpus"]])
    return journal


@pytest.fixture
def gpus(folder):
    return fakes.load(str(folder))["gpus"]


def scenario(folder, **plans):
    one = fakes.load(str(folder))
    one["tools"] = plans
    fakes.save(str(folder), one)


def figures(journal):
    rows = journal.rows("SELECT name, gpu, round(value, 1), unit FROM figure ORDER BY id")
    return {(name, gpu): (value, unit) for name, gpu, value, unit in rows}


def findings(journal, open_only=True):
    which = "source = 'tool'" + (" AND cleared IS NULL" if open_only else "")
    return [one.finding for one in record.select(journal, which)]


def test_all_tests_pass_on_a_good_node_and_their_figures_are_kept(settings, journal, gpus):
    ran = node_tools.run(settings, journal, "L4")
    assert {one.test.name: (one.outcome, one.message) for one in ran} == dict.fromkeys(PLACES, ("pass", ""))
    found = figures(journal)
    assert found["nccl", None] == (470.7, "GB/s")
    assert found["nccl-net", None] == (46.3, "GB/s")
    assert found["nvbandwidth.host_to_device_memcpy_ce", 3] == (55.1, "GB/s")
    assert found["ib-write.mlx5_0/1", None] == (391.2, "Gb/s")
    assert found["ib-lat.mlx5_0/1", None] == (2.7, "us")
    assert found["gpu-burn.gflops", 7] == (51200.0, "GFLOPS")
    kept = journal.one("SELECT tool, version, uuid, model FROM figure WHERE name LIKE 'nvbandwidth.%' AND gpu = 3")
    assert kept == ("nvbandwidth", "v0.8", gpus[3]["uuid"], "NVIDIA H100 80GB HBM3")
    assert findings(journal) == []


def test_a_slow_gpu_is_named_by_its_uuid_and_well_again_it_is_mended(settings, journal, folder, gpus):
    scenario(folder, slow={gpus[3]["uuid"]: 0.5})
    ran = node_tools.run(settings, journal, "L1", "nvbandwidth")
    assert [(one.outcome, len(one.bad)) for one in ran] == [("slow", 3)]
    (found,) = findings(journal)
    assert (found.key, found.gpu, found.severity) == (
        "tool:nvbandwidth",
        Gpu(gpus[3]["uuid"], gpus[3]["pci"], 3, gpus[3]["serial"]),
        "warning",
    )
    assert (
        "nvbandwidth.host_to_device_memcpy_ce 27.55 GB/s, at least 48 expected (nd96isr_h100_v5.conf)" in found.message
    )
    scenario(folder)
    node_tools.run(settings, journal, "L1", "nvbandwidth")
    assert findings(journal) == []
    assert len(findings(journal, open_only=False)) == 1


def test_what_could_not_be_run_mends_nothing(settings, journal, folder, gpus):
    scenario(folder, nvbandwidth=0.5)
    node_tools.run(settings, journal, "L1", "nvbandwidth")
    scenario(folder, nvbandwidth="crash")
    (ran,) = node_tools.run(settings, journal, "L1", "nvbandwidth")
    assert (ran.outcome, len(findings(journal))) == ("untested", 8)


@pytest.mark.parametrize(
    ("plan", "outcome", "words"),
    [
        ("wrong", "wrong", "20 wrong values"),
        ("crash", "untested", "exit code 1: all_reduce_perf: Test CUDA failure"),
        ("nothing", "untested", "it did not end: it printed nothing"),
        ("hang", "untested", "did not end within 1 s"),
        (0.9, "slow", "nccl 423.7 GB/s, at least 460 expected (nd96isr_h100_v5.conf)"),
    ],
)
def test_how_a_program_can_end(settings, journal, folder, plan, outcome, words):
    scenario(folder, all_reduce_perf=plan)
    settings = replace(
        settings, test=tuple(replace(one, timeout=1.0 if plan == "hang" else 60.0) for one in settings.test)
    )
    (ran,) = node_tools.run(settings, journal, "L1", "nccl")
    assert ran.outcome == outcome
    assert words in ran.message
    assert [one.code for one in findings(journal)] == (["nccl"] if outcome in tools.BAD else [])


def test_a_gpu_that_calculates_wrongly_is_named(settings, journal, folder, gpus):
    scenario(folder, gpu_burn="wrong")
    (ran,) = node_tools.run(settings, journal, "L1", "gpu-burn")
    assert (ran.outcome, ran.uuid(ran.bad[0].device)) == ("wrong", gpus[0]["uuid"])


def test_what_is_not_installed_or_not_roots_alone_is_not_run(settings, journal, monkeypatch):
    nowhere = replace(settings, test=tuple(replace(one, command=("/none", "x")) for one in settings.test))
    ran = node_tools.run(nowhere, journal, "L4")
    assert {(one.outcome, one.absent, one.message) for one in ran} == {("untested", True, "not installed: /none")}
    monkeypatch.setattr(tools.configuration, "unsafe", lambda path, *_, **__: [f"{path} can be written by others"])
    assert {one.outcome for one in node_tools.run(settings, journal, "L4")} == {"untested"}
    assert (figures(journal), findings(journal)) == ({}, [])


def test_no_program_runs_with_a_library_that_others_can_write(settings, journal, monkeypatch, folder):
    library = folder / "libx.so"
    library.touch()
    monkeypatch.setattr(tools.configuration, "unsafe", lambda path, *_, **__: ["writable"] * (path == str(library)))
    own = replace(SITE, environment=(f"LD_PRELOAD={library}",))
    ran = [node_tools.run(replace(settings, test=(one,)), journal, "L1")[0] for one in (SITE, own)]
    assert [(one.outcome, one.message) for one in ran] == [("pass", ""), ("untested", "not run: writable")]


def burnt(*gflops, faulty=()):
    """What gpu-burn prints about GPUs of this speed."""
    lines = [
        f"{ten}0.0%  proc'd: {' - '.join(f'{ten} ({one} Gflop/s)' for one in gflops)}   errors: 0" for ten in range(9)
    ]
    ends = [f"\tGPU {one}: {'FAULTY' if one in faulty else 'OK'}" for one in range(len(gflops))]
    return "\n".join([*(f"{line}   temps: {' - '.join(['50 C'] * len(gflops))}" for line in lines), *ends, ""])


@pytest.fixture
def burn(settings, journal, tmp_path):
    """Runs a gpu-burn that prints this."""

    def run(text, **keys):
        output = tmp_path / "output"
        output.write_text(text)
        test = config.Test("burn", ("/bin/cat", str(output)), reads="gpu-burn", rung="L1", **keys)
        (ran,) = node_tools.run(replace(settings, test=(test,)), journal, "L1")
        return ran.outcome, ran.message

    return run


def test_a_gpu_that_did_nothing_has_not_passed(burn, journal, settings):
    assert burn(burnt(*[50000] * 7, 0)) == ("untested", "7 of 8 GPUs were tested")
    limit = Limit("burn.gflops", "*", at_least=1000.0)
    (found,) = tools.run(
        config.Test("burn", ("/bin/echo", burnt(50000, 0)), reads="gpu-burn"), ["a", "b"], "H100", [], [limit]
    ).bad
    assert (found.device, found.message) == (1, "burn.gflops 0 GFLOPS, at least 1000 expected")


def test_a_test_that_saw_some_of_the_gpus_proves_nothing_about_the_others(burn, journal):
    assert burn(burnt(*[50000] * 8, faulty=[5]))[0] == "wrong"
    assert burn(burnt(*[50000] * 3)) == ("untested", "3 of 8 GPUs were tested")
    assert [one.gpu.index for one in findings(journal)] == [5]


def test_only_a_gpu_with_a_figure_of_this_run_is_mended(burn, journal, settings):
    assert burn(burnt(*[50000] * 8, faulty=[1, 5]))[0] == "wrong"
    slow = replace(settings, limit=(Limit("burn.gflops", "*", at_least=1000.0),))
    test = config.Test("burn", ("/bin/echo", burnt(100, 50000, 50000)), reads="gpu-burn", rung="L1")
    node_tools.run(replace(slow, test=(test,)), journal, "L1")
    assert sorted(one.gpu.index for one in findings(journal)) == [0, 5]
    journal.put("gpus", journal.get("gpus")[:5])  # GPU 5 was taken out
    assert burn(burnt(*[50000] * 5)) == ("pass", "")
    assert findings(journal) == []


def test_the_devices_of_a_tool_are_the_gpus_that_it_was_told_in_that_order(settings, journal, folder, gpus):
    """CUDA numbers the fastest first, unless it is told."""
    shuffled = [*reversed(journal.get("gpus"))]
    journal.put("gpus", shuffled)
    scenario(folder, slow={gpus[5]["uuid"]: 0.5})
    node_tools.run(settings, journal, "L1", "nvbandwidth")
    assert [one.gpu.index for one in findings(journal)] == [5]


def test_a_gpu_in_mig_mode_is_left_out(settings, journal, gpus):
    journal.put("nvml", {"gpus": [{"uuid": gpus[0]["uuid"], "mig": 1}, {"uuid": gpus[1]["uuid"], "mig": 0}]})
    node_tools.run(settings, journal, "L1", "nvbandwidth")
    assert {gpu for _, gpu in figures(journal)} == set(range(1, 8))


def test_both_ends_of_perftest_are_ended_when_it_hangs(settings, journal, folder):
    scenario(folder, ib_write_bw="hang")
    settings = replace(settings, test=tuple(replace(one, timeout=1.0) for one in settings.test))
    (ran,) = node_tools.run(settings, journal, "L1", "ib-write")
    assert (ran.outcome, ran.message) == ("untested", "did not end within 1 s and was stopped")
    until_gone(folder / "ib_write_bw")


def test_both_ends_of_perftest_are_ended_when_the_program_that_started_them_was_killed(
    settings, journal, folder, monkeypatch
):
    monkeypatch.setattr(tools, "GRACE", 0.0)
    scenario(folder, ib_write_bw="hang")
    settings = replace(settings, test=tuple(replace(one, timeout=1.0) for one in settings.test))
    worker = os.fork()
    if worker == 0:
        node_tools.run(settings, journal, "L1", "ib-write")
        os._exit(0)
    try:
        until(lambda: len(running(folder / "ib_write_bw")) == 2)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    until_gone(folder / "ib_write_bw")


def test_a_flood_from_perftest_takes_no_memory(tmp_path):
    program = tmp_path / "flood"
    program.write_text('#!/bin/sh\ncase "$*" in *127.0.0.1) head -c 300000000 /dev/zero;; esac\n')
    program.chmod(0o755)
    code = f"""if True:
        import resource
        from slurm_gpuhealth.config.settings import Test
        from slurm_gpuhealth.diagnose import tools
        tools.configuration.unsafe_command = lambda *_: []
        test = Test("x", ({str(program)!r}, "{{device}}"), reads="perftest", server=True)
        print(tools.run(test, ["GPU-a"], "", ["mlx5_0/1"], []).outcome)
        print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) >> 10)
    """
    # By way of a shell: a program begins with the peak of the process that it was forked from, here of all tests.
    argv = ["/bin/sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
    outcome, mebibytes = subprocess.run(argv, capture_output=True, check=True).stdout.split()
    assert outcome == b"untested"
    assert int(mebibytes) < 150


def until_gone(program):
    """Until no process of this program is left; a kill takes an instant."""
    until(lambda: not running(program))


def until(is_so):
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def running(program):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and str(program).encode() in command(pid)]


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_the_test_of_a_pair_of_ports_goes_from_each_port_to_the_next(settings, journal, folder):
    port = folder / "sys/class/infiniband/mlx5_0/ports/1"
    other = folder / "sys/class/infiniband/mlx5_1/ports/1"
    other.parent.mkdir(parents=True)
    for name in ("state", "phys_state", "rate"):
        other.mkdir(exist_ok=True)
        (other / name).write_text((port / name).read_text())
    node_tools.run(settings, journal, "L1", "ib-write")
    assert [name for name, _ in figures(journal)] == ["ib-write.mlx5_0/1", "ib-write.mlx5_1/1"]


def test_a_limit_of_the_test_itself_counts_for_each_port(settings, journal):
    tests = tuple(replace(one, at_least=395.0) if one.name == "ib-write" else one for one in settings.test)
    (ran,) = node_tools.run(replace(settings, test=tests), journal, "L1", "ib-write")
    assert (ran.outcome, ran.message) == ("slow", "ib-write.mlx5_0/1 391.2 Gb/s, at least 395 expected")


def test_which_tests_are_due(settings):
    def names(rung, asked="", model="NVIDIA H100 80GB HBM3", gpus=8, settings=settings):
        return [one.name for one in tools.chosen(settings, rung, asked, model, gpus)]

    assert names("L3") == []
    assert names("L4") == [*PLACES]
    assert names("L4", gpus=1) == ["nvbandwidth", "ib-write", "ib-lat", "gpu-burn"]
    assert names("L1", "nccl,gpu-burn") == ["nccl", "gpu-burn"]
    assert names("L1", "all") == [*PLACES]
    off = replace(settings, sources=replace(settings.sources, tools="off"))
    assert (names("L4", settings=off), names("L4", "nccl", settings=off)) == ([], ["nccl"])
    own = config.Test("nccl", ("/x",), rung="L2", gpu="*A100*")
    both = replace(settings, test=(own, *settings.test))
    assert names("L2", model="NVIDIA A100-SXM4-80GB", settings=both) == ["nccl"]
    assert names("L2", settings=both) == []
    on_request = replace(settings, test=(replace(own, rung="asked", gpu="*"),))
    assert (names("L4", settings=on_request), names("L1", "nccl", settings=on_request)) == ([], ["nccl"])


SITE = config.Test(
    "scratch", ("/bin/sh", "-c", "echo 'read: 2.5 GiB/s'"), pattern=r"read: ([\d.]+)", unit="GB/s", rung="L1"
)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "pass"),
        ({"at_least": 3.0}, "slow"),
        ({"at_most": 3.0}, "pass"),
        ({"at_most": 2.0}, "slow"),
        ({"command": ("/bin/sh", "-c", "echo no disk; exit 2")}, "failed"),
        ({"command": ("/bin/sh", "-c", "echo no disk; exit 3")}, "untested"),
        ({"command": ("/bin/sh", "-c", "kill -9 $$")}, "untested"),
        ({"command": ("/bin/sh", "-c", "printf '\\033[2J'; exit 1")}, "failed"),
    ],
)
def test_a_sites_own_test(settings, journal, changes, outcome):
    settings = replace(settings, test=(replace(SITE, **changes),))
    (ran,) = node_tools.run(settings, journal, "L1")
    assert ran.outcome == outcome
    assert len(findings(journal)) == (outcome in tools.BAD)
    assert all(one.message.isprintable() for one in findings(journal))


def test_the_first_limit_that_meets_figure_model_count_and_unit_counts():
    figure = tools.outputs.Figure("nccl", 1.0, "GB/s")
    limits = [
        Limit("nccl", "*A100*", at_least=1),
        Limit("nccl", "*H100*", gpus=4, at_least=2),
        Limit("nccl", "*H100*", at_least=3, unit="Gb/s"),
        Limit("nc*", "*H100*", at_least=4, unit="GB/s", source="ours"),
        Limit("nccl", "*H100*", at_least=5),
    ]
    assert tools.limit(figure, config.Test("nccl"), "NVIDIA H100", 8, limits) == (4, 0.0, " (ours)")
    assert tools.limit(figure, config.Test("nccl"), "NVIDIA L40S", 8, limits) == (0.0, 0.0, "")


# On the ladder


def climb(settings, journal, text="asked GPU* L1 running tests=nccl,scratch by=alice"):
    ours = reasons.parse(f"gpuhealth:{text}")
    return Climb(settings, journal, "n1", ours, ours.rung, 900.0, lambda: None, time.time())


@pytest.fixture
def levels(monkeypatch):
    """DCGM's answers; every level passes."""
    ran = []
    monkeypatch.setattr(run_level, "run_level", lambda *words, **_: ran.append(words[3]) or "pass")
    return ran


def test_after_the_level_the_rung_runs_the_tests_that_were_asked_for_and_says_their_figures(settings, journal, levels):
    result = rung_test.run(climb(settings, journal))
    assert (result.outcome, result.message, levels) == ("pass", "level 1: pass; nccl: pass (470.7 GB/s)", [1])


def test_a_slow_test_fails_the_rung_only_if_its_row_says_so(settings, journal, folder, gpus, levels):
    scenario(folder, slow={gpus[3]["uuid"]: 0.5})
    settings = replace(settings, test=tuple(one for one in settings.test if one.name == "nvbandwidth"))
    fault = "Xid79 GPU3 L4 running"
    assert rung_test.run(climb(settings, journal, fault)).outcome == "pass"
    settings = replace(settings, test=(replace(settings.test[0], fails=True),))
    result = rung_test.run(climb(settings, journal, fault))
    assert (result.outcome, result.gpu.index, result.test) == ("fail", 3, "tool:nvbandwidth")
    assert "nvbandwidth: slow, nvbandwidth.host_to_device_memcpy_ce 27.55 GB/s" in result.message


def test_what_is_not_installed_is_said_and_fails_nothing(settings, journal, levels):
    settings = replace(settings, test=tuple(replace(one, command=("/none",), fails=True) for one in settings.test))
    result = rung_test.run(climb(settings, journal, "Xid79 GPU3 L4 running"))
    assert result.outcome == "pass"
    assert result.message == "level 4: pass; not installed: nccl, nccl-net, nvbandwidth, ib-write, ib-lat, gpu-burn"
    assert rung_test.run(climb(settings, journal)).outcome == "untested"


def test_a_gpu_that_fails_dcgm_is_not_tested_further(settings, journal, monkeypatch):
    monkeypatch.setattr(run_level, "run_level", lambda *_, **__: "not-testable")
    assert rung_test.run(climb(settings, journal)).outcome == "untested"
    assert figures(journal) == {}


def test_tests_alone_need_no_dcgm(settings, journal, monkeypatch):
    monkeypatch.setattr(run_level, "run_level", lambda *_, **__: "off")
    without = replace(settings, dcgm=replace(settings.dcgm, backend="off"))
    assert rung_test.run(climb(without, journal)).outcome == "pass"
    assert rung_test.run(climb(without, journal, "Xid79 GPU3 L1 running tests=nccl")).outcome == "untested"


def test_a_tool_is_ended_when_the_hold_is_lost(settings, journal, folder, levels, monkeypatch):
    scenario(folder, all_reduce_perf="hang")

    def look(_):
        raise HoldLost("resumed")

    monkeypatch.setattr(child, "watcher", look)
    with pytest.raises(HoldLost):
        rung_test.run(climb(settings, journal))
    until_gone(folder / "all_reduce_perf")
