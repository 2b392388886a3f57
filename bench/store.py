"""The cluster's record: 100,000 findings from 1,000 nodes taken in, and what shipping costs a node."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time

from sqlalchemy import func, select

from slurm_gpuhealth.config.settings import Paths, Settings, Store
from slurm_gpuhealth.controller import ingest
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.ship import outbox
from slurm_gpuhealth.store import open, query, schema

NODES, EACH = 1000, 100
FINDING = (
    "INSERT INTO finding (time, seen, source, code, severity, rung, mode, message, standing, count, details)"
    " VALUES (?, ?1, 'xid', '79', 'fault', 'L3', 'enforce', ?, 0, 1, '{}')"
)


def main() -> int:
    folder = tempfile.mkdtemp(prefix="gpuhealth-bench-")
    try:
        lines = [*take_in(folder), *ship_one(folder)]
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines), flush=True)
    return 1 if any(line.endswith("SHORT") for line in lines) else 0


def take_in(folder: str):
    shared = os.path.join(folder, "shared")
    os.mkdir(shared, 0o700)
    for node in range(NODES):
        write_file(shared, f"node{node:04}")
    settings = Settings(store=Store(url=f"file://{shared}", database=os.path.join(folder, "store/cluster.db")))
    engine = open.open_store(settings)
    for name, bar, rows in (("ingest-100000", 30, NODES * (EACH + 1)), ("ingest-again", 10, 0)):
        began, cpu = time.monotonic(), time.process_time()
        taken = ingest.ingest(engine, settings, time.time())
        assert (taken.rows, taken.skipped) == (rows, 0), taken
        yield bench(name, time.monotonic() - began, "s", bar)
        yield bench(f"{name}-cpu", time.process_time() - cpu, "s", bar)
    with open.reading(engine) as db:
        assert db.execute(select(func.count()).select_from(schema.finding)).scalar() == NODES * EACH
        began = time.monotonic()
        assert len(query.events(db)[1]) == NODES * EACH
        yield bench("events-100000", time.monotonic() - began, "s", 10)


def write_file(shared: str, node: str) -> None:
    """What that node has shipped, as `ship` writes it."""
    whose = {"node": node, "journal": "ab12", "clock": 0.01}
    finding = {
        **{"seen": 9.0, "source": "xid", "code": "79", "severity": "fault", "rung": "L3", "mode": "enforce"},
        **{
            "uuid": "GPU-5d3e7e3c-0000-0000-0000-000000000000",
            "pci": "0000:5d:00",
            "gpu": 3,
            "standing": 0,
            "count": 1,
        },
        **{"message": "Xid 79 on GPU3: it has fallen off the bus; reset or reboot", "details": '{"class": "hardware"}'},
    }
    with os.fdopen(os.open(os.path.join(shared, f"{node}.jsonl"), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(json.dumps({**whose, "kind": "ship", "seq": EACH, "time": 1.0}) + "\n")
        for seq in range(1, EACH + 1):
            row = {"id": seq, "time": 1e9 + seq, **finding}
            key = {"seq": seq, "id": seq, "sub": seq}
            file.write(json.dumps({**whose, "kind": "finding", **key, "row": row}) + "\n")


def ship_one(folder: str):
    """One finding, and the backlog of a day without a store."""
    boot = os.path.join(folder, "proc/sys/kernel/random/boot_id")
    os.makedirs(os.path.dirname(boot))
    with os.fdopen(os.open(boot, os.O_WRONLY | os.O_CREAT), "w") as file:
        file.write("boot\n")
    paths = Paths(state=f"{folder}/state", run=f"{folder}/run", proc=f"{folder}/proc")
    settings = Settings(paths=paths, store=Store(url=f"file://{folder}/shared"))
    journal = open_journal(paths)
    for name, count, bar in (("ship-first", 1, 0.5), ("ship-one", 1, 0.5), ("ship-20000", 20000, 20)):
        journal.together(lambda: [journal.write(FINDING, time.time(), "x" * 60) for _ in range(count)])  # noqa: B023
        began = time.monotonic()
        outbox.ship(settings, journal, "one", 60)
        assert journal.one("SELECT count(*) FROM outbox") == (0,)
        yield bench(name, time.monotonic() - began, "s", bar)


def bench(name: str, value: float, unit: str, bar: float) -> str:
    return f"bench: {name} {value:.3g} {unit} bar {bar:g} {'ok' if value <= bar else 'SHORT'}"


if __name__ == "__main__":
    sys.exit(main())
