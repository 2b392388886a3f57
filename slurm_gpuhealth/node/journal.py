"""The node's own record: one SQLite file, the only place that this suite writes on a node.

    state        small values by name: cursors, baselines, last readings, the hold, children that can't be killed
    finding      what was seen, and what the policy made of it; a fault waits for a decision until `acted` names one
    job          what ran here, on which GPUs, and how it ended
    diagnostic   DCGM results, one row a GPU
    decision     each change of the node that was made, refused, put off, or would have been made (shadow)
    retest       GPUs whose bandwidth was low while other jobs ran: to be tested again when the node is idle
    step         each rung that the ladder climbed here, and what came of it
    joblog       what a failed job's log said (joblog.py)
    outbox       which of these rows are new or changed and wait to be shipped (ship/outbox.py)

Killed at any instruction it is good on the next run (WAL). A corrupt file is set aside and begun anew with what could
be read of it. When the disk is full or read-only a copy of it, acks and faults that wait included, goes on in
`paths.run` (a tmpfs), and comes back when the disk does.
"""

from __future__ import annotations

import _sqlite3 as sqlite3
import marshal
import os

from slurm_gpuhealth.node.journal_file import NAME, make_private, memory, open_file, undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    from slurm_gpuhealth.config.settings import Paths

    Result = TypeVar("Result")


def open_journal(paths: Paths) -> Journal:
    """The journal in `paths.state`; in `paths.run`, or in memory, when that can't be written (`.trouble` says why)."""
    trouble = ""
    try:
        journal = Journal(_connect(paths.state), paths.state, paths.run)
        if os.path.exists(os.path.join(paths.run, NAME)):  # an earlier run could not write: can we now?
            from slurm_gpuhealth.node import journal_mend

            journal_mend.come_back(journal.db, paths.run)
        return journal
    except (OSError, sqlite3.Error) as error:
        trouble = f"journal in {paths.state}: {error}"
    try:
        from slurm_gpuhealth.node import journal_mend

        return Journal(journal_mend.begin_copy(paths.state, paths.run), paths.run, paths.run, trouble)
    except (OSError, sqlite3.Error) as error:
        return Journal(memory(), "", paths.run, f"{trouble}; in {paths.run}: {error}")


def _connect(folder: str) -> sqlite3.Connection:
    make_private(folder)
    try:
        return open_file(os.path.join(folder, NAME))
    except sqlite3.OperationalError:  # locked, full, read-only: not the file's fault
        raise
    except sqlite3.DatabaseError:
        from slurm_gpuhealth.node import journal_mend

        return journal_mend.connect(folder)


class Journal:
    """An open journal. No method raises for a bad disk: it goes on in the fallback and `trouble` says why."""

    def __init__(self, db: sqlite3.Connection, folder: str, run: str, trouble: str = "") -> None:
        self.db = db
        self.folder = folder
        """Where it is; "" in memory."""
        self.run = run
        self.trouble = trouble
        self._whole = False
        """Inside `together`: then a statement that fails is not done elsewhere by itself."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, of marshal's types; `default` when absent or unreadable."""
        row = self.one("SELECT value FROM state WHERE name = ?", name)
        try:
            return marshal.loads(row[0]) if row else default  # noqa: S302 - our own file in a 0700 folder
        except (ValueError, EOFError, TypeError):
            return default

    def put(self, name: str, value: Any) -> None:
        """Keep `value` under `name`; None removes it."""
        if value is None:
            self.write("DELETE FROM state WHERE name = ?", name)
        else:
            # marshal format 4 is read by every Python that we support
            self.write("INSERT OR REPLACE INTO state VALUES (?, ?)", name, marshal.dumps(value, 4))

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        return next(self.rows(sql, *values), None)

    def rows(self, sql: str, *values: Any) -> Iterator[Any]:
        return iter(self._do(lambda: self.db.execute(sql, values).fetchall()))

    def write(self, sql: str, *values: Any) -> int:
        """Run one INSERT, UPDATE or DELETE: the new row's id."""
        return self._do(lambda: self.db.execute(sql, values).lastrowid or 0)

    def together(self, body: Callable[[], Result]) -> Result:
        """`body()` in one transaction: what it reads and writes is kept as a whole or not at all.

        Where the disk is bad all of it is done again in the fallback. For short work: the other programs wait for it.
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
            except sqlite3.DatabaseError as error:
                if self._whole or not self.folder:
                    raise
                self._fall_back(error)

    def prune(self, before: float) -> None:
        """Forget what is older than `before`, but not what stands, runs, or waits to be shipped."""
        waits = "({} NOT IN (SELECT id FROM outbox WHERE kind = '{}'))"
        for table, kind, key, which in (
            ("finding", "finding", "id", "seen < ?1 AND (NOT standing OR cleared IS NOT NULL)"),
            ("job", "run", "job", "(ended < ?1 OR started < ?1 - 366 * 86400)"),
            ("diagnostic", "diagnostic", "id", "time < ?1"),
            ("decision", "decision", "id", "time < ?1 AND id < (SELECT max(id) FROM decision)"),  # numbers stay its own
            ("step", "step", "id", "time < ?1"),
            ("joblog", "log", "job", "time < ?1"),
        ):
            self.write(f"DELETE FROM {table} WHERE {which} AND {waits.format(key, kind)}", before)  # noqa: S608

    def _fall_back(self, error: sqlite3.DatabaseError) -> None:
        from slurm_gpuhealth.node import journal_mend

        was, self.folder = self.folder, ""
        self.trouble = self.trouble or f"journal: {error}"
        self.db, self.folder = journal_mend.fall_back(self.db, error, was, self.run)
