"""DCGM's health watches: what their report means, and what it does not mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_dcgm_run import UUIDS, node  # noqa: F401 - the fixture

from slurm_gpuhealth.config.settings import Gpus, Settings
from slurm_gpuhealth.evidence import dcgm_health

CORPUS = Path(__file__).parents[1] / "corpus" / "dcgm"
KNOWN = {gpu: f"GPU-{gpu}" for gpu in range(4)}


def read(file):
    return dcgm_health.read((CORPUS / file).read_text(), KNOWN, 1.0)


def short(findings):
    return [(f.code, f.gpu.uuid, f.severity) for f in findings]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("health_c_dbe_nvml.json", [("memory", "GPU-0", "warning")]),
        ("health_c_yaml_dbe.json", [("memory", "GPU-1", "warning")]),
        ("health_c_yaml_rowfail.json", [("memory", "GPU-1", "warning")]),
        ("health_c_yaml_lost.json", [("power", "GPU-1", "info")]),
        ("health_c_retire_pending.json", [("memory", "GPU-0", "info")]),
        ("health_c_inforom.json", [("inforom", "GPU-0", "info"), ("memory", "GPU-0", "info")]),
        ("health_c_thermal_power.json", [("thermal", "GPU-1", "info"), ("power", "GPU-2", "info")]),
        ("health_c_xid79_again.json", [("internal", "GPU-1", "warning")]),
        (
            "health_c_recovery_reboot.json",
            [("driver", "GPU-0", "warning"), ("inforom", "GPU-0", "info"), ("memory", "GPU-0", "info")],
        ),
        ("health_c_yaml_rowpend.json", []),
        ("health_c_pcie_only_xid79.json", []),
        ("health_c_not_enabled.txt", []),
        ("health_c_after_clear.txt", []),
    ],
)
def test_a_report_is_read(file, expected):
    assert short(read(file)) == expected


@pytest.mark.parametrize("file", sorted(path.name for path in CORPUS.glob("health_c_*.json")))
def test_health_alone_condemns_nothing(file):
    # It keeps an Xid until the host engine restarts: a fault here would drain a mended node again and again.
    assert all(finding.severity != "fault" and finding.standing for finding in read(file))


def test_the_gpu_is_the_one_of_the_entry_not_of_the_text():
    (finding,) = read("health_c_yaml_rowfail.json")
    assert "3309270192" not in finding.message
    assert "GPU 1 had uncorrectable memory errors and row remapping failed." in finding.message


def test_wrapped_text_is_one_line_and_its_xid_is_told():
    (finding,) = read("health_c_xid79_again.json")
    assert "field diagnostic on the GPU. (triggered by XID 79: GPU 1 has fallen off the bus)" in finding.message
    assert (finding.details["xid"], finding.details["value"]) == (79, "Failure")


@pytest.mark.parametrize("text", ["", "garbage", "{", "[]", "{}", "Error: The Group is not found", '{"body": 3}'])
def test_what_is_no_report_is_said(text):
    with pytest.raises(OSError, match="no report"):
        dcgm_health.read(text, KNOWN, 1.0)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["GPU", "children", "0", "²", "Errors", "Memory system", "value", "overflow", ""]), inner, max_size=4)))  # fmt: skip  # noqa: E501
def test_no_report_makes_us_fail(body):
    for finding in dcgm_health.read(json.dumps({"body": {"GPU": body}}), KNOWN, 1.0):
        assert finding.severity != "fault"


@pytest.mark.parametrize("entity", ["²", "-1", "01", "9" * 5000, "x", ""])
def test_an_entity_that_is_no_number_is_no_gpu(entity):
    error = {"Memory system": {"value": "Failure", "overflow": ["bad"]}}
    report = {"GPU": {"children": {entity: {"children": {"Errors": {"children": error}}}}}}
    (finding,) = dcgm_health.read(json.dumps({"body": report}), KNOWN, 1.0)
    assert (finding.gpu, finding.severity) == (None, "warning")


def settings_of(node, count=0):  # noqa: F811
    return Settings(dcgm=node.settings, gpus=Gpus(count=count))


def test_the_first_look_sets_the_watches_and_the_next_one_sees(node):  # noqa: F811
    node.save(health={UUIDS[2]: [{"system": "Memory system", "value": "Failure", "text": "Detected 2 volatile DBE"}]})
    settings = settings_of(node)
    dcgm_health.collect(settings, 1.0, 10)
    (finding,) = dcgm_health.collect(settings, 2.0, 10)
    assert (finding.source, finding.gpu.uuid, finding.details["entity"]) == ("dcgm-health", UUIDS[2], "GPU 0")


def test_watches_that_others_set_in_part_are_completed(node):  # noqa: F811
    import subprocess

    argv = [node.settings.dcgmi, "health", "--host", node.settings.host]
    subprocess.run([*argv, "-s", "p"], check=True, capture_output=True)
    dcgm_health.collect(settings_of(node), 1.0, 10)
    done = subprocess.run([*argv, "-f", "-j"], check=True, capture_output=True)
    body = json.loads(done.stdout[done.stdout.index(b"{") :])["body"]
    assert {name for name, watch in body.items() if watch["value"] == "Off"} == {"SM"}


def test_healthy_without_a_gpu_is_no_good_news(node):  # noqa: F811
    for gpu in node.gpus:
        gpu["lost"] = "absent"
    node.save()
    (finding,) = dcgm_health.collect(settings_of(node), 1.0, 10)
    assert (finding.code, finding.severity, "0 GPUs" in finding.message) == ("gpus-missing", "warning", True)


def test_healthy_with_a_gpu_gone_is_no_good_news_where_the_number_is_known(node):  # noqa: F811
    node.gpus[1]["lost"] = "absent"
    node.save()
    assert dcgm_health.collect(settings_of(node), 1.0, 10) == []
    assert [f.code for f in dcgm_health.collect(settings_of(node, 4), 1.0, 10)] == ["gpus-missing"]


def test_without_an_engine_the_source_can_not_be_read(node):  # noqa: F811
    node.stop()
    with pytest.raises(OSError, match="no host engine"):
        dcgm_health.collect(settings_of(node), 1.0, 10)
