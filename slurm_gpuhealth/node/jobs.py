"""Which jobs run on this node and which GPUs they hold, from our own journal, without asking the controller.

Also whether a job may start without a test: its GPUs passed recently, and nothing new was found since.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.node.environment import Job
    from slurm_gpuhealth.node.journal import Journal

FINE = ("ok", "launch", "moved", "cancelled", "requeued")
"""Outcomes that say nothing against the node: the job ended well, never ran here, or somebody ended it."""


def started(journal: Journal, job: Job, uuids: Sequence[str], now: float) -> None:
    """Record that `job` has these GPUs from now on. A requeued job has a row for each of its runs.

    If Slurm gives out whole GPUs here, an earlier job with one of them has ended: its epilog did not finish.
    """
    if uuids and not journal.get("gres", {}).get("shared", True):
        for earlier, theirs in running(journal, but=job.job_id):
            if not set(uuids).isdisjoint(theirs):
                gone(journal, earlier, now)
    journal.write(
        "INSERT OR REPLACE INTO job (job, restart, uid, user, nodes, gpus, started) VALUES (?, ?, ?, ?, ?, ?, ?)",
        job.job_id,
        job.restart,
        _uid(job),
        job.user,
        job.num_nodes,
        ",".join(uuids),
        now,
    )


def ended(journal: Journal, job: Job, outcome: str, now: float) -> str:
    """Record how `job` ended as far as an epilog can know, even if our prolog did not run. Returns the kept outcome.

    After a requeue the epilog already sees the restart count of the next run, so the row that is still open is ended.
    """
    row = journal.one("SELECT restart FROM job WHERE job = ? AND ended IS NULL ORDER BY restart DESC", job.job_id)
    restart = row[0] if row else job.restart
    journal.write(
        "INSERT INTO job (job, restart, uid, user, nodes, gpus, started, ended, exit_code, signal, derived, outcome)"
        " VALUES (?, ?, ?, ?, ?, '', ?, ?, ?, ?, ?, ?) ON CONFLICT (job, restart) DO UPDATE SET"
        " ended = excluded.ended, exit_code = excluded.exit_code, signal = excluded.signal, derived = excluded.derived,"
        " outcome = CASE outcome WHEN 'moved' THEN outcome ELSE excluded.outcome END",
        job.job_id,
        restart,
        _uid(job),
        job.user,
        job.num_nodes,
        now,
        now,
        job.exit_code,
        job.signal,
        job.derived_code << 8 | job.derived_signal,
        outcome,
    )
    kept = journal.one("SELECT outcome FROM job WHERE job = ? AND restart = ?", job.job_id, restart)
    return str(kept[0]) if kept else outcome


def gone(journal: Journal, job_id: int, now: float) -> None:
    """Record that this job has ended, nobody knows when and how."""
    journal.write("UPDATE job SET ended = ?, outcome = 'unknown' WHERE job = ? AND ended IS NULL", now, job_id)


def turned_away(journal: Journal, job_id: int) -> None:
    """Note that the prolog sent this job elsewhere: its epilog here sees no failure of the job."""
    journal.write("UPDATE job SET outcome = 'moved' WHERE job = ? AND ended IS NULL", job_id)


def running(journal: Journal, but: int = 0) -> list[tuple[int, list[str]]]:
    """(job id, its GPUs) of the jobs that run here, except job `but`. A job from before this boot has ended."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    rows = journal.rows("SELECT job, gpus FROM job WHERE ended IS NULL AND started > ? AND job != ?", booted, but)
    return [(job, gpus.split(",") if gpus else []) for job, gpus in rows]


def holding(journal: Journal) -> list[tuple[int, int, list[str]]]:
    """(job id, restart, its GPUs) of the jobs that run here and whose GPUs are known."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    which = "ended IS NULL AND started > ? AND gpus != ''"
    rows = journal.rows(f"SELECT job, restart, gpus FROM job WHERE {which} ORDER BY job", booted)  # noqa: S608 - ours
    return [(job, restart, gpus.split(",")) for job, restart, gpus in rows]


def several_nodes(journal: Journal) -> bool:
    """Whether a job of several nodes runs here."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    which = "ended IS NULL AND started > ? AND nodes > 1"
    return bool(journal.one(f"SELECT 1 FROM job WHERE {which} LIMIT 1", booted))  # noqa: S608 - ours


def holder(journal: Journal, uuid: str, when: float) -> tuple[int, int] | None:
    """(job id, uid) of the job that held GPU `uuid` at `when`; a fault is often logged just after its job's end."""
    row = journal.one(
        "SELECT job, uid FROM job WHERE instr(gpus, ?) AND started <= ? AND coalesce(ended, 1e12) >= ?"
        " ORDER BY started DESC",
        uuid,
        when + 1,
        when - 5,
    )
    return (row[0], row[1]) if row else None


def fresh_pass(journal: Journal, uuids: Sequence[str], level: int, since: float) -> bool:
    """Whether each GPU passed run level `level` or a deeper one after `since`, with nothing new on it after that."""
    for uuid in uuids:
        row = journal.one(
            "SELECT time, outcome FROM diagnostic WHERE uuid = ? AND level >= ? ORDER BY id DESC LIMIT 1", uuid, level
        )
        if row is None or not since <= row[0] <= time.time() + 1:
            return False
        if row[1] not in ("pass", "config"):  # config says nothing against the GPU
            return False
        if journal.one(
            "SELECT 1 FROM finding WHERE severity != 'info' AND time > ? AND (uuid = ? OR uuid IS NULL) LIMIT 1",
            row[0],
            uuid,
        ):
            return False
    return bool(uuids)


def _uid(job: Job) -> int:
    return -1 if job.uid is None else job.uid
