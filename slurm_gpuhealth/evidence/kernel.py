"""Evidence from the kernel log: reads the records after a cursor once, as findings.

/dev/kmsg gives one record per read(2): `prio,seq,usec,flags;text` (Documentation/ABI/testing/dev-kmsg). Only records of
the kernel's own facility count; what root or a container writes there has another facility. A regular file with the
same records is read in the same way. Old records are not parsed, and only a suspicious line imports the decoder.
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.frozen import frozen, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_gpuhealth.xid.event import Event

    Cursor = tuple[str, int, int, float]
    """Boot id; number of the last record read, -1: none; its offset in a regular file; time of the reading."""

RECORD = 16384
"""Bytes: more than the longest record (CONSOLE_EXT_LOG_MAX, 8192)."""
FLOOD = 1000
"""So many Xids of one number on one GPU are read at once; of more, only the count and the last one are used."""
SUSPICIOUS = (
    b"NVRM: ", b"nvswitch", b"PCIe Bus", b"AER", b" error status/mask", b": DPC", b"mlx5", b"mlx4", b"peer", b"mce: [",
)  # fmt: skip


@frozen
class Look:
    findings: list[Finding]
    cursor: Cursor | None
    """For the next call; kept in the same transaction as the findings."""
    overrun: bool
    """Records were lost before they could be read."""
    read: int
    """New records."""


class Tail:
    """How far a log was read; updated during the reading."""

    def __init__(self, last: int, offset: int, history: bool) -> None:
        self.last, self.offset, self.history = last, offset, history
        self.lost, self.new = False, 0

    def see(self, number: int, oldest: bool) -> bool:
        """Whether the record is new. `oldest`: it is the first record that is left in the log."""
        if number <= self.last:
            return False
        self.lost = self.lost or (oldest and number > self.last + 1 and not self.history)
        self.last = number
        self.new += 1
        return True


def collect(path: str, cursor: Cursor | None, boot_id: str, now: float, sys_root: str = "/sys") -> Look:
    """The findings of every record after `cursor`, and the cursor for the next look.

    Without a cursor, at a node's first look, everything is history: recorded with `old` in its details, never acted on.
    After a reboot (`boot_id`) everything of the new boot is read. Raises nothing: an unreadable log is a finding.
    """
    last, offset, seen = (-1, 0, 0.0) if cursor is None else cursor[1:]
    tail = Tail(last, offset, cursor is None) if cursor and cursor[0] == boot_id else Tail(-1, 0, cursor is None)
    try:
        records = _suspicious(path, tail)
        first = next(records, None)  # nearly always None: then nothing more is imported
        findings = [] if first is None else _findings(first, records, seen, now, sys_root)
    except OSError as error:
        message = f"Kernel log {path} can't be read: {error.strerror}. Xid errors go unseen. Run as root; see kmsg(4)."
        return Look([Finding(now, "kernel", "unreadable", message, standing=True)], cursor, False, 0)
    if tail.lost:
        message = (
            f"Kernel log {path} was overrun: records were lost before they could be read, perhaps also Xid errors."
        )
        findings.append(Finding(now, "kernel", "overrun", message))
    if tail.history:
        findings = [replace(one, details={**one.details, "old": True}) for one in findings]
    return Look(findings, (boot_id, tail.last, tail.offset, now), tail.lost, tail.new)


def _suspicious(path: str, tail: Tail) -> Iterator[bytes]:
    """New records of the kernel that may concern us; updates `tail` to the end of the log."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        regular = os.fstat(fd).st_mode & 0o170000 == 0o100000
        for record in _from_file(fd, tail) if regular else _from_device(fd, tail):
            if record[1:2] == b"," and record[:1] < b"8":  # priority below 8: facility 0, the kernel
                for word in SUSPICIOUS:
                    if word in record:
                        yield record
                        break
    finally:
        os.close(fd)


def _from_device(fd: int, tail: Tail) -> Iterator[bytes]:
    """One record per read. Old ones are skipped by count, unparsed: there are thousands, every minute on every node."""
    read, skip, oldest = os.read, True, True
    while True:
        try:
            record = read(fd, RECORD)
        except BlockingIOError:
            return
        except BrokenPipeError:  # overwritten while we read; the next read continues with what is left
            oldest = True
            continue
        if not record:
            return
        number = _number(record)
        if oldest and skip and number < tail.last and not _skipped(fd, tail.last - number, tail.last):
            os.lseek(fd, 0, os.SEEK_SET)  # numbers are missing, so we skipped too much: read again, one by one
            skip = False
        elif tail.see(number, oldest):
            oldest = False
            yield record
        else:
            oldest = False


def _skipped(fd: int, count: int, last: int) -> bool:
    """Skip `count` records; True if the last of them has number `last`."""
    read, record = os.read, b""
    try:
        for _ in range(count):
            record = read(fd, RECORD)
    except (BlockingIOError, BrokenPipeError):
        return False
    return _number(record) == last


def _from_file(fd: int, tail: Tail) -> Iterator[bytes]:
    """The same from a file of records, beginning at the last record if that is still in its place."""
    at = tail.offset
    if at and (os.lseek(fd, at, os.SEEK_SET) < 0 or _number(os.read(fd, RECORD)) != tail.last):
        at = 0
    os.lseek(fd, at, os.SEEK_SET)
    oldest, rest = True, b""
    while chunk := os.read(fd, 1 << 18):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()  # a record that is still being written is left for the next look
        for line in lines:
            number = _number(line)
            if number >= 0:
                new = tail.see(number, oldest)
                oldest = False
                if number == tail.last:
                    tail.offset = at
                if new:
                    yield line
            at += len(line) + 1


def _number(record: bytes) -> int:
    """The record's sequence number; -1 if there is none (a continuation line)."""
    fields = record.split(b",", 2)
    return int(fields[1]) if len(fields) == 3 and fields[0].isdigit() and fields[1].isdigit() else -1


def _findings(first: bytes, records: Iterator[bytes], seen: float, now: float, sys_root: str) -> list[Finding]:
    from slurm_gpuhealth.xid.decode import decode
    from slurm_gpuhealth.xid.fold import fold

    boot = now - time.monotonic()

    def at(uptime: float | None) -> float:
        """printk's clock drifts by seconds a day. A new record is never older than the last look."""
        return now if uptime is None else min(max(boot + uptime, seen), now)

    counted: dict[bytes, tuple[int, bytes]] = {}  # "NVRM: Xid (PCI:0000:3b:00): 45" → how many, the last one

    def lines() -> Iterator[str]:
        record: bytes | None = first
        while record is not None:
            text, number = record[record.find(b";") + 1 :], 0
            if text.startswith(b"NVRM: Xid ("):
                same = text.split(b",", 1)[0]
                number = counted.get(same, (0,))[0] + 1
                counted[same] = number, record
            if number <= FLOOD:
                yield _line(record)
            record = next(records, None)

    def events() -> Iterator[Event]:
        yield from decode(lines())
        for number, record in counted.values():
            for event in decode([_line(record)]) if number > FLOOD else ():
                yield replace(event, count=number - FLOOD)

    return fold(events(), at, lambda: gpu_bridges(sys_root))


def _line(record: bytes) -> str:
    return record.split(b"\n", 1)[0].decode("utf-8", "replace")


def gpu_bridges(sys_root: str) -> dict[str, str]:
    """Every GPU and every port above a GPU, `dddd:bb:dd.f` → the GPU's `dddd:bb:dd`; "" for a port above several."""
    folder = os.path.join(sys_root, "bus/pci/devices")
    above: dict[str, str] = {}
    for device in _listed(folder):
        link = os.path.join(folder, device)
        if _text(os.path.join(link, "vendor")) != "0x10de" or _text(os.path.join(link, "class"))[:4] != "0x03":
            continue
        gpu = device.rpartition(".")[0]
        for port in [*os.path.realpath(link).split("/"), device]:
            if port.count(":") == 2 and "." in port:
                above[port] = gpu if above.get(port, gpu) == gpu else ""
    return above


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
