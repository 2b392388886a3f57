"""The properties of simulated clusters: one row of numbers for each setting, with the source of the numbers.

The reference is calibrated so that hardware kills 3.8 jobs per 1000 node-days, as in the three published fleets: Meta
RSC 2.34 and 6.50 (arXiv 2410.21680), Llama 3 3.79 (arXiv 2407.21783), InfiniteHBD's trace 4.2. Rates are per day.
"""

from __future__ import annotations

from typing import NamedTuple

DAY = 86400.0


class Case(NamedTuple):
    """A cluster's size, load and faults, and how much of a fault is visible."""

    nodes: int = 512
    days: float = 60.0
    pod: int = 16
    """Nodes behind one leaf switch."""
    gpus: int = 8
    jobs: float = 1.37
    """Submissions per node and day, without arrays. They use more than half of the node time."""
    single: float = 0.9
    """Share of the jobs that use one node; the others use 86 % of the node time (similar to arXiv 2410.21680)."""
    users: int = 80
    applications: int = 3
    """Of each user."""
    failing: float = 0.12
    """The median application's failure probability; the logit's spread is 1."""
    arrays: float = 2.0
    """Arrays per day, each of 20 to 120 jobs that crash with probability .95."""
    ended: float = 0.07
    """Share of the jobs that end by their user or by the time limit."""

    fault_rate: float = 0.0025
    """A good node's faults per day of allocated time; log-normal over nodes."""
    lemons: float = 0.015
    """Share of the nodes that are lemons (Meta: 1.2 % of RSC-1)."""
    lemon_rate: float = 0.25
    """The median lemon's faults per day of allocated time."""
    leaf_rate: float = 0.0008
    """Incidents per leaf switch and day; each kills the multi-node jobs on the switch."""
    leaf_repeats: int = 1
    """How often an incident comes back within two days."""
    storms: float = 0.0
    """Storage incidents per day; each kills a third of all running jobs."""
    benign: float = 0.002
    """Hard events per day on a running node that harm no job."""
    app_xid: float = 0.05
    """Share of the application failures that leave an Xid 13, 31 or 43."""

    hard: float = 0.55
    node_fail: float = 0.35
    hardware_text: float = 0.25
    """Probabilities that a node's fault shows as a hard Xid, as NODE_FAIL, as a hardware error in the log."""
    lemon_hard: float | None = None
    lemon_node_fail: float | None = None
    """The same for a lemon's fault; None: as for any node."""
    named: float = 0.0
    """Share of the multi-node jobs killed by a node whose log names a host."""
    named_right: float = 0.85
    misnamed: float = 0.0
    """Share of the multi-node application failures whose log names a host."""

    skew: float = 0.0
    """Largest clock offset of a node, in seconds."""
    gpus_known: bool = True
    again: float = 0.0
    """Share of the attempts and events that are reported twice."""
    late: float = 0.0
    """Share of the events that arrive up to two hours late."""
    pinned: int = 0
    """Users with a node of their own and a 50 % failure rate. The first user's node is a lemon."""
    image_day: float | None = None
    """On this day, for twelve hours, half of all jobs die of the same error when they start."""
    repaired: float = 0.0
    """Share of the lemons that are repaired about ten days after their first day; a third of the repairs fail."""
    large: int = 1
    """A lemon fails only in jobs with at least this many nodes."""
    one_gpu: bool = False
    """A lemon is one GPU of its node, and single-node jobs use 1 to 8 GPUs, so nodes are shared."""
    sharing: bool = False
    idle_xids: float = 0.0
    """A lemon's hard Xids per day besides its failures."""
    hangs: float = 0.0
    """Share of node faults after which the job hangs until its time limit."""


class Lemon(NamedTuple):
    node: int
    since: float
    until: float
    rate: float
    """Faults a second of allocated time."""
    gpu: int | None = None
    """The one GPU that is bad; None: the node."""


_silent = Case(lemon_hard=0.1, lemon_node_fail=0.1)

CASES = {
    # The settings of the comparison
    "base": Case(),
    "arrays": Case(arrays=8),
    "lemons": Case(lemons=0.04),
    "silent": _silent,
    "silent-named-30": _silent._replace(named=0.3),
    "silent-named": _silent._replace(named=0.6),
    "none": Case(lemons=0.0),
    # Further troubles
    "named": Case(named=0.6),
    "misnamed": Case(named=0.3, misnamed=0.3),
    "skew": Case(skew=30.0),
    "blind": Case(gpus_known=False),
    "noisy": Case(again=0.2, late=0.2),
    "pinned": Case(pinned=6),
    "leaf": Case(leaf_rate=0.004, leaf_repeats=6),
    "storms": Case(storms=0.15),
    "image": Case(image_day=30.0),
    "repaired": Case(repaired=0.8),
    "large": Case(large=8, lemon_rate=0.5),
    "gpu": Case(one_gpu=True, sharing=True, lemon_rate=0.4),
    "shared": Case(sharing=True),
    "idle-xids": _silent._replace(idle_xids=0.1),
    "hangs": Case(hangs=0.4),
    "crashing": Case(failing=0.4, arrays=8),
    "quiet": Case(lemons=0.0, failing=0.4, arrays=8, leaf_rate=0.004, leaf_repeats=6, storms=0.15, image_day=30.0),
}
COMPARED = ("base", "arrays", "lemons", "silent", "silent-named")
"""The cases in which the policies are compared; `none` and `quiet` measure only wrong drains."""

HARD = {"79": 0.3, "48": 0.2, "119": 0.17, "74": 0.1, "95": 0.1, "140": 0.06, "64": 0.04, "62": 0.03}
"""Xids of broken hardware and their shares; lost GPUs and ECC lead (Llama 3's table; Delta, arXiv 2503.11901)."""
APPLICATION_XIDS = ("13", "31", "43")
SIZES = {2: 0.3, 4: 0.25, 8: 0.2, 16: 0.13, 32: 0.08, 64: 0.04}
"""Nodes of a multi-node job → share."""
HOURS = {"single": (0.8, 1.2), "multi": (6.0, 1.1), "task": (0.25, 0.6)}
"""Run time: median and spread of the log-normal distribution."""
MOST_HOURS = 72.0
