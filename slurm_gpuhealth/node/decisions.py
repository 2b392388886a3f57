"""The journal's table of decisions: changes of the node that were made, refused or put off, or would have been made."""

from __future__ import annotations

from slurm_gpuhealth.slurm import reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.policy.judge import Judged
    from slurm_gpuhealth.slurm.reason import Reason


def note(
    journal: Journal, now: float, program: str, action: str, words: str, detail: str, was: str, job: int | None
) -> int:
    """Add a row to the decision table, or renew the last row if it is the same decision."""
    last = journal.one("SELECT id, action, reason, result, was FROM decision ORDER BY id DESC LIMIT 1")
    if last and last[1:] == (action, words, detail, was) and action not in ("drained", "claimed"):
        journal.write("UPDATE decision SET time = ? WHERE id = ?", now, last[0])
        return int(last[0])
    return journal.write(
        "INSERT INTO decision (time, program, action, reason, result, was, job) VALUES (?, ?, ?, ?, ?, ?, ?)",
        now,
        program,
        action,
        words,
        detail,
        was,
        job,
    )


def confirmed(journal: Journal, kept: dict[str, Any] | None) -> None:
    """Note that the hold's claim became a drain."""
    journal.write(
        "UPDATE decision SET action = 'drained' WHERE id = ? AND action = 'claimed'", (kept or {}).get("decision")
    )
    journal.put("adopted", None)


def of_fault(worst: Judged) -> str:
    """The beginning of the reason, for the decision table and syslog."""
    finding = worst.finding
    index = "*" if finding.gpu is None or finding.gpu.index is None else finding.gpu.index
    where = f"GPU{index}" if finding.about_gpus else "node"
    return f"{reason.fact(finding.source, finding.code)} {where} {worst.rung}".strip()


def of_reason(ours: Reason) -> str:
    """The same for a reason."""
    return f"{ours.fact} {reason.which(ours)} {ours.next or ours.rung}"
