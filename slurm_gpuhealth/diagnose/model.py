"""The result of a DCGM diagnostic: one model for DCGM 2 to 4 and for both back ends."""

from __future__ import annotations

from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

    from slurm_gpuhealth.child import Child
    from slurm_gpuhealth.diagnose.outputs import Figure
    from slurm_gpuhealth.findings import Severity

    Outcome = Literal["pass", "fail", "warn", "config", "not-testable", "tool-error"]

HARDWARE = frozenset({"ISOLATE", "RESET", "TRIAGE"})
"""With an error of these classes no GPU job may run on the node."""
BANDWIDTH = frozenset({30, 31, 62})
"""LOW_BANDWIDTH, HIGH_LATENCY, MEMORY_BANDWIDTH: traffic of another job causes them too, so retest when idle."""

ADVICE: dict[Outcome, str] = {
    "pass": "Nothing to do.",
    "fail": "Take the node out of service and {step}.",
    "warn": "Watch it: run level 3 when the node is idle if this comes again.",
    "config": "Correct the node's configuration; the hardware is not to blame: {message}.",
    "not-testable": "This says nothing about the GPUs: {message}.",
    "tool-error": "This says nothing about the GPUs. Check DCGM itself: {message}.",
}
STEPS = {
    "L3": "run level 3",
    "L4": "run level 4",
    "reset": "reset the GPU",
    "reboot": "reboot the node",
    "RMA": "have the GPU replaced",
}


@frozen
class Error:
    """One error of one test. `cls` is the class in classes.json, else DCGM's own; UNKNOWN if neither has one."""

    test: str
    id: int | None
    name: str | None
    cls: str
    message: str


@frozen
class GpuResult:
    """One GPU's result. Its `outcome` is "pass" if nothing was found on this GPU and no test of it is missing."""

    entity_id: int
    """DCGM's GPU id. It differs from NVML's index, the minor number and Slurm's position."""
    uuid: str | None
    serial: str | None
    outcome: Outcome
    errors: tuple[Error, ...] = ()


@frozen
class TestResult:
    """One test on all GPUs. `errors`: those that DCGM assigns to no GPU."""

    name: str
    outcome: Outcome
    errors: tuple[Error, ...] = ()
    status: Literal["ran", "skip", "missing"] = "ran"
    """Whether it ran on any GPU. "skip": DCGM skipped it on all; "missing": DCGM does not mention it."""
    why: str = ""
    """For a tool error or a skip: what is known, or DCGM's own words."""


@frozen
class Diagnosis:
    """A diagnostic of run level `level` (None: not known) and what to do about it."""

    outcome: Outcome
    level: int | None = None
    dcgm_version: str | None = None
    gpus: tuple[GpuResult, ...] = ()
    tests: tuple[TestResult, ...] = ()
    next: str | None = None
    """The rung that should follow."""
    advice: str = ""
    """One sentence for people."""
    message: str = ""
    """What was found, in one line."""
    exit_code: int | None = None
    seconds: float | None = None
    busy: bool = False
    """Another diagnostic is running: worth another try later."""
    stuck: Child | None = None
    """A child process that can't be killed. Remember it, and start no second one while it lives (`child.alive`)."""
    model: str = ""
    """The GPUs' model, as DCGM names it."""
    figures: tuple[Figure, ...] = ()
    """What the tests measured; `device` is DCGM's entity id."""


def is_bandwidth(error: Error) -> bool:
    """Whether other load on the node explains this error as well as a bad link would."""
    return error.id in BANDWIDTH


def severity(error: Error) -> Outcome:
    """How bad an error is for its GPU."""
    if error.cls in HARDWARE:
        return "fail"
    return "config" if error.cls == "CONFIG" else "warn"


def advise(outcome: Outcome, message: str, rung: str | None = None, errors: Iterable[Error] = ()) -> str:
    """One sentence for people."""
    step = STEPS.get(rung or "", "")
    if outcome == "fail" and all(is_bandwidth(error) for error in errors if error.cls in HARDWARE):
        step += "; if other jobs ran at the time, retest the idle node first"
    short = message if len(message) <= 200 else message[:199] + "…"
    return ADVICE[outcome].format(message=short.rstrip("."), step=step)


def findings(diagnosis: Diagnosis, now: float) -> list[Finding]:
    """One finding for each error, named after its test. Without errors: one that says why there is no result."""
    found = [
        _finding(diagnosis, error, now, Gpu(uuid=gpu.uuid, serial=gpu.serial), gpu.entity_id)
        for gpu in diagnosis.gpus
        for error in gpu.errors
    ]
    found += [_finding(diagnosis, error, now, None, None) for test in diagnosis.tests for error in test.errors]
    if not found and diagnosis.outcome != "pass" and not diagnosis.busy:
        code = "driver" if diagnosis.outcome == "warn" else diagnosis.outcome
        level: Severity = "warning" if diagnosis.outcome == "warn" else "info"
        details = {"level": diagnosis.level, "exit_code": diagnosis.exit_code}
        found.append(Finding(now, "dcgm", code, diagnosis.message, None, level, standing=True, details=details))
    return found


def _finding(diagnosis: Diagnosis, error: Error, now: float, gpu: Gpu | None, entity: int | None) -> Finding:
    label = f"{error.name} ({error.id}), " if error.id is not None else ""
    where = f"DCGM GPU {entity}" if entity is not None else "DCGM, no GPU in particular"
    return Finding(
        now,
        "dcgm",
        error.test,
        f"{where}, level {diagnosis.level or '?'} {error.test}: {error.message} [{label}class {error.cls}]",
        gpu,
        severity={"fail": "fault", "warn": "warning"}.get(severity(error), "info"),  # type: ignore[arg-type]
        standing=True,
        details={
            "level": diagnosis.level,
            "test": error.test,
            "error_id": error.id,
            "error": error.name,
            "class": error.cls,
            "bandwidth": is_bandwidth(error),
            "entity_id": entity,
        },
    )
