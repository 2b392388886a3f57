"""Reads what other tools' tests print: NCCL tests, nvbandwidth, perftest, gpu-burn, a site's own. Pure; never raises.

Each tool's form changes with its version, so columns are found by their names. A figure counts only from a run that
ended: what a tool that was cut short printed is no measurement.
"""

from __future__ import annotations

import json
import re
from statistics import median

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Test

MPIRUN = re.compile(r"^\[\d+,\d+\]<std\w+>:", re.M)
"""What `mpirun --tag-output` writes before each line."""
MIB = (1 << 20) * 8 / 1e9
"""perftest's MB is 2^20 bytes; newer versions write MiB (perftest_parameters.h)."""
ENDED = ("Passed", "Waived", "Skipped")
"""How a test of nvbandwidth ends well, or is not for this node."""
GIGABITS = {"Gb/sec": 1.0, "MB/sec": MIB, "MiB/sec": MIB}


@frozen
class Figure:
    """One measured value. `device`: the tool's number of the GPU; None: the node's, or a port's."""

    name: str
    value: float
    unit: str
    device: int | None = None


@frozen
class Output:
    """What a tool said."""

    figures: tuple[Figure, ...] = ()
    wrong: tuple[tuple[int | None, str], ...] = ()
    """Wrong results that the tool itself reports: device, and what is wrong."""
    version: str = ""
    why: str = ""
    """Why there is no figure."""


def read(text: str, test: Test) -> Output:
    """The output of this test. Without a figure and without a wrong result, `why` says why."""
    output = READERS[test.reads](MPIRUN.sub("", text), test)
    if output.figures or output.wrong or output.why:
        return output
    return Output(version=output.version, why=f"its output has no figure: {_last(text)}")


def _nccl(text: str, test: Test) -> Output:
    """The bus bandwidth of the largest message, the better of out-of-place and in-place."""
    names: list[str] = []
    best, wrong = 0.0, 0
    for line in text.splitlines():
        words = line.replace("#", " ", 1).split() if line.startswith("#") else line.split()
        if line.startswith("#") and "size" in words and "busbw" in words:
            names = words
        elif names and len(words) == len(names) and words[0].isdigit():
            row = list(zip(names, words))
            best = max((number(value) or 0.0 for name, value in row if name == "busbw"), default=0.0)
            wrong += sum(int(number(value) or 0) for name, value in row if name == "#wrong")
    bounds = re.search(r"^# Out of bounds values\s*:\s*(\d{1,15})\s+(\w+)", text, re.M)
    version = re.search(r"^# nccl-tests version (\S+).*?nccl-library=(\d+)", text, re.M)
    said = f"{version[1]} with NCCL {version[2]}" if version else ""
    if wrong or (bounds and bounds[2] == "FAILED"):
        return Output(wrong=((None, f"{wrong or int(bounds[1] if bounds else 0)} wrong values"),), version=said)
    if not bounds:
        return Output(version=said, why=f"it did not end: {_last(text)}")
    return Output((Figure(test.name, best, "GB/s"),) if best else (), version=said)


def _nvbandwidth(text: str, test: Test) -> Output:
    """Each GPU's median in each test. Latencies are in ns."""
    found = json_in(text, "nvbandwidth")
    version = re.search(r"nvbandwidth Version: (\S+)", text)
    said = str(found.get("version", "")) if found else version[1] if version else ""
    pattern = re.search(r"Invalid value when checking the pattern.*", text)
    if pattern:
        return Output(wrong=((None, pattern[0]),), version=said)
    if found and found.get("error"):
        return Output(version=said, why=str(found["error"])[:300])
    cases = (
        [one for one in listed if isinstance(one, dict)] if isinstance(listed := found.get("testcases"), list) else []
    )
    failed = next((one for one in cases if one.get("status") not in ENDED), None)
    if failed:
        return Output(version=said, why=f"{failed.get('name')}: status {failed.get('status')}"[:300])
    blocks = _cases(cases) if found else _blocks(text)
    figures = [
        Figure(f"{test.name}.{name}", value, unit, device)
        for name, unit, rows in blocks
        for device, value in _by_gpu(name, rows)
    ]
    return Output(tuple(figures), version=said)


def _cases(cases: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, list[list[str]]]]:
    for case in cases:
        rows = case.get("bandwidth_matrix")
        if isinstance(rows, list) and case.get("status") == "Passed" and all(isinstance(row, list) for row in rows):
            unit = "ns" if "latency" in str(case.get("name")) else "GB/s"
            yield str(case.get("name")), unit, [[str(value) for value in row] for row in rows]


def _blocks(text: str) -> Iterator[tuple[str, str, list[list[str]]]]:
    """A matrix per test: a line of column numbers, rows that begin with theirs, and `SUM name total`."""
    rows: list[list[str]] = []
    unit = ""
    for line in text.splitlines():
        words = line.split()
        if re.match(r"mem\w+ .*\((GB/s|ns)\)\s*$", line):
            unit, rows = ("ns" if "(ns)" in line else "GB/s"), []
        elif unit and words and words[0] == str(len(rows)) and len(words) > 1 and not words[1].isdigit():
            rows.append(words[1:])
        elif unit and len(words) == 3 and words[0] == "SUM":
            yield words[1], unit, rows
            unit = ""


def _by_gpu(name: str, rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, float]]:
    """With the host as the row, the columns are the GPUs. A GPU's own row has its links to the others; 0: no link."""
    host = len(rows) == 1 and "device_to_device" not in name
    for device, row in enumerate([[value] for value in rows[0]] if host else rows):
        values = [value for value in map(number, row) if value or (host and value is not None)]
        if values:
            yield device, median(values)


def _perftest(text: str, test: Test) -> Output:
    """The average bandwidth, or the typical latency, of the largest message."""
    names: list[str] = []
    figure = None
    for line in text.splitlines():
        if "#bytes" in line and "#iterations" in line:
            names = re.findall(r"#\w+|BW \w+\[[^\]]*\]|[\w.%]+(?: percentile)?\[[^\]]*\]", line)
        words = line.split()
        if not names or len(words) < len(names) or not words[0].isdigit():
            continue
        for name, word in zip(names, words):
            value, unit = number(word), name.partition("[")[2].rstrip("]")
            if value is None or value < 0:  # counters have overflown (perftest issue 82)
                continue
            if name.startswith("BW average"):
                figure = Figure(test.name, value * GIGABITS.get(unit, 1.0), "Gb/s")
            elif name in ("t_typical[usec]", "t_avg[usec]") and not (figure and name == "t_avg[usec]"):
                figure = Figure(test.name, value, "us")
    return Output((figure,) if figure else ())


def _gpu_burn(text: str, test: Test) -> Output:
    """Each GPU's median GFLOPS while it worked, its highest temperature, and who calculates wrongly."""
    gflops: dict[int, list[float]] = {}
    celsius: dict[int, float] = {}
    for line in re.split(r"[\r\n]+", text):
        if "proc'd:" not in line or "errors:" not in line:
            continue
        for device, word in enumerate(re.findall(r"\((\d+) Gflop/s\)", line)):
            gflops.setdefault(device, []).append(number(word) or 0.0)
        for device, word in enumerate(line.partition("temps:")[2].split(" - ")):
            celsius[device] = max(celsius.get(device, 0.0), number(word.partition(" C")[0]) or 0.0)
    verdicts = re.findall(r"^\s*GPU (\d{1,4}): (OK|FAULTY)\s*$", text, re.M)
    wrong = [(int(device), "calculates wrong results") for device, word in verdicts if word == "FAULTY"]
    if wrong or not verdicts:
        return Output(wrong=tuple(wrong), why="" if wrong else f"it did not end: {_last(text)}")
    # 0 until a GPU has done its first round, and that round includes the warm-up; a GPU that does none has 0.
    busy = {device: [value for value in values if value] for device, values in gflops.items()}
    speeds = {device: values[1:] or values or [0.0] for device, values in busy.items()}
    figures = [Figure(f"{test.name}.gflops", median(values), "GFLOPS", device) for device, values in speeds.items()]
    figures += [Figure(f"{test.name}.celsius", value, "C", device) for device, value in celsius.items() if value]
    return Output(tuple(figures))


def _pattern(text: str, test: Test) -> Output:
    """A site's own: the last match of its regular expression."""
    found = re.findall(test.pattern, text)
    value = number(found[-1]) if found else None
    return Output((Figure(test.name, value, test.unit),) if value is not None else ())


READERS: dict[str, Callable[[str, Test], Output]] = {
    "nccl": _nccl,
    "nvbandwidth": _nvbandwidth,
    "perftest": _perftest,
    "gpu-burn": _gpu_burn,
    "pattern": _pattern,
}
"""By `reads` of a test."""


def json_in(text: str, key: str) -> dict[str, Any]:
    """The object under `key` of the JSON document in `text`; {} without one."""
    try:
        document = json.loads(text[max(text.find("{"), 0) :])
    except (ValueError, RecursionError):
        return {}
    found = document.get(key) if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}


def number(word: object) -> float | None:
    """A finite number, or None."""
    try:
        value = float(str(word).replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < 1e12 else None


def _last(text: str) -> str:
    """The last line with words, for people."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if re.search(r"\w", line)]
    return "".join(c if c.isprintable() else " " for c in lines[-1])[:200] if lines else "it printed nothing"
