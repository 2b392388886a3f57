"""NVIDIA's Xid, SXid and NVLink 5 tables, read from the JSON beside this file at first use."""

from __future__ import annotations

import json
import os
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Row = dict[str, Any]


def xid(code: int) -> Row | None:
    """`name`, `meaning`, `class`, `action`, `causes`, `sources` and, where known, `investigate` and `disputed`."""
    found: Row | None = load("xids")["xids"].get(str(code))
    return found


def sxid(code: int) -> Row | None:
    """`name`, `meaning`, `kind`, `sources` and, where known, `severity` (the guide's) and `suspect`."""
    found: Row | None = load("sxids")["sxids"].get(str(code))
    return found


def advice(action: str | None) -> str:
    """NVIDIA's bucket in words."""
    words: dict[str, str] = load("xids")["actions"]
    return words.get(action or "", "NVIDIA's catalogue names no action.")


@cache
def load(name: str) -> Row:
    with open(os.path.join(os.path.dirname(__file__), f"{name}.json"), encoding="utf-8") as file:
        rows: Row = json.load(file)
    return rows
