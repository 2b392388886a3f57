"""Rung reset: what holds the driver is stopped, `nvidia-smi --gpu-reset`, what was stopped is started; then level 1.

    active services ──▶ journal "stopped" ──▶ stop ──▶ reset ──▶ start ──▶ journal cleared ──▶ level 1
                              └── killed anywhere: `mend`, by the next check ──┘

nvidia-smi(1): each GPU by itself from Ampere on, as long as Fabric Manager runs on an NVSwitch system; before that
(Pascal, Volta: `reset.together`) its NVLink peers in the same command, which names them otherwise. So Fabric Manager is
not among the services. nvidia-persistenced and DCGM are: "In use by another client" (NVIDIA/gpu-operator#118), and so
is persistence mode set without the daemon (NVIDIA/NVSentinel#1690). A reset takes MIG's slices away: not done there.
"""

from __future__ import annotations

import os
import time
from fnmatch import fnmatchcase

from slurm_gpuhealth import child
from slurm_gpuhealth.ladder import state
from slurm_gpuhealth.ladder.rungs import Result
from slurm_gpuhealth.node import lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ladder.rungs import Climb
    from slurm_gpuhealth.node.journal import Journal

STOPPED = "stopped"
"""In the journal: what is to be put back. Units, and PCI addresses of GPUs whose persistence mode was on."""
ACTIVE = ("active", "activating", "reloading")
UNIT_SECONDS = 30.0
BUSY = "in use by another client"
PEERS = ("nvlink", "peer", "additional gpu")
"""In nvidia-smi's refusal when more GPUs have to be named; its wording differs between drivers."""
AWAKE = 30.0
"""Seconds for DCGM's host engine to answer after its start."""


def run(climb: Climb) -> Result:
    """Reset the GPUs that need it, then level 1. Raises HoldLost."""
    settings, journal = climb.settings, climb.journal
    gpus = _which(climb)
    slices = [gpu["index"] for gpu in _readings(journal) if gpu.get("mig")]
    if slices:
        return Result("untested", f"MIG is on (GPU {', '.join(map(str, slices))}): a reset would take its slices away")
    climb.check_hold()
    deadline = time.monotonic() + settings.reset.timeout
    _stop(settings, journal)
    try:
        failure = _reset(settings, journal, gpus, deadline)
    finally:
        trouble = mend(settings, journal)
    if failure:
        return failure
    if trouble:
        return Result("untested", f"the reset went well, but {trouble}")
    return _test(climb)


def mend(settings: Settings, journal: Journal) -> str:
    """Start what a reset has stopped; what could not be started, in words, or "". It is tried again the next time."""
    left: list[str] = []
    trouble = ""
    for name in journal.get(STOPPED, []):
        smi = ":" in name
        done = (
            child.run([settings.reset.nvidia_smi, "-i", name, "-pm", "1"], timeout=UNIT_SECONDS)
            if smi
            else _systemctl(settings, "start", name)
        )
        if done.rc:
            left.append(name)
            what = f"persistence mode of {name} can't be set" if smi else f"{name} does not start again"
            trouble = trouble or f"{what}: {_words(done)}"
    journal.put(STOPPED, left or None)
    if trouble:
        from slurm_gpuhealth.say import say

        say(f"stopped for a GPU reset: {trouble}", error=True)
    return trouble


def mend_after_a_kill(settings: Settings, journal: Journal) -> None:
    """`mend`, from the check; not while a worker is at it: what it has stopped must not come back under its reset."""
    turn = lock.take(settings, state.LOCK)
    if turn is not None:
        try:
            mend(settings, journal)
        finally:
            os.close(turn)


def _which(climb: Climb) -> list[str]:
    """The bus ids to name; none means all."""
    from slurm_gpuhealth.node import record

    known = climb.journal.get("gpus", [])
    patterns = climb.settings.reset.together
    if any(fnmatchcase(gpu.get("name") or "", one) for gpu in known for one in patterns):
        return []
    open_ = record.select(climb.journal, "rung = 'reset' AND severity = 'fault' AND cleared IS NULL AND seen >= ?", 0.0)
    wanted = {one.finding.gpu.pci for one in open_ if one.finding.standing and one.finding.gpu}
    blamed = state.blamed(climb.journal, climb.ours)
    wanted.add(blamed.pci if blamed else None)
    return sorted(f"{pci}.0" for pci in wanted if pci)


def _readings(journal: Journal) -> list[dict[str, Any]]:
    """NVML's last reading of each GPU."""
    found: list[dict[str, Any]] = journal.get("nvml", {}).get("gpus", [])
    return found


def _stop(settings: Settings, journal: Journal) -> None:
    """Stop the services that are active; written down before the first is."""
    found = [
        unit
        for unit in settings.reset.services
        if _systemctl(settings, "is-active", unit).stdout.decode("utf-8", "replace").strip() in ACTIVE
    ]
    journal.put(STOPPED, list(dict.fromkeys([*journal.get(STOPPED, []), *found])) or None)
    for unit in found:
        _systemctl(settings, "stop", unit)


def _reset(settings: Settings, journal: Journal, gpus: list[str], deadline: float) -> Result | None:
    """Reset them; what went wrong, or None."""
    done = _smi(settings, journal, gpus, deadline)
    if isinstance(done, child.Completed) and done.rc and BUSY in _all(done).lower() and _persistent(journal, gpus):
        held = _persistent(journal, gpus)
        journal.put(STOPPED, [*journal.get(STOPPED, []), *held])
        child.run([settings.reset.nvidia_smi, "-i", ",".join(held), "-pm", "0"], timeout=UNIT_SECONDS)
        done = _smi(settings, journal, gpus, deadline)
    if isinstance(done, child.Completed) and done.rc and gpus and any(word in _all(done).lower() for word in PEERS):
        done = _smi(settings, journal, [], deadline)
    if isinstance(done, str):
        return Result("fail", done)
    if done.stuck or done.timed_out:
        return Result("fail", f"nvidia-smi did not reset it in {done.seconds:.0f} s: the driver hangs")
    if not done.rc:
        return None
    said = _words(done)
    if done.rc in (126, 127):
        return Result("untested", f"{said}: set reset.nvidia_smi")
    if BUSY in _all(done).lower() or "in use" in said.lower():
        who = holders(settings)
        return Result("untested", f"{said}; open: {who}: end it, or add its unit to reset.services" if who else said)
    return Result("fail", f"nvidia-smi exit {done.rc}: {said}")


def _smi(settings: Settings, journal: Journal, gpus: list[str], deadline: float) -> child.Completed | str:
    """One try, while no look of ours holds the driver; or why there was none."""
    argv = [settings.reset.nvidia_smi, "--gpu-reset", *(["-i", ",".join(gpus)] if gpus else [])]
    left = max(1.0, deadline - time.monotonic())
    turn = lock.take(settings, "diagnostic", time.monotonic() + left)
    try:
        done: child.Completed | None = lock.guarded(
            settings, journal, "nvml", left, lambda seconds: child.run(argv, timeout=seconds)
        )
        return done or "an earlier program of ours hangs in the driver and can't be killed"
    except TimeoutError as error:
        return f"the driver could not be had: {error}"
    finally:
        if turn is not None:
            os.close(turn)


def _persistent(journal: Journal, gpus: list[str]) -> list[str]:
    """Of these GPUs, those whose persistence mode was on at the last look."""
    addresses = {gpu["uuid"]: f"{gpu['pci']}.0" for gpu in journal.get("gpus", []) if gpu.get("pci")}
    on = [addresses.get(gpu.get("uuid", ""), "") for gpu in _readings(journal) if gpu.get("persistence")]
    return [one for one in on if one and (not gpus or one in gpus)]


def holders(settings: Settings, most: int = 5) -> str:
    """Processes that have a GPU's device open: `name (pid), …`; "" for none."""
    proc, dev = settings.paths.proc, os.path.join(settings.paths.dev, "nvidia")
    found: list[str] = []
    end = time.monotonic() + 5
    for pid in sorted((name for name in os.listdir(proc) if name.isdigit()), key=int):
        if len(found) == most or time.monotonic() > end:
            found.append("…")
            break
        try:
            files = {os.readlink(fd.path) for fd in os.scandir(os.path.join(proc, pid, "fd"))}
            if any(file.startswith(dev) for file in files):
                with open(os.path.join(proc, pid, "comm"), errors="replace") as comm:
                    found.append(f"{comm.read().strip()} ({pid})")
        except OSError:  # gone meanwhile
            continue
    return ", ".join(found)


def _test(climb: Climb) -> Result:
    """Level 1, once DCGM's host engine is there again."""
    from slurm_gpuhealth.ladder import rung_test

    end = time.monotonic() + AWAKE
    while True:
        result = rung_test.levels(climb, 1)
        if result.outcome != "untested" or time.monotonic() > end:
            return result
        climb.check_hold()
        time.sleep(2)


def _systemctl(settings: Settings, verb: str, unit: str) -> child.Completed:
    return child.run([settings.reset.systemctl, verb, unit], timeout=UNIT_SECONDS)


def _all(done: child.Completed) -> str:
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def _words(done: child.Completed) -> str:
    """What it said, in one line."""
    text = " ".join(_all(done).split())
    return text[:200] or (f"no end in {done.seconds:.0f} s" if done.timed_out else f"exit {done.rc}")
