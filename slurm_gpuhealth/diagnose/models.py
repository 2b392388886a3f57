"""By GPU model: the settings given to DCGM, the known troubles, and which tests of each level run.

troubles.json: tests that fail although the GPU is good. `says`: text in the error; without `says` the test hangs.
"""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatchcase
from functools import lru_cache

from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.diagnose.catalogue import number
from slurm_gpuhealth.diagnose.tests import LEVEL_OF, REQUIRED
from slurm_gpuhealth.frozen import frozen, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Dcgm
    from slurm_gpuhealth.diagnose.model import Diagnosis

CONFIG_LIMIT = 10000
"""Largest config, in bytes, that dcgmi and the engine accept."""
PAGE = "docs/gpu-models.md"


@frozen
class Trouble:
    """One row of troubles.json."""

    test: str
    after: str
    since: tuple[int, ...]
    until: tuple[int, ...]
    gpus: tuple[str, ...]
    says: str
    why: str
    remedy: str
    source: str

    @property
    def words(self) -> str:
        """What is known of it, and where."""
        return f"{self.test}: {self.why}: {self.source}"

    def of(self, version: str | None) -> bool:
        """Whether DCGM `version` has this trouble; true for an unknown version."""
        spoken = number(version or "")
        return not spoken or (self.since <= spoken and (not self.until or spoken <= self.until))


@frozen
class Level:
    """What one run level tests on this node. `known` is False until this level or a deeper one has run."""

    level: int
    known: bool
    runs: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Tests named in `skips` that DCGM skips."""
    cannot: tuple[tuple[str, str], ...] = ()
    """Tests that the level needs but that do not run, and why. The level then ends as untested."""
    without: tuple[tuple[str, str], ...] = ()
    """The same for tests that the level does not need."""

    @property
    def tests(self) -> bool:
        """Whether the level can pass here."""
        return not self.cannot and (self.level == 1 or bool(set(self.runs) - {"software"}))


@lru_cache(maxsize=1)
def troubles() -> tuple[Trouble, ...]:
    """The table."""
    with open(os.path.join(os.path.dirname(__file__), "troubles.json"), encoding="utf-8") as file:
        rows = json.load(file)
    return tuple(
        Trouble(since=number(row.pop("from")), until=number(row.pop("to")), gpus=tuple(row.pop("gpus")), **row)
        for row in rows
    )


def known_trouble(test: str, text: str, ran: Collection[str], version: str | None) -> Trouble | None:
    """The row for an error of `test` with this text; None if the error counts."""
    for row in troubles():
        follows = not row.after or row.after in ran
        if row.test == test and follows and row.of(version) and row.says and re.search(row.says, text):
            return row
    return None


def hangs(level: int, gpu: str, version: str | None) -> Trouble | None:
    """The row that explains why level `level` did not end on this model."""
    for row in troubles():
        here = any(fnmatchcase(gpu, one) for one in row.gpus)
        if here and not row.says and LEVEL_OF[row.test] <= level and row.of(version):
            return row
    return None


def settings_for(dcgm: Dcgm, gpu: str) -> Dcgm:
    """`dcgm` with config, parameters and skips of the model `gpu` (as the driver names it)."""
    row = next((row for row in dcgm.model if fnmatchcase(gpu, row.gpu)), None)
    if row is None:
        return dcgm
    if row.config or row.parameters:
        dcgm = replace(dcgm, config=row.config, parameters=row.parameters)
    return replace(dcgm, skips=row.skips) if row.skips else dcgm


def configs(dcgm: Dcgm) -> list[str]:
    """Every config that DCGM may be told to obey."""
    named = [dcgm.config, *(row.config for row in dcgm.model)]
    return list(dict.fromkeys(one for one in named if one))


def refused(path: str) -> str:
    """Why the config at `path` is not used; "" if it is used or if there is none."""
    if not path:
        return ""
    unsafe = configuration.unsafe(path)
    if unsafe:
        return f"dcgm.config is not used: {unsafe[0]}"
    try:
        size = os.stat(path).st_size
    except OSError as error:
        return f"dcgm.config is not used: {path}: {error.strerror}"
    if not os.path.isfile(path) or size >= CONFIG_LIMIT:
        return f"dcgm.config is not used: {path} is no file of less than {CONFIG_LIMIT} bytes, DCGM's limit"
    return ""


def told(dcgm: Dcgm) -> str:
    """The settings given to DCGM for a model, and the date of its config: a run under other settings says nothing."""
    try:
        changed = os.stat(dcgm.config).st_mtime_ns if dcgm.config else 0
    except OSError:
        changed = -1
    return f"{dcgm.config} {changed} {dcgm.parameters}"


def seen(diagnosis: Diagnosis, dcgm: Dcgm) -> dict[str, Any] | None:
    """What a run says about the tests that run here, as the journal keeps it; None if it says nothing about them."""
    if not diagnosis.tests:
        return None
    tests = [[test.name, test.status, test.why] for test in diagnosis.tests]
    return {"version": diagnosis.dcgm_version, "told": told(settings_for(dcgm, diagnosis.model)), "tests": tests}


def plan(runs: Mapping[str, Mapping[str, Any]], dcgm: Dcgm, version: str | None = None) -> Iterator[Level]:
    """Each level as its last run shows it, or as the last run of the next deeper level that ran.

    `runs`: level → `seen`; `dcgm`: the settings for the model. Runs of a DCGM other than `version` do not count.
    """
    now = told(dcgm)
    runs = {key: run for key, run in runs.items() if run["told"] == now and version in (None, run["version"])}
    for level in (1, 2, 3, 4):
        run = next((runs[str(deeper)] for deeper in range(level, 5) if str(deeper) in runs), None)
        if run is None:
            yield Level(level, known=False)
            continue
        of_level = {name: (status, why) for name, status, why in run["tests"] if LEVEL_OF.get(name, 9) <= level}
        needed = {test for one in range(1, level + 1) for test in REQUIRED[one]}
        left_out = {name for name, (status, _) in of_level.items() if status == "skip" and name in dcgm.skips}
        absent = dict.fromkeys(needed - of_level.keys(), ("missing", ""))
        idle = {
            name: reason(status, why)
            for name, (status, why) in sorted({**of_level, **absent}.items())
            if status != "ran" and name not in left_out
        }
        yield Level(
            level,
            known=True,
            runs=tuple(name for name, (status, _) in of_level.items() if status == "ran"),
            left_out=tuple(sorted(left_out)),
            cannot=tuple((name, why) for name, why in idle.items() if name in needed),
            without=tuple((name, why) for name, why in idle.items() if name not in needed),
        )


def reason(status: str, why: str) -> str:
    """Why a test does not run, in words."""
    if status == "missing":
        return "DCGM does not have it here: its package is not installed"
    if why:
        return f"DCGM skips it: {why}"
    return "DCGM skips it: this GPU is not on its list"


def expected(dcgm: Dcgm, gpu: str, version: str | None, runs: Mapping[str, Mapping[str, Any]]) -> list[Trouble]:
    """The rows to expect for this model with DCGM `version`, and the rows that a run has met."""
    met = {why for run in runs.values() for _, _, why in run["tests"]}
    return [
        row
        for row in troubles()
        if row.words in met
        or (row.gpus != ("*",) and row.of(version) and any(fnmatchcase(gpu, one) for one in row.gpus))
        if row.test not in settings_for(dcgm, gpu).skips
    ]


def remedy(level: Level, gpu: str) -> str:
    """What makes the level one that can pass."""
    reasons = " ".join(why for _, why in level.cannot)
    if "package" in reasons:
        return "apt install datacenter-gpu-manager-4-cuda12 datacenter-gpu-manager-4-proprietary (or -cuda13)"
    return f'in gpuhealth.toml: [[dcgm.model]] gpu = "{gpu or "*"}" with config or skips: {PAGE}'
