"""Parsing what sacct and sacctmgr print: four releases, hostile names."""

import os
import re
from pathlib import Path

import pytest

from slurm_gpuhealth.config.settings import Accounting, Settings, Slurm
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import control, sacct

CORPUS = Path(__file__).resolve().parent.parent / "corpus/slurm"
DELIMITER = "7f3a99c01b2de845"
FIELDS = [*sacct.FIELDS, *sacct.HOSTILE]
SENT = ("partition", "qos", "reservation", "timelimit", "constraint")


def answer(text):
    """A table of the corpus as sacct prints it for us: no header, our delimiter, the job's number once more."""
    header, *rows = text.splitlines()
    lines = [DELIMITER.join([*row.split("|"), row.split("|")[0]]) for row in rows]
    return header.split("|"), "\n".join(lines) + "\n"


def by_name(version):
    fields, text = answer((CORPUS / version / "sacct.psv").read_text())
    rows, bad = sacct.read_jobs(text, DELIMITER, fields)
    assert not bad
    found = {}
    for row in rows:
        found.setdefault(row.attempt.name, []).append(row)
    return found


def line(job, **changes):
    cells = dict.fromkeys(FIELDS, "") | {
        "JobIDRaw": str(job), "JobID": str(job), "Cluster": "c", "User": "ann", "Account": "lab", "State": "FAILED",
        "ExitCode": "1:0", "DerivedExitCode": "0:0", "Start": "1000", "End": "2000", "NodeList": "n1", "JobName": "x",
    } | changes  # fmt: skip
    return DELIMITER.join([*cells.values(), str(job)]) + "\n"


def read(text):
    rows, bad = sacct.read_jobs(text, DELIMITER, FIELDS)
    return [row.attempt for row in rows], bad


def read_hostile():
    """The sample was asked for before we asked where jobs were sent and what they asked for."""
    pieces = re.split(rf"^(?=\d+{DELIMITER})", (CORPUS / "22.05/sacct_hostile.txt").read_text(), flags=re.MULTILINE)
    place = FIELDS.index("NodeList") + 1
    rows = [piece.split(DELIMITER) for piece in pieces if piece]
    return read("".join(DELIMITER.join([*cells[:place], "", "", "", "", *cells[place:]]) for cells in rows))


@pytest.mark.parametrize(
    ("config", "state"),
    [
        ({"SlurmctldParameters": ("enable_expedited_requeue",)}, "FAILED"),
        ({"SlurmctldParameters": ("enable_expedited_requeue",), "RequeueExit": ("42",)}, "REQUEUED"),
        ({}, "REQUEUED"),
    ],
)
def test_a_failed_run_of_expedited_requeue_has_failed_and_other_requeued_runs_have_not(monkeypatch, config, state):
    text = line(1, State="REQUEUED", ExitCode="3:0") + line(2, State="REQUEUED", ExitCode="0:0")
    monkeypatch.setattr(sacct, "_fields", lambda *_: set())
    monkeypatch.setattr(sacct, "FIELDS", FIELDS)
    monkeypatch.setattr(sacct.secrets, "token_hex", lambda _: DELIMITER)
    monkeypatch.setattr(sacct, "ask", lambda *_: text)
    monkeypatch.setattr(sacct.control, "config", lambda _: config)
    found = sacct.ended(Settings(), 0.0, 3000.0)
    assert [(one.attempt.state, one.attempt.exit_code) for one in found] == [(state, 3), ("REQUEUED", 0)]


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_each_release_tells_the_same_ends(version):
    found = by_name(version)

    def end(name, place=0):
        one = found[name][place].attempt
        return one.state, one.exit_code, one.signal, one.nodes

    assert end("ok") == ("COMPLETED", 0, 0, ("n1", "n2"))
    assert end("fail1")[:3] == ("FAILED", 1, 0)
    assert end("sigkill")[:3] == ("FAILED", 0, 9)
    assert end("segv")[:3] == ("FAILED", 0, 11)
    assert end("segv_step")[:3] == ("FAILED", 139, 0)  # 22.05 and 24.11 print 11
    assert end("multi_rc") == ("FAILED", 7, 0, end("multi_rc")[3])
    assert end("derived")[:3] == ("COMPLETED", 0, 0)
    assert [end(name)[0] for name in ("cancel", "cancel2", "timeout")] == ["CANCELLED", "CANCELLED", "TIMEOUT"]
    assert end("oom_batch")[:3] == ("OUT_OF_MEMORY", 0, 125)
    assert end("oom_step")[0] == "OUT_OF_MEMORY"  # the job itself: FAILED, 1:0
    assert end("overmem")[:2] == ("FAILED", 137)
    assert end("nodefail_multi")[0] == "NODE_FAIL"
    assert [end("requeue", place)[:3] for place in (0, 1)] == [("REQUEUED", 0, 0), ("FAILED", 2, 0)]
    assert len(found["nodefail_requeue"]) == 1  # its second run never began
    assert found["ok"][0].gpus == 4
    assert found["ok"][0].attempt.user == "games"
    assert found["ok"][0].attempt.end - found["ok"][0].attempt.start in (0, 1)


@pytest.mark.parametrize(
    ("version", "node", "restarts"), [("22.05", None, None), ("24.11", "n3", 0), ("26.05", "n3", 0)]
)
def test_the_failed_node_and_the_restarts_are_read_where_sacct_has_them(version, node, restarts):
    found = by_name(version)
    assert found["nodefail_multi"][0].attempt.failed_node == node
    assert found["requeue"][0].restarts == restarts
    assert found["requeue"][1].restarts == (None if restarts is None else 1)


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_each_release_tells_where_a_job_was_sent_and_its_time_limit(version):
    found = by_name(version)
    limits = {"ok": 600.0, "timeout": 60.0, "slowepi": None, "requeue": None}  # requeue: 525600 in 22.05 and 26.05
    for name, limit in limits.items():
        assert tuple(getattr(found[name][0].attempt, one) for one in SENT) == ("gpu", "normal", "", limit, "")


@pytest.mark.parametrize(
    ("minutes", "seconds"),
    [
        ("90", 5400.0), ("525599", 31535940.0), ("525600", None), ("2147483647", None), ("UNLIMITED", None),
        ("Partition_Limit", None), ("", None), ("0", None), ("-1", None),
    ],
)  # fmt: skip
def test_a_time_limit_is_seconds_or_none(minutes, seconds):
    assert sacct.limit_of(minutes) == seconds


def test_a_reservation_and_a_constraint_are_cut_and_forge_nothing():
    text = "a|b\n99" + "&c" * 90
    attempts, bad = read(line(1, QOS="q", Reservation=text, Constraints=text, TimelimitRaw="9") + line(2))
    assert [one.job for one in attempts] == [1, 2]
    assert not bad
    assert attempts[0].reservation == attempts[0].constraint == text[:64]


def test_hostile_names_forge_no_row_and_lose_none():
    attempts, bad = read_hostile()
    assert not bad
    names = {one.job: one.name for one in attempts}
    assert names[2] == "a|b\n99|FAILED"
    assert names[3] == "inv???"
    assert names[4] == "n" * sacct.MAX_NAME
    assert 99 not in names
    assert len(attempts) == len(set(names)) + 1  # one was requeued


def test_array_tasks_share_their_arrays_number_and_het_components_do_not():
    attempts, _ = read_hostile()
    arrays = {one.job: one.array for one in attempts if one.name in ("arr", "wrap")}
    assert arrays.items() >= {11: 6, 12: 6, 6: 6, 9: None, 10: None}.items()


def test_an_array_is_one_submit_line():
    attempts, _ = read_hostile()
    assert len({one.submit for one in attempts if one.array == 6}) == 1
    assert len({one.submit for one in attempts if one.job < 6}) == 5


def test_a_broken_row_is_told_and_the_others_are_read():
    attempts, bad = read(
        line(1) + line(2, ExitCode="x:0") + line(3, NodeList="n[1-") + "4" + DELIMITER + "\n" + line(5)
    )
    assert [one.job for one in attempts] == [1, 5]
    assert len(bad) == 3


def test_an_answer_cut_in_the_middle_loses_the_last_row_alone():
    attempts, bad = read((line(1) + line(2))[:-30])
    assert [one.job for one in attempts] == [1]
    assert len(bad) == 1


@pytest.mark.parametrize(
    "changes",
    [{"NodeList": "None assigned"}, {"NodeList": ""}, {"Start": "Unknown"}, {"Start": "None"}, {"End": "Unknown"}],
)
def test_what_never_began_or_has_not_ended_is_no_attempt(changes):
    assert read(line(1, **changes)) == ([], [])


def test_a_user_that_this_host_does_not_know_is_his_number():
    attempts, _ = read(line(1, User="", UID="1234"))
    assert attempts[0].user == "1234"


def test_no_text_holds_what_a_database_refuses():
    text = "a\udcffb".encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    attempts, _ = read(line(1, JobName=text))
    attempts[0].name.encode()


@pytest.mark.parametrize(
    ("tres", "count"),
    [
        ("billing=2,cpu=2,gres/gpu:h100=4,gres/gpu=4,mem=200M,node=2", 4), ("gres/gpu:a=1,gres/gpu:b=2", 3),
        ("cpu=1,gres/gpumem=4G,gres/gpuutil=3", 0), ("", 0), ("gres/gpu=x", 0),
    ],
)  # fmt: skip
def test_gpus_are_counted_once(tres, count):
    assert sacct.gpus_of(tres) == count


def test_hostlists_are_clustershells():
    assert sacct.nodes_of("r[1-2]n[08-10],x") == (
        *("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"),
        "x",
    )


def test_events_of_three_releases():
    rows, bad = sacct.read_events((CORPUS / "22.05/sacctmgr_events.txt").read_text())
    assert not bad
    assert rows[0].reason == "hello|world\nn1|5|6|DRAIN|root(0)|x|n1"
    assert (rows[0].node, rows[0].state, rows[0].user, rows[0].end) == ("n1", "DRAIN", "root", rows[0].start + 1)
    down = next(row for row in rows if row.state == "DOWN" and row.node == "n4")
    assert (down.reason, down.end) == ("Not responding", None)
    assert not any("Registered" in row.reason for row in rows)
    for version in ("24.11", "26.05"):
        text = (CORPUS / version / "sacctmgr_events.txt").read_text()
        rows, bad = sacct.read_events(text)
        assert not bad
        assert len(rows) == sum(not row.endswith("|") for row in text.splitlines())
        assert {row.state for row in rows} == {"DRAIN", "DOWN", "FAIL", "BOOT"}


def test_a_broken_event_swallows_no_other():
    good = "lab|5|6|DRAIN|root(0)|x|n1\n"
    rows, bad = sacct.read_events(good + "lab|5|6|DRAIN|root(0)|" + "y" * 3000 + "\n" + good)
    assert len(rows) == 2
    assert len(bad) == 1


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def asked(tmp_path, text, timeout=10.0):
    path = program(tmp_path / "sacct", text)
    return replace(Settings(), accounting=Accounting(sacct=path, sacctmgr=path, timeout=timeout))


def test_slurmdbd_that_is_away_is_no_empty_answer(tmp_path):
    refused = "sacctmgr: error: Sending PersistInit msg: Connection refused"
    with pytest.raises(control.ControllerDown, match="Connection refused"):
        sacct.noted(asked(tmp_path, f"echo '{refused}' >&2"), 0, 10)
    with pytest.raises(control.ControllerDown, match=r"no answer in 0\.2 s"):
        sacct.noted(asked(tmp_path, "sleep 60", timeout=0.2), 0, 10)
    with pytest.raises(control.Refused, match="exit 3: no such thing"):
        sacct.noted(asked(tmp_path, "echo no such thing >&2; exit 3"), 0, 10)
    os.remove(tmp_path / "sacct")
    with pytest.raises(control.NoProgram, match=r"\[accounting\]"):
        sacct.noted(replace(Settings(), accounting=Accounting(sacctmgr=str(tmp_path / "sacct"))), 0, 10)
    own = replace(Settings(), slurm=Slurm(scontrol=str(tmp_path / "scontrol")))
    with pytest.raises(control.NoProgram, match=r"scontrol.*\[slurm\]"):
        sacct.ask(own, [own.slurm.scontrol, "show", "config"])


SAYS = """\
if [ "$1" = -e ]; then echo "{fields}"; exit; fi
echo "$*" >>{folder}/asked
while [ "$1" != -o ]; do
    case "$1" in --delimiter=*) d=${{1#*=}};; -S) s=$2;; esac
    shift
done
echo "$TZ $SLURM_TIME_FORMAT $SLURM_CONF" >{folder}/environment
{then}
"""


def test_an_older_sacct_is_not_asked_for_fields_that_it_does_not_know(tmp_path):
    for fields in ("JobID SubmitLine", "JobID SubmitLine FailedNode Restarts"):
        folder = tmp_path / str(len(fields))
        folder.mkdir()
        settings = asked(folder, SAYS.format(fields=fields, folder=folder, then=""))
        assert sacct.ended(settings, 0, 86400.5) == []
        words = (folder / "asked").read_text().split()
        assert ("FailedNode" in words[-1]) == ("FailedNode" in fields)
        assert "-j" not in words
        assert words[words.index("-S") + 1 : words.index("-S") + 4] == [
            "1970-01-01T00:00:00",
            "-E",
            "1970-01-02T00:00:01",
        ]
        assert (folder / "environment").read_text().split() == ["UTC", "%s", "/etc/slurm/slurm.conf"]


def test_each_question_has_a_delimiter_of_its_own(tmp_path):
    settings = asked(tmp_path, SAYS.format(fields="JobID", folder=tmp_path, then=""))
    sacct.ended(settings, 0, 10)
    sacct.ended(settings, 0, 10)
    words = [word for word in (tmp_path / "asked").read_text().split() if word.startswith("--delimiter=")]
    assert len(set(words)) == 2
    assert all(len(word) == len("--delimiter=") + 16 for word in words)


def test_too_long_an_answer_is_asked_for_in_halves(tmp_path, monkeypatch):
    monkeypatch.setattr(sacct, "LIMIT", 1000)
    row = line(7, End="$end").replace(DELIMITER, "${d}").strip()
    then = f"""\
if [ "$s" = 1970-01-01T00:00:00 ] && [ ! -e {tmp_path}/once ]; then touch {tmp_path}/once; yes | head -c 5000
elif [ "$s" = 1970-01-01T00:00:00 ]; then end=2000; echo "{row}"
else end=50000; echo "{row}"; fi"""
    settings = asked(tmp_path, SAYS.format(fields="JobName SubmitLine", folder=tmp_path, then=then))
    assert [one.attempt.end for one in sacct.ended(settings, 0, 86400, (7, 8))] == [2000, 50000]
    asked_of = (tmp_path / "asked").read_text().splitlines()
    assert [" -j 7,8 " in words for words in asked_of] == [True] * 3


def test_only_what_ended_in_the_window_counts(tmp_path):
    row = line(7).replace(DELIMITER, "${d}").strip()
    settings = asked(tmp_path, SAYS.format(fields="JobName SubmitLine", folder=tmp_path, then=f'echo "{row}"'))
    assert len(sacct.ended(settings, 2000, 3000)) == 1
    assert sacct.ended(settings, 0, 2000) == []
