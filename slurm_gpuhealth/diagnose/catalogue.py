"""DCGM's error codes: name, and class in the DCGM version that reported it (numbers and classes have both changed).

errors.json is NVIDIA's table over its releases. classes.json holds our changes: one row for each code, with the reason.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NEWEST = "9999"


def name(code: int | None) -> str | None:
    """NVIDIA's name of an error code: 29 → DCGM_FR_PERSISTENCE_MODE; None for an unknown code."""
    row = _errors().get(str(code))
    return f"DCGM_FR_{row[0]}" if row else None


def summary(code: int | None) -> str:
    """NVIDIA's short text on an error code; empty for an unknown code."""
    row = _errors().get(str(code))
    return str(row[2]) if row else ""


def class_of(code: int | None, version: str | None) -> str:
    """The class that decides: ours if classes.json has the code, else DCGM's own."""
    return _ours().get(code) or dcgm_class(code, version)


def dcgm_class(code: int | None, version: str | None) -> str:
    """The class that DCGM `version` (None: the newest) gives an error code; UNKNOWN for an unknown code."""
    row = _errors().get(str(code))
    if not row:
        return "UNKNOWN"
    spoke = number(version or NEWEST)
    classes = [(number(since), cls) for since, cls in row[3].items()]
    return str(max((c for c in classes if c[0] <= spoke), default=min(classes))[1])


def number(version: str) -> tuple[int, ...]:
    """4.6.0 → (4, 6, 0); stops at the first part that is not a number."""
    parts = []
    for part in version.strip().split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits[:9]))
    return tuple(parts)


@lru_cache(maxsize=1)
def _errors() -> dict[str, list[Any]]:
    errors: dict[str, list[Any]] = _load("errors.json")["errors"]
    return errors


@lru_cache(maxsize=1)
def _ours() -> dict[int | None, str]:
    return {row["code"]: row["class"] for row in _load("classes.json")}


def _load(file: str) -> Any:
    with open(os.path.join(os.path.dirname(__file__), file), encoding="utf-8") as text:
        return json.load(text)
