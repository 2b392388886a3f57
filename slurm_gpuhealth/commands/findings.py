"""gpuhealth findings: what was seen on this node, and what became of it."""

from __future__ import annotations

import json
import time

import click

from slurm_gpuhealth.commands import common


@click.command()
@click.option("--since", default="7d", show_default=True, metavar="AGE", help="How far back: 30min, 6h, 7d.")
@click.option("--gpu", metavar="GPU", help="Only this GPU: index, UUID or PCI address.")
@click.option("--source", metavar="NAME", help="Only this source: xid, sxid, aer, nvml, dcgm, ib, host, site, ...")
@click.option("--severity", type=click.Choice(["info", "warning", "fault"]), help="Only this severity and above.")
@click.option("--job", type=int, help="Only what was seen while this job held the GPU.")
@click.option("--shadow", is_flag=True, help="Only faults that did not drain because of shadow mode.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def findings(
    node: str,
    since: str,
    gpu: str | None,
    source: str | None,
    severity: str | None,
    job: int | None,
    shadow: bool,
    as_json: bool,
) -> None:
    """Show what was seen on this node, newest first."""
    from slurm_gpuhealth.config.kinds import Wrong, scalar

    _, journal = common.open_node(node)
    try:
        where, values = ["seen >= ?"], [time.time() - scalar("Seconds", since)]
    except Wrong as error:
        raise click.BadParameter(f"{since!r} is not {error}", param_hint="--since") from None
    for column, value in (("source", source), ("job", job)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if gpu is not None:
        where.append("? IN (uuid, pci, cast(gpu AS text))")
        values.append(gpu)
    if severity:
        where.append({"info": "1", "warning": "severity != 'info'", "fault": "severity = 'fault'"}[severity])
    if shadow:
        where.append("mode = 'shadow' AND severity = 'fault'")
    found = common.findings(journal, " AND ".join(where), *values)
    if as_json:
        for one in found:
            click.echo(json.dumps(one))
    elif found:
        common.show_findings(found)
    else:
        click.echo(f"nothing in the last {since}")
