"""What a simulated cluster is like: one row of numbers a setting, with where each number comes from.

The reference is calibrated so that hardware kills 3.8 jobs per 1000 node-days, as in the three published fleets: Meta
RSC 2.34 and 6.50 (arXiv 2410.21680), Llama 3 3.79 (arXiv 2407.21783), InfiniteHBD's trace 4.2. Rates are per day.
"""

from __future__ import annotations

from typing import NamedTuple

DAY = 86400.0


class Case(NamedTuple):
    """A cluster's size, load, faults, and how much of a fault can be seen."""

    nodes: int = 512
    days: float = 60.0
    pod: int = 16
    """Nodes behind one leaf switch."""
    gpus: int = 8
    jobs: float = 1.37
    """Submissions a node and day, arrays apart: more than half of the node time is used."""
    single: float = 0.9
    """Share of the jobs that take one node; 86 % of node time is in the others (arXiv 2410.21680 has the same form)."""
    users: int = 80
    applications: int = 3
    """Of each user."""
    failing: float = 0.12
    """The median application's failure probability; the logit's spread is 1."""
    arrays: float = 2.0
    """Arrays a day of 20 to 120 jobs that crash with probability .95."""
    ended: float = 0.07
    """Share of the jobs that their user or the time limit ends."""

    fault_rate: float = 0.0025
    """A good node's faults a day of allocated time; log-normal over nodes."""
    lemons: float = 0.015
    """Share of the nodes (Meta: 1.2 % of RSC-1)."""
    lemon_rate: float = 0.25
    """The median lemon's faults a day of allocated time."""
    leaf_rate: float = 0.0008
    """Incidents of a leaf switch a day; each kills the multi-node jobs on it."""
    leaf_repeats: int = 1
    """How often an incident comes back within two days."""
    storms: float = 0.0
    """Storage incidents a day: each kills a third of what runs, everywhere."""
    benign: float = 0.002
    """Hard events a day on a running node that harm nobody."""
    app_xid: float = 0.05
    """Share of the application failures that leave an Xid 13, 31 or 43."""

    hard: float = 0.55
    node_fail: float = 0.35
    hardware_text: float = 0.25
    """Probabilities that a node's fault shows a hard Xid, a NODE_FAIL, a hardware error in the log."""
    lemon_hard: float | None = None
    lemon_node_fail: float | None = None
    """The same of a lemon's; None: as any node's."""
    named: float = 0.0
    """Share of the multi-node jobs killed by a node whose log names a host."""
    named_right: float = 0.85
    misnamed: float = 0.0
    """Share of the multi-node application failures whose log names a host."""

    skew: float = 0.0
    """Largest clock offset of a node, in seconds."""
    gpus_known: bool = True
    again: float = 0.0
    """Share of attempts and events that are told twice."""
    late: float = 0.0
    """Share of the events that arrive up to two hours late."""
    pinned: int = 0
    """Users with a node of their own and a 50 % failure rate; the first one's node is a lemon."""
    image_day: float | None = None
    """On this day, for twelve hours, half of all jobs die of the same error at their start."""
    repaired: float = 0.0
    """Share of the lemons that are repaired about ten days after they began; a third of the repairs is in vain."""
    large: int = 1
    """A lemon fails only under jobs of this many nodes."""
    one_gpu: bool = False
    """A lemon is one of its node's GPUs, and single-node jobs take 1 to 8 of them: nodes are shared."""
    sharing: bool = False
    idle_xids: float = 0.0
    """A lemon's hard Xids a day outside of its failures."""
    hangs: float = 0.0
    """Share of the node's faults in which the job hangs until its time limit."""


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
    # What else goes wrong
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
"""Where the policies are set against each other; `none` and `quiet` are for wrong drains alone."""

HARD = {"79": 0.3, "48": 0.2, "119": 0.17, "74": 0.1, "95": 0.1, "140": 0.06, "64": 0.04, "62": 0.03}
"""Xids of broken hardware, and their shares: lost GPU and ECC lead (Llama 3's table, Delta arXiv 2503.11901)."""
APPLICATION_XIDS = ("13", "31", "43")
SIZES = {2: 0.3, 4: 0.25, 8: 0.2, 16: 0.13, 32: 0.08, 64: 0.04}
"""Nodes of a multi-node job → share."""
HOURS = {"single": (0.8, 1.2), "multi": (6.0, 1.1), "task": (0.25, 0.6)}
"""Run time: the median and the spread of the log-normal."""
MOST_HOURS = 72.0
