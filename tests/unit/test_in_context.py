"""What is usual where a job is sent, each GPU by itself, events of a place, harmless codes, jobs that hang."""

from __future__ import annotations

import json

import pytest

from slurm_gpuhealth.config.settings import Suspicion
from slurm_gpuhealth.correlate import context, harmless, place, slots, suspects
from slurm_gpuhealth.correlate.engine import Correlator, NodeState
from slurm_gpuhealth.outcomes import Attempt, Event
from slurm_gpuhealth.simulate.worlds import score

NOW, DAY = 1_760_000_000.0, 86400.0
ALL = tuple(range(8))


def job(number, day, state="COMPLETED", node="n1", user="ann", hours=2.0, gpus=None, partition="gpu", **more):
    start = NOW + day * DAY
    held = {node: gpus} if gpus is not None else None
    code = int(state == "FAILED")
    return Attempt(
        *(number, 0, user, "lab", user, None, state, code, 0, start, start + hours * 3600, (node,), held),
        partition=partition,
        **more,
    )


def judged(*items, **more):
    correlator = Correlator(Suspicion(), explained=False, **more)
    for one in items:
        correlator.event(one) if isinstance(one, Event) else correlator.attempt(one)
    return correlator


def xid(day, node="n1", code="79", gpu=0):
    return Event(NOW + day * DAY, node, gpu, "xid", code)


@pytest.mark.parametrize(
    "name",
    [
        *("hangs-from-day-five", "debug-partition", "shells-on-one-node", "partition-of-one", "bad-partition-of-one"),
        *("one-gpu-of-eight", "preemptible", "harmless-without-names", "harmless-by-another-index", "rack-brown-outs"),
        *("unknown-place", "nightly-check-is-broken", "sweep-by-packing"),
    ],
)
def test_in_this_world_the_bad_node_is_found_and_no_good_one_is_accused(name):
    found = score.one(name, 1)
    assert all(days is not None for days in found.bad.values())
    assert all(found.gpus.values())
    assert not found.wronged
    assert found.blamed <= found.failed / 200


@pytest.mark.parametrize(
    ("name", "seed", "why"),
    [
        ("bad-node-in-a-debug-partition", 11, "its users' own failures do not use up their word"),
        ("sacct-alone", 13, "it kills a fifth of its jobs"),
        ("one-gpu-of-eight", 12, "it kills a third of its jobs"),
        ("controller-failover", 14, "that a log tells of a lost node is no second witness"),
        ("unknown-place", 12, "four nodes do not fail by themselves in the same second, be they the same twice"),
    ],
)
def test_in_this_world_too(name, seed, why):
    found = score.one(name, seed)
    assert all(days is not None for days in found.bad.values()), why
    assert not found.wronged, why


class TestContext:
    def test_a_node_is_compared_with_the_other_nodes_of_its_partition(self):
        jobs = [job(one, one / 50, "FAILED", "n2", partition="debug") for one in range(40)]
        jobs += [job(100 + one, one / 50, "COMPLETED", "n3", partition="gpu") for one in range(200)]
        state = judged(*jobs).state
        here = job(1000, 5, "FAILED", "n1", partition="debug")
        shrink = 1.0 / 2.0 ** ((here.end - 1.6e9) / Suspicion.half_life)
        assert context.rate(state, here, context.of(here), 1, 0.1, shrink) > 0.8
        there = here._replace(partition="gpu")
        assert context.rate(state, there, context.of(there), 1, 0.1, shrink) < 0.05

    def test_a_node_does_not_excuse_itself_where_others_show_what_is_usual(self):
        jobs = [job(one, one / 50, "FAILED", "n1", partition="gpu") for one in range(100)]
        jobs += [job(1000 + one, one / 50, "COMPLETED", "n2", partition="gpu") for one in range(100)]
        state, here = judged(*jobs).state, job(5000, 2, "FAILED", "n1", partition="gpu")
        shrink = 1.0 / 2.0 ** ((here.end - 1.6e9) / Suspicion.half_life)
        assert context.rate(state, here, context.of(here), 1, 0.1, shrink) < 0.15
        assert context.rate(state, here._replace(nodes=("n2",)), context.of(here), 1, 0.1, shrink) > 0.6

    def alone(self, elsewhere=0):
        debug = [job(one, one / 10, "FAILED" if one % 3 else "COMPLETED", partition="debug") for one in range(60)]
        debug += [job(900 + one, one / 10, node="n2", partition="debug") for one in range(elsewhere)]
        usual = [job(100 + one, one / 50, "FAILED" if one % 9 == 0 else "COMPLETED", f"n{3 + one % 3}",
                     user=f"u{one % 5}") for one in range(300)]  # fmt: skip
        return judged(*sorted((*debug, *usual), key=lambda one: one.end))

    def test_where_no_other_node_runs_such_jobs_it_can_not_be_told(self):
        one = self.alone()
        (found,) = context.untold(one.state, NOW + 6.2 * DAY, one.settings)
        assert (found.node, context.words(found.where)) == ("n1", "partition debug")
        assert 35 < found.failed < 41 < 55 < found.runs
        assert 4 < found.expected < 9
        assert "of jobs in partition debug hardly any ran on other nodes" in self.said(one)

    def test_where_another_node_runs_such_jobs_it_is_told(self):
        one = self.alone(40)
        assert context.untold(one.state, NOW + 6.2 * DAY, one.settings) == []
        assert "of jobs in partition debug 0% fail on other nodes" in self.said(one)

    def said(self, correlator):
        correlator.judging.explained = True
        verdict = correlator.attempt(job(9999, 6.1, "FAILED", partition="debug"))
        return "\n".join(term.text for term in verdict.terms)

    def test_made_up_constraints_do_not_fill_the_memory(self):
        jobs = [job(one, one / 500, "FAILED", constraint=f"x{one}") for one in range(1, 1200)]
        kept = job(0, 0)
        state = judged(kept, *jobs, *(kept._replace(job=5000 + one) for one in range(9))).state
        assert len(state.fleet.contexts) <= context.MOST_OF_ALL
        assert len(state.nodes["n1"].contexts) <= context.MOST
        assert all(len(app.contexts) <= context.MOST for app in state.applications.values())
        assert context.of(kept) in state.nodes["n1"].contexts

    def test_attempts_that_say_nothing_of_where_they_were_sent_have_no_context(self):
        state = judged(job(1, 0, "FAILED", partition="")).state
        assert context.of(job(1, 0, partition="")) == ""
        assert state.fleet.contexts == {}
        assert state.nodes["n1"].contexts == {}


class TestSlots:
    def bad_gpu(self, others=40):
        jobs = [job(one, one / 4, "FAILED" if one % 2 else "COMPLETED", user=f"u{one % 7}", gpus=(7,), hours=0.5,
                    log_class="nothing") for one in range(24)]  # fmt: skip
        jobs += [job(1000 + one, one * 6 / others, gpus=(one % 7,), user=f"u{one % 7}") for one in range(others)]
        jobs += [job(3000 + one, one / 40, node="n2", user=f"u{one % 7}") for one in range(240)]
        whole = job(2000, 0, gpus=ALL)
        return [whole, *sorted(jobs, key=lambda one: one.end)]

    def test_what_completes_on_seven_gpus_does_not_acquit_the_eighth(self):
        few, many = (judged(*self.bad_gpu(others)) for others in (20, 400))
        for one in (few, many):
            (found,) = [one for one in one.suspicions(NOW + 6.2 * DAY, above=0.02) if one.node == "n1"]
            assert max(found.gpus, key=found.gpus.get) == "7"
        at = NOW + 6.2 * DAY
        levels = [slots.worst(one.state.nodes["n1"], at, one.grid, one.settings).levels[0] for one in (few, many)]
        assert max(levels) < 0.3

    def test_a_verdict_names_the_gpu_that_other_jobs_have_shown(self):
        one = judged(*self.bad_gpu(400))
        here = job(5000, 6.1, "FAILED", user="zoe", gpus=(6, 7), hours=0.5, log_class="hardware")
        assert (one.attempt(here).node, one.attempt(here).gpu) == ("n1", 7)
        there = one.attempt(here._replace(job=5001, gpus={"n1": (5, 6)}))
        assert there.gpu is None
        other = {(6,): {"n1": (7,)}, (7,): {"n1": (6,)}}
        jobs = self.bad_gpu(20)
        twins = [item for item in jobs if item.gpus and item.gpus.get("n1") in other]
        twins = [item._replace(job=item.job + 9000, gpus=other[item.gpus["n1"]]) for item in twins]
        one = judged(*sorted((*jobs, *twins), key=lambda one: one.end))
        both = one.attempt(here)
        assert (both.node, both.gpu) == ("n1", None)  # two GPUs are as bad

    def test_a_gpu_that_was_replaced_is_no_suspect(self):
        one = judged(*self.bad_gpu())
        one.event(Event(NOW + 6.1 * DAY, "n1", 7, "repair", "replaced"))
        found = slots.worst(one.state.nodes["n1"], NOW + 6.2 * DAY, one.grid, one.settings)
        assert found is None or found.levels[0] > 0.9

    def test_jobs_on_all_gpus_tell_none_apart(self):
        jobs = [job(one, one / 4, "FAILED" if one % 2 else "COMPLETED", gpus=ALL) for one in range(24)]
        one = judged(*jobs)
        assert slots.worst(one.state.nodes["n1"], NOW + 7 * DAY, one.grid, one.settings) is None


class TestPlace:
    RACK = {"rack r1": ("n1", "n2", "n3", "n4")}  # noqa: RUF012

    def test_three_nodes_of_a_rack_at_once_make_a_ticket_for_the_rack_and_none_for_them(self):
        one = judged(*(xid(1 + nth / 86400, f"n{nth}") for nth in (1, 2, 3)), places=self.RACK)
        (found,) = place.all_shared(one.state, one.places, NOW + 2 * DAY, Suspicion.horizon)[-1:]
        assert (found.place, found.nodes) == ("rack r1", ("n1", "n2", "n3"))
        assert one.suspicions(NOW + 2 * DAY) == []

    def test_the_same_nodes_one_after_the_other_are_suspects(self):
        one = judged(*(xid(nth, f"n{nth}") for nth in (1, 2, 3)), places=self.RACK)
        assert {found.node for found in one.suspicions(NOW + 4 * DAY, 0.0) if found.hard} == {"n1", "n2", "n3"}

    def test_bad_nodes_of_one_rack_that_meet_by_chance_stay_suspects(self):
        times = [(day, f"n{1 + day % 4}") for day in range(28)]
        events = sorted([xid(day, node) for day, node in times] + [xid(3.0005, "n2")], key=lambda one: one.time)
        one = judged(*events, places=self.RACK)
        assert place.all_shared(one.state, one.places, NOW + 28 * DAY, Suspicion.horizon) == []

    def test_a_job_that_ended_in_that_moment_is_the_infrastructures(self):
        ended = job(1, 1 - 2 / 24, "FAILED", "n1", log_class="hardware")
        one = judged(*(xid(1 - (5 - nth) / 86400, f"n{nth}") for nth in (1, 2, 3)), places=self.RACK)
        assert one.attempt(ended).cause == "infrastructure"


class TestHarmless:
    def test_a_code_that_jobs_run_on_through_weighs_less_on_all_nodes(self):
        items = []
        for day in range(40):
            for nth, node in enumerate(("n1", "n4", "n5")):
                items += [xid(day + 0.05, node, code) for code in ("119", "79")]
                items += [job(100 * day + nth, day, node=node, gpus=(0,), hours=6)]
        one = judged(*items)
        assert harmless.rate(one.state.fleet, "xid 119", one.settings) > 1
        assert "xid 79" not in one.state.fleet.worths  # a GPU that is gone is never harmless
        assert one.state.fleet.worths["xid 119"] < 0.2
        one.event(xid(41, "n2", "119"))
        assert one.suspicion("n2", NOW + 42 * DAY).p_lemon < 0.02
        one.event(xid(41, "n3", "79"))
        assert [event.strength for event in one.state.nodes["n3"].events] == [1.0]

    def test_one_node_alone_teaches_nothing(self):
        items = [
            item for day in range(40) for item in (xid(day + 0.05, "n1", "119"), job(day, day, gpus=(0,), hours=6))
        ]
        one = judged(*items)
        assert harmless.rate(one.state.fleet, "xid 119", one.settings) == one.settings.benign


class TestHangs:
    def test_one_user_who_cancels_makes_no_suspect_also_on_a_node_that_had_a_fault(self):
        fine = [job(1000 + one, one / 6, node=f"n{one % 3 + 1}", user=f"u{one % 9}") for one in range(90)]
        for name in ("eve", "x{}"):
            mine = [
                job(one, 1 + one / 10, "CANCELLED", user="eve")._replace(name=name.format(one)) for one in range(60)
            ]
            one = judged(xid(0.5, "n1", "48"), *sorted((*fine, *mine), key=lambda one: one.end))
            found = [found for found in one.suspicions(NOW + 15 * DAY) if found.node == "n1"]
            assert not found or (found[0].rung == "L2" and found[0].p_lemon < 0.3)

    def test_an_application_that_was_only_ever_cancelled_may_be_forgotten_and_judged_again(self):
        one = judged(job(1, 0, "CANCELLED", gpus=(0,)))
        assert all(app.ended for app in one.state.applications.values())
        one.state.applications.clear()
        one.event(xid(0.05))

    def test_an_attempt_whose_state_turns_out_to_be_another_taught_nothing(self):
        one = judged(job(1, 0, "FAILED"))
        one.attempt(job(1, 0, "CANCELLED"))
        (app,) = one.state.applications.values()
        assert app.failed == pytest.approx(0, abs=1e-6 * app.runs)
        assert app.cut["CANCELLED"] > 0.5 * app.runs

    def test_that_applications_never_ran_into_their_limit_makes_the_first_that_do_no_proof(self):
        well = [job(one, one / 20, node=f"n{one % 3}", user=f"u{one % 3}") for one in range(400)]
        ends = [job(1000 + one, 21 + one, "TIMEOUT", "n1", f"u{one}", 24.0, log_class="user") for one in range(2)]
        state = judged(*well, *ends).state
        assert suspects.of("n1", state.nodes["n1"], NOW + 24 * DAY, Suspicion()).p_lemon < 0.1

    def test_a_node_whose_jobs_run_into_their_limit_is_a_suspect(self):
        states = {"n1": "TIMEOUT", "n2": "COMPLETED", "n3": "COMPLETED"}
        jobs = [
            job(1000 * nth + one, one / 6 + nth / 50, state, node, f"u{one % 9}")
            for one in range(90)
            for nth, (node, state) in enumerate(states.items())
        ]
        (found,) = judged(*jobs).suspicions(NOW + 15 * DAY)
        assert (found.node, found.rung) == ("n1", "L2")
        assert found.p_lemon > 0.5

    def test_a_user_whose_limits_are_too_short_makes_no_suspect(self):
        jobs = []
        for one in range(60):
            user = ("ann", "bob")[one % 2]
            jobs += [job(100 * node + one, one / 6, "TIMEOUT" if user == "ann" else "COMPLETED", f"n{node}", user)
                     for node in (1, 2, 3)]  # fmt: skip
        assert judged(*jobs).suspicions(NOW + 10 * DAY, 0.1) == []

    def test_a_hung_job_is_no_time_that_the_node_has_lived_through(self):
        state = judged(job(1, 0, "TIMEOUT"), job(2, 1, "CANCELLED"), job(3, 2)).state
        assert state.nodes["n1"].days == pytest.approx(2 / 24)


def test_what_is_kept_reads_back():
    node = judged(
        job(1, 0, "FAILED", gpus=(3,), partition="gpu"), job(2, 1, gpus=ALL), job(3, 2, gpus=(1,))
    ).state.nodes["n1"]
    again = NodeState.from_json(json.loads(json.dumps(node.to_json())))
    assert (again.slots, again.full, again.contexts) == (node.slots, node.full, node.contexts)
    assert again.records.keys() == node.records.keys()
