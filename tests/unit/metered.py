"""Journals and a store with something of everything that metrics are made of."""

import json
import time

import sqlalchemy as sql

from slurm_gpuhealth.config.settings import Metrics, Store
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import record, watch
from slurm_gpuhealth.outcomes import CAUSES, Suspicion
from slurm_gpuhealth.slurm import reason
from slurm_gpuhealth.slurm.node import Hold
from slurm_gpuhealth.store import judged, schema

GPUS = [
    {
        "uuid": f"GPU-{one}",
        "pci": f"0000:{one:02x}:00",
        "serial": f"16{one}",
        "minor": one,
        "name": "H100",
        "index": one,
    }
    for one in range(8)
]
HELD = "gpuhealth:Xid79 GPU3 L3 running since=11-20T12:03Z"


def with_textfile(settings, path):
    return replace(settings, metrics=Metrics(textfile=str(path)))


def healthy(journal, now):
    """8 GPUs, all read and tested."""
    journal.put("gpus", GPUS)
    journal.put("gres", {"boot": "boot", "error": "", "uuids": [one["uuid"] for one in GPUS], "time": now})
    journal.put("nvml", {"time": now, "gpus": GPUS})
    source = {"time": now, "seconds": 0.05, "error": "", "whole": True}
    journal.put("sources", dict.fromkeys(watch.SOURCES, source))
    tested(journal, now, "pass", 2)


def tested(journal, now, outcome, level):
    row = "(time, level, uuid, outcome, seconds, program, detail) VALUES (?, ?, ?, ?, 9, 'check', '{}')"
    for one in GPUS:
        journal.write(f"INSERT INTO diagnostic {row}", now, level, one["uuid"], outcome)


def see(journal, settings, code, now, gpu=3, source="nvml", standing=True):
    about = None if gpu is None else Gpu(f"GPU-{gpu}", f"0000:{gpu:02x}:00", gpu)
    record.keep(journal, settings, [Finding(now, source, code, "m", about, "fault", standing)], now)


def broken(journal, settings, now):
    """GPU 3 is lost, the node is held and a job still runs; and it can't ship."""
    healthy(journal, now)
    journal.put("nvml", {"time": now, "gpus": [one for one in GPUS if one["index"] != 3]})
    see(journal, settings, "lost", now)
    see(journal, settings, "79", now, source="xid", standing=False)
    journal.put("hold", {"reason": HELD, "since": now - 60, "seen": now})
    journal.put("waits", "Xid79 GPU3 L3")
    journal.write("INSERT INTO outbox (kind, id, sub, time, bytes) VALUES ('finding', 1, 1, ?, 400)", now)


def filled(settings, engine, now):
    """A store of three nodes, of which n3 is silent; each cause once, n1 failed twice."""
    with engine.begin() as db:
        for number, cause in enumerate((*CAUSES, "node", "")):
            node = f"n{number % 3 + 1}"
            key = {"cluster": "c", "job": number, "attempt": 0}
            ran = {"start": now - 14400, "end": now - 7200 - 4000 * (number == 6)}
            db.execute(
                sql.insert(schema.attempt).values(**key, **ran, nodes=json.dumps([node, "n9"]), gpu_seconds=1000.0)
            )
            db.execute(sql.insert(schema.attempt_node).values(**key, **ran, node=node))
            if cause:
                told = {"cause": cause, "node": "n1", "scored": now, "data": "{}"}
                db.execute(sql.insert(schema.verdict).values(**key, **told))
        for number, node in enumerate(("n1", "n2", "n3")):
            db.execute(sql.insert(schema.node).values(node=node, journal="j", last_shipped=now - (0, 0, 90000)[number]))
            row = {"node": node, "journal": "j", "id": 1, "sub": 0, "seq": 1, "taken": number, "time": now - 60}
            faulty = {"source": "xid", "code": "79", "severity": "fault", "mode": "shadow"}
            db.execute(sql.insert(schema.finding).values(**row, **faulty))
            db.execute(sql.insert(schema.finding).values(**{**row, "id": 2, "time": now - 90000}, **faulty))
            db.execute(sql.insert(schema.step).values(**row, rung="L3", outcome="pass"))
            db.execute(sql.insert(schema.decision).values(**row, action="drained"))
        judged.keep_suspicions(
            db, [Suspicion("n1", now, 0.91, 0.2, 3.0, 0.1, "L4"), Suspicion("n2", now, 0.1, 0, 0, 0)], now
        )


def stored(settings, tmp_path):
    store = Store(database=str(tmp_path / "store/cluster.db"))
    return replace(settings, store=store, metrics=Metrics(cluster=str(tmp_path / "cluster.prom")))


def holds(now=None):
    """What control.holds returns: one node at the end of its ladder, a new hold, a sweep."""
    said = time.gmtime(now or time.time())
    since = time.strftime("%m-%dT%H:%MZ", said)
    ours = (
        reason.Reason("memory", 3, "L4", "fail", since="01-01T00:00Z", next="RMA"),
        reason.Reason("Xid48", 1, "L3", "queued", since=since),
        reason.Reason("sweep", None, "L2", "running", since=since),
    )
    return [Hold(f"n{number}", one, 0.0) for number, one in enumerate(ours)], 40


def values(text):
    """`name{labels}` → value, of a text in Prometheus' format."""
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}
