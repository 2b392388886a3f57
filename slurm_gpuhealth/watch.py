"""What the node says by itself, source by source: read, written down, judged. Every program looks through here."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from slurm_gpuhealth.child import Child
    from slurm_gpuhealth.findings import Finding
    from slurm_gpuhealth.journal import Journal
    from slurm_gpuhealth.judge import Judged
    from slurm_gpuhealth.settings import Settings

    Look = Callable[[Settings, Journal, float, float], tuple[Sequence[Finding], bool]]
    """(settings, journal, now, seconds it may take) → what was found; whether all of it could be read: then what is
    not found any more is mended. OSError: this source could not be read."""


def kernel(settings: Settings, journal: Journal, now: float) -> list[Judged]:
    """The kernel log since the last look of any of our programs. Cursor and findings are written in one transaction."""
    if settings.sources.kernel == "off":
        return []
    from slurm_gpuhealth.evidence import kernel as evidence

    judged: list[Judged] = []
    journal.begin()
    look = evidence.collect(
        settings.paths.kernel_log, journal.get("kernel"), boot_id(settings), now, settings.paths.sys
    )
    if look.findings or journal.get("kernel-trouble"):
        from slurm_gpuhealth import record

        judged = record.keep(journal, settings, look.findings, now)
        record.clear(journal, ("kernel",), judged, now)
        journal.put("kernel-trouble", any(one.finding.source == "kernel" for one in judged) or None)
    journal.put("kernel", look.cursor)
    journal.commit()
    if journal.trouble:  # the commit may have failed: at least the same lines are not judged twice
        journal.put("kernel", look.cursor)
    return judged


def source(settings: Settings, journal: Journal, name: str, now: float, timeout: float) -> list[Judged]:
    """One source of SOURCES, if it is on: its findings judged, what is mended cleared, how it went noted."""
    sources, _, look = SOURCES[name]
    if getattr(settings.sources, name, "enforce") == "off":
        return []
    began = time.monotonic()
    judged: list[Judged] = []
    error = ""
    try:
        findings, whole = look(settings, journal, now, timeout)
        # Nothing found, nothing standing, as nearly always: nothing to judge, and no judge is imported.
        if findings or (whole and _stands(journal, sources)):
            from slurm_gpuhealth import record

            judged = record.keep(journal, settings, findings, now)
            if whole:
                record.clear(journal, sources, judged, now)
    except OSError as failure:
        error = f"could not be read: {failure}"
    notes = {"time": now, "seconds": round(time.monotonic() - began, 3), "error": error}
    journal.put("sources", {**journal.get("sources", {}), name: notes})
    return judged


def due(settings: Settings, journal: Journal, name: str, now: float) -> bool:
    """Whether the check should read this source now. A clock that was set back must not keep it from being read."""
    every = SOURCES[name][1]
    if callable(every):
        every = every(settings)
    last = journal.get("sources", {}).get(name, {}).get("time", 0)
    return every == 0 or not 0 <= now - last < every


def guarded(journal: Journal, name: str, boot: str, start: Callable[[], Any]) -> Any:
    """`start()`, whose result has `.stuck`; None, and nothing started, while an earlier child can't be killed."""
    stuck = journal.get("stuck", {})
    old = stuck.get(name)
    if old:
        from slurm_gpuhealth.child import Child, alive

        if old[0] == boot and alive(Child(old[1], old[2])):
            return None
    result = start()
    child: Child | None = result.stuck
    new = (boot, child.pid, child.start) if child else None
    if new != old:
        rest = {other: value for other, value in stuck.items() if other != name}
        journal.put("stuck", {**rest, name: new} if new else rest)
    return result


def _stands(journal: Journal, sources: Sequence[str]) -> bool:
    return any(
        journal.one("SELECT 1 FROM finding WHERE standing AND cleared IS NULL AND source = ? LIMIT 1", source)
        for source in sources
    )


def boot_id(settings: Settings) -> str:
    """This boot's id (proc(5), /proc/sys/kernel/random/boot_id)."""
    with open(os.path.join(settings.paths.proc, "sys/kernel/random/boot_id")) as file:
        return file.read().strip()


def _nvml(settings: Settings, journal: Journal, now: float, timeout: float) -> tuple[Sequence[Finding], bool]:
    """All GPUs, judged against the last reading and the baseline, which are then replaced."""
    from slurm_gpuhealth.evidence import nvml

    baseline, boot = journal.get("nvml-baseline", {}), boot_id(settings)
    timeout = min(timeout, settings.nvml.timeout)
    full = journal.get("nvml-boot") != boot  # the first of a boot also reads what does not change: VBIOS, limits
    probed = guarded(journal, "nvml", boot, lambda: nvml.read(settings, timeout=timeout, full=full, baseline=baseline))
    if probed is None:
        return [nvml.hung(now)], False
    findings, baseline = nvml.judge_probed(
        probed, journal.get("nvml"), baseline, journal.get("gpus", []), settings, now
    )
    if probed.value and "gpus" in probed.value:
        journal.put("nvml-baseline", baseline)
        journal.put("nvml", {"time": now, **probed.value})
        journal.put("nvml-time", now)
        journal.put("nvml-boot", boot)
        keep = ("pci", "serial", "minor", "name", "index")
        gpus = [{"uuid": uuid, **{k: gpu.get(k) for k in keep}} for uuid, gpu in baseline["gpus"].items()]
        journal.put("gpus", sorted(gpus, key=lambda gpu: gpu["index"] or 0))
        return findings, True
    return findings, False


def _dcgm_health(settings: Settings, journal: Journal, now: float, timeout: float) -> tuple[Sequence[Finding], bool]:
    from slurm_gpuhealth.evidence import dcgm_health

    return dcgm_health.collect(settings, now, timeout), True


def _infiniband(settings: Settings, journal: Journal, now: float, timeout: float) -> tuple[Sequence[Finding], bool]:
    from slurm_gpuhealth.evidence import infiniband

    findings, baseline = infiniband.collect(settings, journal.get("infiniband", {}), now)
    journal.put("infiniband", baseline)
    return findings, True


def _host(settings: Settings, journal: Journal, now: float, timeout: float) -> tuple[Sequence[Finding], bool]:
    from slurm_gpuhealth.evidence import host

    findings, state = host.collect(settings, journal.get("host", {}), now)
    journal.put("host", state)
    return findings, True


def _site(settings: Settings, journal: Journal, now: float, timeout: float) -> tuple[Sequence[Finding], bool]:
    from slurm_gpuhealth.evidence import site

    findings, state = site.collect(settings, journal.get("site", {}), now)
    journal.put("site", state)
    return findings, True


def _inventory(settings: Settings, journal: Journal, now: float, timeout: float) -> tuple[Sequence[Finding], bool]:
    from slurm_gpuhealth.evidence import inventory

    gres = journal.get("gres", {})
    offered = None if gres.get("error") or not gres else len(gres["uuids"])
    listed = inventory.identities(settings)
    return inventory.collect(settings, listed, journal.get("nvml-baseline", {}), offered, now), True


SOURCES: dict[str, tuple[tuple[str, ...], float | Callable[[Settings], float], Look]] = {
    # key of [sources] → the findings' sources that it reads in full, seconds between two readings, how
    "nvml": (("nvml", "driver"), 0, _nvml),
    "infiniband": (("ib",), 0, _infiniband),
    "host": (("host",), 0, _host),
    "site": (("site",), 0, _site),
    "inventory": (("inventory",), 3600, _inventory),
    "dcgm_health": (("dcgm-health",), lambda settings: settings.dcgm.health_every, _dcgm_health),
}
