"""Fixtures of many unit tests: enforcing settings, an empty journal, a stand-in GPU node; and no randomness."""

import gc
import os
import shutil

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as trials

from slurm_gpuhealth.config.settings import Paths, Row, Settings, Slurm
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm import control
from tests.fakes import node

MEMORY = "/dev/shm"

# The same examples each time, so that a change passes or fails repeatably. For new examples: `make soak`.
trials.register_profile("same", max_examples=50, derandomize=True, database=None)
trials.register_profile("new", max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
trials.load_profile(os.environ.get("GPUHEALTH_TRIALS", "same"))


def pytest_configure():
    """Keep journals and stores in memory if there is room: then no write waits for a disk."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def pytest_collection_finish():
    """Exclude the 4,000 collected tests from garbage collection."""
    gc.freeze()


@pytest.fixture
def settings(tmp_path):
    """Every finding is a fault and drains. Paths are below `tmp_path`, with a boot id. No real Slurm is asked."""
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("boot\n")
    paths = Paths(state=str(tmp_path / "s"), run=str(tmp_path / "r"), proc=str(tmp_path / "proc"))
    slurm = Slurm(**dict.fromkeys(("scontrol", "sinfo", "squeue", "slurmd"), "/bin/false"))
    return Settings(mode="enforce", paths=paths, slurm=slurm, policy=(Row("*", "fault", rung="L3"),))


@pytest.fixture
def journal(settings):
    return open_journal(settings.paths)


@pytest.fixture
def folder(tmp_path):
    """The folder of a stand-in node with 8 healthy GPUs."""
    node.make_node(str(tmp_path), "n1", seed=7)
    return tmp_path


@pytest.fixture(autouse=True)
def no_slurmdbd(monkeypatch):
    """The slurmdbd of this machine is never asked."""
    monkeypatch.setattr(control, "events", lambda *_: [])
