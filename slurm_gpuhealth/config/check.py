"""Checks a configuration's text key by key against `settings.py`: every error with its line, and what would be right.

It is slow (TOML, regular expressions), so it runs only when the file has changed, and for `gpuhealth config`.
"""

from __future__ import annotations

import difflib
import re
import sys

from slurm_gpuhealth.config.kinds import CHECKS, Wrong, compare, scalar
from slurm_gpuhealth.config.settings import POLICY_PATH, ROWS, TOOLS_PATH, ConfigError, Problem, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Path = tuple[str | int, ...]
    """A place in the document: ("check", "command", 0, "argv")."""
    Report = Callable[[Path, str], None]

SIZE_LIMIT = 1 << 20


def parse(path: str) -> dict[str, Any]:
    """The checked content of `path`, with the built-in rows after the site's; raises ConfigError."""
    data, _ = _checked(path)
    tools = _checked(TOOLS_PATH)[0]
    return {
        **data,
        "policy": data.get("policy", ()) + built_in(),
        "test": tests(data.get("test", ()), tools["test"]),
        "limit": data.get("limit", ()) + tools["limit"],
    }


def built_in() -> tuple[dict[str, Any], ...]:
    """The rows of the built-in policy."""
    rows: tuple[dict[str, Any], ...] = _checked(POLICY_PATH)[0]["policy"]
    return rows


def tests(own: tuple[dict[str, Any], ...], known: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The site's rows, then the built-in ones. A row with a built-in row's name replaces the keys that it gives."""
    named = {row["name"]: row for row in known}
    return tuple({**named.get(row["name"], {}), **row} for row in own) + known


def parse_with_lines(path: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """The checked content of `path` alone, and the line of each of its keys; raises ConfigError."""
    data, text = _checked(path)
    return data, line_numbers(text)


def _checked(path: str) -> tuple[dict[str, Any], str]:
    """The checked content of `path` alone, and its text; raises ConfigError."""
    text = _read(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at ")
        found = re.match(r"line (\d+)", place)
        line = int(found[1]) if found else text.count("\n") + 1
        raise ConfigError([Problem(path, line, "", f"not TOML: {message}")]) from None
    wrong: list[tuple[Path, str]] = []
    data = _table(Settings, document, (), lambda where, message: wrong.append((where, message)))
    if not wrong:
        wrong = list(compare(data))
    if wrong:
        lines = line_numbers(text)  # dear: a long array is parsed anew for each of its lines
        problems = [Problem(path, line_of(lines, where), dotted(where), message) for where, message in wrong]
        raise ConfigError(sorted(problems, key=lambda one: one.line))
    return data, text


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise ConfigError([Problem(path, 0, "", f"can't be read: {error.strerror}")]) from None
    if len(raw) > SIZE_LIMIT:
        raise ConfigError([Problem(path, 0, "", "is larger than 1 MiB, too large for a configuration")])
    try:
        return raw.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(path, line, "", "not TOML: a byte that is not UTF-8")]) from None


def dotted(where: Path) -> str:
    """`check.command[0].argv`, as people write a place in the document."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in where).lstrip(".")


def line_of(lines: dict[Path, int], where: Path) -> int:
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where, 0)


def line_numbers(text: str) -> dict[Path, int]:
    """The line on which each key, table and row of a valid document begins.

    tomllib does not give it, but it tells whether a piece of text is complete: lines are added until it parses.
    """
    lines: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    chunk, begin = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        chunk += line + "\n"
        try:
            piece = tomllib.loads(chunk)
        except tomllib.TOMLDecodeError:
            continue
        found = tuple(_paths(piece))
        if chunk.lstrip().startswith("["):
            table = _header(found[-1], counts)
            lines.setdefault(table, begin)
        for one in found:
            lines.setdefault(table + one, begin)
        chunk, begin = "", number + 1
    return lines


def _paths(piece: dict[str, Any]) -> Iterator[Path]:
    for key, value in piece.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in _paths(value))
        elif isinstance(value, list) and value == [{}]:
            yield (key, 0)


def _header(found: Path, counts: dict[Path, int]) -> Path:
    """The place that a header opens: `[[policy]]`, seen for the third time, is ("policy", 2)."""
    place: Path = ()
    for key in found:
        if key == 0:
            counts[place] = counts.get(place, -1) + 1
        else:
            place = (*place, counts[place]) if place in counts else place
            place = (*place, key)
    return (*place, counts[place]) if place in counts else place


def _table(cls: type, document: dict[str, Any], where: Path, report: Report) -> dict[str, Any]:
    """The keys of `document` as fields of `cls`; wrong ones are reported and left out."""
    values = {}
    for key, value in document.items():
        here = (*where, key)
        kind = cls.__annotations__.get(key)
        if kind is None:
            report(here, _unknown(key, cls))
            continue
        try:
            values[key] = _value(cls, key, kind, value, here, report)
            check = CHECKS.get((cls.__name__, key))
            for each in values[key] if isinstance(values[key], tuple) else (values[key],):
                if check:
                    check(each)
        except Wrong as error:
            report(here, f"expected {error}, not {_shown(value)}")
    for key in cls.__annotations__:
        if key not in cls.__dict__ and key not in document:
            report((*where, key), "missing; this table needs it")
    return values


def _value(cls: type, key: str, kind: str, value: Any, here: Path, report: Report) -> Any:
    default = cls.__dict__.get(key)
    if hasattr(default, "__dict__"):  # a table
        if not isinstance(value, dict):
            raise Wrong(f"a table, [{dotted(here)}]")
        return _table(type(default), value, here, report)
    if kind in ROWS:
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise Wrong(f"tables, [[{dotted(here)}]]")
        return tuple(_table(ROWS[kind], one, (*here, index), report) for index, one in enumerate(value))
    if kind.startswith("tuple["):
        if not isinstance(value, list):
            raise Wrong('a list, ["...", "..."]')
        return tuple(scalar(kind[6:].partition(",")[0], one) for one in value)
    if (kind, value) in (("File", ""), ("Argv", [])) and not default:
        return default
    return scalar(kind, value)


def _unknown(key: str, cls: type) -> str:
    near = difflib.get_close_matches(key, cls.__annotations__, 1)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    for table in Settings.__annotations__:
        if key in getattr(type(getattr(Settings, table)), "__annotations__", ()):
            return f"unknown key here; it belongs into [{table}]"
    return f"unknown key; known here: {', '.join(cls.__annotations__)}"


def _shown(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
