"""Samples of the GPUs while a job runs: what the check reads of the driver, what the journal keeps, what is shipped."""

import json
import os
import subprocess
import sys
import time

import pytest

from slurm_gpuhealth.config.settings import Hang, Nvml
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import samples, watch
from slurm_gpuhealth.node import slow as told
from slurm_gpuhealth.node.journal import open_journal
from tests.fakes import node
from tests.fakes.node import inject

NOW = time.time()
JOB = "INSERT INTO job (job, restart, uid, user, nodes, gpus, started) VALUES (?, 0, 5, 'games', 1, ?, ?)"


@pytest.fixture
def checked(settings, folder):
    """A stand-in node: `checked(now)` reads NVML as the check does, `checked.journal` is its journal."""
    paths = replace(settings.paths, proc=str(folder / "proc"))
    library = Nvml(library=str(folder / node.LIBRARY), timeout=20.0)
    given = replace(settings, nvml=library, paths=paths, hang=Hang(after=600.0), policy=())
    journal = open_journal(given.paths)

    def look(now=NOW):
        watch.source(given, journal, "nvml", now, 20.0)
        assert journal.get("sources")["nvml"]["error"] == ""

    look.journal, look.settings = journal, given
    look.uuids = [gpu["uuid"] for gpu in node.load(str(folder))["gpus"]]
    look()
    return look


def start(checked, number, *indices):
    checked.journal.write(JOB, number, ",".join(checked.uuids[index] for index in indices), NOW)


def end(checked, number):
    checked.journal.write("UPDATE job SET ended = ? WHERE job = ?", NOW + 1, number)


def found(checked):
    rows = checked.journal.rows("SELECT code, gpu, job, severity, details, cleared FROM finding WHERE source = 'job'")
    return [(*row[:4], json.loads(row[4]), row[5]) for row in rows]


def test_nothing_is_kept_and_nothing_more_is_read_without_a_job(checked):
    checked(NOW + 60)
    assert not {"power", "energy", "processes"} & checked.journal.get("nvml")["gpus"][0].keys()
    assert samples.ring(checked.journal, 0) == []
    assert checked.journal.get("use") is None


def test_of_a_jobs_gpus_the_real_bindings_read_what_they_do(checked, folder):
    start(checked, 7, 2, 3)
    inject(folder, "works", "--gpu", 2)
    inject(folder, "nvml", "energy", "5000000000000", "--gpu", 2)
    inject(folder, "nvml", "field.138", "7000000000", "--gpu", 2)
    checked(NOW + 60)
    (one,) = samples.ring(checked.journal, NOW)
    assert set(one["gpus"]) == {checked.uuids[2], checked.uuids[3]}
    assert one["gpus"][checked.uuids[2]] == {
        **{"utilization": 98, "memory_utilization": 45, "power": 612_000, "limit": 700_000, "clock": 1755},
        **{"memory": 61440, "processes": 1, "temperature": 34, "reasons": 4, "energy": 5_000_000_000_000},
        **{"nvlink_tx": 7_000_000_000, "nvlink_rx": 0, "pcie_tx": 0, "pcie_rx": 0},
    }
    assert one["gpus"][checked.uuids[3]]["processes"] == 0
    assert checked.journal.get("nvml-baseline")["gpus"][checked.uuids[2]]["max_clock"] == 1980


def test_two_hours_of_eight_busy_gpus_are_a_small_journal(checked, folder):
    start(checked, 7, *range(8))
    for gpu in range(8):
        inject(folder, "works", "--gpu", gpu)
    checked.journal.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = os.path.join(checked.settings.paths.state, "journal.db")
    before = os.path.getsize(path)
    checked(NOW + 60)
    gpus = checked.journal.get("nvml")["gpus"]
    held = [(7, 0, checked.uuids)]
    for minute in range(2, 300):
        for key, value in samples.take(checked.settings, checked.journal, held, gpus, NOW + 60 * minute)[1].items():
            checked.journal.put(key, value)
    checked.journal.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert os.path.getsize(path) - before < 1 << 18
    kept = samples.ring(checked.journal, 0)
    assert len(kept) == 120
    assert kept[-1]["time"] - kept[0]["time"] == 119 * 60
    assert [one["time"] for one in samples.ring(checked.journal, NOW + 290 * 60)] == [
        NOW + 60 * m for m in range(291, 300)
    ]


def play(checked, folder, minutes, begin, **gpus):
    for minute in range(begin, begin + minutes):
        for gpu, word in gpus.items():
            if minute == begin:
                inject(folder, word, "--gpu", gpu[3:])
        checked(NOW + 60 * minute)


def test_a_job_that_stands_still_is_a_finding_that_ends_when_it_works_again(checked, folder):
    start(checked, 7, 2, 3)
    play(checked, folder, 5, 1, gpu2="works", gpu3="works")
    play(checked, folder, 10, 6, gpu2="spins", gpu3="idles")
    assert found(checked) == []
    play(checked, folder, 2, 16, gpu2="spins", gpu3="idles")
    spins, idles = sorted(found(checked), key=lambda one: one[1])
    assert spins[:4] == ("stalled", 2, 7, "info")
    assert spins[4] == {
        "kind": "spinning",
        "since": round(NOW + 360),
        "watts": 121,
        "usual": 612,
        "job": 7,
        "restart": 0,
    }
    assert (idles[1], idles[4]["kind"]) == (3, "idle")
    assert spins[5] is idles[5] is None
    play(checked, folder, 1, 18, gpu2="works")
    assert all(one[5] == NOW + 60 * 18 for one in found(checked))


def test_the_finding_ends_with_the_job_and_its_use_is_shipped(checked, folder):
    checked.journal.put("shipped", {"journal": "abc", "seq": 0, "size": 0})
    checked.journal.put("ships", 1)
    start(checked, 7, 2)
    play(checked, folder, 5, 1, gpu2="works")
    play(checked, folder, 20, 6, gpu2="spins")
    assert found(checked)[0][5] is None
    end(checked, 7)
    checked(NOW + 60 * 26)
    assert found(checked)[0][5] == NOW + 60 * 26
    assert checked.journal.get("use") is None
    job, restart, gpus = checked.journal.one("SELECT job, restart, gpus FROM jobuse")
    use = json.loads(gpus)[checked.uuids[2]]
    assert (job, restart, use["usual"], use["limit"]) == (7, 0, 612, 700)
    assert use["longest"]["spinning"] == 19 * 60
    assert use["quarters"]["watts"] == [612, 121, 121, 121]
    assert ("use", 7) in list(checked.journal.rows("SELECT kind, id FROM outbox"))


def slow(checked, standing="cleared IS NULL"):
    rows = checked.journal.rows(
        f"SELECT gpu, severity, job, message, details FROM finding WHERE source = 'gpu' AND {standing}"  # noqa: S608
    )
    return [(*row[:4], json.loads(row[4])) for row in rows]


def test_a_gpu_that_is_hot_is_slower_than_the_others_of_its_job_until_it_is_cool_or_the_job_ends(checked, folder):
    start(checked, 7, 0, 1, 2, 3)
    inject(folder, "crawls", 1110, 0x60, "--gpu", 3)
    play(checked, folder, 30, 1, gpu0="works", gpu1="works", gpu2="works")
    assert slow(checked) == []
    checked(NOW + 60 * 31)
    ((gpu, severity, job, message, details),) = slow(checked)
    assert (gpu, severity, job) == (3, "warning", 7)
    assert message == (
        "slower than the other GPUs of job 7: 1110 MHz at load, their median is 1755 MHz (63%), for 30 min;"
        " the reason is heat: have its cooling looked at"
    )
    whose = {"job": 7, "restart": 0, "since": round(NOW + 60), "seconds": 1800}
    assert details == {"clock": 1110, "median": 1755, "unit": "MHz", "reason": "heat", **whose}
    assert checked.journal.one("SELECT count(*) FROM finding WHERE severity = 'fault'") == (0,)
    play(checked, folder, 10, 32, gpu3="works")
    assert slow(checked) == []
    inject(folder, "crawls", 1110, 0x60, "--gpu", 3)
    play(checked, folder, 31, 42)
    assert len(slow(checked)) == 1
    end(checked, 7)
    checked(NOW + 60 * 73)
    assert (slow(checked), len(slow(checked, "cleared IS NOT NULL"))) == ([], 2)
    use = json.loads(checked.journal.one("SELECT gpus FROM jobuse")[0])[checked.uuids[3]]
    assert (use["model"], use["clock"], use["slow"]["percent"], use["slow"]["reason"]) == (
        "NVIDIA H100 80GB HBM3",
        1110,
        63,
        "heat",
    )


def test_application_clocks_of_one_gpu_are_said_and_are_no_warning(checked, folder):
    start(checked, 7, 0, 1, 2)
    inject(folder, "crawls", 1305, 2, "--gpu", 1)
    play(checked, folder, 31, 1, gpu0="works", gpu2="works")
    ((gpu, severity, _, message, _),) = slow(checked)
    assert (gpu, severity) == (1, "info")
    assert message.endswith("its application clocks were set lower: nvidia-smi -rac takes that back")


def test_what_tests_and_what_a_job_say_of_slow_gpus_do_not_end_each_other(checked, folder):
    start(checked, 7, 0, 1, 2)
    inject(folder, "crawls", 1110, 0x60, "--gpu", 1)
    text = ", ".join(f"{checked.uuids[gpu][:12]} dcgm.gflops 41.2 52.1 TFLOPS" for gpu in (1, 5))
    told.note(checked.settings, checked.journal, text, NOW)
    play(checked, folder, 31, 1, gpu0="works", gpu2="works")
    assert [(one[0], "job 7" in one[3]) for one in slow(checked)] == [(1, True), (5, False)]
    end(checked, 7)
    checked(NOW + 60 * 32)
    assert [(one[0], "elsewhere" in one[3]) for one in slow(checked)] == [(1, True), (5, True)]
    told.note(checked.settings, checked.journal, "", NOW + 60 * 33)
    assert slow(checked) == []


def test_what_cannot_be_judged_is_said_once(checked, folder, capfd):
    start(checked, 7, 1, 2)
    start(checked, 8, 2)
    inject(folder, "mig", 1, "--gpu", 1)
    inject(folder, "nvml", "utilization", "unsupported", "--gpu", 1)
    for minute in range(1, 4):
        checked(NOW + 60 * minute)
    said = [line for line in capfd.readouterr().err.splitlines() if "can't be judged" in line]
    assert [line.rsplit(": ", 1)[1] for line in said] == ["it is in MIG mode", "several jobs share it"]
    jobs = checked.journal.get("use")
    assert {gpu["does"] for job in jobs.values() for gpu in job["gpus"].values()} == {"unknown"}


def test_readings_of_prologs_in_between_are_no_samples(checked):
    start(checked, 7, 2)
    for second in range(20):
        checked(NOW + 60 + second)
    assert checked.journal.get("use")[7, 0]["gpus"][checked.uuids[2]]["bins"][0][0] == 1


def test_a_clock_that_was_set_back_ends_what_stands_and_keeps_what_was_seen(checked, folder):
    start(checked, 7, 2)
    play(checked, folder, 60, 1, gpu2="works")
    play(checked, folder, 12, 61, gpu2="spins")
    before = checked.journal.get("use")[7, 0]["gpus"][checked.uuids[2]]
    for minute in range(5):
        checked(NOW - 36000 + 60 * minute)
    use = checked.journal.get("use")[7, 0]["gpus"][checked.uuids[2]]
    assert use["began"] == pytest.approx(NOW - 36000 - 71 * 60)
    assert (use["worked"], use["since"]) == (before["worked"], NOW - 36000)
    assert sum(one[0] for one in use["bins"]) == 72 + 5
    assert [one[5] is None for one in found(checked)] == [False]
    for minute in range(5, 13):
        checked(NOW - 36000 + 60 * minute)
    assert [one[4]["since"] for one in found(checked) if one[5] is None] == [round(NOW - 36000)]


def test_a_program_that_looked_at_the_clock_before_another_read_is_no_clock_that_was_set_back(checked, folder):
    start(checked, 7, 2)
    play(checked, folder, 9, 1, gpu2="works")
    before = checked.journal.get("use")
    checked(NOW + 60 * 9 - 1)
    assert checked.journal.get("use") == before


def test_what_breaks_in_the_samples_hides_no_fault_and_is_said_once(checked, folder, capfd):
    start(checked, 7, 2)
    inject(folder, "lost", "--gpu", 3)
    for minute in (1, 2):
        checked.journal.put("use", {(7, 0): {"gpus": {checked.uuids[2]: "of another version"}}})
        checked(NOW + 60 * minute)
    rows = checked.journal.rows("SELECT gpu FROM finding WHERE severity = 'fault' AND cleared IS NULL")
    assert set(rows) == {(3,)}
    assert capfd.readouterr().err.count("how the jobs use their GPUs could not be read") == 1
    checked(NOW + 180)
    assert checked.journal.get("use")[7, 0]["gpus"][checked.uuids[2]]["began"] == NOW + 180


def test_the_samples_go_with_the_next_pruning_after_the_last_job(checked):
    start(checked, 7, 2)
    checked(NOW + 60)
    checked.journal.prune(NOW)
    assert len(samples.ring(checked.journal, 0)) == 1
    end(checked, 7)
    checked(NOW + 120)
    assert len(samples.ring(checked.journal, 0)) == 1, "what led to a job's end can be read until then"
    checked.journal.prune(NOW)
    assert samples.ring(checked.journal, 0) == []


def test_without_a_job_nothing_of_this_is_imported(checked):
    given = checked.settings
    code = (
        "import sys; from slurm_gpuhealth.config.settings import Nvml, Paths, Settings\n"
        "from slurm_gpuhealth.hooks import check\nfrom slurm_gpuhealth.node.journal import open_journal\n"
        f"paths = Paths(state={given.paths.state!r}, run={given.paths.run!r}, proc={given.paths.proc!r})\n"
        f"settings = Settings(nvml=Nvml(library={given.nvml.library!r}), paths=paths); journal = open_journal(paths)\n"
        "check.watch.source(settings, journal, 'nvml', 1e9, 20.0)\n"
        "print([name for name in sys.modules if '.measure' in name or name.endswith('.samples')])"
    )

    def imported():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert imported() == "[]"
    start(checked, 7, 2)
    assert "slurm_gpuhealth.measure.use" in imported()
