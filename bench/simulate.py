"""What the correlator finds on simulated clusters, against the policies that it must not be worse than."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slurm_gpuhealth.simulate.cases import CASES, COMPARED
from slurm_gpuhealth.simulate.rivals import PUBLISHED, RIVALS
from slurm_gpuhealth.simulate.score import OURS, Report, behind, run

SEEDS = range(101, 113)
"""Others than those on which constants were tried."""
SLACK = 0.05
AHEAD = ("silent-named", "arrays")
QUIET = ("none", "quiet")
WRONG = 0.01
"""Clean flags per 1000 node-days where a drain is decided."""


def main() -> int:
    seeds = SEEDS if len(sys.argv) < 2 else range(101, 101 + int(sys.argv[1]))
    short = 0
    for setting in COMPARED:
        found = run(CASES[setting], seeds)
        for rival in RIVALS:
            short += bench(f"{setting}/{rival}", behind(found, rival), "behind", SLACK)
        if setting in AHEAD:
            for rival in PUBLISHED:
                short += bench(f"{setting}/{rival}/strictly", behind(found, rival), "behind", -1e-9)
        short += calibration(setting, found)
    for setting in QUIET:
        found = run(CASES[setting], seeds, (OURS,))
        for rung in ("RMA", "L4", "L3"):
            soft = sum(value for name, value in found.rungs.items() if name == f"{rung} soft")
            short += bench(f"{setting}/{rung}-soft", soft, "per-1000-node-days", 0.0)
        worst = next(one for one in found.results if one.policy == f"{OURS} p>0.90")
        short += bench(f"{setting}/clean-at-.9", worst.clean, "per-1000-node-days", WRONG)
    return 1 if short else 0


def calibration(setting: str, found: Report) -> int:
    """What is said to be .9 or more must be that true, and all bins together be off by a few hundredths at most."""
    short = 0
    for what, of in found.calibration.items():
        top = of.bins[-1]
        short += bench(f"{setting}/calibration-{what}", of.error, "expected-error", 0.05)
        short += bench(f"{setting}/said-{top.said:.2f}-{what}", top.said - top.true, "too-sure", 0.05)
    return short


def bench(name: str, value: float, unit: str, limit: float) -> int:
    ok = value <= limit
    name = name.replace(" ", "-")
    print(f"bench: simulate/{name} {value:.3f} {unit} bar {limit:g} {'ok' if ok else 'SHORT'}", flush=True)
    return not ok


if __name__ == "__main__":
    sys.exit(main())
