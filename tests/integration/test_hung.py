"""A job that stands still, on real Slurm: said while it lasts, gone when it works again, and in the job's record;
on the controller, if it stands still on all its nodes."""

import json

import pytest

from tests.fakes import node as fakes

LAB = {"nodes": 2, "gpus": 8, "dbd": False, "poll": "1h", "health_interval": 600}
AFTER = 20.0
CONFIG = """
[hang]
after = "20s"
[store]
url = "file://{lab}/shared"
database = "{lab}/controller/cluster.db"
"""
STANDS = "SELECT gpu, details FROM finding WHERE source = 'job' AND code = 'stalled' AND job = ? AND cleared IS NULL"


@pytest.fixture
def lab(lab):
    (lab.lab / "shared").mkdir(exist_ok=True)
    lab.configure(CONFIG.format(lab=lab.lab))
    return lab


def uses(lab, job, node="n1"):
    """What the job does with its GPUs, by NVML's index."""
    numbers = {gpu["uuid"]: gpu["index"] for gpu in fakes.load(str(lab.lab / "nodes" / node))["gpus"]}
    found = (lab.journal(node, "use") or {}).get((job, 0), {"gpus": {}})["gpus"]
    return {numbers[uuid]: one for uuid, one in found.items()}


def stands(lab, job):
    return {gpu: json.loads(details)["kind"] for gpu, details in lab.rows("n1", STANDS, job)}


def hung(lab, job):
    """What the controller says of the job, after it has read the nodes' records."""
    lab.gpuhealth("n1", "correlate")
    said = [json.loads(line) for line in lab.gpuhealth("n1", "hung", "--json").splitlines()]
    return next((one for one in said if one["job"] == job), None)


def do(lab, **kinds):
    for gpu, kind in kinds.items():
        lab.inject("n1", kind, "--gpu", gpu[3:])


def test_a_job_that_stands_still_is_said_to_until_it_works_again_and_until_it_ends(lab):
    lab.touched.add("n1")
    job = lab.submit("sleep 600", gres="gpu:2", nodelist="n1")
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


def test_a_job_that_stands_still_on_both_its_nodes_is_found_and_the_gpu_that_does_not_wait_is_named(lab):
    lab.touched |= {"n1", "n2"}
    job = lab.submit("sleep 600", nodes=2, gres="gpu:8")
    lab.wait(job, "RUNNING")
    lab.inject_all(lab.names, "works")
    lab.until(
        lambda: all(
            len(gpu["worked"]) >= 3 for node in lab.names for gpu in uses(lab, job, node).values() or [{"worked": ""}]
        ),
        "the usual power of all GPUs",
    )
    assert hung(lab, job) is None
    lab.inject_all(lab.names, "spins")
    lab.inject("n2", "idles", "--gpu", 5)
    lab.inject("n2", "ecc", 2, "--gpu", 5)
    checks = {node: set() for node in lab.names}

    def told():
        for node in lab.names:
            checks[node].add(lab.journal(node, "checked"))
        return all(len(lab.rows(node, STANDS, job)) == 8 for node in lab.names)

    lab.until(told, "both nodes' findings")
    for node in lab.names:
        ((first,),) = lab.rows(node, "SELECT min(time) FROM finding WHERE code = 'stalled' AND job = ?", job)
        quiet = max(json.loads(details)["since"] for _, details in lab.rows(node, STANDS, job))
        late = [when for when in checks[node] if when and quiet + AFTER + 1 <= when < first]
        assert len(late) <= 2, (quiet, first, late)
    found = lab.until(lambda: hung(lab, job), "the controller's word")
    assert (found["waiting"], found["gpus"], found["cause"]) == (15, 16, "node")
    assert (found["node"], found["gpu_index"]) == ("n2", 5)
    assert [(one["node"], one["gpu"]) for one in found["different"]] == [("n2", 5)]
    assert "15 of 16  spinning" in lab.gpuhealth("n1", "hung")
    assert "n2 GPU5: nvml:ecc" in lab.gpuhealth("n1", "hung")
    lab.inject_all(lab.names, "works")
    lab.until(lambda: hung(lab, job) is None, "the end when it works again")
    assert "No running job of several GPUs stands still" in lab.gpuhealth("n1", "hung")
