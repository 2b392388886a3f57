"""gpuhealth jobs: the failed jobs and what they died of."""

from __future__ import annotations

import json

import click

from slurm_gpuhealth.commands import common, dates
from slurm_gpuhealth.correlate.words import sides
from slurm_gpuhealth.outcomes import CAUSES


@click.command()
@click.option("--verdict", type=click.Choice(CAUSES), help="Only jobs with this verdict.")
@click.option("--since", default="7d", show_default=True, metavar="WHEN", callback=dates.moment, help=dates.SINCE)
@click.option("--until", metavar="WHEN", callback=dates.moment, help=dates.UNTIL)
@click.option("--user", metavar="NAME", help="Only jobs of this user.")
@click.option("-w", "--nodes", "nodeset", metavar="NODESET", help="Only jobs that ran on one of these: 'n[1-4]'.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per attempt.")
@click.pass_obj
def jobs(
    node: str,
    verdict: str | None,
    since: float,
    until: float | None,
    user: str | None,
    nodeset: str | None,
    as_json: bool,
) -> None:
    """Show failed attempts with their verdicts, newest first, and the GPU-hours that they lost."""
    from slurm_gpuhealth.store import judged

    names = common.hosts(common.settings_of(node), nodeset) if nodeset else ()
    with common.store(node) as db:
        found = judged.verdicts(db, since=since, until=until, cause=verdict, user=user, nodes=names)
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
