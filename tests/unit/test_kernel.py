"""The kernel log is read once, from a cursor: old lines are not judged again, lost lines are reported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_gpuhealth.evidence import kernel
from slurm_gpuhealth.evidence.kernel import Look, collect, gpu_bridges

BOOT, NOW = "boot-1", 1_700_000_000.0
GONE = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def record(number: int, text: str, prio: int = 4, usec: int | None = None) -> str:
    return f"{prio},{number},{number * 1000 if usec is None else usec},-;{text}\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("".join(record(number, f"boot line {number}") for number in range(10)))
    return path


def append(log: Path, *texts: str, first: int = 10, prio: int = 4) -> None:
    with log.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(record(first + i, text, prio) for i, text in enumerate(texts))


def codes(look: Look) -> list[str]:
    return [finding.key for finding in look.findings]


def test_the_first_look_on_a_node_records_and_judges_nothing(log: Path) -> None:
    append(log, GONE)
    look = collect(str(log), None, BOOT, NOW)
    assert codes(look) == ["xid:79"]
    assert look.findings[0].details["old"] is True
    assert look.cursor is not None
    assert look.cursor[:2] == (BOOT, 10)


def test_a_new_line_is_judged_once(log: Path) -> None:
    first = collect(str(log), None, BOOT, NOW)
    append(log, GONE)
    second = collect(str(log), first.cursor, BOOT, NOW + 60)
    assert (codes(second), second.read, second.overrun) == (["xid:79"], 1, False)
    assert "old" not in second.findings[0].details
    third = collect(str(log), second.cursor, BOOT, NOW + 120)
    assert (third.findings, third.read) == ([], 0)


def test_a_quiet_look_leaves_a_cursor_even_on_an_empty_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("")
    first = collect(str(log), None, BOOT, NOW)
    append(log, GONE, first=0)
    assert codes(collect(str(log), first.cursor, BOOT, NOW + 60)) == ["xid:79"]


def test_a_new_boot_is_read_from_its_start_and_judged(log: Path) -> None:
    cursor = collect(str(log), None, "boot-0", NOW).cursor
    log.write_text(record(0, "hello") + record(1, GONE))
    look = collect(str(log), cursor, BOOT, NOW + 60)
    assert (codes(look), look.overrun) == (["xid:79"], False)
    assert "old" not in look.findings[0].details


def test_the_offset_is_only_a_hint(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[5:]) + record(10, GONE))  # the older half is gone
    look = collect(str(log), cursor, BOOT, NOW + 60)
    assert (codes(look), look.read, look.overrun) == (["xid:79"], 1, False)
    wrong = (BOOT, 9, 10**9, NOW)
    assert codes(collect(str(log), wrong, BOOT, NOW + 60)) == ["xid:79"]


def test_lost_records_are_said(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    log.write_text(record(500, "much later"))
    look = collect(str(log), cursor, BOOT, NOW + 60)
    assert (look.overrun, codes(look)) == (True, ["kernel:overrun"])
    assert look.findings[0].severity == "info"


def test_a_record_that_is_still_being_written_waits_for_the_next_look(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    whole = record(10, GONE)
    with log.open("a") as file:
        file.write(whole[:50])
    look = collect(str(log), cursor, BOOT, NOW + 60)
    assert (look.findings, look.read) == ([], 0)
    with log.open("a") as file:
        file.write(whole[50:])
    assert codes(collect(str(log), look.cursor, BOOT, NOW + 120)) == ["xid:79"]


def test_only_the_kernels_own_facility_counts(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    append(log, GONE, prio=12)
    assert collect(str(log), cursor, BOOT, NOW + 60).findings == []


@pytest.mark.parametrize(
    "text",
    [
        f"NFS: server x path /a/{GONE}",
        f"usb 1-1: Product: \\x0a{GONE}",
        f"usb 1-1: y\n DEVICE=+usb:1-1\n {GONE}",
        "NVRM: Xid 79: a[7]: segfault at 0 ip 0 sp 0 error 4",
    ],
)
def test_users_text_in_other_messages_is_no_event(log: Path, text: str) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    append(log, text)
    assert collect(str(log), cursor, BOOT, NOW + 60).findings == []


def test_bytes_that_are_no_text_break_nothing(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    with log.open("ab") as file:
        file.write(b"\xff\0\n,,,;NVRM: \n4,x,y,-;NVRM: Xid\n" + record(10, "NVRM: Xid (PCI:0000:3b:00): 31, ").encode())
        file.write(b"4,11,1,-;NVRM: Xid (PCI:0000:3b:00): 43, pid=1, name=\xff\xfe\x1b, Ch 8\n")
    assert codes(collect(str(log), cursor, BOOT, NOW + 60)) == ["xid:31", "xid:43"]


def test_an_events_time_lies_between_the_last_look_and_now(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    boot = NOW + 60 - time.monotonic()
    for number, (uptime, wanted) in enumerate(
        [(time.monotonic() - 30, NOW + 30), (1.0, NOW), (time.monotonic() + 900, NOW + 60)], 10
    ):
        line = record(number, GONE, usec=int(uptime * 1e6))
        log.write_text(log.read_text() + line)
        look = collect(str(log), cursor, BOOT, boot + time.monotonic())
        cursor = (*look.cursor[:3], NOW)  # type: ignore[index]
        assert look.findings[0].time == pytest.approx(wanted, abs=2.0)


def test_a_clock_set_back_does_not_put_an_event_into_the_future(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    append(log, GONE)
    assert collect(str(log), cursor, BOOT, NOW - 5000).findings[0].time == NOW - 5000


def test_a_log_that_cannot_be_read_is_a_finding_and_no_fault(tmp_path: Path) -> None:
    cursor = (BOOT, 4, 0, NOW)
    for path in (tmp_path / "missing", tmp_path):
        look = collect(str(path), cursor, BOOT, NOW + 60)
        assert codes(look) == ["kernel:unreadable"]
        assert (look.findings[0].severity, look.cursor) == ("info", cursor)


class Device:
    """Stands in for os.read on /dev/kmsg: records, EPIPE where `None` stands, then EAGAIN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *records: str | None) -> None:
        self.records, self.at = records, 0
        monkeypatch.setattr(kernel.os, "read", self.read)
        monkeypatch.setattr(kernel.os, "lseek", self.seek)

    def read(self, fd: int, size: int) -> bytes:
        if self.at >= len(self.records):
            raise BlockingIOError(errno.EAGAIN, "")
        found = self.records[self.at]
        self.at += 1
        if found is None:
            raise BrokenPipeError(errno.EPIPE, "")
        return found.encode()

    def seek(self, fd: int, offset: int, whence: int) -> int:
        self.at = offset
        return offset


def test_old_records_of_the_device_are_skipped_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, *(record(number, "x") for number in range(3, 9)), record(9, GONE))
    parsed = []
    number = kernel._number
    monkeypatch.setattr(kernel, "_number", lambda line: parsed.append(line) or number(line))
    look = collect("/dev/null", (BOOT, 8, 0, NOW), BOOT, NOW + 60)
    assert (codes(look), look.read, len(parsed)) == (["xid:79"], 1, 3)


def test_numbers_that_the_kernel_left_out_cost_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, record(3, "x"), record(6, "x"), record(8, "x"), record(9, GONE), record(10, "y"))
    look = collect("/dev/null", (BOOT, 8, 0, NOW), BOOT, NOW + 60)
    assert (codes(look), look.read, look.overrun) == (["xid:79"], 2, False)


def test_records_overwritten_while_we_read_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, record(9, "x"), None, record(700, GONE))
    look = collect("/dev/null", (BOOT, 8, 0, NOW), BOOT, NOW + 60)
    assert (sorted(codes(look)), look.cursor[1]) == (["kernel:overrun", "xid:79"], 700)  # type: ignore[index]


def test_old_records_overwritten_while_we_skip_are_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, None, record(5, "x"), record(6, "x"), record(7, GONE))
    look = collect("/dev/null", (BOOT, 6, 0, NOW), BOOT, NOW + 60)
    assert (codes(look), look.overrun) == (["xid:79"], False)


def test_the_real_kernel_log_is_read_once() -> None:
    try:
        first = collect("/dev/kmsg", None, BOOT, NOW)
    except OSError:
        pytest.skip("no /dev/kmsg")
    if first.cursor is None:
        pytest.skip("/dev/kmsg can't be read here")
    try:
        with open("/dev/kmsg", "w") as out:
            out.write(f"<4>{GONE}")
    except OSError:
        pass
    second = collect("/dev/kmsg", first.cursor, BOOT, NOW + 60)
    assert "xid:79" not in codes(second), "root's own line is not the kernel's"
    assert collect("/dev/kmsg", second.cursor, BOOT, NOW + 120).read <= 5


def test_a_quiet_look_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules);"
        "from slurm_gpuhealth.evidence.kernel import collect; collect(sys.argv[2], ('b', 0, 0, 1.0), 'b', 2.0);"
        "print(*(set(sys.modules) - before))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # -I -S: without this installation's own start-up files, which import what they like
    argv = [sys.executable, "-I", "-S", "-c", program, root, os.devnull]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    heavy = {"re", "json", "typing", "dataclasses", "enum", "pathlib", "slurm_gpuhealth.xid"}
    assert not heavy & set(done.stdout.split())


def test_a_flood_is_read_in_a_second_and_counted(log: Path) -> None:
    cursor = collect(str(log), None, BOOT, NOW).cursor
    storm = [f"NVRM: Xid (PCI:0000:3b:00): 45, pid={i}, name=python, Ch {i % 64:08x}" for i in range(100_000)]
    append(log, *storm, GONE)
    begun = time.process_time()
    look = collect(str(log), cursor, BOOT, NOW + 60)
    assert time.process_time() - begun < 1.0
    (finding,) = look.findings
    assert (finding.code, finding.details["with"], look.read) == ("79", "Xid 45 x100000", 100_001)


def test_ports_above_a_gpu_are_found_in_sysfs(tmp_path: Path) -> None:
    gpus = {
        "0000:3b:00.0": "pci0000:3a/0000:3a:01.0/0000:3b:00.0",
        "0000:5d:00.0": "pci0000:50/0000:50:01.0/0000:5c:00.0/0000:5d:00.0",
        "0000:5e:00.0": "pci0000:50/0000:50:01.0/0000:5c:01.0/0000:5e:00.0",
    }
    others = {"0000:3b:00.1": ("0x10de", "0x040300"), "0000:70:00.0": ("0x15b3", "0x020700")}
    devices = tmp_path / "bus/pci/devices"
    devices.mkdir(parents=True)
    for name in (*gpus, *others):
        real = tmp_path / "devices" / gpus.get(name, f"pci0000:70/{name}")
        real.mkdir(parents=True)
        vendor, cls = others.get(name, ("0x10de", "0x030200"))
        (real / "vendor").write_text(vendor + "\n")
        (real / "class").write_text(cls + "\n")
        (devices / name).symlink_to(real)
    assert gpu_bridges(str(tmp_path)) == {
        "0000:3a:01.0": "0000:3b:00",
        "0000:3b:00.0": "0000:3b:00",
        "0000:50:01.0": "",
        "0000:5c:00.0": "0000:5d:00",
        "0000:5d:00.0": "0000:5d:00",
        "0000:5c:01.0": "0000:5e:00",
        "0000:5e:00.0": "0000:5e:00",
    }
    assert gpu_bridges(str(tmp_path / "missing")) == {}
