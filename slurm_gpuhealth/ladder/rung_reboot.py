"""Rung reboot: ask Slurm for it, wait for it, then run level 2 on the node, which is still out of service.

Measured on 22.05.8, on a node that we had drained, `scontrol reboot ASAP nextstate=DOWN`:

    IDLE+DRAIN ─▶ IDLE+DRAIN+REBOOT_REQUESTED ─▶ DOWN+DRAIN+REBOOT_ISSUED      OURS : reboot issued
                                                    │ slurmd is back, BootTime is new
                                                    ├─▶ DOWN                   OURS : reboot issued : reboot complete
                                                    │ ResumeTimeout is over first
                                                    └─▶ DOWN                   OURS : reboot issued : reboot timed out

In the end the drain is gone. Only the DOWN keeps the node out, and Slurm's words in the reason show that it is ours. A
new reason must come with State=DRAIN, and RESUME ends both. With ReturnToService=2 the next registration would put the
node into service untested. If RebootProgram is missing or fails, only ResumeTimeout shows it. A reason that an admin
writes meanwhile stays, with ` : reboot complete` after it. If the admin resumes the node meanwhile, Slurm sets it DOWN
for "Node unexpectedly rebooted".
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import budget
from slurm_gpuhealth.ladder.rungs import HoldLost, Result
from slurm_gpuhealth.node import held, identity
from slurm_gpuhealth.slurm import control, hold, remark
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ladder.rungs import Climb
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

NOTE = "reason-boot"
"""In the journal: a reason, and the id of the boot in which it was first seen."""
UNDERWAY = {"REBOOT_REQUESTED", "REBOOT_ISSUED"}
POLL = 5.0
REQUESTED = 300.0
"""Seconds that slurmctld may take to send the order to an idle node. Measured: 1 s."""
MARGIN = 60.0
"""Seconds after ResumeTimeout. Measured: slurmctld looks about every 30 s."""


def rebooted(settings: Settings, journal: Journal, record: NodeRecord) -> bool:
    """Whether the node has booted since its reason was written. Call it once then: it notes the boot's id."""
    ours = record.ours
    if ours is None or is_underway(record):
        return False
    boot, text = identity.boot_id(settings), reasons.write(ours)
    note = journal.get(NOTE)
    if not note or note[1] != text:
        note = [boot, text]
        journal.put(NOTE, note)
    return bool(note[0] != boot) or slurm_says(record, ours)


def is_underway(record: NodeRecord) -> bool:
    """Whether a reboot is asked for or not over. If slurmd then registers with fewer GPUs than configured, Slurm leaves
    REBOOT_ISSUED there for good (22.05 to 26.05)."""
    issued = "REBOOT_ISSUED" in record.flags and "INVALID_REG" not in record.flags
    return issued or "REBOOT_REQUESTED" in record.flags


def slurm_says(record: NodeRecord, ours: Reason) -> bool:
    """The same from the record alone, in case the journal did not survive the boot. BootTime is by slurmctld's clock.

    When somebody reboots a drained node by hand, slurmctld may set it DOWN (`DOWN+DRAIN`) and renew the reason's time.
    """
    if ours.state == "manual" and not ours.boots and ours.done in ("", "reset") and ours.since:
        return record.boot_time >= budget.began(ours, record.reason_time) + 60  # `since` has no seconds
    return "reboot complete" in ours.tail or record.boot_time > record.reason_time > 0


def run(climb: Climb) -> Result:
    """Before the reboot: ask for it, and wait until it ends this program. After it: level 2."""
    try:
        record = held.show(climb.settings, climb.journal, climb.node)
        if rebooted(climb.settings, climb.journal, record):
            return _test(climb)
        config = control.config(climb.settings.slurm)
        refusal = _refusal(climb, record, config)
        if refusal:
            return refusal
        _order(climb)
        said = config.get("ResumeTimeout", ("",))[0].partition(" ")[0]
        trouble = _wait(climb, float(said) if said.isdigit() else 60.0)
        if not trouble:
            return _test(climb)
        _put_back(climb)
        return Result("untested", trouble)
    except (control.SlurmError, ValueError) as error:
        return Result("untested", f"Slurm could not be asked for the reboot: {error}")


def _test(climb: Climb) -> Result:
    from slurm_gpuhealth.ladder import rung_test

    return rung_test.levels(climb, 2)


def _refusal(climb: Climb, record: NodeRecord, config: Mapping[str, tuple[str, ...]]) -> Result | None:
    """Why no reboot is asked for."""
    if record.ours is None:
        raise HoldLost(f"the hold is no longer ours: {record.reason!r}")
    if record.has_job:
        return Result("untested", "a job is here")
    most, done = climb.settings.reboot.most, _done(climb, record)
    if done >= most:
        days = climb.settings.ladder.window / 86400
        return Result("fail", f"rebooted {done} times within {days:g} days already (reboot.most is {most})")
    if not config.get("RebootProgram"):
        return Result("untested", "slurm.conf has no RebootProgram: set it, to /sbin/reboot for example")
    if config.get("ReturnToService", ("",))[0] == "2":
        return Result(
            "untested", "ReturnToService=2 would put the node into service untested: set it to 1, or reboot by hand"
        )
    return None


def _done(climb: Climb, record: NodeRecord) -> int:
    """How often we rebooted the node within the window, as far as reason, Extra and journal tell."""
    since = time.time() - climb.settings.ladder.window
    last = remark.read_result(record.extra)
    said = last.boots if last and last.at >= since else 0
    rows = climb.journal.one(
        "SELECT count(*) FROM step WHERE rung = 'reboot' AND outcome IN ('pass', 'fail') AND time >= ?", since
    )
    return max(climb.ours.boots, said, int(rows[0]))


def _order(climb: Climb) -> None:
    """Ask for the reboot, unless somebody changed the node meanwhile."""
    settings, journal = climb.settings, climb.journal
    turn = held.turn(settings)
    try:
        record = held.show(settings, journal, climb.node)
        if record.ours is None or replace(record.ours, tail=()) != replace(climb.ours, tail=()):
            raise HoldLost(f"the reason was changed to {record.reason!r}")
        if record.has_job:
            raise control.SlurmError("a job is here")
        wanted = replace(climb.ours, boots=_done(climb, record) + 1, tail=())
        journal.put(NOTE, [identity.boot_id(settings), reasons.write(wanted)])
        try:
            control.reboot(settings.slurm, climb.node, wanted)
        except control.ControllerDown:
            if control.show_node(settings.slurm, climb.node).ours != wanted:  # it may have received the order
                raise
        kept = journal.get("hold") or {"since": record.reason_time}
        journal.put("hold", {**kept, "reason": reasons.write(wanted)})  # Slurm may write over it before we see it again
    finally:
        if turn is not None:
            os.close(turn)


def _wait(climb: Climb, patience: float) -> str:
    """Wait for the reboot to end this program. Returns why it did not come; "" if the node booted and we still run."""
    settings, began = climb.settings, time.monotonic()
    while True:
        time.sleep(POLL)
        passed = time.monotonic() - began
        try:
            record = held.show(settings, climb.journal, climb.node)
        except control.ControllerDown:
            continue
        if record.ours is None:
            raise HoldLost(f"the hold is no longer ours: {record.reason!r}")
        if rebooted(settings, climb.journal, record):
            return ""
        if "REBOOT_REQUESTED" in record.flags and passed > REQUESTED:
            control.cancel_reboot(settings.slurm, climb.node)
            return f"slurmctld did not order the reboot within {REQUESTED:g} s"
        if not UNDERWAY & record.flags or passed > patience + REQUESTED + MARGIN:
            if record.base != "DOWN":
                return "the reboot was cancelled"
            return (
                f"it did not reboot within ResumeTimeout ({patience:g} s): slurmd's log says how RebootProgram of"
                " slurm.conf ended here"
            )


def _put_back(climb: Climb) -> None:
    """After a reboot that did not come: put back our reason, and the drain that Slurm has removed."""
    record = held.show(climb.settings, climb.journal, climb.node)
    if record.ours is None:
        raise HoldLost(f"the hold is no longer ours: {record.reason!r}")
    hold.put(climb.settings.slurm, record, climb.ours)
