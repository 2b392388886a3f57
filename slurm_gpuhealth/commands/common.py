"""What the commands that an admin types have in common: opening the node's journal, tables, times."""

from __future__ import annotations

import contextlib
import json
import os
import time

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

    from sqlalchemy import Connection

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal

COLUMNS = (
    "id, time, seen, source, code, severity, rung, mode, uuid, pci, gpu, serial, message, standing, count, details,"
    " job, uid, cleared, acted"
)


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
            " (if Slurm has another name for this host: gpuhealth --node NAME)"
        )
    return settings, open_journal(settings.paths)


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


def show_findings(found: Iterable[dict[str, Any]]) -> None:
    table(
        ("TIME (UTC)", "SEVERITY", "MODE", "FINDING", "GPU", "N", "MESSAGE"),
        [
            (
                *(utc(one["time"]), one["severity"] + (" mended" if one["cleared"] else ""), one["mode"]),
                *(f"{one['source']}:{one['code']}", "-" if one["gpu"] is None else one["gpu"], one["count"]),
                one["message"],
            )
            for one in found
        ],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; the last one is not padded."""
    cells = [[safe(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header) - 1)]
    for row in cells:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]))


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
