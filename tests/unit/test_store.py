"""The controller reads each record exactly once, whatever the nodes wrote and whenever it was killed."""

import json
import os
import signal
import sqlite3
import time

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from sqlalchemy import select

from slurm_gpuhealth.config.settings import Settings, Store
from slurm_gpuhealth.controller import ingest
from slurm_gpuhealth.outcomes import Event
from slurm_gpuhealth.store import nodes, open, query, records, schema
from tests.older import older

YEARS = 9 * 365 * 86400.0


@pytest.fixture
def shared(tmp_path):
    """Settings of a controller with a shared directory of its own."""
    (tmp_path / "shared").mkdir(0o700)
    return Settings(store=Store(url=f"file://{tmp_path}/shared", database=str(tmp_path / "store/cluster.db")))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shared"


@pytest.fixture
def store(shared):
    engine = open.open_store(shared)
    yield engine
    engine.dispose()


def record(seq, kind="finding", node="n1", key=None, sub=0, journal="ab12", clock=0.0, **row):
    """A line as a node ships it."""
    row = {"time": 100.0 + seq, "source": "xid", "code": "79", "severity": "fault", "started": 5.0, **row}
    whole = {"node": node, "journal": journal, "kind": kind, "seq": seq, "id": key or seq, "sub": sub, "clock": clock}
    return json.dumps({**whole, "row": row}).encode() + b"\n"


def head(seq, when=1000.0, clock=0.0, node="n1", journal="ab12", **more):
    whole = {"node": node, "journal": journal, "kind": "ship", "seq": seq, "time": when, "clock": clock}
    return json.dumps({**whole, **more}).encode() + b"\n"


def write(folder, *lines, name="n1.jsonl"):
    with (folder / name).open("ab") as file:
        file.write(b"".join(lines))


def take(store, shared, now=2000.0):
    return ingest.ingest(store, shared, now)


def rows(store, table=schema.finding):
    with open.reading(store) as db:
        return list(db.execute(select(table)))


def events(store, position=""):
    with open.reading(store) as db:
        return query.events(db, position)


def test_what_was_taken_in_is_not_taken_in_again(store, shared, folder):
    write(folder, head(2), record(1), record(2))
    assert take(store, shared).rows == 3
    assert take(store, shared).rows == 0
    write(folder, record(3))
    assert take(store, shared).rows == 1
    assert [row.id for row in rows(store)] == [1, 2, 3]


def test_the_same_records_again_change_nothing(store, shared, folder):
    write(folder, head(2), record(1), record(2))
    take(store, shared)
    position, _ = events(store)
    write(folder, head(2, when=1001.0), record(1), record(2))
    take(store, shared)
    assert len(rows(store)) == 2
    assert events(store, position)[1] == []


def test_a_row_that_changed_is_one_row_of_its_last_state_in_whatever_order_it_comes(store, shared, folder):
    write(folder, record(3, key=1, cleared=9.0), record(1, key=1))
    take(store, shared)
    write(folder, record(2, key=1, cleared=1.0))
    take(store, shared)
    assert [(row.seq, row.cleared) for row in rows(store)] == [(3, 9.0)]


def test_a_journal_begun_anew_is_another(store, shared, folder):
    write(folder, record(1), record(1, journal="cd34"))
    take(store, shared)
    assert len(rows(store)) == 2


def test_the_last_line_waits_until_it_is_whole(store, shared, folder):
    write(folder, record(1), record(2)[:-10])
    assert take(store, shared) == ingest.Taken(rows=1, files=1)
    write(folder, record(2)[-10:])
    assert take(store, shared).rows == 1
    assert len(rows(store)) == 2


def test_a_torn_line_that_was_cut_off_and_written_anew_is_read_whole(store, shared, folder):
    write(folder, record(1), record(2)[:50])
    take(store, shared)
    path = folder / "n1.jsonl"
    path.write_bytes(record(1) + record(3))
    assert take(store, shared).skipped == 0
    assert [row.id for row in rows(store)] == [1, 3]


def test_a_file_that_was_renamed_is_gone_on_with_and_removed_when_it_is_taken_in(store, shared, folder):
    write(folder, head(1), record(1))
    take(store, shared)
    write(folder, record(2))
    (folder / "n1.jsonl").rename(folder / "n1@17.jsonl")
    write(folder, head(3, when=1001.0), record(3))
    taken = take(store, shared)
    assert (taken.rows, taken.files) == (3, 2)
    assert [row.id for row in rows(store)] == [1, 2, 3]
    assert [path.name for path in folder.iterdir()] == ["n1.jsonl"]
    (folder / "n9.jsonl").mkdir()  # what can't be read keeps nothing else from being forgotten
    take(store, shared)
    assert len(rows(store, schema.file)) == 1


def test_a_file_that_came_back_from_a_backup_doubles_nothing(store, shared, folder):
    write(folder, head(3), record(1), record(2), record(3))
    take(store, shared)
    (folder / "n1.jsonl").write_bytes(head(3) + record(1) + record(4, message="x" * 300))
    take(store, shared)
    assert [row.id for row in rows(store)] == [1, 2, 3, 4]


HOSTILE = [
    b"no JSON at all",
    b"[1, 2]",
    b"{}",
    b"\x00" * 100,
    b"\xff\xfe",
    b"[" * 100000,
    record(5, node="other"),
    record(5, journal="../../etc"),
    record(5, kind="state"),
    record(5, kind=None),
    record(10**30),
    record(5, time="now"),
    record(5, time=float("nan")),
    record(5, time=10**400),
    *(record(5, time=when) for when in (1e308, -1e308, 1e18, -1.0)),
    *(record(5, clock=clock) for clock in (1e308, 5e9, -5e9)),
    record(5, cleared=1e18),
    record(5, kind="step", seconds=1e308),
    record(5, kind="figure", name="é" * 251, value=1.0),
    head(5, gpus=[["G" * 501, 0, "0000:1b:00", "1"]]),
    head(5, when=1e308),
    head(5, clock=-1e308),
    head(5, dropped=[1, 1.0, 1e18]),
    record(5, gpu=2**40),
    record(5, message={"a": 1}),
    record(5, time=None),
    record(5).replace(b'"row": {', b'"row": 7, "x": {'),
    head(5, clock=None),
    head(5, dropped="many"),
    head(5, gpus=[[1, 2]]),
]


@pytest.mark.parametrize("bad", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_is_none_of_ours_is_counted_kept_and_passed_over(store, shared, folder, bad):
    write(folder, record(1), bad.rstrip(b"\n") + b"\n", record(2))
    taken = take(store, shared)
    assert (taken.rows, taken.skipped) == (2, 1)
    assert taken.trouble[0].startswith("n1.jsonl, line 2: skipped: ")
    assert [(row.file, row.line) for row in rows(store, schema.skipped)] == [("n1.jsonl", 2)]
    assert take(store, shared) == ingest.Taken()


def test_a_line_that_is_too_long_is_skipped_once_also_while_it_grows(store, shared, folder, monkeypatch):
    monkeypatch.setattr(records, "LONGEST", 1000)
    write(folder, head(1), record(1), b"x" * 1500)
    taken = take(store, shared)
    assert (taken.rows, taken.skipped) == (2, 1)
    assert taken.trouble == ("n1.jsonl, line 3: skipped: longer than 1000 bytes",)
    for _ in range(3):
        assert take(store, shared) == ingest.Taken()
        write(folder, b"x" * 700)
        taken = take(store, shared)
        assert (taken.rows, taken.skipped, taken.trouble) == (0, 0, ())
    write(folder, b"x\n", record(2), b"no JSON\n")
    assert take(store, shared).trouble[0].startswith("n1.jsonl, line 5: skipped: not JSON")
    assert take(store, shared) == ingest.Taken()
    assert [row.id for row in rows(store)] == [1, 2]
    assert [row.line for row in rows(store, schema.skipped)] == [3, 5]


@pytest.mark.parametrize("beyond", [0, 1, 999, 1000, 5000])
def test_a_line_that_is_too_long_ends_where_it_ends(store, shared, folder, monkeypatch, beyond):
    monkeypatch.setattr(records, "LONGEST", 1000)
    write(folder, record(1), b"x" * (1000 + beyond) + b"\n", record(2))
    taken = take(store, shared)
    assert (taken.rows, taken.skipped) == (2, 1)
    assert take(store, shared) == ingest.Taken()


def test_a_line_that_was_too_long_and_was_cut_off_hides_nothing_that_comes_in_its_place(
    store, shared, folder, monkeypatch
):
    monkeypatch.setattr(records, "LONGEST", 1000)
    write(folder, record(1), b"x" * 1500)
    take(store, shared)
    (folder / "n1.jsonl").write_bytes(b"".join(record(number) for number in range(1, 30)))
    take(store, shared)
    assert [row.id for row in rows(store)] == list(range(1, 30))


def test_text_that_a_database_can_not_hold_is_shown_as_question_marks(store, shared, folder):
    write(folder, record(1, message="a\0b\ud800c" + "x" * 10**6))
    take(store, shared)
    assert rows(store)[0].message.startswith("a?b?c")
    assert len(rows(store)[0].message) == records.TEXT


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from([*json.loads(head(1)), "id", "row", "gpus"]), inner)
    ),
)


@trials(deadline=None)
@given(VALUES)
def test_whatever_a_line_holds_it_is_added_or_refused(given):
    batch = records.Batch()
    line = given if not isinstance(given, dict) else {"node": "n1", "journal": "ab", "kind": "ship", "seq": 1, **given}
    try:
        batch.add(json.dumps(line).encode(), "n1")
    except ValueError:
        assert batch.size == 0


def test_files_of_other_kinds_and_names_are_left_alone(store, shared, folder, tmp_path):
    (folder / "n2.jsonl").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "n3.jsonl")
    (folder / "n4.jsonl").mkdir()
    (folder / "notes.txt").write_text("mine")
    write(folder, record(1))
    taken = take(store, shared)
    assert taken.rows == 1
    assert len(taken.trouble) == 3
    assert (folder / "notes.txt").exists()


def test_a_directory_that_is_not_there_is_trouble_and_no_more(store, shared, folder):
    folder.rmdir()
    assert "No such file" in take(store, shared).trouble[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_a_directory_in_which_others_could_write_is_not_read(store, shared, folder):
    write(folder, record(1))
    for where in (folder, folder.parent):
        os.chown(where, 5, 5)
        taken = take(store, shared)
        assert (taken.rows, len(taken.trouble)) == (0, 1)
        assert f"{where} belongs to uid 5" in taken.trouble[0]
        assert f"chown root {where}" in taken.trouble[0]
        os.chown(where, 0, 0)
        where.chmod(0o770)
        assert f"chmod go-w {where}" in take(store, shared).trouble[0]
        where.chmod(0o700)
    assert take(store, shared).rows == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_a_file_that_somebody_else_wrote_or_could_write_is_not_read_and_holds_up_nobody(store, shared, folder):
    for name in ("n1", "n2", "n3", "n4"):
        write(folder, record(1, node=name), name=f"{name}.jsonl")
    os.chown(folder / "n1.jsonl", 5, 5)
    os.chmod(folder / "n2.jsonl", 0o666)
    os.link(folder / "n3.jsonl", folder.parent / "another")
    taken = take(store, shared)
    assert (taken.rows, [one.split(";")[0] for one in taken.trouble]) == (
        1,
        [
            "n1.jsonl: belongs to uid 5",
            "n2.jsonl: can be written by others (mode 0666)",
            "n3.jsonl: has 2 names (hard links): it may be another file",
        ],
    )
    os.chown(folder / "n1.jsonl", 0, 0)
    assert take(store, shared).rows == 1


def test_the_clock_of_a_node_is_the_median_and_its_times_are_corrected_by_what_it_was_at_the_time(
    store, shared, folder
):
    for number, clock in enumerate((30.0, 30.2, -500.0, 30.1), 1):
        write(folder, head(number, when=1000.0 + number + clock, clock=clock), record(number, clock=clock, time=200.0))
        take(store, shared)
    (node,) = rows(store, schema.node)
    assert node.clock_offset == pytest.approx(30.05)
    assert (node.position, node.last_shipped) == (4, pytest.approx(1004.0))
    assert events(store)[1][0].time == pytest.approx(170.0)


@pytest.mark.parametrize("clock", [YEARS, 0.0])
def test_a_clock_that_was_once_in_the_future_hides_nothing_that_comes_later(store, shared, folder, clock):
    gpu, other = ([f"GPU-{name}", 0, "0000:1b:00", "1"] for name in "ab")
    write(folder, head(1, when=1000.0 + YEARS, clock=clock, about={"driver": "1"}, gpus=[gpu]))
    take(store, shared, 1000.0)
    for when, driver in ((1500.0, "2"), (1400.0, "3")):
        write(folder, head(2, when=when, about={"driver": driver}, gpus=[other]))
        take(store, shared, 1600.0)
    (node,) = rows(store, schema.node)
    assert (node.last_shipped, node.driver) == (1500.0, "2")
    with open.reading(store) as db:
        assert [one["uuid"] for one in nodes.gpus(db, "n1")] == ["GPU-b"]


def test_a_node_that_an_older_controller_took_for_one_of_the_future_is_heard_again(store, shared, folder):
    write(folder, head(1))
    take(store, shared)
    with store.begin() as db:
        db.execute(schema.node.update().values(last_shipped=YEARS))
    write(folder, head(2, when=1500.0))
    take(store, shared)
    assert rows(store, schema.node)[0].last_shipped == 1500.0


def test_what_a_node_dropped_is_known(store, shared, folder):
    write(folder, head(5, dropped=[12, 10.0, 20.0]), record(5))
    take(store, shared)
    (node,) = rows(store, schema.node)
    assert (node.dropped, node.dropped_from, node.dropped_to) == (12, 10.0, 20.0)


def test_what_a_node_says_about_itself_is_kept_and_the_newest_counts(store, shared, folder):
    write(folder, head(1, about={"driver": "580.2", "mode": "shadow", "rack": "r7"}), head(1, when=1001.0))
    write(folder, head(1, when=900.0, about={"driver": "550.1"}))
    taken = take(store, shared)
    (node,) = rows(store, schema.node)
    assert (taken.rows, taken.skipped) == (3, 0)
    assert (node.driver, node.mode, node.dcgm, node.last_shipped) == ("580.2", "shadow", "", 1001.0)


def test_what_is_acknowledged_for_ever_is_taken_in(store, shared, folder):
    write(folder, record(1, acked=2.5e11))
    assert take(store, shared).skipped == 0


def test_a_version_is_a_word(store, shared, folder):
    write(folder, head(1, about={"driver": "5" * 200_000}))
    take(store, shared)
    assert rows(store, schema.node)[0].driver == "5" * records.WORD


@pytest.mark.parametrize("about", [[], "580", {"driver": 580}])
def test_what_is_no_word_about_a_node_is_skipped(store, shared, folder, about):
    write(folder, head(1, about=about))
    assert take(store, shared).skipped == 1


def test_events_come_in_the_order_in_which_they_came_and_each_once(store, shared, folder):
    write(folder, record(1), record(2, severity="info", source="host"), record(3, severity="info", source="xid"))
    take(store, shared)
    position, found = events(store)
    assert [event.time for event in found] == [101.0, 103.0]
    write(folder, record(4, key=1, acted=5), record(5, key=3, severity="warning"))
    take(store, shared)
    later, found = events(store, position)
    assert [(event.time, event.severity) for event in found] == [(105.0, "warning")]
    assert events(store, later) == (later, [])


def test_an_event_says_what_the_finding_said(store, shared, folder):
    more = {"uuid": "GPU-1", "pci": "0000:01:00", "details": '{"action": "RESET_GPU"}', "job": 7, "count": 3}
    write(folder, record(1, **more), record(2, gpu=0, details="broken"))
    take(store, shared)
    detail = {"action": "RESET_GPU", "pci": "0000:01:00", "job": 7, "count": 3}
    first, second = events(store)[1]
    assert first == Event(101.0, "n1", "GPU-1", "xid", "79", "fault", detail)
    assert (second.gpu, second.detail) == (0, {})


def test_a_diagnostic_is_one_event_when_all_gpus_pass_and_one_for_each_that_fails(store, shared, folder):
    def test(seq, uuid, outcome, when):
        return record(seq, "diagnostic", level=3, uuid=uuid, outcome=outcome, time=when, seconds=60.0)

    write(folder, test(1, "GPU-1", "pass", 100.0), test(2, "GPU-2", "pass", 100.0))
    write(folder, test(3, "GPU-1", "pass", 500.0), test(4, "GPU-2", "fail", 500.0))
    write(folder, test(5, "GPU-1", "not-testable", 900.0))
    take(store, shared)
    told = [(event.time, event.gpu, event.code, event.detail["passed"]) for event in events(store)[1]]
    assert told == [(160.0, None, "L3", True), (560.0, "GPU-2", "L3", False)]


def test_a_gpu_that_was_changed_and_a_repair_are_repairs(store, shared, folder):
    write(folder, head(1, gpus=[["GPU-1", 0, "0000:01:00", "s1"], ["GPU-2", 1, "0000:02:00", "s2"]]), record(1))
    take(store, shared)
    position, found = events(store)
    assert len(found) == 1
    write(folder, head(2, when=2000.0, gpus=[["GPU-1", 0, "0000:01:00", "s1"], ["GPU-9", 1, "0000:02:00", "s9"]]))
    write(folder, record(3, "step", rung="repair", outcome="pass", time=50.0, seconds=10.0, uuid="GPU-1", fact="Xid79"))
    write(folder, record(4, "step", rung="L3", outcome="pass"))
    take(store, shared)
    told = sorted((event.time, event.source, event.gpu) for event in events(store, position)[1])
    assert told == [(60.0, "repair", "GPU-1"), (2000.0, "repair", "GPU-2")]


def test_the_runs_and_the_log_of_a_job_are_found(store, shared, folder):
    run = {"gpus": "GPU-1,GPU-2", "ended": 80.0, "exit_code": 1, "signal": 0, "outcome": "failed", "user": "alice"}
    write(folder, record(1, "run", key=7, sub=1, clock=2.0, **{**run, "started": 10.0}))
    write(folder, record(2, "log", key=7, sub=1, reading='{"verdict": "node"}'))
    write(folder, record(1, "run", node="n2", key=7, sub=1, gpus="", outcome=None), name="n2.jsonl")
    take(store, shared)
    with open.reading(store) as db:
        first, second = sorted(query.runs(db, 7), key=lambda one: one["node"])
        assert (first["gpus"], first["attempt"], first["started"], first["ended"]) == (["GPU-1", "GPU-2"], 1, 8.0, 78.0)
        assert (second["gpus"], second["ended"]) == ([], None)
        assert query.logs(db, 7, 1) == {"verdict": "node"}
        assert query.logs(db, 7, 0) is None


def test_the_end_of_a_run_is_news(store, shared, folder):
    write(folder, record(1, "run", key=7))
    take(store, shared)
    (begun,) = rows(store, schema.run)
    write(folder, record(1, "run", key=7), record(2, "run", key=7, ended=80.0))
    take(store, shared)
    (ended,) = rows(store, schema.run)
    assert (begun.ended, ended.ended) == (None, 80.0)
    assert ended.taken > begun.taken


def test_pruning_forgets_by_age(store, shared, folder):
    write(folder, record(1, time=10.0), record(2, time=1000.0), record(1, "run", started=10.0))
    take(store, shared)
    query.prune(store, 500.0)
    assert [row.time for row in rows(store)] == [1000.0]
    assert rows(store, schema.run) == []


def test_a_newer_store_is_refused_and_an_older_one_is_brought_up_to_date(store, shared, monkeypatch):
    with store.begin() as db:
        db.execute(schema.version.update().values(version=schema.VERSION + 1))
    with pytest.raises(open.StoreError, match="a newer gpuhealth has written it"):
        open.open_store(shared)
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 2)
    monkeypatch.setitem(schema.MIGRATIONS, schema.VERSION, ("ALTER TABLE node ADD COLUMN rack TEXT",))
    open.open_store(shared).dispose()
    with sqlite3.connect(shared.store.database) as db:
        assert "rack" in {row[1] for row in db.execute("PRAGMA table_info(node)")}
        assert db.execute("SELECT version FROM schema_version").fetchall() == [(schema.VERSION,)]
    open.open_store(shared).dispose()


def test_a_store_of_the_first_version_gets_what_it_lacks(store, shared):
    with store.begin() as db:
        for name in ("run_taken", "joblog_taken"):
            db.exec_driver_sql(f"DROP INDEX {name}")
        older(db, 1)
    open.open_store(shared).dispose()
    with sqlite3.connect(shared.store.database) as db:
        names = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
        assert {"run_taken", "joblog_taken", "finding_open"} <= names
        assert set(schema.ABOUT) <= {row[1] for row in db.execute("PRAGMA table_info(node)")}


def test_a_store_that_can_not_be_opened_says_where_and_why(tmp_path):
    (tmp_path / "cluster.db").mkdir()
    with pytest.raises(open.StoreError, match="unable to open"):
        open.open_store(Settings(store=Store(database=str(tmp_path / "cluster.db"))))
    with pytest.raises(open.StoreError, match=r"db\.nowhere\.invalid"):
        open.open_store(Settings(store=Store(url="postgresql://me:secret@db.nowhere.invalid/x", timeout=2.0)))


def test_the_store_is_its_owners_alone(store, shared):
    assert os.stat(os.path.dirname(shared.store.database)).st_mode & 0o77 == 0


def taking(shared):
    """A process that takes in."""
    pid = os.fork()
    if not pid:
        try:
            ingest.AT_ONCE = 50
            ingest.ingest(open.open_store(shared), shared, time.time())
        finally:
            os._exit(0)
    return pid


def test_killed_at_any_moment_of_taking_in_nothing_is_lost_or_doubled(store, shared, folder):
    whole = 0
    for attempt in range(8):
        for node in ("n1", "n2"):
            lines = [record(whole + number, node=node) for number in range(1, 401)]
            write(folder, head(whole, when=1000.0 + attempt, node=node), *lines, name=f"{node}.jsonl")
        whole += 400
        if attempt % 3 == 2:
            (folder / "n1.jsonl").rename(folder / f"n1@{attempt}.jsonl")
        pid = taking(shared)
        time.sleep(0.015 * attempt)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    take(store, shared)
    for node in ("n1", "n2"):
        assert sorted(row.id for row in rows(store) if row.node == node) == list(range(1, whole + 1))
    numbers = [row.taken for row in rows(store)]
    assert len(set(numbers)) == len(numbers)


def test_the_file_is_private_and_its_folder_that_is_not_only_ours_stays_as_it_is(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "cluster.db"
    open.open_store(Settings(store=Store(database=str(path)))).dispose()
    path.chmod(0o644)
    engine = open.open_store(Settings(store=Store(database=str(path))))
    with engine.begin() as db:
        db.execute(schema.cursor.insert().values(name="x"))
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    with pytest.raises(open.StoreError, match="others can write there"):
        open.open_store(Settings(store=Store(database=str(tmp_path / "cluster.db"))))
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("name", ["n[1-500]", "n\udcff", "n1,n2", "@all"])
def test_a_file_of_no_node_is_said_and_holds_up_nobody(store, shared, folder, name):
    write(folder, record(1, node=name), name=f"{name}.jsonl")
    write(folder, head(1), record(1), name="n1@\udcff.jsonl")
    taken = take(store, shared)
    assert (taken.rows, [row.node for row in rows(store)]) == (2, ["n1"])
    assert taken.trouble[0].endswith("is not a node's file")


def test_a_count_that_no_database_can_hold_is_skipped(store, shared, folder):
    write(folder, head(1, dropped=[1e300, 0, 0]), head(2, dropped=[1 << 63, 0, 0]), head(3, dropped=[5, 0.5, 1.5]))
    assert take(store, shared)[:2] == (1, 2)
    assert [row.dropped for row in rows(store, schema.node)] == [5]


def test_what_is_appended_to_a_file_that_was_cut_is_taken_in(store, shared, folder):
    write(folder, head(1), record(1), record(2), record(3))
    take(store, shared)
    os.truncate(folder / "n1.jsonl", len(head(1)) + len(record(1)))
    take(store, shared)
    write(folder, record(4), record(5))  # as long as what was cut off
    assert take(store, shared).rows == 2


@pytest.mark.parametrize("slots", [(None, None), ("", ""), ("0000:01:00", "0000:01:00")])
def test_a_gpu_that_is_still_there_or_whose_slot_is_not_known_was_not_replaced(store, shared, folder, slots):
    write(folder, head(1, gpus=[["GPU-1", 0, slots[0], None]]), head(2, 1001.0, gpus=[["GPU-2", 1, slots[1], None]]))
    both = [["GPU-1", 0, slots[0], None], ["GPU-3", 1, slots[1], None]]
    write(folder, head(3, 1002.0, gpus=both))
    take(store, shared)
    replaced = {row.replaces for row in rows(store, schema.gpu)}
    assert replaced == ({""} if not slots[0] else {"", "GPU-1", "GPU-2"})
