"""What prolog and epilog do if the journal alone can't say that all is well: read the sources, test, decide."""

from __future__ import annotations

import os
import time

from slurm_gpuhealth import deadline as own
from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.ladder import drain
from slurm_gpuhealth.node import held, identity, jobs, lock, record, run_level, watch
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.environment import Job
    from slurm_gpuhealth.node.journal import Journal

    Seen = TypeVar("Seen")

UNTESTED = ("not-testable", "tool-error")
FOR_SLURM = 20.0
"""Seconds of a hook's time that are kept for Slurm; at most a third of it."""
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING", "RESIZING")
"""States in which a job may be here."""


def before_job(settings: Settings, journal: Journal, job: Job, deadline: float) -> int:
    """The prolog's exit code: 0 starts the job (unless we have requeued it), 1 makes Slurm requeue it."""
    now = time.time()

    def look(until: float) -> list[str]:
        uuids = _gpus(settings, journal, job)
        _read_nvml(settings, journal, now, until)
        return uuids

    def test(until: float) -> str:
        return run_level.run_level(
            settings, journal, "prolog", 1, uuids, deadline=until, reuse=settings.prolog.reuse_pass, everything=True
        )

    uuids = _keeping_time(settings.prolog.timeout, deadline, look)
    # Usually no time must be kept: a diagnostic that is cut short has nothing to report, and one that DCGM's own limit
    # ends leaves time. But if a fault waits, or a job starts although we hold the node, we must still ask Slurm.
    waits = record.waiting(journal) or journal.get("hold")
    tested = _keeping_time(settings.prolog.timeout, deadline, test) if waits else test(deadline - 1)
    if tested in UNTESTED:
        say(
            f"{job.node}: job {job.job_id}: its GPUs could not be tested ({tested}): gpuhealth findings --severity info"
        )
        if settings.prolog.on_untestable == "drain":
            message = f"level 1 could not test the GPUs ({tested}) and prolog.on_untestable is drain"
            record.keep(journal, settings, [Finding(now, "dcgm", "untestable", message, standing=True)], now)
    faults = record.waiting(journal).values()
    if not journal.get("hold") and not any(_concerns(one.finding, uuids) for one in faults):
        return 0
    outcome = drain.act(settings, journal, "prolog", job.node, now, job.job_id)
    if outcome == "nothing":
        outcome = _held_still(settings, journal, job.node, now)
        if outcome == "nothing":  # slurmctld may have lost our hold: then its faults wait again
            outcome = drain.act(settings, journal, "prolog", job.node, now, job.job_id)
    if outcome in drain.OUT:
        code = move_on(settings, job)
        if code and not _drained(settings, job.node):
            return 0  # it starts here after all
        jobs.turned_away(journal, job.job_id)
        return code
    if outcome != "nothing":
        say(f"{job.node}: job {job.job_id} starts although the node is not fit ({outcome})", error=True)
    return 0


def _keeping_time(whole: float, deadline: float, look: Callable[[float], Seen]) -> Seen:
    """`look(until)`, with time kept for what may follow: asking Slurm, a claim's wait."""
    kept = min(whole / 3, FOR_SLURM)
    own.ends -= kept
    try:
        return look(deadline - kept)
    finally:
        own.ends += kept


def _concerns(finding: Finding, uuids: Sequence[str]) -> bool:
    """Whether it is about these GPUs, the whole node, or a GPU that may be one of these."""
    return finding.gpu is None or not finding.gpu.uuid or finding.gpu.uuid in uuids


def _read_nvml(settings: Settings, journal: Journal, now: float, deadline: float) -> None:
    """Make sure that NVML's reading is fresh. If fifty prologs start at once, one reads and the others wait for it."""
    turn = lock.take(settings, "reading", deadline)
    if turn is not None:
        last = journal.get("sources", {}).get("nvml", {"time": 0.0, "seconds": 0.0})
        tried = now <= last["time"] + last["seconds"] <= time.time()  # while we waited; if that hung, we would hang too
        if not tried and not 0 <= now - journal.get("nvml-time", 0) < settings.check.interval:
            watch.source(settings, journal, "nvml", now, deadline - time.monotonic())
        os.close(turn)


def move_on(settings: Settings, job: Job) -> int:
    """Send the job elsewhere: with `scontrol requeue` (the job is not held) and exit 0, or else with exit 1.

    Requeueing is safe only if the job can't have begun on another node: one node, or PrologFlags=DeferBatch.
    """
    if settings.prolog.move_job == "exit":
        return 1
    try:
        known = control.show_job(settings.slurm, job.job_id)
        flags = ",".join(control.config(settings.slurm).get("PrologFlags", ())) if known.num_nodes > 1 else "DeferBatch"
        if known.batch and not known.het and "deferbatch" in flags.lower():
            # Even with --no-requeue: nothing of it ran. After an exit code Slurm 22.05 would fail the job, and slurmd
            # would report the prolog's failure every 15 s: each time that an admin resumes the node it drains again.
            control.requeue(settings.slurm, known)
            return 0
    except control.SlurmError as error:
        say(f"job {job.job_id}: not requeued ({error}); Slurm moves it on")
    return 1


def after_job(settings: Settings, journal: Journal, job: Job, outcome: str, deadline: float) -> int:
    """The epilog of a failed job, or of any job if a retest waits: read the sources, run level 2 on its GPUs, act.

    Returns the epilog's exit code: 1 makes Slurm start the job elsewhere.
    """
    now = time.time()
    _keeping_time(settings.epilog.timeout, deadline, lambda until: _test(settings, journal, job, outcome, now, until))
    drain.act(settings, journal, "epilog", job.node, now, job.job_id)
    failed = bool(job.exit_code) and outcome not in jobs.FINE
    return int(failed and settings.epilog.expedite and _hands_back(settings, journal, job))


def _hands_back(settings: Settings, journal: Journal, job: Job) -> bool:
    """Whether Slurm shall start this failed job elsewhere at once: a --requeue=expedite job whose GPU is broken.

    Slurm does so if an epilog fails. It then also drains the node, outside our budget, unless the node is drained
    already (25.11, 26.05). So our hold must stand, and that is checked last.
    """
    if not journal.get("hold") or not _is_broken(settings, journal, job):
        return False
    try:
        if not control.is_expedited(settings.slurm, job.job_id):
            return False
        found = control.show_node(settings.slurm, job.node)
    except control.SlurmError as error:
        say(f"job {job.job_id}: not handed back to Slurm (epilog.expedite): {error}")
        return False
    if found.ours is None or found.ours.state == "claim" or "DRAIN" not in found.flags:
        say(f"job {job.job_id}: not handed back to Slurm: {job.node} is not drained by us: {found.reason!r}")
        return False
    say(f"job {job.job_id}: handed back to Slurm, which starts it elsewhere (epilog.expedite): {found.reason!r}")
    return True


def _is_broken(settings: Settings, journal: Journal, job: Job) -> bool:
    """Whether we acted on a fault of the job's GPUs or of the whole node that stands or came during this run."""
    row = journal.one("SELECT started FROM job WHERE job = ? ORDER BY restart DESC", job.job_id)
    faults = record.select(
        journal,
        "severity = 'fault' AND mode = 'enforce' AND acted > 0 AND cleared IS NULL AND (standing OR time >= ?)",
        row[0] if row else time.time(),
    )
    uuids = identity.of_job(settings, journal, job) or ()
    return any(one.finding.gpu is None or one.finding.gpu.uuid in uuids for one in faults)


def _test(settings: Settings, journal: Journal, job: Job, outcome: str, now: float, deadline: float) -> None:
    """Read what an epilog reads, and run level 2."""
    uuids = _gpus(settings, journal, job)
    watch.source(settings, journal, "nvml", now, deadline - time.monotonic())
    others = _held_by_others(settings, journal, job, uuids, now)
    mine = [uuid for uuid in uuids if uuid not in others]
    wanted = mine if outcome not in jobs.FINE else []
    _leftovers(settings, journal, job, mine, now, deadline - time.monotonic())
    retests = [] if others else [row[0] for row in journal.rows("SELECT uuid FROM retest")]
    refusal = _why_not(settings, journal, job, uuids, now)
    if refusal:
        say(f"{job.node}: job {job.job_id} ({outcome}): level 2 not run: {refusal}")
    elif wanted or retests:
        tested = run_level.run_level(
            settings,
            journal,
            "epilog",
            2,
            sorted({*wanted, *retests}),
            deadline=deadline,
            reuse=settings.epilog.reuse_pass if not retests else 0.0,
            others=bool(others),
        )
        if tested not in UNTESTED:
            for uuid in retests:
                journal.write("DELETE FROM retest WHERE uuid = ?", uuid)


def _held_by_others(settings: Settings, journal: Journal, job: Job, mine: Sequence[str], now: float) -> set[str]:
    """The GPUs of other jobs that run here. A job whose epilog did not finish (it was killed, or the configuration was
    broken) would prevent tests of its GPUs: so Slurm is asked about a job that has this job's GPUs, or if a retest
    waits."""
    held: set[str] = set()
    silent = False
    retest = journal.one("SELECT 1 FROM retest LIMIT 1") is not None
    for number, uuids in jobs.running(journal, but=job.job_id):
        over = False
        try:
            doubtful = retest or not set(mine).isdisjoint(uuids)
            over = doubtful and not silent and control.show_job(settings.slurm, number).state not in RUNNING
        except control.NoSuchJob:
            over = True
        except control.Refused:
            over = False  # not known: assume that it runs
        except control.SlurmError:
            silent = True
        if over:
            jobs.gone(journal, number, now)
        else:
            held.update(uuids)
    return held


def _leftovers(
    settings: Settings, journal: Journal, job: Job, uuids: Sequence[str], now: float, timeout: float
) -> None:
    """Report what the job left behind on GPUs that only it had; end or restore it only if configured."""
    if settings.sources.leftovers == "off" or not uuids:
        return
    from slurm_gpuhealth.evidence import leftovers

    timeout = min(timeout, settings.nvml.timeout)
    try:
        probed = lock.guarded(settings, journal, "nvml", timeout, lambda left: leftovers.read(settings, uuids, left))
    except TimeoutError as error:
        say(f"{job.node}: did not check what job {job.job_id} left behind: {error}")
        return
    if probed is None or not probed.value:
        return
    uid = -1 if job.uid is None else job.uid
    found = leftovers.judge_leftovers(probed.value, journal.get("gpus", []), uid, now)
    record.keep(journal, settings, found, now)
    if found and settings.epilog.kill_leftovers:
        ended = leftovers.kill(settings, probed.value, uid)
        say(f"{job.node}: job {job.job_id} left processes on its GPUs; ended: {ended or 'none'}")
    if found and settings.epilog.restore_settings:
        leftovers.restore(settings, probed.value, timeout)


def _why_not(settings: Settings, journal: Journal, job: Job, uuids: Sequence[str], now: float) -> str:
    """Why level 2 should not run here; "" if it should."""
    limits = settings.epilog
    if job.sharing == "mig":
        return "DCGM can't test MIG slices"
    evidence = any(_concerns(one.finding, uuids) for one in record.waiting(journal).values())
    if job.num_nodes > limits.max_nodes and not evidence:
        return (
            f"the job had {job.num_nodes} nodes (epilog.max_nodes {limits.max_nodes}), and nothing points to this one"
        )
    spent = journal.one(
        "SELECT coalesce(sum(seconds), 0) FROM (SELECT DISTINCT time, seconds FROM diagnostic"
        " WHERE program = 'epilog' AND time > ?)",
        now - 86400,
    )[0]
    if spent > limits.max_share * 86400:
        return f"epilogs tested for {spent:.0f} s in the last 24 h (epilog.max_share {limits.max_share:.0%})"
    return ""


def _drained(settings: Settings, node: str) -> bool:
    """Whether the node is drained now. If not, exit 1 would make Slurm drain it, outside our budget."""
    try:
        return "DRAIN" in control.show_node(settings.slurm, node).flags
    except control.SlurmError:  # it was drained a moment ago
        return True


def _held_still(settings: Settings, journal: Journal, node: str, now: float) -> str:
    """Our journal says that we hold this node, but a job starts on it: ask Slurm whether we do."""
    found = held.look_at_hold(settings, journal, node, now)
    return "undecided" if found is None else "held" if found.ours else "nothing"


def _gpus(settings: Settings, journal: Journal, job: Job) -> list[str]:
    """The job's GPUs; all GPUs of the node if it is not known which GPUs Slurm's numbers mean."""
    identity.learn(settings, journal, job.node)
    uuids = identity.of_job(settings, journal, job)
    if uuids is None:
        uuids = identity.everything(journal)
    journal.write(
        "UPDATE job SET gpus = ? WHERE job = ? AND restart = ? AND gpus = ''", ",".join(uuids), job.job_id, job.restart
    )
    return uuids
