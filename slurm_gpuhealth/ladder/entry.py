"""Where a fault enters the ladder: the reason for it on this node, considering the node's past."""

from __future__ import annotations

from slurm_gpuhealth.findings import RUNGS, Gpu
from slurm_gpuhealth.ladder import climb, state
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm import remark
from slurm_gpuhealth.slurm.reason import Reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.policy.judge import Judged
    from slurm_gpuhealth.slurm.node import NodeRecord


def reason(
    settings: Settings, journal: Journal, record: NodeRecord, worst: Judged, now: float, job: int | None
) -> Reason:
    """The reason for `worst`: `queued` at its rung, or `L1 fail next=RUNG` if DCGM found it."""
    finding, gpu = worst.finding, worst.finding.gpu or Gpu()
    level = finding.details.get("level") if finding.source == "dcgm" else None
    fact = reasons.fact(finding.source, finding.code)
    backs, boots = _past(journal, record, fact, gpu.index, now - settings.ladder.window)
    rung = worst.rung or "repair"  # a fault without a rung is for an admin
    if finding.about_gpus:  # a fault of the node that comes back says nothing about a GPU: no RMA
        rung = climb.entry(rung, backs)
    return Reason(
        fact=fact,
        gpu=gpu.index,
        rung=f"L{level}" if level else rung,
        state="fail" if level else "queued",
        pci=gpu.pci or "" if rung == "RMA" else "",
        serial="".join(c for c in gpu.serial or "" if c in reasons.WORD)[:32] if rung == "RMA" else "",
        since=reasons.stamp(now),
        job=job,
        next=rung if level else "",
        boots=boots,
        node=not finding.about_gpus,
    )


def is_higher(one: Reason, than: Reason) -> bool:
    """Whether a new fault's reason should replace a hold's. Not while a rung runs: its end looks at all faults."""
    higher = RUNGS.index(one.next or one.rung) > RUNGS.index(than.next or than.rung)
    return than.state != "running" and (higher or than.state == "pass")


def _past(journal: Journal, record: NodeRecord, fact: str, gpu: int | None, since: float) -> tuple[int, int]:
    """How often the node was given back as fit after this fact on this GPU, and how often the ladder rebooted it.

    A node without a disk knows this only from its record in Slurm.
    """
    backs, boots = state.history(journal, Reason(fact, gpu, "L3", "queued"), since)
    last = remark.read_result(record.extra)
    if last and last.at >= since:
        boots = max(boots, last.boots)
        backs = max(backs, last.backs if (last.fact, last.gpu) == (fact, gpu) else 0)
    return backs, min(boots, 99)
