"""All small worlds: importing their files fills the table."""

from __future__ import annotations

from slurm_gpuhealth.simulate.worlds import (
    kept_context,
    kept_ends,
    kept_gpus,
    kept_places,
    kept_silent,
    tune_context,
    tune_ends,
    tune_gpus,
    tune_places,
    tune_queues,
    tune_silent,
)
from slurm_gpuhealth.simulate.worlds.world import ENTRIES, build

FILES = (
    *(tune_context, tune_ends, tune_gpus, tune_places, tune_queues, tune_silent),
    *(kept_context, kept_ends, kept_gpus, kept_places, kept_silent),
)
ALL = {one.name: one for one in sorted(ENTRIES.values(), key=lambda one: (one.group != "tune", one.family))}

__all__ = ["ALL", "FILES", "build"]
