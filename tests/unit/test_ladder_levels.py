"""Rungs L1 to L4: which GPU is named, and what counts as untested."""

import json
import time

import pytest

from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.ladder import rung_test
from slurm_gpuhealth.ladder.rungs import Climb
from slurm_gpuhealth.node import record
from slurm_gpuhealth.node import run_level as diagnostic
from slurm_gpuhealth.slurm import reason as reasons

NOW = time.time()
TEST = {"test": "memory"}
GOOD = {"GPU-0": "pass", "GPU-1": "pass", "GPU-2": "pass"}
EVERY = [*GOOD]
SAID = json.dumps({"message": "busy"})


@pytest.fixture
def level(settings, journal, monkeypatch):
    """`level(answers)`: DCGM's, one after the other, each GPU → outcome; result, and the GPUs of each run."""
    gpus = [{"uuid": f"GPU-{i}", "pci": f"0000:0{i}:00", "index": i, "serial": "", "name": "H100"} for i in range(3)]
    journal.put("gpus", gpus)
    runs = []

    def run(answers, ours="Xid79 GPU* L3 running"):
        def run_level(settings, journal, program, number, uuids, **_):
            answer, now = answers[len(runs)], NOW + len(runs)
            runs.append(list(uuids))
            bad = [uuid for uuid, outcome in answer.items() if outcome == "fail"]
            found = [Finding(now, "dcgm", "memory", "bad", Gpu(uuid), standing=True, details=TEST) for uuid in bad]
            judged = record.keep(journal, settings, found, now)
            record.clear(journal, ("dcgm",), judged, now, uuids, number)
            for uuid, outcome in answer.items():
                journal.write(
                    "INSERT INTO diagnostic (time, level, uuid, outcome, seconds, program, detail)"
                    " VALUES (?, ?, ?, ?, 1, ?, ?)",
                    *(now, number, uuid, outcome, program, SAID),
                )
            return max(answer.values(), key=("pass", "config", "not-testable", "fail").index)

        monkeypatch.setattr(diagnostic, "run_level", run_level)
        reason = reasons.parse(f"gpuhealth:{ours}")
        return rung_test.run(Climb(settings, journal, "n1", reason, "L3", 2100.0, lambda: None, NOW)), runs

    return run


def test_all_gpus_pass(level):
    result, runs = level([GOOD])
    assert (result.outcome, runs) == ("pass", [EVERY])


def test_of_gpus_that_fail_together_only_who_fails_alone_is_named(level):
    result, runs = level([{**GOOD, "GPU-0": "fail", "GPU-1": "fail"}, {"GPU-0": "pass"}, {"GPU-1": "fail"}])
    assert runs == [EVERY, ["GPU-0"], ["GPU-1"]]
    assert (result.outcome, result.gpu.uuid, result.gpu.index, result.test) == ("fail", "GPU-1", 1, "memory")


def test_gpus_that_fail_only_in_company_are_not_fit_and_none_is_named(level):
    result, _ = level([{**GOOD, "GPU-0": "fail"}, {"GPU-0": "pass"}])
    assert (result.outcome, result.gpu) == ("fail", None)
    assert result.message == "level 3: 1 GPUs fail together, but none of them alone"


def test_a_setting_is_nothing_against_a_gpu(level):
    assert level([{**GOOD, "GPU-0": "config"}])[0].outcome == "pass"


def test_what_could_not_be_tested_is_said_to_be_untested_and_why(level):
    result, _ = level([{**GOOD, "GPU-0": "not-testable"}])
    assert (result.outcome, result.message) == ("untested", "level 3: not-testable: busy")


def test_of_a_gpu_that_somebody_asked_for_that_one_alone_is_tested(level):
    result, runs = level([{"GPU-1": "pass"}], "asked GPU1 L3 running")
    assert (result.outcome, runs) == ("pass", [["GPU-1"]])


def test_for_a_fault_all_gpus_are_tested_whichever_it_names(level):
    assert level([GOOD], "Xid79 GPU1 L3 running")[1] == [EVERY]


def test_what_a_deeper_level_found_is_tested_by_that_level(level, settings, journal):
    found = Finding(NOW, "dcgm", "memory", "bad", Gpu("GPU-1"), standing=True, details={**TEST, "level": 4})
    record.keep(journal, settings, [found], NOW)
    level([GOOD])
    assert journal.one("SELECT max(level) FROM diagnostic")[0] == 4


def test_a_gpu_that_there_is_not_can_not_be_tested(level):
    assert level([], "asked GPU7 L3 running")[0].outcome == "untested"
