"""Compares what is in the node with what should be there, without a call into the driver.

Sources: /proc/driver/nvidia/gpus/*/information (the driver's README, chapter "Proc Interface"), sysfs' PCI devices,
the names of running processes. nvml.py counts the GPUs, because it knows each one.
"""

from __future__ import annotations

import os

from slurm_gpuhealth.findings import Finding, Gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings

NVIDIA = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")  # display and 3D controllers
SWITCH_CLASS = "0x0680"  # "other bridge": an NVSwitch
FABRIC_MANAGER = "nv-fabricmanage"  # as far as comm's 15 characters go


def identities(settings: Settings) -> list[dict[str, Any]]:
    """The driver's list: "uuid", "pci", "minor", "name", "vbios" of each GPU, in order of PCI address, as NVML counts.

    "uuid" is None for a GPU that the driver has not started yet (it prints question marks). GPUs that an admin excluded
    are left out. Without a driver the list is empty.
    """
    root = os.path.join(settings.paths.proc, "driver/nvidia/gpus")
    gpus: list[dict[str, Any]] = []
    for address in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        try:
            with open(os.path.join(root, address, "information"), encoding="utf-8", errors="replace") as file:
                lines = [line.partition(":") for line in file]
        except OSError:
            continue
        facts = {key.strip(): value.strip() for key, _, value in lines}
        if facts.get("GPU Excluded", facts.get("Blacklisted", "No")) == "Yes":
            continue
        uuid, minor = facts.get("GPU UUID", "?"), facts.get("Device Minor", "")
        gpus.append(
            {
                "index": len(gpus),
                "uuid": None if "?" in uuid else uuid,
                "pci": _short(facts.get("Bus Location", address)),
                "minor": int(minor) if minor.isdigit() else None,
                "name": facts.get("Model"),
                "vbios": facts.get("Video BIOS"),
            }
        )
    return gpus


def known(listed: Sequence[Mapping[str, Any]], baseline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All GPUs that this node has or should have: NVML's baseline (with lost GPUs), and GPUs that are only `listed`."""
    seen = [{"uuid": uuid, **facts} for uuid, facts in baseline.get("gpus", {}).items()]
    uuids = {gpu["uuid"] for gpu in seen}
    rest = [dict(gpu) for gpu in listed if gpu["uuid"] and gpu["uuid"] not in uuids]
    return sorted(seen + rest, key=lambda gpu: (gpu.get("index", 0), gpu.get("pci") or ""))


def collect(
    settings: Settings, listed: Sequence[Mapping[str, Any]], baseline: Mapping[str, Any], gres: int | None, now: float
) -> list[Finding]:
    """Findings of the inventory, all of class "config" except a GPU that the driver left out.

    `listed`: `identities`; `baseline`: NVML's, for the versions; `gres`: how many whole GPUs slurmd offers (None: not
    known, or GPUs in MIG mode).
    """
    devices = pci_devices(settings)
    findings = [
        *_not_driven(listed, devices, settings, now),
        *_device_files(listed, settings, now),
        *_vbios(baseline, now),
        *_fabric_manager(devices, settings, now),
    ]
    have = len(listed)
    if gres is not None and listed and gres != have:
        message = f"slurmd offers {gres} GPUs, but the driver has {have}: correct gres.conf and NodeName, or see lspci"
        findings.append(_config("gres-count", message, now, gres=gres, driver=have))
    return findings


def pci_devices(settings: Settings) -> list[tuple[str, str, str]]:
    """NVIDIA's PCI devices: (address, class, name of the kernel driver or "")."""
    root = os.path.join(settings.paths.sys, "bus/pci/devices")
    devices = []
    for address in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        home = os.path.join(root, address)
        if _read(home, "vendor") == NVIDIA:
            link = os.path.join(home, "driver")
            driver = os.path.basename(os.readlink(link)) if os.path.islink(link) else ""
            devices.append((address, _read(home, "class")[:6], driver))
    return devices


def _not_driven(
    listed: Sequence[Mapping[str, Any]], devices: Sequence[tuple[str, str, str]], settings: Settings, now: float
) -> Iterator[Finding]:
    """A GPU on the PCI bus that the driver does not list (and that was not given to a virtual machine)."""
    root = os.path.join(settings.paths.proc, "driver/nvidia/gpus")
    there = {_short(address) for address in os.listdir(root)} if os.path.isdir(root) else set()
    for address, kind, driver in devices if listed else ():
        if kind in GPU_CLASSES and _short(address) not in there and driver in ("", "nvidia"):
            message = f"GPU {_short(address)} is on the PCI bus, but the driver does not list it; see dmesg for NVRM"
            yield Finding(now, "inventory", "not-driven", message, Gpu(pci=_short(address)), "warning", True)


def _device_files(listed: Sequence[Mapping[str, Any]], settings: Settings, now: float) -> Iterator[Finding]:
    for gpu in listed:
        path = os.path.join(settings.paths.dev, f"nvidia{gpu['minor']}")
        if gpu["minor"] is not None and not os.path.exists(path):
            message = f"{path} is missing: jobs can't open this GPU; run nvidia-modprobe or `nvidia-smi` as root"
            who = Gpu(gpu["uuid"], gpu["pci"], gpu["index"])
            yield _config("dev-file", message, now, who, minor=gpu["minor"])


def _vbios(baseline: Mapping[str, Any], now: float) -> Iterator[Finding]:
    """GPUs of one model with different VBIOS versions: reports those that differ from the most frequent version."""
    models: dict[str, dict[str, list[tuple[str, Mapping[str, Any]]]]] = {}
    for uuid, gpu in baseline.get("gpus", {}).items():
        if gpu.get("name") and gpu.get("vbios"):
            models.setdefault(gpu["name"], {}).setdefault(gpu["vbios"], []).append((uuid, gpu))
    for versions in models.values():
        usual = max(versions, key=lambda version: len(versions[version]))
        for version, gpus in versions.items():
            for uuid, gpu in gpus if version != usual else ():
                message = f"VBIOS {version}, while most GPUs of this node have {usual}"
                who = Gpu(uuid, gpu.get("pci"), gpu.get("index"), gpu.get("serial"))
                yield _config("vbios-mix", message, now, who, vbios=version, usual=usual)


def _fabric_manager(devices: Sequence[tuple[str, str, str]], settings: Settings, now: float) -> Iterator[Finding]:
    """Without the fabric manager CUDA does not start on a node with NVSwitches: "system not yet initialized"."""
    wanted = settings.gpus.fabric_manager
    switches = sum(kind == SWITCH_CLASS for _, kind, _ in devices)
    if wanted == "off" or (wanted == "auto" and not switches):
        return
    if not any(name.startswith(FABRIC_MANAGER) for _, name in processes(settings)):
        message = "the fabric manager is not running, and CUDA does not start without it; "
        message += "`systemctl status nvidia-fabricmanager`"
        yield _config("fabric-mgr", message, now, switches=switches)


def processes(settings: Settings) -> Iterator[tuple[int, str]]:
    """Pid and name (its first 15 characters) of every process below `paths.proc`."""
    for entry in os.listdir(settings.paths.proc):
        if entry.isdigit():
            name = _read(os.path.join(settings.paths.proc, entry), "comm")
            if name:
                yield int(entry), name


def _config(code: str, message: str, now: float, gpu: Gpu | None = None, **details: str | int) -> Finding:
    return Finding(now, "inventory", code, message, gpu, "warning", True, details={"class": "config", **details})


def _short(address: str) -> str:
    return address.lower().partition(".")[0]


def _read(folder: str, name: str) -> str:
    """A one-line file's text; empty if it does not exist (any more)."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read(256).strip()
    except OSError:
        return ""
