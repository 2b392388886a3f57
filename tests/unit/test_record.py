import time

import pytest

from slurm_gpuhealth.config.settings import Paths, Row, Settings
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import jobs, record
from slurm_gpuhealth.node.environment import Job
from slurm_gpuhealth.node.journal import open_journal

NOW = time.time()
SETTINGS = Settings(mode="enforce", policy=(Row("nvml:hot", "warning"), Row("*", "fault", rung="L3")))
KNOWN = [{"uuid": f"GPU-{n}", "pci": f"0000:{n}d:00", "index": n, "serial": f"10{n}"} for n in range(8)]
XID = Finding(NOW, "xid", "79", "off the bus", Gpu(pci="0000:3d:00"))
LOST = Finding(NOW, "nvml", "lost", "not there", Gpu(uuid="GPU-3"), standing=True)


@pytest.fixture
def journal(tmp_path):
    opened = open_journal(Paths(state=str(tmp_path / "s"), run=str(tmp_path / "r")))
    opened.put("gpus", KNOWN)
    return opened


def keep(journal, *findings, now=NOW, settings=SETTINGS):
    return record.keep(journal, settings, findings, now)


def run_job(journal, number, uid, uuids, start, end=None):
    job = Job(job_id=number, node="n1", uid=uid, user=f"u{uid}", num_nodes=1)
    jobs.started(journal, job, uuids, start)
    if end:
        jobs.ended(journal, replace(job, exit_code=0), "ok", end)


def test_a_finding_is_completed_from_the_inventory(journal):
    assert keep(journal, XID)[0].finding.gpu == Gpu("GPU-3", "0000:3d:00", 3, "103")


def test_a_fault_waits_until_it_has_a_decision(journal):
    keep(journal, XID)
    (number,) = record.waiting(journal)
    record.settle(journal, [number], 1)
    assert record.waiting(journal) == {}


def test_each_event_is_a_row_and_a_condition_is_one_row_for_as_long_as_it_stands(journal):
    keep(journal, XID, LOST)
    keep(journal, XID, LOST)
    codes = [row[0] for row in journal.rows("SELECT code FROM finding ORDER BY code")]
    assert codes == ["79", "79", "lost"]


def test_a_condition_that_is_gone_is_cleared_and_is_new_when_it_comes_back(journal):
    judged = keep(journal, LOST)
    record.settle(journal, record.waiting(journal), 1)
    record.clear(journal, ("nvml",), judged, NOW)
    assert not record.waiting(journal)
    record.clear(journal, ("nvml",), [], NOW)
    keep(journal, LOST)
    assert len(record.waiting(journal)) == 1


def test_an_admins_ack_lasts_as_long_as_the_condition_or_the_time(journal):
    keep(journal, LOST)
    record.settle(journal, record.waiting(journal), 1)
    assert record.acknowledge(journal, NOW + 100) == 1
    keep(journal, LOST, now=NOW + 50)
    assert not record.waiting(journal)
    keep(journal, LOST, now=NOW + 150)
    assert len(record.waiting(journal)) == 1


def test_a_new_event_of_the_same_kind_is_not_covered_by_an_ack(journal):
    keep(journal, XID)
    record.settle(journal, record.waiting(journal), 1)
    record.acknowledge(journal, NOW + 100)
    keep(journal, replace(XID, time=NOW + 10))
    assert len(record.waiting(journal)) == 1


def test_what_is_older_than_the_first_run_waits_for_nothing(journal):
    keep(journal, replace(XID, details={"old": True}))
    assert not record.waiting(journal)
    assert journal.one("SELECT count(*) FROM finding WHERE severity = 'fault' AND acted IS NULL") == (0,)


def test_an_event_is_given_to_the_job_that_held_the_gpu(journal):
    run_job(journal, 7, 1000, ["GPU-3"], NOW - 100, NOW - 2)
    run_job(journal, 8, 1001, ["GPU-4"], NOW - 100)
    keep(journal, XID)
    assert journal.one("SELECT job, uid FROM finding") == (7, 1000)


def test_the_same_fault_of_three_users_on_one_gpu_is_counted_and_that_of_one_user_is_not(journal):
    rows = (Row("xid:13", "fault", times=3, distinct="user"), Row("*", "info"))
    settings = replace(SETTINGS, policy=rows)
    for number, uid in enumerate([1000, 1000, 1000, 1001]):
        run_job(journal, number, uid, ["GPU-3"], NOW + number * 100, NOW + number * 100 + 50)
        keep(journal, replace(XID, code="13", time=NOW + number * 100 + 10), settings=settings)
    assert not record.waiting(journal)
    run_job(journal, 9, 1002, ["GPU-5"], NOW + 900)
    keep(journal, replace(XID, code="13", gpu=Gpu(uuid="GPU-5"), time=NOW + 910), settings=settings)
    assert not record.waiting(journal)
    run_job(journal, 10, 1002, ["GPU-3"], NOW + 900)
    keep(journal, replace(XID, code="13", time=NOW + 910), settings=settings)
    assert len(record.waiting(journal)) == 1


def test_a_warning_that_stands_long_enough_becomes_a_fault(journal):
    rows = (Row("nvml:thermal", "fault", times=3, rung="L3"), Row("*", "warning"))
    settings = replace(SETTINGS, policy=rows)
    hot = replace(LOST, code="thermal")
    for minute in range(2):
        keep(journal, hot, now=NOW + 60 * minute, settings=settings)
    assert not record.waiting(journal)
    keep(journal, hot, now=NOW + 120, settings=settings)
    assert len(record.waiting(journal)) == 1


def test_a_pass_is_fresh_until_it_is_old_or_something_new_is_seen(journal):
    def passed(uuid, when, level=1, outcome="pass"):
        journal.write(
            "INSERT INTO diagnostic (time, level, uuid, outcome, seconds, program, detail) VALUES (?,?,?,?,1,'t','')",
            *(when, level, uuid, outcome),
        )

    passed("GPU-3", NOW - 50)
    assert jobs.fresh_pass(journal, ["GPU-3"], 1, NOW - 60)
    assert not jobs.fresh_pass(journal, ["GPU-3", "GPU-4"], 1, NOW - 60)
    assert not jobs.fresh_pass(journal, ["GPU-3"], 2, NOW - 60)
    assert not jobs.fresh_pass(journal, ["GPU-3"], 1, NOW - 40)
    assert not jobs.fresh_pass(journal, [], 1, NOW - 60)
    keep(journal, replace(LOST, code="hot", time=NOW - 20))
    assert not jobs.fresh_pass(journal, ["GPU-3"], 1, NOW - 60)
    passed("GPU-3", NOW - 10)
    assert jobs.fresh_pass(journal, ["GPU-3"], 1, NOW - 60)
    passed("GPU-3", NOW - 5, outcome="tool-error")
    assert not jobs.fresh_pass(journal, ["GPU-3"], 1, NOW - 60)


def test_a_job_from_before_the_boot_runs_no_more(journal):
    run_job(journal, 1, 1000, ["GPU-1"], NOW - 400 * 86400)
    run_job(journal, 2, 1000, ["GPU-2"], NOW)
    run_job(journal, 3, 1000, ["GPU-3"], NOW, NOW + 1)
    assert jobs.running(journal) == [(2, ["GPU-2"])]
    assert jobs.running(journal, but=2) == []
