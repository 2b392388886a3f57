"""One real Slurm cluster for each file of tests, several files at a time; before each test all its nodes are healthy.

A file says in `LAB` what its cluster is like (`tests.lab.Lab`).
"""

import os
import zlib

import pytest
from xdist.scheduler import LoadScopeScheduling

from slurm_gpuhealth.config import settings
from tests.cluster import Cluster
from tests.daemons import until
from tests.lab import Lab, fresh, running

FIRST = ("accounting", "wave", "correlate", "correlate_store", "store", "reboot")
"""Files that take longest: they begin first, or all would wait for them at the end."""
PARTS = {"loop": 3, "escalate": 2, "ladder": 2}
"""Files of so many tests that they take turns on more than one cluster."""


class ByCluster(LoadScopeScheduling):
    """What shares a cluster runs in one worker of pytest-xdist."""

    def _split_scope(self, nodeid):
        file, _, test = nodeid.partition("::")
        return f"{file} {zlib.crc32(test.encode()) % PARTS.get(short(file), 1)}"


def short(file):
    """ "tests/integration/test_loop.py" → "loop"."""
    return os.path.basename(file)[len("test_") : -len(".py")]


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return ByCluster(config, log)


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(short(item.nodeid.partition("::")[0]), len(FIRST)))


@pytest.fixture(scope="session", autouse=True)
def _root():
    if os.geteuid() != 0:
        pytest.skip("real Slurm clusters, and daemons of other users, need root")


@pytest.fixture(scope="module")
def shared_lab(request):
    module = request.module
    name = module.__name__.rpartition("test_")[2].replace("_", "-")
    with running(Lab(fresh(name), **module.LAB)) as lab:
        yield lab


@pytest.fixture
def lab(shared_lab):
    """The file's cluster with every node healthy, in service and known to be so."""
    shared_lab.heal()
    return shared_lab


@pytest.fixture(scope="module")
def shared_cluster():
    """Slurm alone, without our programs."""
    with running(Cluster(fresh("slurm"), nodes=4, gpus=8, extra="RebootProgram=/bin/true")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    """It is tidied up after the test, and rebuilt by it where the test broke something and said so."""
    yield shared_cluster
    shared_cluster.cancel_all()
    for name in shared_cluster.names:
        if shared_cluster.state(name) != "IDLE":
            shared_cluster.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
    until(lambda: all(shared_cluster.state(name) == "IDLE" for name in shared_cluster.names), "idle nodes")


@pytest.fixture
def slurm(cluster):
    return settings.Slurm(conf=str(cluster.conf))
