"""What many unit tests begin with: enforcing settings, an empty journal, a stand-in GPU node."""

import pytest

from slurm_gpuhealth.config.settings import Paths, Row, Settings
from slurm_gpuhealth.node.journal import open_journal
from tests.fakes import node


@pytest.fixture
def settings(tmp_path):
    """Everything is a fault and drains; paths below `tmp_path`, with a boot id."""
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("boot\n")
    paths = Paths(state=str(tmp_path / "s"), run=str(tmp_path / "r"), proc=str(tmp_path / "proc"))
    return Settings(mode="enforce", paths=paths, policy=(Row("*", "fault", rung="L3"),))


@pytest.fixture
def journal(settings):
    return open_journal(settings.paths)


@pytest.fixture
def folder(tmp_path):
    """The folder of a stand-in node with 8 healthy GPUs."""
    node.make_node(str(tmp_path), "n1", seed=7)
    return tmp_path
