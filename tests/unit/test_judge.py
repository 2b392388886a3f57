import pytest

from slurm_gpuhealth.config.settings import Check, Command, Row, Settings, Sources
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.policy.judge import judge, match, worst

ENFORCE = Settings(mode="enforce", policy=(Row("xid:79", "fault", rung="L3"), Row("*", "info")))
GPU3 = Gpu("GPU-3", "0000:5d:00", 3, "165")
XID79 = Finding(1.0, "xid", "79", "fell off the bus", GPU3)


def never(finding, row):
    return 0


def test_the_first_row_that_matches_decides():
    rows = (Row("xid:7?", "warning"), Row("xid:*", "fault"))
    assert match(rows, XID79, never).severity == "warning"
    assert match(rows, replace(XID79, code="48"), never).severity == "fault"
    assert match(rows, replace(XID79, source="nvml"), never) is None


def test_a_row_asks_for_details():
    row = Row("xid:*", "fault", when={"action": ("RESET_GPU", "RESTART_BM"), "old": None})
    assert match((row,), replace(XID79, details={"action": "RESET_GPU"}), never)
    assert not match((row,), replace(XID79, details={"action": "IGNORE"}), never)
    assert not match((row,), XID79, never)


@pytest.mark.parametrize(("seen", "severity"), [(2, "info"), (3, "fault")])
def test_a_row_whose_repetition_is_not_reached_is_passed_over(seen, severity):
    rows = (Row("xid:13", "fault", times=3, window=7 * 86400.0, distinct="user"), Row("xid:13", "info"))
    assert match(rows, replace(XID79, code="13"), lambda finding, row: seen).severity == severity


def test_a_fresh_installation_drains_nothing():
    judged = judge([XID79], replace(ENFORCE, mode="shadow"), never)
    assert [(one.severity, one.mode) for one in judged] == [("fault", "shadow")]


def test_a_source_can_be_in_shadow_or_off_by_itself():
    shadow = replace(ENFORCE, sources=Sources(kernel="shadow"))
    assert judge([XID79], shadow, never)[0].mode == "shadow"
    assert judge([XID79], replace(ENFORCE, sources=Sources(kernel="off")), never) == []


def test_a_site_check_has_its_own_mode_and_shadow_first():
    scratch = Finding(1.0, "site", "scratch", "not mounted", severity="fault")
    assert judge([scratch], ENFORCE, never)[0].mode == "shadow"
    command = Command("scratch", ("/x",), mode="enforce")
    assert judge([scratch], replace(ENFORCE, check=Check(command=(command,))), never)[0].mode == "enforce"


def test_what_is_older_than_the_first_run_is_recorded_and_never_acts():
    judged = judge([replace(XID79, details={"old": True})], ENFORCE, never)
    assert judged[0].mode == "old"


def test_the_deepest_rung_names_the_reason():
    rows = (Row("xid:79", "fault", rung="L3"), Row("nvml:remap-fail", "fault", rung="RMA"))
    remap = Finding(1.0, "nvml", "remap-fail", "", replace(GPU3, index=5))
    named = worst(judge([XID79, remap], replace(ENFORCE, policy=rows), never))
    assert (named.finding.code, named.finding.gpu.index, named.rung) == ("remap-fail", 5, "RMA")
    assert worst([]) is None


def test_an_event_names_the_reason_before_the_condition_that_it_leaves():
    rows = (Row("*", "fault", rung="reset"),)
    pending = Finding(1.0, "nvml", "remap-pend", "", GPU3, standing=True)
    xid48 = Finding(1.5, "xid", "48", "", GPU3)
    assert worst(judge([pending, xid48], replace(ENFORCE, policy=rows), never)).finding.code == "48"
