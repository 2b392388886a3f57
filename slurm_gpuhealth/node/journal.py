"""The node's own record: one SQLite file. This suite writes nowhere else on a node.

    state        small values by name: cursors, baselines, last readings, the hold, children that can't be killed
    finding      what was seen, and what the policy made of it; a fault waits for a decision until `acted` names one
    job          what ran here, on which GPUs, and how it ended
    diagnostic   DCGM results, one row a GPU
    decision     each change of the node that was made, refused, put off, or would have been made (shadow)
    retest       GPUs with low bandwidth while other jobs ran: to be tested again when the node is idle
    figure       what tests measured, one row a figure and GPU
    step         each rung that the ladder ran here, and its result
    joblog       what a failed job's log said (joblog.py)
    jobuse       how a job used its GPUs (samples.py)
    outbox       which of these rows are new or changed and wait to be shipped (ship/outbox.py)

A program may be killed at any instruction: the file is still good (WAL). A corrupt file, whatever error it causes, is
set aside, and a new file begins with the rows that could be read. If the disk is full or read-only, a copy in
`paths.run` (a tmpfs) is used, with acks and waiting faults; it is carried back when the disk works again.
"""

from __future__ import annotations

import _sqlite3 as sqlite3
import os

from slurm_gpuhealth.node.journal_file import CURSOR, NAME, make_private, memory, open_file, seal, undo, unseal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    from slurm_gpuhealth.config.settings import Paths

    Result = TypeVar("Result")

WAITS = "SELECT 1 FROM finding WHERE severity = 'fault' AND acted IS NULL AND cleared IS NULL AND NOT standing LIMIT 1"


def open_journal(paths: Paths) -> Journal:
    """The journal in `paths.state`; if that can't be written, in `paths.run` or in memory (`.trouble` says why)."""
    trouble = ""
    try:
        journal = Journal(_connect(paths.state), paths.state, paths.run)
        if os.path.exists(os.path.join(paths.run, NAME)):  # an earlier run could not write: can we now?
            from slurm_gpuhealth.node import journal_mend

            journal_mend.come_back(journal.db, paths.run)
        return journal
    except Exception as error:  # any error: a node without a journal is checked all the same
        trouble = f"journal in {paths.state}: {error}"
    try:
        from slurm_gpuhealth.node import journal_mend

        return Journal(journal_mend.begin_copy(paths.state, paths.run), paths.run, paths.run, trouble)
    except Exception as error:  # as above
        return Journal(memory(), "", paths.run, f"{trouble}; in {paths.run}: {error}")


def _connect(folder: str) -> sqlite3.Connection:
    make_private(folder)
    path = os.path.join(folder, NAME)
    try:
        return open_file(path)
    except Exception as error:  # a scribbled file may raise anything
        from slurm_gpuhealth.node import journal_mend

        journal_mend.set_aside(path, error)
        return open_file(path)


class Journal:
    """An open journal. No method raises for a bad disk or a corrupt file: it continues elsewhere or in a new file."""

    def __init__(self, db: sqlite3.Connection, folder: str, run: str, trouble: str = "") -> None:
        self.db = db
        self.folder = folder
        """Where the file is; "" if in memory."""
        self.run = run
        self.trouble = trouble
        self._whole = False
        """Inside `together`: then a single statement that fails is not repeated elsewhere; the whole is."""
        self._again = False
        """The file was opened again after an error that it did not cause."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, of marshal's types; `default` if there is none."""

        def value() -> Any:
            row = self.db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
            return unseal(name, row[0]) if row else default

        return self._do(value)

    def put(self, name: str, value: Any) -> None:
        """Keep `value` under `name`; None removes it."""
        if value is None:
            self.write("DELETE FROM state WHERE name = ?", name)
        else:
            self.write("INSERT OR REPLACE INTO state VALUES (?, ?)", name, seal(name, value))

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        return next(self.rows(sql, *values), None)

    def rows(self, sql: str, *values: Any) -> Iterator[Any]:
        return iter(self._do(lambda: self.db.execute(sql, values).fetchall()))

    def write(self, sql: str, *values: Any) -> int:
        """Run one INSERT, UPDATE or DELETE; returns the new row's id."""
        return self._do(lambda: self.db.execute(sql, values).lastrowid or 0)

    def together(self, body: Callable[[], Result]) -> Result:
        """`body()` in one transaction: all that it writes is kept, or nothing.

        If the disk is bad, the whole body runs again in the fallback. For short work only: other programs wait for it.
        """
        if self._whole:
            return body()

        def whole() -> Result:
            self._whole = True
            try:
                self.db.execute("BEGIN IMMEDIATE")
                result = body()
                self.db.execute("COMMIT")
                return result
            except BaseException:
                undo(self.db)
                raise
            finally:
                self._whole = False

        return self._do(whole)

    def _do(self, work: Callable[[], Result]) -> Result:
        while True:
            try:
                return work()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter: SQLite's message for a bad file
                if self._whole or not self.folder:
                    raise
                self._fall_back(error)

    def prune(self, before: float) -> None:
        """Delete rows older than `before`, except what stands, runs, or waits to be shipped; and samples of no job."""
        waits = "({} NOT IN (SELECT id FROM outbox WHERE kind = '{}'))"
        for table, kind, key, which in (
            ("finding", "finding", "id", "seen < ?1 AND (NOT standing OR cleared IS NOT NULL)"),
            ("job", "run", "job", "(ended < ?1 OR started < ?1 - 366 * 86400)"),
            ("diagnostic", "diagnostic", "id", "time < ?1"),
            (
                "decision",
                "decision",
                "id",
                "time < ?1 AND id < (SELECT max(id) FROM decision)",
            ),  # the last stays, so that no number is used twice
            ("step", "step", "id", "time < ?1"),
            ("figure", "figure", "id", "time < ?1"),
            ("joblog", "log", "job", "time < ?1"),
            ("jobuse", "use", "job", "time < ?1"),
        ):
            self.write(f"DELETE FROM {table} WHERE {which} AND {waits.format(key, kind)}", before)  # noqa: S608
        if self.get("use") is None:
            self.write("DELETE FROM state WHERE name GLOB 'sample-*'")

    def doubt(self, error: Exception) -> bool:
        """After an unexpected error of the program: whether the file caused it. If so, it was set aside."""
        if not self.folder:
            return False
        from slurm_gpuhealth.node import journal_mend

        undo(self.db)
        self.db.close()
        path = os.path.join(self.folder, NAME)
        try:
            bad = journal_mend.set_aside(path, error)
        except Exception:  # it is not known
            bad = False
        try:
            self.db = open_file(path)
        except Exception as trouble:  # the program must still record its failure
            self.db, self.folder, self.trouble = memory(), "", f"journal: {trouble}"
        return bad

    def settled(self) -> None:
        """Note in `run` how far the kernel log was read, unless a fault waits for a decision."""
        cursor = self.get("kernel")
        if cursor and self.one(WAITS) is None:
            boot, last, offset, seen = cursor
            line = f"{boot} {last:20d} {offset:20d} {seen:20.6f}\n"  # of one length: each write replaces all
            try:
                if os.lstat(self.run).st_uid != os.geteuid():
                    return
                fd = os.open(os.path.join(self.run, CURSOR), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    os.write(fd, line.encode())
                finally:
                    os.close(fd)
            except OSError:  # no folder or no space: then there is no note
                pass

    def _fall_back(self, error: Exception) -> None:
        from slurm_gpuhealth.node import journal_mend

        was, self.folder, again = self.folder, "", self._again
        self._again = True
        self.db, self.folder, why = journal_mend.fall_back(self.db, error, was, self.run, again)
        self.trouble = self.trouble or why
