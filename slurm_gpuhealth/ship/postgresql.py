"""Inserts a node's records into PostgreSQL's table `inbox`. Only with psycopg, and only in the child: imports cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psycopg

from slurm_gpuhealth.ship.line import lines

if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ship.line import Record

# Without a conflict target: with one the role would need SELECT too (PostgreSQL's manual, INSERT).
INSERT = "INSERT INTO inbox (node, journal, seq, line) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"


def insert(settings: Settings, node: str, batch: list[Record]) -> int:
    """See `ship.write`. Raises OSError in PostgreSQL's words."""
    try:
        with connect(settings, node) as db:
            before = time.time()
            there = db.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
            made = lines(batch, before, there[0] if there else before, time.time())
            rows = [
                # The head has the number of its last record, and would collide with it: so it is negative.
                (node, one["journal"], -one["seq"] if one["kind"] == "ship" else one["seq"], line.decode())
                for one, line in zip(batch, made)
            ]
            db.cursor().executemany(INSERT, rows)
    except psycopg.Error as error:
        raise OSError(f"PostgreSQL: {' '.join(str(error).split())}") from None
    return 0


def connect(settings: Settings, node: str) -> psycopg.Connection[tuple[Any, ...]]:
    store = settings.store
    options: dict[str, Any] = {
        "connect_timeout": max(2, int(store.timeout)),  # libpq treats 1 as 2
        "options": f"-c statement_timeout={store.timeout * 1000:.0f}",
        "application_name": f"gpuhealth {node}",
    }
    if store.password_file:
        options["passfile"] = store.password_file
    return psycopg.connect(store.url, **options)
