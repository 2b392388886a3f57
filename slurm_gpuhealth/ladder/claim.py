"""A claim on the budget: a drain that is confirmed or undone two seconds later. If killed, the next check finishes it.

    count ──no room──▶ over-budget, nothing was written
      │
    claim (drained, `claim` in the reason) ──▶ wait ──▶ count ──room──▶ confirm: `queued` or `fail`, a hold
      │                                         ▲         └──none──▶ undo: over-budget
      └──killed, no answer──▶ the next check ───┘

The order of the calls is a generator: this module drives it on a node, and a model of 1,000 nodes drives it in tests.
"""

from __future__ import annotations

import math
import os
import time

from slurm_gpuhealth import deadline
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import budget
from slurm_gpuhealth.node import decisions
from slurm_gpuhealth.node import record as findings
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, hold
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm.node import Hold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

    Steps = Generator[tuple[str, str], Any, tuple[str, str]]
    """Yields `count`, `claim`, `wait`, `renew`, `confirm` or `undo`, and why; gets the answer. Returns outcome, why."""

ROOM = 3.0
"""Seconds that a hook must have left after the wait, to count again."""
ELSEWHERE = 30.0
"""For so many seconds a claim that somebody asked for is settled by the program that wrote it, on another host."""


def claiming(node: str, wanted: Reason, settings: Settings, clock: Callable[[], float]) -> Steps:
    """From no claim to a hold: `drained`, `over-budget`, `refused`, `gone` (somebody changed it) or `stopped`."""
    counted = yield "count", ""
    if isinstance(counted, str):
        return "refused", counted
    holds, total = counted
    room = budget.place(Hold(node, wanted, math.inf), holds, total, settings, clock())
    if not room.fits:
        return "over-budget", room.why
    if not (yield "claim", ""):
        return "stopped", ""
    return (yield from settling(node, settings, clock))


def settling(node: str, settings: Settings, clock: Callable[[], float]) -> Steps:
    """From a written claim to a hold, or back; outcomes as in `claiming`. An old claim is renewed first."""
    for renewed in (False, True):
        yield "wait", ""
        counted = yield "count", ""
        if isinstance(counted, str):
            yield "undo", counted
            return "refused", counted
        holds, total = counted
        mine = next((one for one in holds if one.node == node and one.ours.state == "claim"), None)
        if mine is None:
            return "gone", ""
        old = abs(clock() - mine.time) > budget.RENEW
        if renewed or not old:
            break
        if not (yield "renew", ""):
            return "gone", ""
    assert mine is not None  # noqa: S101 - for the type checker
    room = budget.place(replace(mine, time=math.inf) if old else mine, holds, total, settings, clock())
    if not room.fits:
        return ("over-budget", room.why) if (yield "undo", room.why) else ("gone", "")
    return ("drained", "") if (yield "confirm", "") else ("gone", "")


def take(settings: Settings, journal: Journal, node: str, wanted: Reason, write: Callable[[], bool]) -> tuple[str, str]:
    """Claim and settle, under the caller's lock: outcome, why. `write` writes the claim. Raises control.SlurmError."""
    return _drive(claiming(node, wanted, settings, time.time), settings, journal, node, write)


def finish(settings: Settings, journal: Journal | None, node: str, wait: float | None = None) -> tuple[str, str]:
    """Settle the node's claim, under the caller's lock; returns (outcome, why). Raises control.SlurmError."""
    return _drive(settling(node, settings, time.time), settings, journal, node, wait=wait)


def settle(
    settings: Settings,
    journal: Journal | None,
    node: str,
    record: NodeRecord,
    now: float,
    wait: float | None = None,
) -> str:
    """Settle a claim that is found in the node's record: `drained`, `over-budget`, `refused`, `gone`, `undecided`.

    `journal`: None on another host. `wait`: seconds to wait first; 0 if the claim was written SETTLE ago.
    """
    from slurm_gpuhealth.node import held

    ours = record.ours
    if ours is None or ours.state != "claim":
        return "gone"
    if journal and is_elsewhere(record, now):
        return "undecided"
    turn = held.turn(settings) if journal else None
    if journal and turn is None:
        return "undecided"
    try:
        outcome, why = finish(settings, journal, node, wait)
        if journal and outcome == "gone":
            held.follow_hold(settings, journal, control.show_node(settings.slurm, node), now)
        if journal:
            say(f"{node}: {outcome}: {record.reason}" + (f" ({why})" if why else ""), error=True)
        return outcome
    except (control.SlurmError, ValueError) as error:
        say(f"{node}: {error}; the claim is settled at the next check")
        return "undecided"
    finally:
        if turn is not None:
            os.close(turn)


def is_elsewhere(record: NodeRecord, now: float) -> bool:
    """Whether a program on another host is settling this claim just now."""
    return bool(record.ours and record.ours.by) and abs(now - record.reason_time) < ELSEWHERE


def _drive(
    steps: Steps,
    settings: Settings,
    journal: Journal | None,
    node: str,
    write: Callable[[], bool] = lambda: False,
    wait: float | None = None,
) -> tuple[str, str]:
    """Carry out the steps on real Slurm."""
    answer: Any = None
    while True:
        try:
            verb, why = steps.send(answer)
        except StopIteration as end:
            outcome, why = end.value
            return outcome, why
        if verb == "count":
            answer = _count(settings, node)
        elif verb == "claim":
            answer = write()
        elif verb == "wait":
            pause = budget.SETTLE if wait is None else wait
            if deadline.left() < pause + ROOM:
                raise control.ControllerDown("no time left: the next check settles the claim")
            time.sleep(pause)
            wait = None
        elif verb == "renew":
            answer = _renew(settings, node)
        else:
            answer = _confirm(settings, journal, node) if verb == "confirm" else _undo(settings, journal, node, why)


def _count(settings: Settings, node: str) -> tuple[list[Hold], int] | str:
    try:
        return control.holds(settings.slurm, settings.drain.nodes, node)
    except control.Refused as error:
        return str(error)


def _claim_of(settings: Settings, node: str) -> tuple[NodeRecord, Reason] | None:
    """The node's record and our claim; None when somebody has changed it."""
    record = control.show_node(settings.slurm, node)
    return (record, record.ours) if record.ours and record.ours.state == "claim" else None


def _renew(settings: Settings, node: str) -> bool:
    """Give an old claim a new time. Slurm keeps the old time if the text stays the same."""
    found = _claim_of(settings, node)
    if not found:
        return False
    anew = replace(found[1], since=reasons.stamp(time.time()), tail=())
    return hold.put(settings.slurm, found[0], anew).ours is not None


def _confirm(settings: Settings, journal: Journal | None, node: str) -> bool:
    found = _claim_of(settings, node)
    if not found:
        return False
    record, ours = found
    since = record.reason_time or time.time()
    wanted = replace(ours, state="fail" if ours.next else "queued", since=reasons.stamp(since), tail=())
    if hold.put(settings.slurm, record, wanted).ours is None:
        return False
    if journal:
        journal.together(lambda: _is_held(journal, wanted, since))
    return True


def _is_held(journal: Journal, ours: Reason, since: float) -> None:
    """Note that the claim's decision is a drain now, and the hold no longer a claim."""
    kept = journal.get("hold") or {}
    if not kept.get("decision"):
        detail = "a claim was found, and confirmed"
        decisions.note(journal, time.time(), "check", "drained", decisions.of_reason(ours), detail, "", ours.job)
    decisions.confirmed(journal, kept)
    journal.put("hold", {"reason": reasons.write(ours), "since": since, "seen": time.time()})


def _undo(settings: Settings, journal: Journal | None, node: str, why: str) -> bool:
    """Give an unconfirmed claim back: its faults wait again. The journal is written first; otherwise the next check
    would take this for an admin's resume."""
    found = _claim_of(settings, node)
    if not found:
        return False
    ours = found[1]
    if journal:
        journal.together(lambda: _is_given_up(journal, ours, why))
    adopted = journal.get("adopted") if journal else None
    if adopted and adopted["fact"] == ours.fact:
        hold.put_text(settings.slurm, found[0], adopted["was"])
    else:
        hold.give_back(settings.slurm, node)
    if journal:
        journal.put("adopted", None)
    return True


def _is_given_up(journal: Journal, ours: Reason, why: str) -> None:
    number = (journal.get("hold") or {}).get("decision")
    journal.put("hold", None)
    findings.reopen_standing(journal)
    if number:
        journal.write("UPDATE decision SET action = 'over-budget', result = ? WHERE id = ?", why, number)
        findings.reopen(journal, number)
    elif ours.fact not in reasons.ON_REQUEST:
        decisions.note(journal, time.time(), "check", "over-budget", decisions.of_reason(ours), why, "", ours.job)
    if ours.fact not in reasons.ON_REQUEST:
        journal.put("put-off", time.time())
