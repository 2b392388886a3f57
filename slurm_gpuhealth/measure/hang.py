"""Whether a job stands still on this node: from what its GPUs do (use.py) to what is said of them. Pure.

A job works while one of its GPUs here works: a long evaluation on one GPU keeps the others waiting, and is no hang. If
none has worked for a time, each GPU that had worked before and has a process is said to be spinning or idle.
"""

from __future__ import annotations

from slurm_gpuhealth.measure import use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Hang

    Sample = Mapping[str, Any]
    Job = dict[str, Any]
    """`gpus`: UUID → use; `quiet`: since when none of them works, None while one does, or before one ever has;
    `pause`: the longest time after which one worked again."""
    Said = tuple[str, str, dict[str, Any]]
    """The GPU's UUID, the finding's code, its details."""

PATIENCE = 2.0
"""A job whose GPUs have paused all together is given so many times its longest pause, PAUSES * `hang.after` at most."""
PAUSES = 4.0
STANDS = ("spinning", "idle")


def begin() -> Job:
    return {"gpus": {}, "quiet": None, "pause": 0.0}


def add(job: Job, now: float, seen: Mapping[str, Sample | None], whys: Mapping[str, str], hang: Hang) -> Job:
    """`job` after one more sample of each of its GPUs. None: the GPU gave no answer. `whys`: UUID → why it can't be
    judged, a GPU that several jobs share for example."""
    gpus = {
        uuid: use.add(job["gpus"].get(uuid) or use.begin(now), now, one, hang.power, hang.after, whys.get(uuid, ""))
        for uuid, one in seen.items()
    }
    quiet, pause = job["quiet"], job["pause"]
    if any(one["does"] == "working" for one in gpus.values()):
        if quiet is not None:
            pause = max(pause, now - quiet)
        quiet = None
    elif stopped := [one["quiet"] for one in gpus.values() if use.times(one)]:
        quiet = max(stopped)
    return {"gpus": gpus, "quiet": quiet, "pause": pause}


def set_back(job: Job, now: float) -> Job:
    """`job` after the clock was set back to `now`: what is known of it stays, the times that it does something begin
    anew."""
    gpus = {uuid: use.set_back(one, now) for uuid, one in job["gpus"].items()}
    return {**job, "gpus": gpus, "quiet": None if job["quiet"] is None else now}


def judge(job: Job, now: float, hang: Hang) -> list[Said]:
    """What is to be said of the job's GPUs now: `stalled` with the kind, or `never-started`; details have `since`."""
    gpus = job["gpus"]
    if any(one["does"] in ("working", "unknown") for one in gpus.values()):
        return []
    worked = {uuid: one for uuid, one in gpus.items() if use.times(one)}
    if worked:
        after = max(hang.after, min(PATIENCE * job["pause"], PAUSES * hang.after))
        briefly = all(use.times(one) < use.KNOWN for one in worked.values())
        if briefly and all(one["does"] != "spinning" for one in worked.values()):  # as if it had not begun
            after = max(after, hang.start)
        if now - job["quiet"] < after:
            return []
        return [(uuid, "stalled", _details(one)) for uuid, one in worked.items() if one["does"] in STANDS]
    spins = {uuid: one for uuid, one in gpus.items() if one["does"] == "spinning"}
    if spins and all(now - one["since"] >= hang.after for one in spins.values()):
        return [(uuid, "never-started", _details(one)) for uuid, one in spins.items()]
    if gpus and all(now - one["quiet"] >= hang.start for one in gpus.values()):
        return [(uuid, "never-started", _details(one)) for uuid, one in gpus.items() if one["does"] != "lost"]
    return []


def _details(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": one["does"], "since": round(one["quiet"]), "watts": one["watts"], "usual": use.usual(one)}
