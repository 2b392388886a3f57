"""gpuhealth metrics: the cluster's figures, as Prometheus reads them."""

from __future__ import annotations

import time

import click

from slurm_gpuhealth.commands import common


@click.command()
@click.pass_obj
def metrics(node: str) -> None:
    """Print the cluster's metrics now. Run it as root on the controller; docs/metrics.md explains each.

    gpuhealth correlate writes the same, and how it went itself, to metrics.cluster. A node's own metrics are in its
    metrics.textfile.
    """
    from slurm_gpuhealth.metrics import cluster, text
    from slurm_gpuhealth.metrics.table import CLUSTER

    with common.store(node) as db:
        found, _ = cluster.gather(db, common.settings_of(node), time.time())
    click.echo(text.render(CLUSTER, found), nl=False)
