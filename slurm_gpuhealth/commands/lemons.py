"""gpuhealth lemons: nodes on which more jobs died than on their peers, bad places, and nodes without peers."""

from __future__ import annotations

import json
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.correlate import context, words
from slurm_gpuhealth.ladder import waits
from slurm_gpuhealth.slurm import control

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.outcomes import Suspicion
    from slurm_gpuhealth.slurm.node import NodeRecord

TESTS = ("L3", "L4", "RMA")
"""The rungs that gpuhealth correlate asks for."""
UNKNOWN = "several nodes (no common place is known)"


@click.command()
@click.option(
    "--above",
    type=click.FloatRange(0.05, 1),
    default=0.05,
    help="Only nodes more likely than this to be a lemon [default: 0.05].",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per row.")
@click.pass_obj
def lemons(node: str, above: float, as_json: bool) -> None:
    """Rank nodes by suspicion, as of the last gpuhealth correlate: failures seen and expected, and what is due.

    Below them, places (a rack, a PDU, a leaf switch) at which several nodes had hard events at once, nodes whose many
    failures can't be judged, as no other node runs such jobs, and GPUs that are slower than the same model elsewhere,
    in tests or in their last two jobs.
    """
    from slurm_gpuhealth.controller import clocks
    from slurm_gpuhealth.store import judged

    with common.store(node) as db:
        found = [one for one in judged.suspicions(db) if one.p_lemon > above]
        looked = float(judged.get_cursor(db, "fleet") or 0)
        gpus = {one.node: _gpu(one, judged.gpu_index(db, one.node, words.gpu(one.gpus))) for one in found}
        places = json.loads(judged.get_cursor(db, "places") or "[]")
        suspects = {one.node for one in found}
        slow = json.loads(judged.get_cursor(db, "slow") or "[]")
        behind = clocks.found(db)
        untold = [one for one in json.loads(judged.get_cursor(db, "untold") or "[]") if one["node"] not in suspects]
    if as_json:
        for row in (*(one._asdict() for one in found), *places, *untold, *slow, *behind):
            click.echo(json.dumps(row))
        return
    records = _records(node)
    for name, record in records.items():
        if fault := waits.of(record):
            click.echo(common.safe(f"{name}: in service with a fault because the budget has no room: {fault}"))
    _show(found, gpus, above, records, looked)
    if places:
        click.echo()
        _show_places(places)
    if untold:
        click.echo()
        _show_untold(untold)
    if slow or behind:
        click.echo()
        _show_slow(slow, behind)


def _gpu(one: Suspicion, index: int | None) -> str:
    """`3 92%`: the GPU that is suspected most."""
    name = words.gpu(one.gpus)
    return "-" if name is None else f"{name if index is None else index} {one.gpus[name]:.0%}"


def _show(
    found: Sequence[Suspicion],
    gpus: Mapping[str, str],
    above: float,
    records: Mapping[str, NodeRecord],
    looked: float,
) -> None:
    if not found:
        told = (
            f"as of {common.utc(looked)} UTC, {common.ago(time.time(), looked)}"
            if looked
            else "but none was judged yet"
        )
        click.echo(f"No node is a lemon with a probability above {above:.0%}, {told}.")
        return
    common.table(
        ("NODE", "LEMON", "FAILURES", "EXPECTED", "USERS", "APPS", "HARD", "GPU", "LAST TEST", "DUE", "WHY"),
        [
            (
                *(one.node, f"{one.p_lemon:.0%}", f"{one.observed:.1f}", f"{one.expected:.2f}"),
                *(
                    one.users,
                    one.applications,
                    one.hard,
                    gpus[one.node],
                    one.last_test or "-",
                    _due(one, records.get(one.node)),
                ),
                one.terms[0] if one.terms else "-",
            )
            for one in found
        ],
    )
    click.echo(f"as of {common.utc(found[0].time)} UTC, {common.ago(time.time(), found[0].time)}")


def _show_places(places: Sequence[Mapping[str, Any]]) -> None:
    from ClusterShell.NodeSet import NodeSet  # type: ignore[import-untyped]

    rows = [
        (one["place"] or UNKNOWN, len(one["moments"]), NodeSet.fromlist(one["nodes"]), common.utc(_last(one)))
        for one in places
    ]
    common.table(("PLACE", "TIMES", "NODES", "LAST"), rows)
    click.echo("Several nodes of the place had hard events at once: have its power, cooling and network looked at.")
    click.echo("These events count against no node, and no test is requested for them.")


def _show_untold(rows: Sequence[Mapping[str, Any]]) -> None:
    common.table(
        ("CAN'T BE TOLD", "WHERE", "JOBS", "FAILED", "EXPECTED"),
        [
            (
                one["node"],
                context.words(one["where"]),
                f"{one['runs']:.1f}",
                f"{one['failed']:.1f}",
                f"{one['expected']:.1f}",
            )
            for one in rows
        ],
    )
    click.echo(
        "No other node runs such jobs: it may be the node or its users. To test the node: gpuhealth-escalate NODE"
    )


def _show_slow(slow: Sequence[Mapping[str, Any]], behind: Sequence[Mapping[str, Any]]) -> None:
    """`slow` in tests, and `behind` in jobs."""
    common.table(
        ("SLOW", "GPU", "MODEL", "FIGURE", "VALUE", "OTHERS", "DIFFERS", "LAST"),
        [
            (
                *(one["node"], "-" if one["gpu"] is None else one["gpu"], one["model"], one["name"]),
                *(f"{one['value']:.4g} {one['unit']}", f"{one['median']:.4g}", f"{one['percent']:+d} %"),
                common.utc(one["time"]),
            )
            for one in (*slow, *behind)
        ],
    )
    click.echo(
        "Twice in a row slower than the same model elsewhere. To test again: gpuhealth-escalate NODE --through 4"
    )
    for one in behind:
        jobs = " and ".join(map(str, one["jobs"]))
        where = words.place(one["node"], one["uuid"], one["gpu"])
        click.echo(common.safe(f"{where}: slow in jobs {jobs}. Their work may be unequal: a weak sign"))


def _last(one: Mapping[str, Any]) -> float:
    return float(one["moments"][-1]["time"])


def _records(node: str) -> dict[str, NodeRecord]:
    """The nodes as Slurm has them; empty if it does not answer."""
    settings = common.settings_of(node)
    try:
        return {one.name: one for one in control.show_nodes(settings.slurm, settings.drain.nodes)}
    except control.SlurmError:
        return {}


def _due(one: Suspicion, record: NodeRecord | None) -> str:
    """The rung that gpuhealth correlate asks for; a held node's own. Level 2 is not asked for: the epilog runs it."""
    if record and record.ours:
        return f"held: {record.ours.next or record.ours.rung}"
    return one.rung if one.rung in TESTS else "-"
