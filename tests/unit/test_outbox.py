"""The journal's outbox: new and changed records wait there to be shipped."""

import marshal
import os
import sqlite3

import pytest

from slurm_gpuhealth.node import journal_mend, journal_schema
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.node.journal_file import SEALED, VERSION, seal

FINDING = (
    "INSERT INTO finding (time, seen, source, code, severity, rung, mode, message, standing, count, details)"
    " VALUES (?, ?1, 'xid', ?, 'fault', '', 'enforce', '', 0, 1, '{}')"
)
JOB = "INSERT INTO job (job, restart, uid, user, nodes, gpus, started) VALUES (?, ?, 0, '', 1, '', 1)"
TEST = (
    "INSERT INTO diagnostic (time, level, uuid, outcome, seconds, program, detail) VALUES (1, ?, '', ?, 1, 'check', '')"
)
FIGURE = "INSERT INTO figure (time, tool, version, model, name, value, unit) VALUES (?, '', '', '', '', 1.5, '')"


@pytest.fixture
def ships(journal):
    """A journal whose node ships."""
    journal.put("shipped", {"journal": "abc", "seq": 0, "size": 0})
    journal.put("ships", 1)
    return journal


def waiting(journal):
    return list(journal.rows("SELECT kind, id, sub FROM outbox ORDER BY seq"))


def test_without_a_store_nothing_waits(journal):
    journal.write(FINDING, 1, "79")
    journal.write(JOB, 1, 0)
    assert waiting(journal) == []


def test_a_row_waits_in_the_transaction_that_wrote_it(ships):
    def fails():
        ships.write(FINDING, 1, "79")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        ships.together(fails)
    assert waiting(ships) == []
    assert ships.write(FINDING, 2, "79") == 1
    assert waiting(ships) == [("finding", 1, 2000000)]


def test_every_kind_of_row_waits(ships):
    ships.write(FINDING, 1, "79")
    ships.write(JOB, 7, 2)
    ships.write(TEST, 3, "pass")
    ships.write("INSERT INTO decision (time, program, action, reason, result, was) VALUES (1, '', '', '', '', '')")
    ships.write(
        "INSERT INTO step (time, fact, rung, attempt, outcome, follows, test, code, message, bundle)"
        " VALUES (1, '', 'L3', 1, 'running', '', '', '', '', '')"
    )
    ships.write("INSERT OR REPLACE INTO joblog VALUES (7, 2, 1, '{}')")
    ships.write(FIGURE, 1)
    ships.write("INSERT OR REPLACE INTO jobuse VALUES (7, 2, 1, '{}')")
    kinds = ["finding", "run", "diagnostic", "decision", "step", "log", "figure", "use"]
    assert [row[0] for row in waiting(ships)] == kinds
    assert {row[0] for row in waiting(ships)} == set(journal_schema.SHIPPED)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE finding SET severity = 'info'",
        "UPDATE finding SET cleared = 5",
        "UPDATE finding SET acted = 1",
        "UPDATE finding SET acked = 9, mode = 'acked'",
        "UPDATE job SET ended = 3, outcome = 'failed'",
    ],
)
def test_a_row_that_changes_waits_again_and_once(ships, change):
    ships.write(FINDING, 1, "79")
    ships.write(JOB, 1, 0)
    before = waiting(ships)
    ships.write(change)
    assert sorted(waiting(ships)) == sorted(before)
    assert waiting(ships)[-1][0] == ("run" if "job" in change else "finding")


def test_a_job_that_ends_without_our_prolog_waits_once(ships):
    ships.write(JOB, 1, 0)
    ships.write(JOB + " ON CONFLICT (job, restart) DO UPDATE SET ended = 3", 1, 0)
    ships.write(JOB.replace("INSERT", "INSERT OR REPLACE"), 1, 0)
    assert waiting(ships) == [("run", 1, 0)]


def test_a_condition_that_is_seen_again_does_not_wait_again(ships):
    ships.write(FINDING, 1, "79")
    ships.write("DELETE FROM outbox")
    ships.write("UPDATE finding SET seen = 9, count = count + 1, message = 'still'")
    assert waiting(ships) == []


def test_passes_of_level_1_are_not_shipped_and_failures_are(ships):
    for level, outcome in ((1, "pass"), (1, "not-testable"), (1, "fail"), (2, "pass")):
        ships.write(TEST, level, outcome)
    assert [row[1] for row in waiting(ships)] == [3, 4]


def test_what_waits_is_not_pruned(ships):
    for when in (1, 2):
        ships.write(FINDING, when, "79")
    ships.write("INSERT INTO joblog VALUES (7, 2, 1, '{}')")
    ships.write("DELETE FROM outbox WHERE id = 1")
    ships.prune(1e9)
    assert [row[0] for row in ships.rows("SELECT id FROM finding")] == [2]
    assert ships.one("SELECT count(*) FROM joblog") == (1,)
    ships.write("DELETE FROM outbox")
    ships.prune(1e9)
    assert ships.one("SELECT count(*) FROM finding") == (0,)
    assert ships.one("SELECT count(*) FROM joblog") == (0,)


def test_a_number_that_is_given_again_is_another_row(ships):
    ships.write(FINDING, 1, "79")
    ships.write("DELETE FROM outbox")
    ships.prune(1e9)
    assert ships.write(FINDING, 2e9, "79") == 1
    assert waiting(ships) == [("finding", 1, 2 * 10**15)]


def test_what_the_fallback_saw_waits_when_the_disk_is_good_again(ships, settings):
    ships.write(FINDING, 1, "old")
    ships.write("DELETE FROM outbox")
    ships._fall_back(sqlite3.OperationalError("database or disk is full"))
    ships.write(FINDING, 2, "new")
    ships.write("UPDATE finding SET cleared = 5 WHERE code = 'old'")
    ships.db.close()
    back = open_journal(settings.paths)
    assert not os.path.exists(os.path.join(settings.paths.run, "journal.db"))
    assert {row[2] for row in waiting(back)} == {1000000, 2000000}


def test_a_journal_begun_anew_numbers_beyond_what_was_shipped(journal):
    state = {"shipped": {"journal": "abc", "seq": 500, "size": 0}, "ships": 1}
    journal_mend._filled(journal.db, {"state": [(name, seal(name, value)) for name, value in state.items()]})
    journal.write(FINDING, 2, "79")
    assert journal.one("SELECT seq FROM outbox")[0] > 500 + 10**6


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_journal_of_an_older_version_gets_an_outbox_and_keeps_its_rows(settings, version):
    os.makedirs(settings.paths.state, 0o700)
    with sqlite3.connect(os.path.join(settings.paths.state, "journal.db")) as db:
        for statement in journal_schema.statements(0, version):
            db.execute(statement)
        db.execute(FINDING, (1, "79"))
        value = seal("a", (1, "b")) if version >= SEALED else marshal.dumps((1, "b"), 4)  # without its checksum
        db.execute("INSERT INTO state VALUES ('a', ?)", (value,))
        db.execute(f"PRAGMA user_version = {version}")
    journal = open_journal(settings.paths)
    assert journal.one("PRAGMA user_version") == (VERSION,)
    assert journal.one("SELECT count(*) FROM finding") == (1,)
    assert journal.get("a") == (1, "b")
    assert journal.one("SELECT value FROM state WHERE name = 'a'")[0] == seal("a", (1, "b"))
    for statement in journal_schema.refill():
        journal.write(statement)
    assert waiting(journal) == [("finding", 1, 1000000)]
    assert not journal.trouble
