"""How a job uses its GPUs, folded sample by sample: what each GPU does, since when, and the whole job in short. Pure.

    sample    one GPU at one check: the keys of KEYS that NVML could tell (units: nvml_probe.py)
    use       of one GPU in one job: `begin` and `add` make it; its size does not grow with the job's length

What a GPU does (`does`) comes from utilization and power. A kernel that waits for another GPU keeps the utilization at
100 % but needs little power (facts and limits: docs/hangs.md):

    working     else
    spinning    busy (BUSY), without memory traffic, and below the line between idle and this GPU's usual power
    idle        utilization 0, and a process holds the GPU
    empty       utilization 0, and no process is there
    lost        the GPU gives no answer
    unknown     it can't be told; `why` says what is missing

A use has `marshal`'s types, for the journal. Powers are in W, times in seconds.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Sample = Mapping[str, Any]
    Use = dict[str, Any]

KEYS = (
    *("utilization", "memory_utilization", "power", "limit", "energy", "clock", "memory", "processes", "temperature"),
    *("reasons", "nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx"),
)
"""In the order in which the journal keeps them: add new ones at the end."""
SERIES = ("watts", "busy", "clock", "celsius", "working")
"""What a bin of the series has the sum of, after the number of its samples. `working`: 100 or 0 percent."""
BINS = 32
FIRST = 60.0
"""Seconds of a bin at first. When all bins are full, each two become one."""
KNOWN = 3
"""The usual power of a GPU is known after so many samples in which it clearly worked: the median of the last LAST."""
LAST = 60
BUSY = 95
QUIET = 5
"""Percent. A kernel that polls a flag reads next to nothing from the GPU's memory; one that computes does."""
STANDBY = 0.15
"""Idle power as a share of the limit, if less was not seen: about 105 W of an H100's 700."""
START = 0.1
"""Share of the way from idle power to the limit that counts as work while the usual power is not known. At less power
than this a GPU that loads data looks as one that waits: it does not tell the usual power."""
HELD = 1024
"""MiB that count as a process where the driver does not list processes."""
MORE = 0.02
"""The mean power since the last sample is above idle power if it is so much of the limit above the power now."""
CAPPED = 0.8
"""From this share of its limit on a GPU does all that it may, however low the limit is."""
REASONS = {0x4: "power cap", 0x8: "slowdown", 0x20: "software thermal", 0x40: "thermal", 0x80: "power brake"}
"""Clock event reasons that hold clocks down."""
SLOWED = sum(REASONS) - 0x4
"""Those that explain a low power: the power cap does not, it is set at full power."""


def sample(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of one GPU of an NVML reading."""
    return {key: gpu[key] for key in KEYS if key in gpu}


def packed(seen: Sample) -> tuple[int | None, ...]:
    """A sample without its keys, as the journal keeps it."""
    return tuple(seen.get(key) for key in KEYS)


def unpacked(values: Sequence[int | None]) -> dict[str, int]:
    return {key: value for key, value in zip(KEYS, values) if value is not None}


def begin(now: float) -> Use:
    return {
        "began": now,
        "time": None,
        "energy": None,
        "does": "empty",
        "since": now,
        "quiet": None,  # since when it has not worked; None: it works
        "why": "",
        "worked": [],
        "lowest": None,  # power while the utilization was 0
        "limit": None,
        "spent": {},
        "longest": {},
        "throttled": {},
        "every": FIRST,
        "bins": [],
    }


def add(use: Use, now: float, seen: Sample | None, share: float, gap: float, why: str = "") -> Use:
    """`use` after one more sample; None: the GPU gave no answer. Two samples further apart than `gap` say nothing of
    the time in between. `why`: what makes it impossible to judge this GPU, although it answers."""
    last = use["time"]
    passed = now - last if last is not None and now - last <= gap else 0.0
    watts = _watts(use, now, seen) if seen else None
    use = {**use, "time": now, "energy": seen.get("energy") if seen else None, "why": why}
    if seen is None:
        does = "lost"
    else:
        use["limit"] = seen["limit"] // 1000 if "limit" in seen else use["limit"]
        if not seen.get("utilization", 1) and "power" in seen:
            use["lowest"] = min(filter(None, (use["lowest"], seen["power"] // 1000)), default=None)
        use["why"] = why or _missing(seen)
        does = "unknown" if use["why"] or watts is None else _does(use, seen, watts, share)
    use["watts"] = watts
    if does != use["does"] or (last is not None and not passed):
        use["since"] = now
    use["does"] = does
    if does == "working":
        use["quiet"] = None
        if watts is not None and seen and not seen.get("reasons", 0) & SLOWED and _clear(use, seen, watts):
            use["worked"] = [*use["worked"], watts][-LAST:]
    elif use["quiet"] is None or (last is not None and not passed):
        use["quiet"] = now
    use["longest"] = {**use["longest"], does: max(use["longest"].get(does, 0.0), now - use["since"])}
    use["spent"] = {**use["spent"], does: use["spent"].get(does, 0.0) + passed}
    if seen and seen.get("reasons", 0) & sum(REASONS):
        slowed = [name for bit, name in REASONS.items() if seen["reasons"] & bit]
        use["throttled"] = {**use["throttled"], **{name: use["throttled"].get(name, 0.0) + passed for name in slowed}}
    if seen:
        _enter(use, now, seen, watts)
    return use


def set_back(use: Use, now: float) -> Use:
    """`use` after the clock was set back to `now`: its beginning moves by as much."""
    began = now - (use["time"] - use["began"])
    quiet = None if use["quiet"] is None else now
    return {**use, "began": began, "time": None, "energy": None, "since": now, "quiet": quiet}


def usual(use: Mapping[str, Any]) -> int | None:
    """The median power of the samples in which the GPU clearly worked; None: there are too few."""
    worked: list[int] = use["worked"]
    return median(worked) if len(worked) >= KNOWN else None


def times(use: Mapping[str, Any]) -> int:
    """The number of samples in which the GPU worked, at whatever power."""
    bins: list[list[int]] = use["bins"]
    return sum(one[-1] for one in bins) // 100


def median(values: Sequence[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]


def summary(use: Mapping[str, Any]) -> dict[str, Any]:
    """The use in short, for the cluster's record. `quarters`: medians of the four quarters of its time, as SERIES."""
    every, bins = use["every"], use["bins"]
    series = {
        name: [one[place] // one[0] if one[0] else None for one in bins] for place, name in enumerate(SERIES, start=1)
    }
    spent = sum(use["spent"].values()) or 1.0
    found = {
        "began": use["began"],
        "ended": use["time"],
        "limit": use["limit"],
        "usual": usual(use),
        "spent": {does: round(seconds) for does, seconds in use["spent"].items() if seconds},
        "longest": {does: round(seconds) for does, seconds in use["longest"].items() if seconds},
        "throttled": {name: round(seconds / spent, 3) for name, seconds in use["throttled"].items()},
        "quarters": {name: [_middle(values, quarter) for quarter in range(4)] for name, values in series.items()},
        "every": every,
        "series": {name: series[name] for name in ("watts", "busy", "working")},
    }
    return {**found, "why": use["why"]} if use["why"] else found


def _does(use: Use, seen: Sample, watts: int, share: float) -> str:
    busy, limit, known = seen["utilization"], use["limit"] or 0, usual(use)
    if not busy:
        now = seen["power"] / 1000
        if times(use) >= KNOWN and watts >= now + max(START * ((known or now) - now), MORE * limit):
            return "working"  # by its energy, since the last sample
        return "idle" if seen.get("processes", seen.get("memory", 0) // HELD) else "empty"
    base = min(STANDBY * limit, STANDBY * limit if use["lowest"] is None else use["lowest"])
    line = base + START * (limit - base) if known is None else base + share * (known - base)
    explained = seen.get("reasons", 0) & SLOWED or watts >= CAPPED * limit > 0
    waits = busy >= BUSY and seen.get("memory_utilization", 0) <= QUIET and not explained
    return "spinning" if waits and watts < line else "working"


def _clear(use: Use, seen: Sample, watts: int) -> bool:
    """Whether the power of this sample, in which the GPU worked, is that of work."""
    base = STANDBY * (use["limit"] or 0)
    return watts >= base + START * ((use["limit"] or 0) - base) or seen["utilization"] >= BUSY


def _watts(use: Use, now: float, seen: Sample) -> int | None:
    """The mean power since the last sample, by the energy counter; where that can't be, the power now."""
    power = seen.get("power")
    before, last, energy = use["energy"], use["time"], seen.get("energy")
    if None not in (before, last, energy) and energy >= before and now - last >= 1.0:
        mean = (energy - before) / (now - last)
        if mean <= 1.5 * seen.get("limit", mean):  # no more, after a reset of the counter for example
            power = mean
    return None if power is None else round(power / 1000)


def _missing(seen: Sample) -> str:
    names = [name for name in ("utilization", "power") if name not in seen]
    return f"NVML does not tell {' and '.join(names)}" if names else ""


def _enter(use: Use, now: float, seen: Sample, watts: int | None) -> None:
    """Add the sample to the series."""
    bins: list[list[int]] = [*use["bins"]]
    while (place := int((now - use["began"]) / use["every"])) >= BINS:
        bins = [[sum(pair) for pair in zip(*bins[at : at + 2])] for at in range(0, len(bins), 2)]
        use["every"] *= 2
    bins += [[0] * (1 + len(SERIES)) for _ in range(place + 1 - len(bins))]
    values = [watts or 0, *(seen.get(key, 0) for key in ("utilization", "clock", "temperature"))]
    new = [1, *values, 100 * (use["does"] == "working")]
    bins[place] = [sum(pair) for pair in zip(bins[place], new)]
    use["bins"] = bins


def _middle(values: Sequence[int | None], quarter: int) -> int | None:
    size = len(values)
    part = [one for one in values[size * quarter // 4 : size * (quarter + 1) // 4] if one is not None]
    return median(part) if part else None
