"""Writes a fault for which the budget has no room into the node's Extra, where any host sees it, and removes it."""

from __future__ import annotations

from slurm_gpuhealth.node import decisions, record
from slurm_gpuhealth.policy import judge
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, remark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord


def tell(settings: Settings, journal: Journal, node: str) -> None:
    """Update the node's Extra: one order to Slurm when the wait begins, one when it ends."""
    over = over_budget(journal)
    text = over["fault"] if over else ""
    if text == journal.get("waits", ""):
        return
    try:
        before = control.show_node(settings.slurm, node).extra
        after = remark.write_waits(before, text)
        if after != before:
            control.set_remarks(settings.slurm, node, extra=after)
        journal.put("waits", text or None)
    except (control.SlurmError, ValueError) as error:
        say(f"{node}: could not write into Extra that {text or 'nothing'} waits for the budget: {error}")


def over_budget(journal: Journal) -> dict[str, Any] | None:
    """The fault that waits for room, and why there is none: `fault`, `why`, `time`; None if no fault waits."""
    last = journal.one("SELECT action, result, time FROM decision ORDER BY id DESC LIMIT 1")
    worst = judge.worst(record.waiting(journal).values()) if last and last[0] == "over-budget" else None
    if worst is None or journal.get("hold"):
        return None
    return {"fault": decisions.of_fault(worst), "why": last[1], "time": last[2]}


def of(record: NodeRecord) -> str:
    """The fault that waits, `Xid79 GPU3 L3`, while the node takes jobs; "" if none waits."""
    return "" if record.ours else remark.read_waits(record.extra)
