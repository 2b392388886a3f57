"""Every metric: its type, its labels, what it is (the text of `# HELP`), and what to do with it (docs/metrics.md)."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    Table = dict[str, tuple[str, tuple[str, ...], str, str]]

NODE: Table = {
    "gpuhealth_build_info": (
        *("gauge", ("version",)),
        "The version of gpuhealth on this node, always 1.",
        "`count by (version) (gpuhealth_build_info)` shows an upgrade that has not reached all nodes",
    ),
    "gpuhealth_enforcing": (
        *("gauge", ()),
        "1 if faults drain this node, 0 in shadow mode.",
        "0 on a node that should be in production: set `mode` there",
    ),
    "gpuhealth_check_timestamp_seconds": (
        *("gauge", ()),
        "When the last health check ended.",
        "older than a few minutes: `systemctl status slurmd`, then `gpuhealth doctor` on the node",
    ),
    "gpuhealth_check_duration_seconds": (
        *("gauge", ()),
        "How long the last health check took, without writing this file.",
        "near `check.timeout`: a source is slow, see gpuhealth_source_duration_seconds",
    ),
    "gpuhealth_source_duration_seconds": (
        *("gauge", ("source",)),
        "How long the last reading of a source took.",
        "a source that has become slower than on other nodes: look at it there",
    ),
    "gpuhealth_source_success": (
        *("gauge", ("source",)),
        "1 if the last reading of a source succeeded.",
        "0: this source sees nothing on this node; `gpuhealth status` says why",
    ),
    "gpuhealth_source_timestamp_seconds": (
        *("gauge", ("source",)),
        "When a source was last read.",
        "some sources are read only each hour; none is older than that",
    ),
    "gpuhealth_journal_writable": (
        *("gauge", ()),
        "1 if the node's journal is on its own disk, 0 if a copy in memory is used.",
        "0: the disk of `paths.state` is full or read-only",
    ),
    "gpuhealth_standing_findings": (
        *("gauge", ("source", "code", "severity", "mode")),
        "Conditions that stand now. mode: enforce, shadow, or acked by an admin.",
        "`gpuhealth findings` on the node, `gpuhealth why SOURCE:CODE`",
    ),
    "gpuhealth_findings_total": (
        *("counter", ("source", "code", "severity", "mode")),
        "Findings since the node's boot: events, and conditions when they began.",
        "compare rates between nodes and driver versions",
    ),
    "gpuhealth_gpus_present": (
        *("gauge", ()),
        "GPUs in the driver's last answer.",
        "fewer than expected: `gpuhealth status` names the missing GPU",
    ),
    "gpuhealth_gpus_expected": (
        *("gauge", ()),
        "GPUs that the node should have: gpus.count, else as many as Slurm knows.",
        "compare with gpuhealth_gpus_present",
    ),
    "gpuhealth_gpu_info": (
        *("gauge", ("gpu", "uuid", "pci", "serial", "model")),
        "A GPU that this node has or had, always 1. gpu: its index in nvidia-smi.",
        "join it by `uuid` to name a GPU's serial number",
    ),
    "gpuhealth_gpu_present": (
        *("gauge", ("gpu", "uuid")),
        "1 if the GPU is in the driver's last answer.",
        "0: the GPU is lost, or was taken out",
    ),
    "gpuhealth_gpu_standing_findings": (
        *("gauge", ("gpu", "uuid", "severity")),
        "Conditions of the GPU that stand now.",
        "`gpuhealth findings` on the node",
    ),
    "gpuhealth_gpu_diagnostic_info": (
        *("gauge", ("gpu", "uuid", "level", "outcome")),
        "The GPU's last DCGM diagnostic of this run level and its outcome, always 1.",
        "tool-error or not-testable on many nodes: `gpuhealth doctor`; fail: the ladder deals with it",
    ),
    "gpuhealth_gpu_diagnostic_timestamp_seconds": (
        *("gauge", ("gpu", "uuid", "level")),
        "When the GPU's last DCGM diagnostic of this run level began.",
        "levels 2 and deeper that are weeks old on idle nodes: turn on `sweep.enabled`",
    ),
    "gpuhealth_hold": (
        *("gauge", ()),
        "1 while gpuhealth holds this node.",
        "`gpuhealth ladder NODE`",
    ),
    "gpuhealth_hold_info": (
        *("gauge", ("fact", "gpu", "rung", "state", "next")),
        "Why the node is held and how far the ladder is, always 1; absent if it is not held.",
        "`gpuhealth why REASON` explains each state",
    ),
    "gpuhealth_hold_timestamp_seconds": (
        *("gauge", ()),
        "When the hold began; absent if the node is not held.",
        "`time() - gpuhealth_hold_timestamp_seconds`: for how long the node has been out",
    ),
    "gpuhealth_hold_rung_timestamp_seconds": (
        *("gauge", ()),
        "When a check first saw the hold's present rung and state; absent if the node is not held.",
        "hours in `queued` without a job: `journalctl -t gpuhealth` on the node",
    ),
    "gpuhealth_hold_waits_for_jobs": (
        *("gauge", ()),
        "1 if the node is held and GPU jobs still run on it; absent if it is not held.",
        "nothing: the next rung begins when they end",
    ),
    "gpuhealth_budget_waits": (
        *("gauge", ()),
        "1 if a fault of this node waits because the drain budget has no room. Jobs still start here.",
        "`gpuhealth ladder` lists the held nodes: mend some, or raise `drain.budget`",
    ),
    "gpuhealth_outbox_records": (
        *("gauge", ()),
        "Records that wait to be shipped to the store.",
        "it grows: the store does not answer; `gpuhealth doctor` on the node",
    ),
    "gpuhealth_outbox_bytes": (
        *("gauge", ()),
        "Their size. At store.outbox_mib the oldest are dropped.",
        "mend the store before it reaches `store.outbox_mib`",
    ),
}
