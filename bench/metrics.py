"""What the cluster's metrics cost the controller, with 2,000 nodes and 1,000,000 attempts."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slurm_gpuhealth.config.settings import Metrics, Settings, Slurm, Store
from slurm_gpuhealth.metrics import cluster
from slurm_gpuhealth.outcomes import CAUSES
from slurm_gpuhealth.store.open import open_store

NODES, JOBS, NOW, DAYS = 2000, 1_000_000, 1_795_220_000.0, 28
"""All within 28 days: 18 jobs a node and day. One in ten fails, and leaves a finding, a rung and a decision."""

COUNT = f"WITH RECURSIVE one (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM one WHERE n < {JOBS - 1})"
END = f"{NOW} - {DAYS * 86400} * ((n * 7919 % {JOBS}) / {JOBS}.0)"
NODE = f"'n' || (n * 31 % {NODES})"
ROW = f"SELECT {NODE}, 'j', n, 0, n, n, {END}"
KEY = "node, journal, id, sub, seq, taken, time"
FILL = (
    "INSERT INTO attempt (cluster, job, attempt, state, start, end, nodes, gpu_seconds, log)"
    f" SELECT 'c', n, 0, 'FAILED', {END} - 7200, {END}, '[\"' || {NODE} || '\"]', 57600.0, hex(zeroblob(100)) FROM one",
    "INSERT INTO attempt_node (cluster, job, attempt, node, start, end)"
    f" SELECT 'c', n, 0, {NODE}, {END} - 7200, {END} FROM one",
    "INSERT INTO verdict (cluster, job, attempt, cause, node, scored, data) SELECT 'c', n, 0,"
    f" json_extract('{json.dumps(CAUSES)}', '$[' || (n / 10 % 6) || ']'), {NODE}, {END} + 300, hex(zeroblob(250))"
    " FROM one WHERE n % 10 = 0",
    f"INSERT INTO finding ({KEY}, source, code, severity) {ROW}, 'xid', n % 50, 'fault' FROM one WHERE n % 10 = 0",
    f"INSERT INTO step ({KEY}, rung, outcome) {ROW}, 'L3', 'pass' FROM one WHERE n % 10 = 0",
    f"INSERT INTO decision ({KEY}, action) {ROW}, 'drained' FROM one WHERE n % 10 = 0",
    f"INSERT INTO node (node, journal, last_shipped) SELECT DISTINCT {NODE}, 'j', {NOW} FROM one WHERE n < {NODES}",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(database=f"{folder}/s/cluster.db")
        settings = Settings(
            store=store, metrics=Metrics(cluster=f"{folder}/cluster.prom"), slurm=Slurm(sinfo="/bin/false")
        )
        engine = open_store(settings)
        with engine.begin() as db:
            for statement in FILL:
                db.exec_driver_sql(f"{COUNT} {statement}")
        for name in ("first", "second", "third", "fourth", "later"):
            began, cpu = time.monotonic(), time.process_time()
            cluster.publish(settings, engine, NOW, 0.0, 0)
            for what, spent in ((name, time.monotonic() - began), (f"{name}-cpu", time.process_time() - cpu)):
                print(
                    f"bench: cluster-metrics-{what} {spent:.2f} s bar 5 {'ok' if spent <= 5 else 'SHORT'}", flush=True
                )
        with open(settings.metrics.cluster) as file:
            assert "gpuhealth_cluster_gpu_seconds_1d" in file.read()


if __name__ == "__main__":
    main()
