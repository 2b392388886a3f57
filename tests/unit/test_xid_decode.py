"""Kernel log lines of every form become the right events; hostile text becomes none."""

from __future__ import annotations

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpuhealth.xid.decode import decode
from slurm_gpuhealth.xid.event import KEYS, Event, printed

CORPUS = os.path.join(os.path.dirname(__file__), "../corpus/kernel_lines.jsonl")
KINDS = {"fallen_off_bus_no_xid": "fallen_off_bus", "fabricmanager_log": "sxid", "segfault": None}
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
XID_154 = {"fatal": False, "link": 3, "action": "XID_154_EVAL"}
GONE = """NVRM: The NVIDIA GPU 0000:ec:00.0
NVRM: (PCI ID: 10de:26b5) installed in this system has
NVRM: fallen off the bus and is not responding to commands."""


def samples() -> list[dict]:
    with open(CORPUS, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def one(text: str) -> Event:
    events = list(decode(text.split("\n")))
    assert len(events) == 1, events
    return events[0]


def kind_of(expected: dict) -> str | None:
    kind = expected["kind"]
    if kind.startswith("mlx"):
        return "mlx5"
    return "nvrm" if kind.startswith(("nvrm", "peermem")) else KINDS.get(kind, kind)


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample["id"])
def test_every_sample_reads_as_expected(sample: dict) -> None:
    expected = sample["expected"]
    kind = kind_of(expected)
    if kind is None:
        assert list(decode([sample["line"]])) == []
        return
    event = one(sample["line"])
    seen = {**event.details, **printed(event), "message": event.message, "nvlink": event.link}
    wanted = {key: value for key, value in expected.items() if key in seen and key not in ("kind", "severity", "regs")}
    code = next((expected[key] for key in ("xid", "sxid", "implied_xid") if key in expected), None)
    assert (event.kind, event.code) == (kind, code)
    assert {key: seen[key] for key in wanted if key != "first"} == {k: v for k, v in wanted.items() if k != "first"}
    rules = expected.get("decode_v1", []) + expected.get("decode_v2", [])
    if rules:
        assert [event.action] == [rule["action"] for rule in rules]


def test_all_samples_in_one_file_keep_their_line_numbers() -> None:
    lines, starts = [], []
    for sample in samples():
        if kind_of(sample["expected"]):
            starts.append(len(lines) + 1)
        lines += sample["line"].split("\n")
    assert [event.line for event in decode(lines)] == starts


@pytest.mark.parametrize(
    "stamp",
    [
        "",
        "[ 1843.308145] ",
        "[1843.308145] [ T1946] ",
        "[    5.1 <    0.000316>] ".replace("5.1", "5.100000"),
        "[  +0.000316] ",
        "[Fri Aug 30 11:43:09 2024] ",
        "[ven. août 30 11:43:09 2024] ",
        "[Aug30 11:43] ",
        "2025-01-21T04:41:44,283302+09:00 ",
        "kern  :warn  : 2025-01-21T04:41:44,283302+09:00 ",
        "kern  :warn  : [ 1843.308145] ",
        "<4>[ 1843.308145] ",
        "Nov 29 11:28:11 node39 kernel: ",
        "Nov 29 11:28:11.123456 node39 kernel: ",
        "jan. 29 20:50:17 node31 kernel: ",
        "févr. 01 20:50:17 node31 kernel: ",
        " 1月 29 20:50:17 node31 kernel: ",
        "29 janv. 20:50:17 node31 kernel: ",
        "april 19 09:27:03 node49 kernel: [ 1412.890184] ",
        "2026-10-05T08:08:16-02:00 spark kernel: ",
        "2026-10-05T08:08:16+0000 spark kernel: ",
        "2026-10-05 08:08:16 spark kernel: ",
        "Fri 2024-08-30 11:11:22 UTC node1 kernel: ",
        "1725012345.123456 node1 kernel: ",
        "[12345.678901] node1 kernel: ",
        "kernel: ",
        "4,2310,1843308145,-;",
        "4,2310,1843308145,-,caller=T1946;",
        "\x1b[32m[ 1843.308145] \x1b[0m\x1b[33m",
        "\ufeff[ 1843.308145] ",
        "<4>1 2025-01-25T10:34:54.859532+00:00 node1 kernel - - - ",
        '<4>1 2025-01-25T10:34:54.859532Z node1 kernel - - [meta sequenceId="1"] [ 1843.308145] ',
        "Aug 30 11:43:09 node1 kernel: <4>[ 1843.308145] ",
        "10.0.0.5: kern: warning: [2026-04-22T21:27:51.291660856Z]: ",
    ],
)
def test_the_same_line_is_read_behind_every_stamp(stamp: str) -> None:
    event = one(stamp + XID)
    assert (event.code, event.pci, event.pid, event.process) == (79, "0000:3b:00", 1234, "python3")


def test_a_journals_json_is_read_where_the_kernel_wrote_it() -> None:
    record = {"_TRANSPORT": "kernel", "MESSAGE": XID, "PRIORITY": "4"}
    assert one(json.dumps(record)).code == 79
    assert one(json.dumps({**record, "MESSAGE": GONE})).pci == "0000:ec:00"
    for other in ({"_TRANSPORT": "syslog"}, {"MESSAGE": [78, 86]}, {"MESSAGE": None}, {"MESSAGE": f"x\n{XID}"}):
        assert list(decode([json.dumps({**record, **other})])) == []
    assert list(decode(['{"MESSAGE":', "{" * 9999, XID[:0]])) == []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("NVRM: Xid (0000:03:00): 13, 0001 00000000", {"code": 13, "pci": "0000:03:00"}),
        ("NVRM: Xid (PCI:0000:3B:00.0): 43, Ch 1", {"pci": "0000:3b:00"}),
        ("NVRM: Xid (PCI:00000009:37:00): 43, Ch 1", {"pci": "0009:37:00"}),
        ("NVRM: Xid (PCI:0000:xx:00): 31, Ch 1", {"code": 31, "pci": None}),
        ("NVRM: Xid (PCI:...): 31, Ch 1", {"code": 31, "pci": None}),
        ("NVRM: Xid: 62, Internal micro-controller halt.", {"code": 62, "pci": None}),
        ("NVRM: Xid (PCI:0:b9:00): 145, RLW, nonfatal, injected=0, Link 3 (0x00000004 0x00000001)", XID_154),
        ("NVRM: Xid 171: GDDR, Uncorrectable DRAM error", {"code": 171, "pci": None}),
        ("NVRM: Xid (PCI:0000:01:00): 79, ", {"code": 79, "message": ""}),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE", {"mig": 5, "pid": 7194, "process": None}),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:02 GPU-CI:00): 13, pid=9, name=a, Graphics x", {"mig": 2, "process": "a"}),
        ("NVRM: Xid (PCI:0000:01:00): 45, pid=7, name=a b, Ch 8 caused by previous Xid 31", {"previous": 31}),
        ("NVRM: Xid (PCI:0000:01:00): 43, pid='<unknown>', name=<unknown>, Ch 8", {"pid": None, "process": None}),
        ("NVRM: Xid (PCI:0000:01:00): 13, pid=7, name=a, b, Graphics Exception: ESR", {"process": "a, b"}),
        ("NVRM: Xid (PCI:0000:01:00): 43, pid=7, name=x, name='q\", Ch 00000008", {"process": "x, name='q\""}),
        ("NVRM: Xid (PCI:0000:01:00): 43, pid=7, name=pid=9, name=z, Ch 1", {"pid": 7, "process": "pid=9, name=z"}),
        ("NVRM: Xid (PCI:0000:01:00): 43, pid=7, name=x[1]: y, Ch 1", {"code": 43, "process": "x[1]: y"}),
        ("NVRM: Xid (PCI:0000:01:00): 9999, something new", {"code": 9999, "action": None}),
        ("nvidia 0000:3b:00.0: AER: can't recover (no error_detected callback)", {"kind": "aer"}),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            {"fatal": True, "link": 30},
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 20034, Non-fatal, Link 30 x",
            {"fatal": False, "action": "IGNORE"},
        ),
        (
            "NVRM: GPU 0000:41:00.0: RmInitAdapter failed! (0x62:0x40:2404)",
            {"word": "init-failed", "pci": "0000:41:00"},
        ),
        (
            "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:61:00 (printing 1 of every 30).",
            {"word": "rate-limit", "pci": "0000:61:00"},
        ),
        (
            "NVRM: Xid (PCI:...): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 11 (...)",
            {"pci": None, "fatal": False, "link": 11},
        ),
        ("NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Fatal XC0 i0", {"fatal": True, "link": None, "action": "RESET_GPU"}),
        ("pcieport 0000:00:01.0: DPC: ERR_FATAL detected", {"kind": "aer", "fatal": True}),
        ("pcieport 0000:00:01.0: DPC: containment event, status:0x1f05, ERR_FATAL received from 0", {"fatal": True}),
        ("pcieport 0000:00:01.0: DPC: RP PIO error detected", {"kind": "aer", "word": "uncorrected"}),
        ("pcieport 0000:00:02.0: broadcast error_detected message", {"kind": "aer", "word": "detail"}),
        ("pcieport 0000:00:02.0: Root Port link has been reset", {"kind": "aer", "word": "detail"}),
        ("nvidia 0000:3b:00.0: aer_status: 0x00100000, aer_mask: 0x00000000", {"kind": "aer", "word": "detail"}),
        ("mlx5_core 0000:9c:00.1 ens1f1: TX timeout detected", {"kind": "mlx5", "word": "other"}),
        ("mlx5_core 0000:9c:00.1 ens1f1: Link down", {"kind": "mlx5", "word": "link-down", "pci": "0000:9c:00.1"}),
    ],
)
def test_forms_of_the_drivers(line: str, wanted: dict) -> None:
    event = one(line)
    assert {key: getattr(event, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    "line",
    [
        "[ 1.0] NFS: server 10.0.0.1 path /x/NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "[ 1.0] NVRM: Xid (PCI:[4711]: segfault at 0 ip 00007f sp 00007f error 4 in x",
        "[ 1.0] NVRM: Xid 79: a[4711]: segfault at 0 ip 00007f sp 00007f error 4 in x",
        "[ 1.0] NVRM: Xid 79: page allocation failure: order:4",
        "4,5,6,-;NVRM: Xid 79: a invoked oom-killer: gfp_mask=0xcc0",
        "4,5,6,-;NVRM: Xid 79, GPU has fallen off the bus",
        "[ 1.0] a 00:00.0: AER: page allocation failure: order:4",
        "12,5,6,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "user  :warn  : [ 1.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "<12>[ 1.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "Nov 29 11:28:11 node39 job[12]: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "Nov 29 11:28:11 node39 job: kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "2026-10-05T08:08:16-02:00 n job[1]: kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "[ 1.0] NFS: x\n        NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "4,5,6,-;NFS: a\\x0aNVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "4,5,6,-;usb 1-1: x\n SUBSYSTEM=usb\n NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        *(
            f"{stamp}{name}{says}"
            for stamp in ("[ 1.0] ", "Nov 29 11:28:11 n1 kernel: ", "4,5,6,-;")
            for name in ("NVRM: Xid 79, x", "NVRM: Xid: 79, ", "NVRM: Xid (79):", "NVRM: Xid 79")
            for says in (" uses obsolete (PF_INET,SOCK_PACKET)", " is deprecated, please use x", ": any words", "/7: 8")
        ),
        "NVRM: Xid 79, x uses obsolete (PF_INET,SOCK_PACKET)",
        "[ 1.0] NVRM: Xid (PCI: (12): 79, x",
        "[ 1.0] a 0000:3b:00: [12] general protection fault",
        "[ 1.0] nv_peer_mem: page allocation failure: order:4",
        "[ 1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.95.05",
        "[ 1.0] NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
        "[ 1.0] pcieport 0000:00:1c.0: AER: enabled with IRQ 122",
        "[ 1.0] pcieport 0000:00:1c.0: DPC: enabled with IRQ 122",
        "[ 1.0] pcieport 0000:00:1c.0: DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+ SwTrigger+",
        "[ 1.0] mlx5_core 0000:9c:00.0: firmware version: 20.26.4012",
    ],
)
def test_text_that_only_looks_like_an_event_is_none(line: str) -> None:
    assert list(decode(line.split("\n"))) == []


@pytest.mark.parametrize("name", ["NVRM: kgspabcde", "NVRM: kgsp:", "NVRM: rm_init"])
def test_a_tasks_name_is_no_trouble_of_the_driver(name: str) -> None:
    assert [event.word for event in decode([f"[ 1.0] {name}: something that the kernel says"])] == ["other"]


@pytest.mark.parametrize(
    "text",
    [
        "[ 1.0] NVRM: The NVIDIA GPU 0000:ec:00.0\n        NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "        NVRM: fallen off the bus and is not responding to commands.",
        "[ 1.0] NVRM: The NVIDIA GPU 0000:ec:00.0\n[ 1.0] NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "[ 1.0] NVRM: fallen off the bus and is not responding to commands.",
        "3,9,12,-;NVRM: The NVIDIA GPU 0000:ec:00.0\\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has\\x0a"
        "NVRM: fallen off the bus and is not responding to commands.",
        "Nov 29 11:28:11 n kernel: NVRM: The NVIDIA GPU 0000:ec:00.0#012NVRM: (PCI ID: 10de:26b5) installed in this "
        "system has#012NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: GPU 0000:ec:00.0: GPU has fallen off the bus.",
    ],
)
def test_a_gpu_that_fell_off_the_bus_without_an_xid_counts_as_79_in_every_form(text: str) -> None:
    event = one(text)
    assert (event.line, event.kind, event.code, event.pci) == (1, "fallen_off_bus", 79, "0000:ec:00")
    assert event.action == "RESTART_BM"


def test_lines_between_the_three_do_not_part_them() -> None:
    events = list(
        decode(
            [
                "NVRM: The NVIDIA GPU 0000:ec:00.0",
                "NVRM: Xid (PCI:0000:3b:00): 43, Ch 8",
                "NVRM: (PCI ID: 10de:26b5) installed in this system has",
                "NVRM: fallen off the bus and is not responding to commands.",
            ]
        )
    )
    assert [(event.line, event.code, event.pci) for event in events] == [(1, 79, "0000:ec:00"), (2, 43, "0000:3b:00")]


def test_an_sxid_with_its_data_lines_is_one_event_and_a_data_line_alone_is_too() -> None:
    head = "nvidia-nvswitch1: SXid (PCI:0000:3e:00.0): 20034, "
    lines = ["Fatal, Link 48 LTSSM Fault Up", "Severity 1 Engine instance 48 Sub-engine instance 00", "Data {0x1, 0x2}"]
    assert one("\n".join(head + line for line in lines)).fatal is True
    alone = one(head + lines[2])
    assert (alone.kind, alone.code, alone.fatal) == ("sxid", 20034, None)
    twice = list(decode([head + lines[0], head + lines[1], head + lines[0], head + lines[1]]))
    assert [event.line for event in twice] == [1, 3]


def test_the_lines_of_one_pcie_error_are_one_event() -> None:
    text = """[1.0] pcieport 0000:00:03.1: AER: Uncorrected (Fatal) error received: 0000:3b:00.0
[1.0] nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)
[1.0] nvidia 0000:3b:00.0:   device [10de:2330] error status/mask=00000020/00000000
[1.0] nvidia 0000:3b:00.0:    [ 5] Surprise Down Error    (First)
[1.0] nvidia 0000:3b:00.0: AER:   TLP Header: 40000001 0000000f"""
    event = one(text)
    assert (event.line, event.pci, event.fatal) == (1, "0000:00:03.1", True)
    assert event.details["source"] == "0000:3b:00.0"
    assert event.details["status"] == "00000020"
    assert "Surprise Down" in event.meaning
    assert [e.line for e in decode((text + "\n" + text).split("\n"))] == [1, 6]


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ("0x0 (None) to 0x1 (GPU Reset Required)", "RESET_GPU"),
        ("0x0 (None) to 0x1 (PF FLR)", "RESET_GPU"),
        ("0x0 (None) to 0x2 (Node Reboot Required)", "RESTART_BM"),
        ("0x0 (None) to 0x2 (OS Reboot)", "RESTART_BM"),
        ("0x0 (None) to 0x3 (Drain P2P)", "DRAIN_P2P"),
        ("0x0 (None) to 0x1 (Drain and Reset)", "RESET_GPU"),
        ("0x2 (Node Reboot Required) to 0x0 (None)", "IGNORE"),
        ("0x0 (None) to 0x9 (Something New)", "XID_154"),
    ],
)
def test_154_is_read_by_its_words_not_its_numbers(words: str, action: str) -> None:
    event = one(f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {words}")
    assert (event.cls, event.action) == ("consequence", action)


@pytest.mark.parametrize(
    ("code", "message", "cls", "action"),
    [
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x0)", "hardware", "IGNORE"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x016415c6 0x00000000 0x0)", "driver", "RESET_GPU"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x004505c6, 0x00000000)", "hardware", "RESET_GPU"),
        (149, "NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x0)", "hardware", "RESET_GPU"),
        (144, "SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x0)", "hardware", "IGNORE"),
        (144, "SAW_MVB Fatal XC0 i0 Link 0 (0x00000021 0x00000002 0x0)", "hardware", "RESET_GPU"),
        (145, "RLW_CTRL Nonfatal XC0 i0 Link 0 (0x00000062 0x80000000 0x0)", "driver", "IGNORE"),
        (145, "RLW_REMAP Fatal XC0 i0 Link 02", "hardware", "RESET_GPU"),
        (145, "RLW_REMAP Nonfatal XC0 i0 Link 02", "hardware", "WORKFLOW_NVLINK5_ERR"),
        (145, "RLW_NEW Fatal XC0 i0 Link 02 (0x0fffffff 0x12345678)", "hardware", "CONTACT_SUPPORT"),
        (145, "RLW_NEW Nonfatal XC0 i0 Link 02 (0x0fffffff 0x12345678)", "driver", "CONTACT_SUPPORT"),
        (74, "NVLink: fatal error detected on link 1(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)", "hardware", "RESET_GPU"),
        (74, "NVLink: fatal error detected on link 1(0x100000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "hardware", "IGNORE"),
        (74, "NVLink: error on link 1", "hardware", "WORKFLOW_NVLINK_ERR"),
    ],
)
def test_nvlink_errors_are_read_by_their_registers(code: int, message: str, cls: str, action: str) -> None:
    event = one(f"NVRM: Xid (PCI:0000:3b:00): {code}, {message}")
    assert (event.cls, event.action) == (cls, action)
    assert event.link is not None


def test_classes_follow_the_known_cause() -> None:
    wanted = {13: "application", 31: "application", 45: "consequence", 39: "application", 38: "driver", 48: "hardware"}
    for code, cls in {**wanted, 63: "hardware", 79: "hardware", 106: "information", 119: "hardware"}.items():
        assert one(f"NVRM: Xid (PCI:0000:3b:00): {code}, x").cls == cls, code


def test_printed_keys_are_stable() -> None:
    assert tuple(printed(one(XID))) == KEYS
    assert KEYS[-3:] == ("class", "action", "meaning")


@given(
    st.lists(st.one_of(st.text(), st.sampled_from(samples()).map(lambda s: s["line"][::-1]), st.just(XID)), max_size=8)
)
def test_no_text_breaks_the_decoder(lines: list[str]) -> None:
    for event in decode(lines):
        assert 1 <= event.line <= len(lines)


@pytest.mark.parametrize("stamp", ["[ 1.0] ", "4,1,1,-;", "a " * 4])
@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=" + "a, " * 20000,
        "NVRM: Xid (PCI:0000:3b:00): 149, " + "A " * 20000,
        "NVRM: Xid (PCI:0000:3b:00): 154, " + "(" * 20000,
        "NVRM: " + "0000:" * 20000,
        "pcieport 0000:3b:00.0:    [12] " + " " * 20000 + "x",
        "mlx5_core 0000:3b:00.0: " + "command " * 10000,
        "[" * 20000,
        "nv-fabricmanager: " + "[a] " * 10000,
        "NVRM: Xid (PCI:0000:3b:00): 31, " + "ENGINE x faulted @ 1" * 5000,
    ],
)
def test_a_long_hostile_line_costs_no_time(stamp: str, text: str) -> None:
    begun = time.process_time()
    list(decode([stamp + text]))
    assert time.process_time() - begun < 0.5
