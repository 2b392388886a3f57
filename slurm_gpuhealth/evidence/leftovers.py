"""What a job left behind on its GPUs: processes, settings that differ from the defaults, an MPS daemon.

The epilog reports them. It can also end processes and restore settings (`epilog.kill_leftovers`,
`epilog.restore_settings`). Both are off by default: on a shared node they may belong to somebody else.
NVML does not show locked clocks; it only says that a setting holds the clocks.
"""

from __future__ import annotations

import os
import signal

from slurm_gpuhealth.child import probe
from slurm_gpuhealth.evidence import inventory
from slurm_gpuhealth.findings import Finding, Gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.child import Probed
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Severity

MPS = "nvidia-cuda-mps"  # -control and -server, as far as comm's 15 characters go
HELD_BY_SETTING = 0x2  # nvmlClocksEventReasonApplicationsClocksSetting: application or locked clocks
COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
VALUES: tuple[tuple[Any, ...], ...] = (
    ("compute_mode", "GetComputeMode", (), None),
    ("power_limit", "GetPowerManagementLimit", (), None),
    ("default_power_limit", "GetPowerManagementDefaultLimit", (), None),
    ("app_clock", "GetApplicationsClock", (1,), None),  # of the streaming multiprocessors, MHz
    ("default_app_clock", "GetDefaultApplicationsClock", (1,), None),
    ("reasons", "GetCurrentClocksEventReasons GetCurrentClocksThrottleReasons", (), None),
    ("pids", "GetComputeRunningProcesses", (), lambda found: [process.pid for process in found]),
)


def read(settings: Settings, uuids: Sequence[str], timeout: float) -> Probed:
    """In a child: {"gpus": {uuid: VALUES}, "processes": {pid: [uid, start, name]}, "mps": [pid, ...]}."""

    def look() -> dict[str, Any]:
        from slurm_gpuhealth.evidence import nvml_probe

        gpus = {}
        nvml = nvml_probe.import_pynvml()
        nvml_probe.start(nvml, settings.nvml.library)
        for uuid in uuids:
            gpu: dict[str, Any] = {"errors": {}}
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                gpu["index"] = nvml.nvmlDeviceGetIndex(handle)
                nvml_probe.ask(nvml, handle, gpu, VALUES)
            except nvml.NVMLError as error:
                gpu["errors"]["handle"] = error.value
            gpus[uuid] = gpu
        mps = [pid for pid, name in inventory.processes(settings) if name.startswith(MPS)]
        pids = sorted({*mps, *(pid for gpu in gpus.values() for pid in gpu.get("pids", ()))})
        return {"gpus": gpus, "processes": {pid: _process(settings, pid) for pid in pids}, "mps": mps}

    return probe(look, timeout=timeout)


def judge_leftovers(
    reading: Mapping[str, Any], known: Sequence[Mapping[str, Any]], uid: int, now: float
) -> list[Finding]:
    """Findings about the GPUs of `reading` after a job of `uid`; `known` names them. nvml.py reports lost GPUs."""
    findings = []
    names = {gpu["uuid"]: gpu for gpu in known}
    for uuid, gpu in reading["gpus"].items():
        facts = names.get(uuid, {})
        who = Gpu(uuid, facts.get("pci"), gpu.get("index", facts.get("index")), facts.get("serial"))
        for code, message, details in [*_held(gpu, reading["processes"], uid), *_changed(gpu)]:
            severity: Severity = "warning" if details.get("uid") == uid else "info"
            findings.append(Finding(now, "leftover", code, message, who, severity, details=details))
    for pid in reading["mps"]:
        owner, _, name = reading["processes"][pid]
        if owner not in (0, None):  # root's daemon serves every job
            message = f"an MPS daemon of user {owner} is still running: {name!r}, pid {pid}"
            findings.append(Finding(now, "leftover", "mps", message, details={"pid": pid, "uid": owner}))
    return findings


def kill(settings: Settings, reading: Mapping[str, Any], uid: int) -> list[int]:
    """Kill processes of the job's user `uid` that still use its GPUs; returns their pids. Never root's or others'.

    Since the reading, another process may have got a pid: so it is pinned (pidfd) and checked again.
    """
    ended: list[int] = []
    if uid <= 0:
        return ended
    for pid in sorted({pid for gpu in reading["gpus"].values() for pid in gpu.get("pids", ())}):
        try:
            pinned = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            now = _process(settings, pid)
            if now[0] == uid and now == reading["processes"].get(pid):
                signal.pidfd_send_signal(pinned, signal.SIGKILL)
                ended.append(pid)
        except ProcessLookupError:
            pass
        finally:
            os.close(pinned)
    return ended


def restore(settings: Settings, reading: Mapping[str, Any], timeout: float) -> Probed:
    """In a child: restore compute mode, clocks and power limit that `reading` found changed; value: what failed."""
    wanted = {uuid: [code for code, _, _ in _changed(gpu)] for uuid, gpu in reading["gpus"].items()}

    def put_back() -> dict[str, Any]:
        from slurm_gpuhealth.evidence import nvml_probe

        nvml = nvml_probe.import_pynvml()
        nvml_probe.start(nvml, settings.nvml.library)
        failed = {}
        for uuid, codes in wanted.items():
            for code in codes:
                try:
                    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                    if code == "mode":
                        nvml.nvmlDeviceSetComputeMode(handle, 0)
                    elif code == "power":
                        limit = reading["gpus"][uuid]["default_power_limit"]
                        nvml.nvmlDeviceSetPowerManagementLimit(handle, limit)
                    elif code == "app-clocks":
                        nvml.nvmlDeviceResetApplicationsClocks(handle)
                    else:
                        nvml.nvmlDeviceResetGpuLockedClocks(handle)
                except nvml.NVMLError as error:
                    failed[f"{uuid} {code}"] = str(error)
        return failed

    return probe(put_back, timeout=timeout)


def _held(gpu: Mapping[str, Any], processes: Mapping[int, Any], uid: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for pid in gpu.get("pids", ()):
        owner, _, name = processes.get(pid) or (None, 0, "")
        if owner == 0 != uid:
            continue  # a process of the system: a monitor, a host engine
        whose = "the job's user" if owner == uid else f"user {owner}" if owner is not None else "an unknown user"
        message = f"a process of {whose} still holds the GPU: {name!r}, pid {pid}"  # its name is hostile text
        yield "process", message, {"pid": pid, "uid": owner, "process": name}


def _changed(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Settings that are not the default: (code, message, details)."""
    mode = gpu.get("compute_mode", 0)
    if mode:
        name = COMPUTE_MODES[mode] if mode < len(COMPUTE_MODES) else str(mode)
        yield "mode", f"compute mode is {name}, not default", {"mode": mode}
    limit, usual = gpu.get("power_limit"), gpu.get("default_power_limit")
    if limit and usual and limit != usual:
        yield "power", f"power limit is {limit // 1000} W, default {usual // 1000} W", {"milliwatts": limit}
    clock, usual = gpu.get("app_clock"), gpu.get("default_app_clock")
    if clock and usual and clock != usual:
        yield "app-clocks", f"application clock is {clock} MHz, default {usual} MHz", {"mhz": clock}
    elif gpu.get("reasons", 0) & HELD_BY_SETTING:
        yield "locked", "clocks are held by a setting (locked clocks)", {"reasons": gpu["reasons"]}


def _process(settings: Settings, pid: int) -> list[Any]:
    """[uid, start time, name] of a process; [None, 0, ""] if it has ended. The user chooses the name."""
    folder = os.path.join(settings.paths.proc, str(pid))
    try:
        with open(os.path.join(folder, "status"), encoding="utf-8", errors="replace") as file:
            uids = [line.split()[1] for line in file if line.startswith("Uid:")]
        with open(os.path.join(folder, "stat"), "rb") as stat:
            data = stat.read()
    except OSError:
        return [None, 0, ""]
    name, _, rest = data.partition(b"(")[2].rpartition(b")")
    return [int(uids[0]), int(rest.split()[19]), name.decode("utf-8", "replace")]
