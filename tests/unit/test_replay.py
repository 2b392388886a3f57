"""gpuhealth replay: files in any order, errors in them, and its output."""

from __future__ import annotations

import json
import os
import random

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.gpuhealth import main

NOW = 1_760_000_000
DAY = 86400


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch):
    monkeypatch.setattr("slurm_gpuhealth.config.load.DEFAULT_PATH", "/nonexistent/gpuhealth.toml")
    monkeypatch.delenv("GPUHEALTH_CONFIG", raising=False)


def rows():
    """Jobs of nine users on eight nodes, of which n3 is bad, and its Xids."""
    rng = random.Random(3)  # noqa: S311 - the same every time
    jobs, events = [], []
    for job in range(300):
        node = f"n{job % 8}"
        end = NOW + job * 9000
        bad = node == "n3" and job % 3 == 0
        failed = bad or rng.random() < 0.1
        log = 'he wrote "end": 5, "job": 7 \\" "time": 9' if failed else None
        jobs.append(
            {
                "job": job,
                "attempt": 0,
                "user": f"user{job % 9}",
                "account": "lab",
                "name": "train",
                "array": None,
                "state": "FAILED" if failed else "COMPLETED",
                "exit_code": int(failed),
                "signal": 0,
                "start": end - 7200,
                "end": end,
                "nodes": [node],
                "gpus": {node: ["GPU-1", "GPU-2"]},
                "failed_node": None,
                "log": log,
                "log_class": "none" if bad else "application" if failed else None,
            }
        )
        if bad:
            events.append({"time": end - 4, "node": node, "gpu": "GPU-2", "source": "xid", "code": "79", "detail": {}})
    return jobs, events


def job(**changes):
    """A line of JOBS, its values as JSON."""
    row = {"job": "1", "state": '"FAILED"', "start": "1", "end": "2", "nodes": '["n1"]', **changes}
    return "{" + ", ".join(f'"{key}": {value}' for key, value in row.items()) + "}\n"


@pytest.fixture
def replay(tmp_path):
    def run(jobs, events, *more):
        for name, lines in (("JOBS.jsonl", jobs), ("EVENTS.jsonl", events)):
            text = "".join(one if isinstance(one, str) else f"{json.dumps(one)}\n" for one in lines)
            (tmp_path / name).write_text(text)
        argv = ["replay", str(tmp_path / "JOBS.jsonl"), str(tmp_path / "EVENTS.jsonl"), *more]
        return CliRunner().invoke(main, argv)

    return run


def printed(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_it_prints_verdicts_and_at_the_end_suspicions(replay):
    jobs, events = rows()
    out = printed(replay(jobs, events, "--json"))
    verdicts = {one["job"]: one for one in out if "verdict" in one}
    assert list(verdicts) == [one["job"] for one in jobs if one["state"] == "FAILED"]
    assert set(verdicts[3]) == {"job", "attempt", "verdict", "confidence", "node", "gpu"}
    assert (verdicts[3]["verdict"], verdicts[3]["node"], verdicts[3]["gpu"]) == ("node", "n3", "GPU-2")
    (suspicion,) = [one for one in out if "p_lemon" in one]
    assert set(suspicion) == {"node", "time", "p_lemon", "hazard_per_day", "observed", "expected", "rung"}
    assert (suspicion["node"], suspicion["rung"]) == ("n3", "RMA")


def test_the_order_of_the_files_does_not_matter(replay):
    jobs, events = rows()
    first = replay(jobs, events, "--json").output
    mixed = random.Random(5)  # noqa: S311 - the same every time
    mixed.shuffle(jobs)
    mixed.shuffle(events)
    assert replay(jobs, events, "--json").output == first


def test_what_stands_there_twice_counts_once(replay):
    jobs, events = rows()
    assert replay(jobs * 2, events * 2, "--json").output == replay(jobs, events, "--json").output


def test_a_byte_order_mark_and_blanks_are_read_over(replay):
    jobs, events = rows()
    first = f"\ufeff  {json.dumps(jobs[0])}\t\n"
    assert replay([first, *jobs[1:]], events, "--json").output == replay(jobs, events, "--json").output


def test_suspicion_over_time(replay):
    jobs, events = rows()
    out = [one for one in printed(replay(jobs, events, "--json", "--every", str(DAY))) if "p_lemon" in one]
    times = [one["time"] for one in out if one["node"] == "n3"]
    assert len(times) > 20
    assert {round(after - before) for before, after in zip(times, times[1:-1])} == {DAY}


def test_a_verdict_that_later_evidence_changes_is_printed_once_and_changed(replay):
    jobs = [
        {**rows()[0][0], "job": one, "user": f"u{one}", "state": "FAILED", "log": None, "log_class": "none"}
        | {"start": NOW + one * 20000, "end": NOW + one * 20000 + 15000}
        for one in range(9)
    ]
    out = [one for one in printed(replay(jobs, [], "--json")) if "verdict" in one]
    assert [one["job"] for one in out] == list(range(9))
    assert out[0]["verdict"] == "node"
    assert printed(replay(jobs[:1], [], "--json"))[0]["verdict"] == "application"


def test_for_people_it_is_a_table(replay):
    result = replay(*rows())
    assert result.exit_code == 0
    assert "failed attempts: application" in result.output
    assert "P(LEMON)" in result.output
    assert "n3" in result.output


def test_a_node_that_is_called_otherwise_in_the_events_is_told(replay):
    jobs, events = rows()
    told = "n3.cluster.example of EVENTS and n3 of JOBS are taken for two nodes"
    assert told in replay(jobs, [{**one, "node": f"{one['node']}.cluster.example"} for one in events]).output
    assert "taken for two nodes" not in replay(jobs, [*events, {**events[0], "node": "spare.example"}]).output


def test_empty_files_are_no_error(replay):
    assert replay([], []).output == "0 failed attempts: none\nno node is suspected\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "JOBS.jsonl:2: not JSON"),
        ("[]\n", "JOBS.jsonl:2: not a JSON object"),
        ('{"job": 1, "state": "FAILED", "start": 1, "nodes": []}\n', "JOBS.jsonl:2: no key 'end'"),
        ('{"job": 1, "state": "FAILED", "end": 1, "nodes": []}\n', "JOBS.jsonl:2: no key 'start'"),
        ('{"job": 1, "state": "FAILED", "start": 1, "end": "late", "nodes": []}\n', "'end' is 'late'"),
        ('{"job": "x", "state": "FAILED", "start": 1, "end": 1, "nodes": []}\n', "JOBS.jsonl:2: a value of the wrong"),
        (job(end="1.2.3"), "JOBS.jsonl:2: not JSON"),
        (job(end="1e999"), "JOBS.jsonl:2: a value of the wrong kind: 'end': inf"),
        (
            job(end="1760000000000"),
            "JOBS.jsonl:2: a value of the wrong kind: 'end': 1.76e+12 are not the seconds since",
        ),
        (job(job='"1234_5"'), "'job' is '1234_5', where a whole number belongs"),
        (job(job="true"), "'job' is 'True', where a whole number belongs"),
        (job(exit_code='"1:0"'), "'exit_code' is '1:0', where a whole number belongs"),
        (job(state='["COMPLETED"]'), "'state' is \"['COMPLETED']\", where Slurm's word belongs"),
        (job(state='""'), "'state' is '', where Slurm's word belongs"),
        (job(nodes='[["n1"]]'), "\"['n1']\", where a name belongs"),
        (job(job="1e999"), "JOBS.jsonl:2: a value of the wrong"),
        (job(nodes='"n1"'), "JOBS.jsonl:2: a value of the wrong kind: 'n1', where a list belongs"),
        (job(log="5"), "JOBS.jsonl:2: a value of the wrong kind: '5', where a text belongs"),
        (job(gpus='{"n1": [{}]}'), "JOBS.jsonl:2: a value of the wrong"),
        (job(log="[" * 100_000), "JOBS.jsonl:2: not JSON"),
        (job().rstrip() + " {}\n", "JOBS.jsonl:2: not JSON: Extra data"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_key(replay, line, message):
    jobs, events = rows()
    result = replay([jobs[0], line], events, "--json")
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize("more", ['"time": 1e18', '"time": 5, "gpu": {}', '"time": 5, "detail": "x"'])
def test_an_event_that_would_end_the_engine_is_named(replay, more):
    result = replay([], ['{"node": "n1", "source": "test", "code": "L3", ' + more + "}\n"], "--every", "86400")
    assert result.exit_code == 1
    assert "EVENTS.jsonl:1: a value of the wrong kind" in result.output


@pytest.mark.parametrize(
    "detail", ['{"passed": "false"}', '{"level": 7, "passed": true}', '{"level": "²", "passed": true}']
)
def test_a_test_of_which_one_cannot_tell_whether_it_passed_is_not_passed_over(replay, detail):
    result = replay([], ['{"time": 5, "node": "n1", "source": "test", "detail": ' + detail + "}\n"])
    assert (result.exit_code, "'level' (1 to 4) and 'passed'" in result.output) == (1, True)


def test_a_code_of_any_length_is_read(replay):
    assert replay([], [{"time": 5, "node": "n1", "source": "xid", "code": "9" * 5000}]).exit_code == 0


@pytest.mark.parametrize("word", ["COMPLETED", "completed", "COMPLETED+"])
def test_a_job_that_completed_is_none_that_failed_however_that_is_written(replay, word):
    assert printed(replay([job(state=json.dumps(word))], [], "--json")) == []


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(main, ["replay", str(tmp_path / "pipe"), "/dev/null"])
    assert (result.exit_code, "is a pipe" in result.output) == (1, True)


def test_a_bad_event_is_named_too(replay):
    result = replay([], ['{"time": 5, "source": "xid"}\n'])
    assert result.exit_code == 1
    assert "EVENTS.jsonl:1: no key 'node'" in result.output


def test_thresholds_come_from_the_configuration(replay, tmp_path, monkeypatch):
    file = tmp_path / "gpuhealth.toml"
    file.write_text("[suspicion]\nl2 = 1.0\nl3 = 1.0\nl4 = 1.0\nrma = 1.0\n")
    monkeypatch.setenv("GPUHEALTH_CONFIG", str(file))
    (suspicion,) = [one for one in printed(replay(*rows(), "--json")) if "p_lemon" in one]
    assert suspicion["rung"] == "L2", "it has hard evidence"


def brown_outs():
    """Three times, two nodes of a rack lose a GPU at once; others lose theirs all the time. Their jobs die of it."""
    rng = random.Random(5)  # noqa: S311 - the same every time
    lost = [(NOW + rng.uniform(0, 20 * DAY), f"n{rng.randrange(200)}") for _ in range(400)]
    for day, pair in ((3, ("r1", "r2")), (8, ("r3", "r4")), (13, ("r1", "r4"))):
        lost += [(NOW + day * DAY + number, node) for number, node in enumerate(pair)]
    events = [{"time": time, "node": node, "gpu": 0, "source": "xid", "code": "79"} for time, node in lost]
    jobs = [
        {"job": number, "user": f"user{number % 9}", "name": "train", "state": "FAILED", "nodes": [node]}
        | {"start": time - 7200, "end": time + 4}
        for number, (time, node) in enumerate(lost)
    ]
    return jobs, events


def test_with_places_a_history_blames_the_rack_and_not_its_nodes(replay, tmp_path):
    (tmp_path / "PLACES.json").write_text(json.dumps({"rack r7": [f"r{nth}" for nth in range(1, 9)]}))

    def blamed(*argv):
        told = printed(replay(*brown_outs(), *argv, "--json"))
        return {one["node"] for one in told if one.get("verdict") == "node"}

    rack = {"r1", "r2", "r3", "r4"}
    assert rack <= blamed()
    assert len(blamed("--places", str(tmp_path / "PLACES.json")) & rack) == 0


@pytest.mark.parametrize("option", ["--topology", "--places"])
def test_a_file_of_places_that_is_none_is_refused(replay, tmp_path, option):
    (tmp_path / "file.json").write_text('{"leaf1": "n1"}')
    result = replay(*rows(), option, str(tmp_path / "file.json"))
    assert result.exit_code == 1
    assert 'expected {"leaf": ["node", ...], ...}' in result.output
