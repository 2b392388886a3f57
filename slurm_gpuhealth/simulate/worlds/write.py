"""Writes a small world as files for `gpuhealth replay`, and a file with what is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate import files

if TYPE_CHECKING:
    from slurm_gpuhealth.simulate.worlds.world import World


def write(made: World, folder: str) -> None:
    """Writes JOBS.jsonl, EVENTS.jsonl, TOPOLOGY.json, PLACES.json if it has places, and TRUTH.jsonl."""
    there = Path(folder)
    there.mkdir(parents=True, exist_ok=True)
    files.lines(there / "JOBS.jsonl", map(files.row, made.attempts))
    files.lines(there / "EVENTS.jsonl", (one._asdict() for one in made.events))
    truth = [*(one._asdict() for one in made.bad), *(one._asdict() for one in made.truth.values())]
    places = {"places": made.places, "bad_places": made.bad_places}
    files.lines(there / "TRUTH.jsonl", [places, *truth])
    (there / "TOPOLOGY.json").write_text(json.dumps(made.leaves))
    if made.places:
        (there / "PLACES.json").write_text(json.dumps(made.places))
