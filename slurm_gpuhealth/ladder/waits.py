"""A fault for which the budget has no room, told in the node's Extra: any host sees it, and it goes when it is over."""

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
    """Bring the node's Extra up to date: an order when it begins, one when it ends, and none in between."""
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
        say(f"{node}: that {text or 'nothing'} waits for the budget could not be told: {error}")


def over_budget(journal: Journal) -> dict[str, Any] | None:
    """The fault that waits for room, and why there is none: `fault`, `why`, `time`; None where nothing does."""
    last = journal.one("SELECT action, result, time FROM decision ORDER BY id DESC LIMIT 1")
    worst = judge.worst(record.waiting(journal).values()) if last and last[0] == "over-budget" else None
    if worst is None or journal.get("hold"):
        return None
    return {"fault": decisions.of_fault(worst), "why": last[1], "time": last[2]}


def of(record: NodeRecord) -> str:
    """What waits there, `Xid79 GPU3 L3`, of a node that takes jobs all the same; "" where nothing does."""
    return "" if record.ours else remark.read_waits(record.extra)
