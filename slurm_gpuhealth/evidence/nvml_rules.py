"""The state of each GPU by an NVML reading: rules from values to findings. Pure.

A rule gets a GPU's values now, its facts (nvml.py's baseline with this reading), the earlier baseline and the values of
the reading before, and yields findings as `_found` makes them. If a model or a driver does not know a value, it is
missing, and its rule yields nothing.
"""

from __future__ import annotations

from slurm_gpuhealth.findings import Finding, Gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Severity

    Values = Mapping[str, Any]
    Found = dict[str, Any]

ACTIONS = {  # NVML_GPU_RECOVERY_ACTION_* → the word that policy rows ask for, what it means
    1: ("reset", "a reset of the GPU"),
    2: ("reboot", "a reboot of the node"),
    3: ("drain-p2p", "the end of peer-to-peer traffic"),
    4: ("drain-and-reset", "the end of its jobs, and a reset"),
    5: ("imex", "a recovery of the IMEX domain"),
    6: ("bus-reset", "a reset of its PCIe bus"),
    7: ("reboot", "a reboot of the node"),
}
REASONS = (  # bit of the clock event reasons → code, meaning; the first that is set counts: 0x8 comes with the others
    (0x40, "thermal", "hardware thermal slowdown: too hot; check fans and inlet temperature"),
    (0x80, "brake", "power brake: the power supply asked for less; check the power supplies"),
    (0x08, "slowdown", "hardware slowdown: clocks halved or worse by temperature, power brake or voltage"),
)
TEPID, BURNT = 50, 200
"""°C. A threshold or temperature outside of these is not a real value: -1, 2³²-1, or the distance to a limit."""
REPLAYS_PER_MINUTE = 8
"""DCGM's own limit (DCGM_LIMIT_MAX_PCIREPLAY_RATE)."""
LINK_ERRORS = {  # counter → how many a second are normal (DCGM: 100 CRC errors a second), what it counts
    "crc_flit": (100.0, "flit CRC errors"),
    "crc_data": (100.0, "data CRC errors"),
    "link_replay": (1.0, "replays"),
    "link_recovery": (0.0, "recoveries"),
    "link_ecc": (1.0, "ECC errors"),
}
MODES = (("persistence", "persist", "persistence mode"), ("ecc", "ecc-off", "ECC"))


def judge_gpu(
    gpu: Values, facts: Values, last: Values | None, before: Values | None, seconds: float, settings: Settings
) -> Iterator[Found]:
    """Findings (as keywords of `Finding`) about one GPU that answers. `seconds`: the time since `before`."""
    yield from _memory(gpu, last)
    yield from _rows(gpu)
    yield from _recovery(gpu)
    yield from _clocks(gpu)
    yield from _temperature(gpu, facts, settings)
    yield from _pcie(gpu, facts, before, seconds)
    yield from _links(gpu, before, seconds)
    yield from _expected(facts, settings)
    yield from _mig(gpu, last)


def judge_node(
    present: Sequence[Values], new: Mapping[str, Values], driver: str, settings: Settings, now: float
) -> Iterator[Finding]:
    """Findings that compare the node's GPUs: different modes, NVLinks that the others have, the driver."""
    yield from _modes(present, new, now)
    yield from _links_down(present, new, now)
    wanted = settings.gpus.driver
    if wanted and not any(driver == one or driver.startswith(f"{one}.") for one in wanted):
        expected = " or ".join(wanted)
        message = f"driver {driver} instead of {expected} (gpus.driver); install it, or change the configuration"
        details = {"class": "config", "driver": driver, "expected": expected}
        yield Finding(now, "nvml", "driver", message, severity="warning", standing=True, details=details)


def _found(code: str, severity: Severity, message: str, standing: bool = True, **details: Any) -> Found:
    return {"code": code, "severity": severity, "message": message, "standing": standing, "details": details}


def _memory(gpu: Values, last: Values | None) -> Iterator[Found]:
    """Uncorrectable errors since the baseline; errors from before we first saw this GPU are history."""
    growth = []
    for key, after_reset in (("ecc_volatile", True), ("ecc_aggregate", False)):
        count, old = gpu.get(key), (last or {}).get(key)
        if count is not None and old is not None:
            # A reset clears the volatile count: then all of it is new. If the aggregate shrinks, a person erased it.
            growth.append(count - old if count >= old else count if after_reset else 0)
    grown = max(growth, default=0)
    if grown > 0:
        words = f"{grown} new uncorrectable memory error{'s' if grown > 1 else ''} (ECC)"
        message = f"{words}; the job that used that memory died, see dmesg for Xid 48, 94, 95"
        totals = {"volatile": gpu.get("ecc_volatile"), "aggregate": gpu.get("ecc_aggregate")}
        yield _found("ecc", "warning", message, False, new=grown, **totals)


def _rows(gpu: Values) -> Iterator[Found]:
    """Row remapping (A100 and later): NVIDIA's criterion for returning a GPU is a failed remapping."""
    if "rows" not in gpu:
        return
    correctable, uncorrectable, pending, failed = gpu["rows"]
    counts = {"correctable": correctable, "uncorrectable": uncorrectable}
    if failed:
        yield _found("remap-fail", "fault", "a broken memory row could not be remapped: return the GPU", **counts)
    if pending:
        message = "a broken memory row is remapped at the next GPU reset; until then that memory must not be used"
        yield _found("remap-pend", "fault", message, **counts)
    spent = gpu["banks"][4] if "banks" in gpu else 0
    if spent and not failed:
        message = f"{spent} memory bank(s) have no spare row left: the next broken row there can't be remapped"
        yield _found("remap-left", "warning", message, banks=spent, **counts)


def _recovery(gpu: Values) -> Iterator[Found]:
    number = gpu.get("recovery", 0)
    if number:
        action, words = ACTIONS.get(number, ("unknown", f"action {number}, which this version does not know"))
        severity: Severity = "fault" if number in ACTIONS else "warning"
        yield _found("recovery", severity, f"the driver asks for {words}", action=action, number=number)


def _clocks(gpu: Values) -> Iterator[Found]:
    """One finding per reading; the policy decides how many are too many. Ignores the software power cap (bit 0x4)."""
    for bit, code, meaning in REASONS:
        if gpu.get("reasons", 0) & bit:
            yield _found(code, "info", f"clocks are held down: {meaning}", False, reasons=gpu["reasons"])
            return


def _temperature(gpu: Values, facts: Values, settings: Settings) -> Iterator[Found]:
    degrees = gpu.get("temperature")
    slowdown, allowed = facts.get("slowdown"), settings.nvml.max_temperature
    if degrees is None or not 0 < degrees < BURNT:
        return
    if slowdown and degrees >= slowdown > TEPID:
        yield _found("hot", "fault", f"{degrees} °C: its own slowdown threshold is {slowdown} °C", celsius=degrees)
    elif degrees >= allowed:
        message = f"{degrees} °C: nvml.max_temperature is {allowed} °C; check fans and inlet temperature"
        yield _found("hot", "warning", message, celsius=degrees)


def _pcie(gpu: Values, facts: Values, before: Values | None, seconds: float) -> Iterator[Found]:
    """`gen` and `width` are the last values under load: an idle link becomes narrow and slow to save power."""
    for key, best, code, name in (
        ("gen", "max_gen", "pcie-gen", "generation"),
        ("width", "max_width", "pcie-width", "width"),
    ):
        now, most = facts.get(key), facts.get(best)
        if now and most and now < most:
            message = f"PCIe {name} {now} under load, but {most} is possible: reseat the GPU or its riser"
            yield _found(code, "warning", message, now=now, best=most)
    grown = gpu.get("replay", 0) - (before or gpu).get("replay", gpu.get("replay", 0))
    if grown > REPLAYS_PER_MINUTE * max(1.0, seconds / 60):
        message = f"{grown} PCIe replays in {seconds:.0f} s: a bad slot, riser or cable"
        yield _found("replay", "warning", message, False, new=grown, total=gpu["replay"])


def _links(gpu: Values, before: Values | None, seconds: float) -> Iterator[Found]:
    """NVLink error counters, by their growth; a reset clears them."""
    for key, (allowed, name) in LINK_ERRORS.items():
        grown = gpu.get(key, 0) - (before or gpu).get(key, gpu.get(key, 0))
        if grown > allowed * seconds:
            yield _found(
                "nvlink-err", "warning", f"{grown} NVLink {name} in {seconds:.0f} s", False, counter=key, new=grown
            )
            return


def _expected(facts: Values, settings: Settings) -> Iterator[Found]:
    vbios, wanted = facts.get("vbios"), settings.gpus.vbios
    if wanted and vbios and vbios not in wanted:
        message = f"VBIOS {vbios} instead of {' or '.join(wanted)} (gpus.vbios); flash it, or change the configuration"
        yield _found("vbios", "warning", message, **{"class": "config", "vbios": vbios, "expected": " ".join(wanted)})


def _mig(gpu: Values, last: Values | None) -> Iterator[Found]:
    """A node may have some GPUs in MIG mode and others not, so only a change is reported."""
    mode, old = gpu.get("mig"), (last or {}).get("mig")
    if mode is not None and old is not None and mode != old:
        message = f"MIG mode was turned {'on' if mode else 'off'}"
        yield _found("mig", "info", message, False, **{"class": "config", "value": mode})


def _modes(present: Sequence[Values], new: Mapping[str, Values], now: float) -> Iterator[Finding]:
    """A GPU without a mode that most GPUs of the node have, or that it had before."""
    for key, code, name in MODES:
        on = [gpu["uuid"] for gpu in present if gpu.get(key)]
        for gpu in present:
            had = bool(new[gpu["uuid"]].get(key))
            if gpu.get(key) == 0 and (had or len(on) * 2 > len(present)):
                message = f"{name} is off, but {'it was on before' if had else 'most GPUs of this node have it on'}"
                yield Finding(now, "nvml", code, message, _who(gpu, new), "info", True, details={"class": "config"})


def _links_down(present: Sequence[Values], new: Mapping[str, Values], now: float) -> Iterator[Finding]:
    """Inactive NVLinks that were active before, or that the node's other GPUs of the same kind have.

    If no GPU has an active link, the fabric is at fault, not all GPUs. A GPU in MIG mode has its links off.
    """
    judged = [gpu for gpu in present if "links" in gpu and not gpu.get("mig")]
    counts = sorted(sum(map(bool, gpu["links"])) for gpu in judged)
    usual = counts[(len(counts) - 1) // 2] if counts else 0
    expected = [max(usual, new[gpu["uuid"]].get("links", 0)) for gpu in judged]
    if len(judged) > 1 and not counts[-1] and any(expected):
        message = f"all NVLinks of all {len(judged)} GPUs are down: check the fabric manager and the NVSwitches"
        details = {"class": "config", "how": "fabric"}
        yield Finding(now, "nvml", "nvlink", message, None, "warning", True, details=details)
        return
    for gpu, wanted in zip(judged, expected):
        down = [link for link, state in enumerate(gpu["links"]) if not state]
        if len(gpu["links"]) - len(down) < wanted:
            numbers = ",".join(map(str, down))
            message = f"NVLink {numbers} inactive ({len(gpu['links']) - len(down)} active, {wanted} expected)"
            yield Finding(now, "nvml", "nvlink", message, _who(gpu, new), "warning", True, details={"down": numbers})


def _who(gpu: Values, new: Mapping[str, Values]) -> Gpu:
    facts = new[gpu["uuid"]]
    return Gpu(gpu["uuid"], facts.get("pci"), gpu["index"], facts.get("serial"))
