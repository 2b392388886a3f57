"""The simulated cluster: its events must be possible, and as frequent as its settings say."""

from __future__ import annotations

import functools
import heapq
import json
from collections import Counter, defaultdict

import pytest

from slurm_gpuhealth.correlate.lines import read_attempt, read_event
from slurm_gpuhealth.outcomes import Attempt, Event
from slurm_gpuhealth.simulate import files, texts
from slurm_gpuhealth.simulate.cases import CASES, DAY
from slurm_gpuhealth.simulate.world import EPOCH, World, make, name

once = functools.cache(make)
"""Nobody changes a world."""


def small(setting: str = "base", seed: int = 1, days: float = 20, **changes: object) -> World:
    return once(CASES[setting]._replace(nodes=64, days=days, **changes), seed)  # type: ignore[arg-type]


def attempts(world: World) -> list[Attempt]:
    return [item for _, item in world.stream if isinstance(item, Attempt)]


def events(world: World) -> list[Event]:
    return [item for _, item in world.stream if isinstance(item, Event)]


def test_the_same_seed_makes_the_same_world_and_another_seed_another():
    assert make(small().case, 1) == small()
    assert small().stream != small(seed=2).stream


@pytest.mark.parametrize("setting", CASES)
def test_no_gpu_has_two_jobs_at_a_time(setting):
    busy: list[tuple[float, str, str]] = []
    held: set[tuple[str, str]] = set()
    world = small(setting, days=8, gpus_known=True, again=0.0)
    for one in sorted(attempts(world), key=lambda one: one.start):
        while busy and busy[0][0] <= one.start:
            _, node, gpu = heapq.heappop(busy)
            held.discard((node, gpu))
        assert one.start <= one.end
        for node, gpus in one.gpus.items():
            for gpu in gpus:
                assert (node, gpu) not in held
                held.add((node, gpu))
                heapq.heappush(busy, (one.end, node, gpu))
    assert len(attempts(world)) > 500


@pytest.mark.parametrize("setting", CASES)
def test_what_did_not_complete_has_a_truth_and_a_guilty_node_was_the_jobs(setting):
    world = small(setting, days=8)
    for one in attempts(world):
        truth = world.truth.get((one.job, one.attempt))
        assert (truth is None) == (one.state == "COMPLETED")
        if truth:
            assert truth.cause == "node" or truth.node is None
            assert truth.node is None or truth.node in one.nodes
        assert one.failed_node is None or one.failed_node == truth.node


def test_hardware_kills_as_many_jobs_as_in_the_published_fleets():
    world = make(CASES["base"]._replace(nodes=256), 2)
    assert 2.3 < 1000 * sum(truth.cause == "node" for truth in world.truth.values()) / (256 * 60) < 6.5
    jobs = attempts(world)
    time = Counter()
    for one in jobs:
        time[len(one.nodes) > 1] += (one.end - one.start) * len(one.nodes)
    assert 0.8 < time[True] / sum(time.values()) < 0.92
    assert sum(len(one.nodes) == 1 for one in jobs) / len(jobs) > 0.85


def test_what_is_told_comes_in_the_order_of_its_arrival_and_late_where_it_is_to():
    times = [when for when, _ in small("noisy").stream]
    assert times == sorted(times)
    assert all(when >= item.time for when, item in small("noisy").stream if isinstance(item, Event))
    assert max(when - item.time for when, item in small("noisy").stream if isinstance(item, Event)) > 600
    told = Counter(item[:3] for item in events(small("noisy", late=0.5)))
    assert max(told.values()) == 2


def test_a_job_that_lost_its_node_is_run_again():
    world = small(node_fail=1.0, lemons=0.1)
    lost = [one for one in attempts(world) if one.state == "NODE_FAIL"]
    assert len(lost) > 5
    runs = {(one.job, one.attempt): one for one in attempts(world)}
    again = [runs.get((one.job, one.attempt + 1)) for one in lost if one.end < EPOCH + 15 * DAY and one.attempt < 3]
    assert all(one is not None for one in again[:5])
    assert all(one.start >= runs[one.job, one.attempt - 1].end for one in again if one)


def test_the_clocks_of_nodes_are_off_by_no_more_than_the_setting():
    ends = defaultdict(list)
    world = small("skew", lemons=0.3, hard=1.0, benign=0.0, app_xid=0.0)
    for one in attempts(world):
        truth = world.truth.get((one.job, one.attempt))
        if truth and truth.node:
            ends[truth.node].append(one.end)
    apart = [min((event.time - end for end in ends[event.node]), key=abs) for event in events(world)]
    assert max(apart) > 2
    assert all(-51 < one < 33 for one in apart)


def test_without_known_gpus_none_is_told():
    assert all(one.gpus is None for one in attempts(small("blind")))
    assert all(one.gpu is None for one in events(small("blind")))


def test_a_user_with_a_node_of_its_own_runs_there_and_nobody_else_does():
    world = small("pinned", lemons=0.05)
    own = {one.user: one.nodes for one in attempts(world) if int(one.user[1:]) >= 80}
    assert len(own) == 6
    kept = {node for nodes in own.values() for node in nodes}
    assert len(kept) == 6
    for one in attempts(world):
        assert one.nodes == own[one.user] if one.user in own else kept.isdisjoint(one.nodes)
    assert any(world.lemons[0].node == int(node[3:]) for node in kept)


def test_a_lemon_that_needs_large_jobs_kills_no_small_one():
    world = small("large", lemons=0.2)
    by_lemon = [key for key, truth in world.truth.items() if truth.lemon]
    assert len(by_lemon) > 5
    assert all(len(one.nodes) >= 8 for one in attempts(world) if (one.job, one.attempt) in set(by_lemon))


def test_a_bad_gpu_kills_only_the_jobs_that_hold_it():
    world = small("gpu", lemons=0.2)
    bad = {name(one.node): one.gpu for one in world.lemons}
    killed = [one for one in attempts(world) if (t := world.truth.get((one.job, one.attempt))) and t.lemon]
    assert len(killed) > 5
    for one in killed:
        node = world.truth[one.job, one.attempt].node
        assert any(int(gpu[-2:], 16) == bad[node] for gpu in one.gpus[node])
    nodes = Counter(len(gpus) for one in attempts(world) for gpus in one.gpus.values())
    assert {1, 2, 4, 8} <= nodes.keys()


def test_a_bad_image_kills_jobs_of_everybody_for_half_a_day():
    world = small("image", image_day=10.0)
    wave = [one for one in attempts(world) if world.truth.get((one.job, one.attempt), [0] * 4)[3] and one.reading]
    wave = [one for one in wave if one.reading.error == "ImportError"]
    assert len({one.user for one in wave}) > 10
    assert all(EPOCH + 10 * DAY <= one.start < EPOCH + 10.5 * DAY and one.end - one.start < 61 for one in wave)


def test_a_repaired_lemon_is_good_after_its_repair_or_goes_on():
    world = small("repaired", lemons=0.3)
    repairs = {event.node: event.time for event in events(world) if event.source == "repair"}
    after = {node: world.lemon(node, when + 1) for node, when in repairs.items()}
    assert set(after.values()) == {True, False}
    assert all(world.lemon(node, when - 1) for node, when in repairs.items())


def test_storms_and_leaf_switches_kill_many_jobs_at_once():
    causes = Counter(truth.cause for truth in small("storms", storms=1.0).truth.values())
    assert causes["infrastructure"] > 20
    causes = Counter(truth.cause for truth in small("leaf", leaf_rate=0.1).truth.values())
    assert causes["fabric"] > 10


def test_the_files_are_those_that_replay_reads(tmp_path):
    world = small("silent-named", lemons=0.1)
    files.write(world, str(tmp_path), logs=False)
    jobs = [json.loads(line) for line in (tmp_path / "JOBS.jsonl").read_text().splitlines()]
    read = [read_attempt(row) for row in jobs]
    bare = [one._replace(reading=None) for one in attempts(world)]
    assert [one._replace(log=None, log_class=None) for one in read] == bare
    assert [read_event(json.loads(line)) for line in (tmp_path / "EVENTS.jsonl").open()] == events(world)
    assert json.loads((tmp_path / "TOPOLOGY.json").read_text())["leaf00"] == [name(node) for node in range(16)]
    truth = [json.loads(line) for line in (tmp_path / "TRUTH.jsonl").open()]
    assert sum("lemon" in row and "since" in row for row in truth) == len(world.lemons)
    named = [one for one in attempts(world) if one.reading and one.reading.hosts]
    logs = {(row["job"], row["attempt"]): row["log"] for row in jobs}
    assert named
    assert all(one.reading.hosts[0] in logs[one.job, one.attempt] for one in named)
    assert sum(log is not None for log in logs.values()) == len(named)


def test_written_logs_say_what_the_reading_says():
    for one in attempts(small("silent-named", lemons=0.1)):
        text = texts.text(one)
        assert (text is None) == (one.reading is None)
        if one.reading and one.reading.kind == "application":
            assert one.reading.error in text
            assert one.reading.frame.partition(":")[0] in text
        if one.reading and one.reading.kind == "hardware":
            assert "CUDA error" in text
