"""gpuhealth-epilog: slurm.conf's Epilog. Records how the job ended; a failed one's GPUs are tested.

Exit 0; 1 only for a job that Slurm then starts elsewhere (epilog.expedite), and only on a node that we hold.
"""

from __future__ import annotations

import time

from slurm_gpuhealth import deadline
from slurm_gpuhealth.node import environment, hook, jobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.environment import Job
    from slurm_gpuhealth.node.journal import Journal


def main() -> None:
    hook.run(epilog)


def epilog() -> int:
    began = time.monotonic()
    started = hook.job()
    if not started:
        return 0
    job, settings, journal = started
    deadline.ends = began + settings.epilog.timeout
    now = time.time()
    outcome = environment.outcome(job)
    if outcome == "ok" and settings.epilog.ask_slurm:
        outcome = _ask(settings, job)
    outcome = jobs.ended(journal, job, outcome, now)
    if outcome not in jobs.FINE or _retest_waits(journal, job):
        from slurm_gpuhealth.hooks import fitness
        from slurm_gpuhealth.node import watch

        watch.kernel(settings, journal, now)
        if settings.joblog.enabled and outcome not in jobs.FINE:
            from slurm_gpuhealth.node import joblog  # before the test: minutes later its user may have overwritten it

            joblog.read(settings, journal, job, deadline.ends)
        return fitness.after_job(settings, journal, job, outcome, deadline.ends)
    return 0


def _retest_waits(journal: Journal, job: Job) -> bool:
    return journal.one("SELECT 1 FROM retest LIMIT 1") is not None and not jobs.running(journal, but=job.job_id)


def _ask(settings: Settings, job: Job) -> str:
    """What Slurm knows of a job whose environment reads like success: one call, at most `slurm.timeout`."""
    from slurm_gpuhealth.say import say
    from slurm_gpuhealth.slurm import control

    try:
        known = control.show_job(settings.slurm, job.job_id)
    except control.SlurmError as error:
        say(f"job {job.job_id}: {error}")
        return "ok"
    if known.restarts > job.restart:
        return "requeued"
    if known.reason == "TimeLimit":
        return "timeout"
    return "cancelled" if known.signal else "ok"
