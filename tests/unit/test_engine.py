"""The correlator as a whole: what must hold for all constants, and that its state survives storing."""

from __future__ import annotations

import json
import random

import pytest

from slurm_gpuhealth.config.settings import Suspicion
from slurm_gpuhealth.correlate import suspicion
from slurm_gpuhealth.correlate.engine import AppState, Correlator, FleetState, NodeState, State
from slurm_gpuhealth.correlate.tally import Without
from slurm_gpuhealth.correlate.weights import grid
from slurm_gpuhealth.outcomes import Attempt, Event, Reading

NOW = 1_760_000_000.0
HOUR = 3600.0
CLOSE = 3 * suspicion.TRIFLE


def attempt(job, user="ann", state="FAILED", nodes=("n1",), start=None, hours=1.0, name="train", **more):
    start = NOW + job * HOUR if start is None else start
    code = 0 if state == "COMPLETED" else 1
    end = start + hours * HOUR
    return Attempt(job, 0, user, "lab", name, None, state, code, 0, start, end, tuple(nodes), **more)


def played(items, leaves=None):
    correlator = Correlator(Suspicion(), leaves or {})
    verdicts = {}
    for one in items:
        if isinstance(one, Event):
            correlator.event(one)
        elif verdict := correlator.attempt(one):
            verdicts[verdict.job] = verdict
        verdicts.update({verdict.job: verdict for verdict in correlator.rescored()})
    return correlator, verdicts


def history(seed=1, rename=str):
    """Weeks of a small cluster, by time: jobs of many users, one bad node, hard events."""
    rng = random.Random(seed)  # noqa: S311 - the same every time
    items = []
    for job in range(600):
        size = rng.choice((1, 1, 1, 1, 2, 4))
        first = rng.randrange(12)
        nodes = [rename(f"n{(first + place) % 12}") for place in range(size)]
        hours = rng.uniform(0.2, 12)
        end = NOW + job * HOUR
        bad = rename("n3") in nodes and rng.random() < 0.35
        failed = bad or rng.random() < 0.1
        kind = ("nothing" if bad else "application") if failed else None
        state = "FAILED" if failed else "COMPLETED"
        user = f"user{rng.randrange(9)}"
        items.append(attempt(job, user, state, nodes, end - hours * HOUR, hours, f"app{job % 3}", log_class=kind))
        if bad and rng.random() < 0.5:
            items.append(Event(end - 20, rename("n3"), 2, "xid", "79"))
    return sorted(items, key=lambda one: one.time if isinstance(one, Event) else one.end + 120)


def quiet():
    """Weeks in which all goes well: 40 nodes, nine users."""
    return [attempt(job, f"user{job % 9}", "COMPLETED", [f"n{job % 40}"], start=NOW + job * HOUR) for job in range(900)]


def levels(correlator, time=NOW + 700 * HOUR):
    return {node: correlator.suspicion(node, time).p_lemon for node in correlator.state.nodes}


class TestMetamorphic:
    def test_other_names_of_nodes_change_nothing_but_names(self):
        one, first = played(history())
        other, second = played(history(rename=lambda name: f"rack7-{name}-x"))
        assert {f"rack7-{name}-x": pytest.approx(p) for name, p in levels(one).items()} == levels(other)
        assert {job: verdict.cause for job, verdict in first.items()} == {j: v.cause for j, v in second.items()}

    @pytest.mark.parametrize("nodes", [40, 1])
    @pytest.mark.parametrize("kind", [None, "nothing", "application", "crash", "communication"])
    def test_a_thousand_crashing_jobs_of_one_user_raise_no_node(self, nodes, kind):
        jobs = [
            attempt(job, "bob", nodes=[f"n{job % nodes}"], start=NOW + job * 1500, hours=0.3, log_class=kind)
            for job in range(1000)
        ]
        correlator, verdicts = played(jobs)
        assert max(levels(correlator, jobs[-1].end).values()) < 0.1
        assert {verdict.cause for verdict in list(verdicts.values())[20:]} == {"application"}

    @pytest.mark.parametrize("kind", [None, "nothing", "crash", "application", "communication"])
    @pytest.mark.parametrize("hours", [0.05, 1.0, 8.0])
    def test_the_same_failures_of_five_users_on_one_node_do(self, kind, hours):
        jobs = [attempt(job, f"user{job}", start=NOW + job * 9 * HOUR, hours=hours, log_class=kind) for job in range(5)]
        correlator, _ = played(jobs)
        assert correlator.suspicion("n1", jobs[-1].end).p_lemon > 0.1

    def test_the_same_nan_at_the_same_iteration_on_other_nodes_is_the_application(self):
        reading = Reading("unknown", 0.5, "nothing", iteration=4711, rank=3, fingerprint="loss is nan|train.py:step|")
        lemon = [
            attempt(job, f"user{job}", nodes=["n1"], start=NOW + job * HOUR * 5, hours=4, log_class="nothing")
            for job in range(8)
        ]
        first = attempt(50, "eve", nodes=["n7", "n8"], start=NOW + 50 * HOUR, reading=reading)
        second = attempt(51, "eve", nodes=["n1", "n2"], start=NOW + 52 * HOUR, hours=6, reading=reading)
        _, with_it = played([*lemon, first, second])
        _, without = played([*lemon, first, second._replace(reading=reading._replace(iteration=12, rank=0))])
        assert without[51].cause == "node"
        assert with_it[51].cause == "application"

    def test_a_repair_lowers_suspicion(self):
        items = history()
        correlator, _ = played(items)
        end = NOW + 601 * HOUR
        before = correlator.suspicion("n3", end).p_lemon
        correlator.event(Event(end, "n3", None, "repair", "board"))
        after = correlator.suspicion("n3", end + 1)
        assert before > 0.9
        assert after.p_lemon == pytest.approx(0.1, abs=0.01), "fresh from a repair it fails again sooner than others"
        assert correlator.suspicion("n3", end + 90 * 86400).p_lemon < 0.05

    def test_what_arrives_twice_changes_nothing(self):
        once, first = played(history())
        twice, second = played([one for one in history() for _ in range(2)])
        assert levels(once) == pytest.approx(levels(twice))
        assert {job: verdict.cause for job, verdict in first.items()} == {j: v.cause for j, v in second.items()}

    @pytest.mark.parametrize("seed", range(3))
    def test_what_arrives_hours_late_changes_little(self, seed):
        items = history(seed)
        late = random.Random(seed)  # noqa: S311 - the same every time
        shuffled = sorted(
            items, key=lambda one: (one.time if isinstance(one, Event) else one.end + 120) + late.uniform(0, 3 * HOUR)
        )
        one, first = played(items)
        other, second = played(shuffled)
        for node, p in levels(one).items():
            assert levels(other)[node] == pytest.approx(p, abs=0.03), node
        changed = [job for job, verdict in first.items() if verdict.cause != second[job].cause]
        assert len(changed) <= len(first) * 0.05

    def test_one_failure_of_64_nodes_raises_none_of_them(self):
        for hours in (0.1, 6, 48, 200):
            correlator, _ = played([attempt(1, nodes=[f"n{one}" for one in range(64)], hours=hours)])
            assert max(levels(correlator, NOW + 300 * HOUR).values()) < 0.05


def test_what_is_worked_out_step_by_step_is_what_is_worked_out_anew():
    """The evidence of a node as it is kept: with what came late, was judged again, or is left out for once."""
    items = history(3)
    late = [items.pop(place) for place in range(len(items) - 1, 0, -9)]
    correlator, _ = played([*items, *late])
    s, g = Suspicion(), grid(Suspicion())
    seen = 0
    for node in correlator.state.nodes.values():
        now = node.records and max(one.end for one in node.records.values())
        kept = suspicion.tally_of(node, g, s).at(now, node.days, node.jobs)
        anew = suspicion._anew(node, g, s, None).at(now, node.days, node.jobs)
        assert kept == pytest.approx(anew, abs=CLOSE)
        for key, record in node.records.items():
            without = Without(key, record.start - s.before, record.end + s.after)
            near = suspicion.incidents_in(node, without.start, without.end)
            events = [one for one in near if one.kind in suspicion.COUNTED]
            tally = suspicion._apart(node, suspicion.tally_of(node, g, s), g, s, without, events)
            kept = tally.at(now, node.days, node.jobs)
            anew = suspicion._anew(node, g, s, without).at(now, node.days, node.jobs)
            assert kept == pytest.approx(anew, abs=CLOSE)
            seen += 1
    assert seen > 80


class TestOnlyHere:
    """An application that fails on one node alone, and completes on others all the while."""

    GOOD = tuple(attempt(job, "ann", "COMPLETED", [f"n{2 + job % 9}"], hours=0.5) for job in range(40))

    def test_that_an_application_failed_on_one_node_alone_holds_until_it_fails_on_another(self):
        well = attempt(0, state="COMPLETED", nodes=["n2"])
        here, again, there = attempt(1), attempt(2), attempt(3, nodes=["n2"])
        alone = [
            played(items)[0].state.nodes["n1"].cases["1.0"].apart
            for items in ([well, here, again], [well, here, again, there])
        ]
        assert alone == [True, False]

    def test_it_is_the_node(self):
        bad = [attempt(1000 + job, "ann", start=NOW + (10 + job) * HOUR, hours=0.3) for job in range(20)]
        items = sorted([*self.GOOD, *bad], key=lambda one: one.end)
        correlator, verdicts = played(items)
        assert correlator.suspicion("n1", items[-1].end).p_lemon > 0.9
        assert {verdicts[1000 + job].node for job in range(10, 20)} == {"n1"}
        assert any(term.text.endswith("of late on this node alone") for term in verdicts[1019].terms)

    def test_it_is_the_program_where_the_last_tasks_of_an_array_are_bad_and_one_node_is_free_to_take_them(self):
        bad = [attempt(1000 + job, "ann", start=self.GOOD[-1].end + job * 60, hours=0.01) for job in range(20)]
        correlator, verdicts = played([*self.GOOD, *bad])
        assert correlator.suspicion("n1", bad[-1].end).p_lemon < 0.3
        assert [verdicts[1000 + job].cause for job in range(5, 20)] == ["application"] * 15

    def test_it_is_the_program_where_it_fails_on_a_second_node_too(self):
        bad = [
            attempt(1000 + job, "ann", nodes=[f"n{1 + 19 * (job % 2)}"], start=NOW + (10 + job) * HOUR, hours=0.3)
            for job in range(20)
        ]
        correlator, verdicts = played(sorted([*self.GOOD, *bad], key=lambda one: one.end))
        assert max(correlator.suspicion(node, bad[-1].end).p_lemon for node in ("n1", "n20")) < 0.5
        assert "node" not in [verdicts[1000 + job].cause for job in range(4, 20)]

    def test_what_it_did_on_one_node_alone_is_taken_back_when_it_fails_on_others(self):
        bad = [
            attempt(1000 + job, "ann", nodes=["n1" if job < 8 else f"n{12 + job}"], start=NOW + (10 + job) * HOUR)
            for job in range(11)
        ]
        for many, cause in ((8, "node"), (11, "application")):
            verdicts = played(sorted([*self.GOOD, *bad[:many]], key=lambda one: one.end))[1]
            assert [verdicts[1000 + job].cause for job in (5, 6, 7)] == [cause] * 3


def test_a_broken_image_that_ends_every_job_of_all_in_seconds_is_no_programs_fault():
    good = [attempt(job, f"u{job % 10}", "COMPLETED", [f"n{job % 20}"], NOW + job * HOUR / 20) for job in range(400)]
    bad = [
        attempt(1000 + job, f"u{job % 10}", nodes=[f"n{job % 20}"], start=good[-1].end + job * 12, hours=0.001)
        for job in range(200)
    ]
    verdicts = played([*good, *bad])[1]
    causes = [verdicts[job.job].cause for job in bad]
    assert causes.count("infrastructure") > 150
    assert "node" not in causes


class TestEvidence:
    def test_a_gpu_lost_just_before_the_end_outweighs_what_python_says_of_it(self):
        """`CUDA error: unspecified launch failure` is all that a program sees of a GPU that falls off the bus."""
        good = [attempt(job, "ann", "FAILED" if job % 4 == 0 else "COMPLETED", [f"n{2 + job}"]) for job in range(20)]
        job = attempt(30, "ann", hours=3, gpus={"n1": ("GPU-a", "GPU-b")}, log_class="application")
        just, hour = (
            played([*good, Event(job.end - before, "n1", "GPU-b", "xid", "79"), job])[1][30].masses["node"]
            for before in (5, HOUR)
        )
        assert just > 0.9
        assert hour < just - 0.1

    def test_a_fault_of_one_gpu_by_chance_is_rarely_on_the_jobs_own(self):
        good = [attempt(job, "ann", "FAILED" if job % 4 == 0 else "COMPLETED", [f"n{2 + job}"]) for job in range(20)]
        whole = attempt(1, "eve", "COMPLETED", gpus={"n1": tuple(range(8))}, start=NOW - 9 * HOUR)
        one, eight = (attempt(30, "ann", hours=9, gpus={"n1": gpus}) for gpus in ((3,), tuple(range(8))))
        event = Event(one.end - HOUR, "n1", 3, "xid", "79")
        of_one, of_eight = (played([whole, *good, event, job])[1][30].masses["node"] for job in (one, eight))
        assert 0.5 < of_eight < of_one - 0.02

    def test_a_hard_event_on_the_jobs_gpu_names_node_and_gpu(self):
        job = attempt(
            1, nodes=["n1", "n2"], gpus={"n1": ("GPU-a", "GPU-b"), "n2": ("GPU-c", "GPU-d")}, log_class="comm"
        )
        _, verdicts = played([Event(job.end - 5, "n2", "GPU-d", "xid", "79"), job])
        assert (verdicts[1].cause, verdicts[1].node, verdicts[1].gpu) == ("node", "n2", "GPU-d")
        assert verdicts[1].confidence > 0.7
        assert any("xid 79 on GPU GPU-d" in term.text for term in verdicts[1].terms)

    def test_a_hard_event_on_anothers_gpu_is_weak_for_the_job_and_counts_for_the_node(self):
        job = attempt(1, gpus={"n1": ("GPU-a",)}, log_class="application")
        correlator, verdicts = played([Event(job.end - 5, "n1", "GPU-z", "xid", "79"), job])
        assert verdicts[1].cause == "application"
        assert correlator.suspicion("n1", job.end).p_lemon > 0.08

    def test_a_hard_event_that_comes_late_changes_the_verdict(self):
        job = attempt(1, log_class="nothing", hours=2)
        event = Event(job.end - 5, "n1", 0, "xid", "79")
        correlator, verdicts = played([job])
        assert verdicts[1].cause == "application"
        correlator.event(event)
        (again,) = correlator.rescored()
        assert (again.job, again.cause, again.node) == (1, "node", "n1")
        in_order, first = played([event, job])
        assert again.confidence == pytest.approx(first[1].confidence, abs=0.01)
        assert levels(correlator) == pytest.approx(levels(in_order), abs=0.02)
        assert correlator.rescored() == []

    def test_what_follows_from_another_event_is_no_evidence(self):
        correlator, _ = played([Event(NOW + job, "n1", 0, "xid", code) for job, code in enumerate(("45", "154") * 50)])
        assert "n1" not in correlator.state.nodes or correlator.suspicion("n1", NOW).p_lemon < 0.03

    def test_drains_of_anybody_are_no_failures(self):
        correlator, _ = played([Event(NOW + job, "n1", None, "drain", "Not responding", "fault") for job in range(50)])
        assert levels(correlator) == {}

    def test_a_storm_of_one_fault_is_one_incident(self):
        one, _ = played([Event(NOW, "n1", 0, "xid", "79")])
        storm, _ = played(
            [Event(NOW + minute * 60, "n1", 0, "xid", code) for minute in range(60) for code in ("79", "48")]
        )
        assert storm.suspicion("n1", NOW + HOUR).p_lemon == pytest.approx(one.suspicion("n1", NOW).p_lemon, abs=0.05)

    def test_a_hard_event_after_the_end_is_the_next_jobs_where_that_has_the_gpu(self):
        """In whatever order they are told; without a next job it is still the first one's."""
        bug = attempt(1, start=NOW, gpus={"n1": (3,)}, log_class="application")
        event = Event(bug.end + 50, "n1", 3, "xid", "79")
        killed = attempt(2, "bob", start=bug.end + 10, hours=0.02, gpus={"n1": (2, 3)}, log_class="nothing")
        for order in ((bug, killed, event), (event, bug, killed), (bug, event, killed), (killed, event, bug)):
            _, verdicts = played(order)
            assert (verdicts[1].cause, verdicts[2].cause) == ("application", "node"), order
        beside = killed._replace(gpus={"n1": (0, 1)})
        _, verdicts = played([bug._replace(log_class="nothing"), event, beside])
        assert verdicts[1].cause == "node"
        assert any("50 s after its end" in term.text for term in verdicts[1].terms)

    def test_nodes_that_fail_in_one_minute_are_not_the_cause_however_often_it_happens(self):
        """slurmctld lost its network, or a power strip died: NODE_FAIL of one-node jobs on many nodes."""
        for nodes in (5, 30):
            lost = [
                attempt(10_000 * day + at, f"user{at % 20}", "NODE_FAIL", [f"n{at}"], NOW + day * 86400 + at % 7)
                for day in (8, 20, 34)
                for at in range(nodes)
            ]
            named = [one._replace(failed_node=one.nodes[0]) for one in lost]
            correlator, verdicts = played(sorted((*quiet(), *named), key=lambda one: one.end))
            assert correlator.suspicions(NOW + 35 * 86400, 0.1) == []
            assert {verdicts[one.job].cause for one in lost} == {"infrastructure"}

    def test_the_node_that_slurm_names_is_the_one_that_failed_also_beside_a_suspect(self):
        texts = [attempt(job, f"user{job}", hours=0.01, log_class="hardware") for job in range(3)]
        both = attempt(9, "eve", "NODE_FAIL", ("n1", "n2"), hours=0.01, failed_node="n2")
        _, verdicts = played([*texts, both])
        assert (verdicts[9].cause, verdicts[9].node) == ("node", "n2")

    def test_jobs_of_many_that_die_of_a_programs_own_error_are_not_put_down_to_their_node(self):
        begin = NOW + 900 * HOUR
        course = [
            attempt(10_000 + job, f"new{job % 60}", start=begin + job * 900, hours=0.05, log_class="application")
            for job in range(120)
        ]
        correlator, verdicts = played([*quiet(), *course])
        assert {one.cause for one in verdicts.values()} == {"application"}
        found = correlator.suspicions(course[-1].end, 0.3)
        assert [(one.node, one.rung) for one in found] == [("n1", "L2")]

    def test_where_slurm_names_the_node_a_traceback_in_the_log_does_not_excuse_it(self):
        _, verdicts = played([attempt(1, state="NODE_FAIL", hours=20, failed_node="n1", log_class="application")])
        assert (verdicts[1].cause, verdicts[1].node) == ("node", "n1")

    def test_a_sweep_whose_submit_lines_differ_is_one_application(self):
        correlator, _ = played([attempt(job, name=f"sweep-{job}", submit=f"{job:x}") for job in range(50)])
        assert len(correlator.state.applications) == 1

    def test_a_hard_event_through_which_a_job_went_on_says_little(self):
        event = Event(NOW + 2 * HOUR, "n1", 0, "xid", "79")
        job = attempt(1, state="COMPLETED", start=NOW, hours=6, gpus={"n1": (0, 1)})
        fine, _ = played([event, job])
        late, _ = played([job, event])
        elsewhere, _ = played([event, job._replace(gpus={"n1": (3,)})])
        assert fine.suspicion("n1", job.end).p_lemon < 0.04 < elsewhere.suspicion("n1", job.end).p_lemon
        assert levels(fine) == pytest.approx(levels(late), abs=0.01)

    def test_contained_errors_count_when_they_repeat_on_one_gpu(self):
        once, _ = played([Event(NOW, "n1", 0, "xid", "94")])
        thrice, _ = played([Event(NOW + day * 86400, "n1", 0, "xid", "94") for day in range(4)])
        apart, _ = played([Event(NOW + day * 86400, "n1", day, "xid", "94") for day in range(4)])
        assert once.suspicion("n1", NOW).p_lemon < 0.05
        assert thrice.suspicion("n1", NOW + 4 * 86400).p_lemon > 0.3 > apart.suspicion("n1", NOW + 4 * 86400).p_lemon

    def test_an_xid_of_programs_is_the_programs_unless_its_gpu_shows_it_to_another_user(self):
        def run(users):
            items = []
            for job, user in enumerate(users):
                one = attempt(job, user, hours=3, start=NOW + job * 4 * HOUR, log_class="crash")
                items += [Event(one.end - 3, "n1", 5, "xid", "31"), one]
            return played(items)

        same, _ = run(["ann"] * 5)
        others, verdicts = run(["ann", "bob", "eve", "dan", "joe"])
        assert same.suspicion("n1", NOW + 20 * HOUR).p_lemon < 0.1
        assert others.suspicion("n1", NOW + 20 * HOUR).p_lemon > 0.6
        assert verdicts[4].cause == "node"

    def test_a_failing_switch_is_the_fabric_and_no_node_is_blamed(self):
        leaves = {f"leaf{leaf}": [f"n{16 * leaf + one}" for one in range(16)] for leaf in range(4)}
        quiet = [
            attempt(job, f"u{job % 20}", "COMPLETED", [f"n{job % 64}"], NOW + job * 60, 3.0) for job in range(2000)
        ]
        begin = quiet[-1].end
        down = [
            attempt(
                5000 + job, f"v{job}", nodes=[f"n{2 * job}", f"n{2 * job + 1}"], start=begin, hours=5 + job / 60,
                log_class="communication",
            )
            for job in range(6)
        ]  # fmt: skip
        _, verdicts = played([*quiet, *down], leaves)
        assert {verdicts[one.job].cause for one in down} == {"fabric"}
        correlator, alone = played([*quiet, *down], {})
        assert "fabric" not in {alone[one.job].cause for one in down}, "without the topology nobody can tell"
        assert max(levels(correlator, begin + 9 * HOUR).values()) < 0.3

    def test_a_bad_image_everywhere_condemns_no_node(self):
        quiet = [
            attempt(job, f"u{job % 40}", "COMPLETED", [f"n{job % 64}"], NOW + job * 60, 3.0) for job in range(3000)
        ]
        begin = quiet[-1].end
        wave = [
            attempt(5000 + job, f"u{job % 40}", nodes=[f"n{job % 64}"], start=begin + job * 40, hours=0.05)
            for job in range(640)
        ]
        correlator, _ = played([*quiet, *wave])
        assert max(levels(correlator, wave[-1].end).values()) < 0.3
        assert all(one.rung in ("", "L2") for one in correlator.suspicions(wave[-1].end))

    def test_a_silent_crash_is_the_applications_until_its_node_is_a_suspect(self):
        items = [
            attempt(job, f"user{job}", hours=4, start=NOW + job * 5 * HOUR, log_class="nothing") for job in range(8)
        ]
        correlator = Correlator(Suspicion())
        first = correlator.attempt(items[0])
        assert first.cause == "application"
        assert "no evidence against the node so far" in first.advice
        for one in items[1:]:
            correlator.attempt(one)
        again = {verdict.job: verdict for verdict in correlator.rescored()}
        assert (again[0].cause, again[0].node) == ("node", "n1")

    def test_a_host_that_the_log_singles_out_counts_however_its_name_is_written(self):
        nodes = [f"gpu{one:02d}" for one in range(16)]
        reading = Reading(kind="communication", hosts=("GPU07-ib0.cluster.example.org",))
        _, verdicts = played([attempt(1, nodes=nodes, hours=12, reading=reading)])
        assert max(verdicts[1].responsible, key=verdicts[1].responsible.get) == "gpu07"


class TestState:
    def test_it_survives_json_and_goes_on_the_same(self):
        items = history()
        whole, _ = played(items)
        half, _ = played(items[:300])
        state = State(
            {
                name: NodeState.from_json(json.loads(json.dumps(one.to_json())))
                for name, one in half.state.nodes.items()
            },
            {
                n: AppState.from_json(json.loads(json.dumps(one.to_json())))
                for n, one in half.state.applications.items()
            },
            FleetState.from_json(json.loads(json.dumps(half.state.fleet.to_json()))),
        )
        rest = Correlator(Suspicion(), {}, state)
        for one in items[300:]:
            rest.event(one) if isinstance(one, Event) else rest.attempt(one)
        assert levels(rest) == pytest.approx(levels(whole), abs=1e-3)

    def test_it_grows_with_nodes_and_applications_and_not_with_jobs(self):
        correlator = Correlator(Suspicion())
        sizes = []
        for job in range(4000):
            one = attempt(
                job, f"u{job % 5}", "FAILED" if job % 3 else "COMPLETED", [f"n{job % 4}"], log_class="nothing"
            )
            correlator.attempt(one)
            if job % 50 == 0:
                correlator.event(Event(one.end - 1, f"n{job % 4}", job % 8, "xid", str(13 + job % 3)))
            if job in (1999, 3999):
                sizes.append(sum(len(json.dumps(node.to_json())) for node in correlator.state.nodes.values()))
        assert sizes[1] < 1.1 * sizes[0]

    def test_busy_nodes_of_failing_programs_stay_good_though_they_forget_and_judge_again(self):
        rng = random.Random(4)  # noqa: S311 - the same every time
        correlator = Correlator(Suspicion(), explained=False)
        for job in range(6000):
            kind = rng.choice(("application", "application", "communication", "nothing", None))
            state = "FAILED" if rng.random() < 0.3 else "COMPLETED"
            node, hours = f"n{job % 12}", min(40, rng.lognormvariate(-0.5, 1.5))
            user = f"u{int(rng.random() ** 2 * 80)}"
            one = attempt(
                job, user, state, [node], NOW + job * 900, hours, log_class=kind if state == "FAILED" else None
            )
            correlator.attempt(one)
        assert max(levels(correlator, NOW + 6000 * 900).values()) < 0.3

    def test_another_half_life_in_the_settings_keeps_what_is_known(self):
        one, _ = played(history())
        from slurm_gpuhealth.frozen import replace

        settings = replace(Suspicion(), half_life=14 * 86400.0)
        other = Correlator(settings, {}, one.state)
        found = other.suspicion("n3", NOW + 600 * HOUR)
        assert found.p_lemon > 0.8
        assert 0 < found.expected < 1


class TestHostile:
    def test_odd_attempts_are_taken(self):
        correlator = Correlator(Suspicion())
        assert correlator.attempt(attempt(1, nodes=())) is None
        assert correlator.attempt(attempt(2, state="RUNNING")) is None
        assert correlator.attempt(attempt(3, hours=-5)) is not None
        assert correlator.attempt(attempt(4, hours=24 * 400)) is not None
        assert correlator.attempt(attempt(5, state="SOMETHING_NEW", user="\0\n'", name="x" * 9999)) is not None
        assert correlator.attempt(attempt(6, gpus={"other": (1,)}, log_class="\ud800")) is not None
        correlator.event(Event(NOW, "n1", "GPU-x", "xid", "not a number"))
        correlator.event(Event(NOW, "n1", None, "test", "x", detail={"level": "deep", "passed": "yes"}))
        assert correlator.suspicions(NOW) is not None
