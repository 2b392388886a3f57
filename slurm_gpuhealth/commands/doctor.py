"""gpuhealth doctor: what would make gpuhealth, or Slurm, do the wrong thing here. Looks; changes nothing."""

from __future__ import annotations

import json

import click

from slurm_gpuhealth.commands.resume import settings_or_defaults
from slurm_gpuhealth.doctor import look
from slurm_gpuhealth.frozen import asdict


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def doctor(node: str, as_json: bool) -> None:
    """Find what would make gpuhealth or Slurm do the wrong thing here; change nothing. Exit 1 if something is wrong.

    Run it as root on a node. On the controller it checks only slurm.conf and gpuhealth correlate.
    """
    lines = []
    for line in look.examine(node, *settings_or_defaults(node)):
        lines.append(line)
        if not as_json:
            text = "".join(c if c.isprintable() else "?" for c in str(line))
            click.secho(text, fg={"FAIL": "red", "warn": "yellow"}.get(line.level))
    fine = all(line.level != "FAIL" for line in lines)
    if as_json:
        click.echo(json.dumps({"node": node, "ok": fine, "lines": [asdict(line) for line in lines]}))
    raise SystemExit(0 if fine else 1)
