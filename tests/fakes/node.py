"""Makes the folder of a GPU node without GPUs: what its programs read of /proc, /sys and /dev, and its stand-ins.

    n1/scenario.json     the node as it "is": GPUs, NVML's and DCGM's behaviour; `inject` changes it
       scenario.nvml     the same as lines, for the stand-in libnvidia-ml.so.1 beside it
       kmsg              kernel log, /dev/kmsg's record format
       proc/ sys/ dev/   as far as our programs look

Four numbers for one GPU, all different, as on real nodes: `index` (NVML, by PCI bus), `minor`, `gres` (its position in
slurmd's list) and its place in `dcgm.order`.
"""

from __future__ import annotations

import functools
import json
import os
import zlib

# What follows is imported where it is needed: tests start the programs that import this file by the thousand.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import random
    from collections.abc import Callable

HERE = os.path.dirname(os.path.abspath(__file__))
DRIVER = "580.95.05"
BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")  # an HGX H100's
SWITCHES = ("07", "08", "09", "0a")
LIBRARY = "libnvidia-ml.so.1"
LASTING = ("ecc.aggregate", "remap_failed", "remapped_uncorrectable", "banks.none", "banks.max", "vbios")
"""What NVML says of a GPU after a reset and a reboot too."""
FREEZER = "/sys/fs/cgroup/freezer"


def make_node(folder: str, name: str, gpus: int = 8, seed: int | str = 0) -> dict:
    """Make the node `name` in `folder` (what is there stays, files of ours are written anew); returns its scenario."""
    import random
    import uuid

    rng = random.Random(f"{seed}/{name}")  # noqa: S311 - numbers that stay the same, not secrets
    orders = [list(range(gpus))]
    for _ in range(3):
        orders.append(_unlike(orders, rng))
    _, minors, positions, entities = orders
    cards = [
        {
            "index": index,
            "uuid": f"GPU-{uuid.UUID(int=rng.getrandbits(128), version=4)}",
            "pci": _pci(index),
            "serial": str(1652_0000_00000 + rng.randrange(10**9)),
            "minor": minors[index],
            "gres": positions[index],
            "name": "NVIDIA H100 80GB HBM3",
            "vbios": "96.00.99.00.01",
        }
        for index in range(gpus)
    ]
    scenario = {
        "name": name,
        "boot_id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        "driver": DRIVER,
        "gpus": cards,
        "nvml": {},
        "services": {"nvidia-persistenced": "active", "nvidia-dcgm": "active"},
        "dcgm": {
            "version": "4.4.1",
            "order": [cards[index]["uuid"] for index in sorted(range(gpus), key=entities.__getitem__)],
            "time_scale": 0.01,
            "seconds": {},
            "faults": {},
        },
    }
    os.makedirs(folder, exist_ok=True)
    for tree in (_proc, _sys, _dev, _stand_ins):
        tree(folder, scenario)
    start_kernel_log(folder, scenario)
    save(folder, scenario)
    return scenario


def load(folder: str) -> dict:
    """The node's scenario."""
    with open(os.path.join(folder, "scenario.json"), encoding="utf-8") as file:
        return json.load(file)


def save(folder: str, scenario: dict) -> None:
    """Write the scenario, for people and DCGM (JSON) and for the stand-in library (lines); each file atomically."""
    write(folder, "scenario.json", json.dumps(scenario, indent=1) + "\n")
    write(folder, "scenario.nvml", nvml_lines(scenario) + f"cell {_cell(folder)}\n")
    write(folder, "proc/sys/kernel/random/boot_id", scenario["boot_id"] + "\n")


def nvml_lines(scenario: dict) -> str:
    """`scenario` in the format that nvml/nvml.c reads. A GPU with `lost: absent` is left out, and the rest move up."""
    present = [gpu for gpu in scenario["gpus"] if gpu.get("lost") != "absent"]
    lines = [f"driver {scenario['driver']}", f"nvml 13.{scenario['driver']}", f"count {len(present)}"]
    lines += [f"{key} {value}" for key, value in scenario["nvml"].items()]
    for index, gpu in enumerate(present):
        domain, bus, device = gpu["pci"].split(":")
        values = {key: gpu[key] for key in ("uuid", "serial", "minor", "name", "vbios", "lost") if key in gpu}
        values |= {"bus_id": f"{int(domain, 16):08X}:{bus.upper()}:{device.upper()}.0", **gpu.get("nvml", {})}
        lines += [f"gpu.{index}.{key} {value}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def inject(folder: str | os.PathLike[str], *what: object) -> None:
    """Put a fault into the node in `folder`: the program `inject` beside this file, without a process of its own."""
    _injector()([os.fspath(folder), *map(str, what)])


@functools.cache
def _injector() -> Callable[[list[str]], None]:
    from importlib import machinery, util

    loader = machinery.SourceFileLoader("inject", os.path.join(HERE, "inject"))
    program = util.module_from_spec(util.spec_from_loader("inject", loader))
    loader.exec_module(program)
    return program.main


def reset(gpu: dict) -> None:
    """What a reset heals is healed: pending remaps are made, volatile counters and settings are as after power-on."""
    gpu["nvml"] = {key: value for key, value in gpu.get("nvml", {}).items() if key in LASTING}


def start_kernel_log(folder: str, scenario: dict) -> None:
    """A fresh boot's kernel log: sequence numbers from 0."""
    lines = [(6, "Linux version 6.1.0-40-amd64 (debian-kernel@lists.debian.org)"), (6, "Command line: ro quiet")]
    lines += [(6, f"pci {_pci(i)}.0: [10de:2330] type 00 class 0x030200") for i in range(len(scenario["gpus"]))]
    lines += [(6, f"nvidia {_pci(i)}.0: enabling device (0140 -> 0142)") for i in range(len(scenario["gpus"]))]
    lines += [(4, f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {scenario['driver']}  Release Build")]
    records = [f"{level},{number},{number * 1371},-;{line}" for number, (level, line) in enumerate(lines)]
    write(folder, "kmsg", "\n".join(records) + "\n")


def append_kernel_log(folder: str, lines: list[tuple[int, str]]) -> None:
    """Append (level, text) as records that the kernel would print now; they follow the last one's number."""
    import time

    path = os.path.join(folder, "kmsg")
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 65536))
        last = [line for line in file.read().splitlines() if line and line[:1] != b" "][-1]
    number = int(last.split(b",")[1]) + 1
    now = int(time.monotonic() * 1e6)
    with open(path, "a", encoding="utf-8") as out:
        out.write("".join(f"{lvl},{number + i},{now + i},-;{text}\n" for i, (lvl, text) in enumerate(lines)))


def freezer() -> str | None:
    """A cgroup v1 freezer that we may write to, mounted beside a v2 hierarchy if need be; None: there is none."""
    import subprocess

    mine = "/run/gpuhealth-fake-freezer"
    for path in (FREEZER, mine):
        if os.access(os.path.join(path, "cgroup.procs"), os.W_OK):
            return path
    os.makedirs(mine, exist_ok=True)
    done = subprocess.run(["mount", "-t", "cgroup", "-o", "freezer", "none", mine], capture_output=True, check=False)
    return mine if done.returncode == 0 else None


def thaw(folder: str | None = None) -> int:
    """Let the processes go that this node's (None: any) stand-in froze; a SIGKILL sent to them then ends them."""
    import time

    thawed = 0
    for root in (FREEZER, "/run/gpuhealth-fake-freezer"):
        for cell in sorted(os.listdir(root)) if os.path.isdir(root) else []:
            if not cell.startswith(_cell(folder) if folder else "gpuhealth-fake-"):
                continue
            with open(os.path.join(root, cell, "freezer.state"), "w", encoding="ascii") as state:
                state.write("THAWED")
            thawed += 1
            for _ in range(50):  # until its process is gone: a cgroup can be removed only when it is empty
                try:
                    os.rmdir(os.path.join(root, cell))
                    break
                except OSError:
                    time.sleep(0.02)
    return thawed


def _cell(folder: str) -> str:
    return f"gpuhealth-fake-{zlib.crc32(os.path.abspath(folder).encode()):08x}-"


def write(folder: str, name: str, text: str) -> None:
    """Write one file below `folder`, atomically."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def _pci(index: int) -> str:
    return f"{index // len(BUSES):04x}:{BUSES[index % len(BUSES)]}:00"


def _unlike(orders: list[list[int]], rng: random.Random) -> list[int]:
    """A permutation that gives no GPU a number which it has in `orders` (as far as few GPUs allow)."""
    order = list(orders[0])
    for _ in range(10_000):
        rng.shuffle(order)
        if all(number not in others for number, *others in zip(order, *orders)):
            break
    return order


def _proc(folder: str, scenario: dict) -> None:
    for gpu in scenario["gpus"]:
        text = (
            f"Model: \t\t {gpu['name']}\nIRQ:   \t\t {120 + gpu['index']}\nGPU UUID: \t {gpu['uuid']}\n"
            f"Video BIOS: \t {gpu['vbios']}\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
            f"Bus Location: \t {gpu['pci']}.0\nDevice Minor: \t {gpu['minor']}\nGPU Firmware: \t {DRIVER}\n"
            "GPU Excluded:\t No\n"
        )
        write(folder, f"proc/driver/nvidia/gpus/{gpu['pci']}.0/information", text)
    version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER}  Tue Sep 23 09:55:41 UTC 2025\n"
    write(folder, "proc/driver/nvidia/version", version)
    write(folder, "proc/mounts", "/dev/sda1 / ext4 rw,relatime 0 0\ntmpfs /run tmpfs rw,nosuid,nodev 0 0\n")
    write(folder, "proc/meminfo", "MemTotal:       2113508416 kB\nMemAvailable:   2051231244 kB\n")
    write(folder, "proc/loadavg", "0.42 0.40 0.38 2/1801 42\n")
    write(folder, "proc/vmstat", "nr_free_pages 512814561\noom_kill 0\n")
    process(folder, 1501, "nv-fabricmanage")  # comm holds 15 characters


def process(folder: str, pid: int, name: str, uid: int = 0, state: str = "S") -> None:
    """Make the process `pid` appear in the node's proc."""
    status = f"Name:\t{name}\nState:\t{state} (sleeping)\nPid:\t{pid}\nPPid:\t1\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
    write(folder, f"proc/{pid}/comm", name + "\n")
    write(folder, f"proc/{pid}/status", status)
    write(folder, f"proc/{pid}/stat", f"{pid} ({name}) {state} 1 {pid} {pid} 0 -1 4194560" + " 0" * 12 + " 2100 0 0\n")
    write(folder, f"proc/{pid}/cmdline", name + "\0")


def _sys(folder: str, scenario: dict) -> None:
    cards = [(f"{gpu['pci']}.0", "0x10de", "0x2330", "0x030200") for gpu in scenario["gpus"]]
    cards += [(f"0000:{bus}:00.0", "0x10de", "0x22a3", "0x068000") for bus in SWITCHES]
    for number, (pci, vendor, device, kind) in enumerate(cards):
        bridge = f"{pci[:5]}{int(pci[5:7], 16) - 1:02x}:01.0"
        home = f"sys/devices/pci{pci[:7]}/{bridge}/{pci}"
        _pci_device(folder, home, vendor, device, kind)
        _pci_device(folder, os.path.dirname(home), "0x1000", "0xc030", "0x060400")
        write(folder, f"{home}/numa_node", f"{number * 2 // len(cards)}\n")
    port = "sys/class/infiniband/mlx5_0/ports/1"
    files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    errors = "symbol_error link_error_recovery link_downed port_rcv_errors port_xmit_discards VL15_dropped"
    errors += " excessive_buffer_overrun_errors local_link_integrity_errors"
    files |= {f"counters/{name}": "0" for name in errors.split()}
    hardware = "local_ack_timeout_err out_of_sequence packet_seq_err rx_icrc_encapsulated roce_slow_restart"
    files |= {f"hw_counters/{name}": "0" for name in hardware.split()}
    for name, text in files.items():
        write(folder, f"{port}/{name}", text + "\n")
    for name in ("ce_count", "ue_count"):
        write(folder, f"sys/devices/system/edac/mc/mc0/{name}", "0\n")


def _pci_device(folder: str, home: str, vendor: str, device: str, kind: str) -> None:
    facts = {"vendor": vendor, "device": device, "class": kind, "current_link_width": "16"}
    for name, text in {**facts, "current_link_speed": "32.0 GT/s PCIe"}.items():
        write(folder, f"{home}/{name}", text + "\n")
    link = os.path.join(folder, "sys/bus/pci/devices", os.path.basename(home))
    os.makedirs(os.path.dirname(link), exist_ok=True)
    if not os.path.islink(link):
        os.symlink(os.path.relpath(os.path.join(folder, home), os.path.dirname(link)), link)


def _dev(folder: str, scenario: dict) -> None:
    os.makedirs(os.path.join(folder, "dev"), exist_ok=True)
    for gpu in scenario["gpus"]:
        path = os.path.join(folder, f"dev/nvidia{gpu['minor']}")
        if os.path.lexists(path):
            continue
        try:  # a device that does no harm, whatever a job does with it: /dev/null's numbers
            os.mknod(path, 0o020666, os.makedev(1, 3))
            os.chmod(path, 0o666)
        except PermissionError:
            write(folder, f"dev/nvidia{gpu['minor']}", "")


def _stand_ins(folder: str, scenario: dict) -> None:
    """The library as a copy: two nodes' in one process would else be the same to the dynamic linker."""
    import shutil

    _make_library()
    shutil.copyfile(os.path.join(HERE, "nvml", LIBRARY), os.path.join(folder, LIBRARY + ".new"))
    os.replace(os.path.join(folder, LIBRARY + ".new"), os.path.join(folder, LIBRARY))
    for program in ("dcgmi", "hostengine"):
        link = os.path.join(folder, program)
        if not os.path.lexists(link):
            os.symlink(os.path.join(HERE, "dcgm", program), link)
    for program in (
        *("nvidia-smi", "systemctl", "nvidia-bug-report.sh"),
        *("all_reduce_perf", "nvbandwidth", "ib_write_bw", "ib_read_lat", "gpu_burn"),
    ):
        link = os.path.join(folder, program)
        if not os.path.lexists(link):
            os.symlink(os.path.join(HERE, "tools"), link)


@functools.cache
def _make_library() -> None:
    import subprocess

    subprocess.run(["make", "-s", "-C", os.path.join(HERE, "nvml")], check=True)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the node's folder, or `thaw`")
    parser.add_argument("name", nargs="?")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    if given.folder == "thaw":
        print(f"{thaw()} thawed")
    else:
        make_node(given.folder, given.name or os.path.basename(given.folder.rstrip("/")), given.gpus, given.seed)
