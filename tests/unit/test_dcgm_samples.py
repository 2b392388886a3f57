"""Every sample of `dcgmi diag` in the corpus gets the expected reading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_gpuhealth.diagnose.parse import parse

CORPUS = Path(__file__).parents[1] / "corpus" / "dcgm"
INDEX = {row["file"]: row for row in map(json.loads, (CORPUS / "INDEX.jsonl").read_text().splitlines())}
SAMPLES = sorted(file for file in INDEX if file.startswith(("diag_", "l1_", "l2_")))
REAL = sorted(f"real/{path.name}" for path in (CORPUS / "real").iterdir())

EXPECTED = {  # file → (outcome, next, {GPU: [error ids]})
    "diag_after_client_sigkill.json": ("not-testable", None, {}),  # busy
    "diag_after_timeout.json": ("pass", None, {}),
    "diag_bad_option.txt": ("tool-error", None, {}),
    "diag_busy_second.json": ("not-testable", None, {}),
    "diag_client_SIGHUP.json": ("tool-error", None, {}),
    "diag_client_SIGINT.json": ("tool-error", None, {}),
    "diag_client_SIGKILL.txt": ("tool-error", None, {}),
    "diag_client_SIGKILL_heartbeat.txt": ("tool-error", None, {}),
    "diag_client_SIGTERM.json": ("tool-error", None, {}),
    "diag_expected_mismatch.json": ("tool-error", None, {}),
    "diag_expected_ok.json": ("pass", None, {}),
    "diag_g_all.json": ("pass", None, {}),
    "diag_g_bad.json": ("tool-error", None, {}),
    "diag_host_unresolvable.txt": ("tool-error", None, {}),  # an embedded engine's answer
    "diag_hostengine_SIGTERM.txt": ("tool-error", None, {}),
    "diag_i_bad.json": ("not-testable", None, {}),
    "diag_i_garbage.json": ("tool-error", None, {}),
    "diag_i_gpu_prefix.json": ("pass", None, {}),
    "diag_i_mixed_bad.json": ("not-testable", None, {}),
    "diag_i_uuid.json": ("pass", None, {}),
    "diag_ignore_codes_bad.json": ("tool-error", None, {}),
    "diag_iterations2.json": ("pass", None, {}),
    "diag_iterations2_fail.json": ("fail", "L3", {1: [52]}),
    "diag_level5.txt": ("tool-error", None, {}),
    "diag_memory_no_plugins.json": ("tool-error", None, {}),
    "diag_name_software.json": ("tool-error", None, {}),
    "diag_name_unknown.json": ("tool-error", None, {}),
    "diag_names.json": ("pass", None, {}),
    "diag_no_hostengine.txt": ("tool-error", None, {}),  # embedded, and could not load its plugins
    "diag_no_hostengine_host.txt": ("tool-error", None, {}),
    "diag_no_hostengine_host_no_driver.txt": ("tool-error", None, {}),
    "diag_no_hostengine_no_driver.json": ("not-testable", None, {}),  # nothing in it tells of the engine
    "diag_no_hostengine_no_driver_text.txt": ("not-testable", None, {}),
    "diag_no_nvvs.json": ("tool-error", None, {}),
    "diag_no_r.txt": ("tool-error", None, {}),
    "diag_nvvs_sigterm.json": ("tool-error", None, {}),  # exit 0, and pcie has no results
    "diag_param_malformed.txt": ("tool-error", None, {}),
    "diag_param_ok.json": ("pass", None, {}),
    "diag_param_unknown.json": ("tool-error", None, {}),
    "diag_r1_pass.json": ("pass", None, {}),
    "diag_r2_fail_early.json": ("fail", "L3", {1: [52]}),
    "diag_r2_memory_fail_isolate.json": ("fail", "L3", {1: [52]}),
    "diag_r2_no_plugins.json": ("pass", None, {}),  # as level 1; see the test of missing tests
    "diag_r2_pass.json": ("pass", None, {}),
    "diag_r2_pass_text.txt": ("pass", None, {}),
    "diag_r2_pcie_fail_triage.json": ("fail", "L3", {2: [30]}),
    "diag_r2_pcie_fail_triage_text.txt": ("warn", None, {2: [None]}),  # a table has no error numbers
    "diag_r2_skip.json": ("config", None, {3: [55]}),
    "diag_r2_skip_noerror.json": ("not-testable", None, {}),
    "diag_r3_config_fail.json": ("config", None, {0: [72]}),
    "diag_r3_fail_early.json": ("fail", "L4", {1: [52]}),
    "diag_r3_pass.json": ("pass", None, {}),
    "diag_r3_stress_fail_monitor.json": ("warn", None, {0: [42]}),
    "diag_r4_memtest_fail.json": ("fail", "RMA", {2: [58]}),
    "diag_r4_pass.json": ("pass", None, {}),
    "diag_timeout_vs_duration.txt": ("tool-error", None, {}),
    "l1_after_xid79.json": ("pass", None, {}),  # level 1 does not look at Xids
    "l1_eight_gpus.json": ("pass", None, {}),
    "l1_env_bad_none.json": ("pass", None, {}),
    "l1_fabric_in_progress.json": ("config", None, {}),
    "l1_gpu_lost_some_calls.json": ("pass", None, {}),
    "l1_gpu_removed.json": ("pass", None, {}),  # of three GPUs; see the test of missing GPUs
    "l1_gpu_removed_i2.json": ("not-testable", None, {}),
    "l1_inforom.json": ("fail", "L3", {3: [9]}),
    "l1_mig_enabled_noinstances.json": ("not-testable", None, {}),
    "l1_mig_one_gpu.json": ("not-testable", None, {}),
    "l1_no_libcuda.json": ("config", None, {}),
    "l1_one_gpu.json": ("pass", None, {}),
    "l1_persistence_off.json": ("config", None, {1: [29]}),
    "l1_recovery_reset.json": ("fail", "reset", {1: [125]}),
    "l1_retired_pages_limit.json": ("fail", "L3", {0: [7]}),
    "l1_row_remap_failure.json": ("fail", "reset", {1: [80]}),
    "l1_row_remap_failure_ignored.json": ("pass", None, {}),
    "l1_thermal_violation.json": ("pass", None, {}),
    "l1_yaml_rowfail.json": ("fail", "reset", {1: [80]}),
    "l1_yaml_rowpend.json": ("fail", "reset", {1: [84]}),
    "l2_persistence_off.json": ("config", None, {1: [29]}),
    "l2_row_remap_pending_unc.json": ("fail", "reset", {2: [84]}),
    "real/v3_3_1_issue139_r3_skip.json": ("not-testable", None, {}),
    "real/v4_2_3_gb10-level1.json": ("config", None, {0: [29]}),
    "real/v4_2_3_gb10-level2-partial-skip.json": ("config", None, {0: [29]}),
    "real/v4_2_3_gb10-level2-plugins-allowed.json": ("config", None, {0: [29]}),
    "real/v4_2_3_gb10-level2-plugins-gated.json": ("config", None, {0: [29]}),
    "real/v4_hyperpod_8gpu_persistence_mode_fail.json": ("config", None, {gpu: [29] for gpu in range(8)}),
}


def read(file: str, **known: object):
    exit_code = INDEX[file]["exit_code"] if file in INDEX else None
    return parse((CORPUS / file).read_bytes(), exit_code, **known)


@pytest.mark.parametrize("file", [*SAMPLES, *REAL])
def test_each_sample_is_read_as_it_should_be(file):
    diagnosis = read(file)
    blamed = {gpu.entity_id: [error.id for error in gpu.errors] for gpu in diagnosis.gpus if gpu.errors}
    assert (diagnosis.outcome, diagnosis.next, blamed) == EXPECTED[file], diagnosis.message


def test_the_table_has_every_sample():
    assert {*SAMPLES, *REAL} == EXPECTED.keys()


@pytest.mark.parametrize("file", sorted(path.name for path in CORPUS.iterdir() if path.is_file()))
def test_what_is_no_diagnostic_is_never_a_fault_or_a_pass(file):
    if file not in EXPECTED:
        assert parse((CORPUS / file).read_bytes()).outcome == "tool-error"


@pytest.mark.parametrize("file", ["diag_busy_second.json", "diag_after_client_sigkill.json"])
def test_busy_is_told_apart(file):
    assert read(file).busy


@pytest.mark.parametrize("file", [file for file in EXPECTED if "busy" not in file and "sigkill" not in file])
def test_nothing_else_is_busy(file):
    assert not read(file).busy


@pytest.mark.parametrize(
    ("file", "level"),
    [("diag_r1_pass.json", 1), ("diag_names.json", 2), ("diag_r3_pass.json", 3), ("diag_r4_pass.json", 4)],
)
def test_the_level_is_told_by_the_tests(file, level):
    assert read(file).level == level


def test_a_level_2_without_plugins_is_no_pass_of_level_2():
    diagnosis = read("diag_r2_no_plugins.json", level=2)
    assert diagnosis.outcome == "not-testable"
    assert "memory, pcie" in diagnosis.message


def test_a_gpu_that_vanished_is_missed_where_it_was_expected():
    diagnosis = read("l1_gpu_removed.json", level=1, expected_gpus=[0, 1, 2, 3])
    assert diagnosis.outcome == "not-testable"
    assert [(gpu.entity_id, gpu.outcome) for gpu in diagnosis.gpus] == [
        *((0, "pass"), (1, "pass"), (2, "not-testable"), (3, "pass"))
    ]


def test_only_the_guilty_gpu_is_blamed_for_a_fail_on_all():
    outcomes = {gpu.entity_id: gpu.outcome for gpu in read("l1_inforom.json").gpus}
    assert outcomes == {0: "pass", 1: "pass", 2: "pass", 3: "fail"}


def test_what_concerns_the_node_is_blamed_on_no_gpu():
    diagnosis = read("l1_no_libcuda.json")
    assert {gpu.outcome for gpu in diagnosis.gpus} == {"pass"}
    assert [error.id for test in diagnosis.tests for error in test.errors] == [22]


def test_gpus_that_a_fault_elsewhere_left_untested_have_not_passed():
    outcomes = {gpu.entity_id: gpu.outcome for gpu in read("diag_r2_fail_early.json").gpus}
    assert outcomes == {0: "not-testable", 1: "fail", 2: "not-testable", 3: "not-testable"}


def test_serial_numbers_are_kept_and_none_is_invented():
    assert read("diag_r1_pass.json").gpus[2].serial == "1651230000002"
    assert read("real/v4_2_3_gb10-level1.json").gpus[0].serial is None


def test_a_message_cut_by_the_table_is_whole_again():
    message = read("diag_r2_pcie_fail_triage_text.txt").gpus[2].errors[0].message
    assert message == "Bandwidth of GPU 2 in direction Host to GPU did not reach minimum"
