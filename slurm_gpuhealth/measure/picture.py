"""How a job used a GPU, as people read it: a line of bars, its phases, its figures. From use.summary; pure.

A summary comes from the cluster's record, where a node may have written anything: `read` takes only what has our form.
"""

from __future__ import annotations

import json
import math
from itertools import groupby

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BARS = "▁▂▃▄▅▆▇█"
MOST = 64
"""Bins of a series, and GPUs of a node."""
PHASES = 6
"""A job of more phases is told by their sum, and a GPU that was lost all the time, so that it has no phase."""


def read(text: str) -> dict[str, dict[str, Any]]:
    """UUID → summary, of the GPUs whose summary has our form."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or len(found) > MOST:
        return {}
    return {uuid: one for uuid, one in found.items() if isinstance(one, dict) and _is_ours(one)}


def line(one: dict[str, Any]) -> str:
    """`▁▁▇▇▇▇▂▂ idle 20 min, working 5 h, spinning 50 min; usually 612 of 700 W; power cap 12 % of the time`."""
    if one.get("why"):
        return f"not judged: {one['why']}"
    phases = _phases(one)
    if not 0 < len(phases) <= PHASES:
        words = ", ".join(f"{does} {duration(seconds)}" for does, seconds in one["spent"].items())
        words += "".join(
            f"; {kind} for {duration(one['longest'][kind])} at once"
            for kind in ("spinning", "idle")
            if kind in one["longest"]
        )
    else:
        words = ", ".join(f"{does} {duration(seconds)}" for does, seconds in phases)
    usual = f"; usually {one['usual']} of {one['limit']} W" if one["usual"] and one["limit"] else ""
    slowed = "".join(f"; {name} {share:.0%} of the time" for name, share in one["throttled"].items() if share >= 0.01)
    return f"{_bars(one)} {words}{usual}{slowed}{_slow(one.get('slow'))}".lstrip()


def _slow(slow: dict[str, Any] | None) -> str:
    """`; at 61 % of the others' clock for 2 h (heat)`."""
    if not slow:
        return ""
    why = "the driver names no reason" if slow["reason"] == "none" else slow["reason"]
    return f"; at {slow['percent']} % of the others' clock for {duration(slow['seconds'])} ({why})"


def _bars(one: dict[str, Any]) -> str:
    watts = one["series"]["watts"]
    top = max(one["limit"] or 0, *(value or 0 for value in watts), 1)
    bars, last = "", 0
    for value in watts:  # a bin without a sample is as the one before
        last = value if value is not None else last
        bars += BARS[min(len(BARS) - 1, int(last * len(BARS) / (top + 1)))]
    return bars


def _phases(one: dict[str, Any]) -> list[tuple[str, float]]:
    """What the GPU did, and for how many seconds, one after the other."""
    series, does, all_ = one["series"], "idle", []
    for working, busy in zip(series["working"], series["busy"]):
        if working is not None and busy is not None:
            does = "working" if working >= 50 else "spinning" if busy >= 50 else "idle"
        all_.append(does)
    return [(does, len(list(bins)) * one["every"]) for does, bins in groupby(all_)]


def duration(seconds: float) -> str:
    """`5 h 10 min`."""
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours and rest else f"{hours} h" if hours else f"{minutes} min"


def _is_ours(one: dict[str, Any]) -> bool:
    series = one.get("series")
    return (
        isinstance(series, dict)
        and all(_numbers(series.get(name)) for name in ("watts", "busy", "working"))
        and all(_words(one.get(name)) for name in ("spent", "longest", "throttled"))
        and all(one.get(name) is None or _number(one[name]) for name in ("usual", "limit"))
        and _number(one.get("every"))
        and isinstance(one.get("why", ""), str)
        and isinstance(one.get("model", ""), str)
        and all(_number(one.get(name, 0)) for name in ("clock", "load"))
        and ("slow" not in one or _is_slow(one["slow"]))
    )


def _is_slow(found: object) -> bool:
    return (
        isinstance(found, dict)
        and all(_number(found.get(name)) for name in ("seconds", "percent"))
        and isinstance(found.get("reason"), str)
    )


def _numbers(values: object) -> bool:
    return isinstance(values, list) and len(values) <= MOST and all(one is None or _number(one) for one in values)


def _words(found: object) -> bool:
    return isinstance(found, dict) and len(found) <= MOST and all(map(_number, found.values()))


def _number(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1e12
    )
