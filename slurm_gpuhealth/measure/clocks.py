"""Which GPUs are slower than the other GPUs of their job, by the clock of their SMs at load. Pure.

A GPU is compared in each sample with the job's GPUs of its model that work at load too: one that waits for others runs
at a high clock, and one that is idle at a low one. The time that it is slow fills a measure of `slow.after`; a time at
the others' clock empties it FADE times as fast. It is said to be slow from when the measure is full until it is empty.

A use (use.py) gets two keys:

    clocks   MHz, in steps of STEP → seconds at load
    slow     the measure (`level`), and sums over the time that the GPU was slow; absent or None if it was not
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Slow
    from slurm_gpuhealth.measure.hang import Job, Sample

LOAD = 90
"""Percent of utilization."""
LEAST = 3
"""So many GPUs of a model, itself among them, are needed: of two, nobody can say which is the slow one."""
FADE = 3.0
STEP = 30
"""MHz. Bounds the size; clocks differ by 15 MHz."""
REASONS = ((0x60, "heat"), (0x80, "power brake"), (0x8, "slowdown"), (0x4, "power cap"), (0x2, "application clocks"))
"""Bits of the clock event reasons, the first that is set counts. The power cap counts only if the others are not capped
in the same way: at full power it is set on every GPU."""
CAP = 0x4
LOWER = 0.98
"""A power limit is lower than the others' below this share of it."""
NEW = {"level": 0.0, "since": 0.0, "said": False, "ever": False, "seconds": 0.0, "clock": 0, "median": 0, "reasons": {}}
OFTEN = 0.25
"""A reason counts if it was seen in this share of the slow time: the driver's bits come and go."""


def add(
    job: Job, now: float, seen: Mapping[str, Sample | None], models: Mapping[str, str], passed: float, slow: Slow
) -> Job:
    """`job`, to which hang.add has just added the sample `seen`, with its clocks. `passed`: seconds since the sample
    before, 0 if they can't be told."""
    gpus: dict[str, dict[str, Any]] = job["gpus"]
    loaded = {
        uuid: one
        for uuid, one in seen.items()
        if one and "clock" in one and one.get("utilization", 0) >= LOAD and gpus[uuid]["does"] == "working"
    }
    new = dict(gpus)
    for uuid, one in loaded.items():
        clocks, step = gpus[uuid].get("clocks", {}), one["clock"] // STEP * STEP
        new[uuid] = {**gpus[uuid], "clocks": {**clocks, step: clocks.get(step, 0.0) + passed}}
    for uuid, (middle, is_slow) in compare(
        {uuid: (models.get(uuid, ""), one["clock"]) for uuid, one in loaded.items()}, slow.clock
    ).items():
        before = gpus[uuid].get("slow")
        if is_slow or before:
            peers = [one for other, one in loaded.items() if models.get(other) == models.get(uuid) and other != uuid]
            what = (loaded[uuid]["clock"], middle, _reason(loaded[uuid], peers)) if is_slow else None
            new[uuid]["slow"] = _enter(before, now, passed, what, slow.after)
    return {**job, "gpus": new}


def compare(clocks: Mapping[str, tuple[str, float]], share: float) -> dict[str, tuple[float, bool]]:
    """GPU → model and clock, to GPU → the median clock of its model, and whether its own is below `share` of that."""
    models: dict[str, list[float]] = {}
    for model, clock in clocks.values():
        models.setdefault(model, []).append(clock)
    middles = {model: median(all_) for model, all_ in models.items() if len(all_) >= LEAST}
    return {
        uuid: (middles[model], clock < share * middles[model])
        for uuid, (model, clock) in clocks.items()
        if model in middles
    }


def judge(job: Job) -> list[tuple[str, dict[str, Any]]]:
    """The GPUs that are slow now: UUID, and the details of the finding."""
    return [(uuid, _details(one["slow"])) for uuid, one in job["gpus"].items() if (one.get("slow") or {}).get("said")]


def summary(use: Mapping[str, Any]) -> dict[str, Any]:
    """Of a use, for the cluster's record: `clock`, the median at load in MHz, `load` in seconds, and if the GPU was
    said to be slow `slow`: for how many seconds, at how many percent of the others' clock, the reason."""
    clocks: dict[int, float] = use.get("clocks", {})
    load, passed = sum(clocks.values()), 0.0
    found: dict[str, Any] = {"load": round(load)}
    for clock in sorted(clocks):
        passed += clocks[clock]
        if load and passed >= load / 2:
            found["clock"] = clock
            break
    slow = use.get("slow")
    if slow and slow["ever"]:
        percent = round(100 * slow["clock"] / slow["median"])
        found["slow"] = {"seconds": round(slow["seconds"]), "percent": percent, "reason": _main(slow)}
    return found


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _enter(
    before: Mapping[str, Any] | None, now: float, passed: float, what: tuple[int, float, str] | None, after: float
) -> dict[str, Any] | None:
    """The measure after one more sample. `what`: clock, median and reason if the GPU was slow in it."""
    one: dict[str, Any] = {**NEW, **(before or {})}
    if what:
        clock, middle, reason = what
        if not one["level"]:
            one["since"] = now - passed
        one["level"] = min(after, one["level"] + passed)
        one["seconds"] += passed
        one["clock"] += clock * passed
        one["median"] += middle * passed
        one["reasons"] = {**one["reasons"], reason: one["reasons"].get(reason, 0.0) + passed}
    else:
        one["level"] = max(0.0, one["level"] - FADE * passed)
    one["said"] = one["level"] >= after or (one["said"] and one["level"] > 0)
    one["ever"] = one["ever"] or one["said"]
    return one if one["level"] or one["ever"] else None


def _reason(one: Sample, peers: Sequence[Sample]) -> str:
    """Why the driver holds this GPU's clock down; "none" if it names nothing that does not hold for the others."""
    bits = one.get("reasons", 0)
    if bits & CAP:
        capped = sum(bool(peer.get("reasons", 0) & CAP) for peer in peers)
        limits = [peer["limit"] for peer in peers if "limit" in peer]
        if 2 * capped > len(peers) and not (limits and one.get("limit", limits[0]) < LOWER * median(limits)):
            bits &= ~CAP
    return next((name for bit, name in REASONS if bits & bit), "none")


def _main(slow: Mapping[str, Any]) -> str:
    named = {name: time for name, time in slow["reasons"].items() if name != "none"}
    best = max(named, key=lambda name: named[name], default="none")
    return best if named.get(best, 0.0) >= OFTEN * slow["seconds"] else "none"


def _details(slow: Mapping[str, Any]) -> dict[str, Any]:
    clock, middle = (round(slow[key] / slow["seconds"]) for key in ("clock", "median"))
    which = {"clock": clock, "median": middle, "unit": "MHz", "reason": _main(slow)}
    return {**which, "since": round(slow["since"]), "seconds": round(slow["seconds"])}
