"""The rungs of the ladder: what each does, what follows it, what turns it on. A new rung is a row here and a module.

A rung's module has `run(climb) -> Result`: it does the rung, then tests the node, and raises only `HoldLost`.
docs/ladder.md is made from this table and from the policy.
"""

from __future__ import annotations

from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Gpu
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.reason import Reason


@frozen
class Rung:
    """One rung. A policy row may replace `passed` and `failed`."""

    name: str
    module: str
    """In slurm_gpuhealth.ladder."""
    does: str
    """For people."""
    passed: str = "back"
    """`back`: the node is given back; or the rung that follows."""
    failed: str = "RMA"
    switch: str = ""
    """The key of the configuration that turns it on; if empty, it is always on."""


LADDER = {
    rung.name: rung
    for rung in (
        Rung("L1", "rung_test", "DCGM level 1 on all GPUs", failed="L3", switch="ladder.tests"),
        Rung("L2", "rung_test", "DCGM level 2 on all GPUs", failed="L3", switch="ladder.tests"),
        Rung(
            "L3",
            "rung_test",
            "DCGM level 3 on all GPUs; a GPU that fails is tested again alone before it is named",
            failed="L4",
            switch="ladder.tests",
        ),
        Rung("L4", "rung_test", "DCGM level 4, as level 3", switch="ladder.tests"),
        Rung(
            "reset",
            "rung_reset",
            "GPU reset, while the services that use the driver are stopped; then level 1",
            failed="reboot",
            switch="reset.enabled",
        ),
        Rung(
            "reboot",
            "rung_reboot",
            "scontrol reboot; the node comes back DOWN with our reason; then level 2",
            failed="repair",
            switch="reboot.enabled",
        ),
        Rung("repair", "rung_repair", "the site's program; then level 3", switch="repair.command"),
        Rung("RMA", "rung_rma", "the evidence is gathered; the node stays drained for an admin", passed="", failed=""),
    )
}
assert tuple(LADDER) == RUNGS  # noqa: S101 - two tables of one thing


class HoldLost(Exception):
    """The hold is no longer ours: an admin resumed the node or took it over. The running test is ended."""


@frozen
class Result:
    """How a rung ended."""

    outcome: Literal["pass", "fail", "untested"]
    message: str = ""
    """One line for people."""
    gpu: Gpu | None = None
    """The GPU to blame, if there is one."""
    test: str = ""
    """The failing test, `memory`."""
    code: str = ""
    """DCGM's error number."""
    bundle: str = ""
    """The evidence's path on the node."""


@frozen
class Climb:
    """What a rung is given."""

    settings: Settings
    journal: Journal
    node: str
    ours: Reason
    rung: str
    seconds: float
    """The longest time that the rung may take."""
    check_hold: Callable[[], None]
    """A rung that waits calls it at least once a minute; raises HoldLost."""
    since: float = 0.0
    """When this rung began, seconds since the epoch."""


def enabled(settings: Settings, rung: str) -> bool:
    """Whether the configuration lets the ladder climb this rung by itself."""
    table, _, key = LADDER[rung].switch.partition(".")
    return not table or bool(getattr(getattr(settings, table), key))


def seconds(settings: Settings, rung: str, model: str = "") -> float:
    """The limit of one rung on this GPU model (NVML's name)."""
    from fnmatch import fnmatchcase

    ladder = settings.ladder
    if rung in ("L3", "L4"):
        for row in ladder.model:
            if fnmatchcase(model, row.gpu):
                return float(row.l3 if rung == "L3" else row.l4)
    limits = {"L3": ladder.l3, "L4": ladder.l4, "reset": settings.reset.timeout + ladder.l2}
    limits["repair"] = settings.repair.timeout + seconds(settings, "L3", model) if rung == "repair" else 0
    return float(limits.get(rung, ladder.l2))
