"""Series of samples as jobs make them: which GPU is slower than the others of its job, since when, and why."""

import marshal
import random

import pytest

from slurm_gpuhealth.config.settings import Hang, Slow
from slurm_gpuhealth.measure import clocks, hang, use

HANG, SLOW = Hang(), Slow()
H100 = {"limit": 700_000, "temperature": 55, "reasons": 0, "processes": 1, "memory_utilization": 45}
WORK = {**H100, "utilization": 98, "power": 610_000, "clock": 1755}
GPUS = {
    "W": WORK,
    "C": {**WORK, "reasons": 4, "power": 699_000},  # at its power limit, as all GPUs that have much to do
    "H": {**WORK, "clock": 1110, "reasons": 0x60, "power": 380_000, "temperature": 89},
    "h": {**WORK, "clock": 1110, "reasons": 0x48, "power": 380_000},
    "B": {**WORK, "clock": 870, "reasons": 0x88, "power": 300_000},
    "d": {**WORK, "clock": 870, "reasons": 0x08, "power": 300_000},
    "P": {**WORK, "clock": 1200, "reasons": 4, "limit": 400_000, "power": 399_000},
    "p": {**WORK, "clock": 1200, "reasons": 4},  # capped at the same limit as the others
    "A": {**WORK, "clock": 1305, "reasons": 2, "power": 450_000},
    "a": {**WORK, "clock": 1305, "reasons": 0x42},
    "N": {**WORK, "clock": 1300},
    "9": {**WORK, "clock": 1600},  # 91 % of the others'
    "8": {**WORK, "clock": 1530},  # 87 %
    "S": {**H100, "utilization": 100, "memory_utilization": 0, "power": 121_000, "clock": 1980},
    "I": {**H100, "utilization": 0, "memory_utilization": 0, "power": 113_000, "clock": 1980},
    "E": {**H100, "utilization": 0, "memory_utilization": 0, "power": 71_000, "clock": 345, "processes": 0},
    "L": {**WORK, "utilization": 60, "clock": 1200},
    "-": None,
    "M": {key: value for key, value in {**WORK, "clock": 1110}.items() if key != "utilization"},  # MIG
    "x": {key: value for key, value in WORK.items() if key != "clock"},
    "v": {**WORK, "clock": 1095, "limit": 400_000, "power": 330_000, "model": "A100"},
    "V": {**WORK, "clock": 600, "limit": 400_000, "power": 250_000, "reasons": 0x40, "model": "A100"},
}


def follow(phases, every=60.0, seed=0, whys=None):
    """Play phases, "60 WWWH": minutes and a letter of GPUS for each GPU. Returns the job and, by minute, which GPUs
    are said to be slow and why."""
    rng = random.Random(seed)  # noqa: S311
    job, said, last, now = hang.begin(), [], None, 1e9
    end = now
    for phase in phases.split(", "):
        minutes, gpus = phase.split()
        end += int(minutes) * 60
        models = {str(at): (GPUS[letter] or {}).get("model", "H100") for at, letter in enumerate(gpus)}
        while now < end:
            seen = {str(at): noisy(GPUS[letter], rng) for at, letter in enumerate(gpus)}
            job = hang.add(job, now, seen, whys or {}, HANG)
            job = clocks.add(job, now, seen, models, now - last if last else 0.0, SLOW)
            said.append((round((now - 1e9) / 60), {uuid: one["reason"] for uuid, one in clocks.judge(job)}))
            last, now = now, now + every + rng.uniform(-1, 1)
    return job, said


def noisy(seen, rng):
    return {**seen, "clock": seen["clock"] + rng.choice((-15, 0, 15))} if seen and "clock" in seen else seen


def said(phases, **options):
    """When a GPU was first said to be slow, all that was ever said, and what is said at the end."""
    found = follow(phases, **options)[1]
    first = next((minute for minute, one in found if one), None)
    ever = {f"{uuid} {reason}" for _, one in found for uuid, reason in one.items()}
    return first, ever, found[-1][1]


IS_SLOW = {  # from the first minute on, all the time
    "one GPU is hot": ("60 WWWH", "3 heat"),
    "one of eight is hot, the others are capped": ("60 CCCCCCCh", "7 heat"),
    "one of three is hot": ("60 WHW", "1 heat"),
    "two of eight are hot": ("60 WHWWWWhW", "1 heat, 6 heat"),
    "half of them are hot": ("60 WWHH", "2 heat, 3 heat"),
    "the power brake of one GPU": ("60 WWWB", "3 power brake"),
    "the hardware slows down and does not say why": ("60 WWWd", "3 slowdown"),
    "a power limit on one GPU, the others have none": ("60 WWWP", "3 power cap"),
    "a power limit on one GPU, the others reach theirs": ("60 CCCP", "3 power cap"),
    "all are at the same limit, and one is slow": ("60 CCCp", "3 none"),
    "no reason": ("60 WWWN", "3 none"),
    "a little below nine tenths": ("60 WWWWW8", "5 none"),
    "application clocks on one GPU": ("60 WWWA", "3 application clocks"),
    "application clocks on one GPU, and heat": ("60 WWWa", "3 heat"),
    "an idle GPU beside": ("60 WWWHI", "3 heat"),
    "a GPU that waits beside": ("60 WWWHS", "3 heat"),
    "a GPU that is lost beside": ("60 WWWH-", "3 heat"),
    "another model beside": ("60 WWWHv", "3 heat"),
    "one slow GPU in each of two models": ("60 WWWHvvvV", "3 heat, 7 heat"),
    "the driver's bits come and go": (", ".join(["2 WWWN, 1 WWWH"] * 20), "3 heat"),
}
NOT_SLOW = {
    "all work": "300 WWWW",
    "all are hot": "300 HHHH",
    "all have the power brake": "300 BBBB",
    "application clocks on all": "300 AAAA",
    "two GPUs, one is hot": "300 WH",
    "a single GPU": "300 H",
    "two work and a third is idle": "300 WHI",
    "two work and a third waits": "300 WHS",
    "one GPU is idle": "300 WWWI",
    "one GPU has no process": "300 WWWE",
    "one GPU has little to do": "300 WWWL",
    "one works at its power limit, the others wait at a high clock": "60 CCCC, 300 pSSS",
    "MIG": "300 WWWM",
    "a driver that does not tell the clocks": "300 xxxx",
    "nine tenths": "300 WWWW9",
    "two models of different clocks": "300 WWWvvv",
    "two models, and only two of the hot one": "300 WWWvV",
    "hot for 29 minutes": "60 WWWW, 29 WWWH, 60 WWWW",
    "hot for 20 minutes of each 40": ", ".join(["20 WWWH, 20 WWWW"] * 8),
    "each GPU is slow in turn": ", ".join(["10 HWWW, 10 WHWW, 10 WWHW, 10 WWWH"] * 5),
    "the GPU that is lost": "300 WWW-",
}


@pytest.mark.parametrize("name", IS_SLOW)
def test_a_slow_gpu_is_named_with_the_reason_after_half_an_hour(name):
    phases, expected = IS_SLOW[name]
    first, _, last = said(phases)
    assert {f"{uuid} {reason}" for uuid, reason in last.items()} == set(expected.split(", "))
    assert first in (30, 31)


@pytest.mark.parametrize("name", NOT_SLOW)
def test_other_jobs_have_no_slow_gpu(name):
    assert said(NOT_SLOW[name])[:2] == (None, set())


@pytest.mark.parametrize("seed", range(10))
def test_the_intervals_between_checks_do_not_matter(seed):
    every = random.Random(seed).uniform(31, 500)  # noqa: S311
    first, ever, _ = said("90 WWWHWWWW", every=every, seed=seed)
    assert (30 <= first <= 30 + every / 30, ever) == (True, {"3 heat"})


def test_a_gpu_that_several_jobs_share_is_not_compared():
    assert said("60 WWWH", whys={"3": "several jobs share it"})[1] == set()


def test_it_ends_after_ten_minutes_at_the_others_clock_and_not_while_it_is_idle():
    found = dict(follow("60 WWWH, 60 WWWI, 5 WWWW, 5 WWWH, 30 WWWW")[1])
    assert all(found[minute] == {"3": "heat"} for minute in range(31, 135))
    assert found[145] == {}


def test_it_is_slow_at_nearly_each_sample_and_that_is_enough():
    first, ever, _ = said(", ".join(["9 WWWH, 1 WWWW"] * 12))
    assert (30 < first < 60, ever) == (True, {"3 heat"})


def test_the_details_are_of_the_time_that_it_was_slow():
    (found,) = [one for _, one in clocks.judge(follow("60 WWWW, 40 WWWH")[0])]
    assert abs(found["clock"] - 1110) <= 8
    assert abs(found["median"] - 1755) <= 8
    assert abs(found["since"] - (1e9 + 3600)) <= 120
    assert abs(found["seconds"] - 2400) <= 120
    assert (found["unit"], found["reason"]) == ("MHz", "heat")


def test_the_summary_has_the_clock_at_load_and_how_long_it_was_slow():
    job, _ = follow("60 WWWW, 30 IIII, 50 WWWH, 30 WWWW")
    good, bad = (clocks.summary(job["gpus"][uuid]) for uuid in "03")
    assert (good["clock"], "slow" in good) == (1740, False)
    assert abs(good["load"] - 140 * 60) < 300
    assert abs(bad["slow"].pop("seconds") - 3000) < 120
    assert bad["slow"]["percent"] in (63, 64)
    assert bad["slow"]["reason"] == "heat"
    assert clocks.summary(follow("9 EEE")[0]["gpus"]["0"]) == {"load": 0}


def test_a_gpu_that_was_never_said_to_be_slow_has_no_such_time_in_its_summary():
    job, _ = follow("60 WWWW, 29 WWWH, 60 WWWW")
    assert job["gpus"]["3"]["slow"] is None
    assert "slow" not in clocks.summary(job["gpus"]["3"])


def test_what_is_kept_does_not_grow_with_the_job():
    rng, job = random.Random(1), hang.begin()  # noqa: S311
    for minute in range(5000):
        seen = {f"{at}": {**WORK, "clock": rng.randrange(345, 1995, 15)} for at in range(3)}
        job = clocks.add(hang.add(job, minute * 60.0, seen, {}, HANG), minute * 60.0, seen, {}, 60.0, SLOW)
    own = [{key: one[key] for key in ("clocks", "slow")} for one in job["gpus"].values()]
    assert all(len(marshal.dumps(one)) < 1500 for one in own)


def test_a_use_from_before_an_upgrade_is_taken_over():
    assert clocks.summary(use.begin(0.0)) == {"load": 0}
