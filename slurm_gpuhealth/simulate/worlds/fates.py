"""How a run ends: the first of all that may end it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from random import Random

    from slurm_gpuhealth.simulate.worlds.apps import App, Fault, Held, Incident

HOUR = 3600.0


class Fate(NamedTuple):
    time: float
    end: str = ""
    """A key of ENDS; "" completes."""
    cause: str = ""
    """One that `site.ACCEPTED` has."""
    node: str | None = None
    gpu: int | None = None
    fault: Fault | None = None


def fate_of(
    rng: Random,
    app: App,
    held: Held,
    start: float,
    faults: Mapping[str, Sequence[Fault]],
    incidents: Sequence[Incident],
    cancels: float,
) -> Fate:
    """`cancels`: the share of the hangs that users end."""
    mine = [one for node in held for one in faults.get(node, ()) if not one.when or one.when(app, start)]
    own = max(60.0, app.hours * HOUR * rng.lognormvariate(0, 0.6))
    limit = app.limit * HOUR
    slowest = max((one for one in mine if _since(one) <= start < _until(one)), key=lambda one: one.slow, default=None)
    lasts = own * slowest.slow if slowest else own
    fates = [Fate(start + lasts)]
    if own > limit:
        fates.append(Fate(start + limit, "limit", "user"))
    elif lasts > limit:
        fates.append(Fate(start + limit, "limit", "node", slowest.node if slowest else None))
    fates += _of_user(rng, app, start, own)
    fates += [fate for one in mine for fate in _strike(rng, one, held, start, own)]
    fates += [
        Fate(one.time + rng.uniform(1, 40), one.end, one.cause)
        for one in incidents
        if start < one.time < start + own
        and not held.keys().isdisjoint(one.nodes)
        and (one.of is None or one.of(app))
        and rng.random() < one.share
    ]
    first = min(fates, key=lambda one: one.time)
    if first.end != "hang":
        return first
    if rng.random() < cancels:
        return first._replace(time=min(start + limit, first.time + rng.uniform(1, 8) * HOUR), end="cancelled")
    return first._replace(time=start + limit, end="limit")


def _of_user(rng: Random, app: App, start: float, own: float) -> Iterator[Fate]:
    if rng.random() < app.failing:
        # Aegis (NSDI'25): three quarters of what fails does so in its first ten minutes.
        early = 10 + rng.expovariate(1 / 240)
        after = early if rng.random() < 0.6 and early < own else rng.random() * own
        yield Fate(start + after, rng.choice(app.bugs), app.blames)
    if rng.random() < app.cancelled:
        yield Fate(start + rng.random() * own, "cancelled", "user")
    if rng.random() < app.preempted:
        yield Fate(start + rng.random() * own, "preempted", "user")


def _strike(rng: Random, one: Fault, held: Held, start: float, own: float) -> Iterator[Fate]:
    """When the fault ends the job, if it does."""
    hit = [gpu for gpu in one.gpus if gpu in held[one.node] or one.everyone]
    if one.gpus and not hit:
        return
    when = math.inf
    if one.share and _since(one) <= start < _until(one) and rng.random() < one.share:
        when = start + (5 + rng.expovariate(1 / 60) if one.early else rng.random() * own)
    if one.per_day:
        when = min(when, max(start, _since(one)) + rng.expovariate(one.per_day / DAY))
    if when < min(_until(one), start + own):
        yield Fate(when, rng.choice(one.shows), "node", one.node, rng.choice(hit or held[one.node]), one)


def _since(one: Fault) -> float:
    return EPOCH + one.since * DAY


def _until(one: Fault) -> float:
    return EPOCH + one.until * DAY
