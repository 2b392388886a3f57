"""The built-in policy, reviewed row by row: what each finding leads to, and that each row is needed."""

import ast
import json
from importlib import resources
from pathlib import Path

import pytest

from slurm_gpuhealth.config.check import built_in
from slurm_gpuhealth.config.settings import Repair, Row, Settings
from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.ladder import climb
from slurm_gpuhealth.ladder.rungs import LADDER, Result
from slurm_gpuhealth.policy import rows, runbook
from slurm_gpuhealth.policy.judge import match
from slurm_gpuhealth.slurm.reason import Reason

ROWS = tuple(Row(**row) for row in built_in())
HARDWARE = {"class": "hardware"}


def decide(key: str, details=None, seen: int = 1) -> Row:
    source, _, code = key.partition(":")
    row = match(ROWS, Finding(0.0, source, code, "", details=details or {}), lambda *_: seen)
    assert row is not None
    return row


def xid(action: str, cls: str = "hardware") -> dict[str, str]:
    return {"action": action, "class": cls}


# finding, details, how often it was seen → severity, rung
# fmt: off
REVIEWED = [
    # Xids by NVIDIA's immediate action. 79 goes to level 3, which says what is left of the node.
    ("xid:79", xid("RESTART_BM"), 1, "fault", "L3"),
    ("xid:48", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:48", xid("WORKFLOW_XID_48"), 1, "fault", "reset"),
    ("xid:64", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:95", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:109", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:119", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:140", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:155", xid("RESET_GPU", "driver"), 1, "fault", "reset"),
    ("xid:61", xid("CONTACT_SUPPORT"), 1, "fault", "L3"),
    ("xid:81", xid("CONTACT_SUPPORT"), 1, "fault", "L3"),
    ("xid:125", xid("CONTACT_SUPPORT"), 1, "fault", "L3"),
    ("xid:56", xid("CONTACT_SUPPORT", "driver"), 1, "warning", ""),
    ("xid:4", xid("CONTACT_SUPPORT", "application"), 1, "info", ""),
    # 154 by its words, 144-150 and 74 by what the decoder makes of them.
    ("xid:154", xid("RESTART_BM", "consequence"), 1, "fault", "reboot"),
    ("xid:154", xid("RESET_GPU", "consequence"), 1, "fault", "reset"),
    ("xid:154", xid("IGNORE", "consequence"), 1, "info", ""),
    ("xid:149", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:149", xid("IGNORE"), 1, "warning", ""),
    ("xid:149", xid("WORKFLOW_NVLINK5_ERR"), 1, "warning", ""),
    ("xid:74", xid("RESET_GPU"), 1, "fault", "reset"),
    ("xid:74", xid("IGNORE"), 1, "warning", ""),
    ("xid:74", xid("WORKFLOW_NVLINK_ERR"), 3, "fault", "L3"),
    # Never, however often and whatever it says.
    ("xid:45", xid("WORKFLOW_XID_45", "consequence"), 9999, "info", ""),
    ("xid:45", xid("RESET_GPU"), 9999, "info", ""),
    ("xid:43", xid("IGNORE", "application"), 9999, "info", ""),
    ("xid:69", xid("RESTART_APP", "application"), 9999, "info", ""),
    ("xid:14", xid("IGNORE", "information"), 9999, "info", ""),
    # The application's, until three users or jobs meet them on one GPU.
    ("xid:13", xid("RESTART_APP", "application"), 2, "info", ""),
    ("xid:13", xid("RESTART_APP", "application"), 3, "fault", "L3"),
    ("xid:31", xid("RESTART_APP", "application"), 2, "info", ""),
    ("xid:31", xid("RESTART_APP", "application"), 3, "fault", "L3"),
    ("xid:32", xid("RESTART_APP"), 2, "warning", ""),
    ("xid:32", xid("RESTART_APP"), 3, "fault", "L3"),
    ("xid:80", xid("RESTART_APP"), 2, "warning", ""),
    ("xid:80", xid("RESTART_APP"), 3, "fault", "L3"),
    ("xid:94", xid("RESTART_APP"), 2, "warning", ""),
    ("xid:94", xid("RESTART_APP"), 3, "fault", "L3"),
    ("xid:54", xid("CHECK_MECHANICALS"), 2, "warning", ""),
    ("xid:54", xid("CHECK_MECHANICALS"), 3, "fault", "L3"),
    # Memory that was repaired, or that NVIDIA says to leave.
    ("xid:63", xid("IGNORE"), 9, "warning", ""),
    ("xid:92", xid("IGNORE"), 9, "warning", ""),
    ("xid:157", xid("IGNORE"), 9, "warning", ""),
    ("xid:171", {"action": None, "class": "hardware"}, 1, "warning", ""),
    ("xid:999", {"action": None, "class": "driver"}, 1, "warning", ""),
    ("xid:151", xid("RESTART_VM", "driver"), 1, "warning", ""),
    # Switches.
    ("sxid:20034", {"fatal": True, "class": "hardware", "action": "RESTART_BM"}, 1, "fault", "reboot"),
    ("sxid:12028", {"fatal": False, "class": "hardware", "action": "IGNORE"}, 99, "warning", ""),
    ("sxid:12028", {"fatal": False, "class": "information", "action": "IGNORE"}, 99, "info", ""),
    ("sxid:20034", {"class": "hardware", "action": "RESTART_BM"}, 99, "info", ""),
    # PCI Express.
    ("aer:fatal", {}, 2, "warning", ""), ("aer:fatal", {}, 3, "fault", "L3"),
    ("aer:uncorrected", {}, 9999, "warning", ""), ("aer:corrected", {}, 9999, "info", ""),
    # The driver without an Xid: only where its words ask for what an Xid would.
    ("nvrm:reboot-required", {}, 1, "fault", "reboot"), ("nvrm:reset-required", {}, 1, "fault", "reset"),
    *((f"nvrm:{code}", {}, 9999, "warning", "") for code in ("gsp-timeout", "init-failed", "lost", "locked-up")),
    ("nvrm:rate-limit", {}, 9999, "info", ""),
    # NVML.
    ("driver:hung", {}, 1, "fault", "reboot"),
    ("driver:not-loaded", {"class": "tool"}, 9, "warning", ""),
    ("nvml:lost", {}, 1, "fault", "L3"), ("nvml:count", {}, 1, "fault", "L3"),
    ("nvml:power", {}, 1, "fault", "L3"), ("nvml:irq", {}, 1, "fault", "reboot"),
    ("nvml:remap-fail", {}, 1, "fault", "RMA"), ("nvml:remap-pend", {}, 1, "fault", "reset"),
    ("nvml:remap-left", {}, 1, "warning", ""),
    ("nvml:recovery", {"action": "reset"}, 1, "fault", "reset"),
    ("nvml:recovery", {"action": "drain-and-reset"}, 1, "fault", "reset"),
    ("nvml:recovery", {"action": "drain-p2p"}, 1, "fault", "reset"),
    ("nvml:recovery", {"action": "reboot"}, 1, "fault", "reboot"),
    ("nvml:recovery", {"action": "imex"}, 99, "warning", ""),
    ("nvml:ecc", {}, 2, "warning", ""), ("nvml:ecc", {}, 3, "fault", "L3"),
    *((f"nvml:{code}", {}, 2, "info", "") for code in ("slowdown", "thermal", "brake")),
    *((f"nvml:{code}", {}, 9999, "warning", "") for code in ("slowdown", "thermal", "brake")),
    *((f"nvml:{code}", {}, 99, "warning", "") for code in (
        "hot", "pcie-width", "pcie-gen", "replay", "nvlink", "ecc-off", "driver", "vbios", "init", "handle")),
    *((f"nvml:{code}", {}, 99, "info", "") for code in ("persist", "mig", "timeout", "probe", "call", "permission")),
    ("job:stalled", {"kind": "spinning"}, 99, "info", ""), ("job:never-started", {"kind": "idle"}, 99, "info", ""),
    ("inventory:fabric-manager", {}, 9, "warning", ""),
    # DCGM, at any level and for any test.
    ("dcgm:memory", {"class": "ISOLATE", "error_id": 58}, 1, "fault", "L3"),
    ("dcgm:software", {"class": "RESET", "error_id": 85}, 1, "fault", "reset"),
    ("dcgm:software", {"class": "ISOLATE", "error_id": 126}, 1, "fault", "reboot"),
    ("dcgm:pcie", {"class": "TRIAGE", "error_id": 30}, 1, "fault", "L3"),
    ("dcgm:diagnostic", {"class": "MONITOR", "error_id": 40}, 9, "warning", ""),
    ("dcgm:nccl_tests", {"class": "UNKNOWN", "error_id": 999}, 9, "warning", ""),
    ("dcgm:software", {"class": "CONFIG", "error_id": 29}, 9, "warning", ""),
    ("dcgm:driver", {}, 9, "warning", ""),
    ("dcgm:pcie", {"class": "TRIAGE", "error_id": 30, "bandwidth": True, "busy": True}, 9, "warning", ""),
    ("dcgm:pcie", {"class": "TRIAGE", "error_id": 30, "bandwidth": True}, 1, "fault", "L3"),
    ("dcgm:untestable", {}, 1, "fault", "L3"),
    ("dcgm:not-testable", {}, 9, "info", ""), ("dcgm:tool-error", {}, 9, "info", ""),
    ("dcgm-health:memory", {"value": "Failure"}, 99, "warning", ""),
    ("dcgm-health:power", {"value": "Warning"}, 99, "info", ""),
    ("dcgm-health:gpus-missing", {}, 99, "warning", ""),
    # InfiniBand: a flap is a warning; nothing that we can do mends a cable.
    ("ib:port-down", {}, 2, "warning", ""), ("ib:port-down", {}, 3, "fault", "repair"),
    ("ib:port-missing", {}, 2, "warning", ""), ("ib:port-missing", {}, 3, "fault", "repair"),
    ("ib:unreadable", {}, 99, "info", ""),
    ("ib:link_downed", {}, 99, "warning", ""), ("ib:rate", {}, 99, "warning", ""),
    ("ib:link-down", {}, 99, "warning", ""), ("ib:link", {}, 99, "info", ""), ("ib:command", {}, 99, "info", ""),
    # The host never drains by default.
    *((f"host:{code}", {}, 9999, "warning", "") for code in ("memory", "read-only", "full", "mount", "unit", "hung")),
    ("host:machine-check", {}, 9999, "warning", ""),
    ("nvrm:peermem", {}, 99, "info", ""),
    ("kernel:unreadable", {}, 9999, "warning", ""), ("kernel:flood", {}, 9999, "info", ""),
    ("kernel:overrun", {}, 9999, "info", ""),
    ("host:oom", {}, 9999, "info", ""), ("host:memory-corrected", {}, 9999, "info", ""),
    ("host:unreadable", {}, 9999, "info", ""),
    # A site's check by its own word.
    ("site:nvme", {"says": "fault"}, 1, "fault", "L3"), ("site:nvme", {"says": "warning"}, 9, "warning", ""),
    ("site:scratch", {"says": "fault", "gpu": False}, 1, "fault", "L1"),
    ("site:nvme", {"says": "info"}, 9, "info", ""), ("site:nvme", {}, 9, "info", ""),
    ("tool:nccl", {"outcome": "wrong"}, 9, "warning", ""), ("gpu:slow", {}, 99, "warning", ""),
    *(("gpu:slow", {"reason": reason}, 99, "warning", "") for reason in ("heat", "power brake", "power cap", "none")),
    ("gpu:slow", {"reason": "application clocks"}, 99, "info", ""),
    ("leftover:process", {}, 9, "warning", ""),
    # What nobody thought of never drains.
    ("new-source:new-code", {"class": "hardware", "action": "RESET_GPU"}, 99, "warning", ""),
]
# fmt: on


GIVEN_BACK, HANDS = "back", ""
# Each fault row: where a pass, and where a failure, of its rung leads. The first finding above that meets it names it.
FOLLOWS = {
    # A GPU that is gone: deeper levels can't see it either, a reboot may bring it back.
    "xid:79": (GIVEN_BACK, "reboot"), "nvml:lost": (GIVEN_BACK, "reboot"), "nvml:count": (GIVEN_BACK, "reboot"),
    # It showed by repetition: fifteen quiet minutes prove little.
    "xid:13": ("L4", "L4"), "xid:31": ("L4", "L4"), "xid:32": ("L4", "L4"), "xid:80": ("L4", "L4"),
    "xid:94": ("L4", "L4"), "aer:fatal": ("L4", "L4"), "nvml:ecc": ("L4", "L4"),
    # The same; and a link is trained anew by a reset, a cable needs hands.
    "xid:74": ("L4", "reset"), "xid:54": ("L4", "repair"), "nvml:power": (GIVEN_BACK, "repair"),
    # NVIDIA suspects hardware and names no cure.
    "xid:61": ("L4", "L4"),
    # DCGM against DCGM.
    "dcgm:memory": ("L4", "L4"), "dcgm:pcie": ("L4", "L4"),
    # Could not be tested before: a pass is all that was missing.
    "dcgm:untestable": (GIVEN_BACK, "L4"),
    # What the source itself says is needed.
    "xid:48": (GIVEN_BACK, "reboot"), "xid:64": (GIVEN_BACK, "reboot"), "nvrm:reset-required": (GIVEN_BACK, "reboot"),
    "nvml:remap-pend": (GIVEN_BACK, "reboot"), "nvml:recovery reset": (GIVEN_BACK, "reboot"),
    "dcgm:software": (GIVEN_BACK, "reboot"),
    "xid:154": (GIVEN_BACK, "repair"), "sxid:20034": (GIVEN_BACK, "repair"),
    "nvrm:reboot-required": (GIVEN_BACK, "repair"),
    "driver:hung": (GIVEN_BACK, "repair"), "nvml:irq": (GIVEN_BACK, "repair"),
    "nvml:recovery reboot": (GIVEN_BACK, "repair"),
    "dcgm:software 126": (GIVEN_BACK, "repair"),
    # A cable, and the end.
    "ib:port-down": (GIVEN_BACK, "RMA"), "ib:port-missing": (GIVEN_BACK, "RMA"),
    "nvml:remap-fail": (HANDS, HANDS),
    # Not of DCGM's world.
    "site:nvme": (GIVEN_BACK, "repair"), "site:scratch": (GIVEN_BACK, "repair"),
}  # fmt: skip


def test_what_follows_each_fault_is_what_the_review_says():
    found = {}
    for key, details, seen, severity, _ in REVIEWED:
        row = decide(key, details, seen)
        if severity == "fault" and id(row) not in {id(one) for one in found.values()}:
            more = details.get("action") if key == "nvml:recovery" else details.get("error_id") == 126 and 126
            found[f"{key} {more}" if more else key] = row
    rungs = {
        name: (row.passed or LADDER[row.rung].passed, row.failed or LADDER[row.rung].failed)
        for name, row in found.items()
    }
    assert rungs == FOLLOWS


def test_a_fault_that_shows_by_repetition_needs_more_than_a_pass_of_level_3():
    assert [row.finding for row in ROWS if row.rung == "L3" and row.times > 1 and row.passed != "L4"] == []


@pytest.mark.parametrize("case", REVIEWED, ids=lambda case: f"{case[0]}x{case[2]}")
def test_each_finding_leads_where_the_review_says(case):
    key, details, seen, severity, rung = case
    row = decide(key, details, seen)
    assert (row.severity, row.rung) == (severity, rung), row


def test_each_row_decides_some_finding_of_the_review():
    used = {id(decide(key, details, seen)) for key, details, seen, _, _ in REVIEWED}
    assert [row for row in ROWS if id(row) not in used] == []


def test_each_row_says_why():
    assert [row.finding for row in ROWS if not row.why] == []


def test_every_fault_enters_the_ladder_somewhere():
    assert [row.finding for row in ROWS if row.severity == "fault" and not row.rung] == []


def test_an_xid_seen_once_drains_only_where_nvidia_asks_for_a_reset_a_reboot_or_support_for_hardware():
    catalogue = json.loads((resources.files("slurm_gpuhealth.xid") / "xids.json").read_text())["xids"]
    entries = catalogue.items() if isinstance(catalogue, dict) else [(one["code"], one) for one in catalogue]
    faults = {
        int(code)
        for code, one in entries
        if decide(f"xid:{code}", xid(one["action"], one["class"])).severity == "fault"
    }
    asked = {
        int(code)
        for code, one in entries
        if one["action"] in ("RESET_GPU", "RESTART_BM", "WORKFLOW_XID_48")
        or (one["action"], one["class"]) == ("CONTACT_SUPPORT", "hardware")
    }
    assert faults == asked
    assert {48, 64, 79, 95, 119} <= faults
    assert not {13, 31, 43, 45, 63, 92, 94} & faults


@pytest.mark.parametrize(("command", "step"), [((), ("manual", "repair")), (("/bin/mend",), ("queue", "repair"))])
def test_what_a_sites_check_still_says_after_level_3_is_for_hands_or_the_sites_program_and_no_gpu_is_returned(
    command, step
):
    row = decide("site:nvme", {"says": "fault"})
    still = climb.Open(row.rung, row.passed, row.failed)
    ours = Reason("nvme", None, "L3", "running")
    after = climb.after(
        ours, "L3", Result("pass"), [still], Settings(repair=Repair(command=command)), row.passed, row.failed
    )
    assert (after.do, after.rung) == step


def test_every_row_of_the_built_in_policy_and_of_the_runbook_can_be_met():
    book = [Row(key, "info", when=one.when) for one in runbook.load() for key in one.finding if key[:8] != "request:"]
    assert list(rows.unmatched([*ROWS, *book], ())) == []


def test_every_detail_that_a_source_gives_can_be_asked_for():
    package = Path(rows.__file__).parents[1]
    files = [
        *package.glob("evidence/*.py"),
        package / "diagnose/model.py",
        *package.glob("node/*.py"),
        *package.glob("measure/*.py"),
    ]
    given = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.keyword) and node.arg == "details":
            keys = [key.value for key in getattr(node.value, "keys", []) if isinstance(key, ast.Constant)]
            given |= {*keys, *(word.arg for word in getattr(node.value, "keywords", []) if word.arg)}
    known = {name for names in rows.DETAILS.values() for name in names}
    assert len(given) > 15
    assert given <= known
    assert set(rows.DETAILS) == set(rows.SOURCES)
