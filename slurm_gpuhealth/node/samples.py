"""Samples of the GPUs while a job runs, in the journal: the last two hours, what each job does, how each job was.

state `sample-NNN`   a ring with a slot a minute: {"time": …, "gpus": {UUID: measure.use.packed}}
state `use`          (job, restart) → measure.hang's job, for the jobs that run; no value without jobs
jobuse               a row a job that has ended: measure.use's summary of each of its GPUs, which is shipped
"""

from __future__ import annotations

from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.measure import clocks, hang, use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.findings import Severity
    from slurm_gpuhealth.node.journal import Journal

    Held = Sequence[tuple[int, int, Sequence[str]]]
    """Job, restart count, the UUIDs of its GPUs."""

SLOTS = 120
SLOT = 60.0
"""Seconds."""
OFTEN = 20.0
"""At most so many samples in `hang.after`: prologs and epilogs read NVML too."""
REASON = {
    "heat": "the reason is heat: have its cooling looked at",
    "power brake": "the reason is the power brake: have the power supplies looked at",
    "slowdown": "the hardware holds its clocks down, by heat or power: see nvidia-smi -q -d PERFORMANCE",
    "power cap": "its power limit holds it down and not the others: see nvidia-smi -q -d POWER",
    "application clocks": "its application clocks were set lower: nvidia-smi -rac takes that back",
    "none": "the driver names no reason: it may be a slow part, test it at the highest level",
}


def take(
    settings: Settings, journal: Journal, held: Held, gpus: Sequence[Mapping[str, Any]], now: float
) -> tuple[list[Finding], dict[str, Any]]:
    """A sample of NVML's `gpus` for the jobs that hold them: the findings that stand, and values for the journal."""
    jobs: dict[tuple[int, int], hang.Job] = journal.get("use", {})
    models = {gpu["uuid"]: gpu.get("name") or "" for gpu in journal.get("gpus", ())}
    running = {(job, restart): uuids for job, restart, uuids in held}
    ended = {key: job for key, job in jobs.items() if key not in running}
    if ended:
        _close(journal, ended, models, now)
    there = {gpu["uuid"]: use.sample(gpu) for gpu in gpus if "uuid" in gpu and 15 not in gpu["errors"].values()}
    whys = _whys(held, gpus)
    kept = {}
    for key, uuids in running.items():
        job = jobs.get(key) or hang.begin()
        last = max((one["time"] for one in job["gpus"].values()), default=None)
        if last is not None and now <= last - SLOT:  # the clock was set back; by less: a program that read before
            job, last = hang.set_back(job, now), None
        if last is None or now - last >= settings.hang.after / OFTEN:
            seen = {uuid: there.get(uuid) for uuid in uuids}
            passed = now - last if last is not None and now - last <= settings.hang.after else 0.0
            job = hang.add(job, now, seen, whys, settings.hang)
            job = clocks.add(job, now, seen, models, passed, settings.slow)
        kept[key] = job
    values: dict[str, Any] = {"use": kept or None}
    if kept:
        ours = {uuid for uuids in running.values() for uuid in uuids}
        sample = {uuid: use.packed(seen) for uuid, seen in there.items() if uuid in ours}
        values[f"sample-{int(now // SLOT) % SLOTS:03d}"] = {"time": now, "gpus": sample}
    _tell(journal, {uuid: one["why"] for job in kept.values() for uuid, one in job["gpus"].items() if one["why"]})
    said = [_finding(key, *one, now) for key, job in kept.items() for one in hang.judge(job, now, settings.hang)]
    slow = [_slow(key, *one, now) for key, job in kept.items() for one in clocks.judge(job)]
    return said + slow, values


def doing(journal: Journal) -> dict[str, dict[str, Any]]:
    """What each GPU of a running job did at the last check, by UUID: the sample, and `job`, `does`, `since`, `watts`,
    `usual`, `why` (see measure.use)."""
    seen = {gpu.get("uuid"): gpu for gpu in (journal.get("nvml") or {}).get("gpus", ())}
    found = {}
    for (job, _), one in sorted(journal.get("use", {}).items()):
        for uuid, gpu in one["gpus"].items():
            known = {key: gpu[key] for key in ("does", "since", "watts", "why")}
            found[uuid] = {**use.sample(seen.get(uuid, {})), "job": job, **known, "usual": use.usual(gpu)}
    return found


def ring(journal: Journal, since: float) -> list[dict[str, Any]]:
    """The samples after `since`, the oldest first."""
    names = [row[0] for row in journal.rows("SELECT name FROM state WHERE name GLOB 'sample-*'")]
    found = sorted((journal.get(name) for name in names), key=lambda one: float(one["time"]))
    return [
        {**one, "gpus": {uuid: use.unpacked(values) for uuid, values in one["gpus"].items()}}
        for one in found
        if one["time"] > since
    ]


def _close(journal: Journal, ended: Mapping[tuple[int, int], hang.Job], models: Mapping[str, str], now: float) -> None:
    """Write down how these jobs used their GPUs."""
    import json

    for (job, restart), one in ended.items():
        gpus = {
            uuid: {**use.summary(gpu), **clocks.summary(gpu), "model": models.get(uuid, "")}
            for uuid, gpu in one["gpus"].items()
        }
        values = (job, restart, now, json.dumps(gpus, separators=(",", ":")))
        journal.write("INSERT OR REPLACE INTO jobuse (job, restart, time, gpus) VALUES (?, ?, ?, ?)", *values)


def _whys(held: Held, gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """GPUs that can't be judged although they answer, and why."""
    holders = [uuid for _, _, uuids in held for uuid in uuids]
    shared = {uuid: "several jobs share it" for uuid in holders if holders.count(uuid) > 1}
    mig = {gpu["uuid"]: "it is in MIG mode" for gpu in gpus if gpu.get("mig") and gpu.get("uuid") in holders}
    return {**shared, **mig}


def _tell(journal: Journal, whys: Mapping[str, str]) -> None:
    """Say of each GPU that can't be judged, once, why not."""
    told = journal.get("unjudged", {}) if whys else {}
    new = {uuid: why for uuid, why in whys.items() if told.get(uuid) != why}
    if new:
        from slurm_gpuhealth.say import say

        for uuid, why in new.items():
            say(f"whether the jobs on {uuid} stand still can't be judged: {why}")
        journal.put("unjudged", {**told, **new})


def _finding(key: tuple[int, int], uuid: str, code: str, details: Mapping[str, Any], now: float) -> Finding:
    job, restart = key
    kind, minutes = details["kind"], round((now - details["since"]) / 60)
    does = {
        "spinning": f"busy at {details['watts']} W",
        "idle": "idle, although a process holds it,",
        "empty": "without a process",
    }[kind]
    if code == "stalled":
        usual = f"; it worked at {details['usual']} W" if details["usual"] else ""
        message = f"job {job} stands still: {does} for {minutes} min{usual}"
    else:
        message = f"job {job} has never worked: {does} for {minutes} min"
    whose = {"job": job, "restart": restart}
    return Finding(now, "job", code, message, Gpu(uuid), "info", True, details={**details, **whose})


def _slow(key: tuple[int, int], uuid: str, details: Mapping[str, Any], now: float) -> Finding:
    job, restart = key
    clock, middle, reason = details["clock"], details["median"], details["reason"]
    message = (
        f"slower than the other GPUs of job {job}: {clock} MHz at load, their median is {middle} MHz"
        f" ({clock / middle:.0%}), for {round(details['seconds'] / 60)} min; {REASON[reason]}"
    )
    severity: Severity = "info" if reason == "application clocks" else "warning"
    whose = {"job": job, "restart": restart}
    return Finding(now, "gpu", "slow", message, Gpu(uuid), severity, True, details={**details, **whose})
