"""Asks a lemon for the rung that is due: through its reason, within the budget, and only while it is in service."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from slurm_gpuhealth.controller import action_log
from slurm_gpuhealth.correlate import words
from slurm_gpuhealth.ladder import ask as asking
from slurm_gpuhealth.ladder import budget, claim
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store import judged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from slurm_gpuhealth.controller.action_log import Act
    from slurm_gpuhealth.outcomes import Suspicion

AGAIN = 7 * 86400.0
"""Seconds after which the same rung may be asked for again without new failures."""
FRESH = 0.5
"""With so many new failures since the last request, weighted by blame, the node is asked again."""
TESTS = ("L3", "L4", "RMA")
"""The rungs that are asked for. The epilog runs level 2 after each failed job."""


def lemons(act: Act, suspects: Sequence[Suspicion]) -> list[Suspicion]:
    """The suspects that are due for such a rung and that Slurm still has: a node that was renamed or removed stays a
    suspect for weeks. Raises control.SlurmError."""
    due = [_tested(one) for one in suspects if one.rung in TESTS]
    there = control.known(act.settings.slurm, [one.node for one in due]) if due else ()
    return [one for one in due if one.node in there]


# Rungs for lemons


def ask(act: Act, suspects: Sequence[Suspicion]) -> None:
    """Ask each suspect that is due; failures are logged. Raises control.SlurmError."""
    due = [one for one in suspects if _is_due(act, one)]
    if not due:
        return
    if _only_shown(act):
        for one in due:
            action_log.end(
                act, action_log.begin(act, "rung", _detail(one), None, None, one.node), "shadow: would be asked for"
            )
            say(f"{one.node}: would be asked for {one.rung}: {_because(one)}")
        return
    holds, total = control.holds(act.settings.slurm, act.settings.drain.nodes)
    asked = {one.node: _claim(act, one, holds, total) for one in due}
    claims = {node: number for node, number in asked.items() if number is not None}
    if claims:
        time.sleep(budget.SETTLE)
    for node, number in claims.items():
        if _settle(act, node) in ("over-budget", "refused"):
            action_log.forget(act, number)  # the claim was taken back: the next run asks again


def _only_shown(act: Act) -> bool:
    return "shadow" in (act.settings.correlate.rungs, act.settings.mode)


def _is_due(act: Act, one: Suspicion) -> bool:
    """Whether to ask it: for a deeper rung than last time, after new failures, or if the last time is long ago."""
    # A request that was cut short does not count, and in shadow mode there is none.
    not_asked = ("begun",) if _only_shown(act) else ("begun", "shadow")
    past = [row for row in action_log.past(act, "rung", node=one.node) if not row.result.startswith(not_asked)]
    if not past:
        return True
    last = json.loads(past[-1].detail)
    deeper = asking.rank(one.rung) > asking.rank(last["rung"])
    return deeper or one.observed > last["observed"] + FRESH or not 0 <= act.now - past[-1].time <= AGAIN


def _claim(act: Act, one: Suspicion, holds: list[Any], total: int) -> int | None:
    """Ask one node in service for its rung; returns the action's number if a claim was written."""
    request = asking.Request(one.rung, gpu=_gpu(act, one), by="correlate", fact="suspect")
    if any(hold.node == one.node for hold in holds):
        return None  # it is on the ladder already
    try:
        record = control.show_node(act.settings.slurm, one.node)
        if record.owner != "none":
            return None  # an admin or Slurm drained it: it is asked once it is in service
        number = action_log.begin(act, "rung", _detail(one), None, None, one.node)
        try:
            _, said = asking.ask(act.settings, one.node, request, holds, total, act.now)
        except BaseException:
            action_log.forget(act, number)  # the next run asks again
            raise
        action_log.end(act, number, said)
    except (asking.Unchanged, control.SlurmError, ValueError) as error:
        say(
            f"{one.node}: {one.rung} is due, but was not asked for: {error}",
            error=not isinstance(error, asking.Unchanged),
        )
        return None
    say(f"{one.node}: {said}: {_because(one)}", error=True)
    return number


def _gpu(act: Act, one: Suspicion) -> int | None:
    """The number of the GPU that is suspected most: the tests run on all, the reason names it."""
    named = words.gpu(one.gpus)
    with act.engine.connect() as db:
        return judged.gpu_index(db, one.node, named) if named is not None else None


def _settle(act: Act, node: str) -> str:
    try:
        record = control.show_node(act.settings.slurm, node)
        return claim.settle(act.settings, None, node, record, act.now, wait=0.0)
    except (control.SlurmError, ValueError) as error:
        say(f"{node}: {error}; its own check settles the claim")
        return "undecided"


def _detail(one: Suspicion) -> dict[str, Any]:
    return {"rung": one.rung, "observed": one.observed, "p_lemon": one.p_lemon, "terms": list(one.terms)}


def _because(one: Suspicion) -> str:
    return f"lemon with probability {one.p_lemon:.2f}; {'; '.join(one.terms[:3])}"


def _tested(one: Suspicion) -> Suspicion:
    """Without hard evidence a node is only tested, and comes back by itself: RMA would wait for an admin."""
    return one._replace(rung="L4") if one.rung == "RMA" and not one.hard else one
