"""Suspicion of nodes: incidents, memory, tests, repairs, and which rung is due over the whole fleet."""

from __future__ import annotations

import pytest

from slurm_gpuhealth.config.settings import Suspicion
from slurm_gpuhealth.correlate import fleet
from slurm_gpuhealth.correlate.engine import Correlator
from slurm_gpuhealth.outcomes import Attempt, Event

NOW = 1_760_000_000.0
DAY = 86400.0


def job(number, when, user="ann", state="FAILED", node="n1", hours=4.0, **more):
    fields = {"log_class": "nothing" if state == "FAILED" else None, **more}
    start = NOW + when * DAY
    code = int(state == "FAILED")
    return Attempt(number, 0, user, "lab", user, None, state, code, 0, start, start + hours * 3600, (node,), **fields)


def after(*items):
    correlator = Correlator(Suspicion())
    for one in items:
        correlator.event(one) if isinstance(one, Event) else correlator.attempt(one)
    return correlator


def xid(when, node="n1", code="79", gpu=0):
    return Event(NOW + when * DAY, node, gpu, "xid", code)


def p(correlator, when, node="n1"):
    return correlator.suspicion(node, NOW + when * DAY).p_lemon


class TestMemory:
    def test_an_unknown_node_is_rarely_bad_and_more_often_so_as_it_ages(self):
        start = (1 - Suspicion.priors[0]) * Suspicion.fresh
        assert start <= after().suspicion("n1", NOW).p_lemon < start + 0.001
        idle = after(job(0, 0, state="COMPLETED"))
        assert start + 0.003 < p(idle, 60) < 1 - Suspicion.priors[0]

    def test_success_lowers_it(self):
        good = after(*(job(one, one / 4, state="COMPLETED") for one in range(100)))
        assert p(good, 25) < 0.01

    def test_it_fades_when_the_node_works_without_failing_and_slowly_when_it_is_idle(self):
        failed = [xid(0), xid(2), xid(4)]
        idle = after(*failed)
        busy = after(*failed, *(job(one, 5 + one / 4, state="COMPLETED") for one in range(200)))
        assert p(idle, 4) > 0.8
        assert p(busy, 56) < 0.2 < p(idle, 56) < p(idle, 4)

    def test_a_good_past_does_not_excuse_a_node_that_has_become_bad(self):
        past = [job(one, one / 4, state="COMPLETED", hours=5) for one in range(800)]
        fresh, old = after(xid(200), xid(202)), after(*past, xid(200), xid(202))
        assert p(old, 202) > 0.3
        assert p(old, 202) < p(fresh, 202)

    def test_observed_and_expected_are_told(self):
        correlator = after(*(job(one, one / 4, state="COMPLETED") for one in range(40)), job(99, 11), xid(11.16))
        found = correlator.suspicion("n1", NOW + 11.2 * DAY)
        assert found.observed == pytest.approx(1, abs=0.1)
        assert found.expected == pytest.approx(0.003 * 41 / 6, rel=0.1)
        assert found.hard == 1


class TestIncidents:
    def test_jobs_that_die_together_are_one_failure_of_their_node(self):
        together = after(*(job(one, 0, f"u{one}", hours=6) for one in range(8)))
        apart = after(*(job(one, one, f"u{one}", hours=6) for one in range(8)))
        one = after(job(1, 0, "u1", hours=6))
        assert p(together, 9) == pytest.approx(p(one, 9), abs=0.03)
        assert p(apart, 9) > 0.9

    def test_jobs_that_die_one_after_the_other_are_many(self):
        minute = 1 / 1440
        crashes = after(*(job(one, one * 5 * minute, f"u{one}", hours=4 / 60) for one in range(8)))
        assert p(crashes, 0.1) > 0.6

    def test_one_users_failures_count_less_and_less(self):
        own = after(*(job(one, one / 3, "ann") for one in range(8)))
        others = after(*(job(one, one / 3, f"u{one}") for one in range(8)))
        assert p(own, 3) < 0.2 < 0.8 < p(others, 3)

    def test_but_they_are_no_alibi_for_it(self):
        """A node that kills jobs at their start, and one user's array that keeps coming back to it."""
        six = [job(number, number / 240, f"u{number % 6}", hours=0.02) for number in range(6)]
        array = [job(10 + number, (6 + number) / 240, "u0", hours=0.02) for number in range(20)]
        assert p(after(*six, *array), 1) >= p(after(*six), 1) > 0.5

    @pytest.mark.parametrize("died", [(), (job(1, 1 - 0.16, hours=4.0),)], ids=["idle", "under a job"])
    def test_of_one_incident_the_gpu_with_the_strongest_evidence_is_meant(self, died):
        warm = Event(NOW + DAY - 20, "n1", 2, "nvml", "hot", "warning")
        shares = after(*died, warm, xid(1, gpu=3)).suspicion("n1", NOW + 2 * DAY).gpus
        assert shares.get("3", 0) > 0.9

    def test_gpus_are_told_apart(self):
        correlator = after(xid(0, gpu="GPU-b"), xid(3, gpu="GPU-b"), xid(6, gpu="GPU-c"))
        shares = correlator.suspicion("n1", NOW + 6 * DAY).gpus
        assert shares["GPU-b"] > 0.6 > shares["GPU-c"] > 0.1


class TestTests:
    def test_a_failed_test_raises_it_and_a_passed_one_is_no_acquittal(self):
        def tested(passed, level):
            detail = {"level": level, "passed": passed}
            return after(xid(0), xid(1), Event(NOW + 1.1 * DAY, "n1", None, "test", f"L{level}", detail=detail))

        before = p(after(xid(0), xid(1)), 1.1)
        assert p(tested(False, 3), 1.1) > before
        assert before > p(tested(True, 2), 1.1) > p(tested(True, 4), 1.1) > 0.3 * before
        assert tested(True, 3).suspicion("n1", NOW + 2 * DAY).last_test == "L3 pass 2025-10-10"

    def test_passing_the_same_test_ten_times_is_one_pass(self):
        detail = {"level": 2, "passed": True}
        passes = [Event(NOW + (1 + one / 10) * DAY, "n1", None, "test", "L2", detail=detail) for one in range(10)]
        assert p(after(xid(0), *passes), 2) == pytest.approx(p(after(xid(0), passes[-1]), 2), abs=0.01)

    def test_what_has_been_passed_since_the_last_evidence_is_not_asked_again(self):
        detail = {"level": 3, "passed": True}
        passed = Event(NOW + 0.5 * DAY, "n1", None, "test", "L3", detail=detail)
        rung = after(xid(0)).suspicions(NOW + 3 * DAY, 0.01)[0].rung
        assert rung in ("L2", "L3")
        assert after(xid(0), passed).suspicions(NOW + 3 * DAY, 0.01)[0].rung == ""
        assert after(xid(0), passed, xid(2.9)).suspicions(NOW + 3 * DAY, 0.01)[0].rung in ("L4", "RMA")

    def test_a_repair_of_one_gpu_forgets_that_gpu_only(self):
        items = [xid(0, gpu=1), xid(2, gpu=2), Event(NOW + 3 * DAY, "n1", 1, "repair", "GPU replaced")]
        shares = after(*items).suspicion("n1", NOW + 3.1 * DAY).gpus
        assert shares["2"] > 0.3
        assert p(after(*items), 3.1) < p(after(*items[:2]), 3.1)


class TestRungs:
    def test_they_rise_with_suspicion_when_there_is_hard_evidence(self):
        rungs = []
        items = []
        for one in range(5):
            items.append(xid(one, gpu=one % 2))
            rungs.append(after(*items).suspicions(NOW + one * DAY, 0.01)[0].rung)
        assert rungs[0] in ("L2", "L3")
        assert rungs[-1] == "RMA"
        assert rungs == sorted(rungs)

    def test_soft_evidence_of_one_user_never_takes_a_node_out(self):
        correlator = after(*(job(one, one * 2, "ann") for one in range(40)))
        assert all(one.rung in ("", "L2") for one in correlator.suspicions(NOW + 80 * DAY, 0.01))

    def test_soft_evidence_of_many_users_whose_programs_complete_elsewhere_tests_deeply_and_never_more(self):
        busy = [job(5000 + one, one / 50, f"u{one % 12}", "COMPLETED", f"n{2 + one % 30}") for one in range(600)]
        failures = [job(one, one / 2, f"u{one}") for one in range(12)]
        few = after(*busy, *failures[:4]).suspicions(NOW + 12 * DAY)
        many = after(*busy, *failures).suspicions(NOW + 12 * DAY)
        assert few[0].rung in ("L2", "L3", "L4")
        assert (many[0].node, many[0].rung) == ("n1", "L4")
        course = after(*busy, *(one._replace(user=f"new-{one.user}") for one in failures)).suspicions(NOW + 12 * DAY)
        assert (course[0].node, course[0].rung) == ("n1", "L2")
        assert any("12 applications failed here unexplained" in term for term in many[0].terms)

    def test_three_users_whose_logs_speak_of_hardware_and_whose_programs_complete_elsewhere_are_enough(self):
        fine = [job(100 + one, one / 90, f"u{one % 3}", "COMPLETED", f"n{3 + one % 2}") for one in range(6)]
        died = [job(one, 1 + one / 900, f"u{one}", hours=0.001, log_class="hardware") for one in range(3)]
        found = after(*fine, *died).suspicions(NOW + 1.1 * DAY)
        assert [(one.node, one.rung) for one in found] == [("n1", "L4")]

    def test_they_are_enough_on_a_cluster_where_much_fails(self):
        much = [
            job(100 + one, one / 90, f"v{one % 3}", ("COMPLETED", "FAILED")[one % 2], f"n{1 + one % 5}")
            for one in range(60)
        ]
        fine = [job(200 + one, 1 + one / 900, f"u{one % 3}", "COMPLETED", f"n{3 + one % 2}", 0.01) for one in range(6)]
        died = [job(one, 1.2 + one / 900, f"u{one}", hours=0.001, log_class="hardware") for one in range(3)]
        found = after(*much, *fine, *died).suspicions(NOW + 1.3 * DAY)
        assert [(one.node, one.rung) for one in found if one.node == "n1"] == [("n1", "L4")]

    def test_a_long_past_with_the_usual_failures_keeps_no_node_from_its_test(self):
        past = [job(5000 + one, one / 6, f"u{one % 12}", "COMPLETED", f"n{1 + one % 4}", hours=1) for one in range(480)]
        past[4::8] = [one._replace(state="FAILED", log_class="application") for one in past[4::8]]
        died = [job(one, 81 + one / 24, f"u{one % 6}", hours=0.01) for one in range(18)]
        found = after(*past, *died).suspicions(NOW + 82 * DAY)
        assert [(one.node, one.rung) for one in found] == [("n1", "L4")]

    def test_jobs_that_their_users_cancelled_on_a_node_are_no_failures_there(self):
        busy = [job(5000 + one, one / 50, f"u{one % 12}", "COMPLETED", f"n{1 + one % 4}") for one in range(600)]
        ended = [job(one, 13 + one / 50, f"u{one}", "CANCELLED", hours=1) for one in range(12)]
        found = after(*busy, *ended, xid(13.5)).suspicions(NOW + 14 * DAY, 0.001)
        assert found
        assert not any("failed here unexplained" in term for one in found for term in one.terms)

    def test_a_wave_of_suspects_is_tested_lightly(self):
        names = [f"v{round}{one}" for round in range(12) for one in range(20)]
        quiet = [job(5000 + one, one / 300, names[one % 240], "COMPLETED", f"n{30 + one % 29}") for one in range(600)]
        wave = [
            job(9000 + 60 * round + one, 3 + 3 * round + one / 60, f"v{round}{one % 20}", node=f"n{one}")
            for round in range(12)
            for one in range(20)
        ]
        found = after(*quiet, *wave).suspicions(NOW + 40 * DAY)
        assert len([one for one in found if one.p_lemon > 0.3]) > 4
        assert {one.rung for one in found} <= {"", "L2"}
        assert any("so many nodes" in term for one in found for term in one.terms)


class TestFleet:
    @pytest.mark.parametrize(("count", "expected", "tail"), [(0, 3, 1), (1, 1, 0.632), (5, 1.1, 0.00544), (3, 0, 0)])
    def test_the_tail_of_poisson(self, count, expected, tail):
        assert fleet.poisson_tail(count, expected) == pytest.approx(tail, rel=0.01)

    def test_of_many_nodes_some_look_bad_by_chance(self):
        chances = {f"n{one}": (one + 1) / 512 for one in range(512)}
        assert fleet.discoveries(chances, 512, 0.05) == set()
        assert fleet.discoveries({**chances, "bad": 1e-6, "worse": 1e-9}, 514, 0.05) == {"bad", "worse"}
