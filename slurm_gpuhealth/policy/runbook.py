"""Finds the code that people mean by a text, and for a code its runbook entry and the policy's rows. Pure.

codes("Xid79") → [Code("xid", "79", ...)]        codes("lost") → nvml:lost, nvrm:lost
"""

from __future__ import annotations

import os
import re
import sys
from fnmatch import fnmatchcase
from functools import cache

from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.slurm import reason as reasons

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Row
    from slurm_gpuhealth.findings import Scalar

PATH = os.path.join(os.path.dirname(__file__), "runbook.toml")
FIRST_SXID = 10000
XID = re.compile(r"(s?xid)?[ :#-]*(\d{1,5})", re.I)
DCGM = re.compile(r"dcgm(?: error)?[ :#-]*(\d{1,4})|(DCGM_FR_\w+)", re.I)
OPEN = re.compile(r"(?:site|tool|dcgm|dcgm-health):[\w.-]+", re.A)
"""Sources that may have codes which the runbook does not know: a site's checks, future tests of DCGM."""
BY_THE_LINE = (74, 154, *range(144, 151))
"""Xids whose class and action depend on the words of the line, not on the catalogue."""

RUNGS = {
    "reset": "a reset of the GPU",
    "reboot": "a reboot of the node",
    "repair": "the site's repair",
    "RMA": "the GPU's return",
}
STATES = {
    "claim": "is requested",
    "queued": "comes next",
    "running": "is running",
    "pass": "passed",
    "fail": "failed",
    "manual": "must be done by hand",
    "untested": "could not be done",
}
FIELDS = (
    ("pci", "PCI address {}."),
    ("serial", "Serial number {}."),
    ("since", "Since {} (month-day, UTC)."),
    ("job", "Seen by job {}."),
    ("to", "Tests were asked for up to {}, even if nothing is found."),
    ("boots", "Reboots by the ladder: {}."),
    ("done", "Already done by hand: {}."),
    ("by", "Asked for by {}."),
)


@frozen
class Entry:
    """One row of runbook.toml, its steps filled in."""

    finding: tuple[str, ...]
    """`source:code` patterns; for [[slurm]]: how the reason begins."""
    means: str
    do: tuple[str, ...]
    gives_back: str = ""
    when: Mapping[str, Any] = {}
    details: Mapping[str, Scalar] = {}
    """Details that every finding of these names has; "" if it has none."""


@frozen
class Code:
    """One code, and what is known in advance about its findings."""

    source: str
    code: str
    means: str = ""
    """The catalogue's words, if it has the code."""
    says: Mapping[str, Scalar] = {}
    """Class, action, ... by the catalogue: they choose the runbook's entry."""
    details: Mapping[str, Scalar] = {}
    """Details that each of its findings will have, as far as known; others differ between findings."""

    @property
    def key(self) -> str:
        return f"{self.source}:{self.code}"


@cache
def load(table: str = "runbook") -> tuple[Entry, ...]:
    """The entries of `runbook` or `slurm`, in the file's order."""
    steps = document()["steps"]

    def fill(text: str) -> str:
        text = re.sub(r"@(\w+)", lambda found: str(steps[found[1]]), text)
        return text[:1].upper() + text[1:]

    return tuple(
        Entry(
            _patterns(row["finding" if table == "runbook" else "reason"]),
            fill(row["means"]),
            tuple(fill(step) for step in row["do"]),
            fill(row.get("gives_back", "")),
            row.get("when", {}),
            row.get("details", {}),
        )
        for row in document()[table]
    )


@cache
def document() -> dict[str, Any]:
    """runbook.toml as it is written."""
    with open(PATH, "rb") as file:
        book: dict[str, Any] = tomllib.load(file)
    return book


def entry(key: str, says: Mapping[str, Scalar]) -> Entry | None:
    """The first entry for `key` whose conditions `says` meets."""
    for one in load():
        if any(fnmatchcase(key, pattern) for pattern in one.finding) and _meets(says, one.when):
            return one
    return None


def named() -> dict[str, Entry]:
    """Every `source:code` that the runbook has by its full name."""
    return {key: one for one in load() for key in one.finding if "*" not in key}


def codes(text: str) -> list[Code]:
    """The codes that `text` may name: `xid:79`, `Xid79`, `79`, `SXid20034`, `nvml:lost`, `lost`, `dcgm 45`, ..."""
    text = text.strip()
    numbered = XID.fullmatch(text)
    if numbered:
        number = int(numbered[2])
        source = (numbered[1] or ("sxid" if number >= FIRST_SXID else "xid")).lower()
        return [_event(source, number)]
    error = DCGM.fullmatch(text)
    if error:
        return _dcgm(error)
    known = named()
    low = text.lower()
    whole = [key for key in known if low == key.lower()]
    found = whole or [key for key in known if low == key.partition(":")[2].lower()] or of_fact(text)
    if not found and OPEN.fullmatch(text):
        found = [text]
    return [of_key(key) for key in found]


def of_key(key: str) -> Code:
    """The code of a `source:code`."""
    source, _, code = key.partition(":")
    if source in ("xid", "sxid") and code.isdigit():
        return _event(source, int(code))
    one = entry(key, {})
    return Code(source, code, details=one.details if one else {})


def of_fact(fact: str) -> list[str]:
    """The `source:code` names that a reason shortens to `fact`, which has at most 10 letters."""
    return [key for key in named() if reasons.fact(*key.split(":", 1)) == fact]


def rows(policy: Sequence[Row], one: Code) -> list[Row]:
    """The policy's rows that may decide on a finding of this code, in order, up to the first that always matches."""
    found: list[Row] = []
    for row in policy:
        known = {key: wanted for key, wanted in row.when.items() if key in one.details}
        if fnmatchcase(one.key, row.finding) and _meets(one.details, known):
            found.append(row)
            if row.times <= 1 and len(known) == len(row.when):
                break
    return found


def of_slurm(text: str) -> Entry | None:
    """The entry for a reason that Slurm itself wrote, whole or cut to the 20 columns of `sinfo -R`."""
    *whole, last = re.split(" : |, ", text)
    own = (*reasons.SLURM_OWN, *(begin for begin, _ in reasons.SLURM_SHAPES))
    cut = re.match(r"gres/\S+ count\b", last) or any(one.startswith(last) for one in own)
    cut = cut and 18 <= len(text) <= 20 and all(map(reasons.is_slurms, whole))
    if not cut and not reasons.is_slurms(text):
        return None
    return next((one for one in load("slurm") if any(_alike(text, begin) for begin in one.finding)), None)


def sentence(ours: Mapping[str, Any]) -> str:
    """The fields of a reason of ours after its fact and GPU, in words."""
    text = f"{rung(ours['rung'])} {STATES[ours['state']]}"
    text = text[:1].upper() + text[1:]
    text += f", then {rung(ours['next'])}." if ours["next"] else "."
    for key, words in FIELDS:
        text += f" {words.format(ours[key])}" if ours[key] else ""
    return text + "".join(f" Slurm: {one}." for one in ours["tail"])


def stage(rung_name: str, state: str, follows: str) -> tuple[str, str, str]:
    """Of a reason's rung, state and `next`: `end` or the state, what happens now, and what the reader may do."""
    if state == "fail" and (rung_name == "RMA" or follows in ("", "RMA")):
        state = "end"
    now, do = (
        text.replace("{rung}", rung(rung_name)).replace("{next}", rung(follows)) for text in document()["states"][state]
    )
    return state, now[:1].upper() + now[1:], do[:1].upper() + do[1:]


def rung(name: str) -> str:
    """A rung in words."""
    return RUNGS.get(name) or f"DCGM level {name[1:]}"


def nearest(text: str, count: int = 4) -> list[str]:
    """Codes whose names look like `text`."""
    from difflib import get_close_matches

    short = {key.partition(":")[2].lower(): key for key in named()}
    names = {**short, **{key.lower(): key for key in named()}}
    return list(dict.fromkeys(names[name] for name in get_close_matches(text.lower(), names, 2 * count, 0.6)))[:count]


def _event(source: str, number: int) -> Code:
    from slurm_gpuhealth.xid import advise

    if source == "sxid":  # its line says whether it is fatal
        cls, action, means, _ = advise.on_sxid(number, None)
        return Code(source, str(number), means, {"class": cls, "action": action})
    cls, action, means, _ = advise.on_xid(number, "", None)
    says: dict[str, Scalar] = {"class": cls, "action": action}
    return Code(source, str(number), means, says, {} if number in BY_THE_LINE else says)


def _dcgm(error: re.Match[str]) -> list[Code]:
    """An error of DCGM by its number or its name."""
    from slurm_gpuhealth.diagnose import catalogue, model

    numbers = [int(error[1])] if error[1] else range(1000)
    for number in numbers:
        name = catalogue.name(number)
        if name and (error[1] or name == error[2].upper()):
            says: dict[str, Scalar] = {
                "class": catalogue.class_of(number, None),
                "error_id": number,
                "bandwidth": number in model.BANDWIDTH,
            }
            return [Code("dcgm", f"error {number}", f"{name}: {catalogue.summary(number)}", says, says)]
    return []


def _alike(text: str, begin: str) -> bool:
    return text.startswith(begin) or begin.startswith(text)


def _meets(details: Mapping[str, Scalar], when: Mapping[str, Any]) -> bool:
    return all(
        details.get(key) in (wanted if isinstance(wanted, (tuple, list)) else (wanted,)) for key, wanted in when.items()
    )


def _patterns(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
