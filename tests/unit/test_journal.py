import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time

import pytest

from slurm_gpuhealth.config.settings import Paths
from slurm_gpuhealth.node import journal
from slurm_gpuhealth.node.journal import open_journal


@pytest.fixture
def paths(tmp_path):
    return Paths(state=str(tmp_path / "state"), run=str(tmp_path / "run"))


def test_values_come_back_in_the_next_program(paths):
    first = open_journal(paths)
    first.put("kernel", ("boot", 42, 1.5))
    first.put("gone", 1)
    first.put("gone", None)
    second = open_journal(paths)
    assert second.get("kernel") == ("boot", 42, 1.5)
    assert second.get("gone", "default") == "default"
    assert not second.trouble


def test_the_folder_is_for_root_alone(paths):
    open_journal(paths)
    assert stat.S_IMODE(os.stat(paths.state).st_mode) == 0o700


def test_a_corrupt_file_is_set_aside_and_begun_anew(paths):
    journal = open_journal(paths)
    journal.put("a", 1)
    journal.db.close()  # or the garbage collector does, at any moment, and writes the good pages back
    with open(os.path.join(paths.state, "journal.db"), "r+b") as file:
        file.write(b"not a database at all" * 100)
    journal = open_journal(paths)
    assert "set aside" in journal.get("corrupt")
    journal.put("b", 2)
    assert open_journal(paths).get("b") == 2
    assert any("corrupt-" in name for name in os.listdir(paths.state))


def test_a_state_folder_that_can_not_be_used_sends_the_journal_to_run_and_back(paths):
    with open(paths.state, "w"):
        pass  # a file where the folder should be
    journal = open_journal(paths)
    assert "journal in" in journal.trouble
    journal.put("kernel", 7)
    assert open_journal(paths).get("kernel") == 7
    os.unlink(paths.state)
    mended = open_journal(paths)
    assert not mended.trouble
    assert mended.get("kernel") == 7
    assert not os.path.exists(os.path.join(paths.run, "journal.db"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_on_a_full_disk_it_goes_on_elsewhere_with_its_state(paths):
    os.makedirs(paths.state)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", paths.state], check=True)
    try:
        journal = open_journal(paths)
        journal.put("kernel", 1)
        fill = os.open(os.path.join(paths.state, "fill"), os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(fill, b"x" * 4096)
        os.close(fill)
        for number in range(200):
            journal.put(f"big{number}", "x" * 2000)
        assert "full" in journal.trouble
        assert journal.get("kernel") == 1
        again = open_journal(paths)
        assert again.get("big199") == "x" * 2000
        os.unlink(os.path.join(paths.state, "fill"))
    finally:
        subprocess.run(["umount", "-l", paths.state], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("killed", [False, True])  # then its last changes are in the log (WAL) alone
def test_on_a_read_only_disk_it_says_so_and_goes_on_with_all_that_it_knew(paths, killed):
    os.makedirs(paths.state)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", paths.state], check=True)
    try:
        if not (pid := os.fork()):
            first = open_journal(paths)
            first.put("a", 1)
            if not killed:
                first.db.close()
            os._exit(0)
        os.waitpid(pid, 0)
        subprocess.run(["mount", "-o", "remount,ro", paths.state], check=True)
        journal = open_journal(paths)
        journal.put("b", 2)
        assert journal.trouble
        again = open_journal(paths)
        assert (again.get("a"), again.get("b")) == (1, 2)
        assert os.listdir(paths.run).count("journal.db") == 1
        assert not any("copy" in name for name in os.listdir(paths.run))
    finally:
        subprocess.run(["umount", "-l", paths.state], check=True)


def waiting(journal):
    return [row[0] for row in journal.rows("SELECT code FROM finding WHERE acted IS NULL ORDER BY id")]


INSERT = (
    "INSERT INTO finding (time, seen, source, code, severity, rung, mode, message, standing, count, details, acted)"
    " VALUES (9, 9, 'xid', ?, 'fault', '', 'enforce', '', 0, 1, '{}', ?)"
)


def fill(folder):
    """Leave no space in `folder`, a small file system of its own."""
    fd = os.open(os.path.join(folder, "fill"), os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, b"x" * 4096)
    os.close(fd)


@pytest.fixture
def small(paths):
    """`paths` with a state folder of 512 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    os.makedirs(paths.state)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", paths.state], check=True)
    yield paths
    subprocess.run(["umount", "-l", paths.state], check=True)


def test_faults_and_acks_go_along_to_the_fallback_and_back(small):
    journal = open_journal(small)
    journal.write(INSERT, "waits", None)
    journal.write(INSERT, "waits too", None)
    journal.write(INSERT, "had its decision", 1)
    fill(small.state)
    journal.write(INSERT, "x" * 50000, None)
    assert "full" in journal.trouble
    assert waiting(journal) == ["waits", "waits too", "x" * 50000]
    second = open_journal(small)
    second.write("UPDATE finding SET acted = 2 WHERE code = 'waits'")
    second.write(INSERT, "new", None)
    assert second.trouble
    os.unlink(os.path.join(small.state, "fill"))
    mended = open_journal(small)
    assert not mended.trouble
    assert waiting(mended) == ["waits too", "x" * 50000, "new"]


def test_what_a_transaction_found_is_not_lost_when_the_disk_is_full_at_its_end(small):
    journal = open_journal(small)
    journal.put("cursor", 1)
    fill(small.state)

    def look():
        assert journal.get("cursor") == 1
        for number in range(30):
            journal.write(INSERT, f"{number}" * 4000, None)
        journal.put("cursor", 2)

    journal.together(look)
    assert (journal.get("cursor"), len(waiting(journal))) == (2, 30)
    assert len(waiting(open_journal(small))) == 30


def test_a_fallback_is_carried_over_once_and_takes_no_number_of_another_row(paths):
    journal = open_journal(paths)
    journal.write(INSERT, "old", None)
    journal._fall_back(sqlite3.OperationalError("database or disk is full"))
    other = sqlite3.connect(os.path.join(paths.state, "journal.db"))
    other.execute(INSERT, ("meanwhile", None))
    other.commit()
    journal.write(INSERT, "in the fallback", None)
    journal.put("cursor", 5)
    path = os.path.join(paths.run, "journal.db")
    journal.db.close()
    with open(path, "rb") as file:
        copy = file.read()
    assert waiting(open_journal(paths)) == ["old", "meanwhile", "in the fallback"]
    with open(path, "wb") as file:
        file.write(copy)  # as if it had been killed before it removed the file
    again = open_journal(paths)
    assert waiting(again) == ["old", "meanwhile", "in the fallback"]
    assert again.get("cursor") == 5
    assert not os.path.exists(path)


def test_a_file_that_is_corrupt_further_in_is_begun_anew_with_what_can_be_read(paths):
    journal = open_journal(paths)
    journal.put("hold", 7)
    for number in range(2000):
        journal.write(INSERT, f"{number}", 1)
    journal.db.close()
    path = os.path.join(paths.state, "journal.db")
    with sqlite3.connect(path) as db:
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'finding'").fetchone()[0]
    with open(path, "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    found = open_journal(paths)
    assert found.rows("SELECT * FROM finding") is not None
    found.write(INSERT, "new", None)
    assert (found.folder, found.get("hold"), waiting(found)) == (paths.state, 7, ["new"])
    assert "set aside" in found.get("corrupt")
    assert waiting(open_journal(paths)) == ["new"]


def test_a_journal_that_is_a_folder_or_of_another_version_stops_nothing(paths):
    os.makedirs(os.path.join(paths.state, "journal.db"))
    journal = open_journal(paths)
    journal.put("a", 1)
    assert open_journal(paths).get("a") == 1
    os.rmdir(os.path.join(paths.state, "journal.db"))
    later = open_journal(paths)
    assert later.get("a") == 1
    later.write("PRAGMA user_version = 99")
    later.write("ALTER TABLE finding RENAME TO finding2")
    later.db.close()
    newer = open_journal(paths)
    newer.write(INSERT, "x", None)
    assert (waiting(newer), newer.get("a")) == (["x"], 1)


def test_killed_at_any_moment_the_next_program_finds_a_good_journal(paths):
    code = f"""
from slurm_gpuhealth.node import journal
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.config.settings import Paths
journal = open_journal(Paths(state={paths.state!r}, run={paths.run!r}))
n = journal.get("n", 0)
print(n, flush=True)
while True:
    n += 1
    journal.together(lambda: (journal.put("n", n), journal.put("twin", n)))
"""
    last = 0
    for attempt in range(8):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.01 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        journal = open_journal(paths)
        assert journal.get("n", 0) == journal.get("twin", 0) >= last
        assert journal.one("PRAGMA integrity_check")[0] == "ok"
        last = journal.get("n", 0)
    assert last > 0


def test_a_value_that_can_not_be_read_is_absent(paths):
    journal = open_journal(paths)
    journal.write("INSERT INTO state VALUES ('bad', x'ff')")
    assert journal.get("bad", 5) == 5


def test_pruning_forgets_by_age_but_not_what_still_stands(paths):
    journal = open_journal(paths)
    insert = (
        "INSERT INTO finding (time, seen, source, code, severity, rung, mode, message, standing, count, details)"
        " VALUES (?, ?, 'nvml', ?, 'fault', '', 'enforce', '', ?, 1, '{}')"
    )
    journal.write(insert, 1, 1, "event", 0)
    journal.write(insert, 1, 1, "stands", 1)
    journal.write(insert, 9, 9, "new", 0)
    for job, ended in ((1, 2), (2, None), (3, 9)):
        insert_job = (
            "INSERT INTO job (job, restart, uid, user, nodes, gpus, started, ended) VALUES (?, 0, 0, '', 1, '', 1, ?)"
        )
        journal.write(insert_job, job, ended)
    journal.prune(5)
    assert [row[0] for row in journal.rows("SELECT job FROM job")] == [2, 3]
    assert [row[0] for row in journal.rows("SELECT code FROM finding ORDER BY id")] == ["stands", "new"]


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    journal = open_journal(Paths(state=str(folder), run=str(tmp_path / "run")))
    assert "owned by uid 65534" in journal.trouble


def test_the_journal_is_plain_sqlite_for_an_admin(paths):
    open_journal(paths).put("a", 1)
    with sqlite3.connect(os.path.join(paths.state, "journal.db")) as db:
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert {"state", "finding", "job", "diagnostic", "decision", "retest"} <= tables


def test_the_sql_is_that_of_sqlite_3_34():
    """Debian 11's: before 3.35 an upsert must name its key, and there is no RETURNING."""
    package = os.path.dirname(os.path.dirname(journal.__file__))
    for folder in ("node", "ship", "ladder", "hooks"):
        for name in sorted(os.listdir(os.path.join(package, folder))):
            if name.endswith(".py") and name != "postgresql.py":
                with open(os.path.join(package, folder, name), encoding="utf-8") as file:
                    text = file.read()
                assert "ON CONFLICT DO UPDATE" not in text, name
                assert " RETURNING " not in text, name
