"""One reading of all GPUs through nvidia-ml-py. Runs in a child process: each of these calls may hang (child.py).

The reading, of `marshal`'s types:

    {"driver": "580.95.05", "gpus": [GPU, ...], "seconds": 0.01}       or
    {"failed": {"code": 9, "text": "Driver Not Loaded"}}

GPU has "index", "errors" ({call: NVML return code}) and the keys of EACH_LOOK and FIELDS that the model and the driver
know; also those of ONCE if the GPU was not in `links` or everything was asked for, and of WORKING if a job has it.
"""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

GPU_IS_LOST = 15
UNKNOWN = 999
UNSUPPORTED = (2, 3, 13, 25, 26)
"""Invalid argument (an old driver's answer to a new field), not supported, function not found, version, deprecated."""

# key → the calls that give it, in this order, without "nvmlDevice"; their arguments; how to convert the answer
EACH_LOOK: tuple[tuple[str, str, tuple[int, ...], Callable[[Any], Any] | None], ...] = (
    ("temperature", "GetTemperature GetTemperatureV", (0,), None),
    ("ecc_volatile", "GetTotalEccErrors", (1, 0), None),
    ("ecc_aggregate", "GetTotalEccErrors", (1, 1), None),
    ("rows", "GetRemappedRows", (), list),
    ("reasons", "GetCurrentClocksEventReasons GetCurrentClocksThrottleReasons", (), None),
    ("pstate", "GetPerformanceState", (), None),
    ("utilization", "GetUtilizationRates", (), lambda rates: rates.gpu),
    ("replay", "GetPcieReplayCounter", (), None),
    ("persistence", "GetPersistenceMode", (), None),
    ("ecc", "GetEccMode", (), lambda mode: mode[0]),
    ("mig", "GetMigMode", (), lambda mode: mode[0]),
)
ONCE: tuple[tuple[str, str, tuple[int, ...], Callable[[Any], Any] | None], ...] = (
    ("pci", "GetPciInfo", (), lambda info: pci_address(info.busId)),
    ("serial", "GetSerial", (), None),
    ("minor", "GetMinorNumber", (), None),
    ("name", "GetName", (), None),
    ("vbios", "GetVbiosVersion", (), None),
    ("slowdown", "GetTemperatureThreshold", (1,), None),
    ("max_gen", "GetMaxPcieLinkGeneration", (), None),
    ("max_width", "GetMaxPcieLinkWidth", (), None),
    ("max_clock", "GetMaxClockInfo", (1,), None),
)
WORKING: tuple[tuple[str, str, tuple[int, ...], Callable[[Any], Any] | None], ...] = (
    # Clocks of the SMs in MHz. Power and limit in mW, energy in mJ since the driver was loaded.
    ("memory_utilization", "GetUtilizationRates", (), lambda rates: rates.memory),
    ("power", "GetPowerUsage", (), None),
    ("limit", "GetEnforcedPowerLimit", (), None),
    ("energy", "GetTotalEnergyConsumption", (), None),
    ("clock", "GetClockInfo", (1,), None),
    ("memory", "GetMemoryInfo", (), lambda memory: memory.used >> 20),
    ("processes", "GetComputeRunningProcesses", (), len),
)
UNDER_LOAD = (
    ("gen", "GetCurrPcieLinkGeneration", (), None),
    ("width", "GetCurrPcieLinkWidth", (), None),
)
ROWS_LEFT = (
    ("banks", "GetRowRemapperHistogram", (), lambda rows: [rows.max, rows.high, rows.partial, rows.low, rows.none]),
)
# NVML_FI_* of nvml.h, all in one call; an unknown field does not affect the others.
FIELDS = {"recovery": 230, "crc_flit": 38, "crc_data": 45, "link_replay": 52, "link_recovery": 59, "link_ecc": 160}
ALL_LINKS = 0xFFFFFFFF
TRAFFIC = {"nvlink_tx": (138, ALL_LINKS), "nvlink_rx": (139, ALL_LINKS), "pcie_tx": (197, 0), "pcie_rx": (198, 0)}
"""Counters: KiB of data over NVLink, bytes over PCIe. (nvmlDeviceGetPcieThroughput takes 20 ms for each direction.)"""
LINK_COUNT, LINK_STATE = 91, 165
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The members of a field value's union, by its type."""


def read_all(library: str, links: dict[str, int], full: bool, held: Collection[str] = ()) -> dict[str, Any]:
    """One reading. `links`: the number of NVLinks of each GPU (by UUID) whose unchanging facts are already known;
    `held`: the GPUs of running jobs."""
    began = time.monotonic()
    nvml = import_pynvml()
    try:
        start(nvml, library)
        driver = nvml.nvmlSystemGetDriverVersion()
        count = nvml.nvmlDeviceGetCount()
    except OSError as error:
        return {"failed": {"code": 12, "text": str(error)}}
    except nvml.NVMLError as error:
        return {"failed": {"code": error.value, "text": str(error)}}
    gpus = [_read_gpu(nvml, index, links, full, held) for index in range(count)]
    return {"driver": driver, "gpus": gpus, "seconds": time.monotonic() - began}


def import_pynvml() -> Any:
    """nvidia-ml-py without two modules that it imports but does not need on Linux.

    `ctypes.util` (for `find_library`, never called) and `string` (for one `capwords`) import `subprocess`, `tempfile`
    and `re`, which costs as much CPU as starting Python: too much for each minute on each node.
    """
    import ctypes

    stand_ins: dict[str, dict[str, Any]] = {
        "ctypes.util": {"find_library": None},
        "string": {"capwords": lambda text, sep: sep.join(word.capitalize() for word in text.split(sep))},
    }
    stand_ins = {name: names for name, names in stand_ins.items() if name not in sys.modules}
    for name, names in stand_ins.items():
        module = type(ctypes)(name)
        module.__dict__.update(names)
        sys.modules[name] = module
    try:
        import pynvml  # type: ignore[import-untyped]
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return pynvml


def start(nvml: Any, library: str) -> None:
    """Initialise NVML, from the file `library` if given, instead of the system's libnvidia-ml.so.1."""
    if library:
        import ctypes

        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # pynvml opens it by its SONAME, which the linker has then loaded
    nvml.nvmlInit()


def pci_address(bus: bytes | str) -> str:
    """`dddd:bb:dd` of NVML's `00000000:1B:00.0`; a domain above ffff keeps its digits."""
    domain, number, device = (bus.decode() if isinstance(bus, bytes) else bus).lower().split(":")
    return f"{int(domain, 16):04x}:{number}:{device.partition('.')[0]}"


def _read_gpu(nvml: Any, index: int, links: dict[str, int], full: bool, held: Collection[str]) -> dict[str, Any]:
    gpu: dict[str, Any] = {"index": index, "errors": {}}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu["uuid"] = nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError as error:
        gpu["errors"]["handle"] = error.value
        return gpu
    new = full or gpu["uuid"] not in links
    ask(nvml, handle, gpu, ONCE + EACH_LOOK if new else EACH_LOOK)
    if gpu.get("pstate", 99) <= 2 and gpu.get("utilization", 0) >= 5:  # an idle link slows down to save power
        ask(nvml, handle, gpu, UNDER_LOAD)
    if any(gpu.get("rows", ())):
        ask(nvml, handle, gpu, ROWS_LEFT)
    working = gpu["uuid"] in held
    if working:
        ask(nvml, handle, gpu, WORKING)
    _ask_fields(nvml, handle, gpu, None if new else links[gpu["uuid"]], TRAFFIC if working else {})
    return gpu


def ask(nvml: Any, handle: Any, gpu: dict[str, Any], calls: Collection[tuple[Any, ...]]) -> None:
    """Put the answers of `calls` into `gpu`, without unsupported ones. After "GPU is lost" no call follows."""
    for key, names, arguments, convert in calls:
        if GPU_IS_LOST in gpu["errors"].values():
            return
        for name in names.split():
            function = getattr(nvml, f"nvmlDevice{name}", None)
            try:
                if function is None:
                    continue  # an older nvidia-ml-py
                answer = function(handle, *arguments)
                gpu[key] = convert(answer) if convert else answer
            except nvml.NVMLError as error:
                if error.value in UNSUPPORTED:
                    continue
                gpu["errors"][name] = error.value
            except (
                ValueError
            ):  # an address without colons, a serial number that is not text: the other values still count
                gpu["errors"][name] = UNKNOWN
            break


def _ask_fields(
    nvml: Any, handle: Any, gpu: dict[str, Any], links: int | None, more: dict[str, tuple[int, int]]
) -> None:
    """FIELDS, `more`, and "links": the state of each NVLink (0 inactive, 1 active, 2 asleep)."""
    if GPU_IS_LOST in gpu["errors"].values():
        return
    try:
        if links is None:
            (count,) = nvml.nvmlDeviceGetFieldValues(handle, [LINK_COUNT])
            links = _number(count) or 0
            gpu["nvlinks"] = links
        fields = {**FIELDS, **more}
        wanted: list[Any] = [*fields.values(), *((LINK_STATE, link) for link in range(links))]
        values = [_number(value) for value in nvml.nvmlDeviceGetFieldValues(handle, wanted)]
    except nvml.NVMLError as error:
        if error.value not in UNSUPPORTED:
            gpu["errors"]["GetFieldValues"] = error.value
        return
    gpu.update((key, value) for key, value in zip(fields, values) if value is not None)
    states = values[len(fields) :]
    if None in states:  # this driver does not have the state as a field
        states = [_link_state(nvml, handle, link) for link in range(links)]
    if states and None not in states:
        gpu["links"] = states


def _number(value: Any) -> int | None:
    if value.nvmlReturn != 0 or value.valueType >= len(MEMBERS):
        return None
    return int(getattr(value.value, MEMBERS[value.valueType]))


def _link_state(nvml: Any, handle: Any, link: int) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:
        return None
