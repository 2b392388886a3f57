"""Stores as earlier versions have left them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from sqlalchemy import Connection

NEW = {3: ("qos", "reservation", "timelimit", "constraint")}
"""Version → the columns of `attempt` that came with it."""


def older(db: Connection, version: int) -> None:
    """Make the SQLite store one of an older version. Debian 11's SQLite has no ALTER TABLE DROP COLUMN."""
    gone = {name for since, names in NEW.items() if since > version for name in names}
    made = db.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'attempt'").scalar_one()
    kept = [line for line in made.splitlines() if line.split(maxsplit=1)[0].strip('"') not in gone]
    names = ", ".join(f'"{column.name}"' for column in schema.attempt.c if column.name not in gone)
    db.exec_driver_sql("ALTER TABLE attempt RENAME TO newer")
    db.exec_driver_sql("\n".join(kept))
    db.exec_driver_sql(f"INSERT INTO attempt ({names}) SELECT {names} FROM newer")  # noqa: S608 - no text of others
    db.exec_driver_sql("DROP TABLE newer")
    db.execute(schema.version.update().values(version=version))
