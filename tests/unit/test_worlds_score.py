"""Scoring a correlator on the small worlds, and `gpuhealth simulate --worlds`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.outcomes import Event, Suspicion, Verdict
from slurm_gpuhealth.simulate.worlds import score
from slurm_gpuhealth.simulate.worlds.every import ALL, build
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH


class Says:
    """A judge that always says the same of nodes, and of jobs what `verdict` makes of their truth."""

    def __init__(self, made, verdict, suspects=(), first=0.0, until=99.0):
        self.truth, self.verdict, self.suspects = made.truth, verdict, suspects
        self.first, self.until = EPOCH + first * DAY, EPOCH + until * DAY
        self.last = 0.0

    def event(self, event):
        assert event.time >= self.last
        self.last = event.time

    def attempt(self, attempt):
        assert attempt.end + 120 >= self.last
        self.last = attempt.end + 120
        truth = self.truth.get((attempt.job, attempt.attempt))
        return truth and Verdict(attempt.job, attempt.attempt, *self.verdict(truth))

    def suspicions(self, time, above=0.05):
        return [one._replace(time=time) for one in self.suspects if self.first <= time <= self.until]

    def rescored(self):
        return []


def suspect(node, rung, **gpus):
    return Suspicion(node, 0.0, 0.9, 1.0, 9.0, 1.0, rung, gpus=gpus)


def scored(name, verdict, *suspects, **more):
    made = build(name)
    return score.judge(name, 1, made, Says(made, verdict, suspects, **more), 120.0)


def truly(truth):
    return truth.cause, 1.0, truth.node


def test_who_knows_the_truth_reaches_all_bars():
    (bad,) = build("one-gpu-of-eight").bad
    found = scored("one-gpu-of-eight", truly, suspect("gn03", "L3", **{str(bad.gpus[0][0]): 0.9}), first=8)
    assert found.bad == {"gn03, day 6": pytest.approx(2.0)}
    assert (found.deep, dict(found.gpus), dict(found.wronged), found.blamed) == (1, {"gn03": True}, {}, 0)
    assert found.right == found.failed > 100
    total = score.summary([found])
    assert (total.short(), total.found, total.gpus_right, total.right) == ([], 1, 1, found.failed)


def test_a_rung_comes_too_late_or_too_early_for_a_bad_node():
    name = "repaired-and-back"  # bad on days 3 to 12, and from 24
    assert scored(name, truly, suspect("gn05", "L3"), first=12, until=19).bad["gn05, day 3"] is not None
    late = scored(name, truly, suspect("gn05", "L3"), first=20, until=23)
    assert late.bad == {"gn05, day 3": None, "gn05, day 24": None}
    assert late.wronged == {"gn05": "L3"}
    assert scored(name, truly, suspect("gn05", "L3"), first=0, until=2).wronged == {"gn05": "L3"}


def test_a_light_test_finds_a_bad_node_and_wrongs_no_good_one():
    found = scored("silent-quarter", truly, suspect("gn09", "L2"), suspect("gn01", "L2"), suspect("gn02", ""))
    assert None not in found.bad.values()
    assert (found.deep, dict(found.wronged)) == (0, {})


def test_jobs_put_down_to_a_good_node_are_counted_and_to_the_bad_one_not():
    for node, blames in (("gn01", True), ("gn09", False)):
        found = scored("silent-quarter", lambda truth, node=node: ("node", 1.0, node), suspect("gn01", "RMA"))
        of_the_node = found.verdicts["node", "node"]
        assert (found.blamed == found.failed) == blames
        assert of_the_node > 30
        assert found.wronged == {"gn01": "RMA"}
    assert score.summary([found, found]).short() == ["found", "wronged", "blamed"]


def test_events_and_attempts_come_in_the_order_of_time():
    made = build("xid-74-is-harmless-here")
    times = [(when, isinstance(item, Event)) for when, item in score.merged(made, 120.0)]
    assert times == sorted(times, key=lambda one: one[0])
    assert len(times) == len(made.attempts) + len(made.events)


def simulate(*argv):
    return CliRunner().invoke(main, ["simulate", *argv])


def test_a_world_is_judged_by_its_name():
    result = simulate("--world", "silent-for-two-users", "--world", "limits-too-short")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["silent-for-two-users", "limits-too-short"]
    for words in ("family silent", "group tune", "FOUND: bad nodes", "TRUTH"):
        assert words in result.output
    rows = [json.loads(line) for line in simulate("--world", "limits-too-short", "--json").output.splitlines()]
    assert (rows[0]["name"], rows[0]["bad"]) == ("limits-too-short", {})
    assert [row["summary"] for row in rows[1:]] == ["family ended", "group tune", "all"]
    assert rows[1]["days"] is None


def test_what_is_kept_is_told_as_a_sum_only(monkeypatch):
    found = scored("silent-for-two-users", truly)

    def run(names, seeds, each):
        return [found._replace(name=name) for name in names]

    monkeypatch.setattr(score, "run", run)
    kept = {name for name, one in ALL.items() if one.group == "kept"}
    told = simulate("--worlds").output
    assert "group kept" in told
    assert not [name for name in kept if name in told]
    assert [name for name in kept if name in simulate("--worlds", "--all").output]
    assert not [name for name in kept if name in simulate("--worlds", "--list").output]


def test_a_world_is_written_for_replay(tmp_path):
    result = simulate("--world", "requeued", "--write", str(tmp_path))
    assert result.exit_code == 0, result.output
    argv = ["replay", *(str(tmp_path / name) for name in ("JOBS.jsonl", "EVENTS.jsonl"))]
    told = CliRunner().invoke(main, [*argv, "--topology", str(tmp_path / "TOPOLOGY.json"), "--json"]).output
    rows = [json.loads(line) for line in told.splitlines()]
    truth = [json.loads(line) for line in (tmp_path / "TRUTH.jsonl").open()]
    assert sum("verdict" in row for row in rows) == sum("cause" in row for row in truth) > 100
    assert not (tmp_path / "PLACES.json").exists()


def test_the_places_of_a_world_are_written_for_replay(tmp_path):
    assert simulate("--world", "pdu-and-a-bad-node", "--write", str(tmp_path)).exit_code == 0
    places = tmp_path / "PLACES.json"
    assert json.loads(places.read_text())["pdu p1"] == [f"gn{nth:02}" for nth in range(1, 7)]
    argv = ["replay", *(str(tmp_path / name) for name in ("JOBS.jsonl", "EVENTS.jsonl"))]
    assert CliRunner().invoke(main, [*argv, "--places", str(places)]).exit_code == 0


def test_a_wrong_world_is_told():
    assert "no world 'nonsense'" in simulate("--world", "nonsense").output
