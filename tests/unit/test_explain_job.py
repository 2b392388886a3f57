"""gpuhealth explain JOBID: what an admin reads, and who may read a log's lines."""

import json
import os
import subprocess
import sys

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth import child
from slurm_gpuhealth.child import Completed
from slurm_gpuhealth.commands import explain_job
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Store
from slurm_gpuhealth.correlate import words
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.measure import use
from slurm_gpuhealth.outcomes import Suspicion, Term, Verdict
from slurm_gpuhealth.slurm import control, remark
from slurm_gpuhealth.slurm.node import NodeRecord
from slurm_gpuhealth.store import judged, schema
from slurm_gpuhealth.store.open import open_store

END = 1_795_220_000.0
ATTEMPT = {
    **{
        "cluster": "lab",
        "job": 7,
        "attempt": 0,
        "user": "alice",
        "account": "lab",
        "partition": "gpu",
        "name": "train",
    },
    **{"state": "FAILED", "exit_code": 1, "signal": 0, "start": END - 7200, "end": END, "nodes": '["n1", "n2"]'},
    **{"submit": "", "gpu_seconds": 7200.0},
}
READING = {"cause": {"line": 12, "text": "KeyError: 'x\x1b[1m'"}, "collateral": [{"line": 13, "text": "secret"}]}
DIED = Verdict(
    *(7, 0, "node", 0.95, "n1", "GPU-3"),
    terms=(
        Term("n1 fails once a year", {"node": -6.0}),
        Term("Xid 79 on n1", {"node": -0.1, "application": -5.0}),
        Term("its log blames the program", {"node": -3.0, "application": -0.2}),
    ),
    advice="requeue it as it is",
)


@pytest.fixture
def ask(settings, tmp_path, monkeypatch):
    """Run `gpuhealth explain ...` over a store with one job, of two attempts; `who` asks through sudo."""
    given = replace(settings, store=Store(database=str(tmp_path / "store/cluster.db")))
    monkeypatch.setattr(explain_job.common, "settings_of", lambda _: given)
    with open_store(given).begin() as db:
        db.execute(sql.insert(schema.attempt).values(**ATTEMPT, reading=json.dumps(READING)))
        db.execute(
            sql.insert(schema.attempt).values(**{**ATTEMPT, "attempt": 1, "state": "COMPLETED", "nodes": '["n9"]'})
        )
        db.execute(sql.insert(schema.gpu).values(node="n1", uuid="GPU-3", gpu=3, first=1.0, last=2.0, taken=1))
        judged.keep_verdict(db, DIED, END)
        row = {
            "time": END,
            "kind": "requeue",
            "job": 7,
            "attempt": 0,
            "node": "n1",
            "detail": "{}",
            "result": "requeued",
        }
        db.execute(sql.insert(schema.action).values(**row))

    def run(*argv, who=None, level=b""):
        monkeypatch.setattr(child, "run", lambda *_, **__: Completed(0, level, b"", 0.0))
        env = {"SUDO_USER": who, "GPUHEALTH_CONFIG": "/nowhere"}
        command = () if argv[0] in ("jobs", "lemons") else ("explain",)
        return CliRunner().invoke(main, [*command, *argv], env=env)

    run.store = given
    return run


def test_each_attempt_is_told_with_what_speaks_for_and_against_and_what_was_done(ask):
    said = ask("7").output
    assert "Job 7, attempt 1 of 2 of alice, 'train': FAILED" in said
    assert "It died of the node, n1 GPU3. Confidence high (0.95)." in said
    assert said.index("for: Xid 79 on n1") < said.index("against: its log blames the program")
    assert "requeue: requeued" in said
    assert "What to do: nothing more: attempt 2 ended well" in said
    assert "requeue it as it is" not in said  # it has been
    assert "attempt 2 of 2" in said
    assert "It ended well." in said
    assert "\x1b" not in said


def test_of_an_unknown_cause_it_is_told_between_which_it_can_t_be_told(ask):
    masses = {"node": 0.45, "application": 0.4, "user": 0.15}
    with open_store(ask.store).begin() as db:
        judged.keep_verdict(db, DIED._replace(cause="unknown", confidence=0.45, gpu=None, masses=masses), END)
    said = ask("7").output
    assert "The cause can't be told: the node n1 (0.45) or the application (0.40)." in said
    assert "died of unknown" not in said


def test_the_list_of_jobs_gives_a_reason_for_the_verdict_and_none_against_it(ask):
    against = Term("its log blames the program", {"node": -6.0, "application": -0.2})
    with open_store(ask.store).begin() as db:
        judged.keep_verdict(db, DIED._replace(terms=(against, *DIED.terms[:2])), END)
    said = ask("jobs", "--since", "9999d").output
    assert "Xid 79 on n1" in said
    assert "blames the program" not in said


def test_a_job_that_is_not_known_is_said_with_the_reason(ask):
    done = ask("8")
    assert done.exit_code == 1
    assert "job 8 is not in the cluster's record" in done.output


@pytest.mark.parametrize(
    ("who", "level", "may"),
    [
        (None, b"", True),
        ("root", b"", True),
        ("alice", b"", True),
        ("bob", b"Administrator\n", True),
        ("bob", b"Operator\n", True),
        ("bob", b"None\n", False),
        ("bob", b"", False),
    ],
)
def test_a_logs_lines_are_for_its_user_and_for_operators(ask, who, level, may):
    rows = [json.loads(line) for line in ask("7", "--json", who=who, level=level).output.splitlines()]
    assert rows[0]["verdict"]["cause"] == "node"
    assert ("KeyError" in json.dumps(rows)) is may
    assert ("secret" in json.dumps(rows)) is may
    assert ("KeyError" in ask("7", who=who, level=level).output) is may


def test_a_number_that_slurm_gave_anew_shows_nobody_the_log_of_its_earlier_owner(ask):
    """The state of slurmctld was lost: numbers begin at 1 again. Bob's job 7 is attempt 2 of alice's here."""
    later = {"start": END + 86000, "end": END + 86400}
    key = {"node": "n1", "journal": "j", "id": 7, "sub": 0, "seq": 1, "taken": 1}
    said = json.dumps({"verdict": "application", "cause": {"line": 1, "text": "bob's words"}})
    with open_store(ask.store).begin() as db:
        db.execute(sql.insert(schema.attempt).values(**{**ATTEMPT, **later, "attempt": 2, "user": "bob"}))
        db.execute(sql.insert(schema.joblog).values(**key, time=END + 86401, reading=said))
    told = {who: ask("7", "--json", who=who, level=b"None").output for who in ("alice", "bob")}
    assert {who: ("KeyError" in text, "bob's words" in text) for who, text in told.items()} == {
        "alice": (True, False),
        "bob": (False, True),
    }
    assert json.loads(told["bob"].splitlines()[2])["reading"]["cause"]["text"] == "bob's words"


def test_a_reading_that_is_none_is_left_out(ask):
    key = {"node": "n1", "journal": "j", "id": 7, "sub": 1, "seq": 1, "taken": 1}
    with open_store(ask.store).begin() as db:
        db.execute(sql.update(schema.attempt).values(reading=None))
        db.execute(sql.insert(schema.joblog).values(**key, time=END, reading='{"cause": "x'))
    assert "Its log was not read" in ask("7").output


def test_what_the_flight_recorder_says_is_for_who_may_read_the_log(ask):
    said = {**READING, "flight": {"found": "absent"}, "evidence": ["rank 2 (n2) never entered all_reduce #21"]}
    with open_store(ask.store).begin() as db:
        db.execute(sql.update(schema.attempt).values(reading=json.dumps(said)))
    assert "Its flight recorder: rank 2 (n2) never entered all_reduce #21." in ask("7").output
    assert "never entered" not in ask("7", who="bob", level=b"None").output


@pytest.mark.parametrize(("who", "may"), [("alice", True), ("bob", False), (None, True)])
def test_a_fingerprint_has_words_of_the_log_and_is_for_who_may_read_that(ask, who, may):
    with open_store(ask.store).begin() as db:
        judged.keep_verdict(db, DIED._replace(fingerprint="ValueError | secret"), END)
    done = ask("jobs", "--json", "--since", "9999d", who=who, level=b"None")
    assert (json.loads(done.output)["cause"], "secret" in done.output) == ("node", may)


def test_how_often_an_application_fails_by_itself_speaks_for_it_where_its_node_fails_less_often():
    terms = [
        {"text": "fails in 31%", "weights": {"application": -1.2}},
        {"text": "n1 fails", "weights": {"node": -9.0}},
    ]
    assert words.sides("application", terms) == (["fails in 31%", "n1 fails"], [])
    assert words.sides("node", terms) == ([], ["fails in 31%", "n1 fails"])
    assert words.sides("application", terms[:1]) == (["fails in 31%"], [])


def test_an_arrays_task_is_asked_for_by_its_own_number_and_that_is_said(ask):
    done = ask("10_3")
    assert (done.exit_code, "JobIDRaw" in done.output) == (2, True)


@pytest.mark.parametrize("what", ["fifo", "/dev/zero"])
def test_a_log_that_would_never_end_is_refused(tmp_path, what):
    os.mkfifo(tmp_path / "fifo")
    done = CliRunner().invoke(main, ["explain", "--log", str(tmp_path / what)])
    assert (done.exit_code, "not a regular file" in done.output) == (1, True)


def test_lemons_below_what_the_store_keeps_cannot_be_asked_for_and_are_not_denied():
    done = CliRunner().invoke(main, ["lemons", "--above", "0.01"])
    assert (done.exit_code, "0.05<=x<=1" in done.output) == (2, True)


def test_a_lemon_that_is_held_already_is_due_for_nothing_else_and_level_2_is_nobodys_to_ask_for(ask, monkeypatch):
    held = NodeRecord("n1", "IDLE", frozenset({"DRAIN"}), "gpuhealth:Xid79 GPU3 reboot fail next=RMA")
    free = NodeRecord("n9", "IDLE", frozenset(), "", extra=remark.write_waits("", "lost GPU1 L3"))
    monkeypatch.setattr(control, "show_nodes", lambda *_: [held, free])
    with open_store(ask.store).begin() as db:
        found = [
            Suspicion(name, END, 0.9, 1.0, 1.0, 0.1, rung) for name, rung in (("n1", "L2"), ("n2", "L2"), ("n3", "L4"))
        ]
        judged.keep_suspicions(db, found, END)
    first, header, *rows = ask("lemons").output.splitlines()
    assert first == "n9: in service with a fault because the budget has no room: lost GPU1 L3"
    due = header.index("DUE")
    assert [row[due:].split("  ")[0] for row in rows[:3]] == ["held: RMA", "-", "L4"]


def test_the_gpu_that_is_suspected_is_told_by_its_number(ask):
    with open_store(ask.store).begin() as db:
        shares = ({"GPU-3": 0.8, "GPU-1": 0.1}, {"GPU-far": 0.7}, {"GPU-3": 0.5, "GPU-1": 0.5})
        found = [Suspicion("n1", END, 0.9 - one / 10, 1.0, 1.0, 0.1, "L3", gpus=of) for one, of in enumerate(shares)]
        judged.keep_suspicions(db, [one._replace(node=f"n{nth}") for nth, one in enumerate(found, 1)], END)
    header, *rows = ask("lemons").output.splitlines()
    at = header.index("GPU")
    assert [row[at:].split("  ")[0] for row in rows[:3]] == ["3 80%", "GPU-far 70%", "-"]


def test_that_no_node_is_a_lemon_is_said_with_when_that_was_seen(ask):
    def said():
        return ask("lemons").output

    assert "but none was judged yet" in said()
    with open_store(ask.store).begin() as db:
        judged.put_cursor(db, "fleet", str(END - 9e7))
    assert f"as of {explain_job.common.utc(END - 9e7)} UTC" in said()


def test_a_bad_place_stands_below_the_nodes_and_asks_for_no_test(ask):
    moments = [{"time": END - 60, "nodes": ["gpu001", "gpu003"]}, {"time": END, "nodes": ["gpu002", "gpu003"]}]
    bad = {"place": "rack r7", "nodes": ["gpu001", "gpu002", "gpu003"], "moments": moments}
    scattered = {"place": "", "nodes": ["a1", "b1"], "moments": [{"time": END - 90, "nodes": ["a1", "b1"]}]}
    with open_store(ask.store).begin() as db:
        judged.put_cursor(db, "places", json.dumps([bad, scattered]))
        judged.keep_suspicions(db, [Suspicion("n1", END, 0.9, 1.0, 1.0, 0.1, "L4")], END)
    lines = ask("lemons").output.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("PLACE"))
    assert [line.split()[0] for line in lines[: head - 2]] == ["NODE", "n1"]
    assert lines[head].split() == ["PLACE", "TIMES", "NODES", "LAST"]
    when = explain_job.common.utc
    assert lines[head + 1].split() == ["rack", "r7", "2", "gpu[001-003]", *when(END).split()]
    assert lines[head + 2].startswith("several nodes (no common place is known)  1 ")
    assert lines[head + 2].endswith(f"  a1,b1         {when(END - 90)}")
    assert lines[head + 4] == "These events count against no node, and no test is requested for them."
    rows = [json.loads(line) for line in ask("lemons", "--json").output.splitlines()]
    assert [row.get("node") for row in rows] == ["n1", None, None]
    assert rows[1:] == [bad, scattered]


def test_a_bad_place_is_told_also_if_no_node_is_a_lemon(ask):
    row = {"place": "rack r7", "nodes": ["n1", "n2"], "moments": [{"time": END, "nodes": ["n1", "n2"]}]}
    with open_store(ask.store).begin() as db:
        judged.put_cursor(db, "places", json.dumps([row]))
    said = ask("lemons").output
    assert said.index("No node is a lemon") < said.index("rack r7  1      n[1-2]")


def test_a_node_without_peers_is_told_unless_it_is_a_suspect(ask):
    row = {"node": "n1", "where": "debug|normal||", "runs": 57.9, "failed": 38.6, "expected": 6.6}
    with open_store(ask.store).begin() as db:
        judged.put_cursor(db, "untold", json.dumps([row]))
    *_, header, line, advice = ask("lemons").output.splitlines()
    assert header.split() == ["CAN'T", "BE", "TOLD", "WHERE", "JOBS", "FAILED", "EXPECTED"]
    assert line.split() == ["n1", "partition", "debug,", "QOS", "normal", "57.9", "38.6", "6.6"]
    assert advice.endswith("gpuhealth-escalate NODE")
    assert [json.loads(one) for one in ask("lemons", "--json").output.splitlines()] == [row]
    with open_store(ask.store).begin() as db:
        judged.keep_suspicions(db, [Suspicion("n1", END, 0.9, 1.0, 1.0, 0.1, "L4")], END)
    assert "CAN'T BE TOLD" not in ask("lemons").output


@pytest.mark.parametrize(
    "command", [["lemons"], ["explain", "7"], ["correlate"], ["import", "--jobs", "j", "--events", "e"]]
)
def test_what_is_not_installed_is_said_with_how_to_install_it(command, tmp_path):
    (tmp_path / "sqlalchemy.py").write_text("raise ModuleNotFoundError('no', name='sqlalchemy')")
    (tmp_path / "g.toml").write_text(f'[paths]\nrun = "{tmp_path}/r"\n[store]\ndatabase = "{tmp_path}/g.toml"\n')
    env = {**os.environ, "GPUHEALTH_CONFIG": str(tmp_path / "g.toml")}
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    script += "from slurm_gpuhealth.commands.gpuhealth import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *command], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    pip = f"{os.path.dirname(sys.executable)}/pip"  # the one of this installation: the system's refuses
    assert done.stderr == f"Error: this command needs sqlalchemy: {pip} install 'slurm-gpuhealth[controller]'\n"


def used(*phases):
    """The summary of a GPU with these phases: minutes, watts, utilization."""
    one, now = use.begin(END - 7200), END - 7200
    for minutes, watts, busy in phases:
        sample = {"utilization": busy, "power": watts * 1000, "limit": 700_000, "processes": 1, "memory_utilization": 0}
        for _ in range(minutes):
            one, now = use.add(one, now, sample, 0.5, 600.0), now + 60
    return use.summary(one)


def ship_use(store, attempt=0, node="n1", when=END + 30, **gpus):
    key = {"journal": "j", "id": 7, "sub": attempt, "seq": 1, "taken": 1}
    with open_store(store).begin() as db:
        db.execute(sql.insert(schema.jobuse).values(**key, node=node, time=when, gpus=json.dumps(gpus)))


def test_each_gpu_of_the_job_has_a_line_with_its_phases(ask):
    at_work = (20, 80, 0), (60, 610, 98)
    gpus = {"GPU-3": used(*at_work, (40, 120, 100)), "GPU-9": used(*at_work, (40, 80, 0))}
    ship_use(ask.store, **gpus)
    ship_use(ask.store, node="n2", when=END + 86400, **{"GPU-1": used((9, 610, 98))})  # of another job of this number
    said = ask("7").output.splitlines()
    (three,) = [line for line in said if "n1 GPU3 " in line]
    assert three.endswith(" idle 20 min, working 1 h, spinning 40 min; usually 610 of 700 W")
    bars = three.split()[2]
    assert (len(bars), bars[0], bars[15], bars[-1]) == (30, "▁", "▇", "▂")
    assert any("n1 GPU GPU-9" in line and "working 1 h, idle 40 min" in line for line in said)
    assert not any("GPU-1" in line for line in said)
    first = json.loads(ask("7", "--json").output.splitlines()[0])
    assert [(one["node"], one["gpu"], one["usual"]) for one in first["uses"]] == [("n1", 3, 610), ("n1", None, 610)]


def test_a_job_of_seconds_has_no_picture(ask):
    ship_use(ask.store, **{"GPU-3": used((60, 610, 98))})
    assert "n1 GPU3 " in ask("7").output
    with open_store(ask.store).begin() as db:
        db.execute(sql.update(schema.attempt).values(start=END - 5))
    assert "n1 GPU3 " not in ask("7").output.replace("n1 GPU3.", "")


def test_a_job_of_many_phases_is_told_by_their_sum(ask):
    ship_use(ask.store, **{"GPU-3": used(*[(5, 610, 98), (5, 80, 0)] * 10)})
    assert "working 49 min, idle 50 min; idle for 4 min at once; usually" in ask("7").output


def test_a_gpu_that_was_lost_all_the_time_has_a_line_too(ask):
    one = use.begin(END - 7200)
    for minute in range(61):
        one = use.add(one, END - 7200 + 60 * minute, None, 0.5, 600.0)
    ship_use(ask.store, **{"GPU-3": use.summary(one), "GPU-9": used((60, 610, 98))})
    assert any(line.endswith("n1 GPU3 lost 1 h") for line in ask("7").output.splitlines())


@pytest.mark.parametrize(("reason", "why"), [("heat", "heat"), ("none", "the driver names no reason")])
def test_a_gpu_that_was_slower_than_the_others_is_said_to_be_with_the_reason(ask, reason, why):
    slow = {"seconds": 7190, "percent": 61, "reason": reason}
    ship_use(ask.store, **{"GPU-3": {**used((180, 380, 98)), "slow": slow}, "GPU-9": used((180, 610, 98))})
    said = ask("7").output.splitlines()
    (three,) = [line for line in said if "n1 GPU3 " in line]
    assert three.endswith(f"; usually 380 of 700 W; at 61 % of the others' clock for 2 h ({why})")
    assert sum("others' clock" in line for line in said) == 1


@pytest.mark.parametrize("watts", [3.5, 610.0, 5e-324, 9e11])
def test_watts_with_a_fraction_are_watts(ask, watts):
    one = used((60, 610, 98))
    ship_use(ask.store, **{"GPU-3": {**one, "series": {**one["series"], "watts": [watts, None]}}, "²": one})
    done = ask("7")
    assert (done.exit_code, done.exception) == (0, None)
    assert any("n1 GPU3 " in line for line in done.output.splitlines())


@pytest.mark.parametrize("wrong", ["[" * 5000, "null", '{"GPU-3": {}}', '{"GPU-3": 5}', "{"])
def test_a_use_that_no_node_of_ours_wrote_is_left_out(ask, wrong):
    good = {"GPU-3": used((60, 610, 98))}
    ship_use(ask.store)
    for text in (
        wrong,
        *(
            json.dumps({"GPU-3": {**good["GPU-3"], key: "x"}})
            for key in ("series", "spent", "every", "usual", "clock", "slow")
        ),
    ):
        with open_store(ask.store).begin() as db:
            db.execute(sql.update(schema.jobuse).values(gpus=text))
        said = ask("7")
        assert said.exit_code == 0
        assert "n1 GPU3 ▇" not in said.output


def stood_still(store, since, gpus=("GPU-3", "GPU-9"), idle="", cleared=None, clock=0.0):
    """Job 7 ran on n1 and stood still there. `clock`: its seconds ahead; `cleared`: by its clock."""
    key = {"node": "n1", "journal": "j", "seq": 1, "taken": 1, "clock": clock}
    began, since = END - 7199 + clock, since + clock
    with open_store(store).begin() as db:
        run = {"user": "alice", "nodes": 1, "gpus": ",".join(gpus), "started": began, "ended": END + 1 + clock}
        db.execute(sql.insert(schema.run).values(**key, id=7, sub=0, **run))
        for number, uuid in enumerate(gpus):
            kind = "idle" if uuid == idle else "spinning"
            details = json.dumps({"kind": kind, "since": since, "job": 7, "restart": 0})
            row = {"time": since + 600, "source": "job", "code": "stalled", "uuid": uuid, "cleared": cleared}
            db.execute(sql.insert(schema.finding).values(**key, id=number, sub=0, details=details, **row))


@pytest.mark.parametrize(
    ("state", "words_"), [("TIMEOUT", "its time limit"), ("CANCELLED", "it was cancelled"), ("FAILED", "its end")]
)
def test_a_job_that_had_stood_still_says_since_when_and_which_gpu_did_not_wait(ask, state, words_):
    stood_still(ask.store, END - 4800, ("GPU-9", "GPU-8", "GPU-3"), idle="GPU-3", cleared=END - 10)
    with open_store(ask.store).begin() as db:
        db.execute(sql.update(schema.attempt).where(schema.attempt.c.attempt == 0).values(state=state))
    said = ask("7").output
    since = "It had stood still since 2026-11-20 22:53:20 UTC"
    assert f"{since}, 1 h 20 min before {words_}; 2 of 3 GPUs waited, n1 GPU3 did not." in said
    assert "points to" not in said
    first, last = map(json.loads, ask("7", "--json").output.splitlines())
    assert (first["stood"]["waiting"], first["verdict"]["cause"], last["stood"]) == (2, "node", None)


def test_what_a_hang_points_to_is_said_and_that_the_verdict_does_not_count_it(ask):
    stood_still(ask.store, END - 4800, cleared=END + 5)
    key = {"node": "n1", "journal": "j", "seq": 1, "taken": 1, "id": 8, "sub": 0}
    lost = {
        "time": END - 4790,
        "source": "nvml",
        "code": "lost",
        "severity": "fault",
        "uuid": "GPU-3",
        "message": "gone",
    }
    with open_store(ask.store).begin() as db:
        db.execute(sql.insert(schema.finding).values(**key, **lost))
    said = ask("7").output
    assert "2 of 2 GPUs waited." in said
    assert "then: n1 GPU3: nvml:lost (gone), when it stopped" in said
    assert "It points to the node, n1 GPU3; the verdict above does not count the stop itself." in said


def test_a_job_that_worked_again_before_its_end_is_not_said_to_have_stood_still(ask):
    stood_still(ask.store, END - 4800, cleared=END - 1800 + 5000, clock=5000.0)
    assert "stood still" not in ask("7").output


def test_what_the_node_finds_after_the_job_s_end_is_not_taken_for_the_cause(ask):
    stood_still(ask.store, END - 300, cleared=END + 5)
    key = {"node": "n1", "journal": "j", "seq": 1, "taken": 1, "id": 8, "sub": 0}
    lost = {
        "time": END + 120,
        "source": "nvml",
        "code": "lost",
        "severity": "fault",
        "uuid": "GPU-3",
        "message": "gone",
    }
    with open_store(ask.store).begin() as db:
        db.execute(sql.insert(schema.finding).values(**key, **lost))
    said = ask("7").output
    assert "2 of 2 GPUs waited." in said
    assert "points to" not in said
