"""gpuhealth-check: slurm.conf's HealthCheckProgram. Checks the node and drains it on a fault. Always exits with 0.

Slurm starts it each HealthCheckInterval, even while an earlier one still hangs, and ends it after 60 s.
"""

from __future__ import annotations

import os
import time
import zlib

from slurm_gpuhealth.node import hook, identity, jobs, lock, watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord

MISSED = 1.5
"""Check intervals: each second check."""
RETRY = 300.0
"""Seconds. A heartbeat that the store did not take is sent again so often."""


def main() -> None:
    hook.run(check)


def check() -> int:
    began = time.monotonic()
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    opened = hook.start(node)
    if not opened:
        return 0
    settings, journal = opened
    turn = lock.take(settings, "check")
    if turn is None:  # an earlier check still runs
        return 0
    try:
        look(settings, journal, node, began + settings.check.timeout)
        if settings.metrics.textfile:
            from slurm_gpuhealth.metrics import node as metrics

            metrics.publish(settings, journal, time.time(), time.monotonic() - began)
    finally:
        os.close(turn)
    return 0


def look(settings: Settings, journal: Journal, node: str, deadline: float) -> None:
    """One check: read every source that is on and due, then act on the faults."""
    now = time.time()
    watch.kernel(settings, journal, now)
    boot = identity.boot_id(settings)
    if journal.get("inventory-boot") != boot:
        _first_of_boot(settings, journal, node, now, deadline)
        journal.put("inventory-boot", boot)
    elif identity.doubtful(journal, now):
        identity.learn(settings, journal, node, again=True)
    for name in watch.SOURCES:
        left = deadline - time.monotonic()
        if left > 2 and watch.due(settings, journal, name, now):
            watch.source(settings, journal, name, now, left)
    waits = journal.one("SELECT 1 FROM finding WHERE severity = 'fault' AND acted IS NULL AND cleared IS NULL LIMIT 1")
    put_off = 0 <= now - journal.get("put-off", 0) < settings.slurm.request_poll
    record = None
    if waits and not put_off:
        from slurm_gpuhealth.ladder import drain

        watch.kernel(settings, journal, time.time())  # an Xid names better what NVML has just shown
        drain.act(settings, journal, "check", node, now)
    elif not jobs.running(journal):
        record = _poll(settings, journal, node, now)
    if waits or journal.get("waits"):
        from slurm_gpuhealth.ladder import waits as budget_waits

        budget_waits.tell(settings, journal, node)
    if journal.get("stopped"):  # services that a GPU reset stopped: start them before a new worker stops them again
        from slurm_gpuhealth.ladder import rung_reset

        rung_reset.mend_after_a_kill(settings, journal)
    if journal.get("hold"):
        from slurm_gpuhealth.ladder import worker

        worker.tend(settings, journal, node, record, now)
    elif record is not None and settings.sweep.enabled:
        from slurm_gpuhealth.ladder import sweep

        if sweep.due(settings, journal, node, record, now):
            sweep.begin(settings, journal, node, record, now)
    if not 0 <= now - journal.get("pruned", 0) <= 86400:
        journal.prune(now - settings.journal.keep)
        journal.put("pruned", now)
    journal.put("checked", now)
    ships = journal.get("ships", 0)  # 0 and no url: nothing is shipped, and the outbox is empty
    url = settings.store.url
    at = now + zlib.crc32(node.encode())  # nodes beat at different times
    beat = int(at // settings.store.heartbeat)
    tried, last = (beat, int(at // RETRY)), journal.get("beat")
    news = ships and (last not in (beat, tried) or journal.one("SELECT 1 FROM outbox LIMIT 1"))
    lives = ships and not news and _is_missed(settings, journal, now)
    if news or lives or ships != (zlib.crc32(url.encode()) if url else 0):
        from slurm_gpuhealth.ship import outbox

        if last != beat:
            journal.put("beat", tried)  # until the store has it
        outbox.ship(settings, journal, node, deadline - time.monotonic(), beat, bool(lives))


def _is_missed(settings: Settings, journal: Journal, now: float) -> bool:
    """Whether the cluster's record should hear that this node's checks run: while a job of several nodes runs here,
    each second check. Without that, a node on which the job works looks like a dead one (controller/hung.py).
    """
    if not jobs.several_nodes(journal):
        return False
    last = journal.get("shipped", {}).get("time", 0)
    return not 0 <= now - last < MISSED * settings.check.interval


def _first_of_boot(settings: Settings, journal: Journal, node: str, now: float, deadline: float) -> None:
    """Asked once per boot: which GPUs are here, which numbers do they have, and do they pass level 1?"""
    from slurm_gpuhealth.node import run_level

    journal.put("sources", {})  # read every source now, whatever its interval
    journal.put("beat", None)  # the driver may be another one
    watch.source(settings, journal, "nvml", now, deadline - time.monotonic())
    identity.learn(settings, journal, node)  # after NVML, which wakes the GPUs: a sleeping GPU has no UUID yet
    run_level.run_level(
        settings,
        journal,
        "check",
        1,
        identity.everything(journal),
        deadline=deadline - 5,
        reuse=0.0,
        everything=True,
    )


def _poll(settings: Settings, journal: Journal, node: str, now: float) -> NodeRecord | None:
    """Read the node's record in Slurm, at most once each `slurm.request_poll`. Nodes begin at different times."""
    every = settings.slurm.request_poll
    last = journal.get("polled")
    if last is None:
        last = now - zlib.crc32(node.encode()) % int(every)
        journal.put("polled", last)
    if 0 <= now - last < every:
        return None
    journal.put("polled", now)
    from slurm_gpuhealth.node import held

    return held.look_at_hold(settings, journal, node, now)
