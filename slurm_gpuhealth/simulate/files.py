"""Writes a simulated world as files for `gpuhealth replay`, and a file with what is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_gpuhealth.outcomes import Attempt, Event
from slurm_gpuhealth.simulate import texts
from slurm_gpuhealth.simulate.cases import DAY
from slurm_gpuhealth.simulate.world import name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from slurm_gpuhealth.simulate.world import World

KEYS = (
    *("job", "attempt", "user", "account", "name", "array", "state", "exit_code", "signal", "start", "end"),
    *("nodes", "gpus", "failed_node", "log", "log_class", "submit"),
    *("partition", "qos", "reservation", "timelimit", "constraint"),
)


def write(world: World, folder: str, logs: bool) -> None:
    """Writes JOBS.jsonl, EVENTS.jsonl, TOPOLOGY.json and TRUTH.jsonl.

    `logs`: each failed job's log as text; else only its class, with text only if the log names a host.
    """
    there = Path(folder)
    there.mkdir(parents=True, exist_ok=True)
    attempts = (item for _, item in world.stream if isinstance(item, Attempt))
    events = (item._asdict() for _, item in world.stream if isinstance(item, Event))
    lines(there / "JOBS.jsonl", (_row(one, logs) for one in attempts))
    lines(there / "EVENTS.jsonl", events)
    truth = [*(_lemon(one) for one in world.lemons), *(one._asdict() for one in world.truth.values())]
    lines(there / "TRUTH.jsonl", truth)
    (there / "TOPOLOGY.json").write_text(json.dumps(world.leaves))


def _row(attempt: Attempt, logs: bool) -> dict[str, Any]:
    reading = attempt.reading
    if reading and (logs or reading.hosts):
        attempt = attempt._replace(log=texts.text(attempt))
    if reading and not logs:
        attempt = attempt._replace(log_class=reading.kind or "none")
    return row(attempt)


def row(attempt: Attempt) -> dict[str, Any]:
    """A line of JOBS, as docs/replay.md has it."""
    return {key: getattr(attempt, key) for key in KEYS}


def line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def _lemon(one: Any) -> dict[str, Any]:
    told = {"lemon": name(one.node), "since": one.since, "until": one.until, "gpu": one.gpu}
    return {**told, "per_day": one.rate * DAY}


def lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(map(line, rows))
