"""gpuhealth import: writes files for `gpuhealth replay` from accounting, and the cluster's record if there is one.

Only root may read the files: JOBS has the names of users and jobs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from typing import TYPE_CHECKING, Any

import click

from slurm_gpuhealth.commands import common, dates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TextIO

    from sqlalchemy import Connection

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.outcomes import Attempt, Event

    Hide = Callable[[str], str]

HARMLESS = frozenset({"level", "passed", "gpus", "until", "count", "pci"})
"""The details of an event that --anonymous keeps; others may name people and programs."""

HIDDEN = ("user", "account", "submit", "partition", "qos", "reservation")
"""Partitions and QOS are often called after the group that owns them; a constraint names what nodes have."""

LETTERS = str.maketrans("0123456789", "ghijklmnop")
"""A hash has letters only: the correlator ignores digits in a job's name, and would take two hashes for one name."""


@click.command("import")
@click.option("--jobs", metavar="FILE", required=True, help="Where to write how jobs ended.")
@click.option("--events", metavar="FILE", required=True, help="Where to write what happened to nodes.")
@click.option("--topology", metavar="FILE", help="Where to write which nodes share a leaf switch.")
@click.option("--since", metavar="WHEN", default="28d", show_default=True, callback=dates.moment, help=dates.SINCE)
@click.option("--anonymous", is_flag=True, help="Hash users, accounts and names; leave out logs and admins' reasons.")
@click.pass_obj
def import_(node: str, jobs: str, events: str, topology: str | None, since: float, anonymous: bool) -> None:
    """Write past jobs and events to files for gpuhealth replay, to try thresholds on your own history.

    They come from sacct and sacctmgr. If there is a cluster record, it adds each job's GPUs, true exit codes and log
    reading, and the nodes' findings and tests. A file is replaced only when the new one is complete.
    """
    from slurm_gpuhealth.slurm.control import SlurmError

    settings, now = common.settings_of(node), time.time()
    salt = secrets.token_bytes(16)

    def hide(text: str) -> str:
        hashed = hashlib.blake2b(text.encode("utf-8", "replace"), key=salt, digest_size=6).hexdigest() if text else ""
        return hashed.translate(LETTERS)

    with contextlib.ExitStack() as stack:
        db = stack.enter_context(common.store(node)) if _has_store(settings) else None
        try:
            ended = _write(
                jobs,
                (
                    _job(one, hide if anonymous else None)
                    for one in common.progress(_attempts(settings, db, now, since), "jobs")
                ),
            )
            seen = _write(events, (_event(one, hide if anonymous else None) for one in _seen(settings, db, now, since)))
            leaves = _write_topology(settings, topology) if topology else ""
        except (SlurmError, OSError) as error:
            raise click.ClickException(str(error)) from None
    source = "accounting and the cluster's record" if db else "accounting alone: no GPUs, findings or logs"
    click.echo(f"{ended} attempts, {seen} events{leaves}, from {source}")


def _attempts(settings: Settings, db: Connection | None, now: float, since: float) -> Iterator[Attempt]:
    from slurm_gpuhealth.controller import accounting

    attempts = (one.attempt for one in accounting.finished(settings, since, now))
    return accounting.join(db, attempts) if db else attempts


def _seen(settings: Settings, db: Connection | None, now: float, since: float) -> Iterator[Event]:
    from slurm_gpuhealth.controller import accounting
    from slurm_gpuhealth.store import query

    yield from accounting.outside(settings, since, now)
    if db:
        yield from (one for one in query.events(db, now=now)[1] if one.time >= since)


def _job(one: Attempt, hide: Hide | None) -> dict[str, Any]:
    """A line of JOBS."""
    row = one._asdict()
    reading = row.pop("reading")
    if reading:
        row["log_class"] = row["log_class"] or reading.kind or None
        lines = [cited.text for cited in (reading.cause, *reading.collateral) if cited]
        row["log"] = row["log"] or "\n".join(lines) or None
    if hide:
        row |= {name: hide(row[name]) for name in HIDDEN}
        row["name"] = hide(re.sub(r"\d+", "#", row["name"]))
        row["log"] = None
    return row


def _event(one: Event, hide: Hide | None) -> dict[str, Any]:
    """A line of EVENTS."""
    from slurm_gpuhealth.slurm.reason import is_slurms

    row = one._asdict()
    if hide:
        detail = {name: value for name, value in one.detail.items() if name in HARMLESS}
        reason, user = str(one.detail.get("reason", "")), str(one.detail.get("user", ""))
        detail |= {"reason": reason} if is_slurms(reason) else {}
        row["detail"] = detail | ({"user": user if user in ("root", "slurm") else hide(user)} if user else {})
    return row


def _write_topology(settings: Settings, path: str) -> str:
    from slurm_gpuhealth.slurm.topology import leaves

    found = leaves(settings)
    _write(path, [found])
    return f", {len(found)} leaves"


def _write(path: str, rows: Iterable[dict[str, Any]]) -> int:
    """Write one object a line; returns how many."""
    count = 0
    with _replaced(path) as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            count += 1
    return count


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[TextIO]:
    """A file that replaces `path` once it is complete. Raises OSError."""
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=folder)  # mode 0600
    try:
        with open(handle, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _has_store(settings: Settings) -> bool:
    return settings.store.url.startswith("postgresql:") or os.path.exists(settings.store.database)
