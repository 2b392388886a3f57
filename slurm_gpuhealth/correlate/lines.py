"""The lines of the files of `gpuhealth replay` as attempts and events: docs/replay.md is the page."""

from __future__ import annotations

from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING

from slurm_gpuhealth.outcomes import Attempt, Event

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from slurm_gpuhealth.outcomes import GpuName

LATEST = 4_102_444_800.0
"""The year 2100."""
CUT = ("CANCELLED", "OUT_OF_MEMORY", "COMPLETED", "COMPLETING", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "DEADLINE")
"""Those that sacct cuts in a narrow column: `CANCELLED+`, `OUT_OF_ME+`."""

NAMES = frozenset((str, int))
"""What a GPU is named by: no bool, which is an int too."""


def read_attempt(row: Mapping[str, Any]) -> Attempt:
    """A line of JOBS. Raises ValueError, which names the key."""
    try:
        gpus = row.get("gpus")
        if gpus is not None and not isinstance(gpus, dict):
            raise TypeError(f"'gpus' is {str(gpus)[:80]!r}, where {{node: [UUID or index, ...]}} belongs")
        return Attempt(
            _whole(row, "job"),
            _whole(row, "attempt", 0),
            intern(str(row.get("user") or "")),
            intern(str(row.get("account") or "")),
            str(row.get("name") or ""),
            _whole(row, "array") if row.get("array") is not None else None,
            _state(row["state"]),
            _whole(row, "exit_code", 0),
            _whole(row, "signal", 0),
            _seconds(row, "start"),
            _seconds(row, "end"),
            _nodes(_list(row["nodes"])),
            _gpus_of(gpus) if gpus else None,
            _text(row.get("failed_node")),
            _text(row.get("log")),
            _text(row.get("log_class")),
            None,
            str(row.get("submit") or ""),
            str(row.get("partition") or ""),
            str(row.get("qos") or ""),
            str(row.get("reservation") or ""),
            _seconds(row, "timelimit") if row.get("timelimit") is not None else None,
            str(row.get("constraint") or ""),
        )
    except KeyError as error:
        raise ValueError(f"no key {error}") from None
    except TypeError as error:
        raise ValueError(f"a value of the wrong kind: {error}") from None


def read_event(row: Mapping[str, Any]) -> Event:
    """A line of EVENTS. Raises ValueError, which names the key."""
    try:
        detail = row.get("detail") or {}
        if not isinstance(detail, dict):
            raise TypeError(f"'detail' is {str(detail)[:80]!r}, where an object belongs")
        if row["source"] == "test" and not (
            detail.get("level") in (1, 2, 3, 4) and isinstance(detail.get("passed"), bool)
        ):
            raise TypeError("'detail' of a test: its 'level' (1 to 4) and 'passed' (true or false) belong there")
        return Event(
            _seconds(row, "time"),
            _node(row["node"]),
            None if row.get("gpu") is None else _gpu(row["gpu"]),
            _node(row["source"]),
            str(row.get("code", ""))[:100],
            str(row.get("severity") or "info"),
            dict(detail),
        )
    except KeyError as error:
        raise ValueError(f"no key {error}") from None
    except TypeError as error:
        raise ValueError(f"a value of the wrong kind: {error}") from None


def _whole(row: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Not what int() takes for one: of an array's task `123_4` it would make job 1234."""
    value = row[key] if default is None else row.get(key)
    if type(value) is int:
        return value
    if value is None and default is not None:
        return default
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    raise TypeError(f"{key!r} is {str(value)[:80]!r}, where a whole number belongs")


def _state(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"'state' is {str(value)[:80]!r}, where Slurm's word belongs")
    return _word(value)


@lru_cache(maxsize=1024)
def _word(state: str) -> str:
    """Slurm's first word: of `CANCELLED by 1000`, or cut by sacct."""
    word = state.split()[0].upper()
    return next((one for one in CUT if one.startswith(word[:-1])), word) if word.endswith("+") else word


def _seconds(row: Mapping[str, Any], key: str) -> float:
    try:
        time = float(row[key])
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{key!r} is {str(row[key])[:80]!r}, not a number of seconds") from None
    if not -LATEST < time < LATEST:  # nor is NaN; milliseconds are far away
        raise TypeError(f"{key!r}: {time:g} are not the seconds since 1970")
    return time


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:80]!r}, where a list belongs")
    return value


def _nodes(names: list[Any]) -> tuple[str, ...]:
    try:
        return _same_nodes(tuple(names))
    except TypeError:  # a list or an object among them can't be looked up
        return tuple(map(_node, names))


@lru_cache(maxsize=4096)
def _same_nodes(names: tuple[Any, ...]) -> tuple[str, ...]:
    """Each name once; the same object for equal nodes."""
    return tuple(dict.fromkeys(map(_node, names)))


def _node(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{str(value)[:80]!r}, where a name belongs")
    return intern(value)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r}, where a text belongs")
    return value


def _gpus_of(gpus: Mapping[str, Any]) -> dict[str, tuple[GpuName, ...]]:
    """Node → its GPUs; mostly a job holds the same of each node."""
    found: dict[str, tuple[GpuName, ...]] = {}
    last: Any = None
    same: tuple[GpuName, ...] = ()
    for node, names in gpus.items():
        if names != last:
            last, same = names, _gpus(_list(names))
        found[intern(node)] = same
    return found


def _gpus(names: list[Any]) -> tuple[GpuName, ...]:
    return _same_gpus(tuple(names) if NAMES.issuperset(map(type, names)) else tuple(map(_gpu, names)))


@lru_cache(maxsize=16384)
def _same_gpus(names: tuple[GpuName, ...]) -> tuple[GpuName, ...]:
    """The same object for equal GPUs."""
    return names


def _gpu(value: Any) -> Any:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise TypeError(f"{str(value)[:80]!r}, where a GPU's UUID or index belongs")
    return value
