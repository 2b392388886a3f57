"""Verdicts of single attempts: Slurm's word first, then likelihoods, told in sentences."""

from __future__ import annotations

import pytest

from slurm_gpuhealth.config.settings import Suspicion
from slurm_gpuhealth.correlate import weights
from slurm_gpuhealth.correlate.cases import application, hosts
from slurm_gpuhealth.correlate.engine import Correlator
from slurm_gpuhealth.outcomes import CAUSES, Attempt, Cited, Event, Reading

NOW = 1_760_000_000.0


def attempt(state="FAILED", nodes=("n1",), hours=2.0, job=1, **more):
    fields = {"exit_code": 0 if state == "COMPLETED" else 1, "signal": 0, **more}
    return Attempt(
        job, 0, "ann", "lab", "train", None, state, start=NOW, end=NOW + hours * 3600, nodes=tuple(nodes), **fields
    )


def judged(one, *events, leaves=None):
    correlator = Correlator(Suspicion(), leaves or {})
    for event in events:
        correlator.event(event)
    return correlator.attempt(one)


class TestSlurmsWord:
    @pytest.mark.parametrize("state", ["TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE", "REQUEUED"])
    @pytest.mark.parametrize("kind", [None, "nothing", "communication", "user"])
    def test_what_slurm_or_the_user_ended_is_nobodys_fault(self, state, kind):
        verdict = judged(attempt(state, nodes=("n1", "n2"), log_class=kind))
        assert verdict.cause == "user"
        assert verdict.confidence > 0.7

    def test_a_timeout_with_a_dead_gpu_is_the_nodes_hang(self):
        one = attempt("TIMEOUT", nodes=("n1", "n2"), hours=24)
        verdict = judged(one, Event(NOW + 3600, "n2", 0, "xid", "79"))
        assert (verdict.cause, verdict.node) == ("node", "n2")

    def test_a_timeout_raises_no_suspicion_by_itself(self):
        correlator = Correlator(Suspicion())
        for job in range(50):
            correlator.attempt(attempt("TIMEOUT", job=job))
        assert correlator.suspicion("n1", NOW + 9999).p_lemon < 0.05

    def test_memory_is_the_applications_at_its_own_limit(self):
        assert judged(attempt("OUT_OF_MEMORY")).cause == "application"

    def test_nodes_that_do_not_boot_are_infrastructure(self):
        assert judged(attempt("BOOT_FAIL")).cause == "infrastructure"

    def test_a_node_that_slurm_lost_is_named_only_if_slurm_or_an_event_does(self):
        nodes = tuple(f"n{one}" for one in range(8))
        unnamed = judged(attempt("NODE_FAIL", nodes))
        named = judged(attempt("NODE_FAIL", nodes, failed_node="n5"))
        told = judged(attempt("NODE_FAIL", nodes), Event(NOW + 7190, "n6", None, "driver", "hung", "fault"))
        assert (unnamed.cause, unnamed.node) == ("node", None)
        assert (named.cause, named.node) == ("node", "n5")
        assert (told.cause, told.node) == ("node", "n6")

    @pytest.mark.parametrize("state", ["COMPLETED", "RUNNING", "PENDING"])
    def test_nothing_is_to_be_explained(self, state):
        assert judged(attempt(state)) is None


class TestLikelihood:
    def test_masses_add_up_and_the_cause_is_the_largest(self):
        for kind in (*weights.KINDS, None):
            verdict = judged(attempt(nodes=("n1", "n2", "n3"), log_class=kind))
            assert sum(verdict.masses.values()) == pytest.approx(1)
            assert verdict.confidence == max(verdict.masses.values())
            assert verdict.cause in CAUSES
            assert (verdict.cause == "unknown") == (verdict.confidence < 0.5)

    def test_a_log_alone_never_condemns_a_node(self):
        correlator = Correlator(Suspicion())
        for job in range(30):  # one user who writes of ECC errors
            correlator.attempt(
                attempt(job=job, log_class="hardware")._replace(start=NOW + job * 9e4, end=NOW + job * 9e4 + 60)
            )
        (suspicion,) = correlator.suspicions(NOW + 30 * 9e4) or [correlator.suspicion("n1", NOW)]
        assert suspicion.rung in ("", "L2")

    def test_no_log_is_no_evidence_and_a_log_without_a_cause_is_some(self):
        assert judged(attempt()).masses["node"] < judged(attempt(log_class="nothing")).masses["node"]

    @pytest.mark.parametrize(
        ("word", "kind"),
        [
            ("node_hardware", "hardware"),
            ("ECC", "hardware"),
            ("traceback", "application"),
            ("NCCL", "communication"),
            ("watchdog", "communication"),
            ("preempt_or_user", "user"),
            ("host OOM", "memory"),
            ("none", "nothing"),
            ("Unknown", "nothing"),
            ("never heard of", None),
        ],
    )
    def test_others_words_for_a_log_are_understood(self, word, kind):
        assert weights.kind_of(attempt(log_class=word), None) == kind

    @pytest.mark.parametrize(("code", "signal"), [(139, 0), (135, 0), (0, 11), (0, 7)])
    def test_a_signal_without_a_traceback_is_a_crash(self, code, signal):
        assert weights.kind_of(attempt(exit_code=code, signal=signal, log_class="none"), None) == "crash"
        assert weights.kind_of(attempt(exit_code=code, signal=signal, log_class="app"), None) == "application"

    def test_programs_of_this_cluster_that_leave_no_traceback_are_learnt(self):
        correlator = Correlator(Suspicion())
        first = correlator.attempt(attempt(log_class="nothing"))
        for job in range(2, 2000):
            one = attempt(job=job, nodes=(f"n{job % 100}",), log_class="nothing")._replace(user=f"user{job % 50}")
            correlator.attempt(one._replace(state="COMPLETED") if job % 5 else one)
        last = correlator.attempt(attempt(job=5000, nodes=("n777",), log_class="nothing")._replace(user="new"))
        assert last.masses["node"] < first.masses["node"] / 1.5

    def test_the_log_names_the_host_of_a_large_job(self):
        nodes = tuple(f"n{one}" for one in range(32))
        verdict = judged(attempt(nodes=nodes, hours=12, reading=Reading(kind="communication", hosts=("n9",))))
        assert (verdict.cause, verdict.node) == ("node", "n9")
        both = judged(attempt(nodes=nodes, hours=12, reading=Reading(kind="communication", hosts=("n9", "n10"))))
        assert set(sorted(both.responsible, key=both.responsible.get)[-2:]) == {"n9", "n10"}
        assert both.node is None

    def test_hosts_that_are_not_the_jobs_are_not_believed(self):
        assert hosts(Reading(hosts=("n7", "evil", "n1.example.org", "N2-ib0")), ("n1", "n2")) == {"n1", "n2"}

    def test_heat_is_a_ticket_and_no_suspicion(self):
        one = attempt("TIMEOUT", nodes=("n1", "n2"), gpus={"n1": (0, 1), "n2": (0, 1)})
        correlator = Correlator(Suspicion())
        correlator.event(Event(NOW + 60, "n2", 1, "nvml", "thermal", "warning"))
        verdict = correlator.attempt(one)
        assert (verdict.cause, verdict.node, verdict.gpu) == ("node", "n2", 1)
        assert "thermal" in verdict.advice
        assert correlator.suspicion("n2", NOW + 9999).p_lemon < 0.03

    def test_the_gpu_of_the_log_is_that_of_the_job(self):
        reading = Reading(kind="hardware", cause=Cited(1, "x", gpu=2))
        gpus = {"n1": ("GPU-a", "GPU-b", "GPU-c", "GPU-d")}
        verdict = judged(attempt(hours=48, gpus=gpus, reading=reading), Event(NOW + 9, "n1", None, "xid", "48"))
        assert (verdict.node, verdict.gpu) == ("n1", "GPU-c")


class TestALogThatSpeaksOfHardware:
    """A node whose own log says nothing about it, or only later."""

    ECC = Reading("node", 0.85, "hardware", Cited(1, "CUDA error: uncorrectable ECC error"), fingerprint="ecc")

    def failing(self):
        """A correlator that knows the application: it fails by itself in a third of its runs."""
        correlator = Correlator(Suspicion())
        for one in range(60):
            state = "FAILED" if one % 3 == 0 else "COMPLETED"
            correlator.attempt(attempt(state, (f"n{one % 9 + 20}",), job=100 + one, log_class="application"))
        return correlator

    @pytest.mark.parametrize("seconds", [4, 30, 3600])
    def test_is_never_called_the_applications_without_another_word(self, seconds):
        verdict = self.failing().attempt(attempt(hours=seconds / 3600, reading=self.ECC))
        assert verdict.cause in ("unknown", "node")
        assert verdict.masses["application"] < 0.5
        assert sum(verdict.masses.values()) == pytest.approx(1)
        assert "have the node tested" in verdict.advice

    def test_is_the_nodes_as_soon_as_the_node_says_so_too(self):
        correlator = self.failing()
        correlator.attempt(attempt(hours=4 / 3600, reading=self.ECC))
        correlator.event(Event(NOW + 3, "n1", None, "xid", "48"))
        (verdict,) = correlator.rescored()
        assert (verdict.cause, verdict.node) == ("node", "n1")

    def test_and_its_node_of_another_gpu_is_told_as_a_contradiction(self):
        correlator = self.failing()
        correlator.event(Event(NOW + 7199, "n1", 5, "xid", "48"))
        verdict = correlator.attempt(attempt(reading=self.ECC, gpus={"n1": (0, 1, 2, 3)}))
        assert (verdict.cause, verdict.masses["application"] > 0.51) == ("unknown", False)
        text = "its log shows a hardware error, and n1 reported xid 48 on GPU 5; but Slurm gave the job other GPUs"
        assert text in [term.text for term in verdict.terms[:3]]
        assert "have n1 tested: either the job used a GPU that was not its own" in verdict.advice
        correlator = self.failing()
        correlator.event(Event(NOW + 7199, "n1", 3, "xid", "48"))
        assert correlator.attempt(attempt(reading=self.ECC, gpus={"n1": (0, 1, 2, 3)})).cause == "node"

    def test_is_the_programs_where_it_says_the_same_on_nodes_apart(self):
        correlator = self.failing()
        for job in range(3):
            verdict = correlator.attempt(attempt(hours=0.01, nodes=(f"n{job}",), job=job, reading=self.ECC))
        assert verdict.cause == "application"
        assert "on other nodes" in verdict.advice


class TestWhichXid:
    def signs(self, *times, tests=()):
        correlator = Correlator(Suspicion())
        for when in times:
            correlator.event(Event(NOW + when, "n1", None, "xid", "48"))
        for level, when in tests:
            detail = {"level": level, "passed": True, "gpus": []}
            correlator.event(Event(NOW + when, "n1", None, "test", f"L{level}", "info", detail))
        verdict = correlator.attempt(attempt(hours=0.01, log_class="hardware"))
        return verdict, " ".join(term.text for term in verdict.terms)

    def test_that_of_the_run_is_named_before_one_that_was_there_already(self):
        _, told = self.signs(-60, 30)
        assert ("while it ran" in told, "before its start" in told) == (True, False)

    def test_one_that_a_test_has_shown_to_be_mended_is_not_named(self):
        assert "before its start" in self.signs(-60)[1]
        assert "before its start" in self.signs(-60, tests=[(1, -30)])[1]
        assert "before its start" not in self.signs(-60, tests=[(3, -30)])[1]


class TestTerms:
    def test_the_strongest_comes_first_and_the_log_is_not_quoted(self):
        reading = Reading(kind="application", error="<secret>", frame="<secret>", cause=Cited(1, "<secret>"))
        verdict = judged(attempt(reading=reading), Event(NOW + 7190, "n1", 3, "xid", "31"))
        assert any("error of the program" in term.text for term in verdict.terms[:2])
        assert any("n1 reported xid 31 on GPU 3" in term.text for term in verdict.terms)
        assert "secret" not in str(verdict.terms)

    def test_what_speaks_against_it_is_among_them(self):
        verdict = judged(attempt(log_class="hardware", nodes=("n1",)))
        assert verdict.cause == "unknown"
        assert any(term.weights.get("node", 0) > term.weights.get("application", 0) for term in verdict.terms)

    def test_a_hardware_fault_on_the_jobs_gpu_is_never_called_no_evidence(self):
        correlator = Correlator(Suspicion())
        for one in range(9):
            correlator.attempt(attempt(nodes=("n2",), job=10 + one, log_class="application"))
        correlator.event(Event(NOW + 190, "n1", 3, "xid", "79"))
        verdict = correlator.attempt(attempt(hours=24, log_class="application"))
        assert verdict.cause == "application"
        assert "have n1 tested" in verdict.advice

    def test_heat_is_told_also_where_it_did_not_end_the_job(self):
        correlator = Correlator(Suspicion())
        for one in range(9):
            correlator.attempt(attempt(nodes=("n2",), job=10 + one, log_class="nothing"))
        correlator.event(Event(NOW + 190, "n1", 3, "nvml", "hw_thermal", "warning"))
        verdict = correlator.attempt(attempt(log_class="nothing"))
        assert (verdict.cause, "slowed by heat" in verdict.advice) == ("application", True)

    @pytest.mark.parametrize(
        ("leaves", "cause", "said", "unsaid"),
        [
            (
                {"leaf1": ["n0", "n1", "n2", "n3"], "leaf2": ["n4", "n5", "n6", "n7"]},
                "fabric",
                "under leaf",
                "other users",
            ),
            ({}, "infrastructure", "other users on other nodes failed", "under leaf"),
        ],
    )
    def test_what_failed_at_once_is_told_and_a_switch_explains_what_failed_under_it(self, leaves, cause, said, unsaid):
        correlator = Correlator(Suspicion(), leaves)
        for one in range(300):
            correlator.attempt(attempt("COMPLETED", (f"n{one % 8}",), job=100 + one)._replace(user=f"u{one % 9}"))
        verdicts = {}
        for one in range(6):
            nodes = f"n{one % 4}", f"n{(one + 1) % 4}"
            last = correlator.attempt(attempt(nodes=nodes, job=one, log_class="communication")._replace(user=f"v{one}"))
            verdicts[one] = last.cause
            verdicts.update({old.job: old.cause for old in correlator.rescored()})
        assert last.cause == cause
        assert any(said in term.text for term in last.terms)
        assert not any(unsaid in term.text for term in last.terms)
        assert set(verdicts.values()) == {cause}, "the first too, once it is known"

    def test_what_the_node_is_without_this_job_is_also_without_its_events(self):
        correlator = Correlator(Suspicion())
        for one in range(40):
            correlator.attempt(attempt("COMPLETED", ("n1",), job=100 + one)._replace(user=f"u{one % 8}"))
        job = attempt(job=200)._replace(start=NOW + 4e5, end=NOW + 4e5 + 3600)
        correlator.event(Event(job.end - 60, "n1", 3, "xid", "79"))
        (said,) = [term.text for term in correlator.attempt(job).terms if term.text.startswith("n1 by itself ends")]
        assert said.endswith("(suspicion 0.00)")

    def test_what_the_node_ends_of_such_jobs_is_what_was_reckoned_with(self):
        correlator = Correlator(Suspicion())
        for one in range(40):
            correlator.attempt(attempt("COMPLETED", ("n2",), job=100 + one)._replace(user=f"u{one % 8}"))
        for one in range(8):
            died = attempt(hours=0.01, job=one, log_class="nothing")
            last = correlator.attempt(died._replace(user=f"u{one}", start=NOW + 3600 * one, end=NOW + 3600 * one + 20))
        (said,) = [term for term in last.terms if term.text.startswith("n1 by itself ends")]
        assert last.node == "n1"
        assert "% of jobs of 20 s" in said.text, "seconds of its rate a day would come to nothing"
        assert said.weights["node"] > -1.5


class TestEvents:
    @pytest.mark.parametrize(
        ("source", "code", "severity", "kind"),
        [
            ("xid", "79", "info", "hard"),
            ("xid", "48", "warning", "hard"),
            ("xid", "Xid 95", "fault", "hard"),
            ("xid", "94", "fault", "weak"),
            ("xid", "63", "info", "weak"),
            ("xid", "13", "fault", "application"),
            ("xid", "45", "fault", ""),
            ("xid", "154", "fault", ""),
            ("xid", "4711", "fault", ""),
            ("sxid", "12028", "fault", ""),
            ("dcgm", "memory", "fault", "hard"),
            ("dcgm", "memory", "info", ""),
            ("nvml", "lost", "info", "hard"),
            ("nvml", "nvml:thermal", "warning", "thermal"),
            ("ib", "port-down", "fault", "link"),
            ("drain", "kill task failed", "fault", ""),
            ("leftovers", "process", "fault", ""),
            ("never heard of", "x", "fault", ""),
        ],
    )
    def test_what_an_event_is_evidence_of(self, source, code, severity, kind):
        assert weights.weigh(Event(NOW, "n1", 0, source, code, severity))[0] == kind

    def test_a_fatal_event_of_a_switch_is_hard(self):
        assert weights.weigh(Event(NOW, "n1", None, "sxid", "12028", detail={"fatal": True}))[0] == "hard"

    @pytest.mark.parametrize(
        ("gpu", "held", "same"),
        [
            (3, (1, 2, 3), True),
            ("3", (1, 2, 3), True),
            (0, (1, 2), False),
            ("GPU-A", ("gpu-a",), True),
            ("MIG-GPU-a/1/0", ("GPU-a",), True),
            ("GPU-b", ("GPU-a",), False),
            ("GPU-b", (0, 1), None),
            ("0000:3b:00", (0, 1), None),
            (None, (0,), None),
            (0, None, None),
        ],
    )
    def test_gpus_are_compared_where_they_are_named_alike(self, gpu, held, same):
        assert weights.same_gpu(gpu, held) is same


def test_an_application_is_its_name_without_numbers():
    assert application("ann", "lab", "train-17", "") == application("ann", "lab", "train-18", "")
    assert application("ann", "lab", "train-17", "") != application("bob", "lab", "train-17", "")
