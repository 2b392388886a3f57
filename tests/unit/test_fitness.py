"""When the epilog does not run level 2, how jobs are moved on, and who gets the result of a diagnostic."""

import threading
import time

import pytest

from slurm_gpuhealth.config.settings import Epilog
from slurm_gpuhealth.diagnose import model
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.hooks import fitness
from slurm_gpuhealth.node import jobs, lock, record
from slurm_gpuhealth.node import run_level as diagnostic
from slurm_gpuhealth.node.environment import Job
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import JobRecord

NOW = time.time()
BATCH = JobRecord("RUNNING", "None", True, 0, True, 0, 0, 1, "7")


@pytest.fixture
def journal(journal):
    journal.put("gpus", [{"uuid": f"GPU-{n}", "pci": f"0000:0{n}:00", "index": n, "serial": None} for n in range(8)])
    return journal


def why_not(settings, journal, **job):
    return fitness._why_not(settings, journal, Job(1, "n1", **job), ["GPU-3"], NOW)


def test_a_failed_job_of_one_node_is_tested(settings, journal):
    assert why_not(settings, journal) == ""


def test_slices_of_a_gpu_are_untestable_and_said_to_be(settings, journal):
    assert "MIG" in why_not(settings, journal, sharing="mig")


def test_of_a_job_of_many_nodes_only_those_with_evidence_are_tested(settings, journal):
    assert "64 nodes" in why_not(settings, journal, num_nodes=64)
    record.keep(journal, settings, [Finding(NOW, "xid", "48", "", Gpu(uuid="GPU-3"))], NOW)
    assert why_not(settings, journal, num_nodes=64) == ""


def test_epilogs_take_no_more_than_their_share_of_the_nodes_time(settings, journal):
    for uuid in ("GPU-3", "GPU-4"):  # one run of 4320 s is one, whatever the number of GPUs
        journal.write(
            "INSERT INTO diagnostic (time, level, uuid, outcome, seconds, program, detail)"
            " VALUES (?, 2, ?, 'pass', 4320, 'epilog', '')",
            *(NOW - 100, uuid),
        )
    assert why_not(settings, journal) == ""
    assert "max_share" in why_not(replace(settings, epilog=Epilog(max_share=0.04)), journal)


@pytest.mark.parametrize(
    ("known", "flags", "code"),
    [
        (BATCH, (), 0),
        (replace(BATCH, requeue=False), (), 0),
        (replace(BATCH, batch=False), (), 1),
        (replace(BATCH, het=True), (), 1),
        (replace(BATCH, num_nodes=2), ("Alloc",), 1),
        (replace(BATCH, num_nodes=2), ("Alloc,DeferBatch",), 0),
    ],
)
def test_a_job_is_requeued_gently_only_where_none_of_it_can_have_begun(settings, monkeypatch, known, flags, code):
    requeued = []
    monkeypatch.setattr(control, "show_job", lambda slurm, job: known)
    monkeypatch.setattr(control, "config", lambda slurm: {"PrologFlags": flags})
    monkeypatch.setattr(control, "requeue", lambda slurm, job: requeued.append(job))
    assert fitness.move_on(settings, Job(7, "n1")) == code
    assert requeued == ([known] if code == 0 else [])


def test_a_job_whose_record_can_not_be_read_is_left_to_slurm(settings, monkeypatch):
    def refuse(slurm, job):
        raise control.Refused("scontrol show job", 0, "its record can't be read safely")

    monkeypatch.setattr(control, "show_job", refuse)
    assert fitness.move_on(settings, Job(7, "n1")) == 1


def run_level(settings, journal, **options):
    given = {"deadline": time.monotonic() + 20, "reuse": 600.0, "everything": True, **options}
    return diagnostic.run_level(settings, journal, "prolog", 1, ["GPU-1", "GPU-2"], **given)


def passed(uuids=range(8)):
    gpus = tuple(model.GpuResult(n, f"GPU-{n}", None, "pass") for n in uuids)
    return model.Diagnosis("pass", 1, "4.4.1", gpus, seconds=0.0)


def test_all_who_wait_for_a_diagnostic_take_its_result(settings, monkeypatch, journal):
    runs = []

    def slow(level, uuids, settings, timeout):
        runs.append(level)
        time.sleep(0.3)
        return passed()

    monkeypatch.setattr("slurm_gpuhealth.diagnose.diagnose", slow)
    outcomes = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(run_level(settings, open_journal(settings.paths))))
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (runs, outcomes) == ([1], ["pass"] * 10)


def test_who_can_not_wait_long_enough_has_not_been_tested(settings, journal):
    import os

    turn = lock.take(settings, "diagnostic")
    try:
        assert run_level(settings, journal, deadline=time.monotonic() + 0.2) == "not-testable"
    finally:
        os.close(turn)


def test_a_gpu_that_is_missing_from_a_passing_result_did_not_pass(settings, journal, monkeypatch):
    monkeypatch.setattr("slurm_gpuhealth.diagnose.diagnose", lambda *_: passed(uuids=[1]))
    run_level(settings, journal)
    assert jobs.fresh_pass(journal, ["GPU-1"], 1, NOW - 10)
    assert not jobs.fresh_pass(journal, ["GPU-2"], 1, NOW - 10)


def test_what_a_diagnostic_found_is_mended_by_a_pass_of_the_same_level_or_deeper(settings, journal, monkeypatch):
    error = model.Error("memory", 58, "DCGM_FR_X", "ISOLATE", "bad")
    bad = model.GpuResult(1, "GPU-1", None, "fail", (error,))
    failed = model.Diagnosis("fail", 2, "4.4.1", (bad,), seconds=0.0)
    monkeypatch.setattr("slurm_gpuhealth.diagnose.diagnose", lambda *_: failed)
    far = time.monotonic() + 20
    diagnostic.run_level(settings, journal, "epilog", 2, ["GPU-1"], deadline=far, reuse=0.0)
    assert len(record.waiting(journal)) == 1
    monkeypatch.setattr("slurm_gpuhealth.diagnose.diagnose", lambda *_: passed())
    run_level(settings, journal, reuse=0.0)
    assert len(record.waiting(journal)) == 1
    diagnostic.run_level(settings, journal, "epilog", 2, ["GPU-1"], deadline=far, reuse=0.0)
    assert len(record.waiting(journal)) == 0


def test_a_busy_engine_is_waited_for(settings, journal, monkeypatch):
    answers = [model.Diagnosis("not-testable", 1, busy=True), passed()]
    monkeypatch.setattr("slurm_gpuhealth.diagnose.diagnose", lambda *_: answers.pop(0))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert run_level(settings, journal) == "pass"


def test_a_job_whose_end_was_not_recorded_keeps_its_gpus_from_no_test(settings, journal, monkeypatch):
    for number in (1, 2, 3, 4):
        jobs.started(journal, Job(number, "n1"), [f"GPU-{number}"], NOW)

    def show(slurm, number):
        if number == 1:
            raise control.NoSuchJob("scontrol show job", 1, control.NO_JOB)
        if number == 2:
            raise control.Unreadable("scontrol show job", 0, "Invalid job id specified")
        return replace(BATCH, state="FAILED" if number == 3 else "RUNNING")

    monkeypatch.setattr(control, "show_job", show)
    everything = [f"GPU-{number}" for number in range(1, 5)]
    assert fitness._held_by_others(settings, journal, Job(9, "n1"), ["GPU-7"], NOW) == set(everything)  # no need to ask
    assert fitness._held_by_others(settings, journal, Job(9, "n1"), everything, NOW) == {"GPU-2", "GPU-4"}
    assert [job for job, _ in jobs.running(journal)] == [2, 4]


def test_a_result_from_before_the_clock_was_set_back_is_not_taken_for_one_of_now(settings, journal, monkeypatch):
    runs = []
    monkeypatch.setattr("slurm_gpuhealth.diagnose.diagnose", lambda *_: runs.append(1) or passed())
    run_level(settings, journal)
    journal.write("UPDATE diagnostic SET time = time + 10800")
    assert run_level(settings, journal) == "pass"
    assert len(runs) == 2
    assert jobs.fresh_pass(journal, ["GPU-1"], 1, NOW - 10)


def test_prologs_that_waited_for_a_reading_that_hung_do_not_try_it_one_after_the_other(settings, journal, monkeypatch):
    reads = []

    def hang(settings, journal, name, now, timeout):
        reads.append(name)
        time.sleep(0.3)
        journal.put("sources", {"nvml": {"time": now, "seconds": time.time() - now, "error": "timeout"}})

    monkeypatch.setattr("slurm_gpuhealth.node.watch.source", hang)
    threads = [
        threading.Thread(
            target=lambda: fitness._read_nvml(
                settings, open_journal(settings.paths), time.time(), time.monotonic() + 10
            )
        )
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads == ["nvml"]
