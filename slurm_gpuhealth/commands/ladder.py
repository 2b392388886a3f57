"""gpuhealth ladder: where the nodes that we hold stand, each step so far, and how to stop the climb."""

from __future__ import annotations

import json
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.commands.resume import not_ours, settings_or_defaults, tell, why_not
from slurm_gpuhealth.ladder import ask, follow, waits
from slurm_gpuhealth.slurm import control, remark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord

OVER = "in service with a fault because the budget has no room, and jobs start there:"
MOST = 60
"""The most lines of a node's past."""
STEP = "time, seconds, fact, gpu, uuid, rung, attempt, outcome, follows, test, code, message, bundle"
FINDING = "time, source, code, gpu, uuid, severity, mode, message, job, cleared"
DECISION = "time, program, action, reason, result, was, job"


@click.command()
@click.argument("words", nargs=-1, metavar="[cancel] [NODE]")
@click.option("-w", "--nodes", "nodeset", metavar="NODESET", help="These nodes, as NODE: 'n[1-4]'.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node.")
@click.pass_obj
def ladder(here: str, words: tuple[str, ...], nodeset: str | None, as_json: bool) -> None:
    """Show where each node that gpuhealth holds stands. For a NODE also its last result and, as root there or on the
    controller, each step. NODE may be a host list.

    cancel NODE stops its climb. If somebody asked for the test, the node goes back to its state before; a node with a
    fault stays drained and waits for an admin. Exit 1 when nothing was cancelled.
    """
    cancelling = words[:1] == ("cancel",)
    texts = [*words[cancelling:], *([nodeset] if nodeset else [])]
    if len(texts) > 1 or (cancelling and not texts):
        raise click.UsageError("name one node, or a host list: gpuhealth ladder [cancel] NODE")
    settings, problems = settings_or_defaults(here)
    tell(problems)
    names = common.hosts(settings, texts[0]) if texts else []
    try:
        if cancelling:
            _cancel(settings, names, as_json)
        elif names:
            for name in names:
                _one(settings, name, here, as_json)
        else:
            _all(settings, as_json)
    except control.ControllerDown as error:
        raise click.ClickException(f"slurmctld does not answer: {error}") from None
    except (control.Refused, control.NoProgram) as error:
        raise click.ClickException(why_not(error)) from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _cancel(settings: Settings, names: list[str], as_json: bool) -> None:
    """Exits with 1 unless each of them was cancelled."""
    every = True
    for name in names:
        record = control.show_node(settings.slurm, name)
        done, text = False, not_ours(record)[1]
        if record.ours is not None:
            try:
                done, text = True, ask.cancel(settings, record, record.ours)
            except ask.Unchanged as error:
                text = f"left as it is: {error}"
        every &= done
        if as_json:
            click.echo(json.dumps({"node": name, "cancelled": done, "message": text}))
        else:
            click.echo(common.safe(f"{name}: {text}"), err=not done)
    if not every:
        raise SystemExit(1)


def _all(settings: Settings, as_json: bool) -> None:
    held, total = control.holds(settings.slurm, settings.drain.nodes)
    records = [control.show_node(settings.slurm, one.node) for one in held]
    facts = [_facts(settings, one) for one in records if one.ours]
    others = [f"{one.name} ({one.base})" for one in records if one.counts and not one.ours]
    every = control.show_nodes(settings.slurm, settings.drain.nodes)
    waiting = [_facts(settings, one) for one in every if waits.of(one)]
    if as_json:
        for one in facts + waiting:
            click.echo(json.dumps(one))
        return
    click.echo(f"{len(facts)} of {total} nodes are held by gpuhealth")
    if others:
        told = ", ".join(others)
        click.echo(f"also count against the budget, by gpuhealth's reason, until they are in service again: {told}")
    names = ("node", "fact", "gpu", "rung", "state", "since", "next", "by", "now")
    shown = [{**one, "gpu": "*" if one["gpu"] is None else str(one["gpu"])} for one in facts]
    rows = [[one[key] or "-" for key in names] for one in shown]
    if facts:
        common.table([name.upper() for name in names], rows)
    if waiting:
        click.echo(OVER)
        for one in waiting:
            click.echo(common.safe(f"  {one['node']}: {one['waits']}"))


def _one(settings: Settings, name: str, here: str, as_json: bool) -> None:
    record = control.show_node(settings.slurm, name)
    facts = _facts(settings, record)
    journal, since = common.own_journal(settings) if name == here else None, time.time() - settings.ladder.window
    past = _past(journal, since) if journal else _shipped(here, name, since)
    if as_json:
        click.echo(json.dumps({**facts, "past": past}))
        return
    click.echo(common.safe(f"{name}: {record.reason}" if record.ours else f"{name}: {not_ours(record)[1]}"))
    if facts["waits"]:
        click.echo(common.safe(f"  {OVER} {facts['waits']}"))
    if facts["now"]:
        click.echo(common.safe(f"  now: {facts['now']}"))
    last = remark.read_result(record.extra)
    if last:
        follows = f"; {last.next} follows" if last.next else ""
        click.echo(common.safe(f"  last result: {follow.result_words(last)}{follows} ({remark.stamp(last.at)})"))
    if past is None:
        click.echo(f"  each step and its evidence: gpuhealth ladder {name}, as root on {name} or the controller")
    else:
        rows = sorted(_line(kind, row) for kind, rows in past.items() for row in rows)[-MOST:]
        common.table(("TIME (UTC)", "WHAT", "DETAIL"), [(common.utc(when), *rest) for when, *rest in rows])


def _facts(settings: Settings, record: NodeRecord) -> dict[str, Any]:
    """One node as the JSON has it; `now` is what it does or waits for."""
    ours, last = record.ours, remark.read_result(record.extra)
    facts: dict[str, Any] = {
        "node": record.name,
        "state": None,
        "slurm": "+".join([record.base, *sorted(record.flags)]),
        "owner": record.owner,
        "reason": record.reason,
        "was": remark.read_said(record.comment).was or None,
        "result": dict(last.__dict__) if last else None,
        "waits": waits.of(record) or None,
        "now": "",
    }
    if ours is None:
        return facts
    jobs = control.jobs(settings.slurm, record.name) if record.has_job else []
    now = follow.progress(record, ours, jobs, settings, time.time())
    names = ("fact", "gpu", "rung", "state", "since", "next", "to", "attempt", "boots", "done", "by")
    text = f"{now.what}, {now.time}" if now.time else now.what
    return {**facts, **{name: getattr(ours, name) for name in names}, "now": text}


def _past(journal: Journal, since: float) -> dict[str, list[dict[str, Any]]]:
    """What the node's journal knows: faults, the decisions on them, the rungs that ran."""
    asks = {
        "fault": (FINDING, "finding WHERE severity = 'fault' AND seen >= ?"),
        "decision": (DECISION, "decision WHERE time >= ?"),
        "step": (STEP, "step WHERE time >= ?"),
    }
    return {
        kind: [
            dict(zip(columns.split(", "), row))
            for row in journal.rows(f"SELECT {columns} FROM {where} ORDER BY time", since)  # noqa: S608 - constants
        ]
        for kind, (columns, where) in asks.items()
    }


def _shipped(here: str, name: str, since: float) -> dict[str, list[dict[str, Any]]] | None:
    """The same from the cluster's record; None where it can't be read, for it is root's."""
    try:
        with common.store(here) as db:
            from slurm_gpuhealth.store import nodes

            return nodes.past(db, name, since)
    except (click.ClickException, ModuleNotFoundError):
        return None


def _line(kind: str, row: dict[str, Any]) -> tuple[float, str, str]:
    """Time, what, detail."""
    gpu = "" if row.get("gpu") is None else f" GPU{row['gpu']}"
    if kind == "fault":
        mended = f" (mended {common.utc(row['cleared'])})" if row["cleared"] else ""
        mode = "" if row["mode"] == "enforce" else f" ({row['mode']})"
        return row["time"], f"fault{mode}", f"{row['source']}:{row['code']}{gpu}: {row['message']}{mended}"
    if kind == "decision":
        was = f", was {row['was']!r}" if row["was"] else ""
        return row["time"], row["action"], f"{row['reason']}{': ' if row['result'] else ''}{row['result']}{was}"
    again = f", try {row['attempt']}" if row["attempt"] > 1 else ""
    took = "" if row["seconds"] is None else f" after {follow.span(row['seconds'])}"
    parts = [f"{row['outcome']}{took}{gpu}{again}", row["message"]]
    if row["follows"] not in ("", row["rung"]):
        parts.append(f"{row['follows']} follows")
    if row["bundle"] not in row["message"]:
        parts.append(f"evidence: {row['bundle']}")
    return row["time"], row["rung"], "; ".join(part for part in parts if part)
