"""The small worlds: their truth is in what they tell, and they say nothing else."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from slurm_gpuhealth.correlate.lines import read_attempt, read_event
from slurm_gpuhealth.outcomes import CAUSES
from slurm_gpuhealth.simulate import files
from slurm_gpuhealth.simulate.worlds import every
from slurm_gpuhealth.simulate.worlds.every import ALL, build
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH


@pytest.fixture(scope="module", params=sorted(ALL))
def made(request):
    return build(request.param)


def test_every_family_has_worlds_to_tune_by_and_worlds_that_are_kept():
    families = defaultdict(Counter)
    for entry in ALL.values():
        families[entry.family][entry.group] += 1
    assert all(number >= 30 for number in Counter(entry.group for entry in ALL.values()).values())
    assert all(groups["tune"] and groups["kept"] for groups in families.values())


def test_a_world_says_why_and_a_kept_one_stands_in_a_file_that_says_so():
    for module in every.FILES:
        text = Path(module.__file__).read_text()
        kept = module.__name__.rsplit(".", 1)[1].startswith("kept_")
        assert text.startswith("# Kept from whoever tunes the correlator") == kept
        names = [name for name, entry in ALL.items() if entry.make.__module__ == module.__name__]
        assert names
        assert {ALL[name].group for name in names} == {"kept" if kept else "tune"}
        assert all(ALL[name].make.__doc__ for name in names)


def test_a_world_is_small_and_in_order(made):
    assert 4 <= len(made.nodes) <= 64
    assert 7 <= made.days <= 40
    assert 300 <= len(made.attempts) <= 20_000
    assert [one.end for one in made.attempts] == sorted(one.end for one in made.attempts)
    assert [one.time for one in made.events] == sorted(one.time for one in made.events)
    assert len({(one.job, one.attempt) for one in made.attempts}) == len(made.attempts)
    known = set(made.nodes)
    for one in made.attempts:
        assert EPOCH <= one.start <= one.end <= EPOCH + made.days * DAY
        assert known.issuperset(one.nodes)
        assert one.gpus is None or set(one.gpus) == set(one.nodes)
        assert (one.log is None and one.log_class is None) or one.state != "COMPLETED"
    assert all(one.node in known for one in made.events)
    for groups in (made.leaves, made.places):
        assert all(known.issuperset(nodes) for nodes in groups.values())


def test_no_gpu_is_given_to_two_jobs_at_once(made):
    until = {}
    for one in sorted(made.attempts, key=lambda one: one.start):
        for node, gpus in (one.gpus or {}).items():
            for gpu in gpus:
                assert until.get((node, gpu), 0) <= one.start + 1
                until[node, gpu] = one.end


def test_each_failure_has_a_cause_and_only_bad_nodes_cause_any(made):
    attempts = {(one.job, one.attempt): one for one in made.attempts}
    assert {key for key, one in attempts.items() if one.state != "COMPLETED"} == set(made.truth)
    for key, truth in made.truth.items():
        assert truth.cause in CAUSES
        assert truth.cause == truth.accepted[0]
        assert (truth.node is not None) == (truth.cause == "node")
        if truth.node is not None:
            assert truth.node in attempts[key].nodes
            assert made.is_bad(truth.node, attempts[key].end, DAY)
    assert set(made.bad_places) <= {*made.leaves, *made.places}


def test_a_bad_node_can_be_told_by_what_is_recorded(made):
    """Its failures against those of the same applications elsewhere; or Xids, or NODE_FAILs, that end its jobs."""
    where = defaultdict(set)
    for one in made.events:
        where[one.code].add(one.node)
    telling = [one for one in made.events if one.severity == "fault" and len(where[one.code]) <= len(made.nodes) / 2]
    for bad in made.bad:
        hard = sum(one.node == bad.node and bad.since <= one.time <= bad.until for one in telling)
        lost = sum(one.state == "NODE_FAIL" and bad.node in one.nodes for one in made.attempts)
        assert hard >= 4 or lost >= 5 or excess(made, bad) > 4


def test_a_good_node_of_a_world_without_bad_ones_is_like_others_in_its_context(made):
    if not made.bad:
        assert not [truth for truth in made.truth.values() if truth.cause == "node"]


def excess(made, bad):
    """How many standard deviations more of its jobs fail than of the same programs elsewhere, in the same partition."""

    def there(one):
        names = {name for gpu in bad.gpus for name in gpu}
        return bad.node in one.nodes and (not bad.gpus or not one.gpus or not names.isdisjoint(one.gpus[bad.node]))

    def what(one):
        return one.user, one.name if one.user else "", one.partition, len(one.nodes) > 1

    runs, failed = Counter(), Counter()
    every_runs, every_failed = Counter(), Counter()
    for one in made.attempts:
        if not any(made.is_bad(node, one.end) for node in one.nodes):
            runs[what(one)] += 1
            failed[what(one)] += one.state != "COMPLETED"
            every_runs[one.partition] += 1
            every_failed[one.partition] += one.state != "COMPLETED"
    seen = expected = 0.0
    for one in made.attempts:
        if there(one) and bad.since <= one.end <= bad.until:
            usual = every_failed[one.partition] / every_runs[one.partition]
            expected += (failed[what(one)] + 5 * usual) / (runs[what(one)] + 5)
            seen += one.state != "COMPLETED"
    return (seen - expected) / expected**0.5


def test_the_same_name_and_seed_make_the_same_world():
    for name in ("silent-for-two-users", "requeued"):
        assert build(name) == build(name)
        assert build(name) != build(name, 2)


def test_a_world_reads_back_from_the_lines_of_replay(made):
    some = [one for nth, one in enumerate(made.attempts) if one.state != "COMPLETED" or nth % 10 == 0]
    for one in some[:200]:
        assert read_attempt(json.loads(files.line(files.row(one)))) == one
    for one in made.events[:100]:
        assert read_event(json.loads(files.line(one._asdict()))) == one
