"""The long search, `make soak`: new random histories of the ladder, new small worlds of the budget, new odd inputs.

SOAK=1000000: number of histories (default 100,000); or SOAK_MINUTES=60. SEED=N repeats an earlier search; SOAK_CORES=1
uses fewer cores. Each batch has its own seed, so the number of cores does not change the result. A failure is
printed as the shortest history that shows it; make it a named test in tests/unit/test_ladder_properties.py.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

BATCH = 250
"""Histories per batch."""
WORLDS = 10
"""Small worlds of the budget per batch."""
NEWS = 60.0
"""Seconds between two progress lines."""


def main() -> int:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(1 << 32))
    minutes, cores = os.environ.get("SOAK_MINUTES"), int(os.environ.get("SOAK_CORES") or os.cpu_count() or 1)
    most = float("inf") if minutes else float(os.environ.get("SOAK") or 100_000)
    end = time.monotonic() + 60 * float(minutes or "inf")
    print(f"soak: seed {seed}, on {cores} cores", flush=True)
    found, played, news, numbers = odd_inputs(seed), 0, time.monotonic(), itertools.count()
    waiting, begun = set(), 0
    with ProcessPoolExecutor(cores) as pool:
        while True:
            while len(waiting) < 2 * cores and begun < most and time.monotonic() < end:
                waiting.add(pool.submit(batch, seed, next(numbers), min(BATCH, int(min(most - begun, BATCH)))))
                begun += BATCH
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for count, finds in (one.result() for one in done):
                played += count
                found += len(finds)
                for text in finds:
                    print(f"\nsoak: FOUND {text}\n", flush=True)
            if time.monotonic() - news > NEWS:
                news = time.monotonic()
                print(f"soak: {played} histories so far, {found} found", flush=True)
    print(f"soak: {played} histories, {found} found, seed {seed}", flush=True)
    return 1 if found else 0


def odd_inputs(seed: int) -> int:
    """Runs the hypothesis tests with many more, new examples. Returns how many fail."""
    import xml.etree.ElementTree as xml

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [sys.executable, "-m", "pytest", "-m", "hypothesis", "tests/unit", f"--junit-xml={report}"]
        subprocess.run(
            [*tests, f"--hypothesis-seed={seed}", "--timeout=0"], env={**os.environ, "GPUHEALTH_TRIALS": "new"}
        )
        suite = xml.parse(report).getroot()[0]  # noqa: S314 - pytest's
        return int(suite.get("failures", 0)) + int(suite.get("errors", 0))


def batch(seed: int, number: int, count: int) -> tuple[int, list[str]]:
    """Play up to `count` histories of that batch, until one fails. Returns how many were played, and the failure."""
    from hypothesis import HealthCheck, Phase, given
    from hypothesis import seed as seeded
    from hypothesis import settings as trials

    from tests.histories import HISTORY
    from tests.unit import test_budget_model as model
    from tests.unit import test_ladder_properties as ladder

    mine, played, last, finds = seed * 1_000_003 + number, 0, None, []
    with tempfile.TemporaryDirectory() as folder:
        nodes = ladder.three(Path(folder))

        @seeded(mine)
        @trials(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(HISTORY)
        def search(history):
            nonlocal played, last
            played, last = played + 1, history
            ladder.ends_well(nodes, history)

        try:
            search()
        except Exception as error:  # from the shortest history, which was played last
            finds.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}\n    history = {last!r}")
    for world in range(WORLDS * number, WORLDS * (number + 1)):
        broken = model.breaks(f"{seed}/{world}")
        if broken:
            finds.append(f"{broken}\n    test_budget_model.breaks('{seed}/{world}')")
    return played, finds


if __name__ == "__main__":
    sys.exit(main())
