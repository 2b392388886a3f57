"""Whatever a journal's file contains, it is opened or set aside, and the next check still checks the node."""

import fcntl
import os
import random
import shutil
import sqlite3
import time

import pytest

from slurm_gpuhealth import deadline
from slurm_gpuhealth.config.settings import Paths, Row, Settings, Sources
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.hooks import check
from slurm_gpuhealth.node import decisions, held, hook, journal_sound, record
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.node.journal_file import NAME
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import NodeRecord

TRIALS = range(1000) if os.environ.get("GPUHEALTH_SOAK") else range(0, 1000, 16)
"""All take half a minute of CPU and more: an ordinary run plays each sixteenth."""
OURS = "gpuhealth:Xid79 GPU3 L3 running since=11-20T12:03Z"
FINDING = (
    "INSERT INTO finding (time, seen, source, code, severity, rung, mode, message, standing, count, details, acted)"
    " VALUES (?1, ?1, ?, ?, 'fault', 'L3', 'enforce', 'what was seen', ?, 1, '{\"a\": 1}', ?)"
)
STEP = (
    "INSERT INTO step (time, fact, gpu, rung, attempt, outcome, follows, test, code, message, bundle)"
    " VALUES (?, 'Xid79', 3, 'L3', 1, ?, '', '', '', '', '')"
)


class Node:
    """A node with a kernel log, whose check runs in this process."""

    def __init__(self, root, monkeypatch):
        self.root, self.number, self.starts = str(root), 0, 0
        os.makedirs(self.at("proc/sys/kernel/random"))
        with open(self.at("proc/sys/kernel/random/boot_id"), "w") as file:
            file.write("boot-1\n")
        paths = Paths(state=self.at("s"), run=self.at("r"), proc=self.at("proc"), kernel_log=self.at("kmsg"))
        off = dict.fromkeys(("nvml", "infiniband", "host", "inventory", "dcgm_health", "dcgm"), "off")
        sources = replace(Sources(), kernel="enforce", **off)
        self.settings = Settings(mode="shadow", paths=paths, sources=sources, policy=(Row("*", "fault", rung="L3"),))
        os.makedirs(paths.run, 0o700)
        for _ in range(5):
            self.says("all is well")
        monkeypatch.setenv("SLURMD_NODENAME", "n1")
        monkeypatch.setattr("slurm_gpuhealth.config.load.load", lambda node: self.settings)
        monkeypatch.setattr("slurm_gpuhealth.config.load.refuse_if_writable_by_others", lambda path: None)
        monkeypatch.setattr("slurm_gpuhealth.node.identity.learn", lambda *_, **__: None)
        monkeypatch.setattr("slurm_gpuhealth.ladder.worker.start", self.start_worker)
        monkeypatch.setattr("slurm_gpuhealth.node.hook.set_handler", lambda *_: None)
        monkeypatch.setattr("slurm_gpuhealth.say.say", lambda *_, **__: None)
        monkeypatch.setattr(control, "show_node", lambda *_: self.record)
        self.record = NodeRecord("n1", "IDLE", frozenset({"DRAIN"}), OURS, "root", time.time(), gres="gpu:h100:8")

    def at(self, path):
        return os.path.join(self.root, path)

    def start_worker(self, node):
        self.starts += 1

    def says(self, text):
        with open(self.at("kmsg"), "a") as file:
            file.write(f"4,{self.number},{time.monotonic() * 1e6:.0f},-;{text}\n")
        self.number += 1

    def xid(self, code):
        self.says(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid='<unknown>', name=<unknown>, it failed.")

    def check(self):
        self.run(check.check)

    def run(self, body):
        with pytest.raises(SystemExit) as end:
            hook.run(body)
        assert end.value.code == 0

    def read_and_write_all(self):
        """As any of our programs may, sooner or later."""
        _, journal = hook.start("n1")
        for table in journal_sound.TABLES:
            list(journal.rows(f"SELECT * FROM {table}"))  # noqa: S608 - ours
        for (name,) in list(journal.rows("SELECT name FROM state")):
            journal.put(name, journal.get(name))
        record.select(journal, "1")
        journal.write("UPDATE finding SET seen = seen + 1, acted = 5")
        journal.prune(time.time() - 20)
        self.fill(journal)
        return 0

    def fill(self, journal):
        now = time.time()
        for number in range(40):
            journal.write(FINDING, now - number, "site", f"code{number}", number == 7, 1)
            decisions.note(journal, now - 9, "check", "drained", "x" * 300, "", "", None)

    def journal(self):
        return open_journal(self.settings.paths)

    def seen(self):
        """Code → mode of the Xids that are written down."""
        return dict(self.journal().rows("SELECT code, mode FROM finding WHERE source = 'xid' ORDER BY id"))


@pytest.fixture
def node(tmp_path, monkeypatch):
    return Node(tmp_path / "n1", monkeypatch)


def live(node, climbing):
    """A journal in use: rows in its file, later ones in its log (WAL) alone, as when its program was killed."""
    node.check()
    journal = node.journal()
    now = time.time()
    node.fill(journal)
    journal.put("gpus", [{"uuid": f"GPU-{number}", "pci": "0000:3b:00", "index": number} for number in range(8)])
    journal.put("nvml-baseline", {"gpus": {f"GPU-{number}": {"x": "y" * 200} for number in range(8)}})
    journal.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if climbing:
        journal.put("hold", {"reason": OURS, "since": now - 60})
        journal.put("ladder-child", ("boot-1", 1 << 30, 1))
        for outcome in ("fail", "running"):
            journal.write(STEP, now - 30, outcome)
    node.check()
    saved = node.at("saved")
    shutil.copytree(node.settings.paths.state, saved)
    journal.db.close()
    return saved


def scribble(chance, path):
    """One of the things that happen to files."""
    size = os.path.getsize(path)
    kind = chance.choice(("byte", "bytes", "run", "page", "zeros", "first page", "cut", "longer", "text"))
    with open(path, "r+b") as file:
        if kind == "cut":
            file.truncate(chance.randrange(size + 1))
        elif kind == "longer":
            file.seek(size)
            file.write(chance.randbytes(chance.randrange(1, 20000)))
        elif size:
            at = chance.randrange(size)
            many = chance.choice((1, 100, 4096))
            for _ in range(chance.choice((1, 10, 200)) if kind == "bytes" else 1):
                file.seek(chance.randrange(size) if kind == "bytes" else 0 if kind == "first page" else at)
                if kind in ("page", "zeros"):
                    file.seek(at // 4096 * 4096)
                what = {"page": chance.randbytes(4096), "zeros": bytes(4096), "text": b"\xff\xfe not a number \0" * 9}
                file.write(what.get(kind) or chance.randbytes(1 if kind.startswith("byte") else many))
    return kind


def test_a_scribbled_journal_is_opened_or_set_aside_and_the_next_check_looks_at_the_node(node):
    saved = {climbing: live(node, climbing) for climbing in (False,)}
    shutil.move(saved[False], node.at("quiet"))
    shutil.rmtree(node.settings.paths.state)
    shutil.move(live(node, True), node.at("climbing"))
    with open(node.at("kmsg")) as file:
        log, number = file.read(), node.number
    with open(os.path.join(node.settings.paths.run, "kernel.seen")) as file:
        noted = file.read()
    for trial in TRIALS:
        chance = random.Random(trial)  # noqa: S311
        shutil.rmtree(node.settings.paths.state)
        climbing = chance.random() < 0.5
        shutil.copytree(node.at("climbing" if climbing else "quiet"), node.settings.paths.state)
        with open(node.at("kmsg"), "w") as file:
            file.write(log)
        with open(os.path.join(node.settings.paths.run, "kernel.seen"), "w") as file:
            file.write(noted)
        node.number = number
        done = []
        for _ in range(chance.choice((1, 1, 3))):
            name = NAME + chance.choice(("", "", "", "-wal", "-shm"))
            done.append((name, scribble(chance, os.path.join(node.settings.paths.state, name))))
        what = trial, climbing, done
        node.xid(79)
        node.check()
        node.xid(95)
        before = time.time()
        node.check()
        journal = node.journal()
        assert (journal.trouble, journal.folder) == ("", node.settings.paths.state), what
        assert journal.get("checked", 0) >= before, what
        assert journal.get("failure", {"time": 0})["time"] < before, what
        assert node.seen() == {"79": "shadow", "95": "shadow"}, what
        if climbing:
            held.look_at_hold(node.settings, journal, "n1", time.time())
            assert journal.get("hold")["reason"] == OURS, what
        journal.db.close()
        node.run(node.read_and_write_all)
        before = time.time()
        node.run(node.read_and_write_all)
        journal = node.journal()
        assert (journal.trouble, journal.folder) == ("", node.settings.paths.state), what
        assert journal.get("failure", {"time": 0})["time"] < before, what


def remove(node):
    shutil.rmtree(node.settings.paths.state)


def in_the_file(node):
    """All of the journal, nothing in its log; the page of what was seen."""
    journal = node.journal()
    journal.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    page = journal.one("SELECT rootpage FROM sqlite_master WHERE name = 'finding'")[0]
    journal.db.close()
    return page


def spoil(node):
    """The first page: nothing can be read of it any more."""
    in_the_file(node)
    with open(os.path.join(node.settings.paths.state, NAME), "r+b") as file:
        file.write(b"\xff" * 4096)


def spoil_findings(node):
    """What was seen, and no more: where the kernel log was read is still there."""
    page = in_the_file(node)
    with open(os.path.join(node.settings.paths.state, NAME), "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)


LOST = pytest.mark.parametrize("lose", [remove, spoil, spoil_findings])


@LOST
def test_an_xid_after_the_last_look_is_judged_although_the_journal_was_lost(node, lose):
    node.xid(79)
    node.check()
    node.check()
    assert node.seen() == {"79": "old"}  # the node's first look ever
    node.xid(95)
    lose(node)
    node.check()
    assert node.seen().get("79", "old") == "old"
    assert node.seen()["95"] == "shadow"


@LOST
def test_an_xid_that_had_its_decision_does_not_drain_again_though_the_journal_was_lost(node, lose, monkeypatch):
    node.settings = replace(node.settings, mode="enforce")
    monkeypatch.setattr("slurm_gpuhealth.ladder.drain._spread", lambda node: None)
    node.check()
    node.record = replace(node.record, reason="PSU, JD")  # an admin holds it, and resumes it when he is done
    node.xid(79)
    node.check()
    assert node.journal().one("SELECT action FROM decision") == ("admin",)
    lose(node)
    node.record = replace(node.record, reason="", flags=frozenset())
    node.check()  # `control.drain` would fail loudly: it is none of this node's stand-ins
    node.check()
    assert "79" not in node.seen()
    assert list(node.journal().rows("SELECT action FROM decision")) in ([], [("admin",)])
    assert node.journal().get("failure") is None


@LOST
def test_a_fault_that_still_waited_for_its_decision_is_judged_when_the_journal_was_lost(node, lose, monkeypatch):
    node.settings = replace(node.settings, mode="enforce")
    monkeypatch.setattr("slurm_gpuhealth.ladder.drain._spread", lambda node: None)
    monkeypatch.setattr(control, "show_node", silent)
    node.check()
    node.xid(79)
    for _ in range(3):
        node.check()
    lose(node)
    node.check()
    rows = list(node.journal().rows("SELECT code, mode, acted FROM finding WHERE source = 'xid'"))
    assert rows == [("79", "enforce", None)]


def silent(*_):
    raise control.ControllerDown("no answer")


@pytest.mark.parametrize("lose", [remove, spoil])
def test_where_nothing_is_known_nothing_is_new(node, lose):
    node.check()
    node.xid(79)
    lose(node)
    os.unlink(os.path.join(node.settings.paths.run, "kernel.seen"))
    node.check()
    assert node.seen() == {"79": "old"}


def test_what_is_noted_of_another_boot_is_not_of_this_one(node):
    node.check()
    node.check()
    with open(node.at("proc/sys/kernel/random/boot_id"), "w") as file:
        file.write("boot-2\n")
    node.xid(79)
    remove(node)
    node.check()
    assert node.seen() == {"79": "old"}


def test_all_of_this_boot_is_new_to_a_node_whose_corrupt_journal_is_older(node):
    node.check()
    node.xid(79)
    spoil(node)
    os.utime(os.path.join(node.settings.paths.state, NAME), (1e9, 1e9))
    shutil.rmtree(node.settings.paths.run)  # a tmpfs
    node.check()
    assert node.seen() == {"79": "shadow"}


def test_what_is_read_again_counts_once(node):
    node.settings = replace(node.settings, policy=(Row("xid:31", "fault", times=2),))
    node.check()
    node.check()
    node.xid(31)
    node.check()
    journal = node.journal()
    journal.write(FINDING, time.time(), "site", "bad", 0, 1)
    journal.write("UPDATE finding SET details = 'spoilt' WHERE code = 'bad'")
    journal.write("INSERT OR REPLACE INTO state VALUES ('spoilt', x'ff')")
    journal.db.close()
    assert node.journal().get("spoilt") is None  # whoever meets it sets the file aside
    node.check()
    rows = list(node.journal().rows("SELECT code, count FROM finding WHERE severity != 'fault'"))
    assert rows == [("31", 1)]
    node.xid(31)
    node.check()
    assert node.journal().one("SELECT count(*) FROM finding WHERE severity = 'fault'") == (1,)  # the second


@pytest.mark.parametrize("spoiling", [spoil, spoil_findings])
def test_what_is_spoilt_while_a_program_runs_is_set_aside_by_it_and_the_next_one_works(node, spoiling):
    live(node, True)
    done = []

    def climb():
        _, journal = hook.start("n1")
        journal.put("before", 1)
        spoiling(node)
        for moment in range(3):  # as the worker: for hours
            journal.write(STEP, time.time(), "pass")
            record.select(journal, "1")
            journal.together(lambda now=moment: journal.put("ladder-child", ("boot-1", now, 1)))
        done.append(journal.get("corrupt"))
        return 0

    node.run(climb)
    assert ["set aside" in str(one) for one in done] in ([True], [])  # it went on, or ended: then the next one goes on
    node.xid(95)
    node.check()
    assert node.seen()["95"] == "shadow"
    assert any("corrupt" in name for name in os.listdir(node.settings.paths.state))
    assert node.journal().get("failure", {"time": 0})["time"] < node.journal().get("checked")


def test_a_good_journal_stays_whatever_a_program_of_ours_stumbles_over(node):
    node.check()
    node.journal().put("mine", 5)

    def stumble():
        hook.start("n1")
        raise ValueError("a bug")

    node.run(stumble)
    assert node.journal().get("mine") == 5
    assert "a bug" in node.journal().get("failure")["error"]
    assert not any("corrupt" in name for name in os.listdir(node.settings.paths.state))


@pytest.mark.parametrize("words", journal_sound.DISK)
def test_a_good_journal_stays_whatever_the_disk_is_to_blame_for(node, words):
    node.check()
    journal = node.journal()
    journal._fall_back(sqlite3.OperationalError(words))
    assert (journal.folder, journal.trouble) == (node.settings.paths.run, f"journal: {words}")
    journal.put("a", 1)
    assert node.journal().get("a") == 1
    assert not any("corrupt" in name for name in os.listdir(node.settings.paths.state))


def test_who_looks_through_a_corrupt_file_and_does_not_end_holds_up_nobody_for_ever(node, monkeypatch):
    paths = node.settings.paths
    open_journal(paths).db.close()
    with open(os.path.join(paths.state, NAME), "r+b") as file:
        file.write(b"scribble")
    monkeypatch.setattr(deadline, "ends", time.monotonic() + 0.3)
    other = os.open(paths.state, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert open_journal(paths).folder == paths.run
    os.close(other)
    assert open_journal(paths).folder == paths.state


def test_corrupt_files_do_not_fill_the_disk(node, monkeypatch):
    for moment in range(9):
        monkeypatch.setattr("slurm_gpuhealth.node.journal_mend.time.time", lambda now=1e9 + moment: now)
        node.journal().put("a", moment)
        spoil(node)
        assert node.journal().get("corrupt")
    kept = {name.partition("-wal")[0].partition("-shm")[0] for name in os.listdir(node.settings.paths.state)}
    assert sorted(kept) == [NAME, *(f"{NAME}.corrupt-{int(1e9) + moment}" for moment in range(5, 9))]


def test_a_fallback_that_is_corrupt_does_not_keep_the_journal_from_being_used(node):
    node.check()
    journal = node.journal()
    journal._fall_back(sqlite3.OperationalError("database or disk is full"))
    journal.put("kept", 1)
    journal.db.close()
    with open(os.path.join(node.settings.paths.run, NAME), "r+b") as file:
        file.write(b"\xff" * 4096)
    journal = node.journal()
    assert (journal.trouble, journal.folder) == ("", node.settings.paths.state)
    assert not os.path.exists(os.path.join(node.settings.paths.run, NAME))
