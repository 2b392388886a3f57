"""`gpuhealth correlate` cut short anywhere, and on PostgreSQL: at the end it says what an undisturbed one says."""

import collections
import json
import os
import random
import re
import signal
import subprocess
import time

import pytest
from click.testing import CliRunner
from sqlalchemy import select

from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Paths, Store
from slurm_gpuhealth.controller import actions, run
from slurm_gpuhealth.ship import file as ship_file
from slurm_gpuhealth.ship import line
from slurm_gpuhealth.ship import postgresql as ship_postgresql
from slurm_gpuhealth.store import judged, schema
from slurm_gpuhealth.store.open import open_store, reading
from tests.daemons import PATIENCE, until
from tests.lab import BIN as PROGRAMS
from tests.lab import fresh
from tests.ledger import JOBS, LEMON, Ledger
from tests.postgresql import BIN, Postgresql

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts daemons as other users")
KILLS = 100 if os.environ.get("GPUHEALTH_SOAK") else 10


@pytest.fixture(autouse=True)
def _one_clock(monkeypatch):
    """By how much a node's clock seems to be ahead of the store's is chance here, of a millisecond."""
    for module in (ship_file, ship_postgresql):
        monkeypatch.setattr(module, "lines", lambda batch, before, *_: line.lines(batch, before, before, before))


@pytest.fixture(scope="module")
def server():
    if not (BIN / "initdb").exists():
        pytest.skip(f"no PostgreSQL in {BIN}")
    with Postgresql(fresh("correlate-postgresql")) as server:
        yield server


@pytest.fixture
def calm(tmp_path):
    """Undisturbed, on SQLite."""
    return ledger(tmp_path / "calm", time.time() // 3600 * 3600 - 20 * 3600)


def ledger(folder, begin):
    (folder / "shared").mkdir(parents=True, mode=0o700)
    store = Store(url=f"file://{folder}/shared", database=f"{folder}/store/cluster.db")
    return Ledger(folder, store, store, begin)


def ran(settings, now, seconds=PATIENCE):
    """Whether a run in a process of its own ended by itself; after `seconds` it is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            run.once(settings, now)
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.WIFEXITED(os.waitpid(pid, 0)[1])


def content(settings):
    """What the correlator came to, and all that it counted; numbers to be compared as such."""
    engine = open_store(settings)
    with reading(engine) as db:
        found = {}
        for table, drop in ((schema.verdict, "scored"), (schema.suspicion, ""), (schema.state, "")):
            keys = [column.name for column in table.primary_key.columns]
            for row in db.execute(select(table)).mappings():
                values = {**row, "data": json.loads(row["data"])}
                found[(table.name, *(row[key] for key in keys))] = {k: v for k, v in values.items() if k != drop}
        for table in (schema.attempt, schema.attempt_node, schema.finding, schema.run, schema.joblog):
            found[table.name] = len(db.execute(select(table)).all())
    engine.dispose()
    return found


def same(one, other):
    if isinstance(one, float) or isinstance(other, float):
        return one == pytest.approx(other, rel=1e-9, abs=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def difference(one, other):
    return [(key, one.get(key), other.get(key)) for key in {**one, **other} if not same(one.get(key), other.get(key))]


def requeued(settings):
    """Job → how often it was put back, as the store has it."""
    engine = open_store(settings)
    with reading(engine) as db:
        return collections.Counter(
            db.execute(select(schema.action.c.job).where(schema.action.c.kind == "requeue")).scalars()
        )


def to_requeue(settings):
    """Jobs that surely died of their node."""
    with reading(open_store(settings)) as db:
        found = judged.scored_since(db, 0.0)
    return {one.job for one in found if one.cause == "node" and one.confidence >= actions.SURE}


def counted(found):
    """Causes and counts: what was told between accounting and the nodes' records moves the numbers a little."""
    kept = {key: one for key, one in found.items() if isinstance(key, str)}
    kept |= {key: (one["cause"], one["node"]) for key, one in found.items() if key[0] == "verdict"}
    kept |= {key: (one["data"][2], one["data"][9]) for key, one in found.items() if key[:2] == ("state", "node")}
    return kept


def told(calm, wild, exact=True):
    """Nothing lost, nothing counted twice."""
    expected, found = content(calm.settings), content(wild.settings)
    if exact:
        assert difference(expected, found) == []
    else:
        assert counted(expected) == counted(found)
    assert LEMON in {row["node"] for key, row in found.items() if key[0] == "suspicion"}
    assert max(requeued(wild.settings).values()) == 1
    assert to_requeue(wild.settings) <= set(requeued(wild.settings))
    done = collections.Counter(map(int, wild.requeued.read_text().split()))
    assert max(done.values()) == 1
    return found


def killed_at_random(calm, wild):
    chance, kills, part, took = random.Random(6), 0, 0, 0.3  # noqa: S311
    while kills < KILLS:
        part += 1
        for one in (calm, wild):
            one.tell(part)
        assert ran(calm.settings, calm.now(part))
        while chance.random() < 0.75:
            kills += not ran(wild.settings, wild.now(part), chance.uniform(0, took))
        started = time.monotonic()
        assert ran(wild.settings, wild.now(part))
        took = 0.7 * took + 0.3 * (time.monotonic() - started)
    for one in (calm, wild):
        run.once(one.settings, one.now(part + 1))
    assert told(calm, wild)["attempt"] == JOBS * part


def test_killed_at_random_points_it_judges_as_if_it_had_not_been(calm, tmp_path):
    killed_at_random(calm, ledger(tmp_path / "wild", calm.begin))


def test_killed_at_random_points_on_postgresql_it_judges_as_sqlite_undisturbed(calm, server, tmp_path):
    killed_at_random(calm, Ledger(tmp_path / "wild", *server.store(), calm.begin))


def test_what_the_nodes_ship_an_hour_late_is_heard_all_the_same(calm, tmp_path):
    late = ledger(tmp_path / "late", calm.begin)
    ship_now, late.ship = late.ship, lambda: False
    for part in range(12):
        for one in (calm, late):
            one.tell(part)
            run.once(one.settings, one.now(part))
        if part % 6 == 5:
            assert ship_now()
    for one in (calm, late):
        run.once(one.settings, one.now(12))
    expected, found = content(calm.settings), content(late.settings)
    assert counted(expected) == counted(found)
    assert log_says(expected) == log_says(found)
    assert len(log_says(found)) > 5


def log_says(found):
    """Attempts whose verdict weighs what their log said."""
    said = {key: {term["text"] for term in row["data"]["terms"]} for key, row in found.items() if key[0] == "verdict"}
    return {key for key, terms in said.items() if any(text.startswith("its log shows") for text in terms)}


CONFIG = """
[paths]
state = "{paths.state}"
run = "{paths.run}"
[slurm]
scontrol = "{slurm.scontrol}"
sinfo = "{slurm.sinfo}"
[accounting]
sacct = "{accounting.sacct}"
sacctmgr = "{accounting.sacctmgr}"
[correlate]
requeue = true
settle = "0s"
[store]
url = "{store.url}"
database = "{store.database}"
password_file = "{store.password_file}"
timeout = "5s"
"""


def config(one, host=""):
    """The ledger's settings as a file, for another host if need be."""
    path = one.folder / f"gpuhealth{host}.toml"
    paths = Paths(state=f"{one.settings.paths.state}{host}", run=f"{one.settings.paths.run}{host}")
    path.write_text(CONFIG.format(**{**vars(one.settings), "paths": paths}))
    path.chmod(0o600)
    return str(path)


def says(one, *argv):
    done = CliRunner().invoke(main, ["--config", config(one), *argv])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if " ago" not in line]
    # How sure it is depends a little on what came first: `told` compares that.
    return [re.sub(r"\b\d+\.\d+\b|\d+(\.\d+)?%", "#", line).split() for line in lines]


def test_postgresql_stopped_and_started_while_two_hosts_run_it_the_same_is_said_in_the_end(calm, server, tmp_path):
    wild = Ledger(tmp_path / "wild", *server.store(), calm.begin)
    stop, said = tmp_path / "stop", tmp_path / "said"
    programs = []
    for host in ("a", "b"):
        loop = f"while [ ! -e {stop} ]; do {PROGRAMS}/gpuhealth --config {config(wild, host)} correlate; done"
        programs.append(subprocess.Popen(["sh", "-c", f"({loop}) >>{said} 2>&1"]))
    try:
        for part in range(24):
            for one in (calm, wild):
                one.tell(part)
            run.once(calm.settings, calm.now(part))
            time.sleep(0.4)
            if part % 6 == 3:
                server.stop(signal.SIGINT if part % 4 == 3 else signal.SIGQUIT)
                time.sleep(1)
                server.start()
    finally:
        stop.touch()
        for program in programs:
            program.wait(PATIENCE)
    until(wild.ship, "what waited to be shipped")
    now = time.time()
    for one in (calm, wild):
        run.once(one.settings, now)
    text = said.read_text()
    assert "suspect nodes" in text, "it ran"
    assert "another run is active on another host" in text
    assert "cluster's record" in text, "PostgreSQL was away meanwhile"
    assert "Traceback" not in text
    told(calm, wild, exact=False)
    job = str(min(to_requeue(wild.settings)))
    for argv in (("explain", job), ("jobs", "--verdict", "node"), ("lemons",)):
        assert says(wild, *argv) == says(calm, *argv)
