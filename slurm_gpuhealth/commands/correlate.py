"""gpuhealth correlate: brings the cluster's record up to date, judges what is new, and acts where it is told to."""

from __future__ import annotations

import json
import os
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.node import lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.controller.run import Done

HANGS = 3600.0
"""Seconds after which a run hangs, on a shared directory most likely: even a first one over weeks takes minutes."""


@click.command()
@click.option("--wait", is_flag=True, help="Wait for another run to end, at most 5 min.")
@click.option("--no-actions", is_flag=True, help="Judge only: no rung, comment, requeue or exclude list.")
@click.option("--json", "as_json", is_flag=True, help="What was done, as one JSON object.")
@click.pass_obj
def correlate(node: str, wait: bool, no_actions: bool, as_json: bool) -> None:
    """Judge the failed jobs and suspect nodes that are new since the last run, as root on the controller.

    From a systemd timer each minute, or as EpilogSlurmctld. If another run is active,
    this one exits with 0, for up to an hour.
    """
    if os.geteuid() != 0:
        raise click.ClickException("only root, on the controller: it reads every job's record")
    settings = common.settings_of(node)
    turn = lock.take(settings, "correlate", time.monotonic() + (300 if wait else 0), real=True)
    if turn is None:
        _another(settings)
        return
    try:
        os.utime(turn)
        done = _once(settings, act=not no_actions)
    finally:
        os.close(turn)
    for line in done.trouble:
        click.echo(common.safe(line), err=True)
    if as_json:
        click.echo(json.dumps(done.__dict__))
        return
    click.echo(
        f"{done.taken} records of nodes and {done.attempts} attempts taken in; {done.judged} failed attempts judged,"
        f" {done.rescored} anew; {done.suspects} suspect nodes"
    )


def _another(settings: Settings) -> None:
    """Another run is at it; a click error when it has been for so long that it hangs, and nothing is judged."""
    try:
        since = os.stat(os.path.join(settings.paths.run, "correlate.lock")).st_mtime
    except OSError:
        since = time.time()
    if time.time() - since > HANGS:
        told = f"another run is at it, which began {common.ago(time.time(), since)}: it hangs"
        raise click.ClickException(f"{told}; look at it: ps -eo pid,etime,wchan:20,args | grep correlate")
    click.echo("another run is at it", err=True)


def _once(settings: Settings, act: bool) -> Done:
    """A run. Imported here: of a hundred jobs that end together, ninety-nine only find that another is at it."""
    from sqlalchemy.exc import SQLAlchemyError

    from slurm_gpuhealth.controller import run
    from slurm_gpuhealth.store.open import StoreError

    try:
        return run.once(settings, time.time(), act=act)
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    except SQLAlchemyError as error:
        raise click.ClickException(f"the cluster's record: {getattr(error, 'orig', None) or error}") from None
