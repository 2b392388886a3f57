"""gpuhealth accept: new or returned nodes prove themselves by level 4 and all tests, and get a certificate."""

from __future__ import annotations

import json
import time

import click

from slurm_gpuhealth.commands import common, escalate
from slurm_gpuhealth.ladder import ask as asking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ladder.follow import End

ARRIVE = 300.0
"""Seconds to wait for the node's records: a health check ships them, and gpuhealth correlate reads them."""
LOOK = 5.0
EXITS = {"fit": 0, "not fit": 1, "not testable": 2}


@click.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--wait", is_flag=True, help="Follow the tests until they end, then print the certificates.")
@click.option("--take-over", is_flag=True, help="Also a node that an admin drained; then put the drain back.")
@click.option("--certificate", is_flag=True, help="Ask for nothing: print the certificate of the last level 4.")
@click.option("--html", type=click.Path(file_okay=False, exists=True), help="Also write NODE.html into this folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per certificate.")
@click.pass_obj
def accept(
    node: str,
    nodes: tuple[str, ...],
    wait: bool,
    take_over: bool,
    certificate: bool,
    html: str | None,
    as_json: bool,
) -> None:
    """Have new or returned nodes run DCGM level 4 and all tests; the certificate has each figure beside the fleet's.

    The request is that of gpuhealth-escalate NODE --level 4 --test all. A certificate is made from the store, so it
    needs a store, and is kept there. Exit 0: all are fit. 1: not all. 2: not testable. 3: without a certificate.
    """
    settings = common.settings_of(node)
    names = [name for text in nodes for name in escalate.hostlist(settings, text)]
    since = 0.0
    if not certificate:
        since = time.time() - 60  # the node's clock may be behind
        ends = _ask(settings, names, wait, take_over)
        if not wait:
            click.echo(f"to follow: gpuhealth ladder NODE; then: gpuhealth accept --certificate {' '.join(nodes)}")
        if not wait or all(one.outcome == "not run" for one in ends):
            raise SystemExit(max(one.exit for one in ends))
    done = _certificates(node, names, since, ARRIVE if wait else 0.0)
    for one in done:
        _show(one, as_json)
    if html:
        _write(done, html)
    missing = [name for name in names if name not in {one["node"] for one in done}]
    if missing:
        click.echo(f"no certificate: {', '.join(missing)}: no level 4 of it is in the store yet", err=True)
    raise SystemExit(3 if missing else max((EXITS[one["outcome"]] for one in done), default=0))


def _ask(settings: Settings, names: list[str], wait: bool, take_over: bool) -> list[End]:
    request = asking.Request("L4", by=escalate.who(None), take_over=take_over, tests="all")
    ends = escalate.run(settings, names, request, escalate.Screen(), here=False, no_wait=not wait)
    for end in ends:
        click.echo(common.safe(f"{end.node}: {end.outcome}: {end.message}"), err=True)
    return ends


def _certificates(node: str, names: list[str], since: float, patience: float) -> list[dict[str, Any]]:
    """The certificates that can be made; waits for records that are on their way."""
    from slurm_gpuhealth.controller import certificate
    from slurm_gpuhealth.store import open as opening

    end = time.monotonic() + patience
    with common.store(node):  # says what is missing
        engine = opening.open_store(common.settings_of(node))
    while True:
        with engine.begin() as db:
            made = [certificate.made(db, name, since, time.time()) for name in names]
        done = [one for one in made if one]
        if len(done) == len(names) or time.monotonic() >= end:
            return done
        time.sleep(LOOK)


def _write(done: list[dict[str, Any]], folder: str) -> None:
    import os

    from slurm_gpuhealth.controller import certificate

    for one in done:
        path = os.path.join(folder, f"{one['node']}.html")
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(certificate.page(one))
        except OSError as error:
            raise click.ClickException(f"{path} can't be written: {error.strerror}") from None


def _show(done: dict[str, Any], as_json: bool) -> None:
    from slurm_gpuhealth.controller import certificate

    if as_json:
        click.echo(json.dumps(done))
        return
    click.echo(common.safe(f"{done['node']}: {done['outcome']} ({common.utc(done['time'])} UTC): {done['message']}"))
    if done["figures"]:
        common.table(
            ("FIGURE", "GPU", "VALUE", "FLEET", "DIFFERS", "TOOL"),
            [
                (
                    *(one["name"], "-" if one["gpu"] is None else one["gpu"], f"{one['value']:.4g} {one['unit']}"),
                    "-" if one["fleet"] is None else f"{one['fleet']:.4g}",
                    certificate.differs(one),
                    f"{one['tool']} {one['version']}",
                )
                for one in done["figures"]
            ],
        )
