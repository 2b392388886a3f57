"""Every metric: its type, its labels, what it is (the text of `# HELP`), and what to do with it (docs/metrics.md).

The node's and the cluster's names differ: the controller may be a node too, and node_exporter refuses a folder in which
two files have the same metric.
"""

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

CLUSTER: Table = {
    "gpuhealth_cluster_build_info": (
        *("gauge", ("version",)),
        "The version of gpuhealth on the controller, always 1.",
        "differs from the nodes' gpuhealth_build_info: finish the upgrade",
    ),
    "gpuhealth_cluster_correlate_timestamp_seconds": (
        *("gauge", ()),
        "When the last gpuhealth correlate ended.",
        "older than 15 minutes: `systemctl status gpuhealth-correlate.timer`",
    ),
    "gpuhealth_cluster_correlate_duration_seconds": (
        *("gauge", ()),
        "How long that run took, without these metrics.",
        "longer than the timer's interval: look at the shared directory, the database and sacct",
    ),
    "gpuhealth_cluster_correlate_troubles": (
        *("gauge", ()),
        "Things that this run could not ask or read.",
        "`journalctl -u gpuhealth-correlate` names them",
    ),
    "gpuhealth_cluster_metrics_duration_seconds": (
        *("gauge", ()),
        "How long it took to gather these metrics.",
        "seconds: the store's disk is slow",
    ),
    "gpuhealth_cluster_slurmctld_up": (
        *("gauge", ()),
        "1 if slurmctld answered. If 0, what it would have said is absent.",
        "0: nothing can be drained or given back",
    ),
    "gpuhealth_cluster_nodes": (
        *("gauge", ()),
        "Nodes that the budget counts: drain.nodes, else all with GPUs.",
        "differs from your number of GPU nodes: set `drain.nodes`",
    ),
    "gpuhealth_cluster_held_nodes": (
        *("gauge", ("kind",)),
        "Nodes that gpuhealth holds, by the limit that they count against: new, lost, confirmed, sweep.",
        "`gpuhealth ladder`",
    ),
    "gpuhealth_cluster_held_nodes_limit": (
        *("gauge", ("kind",)),
        "How many nodes of each kind may be held. hour: new holds in an hour.",
        "`[drain]` and `sweep.budget` in gpuhealth.toml",
    ),
    "gpuhealth_cluster_budget_left_nodes": (
        *("gauge", ("kind",)),
        "How many more nodes may be held.",
        "0: jobs start on nodes with faults; find out whether the faults are real, then mend or raise the limit",
    ),
    "gpuhealth_cluster_held_rung_nodes": (
        *("gauge", ("rung", "state", "next")),
        "Held nodes by where they stand on the ladder.",
        "state `manual`: a rung that is turned off waits for an admin",
    ),
    "gpuhealth_cluster_rma_nodes": (
        *("gauge", ()),
        "Held nodes whose ladder has ended: an admin must return a GPU or mend the node.",
        "`gpuhealth ladder`; the reason has the serial number, the node has the evidence",
    ),
    "gpuhealth_cluster_reporting_nodes": (
        *("gauge", ()),
        "Nodes that have ever shipped records to the store.",
        "fewer than your GPU nodes: `gpuhealth doctor` on one that is missing",
    ),
    "gpuhealth_cluster_silent_nodes": (
        *("gauge", ()),
        "Nodes that missed three heartbeats, never shipped, or shipped nothing about a GPU job that ended there 1 to 24"
        " h ago.",
        "`gpuhealth doctor` on the controller names them: do their hooks run, does the store answer?",
    ),
    "gpuhealth_cluster_suspect_nodes": (
        *("gauge", ("rung",)),
        "Suspect nodes by the rung that is due; none: only watched.",
        "`gpuhealth lemons`",
    ),
    "gpuhealth_cluster_lemon_probability": (
        *("gauge", ("node",)),
        "How likely the node is a lemon; the 20 worst.",
        "`gpuhealth lemons` shows the evidence",
    ),
    "gpuhealth_cluster_failed_jobs_1d": (
        *("gauge", ("cause",)),
        "Attempts of jobs that failed and ended in the last 24 hours, by verdict.",
        "`gpuhealth jobs --verdict CAUSE`",
    ),
    "gpuhealth_cluster_lost_gpu_seconds_1d": (
        *("gauge", ("cause",)),
        "GPU time that these attempts had used. With checkpoints, less was lost.",
        "compare with gpuhealth_cluster_gpu_seconds_1d",
    ),
    "gpuhealth_cluster_gpu_seconds_1d": (
        *("gauge", ()),
        "GPU time of all attempts that ended in the last 24 hours.",
        "the whole of which the lost GPU time is a part",
    ),
    "gpuhealth_cluster_decisions_1d": (
        *("gauge", ("action",)),
        "Decisions of the nodes in the last 24 hours.",
        "over-budget, refused: `gpuhealth ladder NODE`",
    ),
    "gpuhealth_cluster_rungs_1d": (
        *("gauge", ("rung", "outcome")),
        "Rungs that ran in the last 24 hours, by outcome.",
        "many untested: DCGM is not able to test; `gpuhealth doctor` on such a node",
    ),
    "gpuhealth_cluster_findings_1d": (
        *("gauge", ("source", "code", "severity", "mode")),
        "Findings of the last 24 hours that the nodes have shipped.",
        "shadow faults: would you have drained? If not, add a row to the policy before you enforce",
    ),
    "gpuhealth_cluster_node_failures_28d": (
        *("gauge", ()),
        "Times that a node failed jobs in the last 28 days, by verdict; a node fails once an hour at most.",
        "the number behind the MTBF",
    ),
    "gpuhealth_cluster_node_mtbf_seconds": (
        *("gauge", ("bound",)),
        "Node time of GPU jobs for each such failure, last 28 days: estimate; lower, upper: its 95% interval.",
        "divide by a job's number of nodes: how long such a job runs between failures of hardware",
    ),
}
"""`_1d`, `_28d`: over a window, so a gauge. The store forgets old rows and corrects verdicts: a total would shrink."""
