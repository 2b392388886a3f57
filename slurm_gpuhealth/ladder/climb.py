"""What a held node does next: one step, from its reason, its record in Slurm and what the node knows. Pure: no I/O.

    claim ──budget──▶ queued ──no job here──▶ running ──pass, no fault open──▶ given back, or the next rung
      │                 ▲                       │ fail, or a fault is open
      ▼                 └──────next rung────────┤
    given back           manual ◀──rung is off──┤──cut short once──▶ running again
                         untested ◀─────────────┤
                         fail next=RMA ◀────────┘  end: waits for an admin

Each step up leads to a higher rung, and a rung that somebody did by hand (`done`) counts too, so every climb ends.
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
"""How often a rung that could not be done is tried, once each `ladder.retry`: DCGM may be down for a night."""
BY_HAND = ("reset", "reboot", "repair")
"""Rungs that an admin may do instead of the ladder."""


@frozen
class Step:
    """What to do with a held node."""

    do: Literal["wait", "settle", "run", "back", "queue", "end", "manual", "untested"]
    """`settle`: confirm or undo a claim. `end`: write a final reason. The others: the reason's next state."""
    rung: str = ""
    why: str = ""
    attempt: int = 1
    done: str = ""
    """For `run` after `manual`: the highest rung that an admin has done by hand."""


@frozen
class Known:
    """What the node knows in addition to its record."""

    worker: bool = False
    """A worker is running."""
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
    """A fault that is true now, and the rungs that the policy gives it."""

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
            return Step("run", "L3", "fit, but not given back: slurmd was away, or ladder.give_back was off")
        return Step("wait", why="fit: an admin gives it back")
    if is_end(ours) and known.bundled:
        return Step("wait", why="the end of the ladder: an admin must act")
    if ours.fact == "sweep" and ours.state == "queued" and record.has_job:
        return Step("back", ours.rung, "a job came first")
    way = in_the_way(record, known.rebooted)
    if way:
        return Step("wait", why=way)
    if ours.state == "manual":
        proof = "L1" if ours.node else "L3"
        if (known.rebooted or known.mended) and _may(proof, ours, settings):
            return Step("run", proof, "somebody has mended it: it must prove that", done=_hands(ours, known))
        return Step("wait", why=f"{ours.rung} must be done by hand")
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
    """What follows a rung. `passed`, `failed`: from the policy row of the hold's fault; if empty, the rung's own.

    The node is fit if the rung passed and no fault is true.
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
    if wanted in BY_HAND and ours.done and _rank(wanted) <= _rank(ours.done):  # it did not help
        wanted = rungs.LADDER[ours.done].failed
    of_node = ours.node or (result.test.startswith("tool:") and result.gpu is None)  # NVLink, a cable, the network
    if wanted == "RMA" and of_node:
        return Step("manual", "repair")  # there is no GPU to return; once it is mended, the node comes back
    if wanted == "repair" and wanted in higher and not rungs.enabled(settings, "repair"):
        return Step("manual", wanted)  # the policy asks for a repair, of a cable: no GPU is to be returned
    return _queue(wanted, ours, settings)


def entry(rung: str, returns: int) -> str:
    """The first rung for a fault that came back `returns` times within the window after the node was given back."""
    if returns >= 2:
        return "RMA"
    return RUNGS[min(_rank(rung) + returns, len(RUNGS) - 1)]


def is_end(ours: Reason) -> bool:
    """Whether this hold is at the end of the ladder."""
    return ours.state == "fail" and (ours.rung == "RMA" or ours.next in ("", "RMA"))


def asked_after(ours: Reason, rebooted: bool) -> str:
    """The highest rung done by hand, when somebody asks for a test of a node that waits for an admin.

    The node sees a boot. Only an admin knows that a reset or a repair was done, and says so by asking.
    """
    return _hands(ours, Known(rebooted=rebooted, mended=ours.rung != "reboot"))


def in_the_way(record: NodeRecord, rebooted: bool = False) -> str:
    """Why no rung may run on a node in this state; "" if it may. `rebooted`: a reboot that Slurm waits for is over."""
    if record.has_job:
        return "a job is here"
    if record.base not in ("IDLE", "DOWN"):
        return f"its state is {record.base}"
    over = {"REBOOT_ISSUED"} if rebooted else set()
    for flag in sorted(record.flags - over - (HARMLESS.keys() - IN_THE_WAY)):
        return f"{flag}: {LEFT_ALONE.get(flag) or HARMLESS.get(flag) or 'not a flag that we know'}"
    return ""


def _hands(ours: Reason, known: Known) -> str:
    """The highest rung done by hand, as far as the node can see: it has booted, or the fault is gone.

    If a reboot was due and the fault is gone without a boot, it counts as a reset; the second time as the reboot.
    """
    mended = "reset" if ours.rung == "reboot" and not ours.done else ours.rung
    counts = known.mended and ours.rung in BY_HAND
    done = [ours.done, "reboot" if known.rebooted else "", mended if counts else ""]
    return max((one for one in done if one), key=_rank, default="")


def _run(rung: str, ours: Reason, settings: Settings) -> Step:
    return Step("run", rung) if _may(rung, ours, settings) else Step("manual", rung)


def _may(rung: str, ours: Reason, settings: Settings) -> bool:
    """Whether the configuration lets the node do this rung, or somebody asked for this test."""
    return rungs.enabled(settings, rung) or (ours.fact in reasons.ON_REQUEST and rung.startswith("L"))


def _queue(rung: str, ours: Reason, settings: Settings) -> Step:
    """Queue `rung`, or the next one up if it can't help any more."""
    if rung == "reboot" and settings.reboot.enabled and ours.boots >= settings.reboot.most:
        rung = "repair"
    if rung == "repair" and not rungs.enabled(settings, "repair"):
        rung = "RMA"
    return Step("queue" if _may(rung, ours, settings) else "manual", rung)


def _rank(rung: str) -> int:
    return RUNGS.index(rung)
