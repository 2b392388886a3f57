"""Diagnostics without results, hostile text, and what a diagnosis becomes for the judge."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dcgm_parse import SOFT, check, refused, result, v4, warning

from slurm_gpuhealth.diagnose import model
from slurm_gpuhealth.diagnose.parse import ORDER, parse

# No results


@pytest.mark.parametrize(
    ("text", "exit_code", "outcome"),
    [
        (refused("Return: (-34) : in use"), 222, "not-testable"),
        (refused("Return: (-34) : in use"), None, "not-testable"),
        (refused("Return: (-39) : already running", "DCGM GPU Diagnostic"), 217, "not-testable"),
        (refused("GPU 3's MIG configuration is incompatible with the diagnostic because it ..."), 226, "not-testable"),
        (
            refused(
                "Cannot run diagnostic: CUDA does not support enumerating GPUs when one more GPUs has MIG mode enabled"
            ),
            226,
            "not-testable",
        ),
        (refused("Return: (-11) : Timeout"), 245, "tool-error"),
        (refused("Return: (-53) : killed by a signal. terminated due to signal 6"), 203, "tool-error"),
        (refused("Return: (-30) : something new"), 226, "tool-error"),
        (refused(""), 226, "tool-error"),
        (refused("Return: (-57) : the driver timed out"), 199, "warn"),
        ("", 204, "tool-error"),
        ("", 0, "tool-error"),
        ("", None, "tool-error"),
        ("", 137, "tool-error"),
        ("", -15, "tool-error"),
        ("", 222, "not-testable"),
        ("Error: Unable to complete diagnostic for group 0. Return: (-34) : in use", None, "not-testable"),
        (b"\xff\xfe\x00garbage", 1, "tool-error"),
    ],
)
def test_a_diagnostic_without_results_is_never_a_fault(text, exit_code, outcome):
    diagnosis = parse(text, exit_code, 2)
    assert (diagnosis.outcome, diagnosis.gpus, diagnosis.next, diagnosis.level) == (outcome, (), None, 2)


# Findings


def test_findings_say_which_gpu_which_test_and_how_bad():
    text = v4(
        SOFT, check("pcie", result(0, "Fail", warning(30, "slow")), result(1, "Fail", warning(42)), status="Fail")
    )
    fault, monitor = model.findings(parse(text, 226, 2), 100.0)
    assert (fault.source, fault.code, fault.severity, fault.standing) == ("dcgm", "pcie", "fault", True)
    assert fault.details["bandwidth"]
    assert (fault.details["level"], fault.details["test"], fault.details["error_id"], fault.details["class"]) == (
        2,
        "pcie",
        30,
        "TRIAGE",
    )
    assert "slow" in fault.message
    assert "GPU 0" in fault.message
    assert (monitor.severity, monitor.details["bandwidth"]) == ("warning", False)


def test_a_config_error_is_information_and_a_nodes_error_has_no_gpu():
    (finding,) = model.findings(parse(v4(check("software", result(0), status="Fail", summary=[warning(22)]))), 1.0)
    assert (finding.severity, finding.gpu) == ("info", None)


def test_what_could_not_be_tested_is_said_and_busy_is_not():
    (finding,) = model.findings(parse(refused("MIG"), 226), 1.0)
    assert (finding.code, finding.severity) == ("not-testable", "info")
    assert model.findings(parse(refused("x"), 222), 1.0) == []
    assert model.findings(parse(v4(SOFT), 0), 1.0) == []


def test_a_bandwidth_failure_asks_for_a_retest_on_an_idle_node():
    assert "idle" in parse(v4(check("pcie", result(0, "Fail", warning(30))))).advice
    assert "idle" not in parse(v4(check("pcie", result(0, "Fail", warning(30), warning(52))))).advice


def test_messages_are_one_line_of_bounded_length():
    diagnosis = parse(v4(check("memory", result(0, "Fail", warning(52, "a\n\x1b[31mb\t" + "x" * 9999)))))
    message = diagnosis.gpus[0].errors[0].message
    assert message.startswith("a [31mb x")
    assert len(message) <= 512


# Hostile text

KEYS = (
    "DCGM Diagnostic,DCGM GPU Diagnostic,test_categories,tests,name,results,status,warnings,entity_id,gpu_id,error_id,"
    "iterations,test_summary,entity_groups,entities,metadata,version,runtime_error,category"
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["Pass", "Fail", "GPU", 52]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS.split(",")),
            inner,
            max_size=6,
        )
    ),
    max_leaves=40,
)


@settings(deadline=None)
@given(JSON, st.sampled_from([None, 0, 205, 226, 222, 255, -9, 1000]), st.sampled_from([None, 1, 4]))
def test_no_document_makes_us_fail(value, exit_code, level):
    assert parse(json.dumps({"DCGM Diagnostic": value}), exit_code, level).outcome in ORDER
    assert parse(json.dumps(value), exit_code, level, [0]).outcome != "pass" or "DCGM" in json.dumps(value)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_us_fail_or_pass(data):
    assert parse(data).outcome == "tool-error"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"DCGM Diagnostic":' * 50_000, "{" * 100_000, "1" * 10_000])
def test_deep_or_endless_text_is_unreadable(text):
    assert parse(text).outcome == "tool-error"
