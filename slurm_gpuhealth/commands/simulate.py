"""gpuhealth simulate: makes clusters with known faults, to compare policies, or as files for replay."""

from __future__ import annotations

import json
import math

import click

from slurm_gpuhealth.commands import common

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from slurm_gpuhealth.simulate.cases import Case
    from slurm_gpuhealth.simulate.score import Report, Result

CALIBRATED = {
    "suspicion": "p_lemon of all nodes, every two days, and how many were lemons",
    "verdict": "Confidence of the verdicts, and how many were right",
    "node": "Share of the blame that the node got at once, and how many the node had killed",
}
SHOWN = (".05", ".10", ".20", ".30", ".40", ".50", ".60", ".70", ".80", ".90", ".95")
"""Thresholds of ours that the table shows; --json has them all."""
LEGEND = (
    "CLEAN, ONE-OFF: good nodes flagged per 1000 node-days, without and with a true fault in the 14 days before.\n"
    "DAYS, FAILURES: from the first failure of a found lemon to its flag. AVOIDED: its failures after the flag."
)


@click.command()
@click.option("--setting", "settings", multiple=True, metavar="NAME", help="[default: base; --list names them]")
@click.option("--list", "list_them", is_flag=True, help="List the settings, and what each changes.")
@click.option("--nodes", type=click.IntRange(4, 100_000), help="[default: the setting's, 512]")
@click.option("--days", type=click.FloatRange(1, 3650), help="[default: the setting's, 60]")
@click.option("--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many clusters.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the first cluster.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Only this policy; `ours` is gpuhealth's. [default: all]",
)
@click.option("--logs", is_flag=True, help="Write job logs as text and read them, instead of giving their meaning.")
@click.option("--write", metavar="FOLDER", help="Only write the first cluster to files for gpuhealth replay.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for each setting and policy.")
def simulate(
    settings: tuple[str, ...],
    list_them: bool,
    nodes: int | None,
    days: float | None,
    seeds: int,
    seed: int,
    policies: tuple[str, ...],
    logs: bool,
    write: str | None,
    as_json: bool,
) -> None:
    """Compare policies that find bad nodes, on simulated clusters that are calibrated on published rates.

    Trust the order of the policies, not the absolute figures: the clusters are simulated.
    """
    from slurm_gpuhealth.simulate import files, score, world
    from slurm_gpuhealth.simulate.cases import CASES

    if list_them:
        for name, case in CASES.items():
            told = (f"{key}={value}" for key, value in case._asdict().items() if value != getattr(CASES["base"], key))
            click.echo(f"{name:<16}  {', '.join(told)}".rstrip())
        return
    _known("setting", settings, CASES)
    _known("policy", policies, score.POLICIES)
    chosen = {name: _sized(CASES[name], nodes, days) for name in settings or ("base",)}
    if write:
        try:
            files.write(world.make(next(iter(chosen.values())), seed), write, logs)
        except OSError as error:
            raise click.ClickException(f"{write} can't be written: {error.strerror}") from None
        return
    for name, case in chosen.items():
        found = score.run(case, range(seed, seed + seeds), policies or score.POLICIES, logs)
        if as_json:
            _show_json(name, found)
        else:
            _show(name, case, found)


def _known(what: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise click.UsageError(f"no {what} {name!r}; there are {', '.join(known)}")


def _sized(case: Case, nodes: int | None, days: float | None) -> Case:
    return case._replace(nodes=nodes or case.nodes, days=days or case.days)


def _show_json(setting: str, found: Report) -> None:
    which = {"setting": setting, "seeds": found.seeds}
    for one in found.results:
        click.echo(json.dumps({**which, **{key: _known_or_null(value) for key, value in _row(one)}}))
    if found.verdicts:
        told = {"verdicts": found.verdicts, "right": found.right, "rungs": found.rungs}
        told["right_node"] = _known_or_null(found.right_node)
        bins = {what: [tuple(one) for one in of.bins if one.number] for what, of in found.calibration.items()}
        click.echo(json.dumps({**which, **told, "calibration": bins}))


def _known_or_null(value: float | str) -> float | str | None:
    """NaN is no JSON."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _row(one: Result) -> Iterable[tuple[str, float | str]]:
    return one._asdict().items()


def _show(setting: str, case: Case, found: Report) -> None:
    jobs = f"{found.attempts} attempts of jobs"
    click.echo(f"{setting}: {found.seeds} clusters of {case.nodes} nodes, {case.days:g} days, {jobs}")
    header = ("POLICY", "PRECISION", "RECALL", "CLEAN", "ONE-OFF", "DAYS", "FAILURES", "AVOIDED")
    shown = [one for one in found.results if not one.policy.startswith("ours") or one.policy.endswith(SHOWN)]
    common.table(header, [(one.policy, *map(_figure, one[1:])) for one in shown])
    click.echo(LEGEND)
    if not found.verdicts:
        return
    click.echo(
        f"\nVerdicts right: {found.right:.2%}; `node` verdicts that name the right node: {_figure(found.right_node)}"
    )
    rows = [(true, ", ".join(f"{said} {n}" for said, n in row.items())) for true, row in found.verdicts.items()]
    common.table(("TRUTH", "VERDICTS"), rows)
    for what, title in CALIBRATED.items():
        of = found.calibration[what]
        click.echo(f"\n{title}: expected calibration error {of.error:.3f}, Brier score {of.brier:.4f}")
        bins = [(_figure(one.said), _figure(one.true), one.number) for one in of.bins if one.number]
        common.table(("SAID", "TRUE", "N"), bins)
    if found.rungs:
        click.echo("\nRungs due on good nodes per 1000 node-days, by their evidence")
        common.table(("RUNG", "N"), [(rung, f"{value:.3f}") for rung, value in found.rungs.items()])
    click.echo()


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
