"""Reads the node's sources, judges what they show and writes it down. Every program uses this module for that."""

from __future__ import annotations

import time

from slurm_gpuhealth.node import identity, jobs, lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from slurm_gpuhealth.child import Probed
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Finding
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.policy.judge import Judged

    Seen = tuple[Sequence[Finding], bool, dict[str, Any]]
    """The findings; whether the source was read in full (then a finding that is missing is mended); and values for the
    journal."""
    Look = Callable[[Settings, Journal, float, float], Seen]
    """(settings, journal, now, seconds that it may take) → what was seen. OSError: the source could not be read."""


def kernel(settings: Settings, journal: Journal, now: float) -> list[Judged]:
    """The kernel log since any of our programs last read it. Cursor and findings are written in one transaction."""
    if settings.sources.kernel == "off":
        return []
    from slurm_gpuhealth.evidence import kernel as evidence

    boot, first = identity.boot_id(settings), False

    def look() -> list[Judged]:
        nonlocal first
        judged: list[Judged] = []
        cursor = journal.get("kernel")
        first = cursor is None
        if first:
            from slurm_gpuhealth.node import kernel_cursor

            cursor = kernel_cursor.begin(journal, boot, now)
        else:
            journal.settled()
        seen = evidence.collect(settings.paths.kernel_log, cursor, boot, now, settings.paths.sys)
        if seen.findings or journal.get("kernel-trouble"):
            from slurm_gpuhealth.node import record

            if journal.get("nvml-boot") != boot:
                identity.renumber(settings, journal)
            judged = record.keep(journal, settings, seen.findings, now)
            record.clear(journal, ("kernel",), judged, now)
            journal.put("kernel-trouble", any(one.finding.source == "kernel" for one in judged) or None)
        journal.put("kernel", seen.cursor)
        return judged

    judged = journal.together(look)
    if first:
        journal.together(journal.settled)
    return judged


def source(settings: Settings, journal: Journal, name: str, now: float, timeout: float) -> list[Judged]:
    """Read one source of SOURCES, if it is on: judge its findings, clear what is mended, note how it went."""
    sources, _, look = SOURCES[name]
    if getattr(settings.sources, name, "enforce") == "off":
        return []
    began = time.monotonic()
    error = ""

    def keep() -> list[Judged]:
        for key, value in state.items():
            journal.put(key, value)
        # Nearly always nothing is found and nothing stands: then the judge is not even imported.
        if not (findings or (whole and _stands(journal, sources))):
            return []
        from slurm_gpuhealth.node import record

        judged = record.keep(journal, settings, findings, now)
        if whole:
            record.clear(journal, sources, judged, now)
        return judged

    whole = False
    try:
        findings, whole, state = look(settings, journal, now, timeout)
        # In one transaction: a program killed between the two would have counted an error but not reported it.
        return journal.together(keep)
    except OSError as failure:
        error = f"could not be read: {failure}"
    except Exception as failure:
        # A bug in one source must not stop the others, or the action on what was found.
        error = f"broke: {type(failure).__name__}: {failure}; please report it"
        from slurm_gpuhealth.say import say

        say(f"source {name} {error}", error=True)
        if journal.doubt(failure):
            say("the journal was corrupt: it is set aside, and a new one begun", error=True)
    finally:
        notes = {"time": now, "seconds": round(time.monotonic() - began, 3), "error": error, "whole": whole}
        journal.put("sources", {**journal.get("sources", {}), name: notes})
    return []


def due(settings: Settings, journal: Journal, name: str, now: float) -> bool:
    """Whether the check should read this source now. A clock that was set back must not prevent that."""
    every = SOURCES[name][1]
    if callable(every):
        every = every(settings)
    last = journal.get("sources", {}).get(name, {}).get("time", 0)
    return every == 0 or not 0 <= now - last < every


def _stands(journal: Journal, sources: Sequence[str]) -> bool:
    return any(
        journal.one("SELECT 1 FROM finding WHERE standing AND cleared IS NULL AND source = ? LIMIT 1", source)
        for source in sources
    )


def _nvml(settings: Settings, journal: Journal, now: float, timeout: float) -> Seen:
    """All GPUs, judged against the last reading and the baseline; the new reading replaces both."""
    from slurm_gpuhealth.evidence import nvml

    baseline, boot = journal.get("nvml-baseline", {}), identity.boot_id(settings)
    timeout = min(timeout, settings.nvml.timeout)
    full = journal.get("nvml-boot") != boot  # the first reading of a boot includes what does not change: VBIOS, limits
    held = jobs.holding(journal)
    busy = [uuid for _, _, uuids in held for uuid in uuids]

    def read(left: float) -> Probed:
        return nvml.read(settings, timeout=left, full=full, baseline=baseline, held=busy)

    probed = lock.guarded(settings, journal, "nvml", timeout, read)
    if probed is None:
        return [nvml.hung(now)], False, {}
    findings, baseline = nvml.judge_probed(
        probed, journal.get("nvml"), baseline, journal.get("gpus", []), settings, now
    )
    if not (probed.value and "gpus" in probed.value):
        return findings, False, {}
    keep = ("pci", "serial", "minor", "name", "index")
    gpus = [{"uuid": uuid, **{k: gpu.get(k) for k in keep}} for uuid, gpu in baseline["gpus"].items()]
    work: dict[str, Any] = {}
    try:
        if held or journal.get("use"):
            from slurm_gpuhealth.node import samples

            stand, work = samples.take(settings, journal, held, probed.value["gpus"], now)
            findings += stand
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as failure:
        # How jobs use the GPUs must not hide what is wrong with the GPUs.
        broke = f"{type(failure).__name__}: {failure}"
        work = {"use": None, "samples-broke": broke}
        if journal.get("samples-broke") != broke:
            from slurm_gpuhealth.say import say

            say(f"how the jobs use their GPUs could not be read: {broke}; it begins anew; please report it", error=True)
    if text := journal.get("slow"):  # the same condition, seen by tests: this reading must not end it
        from slurm_gpuhealth.node import slow

        here = [one.gpu for one in findings if one.key == "gpu:slow"]
        findings += [one for one in slow.told(journal, text, now) if one.gpu not in here]
    return (
        findings,
        True,
        {
            **work,
            "nvml-baseline": baseline,
            "nvml": {"time": now, **probed.value},
            "nvml-time": now,
            "nvml-boot": boot,
            "gpus": sorted(gpus, key=lambda gpu: gpu["index"] or 0),
        },
    )


def _dcgm_health(settings: Settings, journal: Journal, now: float, timeout: float) -> Seen:
    from slurm_gpuhealth.evidence import dcgm_health

    return dcgm_health.collect(settings, now, timeout), True, {}


def _infiniband(settings: Settings, journal: Journal, now: float, timeout: float) -> Seen:
    from slurm_gpuhealth.evidence import infiniband

    findings, baseline = infiniband.collect(settings, journal.get("infiniband", {}), now)
    return findings, True, {"infiniband": baseline}


def _host(settings: Settings, journal: Journal, now: float, timeout: float) -> Seen:
    from slurm_gpuhealth.evidence import host

    findings, state = host.collect(settings, journal.get("host", {}), now)
    return findings, True, {"host": state}


def _site(settings: Settings, journal: Journal, now: float, timeout: float) -> Seen:
    from slurm_gpuhealth.evidence import site

    findings, state = site.collect(settings, journal.get("site", {}), now)
    return findings, True, {"site": state}


def _inventory(settings: Settings, journal: Journal, now: float, timeout: float) -> Seen:
    from slurm_gpuhealth.evidence import inventory

    gres = journal.get("gres", {})
    offered = None if gres.get("error") or not gres else len(gres["uuids"])
    listed = inventory.identities(settings)
    return inventory.collect(settings, listed, journal.get("nvml-baseline", {}), offered, now), True, {}


SOURCES: dict[str, tuple[tuple[str, ...], float | Callable[[Settings], float], Look]] = {
    # key of [sources] → the findings' sources that it reads in full, seconds between two readings, how
    "nvml": (("nvml", "driver", "job", "gpu"), 0, _nvml),
    "infiniband": (("ib",), 0, _infiniband),
    "host": (("host",), 0, _host),
    "site": (("site",), 0, _site),
    "inventory": (("inventory",), 3600, _inventory),
    "dcgm_health": (("dcgm-health",), lambda settings: settings.dcgm.health_every, _dcgm_health),
}
