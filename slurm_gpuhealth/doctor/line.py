"""What the doctor says of one thing, and what its judges share."""

from __future__ import annotations

import re

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    Level = Literal["ok", "warn", "FAIL", "skip"]
    Config = Mapping[str, tuple[str, ...]]
    """slurmctld's configuration (`control.config`)."""


@frozen
class Line:
    """One check's answer."""

    check: str
    """Its name in the JSON; it does not change."""
    level: Level
    what: str
    remedy: str = ""
    """A line to paste: a command, or `in FILE: KEY=VALUE`."""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.what}" + (f" — {self.remedy}" if self.remedy else "")


def first(config: Config, key: str) -> str:
    """The last value of `key`, or ""."""
    return (config.get(key) or ("",))[-1]


def number(text: str) -> int | None:
    """`60`, `60 sec`; None for `INFINITE` and nothing."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None
