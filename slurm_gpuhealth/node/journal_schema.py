"""The journal's tables by version, and the triggers that put changed rows into its outbox, for ship/outbox.py.

Imported only to make or upgrade a journal, and to ship.
"""

from __future__ import annotations

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
MADE = "CAST({}time * 1e6 AS INTEGER)"
"""SQLite uses the number of a pruned row again, so a row's name includes its time."""
SHIPPED = {
    # kind → table, key, time, text that counts as its size, which rows, the columns whose change ships a row again.
    # Passes of level 1 are as many as jobs and say little; a condition that stands is seen again each minute.
    "finding": ("finding", "{}id", MADE, "{}time", "{}message || {}details", "1", "severity, mode, cleared, acted"),
    "run": ("job", "{}job", "{}restart", "coalesce({}ended, {}started)", "{}gpus", "1", "gpus, ended, outcome"),
    "diagnostic": (
        *("diagnostic", "{}id", MADE, "{}time", "{}detail"),
        *("({}level > 1 OR {}outcome IN ('fail', 'warn'))", "outcome"),
    ),
    "decision": ("decision", "{}id", "0", "{}time", "{}reason || {}result || {}was", "1", "action, result"),
    "step": ("step", "{}id", MADE, "{}time", "{}message", "1", "outcome"),
    "log": ("joblog", "{}job", "{}restart", "{}time", "{}reading", "1", "reading"),
}
OVERHEAD = 400
"""Bytes of a record without its long texts."""


def statements(version: int, to: int = 3) -> list[str]:
    """SQL that upgrades a journal's tables from `version` (0: an empty file) to `to`; version 4 has the same tables.

    `journal_sound` compares a file with this text: changed text needs a new version.
    """
    tables = "".join((TABLES, STEPS, OUTBOX)[version:to])
    return [one for one in tables.split(";\n") if one] + (_triggers() if version < 3 <= to else [])


def _triggers() -> list[str]:
    """A new or changed row goes into the outbox in the same transaction, if this node ships at all.

    Not OR REPLACE: the conflict rule of the statement that fires a trigger would apply (sqlite.org/lang_createtrigger).
    """
    made = []
    for kind, (table, key, sub, time, text, which, columns) in SHIPPED.items():
        drop = f"DELETE FROM outbox WHERE kind = '{kind}' AND id = {key} AND sub = {sub}"  # noqa: S608 - all ours
        insert = f"INSERT INTO outbox {COLUMNS} VALUES ({_values(kind, key, sub, time, text)})"  # noqa: S608
        for name, moment in (("new", f"INSERT ON {table}"), ("changed", f"UPDATE OF {columns} ON {table}")):
            body = f"WHEN {which} AND EXISTS ({SHIPS}) BEGIN {drop}; {insert}; END".replace("{}", "new.")
            made.append(f"CREATE TRIGGER {table}_{name} AFTER {moment} {body}")
    return made


def refill() -> list[str]:
    """SQL that empties the outbox and puts into it all rows that should be shipped, oldest first."""
    parts = [
        f"SELECT {_values(kind, key, sub, time, text)} FROM {table} WHERE {which}".replace("{}", "")  # noqa: S608
        for kind, (table, key, sub, time, text, which, _) in SHIPPED.items()
    ]
    return ["DELETE FROM outbox", f"INSERT INTO outbox {COLUMNS} {' UNION ALL '.join(parts)} ORDER BY 4"]


COLUMNS = "(kind, id, sub, time, bytes)"
SHIPS = "SELECT 1 FROM state WHERE name = 'ships'"


def _values(kind: str, key: str, sub: str, time: str, text: str) -> str:
    return f"'{kind}', {key}, {sub}, {time}, {OVERHEAD} + length(CAST({text} AS BLOB))"
