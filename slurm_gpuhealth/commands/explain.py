"""gpuhealth explain: what a job died of."""

from __future__ import annotations

import click


@click.command()
@click.argument("job", type=int, required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object an attempt.")
@click.pass_obj
def explain(node: str, job: int | None, as_json: bool) -> None:
    """What a job died of."""
    from slurm_gpuhealth.commands.explain_job import explain_job

    if job is None:
        raise click.UsageError("which job?")
    explain_job(node, job, as_json)
