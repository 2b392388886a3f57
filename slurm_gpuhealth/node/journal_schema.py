"""The journal's tables by version, and the triggers that put changed rows into its outbox, for ship/outbox.py.

Imported only to make or upgrade a journal, and to ship.
"""

from __future__ import annotations

from slurm_gpuhealth.frozen import frozen

TABLES = """
CREATE TABLE state (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE finding (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, seen REAL NOT NULL, source TEXT NOT NULL, code TEXT NOT NULL,
  severity TEXT NOT NULL, rung TEXT NOT NULL, mode TEXT NOT NULL, uuid TEXT, pci TEXT, gpu INTEGER, serial TEXT,
  message TEXT NOT NULL, standing INTEGER NOT NULL, count INTEGER NOT NULL, details TEXT NOT NULL,
  job INTEGER, uid INTEGER, cleared REAL, acted INTEGER, acked REAL);
CREATE INDEX finding_time ON finding (time);
CREATE INDEX finding_key ON finding (source, code, time);
CREATE INDEX finding_open ON finding (severity) WHERE acted IS NULL AND cleared IS NULL;
CREATE TABLE job (
  job INTEGER NOT NULL, restart INTEGER NOT NULL, uid INTEGER NOT NULL, user TEXT NOT NULL, nodes INTEGER NOT NULL,
  gpus TEXT NOT NULL, started REAL NOT NULL, ended REAL, exit_code INTEGER, signal INTEGER, derived INTEGER,
  outcome TEXT, PRIMARY KEY (job, restart)) WITHOUT ROWID;
CREATE INDEX job_running ON job (ended, started);
CREATE TABLE diagnostic (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, level INTEGER NOT NULL, uuid TEXT, outcome TEXT NOT NULL,
  seconds REAL NOT NULL, program TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX diagnostic_uuid ON diagnostic (uuid, level, time);
CREATE TABLE decision (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, program TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL,
  result TEXT NOT NULL, was TEXT NOT NULL, job INTEGER);
CREATE TABLE retest (uuid TEXT PRIMARY KEY, time REAL NOT NULL, job INTEGER) WITHOUT ROWID;
"""
STEPS = """
CREATE TABLE step (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, seconds REAL, fact TEXT NOT NULL, gpu INTEGER, uuid TEXT,
  rung TEXT NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL, follows TEXT NOT NULL, test TEXT NOT NULL,
  code TEXT NOT NULL, message TEXT NOT NULL, bundle TEXT NOT NULL);
"""
OUTBOX = """
CREATE TABLE joblog (
  job INTEGER NOT NULL, restart INTEGER NOT NULL, time REAL NOT NULL, reading TEXT NOT NULL,
  PRIMARY KEY (job, restart)) WITHOUT ROWID;
CREATE TABLE outbox (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, id INTEGER NOT NULL, sub INTEGER NOT NULL,
  time REAL NOT NULL, bytes INTEGER NOT NULL);
CREATE UNIQUE INDEX outbox_row ON outbox (kind, id, sub);
"""
FIGURES = """
CREATE TABLE figure (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, tool TEXT NOT NULL, version TEXT NOT NULL, uuid TEXT, gpu INTEGER,
  model TEXT NOT NULL, name TEXT NOT NULL, value REAL NOT NULL, unit TEXT NOT NULL);
"""
USES = """
CREATE TABLE jobuse (
  job INTEGER NOT NULL, restart INTEGER NOT NULL, time REAL NOT NULL, gpus TEXT NOT NULL,
  PRIMARY KEY (job, restart)) WITHOUT ROWID;
"""
BY_VERSION = (TABLES, STEPS, OUTBOX, "", FIGURES + USES)
"""What each version added; version 4 sealed the values of `state`."""
MADE = "CAST({}time * 1e6 AS INTEGER)"
"""SQLite uses the number of a pruned row again, so a row's name includes its time."""


@frozen
class Shipped:
    """Rows of a table that go to the cluster's record. In SQL, `{}` stands before each column."""

    table: str
    id: str
    size: str
    """Text whose length counts as the row's size."""
    again: str
    """Columns whose change ships a row again."""
    sub: str = MADE
    """With `id`, what names the row."""
    time: str = "{}time"
    which: str = "1"
    """Only rows for which this is true."""
    since: int = 3
    """The version from which on the table is shipped."""


SHIPPED = {
    # Passes of level 1 are as many as jobs and say little; a condition that stands is seen again each minute.
    "finding": Shipped(
        table="finding",
        id="{}id",
        size="{}message || {}details",
        again="severity, mode, cleared, acted",
    ),
    "run": Shipped(
        table="job",
        id="{}job",
        sub="{}restart",
        time="coalesce({}ended, {}started)",
        size="{}gpus",
        again="gpus, ended, outcome",
    ),
    "diagnostic": Shipped(
        table="diagnostic",
        id="{}id",
        size="{}detail",
        which="({}level > 1 OR {}outcome IN ('fail', 'warn'))",
        again="outcome",
    ),
    "decision": Shipped(
        table="decision",
        id="{}id",
        sub="0",
        size="{}reason || {}result || {}was",
        again="action, result",
    ),
    "step": Shipped(
        table="step",
        id="{}id",
        size="{}message",
        again="outcome",
    ),
    "log": Shipped(
        table="joblog",
        id="{}job",
        sub="{}restart",
        size="{}reading",
        again="reading",
    ),
    "figure": Shipped(
        table="figure",
        id="{}id",
        size="{}name",
        again="value",
        since=5,
    ),
    "use": Shipped(
        table="jobuse",
        id="{}job",
        sub="{}restart",
        size="{}gpus",
        again="gpus",
        since=5,
    ),
}
OVERHEAD = 400
"""Bytes of a record without its long texts."""


def statements(version: int, to: int = len(BY_VERSION)) -> list[str]:
    """SQL that upgrades a journal's tables from `version` (0: an empty file) to `to`.

    `journal_sound` compares a file with this text: changed text needs a new version.
    """
    tables = "".join(BY_VERSION[version:to])
    return [one for one in tables.split(";\n") if one] + _triggers(version, to)


def _triggers(version: int, to: int) -> list[str]:
    """A new or changed row goes into the outbox in the same transaction, if this node ships at all.

    Not OR REPLACE: the conflict rule of the statement that fires a trigger would apply (sqlite.org/lang_createtrigger).
    """
    made = []
    for kind, one in SHIPPED.items():
        if not version < one.since <= to:
            continue
        drop = f"DELETE FROM outbox WHERE kind = '{kind}' AND id = {one.id} AND sub = {one.sub}"  # noqa: S608 - all ours
        insert = f"INSERT INTO outbox {COLUMNS} VALUES ({_values(kind, one)})"  # noqa: S608
        for name, moment in (("new", f"INSERT ON {one.table}"), ("changed", f"UPDATE OF {one.again} ON {one.table}")):
            body = f"WHEN {one.which} AND EXISTS ({SHIPS}) BEGIN {drop}; {insert}; END".replace("{}", "new.")
            made.append(f"CREATE TRIGGER {one.table}_{name} AFTER {moment} {body}")
    return made


def refill() -> list[str]:
    """SQL that empties the outbox and puts into it all rows that should be shipped, oldest first."""
    parts = [
        f"SELECT {_values(kind, one)} FROM {one.table} WHERE {one.which}".replace("{}", "")  # noqa: S608
        for kind, one in SHIPPED.items()
    ]
    return ["DELETE FROM outbox", f"INSERT INTO outbox {COLUMNS} {' UNION ALL '.join(parts)} ORDER BY 4"]


COLUMNS = "(kind, id, sub, time, bytes)"
SHIPS = "SELECT 1 FROM state WHERE name = 'ships'"


def _values(kind: str, one: Shipped) -> str:
    return f"'{kind}', {one.id}, {one.sub}, {one.time}, {OVERHEAD} + length(CAST({one.size} AS BLOB))"
