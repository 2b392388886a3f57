"""gpuhealth correlate: updates the cluster's record, judges what is new, and takes the actions that are turned on."""

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
"""A run that is older than this many seconds hangs, most likely on a shared directory: a first run takes minutes."""


@click.command()
@click.option("--wait", is_flag=True, help="Wait for another run to end, at most 5 min.")
@click.option("--no-actions", is_flag=True, help="Judge only: no rung, comment, requeue or exclude list.")
@click.option("--json", "as_json", is_flag=True, help="What was done, as one JSON object.")
@click.pass_obj
def correlate(node: str, wait: bool, no_actions: bool, as_json: bool) -> None:
    """Judge the jobs that failed since the last run, and find suspect nodes. Run it as root on the controller.

    Start it from a systemd timer each minute, or as EpilogSlurmctld. If another run is active, this one does nothing
    and exits with 0; with 1 if the other run began more than an hour ago, because then it hangs.
    """
    if os.geteuid() != 0:
        raise click.ClickException("run this as root on the controller: it reads the records of all jobs")
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
        f"read {done.taken} node records and {done.attempts} attempts; judged {done.judged} failed attempts,"
        f" and {done.rescored} earlier ones again; {done.suspects} suspect nodes"
    )


def _another(settings: Settings) -> None:
    """Say that another run is active; a click error if it hangs: then nothing is judged."""
    try:
        since = os.stat(os.path.join(settings.paths.run, "correlate.lock")).st_mtime
    except OSError:
        since = time.time()
    if time.time() - since > HANGS:
        told = f"another run began {common.ago(time.time(), since)} and hangs"
        raise click.ClickException(f"{told}; look at it: ps -eo pid,etime,wchan:20,args | grep correlate")
    click.echo("another run is active", err=True)


def _once(settings: Settings, act: bool) -> Done:
    """One run. It imports here: if a hundred jobs end together, ninety-nine calls only find another run active."""
    from sqlalchemy.exc import SQLAlchemyError

    from slurm_gpuhealth.controller import run
    from slurm_gpuhealth.store.open import StoreError

    try:
        return run.once(settings, time.time(), act=act)
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    except SQLAlchemyError as error:
        raise click.ClickException(f"the cluster's record: {getattr(error, 'orig', None) or error}") from None
