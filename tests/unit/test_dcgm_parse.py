"""DCGM's documents in all versions and states: what they mean, and that no content breaks the parser."""

from __future__ import annotations

import json

import pytest

from slurm_gpuhealth.diagnose import catalogue
from slurm_gpuhealth.diagnose.parse import parse


def warning(code, text="text", severity=0):
    return {"warning": text, "error_id": code, "error_category": 1, "error_severity": severity}


def result(gpu, status="Pass", *warnings, **more):
    entry = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu, "status": status, **more}
    return entry | ({"warnings": list(warnings)} if warnings else {})


def check(name, *results, status="Pass", summary=()):
    return {"name": name, "results": list(results), "test_summary": {"status": status, "warnings": list(summary)}}


def v4(*tests, version="4.6.0"):
    categories = [
        {"category": "Deployment" if t and t["name"] == "software" else "Hardware", "tests": [t]} for t in tests
    ]
    return json.dumps({"DCGM Diagnostic": {"test_categories": categories}, "metadata": {"version": version}})


def v3(deployment, plugins=(), version="3.3.9", **more):
    categories = [
        {"category": "Deployment", "tests": [{"name": n, "results": [r]} for n, r in deployment]},
        {"category": "Hardware", "tests": [{"name": n, "results": r} for n, r in plugins]},
    ]
    return json.dumps({"DCGM GPU Diagnostic": {"test_categories": categories}, "version": version, **more})


def refused(text, root="DCGM Diagnostic"):
    return json.dumps({root: {"runtime_error": text, "version": "4.6.0"}})


def errors(diagnosis):
    return {gpu.entity_id: [(e.test, e.id, e.cls) for e in gpu.errors] for gpu in diagnosis.gpus if gpu.errors}


SOFT = check("software", result(0), result(1))


@pytest.mark.parametrize(
    ("version", "code", "cls", "outcome"),
    [
        ("3.1.3", 30, "MONITOR", "warn"),
        ("3.3.1", 30, "TRIAGE", "fail"),
        ("3.1.8", 6, "MONITOR", "warn"),
        ("3.3.9", 6, "RESET", "fail"),
        ("4.5.3", 80, "ISOLATE", "fail"),
        ("4.6.0", 80, "RESET", "fail"),
        ("3.2.6", 29, "CONFIG", "config"),  # ISOLATE there, counted as what it is
        ("9.9.9", 80, "RESET", "fail"),
    ],
)
def test_the_class_is_that_of_the_version_that_spoke(version, code, cls, outcome):
    # The severity in the document is the number 1, which meant ISOLATE up to 3.2 and MONITOR since 3.3.1.
    diagnosis = parse(v4(check("memory", result(0, "Fail", warning(code, severity=1))), version=version))
    assert (errors(diagnosis), diagnosis.outcome) == ({0: [("memory", code, cls)]}, outcome)


@pytest.mark.parametrize(
    ("severity", "cls", "outcome"),
    [
        *((number, "UNKNOWN", "warn") for number in (None, 0, 3, 99)),
        *((1, "MONITOR", "warn"), (4, "TRIAGE", "fail"), (5, "CONFIG", "config"), ("6", "RESET", "fail")),
    ],
)
def test_a_code_newer_than_our_table_has_the_class_that_its_document_gives(severity, cls, outcome):
    diagnosis = parse(v4(check("memory", result(0, "Fail", warning(4711, severity=severity)))), 226)
    assert (diagnosis.outcome, errors(diagnosis)) == (outcome, {0: [("memory", 4711, cls)]})


def test_in_a_document_of_the_old_form_the_number_of_a_class_says_nothing():
    failed = {"gpu_id": "0", "status": "Fail", "warnings": [warning(4711, severity=2)]}
    assert parse(v3([], [("GPU Memory", [failed])]), 226).outcome == "warn"


def test_a_code_that_nobody_knows_is_hardware_where_dcgm_says_isolate_and_nothing_else_explains_it():
    text = v4(check("memory", result(0, "Fail", warning(4711)), result(1, "Fail", warning(29))))
    assert (parse(text, 205).outcome, parse(text, 226).outcome) == ("fail", "warn")
    explained = v4(check("memory", result(0, "Fail", warning(4711)), result(1, "Fail", warning(24))))
    assert parse(explained, 205).outcome == "warn"


@pytest.mark.parametrize("status", ["Pass", "PASS", "Skip"])
def test_errors_count_whatever_the_status(status):
    diagnosis = parse(v4(SOFT, check("memory", result(0, status, warning(52)), result(1), status="Fail")), 226)
    assert errors(diagnosis) == {0: [("memory", 52, "ISOLATE")]}
    assert diagnosis.outcome == "fail"


def test_every_gpu_pass_and_the_test_fail_is_the_tools_error():
    diagnosis = parse(v4(SOFT, check("pcie", result(0), result(1), status="Fail")), 226)
    assert diagnosis.outcome == "tool-error"
    assert {gpu.outcome for gpu in diagnosis.gpus} == {"tool-error"}


def test_every_gpu_pass_and_the_test_fail_is_what_its_errors_say():
    diagnosis = parse(v4(SOFT, check("pcie", result(0), result(1), status="Fail", summary=[warning(15)])), 205)
    assert (diagnosis.outcome, errors(diagnosis)) == ("fail", {})
    assert [(test.name, [e.id for e in test.errors]) for test in diagnosis.tests if test.errors] == [("pcie", [15])]


def test_a_failure_without_reason_is_a_warning_on_its_gpu_and_on_none_in_software():
    assert errors(parse(v4(SOFT, check("memory", result(0, "Fail"), result(1), status="Fail")), 226)) == {
        0: [("memory", None, "UNKNOWN")]
    }
    diagnosis = parse(v4(check("software", result(0, "Fail"), result(1, "Fail"), status="Fail")), 226)
    assert (diagnosis.outcome, errors(diagnosis)) == ("warn", {})


def test_a_neighbour_that_failed_along_is_neither_blamed_nor_passed():
    diagnosis = parse(v4(SOFT, check("pcie", result(0, "Fail", warning(30)), result(1, "Fail"), status="Fail")), 226)
    assert [(gpu.outcome, len(gpu.errors)) for gpu in diagnosis.gpus] == [("fail", 1), ("not-testable", 0)]


def test_skip_is_not_pass_but_for_tests_that_come_with_other_hardware():
    assert parse(v4(SOFT, check("memory", result(0, "Skip"), result(1)))).outcome == "not-testable"
    assert parse(v4(SOFT, check("eud", result(0, "Skip"), result(1, "Skip"), status="Skip"))).outcome == "pass"


def test_a_gpu_without_a_result_in_a_test_has_not_passed_it():
    diagnosis = parse(v4(SOFT, check("memory", result(0))), 0)
    assert [(gpu.entity_id, gpu.outcome) for gpu in diagnosis.gpus] == [(0, "pass"), (1, "not-testable")]
    assert diagnosis.outcome == "not-testable"


def test_an_error_of_a_cpu_is_no_gpus():
    cpu = {"entity_group": "CPU", "entity_id": 0, "status": "Fail", "warnings": [warning(95, "core 3")]}
    diagnosis = parse(v4(SOFT, {"name": "cpu_eud", "results": [cpu], "test_summary": {"status": "Fail"}}))
    assert [e.message for test in diagnosis.tests for e in test.errors] == ["CPU 0: core 3"]
    assert errors(diagnosis) == {}


def test_an_iteration_that_failed_fails_all():
    good, bad = json.loads(v4(SOFT)), json.loads(v4(check("software", result(0, "Fail", warning(7)), result(1))))
    assert parse(json.dumps({"iterations": [good, bad], "Overall Result": "Fail"})).outcome == "fail"


@pytest.mark.parametrize("before", ["[./x.h][81] key {Foo} is not injected\n", "banner {\n", "", "{}\n", '{"a": 1}'])
def test_text_before_the_document_is_passed_over(before):
    assert parse(before + v4(SOFT) + "\ntrailing }", 0).outcome == "pass"


def test_a_document_of_an_embedded_engine_is_no_pass():
    banner = "Error: unable to establish a connection to the specified host: 127.0.0.1\n"
    assert parse(banner + v4(SOFT), 0).outcome == "tool-error"


@pytest.mark.parametrize("length", [0, 1, 30, 120, 250])
def test_a_truncated_document_is_the_tools_error(length):
    assert parse(v4(SOFT, check("memory", result(0), result(1)))[:length], 0).outcome == "tool-error"


def test_null_entries_are_passed_over():
    text = v4(SOFT).replace('"tests": [', '"tests": [null, ').replace('"results": [', '"results": [null, ')
    assert parse(text, 0).outcome == "pass"
    assert parse('{"DCGM Diagnostic": null}', 0).outcome == "tool-error"
    assert parse('{"DCGM Diagnostic": {"test_categories": null}}', 0).outcome == "tool-error"


def test_numbers_may_be_strings():
    diagnosis = parse(v4(check("memory", result("3", "Fail", warning("52")))))
    assert errors(diagnosis) == {3: [("memory", 52, "ISOLATE")]}


# DCGM 2 and 3


def test_the_checks_of_an_old_level_1_are_one_test_on_all_gpus():
    serials = {"GPU Device Serials": {"0": "11", "1": "12"}}
    diagnosis = parse(v3([("Denylist", {"status": "Pass"}), ("Inforom", {"status": "Skip"})], **serials), 0)
    assert (diagnosis.outcome, diagnosis.level, [t.name for t in diagnosis.tests]) == ("pass", 1, ["software"])
    assert [(gpu.entity_id, gpu.serial, gpu.outcome) for gpu in diagnosis.gpus] == [
        (0, "11", "pass"),
        (1, "12", "pass"),
    ]


def test_an_old_level_1_failure_blames_the_gpu_that_it_names_and_reads_the_odd_key():
    odd = {"warnings": "Persistence mode for GPU 1 is disabled", "error_id": 29, "error_severity": 5}
    failing = {"status": "Fail", "gpu_id": 1, "warnings": [odd]}
    diagnosis = parse(
        v3(
            [("Persistence Mode", failing)],
            [("GPU Memory", [{"gpu_id": "0", "status": "Pass"}, {"gpu_id": "1", "status": "Pass"}])],
        ),
        226,
    )
    assert errors(diagnosis) == {1: [("software", 29, "CONFIG")]}
    assert "GPU 1" in diagnosis.gpus[1].errors[0].message


def test_an_old_level_1_with_several_errors_gives_the_gpu_of_the_last_only():
    both = [{"warnings": f"Persistence mode for GPU {n} is disabled", "error_id": 29} for n in (0, 1)]
    serials = {"GPU Device Serials": {"0": "11", "1": "12", "2": "13"}}
    text = v3([("Persistence Mode", {"status": "Fail", "gpu_id": 1, "warnings": both})], **serials)
    assert errors(parse(text)) == {0: [("software", 29, "CONFIG")], 1: [("software", 29, "CONFIG")]}
    vague = [{"warnings": "no libcuda", "error_id": 22}, both[1]]
    diagnosis = parse(v3([("CUDA Main Library", {"status": "Fail", "gpu_id": 1, "warnings": vague})], **serials))
    assert errors(diagnosis) == {1: [("software", 29, "CONFIG")]}


def test_old_plugins_have_their_gpu_as_a_string_and_names_of_their_own():
    memory = [
        {"gpu_id": "0", "status": "Pass", "info": "x"},
        {"gpu_id": "1", "status": "Fail", "warnings": [warning(52)]},
    ]
    diagnosis = parse(v3([("Denylist", {"status": "Pass"})], [("GPU Memory", memory)]), 205)
    assert errors(diagnosis) == {1: [("memory", 52, "ISOLATE")]}
    assert (diagnosis.outcome, diagnosis.next, diagnosis.dcgm_version) == ("fail", "L3", "3.3.9")


def test_dcgm_2_writes_its_warning_as_bare_text_without_a_number():
    memory = [{"gpu_id": "0", "status": "Fail", "warnings": "GPU 0 has bad memory"}]
    text = v3([("Blacklist", {"status": "Pass"})], [("GPU Memory", memory)], version="2.4.7")
    assert (parse(text, 226).outcome, parse(text, 205).outcome) == ("warn", "fail")
    assert parse(text, 226).gpus[0].errors[0].message == "GPU 0 has bad memory"


def test_an_old_table_names_its_gpus_in_groups():
    rule = "+---------------------------+------------------------------------------------+\n"
    rows = ["|-----  Deployment  --------+------------------------------------------------|"]
    for name, cell in (("Denylist", "Pass"), ("Inforom", "Pass")):
        rows.append(f"| {name:<25} | {cell:<46} |")
    rows.append("+-----  Integration  -------+------------------------------------------------+")
    for name, cell in (("PCIe", "Pass - GPUs: 0, 2   "), ("", "Fail - GPU: 1   "), ("Warning", "Bandwidth too low")):
        rows.append(f"| {name:<25} | {cell:<46} |")
    head = f"| {'Diagnostic':<25} | {'Result':<46} |\n+===========================+====+\n"
    diagnosis = parse("Successfully ran diagnostic for group.\n" + rule + head + "\n".join(rows) + "\n" + rule, 226)
    assert diagnosis.outcome == "warn"
    assert {gpu.entity_id for gpu in diagnosis.gpus} == {0, 1, 2}


def table(*cells):
    head = f"| {'Diagnostic':<25} | {'Result':<46} |\n+===========================+====+\n"
    return head + "".join(f"| {name:<25} | {cell:<46} |\n" for name, cell in cells)


def test_a_table_that_passed_on_all_gpus_is_a_pass_though_it_names_none():
    assert parse(table(("PCIe", "Pass - All"), ("GPU Memory", "Pass - All")), 0).outcome == "pass"
    assert parse(table(("PCIe", "Skip - All")), 0).outcome == "not-testable"


@pytest.mark.parametrize("text", ["GPU 1 is too slow", "too slow", "GPU 7 is too slow"])
def test_a_warning_in_the_old_table_belongs_to_the_gpu_that_failed(text):
    diagnosis = parse(table(("PCIe", "Pass - GPUs: 0, 2"), ("", "Fail - GPU: 1"), ("Warning", text)), 205)
    assert errors(diagnosis) == {1: [("pcie", None, "ISOLATE")]}


def test_a_warning_in_the_old_table_that_fits_no_gpu_stays_with_the_node():
    diagnosis = parse(table(("PCIe", "Fail - GPUs: 1, 2"), ("Warning", "too slow")), 226)
    assert (errors(diagnosis), diagnosis.outcome) == ({}, "warn")


@pytest.mark.parametrize(
    "rows", [[("Error", "GPU 3 has uncorrectable memory errors")], [("PCIe", "Fail - All"), ("Warning", "GPU 3 x")]]
)
def test_the_old_table_may_name_a_gpu_in_the_text_only(rows):
    assert [(gpu, len(found)) for gpu, found in errors(parse(table(*rows), 226)).items()] == [(3, 1)]


def test_what_follows_an_info_row_of_a_table_is_no_part_of_the_warning_before():
    rows = [
        ("PCIe", "Fail - GPU: 0"),
        ("Warning", "GPU 0 is slow, "),
        ("", "really"),
        ("Info", "GPU 1"),
        ("", "is not"),
    ]
    (error,) = parse(table(*rows), 226).gpus[0].errors
    assert error.message == "GPU 0 is slow, really"


def test_pages_of_text_with_braces_may_stand_before_the_document():
    failed = v4(check("memory", result(0, "Fail", warning(52))))
    assert parse("NVML {warns} of {something\n" * 500 + failed, 205).outcome == "fail"


def test_iterations_cut_short_are_no_pass():
    whole = json.dumps({"Overall Result": "Pass", "iterations": [json.loads(v4(SOFT))] * 2})
    assert parse(whole).outcome == "pass"
    assert {parse(whole[:end]).outcome for end in range(len(whole))} == {"tool-error"}


def test_an_exit_code_that_the_document_does_not_explain_is_no_pass():
    assert parse(v4(SOFT), 226).outcome == "tool-error"
    assert parse(v4(SOFT), 203).outcome == "tool-error"
    assert parse(v4(SOFT), 0).outcome == "pass"
    assert parse(v4(SOFT)).outcome == "pass"


@pytest.mark.parametrize(
    ("level", "code", "rung"),
    [
        (1, 52, "L3"),
        (2, 52, "L3"),
        (3, 52, "L4"),
        (4, 52, "RMA"),
        (1, 85, "reset"),
        (4, 125, "reset"),
        (1, 126, "reboot"),
    ],
)
def test_the_next_rung_follows_from_level_and_class(level, code, rung):
    assert parse(v4(check("software", result(0, "Fail", warning(code)))), level=level).next == rung


def test_a_reset_does_not_hide_a_worse_error():
    text = v4(check("software", result(0, "Fail", warning(85), warning(7))))
    assert parse(text, level=1).next == "L3"


def test_the_catalogue_names_and_classes():
    assert catalogue.name(29) == "DCGM_FR_PERSISTENCE_MODE"
    assert catalogue.name(4711) is None
    assert catalogue.name(None) is None
    assert catalogue.dcgm_class(None, None) == "UNKNOWN"
    assert catalogue.number("4.6.0-rc1") == (4, 6, 0)
    assert catalogue.number("") == ()
