"""gpuhealth findings: what was seen on this node, or on others by the cluster's record, and what became of it."""

from __future__ import annotations

import json
import math

import click

from slurm_gpuhealth.commands import common, dates

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SEVERITIES = ("info", "warning", "fault")


@click.command()
@click.option(
    "-w", "--nodes", "nodeset", metavar="NODESET", help="On these nodes, from the cluster's record: 'n[1-4]'."
)
@click.option("--since", default="7d", show_default=True, metavar="WHEN", callback=dates.moment, help=dates.SINCE)
@click.option("--until", metavar="WHEN", callback=dates.moment, help=dates.UNTIL)
@click.option("--gpu", metavar="GPU", help="Only this GPU: index, UUID or PCI address.")
@click.option("--source", metavar="NAME", help="Only this source: xid, sxid, aer, nvml, dcgm, ib, host, site, ...")
@click.option("--severity", type=click.Choice(SEVERITIES), help="Only this severity and above.")
@click.option("--job", type=click.IntRange(1, (1 << 63) - 1), help="Only what was seen while this job held the GPU.")
@click.option("--shadow", is_flag=True, help="Only faults that did not drain because of shadow mode.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def findings(
    node: str,
    nodeset: str | None,
    since: float,
    until: float | None,
    gpu: str | None,
    source: str | None,
    severity: str | None,
    job: int | None,
    shadow: bool,
    as_json: bool,
) -> None:
    """Show what was seen on this node, newest first.

    With -w on any nodes, as far as they have shipped it: as root on the controller. On a node itself, its own journal.
    """
    settings = common.settings_of(node)
    names = common.hosts(settings, nodeset) if nodeset else []
    wanted = {"gpu": gpu, "source": source, "severity": "fault" if shadow else severity, "job": job}
    wanted["mode"] = "shadow" if shadow else None
    until = math.inf if until is None else until
    if common.is_here(settings, node, names):
        found = _here(node, since, until, wanted)
    else:
        with common.store(node) as db:
            from slurm_gpuhealth.store import nodes

            found = nodes.findings(db, names, since, until, severities=_from(wanted.pop("severity")), **wanted)
    if as_json:
        for one in found:
            click.echo(json.dumps(one))
    elif found:
        common.show_findings(found)
    else:
        click.echo(f"nothing since {common.utc(since)} UTC")


def _from(severity: object) -> tuple[str, ...]:
    """This severity and those above; all without one."""
    return SEVERITIES[SEVERITIES.index(str(severity)) :] if severity else SEVERITIES


def _here(node: str, since: float, until: float, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """From this node's journal."""
    _, journal = common.open_node(node)
    where, values = ["seen >= ?", "time <= ?"], [since, until]
    for column in ("source", "job", "mode"):
        if wanted[column] is not None:
            where.append(f"{column} = ?")
            values.append(wanted[column])
    if wanted["gpu"] is not None:
        where.append("? IN (uuid, pci, cast(gpu AS text))")
        values.append(wanted["gpu"])
    severities = _from(wanted["severity"])
    where.append(f"severity IN ({', '.join('?' * len(severities))})")
    return common.findings(journal, " AND ".join(where), *values, *severities)
