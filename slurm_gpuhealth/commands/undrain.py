"""gpuhealth undrain: the way out of a drain wave. Shows nodes that we hold, gives them back, acknowledges the facts."""

from __future__ import annotations

import json
import sys
import time
from fnmatch import fnmatchcase

import click

from slurm_gpuhealth.commands import common, dates
from slurm_gpuhealth.commands.resume import INVALID, SERVING, TOO_FEW, settings_or_defaults, tell, why_not
from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import frozen, replace
from slurm_gpuhealth.ladder import ask as asking
from slurm_gpuhealth.ladder import budget, waits
from slurm_gpuhealth.policy import runbook
from slurm_gpuhealth.slurm import control, hold, remark
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

AT_ONCE = 500
"""Nodes in one order: a program's argument has 128 KiB."""


@frozen
class Which:
    """The conditions that a hold must meet."""

    since: float | None
    """It began then or later: seconds since the epoch."""
    facts: tuple[str, ...]
    """Patterns, as `--fact` takes them."""
    check: str | None
    rung: str | None
    confirmed: bool


@click.command()
@click.option("--since", metavar="WHEN", callback=dates.moment, help=dates.SINCE)
@click.option(
    "--fact", "facts", multiple=True, metavar="PATTERN", help="Only this fact of sinfo -R, or finding: Xid79, 'dcgm*'."
)
@click.option("--check", metavar="SOURCE", help="Only what this source found: xid, dcgm, nvml, host, ...")
@click.option("--rung", type=click.Choice(RUNGS, case_sensitive=False), help="Only nodes at this rung, or before it.")
@click.option("-w", "--nodes", metavar="NODESET", help="Only these nodes: 'n[1-32]', @rack3.")
@click.option("--confirmed", is_flag=True, help="Also nodes where a test confirmed the fault, and nodes at RMA.")
@click.option("--everywhere", is_flag=True, help="Acknowledge the fact on all nodes: else others are drained next.")
@click.option("--for", "how_long", metavar="AGE", help="How long the fact is acknowledged [default: drain.ack].")
@click.option("--dry-run", is_flag=True, help="Only show them.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node; with --yes or --dry-run.")
@click.pass_obj
def undrain(
    here: str,
    since: float | None,
    facts: tuple[str, ...],
    check: str | None,
    rung: str | None,
    nodes: str | None,
    confirmed: bool,
    everywhere: bool,
    how_long: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Show the nodes that gpuhealth holds and that meet all options, ask, and give them back.

    Each node's fact is acknowledged in its Comment: for the time of --for the fact does not drain this node again, even
    if it is still true or returns. Nodes that an admin or Slurm drained are left alone. --fact '*' means all. Exit 0
    when each node is in service.
    """
    if not (since or facts or check or rung or nodes):
        raise click.UsageError("say which: --since, --fact, --check, --rung, --nodes; --fact '*' for all held nodes")
    if not (yes or dry_run) and (as_json or not sys.stdin.isatty()):
        raise click.UsageError("can't ask here: --yes gives the nodes back, --dry-run only shows them")
    settings, problems = settings_or_defaults(here)
    tell(problems)
    which = Which(
        since=since,
        facts=facts,
        check=check,
        rung=rung,
        confirmed=confirmed or (rung or "").upper() == "RMA",
    )
    ack = settings.drain.ack if how_long is None else _seconds(how_long, "--for") or 0.0
    try:
        names = common.fold(common.hosts(settings, nodes)) if nodes else ""
        good = _undrain(settings, which, names, ack, everywhere, dry_run, yes, as_json)
    except control.ControllerDown as error:
        raise click.ClickException(
            f"slurmctld does not answer: {error}; run this again: it shows what is left"
        ) from None
    except (control.Refused, control.NoProgram) as error:
        raise click.ClickException(why_not(error)) from None
    raise SystemExit(0 if good else 1)


def _undrain(
    settings: Settings,
    which: Which,
    nodes: str,
    ack: float,
    everywhere: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> bool:
    """Show, ask, give back, look again, tell. Returns whether each node is in service."""
    now = time.time()
    held = [record for record in control.show_nodes(settings.slurm, nodes) if record.ours]
    chosen = {one.name: one for one in held if meets(replace(which, confirmed=True), one, now)}
    left = [name for name, one in chosen.items() if not meets(which, one, now)]
    chosen = {name: one for name, one in chosen.items() if name not in left}
    if not as_json:
        _show(list(chosen.values()), len(held), len(left), now)
    if dry_run or not chosen:
        _as_json(as_json, chosen, {}, None)
        return True
    until = (now + ack) // 60 * 60 + 60 if ack else 0.0
    if not yes and not click.confirm(f"Give back {len(chosen)} nodes?"):
        return False
    latest = {one.name: one for one in control.show_nodes(settings.slurm, nodes)}  # the answer may have taken an hour
    ready = [one for one in (latest.get(name) for name in chosen) if one and one.ours and meets(which, one, now)]
    if everywhere:  # before there is room for them in the budget
        facts = _facts(ready)
        others = [one for one in latest.values() if one.ours is None or one.ours.fact not in facts]
        _acknowledge(settings, others, facts, until, now)
    _give_back(settings, ready, until, now)
    after = {one.name: one for one in control.show_nodes(settings.slurm, nodes)}
    trouble = {name: why for name in chosen if (why := _trouble(chosen[name], after.get(name)))}
    if not _as_json(as_json, chosen, trouble, until):
        _tell(chosen, trouble, until, everywhere)
        if waiting := [f"{one.name} ({waits.of(one)})" for one in after.values() if waits.of(one)]:
            click.echo(common.safe(f"the budget has room again, and these are drained next: {', '.join(waiting)}"))
    return not trouble


def meets(which: Which, record: NodeRecord, now: float) -> bool:
    """Whether this node meets the conditions. Pure."""
    ours = record.ours
    return (
        ours is not None
        and (which.confirmed or budget.kind(ours) != "confirmed")
        and (which.since is None or _began(record, ours, now) >= which.since - 60)
        and (not which.facts or any(_named(pattern, ours) for pattern in which.facts))
        and (which.check is None or any(name.startswith(f"{which.check.lower()}:") for name in _findings(ours)))
        and (which.rung is None or which.rung in (ours.rung, ours.next))
    )


def _named(pattern: str, ours: Reason) -> bool:
    """Whether a pattern of the admin means this fact: `Xid79`, `gpuhealth:xid79 gpu3`, `row*`, `dcgm*`, `nvml:lost`."""
    low = pattern.lower()
    low = low[len(reasons.PREFIX) :] if low.startswith(reasons.PREFIX) else low
    fact = ours.fact.lower()
    names = {fact, f"{fact} gpu{'*' if ours.gpu is None else ours.gpu}", *_findings(ours)}
    return low in names or any(fnmatchcase(name, low) for name in names)


def _findings(ours: Reason) -> list[str]:
    """The findings that the fact can stand for, `dcgm:memory_bandwidth`, in lower case."""
    tested = ours.rung in ("L1", "L2") and ours.next
    names = [f"dcgm:{ours.fact}"] if tested else []
    return [name.lower() for name in (*names, *(code.key for code in runbook.codes(ours.fact)))]


def _give_back(settings: Settings, ready: list[NodeRecord], until: float, now: float) -> None:
    """Write the ack and end the drain in one order. Nodes that get the same Comment share an order."""
    groups: dict[str | None, list[str]] = {}
    for one in ready:
        comment = _acknowledged(one, _facts([one]), until, now)
        # A drain that we took over from an admin is put back. UNDRAIN would leave a DOWN that our reboot caused.
        if remark.read_said(one.comment).was or one.base == "DOWN":
            if comment is not None:
                control.set_remarks(settings.slurm, one.name, comment=comment)
            _unless_invalid(lambda: hold.give_back(settings.slurm, one.name))  # noqa: B023
        else:
            groups.setdefault(comment, []).append(one.name)
    for comment, names in groups.items():
        for first in range(0, len(names), AT_ONCE):
            some = names[first : first + AT_ONCE]
            _unless_invalid(lambda: control.undrain_all(settings.slurm, some, comment))  # noqa: B023
            before = [one for one in ready if one.name in some]
            hold.put_back(settings.slurm, before, before)


def _unless_invalid(order: Callable[[], object]) -> None:
    """Slurm carries the order out on the other nodes if one may not leave its drain; `_trouble` tells of that one."""
    try:
        order()
    except control.Refused as error:
        if INVALID not in error.text:
            raise


def _acknowledge(settings: Settings, others: list[NodeRecord], facts: list[str], until: float, now: float) -> None:
    """Write the ack on nodes that are not held for these facts."""
    groups: dict[str, list[str]] = {}
    for one in others:
        comment = _acknowledged(one, facts, until, now)
        if comment is not None and comment != one.comment:
            groups.setdefault(comment, []).append(one.name)
    for comment, names in groups.items():
        for first in range(0, len(names), AT_ONCE):
            control.comment_all(settings.slurm, names[first : first + AT_ONCE], comment)


def _acknowledged(record: NodeRecord, facts: list[str], until: float, now: float) -> str | None:
    """The node's Comment with the acks, without expired ones; None to leave it as it is."""
    if not facts or not until or "\n" in record.comment:
        return None
    said = remark.read_said(record.comment)
    acks = {fact: when for fact, when in said.acks.items() if when > now}
    return remark.write_said(record.comment, replace(said, acks={**acks, **dict.fromkeys(facts, until)}))


def _facts(held: Iterable[NodeRecord]) -> list[str]:
    """The facts for which these nodes are held, without tests that somebody asked for."""
    return sorted({one.ours.fact for one in held if one.ours and one.ours.fact not in reasons.ON_REQUEST})


def _began(record: NodeRecord, ours: Reason, now: float) -> float:
    return budget.began(ours, now) or record.reason_time


def _show(chosen: list[NodeRecord], held: int, left: int, now: float) -> None:
    if chosen:
        rows = [
            (
                one.name,
                "+".join([one.base, *sorted(one.flags)]),
                common.ago(now, _began(one, one.ours, now)),
                one.reason,
            )
            for one in chosen
            if one.ours
        ]
        common.table(("NODE", "STATE", "HELD SINCE", "REASON"), rows)
    click.echo(f"{len(chosen)} of {held} nodes that gpuhealth holds" + ("" if chosen else ": nothing to give back"))
    if broken := [f"{one.name} ({one.ours.fact})" for one in chosen if one.ours and is_broken(one, one.ours)]:
        click.echo(common.safe(f"still broken, as far as is known, and jobs will start there: {', '.join(broken)}"))
    if left:
        click.echo(f"left out: {left} more, at RMA or with a fault that a test confirmed (--confirmed includes them)")


def is_broken(record: NodeRecord, ours: Reason) -> bool:
    """Whether a GPU is lost or a test has failed there, and nothing shows that it is mended."""
    return budget.kind(ours) in ("lost", "confirmed") or asking.has_failed(record, ours)


def _trouble(before: NodeRecord, after: NodeRecord | None) -> str:
    """Why a node is not in service; "" when it is."""
    if after is None:
        return "Slurm does not show it any more"
    if "DRAIN" in after.flags:
        return f"still drained: {after.reason!r}" + (f": {TOO_FEW}" if "INVALID_REG" in after.flags else "")
    if after.base not in SERVING:
        return (
            f"no longer drained, but {after.base}; once it is well: scontrol update NodeName={after.name} State=RESUME"
        )
    return ""


def _as_json(wanted: bool, chosen: dict[str, NodeRecord], trouble: dict[str, str], until: float | None) -> bool:
    """Print JSON if it is `wanted`; returns `wanted`. `until` is None when nothing was done."""
    for one in chosen.values() if wanted else ():
        ours = one.ours
        if ours:
            back = until is not None and one.name not in trouble
            facts = {"fact": ours.fact, "gpu": ours.gpu, "rung": ours.rung, "state": ours.state, "since": ours.since}
            told: dict[str, Any] = {
                "given_back": back,
                "trouble": trouble.get(one.name, ""),
                "acked_until": until or None,
            }
            told["broken"] = is_broken(one, ours)
            click.echo(json.dumps({"node": one.name, "reason": one.reason, **facts, **told}))
    return wanted


def _tell(chosen: dict[str, NodeRecord], trouble: dict[str, str], until: float, everywhere: bool) -> None:
    for name, why in trouble.items():
        click.echo(common.safe(f"{name}: {why}"), err=True)
    click.echo(f"{len(chosen) - len(trouble)} of {len(chosen)} nodes are back in service")
    facts = _facts(chosen.values())
    if until and facts:
        where = "no node" if everywhere else "none of these nodes"
        what = f"{', '.join(facts)}: drains {where} until {remark.stamp(until)} (--for; in each Comment)"
        click.echo(f"{what}; any other fact still does")
        if not everywhere:
            click.echo("other nodes with the same fault are drained next: --everywhere acknowledges it there too")
    if any("\n" in one.comment for one in chosen.values()):
        click.echo("no ack on a node that has a Comment of several lines: it was left as it is", err=True)


def _seconds(text: str | None, option: str) -> float | None:
    from slurm_gpuhealth.config.kinds import Wrong, scalar

    try:
        return None if text is None else float(scalar("Seconds", text))
    except Wrong as error:
        raise click.BadParameter(f"{text!r} is not {error}", param_hint=option) from None
