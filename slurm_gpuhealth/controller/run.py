"""One run of `gpuhealth correlate`: judges what is new in the store in one transaction, then acts.

    ingest, accounting ─▶ new events and attempts, by time ─▶ Correlator ─▶ verdicts, suspicion, its state, cursors

If it is killed before the commit, nothing has happened; after it, nothing is judged twice.
"""

from __future__ import annotations

import json
import time
import zlib
from heapq import merge
from typing import TYPE_CHECKING

import sqlalchemy as sql

from slurm_gpuhealth.controller import accounting, action_log, actions, clocks, hung, ingest, slow
from slurm_gpuhealth.correlate import cases, context, place
from slurm_gpuhealth.correlate.engine import Correlator
from slurm_gpuhealth.correlate.state import AppState, Case, FleetState, Incident, NodeState, Record, State
from slurm_gpuhealth.frozen import frozen, replace
from slurm_gpuhealth.outcomes import Attempt, Event
from slurm_gpuhealth.slurm import control, sacct, topology
from slurm_gpuhealth.store import judged, query, schema
from slurm_gpuhealth.store.open import alone, lock, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any, TypeVar

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.outcomes import Suspicion, Verdict

    Item = TypeVar("Item")

KEPT = (NodeState, AppState, FleetState, Case, Record, Incident, Attempt)
SET = 1_700_000_000.0
"""November 2023: a clock with an earlier time is not set yet."""
LAYOUT = f"{zlib.crc32(repr([getattr(kind, '_fields', None) or [*kind.__annotations__] for kind in KEPT]).encode()):x}"
"""Which fields the state in the store has."""
FLEET = 600.0
"""Seconds between two computations of all nodes' suspicion: their cost grows with the fleet."""

UNTOLD = 100
"""Rows of nodes that can't be judged which are kept for gpuhealth lemons."""


@frozen
class Done:
    """What a run did."""

    taken: int = 0
    """Records from the nodes."""
    attempts: int = 0
    judged: int = 0
    rescored: int = 0
    suspects: int = 0
    trouble: tuple[str, ...] = ()
    """What could not be asked or read; the next run tries again."""


def once(settings: Settings, now: float, act: bool = True) -> Done:
    """Read the records, judge, and act. Raises StoreError if there is no store; accounting that is down is trouble."""
    if now < SET:
        return Done(trouble=(f"the clock of this host is not set: it says {now:.0f} s after 1970; nothing is judged",))
    engine, began = open_store(settings), time.monotonic()
    with alone(engine) as mine:
        if mine:
            done = _once(engine, settings, now, act)
            return _publish(engine, settings, now, time.monotonic() - began, done)
    return Done(trouble=("another run is active on another host",))


def _publish(engine: sql.Engine, settings: Settings, now: float, took: float, done: Done) -> Done:
    """Write the cluster's metrics, if they are on."""
    if not settings.metrics.cluster:
        return done
    from slurm_gpuhealth.metrics import cluster

    try:
        cluster.publish(settings, engine, now, took, len(done.trouble))
    except OSError as error:
        told = f"metrics.cluster {settings.metrics.cluster}: {error.strerror}"
        return replace(done, trouble=(*done.trouble, told))
    return done


def _once(engine: sql.Engine, settings: Settings, now: float, act: bool) -> Done:
    trouble: list[str] = []
    taken = ingest.ingest(engine, settings, now)
    trouble += taken.trouble
    attempts = 0
    try:
        attempts = accounting.take_in(engine, settings, now).attempts
    except control.SlurmError as error:
        trouble.append(f"{error}; the next run asks again")
    leaves = _leaves(engine, settings, trouble)
    unacted = _begin_to_act(engine, now) if act else ""
    anew = _begin_anew(engine, f"{LAYOUT} {len(settings.suspicion.hazards)}")
    verdicts, again, suspects = judge(engine, settings, leaves, now)
    behind = _unless_it_fails(lambda: slow.look(engine, now), "the figures of tests", trouble)
    _unless_it_fails(lambda: clocks.look(engine, settings.slow, now), "the clocks of jobs", trouble)
    standing = _unless_it_fails(lambda: hung.look(engine, settings, now, trouble), "the jobs that run", trouble) or ()
    with engine.begin() as db:
        due = abs(now - float(judged.get_cursor(db, "pruned") or 0)) > 86400
        if due:
            judged.put_cursor(db, "pruned", str(now))
            newest = query.newest(db)
        clusters = query.clusters(db, now - 86400)
    if due:
        before = min(now, newest) - settings.store.keep
        query.prune(engine, before)
        _forget(engine, before)
    if act:
        with engine.connect() as db:
            told = judged.scored_since(db, float(unacted)) if unacted else []
        latest = {} if anew else _by_attempt((*told, *verdicts, *again))
        if len(clusters) > 1:  # a node could be drained for a node of the same name in another cluster
            trouble.append(f"the store has jobs of several clusters ({', '.join(clusters)}): no action is taken")
        else:
            actions.after(action_log.Act(settings, engine, now), list(latest.values()), suspects, standing)
            if behind is not None and settings.mode == "enforce" and settings.sources.tools != "off":
                slow.tell(engine, settings, behind)
        with engine.begin() as db:
            judged.put_cursor(db, "unacted", "")
    return Done(taken.rows, attempts, len(verdicts), len(again), len(suspects), tuple(trouble))


def _unless_it_fails(look: Callable[[], Item], what: str, trouble: list[str]) -> Item | None:
    """What `look` returns. Nodes measured what it looks at: if it fails, that is trouble, and the run goes on."""
    try:
        return look()
    except Exception as error:
        trouble.append(f"{what} could not be judged: {type(error).__name__}: {error}")
        return None


def _leaves(engine: sql.Engine, settings: Settings, trouble: list[str]) -> Mapping[str, Sequence[str]]:
    """Leaf switch → its nodes, as slurmctld last said. If slurmctld is down, the switch itself may be the cause, and
    without the switches its nodes would be blamed."""
    try:
        leaves = topology.leaves(settings)
    except control.SlurmError as error:
        trouble.append(f"{error}; using the switches of the last run")
        with engine.connect() as db:
            return dict(json.loads(judged.get_cursor(db, "leaves") or "{}"))
    with engine.begin() as db:
        judged.put_cursor(db, "leaves", json.dumps(leaves))
    return leaves


def _forget(engine: sql.Engine, before: float) -> None:
    """Delete applications that have not run since: if each job has its own submit line, there is one per job."""
    table = schema.state
    its = table.c.kind == "application"
    with engine.begin() as db:
        rows = db.execute(sql.select(table.c.key, table.c.data).where(its))
        old = [key for key, data in rows if AppState.from_json(json.loads(data)).ended < before]
        for begin in range(0, len(old), accounting.MANY):
            some = old[begin : begin + accounting.MANY]
            db.execute(sql.delete(table).where(its, table.c.key.in_(some)))


def _begin_anew(engine: sql.Engine, layout: str) -> bool:
    """If an upgrade has changed the state's fields, or a node's levels are not as many as before, judge the whole store
    again. True: it was acted upon before."""
    with engine.begin() as db:
        lock(db)
        before = judged.get_cursor(db, "layout")
        judged.put_cursor(db, "layout", layout)
        if before == layout or not db.execute(sql.select(schema.state.c.key).limit(1)).scalar():
            return False
        db.execute(sql.delete(schema.state))
        db.execute(sql.update(schema.attempt).values(fed=None))
        judged.put_cursor(db, "events", "")
        return True


def _begin_to_act(engine: sql.Engine, now: float) -> str:
    """Since when verdicts were not acted upon because a run was cut short; "" if there are none."""
    with engine.begin() as db:
        unacted = judged.get_cursor(db, "unacted")
        judged.put_cursor(db, "unacted", unacted or str(now))
    return unacted


def judge(
    engine: sql.Engine, settings: Settings, leaves: Mapping[str, Sequence[str]], now: float
) -> tuple[list[Verdict], list[Verdict], list[Suspicion]]:
    """Judge what is new, in one transaction. Returns the new verdicts, the changed ones, and the suspects."""
    with engine.begin() as db:
        lock(db)
        nodes = judged.Rows(db, "node", NodeState.from_json)
        applications = judged.Rows(db, "application", AppState.from_json)
        fleet = judged.Rows(db, "fleet", FleetState.from_json)
        state = State(nodes, applications, fleet.setdefault("all", FleetState()))
        places = {one.name: sacct.nodes_of(one.nodes) for one in settings.place}
        correlator = Correlator(settings.suspicion, leaves, state, places=places)
        begin = judged.get_cursor(db, "events")
        position, events = query.events(db, begin, now)
        until = now - settings.correlate.settle
        verdicts: dict[tuple[int, int], Verdict] = {}
        again: dict[tuple[int, int], Verdict] = {}
        judged_before = _judged_before(db, until)
        late = list(_late(db, state, int(begin or 0), int(position)))
        new: list[Iterable[Attempt | Event]] = [sorted(events, key=_when), late, _attempts(db, until)]
        for one in merge(*new, key=_when):
            if isinstance(one, Event):
                correlator.event(one)
                continue
            if _key(one) in judged_before and one.end < state.fleet.last and not _known(state, one):
                continue  # an old row was corrected: it keeps its verdict, or it would count twice
            again |= _by_attempt(correlator.rescored())
            if verdict := correlator.attempt(one):
                verdicts[_key(one)] = verdict
                again.pop(_key(one), None)  # an older verdict, without the late evidence
        again |= _by_attempt(correlator.rescored())
        for verdict in (*verdicts.values(), *again.values()):
            judged.keep_verdict(db, verdict, now)
        # Between two looks at the whole fleet, only former suspects and nodes with news can be suspects.
        whole = not 0 <= now - float(judged.get_cursor(db, "fleet") or 0) < FLEET
        known = {one.node for one in judged.suspicions(db)} | nodes.known.keys()
        suspects = correlator.suspicions(now, among=None if whole else sorted(known))
        judged.keep_suspicions(db, suspects, now)
        if whole:
            judged.put_cursor(db, "fleet", str(now))
            judged.put_cursor(db, "places", json.dumps(_bad_places(correlator, now)))
            untold = context.untold(state, now, settings.suspicion)
            judged.put_cursor(db, "untold", json.dumps([one._asdict() for one in untold[:UNTOLD]]))
        for rows in (nodes, applications, fleet):
            rows.save()
        judged.put_cursor(db, "events", position)
        db.execute(sql.update(schema.attempt).where(*_unfed(until)).values(fed=now))
    return list(verdicts.values()), list(again.values()), suspects


def _bad_places(correlator: Correlator, now: float) -> list[dict[str, Any]]:
    """As `gpuhealth lemons --json` prints them."""
    found = place.all_shared(correlator.state, correlator.places, now, correlator.settings.horizon)
    return [
        {
            "place": one.place,
            "nodes": one.nodes,
            "moments": [{"time": time, "nodes": names} for time, names in one.moments],
        }
        for one in found
    ]


def _by_attempt(verdicts: Iterable[Verdict]) -> dict[tuple[int, int], Verdict]:
    return {_key(one): one for one in verdicts}


def _key(one: Attempt | Verdict) -> tuple[int, int]:
    return one.job, one.attempt


def _unfed(until: float) -> tuple[sql.ColumnElement[bool], ...]:
    return schema.attempt.c.fed.is_(None), schema.attempt.c.end <= until


def _attempts(db: sql.Connection, until: float) -> Iterator[Attempt]:
    """Attempts that ended by then and were not judged yet, by their end, with their nodes' records.

    An attempt that was judged and then REQUEUED keeps its verdict: we requeued it, or its user did.
    """
    table, verdict, other = schema.attempt, schema.verdict, schema.attempt.alias()
    # A job without GPUs says nothing about them. If accounting counts no GPUs (AccountingStorageTRES), all jobs count.
    some = sql.exists(sql.select(other).where(other.c.gpu_seconds > 0).correlate(None))
    known = sql.exists().where(*(verdict.c[name] == table.c[name] for name in ("cluster", "job", "attempt")))
    rows = db.execute(
        sql.select(table)
        .where(*_unfed(until), ~sql.and_(table.c.state == "REQUEUED", known))
        .where(sql.or_(table.c.gpu_seconds > 0, table.c.end == table.c.start, ~some))
        .order_by(table.c.end, table.c.job, table.c.attempt)
    )
    return accounting.join(db, map(accounting.attempt_of, rows.mappings()))


def _judged_before(db: sql.Connection, until: float) -> set[tuple[int, int]]:
    """The attempts of `_attempts` that have a verdict: their rows have changed since."""
    table, verdict = schema.attempt, schema.verdict
    same = [verdict.c[name] == table.c[name] for name in ("cluster", "job", "attempt")]
    found = db.execute(sql.select(table.c.job, table.c.attempt).join(verdict, sql.and_(*same)).where(*_unfed(until)))
    return {(job, attempt) for job, attempt in found}


def _known(state: State, one: Attempt) -> bool:
    """Whether the correlator still knows the attempt."""
    home = state.nodes.get(one.nodes[0]) if one.nodes else None
    return home is not None and f"{one.job}.{one.attempt}" in home.seen


def _late(db: sql.Connection, state: State, begin: int, end: int) -> Iterator[Attempt]:
    """Failed attempts for which a log or a node's record came after the verdict and says more; by their end.

    Only those that the correlator still knows: others would count twice.
    """
    table = schema.attempt
    came = (sql.select(one.c.id).where(one.c.taken > begin, one.c.taken <= end) for one in (schema.run, schema.joblog))
    rows = db.execute(
        sql.select(table)
        .where(table.c.fed.is_not(None), table.c.state.not_in(("COMPLETED", "REQUEUED")))
        .where(table.c.job.in_(sql.union(*came)))
        .order_by(table.c.end, table.c.job, table.c.attempt)
    )
    for one in accounting.join(db, map(accounting.attempt_of, rows.mappings())):
        key, home = f"{one.job}.{one.attempt}", state.nodes.get(one.nodes[0]) if one.nodes else None
        before = home.cases.get(key) if home and key in home.seen else None
        if before and not cases.same_evidence(cases.case_of(one, before.application), before):
            yield one


def _when(one: Attempt | Event) -> float:
    return one.end if isinstance(one, Attempt) else one.time
