"""What on this node would make gpuhealth do the wrong thing. Judges the facts that look.py gathers. No I/O."""

from __future__ import annotations

import os
import re

from slurm_gpuhealth.doctor.line import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Dcgm, Settings

DCGM_FROM, DCGM_TO = (2, 4), (5, 0)
"""gpuhealth knows the output of these versions of DCGM."""
STALE = 3
"""Health checks that may be missing before the doctor says so."""
MARGIN = 60.0
"""Seconds that a clock may be wrong before the doctor says so."""


def judge_configuration(path: str, problems: Sequence[str], settings: Settings, root: bool = True) -> Iterator[Line]:
    for problem in problems:
        if not root and "Permission denied" in problem:
            yield Line(
                "configuration",
                "skip",
                f"only root may read {path}: checked with the defaults",
                "sudo gpuhealth doctor",
            )
            continue
        what, _, remedy = problem.rpartition(": ")
        mend = remedy.startswith(("chmod ", "chown "))  # as `config.unsafe` says it
        what = f"{what if mend else problem}: until this is corrected the hooks check nothing"
        yield Line("configuration", "FAIL", what, remedy if mend else "gpuhealth config check")
    if problems:
        return
    yield Line("configuration", "ok", f"{path} is read")
    if settings.mode == "shadow":
        what = 'mode = "shadow": nothing is drained; gpuhealth findings --shadow shows what would have been'
        yield Line("mode", "warn", what, f'in {path}: mode = "enforce", once you have looked at that')
    else:
        yield Line("mode", "ok", "faults drain (mode = enforce)")
    off = [name for name in ("kernel", "nvml", "dcgm") if getattr(settings.sources, name) == "off"]
    if off:
        what = f"{', '.join(off)} is off in [sources]: faults that no other source sees go unseen"
        yield Line("sources", "warn", what, f'in {path}, [sources]: {off[0]} = "enforce"')


def judge_folder(name: str, path: str, found: tuple[int, int] | str) -> Line:
    """`found`: owner and mode, or why it can't be looked at."""
    if isinstance(found, str):
        what = f"{path} ({name}): {found}: no program of gpuhealth has run here yet, or none could"
        return Line(name, "warn", what, "SLURMD_NODENAME=$(hostname -s) /opt/gpuhealth/bin/gpuhealth-check")
    uid, mode = found
    if uid != 0:
        return Line(name, "FAIL", f"{path} belongs to uid {uid}: gpuhealth does not use it", f"chown root: {path}")
    if mode & 0o077:
        return Line(name, "warn", f"{path} was open to others (mode {mode & 0o7777:04o})", f"chmod 700 {path}")
    return Line(name, "ok", f"{path} is root's alone")


def judge_journal(facts: Mapping[str, Any], settings: Settings, now: float) -> Iterator[Line]:
    """`facts`: the journal's `trouble`, and its values `checked`, `failure`, `sources`, `gres`, `stuck`."""
    if facts["trouble"]:
        remedy = f"df -h {settings.paths.state}; ls -ld {settings.paths.state}"
        yield Line("journal", "FAIL", f"{facts['trouble']}: a reboot loses what gpuhealth knows", remedy)
    checked, every = facts["checked"] or 0, settings.check.interval
    if checked > now + MARGIN:
        what = f"the last health check was {checked - now:.0f} s in the future: the clock was set back"
        yield Line("checked", "warn", what, "chronyc tracking")
    elif now - checked > STALE * every + MARGIN:
        last = f"the last completed health check was {(now - checked) / 60:.0f} min ago" if checked else ""
        what = f"{last or 'no health check has completed yet'}; there should be one every {every:g} s"
        yield Line("checked", "FAIL", what, "journalctl -t gpuhealth -n 20; tail /var/log/slurm/slurmd.log")
    else:
        yield Line("checked", "ok", f"the last health check was {max(0.0, now - checked):.0f} s ago")
    failure = facts["failure"]
    if failure:
        what = f"{failure['program']} failed {(now - failure['time']) / 3600:.1f} h ago: {failure['error']}"
        yield Line("failure", "warn", what, "report it: it is a bug of gpuhealth; the jobs went on")
    for name, source in (facts["sources"] or {}).items():
        if source["error"]:
            yield Line("source", "warn", f"source {name}: {source['error']}", "gpuhealth findings --severity info")
    for name in facts["stuck"] or ():
        if name == "store":
            what = (
                "a child that writes to the store can't be killed: the shared directory hangs, and nothing is shipped"
            )
            yield Line("stuck", "FAIL", what, "check the file server; new records wait in the journal")
            continue
        what = f"a child that asked {name} can't be killed: the driver hangs, and it is not asked again"
        yield Line("stuck", "FAIL", what, "drain, then reboot this node")
    error = (facts["gres"] or {}).get("error")
    if error:
        yield Line("positions", "warn", error, "slurmd -G; correct gres.conf")


def judge_kernel_log(path: str, error: str, mode: str, root: bool) -> Line:
    """`error`: why it could not be opened and read; "" if it could."""
    if mode == "off":
        return Line("kernel-log", "skip", "the kernel log is off in [sources]")
    if not error:
        return Line("kernel-log", "ok", f"{path} can be read")
    if not root:
        return Line(
            "kernel-log",
            "skip",
            f"{path}: {error}: run this as root to see whether root can read it",
            "sudo gpuhealth doctor",
        )
    what = f"{path} can't be read: {error}: Xid errors go unseen"
    return Line("kernel-log", "FAIL", what, "give slurmd CAP_SYSLOG and the device; dmesg_restrict=1 requires it")


def judge_gpus(offered: int | str, driven: int | str, configured: int | None, settings: Settings) -> Iterator[Line]:
    """`offered`: GPUs by `slurmd -G`, `driven`: GPUs by NVML, each a number or an error; `configured`: by NodeName."""
    if not configured and not offered and isinstance(driven, str):
        yield Line("gpus", "skip", f"no GPU here, and Slurm expects none ({driven})")
        return
    if isinstance(driven, str):
        yield Line("nvml", "FAIL", f"NVML: {driven}: the GPUs are not watched", "nvidia-smi; dmesg | grep -i nvrm")
    if isinstance(offered, str):
        what = f"slurmd -G: {offered}: which GPU a job has is not known, so the whole node is checked"
        yield Line("gres", "FAIL", what, "slurmd -G; correct gres.conf, or slurm.slurmd in gpuhealth.toml")
    if isinstance(driven, str) or isinstance(offered, str):
        return
    wanted = settings.gpus.count
    if driven != offered:
        what = f"slurmd offers {offered} GPUs (slurmd -G), but the driver has {driven}"
        yield Line("gres", "FAIL", what, "nvidia-smi -L; slurmd -G; a GPU is lost, or gres.conf is wrong")
    elif configured is not None and configured != offered:
        what = f"slurmd offers {offered} GPUs, but NodeName has Gres=gpu:{configured}"
        yield Line("gres", "FAIL", what, f"in slurm.conf, NodeName: Gres=gpu:{offered}")
    elif wanted and wanted != driven:
        what = f"the driver has {driven} GPUs, but gpus.count says {wanted}"
        yield Line("gres", "warn", what, f"in gpuhealth.toml, [gpus]: count = {driven}")
    else:
        yield Line("gres", "ok", f"{driven} GPUs: as many as slurmd offers")


def judge_registered(flags: Container[str]) -> Iterator[Line]:
    """`flags`: of the node's State in Slurm."""
    if "INVALID_REG" in flags:
        what = "slurmd reports less than slurm.conf has (INVALID_REG): Slurm keeps this node drained, refuses a resume"
        yield Line(
            "registered",
            "FAIL",
            what,
            "slurmd -C; slurmd -G; correct the node, slurm.conf or gres.conf; restart slurmd",
        )


def judge_dcgm(dcgm: Dcgm, facts: Mapping[str, Any], driven: int | str) -> Iterator[Line]:
    """`facts`: `answers`: whether the engine does; `error` and `trouble` in its answer; `version` of dcgmi; number of
    GPUs `seen`; DCGM's version in the `last` result."""
    if dcgm.backend == "off":
        yield Line("dcgm", "skip", "DCGM is off (dcgm.backend): GPUs are not tested")
        return
    if not facts["answers"]:
        what = f"no host engine answers at {dcgm.host}: levels 1 and 2 don't run, and jobs start untested"
        yield Line("host-engine", "FAIL", what, "systemctl enable --now nvidia-dcgm")
    else:
        yield Line("host-engine", "ok", f"a host engine answers at {dcgm.host}")
    if facts["error"]:
        remedy = "dcgmi discovery -l; dcgmi and nv-hostengine must be of one version"
        pydcgm = 'in gpuhealth.toml, [dcgm]: backend = "dcgmi", or the folder of pydcgm.py as pydcgm'
        yield Line("dcgm", "FAIL", facts["error"], pydcgm if dcgm.backend == "pydcgm" else remedy)
        return
    if facts.get("trouble"):
        what = f"{facts['trouble']}: GPUs are tested, but what DCGM does not list (NvSwitches) is not watched"
        yield Line("dcgm-discovery", "warn", what, "dcgmi modules -l; nv-hostengine without --denylist-modules")
    version, last, seen = facts["version"], facts["last"], facts["seen"]
    number = tuple(map(int, re.findall(r"\d+", version or "")[:2]))
    if version and not DCGM_FROM <= number < DCGM_TO:
        what = f"gpuhealth knows DCGM 2.4 to 4.x, not dcgmi {version}: it may misread the results"
        yield Line(
            "dcgm-version",
            "warn",
            what,
            "apt install datacenter-gpu-manager-4-core, or gpuhealth diag show on its output",
        )
    elif version:
        yield Line("dcgm-version", "ok", f"dcgmi {version}")
    if version and last and last != version:
        what = f"the last diagnostic ran with DCGM {last}, but dcgmi is {version} now"
        yield Line("dcgm-mismatch", "warn", what, "systemctl restart nvidia-dcgm after an upgrade")
    if seen is not None and isinstance(driven, int) and seen != driven:
        what = f"DCGM sees {seen} GPUs, but the driver has {driven}: the others are never tested"
        yield Line("dcgm-gpus", "FAIL", what, "systemctl restart nvidia-dcgm")


def judge_slurmds(count: int, node: str, settings: Settings) -> Line | None:
    """Several slurmd on one host: each node needs a journal of its own."""
    shared = [path for path in (settings.paths.state, settings.paths.run) if node not in path.split(os.sep)]
    if count < 2 or not shared:
        return None
    what = f"{count} slurmd run here, but their nodes would share {' and '.join(shared)}"
    return Line(
        "slurmds", "FAIL", what, 'in gpuhealth.toml, [paths]: state = "/var/lib/gpuhealth/{node}", and run likewise'
    )
