"""Which nodes each leaf switch or block has: `scontrol show topology`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from slurm_gpuhealth.slurm import control, sacct

if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings

LEAF = re.compile(r"^SwitchName=(\S+) Level=0 .*?\bNodes=(\S+)|^BlockName=([^\s\[]+) .*?\bNodes=(\S+)", re.MULTILINE)
"""A switch of level 0 (topology/tree) or a base block (topology/block); not a switch or block that has others below."""
NONE = "No topology information available"
"""slurmctld's message for topology/none (22.05: on stderr, with exit 0)."""


def leaves(settings: Settings) -> dict[str, list[str]]:
    """Leaf → its nodes; empty without a topology plugin. Raises control.SlurmError."""
    try:
        return read(sacct.ask(settings, [settings.slurm.scontrol, "show", "topology"]))
    except control.Refused as error:
        if NONE in error.text:
            return {}
        raise


def read(text: str) -> dict[str, list[str]]:
    """What `scontrol show topology` prints."""
    found: dict[str, list[str]] = {}
    for switch, below, block, inside in LEAF.findall(text):
        found.setdefault(switch or block, []).extend(sacct.nodes_of(below or inside))
    return {leaf: list(dict.fromkeys(nodes)) for leaf, nodes in found.items() if nodes}
