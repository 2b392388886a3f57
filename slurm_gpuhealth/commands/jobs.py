"""gpuhealth jobs: the failed jobs and what they died of."""

from __future__ import annotations

import json
import re
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.correlate.words import sides
from slurm_gpuhealth.outcomes import CAUSES


@click.command()
@click.option("--verdict", type=click.Choice(CAUSES), help="Only jobs with this verdict.")
@click.option("--since", default="7d", metavar="AGE", help="Only jobs that ended since then: 12h, 7d [default: 7d].")
@click.option("--user", metavar="NAME", help="Only jobs of this user.")
@click.option("--node", "on", metavar="NAME", help="Only jobs that ran on this node.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per attempt.")
@click.pass_obj
def jobs(node: str, verdict: str | None, since: str, user: str | None, on: str | None, as_json: bool) -> None:
    """Show failed attempts with their verdicts, newest first, and the GPU-hours that they lost."""
    from slurm_gpuhealth.store import judged

    with common.store(node) as db:
        found = judged.verdicts(db, since=time.time() - _age(since), cause=verdict, user=user, node=on)
    if as_json:
        may_read = common.may_read(node)
        for one in found:
            # A fingerprint has words of the log.
            click.echo(json.dumps(one if may_read(one["user"]) else {**one, "fingerprint": ""}))
        return
    common.table(
        ("JOB", "USER", "NAME", "ENDED (UTC)", "STATE", "VERDICT", "SURE", "NODE", "GPU-H", "WHY"),
        [
            (
                *(f"{one['job']}.{one['attempt']}" if one["attempt"] else one["job"], one["user"], one["name"][:20]),
                *(common.utc(one["end"]), one["state"], one["cause"], f"{one['confidence']:.2f}"),
                *(one["node"] or "-", f"{one['gpu_hours']:.1f}", next(iter(sides(one["cause"], one["terms"])[0]), "-")),
            )
            for one in found
        ],
    )
    hours = sum(one["gpu_hours"] for one in found)
    click.echo(f"{len(found)} failed attempts, {hours:.1f} GPU-hours")


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+)(min|h|d|w)", text)
    if not match:
        raise click.BadParameter(f"{text!r}: a number and min, h, d or w: 7d", param_hint="--since")
    return int(match[1]) * {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}[match[2]]
