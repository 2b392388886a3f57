"""The stand-in NVML and its node folder behave as the driver does."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes import node
from tests.fakes.node import inject

ASK = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import pynvml as n
n.nvmlInit()
gpus = []
for i in range(n.nvmlDeviceGetCount()):
    try:
        h = n.nvmlDeviceGetHandleByIndex(i)
        rows = n.nvmlDeviceGetRemappedRows(h)
        gpus.append([n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetMinorNumber(h), n.nvmlDeviceGetTemperature(h, 0), *rows])
    except n.NVMLError as error:
        gpus.append(error.value)
print(json.dumps(gpus))
"""


def ask(folder):
    done = subprocess.run(
        [sys.executable, "-c", ASK, folder / node.LIBRARY], capture_output=True, timeout=20, check=True
    )
    return json.loads(done.stdout)


def records(folder):
    return [line.split(";", 1) for line in (folder / "kmsg").read_text().splitlines()]


def test_the_real_bindings_read_eight_healthy_gpus(folder):
    gpus = ask(folder)
    assert [gpu[0] for gpu in gpus] == [gpu["uuid"] for gpu in node.load(folder)["gpus"]]
    assert all(gpu[2:] == [34, 0, 0, 0, 0] for gpu in gpus)


def test_a_library_reached_through_a_link_plays_the_scenario_of_the_links_folder(folder, tmp_path):
    other = tmp_path / "other"
    node.make_node(str(other), "n2")
    (other / node.LIBRARY).unlink()
    (other / node.LIBRARY).symlink_to(folder / node.LIBRARY)
    assert ask(other)[0][0] == node.load(other)["gpus"][0]["uuid"] != ask(folder)[0][0]


def test_no_gpu_has_the_same_number_in_two_of_the_four_orders(folder):
    scenario = node.load(folder)
    for gpu in scenario["gpus"]:
        entity = scenario["dcgm"]["order"].index(gpu["uuid"])
        assert len({gpu["index"], gpu["minor"], gpu["gres"], entity}) == 4


def test_two_nodes_have_other_gpus_and_a_remade_node_has_its_own_again(folder, tmp_path):
    again, other = (node.make_node(str(tmp_path / name), name, seed=7) for name in ("n1", "n2"))
    assert again["gpus"] == node.load(folder)["gpus"]
    assert not {gpu["uuid"] for gpu in other["gpus"]} & {gpu["uuid"] for gpu in again["gpus"]}


def test_a_gpu_off_the_bus_gives_no_handle_and_the_kernel_says_so(folder):
    inject(folder, "xid", 79, "--gpu", 3)
    gpus = ask(folder)
    assert gpus[3] == 15
    assert len(gpus) == 8
    texts = [text for _, text in records(folder)]
    pci = node.load(folder)["gpus"][3]["pci"]
    assert f"NVRM: Xid (PCI:{pci}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus." in texts


def test_an_absent_gpu_moves_the_others_up(folder):
    before = ask(folder)
    inject(folder, "absent", "--gpu", 3)
    assert ask(folder) == before[:3] + before[4:]


def test_kernel_records_go_on_in_number_and_time(folder):
    inject(folder, "noise", 50)
    inject(folder, "xid", 13, "--pid", 4711)
    heads = [[int(n) for n in head.split(",")[:3]] for head, _ in records(folder)]
    assert [head[1] for head in heads] == list(range(len(heads)))
    assert [head[2] for head in heads] == sorted(head[2] for head in heads)
    assert abs(heads[-1][2] / 1e6 - time.monotonic()) < 60
    assert "pid=4711, name=python3" in records(folder)[-1][1]


def test_a_reboot_begins_boot_id_and_kernel_log_anew_and_heals_what_a_reset_heals(folder):
    inject(folder, "xid", 79, "--gpu", 3)
    inject(folder, "row-remap-failed", "--gpu", 2)
    boot = node.load(folder)["boot_id"]
    inject(folder, "reboot")
    assert node.load(folder)["boot_id"] != boot
    assert (folder / "proc/sys/kernel/random/boot_id").read_text().strip() == node.load(folder)["boot_id"]
    assert records(folder)[0][0].startswith("6,0,0,")
    gpus = ask(folder)
    assert gpus[3][2] == 34
    assert gpus[2][6] == 1


def test_any_value_and_any_return_code_can_be_played(folder):
    inject(folder, "temperature", 95, "--gpu", 1)
    inject(folder, "nvml", "nvmlDeviceGetRemappedRows", "error", 999, "--gpu", 2)
    inject(folder, "nvml", "temperature", "unsupported", "--gpu", 4)
    gpus = ask(folder)
    assert gpus[1][2] == 95
    assert [gpus[2], gpus[4]] == [999, 3]
    inject(folder, "clear")
    assert ask(folder)[1][2] == 34


def test_the_drivers_proc_files_agree_with_nvml(folder):
    for gpu in node.load(folder)["gpus"]:
        text = (folder / f"proc/driver/nvidia/gpus/{gpu['pci']}.0/information").read_text()
        assert f"GPU UUID: \t {gpu['uuid']}\n" in text
        assert f"Device Minor: \t {gpu['minor']}\n" in text
        assert (folder / f"dev/nvidia{gpu['minor']}").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for the cgroup freezer")
def test_an_unkillable_hang_survives_sigkill_until_it_is_thawed(folder):
    if not node.freezer():
        pytest.skip("no cgroup v1 freezer here")
    inject(folder, "hang-unkillable")
    pid = os.fork()
    if pid == 0:
        library = ctypes.CDLL(str(folder / node.LIBRARY))
        library.nvmlInit_v2()
        handle, value = ctypes.c_void_p(), ctypes.c_uint()
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(value))
        os._exit(0)
    try:
        deadline = time.monotonic() + 5
        while not frozen(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert state(pid) == "D"
    finally:
        assert node.thaw(str(folder)) == 1
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def frozen(pid):
    cells = Path(node.freezer()).glob(f"gpuhealth-fake-*-{pid}/freezer.state")
    return any(cell.read_text().strip() == "FROZEN" for cell in cells)
