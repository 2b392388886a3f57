"""gpuhealth replay: runs the correlator on recorded jobs and events, to try thresholds before anything may act."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.outcomes import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.correlate.state import NodeState
    from slurm_gpuhealth.outcomes import Suspicion

FILE = click.Path(exists=True, dir_okay=False)


@click.command()
@click.argument("jobs", type=FILE)
@click.argument("events", type=FILE)
@click.option("--topology", type=FILE, metavar="FILE", help='Which nodes a leaf switch has: {"leaf": ["node", ...]}.')
@click.option("--places", type=FILE, metavar="FILE", help='Which nodes a place has: {"rack r7": ["node", ...]}.')
@click.option("--every", type=click.FloatRange(min=1), metavar="SECONDS", help="Also report suspects at this interval.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def replay(
    node: str,
    jobs: str,
    events: str,
    topology: str | None,
    places: str | None,
    every: float | None,
    as_json: bool,
) -> None:
    """Judge recorded jobs and events: what each failed job died of, and which nodes are suspects.

    JOBS and EVENTS are files of JSON lines, in any order (docs/replay.md). Thresholds come from the configuration.
    """
    import gc

    from slurm_gpuhealth.correlate import history
    from slurm_gpuhealth.correlate.engine import Correlator

    gc.disable()  # the correlator makes no reference cycles, and looking for them takes a third of the time
    try:
        leaves, shared = (history.topology(file) if file else {} for file in (topology, places))
        correlator = Correlator(_settings(node).suspicion, leaves, explained=False, places=shared)
        show = _Json() if as_json else _Table()
        found = history.run(jobs, events, correlator, every, 0.005 if as_json else 0.05)
        for one in found if as_json else common.progress(found, "judged"):
            show.add(one)
        show.end()
        _warn(correlator.state.nodes)
    except history.HistoryError as error:
        raise click.ClickException(f"{error} (docs/replay.md says what belongs there)") from None


def _warn(nodes: Mapping[str, NodeState]) -> None:
    """Warn of a node that has one name in JOBS and another in EVENTS: its events would not count for its jobs."""
    idle = {name for name, one in nodes.items() if not one.jobs}
    short = {name.partition(".")[0]: name for name in nodes.keys() - idle}
    twice = [(name, short[name.partition(".")[0]]) for name in sorted(idle) if name.partition(".")[0] in short]
    if twice:
        other, name = twice[0]
        more = f", and {len(twice) - 1} more" if len(twice) > 1 else ""
        click.echo(f"gpuhealth: {other} of EVENTS and {name} of JOBS are taken for two nodes{more}", err=True)


def _settings(node: str) -> Settings:
    """This host's settings, or the defaults if it has no configuration: replay works on any host."""
    from slurm_gpuhealth.config.load import config_path
    from slurm_gpuhealth.config.settings import Settings

    return common.settings_of(node) if os.path.exists(config_path()) or "GPUHEALTH_CONFIG" in os.environ else Settings()


class _Json:
    def add(self, one: Verdict | Suspicion) -> None:
        sys.stdout.write(f"{json.dumps(printed(one))}\n")  # click.echo would flush each of a million

    def end(self) -> None:
        pass


class _Table:
    """Lists the suspects, counts the verdicts."""

    def __init__(self) -> None:
        self.causes: dict[str, int] = {}
        self.time = 0.0
        self.rows: list[tuple[str, ...]] = []

    def add(self, one: Verdict | Suspicion) -> None:
        row = printed(one)
        if "verdict" in row:
            self.causes[row["verdict"]] = self.causes.get(row["verdict"], 0) + 1
            return
        self.rows.append(
            (
                common.utc(row["time"]),
                row["node"],
                f"{row['p_lemon']:.2f}",
                f"{row['hazard_per_day']:.3f}",
                f"{row['observed']:.1f}",
                f"{row['expected']:.1f}",
                row["rung"] or "-",
            )
        )

    def end(self) -> None:
        counts = ", ".join(f"{cause} {count}" for cause, count in sorted(self.causes.items(), key=lambda one: -one[1]))
        click.echo(f"{sum(self.causes.values())} failed attempts: {counts or 'none'}")
        if self.rows:
            head = ("TIME", "NODE", "P(LEMON)", "FAILS/DAY", "OBSERVED", "EXPECTED", "RUNG")
            common.table(head, self.rows)
        else:
            click.echo("no node is suspected")


def printed(one: Verdict | Suspicion) -> dict[str, Any]:
    """As `--json` prints it."""
    if isinstance(one, Verdict):
        told = {"verdict": one.cause, "confidence": one.confidence, "node": one.node, "gpu": one.gpu}
        return {"job": one.job, "attempt": one.attempt, **told}
    keys = ("node", "time", "p_lemon", "hazard_per_day", "observed", "expected")
    return {key: getattr(one, key) for key in keys} | {"rung": one.rung or None}
