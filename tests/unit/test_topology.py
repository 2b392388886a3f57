"""Leaves of `scontrol show topology`."""

import pytest

from slurm_gpuhealth.config.settings import Accounting, Settings, Slurm
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import control, topology

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]
"""
BLOCK = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
BlockName=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
"""


@pytest.mark.parametrize(("text", "names"), [(TREE, ("s0", "s1")), (BLOCK, ("b1", "b2"))])
def test_only_leaves_count(text, names):
    assert topology.read(text) == {names[0]: ["n1", "n2"], names[1]: ["n3", "n4"]}


def asked(tmp_path, text):
    path = tmp_path / "scontrol"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return replace(Settings(), slurm=Slurm(scontrol=str(path)))


@pytest.mark.parametrize("code", [0, 1])
def test_a_cluster_without_topology_has_no_leaves(tmp_path, code):
    said = "scontrol: error: No topology information available"
    assert topology.leaves(asked(tmp_path, f"echo '{said}' >&2; exit {code}")) == {}


def test_a_controller_that_is_away_is_no_missing_topology(tmp_path):
    with pytest.raises(control.ControllerDown):
        topology.leaves(asked(tmp_path, "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"))


def test_who_does_not_answer_is_slurmctld_and_not_accounting(tmp_path):
    hangs = asked(tmp_path, "exec sleep 60")
    with pytest.raises(control.ControllerDown, match=r"is slurmctld up"):
        topology.leaves(replace(hangs, accounting=Accounting(timeout=0.2)))
