"""The end of a rung: look at all sources again, write the journal, the node's result line and its reason, give back.

In this order: if we are killed between two of them, the rung runs again, and no node is given back unproven.
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth import child
from slurm_gpuhealth.findings import Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import climb as core
from slurm_gpuhealth.ladder import state
from slurm_gpuhealth.ladder.rungs import HoldLost, Result
from slurm_gpuhealth.node import decisions, held, watch
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, hold, remark
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Literal, TypeVar

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ladder.climb import Step
    from slurm_gpuhealth.ladder.rungs import Climb
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

    Answer = TypeVar("Answer")

PATIENCE = 21600.0
"""Seconds that a result waits for a controller that is down; after that the rung runs again."""


def conclude(given: Climb, result: Result, number: int, since: float) -> bool:
    """Write down the rung's result and do what follows. Returns whether another rung may run at once.

    `number`: the rung's row in the journal; `since`: when the hold began. Raises HoldLost.
    """
    settings, journal = given.settings, given.journal
    record = ask(lambda: held.show(settings, journal, given.node))
    if not is_still(record, given.ours):
        raise HoldLost(f"the hold is no longer ours: {record.reason!r}")
    open_ = state.open_faults(settings, journal, given.since)
    if "INVALID_REG" in record.flags:  # slurmd reports fewer GPUs than configured
        open_ = [*open_, core.Open("L3", failed="reboot")]
    about = next(iter(state.causes(settings, journal, since)), core.Open(given.rung))
    step = core.after(given.ours, given.rung, result, open_, settings, about.passed, about.failed)
    if result.outcome == "pass" and open_:
        result = _not_fit(journal, given, result)
    ours = _named(given.ours, result)
    follows = {"back": "back", "end": "RMA", "untested": ""}.get(step.do, step.rung)
    end(journal, number, result, follows)
    _write_result(given, record, ours, result, follows)
    say(f"{given.node}: {given.rung} {result.outcome}: {result.message}; next: {follows or 'none'}")
    may = step.do == "back" and (settings.ladder.give_back or ours.fact in reasons.ON_REQUEST)
    if may:
        became = ask(lambda: give_back(settings, journal, given.node, given.ours, since, given.since))
        if became == "found":  # by a check since our look. It is decided already: if we ignored it, nobody would act
            return conclude(given, result, number, since)
        if became == "back":
            return False
    reword(settings, journal, record, _reason_after(journal, given, ours, step))
    return step.do == "queue"


def _reason_after(journal: Journal, given: Climb, ours: Reason, step: Step) -> Reason:
    """The reason that says what follows."""
    if step.do == "back":
        return replace(ours, rung=given.rung, state="pass")
    if step.do == "end":
        return replace(ours, state="fail")
    if step.do == "untested":
        return replace(ours, rung=given.rung, state="untested")
    if step.rung == "RMA":  # keeps the failing test, and adds what an admin needs at the rack
        return replace(located(journal, ours), rung=given.rung, state="fail", next="RMA")
    if step.do == "manual":  # if the GPU is lost after a boot, and the journal too, only the reason tells which it was
        return replace(located(journal, ours), rung=step.rung, state="manual", attempt=1)
    return replace(ours, rung=step.rung, state="queued", attempt=1)


def located(journal: Journal, ours: Reason) -> Reason:
    """The reason with its GPU's address and serial number."""
    gpu = state.blamed(journal, ours) or Gpu()
    serial = "".join(c for c in gpu.serial or "" if c in reasons.WORD)[:32]
    return replace(ours, pci=gpu.pci or "", serial=serial)


def give_back(
    settings: Settings, journal: Journal, node: str, ours: Reason, since: float, began: float
) -> Literal["back", "down", "found"]:
    """End our hold, and the DOWN that our own reboot caused. Raises HoldLost.

    `down`: our reboot did not cause this DOWN. `found`: a fault is true now, or was seen since the rung `began`.
    """
    turn = held.turn(settings)
    try:
        record = held.show(settings, journal, node)
        if not is_still(record, ours):
            raise HoldLost(f"the hold is no longer ours: {record.reason!r}")
        down = record.base == "DOWN" and not remark.read_said(record.comment).was
        if down and not _rebooted_it(journal, record, since):
            return "down"
        if state.faults(journal, began):
            return "found"
        # First the journal: otherwise the next check would take this for an admin's resume. If we are killed here, the
        # next check finds the hold again.
        journal.put("hold", None)
        after = hold.end(settings.slurm, record, down=True) if down else hold.give_back(settings.slurm, node).after
        if after.owner == "admin" and after.reason != remark.read_said(record.comment).was:
            detail = "an admin took it out while it was given back"
            decisions.note(journal, time.time(), "worker", "taken over", record.reason, detail, after.reason, None)
        else:
            decisions.note(
                journal, time.time(), "ladder", "given back", decisions.of_reason(ours), "", record.reason, None
            )
        return "back"
    finally:
        if turn is not None:
            os.close(turn)


def _rebooted_it(journal: Journal, record: NodeRecord, since: float) -> bool:
    """Whether our reboot caused this DOWN. A silent slurmd, or a boot that nobody ordered, is for an admin."""
    ordered = journal.one("SELECT 1 FROM step WHERE rung = 'reboot' AND time >= ? LIMIT 1", since)
    return ordered is not None or bool(record.ours and record.ours.tail)


def reword(settings: Settings, journal: Journal, record: NodeRecord, ours: Reason) -> None:
    """Replace the reason, if it is still the same as in `record`. Raises HoldLost."""

    def write() -> str:
        turn = held.turn(settings)
        try:
            before = held.show(settings, journal, record.name)
            if before.ours != ours:
                if before.ours != record.ours:
                    raise HoldLost(f"the reason was changed to {before.reason!r}")
                after = hold.put(settings.slurm, before, ours)
                if not is_still(after, ours):
                    raise HoldLost(f"the reason was changed to {after.reason!r}")
            return reasons.write(ours)
        finally:
            if turn is not None:
                os.close(turn)

    text = ask(write)
    journal.put("hold", {**(journal.get("hold") or {"since": record.reason_time}), "reason": text})


def is_still(record: NodeRecord, running: Reason) -> bool:
    """Whether the node still has this reason of ours, whatever Slurm has appended to it."""
    return record.ours is not None and replace(record.ours, tail=()) == replace(running, tail=())


def look(settings: Settings, journal: Journal) -> str:
    """Read every source again: only what is true now decides about a give-back. Returns an unreadable source that may
    drain, or ""."""
    watch.kernel(settings, journal, time.time())
    unread = ""
    for name, (sources, _, _) in watch.SOURCES.items():
        acts = any(row.severity == "fault" and row.finding.partition(":")[0] in sources for row in settings.policy)
        matters = acts and getattr(settings.sources, name, "enforce") == "enforce"
        for pause in (5.0, 20.0, 0.0):  # a check, or DCGM that is just ending, may have blocked it
            watch.source(settings, journal, name, time.time(), settings.check.timeout / 2)
            note = journal.get("sources", {}).get(name, {})
            if not matters or note["whole"]:
                break
            if not pause:
                unread = unread or f"{name} {note['error'] or 'could not be read'}"
            time.sleep(pause)
    return unread


def ask(question: Callable[[], Answer]) -> Answer:
    """The answer to a question to slurmctld. Waits while slurmctld is down, for PATIENCE at most."""
    end_ = time.monotonic() + PATIENCE
    while True:
        try:
            return question()
        except control.ControllerDown:
            if time.monotonic() > end_:
                raise
            time.sleep(child.WATCH / 2)


def began(journal: Journal, step: Step, since: float) -> float:
    """When the rung began. If it was cut short: when its first attempt began, because the faults since then count."""
    if step.attempt == 1:
        return time.time()
    cut = "('running', 'cut short')"
    first = journal.one(
        f"SELECT min(time) FROM step WHERE rung = ? AND time >= ? AND outcome IN {cut}"  # noqa: S608 - a constant
        f" AND id > (SELECT coalesce(max(id), 0) FROM step WHERE outcome NOT IN {cut})",
        step.rung,
        since,
    )[0]
    return float(first or time.time())


def begin(journal: Journal, ours: Reason, step: Step, now: float) -> int:
    """Insert the row of a rung that begins. After a reboot the rung keeps its row."""
    last = journal.one("SELECT id, rung FROM step WHERE outcome = 'running' ORDER BY id DESC LIMIT 1")
    if last and last[1] == step.rung == "reboot":
        return int(last[0])
    journal.write("UPDATE step SET outcome = 'cut short' WHERE outcome = 'running'")
    return journal.write(
        "INSERT INTO step (time, fact, gpu, rung, attempt, outcome, follows, test, code, message, bundle)"
        " VALUES (?, ?, ?, ?, ?, 'running', '', '', '', '', '')",
        now,
        ours.fact,
        None if ours.fact == "suspect" else ours.gpu,  # a suspicion: the row is to have the GPU that failed
        step.rung,
        step.attempt,
    )


def end(journal: Journal, number: int, result: Result, follows: str) -> None:
    """Write a rung's result into its row."""
    gpu = result.gpu or Gpu()
    journal.write(
        "UPDATE step SET seconds = ? - time, outcome = ?, follows = ?, test = ?, code = ?, message = ?, bundle = ?,"
        " uuid = ?, gpu = coalesce(gpu, ?) WHERE id = ?",
        time.time(),
        result.outcome,
        follows,
        result.test,
        result.code,
        result.message,
        result.bundle,
        gpu.uuid,
        gpu.index,
        number,
    )


def _not_fit(journal: Journal, given: Climb, result: Result) -> Result:
    """A passed rung while a fault is true does not count as passed."""
    found = state.faults(journal, given.since)
    if not found:
        return Result("fail", f"{result.message}; slurmd reports fewer GPUs than configured", test="gres")
    return Result("fail", f"{result.message}; but this fault stands: {found[0].message}", found[0].gpu, found[0].key)


def _named(ours: Reason, result: Result) -> Reason:
    """The reason with what the rung found: for a request the fact and its GPU, for a fault of the node the GPU."""
    if result.outcome != "fail":
        return ours
    fact = ours.fact
    if fact in reasons.ON_REQUEST and result.test:
        source, _, code = result.test.rpartition(":")
        fact = reasons.fact(source, code)
    keeps = result.gpu is None or (ours.gpu is not None and fact == ours.fact)
    gpu = ours.gpu if keeps or result.gpu is None else result.gpu.index
    return replace(ours, fact=fact, gpu=gpu, node=ours.node and gpu is None)


def _write_result(given: Climb, record: NodeRecord, ours: Reason, result: Result, follows: str) -> None:
    """Write the result into the node's Extra. It survives the hold, and a node without a disk has nothing else."""
    settings, now = given.settings, time.time()
    backs, boots = state.history(given.journal, ours, now - settings.ladder.window)
    last: Any = remark.read_result(record.extra)
    if last and last.at > now - settings.ladder.window:
        same = (last.fact, last.gpu) == (ours.fact, ours.gpu)
        backs = max(backs, last.backs + (follows == "back") if same else 0)
        boots = max(boots, last.boots)
    line = remark.Result(
        rung=given.rung,
        outcome=result.outcome,
        at=now,
        fact=ours.fact,
        gpu=ours.gpu,
        test=result.test,
        code=result.code,
        next=follows,
        backs=backs if ours.fact not in reasons.ON_REQUEST else 0,
        boots=max(boots, ours.boots),
        bundle=os.path.basename(result.bundle),
    )
    if given.rung == "RMA" and last and last.next == "RMA":  # keep the failing test
        line = replace(last, bundle=line.bundle)
    extra = remark.write_result(record.extra, line)
    try:
        ask(lambda: control.set_remarks(settings.slurm, given.node, extra=extra))
    except (control.SlurmError, ValueError) as error:
        say(f"{given.node}: the result line could not be written: {error}")
