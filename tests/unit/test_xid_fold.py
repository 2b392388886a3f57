"""Events of one check are folded into the findings that an admin should see."""

from __future__ import annotations

import pytest

from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.xid.decode import decode
from slurm_gpuhealth.xid.fold import LIMIT, fold

BRIDGES = {"0000:3b:00.0": "0000:3b:00", "0000:3a:01.0": "0000:3b:00", "0000:00:01.0": ""}


def folded(*lines: str) -> list[Finding]:
    return fold(decode(lines), lambda uptime: 1000.0 + (uptime or 0), lambda: BRIDGES)


def xid(code: int, message: str = "x", pci: str = "0000:3b:00", who: str = "") -> str:
    return f"NVRM: Xid (PCI:{pci}): {code}, {who}{message}"


def keys(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.key, finding.severity) for finding in findings]


def test_a_storm_of_45_is_one_finding_for_information() -> None:
    (finding,) = folded(*[xid(45, f"Ch {i:08x}", who=f"pid={i}, name=a, ") for i in range(5000)])
    assert (finding.key, finding.severity, finding.count) == ("xid:45", "info", 5000)
    assert finding.gpu is not None
    assert finding.gpu.pci == "0000:3b:00"


@pytest.mark.parametrize("cause", [13, 31, 43, 94])
def test_45_is_part_of_what_came_before_it(cause: int) -> None:
    (finding,) = folded(xid(45), xid(cause), xid(45), xid(45))
    assert finding.code == str(cause)
    assert finding.details["with"] == "Xid 45 x3"
    assert finding.severity != "fault"


def test_45_of_another_gpu_is_not_folded() -> None:
    assert len(folded(xid(31), xid(45, pci="0000:5d:00"))) == 2


def test_one_lost_gpu_is_one_finding_whatever_was_printed() -> None:
    (finding,) = folded(
        "[ 7.5] " + xid(79, "GPU has fallen off the bus."),
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:3b:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
        xid(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"),
        xid(119, "Timeout waiting for RPC from GSP!"),
        "NVRM: GPU0 _kgspIsHeartbeatTimedOut: Heartbeat timed out",
        "pcieport 0000:3a:01.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
    )
    assert (finding.key, finding.severity, finding.count, finding.time) == ("xid:79", "fault", 3, 1007.5)
    assert finding.details["action"] == "RESTART_BM"
    assert "0000:3b:00" in finding.message


def test_48_takes_its_row_remapping_along() -> None:
    (finding,) = folded(xid(48), xid(63), xid(171))
    assert (finding.code, finding.severity, finding.details["remap"]) == ("48", "fault", "recorded")
    (failed,) = folded(xid(64), xid(48))
    assert failed.details["remap"] == "failed"
    (alone,) = folded(xid(48))
    assert (alone.severity, "remap" in alone.details) == ("fault", False)


@pytest.mark.parametrize(
    ("code", "severity"), [(63, "warning"), (64, "fault"), (94, "warning"), (95, "fault"), (92, "warning")]
)
def test_memory_errors_by_whether_the_gpu_can_go_on(code: int, severity: str) -> None:
    assert keys(folded(xid(code))) == [(f"xid:{code}", severity)]


@pytest.mark.parametrize(
    ("code", "severity"),
    [(13, "info"), (31, "info"), (43, "info"), (8, "info"), (109, "fault"), (119, "fault"), (78, "info")],
)
def test_severity_is_nvidias_action(code: int, severity: str) -> None:
    assert keys(folded(xid(code))) == [(f"xid:{code}", severity)]


def test_154_that_asks_for_more_than_its_cause_stands_by_itself() -> None:
    reset = xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    assert keys(folded(xid(31), reset)) == [("xid:31", "info"), ("xid:154", "fault")]
    assert keys(folded(xid(119), reset)) == [("xid:119", "fault")]


def test_154_back_to_none_is_no_fault() -> None:
    lines = [
        f"GPU recovery action changed from {a}"
        for a in ("0x0 (None) to 0x1 (GPU Reset Required)", "0x1 (x) to 0x0 (None)")
    ]
    assert keys(folded(*[xid(154, line) for line in lines])) == [("xid:154", "info")]


def test_154_says_what_an_nvlink_5_error_needs() -> None:
    link = xid(145, "RLW_REMAP Nonfatal XC0 i0 Link 02 (0x00000004 0x00000001)")
    reset = xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    assert [finding.details["action"] for finding in folded(link)] == ["RESTART_APP"]
    assert ("fault", "RESET_GPU") in [(finding.severity, finding.details["action"]) for finding in folded(link, reset)]


def test_a_fatal_sxid_is_told_with_the_74_at_its_gpu() -> None:
    switch = "nvidia-nvswitch1: SXid (PCI:0000:c6:00.0): 20034, Fatal, Link 48 LTSSM Fault Up"
    link = xid(74, "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)")
    (finding,) = folded(switch, link)
    assert (finding.code, finding.details["with"], finding.details["link"]) == ("74", "SXid 20034", 14)
    assert keys(folded(switch)) == [("sxid:20034", "fault")]


def test_a_fatal_sxid_is_not_hidden_by_a_74_that_condemns_nothing_nor_by_one_when_it_is_on_no_link() -> None:
    switch = "nvidia-nvswitch1: SXid (PCI:0000:c6:00.0): 20034, Fatal, Link {} LTSSM Fault Up"
    others_fault = xid(74, "NVLink: fatal error detected on link 14(0x100000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)")
    assert ("sxid:20034", "fault") in keys(folded(others_fault, switch.format(48)))
    fatal = xid(74, "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)")
    assert ("sxid:20034", "fault") in keys(folded(fatal, switch.format(-1)))


def test_a_lone_sxid_data_line_condemns_nothing() -> None:
    assert keys(folded("nvidia-nvswitch1: SXid (PCI:0000:c6:00.0): 20034, Data {0x1}")) == [("sxid:20034", "info")]


def test_the_same_link_three_times_is_the_hardwares() -> None:
    line = xid(74, "NVLink: fatal error detected on link 14(0x400000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)")
    assert folded(line)[0].details["investigate"] == "INVESTIGATE_LINK_SI"
    assert folded(line, line, line)[0].details["investigate"] == "CONTACT_SUPPORT"


def test_pcie_errors_count_only_on_a_gpu_or_above_it() -> None:
    fatal = "pcieport {}: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)"
    (finding,) = folded(fatal.format("0000:3a:01.0"))
    assert (finding.key, finding.severity, finding.gpu.pci) == ("aer:fatal", "fault", "0000:3b:00")  # type: ignore[union-attr]
    assert folded(fatal.format("0000:10:01.0")) == []
    shared = folded(fatal.format("0000:00:01.0"))
    assert [(one.gpu, one.details["port"]) for one in shared] == [(None, "0000:00:01.0")]


def test_the_bridges_are_looked_up_only_for_pcie_errors() -> None:
    assert len(fold(decode([xid(79)]), lambda uptime: 0.0, lambda: pytest.fail("asked"))) == 1


def test_adapter_lines_of_one_fault_are_one_finding() -> None:
    lines = [
        "assert_var[0] 0x1",
        "assert_exit_ptr 0x2",
        "synd 0x7: irisc not responding",
        "device's health compromised",
    ]
    (finding,) = folded(*[f"mlx5_core 0000:b6:00.0: {line}" for line in lines])
    assert (finding.key, finding.severity, finding.count, finding.gpu) == ("ib:health", "warning", 4, None)


def test_gsp_words_belong_to_119() -> None:
    rate = "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:3b:00 (printing 1 of every 30)."
    (finding,) = folded(xid(119), rate, "NVRM: GPU6 _kgspIsHeartbeatTimedOut: Heartbeat timed out")
    assert finding.code == "119"
    assert keys(folded(rate)) == [("nvrm:rate-limit", "info")]


def test_unknown_driver_words_make_no_finding() -> None:
    assert folded("NVRM: something never heard of") == []


def test_repeats_keep_their_sms() -> None:
    lines = [xid(13, f"Graphics SM Warp Exception on (GPC {g}, TPC 1, SM 0): x") for g in (1, 2, 1)]
    (finding,) = folded(*lines)
    assert (finding.details["gpc"], finding.details["tpc"], finding.details["units"]) == (1, 1, "1/1 2/1")


def test_hostile_names_are_harmless_in_findings() -> None:
    (finding,) = folded(xid(31, "Ch 8", who="pid=1, name=\x1b[2J\u202e\x07, "))
    assert finding.details["process"] == "?[2J??"
    assert finding.message.isprintable()


def test_a_flood_of_kinds_is_cut_and_said_but_the_worst_stay() -> None:
    lines = [xid(13, pci=f"0000:{bus:02x}:{device:02x}") for bus in range(256) for device in (0, 1)]
    findings = folded(*lines, xid(79))
    assert len(findings) == LIMIT + 1
    assert findings[-1].code == "flood"
    assert "79" in [finding.code for finding in findings]


def test_machine_checks_are_one_warning_about_the_host():
    lines = [
        "mce: [Hardware Error]: Machine check events logged",
        "mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7",
    ]
    (finding,) = fold(decode(lines), lambda uptime: 5.0, dict)
    assert (finding.key, finding.severity, finding.count, finding.gpu) == ("host:machine-check", "warning", 2, None)
