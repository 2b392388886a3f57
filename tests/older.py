"""Stores as earlier versions have left them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from sqlalchemy import Connection

NEW = {3: ("attempt", ("qos", "reservation", "timelimit", "constraint")), 4: ("node", schema.ABOUT)}
"""Version → the columns of a table that came with it."""
INDEXES = {4: "finding_open"}


def older(db: Connection, version: int) -> None:
    """Make the SQLite store one of an older version. Debian 11's SQLite has no ALTER TABLE DROP COLUMN."""
    for since, (table, gone) in NEW.items():
        if since > version:
            made = db.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).scalar_one()
            kept = [line for line in made.splitlines() if line.split(maxsplit=1)[0].strip('"') not in gone]
            names = ", ".join(
                f'"{column.name}"' for column in schema.metadata.tables[table].c if column.name not in gone
            )
            db.exec_driver_sql(f"ALTER TABLE {table} RENAME TO newer")
            db.exec_driver_sql("\n".join(kept))
            db.exec_driver_sql(f"INSERT INTO {table} ({names}) SELECT {names} FROM newer")  # noqa: S608 - no text of others
            db.exec_driver_sql("DROP TABLE newer")
    for since, name in INDEXES.items():
        if since > version:
            db.exec_driver_sql(f"DROP INDEX {name}")
    db.execute(schema.version.update().values(version=version))
