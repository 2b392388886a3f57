"""What judging costs: `gpuhealth replay` of a million attempts on 2,000 nodes, and one finished job by itself.

CPU, not time, and beside what reading the same file as JSON takes in the same run: the machine may be busy.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slurm_gpuhealth.config.settings import Suspicion
from slurm_gpuhealth.correlate.engine import AppState, Correlator, FleetState, NodeState, State
from slurm_gpuhealth.correlate.lines import read_attempt
from slurm_gpuhealth.outcomes import Event

ROOT = Path(__file__).resolve().parent.parent
NODES, JOBS, DAYS = 2000, int(os.environ.get("GPUHEALTH_BENCH_JOBS", "1000000")), 90
BEGIN = 1_750_000_000
CLASSES = ("application", "application", "application", "communication", "nothing", None)
SIZES = (1,) * 90 + (2, 2, 2, 4, 4, 8, 8, 16, 32, 64)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        jobs, events = Path(folder, "JOBS.jsonl"), Path(folder, "EVENTS.jsonl")
        with jobs.open("w") as file:
            file.writelines(f"{line}\n" for line in attempts(JOBS))
        with events.open("w") as file:
            file.writelines(f"{line}\n" for line in told(JOBS // 50))
        program = "from slurm_gpuhealth.commands.gpuhealth import main; main()"
        argv = [sys.executable, "-c", program, "replay", str(jobs), str(events), "--json"]
        before = read_alone(jobs)
        with open(os.devnull, "w") as sink:
            subprocess.run(argv, stdout=sink, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        alone = (before + read_alone(jobs)) / 2
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = spent.ru_utime + spent.ru_stime
    print(f"bench: replay-cpu {took:.1f} s, json.loads alone {alone:.1f} s", file=sys.stderr)
    short = bench("replay-over-json", took / alone, "x", 15)
    short += bench("replay-memory", spent.ru_maxrss / 1024, "MiB", 512)
    return short + one_job()


def read_alone(jobs: Path) -> float:
    """CPU of nothing but reading the file's lines as JSON."""
    begun = time.process_time()
    with jobs.open("rb") as file:
        for line in file:
            json.loads(line)
    return time.process_time() - begun


def one_job() -> int:
    """CPU of a failed 64-node job on a cluster that has run for weeks, its nodes read from JSON and written back.

    The bar: 50 ms, or on a slow or busy machine two and a half times what reading and writing that JSON alone takes.
    """
    lines = [json.loads(line) for line in attempts(60_000, nodes=128)]
    rows = sorted((read_attempt(one) for one in lines), key=lambda one: one.end)
    correlator = Correlator(Suspicion())
    for one in rows:
        correlator.attempt(one)
    known = correlator.state
    nodes = {name: json.dumps(one.to_json()) for name, one in known.nodes.items()}
    apps = {name: json.dumps(one.to_json()) for name, one in known.applications.items()}
    all_of = json.dumps(known.fleet.to_json())
    job = rows[-1]._replace(job=10**9, state="FAILED", nodes=tuple(sorted(nodes))[:64], gpus=None, log_class="nothing")
    mine = {name: text for name, text in apps.items() if name.startswith(f"{job.user}|")}
    gc.freeze()  # a new process would not have the cluster above to look through
    begun = time.process_time()
    state = State(
        {name: NodeState.from_json(json.loads(nodes[name])) for name in job.nodes},
        {name: AppState.from_json(json.loads(text)) for name, text in mine.items()},
        FleetState.from_json(json.loads(all_of)),
    )
    correlator = Correlator(Suspicion(), {}, state)
    correlator.event(Event(job.end - 5, job.nodes[3], 2, "xid", "79"))
    verdict = correlator.attempt(job)
    for one in (*state.nodes.values(), *state.applications.values(), state.fleet):
        json.dumps(one.to_json())
    took = time.process_time() - begun
    if verdict is None or verdict.node != job.nodes[3]:
        sys.exit(f"bench: {verdict} does not name {job.nodes[3]}")
    begun = time.process_time()
    for text in (*(nodes[name] for name in job.nodes), *mine.values(), all_of):
        json.dumps(json.loads(text))
    alone = time.process_time() - begun
    print(f"bench: one-job-json-alone {alone * 1000:.1f} ms", file=sys.stderr)
    return bench("one-job-64-nodes", took * 1000, "ms", max(50.0, 2.5 * alone * 1000))


def attempts(count: int, nodes: int = NODES):
    """Lines of JOBS: nine in ten take one node, one in four fails; thirty lemons, and two arrays a day that crash."""
    rng = random.Random(1)  # noqa: S311 - the same every time
    lemons = set(rng.sample(range(nodes), max(2, nodes * 3 // 200)))
    for job in range(count):
        size = SIZES[job % 100]
        first = rng.randrange(nodes)
        names = [f"gpu{(first + place) % nodes:04d}" for place in range(size)]
        minutes = min(2880.0, rng.lognormvariate(3.5, 1.6))
        user = int(rng.random() ** 2 * 400)
        failed = rng.random() < 0.25 or (first in lemons and rng.random() < minutes / 4000)
        end = BEGIN + job * DAYS * 86400 // count + rng.randrange(600)
        row = {
            "job": job,
            "attempt": 0,
            "user": f"user{user}",
            "account": f"group{user % 20}",
            "name": f"train-{user}-{rng.randrange(3)}",
            "array": None,
            "state": "FAILED" if failed else "COMPLETED",
            "exit_code": int(failed),
            "signal": 0,
            "start": end - int(minutes * 60),
            "end": end,
            "nodes": names,
            "gpus": {name: [0, 1, 2, 3, 4, 5, 6, 7] for name in names},
            "failed_node": None,
            "log": None,
            "log_class": rng.choice(CLASSES) if failed else None,
        }
        yield json.dumps(row)


def told(count: int):
    rng = random.Random(2)  # noqa: S311 - the same every time
    for _ in range(count):
        row = {"time": BEGIN + rng.randrange(DAYS * 86400), "node": f"gpu{rng.randrange(NODES):04d}"}
        code = rng.choice(("13", "31", "43", "63", "94", "79"))
        yield json.dumps({**row, "gpu": rng.randrange(8), "source": "xid", "code": code, "severity": "info"})


def bench(name: str, value: float, unit: str, limit: float) -> int:
    """1 where `value` is over the bar."""
    print(f"bench: {name} {value:.1f} {unit} bar {limit:.3g} {'ok' if value <= limit else 'SHORT'}", flush=True)
    return int(value > limit)


if __name__ == "__main__":
    sys.exit(main())
