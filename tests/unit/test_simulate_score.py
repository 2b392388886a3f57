"""The comparison of policies: judges of known quality must get the right score."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest

from slurm_gpuhealth.outcomes import Attempt, Event, Suspicion, Verdict
from slurm_gpuhealth.simulate import score
from slurm_gpuhealth.simulate.cases import CASES, DAY
from slurm_gpuhealth.simulate.rivals import RIVALS
from slurm_gpuhealth.simulate.watch import watch
from slurm_gpuhealth.simulate.world import EPOCH, World, make

SMALL = CASES["base"]._replace(nodes=64, days=15, lemons=0.15)


class Oracle:
    """Gives `sure` for a node that has become a lemon, and 0 for the others; turned around: the reverse."""

    def __init__(self, world: World, sure: float = 1.0, turned: bool = False, rung: str = "") -> None:
        self.world, self.sure, self.turned, self.rung = world, sure, turned, rung

    def event(self, event: Event) -> None:
        pass

    def attempt(self, attempt: Attempt) -> Verdict | None:
        truth = self.world.truth.get((attempt.job, attempt.attempt))
        if truth is None:
            return None
        cause = truth.accepted[0] if not self.turned else "node" if truth.cause != "node" else "application"
        masses = {cause: self.sure, "unknown": 1 - self.sure}
        return Verdict(attempt.job, attempt.attempt, cause, self.sure, truth.node, masses=masses)

    def suspicion(self, node: str, time: float) -> Suspicion:
        lemon = bool(node) and self.world.lemon(node, time) != self.turned
        return Suspicion(node, time, self.sure if lemon else 0.0, 0.0, 0.0, 0.0, self.rung if lemon else "")

    def suspicions(self, time: float, above: float = 0.05) -> list[Suspicion]:
        found = [self.suspicion(node, time) for nodes in self.world.leaves.values() for node in nodes]
        return [one for one in found if one.p_lemon > above]

    def rescored(self) -> list[Verdict]:
        return []


small = functools.cache(functools.partial(make, SMALL))
"""A seed's world; nobody changes it."""


def scored(seeds: int = 2, **how) -> score.Report:
    counts = []
    for seed in range(seeds):
        world = small(seed)
        counted: Counter[tuple[str, ...]] = Counter({("seeds",): 1})
        score.count_ours(counted, world, watch(world, Oracle(world, **how)))
        counts.append(counted)
    return score.report(counts)


def test_who_knows_the_truth_is_perfect_in_everything():
    found = scored()
    for one in found.results:
        assert (one.precision, one.recall, one.clean, one.one_off) == (1, 1, 0, 0)
        assert one.days <= 0.05
        assert one.avoided > 0.5
    assert (found.right, found.right_node) == (1, 1)
    assert all(of.error == of.brier == 0 for of in found.calibration.values())


def test_who_has_everything_the_wrong_way_round_gets_nothing():
    found = scored(turned=True)
    for one in found.results[5:]:  # the first thresholds are below what is said of a node that is not known
        assert one.precision == one.recall == one.avoided == 0
        assert one.clean > 1
    assert found.right == found.right_node == 0
    assert found.calibration["suspicion"].brier == 1


def test_a_threshold_above_what_a_judge_says_finds_nothing_and_no_precision_is_claimed():
    results = {one.policy: one for one in scored(sure=0.4).results}
    assert results["ours p>0.36"].recall == 1
    assert results["ours p>0.50"].recall == 0
    assert math.isnan(results["ours p>0.50"].precision)


def test_who_says_less_than_is_true_is_badly_calibrated_and_the_bins_show_where():
    of = scored(sure=0.65).calibration["suspicion"]
    (low, high) = [one for one in of.bins if one.number]
    assert (low.said, low.true, high.true) == (0, 0, 1)
    assert high.said == pytest.approx(0.65)
    assert of.error_above == pytest.approx(0.35)


def test_a_rung_on_a_good_node_without_hard_evidence_is_counted_as_soft():
    assert not scored(rung="RMA").rungs
    soft = scored(rung="RMA", turned=True).rungs
    assert soft["RMA soft"] > 1
    assert "RMA hard" not in soft


def test_sums_over_seeds_are_sums_over_their_worlds():
    one, three = (score.report([counts(seed) for seed in seeds]) for seeds in ([1], [1, 2, 3]))
    assert (one.seeds, three.seeds) == (1, 3)
    assert three.attempts > 2 * one.attempts


@functools.cache
def counts(seed: int) -> Counter[tuple[str, ...]]:
    return score.seed(SMALL, ("1 hard Xid",), False, seed)


def test_our_best_threshold_is_behind_a_rival_by_the_worse_of_precision_and_recall():
    def result(policy: str, precision: float, recall: float) -> score.Result:
        return score.Result(policy, precision, recall, 0, 0, 0, 0, 0)

    report = score.report([])._replace(
        results=(result("r", 0.8, 0.6), result("ours p>0.30", 0.7, 0.9), result("ours p>0.90", 1.0, 0.55))
    )
    assert score.behind(report, "r") == pytest.approx(0.05)
    assert score.behind(report._replace(results=(report.results[0], result("ours", 0.9, 0.7))), "r") < 0


NODE = "gpu0001"


def job(day: float, state: str = "FAILED", nodes: tuple[str, ...] = (NODE,), failed: str | None = None):
    when = EPOCH + day * DAY
    attempt = Attempt(int(day * 100), 0, "u", "a", "n", None, state, 1, 0, when - 600, when, nodes, None, failed)
    return when, attempt


def xid(day: float, code: str = "79"):
    when = EPOCH + day * DAY
    return when, Event(when, NODE, 0, "xid", code)


DOWN = {"state": "NODE_FAIL", "failed": NODE}
WIDE = (NODE, "gpu0002")


@pytest.mark.parametrize(
    ("rival", "stream", "flags"),
    [
        ("any failure", [job(1), job(2, "COMPLETED"), job(3, nodes=WIDE)], 3),
        ("any failure", [job(1, "CANCELLED"), job(2, "TIMEOUT")], 0),
        ("3 failures in 1 d", [job(1), job(1.4), job(1.9), job(2.1)], 1),
        ("3 failures in 1 d", [job(1), job(1.6), job(2.2), job(2.8)], 0),
        (
            "failure rate z>3",
            [job(1 + n / 100, "COMPLETED", ("x",)) for n in range(90)] + [job(2 + n) for n in range(5)],
            1,
        ),
        ("failure rate z>3", [job(1 + n / 10, ("COMPLETED", "FAILED")[n % 2]) for n in range(50)], 0),
        (
            "failures z>4 in 28 d",
            [job(1 + n / 100, "COMPLETED", ("x",)) for n in range(90)] + [job(2 + 5 * n) for n in range(5)],
            1,
        ),
        (
            "failures z>4 in 28 d",
            [job(1 + n / 100, "COMPLETED", ("x",)) for n in range(90)] + [job(2 + 8 * n) for n in range(9)],
            0,
        ),
        ("1 hard Xid", [xid(1), xid(2, "31"), xid(3, "45")], 1),
        ("2 hard Xids in 28 d", [xid(1), xid(20), xid(21)], 1),
        ("2 hard Xids in 28 d", [xid(1), xid(30)], 0),
        ("any NODE_FAIL", [job(1, nodes=WIDE, **DOWN), job(2, "NODE_FAIL"), job(3, "NODE_FAIL", WIDE)], 2),
        ("lemon rule 2 of 5", [xid(1), job(2, **DOWN)], 1),
        ("lemon rule 2 of 5", [xid(1), job(40, **DOWN)], 0),
        ("lemon rule 3 of 5", [xid(1), xid(2), job(3, **DOWN)], 1),
        ("lemon rule 3 of 5", [xid(1), job(3, **DOWN)], 0),
        ("strict rule 2 of 5", [xid(1), job(2, **DOWN)], 0),
        ("strict rule 2 of 5", [xid(1), xid(2), job(3, nodes=WIDE, **DOWN)], 1),
        ("strict rule 3 of 5", [xid(1), xid(2), job(3, nodes=WIDE, **DOWN), job(4, **DOWN)], 1),
    ],
)
def test_a_rival_flags_what_its_name_says(rival, stream, flags):
    assert len(list(RIVALS[rival](stream))) == flags


def test_every_rival_is_tried_above():
    tried = {case[0] for case in test_a_rival_flags_what_its_name_says.pytestmark[0].args[1]}
    assert tried == set(RIVALS)
