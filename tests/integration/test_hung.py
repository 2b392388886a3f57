"""A job that stands still, on real Slurm: said while it lasts, gone when it works again, and in the job's record."""

import json

import pytest

from tests.fakes import node as fakes

LAB = {"nodes": 1, "gpus": 4, "dbd": False, "poll": "1h", "health_interval": 600}
HANG = '\n[hang]\nafter = "20s"\n'
STANDS = "SELECT gpu, details FROM finding WHERE source = 'job' AND code = 'stalled' AND job = ? AND cleared IS NULL"


@pytest.fixture
def lab(lab):
    lab.configure(HANG)
    return lab


def uses(lab, job):
    """What the job does with its GPUs, by NVML's index."""
    numbers = {gpu["uuid"]: gpu["index"] for gpu in fakes.load(str(lab.lab / "nodes/n1"))["gpus"]}
    found = (lab.journal("n1", "use") or {}).get((job, 0), {"gpus": {}})["gpus"]
    return {numbers[uuid]: one for uuid, one in found.items()}


def stands(lab, job):
    return {gpu: json.loads(details)["kind"] for gpu, details in lab.rows("n1", STANDS, job)}


def do(lab, **kinds):
    for gpu, kind in kinds.items():
        lab.inject("n1", kind, "--gpu", gpu[3:])


def test_a_job_that_stands_still_is_said_to_until_it_works_again_and_until_it_ends(lab):
    lab.touched.add("n1")
    job = lab.submit("sleep 600", gres="gpu:2")
    lab.wait(job, "RUNNING")
    lab.until(lambda: len(uses(lab, job)) == 2, "a sample of its GPUs")
    one, other = sorted(uses(lab, job))
    do(lab, **{f"gpu{one}": "works", f"gpu{other}": "works"})
    lab.until(lambda: all(len(gpu["worked"]) >= 3 for gpu in uses(lab, job).values()), "their usual power")
    do(lab, **{f"gpu{one}": "spins", f"gpu{other}": "idles"})
    lab.until(lambda: stands(lab, job) == {one: "spinning", other: "idle"}, "the finding of each GPU")
    said = lab.gpuhealth("n1", "status")
    assert f"{one}    {job}" in said
    assert "spinning" in said
    assert lab.state("n1") == "MIXED"  # not drained
    do(lab, **{f"gpu{other}": "works"})
    lab.until(lambda: stands(lab, job) == {}, "its end when one GPU works again")
    do(lab, **{f"gpu{other}": "spins"})
    lab.until(lambda: stands(lab, job) == {one: "spinning", other: "spinning"}, "the next one")
    lab.run("scancel", str(job))
    lab.until(lambda: lab.journal("n1", "use") is None, "the job's end")
    assert stands(lab, job) == {}
    ((gpus,),) = lab.rows("n1", "SELECT gpus FROM jobuse WHERE job = ? AND restart = 0", job)
    assert [use["usual"] for use in json.loads(gpus).values()] == [612, 612]
    assert all(use["longest"]["spinning"] >= 20 for use in json.loads(gpus).values())
