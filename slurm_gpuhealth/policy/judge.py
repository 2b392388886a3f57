"""Applies the policy: gives each finding its severity and rung, and chooses the fault for the reason. Pure: no I/O."""

from __future__ import annotations

from fnmatch import fnmatchcase

from slurm_gpuhealth.findings import RUNGS, Finding
from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Literal

    from slurm_gpuhealth.config.settings import Row, Settings
    from slurm_gpuhealth.findings import Severity

    Mode = Literal["enforce", "shadow", "off", "old", "acked"]
    Repeats = Callable[[Finding, Row], int]
    """How often this finding was seen on this GPU within the row's window, including now; if the row says so, counted
    by distinct jobs or users."""

SOURCE_OF = {  # a finding's source → the key of [sources] that governs it
    "xid": "kernel",
    "sxid": "kernel",
    "aer": "kernel",
    "nvrm": "kernel",
    "kernel": "kernel",
    "nvml": "nvml",
    "driver": "nvml",
    "job": "nvml",
    "inventory": "inventory",
    "dcgm": "dcgm",
    "dcgm-health": "dcgm_health",
    "ib": "infiniband",
    "host": "host",
    "leftover": "leftovers",
    "tool": "tools",
    "gpu": "tools",
}


@frozen
class Judged:
    """A finding and the policy's judgement."""

    finding: Finding
    severity: Severity
    rung: str
    mode: Mode
    """Whether a fault may act: only with `enforce`. The other words say why not."""
    why: str = ""


def judge(
    findings: Iterable[Finding],
    settings: Settings,
    repeats: Repeats,
) -> list[Judged]:
    """Each finding with the severity, rung and mode that the policy gives it; sources that are off are left out."""
    judged = []
    for finding in findings:
        row = match(settings.policy, finding, repeats)
        severity, rung, why = (row.severity, row.rung, row.why) if row else (finding.severity, "", "")
        mode = _mode(finding, settings)
        if mode == "off":
            continue
        if finding.details.get("old"):
            mode = "old"
        judged.append(Judged(finding, severity, rung if severity == "fault" else "", mode, why))
    return judged


def match(rows: Sequence[Row], finding: Finding, repeats: Repeats) -> Row | None:
    """The first row that matches the finding: pattern, conditions and repetition."""
    for row in rows:
        if (
            fnmatchcase(finding.key, row.finding)
            and all(_meets(finding.details.get(key), wanted) for key, wanted in row.when.items())
            and (row.times <= 1 or repeats(finding, row) >= row.times)
        ):
            return row
    return None


def worst(judged: Iterable[Judged]) -> Judged | None:
    """The fault for the reason: the highest rung first, then an event (Xid 48) before the condition that it leaves (a
    pending remap), then the oldest. None if there is no fault."""

    def rank(one: Judged) -> tuple[int, bool]:
        return RUNGS.index(one.rung) if one.rung in RUNGS else -1, not one.finding.standing

    return max((one for one in judged if one.severity == "fault"), key=rank, default=None)


def identity(finding: Finding) -> tuple[str, str]:
    """What makes two findings the same condition: the key, and the GPU."""
    gpu = finding.gpu
    return finding.key, (gpu.uuid or gpu.pci or str(gpu.index)) if gpu else ""


def _meets(value: object, wanted: object) -> bool:
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def _mode(finding: Finding, settings: Settings) -> Mode:
    own: Mode
    if finding.source == "site":
        modes = {command.name: command.mode for command in settings.check.command}
        own = modes.get(str(finding.details.get("check", finding.code)), "shadow")
    else:
        own = getattr(settings.sources, SOURCE_OF.get(finding.source, ""), "shadow")
    return "shadow" if own == "enforce" and settings.mode == "shadow" else own
