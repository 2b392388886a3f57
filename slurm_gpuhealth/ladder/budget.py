"""How many nodes may be held: one question, answered from all nodes' reasons. Pure: no I/O.

Nodes decide without a coordinator. Each writes its drain as a claim, waits, reads all reasons once, and asks for a
place: before it are the confirmed holds and the claims that are older (slurmctld's second, then the name). Who is
before me had written when I read, so never more than fit are confirmed; and a confirmed one is never evicted.
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
"""Facts that say: a GPU is gone. No bug of a check makes them, so they don't use up what waits for a diagnosis."""
SETTLE = 2.0
"""Seconds between writing a claim and asking for its place: slurmctld keeps whole seconds."""
SPLAY = 2.0
"""Seconds over which checks that see a fault at the same time spread their claims, by the node's name."""
ABANDONED = 1200.0
"""Seconds after which a claim that nobody settles counts no more: its node died over it. Its own node makes it anew
after RENEW seconds. The clocks of the two differ by less than 300 s, or munge would let neither speak to slurmctld."""
RENEW = 300.0


@frozen
class Place:
    """`fits`, or why not."""

    fits: bool
    why: str = ""


def kind(ours: Reason) -> Kind:
    """Which limit a hold counts against."""
    if ours.fact == "sweep" or (ours.fact == "suspect" and ours.rung != "RMA"):
        return "sweep"  # of a suspect nothing is known yet but that its jobs died: a test, and not many at once
    if ours.rung == "RMA" or (ours.state == "fail" and ours.rung not in ("L1", "L2")):
        return "confirmed"  # a diagnosis on the idle node, or NVIDIA's own criterion: no longer a check's word
    return "lost" if ours.fact in LOST else "new"


def place(mine: Hold, holds: Iterable[Hold], total: int, settings: Settings, now: float) -> Place:
    """Whether the claim `mine` fits. Before it is written: with an infinite `time`, which is after every claim."""
    others = [hold for hold in holds if hold.node != mine.node and _before(hold, mine, now)]
    limits, which, kinds = settings.drain, kind(mine.ours), [kind(hold.ours) for hold in others]
    counts = {name: kinds.count(name) for name in WORDS}
    share = {"sweep": settings.sweep.budget, "lost": limits.lost, "confirmed": limits.confirmed, "new": limits.budget}
    floor = 1 if which == "sweep" else limits.floor
    if counts[which] + 1 > most(total, share[which], floor):
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
    """Whether this hold comes before the claim `mine`. Of a claim whose time can't be read: both say yes."""
    if hold.ours.state != "claim":
        return True
    if hold.time and now - hold.time > ABANDONED:
        return False
    return (hold.time, hold.node) < (mine.time or math.inf, mine.node)


WORDS: dict[Kind, str] = {
    "sweep": "sweep.budget: sweeps and suspects",
    "lost": "drain.lost: GPUs gone",
    "confirmed": "drain.confirmed: faults that a diagnosis confirmed",
    "new": "drain.budget",
}


def most(total: int, share: float, floor: int) -> int:
    """`share` of `total` nodes, rounded down, and at least `floor`. A floor of 0 and a share of 0 hold nothing."""
    return max(floor, int(share * total + 1e-9))


def began(ours: Reason, now: float) -> float:
    """When the hold began, by its `since`, which has no year; 0.0 without one."""
    if not ours.since:
        return 0.0
    from calendar import timegm

    year = time.gmtime(now).tm_year
    month, day, hour, minute = (int(ours.since[at : at + 2]) for at in (0, 3, 6, 9))
    for guess in (year, year - 1):
        try:
            found = timegm((guess, month, day, hour, minute, 0))
        except ValueError:  # no date
            continue
        if found <= now + 86400:
            return float(found)
    return 0.0
