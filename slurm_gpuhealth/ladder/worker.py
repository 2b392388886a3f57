"""The worker: a separate process that climbs the ladder on a node that we hold, until the node is fit or at an end.

The health check starts it when a rung is due, and ends long before it. A lock and the node's reason are all that they
share. Every 20 s the worker asks Slurm whether the hold is still ours. If it is killed, the next check starts another
worker, which reads in the reason how far the first one came:

    reword `<rung> running` ─▶ the rung ─▶ conclude: look anew, what follows, result line ─▶ reword, or give back
"""

from __future__ import annotations

import os
import sys
import time

from slurm_gpuhealth import child
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import climb as core
from slurm_gpuhealth.ladder import conclude, rungs, state
from slurm_gpuhealth.ladder.rungs import Climb, HoldLost, Result
from slurm_gpuhealth.node import identity, lock
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ladder.climb import Step
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

RESTING = ("pass", "manual", "untested")


def tend(settings: Settings, journal: Journal, node: str, record: NodeRecord | None, now: float) -> None:
    """Called by the check, if the journal says that we hold this node: start a worker when something is due.

    `record`: the node's, if it was just read; otherwise it is read if something may be due.
    """
    kept = journal.get("hold")
    ours = reasons.parse(kept["reason"]) if kept else None
    if record is None and ours and _may_be_due(settings, journal, ours, now):
        from slurm_gpuhealth.node import held

        journal.put("polled", now)
        record = held.look_at_hold(settings, journal, node, now)
    if record is None or record.ours is None:
        return
    step = core.due(record.ours, record, state.known(settings, journal, record, now), settings)
    if step.do == "settle":
        from slurm_gpuhealth.ladder import claim

        claim.settle(settings, journal, node, record, now)
    elif step.do != "wait":
        start(node)


def _may_be_due(settings: Settings, journal: Journal, ours: Reason, now: float) -> bool:
    """Whether to ask Slurm now: at each check while we climb and no job is here, otherwise each request_poll."""
    from slurm_gpuhealth.node import jobs

    resting = ours.state in RESTING or core.is_end(ours)
    quiet = not resting and not jobs.running(journal)
    return quiet or not 0 <= now - journal.get("polled", 0) < settings.slurm.request_poll


def start(node: str) -> None:
    """Start the worker in its own session and without our descriptors: slurmd ends the whole group that it started, and
    waits while a process has its pipe open."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            child.close_from(3)
            os.chdir("/")
            ours = {key: value for key, value in os.environ.items() if key.startswith("GPUHEALTH_")}
            env = {"PATH": child.PATH, "LC_ALL": "C.UTF-8", **ours, "SLURMD_NODENAME": node}
            # A new interpreter: modules that it imports later must be of the same version.
            os.execve(sys.executable, [sys.executable, "-m", "slurm_gpuhealth.ladder.worker"], env)  # noqa: S606
    finally:
        os._exit(0)


def main() -> int:
    """`python -m slurm_gpuhealth.ladder.worker`, with SLURMD_NODENAME."""
    from slurm_gpuhealth.node import hook

    node = os.environ["SLURMD_NODENAME"]
    opened = hook.start(node)
    if not opened:
        return 0
    settings, journal = opened
    turn = lock.take(settings, state.LOCK, real=True)
    if turn is None:
        return 0
    try:
        climb(settings, journal, node)
    finally:
        os.close(turn)
    return 0


def climb(settings: Settings, journal: Journal, node: str) -> None:
    """Do rung after rung, until nothing is due."""
    from slurm_gpuhealth.node import held

    _end_orphan(settings, journal)
    try:
        while True:
            record = conclude.ask(lambda: held.show(settings, journal, node))
            if record.ours is None:
                raise HoldLost(f"the hold is no longer ours: {record.reason!r}")
            known = replace(state.known(settings, journal, record, time.time()), worker=False)
            step = core.due(record.ours, record, known, settings)
            if step.do in ("manual", "untested"):
                ours = conclude.located(journal, record.ours) if step.do == "manual" else record.ours
                resting = replace(ours, rung=step.rung, state=step.do, next="", attempt=step.attempt, tail=())
                conclude.reword(settings, journal, record, resting)
            elif step.do == "back":
                now = time.time()
                conclude.give_back(settings, journal, node, record.ours, state.began_at(journal, record), now)
                return
            elif step.do != "run" or not _one_rung(settings, journal, record, step):
                return
    except HoldLost as gone:
        journal.write("UPDATE step SET outcome = 'cancelled', message = ? WHERE outcome = 'running'", str(gone))
        held.look_at_hold(settings, journal, node, time.time())
        say(f"{node}: the ladder ends: {gone}")


def _one_rung(settings: Settings, journal: Journal, record: NodeRecord, step: Step) -> bool:
    """Do one rung. Returns whether another may follow at once. Raises HoldLost."""
    ours = record.ours
    assert ours is not None  # noqa: S101 - for the type checker
    since = state.began_at(journal, record)
    began = conclude.began(journal, step, since)
    running = ours
    if step.rung != "RMA" and (step.rung, ours.rung, ours.state) != ("reboot", "reboot", "running"):
        running = replace(ours, rung=step.rung, state="running", next="", attempt=step.attempt, tail=())
        running = replace(running, done=step.done or ours.done)
        conclude.reword(settings, journal, record, running)
    say(f"{record.name}: {step.rung} begins: {reasons.write(running)}")
    number = conclude.begin(journal, running, step, time.time())
    model = str((journal.get("gpus", []) or [{}])[0].get("name", ""))
    check_hold = _checker(settings, journal, record.name, running)
    given = Climb(
        settings=settings,
        journal=journal,
        node=record.name,
        ours=running,
        rung=step.rung,
        seconds=rungs.seconds(settings, step.rung, model),
        check_hold=check_hold,
        since=began,
    )
    child.watcher = _watcher(settings, journal, check_hold)
    try:
        result = _run(given)
        unread = conclude.look(settings, journal)
        if unread and result.outcome == "pass":
            result = Result("untested", f"{result.message}; but not all could be read: {unread}")
    finally:
        child.watcher = None
        journal.put("ladder-child", None)
    return conclude.conclude(given, result, number, since)


def _run(given: Climb) -> Result:
    """Run the rung. Before a test that nobody asked for: look whether a test can prove anything."""
    import importlib

    if given.rung.startswith("L") and given.ours.fact not in reasons.ON_REQUEST:
        conclude.look(given.settings, given.journal)
        stands = state.pointless(state.faults(given.journal, given.since))
        if stands:
            return Result("fail", f"not tested while this fault stands: {stands.message}", stands.gpu, stands.key)
    module = importlib.import_module(f"slurm_gpuhealth.ladder.{rungs.LADDER[given.rung].module}")
    result: Result = module.run(given)
    return result


def _checker(settings: Settings, journal: Journal, node: str, running: Reason) -> Callable[[], None]:
    """A function that raises HoldLost if the node's reason is no longer `running`. It ignores a silent controller."""
    from slurm_gpuhealth.node import held

    def check() -> None:
        try:
            record = held.show(settings, journal, node)
        except control.SlurmError:
            return
        if not conclude.is_still(record, running):
            raise HoldLost(f"the hold is no longer ours: {record.reason!r}")

    return check


def _watcher(settings: Settings, journal: Journal, check_hold: Callable[[], None]) -> Callable[[child.Child], None]:
    """Called for each child: first note it, in case we are killed; then check the hold while it runs."""
    seen: set[tuple[int, int]] = set()

    def look(one: child.Child) -> None:
        if (one.pid, one.start) in seen:
            check_hold()
        else:
            seen.add((one.pid, one.start))
            journal.put("ladder-child", (identity.boot_id(settings), one.pid, one.start))

    return look


def _end_orphan(settings: Settings, journal: Journal) -> None:
    """End the child of an earlier worker that was killed: DCGM runs only one diagnostic at a time."""
    left = journal.get("ladder-child")
    if left:
        # After a boot, another process may have that number and start time.
        orphan = child.Child(left[1], left[2] if left[0] == identity.boot_id(settings) else -1)
        for _ in range(100):
            if not child.alive(orphan):
                break
            child.terminate(orphan)
            time.sleep(0.1)
        journal.put("ladder-child", None)


if __name__ == "__main__":
    from slurm_gpuhealth.node import hook

    hook.run(main)
