"""`make hardware`: compares what we read on a machine with an NVIDIA GPU with `nvidia-smi -q -x`. Needs no Slurm.

Prints a table and writes hardware-report.txt, to attach to a bug report. LEVELS=1,2 runs only those DCGM levels: level
4 takes an hour or more. Exits with 1 if the two readings differ. Without a GPU it says so and exits with 0.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from xml.etree import ElementTree

from slurm_gpuhealth.config.settings import Settings
from slurm_gpuhealth.evidence.nvml_probe import pci_address

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NO = (None, "N/A", "Requested functionality has been deprecated", "Unknown Error", "")
WORDS = {"Yes": 1, "No": 0, "Enabled": 1, "Disabled": 0, "None": 0}
REASONS = {  # bits of nvml.h
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
PLAIN = {  # our key → its place in nvidia-smi's document
    "serial": "serial",
    "name": "product_name",
    "vbios": "vbios_version",
    "minor": "minor_number",
    "persistence": "persistence_mode",
    "mig": "mig_mode/current_mig",
    "ecc": "ecc_mode/current_ecc",
    "temperature": "temperature/gpu_temp",
    "utilization": "utilization/gpu_util",
    "replay": "pci/replay_counter",
    "max_gen": "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
    "max_width": "pci/pci_gpu_link_info/link_widths/max_link_width",
    "slowdown": "temperature/gpu_temp_slow_threshold",
    "recovery": "gpu_recovery_action",
}
ROWS = ("corr", "unc", "pending", "failure")
MOVING = {"temperature": 3, "utilization": 100, "reasons": 1 << 16, "pstate": 16}
"""The values that may differ between two readings within one second, and by how much."""
TEXTS = ("serial", "name", "vbios")


def compare(reading, document):
    """(GPU, field, ours, nvidia-smi's, verdict) for each field: "same", "DIFFERS", "moves", or which side has it."""
    root = ElementTree.fromstring(document)  # noqa: S314 - of NVIDIA's own program, which root runs anyway
    yield _row("node", "driver", reading["driver"], root.findtext("driver_version"))
    theirs = {gpu.findtext("uuid"): gpu for gpu in root.findall("gpu")}
    ours = {gpu["uuid"]: gpu for gpu in reading["gpus"] if "uuid" in gpu}
    yield _row("node", "gpus", sorted(ours), sorted(theirs))
    for uuid in (one for one in ours if one in theirs):
        gpu, values = ours[uuid], fields(theirs[uuid])
        for field in sorted({*values, *gpu.keys() & {*PLAIN, "pci", "rows", "banks", "reasons", "pstate"}}):
            yield _row(f"GPU{gpu['index']}", field, gpu.get(field), values.get(field))


def fields(gpu):
    """nvidia-smi's values under our names and in our units, without fields that have no value."""
    found = {key: _value(gpu.findtext(place), key in TEXTS) for key, place in PLAIN.items()}
    found["pci"] = pci_address(gpu.findtext("pci/pci_bus_id"))
    state = gpu.findtext("performance_state")
    found["pstate"] = None if state in NO else int(state[1:])
    for key, scope in (("ecc_volatile", "volatile"), ("ecc_aggregate", "aggregate")):
        counts = [_value(one.text) for one in gpu.findall(f"ecc_errors/{scope}/*") if "uncorrectable" in one.tag]
        found[key] = None if not counts or None in counts else sum(counts)
    rows = [_value(gpu.findtext(f"remapped_rows/remapped_row_{one}")) for one in ROWS]
    found["rows"] = None if None in rows else rows
    banks = [_value(one.text) for one in gpu.findall("remapped_rows/row_remapper_histogram/*")]
    found["banks"] = banks if banks and None not in banks else None
    # Drivers before 535 call them clocks_throttle_reasons.
    places = [("clocks_event_reasons", "clocks_event_reason"), ("clocks_throttle_reasons", "clocks_throttle_reason")]
    for place, tag in places:
        if gpu.find(place) is not None:
            on = [bit for name, bit in REASONS.items() if gpu.findtext(f"{place}/{tag}_{name}") == "Active"]
            found["reasons"] = sum(on)
    return {key: value for key, value in found.items() if value is not None}


def _value(text, as_text=False):
    """`34 C` → 34, `16x` → 16, `Enabled` → 1; the text itself if it is not a number."""
    text = text.strip() if text else text
    if text in NO:
        return None
    if as_text:
        return text
    word = WORDS.get(text, text)
    first = str(word).split()[0].rstrip("x")
    return int(first) if first.lstrip("-").isdigit() else word


def _row(gpu, field, ours, theirs):
    if ours is None or theirs is None:
        verdict = "nvidia-smi only" if ours is None else "ours only"
    elif ours == theirs:
        verdict = "same"
    else:
        verdict = "moves" if field in MOVING and abs(ours - theirs) <= MOVING[field] else "DIFFERS"
    return gpu, field, ours, theirs, verdict


def main():
    from slurm_gpuhealth.evidence import nvml

    settings = Settings()
    if not os.path.exists("/dev/nvidiactl") or not os.access(settings.reset.nvidia_smi, os.X_OK):
        print("hardware: no NVIDIA GPU here, or no nvidia-smi: nothing is compared")
        return 0
    argv = [settings.reset.nvidia_smi, "-q", "-x"]
    document = subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout
    probed = nvml.read(settings, full=True)
    report = Report()
    report.line(f"slurm_gpuhealth on {os.uname().nodename}, {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}")
    if not probed.value or "failed" in probed.value:
        report.line(f"NVML: {probed.error or probed.value}")
        return report.end(1)
    report.line(f"NVML: {probed.seconds:.3f} s, errors {[gpu['errors'] for gpu in probed.value['gpus']]}")
    rows = list(compare(probed.value, document))
    for gpu, field, ours, theirs, verdict in rows:
        report.line(f"{gpu:6} {field:14} {verdict:16} {ours!s:40.40} {theirs!s:40.40}")
    kernel_log(report)
    cpu(report)
    levels(report, settings)
    with open(report.path + ".xml", "wb") as file:
        file.write(document)
    return report.end(int(any(row[4] == "DIFFERS" for row in rows)))


class Report:
    """Writes lines to the screen and into the file."""

    path = os.path.join(ROOT, "hardware-report.txt")

    def __init__(self):
        self.lines = []

    def line(self, text):
        print(text, flush=True)
        self.lines.append(text)

    def end(self, status):
        with open(self.path, "w", encoding="utf-8") as file:
            file.write("\n".join(self.lines) + "\n")
        print(f"attach to a bug report: {self.path} (it names GPUs by serial number)")
        return status


def kernel_log(report):
    """What the kernel log says about GPUs since the boot."""
    from slurm_gpuhealth.evidence import kernel

    look = kernel.collect("/dev/kmsg", None, "", time.time())
    report.line(f"kernel log: {len(look.findings)} findings")
    for finding in look.findings[:50]:
        report.line(f"    {finding.source}:{finding.code} {finding.message[:160]}")


def cpu(report, runs=10):
    """CPU time of reading and judging NVML once, compared with a Python that does nothing."""
    program = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from slurm_gpuhealth.evidence import nvml\nfrom slurm_gpuhealth.config.settings import Settings\n"
        "probed = nvml.read(Settings())\nnvml.judge_probed(probed, None, {}, [], Settings(), 0.0)\n"
    )
    spent = {"pass": [], program: []}
    for _ in range(runs):
        for code, seconds in spent.items():
            pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
            _, _, usage = os.wait4(pid, 0)
            seconds.append(usage.ru_utime + usage.ru_stime)
    base, ours = (statistics.median(one) for one in spent.values())
    report.line(f"cpu: a reading {1000 * ours:.0f} ms, a bare Python {1000 * base:.0f} ms: {ours / base:.1f} times")


def levels(report, settings):
    """DCGM's levels, if a host engine answers."""
    from slurm_gpuhealth.diagnose import diagnose, engine

    if not os.access(settings.dcgm.dcgmi, os.X_OK) or not engine.answers(settings.dcgm.host):
        report.line(f"dcgm: no {settings.dcgm.dcgmi}, or no host engine at {settings.dcgm.host}")
        return
    for level in map(int, os.environ.get("LEVELS", "1,2,3,4").split(",")):
        found = diagnose(level, (), settings, 2 * settings.ladder.l4)
        report.line(f"dcgm level {level}: {found.outcome} in {found.seconds or 0:.0f} s: {found.message}")
        for test in found.tests:
            report.line(f"    {test.name:18} {test.status:8} {test.outcome:13} {test.why}")


if __name__ == "__main__":
    sys.exit(main())
