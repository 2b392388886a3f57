"""Finds policy rows that can never match a finding: a misspelt source, code or detail. Only people are told: on a node
such a row does no harm, and a row for a later version's code is no error there."""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase

from slurm_gpuhealth.config.check import dotted, line_of, parse_with_lines
from slurm_gpuhealth.config.settings import Problem
from slurm_gpuhealth.policy import runbook
from slurm_gpuhealth.policy.judge import SOURCE_OF

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from slurm_gpuhealth.config.settings import Command, Row, Settings

SOURCES = (*SOURCE_OF, "site")
NUMBERED = ("xid", "sxid")
OPEN = ("dcgm", "dcgm-health", "tool")
"""Sources whose codes are names of DCGM's tests, of which a later version may have more, or of a `[[test]]`."""
EVENT = ("class", "action", "fatal", "link", "pci", "name", "count", "old")
DETAILS: dict[str, tuple[str, ...]] = {
    "xid": (
        *EVENT,
        *("bits", "gpc", "investigate", "pid", "process", "recovery", "regs", "remap", "sm", "tpc", "unit", "units"),
        "with",
    ),
    "sxid": (*EVENT, "nvswitch", "suspect"),
    "aer": (*EVENT, "gpu", "layer", "port", "severity"),
    "nvrm": EVENT,
    "kernel": EVENT,
    "nvml": (
        *("action", "aggregate", "banks", "best", "calls", "celsius", "class", "correctable", "counter", "down"),
        *("driver", "expected", "how", "new", "now", "number", "nvml", "present", "reasons", "total"),
        *("uncorrectable", "value", "vbios", "volatile"),
    ),
    "driver": ("class",),
    "job": ("job", "kind", "restart", "since", "usual", "watts"),
    "inventory": ("class", "driver", "gres", "minor", "switches", "usual", "vbios"),
    "dcgm": ("bandwidth", "busy", "class", "entity_id", "error", "error_id", "exit_code", "level", "test"),
    "dcgm-health": ("entity", "error_id", "system", "value", "xid"),
    "ib": ("class", "pci"),
    "host": ("class",),
    "leftover": ("mhz", "milliwatts", "mode", "pid", "process", "reasons", "uid"),
    "site": ("check", "gpu", "says"),
    "tool": ("outcome",),
    "gpu": ("figure", "unit", "value", "median", "clock", "reason", "seconds", "since", "job", "restart"),
}
"""A finding's source → the names of its details, which `when` may ask for."""


def problems(path: str, settings: Settings) -> list[Problem]:
    """Rows of the site that can't match any finding; raises ConfigError."""
    data, lines = parse_with_lines(path)
    own = settings.policy[: len(data.get("policy", ()))]
    return [
        Problem(path, line_of(lines, ("policy", index, key)), dotted(("policy", index, key)), why)
        for index, key, why in unmatched(own, settings.check.command)
    ]


def unmatched(rows: Sequence[Row], commands: Sequence[Command]) -> Iterator[tuple[int, str, str]]:
    """Each row that can't match: its place in `rows`, the wrong key, and why."""
    known = [*runbook.named(), *(f"site:{one.name}" for one in commands)]
    for index, row in enumerate(rows):
        source, _, code = row.finding.partition(":") if ":" in row.finding else ("*", ":", "*")
        sources = [one for one in SOURCES if fnmatchcase(one, source)]
        if not sources:
            near = _near(source, SOURCES, f":{code}")
            yield index, "finding", f'no source has the name "{source}", so this row matches nothing{near}'
        elif not any(_has(one, code, known) for one in sources):
            own = [key for key in known if key.partition(":")[0] in sources]
            what = "its codes are numbers" if sources[0] in NUMBERED else "it has no such code"
            yield index, "finding", f"{what}, so {row.finding} matches nothing{_near(row.finding, own)}"
        else:
            names = {name for one in sources for name in DETAILS[one]}
            for name in row.when.keys() - names:
                what = f'{row.finding} has no detail "{name}", so this row matches nothing'
                yield index, "when", what + _near(name, names)


def _has(source: str, code: str, known: Sequence[str]) -> bool:
    """Whether the source may have a finding with such a code."""
    wild = any(letter in code for letter in "*?[")
    if source in OPEN:
        return True
    if source in NUMBERED:
        return bool(re.fullmatch(r"[\d*?\[\]!-]+" if wild else r"\d{1,5}", code))
    return (wild and code == "*") or any(fnmatchcase(key, f"{source}:{code}") for key in known)


def _near(word: str, words: Iterable[str], rest: str = "") -> str:
    """The nearest word, or else all words."""
    words = sorted(words)
    found = difflib.get_close_matches(word, words, 1, cutoff=0.75)
    return f"; did you mean {found[0]}{rest}?" if found else f"; known: {', '.join(words)}" if words else ""
