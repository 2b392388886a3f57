"""A node ships everything to the shared directory once and in order, whatever happens in between."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time

import pytest

from slurm_gpuhealth import __version__, child
from slurm_gpuhealth.config.settings import Store
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.hooks import check
from slurm_gpuhealth.node import identity, lock, watch
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.ship import file as ship_file
from slurm_gpuhealth.ship import outbox

FINDING = (
    "INSERT INTO finding (time, seen, source, code, severity, rung, mode, message, standing, count, details)"
    " VALUES (?, ?1, 'xid', ?, 'fault', '', 'enforce', ?, 0, 1, '{}')"
)

TEST = (
    "INSERT INTO diagnostic (time, level, uuid, outcome, seconds, program, detail)"
    " VALUES (1, 2, '', 'pass', 1, 'check', ?)"
)


@pytest.fixture
def shared(settings, tmp_path):
    """Settings that ship to a folder of this test's own."""
    folder = tmp_path / "shared"
    folder.mkdir(0o700)
    return replace(settings, store=Store(url=f"file://{folder}", database=str(tmp_path / "store/cluster.db")))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shared"


def add(journal, *codes, when=100.0, message=""):
    for number, code in enumerate(codes):
        journal.write(FINDING, when + number, code, message)


def send(shared, journal, seconds=20.0):
    outbox.ship(shared, journal, "n1", seconds)


def lines(folder, name="n1.jsonl"):
    return [json.loads(line) for line in (folder / name).read_bytes().splitlines()]


def codes(folder):
    """The findings in the node's files, in order."""
    names = sorted(path.name for path in folder.iterdir())
    records = [record for name in names for record in lines(folder, name)]
    return [record["row"]["code"] for record in records if record["kind"] == "finding"]


def test_all_that_the_journal_knew_before_and_what_is_new_later_is_shipped_once(shared, journal, folder):
    add(journal, "a", "b")
    send(shared, journal)
    assert codes(folder) == ["a", "b"]
    add(journal, "c")
    send(shared, journal)
    send(shared, journal)
    assert codes(folder) == ["a", "b", "c"]
    assert journal.one("SELECT count(*) FROM outbox") == (0,)
    assert [line["seq"] for line in lines(folder) if line["kind"] == "finding"] == [1, 2, 3]


def test_each_record_names_node_and_journal_and_the_first_tells_clock_and_gpus(shared, journal, folder):
    journal.put("gpus", [{"uuid": "GPU-1", "index": 0, "pci": "0000:01:00", "serial": "77", "name": "H100"}])
    add(journal, "a")
    before = time.time()
    send(shared, journal)
    head, record = lines(folder)
    assert (head["kind"], head["gpus"]) == ("ship", [["GPU-1", 0, "0000:01:00", "77"]])
    assert before <= head["time"] <= time.time()
    assert abs(head["clock"]) < 0.5
    for one in (head, record):
        assert (one["node"], one["journal"]) == ("n1", journal.get("shipped")["journal"])
    add(journal, "b")
    send(shared, journal)
    assert "gpus" not in lines(folder)[2]


def test_a_heartbeat_tells_the_versions_though_nothing_waits(shared, journal, folder, monkeypatch):
    monkeypatch.setenv("GPUHEALTH_CONFIG", str(folder.parent / "g.toml"))
    (folder.parent / "g.toml").write_text('mode = "enforce"\n')
    journal.put("nvml-baseline", {"driver": "580.95.05", "gpus": {}})
    for version in ("4.5.0", "4.6.0"):
        journal.write(TEST, json.dumps({"version": version}))
    send(shared, journal)  # the tests
    for beat in (7, 7, 8):
        outbox.ship(shared, journal, "n1", 20.0, beat)
    first, *others = (line for line in lines(folder) if line["kind"] == "ship")
    config = subprocess.run(["sha256sum", folder.parent / "g.toml"], capture_output=True, text=True, check=True).stdout
    same = {"gpuhealth": __version__, "config": config[:8], "mode": "enforce", "driver": "580.95.05", "dcgm": "4.6.0"}
    assert first["about"] == same
    assert [one["about"] for one in others] == [same, same]
    assert {one["seq"] for one in others} == {first["seq"]}


def test_versions_come_with_the_next_shipment_when_they_have_changed(shared, journal, folder):
    for driver in ("550.1", "550.1", "580.2"):
        journal.put("nvml-baseline", {"driver": driver, "gpus": {}})
        add(journal, "a")
        send(shared, journal)
    heads = [line.get("about", {}).get("driver") for line in lines(folder) if line["kind"] == "ship"]
    assert heads == ["550.1", None, "580.2"]


def test_a_heartbeat_that_could_not_be_shipped_is_shipped_with_the_next_try(shared, journal, folder):
    folder.rename(folder.parent / "away")
    outbox.ship(shared, journal, "n1", 20.0, 1)
    (folder.parent / "away").rename(folder)
    for _ in range(2):
        outbox.ship(shared, journal, "n1", 20.0, 1)
    assert len(lines(folder)) == 1


def test_the_clock_offset_is_the_nodes_against_the_file_servers(shared, journal, folder, monkeypatch):
    real = os.utime
    monkeypatch.setattr(os, "utime", lambda fd: real(fd, (time.time() - 30, time.time() - 30)))
    add(journal, "a")
    send(shared, journal)
    assert lines(folder)[0]["clock"] == pytest.approx(30, abs=0.5)


def test_while_a_job_of_several_nodes_runs_here_each_second_check_says_that_the_node_lives(
    shared, journal, folder, monkeypatch
):
    monkeypatch.setattr(watch, "SOURCES", {})
    journal.put("inventory-boot", identity.boot_id(shared))
    now, store = time.time(), replace(shared.store, heartbeat=1e12)  # there is one, and no second
    whole = replace(shared, sources=replace(shared.sources, kernel="off"), store=store)

    def checks(count):
        before = len(lines(folder))
        for _ in range(count):
            journal.put("polled", time.time())
            check.look(whole, journal, "n1", time.monotonic() + 20)
            shipped = journal.get("shipped")
            journal.put("shipped", {**shipped, "time": shipped["time"] - shared.check.interval})
        return [one["kind"] for one in lines(folder)[before:]]

    job = "INSERT INTO job (job, restart, uid, user, nodes, gpus, started) VALUES (7, 0, 1, 'a', 1, 'GPU-1', ?)"
    journal.write(job, now)
    send(shared, journal)
    checks(1)
    assert checks(4) == []
    journal.write("UPDATE job SET nodes = 2")
    assert checks(4) == ["ship", "ship"]
    journal.write("UPDATE job SET ended = ?", now)
    assert checks(4) == ["ship", "run"]  # its end


def test_a_row_that_changes_is_shipped_again_with_a_higher_number(shared, journal, folder):
    add(journal, "a")
    send(shared, journal)
    journal.write("UPDATE finding SET cleared = 5")
    send(shared, journal)
    first, second = (line for line in lines(folder) if line["kind"] == "finding")
    assert (first["id"], first["sub"]) == (second["id"], second["sub"])
    assert first["seq"] < second["seq"]
    assert second["row"]["cleared"] == 5


def test_a_torn_line_is_cut_off_and_shipped_again(shared, journal, folder):
    add(journal, "a")
    send(shared, journal)
    whole = (folder / "n1.jsonl").read_bytes()
    (folder / "n1.jsonl").write_bytes(whole + b'{"node":"n1","kind":"fin' * 5000)
    add(journal, "b")
    send(shared, journal)
    assert (folder / "n1.jsonl").read_bytes().startswith(whole)
    assert codes(folder) == ["a", "b"]


def test_a_file_that_is_gone_or_shorter_is_shipped_again_from_the_journal(shared, journal, folder, capfd):
    add(journal, "a")
    send(shared, journal)
    (folder / "n1.jsonl").unlink()
    add(journal, "b")
    send(shared, journal)
    assert codes(folder) == ["a", "b"]
    assert "is shorter than it was" in capfd.readouterr().err


def test_a_long_file_is_set_aside_under_a_new_name(shared, journal, folder, monkeypatch):
    monkeypatch.setattr(ship_file, "ROTATE", 2000)
    for code in "abcdefghij":
        add(journal, code, message="x" * 500)
        send(shared, journal)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) > 2
    assert all(name.startswith("n1@") or name == "n1.jsonl" for name in names)
    assert sorted(codes(folder)) == list("abcdefghij")
    assert all(path.stat().st_size < 3000 for path in folder.iterdir())


def test_what_waits_goes_in_pieces(shared, journal, folder, monkeypatch):
    monkeypatch.setattr(outbox, "AT_ONCE", 3000)
    add(journal, *"abcdefghij", message="x" * 500)
    send(shared, journal)
    assert codes(folder) == list("abcdefghij")
    assert sum(line["kind"] == "ship" for line in lines(folder)) > 2


def test_a_store_that_is_away_is_said_once_and_nothing_is_lost(shared, journal, folder, capfd):
    folder.rename(folder.parent / "away")
    add(journal, "a")
    for _ in range(3):
        send(shared, journal)
    said = capfd.readouterr().err
    assert said.count("No such file") == 1
    assert "wait in the journal" in said
    (folder.parent / "away").rename(folder)
    send(shared, journal)
    assert codes(folder) == ["a"]
    assert "ships again" in capfd.readouterr().err


def test_beyond_its_bytes_the_oldest_is_dropped_and_the_store_is_told(shared, journal, folder, capfd):
    shared = replace(shared, store=replace(shared.store, outbox_mib=1))
    folder.rename(folder.parent / "away")
    journal.together(lambda: add(journal, *(str(n) for n in range(3000)), message="x" * 600))
    send(shared, journal)
    assert journal.one("SELECT sum(bytes) FROM outbox")[0] <= 1 << 20
    assert "dropped" in capfd.readouterr().err
    journal.together(lambda: add(journal, *(str(n) for n in range(3000, 4000)), when=9000.0, message="x" * 600))
    send(shared, journal)
    (folder.parent / "away").rename(folder)
    send(shared, journal)
    left = [int(code) for code in codes(folder)]
    assert left == list(range(4000 - len(left), 4000))
    dropped = lines(folder)[0]["dropped"]
    assert dropped[:2] == [4000 - len(left), 100.0]
    assert dropped[2] == journal.one("SELECT max(time) FROM finding WHERE CAST(code AS INTEGER) < ?", left[0])[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_on_a_full_disk_only_whole_lines_stay_and_the_rest_is_shipped_later(shared, journal, folder):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)], check=True)
    try:
        add(journal, *(str(n) for n in range(300)), message="x" * 500)
        send(shared, journal)
        assert journal.one("SELECT count(*) FROM outbox") == (300,)
        assert (folder / "n1.jsonl").read_bytes()[-1:] == b"\n"
        subprocess.run(["mount", "-o", "remount,size=1m", str(folder)], check=True)
        send(shared, journal)
        assert sorted(set(codes(folder)), key=int) == [str(n) for n in range(300)]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def give(uid):
    return lambda path: os.chown(path, uid, uid)


NOT_ROOTS = {
    "anybody may write": lambda folder: folder.chmod(0o777),
    "a group may write": lambda folder: folder.chmod(0o770),
    "sticky, as /tmp": lambda folder: folder.chmod(0o1777),
    "somebody else's": give(5),
    "below a folder of somebody else's": lambda folder: give(5)(folder.parent),
    "below a folder that a group may write": lambda folder: folder.parent.chmod(0o775),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize("spoil", NOT_ROOTS)
def test_a_folder_in_which_others_could_write_is_not_used_and_nothing_is_lost(shared, journal, folder, capfd, spoil):
    add(journal, "a")
    NOT_ROOTS[spoil](folder)
    send(shared, journal)
    assert list(folder.iterdir()) == []
    said = capfd.readouterr().err
    assert str(folder.parent) in said
    assert "chown root" in said or "chmod go-w" in said
    for path in (folder, folder.parent):
        os.chown(path, 0, 0)
        path.chmod(0o700)
    send(shared, journal)
    assert codes(folder) == ["a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize("trap", ["link", "theirs", "writable"])
def test_a_file_that_may_be_another_or_somebody_elses_is_not_written(shared, journal, folder, tmp_path, capfd, trap):
    victim, path = tmp_path / "victim", folder / "n1.jsonl"
    victim.write_text("")
    victim.chmod(0o600)
    if trap == "link":
        os.link(victim, path)
    else:
        path.write_text("")
        os.chmod(path, 0o622 if trap == "writable" else 0o600)
        os.chown(path, 5 if trap == "theirs" else 0, 0)
    add(journal, "a")
    send(shared, journal)
    assert (victim.read_text(), path.read_text()) == ("", "")
    said = capfd.readouterr().err
    assert {"link": "hard links", "theirs": "belongs to uid 5", "writable": "chmod go-w"}[trap] in said
    os.unlink(path)
    send(shared, journal)
    assert codes(folder) == ["a"]


@pytest.mark.parametrize("trap", ["symlink", "fifo", "folder"])
def test_nothing_but_a_regular_file_is_written(shared, journal, folder, tmp_path, trap):
    victim = tmp_path / "victim"
    victim.write_text("")
    path = folder / "n1.jsonl"
    {"symlink": lambda: path.symlink_to(victim), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[trap]()
    add(journal, "a")
    send(shared, journal)
    assert victim.read_text() == ""
    assert journal.one("SELECT count(*) FROM outbox") == (1,)


def test_the_file_is_roots_alone(shared, journal, folder):
    add(journal, "a")
    send(shared, journal)
    assert stat.S_IMODE((folder / "n1.jsonl").stat().st_mode) == 0o600


def test_a_directory_that_hangs_is_not_waited_for_and_no_second_child_is_started(shared, journal, monkeypatch, capfd):
    shared = replace(shared, store=replace(shared.store, timeout=1.0), nvml=replace(shared.nvml, timeout=-30.0))
    add(journal, "a")
    sleeper = subprocess.Popen(["sleep", "60"])  # stands for a child in D state
    stuck = child.Child(sleeper.pid, child._stat(sleeper.pid)[1])
    try:
        monkeypatch.setattr(child, "probe", lambda *_, **__: child.Probed(None, "no answer in 1 s", 1.0, True, stuck))
        send(shared, journal)
        assert journal.get("stuck")["store"][1] == sleeper.pid
        monkeypatch.setattr(child, "probe", lambda *_, **__: pytest.fail("a second child"))
        send(shared, journal)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert journal.one("SELECT count(*) FROM outbox") == (1,)
    monkeypatch.undo()
    send(shared, journal)
    assert journal.one("SELECT count(*) FROM outbox") == (0,)
    assert "no answer" in capfd.readouterr().err


def test_while_the_child_of_a_killed_program_still_writes_nobody_else_does(shared, journal, folder):
    shared = replace(shared, store=replace(shared.store, timeout=1.0))
    add(journal, "a")
    turn = lock.take(shared, "store-writer")
    send(shared, journal)
    os.close(turn)
    assert list(folder.iterdir()) == []
    assert journal.one("SELECT count(*) FROM outbox") == (1,)
    send(shared, journal)
    assert codes(folder) == ["a"]


def test_switched_off_nothing_waits_and_switched_on_again_all_is_shipped_under_the_same_name(shared, journal, folder):
    add(journal, "a")
    send(shared, journal)
    off = replace(shared, store=replace(shared.store, url=""))
    add(journal, "b")
    send(off, journal)
    add(journal, "c")
    assert journal.one("SELECT count(*) FROM outbox") == (0,)
    send(shared, journal)
    assert codes(folder) == ["a", "a", "b", "c"]
    assert len({line["journal"] for line in lines(folder)}) == 1
    numbers = [line["seq"] for line in lines(folder) if line["kind"] == "finding"]
    assert numbers == sorted(set(numbers))


def test_what_a_corrupt_journal_could_not_keep_does_not_end_shipping(shared, journal, folder):
    add(journal, "a")
    send(shared, journal)
    journal.put("shipped", None)
    add(journal, "b")
    send(shared, journal)
    assert codes(folder) == ["a", "a", "b"]
    assert len({record["journal"] for record in lines(folder)}) == 2


def test_from_the_fallback_nothing_is_shipped(shared, journal, folder):
    add(journal, "a")
    send(shared, journal)
    journal._fall_back(sqlite3.OperationalError("database or disk is full"))
    add(journal, "b")
    send(shared, journal)
    assert codes(folder) == ["a"]
    journal.db.close()
    send(shared, open_journal(shared.paths))
    assert set(codes(folder)) == {"a", "b"}


LOOP = """
import sys, time
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.config.settings import Paths, Settings, Store
from slurm_gpuhealth.ship import outbox as ship, file as ship_file
state, run, proc, url, add = sys.argv[1:6]
ship_file.ROTATE = 20000
settings = Settings(paths=Paths(state=state, run=run, proc=proc), store=Store(url=url))
journal = open_journal(settings.paths)
while True:
    for _ in range(3):
        journal.write(add, time.time(), str(time.time_ns()), "x" * 200)
    ship.ship(settings, journal, "n1", 20)
    print("shipped", flush=True)
"""


def test_killed_at_any_moment_nothing_is_lost(shared, journal, folder):
    paths = shared.paths
    for attempt in range(10):
        argv = [sys.executable, "-c", LOOP, paths.state, paths.run, paths.proc, shared.store.url, FINDING]
        program = subprocess.Popen(argv, stdout=subprocess.PIPE)
        program.stdout.readline()
        time.sleep(0.003 * attempt**1.5)
        program.send_signal(signal.SIGKILL)
        program.wait()
    send(shared, journal)
    known = {row[0] for row in journal.rows("SELECT code FROM finding")}
    assert set(codes(folder)) == known
    assert len(known) >= 30
