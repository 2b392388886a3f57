"""Rung RMA: gather in one file on the node what an admin needs to return the GPU. The node stays drained.

bundles/NODE-YYYYMMDDThhmmssZ.tar.gz   findings.json diagnostics.json decisions.json steps.json gpus.json nvml.json
                                       config.json kernel.log nvidia-bug-report.log.gz missing.txt
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth import child
from slurm_gpuhealth.findings import Gpu
from slurm_gpuhealth.ladder import state
from slurm_gpuhealth.ladder.rungs import HoldLost, Result
from slurm_gpuhealth.node import lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from slurm_gpuhealth.ladder.rungs import Climb

KEPT = 5
"""Bundles that the node keeps."""
PART = 8 << 20
"""The most bytes of a part that we write."""
REPORT = 64 << 20
REPORT_SECONDS = 300.0
SAFE_SECONDS = 120.0
NEWEST = 2000
"""The most rows of a table."""
ABOUT = (b"NVRM", b"nvidia", b"nvswitch", b"pcieport", b"AER", b"DPC")
"""A kernel line is kept if it has one of these words or the GPU's address."""


def run(climb: Climb) -> Result:
    """Gather the evidence. Always `fail`: this does not mend the node. The message names missing parts."""
    gpu, test, code, about = _blamed(climb)
    what = about or f"{climb.ours.fact}: the node can do nothing more by itself"
    try:
        path, missing = _write(climb, gpu)
    except OSError as error:
        return Result("fail", f"{what}; the evidence could not be written: {error}", gpu, test, code)
    without = f"; without {', '.join(missing)}" if missing else ""
    return Result("fail", f"{what}; evidence: {path}{without}", gpu, test, code, path)


def _blamed(climb: Climb) -> tuple[Gpu | None, str, str, str]:
    """GPU, test, code and message of the last failed rung for this fact; if the reason names a GPU, that one."""
    journal = climb.journal
    row = journal.one(
        "SELECT gpu, uuid, test, code, message FROM step"
        " WHERE outcome = 'fail' AND rung != 'RMA' AND fact = ? ORDER BY id DESC LIMIT 1",
        climb.ours.fact,
    ) or (None, None, "", "", "")
    if climb.ours.gpu is not None:
        return state.blamed(journal, climb.ours), *row[2:]
    index = row[0]
    for one in journal.get("gpus", []):
        if one["index"] == index if index is not None else (row[1] and one["uuid"] == row[1]):
            return Gpu(one["uuid"], one.get("pci"), one["index"], one.get("serial")), *row[2:]
    return (Gpu(index=index) if index is not None else None), *row[2:]


def _write(climb: Climb, gpu: Gpu | None) -> tuple[str, list[str]]:
    """Write the file completely or not at all. Returns its path and the missing parts. Raises OSError."""
    import io
    import tarfile

    from slurm_gpuhealth.node.journal_file import make_private

    folder = os.path.join(climb.settings.paths.state, "bundles")
    make_private(folder)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = os.path.join(folder, f"{climb.node}-{stamp}.tar.gz")
    for left in os.listdir(folder):  # by a program that was killed
        if left.startswith("."):
            os.unlink(os.path.join(folder, left))
    part = os.path.join(folder, ".new")
    missing: dict[str, str] = {}
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:

            def add(name: str, data: bytes) -> None:
                entry = tarfile.TarInfo(f"{climb.node}-{stamp}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                tar.addfile(entry, io.BytesIO(data))

            for name, read in PARTS.items():
                try:
                    data = read(climb, gpu)
                except HoldLost:
                    raise
                except Exception as error:  # whatever is wrong with one part, the others are worth having
                    missing[name] = f"{type(error).__name__}: {error}"
                    continue
                add(name, data)
            add("missing.txt", "".join(f"{name}: {why}\n" for name, why in missing.items()).encode())
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.unlink(part)
    kept = [name for name in os.listdir(folder) if name.endswith(".tar.gz")]  # leave what an admin unpacked there
    for old in sorted(kept)[:-KEPT]:
        os.unlink(os.path.join(folder, old))
    return path, list(missing)


def _table(name: str) -> Callable[[Climb, Gpu | None], bytes]:
    """The newest rows of a table of the journal."""

    def read(climb: Climb, _: Gpu | None) -> bytes:
        columns = [row[0] for row in climb.journal.rows("SELECT name FROM pragma_table_info(?)", name)]
        rows = climb.journal.rows(f"SELECT * FROM {name} ORDER BY id DESC LIMIT {NEWEST}")  # noqa: S608 - ours
        return _json([dict(zip(columns, row)) for row in rows])

    return read


def _gpus(climb: Climb, gpu: Gpu | None) -> bytes:
    """Each GPU with serial, VBIOS and address; the blamed GPU; the driver."""
    baseline = climb.journal.get("nvml-baseline", {})
    blamed = {"uuid": gpu.uuid, "pci": gpu.pci, "index": gpu.index, "serial": gpu.serial} if gpu else None
    return _json({"driver": baseline.get("driver"), "blamed": blamed, "gpus": baseline.get("gpus", {})})


def _reading(climb: Climb, _: Gpu | None) -> bytes:
    return _json(climb.journal.get("nvml"))


def _config(climb: Climb, _: Gpu | None) -> bytes:
    from slurm_gpuhealth.frozen import asdict

    return _json(asdict(climb.settings))


def _kernel(climb: Climb, gpu: Gpu | None) -> bytes:
    """The kernel's lines about the GPU, NVIDIA's driver and PCIe; if there are too many, the last ones."""
    words = (*ABOUT, gpu.pci.encode()) if gpu and gpu.pci else ABOUT
    fd = os.open(climb.settings.paths.kernel_log, os.O_RDONLY | os.O_NONBLOCK)
    found, size = [], 0
    with os.fdopen(fd, "rb", buffering=0) as log:
        device = not os.path.isfile(climb.settings.paths.kernel_log)
        if not device:
            log.seek(max(0, os.fstat(fd).st_size - 4 * PART))
        while True:
            try:
                data = os.read(fd, 1 << 16 if device else 4 * PART)
            except BrokenPipeError:  # overwritten while we read
                continue
            except BlockingIOError:
                break
            if not data:
                break
            found += [line for line in data.split(b"\n") if any(word in line for word in words)]
    for place in range(len(found) - 1, -1, -1):
        size += len(found[place]) + 1
        if size > PART:
            found = found[place + 1 :]
            break
    return b"\n".join([*found, b""])


def _bug_report(climb: Climb, _: Gpu | None) -> bytes:
    """The output of NVIDIA's own collector; in its safe mode if the driver or the collector hangs."""
    program = climb.settings.ladder.bug_report
    if not os.path.exists(program):
        raise FileNotFoundError(f"no {program}")
    folder = os.path.join(climb.settings.paths.state, "bundles")
    path = os.path.join(folder, ".report.log")
    ways = [([], REPORT_SECONDS), (["--safe-mode"], SAFE_SECONDS)]
    said = "an earlier program of ours hangs in the driver"
    hangs = climb.journal.get("stuck", {}).keys() & {"nvml", "dcgm", "bug-report"}  # not a user's NFS
    for words, seconds in ways[1:] if hangs else ways:
        argv = [program, *words, "--output-file", path]
        done: child.Completed | None = lock.guarded(
            climb.settings,
            climb.journal,
            "bug-report",
            seconds,
            lambda left, argv=argv: child.run(argv, timeout=left),  # type: ignore[misc]
        )
        if done is None:
            break
        for file in (f"{path}.gz", path):
            if done.rc == 0 and os.path.exists(file):
                with open(file, "rb") as report:
                    data = report.read(REPORT)
                os.unlink(file)
                return data
        said = f"no end in {seconds:g} s" if done.timed_out else f"exit {done.rc}: {done.stderr[-200:]!r}"
    raise OSError(said)


def _json(value: Any) -> bytes:
    import json

    return json.dumps(value, indent=1, default=str).encode()[:PART]


PARTS: dict[str, Callable[[Climb, Gpu | None], bytes]] = {
    "findings.json": _table("finding"),
    "diagnostics.json": _table("diagnostic"),
    "decisions.json": _table("decision"),
    "steps.json": _table("step"),
    "gpus.json": _gpus,
    "nvml.json": _reading,
    "config.json": _config,
    "kernel.log": _kernel,
    "nvidia-bug-report.log.gz": _bug_report,
}
