"""The cluster's record for real: PostgreSQL, kills and restarts under load, and nodes of a real cluster that ship."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select

from slurm_gpuhealth.config.settings import Paths, Settings, Store
from slurm_gpuhealth.controller import ingest
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.ship import outbox
from slurm_gpuhealth.store import open, query, schema
from tests.daemons import until
from tests.lab import Lab, fresh
from tests.postgresql import BIN, NODES, SECRET, Postgresql

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts daemons as other users")
ADD = (
    "INSERT INTO finding (time, seen, source, code, severity, rung, mode, message, standing, count, details)"
    " VALUES (?, ?1, 'xid', ?, 'fault', '', 'enforce', ?, 0, 1, '{}')"
)
KILLS = 100 if os.environ.get("GPUHEALTH_SOAK") else 10


@pytest.fixture(scope="module")
def server():
    if not (BIN / "initdb").exists():
        pytest.skip(f"no PostgreSQL in {BIN}")
    with Postgresql(fresh("store-postgresql")) as server:
        yield server


@pytest.fixture
def database(server):
    """Settings of a controller on an empty database, whose nodes' role may insert and no more."""
    return Settings(store=server.store()[0])


def node(folder, controller, name="n1"):
    """Settings of a node that ships to the controller's store."""
    boot = folder / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True, exist_ok=True)
    boot.write_text("boot\n")
    paths = Paths(state=f"{folder}/{name}/state", run=f"{folder}/{name}/run", proc=str(folder / "proc"))
    url = controller.store.url.replace("postgres@", f"{NODES}@")
    return Settings(paths=paths, store=replace(controller.store, url=url, timeout=5.0))


def add(journal, count, prefix):
    journal.together(lambda: [journal.write(ADD, time.time(), f"{prefix}-{n}", "x" * 100) for n in range(count)])


def codes(engine):
    """Node → codes of its findings in the store, sorted."""
    found = {}
    with open.reading(engine) as db:
        for row in db.execute(select(schema.finding.c.node, schema.finding.c.code)):
            found.setdefault(row.node, []).append(row.code)
    return {name: sorted(list_) for name, list_ in found.items()}


def in_journal(settings):
    return sorted(row[0] for row in open_journal(settings.paths).rows("SELECT code FROM finding"))


def drain(settings, name):
    """Ship until nothing waits."""
    journal = open_journal(settings.paths)
    until(
        lambda: outbox.ship(settings, journal, name, 20) or journal.one("SELECT count(*) FROM outbox") == (0,), name, 60
    )


def test_a_role_that_may_only_insert_ships_over_tls(server, database, tmp_path, capfd):
    settings = node(tmp_path, database)
    journal = open_journal(settings.paths)
    add(journal, 2000, "a")
    journal.put("gpus", [{"uuid": "GPU-1", "index": 0, "pci": "0000:01:00", "serial": "77"}])
    outbox.ship(settings, journal, "n1", 20)
    assert journal.one("SELECT count(*) FROM outbox") == (0,), capfd.readouterr().err
    for statement in ("SELECT * FROM inbox", "DELETE FROM inbox", "SELECT * FROM finding", "TRUNCATE inbox"):
        with server.connect(NODES) as db, pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute(statement)
    engine = open.open_store(database)
    assert ingest.ingest(engine, database, time.time()).rows == 2001
    assert ingest.ingest(engine, database, time.time()).rows == 0
    assert codes(engine) == {"n1": in_journal(settings)}
    journal.write("UPDATE finding SET cleared = 5, severity = 'info' WHERE id = 1")
    shipped = journal.get("shipped")
    outbox.ship(settings, journal, "n1", 20)
    journal.put("shipped", shipped)
    for statement in outbox.journal_schema.refill():  # as if it had been killed before it knew that all had arrived
        journal.write(statement)
    outbox.ship(settings, journal, "n1", 20)
    ingest.ingest(engine, database, time.time())
    assert codes(engine) == {"n1": in_journal(settings)}
    with open.reading(engine) as db:
        assert len(query.events(db)[1]) == 2000
        assert db.execute(select(schema.finding.c.cleared).where(schema.finding.c.id == 1)).scalar() == 5
        known = db.execute(select(schema.node)).one()
        assert abs(known.clock_offset) < 1
        assert db.execute(select(schema.gpu.c.serial)).scalar() == "77"
        assert db.execute(select(schema.inbox)).all() == []
    query.prune(engine, time.time() + 1)
    assert codes(engine) == {}
    engine.dispose()


def test_rows_that_no_node_of_ours_inserts_hold_up_nobody(server, database):
    hostile = [("n1", "ab", seq, '{"kind": "ship"}') for seq in (-(1 << 63), (1 << 63) - 1)]
    with server.connect(NODES) as db:
        db.cursor().executemany(
            "INSERT INTO inbox VALUES (%s, %s, %s, %s)", [*hostile, ("n[1-9]", "ab", 1, "{}"), ("", "", 0, "")]
        )
    engine = open.open_store(database)
    assert ingest.ingest(engine, database, time.time())[:2] == (0, 4)
    with open.reading(engine) as db:
        assert db.execute(select(schema.inbox)).all() == []
    engine.dispose()


def test_what_postgresql_refuses_is_said_in_its_words_and_waits(server, database, tmp_path, capfd):
    settings = node(tmp_path, database)
    journal = open_journal(settings.paths)
    add(journal, 1, "a")
    for url, words in (
        (settings.store.url.replace("verify-full", "disable"), "no encryption"),
        (settings.store.url.replace("localhost", "127.0.0.1"), "does not match host name"),
        (settings.store.url.replace(NODES, "nobody"), "password"),
        (settings.store.url.replace("/postgres?", "/elsewhere?"), "does not exist"),
    ):
        outbox.ship(replace(settings, store=replace(settings.store, url=url)), journal, "n1", 20)
        assert words in journal.get("shipped")["error"]
        assert SECRET not in capfd.readouterr().err
    assert journal.one("SELECT count(*) FROM outbox") == (1,)
    outbox.ship(settings, journal, "n1", 20)
    assert journal.one("SELECT count(*) FROM outbox") == (0,)


def test_lines_in_the_inbox_that_are_none_of_ours_are_passed_over(server, database, tmp_path):
    engine = open.open_store(database)
    good = {"node": "n1", "journal": "ab", "kind": "finding", "seq": 3, "id": 1, "sub": 1, "clock": 0.0}
    row = {"time": 1.0, "message": "a\0\ud800", "count": 2**62, "gpu": 3, "source": "xid", "severity": "fault"}
    lines = ["no JSON", json.dumps(good).replace("n1", "n2"), json.dumps({**good, "row": row})]
    lines += [json.dumps({**good, "row": {**row, "gpu": 2**31}}), "[" * 10**6]
    with server.connect(NODES) as db:
        for number, line in enumerate(lines):
            db.execute("INSERT INTO inbox VALUES ('n1', 'ab', %s, %s)", (number, line))
    taken = ingest.ingest(engine, database, 5.0)
    assert (taken.rows, taken.skipped) == (1, 4)
    with open.reading(engine) as db:
        assert db.execute(select(schema.finding.c.message)).scalars().all() == ["a??"]
        assert len(db.execute(select(schema.skipped)).all()) == 4
    engine.dispose()


def test_of_many_that_open_an_empty_database_at_once_one_makes_the_tables(server, database):
    with server.connect() as db:
        db.execute("DROP SCHEMA public CASCADE")
        db.execute("CREATE SCHEMA public")
    code = (
        "import sys; from slurm_gpuhealth.config.settings import *; from slurm_gpuhealth.store.open import open_store;"
        "open_store(Settings(store=Store(url=sys.argv[1], password_file=sys.argv[2])))"
    )
    argv = [sys.executable, "-c", code, server.url(), str(server.passwords)]
    programs = [subprocess.Popen(argv) for _ in range(4)]
    assert [program.wait(60) for program in programs] == [0] * 4
    open.open_store(database).dispose()


SHIP = """
import sys, time
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.config.settings import Paths, Settings, Store
from slurm_gpuhealth.ship import outbox as ship, file as ship_file
name, state, run, proc, url, passwords, add = sys.argv[1:8]
ship_file.ROTATE = 50000
store = Store(url=url, password_file=passwords, timeout=5.0)
settings = Settings(paths=Paths(state=state, run=run, proc=proc), store=store)
journal = open_journal(settings.paths)
print("ready", flush=True)
while True:
    for _ in range(20):
        journal.write(add, time.time(), str(time.time_ns()), "x" * 200)
    journal.write("UPDATE finding SET cleared = 5 WHERE cleared IS NULL AND id % 3 = 0")
    ship.ship(settings, journal, name, 20)
    time.sleep(0.02)
"""
TAKE = """
import sys, time
from slurm_gpuhealth.config.settings import Settings, Store
from slurm_gpuhealth.controller import ingest
from slurm_gpuhealth.store import open
ingest.AT_ONCE = 100
settings = Settings(store=Store(url=sys.argv[1], database=sys.argv[2], password_file=sys.argv[3], timeout=5.0))
print("ready", flush=True)
while True:
    try:
        ingest.ingest(open.open_store(settings), settings, time.time())
    except Exception as error:
        if "sqlalchemy" not in type(error).__module__ and not isinstance(error, open.StoreError):
            raise
    time.sleep(0.02)
"""


class Load:
    """A node that never stops to find and ship, and a controller that never stops to take in, as processes."""

    def __init__(self, controller, nodes):
        store = controller.store
        self.argvs = {
            name: [SHIP, name, one.paths.state, one.paths.run, one.paths.proc, one.store.url, store.password_file, ADD]
            for name, one in nodes.items()
        }
        self.argvs["controller"] = [TAKE, store.url, store.database, store.password_file]
        self.running = {}

    def __enter__(self):
        for name in self.argvs:
            self.start(name)
        return self

    def __exit__(self, *_):
        for name in self.argvs:
            self.kill(name)

    def start(self, name):
        argv = [sys.executable, "-c", *self.argvs[name]]
        self.running[name] = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.running[name].stdout.readline()

    def kill(self, name, children=True):
        """Also in the middle of what its child does; or only the program, and the child lives on beside the next."""
        program = self.running[name]
        assert program.poll() is None, f"{name} ended by itself with {program.returncode}"
        program.send_signal(signal.SIGSTOP)
        pids = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        for pid in pids if children else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        program.send_signal(signal.SIGKILL)
        program.wait()


def settled(controller, nodes):
    """After the load: ship and take in the rest, and compare what the nodes have with what the store has."""
    for name, one in nodes.items():
        drain(one, name)
    engine = open.open_store(controller)
    taken = ingest.ingest(engine, controller, time.time())
    assert (taken.skipped, taken.trouble) == (0, ())
    found = codes(engine)
    total = 0
    for name, one in nodes.items():
        assert found[name] == in_journal(one)
        total += len(found[name])
        own = dict(open_journal(one.paths).rows("SELECT code, cleared FROM finding"))
        with open.reading(engine) as db:
            table = schema.finding
            rows = db.execute(select(table.c.code, table.c.cleared).where(table.c.node == name))
            assert {row.code: row.cleared for row in rows} == own
    with open.reading(engine) as db:
        assert len(query.events(db)[1]) == total
    engine.dispose()
    return total


def killed_at_random(controller, nodes, kills):
    chance = random.Random(4)  # noqa: S311
    with Load(controller, nodes) as load:
        for _ in range(kills):
            time.sleep(chance.uniform(0, 0.15))
            name = chance.choice(list(load.argvs))
            load.kill(name, children=chance.random() < 0.8)
            load.start(name)
    return settled(controller, nodes)


def test_killed_at_random_points_nothing_is_lost_or_doubled(tmp_path):
    (tmp_path / "shared").mkdir(0o700)
    store = Store(url=f"file://{tmp_path}/shared", database=f"{tmp_path}/store/cluster.db")
    controller = Settings(store=store)
    nodes = {name: node(tmp_path, controller, name) for name in ("n1", "n2")}
    assert killed_at_random(controller, nodes, KILLS) > KILLS


def test_killed_at_random_points_postgresql_loses_and_doubles_nothing(server, database, tmp_path):
    nodes = {name: node(tmp_path, database, name) for name in ("n1", "n2")}
    assert killed_at_random(database, nodes, KILLS) > KILLS


def test_postgresql_stopped_and_started_under_load_loses_and_doubles_nothing(server, database, tmp_path):
    nodes = {name: node(tmp_path, database, name) for name in ("n1", "n2", "n3")}
    with Load(database, nodes) as load:
        for sign in (signal.SIGINT, signal.SIGQUIT, signal.SIGINT, signal.SIGQUIT):
            time.sleep(2)
            server.stop(sign)
            time.sleep(1)
            server.start()
        time.sleep(2)
        assert all(program.poll() is None for program in load.running.values())
    assert settled(database, nodes) > 300


def test_the_nodes_of_a_real_cluster_ship_what_they_saw_and_what_ran(tmp_path):
    with Lab(fresh("store"), nodes=2, gpus=2, dbd=False) as lab:
        shared = lab.lab / "shared"
        shared.mkdir(mode=0o700)
        lab.configure(f'\n[store]\nurl = "file://{shared}"\n')
        store = Store(url=f"file://{shared}", database=str(lab.lab / "store/cluster.db"))
        controller = Settings(store=store)
        engine = open.open_store(controller)
        lab.wait(lab.submit("exit 3", gres="gpu:1", nodelist="n1"), "FAILED")
        lab.inject("n2", "xid", 79, "--gpu", 1)
        lab.until_reason("n2", "gpuhealth:Xid79")

        def arrived():
            taken = ingest.ingest(engine, controller, time.time())
            assert (taken.skipped, taken.trouble) == (0, ())
            with open.reading(engine) as db:
                ended = db.execute(select(schema.run).where(schema.run.c.ended.is_not(None))).first()
                drained = db.execute(select(schema.decision).where(schema.decision.c.action == "drained")).first()
                return (ended, drained, query.events(db)[1]) if ended and drained else None

        ended, drained, events = until(arrived, "what n1 and n2 know, in the store")
        assert (ended.node, ended.exit_code, ended.outcome) == ("n1", 3, "exit 3")
        assert ended.gpus.startswith("GPU-")
        assert drained.node == "n2"
        assert any((one.node, one.source, one.code, one.severity) == ("n2", "xid", "79", "fault") for one in events)
        with open.reading(engine) as db:
            assert {row.node for row in db.execute(select(schema.gpu))} == {"n1", "n2"}
        engine.dispose()
