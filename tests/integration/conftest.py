"""One real Slurm cluster for all integration tests, with every node in service and no job before each test."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from slurm_gpuhealth.config import settings
from tests.cluster import Cluster
from tests.daemons import until


@pytest.fixture(scope="session")
def shared_cluster():
    if os.geteuid() != 0:
        pytest.skip("a real Slurm cluster needs root")
    lab = Path(tempfile.mkdtemp(prefix="gpuhealth-", dir="/tmp"))  # short: sockets below it have 107 bytes
    lab.chmod(0o755)
    try:
        with Cluster(lab, nodes=4, gpus=8, extra="RebootProgram=/bin/true") as cluster:
            yield cluster
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(lab, ignore_errors=True)


@pytest.fixture
def cluster(shared_cluster):
    """The shared cluster, tidied up after the test, and rebuilt by it where the test broke something and said so."""
    yield shared_cluster
    shared_cluster.cancel_all()
    for name in shared_cluster.names:
        if shared_cluster.state(name) != "IDLE":
            shared_cluster.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
    until(lambda: all(shared_cluster.state(name) == "IDLE" for name in shared_cluster.names), "idle nodes")


@pytest.fixture
def slurm(cluster):
    return settings.Slurm(conf=str(cluster.conf))


def pytest_terminal_summary(terminalreporter):
    """What passed only when it was run again is shown as a failure is: a stalled machine, or a fault that is rare."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"run again: {report.nodeid}", "_")
        terminalreporter.line(report.longreprtext)
