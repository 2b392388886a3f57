"""What a held node does next: from its reason, its record and what is known, to one step. Pure: no I/O.

    claim ──budget──▶ queued ──no job here──▶ running ──pass, no fault open──▶ given back, or the next rung
      │                 ▲                       │ fail, or a fault is open
      ▼                 └──────next rung────────┤
    given back           manual ◀──rung is off──┤──cut short once──▶ running again
                         untested ◀─────────────┤
                         fail next=RMA ◀────────┘  end: a human's

Each way up leads to a higher rung, and what hands have done (`done`) counts as climbed, so every climb ends.
"""

from __future__ import annotations

from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.ladder import rungs
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm.hold import HARMLESS, LEFT_ALONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ladder.rungs import Result
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

IN_THE_WAY = {"PLANNED", "COMPLETING"}
"""Flags with which a node may be drained, but not be tested."""
TRIES = 24
"""How often a rung that could not be done is tried, each `ladder.retry`: DCGM may be away for a night."""
BY_HAND = ("reset", "reboot", "repair")
"""Rungs that a human may climb in the ladder's place."""


@frozen
class Step:
    """What to do with a held node."""

    do: Literal["wait", "settle", "run", "back", "queue", "end", "manual", "untested"]
    """`settle`: confirm or undo a claim. `end`: a final reason. The rest: the reason's state after it."""
    rung: str = ""
    why: str = ""
    attempt: int = 1
    done: str = ""
    """Of `run` after `manual`: the highest rung that hands have done."""


@frozen
class Known:
    """What the node knows beside its record."""

    worker: bool = False
    """One is at it."""
    rebooted: bool = False
    """The node has booted since the reason was written."""
    mended: bool = False
    """The standing faults that this hold is about are gone."""
    bundled: bool = True
    """The evidence for an RMA has been gathered."""
    age: float = 0.0
    """Seconds since the reason was written."""


@frozen
class Open:
    """A fault that is true now, and what the policy makes of it."""

    rung: str
    passed: str = ""
    failed: str = ""


def due(ours: Reason, record: NodeRecord, known: Known, settings: Settings) -> Step:
    """What is due on a node that we hold with the reason `ours`."""
    if ours.state == "claim":
        return Step("settle")
    if known.worker:
        return Step("wait", why=f"{ours.rung} is running")
    if ours.state == "pass":
        if (
            settings.ladder.give_back
            and not in_the_way(record)
            and record.base != "DOWN"
            and _may("L3", ours, settings)
        ):
            return Step("run", "L3", "fit, and not given back: slurmd was away, or it was not to be")
        return Step("wait", why="fit: an admin gives it back")
    if is_end(ours) and known.bundled:
        return Step("wait", why="the end of the ladder: a human's")
    if ours.fact == "sweep" and ours.state == "queued" and record.has_job:
        return Step("back", ours.rung, "a job came first")
    way = in_the_way(record)
    if way:
        return Step("wait", why=way)
    if ours.state == "manual":
        proof = "L1" if ours.node else "L3"
        if (known.rebooted or known.mended) and _may(proof, ours, settings):
            return Step("run", proof, "somebody has mended it: to be proven", done=_hands(ours, known))
        return Step("wait", why=f"{ours.rung} is to be done by hand")
    if ours.state == "untested":
        if ours.attempt >= TRIES or known.age < settings.ladder.retry or not _may(ours.rung, ours, settings):
            return Step("wait", why="could not be tested")
        return Step("run", ours.rung, "once more", ours.attempt + 1)
    if ours.state == "fail":
        return _run("RMA" if is_end(ours) else ours.next, ours, settings)
    if ours.state == "queued":
        return _run(ours.rung, ours, settings)
    if ours.rung == "reboot" and known.rebooted:
        return Step("run", "reboot", "it has booted", ours.attempt)
    if ours.attempt > 1:
        return Step("untested", ours.rung, "was cut short again", ours.attempt)
    if not _may(ours.rung, ours, settings):  # switched off meanwhile
        return Step("manual", ours.rung)
    return Step("run", ours.rung, "was cut short", ours.attempt + 1)


def after(
    ours: Reason,
    rung: str,
    result: Result,
    open_: Sequence[Open],
    settings: Settings,
    passed: str = "",
    failed: str = "",
) -> Step:
    """What follows a rung. `passed`, `failed`: of the policy row that the hold is about, empty: the rung's own.

    Fit is: the rung passed, and no fault is true.
    """
    asked = ours.fact in reasons.ON_REQUEST
    if result.outcome == "untested":
        if asked and not open_:
            return Step("back", rung, result.message)
        return Step("untested", rung, result.message)
    if result.outcome == "pass" and not open_:
        follows = [one for one in (passed, ours.to) if one and _rank(one) > _rank(rung)]
        if follows:
            return _queue(min(follows, key=_rank), ours, settings)
        return Step("back", rung)
    own = rungs.LADDER[rung].failed
    if not own:
        return Step("end", rung, result.message)
    higher = [one for one in (failed, *(each.failed for each in open_), *(each.rung for each in open_)) if one]
    wanted = max([one for one in higher if _rank(one) > _rank(rung)], key=_rank, default=own)
    if wanted in BY_HAND and ours.done and _rank(wanted) <= _rank(ours.done):  # and it stands all the same
        wanted = rungs.LADDER[ours.done].failed
    if wanted == "RMA" and ours.node:
        return Step("manual", "repair")  # there is no GPU to be returned; mended, the node comes back
    if wanted == "repair" and wanted in higher and not rungs.enabled(settings, "repair"):
        return Step("manual", wanted)  # the policy's own word for it: a cable, not a GPU to be returned
    return _queue(wanted, ours, settings)


def entry(rung: str, returns: int) -> str:
    """The rung at which a fault enters that came back `returns` times after it was given back in the window."""
    if returns >= 2:
        return "RMA"
    return RUNGS[min(_rank(rung) + returns, len(RUNGS) - 1)]


def is_end(ours: Reason) -> bool:
    """Whether nothing more happens to this hold by itself."""
    return ours.state == "fail" and (ours.rung == "RMA" or ours.next in ("", "RMA"))


def asked_after(ours: Reason, rebooted: bool) -> str:
    """The highest rung done by hand when somebody asks for a test of a node that waits for hands.

    A boot is seen; that a reset or a repair was done, only a human can say: by asking.
    """
    return _hands(ours, Known(rebooted=rebooted, mended=ours.rung != "reboot"))


def in_the_way(record: NodeRecord) -> str:
    """Why no rung may be climbed on a node in this state; "" when it may."""
    if record.has_job:
        return "a job is here"
    if record.base not in ("IDLE", "DOWN"):
        return f"its state is {record.base}"
    for flag in sorted(record.flags - (HARMLESS.keys() - IN_THE_WAY)):
        return f"{flag}: {LEFT_ALONE.get(flag) or HARMLESS.get(flag) or 'not a flag that we know'}"
    return ""


def _hands(ours: Reason, known: Known) -> str:
    """The highest rung that hands have done, as far as the node sees it: it has booted, or what stood is gone.

    What is gone without a boot was a reset at most, where a reboot was to be done; the second time it counts as that.
    """
    mended = "reset" if ours.rung == "reboot" and not ours.done else ours.rung
    counts = known.mended and ours.rung in BY_HAND
    done = [ours.done, "reboot" if known.rebooted else "", mended if counts else ""]
    return max((one for one in done if one), key=_rank, default="")


def _run(rung: str, ours: Reason, settings: Settings) -> Step:
    return Step("run", rung) if _may(rung, ours, settings) else Step("manual", rung)


def _may(rung: str, ours: Reason, settings: Settings) -> bool:
    """Whether the configuration lets the node do it, or somebody asked for this test."""
    return rungs.enabled(settings, rung) or (ours.fact in reasons.ON_REQUEST and rung.startswith("L"))


def _queue(rung: str, ours: Reason, settings: Settings) -> Step:
    """The rung that follows; the next one up where a rung can't help any more."""
    if rung == "reboot" and settings.reboot.enabled and ours.boots >= settings.reboot.most:
        rung = "repair"
    if rung == "repair" and not rungs.enabled(settings, "repair"):
        rung = "RMA"
    return Step("queue" if _may(rung, ours, settings) else "manual", rung)


def _rank(rung: str) -> int:
    return RUNGS.index(rung)
