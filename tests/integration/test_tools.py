"""Other tools' tests on real Slurm: asked for by name, they run on the node, and what they measure is kept there."""

import subprocess

import pytest

from tests.fakes import node as fakes
from tests.lab import BIN

LAB = {"nodes": 1, "dbd": False}

TESTS = """
[[test]]
name = "nccl"
command = ["{folder}/all_reduce_perf", "-b", "512M", "-e", "8G", "-f", "2", "-g", "{{gpus}}"]

[[test]]
name = "nvbandwidth"
command = ["{folder}/nvbandwidth", "-j", "-t", "host_to_device_memcpy_ce"]
"""


@pytest.fixture
def lab(lab):
    folder = lab.lab / "nodes/n1"
    lab.configure(TESTS.format(folder=folder))
    scenario = fakes.load(str(folder))
    scenario["dcgm"]["time_scale"] = 0.002
    fakes.save(str(folder), scenario)
    return lab


def test_named_tests_run_on_the_node_and_a_slow_gpu_is_a_warning_that_drains_nothing(lab):
    folder = str(lab.lab / "nodes/n1")
    scenario = fakes.load(folder)
    scenario["tools"] = {"slow": {scenario["gpus"][3]["uuid"]: 0.5}}
    fakes.save(folder, scenario)
    argv = [str(BIN / "gpuhealth-escalate"), "n1", "--test", "nccl,nvbandwidth"]
    env = {**lab.env, "GPUHEALTH_CONFIG": "/nowhere", "SLURMD_NODENAME": "login1"}
    asked = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lab.until(lambda: asked.poll() is not None, "the command's end", "n1")
    out, err = asked.communicate()
    assert (asked.returncode, out.startswith("n1: fit: L1 pass; it is in service")) == (0, True), (out, err)
    (message,) = lab.rows("n1", "SELECT message FROM step WHERE rung = 'L1'")[0]
    assert "nccl: pass (470.7 GB/s); nvbandwidth: slow, nvbandwidth.host_to_device_memcpy_ce 27.55 GB/s" in message
    found = lab.rows("n1", "SELECT gpu, severity FROM finding WHERE source = 'tool' AND cleared IS NULL")
    assert found == [(3, "warning")]
    assert lab.rows("n1", "SELECT count(*) FROM figure WHERE name LIKE 'nvbandwidth.%'") == [(8,)]
