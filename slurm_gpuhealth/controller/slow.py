"""Compares the figures of all nodes, and tells a node through its Extra which of its GPUs are slow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import sqlalchemy as sql

from slurm_gpuhealth.correlate import slow
from slurm_gpuhealth.say import say
from slurm_gpuhealth.slurm import control, remark
from slurm_gpuhealth.store import judged, schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings

RECENT = 90 * 86400.0
"""Figures older than so many seconds do not count."""
AT_ONCE = 50
"""The most nodes that a run tells: each is an order to slurmctld."""
SHORT = len("GPU-5db0a814")


def look(engine: sql.Engine, now: float) -> list[dict[str, Any]]:
    """The slow GPUs, worst first; kept for `gpuhealth lemons`. Compares only if there are new figures."""
    table = schema.figure
    with engine.begin() as db:
        last = str(db.execute(sql.select(sql.func.max(table.c.taken))).scalar() or "")
        if last != judged.get_cursor(db, "figures"):
            found = [{**one._asdict(), "percent": one.percent} for one in slow.compare(figures(db, now - RECENT))]
            judged.put_cursor(db, "slow", json.dumps(found))
            judged.put_cursor(db, "figures", last)
        return list(json.loads(judged.get_cursor(db, "slow") or "[]"))


def figures(db: sql.Connection, since: float) -> list[slow.Measured]:
    """The last two values of each figure of each GPU since then, for each version of its tool."""
    table = schema.figure
    time = table.c.time - sql.func.coalesce(table.c.clock, 0.0)
    whose = (table.c.node, table.c.uuid, table.c.name, table.c.version, table.c.model)
    number = sql.func.row_number().over(partition_by=whose, order_by=time.desc()).label("number")
    columns = (*whose, table.c.gpu, table.c.value, table.c.unit, time.label("when"), number)
    last = sql.select(*columns).where(table.c.time >= since, table.c.value.is_not(None)).subquery()
    return [
        slow.Measured(
            node=row.node,
            uuid=row.uuid or "",
            gpu=row.gpu,
            model=row.model,
            name=row.name,
            value=row.value,
            unit=row.unit,
            time=row.when,
            version=row.version,
        )
        for row in db.execute(sql.select(last).where(last.c.number <= 2))
    ]


def tell(engine: sql.Engine, settings: Settings, found: Sequence[Mapping[str, Any]]) -> None:
    """Write each node's slow GPUs into its Extra, and remove what is over: one order for each change."""
    texts = {node: remark.slow_text(remark.write_slow("", rows)) for node, rows in _by_node(found).items()}
    with engine.connect() as db:
        told: dict[str, str] = json.loads(judged.get_cursor(db, "slow-told") or "{}")
    changed = [node for node in sorted({*texts, *told}) if texts.get(node) != told.get(node)][:AT_ONCE]
    if not changed:
        return
    try:
        there = control.known(settings.slurm, changed)
        for node in changed:
            if node in there:  # a node that was removed keeps its figures for weeks
                extra = control.show_node(settings.slurm, node).extra
                after = remark.write_slow(extra, remark.read_slow(texts.get(node, "")))
                if after != extra:
                    control.set_remarks(settings.slurm, node, extra=after)
            told[node] = texts.get(node, "")
    except (control.SlurmError, ValueError) as error:
        say(f"the nodes could not be told which GPUs are slow: {error}")
    with engine.begin() as db:
        judged.put_cursor(db, "slow-told", json.dumps({node: text for node, text in told.items() if text}))


def _by_node(found: Sequence[Mapping[str, Any]]) -> dict[str, list[remark.Slow]]:
    """The worst figure of each slow GPU, by node."""
    worst: dict[tuple[str, str], remark.Slow] = {}
    for one in found:  # worst first
        gpu = one["uuid"][:SHORT] or "node"
        row = remark.Slow(gpu, one["name"], one["value"], one["median"], one["unit"])
        worst.setdefault((one["node"], gpu), row)
    nodes: dict[str, list[remark.Slow]] = {}
    for (node, _), row in worst.items():
        nodes.setdefault(node, []).append(row)
    return nodes
