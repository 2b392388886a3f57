"""gpuhealth status: this node at a glance, from its own journal."""

from __future__ import annotations

import json
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.ladder import waits
from slurm_gpuhealth.node import jobs, samples

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal


@click.command()
@click.option("-w", "--nodes", "nodeset", metavar="NODESET", help="These nodes, from the cluster's record: 'n[1-4]'.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node.")
@click.pass_obj
def status(node: str, nodeset: str | None, as_json: bool) -> None:
    """Show this node: GPUs, findings, hold, last diagnostics. Exit 1 while a fault stands that may drain the node.

    With -w any nodes, as far as they have shipped it: as root on the controller. On a node itself, its own journal.
    """
    settings = common.settings_of(node)
    names = common.hosts(settings, nodeset) if nodeset else []
    broken = False
    for number, facts in enumerate(_each(node, settings, names)):
        if as_json:
            click.echo(json.dumps(facts))
        else:
            click.echo("\n" if number else "", nl=False)
            show(facts, "none of level 2 or deeper" if "gpuhealth" in facts else "none")
        broken |= any(one["severity"] == "fault" and one["mode"] == "enforce" for one in facts["findings"])
    raise SystemExit(1 if broken else 0)


def _each(node: str, settings: Settings, names: list[str]) -> Iterable[dict[str, Any]]:
    if common.is_here(settings, node, names):
        return [gather(node, *common.open_node(node))]
    from slurm_gpuhealth.commands import record

    return record.status(node, settings, names, time.time())


def gather(node: str, settings: Settings, journal: Journal) -> dict[str, Any]:
    """Everything that `status` shows, as its JSON."""
    gpus, doing = [], samples.doing(journal)
    for gpu in _numbered(journal):
        row = journal.one(
            "SELECT level, outcome, time FROM diagnostic WHERE uuid = ? ORDER BY time DESC LIMIT 1", gpu["uuid"]
        )
        last = dict(zip(("level", "outcome", "time"), row)) if row else None
        state = _state(journal, gpu["uuid"])
        gpus.append({**gpu, "last_diagnostic": last, "state": state, "doing": doing.get(gpu["uuid"])})
    hold = journal.get("hold")
    last = journal.one("SELECT time, action, reason, result FROM decision ORDER BY id DESC LIMIT 1")
    # what stands, what waits, and the events that the hold is about
    now_true = "cleared IS NULL AND mode != 'old' AND severity != 'info' AND (standing OR acted IS NULL OR seen >= ?)"
    return {
        "node": node,
        "mode": settings.mode,
        "hold": hold,
        "journal": journal.trouble or "ok",
        "gpus": gpus,
        "findings": common.findings(journal, now_true, hold["since"] - 60 if hold else time.time()),
        "jobs": [{"job": job, "gpus": uuids} for job, uuids in jobs.running(journal)],
        "sources": journal.get("sources", {}),
        "last_check": journal.get("checked"),
        "failure": journal.get("failure"),
        "over_budget": waits.over_budget(journal),
        "decision": dict(zip(("time", "action", "about", "result"), last)) if last else None,
    }


def _numbered(journal: Journal) -> list[dict[str, Any]]:
    """The node's GPUs. After a boot the driver renumbers the GPUs that are left. If one of them now has the number of a
    lost GPU, the lost one has no `index`; `was` is its old number."""
    gpus = journal.get("gpus", [])
    here = {gpu.get("uuid") for gpu in (journal.get("nvml") or {}).get("gpus", ())}
    taken = {gpu["index"] for gpu in gpus if gpu["uuid"] in here}
    return [
        {**gpu, "index": None, "was": gpu["index"]} if gpu["uuid"] not in here and gpu["index"] in taken else gpu
        for gpu in gpus
    ]


def show(facts: dict[str, Any], untested: str = "none") -> None:
    now = time.time()
    checked = f"last check {common.ago(now, facts['last_check'])}" if facts["last_check"] else "never checked"
    click.echo(f"{facts['node']}: {facts['mode'] or 'unknown'} mode, {checked}, journal {facts['journal']}")
    hold = facts["hold"]
    click.echo(f"hold: {hold['reason']} ({common.ago(now, hold['since'])})" if hold else "hold: none")
    if over := facts["over_budget"]:
        click.echo(
            "in service with a fault because the budget has no room, and jobs start here:"
            f" {over['fault']} ({over['why']})"
        )
    if last := facts["decision"]:
        result = f": {last['result']}" if last["result"] else ""
        done = "found while already held:" if last["action"] == "held" else last["action"]
        click.echo(f"last decision: {done} {last['about']}{result} ({common.ago(now, last['time'])})")
    click.echo(f"jobs with GPUs: {', '.join(str(job['job']) for job in facts['jobs']) or 'none'}")
    common.table(
        ("GPU", "PCI", "UUID", "SERIAL", "STATE", "LAST DIAGNOSTIC"),
        [
            (
                *(
                    f"was {gpu.get('was', '?')}" if gpu["index"] is None else gpu["index"],
                    gpu["pci"],
                    gpu["uuid"],
                    gpu["serial"] or "-",
                    gpu["state"],
                ),
                f"level {last['level']} {last['outcome']}, {common.ago(now, last['time'])}"
                if (last := gpu["last_diagnostic"])
                else untested,
            )
            for gpu in facts["gpus"]
        ],
    )
    if busy := [gpu for gpu in facts["gpus"] if gpu.get("doing")]:
        click.echo()
        header = ("GPU", "JOB", "DOES", "FOR", "BUSY", "POWER", "USUAL", "CLOCK", "MEMORY", "TEMPERATURE")
        common.table(header, [(gpu["index"], *_doing(now, **gpu["doing"])) for gpu in busy])
    for gpu in facts["gpus"]:
        if before := gpu.get("replaces"):
            click.echo(f"GPU {gpu['index']}, {gpu['uuid']}, replaced {before} ({common.ago(now, gpu['first'])})")
    if facts["findings"]:
        click.echo()
        common.show_findings(facts["findings"])
    failure = facts["failure"]
    if failure:
        click.echo(
            f"{failure['program']} failed {common.ago(now, failure['time'])}: {failure['error']}: please report it"
        )
    for name, source in facts["sources"].items():
        if source["error"]:
            click.echo(f"source {name}: {source['error']} ({common.ago(now, source['time'])})")


def _doing(now: float, **gpu: Any) -> tuple[object, ...]:
    """A row of what a GPU does for its job."""

    def told(key: str, unit: str, of: float = 1) -> str:
        return "-" if gpu.get(key) is None else f"{gpu[key] / of:.0f} {unit}"

    does = f"not judged: {gpu['why']}" if gpu["why"] else gpu["does"]
    power = f"{told('watts', 'W')} of {told('limit', 'W', 1000)}" if gpu.get("limit") else told("watts", "W")
    return (
        *(gpu["job"], does, common.ago(now, gpu["since"]).removesuffix(" ago"), told("utilization", "%"), power),
        *(told("usual", "W"), told("clock", "MHz"), told("memory", "GiB", 1024), told("temperature", "°C")),
    )


def _state(journal: Journal, uuid: str) -> str:
    """The worst finding that stands on this GPU."""
    row = journal.one(
        "SELECT severity, source, code, mode FROM finding WHERE uuid = ? AND cleared IS NULL AND severity != 'info'"
        " AND mode != 'old' AND (standing OR acted IS NULL OR ?) ORDER BY severity, time DESC LIMIT 1",
        uuid,
        journal.get("hold") is not None,
    )
    return f"{row[0]} {row[1]}:{row[2]}{'' if row[3] == 'enforce' else f' ({row[3]})'}" if row else "ok"
