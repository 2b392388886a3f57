"""Which GPUs are slow by the figures of their fleet."""

import random
import time

import pytest

from slurm_gpuhealth.correlate.slow import Measured, compare

NOW = 1_795_220_000.0


def fleet(nodes=8, gpus=8, value=52.1, spread=0.01, unit="GFLOPS", seed=1, first=0, version="4.4.1", times=2):
    """`times` figures of each GPU."""
    rng = random.Random(seed)  # noqa: S311
    return [
        Measured(
            f"n{node}",
            f"GPU-{node}-{gpu}",
            gpu,
            "H100",
            "dcgm.gflops",
            value * rng.gauss(1, spread),
            unit,
            NOW + when,
            version,
        )
        for node in range(first, first + nodes)
        for gpu in range(gpus)
        for when in range(times)
    ]


def changed(figures, node="n3", gpu=3, values=(41.2, 41.2), unit=None):
    """The figures with these values of one GPU, the newest last."""
    own = [one for one in figures if (one.node, one.gpu) == (node, gpu)]
    rest = [one for one in figures if (one.node, one.gpu) != (node, gpu)]
    base = own[0]._replace(unit=unit or own[0].unit)
    return rest + [base._replace(value=value, time=NOW + when) for when, value in enumerate(values)]


def slow(figures):
    return [(one.node, one.gpu, one.percent) for one in compare(figures)]


def test_a_good_fleet_has_no_slow_gpu():
    for seed in range(50):
        assert slow(fleet(nodes=40, spread=0.02, seed=seed)) == []


def test_a_slow_gpu_is_named_with_the_fleets_median_and_how_far_it_is():
    (found,) = compare(changed(fleet()))
    assert (found.node, found.uuid, found.gpu, found.value, found.unit) == ("n3", "GPU-3-3", 3, 41.2, "GFLOPS")
    assert (round(found.median, 1), found.percent) == (52.1, -21)


def test_one_bad_value_is_not_enough_whenever_it_was():
    assert slow(changed(fleet(), values=(52.0, 41.2))) == []
    assert slow(changed(fleet(), values=(41.2, 52.0))) == []
    assert slow(changed(fleet(), values=(41.2,))) == []


def test_a_slow_gpu_that_was_repaired_is_slow_no_more():
    assert slow(changed(fleet(), values=(41.0, 41.2, 41.1, 52.0, 52.2))) == []
    assert slow(changed(fleet(), values=(52.0, 52.0, 41.1, 41.0))) == [("n3", 3, -21)]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (5, 8), (8, 1), (3, 8)])
def test_a_tiny_fleet_tells_nothing(nodes, gpus):
    assert slow(changed(fleet(nodes=nodes, gpus=gpus), node="n0", gpu=0)) == []


def test_the_gpus_of_its_own_node_do_not_make_the_fleet_large_enough():
    figures = fleet(nodes=1) + fleet(nodes=5, gpus=1, first=1)
    assert slow(changed(figures, node="n0", gpu=0)) == []


@pytest.mark.parametrize(("nodes", "gpus"), [(6, 2), (9, 1)])
def test_eight_gpus_on_five_other_nodes_are_enough(nodes, gpus):
    assert slow(changed(fleet(nodes=nodes, gpus=gpus), node="n0", gpu=0)) == [("n0", 0, -21)]


def test_a_partition_with_a_power_cap_is_a_crowd_of_its_own():
    both = fleet(nodes=20) + fleet(nodes=8, value=41.0, first=20, seed=2)
    assert slow(both) == []
    assert slow(changed(both, values=(44.5, 44.5))) == [("n3", 3, -15)]
    assert slow(changed(both, node="n25", values=(33.0, 33.0))) == [("n25", 3, -19)]


def test_identical_values_do_not_make_a_hair_slow():
    same = fleet(spread=0.0)
    assert slow(changed(same, values=(51.0, 51.0))) == []
    assert slow(changed(same, values=(49.0, 49.0))) == [("n3", 3, -6)]


def test_a_slow_node_is_slow_as_a_whole():
    figures = [one._replace(value=one.value / 2) if one.node == "n3" else one for one in fleet()]
    assert sorted((node, gpu) for node, gpu, _ in slow(figures)) == [("n3", gpu) for gpu in range(8)]


def test_a_few_slow_gpus_are_no_crowd():
    figures = fleet(nodes=20)
    for node in ("n1", "n2", "n3", "n4"):
        figures = changed(figures, node=node)
    assert {node for node, _, _ in slow(figures)} == {"n1", "n2", "n3", "n4"}


def between(nodes, value=46.0, share=0.96):
    """Nodes n20 and up with a power cap, and a GPU of n60 between them and the others."""
    capped = fleet(nodes=20, spread=0.003) + fleet(nodes=nodes, value=value, spread=0.003, first=20)
    return capped + fleet(nodes=1, gpus=1, value=52.1 * share, spread=0.0, first=60)


@pytest.mark.parametrize(("nodes", "value"), [(20, 47.9), (6, 47.9), (2, 47.9), (2, 30.0)])
def test_a_partition_with_a_power_cap_is_not_slow_whatever_lies_between_it_and_the_others(nodes, value):
    assert slow(between(nodes, value)) == []


def test_a_partition_hides_no_slow_gpu_of_another_node():
    assert slow(changed(between(3, 41.2), values=(41.2, 41.2))) == [("n3", 3, -21)]


def test_gpus_that_are_slow_alike_on_six_nodes_are_a_crowd():
    figures = fleet(nodes=30)
    for node in range(6):
        found = slow(figures := changed(figures, node=f"n{node}", values=(41.2, 41.2)))
        assert len(found) == (node + 1 if node < 5 else 0)


def test_gpus_that_are_slow_each_in_its_own_way_are_no_crowd():
    figures = fleet(nodes=30)
    for node in range(7):
        figures = changed(figures, node=f"n{node}", values=(45.0 * 0.9**node,) * 2)
    assert len(slow(figures)) == 7


def test_units_that_change_are_one_figure_and_shown_in_its_own_unit():
    figures = fleet(value=52100.0)
    (found,) = compare(changed(figures, values=(41.2, 41.2), unit="TFLOPS"))
    assert (found.value, found.unit, round(found.median, 1), found.percent) == (41.2, "TFLOPS", 52.1, -21)
    assert (
        slow([one._replace(value=one.value / 1000, unit="TFLOPS") if one.node < "n4" else one for one in figures]) == []
    )


def test_another_version_of_the_tool_or_model_is_another_fleet():
    figures = fleet()
    for new in ({"version": "4.5.0"}, {"model": "H200"}, {"name": "dcgm.stress"}):
        moved = [one._replace(value=20.0, **new) if one.node == "n3" else one for one in figures]
        assert slow(moved) == []


def test_of_a_latency_more_is_worse():
    figures = fleet(value=2.7, unit="us")
    assert slow(changed(figures, values=(1.5, 1.5))) == []
    (found,) = compare(changed(figures, values=(5.4, 5.4)))
    assert (round(found.median, 1), found.percent) == (2.7, 100)


def test_watts_and_degrees_are_not_compared():
    for unit in ("W", "C", ""):
        assert slow(changed(fleet(unit=unit))) == []


def test_nonsense_is_passed_over():
    assert slow(changed(fleet(), values=(0.0, 0.0))) == []
    assert slow([]) == []
    same = [one._replace(time=NOW) for one in changed(fleet())]
    assert slow(same) == []


@pytest.mark.parametrize("unit", ["us", "GFLOPS"])
@pytest.mark.parametrize("value", [1e308, 5e-324, float("inf"), float("nan"), -1.0])
def test_a_value_that_no_gpu_can_have_stops_nothing(value, unit):
    figures = changed(fleet(unit=unit, value=2.0), values=(1.0, 1.0) if unit == "GFLOPS" else (3.0, 3.0))
    found = slow(figures)
    assert found
    assert slow(changed(figures, node="n5", values=(value, value))) == found


def test_a_nodes_own_figure_is_compared_by_node():
    figures = [one._replace(uuid="", gpu=None, name="nccl") for one in fleet(nodes=20, gpus=1)]
    bad = [one._replace(value=20.0) if one.node == "n3" else one for one in figures]
    assert slow(bad) == [("n3", None, -62)]


def test_a_large_fleet_is_compared_in_seconds():
    figures = fleet(nodes=500, gpus=8)
    begin = time.process_time()
    sorted(figures * 10, key=lambda one: (one.value, one.node))
    usual = time.process_time() - begin
    begin = time.process_time()
    compare(figures)
    assert time.process_time() - begin < 20 * usual


def test_the_worst_comes_first():
    figures = changed(changed(fleet(nodes=20)), node="n9", values=(20.0, 20.0))
    assert [node for node, _, _ in slow(figures)] == ["n9", "n3"]
