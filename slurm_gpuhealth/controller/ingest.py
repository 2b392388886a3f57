"""Reads what the nodes have shipped, from their files in the shared directory or PostgreSQL's inbox, into the store.

Rows and their position in the file are written in one transaction. If a run is killed, the next one continues there.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import delete, select, text

from slurm_gpuhealth import child
from slurm_gpuhealth.ship.file import BEFORE_TIME, END, open_folder, refuse_unless_ours
from slurm_gpuhealth.store import records, schema
from slurm_gpuhealth.store.open import lock, reading

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from slurm_gpuhealth.config.settings import Settings

AT_ONCE = 5000
"""Records per transaction."""
MOST_KEPT = 100
"""How many invalid lines a run keeps; others are only counted."""


class Taken(NamedTuple):
    rows: int = 0
    """Records, including those that were already known."""
    skipped: int = 0
    """Lines that are not valid records."""
    files: int = 0
    trouble: tuple[str, ...] = ()
    """What could not be read, and the first skipped lines: file, line, why."""


def ingest(engine: Engine, settings: Settings, now: float) -> Taken:
    """Read everything that is there. Never raises because of what nodes wrote, or of an unreadable directory."""
    url = settings.store.url
    if url.startswith("postgresql:"):
        return _Inbox(engine, now).all()
    if not url:
        return Taken()
    folder = url[len("file://") :]
    listed = child.probe(lambda: _listed(folder), timeout=settings.store.timeout)
    if listed.error:
        return Taken(trouble=(f"{folder}: {listed.error}",))
    return _Files(engine, now, folder).all(listed.value)


def _listed(folder: str) -> list[str]:
    """In a child, because it may hang. Complete files first, a node's oldest first."""
    there = open_folder(folder)
    names = [name for name in os.listdir(there) if name.endswith(END) and not name.startswith(".")]
    return sorted(names, key=lambda name: (node_of(name), BEFORE_TIME not in name, name))


def node_of(name: str) -> str:
    """The node whose file it is."""
    return name[: -len(END)].partition(BEFORE_TIME)[0]


class _Taking:
    """One run: the rows to write, and the counts."""

    def __init__(self, engine: Engine, now: float) -> None:
        self.engine, self.now = engine, now
        self.batch = records.Batch()
        self.rows = self.skipped = self.files = 0
        self.bad: list[dict[str, object]] = []
        self.trouble: list[str] = []

    def line(self, line: bytes, node: str, name: str, number: int) -> None:
        try:
            self.batch.add(line, node)
        except ValueError as error:
            self.skip(node, name, number, str(error), line)

    def skip(self, node: str, name: str, number: int, why: str, line: bytes) -> None:
        self.skipped += 1
        if self.skipped <= MOST_KEPT:
            said = {"node": node, "file": name, "why": why, "text": line[:2000].decode("utf-8", "replace")}
            self.bad.append(
                {key: records.text(value) for key, value in said.items()} | {"line": number, "time": self.now}
            )
        if self.skipped <= 3:
            self.trouble.append(f"{name}, line {number}: skipped: {why}")

    def save(self, db: Connection) -> None:
        self.batch.save(db, self.now)
        if self.bad:
            db.execute(schema.skipped.insert(), self.bad)
        self.rows += self.batch.size
        self.batch, self.bad = records.Batch(), []

    def counts(self) -> Taken:
        return Taken(self.rows, self.skipped, self.files, tuple(self.trouble))


class _Files(_Taking):
    """The nodes' files. The hash of its first line identifies a file: its name changes, and inodes are used again."""

    def __init__(self, engine: Engine, now: float, folder: str) -> None:
        super().__init__(engine, now)
        self.folder = folder
        self.moved: dict[tuple[str, str], dict[str, object]] = {}
        """(node, first) → its new row of `file`."""
        self.done: list[str] = []
        """Complete files that were read."""

    def all(self, names: list[str]) -> Taken:
        with reading(self.engine) as db:
            rows = db.execute(select(schema.file))
            self.known = {(row.node, row.first): (row.position, row.lines) for row in rows}
        seen, unread = set(), set()
        for name in names:
            if not records.NODE.fullmatch(node_of(name)):
                self.trouble.append(f"{name!r}: is not a node's file")
                continue
            try:
                seen.add(self._file(name))
            except FileNotFoundError:
                continue  # renamed or removed since it was listed
            except OSError as error:
                self.trouble.append(f"{name}: {error.strerror}")
                unread.add(node_of(name))
        self._flush()
        self._forget([key for key in self.known if key not in seen and key[0] not in unread])
        return self.counts()

    def _file(self, name: str) -> tuple[str, str]:
        node = node_of(name)
        fd = os.open(os.path.join(self.folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            refuse_unless_ours(fd, name)
            return self._lines(fd, name, node)
        finally:
            os.close(fd)

    def _lines(self, fd: int, name: str, node: str) -> tuple[str, str]:
        head = os.pread(fd, 4096, 0).partition(b"\n")
        first = node, hashlib.sha256(head[0]).hexdigest()[:32]
        position, number = self.known.get(first, (0, 0))
        inside, number = number < 0, abs(number)  # negative: inside a line that is too long and was skipped
        if position and not _is_where_we_were(fd, position, inside):  # restored from a backup
            position, number, inside = 0, 0, False
        begin = position
        while True:
            chunk = os.pread(fd, records.LONGEST, position)
            whole = (chunk.find(b"\n") if inside else chunk.rfind(b"\n")) + 1
            if not chunk or not (whole or inside or len(chunk) == records.LONGEST):
                break  # nothing, or an incomplete line
            if whole and not inside:
                for line in chunk[: whole - 1].split(b"\n"):
                    number += 1
                    self.line(line, node, name, number)
            elif not inside:
                number += 1
                self.skip(node, name, number, f"longer than {records.LONGEST} bytes", chunk)
            inside = not whole
            position += whole or len(chunk)
            lines = -number if inside else number
            row = {"node": node, "first": first[1], "name": records.text(name), "position": position, "lines": lines}
            self.moved[first] = row
            if self.batch.size >= AT_ONCE:
                self._flush()
        self.files += position > begin
        if BEFORE_TIME in name:  # complete: a torn line at its end was shipped again in the next file
            self.done.append(name)
        return first

    def _flush(self) -> None:
        """Write the rows and the positions; then remove complete files."""
        if self.moved:
            with self.engine.begin() as db:
                self.save(db)
                table = schema.file
                statement = records.insert(db, table)
                new = statement.excluded
                values = {key: new[key] for key in ("name", "position", "lines")}
                # Also backwards: a truncated file grows again.
                moved = statement.on_conflict_do_update(index_elements=("node", "first"), set_=values)
                db.execute(moved, list(self.moved.values()))
            self.moved.clear()
        for name in self.done:
            try:
                os.unlink(os.path.join(self.folder, name))
            except FileNotFoundError:
                pass
            except OSError as error:
                self.trouble.append(f"{name}: was read, but can't be removed: {error.strerror}")
        self.done.clear()

    def _forget(self, gone: list[tuple[str, str]]) -> None:
        """Delete the positions of files that do not exist any more."""
        table = schema.file
        if not gone:
            return
        with self.engine.begin() as db:
            for node, first in gone:
                db.execute(delete(table).where(table.c.node == node, table.c.first == first))


def _is_where_we_were(fd: int, position: int, inside: bool) -> bool:
    """Whether a line ends at `position`; `inside`: whether no line ends before it, for the length of a line."""
    if not inside:
        return os.pread(fd, 1, position - 1) == b"\n"
    before = os.pread(fd, records.LONGEST, position - records.LONGEST)
    return len(before) == records.LONGEST and b"\n" not in before


class _Inbox(_Taking):
    """PostgreSQL's inbox: rows that are read are removed in the same transaction."""

    QUERY = """
        DELETE FROM inbox
        WHERE ctid = ANY(ARRAY(SELECT ctid FROM inbox ORDER BY node, journal, abs(seq::numeric) LIMIT :most))
        RETURNING node, journal, seq, left(line, :longest) AS line"""

    def all(self) -> Taken:
        while True:
            with self.engine.begin() as db:
                lock(db)
                found = db.execute(text(self.QUERY), {"most": AT_ONCE, "longest": records.LONGEST}).all()
                for row in sorted(found, key=lambda row: (row.node, row.journal, abs(row.seq))):
                    self.line(row.line.encode(), row.node, "inbox", row.seq)
                self.save(db)
            if len(found) < AT_ONCE:
                return self.counts()
