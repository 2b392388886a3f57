"""gpu:slow: what the controller wrote into the node's Extra about its GPUs, as findings of this node.

The same finding tells of a GPU that is slower than the others of its job (samples.py).
"""

from __future__ import annotations

from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.node import record
from slurm_gpuhealth.slurm import remark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal


def note(settings: Settings, journal: Journal, text: str, now: float) -> None:
    """Keep a finding for each GPU in `text` (`remark.slow_text`), and clear those that are not in it any more."""

    def keep() -> None:
        judged = record.keep(journal, settings, told(journal, text, now), now)
        record.clear(journal, ("gpu",), judged, now)
        journal.put("slow", text or None)

    journal.together(keep)


def told(journal: Journal, text: str, now: float) -> list[Finding]:
    """A finding for each GPU in `text` that this node has."""
    known = [gpu["uuid"] for gpu in journal.get("gpus", [])]
    found = []
    for one in remark.read_slow(text):
        uuid = next((uuid for uuid in known if uuid.startswith(one.gpu)), None)
        if uuid or one.gpu == "node":
            found.append(
                Finding(
                    now,
                    "gpu",
                    "slow",
                    f"slower than the same model elsewhere: {one.words()}",
                    Gpu(uuid) if uuid else None,
                    "warning",
                    standing=True,
                    details={"figure": one.figure, "unit": one.unit, "value": one.value, "median": one.median},
                )
            )
    return found
