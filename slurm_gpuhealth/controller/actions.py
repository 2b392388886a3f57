"""Acts on verdicts and suspicion: a rung for a lemon, a comment, a requeue, the exclude list. Each is opt-in.

An action is written down before it is done. After a kill in between it is done again if that does no harm; a requeue
must not be done twice, so it counts as done.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import sqlalchemy as sql

from slurm_gpuhealth import child
from slurm_gpuhealth.controller import action_log, exclude
from slurm_gpuhealth.controller import lemons as rungs
from slurm_gpuhealth.correlate import words
from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store import judged, schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.controller.action_log import Act
    from slurm_gpuhealth.outcomes import Suspicion, Verdict

SURE = 0.7
"""Jobs are requeued from this confidence on: correlator.md's "medium"."""
RECENT = 86400.0
"""A job gets its first comment within so many seconds after its end: for 28 days of history a run would take hours."""
NOTIFIED = "notified"
"""The result of a report."""
HUNG = 600.0
"""A job that still runs so many seconds after its GPU was lost counts as hung."""
AN_HOUR = 100
"""The most requeues per hour, of all jobs: a node has fewer jobs, so if more fail, no single node is the cause."""
SAME = 2.0
"""slurmctld and accounting may differ by so many seconds about a run's begin: PySlurm and sacct have whole seconds."""
PROLOG = 60.0
"""A node's clock may be so many seconds behind when its prolog notes a job's begin."""


def after(
    act: Act,
    verdicts: Sequence[Verdict],
    suspects: Sequence[Suspicion],
    standing: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Do what is turned on. If Slurm refuses, that is logged and written down; nothing here raises because of Slurm.

    `standing`: the jobs that stand still, as hung.look has them.
    """
    wanted = act.settings.correlate
    action_log.mend(act)
    try:
        lemons = rungs.lemons(act, suspects) if wanted.exclude or wanted.rungs != "off" else []
        if wanted.exclude:
            exclude.publish(act.settings, [one.node for one in lemons])
        if wanted.rungs != "off":
            rungs.ask(act, lemons)
    except control.SlurmError as error:
        say(f"no rung asked for: {error}", error=True)
    for verdict in verdicts:
        if wanted.comment:
            _comment(act, verdict)
        if wanted.requeue and verdict.cause == "node" and verdict.confidence >= SURE:
            _requeue(act, verdict)
    if wanted.hung != "off":
        _look_for_hung(act)
        for one in standing:
            _stands(act, one)


def _comment(act: Act, verdict: Verdict) -> None:
    """Write the verdict into the AdminComment of the job's latest attempt, unless somebody else wrote one."""
    text = _line(act, verdict)
    past = action_log.past(act, "comment", job=verdict.job, attempt=verdict.attempt)
    told = [json.loads(row.detail) for row in past if row.result == "written"]
    if told and not _worth_telling(verdict, told):
        return
    accounting, job = act.settings.accounting, str(int(verdict.job))
    env = {"SLURM_CONF": act.settings.slurm.conf}
    with act.engine.connect() as db:
        table = schema.attempt.c
        of = sql.select(sql.func.max(table.attempt), sql.func.max(table.end)).where(table.job == verdict.job)
        latest, ended = db.execute(of).one()
    if (latest or 0) > verdict.attempt:
        return  # sacctmgr reaches the latest attempt only
    if not past and ended is not None and ended < act.now - RECENT:
        return
    fields = "JobIDRaw,JobID,AdminComment"
    asked = child.run(
        [accounting.sacct, "-n", "-X", "-P", "-j", job, "-o", fields], timeout=accounting.timeout, env=env
    )
    # The last task of an array and the first part of a heterogeneous job have the number of the whole job, which for
    # sacctmgr means all of them. 10_3 and 10+0 mean only the one.
    row = re.search(rf"^{job}\|([\d_+]+)\|(.*)", asked.stdout.decode("utf-8", "replace"), re.MULTILINE)
    if asked.rc != 0 or not row or (row[2] and not row[2].startswith(words.PREFIX.strip())):
        return
    detail = {"text": text, "cause": verdict.cause, "node": verdict.node}
    number = action_log.begin(act, "comment", detail, verdict.job, verdict.attempt, verdict.node)
    done = child.run(
        [accounting.sacctmgr, "-i", "modify", "job", f"JobID={row[1]}", "set", f"AdminComment={text}"],
        timeout=accounting.timeout,
        env=env,
    )
    action_log.end(
        act, number, "written" if done.rc == 0 else f"refused: {done.stderr.decode('utf-8', 'replace')[:300]}"
    )


def _worth_telling(verdict: Verdict, told: Sequence[dict[str, Any]]) -> bool:
    """Whether to replace what the user was told: only by another cause that is sure and was not told before. A comment
    that changes back and forth convinces nobody."""
    known = [(one.get("cause"), one.get("node")) for one in told]
    return verdict.confidence >= SURE and (verdict.cause, verdict.node) not in known


def _line(act: Act, verdict: Verdict) -> str:
    with act.engine.connect() as db:
        index = judged.gpu_index(db, verdict.node, verdict.gpu)
    supports, _ = words.sides(verdict.cause, [term._asdict() for term in verdict.terms])
    return words.comment(verdict.cause, verdict.confidence, words.place(verdict.node, verdict.gpu, index), supports)


def _requeue(act: Act, verdict: Verdict) -> None:
    """Requeue the job away from the node: only this attempt, and not too often."""
    every = [row for row in action_log.past(act, "requeue") if abs(act.now - row.time) < 3600.0]
    past = action_log.past(act, "requeue", job=verdict.job)
    if len(every) >= AN_HOUR:
        return
    if len(past) >= act.settings.correlate.requeue_most or any(row.attempt == verdict.attempt for row in past):
        return
    slurm = act.settings.slurm
    try:
        job = control.show_job(slurm, verdict.job)
        if job.state not in ("FAILED", "NODE_FAIL") or job.restarts != verdict.attempt:
            return
        if not _began(act, verdict, job.start):
            return  # another job with the same number
        if not (job.requeue and job.batch) or job.het:
            return  # its user does not want that, or it can't be started again
        named = verdict.node and control.asks_by_name(slurm, job)
    except control.SlurmError:
        return  # slurmctld forgets a job after MinJobAge
    number = action_log.begin(act, "requeue", {}, verdict.job, verdict.attempt, verdict.node)
    if named:
        action_log.end(act, number, f"not requeued: it asks for nodes by name, and might die of {verdict.node} again")
        return
    try:
        control.requeue(slurm, job)
        if verdict.node:
            control.keep_off(slurm, job, verdict.node)
        action_log.end(act, number, "requeued")
        say(f"job {verdict.job}: requeued: {_line(act, verdict)}")
    except control.SlurmError as error:
        action_log.end(act, number, f"refused: {error}"[:300])


def _began(act: Act, verdict: Verdict, start: float) -> bool:
    table = schema.attempt
    this = sql.select(table.c.start).where(table.c.job == verdict.job, table.c.attempt == verdict.attempt)
    with act.engine.connect() as db:
        return any(abs(one - start) <= SAME for one in db.execute(this).scalars())


def _look_for_hung(act: Act) -> None:
    """Find jobs that still run on a lost GPU: report them, or requeue only these, once per attempt."""
    run, finding = schema.run, schema.finding
    ahead = sql.func.coalesce(finding.c.clock, 0.0)
    gone = sql.or_(
        sql.and_(finding.c.source == "xid", finding.c.code == "79"),
        sql.and_(finding.c.source == "nvml", finding.c.code == "lost"),
    )
    query = (
        sql.select(run.c.id.label("job"), run.c.sub.label("restart"), run.c.node)
        .add_columns((run.c.started - ahead).label("began"), finding.c.uuid, finding.c.gpu)
        .add_columns((finding.c.time - ahead).label("time"))
        .where(run.c.node == finding.c.node, run.c.ended.is_(None), gone, finding.c.cleared.is_(None))
        .where(finding.c.time >= run.c.started, finding.c.time - ahead <= act.now - HUNG, finding.c.uuid.is_not(None))
        .where(run.c.gpus.contains(finding.c.uuid))
    )
    with act.engine.connect() as db:
        found = list(db.execute(query))
    for one in found:
        text = f"job {one.job} still runs on {one.node}, whose GPU {one.gpu} was lost {act.now - one.time:.0f} s ago"
        _hung(act, Stuck(one.job, one.restart, one.began, one.node, {"gpu": one.uuid, "since": one.time}, text, True))


def _stands(act: Act, one: Mapping[str, Any]) -> None:
    """Report a job that stands still; requeue it if there is evidence that a node is to blame."""
    where = words.place(one["node"], one["gpu"], one["gpu_index"])
    cause = words.CAUSE[one["cause"]] + (f", {where}" if where else "")
    waits = f"{one['waiting']} of {one['gpus']} GPUs {one['kind']} for {(act.now - one['since']) / 60:.0f} min"
    text = f"job {one['job']} stands still, {waits}, cause {cause}: {'; '.join(one['why'])}"
    detail = {"gpu": one["gpu"], "since": one["since"], "cause": one["cause"]}
    blamed = one["cause"] == "node"
    _hung(act, Stuck(one["job"], one["attempt"], one["began"], one["node"], detail, text, blamed, away=blamed))


@frozen
class Stuck:
    """A job that hangs."""

    job: int
    restart: int
    began: float
    node: str | None
    detail: dict[str, Any]
    text: str
    blamed: bool
    """There is evidence that the node is to blame."""
    away: bool = False
    """Requeue it away from the node."""


def _hung(act: Act, one: Stuck) -> None:
    wanted = act.settings.correlate.hung == "requeue" and one.blamed
    past = action_log.past(act, "hung", job=one.job)
    # Reported once a run; requeued once, also if it was reported before there was evidence.
    if any(row.attempt == one.restart for row in past if not wanted or row.result != NOTIFIED):
        return
    slurm = act.settings.slurm
    try:
        job = control.show_job(slurm, one.job)
        if job.state != "RUNNING" or job.restarts != one.restart or one.began < job.start - PROLOG or not job.start:
            return  # after a reinstallation a node's record may be about an earlier job with that number
        wanted = wanted and job.requeue and job.batch and not job.het
        if one.away:
            again = any(row.result == "requeued" for row in past)
            wanted = wanted and not again and _has_room(act) and not control.asks_by_name(slurm, job)
    except control.SlurmError as error:
        say(f"job {one.job}: {error}")
        return
    if not wanted and any(row.attempt == one.restart for row in past):
        return
    number = action_log.begin(act, "hung", one.detail, one.job, one.restart, one.node)
    result = NOTIFIED
    if wanted:
        try:
            control.requeue(slurm, job)
            result = "requeued"
            if one.away and one.node:
                control.keep_off(slurm, job, one.node)
        except control.SlurmError as error:
            result = f"{result}, but {error}"[:300] if result == "requeued" else f"refused: {error}"[:300]
    action_log.end(act, number, result)
    say(f"{one.text}: {result}", error=True)


def _has_room(act: Act) -> bool:
    """Whether fewer than AN_HOUR jobs were requeued in the last hour."""
    past = [row for kind in ("requeue", "hung") for row in action_log.past(act, kind)]
    return len([row for row in past if abs(act.now - row.time) < 3600.0 and row.result != NOTIFIED]) < AN_HOUR
