"""Series of samples as jobs make them: which of them stand still, since when, and what is said of each GPU."""

import random

import pytest

from slurm_gpuhealth.config.settings import Hang
from slurm_gpuhealth.measure import hang, use

HANG = Hang()
H100 = {"limit": 700_000, "temperature": 55, "reasons": 0, "processes": 1, "clock": 1980, "memory_utilization": 0}
WORK = {**H100, "utilization": 98, "memory_utilization": 45, "power": 610_000}
SPIN = {**H100, "utilization": 100, "power": 121_000}
IDLE = {**H100, "utilization": 0, "power": 113_000}
COMPUTE = {**WORK, "memory_utilization": 2}
LIGHT = {**H100, "utilization": 24, "memory_utilization": 7, "power": 138_000}
GPUS = {
    "W": WORK,
    "S": SPIN,
    "I": IDLE,
    "E": {**IDLE, "processes": 0, "power": 71_000},
    "-": None,  # lost
    "a": {**WORK, "limit": 400_000, "power": 330_000},  # an A100 that works, and one that spins
    "b": {**SPIN, "limit": 400_000, "power": 71_000},
    "C": COMPUTE,  # hardly reads its memory
    "M": {**WORK, "memory_utilization": 70, "power": 290_000},  # bound by memory
    "L": LIGHT,
    "m": {**LIGHT, "utilization": 60},
    "k": {**SPIN, "memory_utilization": 3, "power": 190_000},
    "Q": {**WORK, "power": 250_000},
    "q": {**WORK, "power": 118_000},
    "P": {**WORK, "limit": 200_000, "power": 199_000, "reasons": 4},
    "p": {**COMPUTE, "limit": 200_000, "power": 199_000, "reasons": 4},
    "H": {**COMPUTE, "power": 210_000, "reasons": 0x40},
    "B": {**COMPUTE, "power": 180_000, "reasons": 0x88},
}
UNKNOWN = {  # a driver that does not tell
    "w": (WORK, "memory_utilization"),
    "s": (SPIN, "memory_utilization"),
    "o": (IDLE, "utilization"),
    "n": (SPIN, "power"),
    "h": ({**WORK, "memory": 60_000}, "processes"),
    "i": ({**IDLE, "memory": 60_000}, "processes"),
}
GPUS |= {
    letter: {key: value for key, value in one.items() if key != not_told} for letter, (one, not_told) in UNKNOWN.items()
}


def follow(phases, every=60.0, seed=0):
    """Play phases, "60 WW, 30 SI": minutes and a letter of GPUS for each GPU, with a little noise. Returns what was
    said, if anything, by minute: (minute, {GPU: (code, kind)})."""
    rng = random.Random(seed)  # noqa: S311
    job, said, now, begin = hang.begin(), [], 1e9, 1e9
    end = begin
    for phase in phases.split(", "):
        minutes, gpus = phase.split()
        end += int(minutes) * 60
        while now < end:
            seen = {f"GPU{number}": noisy(GPUS[letter], rng) for number, letter in enumerate(gpus)}
            job = hang.add(job, now, seen, {}, HANG)
            found = {uuid: (code, details["kind"]) for uuid, code, details in hang.judge(job, now, HANG)}
            said.append((round((now - begin) / 60), found))
            now += every + rng.uniform(-1, 1)
    return [one for one in said if one[1]]


def noisy(seen, rng):
    return {**seen, "power": round(seen["power"] * rng.uniform(0.97, 1.03))} if seen and "power" in seen else seen


def said(phases, **options):
    """When something was said first, and all that was."""
    found = follow(phases, **options)
    kinds = {f"{uuid} {code} {kind}" for _, one in found for uuid, (code, kind) in one.items()}
    return found[0][0] if found else None, kinds


HANGS = {  # the last phase is the hang; kind by GPU
    "all spin in a collective": ("60 WW, 30 SS", "0 spinning, 1 spinning"),
    "one is idle, the rest spin": ("60 WWW, 30 ISS", "0 idle, 1 spinning, 2 spinning"),
    "all are idle": ("60 WW, 30 II", "0 idle, 1 idle"),
    "one is lost, the rest spin": ("60 WW, 30 -S", "1 spinning"),
    "one process has died, the rest spin": ("60 WW, 30 ES", "1 spinning"),
    "a single GPU spins": ("60 W, 30 S", "0 spinning"),
    "an A100 that spins at 71 W": ("60 aa, 30 bb", "0 spinning, 1 spinning"),
    "an H100 that works at 250 W": ("60 Q, 30 S", "0 spinning"),
    "after a data load of an hour": ("60 II, 60 WW, 30 SS", "0 spinning, 1 spinning"),
    "one GPU was never used": ("60 EW, 30 ES", "1 spinning"),
    "in the first collective, after a short load": ("5 LL, 600 SS", "0 spinning, 1 spinning"),
    "in the first collective, a sample after the load": ("1 LL, 600 SS", "0 spinning, 1 spinning"),
    "after a load, on GPUs that were seen empty": ("2 EE, 5 LL, 600 SS", "0 spinning, 1 spinning"),
    "after a moment of work": ("1 WW, 600 SI", "0 spinning, 1 idle"),
    "after checkpoints of 3 min": ("30 WW, 3 II, 30 WW, 3 II, 30 WW, 30 SI", "0 spinning, 1 idle"),
    "a notebook that has memory and waits for its user": ("20 W, 300 I", "0 idle"),
    "a driver that does not tell memory traffic": ("60 w, 30 s", "0 spinning"),
    "a driver that lists no processes": ("60 h, 30 i", "0 idle"),
}
NEVER = {
    "it spins from its first collective on": ("30 SS", "0 spinning, 1 spinning"),
    "it holds the memory and does nothing": ("150 I", "0 idle"),
    "it never opened the GPU": ("150 E", "0 empty"),
}
FINE = {
    "it works": "300 WW",
    "a checkpoint of 5 min": "60 WW, 5 II, 60 WW",
    "a checkpoint by one rank for 8 min": "60 WW, 8 IS, 60 WW",
    "a data load of 9 min": "60 W, 9 I, 60 W",
    "an evaluation on one GPU for 20 min, the others spin": "60 WW, 20 WS, 60 WW",
    "an evaluation on one GPU for 20 min, the others are idle": "60 WW, 20 WI, 60 WW",
    "an evaluation on one GPU for 20 min, bound by memory": "60 WW, 20 MS, 60 WW",
    "an evaluation on all GPUs, bound by memory": "60 WW, 40 MM, 60 WW",
    "GPUs that work in turns": ", ".join(["8 WS, 8 SW"] * 8),
    "it breathes, a minute each": ", ".join(["1 W, 1 I"] * 60),
    "it breathes, 7 min each": ", ".join(["7 W, 7 I"] * 10),
    "it ends, and its processes are gone": "60 WW, 30 EE",
    "inference with little to do": ", ".join(["1 L, 1 I, 1 L, 2 I, 1 L"] * 40),
    "inference on one of two GPUs": ", ".join(["1 LI, 1 II, 2 LI"] * 40),
    "a power limit of 200 W": "60 W, 60 P",
    "a power limit of 200 W, without memory traffic": "60 C, 60 p",
    "throttled by heat": "60 C, 60 H",
    "throttled by the power brake": "60 C, 60 B",
    "the CPUs prepare for an hour": "60 II, 60 WW",
    "it tries the GPUs, then the CPUs prepare for an hour": "1 WW, 60 II, 60 WW",
    "it loads, waits for the last rank, works": "5 LL, 8 SS, 60 WW",
    "a debugging session between its runs": "6 W, 45 E, 6 W, 100 E",
    "a debugging session that has not run anything yet": "110 E",
    "a small model": "300 m",
    "a small kernel that is always there": "300 k",
    "half of its GPUs are never used": "300 WWEE",
    "one GPU works for hours at the end": "60 WW, 300 WE",
    "one GPU is lost, the other works": "60 WW, 60 -W",
    "MIG": "300 o",
    "an old driver that does not tell the power": "300 n",
    "a usual power that is hardly above idle power": "60 q, 60 S",
}


@pytest.mark.parametrize("name", HANGS)
def test_a_job_that_stands_still_is_said_to_and_not_before_its_time(name):
    phases, kinds = HANGS[name]
    first, found = said(phases)
    assert found == {"GPU{} stalled {}".format(*one.split()) for one in kinds.split(", ")}
    begin = sum(int(phase.split()[0]) for phase in phases.split(", ")[:-1])
    assert begin + 10 <= first <= begin + 12


@pytest.mark.parametrize("name", NEVER)
def test_a_job_that_never_worked_is_said_to(name):
    phases, kinds = NEVER[name]
    first, found = said(phases)
    assert found == {"GPU{} never-started {}".format(*one.split()) for one in kinds.split(", ")}
    assert first in ((10, 11) if "spinning" in kinds else (120, 121))


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("every", [60.0, 150.0])
def test_of_a_job_that_works_nothing_is_said(name, every):
    assert said(FINE[name], every=every) == (None, set())


def test_a_job_that_worked_for_a_moment_and_is_idle_is_said_to_stand_still_after_hang_start():
    first, found = said("1 WW, 300 II")
    assert found == {"GPU0 stalled idle", "GPU1 stalled idle"}
    assert first in (121, 122)


def test_it_ends_when_one_gpu_works_again():
    minutes = [minute for minute, _ in follow("60 WW, 20 SS, 1 WS, 5 SS")]
    assert minutes == list(range(minutes[0], 80))
    assert minutes[0] in (70, 71)


def test_a_job_is_given_twice_its_longest_pause():
    first, _ = said("40 W, 9 I, 60 W, 60 I")
    assert first in (109 + 18, 109 + 19)
    minutes = [minute for minute, _ in follow("40 W, 90 I, 60 W, 90 I")]
    assert minutes[0] in (50, 51), "nothing is known of this job yet"
    assert next(one for one in minutes if one > 190) in (190 + 40, 190 + 41)


def test_since_is_when_each_gpu_stopped():
    job, now = hang.begin(), 1000.0
    for minute in range(90):
        gpus = {"a": WORK if minute < 30 else SPIN, "b": WORK if minute < 40 else IDLE}
        job = hang.add(job, now + 60 * minute, gpus, {}, HANG)
    since = {uuid: details["since"] for uuid, _, details in hang.judge(job, now + 60 * 89, HANG)}
    assert since == {"a": 1000 + 30 * 60, "b": 1000 + 40 * 60}


def test_a_time_without_samples_is_no_standstill():
    job, now = hang.begin(), 1000.0
    for minute in [*range(30), 31, 95, 96]:
        job = hang.add(job, now + 60 * minute, {"a": WORK if minute < 30 else SPIN}, {}, HANG)
    assert hang.judge(job, now + 60 * 96, HANG) == []


def test_a_gpu_that_cannot_be_judged_keeps_the_others_from_being_judged():
    job, now = hang.begin(), 1000.0
    for minute in range(60):
        gpus = {"a": WORK if minute < 30 else SPIN, "b": WORK if minute < 30 else SPIN}
        job = hang.add(job, now + 60 * minute, gpus, {"b": "several jobs share it"}, HANG)
    assert hang.judge(job, now + 60 * 59, HANG) == []
    assert job["gpus"]["b"]["why"] == "several jobs share it"


@pytest.mark.parametrize(("work", "mean"), [(WORK, 300_000), (LIGHT, 138_000)])
def test_the_energy_since_the_last_sample_shows_work_that_the_samples_miss(work, mean):
    job, now, energy = hang.begin(), 1000.0, 0
    for minute in range(90):
        energy += mean * 60
        job = hang.add(job, now + 60 * minute, {"a": {**(work if minute < 9 else IDLE), "energy": energy}}, {}, HANG)
    assert hang.judge(job, now + 60 * 89, HANG) == []
    for minute, strange in ((90, {"energy": 0}), (91, {"energy": 1 << 50}), (92, {})):
        job = hang.add(job, now + 60 * minute, {"a": {**IDLE, **strange}}, {}, HANG)
        assert job["gpus"]["a"]["watts"] == 113, "a counter that was reset, or leaps, counts for nothing"


def test_the_summary_of_a_long_job_is_as_small_as_that_of_a_short_one():
    one = use.begin(0.0)
    for minute in range(7 * 24 * 60):
        quarter = minute * 4 // (7 * 24 * 60)
        seen = {**WORK, "power": (100 + 100 * quarter) * 1000, "reasons": 0x44 if quarter == 3 else 0}
        one = use.add(one, minute * 60.0, seen, 0.5, 600.0)
    found = use.summary(one)
    assert found["quarters"]["watts"] == [100, 200, 300, 400]
    assert found["quarters"]["clock"] == [1980] * 4
    assert found["throttled"] == {"power cap": 0.25, "thermal": 0.25}
    assert found["longest"] == {"working": 604740}
    assert use.BINS / 2 <= len(found["series"]["watts"]) <= use.BINS
    assert found["every"] * len(found["series"]["watts"]) == pytest.approx(604800, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_no_job_with_short_pauses_stands_still_and_each_hang_is_seen(seed):
    rng = random.Random(seed)  # noqa: S311
    gpus = rng.choice([1, 2, 4, 8])
    work, wait = rng.choice(["W", "C", "m", "L", "Q"]), "ISE-"

    def pause(most):
        """Of all GPUs for less than `most` minutes, or of all but one for as long as it likes."""
        if gpus > 1 and rng.random() < 0.5:
            at = rng.randrange(gpus)
            return f"{rng.randint(1, 120)} " + "".join(work if one == at else rng.choice(wait) for one in range(gpus))
        return f"{rng.randint(1, most)} " + "".join(rng.choice(wait) for _ in range(gpus))

    phases = [f"{rng.randint(0, 100)} {'I' * gpus}", f"{rng.randint(10, 200)} {work * gpus}"]
    for _ in range(12):
        phases += [pause(8), f"{rng.randint(1, 90)} {work * gpus}"]
    assert said(", ".join(phases), seed=seed) == (None, set())
    phases.append("60 I" + "S" * (gpus - 1))
    begin = sum(int(phase.split()[0]) for phase in phases[:-1])
    assert begin + 10 <= said(", ".join(phases), seed=seed)[0] <= begin + 20
