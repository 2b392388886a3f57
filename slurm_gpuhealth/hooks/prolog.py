"""gpuhealth-prolog: slurm.conf's Prolog. If this job's GPUs are not fit, drains the node and sends the job elsewhere.

Exit 0 starts the job. Exit 1 makes Slurm requeue the job; Slurm keeps our reason, because it was written first.
"""

from __future__ import annotations

import time

from slurm_gpuhealth import deadline
from slurm_gpuhealth.node import hook, identity, jobs, watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal


def main() -> None:
    hook.run(prolog)


def prolog() -> int:
    began = time.monotonic()
    started = hook.job()
    if not started:
        return 0
    job, settings, journal = started
    deadline.ends = began + settings.prolog.timeout
    now = time.time()
    uuids = identity.of_job(settings, journal, job)
    jobs.started(journal, job, uuids or [], now)
    news = watch.kernel(settings, journal, now)
    if not news and uuids and _fit_as_known(settings, journal, uuids, now):
        return 0
    from slurm_gpuhealth.hooks import fitness

    return fitness.before_job(settings, journal, job, deadline.ends)


def _fit_as_known(settings: Settings, journal: Journal, uuids: Sequence[str], now: float) -> bool:
    """Whether the journal alone can say that these GPUs are fit."""
    return (
        journal.get("hold") is None
        and journal.one("SELECT 1 FROM finding WHERE severity = 'fault' AND acted IS NULL AND cleared IS NULL") is None
        and (settings.sources.nvml == "off" or 0 <= now - journal.get("nvml-time", 0) < settings.check.interval)
        and (
            settings.sources.dcgm == "off"
            or settings.dcgm.backend == "off"
            or jobs.fresh_pass(journal, uuids, 1, now - settings.prolog.reuse_pass)
        )
    )
