"""gpuhealth explain: what a job died of, from all that is known about it, or from its log files alone."""

from __future__ import annotations

import click


@click.command()
@click.argument("what", metavar="[JOBID | FILE...]", nargs=-1)
@click.option("--log", "by_log", is_flag=True, help="Read only FILEs, the logs of one job; - is standard input.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit for --log.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per attempt, or for the files.")
@click.pass_obj
def explain(node: str, what: tuple[str, ...], by_log: bool, timeout: float, as_json: bool) -> None:
    """Explain what a job died of: gpuhealth explain JOBID; from its logs alone: gpuhealth explain --log FILE..."""
    if by_log:
        from slurm_gpuhealth.commands.explain_log import explain_log

        if not what:
            raise click.UsageError("which log? Name the job's files, or - for standard input.")
        explain_log(what, timeout, as_json)
        return
    if len(what) != 1 or not what[0].isdecimal() or len(what[0]) > 10:
        raise click.UsageError(
            "which job? Give one number; a task of an array has its own: sacct -X -j 10_3 -o JobIDRaw. For logs: --log."
        )
    from slurm_gpuhealth.commands.explain_job import explain_job

    explain_job(node, int(what[0]), as_json)
