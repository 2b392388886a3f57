"""Rungs L1 to L4: a DCGM level on all GPUs, then the tests of other tools that are due.

A GPU with an error makes other GPUs fail too (NVIDIA/DCGM#145, #224), and a test right after another may fail on a good
GPU (#272). So a GPU that fails is tested again alone, and only one that also fails alone is named. If GPUs failed only
together, the node is still not fit: the next rung decides.
"""

from __future__ import annotations

import time

from slurm_gpuhealth.findings import Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder.rungs import Result, seconds
from slurm_gpuhealth.node import identity, run_level, tools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.diagnose.tools import Ran
    from slurm_gpuhealth.ladder.rungs import Climb

FIT = ("pass", "warn", "config")
"""DCGM's MONITOR and CONFIG classes do not count against a GPU: a setting must not keep a node out for ever."""


def run(climb: Climb) -> Result:
    """Run the level of this rung, and if it passes, other tools' tests; if somebody asked for one GPU, only the level,
    on that GPU."""
    dcgm = climb.settings.sources.dcgm != "off" and climb.settings.dcgm.backend != "off"
    if climb.ours.fact == "asked" and climb.ours.tests and climb.rung == "L1" and not dcgm:
        return tests(climb, Result("pass", "without DCGM"))
    index = climb.ours.gpu if climb.ours.fact == "asked" else None
    result = levels(climb, int(climb.rung[1:]), index)
    return tests(climb, result) if result.outcome == "pass" and index is None else result


def tests(climb: Climb, result: Result) -> Result:
    """The result after other tools' tests: a test that could not be run proves nothing, a bad one counts if it says so.

    If somebody asked for tests alone and none could be run: untested.
    """
    from slurm_gpuhealth.diagnose.tools import BAD

    ran = tools.run(climb.settings, climb.journal, climb.rung, climb.ours.tests)
    if not ran:
        return result
    absent = [one.test.name for one in ran if one.absent]
    said = [f"{one.test.name}: {_words(one)}" for one in ran if not one.absent]
    said += [f"not installed: {', '.join(absent)}"] if absent else []
    message = "; ".join([result.message, *said])
    bad = next((one for one in ran if one.outcome in BAD and one.test.fails), None)
    if bad:
        from slurm_gpuhealth.node import record

        uuid = next((bad.uuid(one.device) for one in bad.bad), None)
        gpu = record.identify(Gpu(uuid), climb.journal.get("gpus", [])) if uuid else None
        return Result("fail", message, gpu, f"tool:{bad.test.name}")
    alone = climb.ours.fact == "asked" and climb.ours.tests and climb.rung == "L1"
    if alone and all(one.outcome == "untested" for one in ran):
        return Result("untested", message)
    return replace(result, message=message)


def levels(climb: Climb, level: int, index: int | None = None) -> Result:
    """Run DCGM level `level` on all GPUs, or on the one of NVML's `index`.

    If a deeper level found the fault, that level is run: only level 3 can prove that a reset cured what level 3 found.
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
            return Result("fail", f"level {level}: {len(failed)} GPUs fail together, but none of them alone")
        failed = again
    return _worst(climb, level, failed)


def _words(ran: Ran) -> str:
    """`pass (461 GB/s)`, or what went wrong."""
    if ran.outcome != "pass":
        return f"{ran.outcome}, {ran.message}"
    values = [figure.value for figure in ran.figures]
    low, high = min(values), max(values)
    units = {figure.unit for figure in ran.figures}
    span = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    return f"pass ({span} {units.pop()})" if len(units) == 1 else f"pass ({len(values)} figures)"


def _depths(climb: Climb) -> list[int]:
    """The levels at which a diagnostic found faults that still stand; at least 1."""
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
    """The GPUs that failed in the last run."""
    last = climb.journal.one("SELECT max(time) FROM diagnostic WHERE program = 'ladder'")[0]
    rows = climb.journal.rows("SELECT uuid FROM diagnostic WHERE time = ? AND outcome = 'fail' ORDER BY id", last)
    return [row[0] for row in rows]


def _worst(climb: Climb, level: int, failed: list[str]) -> Result:
    """The failing test and GPU: the GPU that failed alone and needs the highest rung."""
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
