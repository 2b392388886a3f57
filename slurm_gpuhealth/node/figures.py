"""What tests measured on this node, into its journal: one row for each figure and GPU."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_gpuhealth.diagnose.outputs import Figure
    from slurm_gpuhealth.node.journal import Journal


def keep(journal: Journal, tool: str, version: str, figures: Iterable[tuple[str | None, Figure]], now: float) -> None:
    """A row for each figure: the GPU's UUID (None: the node's) and the figure."""
    known = {gpu["uuid"]: gpu for gpu in journal.get("gpus", [])}
    model = next((str(gpu.get("name") or "") for gpu in known.values()), "")
    for uuid, figure in figures:
        gpu = known.get(uuid, {})
        journal.write(
            "INSERT INTO figure (time, tool, version, uuid, gpu, model, name, value, unit)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            now,
            tool,
            version,
            uuid,
            gpu.get("index"),
            str(gpu.get("name") or model),
            figure.name,
            figure.value,
            figure.unit,
        )
