"""How many nodes may be held: decided from the reasons of all nodes. Pure: no I/O.

Nodes decide without a coordinator. Each node writes its drain as a claim, waits, reads all reasons once, and counts
those before it: the confirmed holds, and the older claims (by slurmctld's second, then by name). All claims before it
were written when it reads. So the nodes never confirm more claims than fit, and never take back a confirmed hold.
"""

from __future__ import annotations

import math
import time

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.slurm.node import Hold
    from slurm_gpuhealth.slurm.reason import Reason

    Kind = Literal["sweep", "lost", "confirmed", "new"]

LOST = ("Xid79", "lost", "count")
"""Facts that say that a GPU is lost. No bug of a check can cause them, so they have a limit of their own."""
SETTLE = 2.0
"""Seconds between writing a claim and asking for its place: slurmctld keeps whole seconds."""
SPLAY = 2.0
"""If many checks see a fault at the same time, they spread their claims over these seconds, by the node's name."""
ABANDONED = 1200.0
"""Seconds after which other nodes ignore a claim that nobody settled: its node died. Its own node renews it after RENEW
seconds. The clocks of two nodes differ by less than 300 s: otherwise munge would not let them speak to slurmctld."""
RENEW = 300.0


@frozen
class Place:
    """`fits`, or why not."""

    fits: bool
    why: str = ""


def kind(ours: Reason) -> Kind:
    """Which limit a hold counts against."""
    if ours.fact == "sweep" or (ours.fact == "suspect" and ours.rung != "RMA"):
        return "sweep"  # a suspect's jobs died, but no fault is known: tested, and not many nodes at once
    if ours.rung == "RMA" or (ours.state == "fail" and ours.rung not in ("L1", "L2")):
        return "confirmed"  # by a diagnosis on the idle node, or by NVIDIA's own criterion
    return "lost" if ours.fact in LOST else "new"


def place(mine: Hold, holds: Iterable[Hold], total: int, settings: Settings, now: float) -> Place:
    """Whether the claim `mine` fits. Not yet written, it has an infinite `time`, which is after every claim."""
    others = [hold for hold in holds if hold.node != mine.node and _before(hold, mine, now)]
    limits, which, kinds = settings.drain, kind(mine.ours), [kind(hold.ours) for hold in others]
    counts = {name: kinds.count(name) for name in WORDS}
    if counts[which] + 1 > limit(which, total, settings):
        return Place(False, f"{counts[which]} of {total} nodes are held already ({WORDS[which]})")
    if which != "confirmed" and counts["confirmed"] >= most(total, limits.confirmed, 2 * limits.floor):
        return Place(False, f"diagnoses have confirmed faults on {counts['confirmed']} of {total} nodes: look at them")
    an_hour = most(total, limits.per_hour, 2 * limits.floor)
    drained = [hold for hold, one in zip(others, kinds) if one != "sweep"]
    if which != "sweep" and len(drained) >= an_hour:  # else it does not matter when
        recent = sum(now - (began(hold.ours, now) or hold.time) < 3600 for hold in drained)
        if recent >= an_hour:
            return Place(False, f"{recent} nodes were drained in the last hour")
    return Place(True)


def _before(hold: Hold, mine: Hold, now: float) -> bool:
    """Whether this hold comes before the claim `mine`. If a claim's time can't be read, each is before the other."""
    if hold.ours.state != "claim":
        return True
    if hold.time and now - hold.time > ABANDONED:
        return False
    return (hold.time, hold.node) < (mine.time or math.inf, mine.node)


WORDS: dict[Kind, str] = {
    "sweep": "sweep.budget: sweeps and suspects",
    "lost": "drain.lost: lost GPUs",
    "confirmed": "drain.confirmed: faults that a diagnosis confirmed",
    "new": "drain.budget",
}


def limit(which: Kind, total: int, settings: Settings) -> int:
    """How many holds of a kind there may be."""
    limits = settings.drain
    share = {"sweep": settings.sweep.budget, "lost": limits.lost, "confirmed": limits.confirmed, "new": limits.budget}
    return most(total, share[which], 1 if which == "sweep" else limits.floor)


def most(total: int, share: float, floor: int) -> int:
    """`share` of `total` nodes, rounded down, and at least `floor`. If both are 0, no node may be held."""
    return max(floor, int(share * total + 1e-9))


def began(ours: Reason, now: float) -> float:
    """When the hold began, by its `since`, which has no year; 0.0 if it has no `since`."""
    if not ours.since:
        return 0.0
    from calendar import timegm

    year = time.gmtime(now).tm_year
    month, day, hour, minute = (int(ours.since[at : at + 2]) for at in (0, 3, 6, 9))
    for guess in (year, year - 1):
        try:
            found = timegm((guess, month, day, hour, minute, 0))
        except ValueError:  # 29 February
            continue
        if found <= now + 86400:
            return float(found)
    return 0.0
