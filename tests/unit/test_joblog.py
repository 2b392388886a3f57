"""Job logs are read with the user's rights only, whatever they contain; the child's answer is checked."""

import grp
import json
import os
import pwd
import signal
import socket
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

from slurm_gpuhealth import child
from slurm_gpuhealth.config.settings import JobLog
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.logs.reading import to_dict, validated
from slurm_gpuhealth.node import joblog, jobs, rights
from slurm_gpuhealth.node.environment import Job
from slurm_gpuhealth.outcomes import Cited, Reading

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="to become another user one must be root")
GAMES = pwd.getpwnam("games")
OTHER = pwd.getpwnam("nobody")
MIB = 1 << 20
NOW = 1_800_000_000.0
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/games/train.py", line 12, in <module>
    step(batch)
  File "/home/games/train.py", line 7, in step
    raise ValueError(f"no such shape: {batch}")
ValueError: no such shape: 3
"""


def job(number=7, **more):
    given = {"uid": GAMES.pw_uid, "gid": GAMES.pw_gid, "user": "games", "batch": True, "nodes": "n1", **more}
    return Job(number, "n1", **given)


def classify(text):
    """A classifier that finds the first line with `Error`, and tells in `evidence` all that it was given."""
    for number, line in enumerate(text.split("\n"), 1):
        if "Error" in line:
            return Reading("application", 0.9, "application", Cited(number, line[:500]), evidence=(text[:400],))
    return Reading(evidence=(text[:400],))


@pytest.fixture
def classifier(monkeypatch):
    """The classifier of job logs, replaced by `classify`, or by what a test sets as its `read_text`."""
    stand_in = types.ModuleType("slurm_gpuhealth.logs.read")
    stand_in.read_text = classify
    monkeypatch.setitem(sys.modules, "slurm_gpuhealth.logs.read", stand_in)
    monkeypatch.setattr("slurm_gpuhealth.logs.read", stand_in, raising=False)
    return stand_in


@pytest.fixture
def home():
    """A folder of the user games that others can enter too, outside pytest's: each new pytest closes that to others."""
    with tempfile.TemporaryDirectory(prefix="gpuhealth-home-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(folder, GAMES.pw_uid, GAMES.pw_gid)
        yield folder


@pytest.fixture
def on(settings):
    return replace(settings, joblog=JobLog(enabled=True, timeout=5.0))


def put(path, text, owner=GAMES, mode=0o600):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.chown(path, owner.pw_uid, owner.pw_gid)
    path.chmod(mode)
    return str(path)


def read(settings, journal, *paths, seconds=10.0, **more):
    """`joblog.read` of a job that failed just now, whose log is `paths`."""
    which = job(stdout=paths[0], stderr=paths[-1], **more)
    return joblog.read(settings, journal, which, time.monotonic() + seconds)


def said(capsys):
    return capsys.readouterr().err


# ---- what it is for


@ROOT
def test_what_a_log_says_is_in_the_journal(on, journal, home, classifier):
    path = put(home / "log", "start\nValueError: no\n")
    jobs.started(journal, job(), [], time.time() - 10)
    jobs.ended(journal, job(), "exit 1", time.time())
    reading = read(on, journal, path)
    assert (reading.verdict, reading.cause) == ("application", Cited(2, "ValueError: no"))
    number, restart, text = journal.one("SELECT job, restart, reading FROM joblog")
    assert (number, restart) == (7, 0)
    assert json.loads(text)["cause"]["text"] == "ValueError: no"


@ROOT
def test_stderr_comes_first_and_each_file_has_its_own_line_numbers(on, journal, home, classifier):
    out, err = put(home / "out", "1\n2\nError in out\n"), put(home / "err", "warned\n")
    assert read(on, journal, out, err).cause == Cited(3, "Error in out")
    put(home / "err", "warned\nError in err\n")
    assert read(on, journal, out, err).cause == Cited(2, "Error in err")


@ROOT
def test_of_a_long_log_the_beginning_and_the_end_are_read(journal, on, home, classifier):
    on = replace(on, joblog=JobLog(enabled=True, head_mib=1, tail_mib=1))
    line = "x" * 99 + "\n"
    path = put(home / "log", "first Error\n" + line * 50_000)
    assert read(on, journal, path).cause == Cited(1, "first Error")
    put(home / "log", line * 50_000 + "last Error\n")
    assert read(on, journal, path).cause == Cited(0, "last Error"), "of the lines before it some were not read"
    put(home / "log", line * 25_000 + "Error in the middle\n" + line * 25_000)
    assert read(on, journal, path).cause is None


@ROOT
def test_a_sparse_file_of_ten_gib_is_read_like_any_other(on, journal, home, classifier):
    path = put(home / "log", "")
    with open(path, "r+b") as file:
        file.truncate(10 << 30)
        file.seek((10 << 30) - 6)
        file.write(b"Error\n")
    began = time.process_time()
    assert read(on, journal, path).cause.text == "Error"
    assert time.process_time() - began < 1


@ROOT
def test_a_log_without_a_word_is_a_reading_and_an_empty_one_is_none(on, journal, home, classifier):
    assert read(on, journal, put(home / "log", "all is well\n")).kind == ""
    assert read(on, journal, put(home / "log", "")) is None


# ---- which part of it


def test_only_what_this_run_wrote_counts_where_slurm_marked_the_end_of_the_one_before():
    mark = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT {} DUE TO {} ***\n"
    ended = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW - 100))
    later = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW + 100))
    earlier = "old Error\n" + mark.format(ended, "JOB REQUEUE")
    text = earlier + "new\n" + mark.format(later, "PREEMPTION")
    assert joblog.this_attempt([(1, text)], 7, NOW) == [(3, "new\n" + mark.format(later, "PREEMPTION"))]
    assert joblog.this_attempt([(1, text)], 8, NOW) == [(1, text)], "another job's mark"
    assert joblog.this_attempt([(1, "head\n"), (0, text)], 7, NOW)[0][0] == 0
    assert joblog.this_attempt([(1, earlier + "a\n"), (0, "b\n")], 7, NOW) == [(3, "a\n"), (0, "b\n")]
    assert joblog.this_attempt([(1, mark.format("yesterday", "x") + "a\n")], 7, NOW)[0][0] == 1


@ROOT
def test_a_file_older_than_the_job_is_another_jobs(on, journal, home, classifier, capsys):
    path = put(home / "log", "Error of last week\n")
    os.utime(path, (time.time() - 7 * 86400,) * 2)
    jobs.started(journal, job(), [], time.time() - 3600)
    jobs.ended(journal, job(), "exit 1", time.time())
    assert read(on, journal, path) is None
    assert "older than the job" in said(capsys)


# ---- with whose rights


@ROOT
@pytest.mark.parametrize("mode", [0o600, 0o000])
def test_another_users_file_is_not_read(on, journal, home, classifier, capsys, mode):
    path = put(home / "log", "Error: secret\n", OTHER, mode)
    assert read(on, journal, path) is None
    assert "Permission denied" in said(capsys)


@ROOT
def test_what_only_root_may_read_is_not_read(on, journal, classifier, capsys):
    assert read(on, journal, "/etc/shadow") is None
    assert "Permission denied" in said(capsys)


@ROOT
def test_no_symbolic_link_is_followed_to_a_log(on, journal, home, classifier, capsys):
    (home / "shadow").symlink_to("/etc/shadow")
    assert read(on, journal, str(home / "shadow")) is None
    (home / "link").symlink_to(put(home / "log", "Error\n"))
    assert read(on, journal, str(home / "link")) is None
    assert said(capsys).count("a symbolic link") == 2
    (home / "folder").symlink_to(home)
    assert read(on, journal, str(home / "folder" / "log")).cause.text == "Error", "a home folder often is one"


@ROOT
def test_a_log_in_a_folder_that_only_its_user_can_enter_is_read(on, journal, home, classifier):
    home.chmod(0o700)
    path = put(home / "log", "Error\n")
    assert read(on, journal, path).cause.text == "Error"
    assert read(on, journal, path, uid=OTHER.pw_uid, gid=OTHER.pw_gid, user="nobody") is None


@ROOT
def test_the_users_other_groups_count_too(monkeypatch, on, journal, home, classifier):
    group = grp.getgrnam("tty").gr_gid
    path = put(home / "log", "Error\n", types.SimpleNamespace(pw_uid=OTHER.pw_uid, pw_gid=group), 0o640)
    assert read(on, journal, path) is None
    monkeypatch.setattr(os, "getgrouplist", lambda user, gid: [gid, group])
    assert read(on, journal, path).cause.text == "Error"


def test_the_groups_are_those_of_the_user_whose_uid_it_is(monkeypatch):
    monkeypatch.setattr(os, "getgrouplist", lambda user, gid: [gid, 4711])
    assert rights.groups_of("root", GAMES.pw_uid, GAMES.pw_gid) == [GAMES.pw_gid]
    assert rights.groups_of("no such user", 12345, 678) == [678]
    assert rights.groups_of("games", GAMES.pw_uid, GAMES.pw_gid) == [GAMES.pw_gid, 4711]


@ROOT
@pytest.mark.parametrize("ids", [{"uid": 0}, {"uid": None}, {"gid": None}])
def test_roots_jobs_and_nobodys_are_not_read(on, journal, home, classifier, ids, capsys):
    assert read(on, journal, put(home / "log", "Error\n"), **ids) is None
    assert said(capsys) == ""


def inside(settings, journal, home, classifier, look):
    """What `look()` returns in the child, when it has the user's rights and classifies."""

    def read_text(text):
        return Reading(evidence=(json.dumps(look()),)) if text else Reading()

    classifier.read_text = read_text
    return json.loads(read(settings, journal, put(home / "log", "x\n")).evidence[0])


@ROOT
def test_the_child_has_nothing_of_root_and_no_way_back(on, journal, home, classifier):
    def look():
        back = []
        for way in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.kill(1, 0)):
            try:
                way()
                back.append(True)
            except PermissionError:
                back.append(False)
        status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
        keys = ("CapEff", "CapPrm", "CapAmb", "NoNewPrivs", "Uid", "Gid")
        return (
            back,
            [status[key].split() for key in keys],
            sorted(os.getgroups()),
            os.getcwd(),
            os.getsid(0) == os.getpid(),
        )

    back, status, groups, folder, own_session = inside(on, journal, home, classifier, look)
    none = ["0" * 16]
    assert back == [False] * 4
    assert status == [none, none, none, ["1"], ["5"] * 4, [str(GAMES.pw_gid)] * 4]
    assert (groups, folder, own_session) == ([GAMES.pw_gid], "/", True)


@ROOT
def test_of_the_parents_descriptors_the_child_has_the_result_pipe_alone(on, journal, home, classifier):
    def look():
        return sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in map(str, range(64)) if exists(fd))

    def exists(fd):
        return os.path.lexists(f"/proc/self/fd/{fd}")

    with open("/etc/shadow", "rb") as ours:
        os.set_inheritable(ours.fileno(), True)
        found = inside(on, journal, home, classifier, look)
    assert found == ["/dev/null", "/dev/null", "/dev/null", "pipe"]


@ROOT
def test_the_child_starts_nothing_writes_nothing_and_can_not_grow(on, journal, home, classifier):
    def look():
        tried = []
        for way in (os.fork, lambda: (home / "new").write_text("x"), lambda: bytearray(1 << 34), many):
            try:
                way()
                tried.append("done")
            except (OSError, MemoryError) as error:
                tried.append(type(error).__name__)
        return tried

    def many():
        return [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]

    assert inside(on, journal, home, classifier, look) == ["BlockingIOError", "OSError", "MemoryError", "OSError"]


@ROOT
def test_other_processes_of_the_user_can_neither_trace_the_child_nor_read_its_memory(on, journal, home, classifier):
    def look():
        import ctypes

        return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)

    assert inside(on, journal, home, classifier, look) == 0


def test_a_child_that_could_go_back_reads_nothing(monkeypatch, home, classifier):
    for call in ("setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, call, lambda *_: None)
    path = put(home / "log", "Error\n")
    done = child.told(lambda: joblog.as_user(job(), [path], JobLog(), 0.0, False, 5.0), timeout=5)
    assert json.loads(done.stdout)["error"].startswith("NotDropped: still")


def test_capabilities_that_were_kept_are_seen(monkeypatch):
    ids = (os.getresuid(), os.getresgid(), os.getgroups())
    monkeypatch.setattr(os, "getresuid", lambda: (5, 5, 5))
    monkeypatch.setattr(os, "getresgid", lambda: (6, 6, 6))
    monkeypatch.setattr(os, "getgroups", lambda: [6])
    if 0 in ids[0]:
        with pytest.raises(rights.NotDropped, match="way back"):
            rights._prove(5, 6, [6])

    def refuse(*_):
        raise PermissionError

    for call in ("setresuid", "setuid", "setgroups"):
        monkeypatch.setattr(os, call, refuse)
    if 0 in ids[0]:
        with pytest.raises(rights.NotDropped, match="capabilities"):
            rights._prove(5, 6, [6])


@ROOT
def test_nothing_is_imported_with_the_users_rights(monkeypatch, on, journal, home, capsys):
    """Python may be where its users can't enter: /root/.pyenv."""
    drop = os.setresuid

    class Nowhere:
        def find_spec(self, name, path=None, target=None):
            raise ImportError(f"{name} is imported too late")

    def drop_and_close(*ids):
        sys.meta_path.insert(0, Nowhere())
        drop(*ids)

    monkeypatch.setattr(os, "setresuid", drop_and_close)
    monkeypatch.delitem(sys.modules, "_strptime", raising=False)
    mark = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***\n"
    text = "ValueError: old\n" + mark + TRACEBACK
    jobs.started(journal, job(restart=1), [], time.time() - 10)
    jobs.ended(journal, job(restart=1), "exit 1", time.time())
    reading = read(on, journal, put(home / "log", text), restart=1)
    assert reading, said(capsys)
    assert reading.verdict == "application"
    assert reading.cause.line == len(text.splitlines())


# ---- whatever stands there


@ROOT
@pytest.mark.parametrize("what", ["fifo", "socket", "folder", "/dev/zero", "/dev/tty", "/proc/kmsg", "/proc/self/mem"])
def test_what_is_no_regular_file_is_neither_opened_nor_waited_for(on, journal, home, classifier, what, capsys):
    path = what if what.startswith("/") else str(home / what)
    if what == "fifo":
        os.mkfifo(path, 0o666)
    if what == "socket":
        socket.socket(socket.AF_UNIX).bind(path)
    if what == "folder":
        os.mkdir(path)
    began = time.monotonic()
    assert read(on, journal, path) is None
    assert time.monotonic() - began < 60
    if not what.startswith("/proc"):  # those are regular, and of no length
        assert "not a regular file" in said(capsys)


@ROOT
def test_no_file_no_folder_and_dev_null_are_nothing_and_nothing_is_said(on, journal, home, classifier, capsys):
    put(home / "log", "x")
    for path in (home / "none", home / "none/log", home / "log/log", "/dev/null"):
        assert read(on, journal, str(path)) is None
    assert said(capsys) == ""


@ROOT
@pytest.mark.parametrize("name", ["a\nb StdErr=\x1b[2J", "100%%", "\udcff", "-rf *; $(id)", "x" * 255])
def test_a_name_is_just_a_name(on, journal, home, classifier, name):
    put(home / name.replace("%%", "%"), "Error\n")
    assert read(on, journal, str(home / name)).cause.text == "Error"


@ROOT
def test_a_name_that_can_not_be_one_harms_nobody(on, journal, classifier, capsys):
    assert read(on, journal, "/a\0b") is None
    assert read(on, journal, "/" + "x" * 5000) is None
    assert "was not read" in said(capsys)


@ROOT
def test_bytes_that_are_no_text_are_read_as_such(on, journal, home, classifier):
    path = put(home / "log", b"\xff\xfe\x00\x01\x1b[31mError\x00\x80\n")
    assert read(on, journal, path).cause.text == "???[31mError\ufffd".replace("???", "\ufffd\ufffd??")


@ROOT
def test_a_file_that_grows_is_read_as_it_was(home, classifier):
    path = put(home / "log", "one\n")
    real = os.pread

    def growing(fd, length, offset):
        with open(path, "a") as file:
            file.write("more\n" * 1000)
        return real(fd, length, offset)

    try:
        os.pread = growing
        assert joblog.read_file(path, MIB, MIB, 0.0) == [(1, "one\n")]
    finally:
        os.pread = real


@ROOT
def test_a_file_that_is_cut_or_replaced_while_it_is_read_gives_what_was_there(home):
    path = put(home / "log", "one\n" * 1000)
    real = os.fstat

    def replaced(fd):
        found = real(fd)
        os.truncate(path, 4) if os.path.exists(path) else None
        return found

    try:
        os.fstat = replaced
        assert joblog.read_file(path, MIB, MIB, 0.0) == [(1, "one\n")]
    finally:
        os.fstat = real
    put(home / "log", "one\n")
    os.mkfifo(home / "fifo")

    def swapped(fd):
        if os.path.lexists(home / "fifo"):
            os.rename(home / "fifo", path)
        return real(fd)

    try:
        os.fstat = swapped
        assert joblog.read_file(path, MIB, MIB, 0.0) == [(1, "one\n")]
    finally:
        os.fstat = real


# ---- a child that does not answer as it should


@ROOT
def test_a_file_system_that_hangs_is_not_waited_for(on, journal, home, classifier, capsys):
    classifier.read_text = lambda text: text and os.kill(os.getpid(), signal.SIGSTOP)
    on = replace(on, joblog=JobLog(enabled=True, timeout=1.0))
    began = time.monotonic()
    assert read(on, journal, put(home / "log", "x")) is None
    assert time.monotonic() - began < 60
    assert "no answer in" in said(capsys)
    assert journal.get("stuck") is None, "it could be killed"
    assert journal.one("SELECT count(*) FROM finding") == (0,), "nothing against the node"


@ROOT
def test_while_one_child_can_not_be_killed_no_other_is_started(on, journal, home, classifier, capsys, monkeypatch):
    boot = (Path(on.paths.proc) / "sys/kernel/random/boot_id").read_text().strip()
    mine = child.Child(os.getpid(), child._stat(os.getpid())[1])
    monkeypatch.setattr(child, "age", lambda child: 1000.0)
    journal.put("stuck", {"joblog": (boot, mine.pid, mine.start)})
    assert read(on, journal, put(home / "log", "Error\n")) is None
    assert "can't be killed" in said(capsys)
    assert journal.get("stuck")["joblog"][1] == mine.pid


@ROOT
def test_a_child_that_its_user_kills_says_nothing_and_the_epilog_goes_on(on, journal, home, classifier, capsys):
    classifier.read_text = lambda text: text and os.kill(os.getpid(), signal.SIGKILL)
    assert read(on, journal, put(home / "log", "x")) is None
    assert "its reader died" in said(capsys)


@ROOT
def test_a_classifier_that_breaks_is_said_and_no_more(on, journal, home, classifier, capsys):
    classifier.read_text = lambda text: text and 1 / 0
    assert read(on, journal, put(home / "log", "x")) is None
    assert "ZeroDivisionError" in said(capsys)
    assert journal.one("SELECT count(*) FROM joblog") == (0,)


def test_no_time_left_is_no_reading(on, journal, home, classifier, capsys):
    assert read(on, journal, put(home / "log", "Error\n"), seconds=0.1) is None
    assert "no time is left" in said(capsys)


GOOD = to_dict(
    Reading(
        "node",
        0.5,
        "hardware",
        Cited(3, "x", 1, "n1", 2, 1e9),
        (Cited(4, "y"),),
        ("n1",),
        1,
        2,
        "E",
        "f",
        "p",
        ("s",),
        "a",
    )
)


def answer(**changes):
    return json.dumps({**GOOD, **changes}).encode()


def test_a_good_answer_comes_through_whole():
    assert to_dict(validated(answer())) == GOOD
    assert validated(b"null") is None


@pytest.mark.parametrize(
    "said",
    [
        b"", b"{}", b"[]", b"1", b"\xff", answer()[:-1], b"[" * 200_000, b"9" * 200_000,
        answer(verdict="us"), answer(verdict=["node"]), answer(kind="magic"), answer(kind=None), answer(more=1),
        answer(confidence=1.5), answer(confidence=float("nan")), answer(confidence=True), answer(confidence="1"),
        answer(cause="x"), answer(cause={}), answer(cause={**GOOD["cause"], "line": -1}),
        answer(cause={**GOOD["cause"], "rank": 1.5}), answer(cause={**GOOD["cause"], "text": None}),
        answer(cause={**GOOD["cause"], "time": float("inf")}), answer(cause={**GOOD["cause"], "gpu": 1 << 70}),
        answer(collateral=None), answer(collateral=[None]), answer(hosts="n1"), answer(hosts=[1]), answer(hosts={}),
        answer(rank="0"), answer(iteration=-1), answer(error=None), answer(evidence=[[]]), answer(advice=1),
        b'{"error": 1}',
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(said):
    with pytest.raises(ValueError):  # noqa: PT011 - also json's own
        validated(said)


def test_texts_are_cut_and_control_characters_shown():
    long = validated(answer(advice="\x1b]0;\n" + "x" * 5000, evidence=["\u202e"] * 99, hosts=["h" * 999] * 99))
    assert long.advice == "?]0;?" + "x" * 495
    assert long.evidence == ("?",) * 20
    assert long.hosts == ("h" * 255,) * 20
    assert validated(answer(cause={**GOOD["cause"], "text": "\ud800"})).cause.text == "?"


def test_an_answer_that_is_too_long_is_cut_and_then_none():
    done = child.told(lambda: answer(advice="x" * 1_000_000), timeout=5, limit=joblog.ANSWER)
    assert len(done.stdout) == joblog.ANSWER
    with pytest.raises(ValueError):  # noqa: PT011 - also json's own
        validated(done.stdout)


def test_the_longest_reading_fits():
    cited = Cited(1 << 52, "\x1b" * 500, 1 << 52, "h" * 255, 1, 1.0)
    most = Reading(cause=cited, collateral=(cited,) * 20, hosts=("h" * 255,) * 20, evidence=("\x1b" * 500,) * 20)
    assert len(json.dumps(to_dict(most), ensure_ascii=False)) < joblog.ANSWER


# ---- the flight recorder's dumps


REAL = Path(__file__).parents[1] / "corpus/flight/absent"


def fly(settings, journal, home, prefix="fr/%j/rank_", **more):
    """`joblog.read` of a job without a log, whose dumps are the real ones, as root's setting `prefix` finds them."""
    folder = home / "fr/7"
    folder.mkdir(parents=True)
    for path in REAL.glob("*_[0-3]"):
        put(folder / f"rank_{path.name[-1]}", path.read_bytes())
    settings = replace(settings, joblog=JobLog(enabled=True, timeout=120.0, flight=f"{home}/{prefix}"))
    return lambda log="no log": read(settings, journal, str(home / log), seconds=120.0, **more)


@ROOT
def test_dumps_are_found_by_the_sites_pattern_and_read_as_the_user(on, journal, home):
    ask = fly(on, journal, home, nodes="n[1-2]", num_nodes=2)
    (home / "fr").chmod(0o755)
    (home / "fr/7").chmod(0o700)
    os.chown(home / "fr/7", GAMES.pw_uid, GAMES.pw_gid)
    reading = ask()
    assert (reading.flight.found, reading.flight.ranks, reading.flight.hosts) == ("absent", (2,), ("n2",))
    (text,) = journal.one("SELECT reading FROM joblog")
    assert json.loads(text)["flight"]["op"] == "all_reduce"


@ROOT
def test_dumps_and_log_are_read_together(on, journal, home):
    put(home / "log", "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=21)\n")
    reading = fly(on, journal, home)("log")
    assert (reading.cause.line, reading.rank, reading.flight.found) == (1, 2, "absent")


@ROOT
def test_only_regular_files_of_the_user_count_as_dumps(on, journal, home):
    ask = fly(on, journal, home)
    folder = home / "fr/7"
    os.mkfifo(folder / "rank_4")
    (folder / "rank_5").symlink_to("/etc/shadow")
    (folder / "rank_6").symlink_to(folder / "rank_0")
    (folder / "rank_7").symlink_to("/dev/zero")
    put(folder / "rank_8", (REAL / "comm_lib_trace_rank_0").read_bytes(), OTHER, 0o644)
    put(folder / "rank_9", "root:x:0:0\n")
    (folder / "rank_10").mkdir()
    with open(put(folder / "rank_11", b"\x80\x02"), "r+b") as endless:
        endless.truncate(1 << 40)
    put(folder / "rank_12", b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00true\x85R.")
    put(folder / "rank_0.bak", b"\x80\x02")
    found = ask().flight
    assert (found.dumps, found.ranks) == (4, (2,))
    assert found.unread == (
        "rank_4: not a regular file",
        "rank_5: a symbolic link",
        "rank_6: a symbolic link",
        "rank_7: a symbolic link",
        "rank_8: another user wrote it",
        "rank_9: is no dump of PyTorch's flight recorder",
        "rank_10: not a regular file",
        "rank_11: has 1048576 MiB; a dump has 16 MiB at most",
    )


@ROOT
def test_dumps_of_an_earlier_job_do_not_count(on, journal, home):
    ask = fly(on, journal, home)
    for path in (home / "fr/7").iterdir():
        os.utime(path, (time.time() - 7 * 86400,) * 2)
    jobs.started(journal, job(), [], time.time() - 3600)
    jobs.ended(journal, job(), "exit 1", time.time())
    assert ask() is None


@ROOT
def test_dumps_end_with_the_time_that_they_may_take(on, journal, home, monkeypatch):
    ask = fly(on, journal, home)
    monkeypatch.setattr(joblog, "SHARE", 0.0)
    assert "no time was left for it" in ask().flight.unread[0]


@ROOT
def test_without_the_setting_no_dump_is_looked_for(on, journal, home, monkeypatch):
    fly(on, journal, home)
    monkeypatch.setattr(joblog, "read_dumps", None)
    assert read(on, journal, str(home / "no log")) is None
