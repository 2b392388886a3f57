"""Which GPU Slurm means: its number is a position in slurmd's gres list, not NVML's index, a minor or DCGM's id.

    position ──slurmd -G──▶ device file ──▶ minor ──/proc/driver/nvidia/gpus/*/information──▶ UUID

The map is learnt once per boot and kept in the journal. Nothing here can hang in the driver.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.environment import Job
    from slurm_gpuhealth.node.journal import Journal

AGAIN = 600.0
"""Seconds before the map is tried again if it could not be learnt."""
UNKNOWN = ""
"""In place of a UUID: Slurm has a GPU that the driver does not know."""


def of_job(settings: Settings, journal: Journal, job: Job) -> list[str] | None:
    """The UUIDs of the job's GPUs; None if they are not known (yet)."""
    whole = [name for name in job.gpu_names if name.startswith("GPU-")]
    if job.gpu_names:
        return whole if len(whole) == len(job.gpu_names) else None
    gres = journal.get("gres", {})
    if gres.get("boot") != boot_id(settings):
        return None
    uuids = [gres["uuids"][position] for position in job.gpus if position < len(gres["uuids"])]
    return uuids if len(uuids) == len(job.gpus) and UNKNOWN not in uuids else None


def learn(settings: Settings, journal: Journal, node: str, again: bool = False) -> str:
    """Learn the map if this boot's is not known; returns "" or why that failed. `again`: learn it even if known."""
    boot = boot_id(settings)
    gres = journal.get("gres", {})
    if gres.get("boot") == boot and not again:
        return str(gres["error"])
    from slurm_gpuhealth.slurm import control

    known = renumber(settings, journal)
    uuids: list[str] = []
    error, shared = "", True
    try:
        positions, shared = control.gres_map(settings.slurm, node)
        uuids = _uuids(positions, known)
        shared = shared or len(set(uuids)) < len(uuids)  # MIG: a GPU has several positions
    except (control.SlurmError, ValueError) as failure:
        error = f"which GPUs Slurm's numbers mean is not known: {failure}"
        from slurm_gpuhealth.say import say

        say(f"{error}; the whole node is checked instead")
    journal.put("gres", {"boot": boot, "time": time.time(), "uuids": uuids, "error": error, "shared": shared})
    return error


def doubtful(journal: Journal, now: float) -> bool:
    """Whether to learn the map again: slurmd did not answer, or the driver had not started all GPUs yet."""
    gres = journal.get("gres", {"uuids": (), "error": "not learnt"})
    return bool(gres["error"] or UNKNOWN in gres["uuids"]) and not 0 <= now - gres.get("time", 0) < AGAIN


def renumber(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """The driver's list of GPUs. Updates the GPUs that we know: after a reboot, another GPU may have an address."""
    from slurm_gpuhealth.evidence import inventory

    # Without persistence mode the driver has no UUID for a GPU until somebody opens it.
    listed = [gpu for gpu in inventory.identities(settings) if gpu["uuid"]]
    old = {gpu["uuid"]: gpu for gpu in journal.get("gpus", [])}
    if listed and journal.get("nvml-boot") != boot_id(settings):
        taken = {gpu["pci"] for gpu in listed} | {gpu["uuid"] for gpu in listed}
        lost = [gpu for gpu in old.values() if gpu["uuid"] not in taken and gpu["pci"] not in taken]
        journal.put("gpus", [*({**old.get(gpu["uuid"], {"serial": None}), **gpu} for gpu in listed), *lost])
    return listed


def everything(journal: Journal) -> list[str]:
    """The UUIDs of all GPUs of the node that we know."""
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


def boot_id(settings: Settings) -> str:
    """This boot's id (proc(5), /proc/sys/kernel/random/boot_id)."""
    with open(os.path.join(settings.paths.proc, "sys/kernel/random/boot_id")) as file:
        return file.read().strip()
