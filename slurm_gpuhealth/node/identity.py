"""Which GPU Slurm means: its number is a position in slurmd's gres list, not NVML's index, the minor or DCGM's id.

    position ──slurmd -G──▶ device file ──▶ minor ──/proc/driver/nvidia/gpus/*/information──▶ UUID

Learnt once a boot and kept in the journal; nothing here can hang in the driver.
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
"""Seconds before a map that could not be told is tried again."""
UNKNOWN = ""
"""In place of a UUID: Slurm has a GPU there that the driver does not know."""


def of_job(settings: Settings, journal: Journal, job: Job) -> list[str] | None:
    """The UUIDs of the job's GPUs; None when that is not known (yet)."""
    whole = [name for name in job.gpu_names if name.startswith("GPU-")]
    if job.gpu_names:
        return whole if len(whole) == len(job.gpu_names) else None
    gres = journal.get("gres", {})
    if gres.get("boot") != boot_id(settings):
        return None
    uuids = [gres["uuids"][position] for position in job.gpus if position < len(gres["uuids"])]
    return uuids if len(uuids) == len(job.gpus) and UNKNOWN not in uuids else None


def learn(settings: Settings, journal: Journal, node: str, again: bool = False) -> str:
    """Learn the map if this boot's is not known; "" or why it could not be told. `again`: also where doubtful."""
    boot = boot_id(settings)
    gres = journal.get("gres", {})
    if gres.get("boot") == boot and not again:
        return str(gres["error"])
    from slurm_gpuhealth.slurm import control

    known = renumber(settings, journal)
    uuids: list[str] = []
    error = ""
    try:
        uuids = _uuids(control.gres_map(settings.slurm, node), known)
    except (control.SlurmError, ValueError) as failure:
        error = f"Slurm's GPU numbers can't be told from one another: {failure}"
        from slurm_gpuhealth.say import say

        say(f"{error}; the whole node is looked at instead")
    journal.put("gres", {"boot": boot, "time": time.time(), "uuids": uuids, "error": error})
    return error


def doubtful(journal: Journal, now: float) -> bool:
    """Whether it is time to learn the map again: slurmd did not answer, or the driver had not started all GPUs yet."""
    gres = journal.get("gres", {"uuids": (), "error": "not learnt"})
    return bool(gres["error"] or UNKNOWN in gres["uuids"]) and not 0 <= now - gres.get("time", 0) < AGAIN


def renumber(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """The driver's list, and the GPUs that we know brought up to it: after a reboot an address may be another GPU's."""
    from slurm_gpuhealth.evidence import inventory

    # Without persistence mode the driver has no UUID for a GPU that nobody has opened since the boot.
    listed = [gpu for gpu in inventory.identities(settings) if gpu["uuid"]]
    old = {gpu["uuid"]: gpu for gpu in journal.get("gpus", [])}
    if listed and journal.get("nvml-boot") != boot_id(settings):
        taken = {gpu["pci"] for gpu in listed} | {gpu["uuid"] for gpu in listed}
        lost = [gpu for gpu in old.values() if gpu["uuid"] not in taken and gpu["pci"] not in taken]
        journal.put("gpus", [*({**old.get(gpu["uuid"], {"serial": None}), **gpu} for gpu in listed), *lost])
    return listed


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


def boot_id(settings: Settings) -> str:
    """This boot's id (proc(5), /proc/sys/kernel/random/boot_id)."""
    with open(os.path.join(settings.paths.proc, "sys/kernel/random/boot_id")) as file:
        return file.read().strip()
