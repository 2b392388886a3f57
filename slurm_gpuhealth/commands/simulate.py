"""gpuhealth simulate: makes clusters with known faults, to compare policies, or as files for replay."""

from __future__ import annotations

import json
import math
from functools import partial

import click

from slurm_gpuhealth.commands import common

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from slurm_gpuhealth.simulate.cases import Case
    from slurm_gpuhealth.simulate.score import Report, Result
    from slurm_gpuhealth.simulate.worlds.score import Score as WorldScore
    from slurm_gpuhealth.simulate.worlds.score import Summary

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

WORLD = ("WORLD", "BLAMED", "WRONGED", "GPU", "BAD NODES, FOUND AFTER")
MOST_WRONGED = 3
SUM = ("SUMMARY", "WORLDS", "FOUND", "DAYS", "GPU", "WRONGED", "BLAMED", "RIGHT", "SHORT OF")
WORLDS_LEGEND = (
    "FOUND: bad nodes for which L2 or deeper was due while they were bad, or within 7 days after; DAYS: the median.\n"
    "WRONGED: good nodes for which L3 or deeper was due. BLAMED: failed jobs put down to a good node.\n"
    "GPU: nodes with a single bad GPU that was named. RIGHT: failed jobs with an accepted verdict."
)


@click.command()
@click.option("--setting", "settings", multiple=True, metavar="NAME", help="[default: base; --list names them]")
@click.option("--list", "list_them", is_flag=True, help="List the settings, and what each changes.")
@click.option("--nodes", type=click.IntRange(4, 100_000), help="[default: the setting's, 512]")
@click.option("--days", type=click.FloatRange(1, 3650), help="[default: the setting's, 60]")
@click.option("--seeds", type=click.IntRange(1, 1000), help="How many clusters; of each small world. [default: 3; 1]")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the first cluster.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Only this policy; `ours` is gpuhealth's. [default: all]",
)
@click.option("--logs", is_flag=True, help="Write job logs as text and read them, instead of giving their meaning.")
@click.option(
    "--write", metavar="FOLDER", help="Only write the first cluster, or world, to files for gpuhealth replay."
)
@click.option("--worlds", is_flag=True, help="Judge the correlator on small worlds whose truth is plain.")
@click.option("--world", "chosen_worlds", multiple=True, metavar="NAME", help="Only this small world.")
@click.option("--all", "everything", is_flag=True, help="Also a line for each world that is kept from tuning.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for each setting and policy, or world.")
def simulate(
    settings: tuple[str, ...],
    list_them: bool,
    nodes: int | None,
    days: float | None,
    seeds: int | None,
    seed: int,
    policies: tuple[str, ...],
    logs: bool,
    write: str | None,
    worlds: bool,
    chosen_worlds: tuple[str, ...],
    everything: bool,
    as_json: bool,
) -> None:
    """Compare policies that find bad nodes, on simulated clusters that are calibrated on published rates.

    Trust the order of the policies, not the absolute figures: the clusters are simulated.
    """
    if worlds or chosen_worlds:
        _worlds(chosen_worlds, list_them, seeds or 1, seed, write, everything, as_json)
        return
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
        some = range(seed, seed + (seeds or 3))
        each = partial(common.progress, what=name, total=len(some))
        found = score.run(case, some, policies or score.POLICIES, logs, each)
        if as_json:
            _show_json(name, found)
        else:
            _show(name, case, found)


def _worlds(
    names: Sequence[str], list_them: bool, seeds: int, seed: int, write: str | None, everything: bool, as_json: bool
) -> None:
    from slurm_gpuhealth.simulate.worlds import score
    from slurm_gpuhealth.simulate.worlds import write as writer
    from slurm_gpuhealth.simulate.worlds.every import ALL, build

    _known("world", names, ALL)
    if list_them:
        listed = [
            (one.name, one.group, one.family, one.about) for one in ALL.values() if everything or one.group == "tune"
        ]
        common.table(("WORLD", "GROUP", "FAMILY", "WHAT"), listed)
        return
    if write:
        try:
            writer.write(build(next(iter(names or ALL)), seed), write)
        except OSError as error:
            raise click.ClickException(f"{write} can't be written: {error.strerror}") from None
        return
    chosen = list(names or ALL)
    each = partial(common.progress, what="worlds", total=len(chosen) * seeds)
    scores = score.run(chosen, range(seed, seed + seeds), each)
    shown = [one for one in scores if everything or names or ALL[one.name].group == "tune"]
    sums = {f"family {family}": score.summary(some) for family, some in _by(shown, lambda one: ALL[one.name].family)}
    sums |= {f"group {group}": score.summary(some) for group, some in _by(scores, lambda one: ALL[one.name].group)}
    sums["all"] = score.summary(scores)
    if as_json:
        for one in shown:
            click.echo(json.dumps({**one._asdict(), "verdicts": _by_truth(one.verdicts)}))
        for what, total in sums.items():
            told = {"summary": what, **total._asdict(), "days": _known_or_null(total.days), "short": total.short()}
            click.echo(json.dumps({**told, "verdicts": _by_truth(total.verdicts)}))
        return
    common.table(WORLD, [_world_row(one) for one in shown])
    click.echo()
    common.table(SUM, [_sum_row(what, one) for what, one in sums.items()])
    click.echo(WORLDS_LEGEND)
    for what, total in sums.items():
        if not what.startswith("family"):
            click.echo(f"\n{what}: true cause, and the last verdicts")
            common.table(("TRUTH", "VERDICTS"), [(true, _told(row)) for true, row in _by_truth(total.verdicts).items()])


def _by(scores: Iterable[WorldScore], what: Callable[[WorldScore], str]) -> Iterable[tuple[str, list[WorldScore]]]:
    groups: dict[str, list[WorldScore]] = {}
    for one in scores:
        groups.setdefault(what(one), []).append(one)
    return groups.items()


def _world_row(one: WorldScore) -> tuple[object, ...]:
    bad = ", ".join(f"{node}: {'not found' if days is None else f'{days:.0f} d'}" for node, days in one.bad.items())
    wronged = [f"{node} {rung}" for node, rung in sorted(one.wronged.items())]
    wronged[MOST_WRONGED:] = [f"{len(wronged) - MOST_WRONGED} more"] if len(wronged) > MOST_WRONGED else []
    gpus = f"{sum(one.gpus.values())}/{len(one.gpus)}" if one.gpus else "-"
    return one.name, f"{one.blamed}/{one.failed}", ", ".join(wronged) or "-", gpus, bad or "-"


def _sum_row(what: str, one: Summary) -> tuple[object, ...]:
    found = f"{one.found}/{one.bad} ({one.deep} at L3)"
    blamed = f"{one.blamed}/{one.failed} = {one.blamed / one.failed:.2%}"
    gpus, right = f"{one.gpus_right}/{one.gpus}", f"{one.right / one.failed:.2%}"
    short = "-" if what.startswith("family") else ", ".join(one.short()) or "-"
    return what, one.worlds, found, _figure(one.days), gpus, one.wronged, blamed, right, short


def _by_truth(verdicts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    rows: dict[str, dict[str, int]] = {}
    for (true, said), number in sorted(verdicts.items()):
        rows.setdefault(true, {})[said] = number
    return rows


def _told(said: Mapping[str, int]) -> str:
    return ", ".join(f"{verdict} {number}" for verdict, number in said.items())


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
    common.table(("TRUTH", "VERDICTS"), [(true, _told(row)) for true, row in found.verdicts.items()])
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
