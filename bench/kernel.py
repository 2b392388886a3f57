"""CPU of a look at the kernel log: microseconds an old record, seconds for 100,000 new ones."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from slurm_gpuhealth.evidence.kernel import RECORD, collect

NEW = 100_000
FLOODS = {
    "noise": "usb 1-1: device descriptor read/64, error -{i}",
    "xid45": "NVRM: Xid (PCI:0000:{bus:02x}:00): 45, pid={i}, name=python, Ch {i:08x}",
    "xid31": "NVRM: Xid (PCI:0000:{bus:02x}:00): 31, pid={i}, name=python, Ch 00000008, intr 00000000. MMU Fault: "
    "ENGINE GRAPHICS GPCCLIENT_T1_8 faulted @ 0x{i:x}_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
}


def main() -> None:
    """Print one line a measurement; exit 1 where one is short."""
    short = old_records("/dev/kmsg")
    for name, text in FLOODS.items():
        short += new_records(name, text)
    sys.exit(short > 0)


def old_records(path: str) -> int:
    """CPU of a look that finds nothing new, by the records that it skips, beside that of reading them alone.

    Not measured where we may not read.
    """
    first = collect(path, None, "boot", time.time())
    if not first.read:
        print(f"bench: kernel-old-record skipped: {path} is empty or can't be read", file=sys.stderr)
        return 0
    took, bare = [], []
    for _ in range(50):
        begun = time.process_time()
        collect(path, first.cursor, "boot", time.time())
        took.append(time.process_time() - begun)
        begun = time.process_time()
        only_read(path)
        bare.append(time.process_time() - begun)
    ours, alone = (sorted(one)[25] / first.read * 1e6 for one in (took, bare))
    return report("kernel-old-record", ours, "us", max(1.5, 6 * alone))


def only_read(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError), contextlib.closing(os.fdopen(fd, "rb", 0)):
        while os.read(fd, RECORD):
            pass


def new_records(name: str, text: str) -> int:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("6,0,0,-;boot\n")
        file.writelines(f"4,{i},{i},-;{text.format(i=i, bus=16 + i % 8)}\n" for i in range(1, NEW + 1))
        file.flush()
        begun = time.process_time()
        look = collect(file.name, ("boot", 0, 0, 1.0), "boot", time.time())
        took = time.process_time() - begun
    if look.read != NEW:
        sys.exit(f"bench: {look.read} of {NEW} records were read")
    return report(f"kernel-new-{name}", took, "s", 1.0)


def report(name: str, value: float, unit: str, limit: float) -> int:
    """1 where `value` is over the bar."""
    print(f"bench: {name} {value:.2f} {unit} bar {limit:.3g} {'ok' if value <= limit else 'SHORT'}")
    return int(value > limit)


if __name__ == "__main__":
    main()
