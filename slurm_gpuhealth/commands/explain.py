"""gpuhealth explain: what a job died of, by all that is known of it, or by its log files alone."""

from __future__ import annotations

import click


@click.command()
@click.argument("what", metavar="[JOBID | FILE...]", nargs=-1)
@click.option("--log", "by_log", is_flag=True, help="Read FILEs, of one job, alone; - is standard input. No Slurm.")
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=300.0, show_default=True, metavar="SECONDS", help="With --log."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for an attempt, or for the files.")
@click.pass_obj
def explain(node: str, what: tuple[str, ...], by_log: bool, timeout: float, as_json: bool) -> None:
    """What a job died of: gpuhealth explain JOBID, or from its logs alone: gpuhealth explain --log FILE..."""
    if by_log:
        from slurm_gpuhealth.commands.explain_log import explain_log

        if not what:
            raise click.UsageError("which log? Name the job's files, or - for standard input.")
        explain_log(what, timeout, as_json)
        return
    if len(what) != 1 or not what[0].isdecimal() or len(what[0]) > 10:
        raise click.UsageError(
            "which job? One number; of an array's task its own: sacct -X -j 10_3 -o JobIDRaw. Logs go with --log."
        )
    from slurm_gpuhealth.commands.explain_job import explain_job

    explain_job(node, int(what[0]), as_json)
