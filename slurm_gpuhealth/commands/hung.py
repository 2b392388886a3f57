"""gpuhealth hung: the running jobs that stand still, since when, what it costs, and where to look."""

from __future__ import annotations

import json
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.correlate import words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OLD = 300.0
"""gpuhealth correlate runs each minute; what it said so many seconds ago is said to be old."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per job.")
@click.pass_obj
def hung(node: str, as_json: bool) -> None:
    """Show running jobs of several GPUs that stand still on all their nodes, as of the last gpuhealth correlate.

    Since when, the GPU-hours lost so far, which GPU or node is different, and the cause if there is evidence for one.
    """
    from slurm_gpuhealth.store import judged

    with common.store(node) as db:
        last = json.loads(judged.get_cursor(db, "hung") or "{}")
    found = last.get("jobs", [])
    if as_json:
        for one in found:
            click.echo(json.dumps(one))
        return
    now = time.time()
    if not last:
        click.echo("Not looked for yet: gpuhealth correlate does that, on the controller.")
        return
    if not found:
        click.echo(f"No running job of several GPUs stands still, as of {common.utc(last['time'])} UTC.")
    else:
        head = ("JOB", "USER", "SINCE (UTC)", "GPUS", "DO", "GPU-H", "CAUSE", "WHERE")
        common.table(head, [_row(one) for one in found])
        for one in found:
            click.echo()
            _explain(one)
    if now - last["time"] > OLD:
        click.echo(f"That is old: gpuhealth correlate last looked {common.ago(now, last['time'])}. Does its timer run?")


def _row(one: dict[str, Any]) -> tuple[object, ...]:
    job = f"{one['job']}.{one['attempt']}" if one["attempt"] else one["job"]
    count = f"{one['waiting']} of {one['gpus']}"
    hours, where = f"{one['gpu_hours']:.1f}", words.place(one["node"], one["gpu"], one["gpu_index"])
    return job, one["user"], common.utc(one["since"]), count, one["kind"], hours, one["cause"], where or "-"


def _explain(one: dict[str, Any]) -> None:
    for sentence in one["why"]:
        click.echo(common.safe(f"Job {one['job']}: {sentence}"))
    click.echo(common.safe(f"Job {one['job']}: what to do: {one['advice']}"))
