"""Which GPU Slurm means: its number is a position in slurmd's gres list, not NVML's index, the minor or DCGM's id.

    position ──slurmd -G──▶ device file ──▶ minor ──/proc/driver/nvidia/gpus/*/information──▶ UUID

Learnt once a boot and kept in the journal; nothing here can hang in the driver.
"""

from __future__ import annotations

import os

from slurm_gpuhealth import watch
from slurm_gpuhealth.say import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from slurm_gpuhealth.journal import Journal
    from slurm_gpuhealth.settings import Settings
    from slurm_gpuhealth.slurm.environment import Job

UNKNOWN = ""
"""In place of a UUID: Slurm has a GPU there that the driver does not know."""


def of_job(settings: Settings, journal: Journal, job: Job) -> list[str] | None:
    """The UUIDs of the job's GPUs; None when that is not known (yet)."""
    whole = [name for name in job.gpu_names if name.startswith("GPU-")]
    if job.gpu_names:
        return whole if len(whole) == len(job.gpu_names) else None
    gres = journal.get("gres", {})
    if gres.get("boot") != watch.boot_id(settings):
        return None
    uuids = [gres["uuids"][position] for position in job.gpus if position < len(gres["uuids"])]
    return uuids if len(uuids) == len(job.gpus) and UNKNOWN not in uuids else None


def learn(settings: Settings, journal: Journal, node: str) -> str:
    """Learn the map if this boot's is not known; "" or why it could not be told."""
    boot = watch.boot_id(settings)
    gres = journal.get("gres", {})
    if gres.get("boot") == boot:
        return str(gres["error"])
    from slurm_gpuhealth.evidence import inventory
    from slurm_gpuhealth.slurm import control

    known = inventory.identities(settings)
    if known and not journal.get("gpus"):
        journal.put("gpus", known)
    uuids: list[str] = []
    error = ""
    try:
        uuids = _uuids(control.gres_map(settings.slurm, node), known)
    except (control.SlurmError, ValueError) as failure:
        error = f"Slurm's GPU numbers can't be told from one another: {failure}"
        say(f"{error}; the whole node is looked at instead")
    journal.put("gres", {"boot": boot, "uuids": uuids, "error": error})
    return error


def everything(journal: Journal) -> list[str]:
    """The UUIDs of all of the node's GPUs that we know."""
    return [gpu["uuid"] for gpu in journal.get("gpus", [])]


def _uuids(positions: Sequence[Sequence[str]], known: Sequence[dict[str, Any]]) -> list[str]:
    """The UUID for each position, by the minor number of its first device file."""
    by_minor = {gpu["minor"]: gpu["uuid"] for gpu in known}
    return [by_minor.get(_minor(files[0]) if files else None, UNKNOWN) for files in positions]


def _minor(file: str) -> int | None:
    """`/dev/nvidia3` → 3; another name: the device's own minor number."""
    digits = os.path.basename(file)[len("nvidia") :]
    if os.path.basename(file).startswith("nvidia") and digits.isdigit():
        return int(digits)
    try:
        return os.minor(os.stat(file).st_rdev)
    except OSError:
        return None
