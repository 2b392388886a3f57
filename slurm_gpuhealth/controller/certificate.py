"""What a node proved when it was accepted: its last level 4, and each figure beside the fleet's. Kept in the store."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING

import sqlalchemy as sql

from slurm_gpuhealth.controller import slow
from slurm_gpuhealth.correlate.slow import HUGE, LEAST, LEAST_GPUS, LEAST_NODES, SPREAD
from slurm_gpuhealth.store import judged, schema
from slurm_gpuhealth.store import nodes as stored

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from slurm_gpuhealth.correlate.slow import Measured

RUNG = "L4"
OUTCOMES = {"pass": "fit", "fail": "not fit"}
MARGIN = 60.0
"""Figures so many seconds around the step belong to it."""


def made(db: sql.Connection, node: str, since: float, now: float) -> dict[str, Any] | None:
    """The certificate of the node's last level 4 that began after `since`; None: its records have not arrived.

    The same step gives the same certificate again.
    """
    table = schema.step
    when = table.c.time - sql.func.coalesce(table.c.clock, 0.0)
    its = table.c.node == node, table.c.rung == RUNG, when >= since, table.c.outcome != "running"
    step = db.execute(sql.select(table, when.label("when")).where(*its).order_by(when.desc()).limit(1)).one_or_none()
    if step is None:
        return None
    begin, end = step.time - MARGIN, step.time + (step.seconds or 0.0) + MARGIN
    figure = schema.figure
    own = figure.c.node == node, figure.c.time >= begin, figure.c.time <= end, figure.c.value.is_not(None)
    last = {(row.uuid, row.name): row for row in db.execute(sql.select(figure).where(*own).order_by(figure.c.time))}
    fleet = slow.figures(db, now - slow.RECENT)
    done = {
        "node": node,
        "time": step.when,
        "outcome": OUTCOMES.get(step.outcome, "not testable"),
        "message": step.message,
        "gpus": [{key: one[key] for key in ("gpu", "uuid", "pci", "serial")} for one in stored.gpus(db, node)],
        "figures": [_beside(row, fleet) for row in sorted(last.values(), key=lambda row: (row.name, row.gpu or 0))],
    }
    judged.put(db, schema.certificate, {"node": node, "time": step.when}, {"data": json.dumps(done)})
    return done


def _beside(row: Any, fleet: Sequence[Measured]) -> dict[str, Any]:
    """A figure, and the median of the same model, tool and version on the other nodes, if they are enough. It is `far`
    if it is further from it than a slow GPU's, in either direction."""
    same = [
        one
        for one in fleet
        if (one.name, one.model, one.version, one.unit) == (row.name, row.model, row.version, row.unit)
        and one.node != row.node
        and abs(one.value) < HUGE
    ]
    enough = (
        len({one.uuid or one.node for one in same}) >= LEAST_GPUS and len({one.node for one in same}) >= LEAST_NODES
    )
    usual = median(one.value for one in same) if enough else None
    percent = round(100 * (row.value / usual - 1)) if usual and abs(row.value) < HUGE * abs(usual) else None
    far = usual is not None and abs(row.value - usual) > max(
        LEAST * abs(usual), SPREAD * median(abs(one.value - usual) for one in same)
    )
    return {
        "gpu": row.gpu,
        "uuid": row.uuid,
        "model": row.model,
        "tool": row.tool,
        "version": row.version,
        "name": row.name,
        "value": row.value,
        "unit": row.unit,
        "fleet": usual,
        "percent": percent,
        "far": far,
    }


def differs(one: dict[str, Any]) -> str:
    """How far a figure is from the fleet's, in words."""
    percent = [] if one["percent"] is None else [f"{one['percent']:+d} %"]
    return ", ".join([*percent, *(["far"] if one["far"] else [])]) or "-"


def page(done: dict[str, Any]) -> str:
    """The certificate for people, as one HTML file without anything from elsewhere."""
    from html import escape
    from time import gmtime, strftime

    def row(cells: Sequence[object], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{escape('-' if one is None else str(one))}</{tag}>" for one in cells) + "</tr>"

    gpus = [row((one["gpu"], one["uuid"], one["pci"], one["serial"])) for one in done["gpus"]]
    figures = [
        row(
            (
                *(one["name"], one["gpu"], f"{one['value']:.4g} {one['unit']}"),
                *("-" if one["fleet"] is None else f"{one['fleet']:.4g}",),
                *(differs(one), f"{one['tool']} {one['version']}"),
            )
        )
        for one in done["figures"]
    ]
    when = strftime("%Y-%m-%d %H:%M UTC", gmtime(done["time"]))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(done["node"])}: {escape(done["outcome"])}</title>
<style>
body {{ font: 15px sans-serif; margin: 2em auto; max-width: 60em; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
td, th {{ border: 1px solid #bbb; padding: .2em .6em; text-align: left; }}
</style></head><body>
<h1>{escape(done["node"])}: {escape(done["outcome"])}</h1>
<p>{when}: {escape(done["message"])}</p>
<table>{row(("GPU", "UUID", "PCI", "Serial"), "th")}
{chr(10).join(gpus)}</table>
<table>{row(("Figure", "GPU", "Value", "Fleet", "Differs", "Tool"), "th")}
{chr(10).join(figures)}</table>
</body></html>
"""
