"""What `gpuhealth nodes` costs on a large cluster: 2,000 nodes, 1,000,000 attempts of jobs, 200,000 findings."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slurm_gpuhealth.config.settings import Settings, Store
from slurm_gpuhealth.store import open
from tests.lab import BIN, fresh

NODES, ATTEMPTS, EACH = 2000, 1_000_000, 100
RUNS = 3
SERIES = "WITH RECURSIVE series(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM series WHERE i < :count)"
NAME, END = "printf('node%04d', i * 7919 % :nodes)", ":now - i * 31536000.0 / :count"
FINDING = f"""
    INSERT INTO finding (node, journal, id, sub, seq, taken, clock, time, seen, source, code, severity, mode, gpu,
        message, standing, count, details, cleared)
    SELECT {NAME}, 'ab12', i, i, i, i, 0, {END}, {END}, 'xid', '31', 'warning', 'enforce', 3,
        'Xid 31 on GPU3', 0, 1, '{{}}', CASE WHEN i % 5 THEN :now END FROM series"""
ATTEMPT = f"""
    INSERT INTO attempt (cluster, job, attempt, user, name, state, start, "end", nodes)
    SELECT 'c', i, 0, 'alice', 'train', 'COMPLETED', {END} - 3600, {END}, '["' || {NAME} || '"]' FROM series"""
ATTEMPT_NODE = f"""
    INSERT INTO attempt_node (cluster, job, attempt, node, start, "end")
    SELECT 'c', i, 0, {NAME}, {END} - 3600, {END} FROM series"""
RECORD = (
    "NodeName={} Arch=x86_64 CoresPerSocket=64 CPUAlloc=0 CPUTot=128 CPULoad=0.02 AvailableFeatures=h100"
    " ActiveFeatures=h100 Gres=gpu:h100:8(S:0-1) NodeAddr={} NodeHostName={} Version=24.11.5 OS=Linux 6.1.0"
    " RealMemory=2000000 AllocMem=0 FreeMem=1900000 Sockets=2 Boards=1 State={} ThreadsPerCore=1 TmpDisk=0 Weight=1"
    " Owner=N/A MCS_label=N/A Partitions=gpu BootTime=1794000000 SlurmdStartTime=1794000100 LastBusyTime=1795000000"
    " CfgTRES=cpu=128,mem=2000000M,billing=128,gres/gpu=8 AllocTRES= CurrentWatts=0 AveWatts=0{}\n"
)


def main() -> int:
    folder = fresh("bench-nodes")  # root alone can write there: gpuhealth refuses a configuration elsewhere
    memory = Path(tempfile.mkdtemp(prefix="gpuhealth-bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        began = time.monotonic()
        fill(folder, memory / "store/cluster.db")
        print(f"a store of {NODES} nodes, made in {time.monotonic() - began:.0f} s", flush=True)
        seconds, shown = min(run(folder) for _ in range(RUNS))
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(memory)
    lines = shown.splitlines()
    assert lines[0].startswith(f"{NODES} nodes: 20 held by gpuhealth, 0 out of service for another reason, 10 silent")
    assert sum(line.startswith("node") for line in lines) == NODES, lines[:5]
    print("\n".join(lines[:8]))
    line = f"bench: nodes-{NODES} {seconds:.3g} s bar 2 {'ok' if seconds <= 2 else 'SHORT'}"
    print(line, flush=True)
    return int(line.endswith("SHORT"))


def run(folder: Path) -> tuple[float, str]:
    """CPU of one call, with scontrol's, and what it printed."""
    env = {**os.environ, "GPUHEALTH_CONFIG": str(folder / "gpuhealth.toml")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([BIN / "gpuhealth", "nodes"], env=env, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(after[:2]) - sum(before[:2]), done.stdout


def fill(folder: Path, database: Path) -> None:
    """A configuration, a scontrol that prints 2,000 records, and a store after a year."""
    names = [f"node{number:04}" for number in range(NODES)]
    now = time.time()
    out = "".join(RECORD.format(*[name] * 3, *_state(number, now)) for number, name in enumerate(names))
    (folder / "nodes").write_text(out)
    (folder / "scontrol").write_text(f"#!/bin/sh\nexec cat {folder}/nodes\n")
    (folder / "scontrol").chmod(0o755)
    (folder / "gpuhealth.toml").write_text(
        f'[slurm]\nscontrol = "{folder}/scontrol"\n[store]\nurl = "file://{folder}"\ndatabase = "{database}"\n'
    )
    open.open_store(Settings(store=Store(database=str(database)))).dispose()
    with contextlib.closing(sqlite3.connect(database)) as db, db:
        db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -500000")
        put = "INSERT INTO node (node, journal, clock_offset, last_shipped, gpuhealth, config, mode, driver, dcgm)"
        db.executemany(
            f"{put} VALUES (?, 'ab12', 0, ?, '0.1.0', '1234abcd', 'enforce', ?, '4.6.0')", map(_node, range(NODES))
        )
        db.executemany("INSERT INTO suspicion VALUES (?, 1, 0.2, '{}')", [(f"node{number:04}",) for number in range(5)])
        for sql, count in ((FINDING, NODES * EACH), (ATTEMPT, ATTEMPTS), (ATTEMPT_NODE, ATTEMPTS)):
            db.execute(f"{SERIES} {sql}", {"count": count, "now": time.time(), "nodes": NODES})


def _state(number: int, now: float) -> tuple[str, str]:
    if number % 100:
        return "IDLE", ""
    since = time.strftime("%m-%dT%H:%MZ", time.gmtime(now - 7200))
    return "IDLE+DRAIN", f"\n   Reason=gpuhealth:Xid79 GPU3 L3 queued since={since} [root@{now - 7200:.0f}]".replace(
        "\n  ", ""
    )


def _node(number: int) -> tuple[str, float, str]:
    heard = time.time() - (86400 if number % 200 == 7 else 60)
    return f"node{number:04}", heard, "570.1" if number in (3, 4, 5) else "580.95.05"


if __name__ == "__main__":
    sys.exit(main())
