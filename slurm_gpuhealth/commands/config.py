"""gpuhealth config: check a configuration, show the one in force."""

from __future__ import annotations

import json
import os
import re
import sys

import click

from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.config.check import dotted, line_of, parse, parse_with_lines
from slurm_gpuhealth.config.kinds import UNITS
from slurm_gpuhealth.config.settings import ROWS, ConfigError, Problem, Row, Settings
from slurm_gpuhealth.diagnose import models
from slurm_gpuhealth.frozen import asdict
from slurm_gpuhealth.policy import rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from slurm_gpuhealth.config.check import Path


@click.group()
def config() -> None:
    """Check or show the configuration."""


@config.command()
@click.argument("file", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per problem.")
@click.pass_obj
def check(node: str | None, file: str | None, as_json: bool) -> None:
    """Say what is wrong with the configuration, or with FILE. Exit 1 if anything is."""
    path = os.path.abspath(file or configuration.config_path())
    problems = _problems(path, node)
    for problem in problems:
        click.echo(json.dumps(problem.__dict__) if as_json else str(problem))
    if problems:
        sys.exit(1)
    if not as_json:
        click.echo(f"{path}: nothing is wrong")


def _problems(path: str, node: str | None) -> list[Problem]:
    problems = [Problem(path, 0, "", one) for one in configuration.unsafe(path)] if os.path.exists(path) else []
    try:
        settings = configuration.build(parse(path), path, node)
    except ConfigError as error:
        return problems + error.problems
    _, lines = parse_with_lines(path)
    for index, command in enumerate(settings.check.command):
        where: Path = ("check", "command", index, "argv")
        problems += [
            Problem(path, line_of(lines, where), dotted(where), f"would not be run: {one}")
            for one in configuration.unsafe_command(command.argv)
        ]
    files: list[tuple[Path, str]] = [(("dcgm", "config"), settings.dcgm.config)]
    files += [(("dcgm", "model", index, "config"), row.config) for index, row in enumerate(settings.dcgm.model)]
    for place, file in files:
        # A model's file may exist only on the nodes that have this model.
        refused = models.refused(file) if len(place) == 2 or os.path.exists(file) else ""
        if refused:
            problems.append(Problem(path, line_of(lines, place), dotted(place), refused))
    return problems + rows.problems(path, settings)


@config.command()
@click.option("--changed", is_flag=True, help="Only what the file sets.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: each key, its value and its origin.")
@click.pass_obj
def show(node: str | None, changed: bool, as_json: bool) -> None:
    """Show the settings in force, and where each comes from: file and line, or the default."""
    path = os.path.abspath(configuration.config_path())
    try:
        settings = configuration.build(parse(path), path, node)
        data, lines = parse_with_lines(path)
    except ConfigError as error:
        click.echo(str(error))
        sys.exit(1)
    own = len(data.get("policy", ()))
    table = [(where, kind, value, _origin(where, lines, path, own)) for where, kind, value in _fields(settings)]
    if changed:
        table = [one for one in table if one[3] not in (DEFAULT, BUILT_IN)]
    if as_json:
        click.echo(
            json.dumps({dotted(where): {"value": plain(v), "from": origin} for where, _, v, origin in table}, indent=1)
        )
        return
    for where, kind, value, origin in table:
        click.echo(f"{dotted(where)} = {written(kind, value)}  # {origin}")


DEFAULT, BUILT_IN = "default", "built in"
PASSWORD = re.compile(r"(://[^/@:]*:)[^/@]*@")


def _fields(value: Any, where: Path = ()) -> Iterator[tuple[Path, str, Any]]:
    """Each setting as (place, kind, value); a policy row is one setting."""
    for key, kind in type(value).__annotations__.items():
        one = getattr(value, key)
        if hasattr(one, "__dict__"):
            yield from _fields(one, (*where, key))
        elif kind in ROWS:
            for index, row in enumerate(one):
                if isinstance(row, Row):
                    yield (*where, key, index), "Row", row
                else:
                    yield from _fields(row, (*where, key, index))
        else:
            yield (*where, key), kind, PASSWORD.sub(r"\1***@", one) if isinstance(one, str) else one


def _origin(where: Path, lines: dict[Path, int], path: str, own: int) -> str:
    if where[0] == "policy":
        return f"{path}:{line_of(lines, where)}" if int(where[1]) < own else BUILT_IN
    return f"{path}:{lines[where]}" if where in lines else DEFAULT


def written(kind: str, value: Any) -> str:
    """`value` as the file has it."""
    if kind == "Seconds":
        unit, size = next(((u, s) for u, s in reversed(UNITS.items()) if value and value % s == 0), ("s", 1.0))
        return f'"{value / size:g}{unit}"'
    if kind == "Share":
        return f'"{100 * value:g}%"'
    if kind == "Row":
        rest = {k: v for k, v in asdict(value).items() if v != Row.__dict__.get(k)}
        return "{ " + ", ".join(f"{k} = {written(Row.__annotations__[k], v)}" for k, v in rest.items()) + " }"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {json.dumps(plain(v), ensure_ascii=False)}" for k, v in value.items()) + " }"
    return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """`value` as JSON takes it."""
    return asdict(value) if isinstance(value, (Row, Settings)) else list(value) if isinstance(value, tuple) else value
