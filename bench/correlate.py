"""What one finished job costs `gpuhealth correlate`: CPU beside the start of the process, with 2,000 nodes known."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

import sqlalchemy as sql

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slurm_gpuhealth.config.settings import Correlate, Settings, Store
from slurm_gpuhealth.controller import run
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store

NODES, JOBS, NOW = 2000, 60_000, 1_795_220_000.0


def attempt(number: int, luck: random.Random) -> dict[str, object]:
    """A job of 1 or 8 nodes in the last 28 days; one in five fails."""
    end, first, count = NOW - 28 * 86400 * luck.random(), luck.randrange(NODES), 1 if luck.random() < 0.9 else 8
    failed = luck.random() < 0.2
    return {
        **{"cluster": "c", "job": number, "attempt": 0, "user": f"u{luck.randrange(80)}", "account": "a"},
        **{"partition": "p", "name": f"run{luck.randrange(3)}", "exit_code": int(failed), "signal": 0, "submit": ""},
        **{"state": "FAILED" if failed else "COMPLETED", "start": end - 7200, "end": end, "gpu_seconds": 7200.0},
        **{"nodes": json.dumps([f"n{(first + place) % NODES}" for place in range(count)])},
        **{"log_class": "application" if failed and luck.random() < 0.7 else None},
    }


def main() -> None:
    luck = random.Random(1)  # noqa: S311 - a world, no secret
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(store=Store(database=f"{folder}/s/cluster.db"), correlate=Correlate(settle=0.0))
        engine = open_store(settings)
        with engine.begin() as db:
            db.execute(sql.insert(schema.attempt), [attempt(number, luck) for number in range(JOBS)])
        run.judge(engine, settings, {}, NOW)
        spent = []
        for number in range(9):
            with engine.begin() as db:
                one = {**attempt(JOBS + number, luck), "state": "FAILED", "exit_code": 1, "end": NOW + number}
                db.execute(sql.insert(schema.attempt).values(**one))
            began = time.process_time()
            run.judge(engine, settings, {}, NOW + number)
            spent.append((time.process_time() - began) * 1000)
        middle = sorted(spent)[4]
        print(f"bench: correlate_one_job {middle:.1f} ms bar 50 {'ok' if middle <= 50 else 'SHORT'}")


if __name__ == "__main__":
    main()
