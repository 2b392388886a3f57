"""Passive evidence from DCGM's health watches, `dcgmi health -c -j`: a second opinion, off the hot path.

It never goes above `warning`, and "Healthy" is never proof: DCGM says it without any GPU, without NVML, with a lost
GPU, with pending row remaps, and about everything before the watches were set. An Xid that it saw stays until the host
engine restarts, long after the repair. Power capping counts as a warning. The kernel log and NVML see the same things
directly. Source: modules/health/DcgmHealthWatch.cpp.
"""

from __future__ import annotations

import re
from time import monotonic

from slurm_gpuhealth import child
from slurm_gpuhealth.diagnose import dcgmi, engine
from slurm_gpuhealth.findings import Finding, Gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.child import Completed
    from slurm_gpuhealth.config.settings import Dcgm, Settings
    from slurm_gpuhealth.findings import Severity

SEVERITY: dict[str, Severity] = {"Failure": "warning", "Warning": "info"}
NEEDED = ("Memory", "PCIe", "InfoROM", "Thermal", "Power")
"""Watches that must be on; only Memory and InfoROM see Xids. SM can't be turned on."""


def collect(settings: Settings, now: float, timeout: float) -> list[Finding]:
    """Findings of the watches. Turns on watches that are off, for the next time. OSError: DCGM gave no answer."""
    dcgm = settings.dcgm
    deadline = monotonic() + timeout
    if dcgm.backend == "off":
        return []
    if not engine.answers(dcgm.host):
        raise OSError(f"no host engine at {dcgm.host}")  # without one, dcgmi would wait 5 s
    try:
        known = dcgmi.discover(dcgm, min(dcgmi.SHORT, timeout / 2))
    except dcgmi.DcgmError as error:
        raise OSError(str(error)) from error
    if _off(_health(dcgm, ("-f", "-j"), deadline)):
        _health(dcgm, ("-s", "a"), deadline)
    found = read(_health(dcgm, ("-c", "-j"), deadline), known, now)
    expected = settings.gpus.count
    if len(known) < max(expected, 1):
        message = f"DCGM sees {len(known)} GPUs" + (f" of {expected}" if expected else "") + ": it watches no others"
        found.append(Finding(now, "dcgm-health", "gpus-missing", message, severity="warning", standing=True))
    return found


def read(text: str, known: Mapping[int, str], now: float) -> list[Finding]:
    """The report of `dcgmi health -c -j`; `known`: entity id → UUID. Watches that are off, or just set, find nothing.

    The key of an entry says which GPU it is: the text may name another (for a row remap it is random memory).
    """
    body = _body(text)
    if body is None:
        if "not enabled" in text:
            return []
        raise OSError(f"dcgmi health -c gave no report: {' '.join(text.split())[:200] or 'no output'}")
    return list(_findings(body, known, now))


def _findings(body: Mapping[str, Any], known: Mapping[int, str], now: float) -> Iterator[Finding]:
    for group, entry in body.items():
        for entity, report in _children(entry):
            for system, error in _children(_dict(_dict(report).get("children")).get("Errors")):
                value = str(error.get("value"))
                gpu = {str(number): uuid for number, uuid in known.items()}.get(entity) if group == "GPU" else None
                text = re.sub(r"\bGPU (\d+|%d)", f"GPU {entity}", " ".join(_lines(error.get("overflow"))))
                xid = re.search(r"triggered by XID (\d+)", text)
                yield Finding(
                    now,
                    "dcgm-health",
                    system.split()[0].lower() if system.split() else "unknown",
                    f"DCGM health: {group} {entity}, {system}: {text or value}",
                    Gpu(uuid=gpu) if gpu else None,
                    SEVERITY.get(value, "info"),
                    standing=True,
                    details={
                        "system": system,
                        "value": value,
                        "entity": f"{group} {entity}",
                        "xid": int(xid[1]) if xid else None,
                    },
                )


def _health(dcgm: Dcgm, options: Sequence[str], deadline: float) -> str:
    """The output of `dcgmi health`; its exit code says nothing (0 on Failure, 253 for watches that are off)."""
    left = max(0.1, deadline - monotonic())
    done: Completed = child.run([dcgm.dcgmi, "health", "--host", dcgm.host, *options], timeout=left, grace=engine.STOP)
    if done.timed_out or done.rc in (126, 127):
        raise OSError(f"dcgmi health {' '.join(options)} did not answer within {left:.0f} s")
    return (done.stdout or done.stderr).decode("utf-8", "replace")


def _off(text: str) -> bool:
    """Whether a watch that we need is off. If we can't read the report, we assume that they are on, and set nothing."""
    body = _body(text)
    if body is None:
        return "not enabled" in text
    return any(_dict(body.get(watch)).get("value") == "Off" for watch in NEEDED)


def _body(text: str) -> dict[str, Any] | None:
    """The report's body; a line of plain text may come before it."""
    import json

    try:
        document, _ = json.JSONDecoder().raw_decode(text, max(text.find("{"), 0))
    except (ValueError, RecursionError):
        return None
    body = _dict(document).get("body")
    return body if isinstance(body, dict) else None


def _children(entry: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((str(key), value) for key, value in _dict(_dict(entry).get("children")).items() if isinstance(value, dict))


def _lines(value: Any) -> list[str]:
    """The lines of the message, which dcgmi wraps at 54 columns."""
    return [" ".join(str(line).split()) for line in value] if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
