"""Evidence from InfiniBand: lost ports and growing counters are reported, ports never used are not."""

import time
from types import SimpleNamespace

import pytest

from slurm_gpuhealth import child
from slurm_gpuhealth.config.settings import Infiniband, Paths, Settings
from slurm_gpuhealth.evidence import infiniband
from slurm_gpuhealth.frozen import replace

NOW = 1_800_000_000.0
DAY = 86400.0


@pytest.fixture
def node(tmp_path):
    def port(name="mlx5_0/1", state="4: ACTIVE", phys="5: LinkUp", rate="400 Gb/sec (4X NDR)", **counters):
        device, _, number = name.partition("/")
        folder = tmp_path / "class/infiniband" / device / "ports" / number
        (folder / "counters").mkdir(parents=True, exist_ok=True)
        (folder / "state").write_text(state + "\n")
        (folder / "phys_state").write_text(phys + "\n")
        (folder / "rate").write_text(rate + "\n")
        for counter, value in counters.items():
            (folder / "counters" / counter).write_text(f"{value}\n")

    def look(baseline=None, now=NOW, **keys):
        settings = replace(Settings(), paths=Paths(sys=str(tmp_path)), infiniband=Infiniband(**keys))
        return infiniband.collect(settings, baseline or {}, now)

    return SimpleNamespace(port=port, look=look, root=tmp_path)


def codes(found):
    return [one.code for one in found[0]]


def test_a_node_without_infiniband_is_left_alone(node, monkeypatch):
    monkeypatch.setattr(child, "probe", None)
    assert node.look() == ([], {})


def test_a_well_port_has_no_findings_whatever_its_counters_are(node):
    node.port(link_downed=12, symbol_error=99999)
    found, baseline = node.look()
    assert found == []
    assert node.look(baseline)[0] == []


def test_a_port_that_was_never_active_is_not_missed(node):
    node.port("mlx5_1/1", state="1: DOWN", phys="3: Disabled")
    found, baseline = node.look()
    assert found == []
    assert node.look(baseline) == ([], {"ports": {}})


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", "N/A"])
def test_a_port_that_was_active_and_is_not_stands_until_it_is_again(node, state):
    node.port("mlx5_0/1")
    node.port("mlx5_1/1")
    _, baseline = node.look()
    node.port("mlx5_1/1", state=state, phys="2: Polling")
    for minute in range(2):
        found, baseline = node.look(baseline, NOW + 60 * minute)
        (finding,) = found
        assert (finding.source, finding.code, finding.severity, finding.standing) == (
            "ib",
            "port-down",
            "warning",
            True,
        )
        assert f"mlx5_1/1 ({state.rpartition(': ')[2]}, Polling)" in finding.message
        assert "mlx5_0" not in finding.message
    node.port("mlx5_1/1")
    assert codes(node.look(baseline)) == []


def test_a_port_out_of_use_for_a_week_is_forgotten(node):
    node.port()
    _, baseline = node.look()
    node.port(state="1: DOWN")
    found, baseline = node.look(baseline, NOW + 6 * DAY)
    assert codes((found,)) == ["port-down"]
    found, baseline = node.look(baseline, NOW + 8 * DAY)
    assert (found, baseline) == ([], {"ports": {}})


def test_only_the_ports_that_the_configuration_names_must_be_active(node):
    node.port("mlx5_0/1", state="1: DOWN")
    node.port("mlx5_1/1")
    _, baseline = node.look()
    node.port("mlx5_1/1", state="1: DOWN")
    (finding,), _ = node.look(baseline, ports=("mlx5_0/1",))
    assert finding.code == "port-down"
    assert "mlx5_1" not in finding.message


def test_an_adapter_that_is_gone_is_missed(node):
    node.port()
    _, baseline = node.look()
    (node.root / "class/infiniband/mlx5_0").rename(node.root / "gone")
    found, baseline = node.look(baseline, NOW + 60)
    assert codes((found,)) == ["port-missing"]
    (node.root / "class/infiniband").rmdir()
    assert codes(node.look(baseline, NOW + 120)) == ["port-missing"]
    assert codes(node.look(ports=("mlx5_9/1",))) == ["port-missing"]


def test_counters_are_told_by_growth_and_once(node):
    node.port(link_downed=3, symbol_error=10)
    _, baseline = node.look()
    node.port(link_downed=4, symbol_error=109)
    found, baseline = node.look(baseline)
    assert [(one.code, one.standing) for one in found] == [("link_downed", False)]
    assert "mlx5_0/1 (+1)" in found[0].message
    assert node.look(baseline)[0] == []
    node.port(link_downed=4, symbol_error=209)
    assert codes(node.look(baseline)) == ["symbol_error"]
    assert codes(node.look(baseline, error_growth=101)) == []


def test_a_counter_that_was_reset_counts_from_zero(node):
    node.port(link_downed=30)
    _, baseline = node.look()
    node.port(link_downed=0)
    found, baseline = node.look(baseline)
    assert found == []
    node.port(link_downed=1)
    assert codes(node.look(baseline)) == ["link_downed"]


def test_counters_that_a_model_lacks_make_no_noise(node):
    node.port(symbol_error="N/A (no PMA)", link_downed="")
    found, baseline = node.look()
    assert found == []
    node.port(symbol_error=5000, link_downed=2)
    assert node.look(baseline)[0] == []


def test_a_link_that_trained_to_less_than_it_had_is_slow(node):
    node.port()
    _, baseline = node.look()
    node.port(rate="200 Gb/sec (4X HDR)")
    for _ in range(2):
        found, baseline = node.look(baseline)
        assert codes((found,)) == ["rate"]
        assert "200 instead of 400 Gb/s" in found[0].message


def test_an_adapter_that_does_not_answer_is_no_fault_and_keeps_its_baseline(node, monkeypatch):
    node.port()
    _, baseline = node.look()
    monkeypatch.setattr(infiniband, "READ_TIMEOUT", 0.2)
    monkeypatch.setattr(infiniband, "read_ports", lambda root: time.sleep(30))
    found, after = node.look(baseline)
    assert [(one.code, one.severity) for one in found] == [("unreadable", "info")]
    assert after == baseline


def test_a_look_that_can_not_be_killed_is_not_joined_by_a_second_one(node, monkeypatch):
    node.port()
    _, baseline = node.look()
    stuck = child.Probed(None, "no answer in 5 s, and can't be killed", 5.0, True, child.Child(7, 8))
    monkeypatch.setattr(child, "probe", lambda *_, **__: stuck)
    _, baseline = node.look(baseline)
    monkeypatch.setattr(child, "probe", None)
    monkeypatch.setattr(child, "alive", lambda one: one == child.Child(7, 8))
    found, after = node.look(baseline)
    assert [(one.code, one.severity) for one in found] == [("unreadable", "info")]
    assert after == baseline
