"""Opens the cluster's record, SQLite on the controller or PostgreSQL; creates or upgrades it first."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import sqlalchemy
from sqlalchemy import event, select
from sqlalchemy.exc import SQLAlchemyError

from slurm_gpuhealth.store import schema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from sqlalchemy import Connection, Engine

    from slurm_gpuhealth.config.settings import Settings

LOCK = 0x67707568
"""PostgreSQL's advisory lock for programs that take records in or migrate: one at a time."""
ALONE = LOCK + 1
"""The lock for programs that judge and act."""
LONGEST = 600.0
"""Seconds that one statement may take on the controller."""


class StoreError(Exception):
    """The record can't be used; the text says why, and what to do."""


def open_store(settings: Settings) -> Engine:
    """The record that `store.url` names; without a url, SQLite in `store.database`. Raises StoreError.

    `with engine.begin() as db:` is one transaction; on SQLite, no other writes meanwhile. `reading(engine)` only reads,
    and does not block writers.
    """
    engine = _postgresql(settings) if settings.store.url.startswith("postgresql:") else _sqlite(settings)
    try:
        _migrate(engine)
    except SQLAlchemyError as error:
        engine.dispose()
        where = settings.store.database if engine.dialect.name == "sqlite" else safe_url(settings.store.url)
        raise StoreError(f"the cluster's record in {where}: {getattr(error, 'orig', None) or error}") from None
    except StoreError:
        engine.dispose()
        raise
    return engine


def reading(engine: Engine) -> Connection:
    """A connection only for SELECT; on SQLite it blocks no writer."""
    return engine.connect().execution_options(gpuhealth_reading=True)


def safe_url(url: str) -> str:
    """The url without a password."""
    return sqlalchemy.make_url(url).render_as_string(hide_password=True)


def _sqlite(settings: Settings) -> Engine:
    path = settings.store.database
    try:
        _make_private(path)
    except OSError as error:
        raise StoreError(f"the cluster's record in {path}: {error}") from None
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", connect_args={"timeout": 60, "isolation_level": None})

    @event.listens_for(engine, "connect")
    def prepare(db: Any, _: object) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        # FULL: records that are taken in are removed from the shared directory, so a power cut must not lose them.
        db.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # IMMEDIATE: otherwise a transaction that reads first must start again if another one writes in between.
        only_reads = db.get_execution_options().get("gpuhealth_reading")
        db.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")

    return engine


def _make_private(path: str) -> None:
    """Only we may read the file. Its folder may be shared (/var/lib), and is not changed. Raises OSError."""
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o700, exist_ok=True)
    found = os.stat(folder)
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise PermissionError(
            1, "others can write there; set store.database to a file in a folder that belongs to root", folder
        )
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if os.stat(path).st_mode & 0o077:
            os.chmod(path, 0o600)


def _postgresql(settings: Settings) -> Engine:
    store = settings.store
    limits = f"-c statement_timeout={LONGEST * 1000:.0f} -c lock_timeout={LONGEST * 1000:.0f}"
    options = {"connect_timeout": max(2, int(store.timeout)), "application_name": "gpuhealth", "options": limits}
    if store.password_file:
        options["passfile"] = store.password_file
    url = sqlalchemy.make_url(store.url).set(drivername="postgresql+psycopg")
    try:
        return sqlalchemy.create_engine(url, connect_args=options, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise StoreError(f"store.url needs {error.name}: {pip()} install 'slurm-gpuhealth[postgresql]'") from None


def pip() -> str:
    """This installation's pip: the system's pip refuses (PEP 668), or installs elsewhere."""
    return os.path.join(os.path.dirname(sys.executable), "pip")


def _migrate(engine: Engine) -> None:
    """Create what is missing, one program at a time. Raises StoreError for a newer schema than ours."""
    with reading(engine) as db:
        if sqlalchemy.inspect(db).has_table("schema_version") and _version(db) == schema.VERSION:
            return
    with engine.begin() as db:
        lock(db)
        schema.version.create(db, checkfirst=True)
        found = _version(db)
        if found > schema.VERSION:
            what = f"the cluster's record has schema {found}, but this gpuhealth knows {schema.VERSION}"
            raise StoreError(f"{what}: a newer gpuhealth has written it; install that version here too")
        for statement in _steps(found):
            db.exec_driver_sql(statement)
        schema.metadata.create_all(db)
        db.execute(schema.version.delete())
        db.execute(schema.version.insert().values(version=schema.VERSION))


def lock(db: Connection) -> None:
    """Be the only program that takes in or migrates, until this transaction ends. On SQLite any writer is alone."""
    if db.dialect.name == "postgresql":
        db.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")


@contextlib.contextmanager
def alone(engine: Engine) -> Iterator[bool]:
    """Whether no other program on any host judges and acts, until the end. SQLite is on one host, which has a lock."""
    if engine.dialect.name != "postgresql":
        yield True
        return
    with engine.connect() as db:
        db.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        yield bool(db.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({ALONE})").scalar())


def _version(db: Connection) -> int:
    """0: a new one."""
    return int(db.execute(select(schema.version.c.version)).scalar() or 0)


def _steps(found: int) -> Iterator[str]:
    for version, statements in sorted(schema.MIGRATIONS.items()):
        if 0 < found < version:
            yield from statements
