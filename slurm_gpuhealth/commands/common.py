"""What the commands that an admin types have in common: opening the node's journal, tables, times."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, TypeVar

    from sqlalchemy import Connection

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal

    Item = TypeVar("Item")

COLUMNS = (
    "id, time, seen, source, code, severity, rung, mode, uuid, pci, gpu, serial, message, standing, count, details,"
    " job, uid, cleared, acted"
)

COLOURS = {"fault": "red", "FAIL": "red", "fail": "red", "SILENT": "red", "warning": "yellow", "warn": "yellow"}
LAST, LEAST = 16, 2
"""Characters that a table's last column, and any column, keeps on a narrow terminal."""
RECENT = 7 * 86400.0
"""Seconds for which an event counts, an Xid for example; a condition counts while it stands."""
SLOW, DRAWS = 2.0, 0.2
"""Seconds after which a bar shows the progress, and between two drawings of it."""
MOST = 65536
"""The most nodes of a host list, as Slurm's MAX_SLURM_NODES."""


def settings_of(node: str) -> Settings:
    """The configuration. If it is broken: a click error that names each problem."""
    from slurm_gpuhealth.config.load import load
    from slurm_gpuhealth.config.settings import ConfigError

    try:
        return load(node=node)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


def open_node(node: str) -> tuple[Settings, Journal]:
    """Settings and journal of this node; a click error when it has no journal that we may read."""
    from slurm_gpuhealth.node.journal import open_journal

    settings = settings_of(node)
    if not os.access(settings.paths.state, os.R_OK | os.X_OK) and not os.path.exists(settings.paths.run):
        raise click.ClickException(
            f"no readable journal in {settings.paths.state}: run this as root on the node, after its first health check"
            " (if Slurm has another name for this host: gpuhealth --node NAME); or ask the cluster's record: -w NODE"
        )
    return settings, open_journal(settings.paths)


def hosts(settings: Settings, text: str) -> list[str]:
    """The nodes of a host list, each once; a click error if it is none.

    ClusterShell reads it (`n[1-32]!n7`, `@rack3`); where it is not installed, Slurm does.
    """
    from slurm_gpuhealth.slurm import control
    from slurm_gpuhealth.slurm.reason import WORD

    if text and WORD.issuperset(text) and text[0] != "-":
        return [text]
    ranges = re.findall(r"(\d{1,9})-(\d+)", text)  # ClusterShell would make a set of a billion
    if any(len(high) > 9 or int(high) - int(low) >= MOST for low, high in ranges):
        raise click.BadParameter(f"{text!r} is not a host list of 1 to {MOST} nodes")
    try:
        from ClusterShell.NodeSet import NodeSet, NodeSetException  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        if set(text) & set("@!&^*/") or text.startswith("-"):
            raise click.BadParameter(f"{text!r}: only 'n[1-32,40]' is known here; ClusterShell knows more") from None
        try:
            names = control.hostnames(settings.slurm, text)
        except control.SlurmError as error:
            raise click.BadParameter(str(error)) from None
    else:
        try:
            found = NodeSet(text)
        except NodeSetException as error:
            raise click.BadParameter(f"{text!r} is no host list: {error}") from None
        names = list(found) if len(found) <= MOST else []
    if not 0 < len(names) <= MOST or not all(WORD.issuperset(one) and one[0] != "-" for one in names):
        raise click.BadParameter(f"{text!r} is not a host list of 1 to {MOST} nodes")
    return names


def fold(names: Iterable[str]) -> str:
    """`n1`, `n2`, `n3` → `n[1-3]`; with commas where ClusterShell is not installed."""
    try:
        from ClusterShell.NodeSet import NodeSet
    except ModuleNotFoundError:
        return ",".join(names)
    return str(NodeSet.fromlist(list(names)))


def is_here(settings: Settings, node: str, names: Sequence[str]) -> bool:
    """Whether `names` (of -w) is about this node alone, whose journal is here: the truth is there."""
    return not names or (list(names) == [node] and os.path.exists(os.path.join(settings.paths.state, "journal.db")))


def own_journal(settings: Settings) -> Journal | None:
    """This host's journal, if we are root and there is one."""
    from slurm_gpuhealth.node.journal import open_journal

    there = os.path.join(settings.paths.state, "journal.db")
    return open_journal(settings.paths) if os.geteuid() == 0 and os.path.exists(there) else None


@contextlib.contextmanager
def store(node: str) -> Iterator[Connection]:
    """The cluster's record, opened for reading; a click error if there is none or we may not read it."""
    from sqlalchemy.exc import SQLAlchemyError

    from slurm_gpuhealth.store import open as opening

    settings = settings_of(node)
    if not settings.store.url.startswith("postgresql:") and not os.path.exists(settings.store.database):
        raise click.ClickException(
            f"no readable cluster record in {settings.store.database}: run this as root on the controller, once"
            " gpuhealth correlate has run there"
        )
    try:
        with opening.reading(opening.open_store(settings)) as db:
            yield db
    except opening.StoreError as error:
        raise click.ClickException(str(error)) from None
    except SQLAlchemyError as error:
        raise click.ClickException(f"the cluster's record: {getattr(error, 'orig', None) or error}") from None


def may_read(node: str) -> Callable[[str], bool]:
    """Tells whose logs the caller may see: root and Slurm's operators all, others their own. sudo names the caller."""
    from slurm_gpuhealth import child

    asks = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    if asks in (None, "root"):
        return lambda _: True
    settings = settings_of(node)
    done = child.run(
        [settings.accounting.sacctmgr, "-n", "-P", "show", "user", asks, "format=AdminLevel"],
        timeout=settings.slurm.timeout,
        env={"SLURM_CONF": settings.slurm.conf},
    )
    every = done.rc == 0 and done.stdout.strip() in (b"Operator", b"Administrator")
    return lambda user: every or user == asks


def findings(journal: Journal, where: str, *values: Any) -> list[dict[str, Any]]:
    """Rows of the finding table as JSON has them, newest first. `where` is our own SQL, `values` its parameters."""
    names = [name.strip() for name in COLUMNS.split(",")]
    rows = journal.rows(f"SELECT {COLUMNS} FROM finding WHERE {where} ORDER BY seen DESC, id DESC", *values)  # noqa: S608
    found = [dict(zip(names, row)) for row in rows]
    for one in found:
        one["details"] = json.loads(one["details"])
        one["standing"] = bool(one["standing"])
        if one["acted"]:
            row = journal.one("SELECT action, result FROM decision WHERE id = ?", one["acted"])
            one["decision"] = dict(zip(("action", "result"), row)) if row else None
    return found


def show_findings(found: Sequence[dict[str, Any]]) -> None:
    """With a column NODE if they are of the cluster's record."""
    of_nodes = ("NODE",) if found and "node" in found[0] else ()
    table(
        (*of_nodes, "TIME (UTC)", "SEVERITY", "MODE", "FINDING", "GPU", "N", "MESSAGE"),
        [
            (
                *(one["node"] for _ in of_nodes),
                utc(one["time"]),
                one["severity"] + (" mended" if one["cleared"] else ""),
                one["mode"],
                f"{one['source']}:{one['code']}",
                "-" if one["gpu"] is None else one["gpu"],
                one["count"],
                one["message"],
            )
            for one in found
        ],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell. On a terminal they are cut to fit, and words of COLOURS have a colour."""
    cells = [[safe(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    terminal = sys.stdout.isatty()
    if terminal:
        widths = fit(widths, shutil.get_terminal_size().columns)
    colours = {} if not terminal or os.environ.get("NO_COLOR") else COLOURS
    for row in cells:
        shown = [cell if len(cell) <= width else f"{cell[: width - 1]}…" for cell, width in zip(row, widths)]
        padded = [*map(str.ljust, shown[:-1], widths), shown[-1]]
        click.echo("  ".join(_coloured(one, colours.get(one.partition(" ")[0])) for one in padded))


def _coloured(text: str, colour: str | None) -> str:
    return click.style(text, fg=colour) if colour else text


def fit(widths: Sequence[int], room: int) -> list[int]:
    """Widths that fit into `room`: the last column, which is text, gives way first, then the widest."""
    fitted = list(widths)
    over = sum(fitted) + 2 * (len(fitted) - 1) - room
    fitted[-1] = max(min(fitted[-1], LAST), fitted[-1] - max(0, over))
    while sum(fitted) + 2 * (len(fitted) - 1) > room and max(fitted) > LEAST:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The items. After 2 s with a bar on a terminal's stderr, if rich is installed (the extra `controller`).

    It draws only when an item comes, without a thread: our programs fork.
    """
    bar, began, drawn = None, time.monotonic(), 0.0
    try:
        for done, item in enumerate(items, 1):
            yield item
            now = time.monotonic()
            if now - began < SLOW or now - drawn < DRAWS or not sys.stderr.isatty():
                continue
            if bar is None:
                bar, task = _bar(what, total)
            if bar is None:
                drawn = float("inf")
            else:
                drawn = now
                bar.update(task, completed=done, refresh=True)
    finally:
        if bar is not None:
            bar.stop()


def _bar(what: str, total: int | None) -> tuple[Any, Any]:
    """A bar, begun, and its task; (None, None) without rich."""
    from importlib import import_module

    try:
        rich, console = import_module("rich.progress"), import_module("rich.console").Console(stderr=True)
    except ModuleNotFoundError:
        return None, None
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
    bar = rich.Progress(*columns, rich.TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)
    bar.start()
    return bar, bar.add_task(what, total=total)


def safe(text: str) -> str:
    """`text` with `?` for each control character: reasons and names are written by others."""
    return "".join(c if c.isprintable() else "?" for c in text)


def utc(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when))


def ago(now: float, then: float) -> str:
    """`5 min ago`, in the largest unit that fits."""
    age = max(0, int(now - then))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * size:
            return f"{age // size} {unit} ago"
    return f"{age} s ago"
