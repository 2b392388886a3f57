"""Rungs L1 to L4: a DCGM level on all GPUs; one that fails is tested again alone, for neighbours fail together.

A GPU with an error makes others beside it fail (NVIDIA/DCGM#145, #224), and a test right after another may fail on a
good one (#272): so only what fails alone as well is named. What failed only in company is not fit all the same: the
next rung decides.
"""

from __future__ import annotations

import time

from slurm_gpuhealth.findings import Gpu
from slurm_gpuhealth.ladder.rungs import Result, seconds
from slurm_gpuhealth.node import identity, run_level

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.ladder.rungs import Climb

FIT = ("pass", "warn", "config")
"""DCGM's MONITOR and CONFIG classes are nothing against the GPU: a setting must not keep a node out for ever."""


def run(climb: Climb) -> Result:
    """The level of this rung; of a GPU that somebody asked for, that one alone."""
    return levels(climb, int(climb.rung[1:]), climb.ours.gpu if climb.ours.fact == "asked" else None)


def levels(climb: Climb, level: int, index: int | None = None) -> Result:
    """Run DCGM level `level` on all GPUs, or on the one of NVML's `index`.

    A deeper one where only that can clear what a diagnostic found: a reset for what level 3 found is proven by level 3.
    """
    journal = climb.journal
    known = journal.get("gpus", [])
    level = max(level, *_depths(climb))
    model = str(known[0].get("name", "")) if known else ""
    deadline = time.monotonic() + seconds(climb.settings, f"L{level}", model)
    wanted = [gpu["uuid"] for gpu in known if gpu["index"] == index] if index is not None else []
    if index is not None and not wanted:
        return Result("untested", f"there is no GPU {index}", test="")
    everything = identity.everything(journal)
    outcome = _level(climb, level, wanted or everything, deadline, not wanted)
    if outcome in FIT:
        return Result("pass", f"level {level}: {outcome}")
    if outcome != "fail":
        return Result("untested", f"level {level}: {outcome}: {_message(climb)}")
    failed = _failed(climb)
    if level > 1 and len(wanted or everything) > 1:
        alone = {uuid: _level(climb, level, [uuid], deadline, False) for uuid in failed}
        again = [uuid for uuid, one in alone.items() if one not in FIT]
        if failed and not again:
            return Result("fail", f"level {level}: {len(failed)} GPUs fail together, and none of them alone")
        failed = again
    return _worst(climb, level, failed)


def _depths(climb: Climb) -> list[int]:
    """The levels at which a diagnostic found what still stands; 1 at least."""
    from slurm_gpuhealth.node import record

    stand = record.select(
        climb.journal, "source = 'dcgm' AND severity = 'fault' AND mode = 'enforce' AND cleared IS NULL"
    )
    return [1, *(depth for one in stand if isinstance(depth := one.finding.details.get("level"), int))]


def _level(climb: Climb, level: int, uuids: list[str], deadline: float, everything: bool) -> str:
    return run_level.run_level(
        climb.settings, climb.journal, "ladder", level, uuids, deadline=deadline, reuse=0.0, everything=everything
    )


def _failed(climb: Climb) -> list[str]:
    """The GPUs that have an error in the last run."""
    last = climb.journal.one("SELECT max(time) FROM diagnostic WHERE program = 'ladder'")[0]
    rows = climb.journal.rows("SELECT uuid FROM diagnostic WHERE time = ? AND outcome = 'fail' ORDER BY id", last)
    return [row[0] for row in rows]


def _worst(climb: Climb, level: int, failed: list[str]) -> Result:
    """The failing test and GPU: of the GPUs that failed alone the one whose finding asks for the highest rung."""
    from slurm_gpuhealth.node import record

    found = [
        one.finding
        for one in record.select(climb.journal, "source = 'dcgm' AND severity = 'fault' AND cleared IS NULL")
        if not failed or (one.finding.gpu and one.finding.gpu.uuid in failed)
    ]
    if not found:
        return Result("fail", f"level {level}: fail: {_message(climb)}")
    first = found[0]
    code = first.details.get("error_id")
    return Result(
        "fail", first.message, first.gpu or Gpu(), str(first.details.get("test", "")), "" if code is None else str(code)
    )


def _message(climb: Climb) -> str:
    import json

    row = climb.journal.one("SELECT detail FROM diagnostic WHERE program = 'ladder' ORDER BY id DESC LIMIT 1")
    return str(json.loads(row[0]).get("message", "")) if row else "the driver or the host engine did not answer"
