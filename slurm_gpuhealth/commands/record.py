"""What `gpuhealth status` shows of any node, from the cluster's record and Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.ladder import budget, waits
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store import nodes, schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from sqlalchemy import Connection

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.slurm.node import NodeRecord

    Facts = dict[str, Any]

BEFORE = 600.0
"""A hold's faults were seen at most so many seconds before it began."""


def status(here: str, settings: Settings, names: Sequence[str], now: float) -> Iterator[Facts]:
    """What `gpuhealth status` shows of each node. A click error for a name that neither the record nor Slurm has."""
    try:
        slurms = {one.name: one for one in control.show_nodes(settings.slurm)}
    except control.SlurmError as error:
        click.echo(common.safe(f"Slurm does not answer, holds are not known: {error}"), err=True)
        slurms = {}
    with common.store(here) as db:
        heads = nodes.heads(db)
        known = {one: nodes.still_open(db, heads, now - common.RECENT, [one]) for one in names}
        for name in names:
            if name not in heads:
                what = "has shipped nothing yet" if name in slurms else "is no node of this cluster"
                raise click.ClickException(f"{name} {what}")
            yield _status(db, name, slurms.get(name), heads[name], known[name], now)


def _status(db: Connection, name: str, slurms: NodeRecord | None, head: Facts, found: list[Facts], now: float) -> Facts:
    ours = slurms.ours if slurms else None
    since = (budget.began(ours, now) or slurms.reason_time) if slurms and ours else None
    # What stands, what waits, and the events that the hold is about.
    begin = now if since is None else since - BEFORE
    found = [one for one in found if one["standing"] or one["acted"] is None or one["time"] >= begin]
    worst: dict[str, Facts] = {}
    for one in found:
        worst.setdefault(one["uuid"], one)
    decision = next(iter(nodes.past(db, name, 0.0)["decision"][-1:]), None)
    fault = waits.of(slurms) if slurms else ""
    return {
        "node": name,
        "mode": head["mode"] or None,
        "hold": {"reason": slurms.reason, "since": since} if slurms and ours else None,
        "journal": "on the node: this is what it has shipped",
        "gpus": _gpus(db, name, worst),
        "findings": found,
        "jobs": [
            {"job": one["id"], "gpus": one["gpus"].split(",")} for one in nodes.running(db, name, now - 30 * 86400)
        ],
        "sources": {},
        "last_check": head["heard"],
        "failure": None,
        "over_budget": {"fault": fault, "why": decision["result"] if decision else "drain.budget"} if fault else None,
        "decision": {"about": decision["reason"], **{key: decision[key] for key in ("time", "action", "result")}}
        if decision
        else None,
        **{key: head[key] or None for key in schema.ABOUT if key != "mode"},
    }


def _gpus(db: Connection, name: str, worst: dict[str, Facts]) -> list[Facts]:
    tests, found = nodes.tests(db, name), []
    for gpu in nodes.gpus(db, name):
        one, test = worst.get(gpu["uuid"]), tests.get(gpu["uuid"])
        found.append(
            {
                **{key: gpu[key] for key in ("uuid", "pci", "serial", "first")},
                "index": gpu["gpu"],
                "replaces": gpu["replaces"] or None,
                "state": state(one) if one else "ok",
                "last_diagnostic": {key: test[key] for key in ("level", "outcome", "time")} if test else None,
            }
        )
    return found


def state(one: Facts) -> str:
    """`fault nvml:lost (shadow)`."""
    mode = "" if one["mode"] == "enforce" else f" ({one['mode']})"
    return f"{one['severity']} {one['source']}:{one['code']}{mode}"
