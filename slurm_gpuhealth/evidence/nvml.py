"""What NVIDIA's management library says about the GPUs: which are there, and (nvml_rules.py) the state of each.

    read         in a child, which may hang: nvml_probe.py's reading
    judge_probed pure: reading, the one before and the baseline → findings and the new baseline

The baseline keeps, by UUID, each GPU's unchanging facts (so that a GPU that no longer answers still has a name) and the
error counts that were already reported. `lost` needs no driver call that could hang: such a GPU is missing in the list.
"""

from __future__ import annotations

from slurm_gpuhealth.child import probe
from slurm_gpuhealth.evidence import nvml_rules
from slurm_gpuhealth.findings import Finding, Gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.child import Probed
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Scalar, Severity

STATIC = ("pci", "serial", "minor", "name", "vbios", "slowdown", "max_gen", "max_width", "max_clock", "nvlinks")
LASTING = ("ecc_volatile", "ecc_aggregate", "mig", "gen", "width")
"""What a GPU's baseline takes from the reading, if it has it; `gen` and `width` are seen only under load."""

# NVML's answer to nvmlInit and similar calls → source, code, meaning and remedy. None of these means a broken GPU.
NOT_READY = {
    4: ("driver", "permission", "we may not open the driver's devices; run as root, outside a device cgroup"),
    9: ("driver", "not-loaded", "the nvidia kernel module is not loaded; see dmesg and `modprobe nvidia`"),
    12: (
        "driver",
        "no-library",
        "libnvidia-ml.so.1 can't be loaded; install the driver's libraries or set nvml.library",
    ),
    18: ("driver", "mismatch", "library and kernel module have different versions: the driver was updated; reboot"),
}
HANDLE = {  # NVML's answer when asked for one GPU → severity, code, meaning
    4: ("info", "permission", "we may not open this GPU's device file"),
    8: ("fault", "power", "not all of its external power cables are connected"),
    11: ("fault", "irq", "the driver gets no interrupts from it"),
    14: ("warning", "inforom", "its InfoROM is corrupted"),
    15: ("fault", "lost", "it has fallen off the bus or does not answer the driver"),
    16: ("fault", "recovery", "the driver wants it reset before it can be used"),
    999: ("fault", "lost", "the driver can't talk to it (unknown error)"),
}
ACTION: dict[str, dict[str, str]] = {"recovery": {"action": "reset"}}


def read(
    settings: Settings,
    *,
    timeout: float | None = None,
    full: bool = False,
    baseline: Mapping[str, Any] | None = None,
    held: Collection[str] = (),
) -> Probed:
    """One reading (nvml_probe.read_all), made in a child that has `timeout` seconds (default: nvml.timeout).

    Facts that do not change are read only for GPUs that `baseline` (from `judge_probed`) lacks; for all if `full`. What
    a GPU does for its job is read only of those in `held`, by UUID.
    """
    links = {uuid: gpu.get("nvlinks", 0) for uuid, gpu in (baseline or {}).get("gpus", {}).items()}

    def look() -> dict[str, Any]:
        import gc

        gc.disable()  # nvidia-ml-py's thousand functions are no garbage, and this child ends in a moment
        from slurm_gpuhealth.evidence.nvml_probe import read_all

        return read_all(settings.nvml.library, links, full, held)

    return probe(look, timeout=settings.nvml.timeout if timeout is None else timeout)


def judge_probed(
    probed: Probed,
    previous: Mapping[str, Any] | None,
    baseline: Mapping[str, Any],
    known: Sequence[Mapping[str, Any]],
    settings: Settings,
    now: float,
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of a reading, and the baseline for the next.

    `previous` is the last good reading with its "time"; `known` the GPUs that the driver listed at boot
    (inventory.identities). A failed reading is a tool error; baseline stays as it is.
    """
    reading = probed.value
    if not reading:
        code = "timeout" if probed.timed_out else "probe"
        message = f"NVML gave no reading: {probed.error}. This is not a hardware fault; see dmesg, try nvidia-smi"
        return [_tool("nvml", code, message, now)], dict(baseline)
    if "failed" in reading:
        failed = reading["failed"]
        source, code, meaning = NOT_READY.get(failed["code"], ("nvml", "init", "see dmesg, try nvidia-smi"))
        message = f"NVML does not start: {failed['text']} ({failed['code']}): {meaning}"
        return [_tool(source, code, message, now)], dict(baseline)
    old = baseline.get("gpus", {})
    names = {**{gpu["uuid"]: dict(gpu) for gpu in known if gpu.get("uuid")}, **old}
    present = [gpu for gpu in reading["gpus"] if "uuid" in gpu]
    findings = _missing(reading["gpus"], names, settings, now)
    before = {gpu.get("uuid"): gpu for gpu in (previous or {}).get("gpus", ())}
    seconds = max(1.0, now - (previous or {}).get("time", now))
    new = {}
    for gpu in present:
        facts = {**names.get(gpu["uuid"], {}), **{key: gpu[key] for key in STATIC if key in gpu}}
        last = old.get(gpu["uuid"])
        new[gpu["uuid"]] = _remember(gpu, facts)
        who = Gpu(gpu["uuid"], facts.get("pci"), gpu["index"], facts.get("serial"))
        seen = nvml_rules.judge_gpu(gpu, new[gpu["uuid"]], last, before.get(gpu["uuid"]), seconds, settings)
        findings += [Finding(now, "nvml", gpu=who, **found) for found in [*_call_errors(gpu), *seen]]
    findings += nvml_rules.judge_node(present, new, reading["driver"], settings, now)
    kept = {} if 0 < settings.gpus.count <= len(present) else _kept(names, new)
    return findings, {"driver": reading["driver"], "gpus": {**kept, **new}}


def hung(now: float) -> Finding:
    """The finding for a child that could not be killed and still exists at the next look."""
    message = (
        "driver unresponsive: a child that read NVML has been in uninterruptible sleep since an earlier check, so no "
        "other is started. Jobs that use a GPU will hang too; reboot the node, see dmesg for Xid 79, 119, 120"
    )
    return Finding(now, "driver", "hung", message, severity="fault", standing=True)


def _missing(
    gpus: Sequence[Mapping[str, Any]], names: Mapping[str, Mapping[str, Any]], settings: Settings, now: float
) -> list[Finding]:
    """Findings for GPUs without a handle, and for GPUs that were here but are not listed any more."""
    here = {gpu.get("uuid") for gpu in gpus}
    there = {facts.get("pci") for uuid, facts in names.items() if uuid in here} | {gpu.get("pci") for gpu in gpus}
    order = sorted(names, key=lambda uuid: names[uuid].get("pci") or "")
    # If another GPU has its address, it was replaced.
    gone = [uuid for uuid in order if uuid not in here and names[uuid].get("pci") not in there]
    findings = []
    for gpu in (gpu for gpu in gpus if "uuid" not in gpu):
        index = gpu["index"]
        likely = [uuid for uuid in gone if names[uuid].get("index") == index]
        uuid = likely[0] if likely else gone[0] if gone else None
        if uuid:
            gone.remove(uuid)
        findings.append(_no_handle(gpu["errors"]["handle"], _named(uuid, names, index), now))
    present = sum("uuid" in gpu for gpu in gpus)
    if 0 < settings.gpus.count <= present:
        return findings
    for uuid in gone:
        who = _named(uuid, names, None)
        message = (
            f"{_words(who)} is missing: it was here before, but is not one of the {len(gpus)} GPUs that NVML lists"
        )
        remedy = "reset or reboot; if it was taken out on purpose, set gpus.count"
        findings.append(
            Finding(now, "nvml", "lost", f"{message}; {remedy}", who, "fault", True, details={"how": "absent"})
        )
    expected = settings.gpus.count
    if expected > present + len(findings):
        message = f"{present} GPUs instead of {expected} (gpus.count): the others were never seen; see lspci and dmesg"
        details = {"present": present, "expected": expected}
        findings.append(Finding(now, "nvml", "count", message, None, "fault", True, details=details))
    return findings


def _no_handle(code: int, who: Gpu, now: float) -> Finding:
    severity: Severity
    severity, word, meaning = HANDLE.get(code, ("warning", "handle", "it can't be asked anything"))  # type: ignore[assignment]
    message = f"{_words(who)} gives no handle (NVML error {code}): {meaning}; see dmesg for its Xid"
    details: dict[str, Scalar] = {"nvml": code, "how": "handle", **ACTION.get(word, {})}
    return Finding(now, "nvml", word, message, who, severity, True, details=details)


def _call_errors(gpu: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Errors of a GPU with a handle: lost or reset needed, as without a handle; other errors in one finding."""
    errors = gpu["errors"]
    for code in (15, 16):
        if code in errors.values():
            severity, word, meaning = HANDLE[code]
            details = {"nvml": code, "how": "call", **ACTION.get(word, {})}
            message = f"{meaning[:1].upper()}{meaning[1:]} (NVML error {code}); see dmesg for its Xid"
            return [{"code": word, "severity": severity, "message": message, "standing": True, "details": details}]
    if not errors:
        return []
    calls = ", ".join(f"{call}: {code}" for call, code in sorted(errors.items()))
    message = f"NVML could not answer ({calls}); see dmesg"
    return [{"code": "call", "severity": "info", "message": message, "standing": True, "details": {"calls": calls}}]


def _named(uuid: str | None, names: Mapping[str, Mapping[str, Any]], index: int | None) -> Gpu:
    facts = names.get(uuid, {}) if uuid else {}
    return Gpu(uuid, facts.get("pci"), facts.get("index", index), facts.get("serial"))


def _words(gpu: Gpu) -> str:
    parts = [f"GPU{'' if gpu.index is None else gpu.index}", gpu.pci, gpu.uuid, gpu.serial and f"serial {gpu.serial}"]
    return " ".join(part for part in parts if part)


def _remember(gpu: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The GPU's new baseline: facts, index, the counts that this look's findings cover, the best values ever seen."""
    lasting = {key: gpu[key] for key in LASTING if key in gpu}
    best = {"ecc": int(gpu.get("ecc", 0)), "links": sum(map(bool, gpu.get("links", ())))}
    best = {key: max(value, facts.get(key, 0)) for key, value in best.items()}
    if "max_width" in gpu:  # everything was read again after a boot: the link's state before does not count
        facts = {key: value for key, value in facts.items() if key not in ("gen", "width")}
    return {**facts, "index": gpu["index"], **lasting, **best}


def _kept(names: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """GPUs that are not here any more, unless another GPU has taken their place."""
    taken = {gpu.get("pci") for gpu in new.values()}
    return {uuid: dict(gpu) for uuid, gpu in names.items() if uuid not in new and gpu.get("pci") not in taken}


def _tool(source: str, code: str, message: str, now: float) -> Finding:
    return Finding(now, source, code, message, severity="warning", standing=True, details={"class": "tool"})
