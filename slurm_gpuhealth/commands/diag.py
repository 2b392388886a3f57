"""gpuhealth diag: what the output of `dcgmi diag` means, and which tests DCGM runs on this node's GPUs."""

from __future__ import annotations

import sys

import click

from slurm_gpuhealth.frozen import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    from slurm_gpuhealth.diagnose.model import Diagnosis, Error
    from slurm_gpuhealth.diagnose.models import Level

LIMIT = 16 << 20


@click.group()
def diag() -> None:
    """Read the output of dcgmi diag; say which tests run on this node."""


@diag.command()
@click.argument("file", type=click.File("rb"), required=False)
@click.option("--gpu", metavar="MODEL", help="With FILE: the GPU model, as nvidia-smi -L names it, for [[dcgm.model]].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def plan(node: str, file: BinaryIO | None, gpu: str | None, as_json: bool) -> None:
    """Show which tests DCGM runs at each level on this node's GPUs, which it does not run, and why.

    It reads the node's last runs, or FILE (`-`: standard input): the output of `dcgmi diag -r 4 -j`, run with the -c or
    -p that [dcgm] has. Exit 1 if a level can't pass.
    """
    from slurm_gpuhealth.commands.common import open_node, settings_of
    from slurm_gpuhealth.diagnose import models
    from slurm_gpuhealth.diagnose.parse import parse
    from slurm_gpuhealth.doctor.look import model_of

    if file:
        dcgm = settings_of(node).dcgm
        diagnosis = replace(parse(file.read(LIMIT)), model=gpu or "")
        shown = models.seen(diagnosis, dcgm)
        if not shown:
            raise click.ClickException(f"no result of a diagnostic: {diagnosis.message}")
        runs = {str(diagnosis.level or 1): shown}
    else:
        settings, journal = open_node(node)
        dcgm, gpu, runs = settings.dcgm, model_of(journal), journal.get("levels", {})
    levels = list(models.plan(runs, models.settings_for(dcgm, gpu or "")))
    troubles = models.expected(dcgm, gpu or "", None, runs)
    if as_json:
        import json

        told = [{**level.__dict__, "can_pass": level.tests if level.known else None} for level in levels]
        known = [{"trouble": row.words, "remedy": row.remedy} for row in troubles]
        click.echo(json.dumps({"gpu": gpu or None, "levels": told, "known_trouble": known}))
    else:
        click.echo("\n".join(line for level in levels for line in _level(level, gpu or "")))
        for row in troubles:
            click.echo(f"known trouble: {row.words}\n    {row.remedy}")
    raise SystemExit(0 if all(level.tests or not level.known for level in levels) else 1)


def _level(level: Level, gpu: str) -> Iterator[str]:
    from slurm_gpuhealth.diagnose import models

    if not level.known:
        yield f"level {level.level}: not known before its first run"
        return
    yield f"level {level.level}: {'can pass' if level.tests else 'CAN NOT PASS, and ends as untested'}"
    yield f"    runs: {', '.join(level.runs) or 'nothing'}"
    if level.left_out:
        yield f"    not for this model: {', '.join(level.left_out)}"
    for name, why in (*level.cannot, *level.without):
        yield f"    does not run: {name}: {why}"
    if not level.tests:
        yield f"    {models.remedy(level, gpu)}"


@diag.command()
@click.argument("file", type=click.File("rb"))
@click.option("--exit-code", type=int, metavar="N", help="dcgmi's exit code, if known: 205 means an ISOLATE error.")
@click.option(
    "--level", type=click.IntRange(1, 4), help="The run level that was asked for: a missing test then does not pass."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; its keys stay the same.")
def show(file: BinaryIO, exit_code: int | None, level: int | None, as_json: bool) -> None:
    """Show what a diagnostic found. FILE (`-`: standard input): the output of dcgmi diag, DCGM 2 to 4, best with -j."""
    from slurm_gpuhealth.diagnose.parse import parse

    diagnosis = parse(file.read(LIMIT), exit_code, level)
    if as_json:
        import json

        json.dump(as_dict(diagnosis), sys.stdout)
        click.echo()
    else:
        click.echo("\n".join(_text(diagnosis)))


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """The stable form that other tools rely on: these keys and no others."""
    return {
        "outcome": diagnosis.outcome,
        "level": diagnosis.level,
        "dcgm_version": diagnosis.dcgm_version,
        "gpus": [
            {
                "entity_id": gpu.entity_id,
                "uuid": gpu.uuid,
                "serial": gpu.serial,
                "outcome": gpu.outcome,
                "errors": [_error(error) for error in gpu.errors],
            }
            for gpu in diagnosis.gpus
        ],
        "tests": [
            {"name": test.name, "outcome": test.outcome, "errors": [_error(error) for error in test.errors]}
            for test in diagnosis.tests
        ],
        "next": diagnosis.next,
        "advice": diagnosis.advice,
    }


def _error(error: Error) -> dict[str, Any]:
    return {"test": error.test, "id": error.id, "name": error.name, "class": error.cls, "message": error.message}


def _text(diagnosis: Diagnosis) -> Iterator[str]:
    told = [f"DCGM {diagnosis.dcgm_version}"] if diagnosis.dcgm_version else []
    told += [f"level {diagnosis.level}"] if diagnosis.level else []
    yield f"{diagnosis.outcome}: {diagnosis.message}" + (f"  ({', '.join(told)})" if told else "")
    for gpu in diagnosis.gpus:
        serial = f"  serial {gpu.serial}" if gpu.serial else ""
        yield f"  GPU {gpu.entity_id}  {gpu.outcome}{serial}"
        yield from map(_line, gpu.errors)
    for test in diagnosis.tests:
        if test.errors:
            yield f"  the node, {test.name}"
            yield from map(_line, test.errors)
    yield diagnosis.advice


def _line(error: Error) -> str:
    known = f"{error.name} ({error.id}), " if error.name else f"{error.id}, " if error.id is not None else ""
    return f"    {error.test}: {error.message} [{known}{error.cls}]"
