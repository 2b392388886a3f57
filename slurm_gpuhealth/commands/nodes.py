"""gpuhealth nodes: the whole cluster, a line for each node, from the cluster's record and Slurm."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.commands.resume import settings_or_defaults, tell
from slurm_gpuhealth.ladder import budget, waits
from slurm_gpuhealth.policy import runbook
from slurm_gpuhealth.slurm import control

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.slurm.node import NodeRecord

    Facts = dict[str, Any]
    Known = tuple[Mapping[str, Facts], Mapping[str, Facts], Mapping[str, float], frozenset[str]]

ABOUT = {"driver": "driver", "gpuhealth": "gpuhealth", "dcgm": "DCGM", "config": "configuration", "mode": "mode"}
"""What nodes should have in common, in words."""
MOST_GROUPS = 6


@click.command()
@click.option("-w", "--nodes", "nodeset", metavar="NODESET", help="Only these nodes: 'n[1-32]', @rack3.")
@click.option("--held", is_flag=True, help="Only nodes that gpuhealth holds.")
@click.option("--silent", is_flag=True, help="Only nodes that have said nothing for three heartbeats.")
@click.option("--lemon", is_flag=True, help="Only suspects of gpuhealth correlate.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node, and a last one with the summary.")
@click.pass_obj
def nodes(here: str, nodeset: str | None, held: bool, silent: bool, lemon: bool, as_json: bool) -> None:
    """Show every GPU node: state and reason, rung, worst finding, last check, lemon probability, versions.

    Above it the budget, and the nodes that differ from most in driver, version or configuration. As root on the
    controller; where the cluster's record can't be read, only what Slurm knows.
    """
    settings, problems = settings_or_defaults(here)
    tell(problems)
    now = time.time()
    chosen = common.hosts(settings, nodeset) if nodeset else []
    records = _slurm(settings)
    counted = _counted(settings, records)
    known = _store(here, settings, counted, now)
    if records is None and known is None:
        raise SystemExit(1)
    every = _gather(records, counted, known, now)
    if unknown := [name for name in chosen if name not in every]:
        click.echo(f"no such node: {common.fold(unknown)}", err=True)
    shown = [every[name] for name in chosen if name in every] if chosen else [*every.values()]
    shown = [one for one in shown if one["counted"] or chosen]
    wanted = {"held": held, "silent": silent, "p_lemon": lemon}
    shown = [one for one in shown if all(one[key] for key, asked in wanted.items() if asked)]
    told = summary(settings, [one for one in every.values() if one["counted"]], now)
    if as_json:
        for one in shown:
            click.echo(json.dumps({key: value for key, value in one.items() if key != "counted"}))
        click.echo(json.dumps({"summary": told}))
        raise SystemExit(1 if unknown else 0)
    for line in _lines(told):
        click.echo(common.safe(line))
    if shown:
        head = ("NODE", "STATE", "RUNG", "SINCE", "FINDING", "CHECKED", "LEMON", *map(str.upper, ABOUT), "WHY")
        common.table(head, [_row(one, now) for one in shown])
    raise SystemExit(1 if unknown else 0)


def _slurm(settings: Settings) -> list[NodeRecord] | None:
    """Slurm's records of all nodes, in one call; None if it does not answer, which is said."""
    try:
        return control.show_nodes(settings.slurm)
    except control.SlurmError as error:
        click.echo(common.safe(f"Slurm does not answer, states and reasons are not known: {error}"), err=True)
        return None


def _counted(settings: Settings, records: Sequence[NodeRecord] | None) -> frozenset[str] | None:
    """The nodes that the budget counts; None: Slurm does not say."""
    if settings.drain.nodes:
        return frozenset(common.hosts(settings, settings.drain.nodes))
    if records is None:
        return None
    gpu = re.compile(r"\bgpu\b")
    return frozenset(one.name for one in records if gpu.search(one.gres))


def _store(here: str, settings: Settings, counted: frozenset[str] | None, now: float) -> Known | None:
    """Of each node the head of its record, its worst finding and its lemon probability, and the silent nodes; None if
    the record can't be read, which is said."""
    try:
        with common.store(here) as db:
            from slurm_gpuhealth.store import nodes as stored
            from slurm_gpuhealth.store import query

            worst: dict[str, Facts] = {}
            heads = stored.heads(db)
            for one in stored.still_open(db, heads, now - common.RECENT):
                worst.setdefault(one["node"], one)
            silent = query.silent(db, now, settings.store.heartbeat, counted)["silent"]
            return heads, worst, stored.suspects(db), frozenset(silent)
    except click.ClickException as error:
        click.echo(f"only what Slurm knows: {error.message}", err=True)
    except ModuleNotFoundError as error:
        click.echo(f"only what Slurm knows: the cluster's record is read where {error.name} is installed", err=True)
    return None


def _gather(
    records: Sequence[NodeRecord] | None, counted: frozenset[str] | None, known: Known | None, now: float
) -> dict[str, Facts]:
    """Node → what is shown of it, as its JSON; `counted`: it is one of the nodes that the budget counts."""
    heads, worst, suspects, silent = known or ({}, {}, {}, frozenset())
    slurms = {one.name: one for one in records or ()}
    found = {}
    for name in sorted({*slurms, *heads}, key=_natural):
        record, head, finding = slurms.get(name), heads.get(name), worst.get(name)
        if record is None and records is not None:
            continue  # it has left the cluster
        ours, counts = (record.ours, record.counts) if record else (None, None)
        found[name] = {
            "node": name,
            "state": "+".join([record.base, *sorted(record.flags)]).lower() if record else None,
            "owner": record.owner if record else None,
            "reason": record.reason if record else None,
            "why": _why(record) if record else "",
            "held": ours is not None,
            "kind": budget.kind(counts) if counts else None,
            "rung": ours.rung if ours else None,
            "rung_state": ours.state if ours else None,
            "since": (budget.began(counts, now) or record.reason_time or None) if record and counts else None,
            "finding": _finding(finding),
            "checked": head["heard"] if head else None,
            "silent": name in silent,
            "p_lemon": suspects.get(name),
            **{key: (head[key] if head else "") or None for key in ABOUT},
            "counted": counted is None or name in counted,
        }
    return found


def _natural(name: str) -> tuple[str | int, ...]:
    """n2 before n10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name))


def _finding(one: Facts | None) -> Facts | None:
    keys = ("severity", "source", "code", "gpu", "uuid", "mode", "message", "time")
    return {key: one[key] for key in keys} if one else None


def _why(record: NodeRecord) -> str:
    """Slurm's reason in words; "" for a node in service without a fault."""
    if ours := record.ours:
        gpu = "" if ours.node else " on all GPUs" if ours.gpu is None else f" on GPU {ours.gpu}"
        return f"{ours.fact}{gpu}. {runbook.sentence(ours.__dict__)}"
    if fault := waits.of(record):
        return f"in service with a fault because the budget has no room: {fault}"
    if record.owner == "none":
        return ""
    who = "Slurm" if record.owner == "slurm" else record.reason_user or "an admin"
    return f"{who}: {record.reason}" if record.reason else who


def summary(settings: Settings, counted: Sequence[Facts], now: float) -> Facts:
    """The budget, how many nodes there are of each kind, and which differ from most of them."""
    kinds = Counter(one["kind"] for one in counted if one["kind"])
    recent = sum(one["kind"] not in (None, "sweep") and now - (one["since"] or 0.0) < 3600 for one in counted)
    differ = {}
    for key in ABOUT:
        groups: dict[str, list[str]] = {}
        for one in counted:
            if one[key]:
                groups.setdefault(one[key], []).append(one["node"])
        if len(groups) > 1:
            differ[key] = dict(sorted(groups.items(), key=lambda group: -len(group[1])))
    limits = budget.limits(len(counted), settings)
    return {
        "nodes": len(counted),
        "held": sum(one["held"] for one in counted),
        "out": sum(one["owner"] in ("admin", "slurm") for one in counted),
        "silent": [one["node"] for one in counted if one["silent"]],
        "suspects": sum(one["p_lemon"] is not None for one in counted),
        "budget": {
            **{kind: {"used": kinds[kind], "of": limits[kind]} for kind in budget.WORDS},
            "hour": {"used": recent, "of": limits["hour"]},
        },
        "differ": differ,
    }


def _lines(told: Facts) -> Iterable[str]:
    used = {kind: f"{one['used']} of {one['of']}" for kind, one in told["budget"].items()}
    yield (
        f"{told['nodes']} nodes: {told['held']} held by gpuhealth, {told['out']} out of service for another reason,"
        f" {len(told['silent'])} silent, {told['suspects']} suspects"
    )
    yield (
        f"budget: new {used['new']}, lost GPUs {used['lost']}, confirmed {used['confirmed']},"
        f" sweeps and suspects {used['sweep']}; in the last hour {used['hour']}"
    )
    if told["silent"]:
        yield f"silent: {common.fold(told['silent'])}: there, as root: gpuhealth doctor"
    for key, groups in told["differ"].items():
        (most, here), *others = groups.items()
        some = "; ".join(f"{value} on {common.fold(names)}" for value, names in others[:MOST_GROUPS])
        more = f"; and {len(others) - MOST_GROUPS} more" if len(others) > MOST_GROUPS else ""
        yield f"{ABOUT[key]}: {most} on {len(here)} nodes, but {some}{more}"


def _row(one: Facts, now: float) -> tuple[str, ...]:
    finding, heard = one["finding"], one["checked"]
    checked = common.ago(now, heard) if heard else "never"
    return (
        one["node"],
        one["state"] or "?",
        f"{one['rung']} {one['rung_state']}" if one["held"] else "-",
        common.ago(now, one["since"]) if one["held"] and one["since"] else "-",
        finding_words(finding) if finding else "-",
        f"SILENT {checked}" if one["silent"] else checked,
        "-" if one["p_lemon"] is None else f"{one['p_lemon']:.0%}",
        *(one[key] or "-" for key in ABOUT),
        one["why"] or "-",
    )


def finding_words(one: Facts) -> str:
    """`fault nvml:lost GPU3 (shadow)`."""
    gpu = "" if one["gpu"] is None else f" GPU{one['gpu']}"
    mode = "" if one["mode"] == "enforce" else f" ({one['mode']})"
    return f"{one['severity']} {one['source']}:{one['code']}{gpu}{mode}"
