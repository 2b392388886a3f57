"""What the users of a simulated cluster submit: applications, each with its own bugs, as jobs and as arrays."""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.simulate.cases import HOURS, MOST_HOURS, SIZES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from slurm_gpuhealth.simulate.cases import Case

FRAMES = ("train.py:forward", "data.py:collate", "model.py:attention", "eval.py:main", "loss.py:backward", "io.py:read")
ERRORS = ("RuntimeError", "ValueError", "KeyError", "IndexError", "FileNotFoundError", "TypeError", "AssertionError")
KINDS = ("train", "pretrain", "finetune", "sweep", "eval", "embed", "sim")


class Bug(NamedTuple):
    """What an application dies of: the same message each time."""

    error: str
    frame: str
    rank: int | None = None
    iteration: int | None = None
    """Whether it happens at the same rank and iteration each time: bad data, a NaN."""


class App(NamedTuple):
    user: str
    account: str
    name: str
    submit: str
    failing: float
    bugs: tuple[Bug, ...]


class Job(NamedTuple):
    id: int
    app: App
    submit: float
    nodes: int
    gpus: int
    """Of each node."""
    seconds: float
    failing: float
    array: int | None = None
    node: int | None = None
    """Asked for by name."""


def jobs(case: Case, rng: Random, start: float, end: float, pins: Sequence[int]) -> list[Job]:
    """All submissions by time."""
    apps = [_app(case, rng, user, nth) for user in range(case.users) for nth in range(case.applications)]
    ids = count(1001)
    found: list[Job] = []
    for _ in range(_poisson(rng, case.jobs * case.nodes * case.days)):
        app = apps[int(len(apps) * rng.random() ** 1.5)]  # some applications are submitted more often than others
        nodes, seconds = _shape(case, rng)
        gpus = rng.choice((1, 1, 2, 4, 8)) if case.sharing and nodes == 1 else case.gpus
        found.append(Job(0, app, rng.uniform(start, end), nodes, gpus, seconds, app.failing))
    for _ in range(_poisson(rng, case.arrays * case.days)):
        app, when = rng.choice(apps), rng.uniform(start, end)
        array = next(ids)
        found += [
            Job(0, app, when, 1, case.gpus, _seconds(rng, "task"), 0.95, array) for _ in range(rng.randint(20, 120))
        ]
    for nth, node in enumerate(pins):
        app = _app(case, rng, case.users + nth, 0)
        for _ in range(round(case.days * 4)):
            seconds = _seconds(rng, "single")
            found.append(Job(0, app, rng.uniform(start, end), 1, case.gpus, seconds, 0.5, None, node))
    found.sort(key=lambda job: job.submit)
    return [job._replace(id=next(ids)) for job in found]


def _app(case: Case, rng: Random, user: int, nth: int) -> App:
    logit = math.log(case.failing / (1 - case.failing)) + rng.gauss(0, 1)
    submit = f"{rng.getrandbits(48):012x}"
    bugs = [Bug(rng.choice(ERRORS), rng.choice(FRAMES)) for _ in range(3)]
    if rng.random() < 0.2:
        bugs.append(Bug("nan", "train.py:step", rng.randrange(8), rng.randrange(100, 90000)))
    name = f"{rng.choice(KINDS)}-{user % 9}{nth}"
    return App(f"u{user:03d}", f"lab{user % 12}", name, submit, 1 / (1 + math.exp(-logit)), tuple(bugs))


def _shape(case: Case, rng: Random) -> tuple[int, float]:
    if rng.random() < case.single:
        return 1, _seconds(rng, "single")
    sizes = [size for size in SIZES if size <= max(2, case.nodes // 4)]
    return rng.choices(sizes, [SIZES[size] for size in sizes])[0], _seconds(rng, "multi")


def _seconds(rng: Random, kind: str) -> float:
    median, spread = HOURS[kind]
    return max(60.0, 3600 * min(MOST_HOURS, median * rng.lognormvariate(0, spread)))


def _poisson(rng: Random, mean: float) -> int:
    """Uses the normal distribution for large numbers, to do without numpy."""
    if mean > 50:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    limit, found, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        found, product = found + 1, product * rng.random()
    return found
