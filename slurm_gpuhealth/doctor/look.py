"""What gpuhealth doctor finds here: this file gathers the facts, the files beside it judge them."""

from __future__ import annotations

import glob
import json
import os
import re
import time

from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.doctor import ladder as ladder_rules
from slurm_gpuhealth.doctor import levels, store
from slurm_gpuhealth.doctor import node as node_rules
from slurm_gpuhealth.doctor import slurm_conf as rules
from slurm_gpuhealth.doctor.line import Line, first
from slurm_gpuhealth.doctor.slurm_conf import Entry
from slurm_gpuhealth.policy import rows
from slurm_gpuhealth.slurm import control

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord

STARTS = re.compile(r"gpuhealth-(prolog|epilog|check)\b|slurm_gpuhealth\.(?:hooks|commands)\.(prolog|epilog|check)\b")
INSTALLED = re.compile(r"(?<![\w.{}$-])/[\w./+-]*/bin/(?:python3?|gpuhealth-(?:prolog|epilog|check))\b")
SHORT = 10.0
OBEYED = (
    ("slurm", "scontrol"),
    ("slurm", "sinfo"),
    ("slurm", "squeue"),
    ("slurm", "slurmd"),
    ("dcgm", "dcgmi"),
    ("dcgm", "pydcgm"),
    ("nvml", "library"),
    ("reset", "nvidia_smi"),
    ("reset", "systemctl"),
    ("ladder", "bug_report"),
)
"""Table and key of the programs and libraries that root uses because the configuration says so."""


def examine(node: str, settings: Settings, problems: list[str]) -> Iterator[Line]:
    """Every check, the cheap ones first; each call to the outside has a deadline. `problems`: of the configuration."""
    record, here, trouble = None, True, None
    try:
        record = control.show_node(settings.slurm, node)
    except (control.SlurmError, ValueError) as error:
        here = not isinstance(error, control.NoSuchNode)
        trouble = error
    path = configuration.config_path()
    if here or os.path.exists(path):
        yield from _configuration(path, problems, settings)
    if not here:
        what = f"{node} is not a node of this cluster: only slurm.conf is checked"
        yield Line("node", "skip", what, "gpuhealth --node NAME doctor")
    elif trouble:
        yield _no_slurm(trouble, settings)
    if record or not here:
        yield from _slurm_conf(settings, node, here)
    if os.geteuid() == 0:
        yield from store.examine_controller(settings, here, time.time())
    if here and (os.geteuid() == 0 or os.access(path, os.R_OK)):
        yield from _node(settings, node, record)


def _configuration(path: str, problems: list[str], settings: Settings) -> Iterator[Line]:
    yield from node_rules.judge_configuration(path, problems, settings, os.geteuid() == 0)
    for problem in [] if problems else rows.problems(path, settings):
        yield Line("policy-row", "warn", str(problem), "gpuhealth config check")
    for command in settings.check.command:
        for one in configuration.unsafe_command(command.argv)[:1]:
            what, _, remedy = one.rpartition(": ")
            yield Line("site-check", "FAIL", f"check {command.name} is not run: {what}", remedy)
    for path in [getattr(getattr(settings, table), key) for table, key in OBEYED]:
        for one in configuration.unsafe(path)[:1] if path and os.path.exists(path) else []:
            what, _, remedy = one.rpartition(": ")
            yield Line("unsafe-program", "FAIL", f"root uses {path}, and {what}", remedy)


def _no_slurm(error: Exception, settings: Settings) -> Line:
    if isinstance(error, control.NoProgram):
        return Line("controller", "FAIL", str(error), "command -v scontrol")
    return Line(
        "controller", "FAIL", f"slurmctld can't be asked: {error}", f"SLURM_CONF={settings.slurm.conf} scontrol ping"
    )


def _slurm_conf(settings: Settings, node: str, here: bool) -> Iterator[Line]:
    try:
        found = control.config(settings.slurm)
    except control.SlurmError as error:
        yield _no_slurm(error, settings)
        return
    written = {}
    try:
        with open(settings.slurm.conf, encoding="utf-8", errors="replace") as file:
            written = rules.parse_written(file.read())
    except OSError as error:
        what = f"slurm.conf ({settings.slurm.conf}): {error.strerror}"
        remedy = 'in gpuhealth.toml, [slurm]: conf = "/run/slurm/conf/slurm.conf" (configless)'
        yield Line("slurm-conf", "warn", what, remedy)
    patterns = [pattern for key in rules.PROGRAMS for pattern in found.get(key, ())]
    listing = {pattern: list_hooks(pattern) for pattern in patterns} if here else None
    yield from rules.judge_slurm_conf(found, rules.version_of(found), settings, listing, written, node)
    reboot = _entry(first(found, "RebootProgram").partition(" ")[0]) if here else None
    yield from ladder_rules.judge_slurm_conf(found, settings, reboot)
    yield from store.judge_slurm_conf(found, settings)


def list_hooks(pattern: str) -> list[Entry]:
    """The files that a value of Prolog, Epilog or HealthCheckProgram names."""
    return [_entry(path) for path in (glob.glob(pattern) if glob.has_magic(pattern) else [pattern])]


def _entry(path: str) -> Entry:
    unsafe = tuple(configuration.unsafe(path))
    target = os.path.realpath(path) if os.path.islink(path) else ""
    if os.path.isdir(path):
        return Entry(path, "folder", unsafe=unsafe, target=target)
    if not os.path.exists(path):
        return Entry(path, "missing", target=target)
    runs = bool(os.stat(path).st_mode & 0o111)
    text = os.path.realpath(path) + "\n"
    if os.path.isfile(path):  # not a pipe, on which `open` waits
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text += re.sub(r"(?m)^\s*#(?!!).*", "", file.read(1 << 14))
        except OSError:
            pass
    starts = next(STARTS.finditer(text), None)
    if not starts:
        return Entry(path, "file", runs, unsafe=unsafe, target=target)
    programs = INSTALLED.findall(text)
    lacks = next((one for one in programs if not os.access(one, os.X_OK)), "")
    unsafe += tuple(one for program in programs if not lacks for one in configuration.unsafe(program))
    return Entry(path, "file", runs, starts[1] or starts[2], lacks, unsafe, target)


def _node(settings: Settings, node: str, record: NodeRecord | None) -> Iterator[Line]:
    """What only the node itself can tell."""
    from slurm_gpuhealth.evidence.inventory import processes

    root = os.geteuid() == 0
    missing = [f"{key} = {path}" for key, path in _roots(settings) if not os.path.isdir(path)]
    if missing:
        what = f"{', '.join(missing)} in [paths] does not exist: nothing of this node can be checked"
        yield Line("paths", "FAIL", what, f"correct [paths] in gpuhealth.toml, or the name {node}: --node NAME")
        return
    count = sum(name == "slurmd" for _, name in processes(settings))
    several = node_rules.judge_slurmds(count, node, settings)
    if several:
        yield several
    error = _unreadable(settings.paths.kernel_log)
    yield node_rules.judge_kernel_log(settings.paths.kernel_log, error, settings.sources.kernel, root)
    journal = None
    if root:
        yield from _folders(settings)
        journal = _journal(settings)
    else:
        yield Line("journal", "skip", "only root may read the journal", "sudo gpuhealth doctor")
    if journal:
        names = ("checked", "failure", "sources", "gres", "stuck")
        facts = {"trouble": journal.trouble, **{name: journal.get(name) for name in names}}
        yield from node_rules.judge_journal(facts, settings, time.time())
    yield from node_rules.judge_registered(record.flags if record else ())
    driven = _driven(settings, journal)
    if root:
        yield from node_rules.judge_gpus(_offered(settings, node), driven, _configured(record), settings)
    dcgm = _dcgm(settings, journal)
    yield from node_rules.judge_dcgm(settings.dcgm, dcgm, driven)
    if journal and dcgm["answers"] and not dcgm["error"]:
        yield from levels.judge(settings, model_of(journal), dcgm["version"], journal.get("levels", {}))
    if root:
        yield from store.examine(settings, journal, time.time())
    yield from _ladder(settings, journal, record)


def model_of(journal: Journal) -> str:
    """The node's GPU model, as the driver names it; "" if it is not known."""
    gpus = journal.get("gpus", [])
    return str(gpus[0].get("name", "")) if gpus else ""


def _roots(settings: Settings) -> list[tuple[str, str]]:
    return [(key, getattr(settings.paths, key)) for key in ("proc", "sys", "dev")]


def _ladder(settings: Settings, journal: Journal | None, record: NodeRecord | None) -> Iterator[Line]:
    yield from ladder_rules.judge_settings(settings, model_of(journal) if journal else "")
    programs = (settings.reset.nvidia_smi, settings.reset.systemctl, *settings.repair.command[:1])
    runs = {path: os.path.isfile(path) and os.access(path, os.X_OK) for path in programs}
    unsafe = configuration.unsafe_command(settings.repair.command) if settings.repair.command else []
    yield from ladder_rules.judge_programs(settings, runs, unsafe)
    yield from ladder_rules.judge_unit(_unit(settings))
    if record:
        yield from ladder_rules.judge_remarks(record.comment, record.extra, record.name)


def _unit(settings: Settings) -> dict[str, str]:
    """slurmd's unit, if systemd runs."""
    from slurm_gpuhealth import child

    argv = (settings.reset.systemctl, "show", "-p", "LoadState", "-p", "KillMode", "slurmd.service")
    done = child.run(argv, timeout=SHORT)
    return dict(line.partition("=")[::2] for line in done.stdout.decode("utf-8", "replace").splitlines())


def _folders(settings: Settings) -> Iterator[Line]:
    for name, path in (("state", settings.paths.state), ("run", settings.paths.run)):
        try:
            status = os.lstat(path)
            found: tuple[int, int] | str = (status.st_uid, status.st_mode)
        except OSError as error:
            found = str(error.strerror)
        yield node_rules.judge_folder(name, path, found)


def _journal(settings: Settings) -> Journal | None:
    """The node's journal, or None: the doctor does not create one."""
    from slurm_gpuhealth.node.journal import open_journal

    folders = (settings.paths.state, settings.paths.run)
    if any(os.path.exists(os.path.join(folder, "journal.db")) for folder in folders):
        return open_journal(settings.paths)
    return None


def _unreadable(path: str) -> str:
    """Why the kernel log can't be read; "" if it can."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return str(error.strerror)
    try:
        os.read(fd, 16384)
    except BlockingIOError:  # nothing in it
        pass
    except BrokenPipeError:  # the oldest record was overwritten meanwhile
        pass
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(fd)
    return ""


def _driven(settings: Settings, journal: Journal | None) -> int | str:
    """How many GPUs answer, or why none does. If an earlier child can't be killed, no second one is started."""
    from slurm_gpuhealth.evidence import nvml
    from slurm_gpuhealth.node import lock

    def ask(seconds: float = settings.nvml.timeout) -> Any:
        return nvml.read(settings, timeout=seconds, baseline=journal.get("nvml-baseline") if journal else None)

    try:
        probed = lock.guarded(settings, journal, "nvml", settings.nvml.timeout, ask) if journal else ask()
    except TimeoutError as error:
        return str(error)
    if probed is None:
        return "the driver hangs: an earlier child still waits for it"
    if not probed.value:
        return str(probed.error)
    if "failed" in probed.value:
        return f"does not start: {probed.value['failed']['text']}"
    return sum("uuid" in gpu for gpu in probed.value["gpus"])


def _offered(settings: Settings, node: str) -> int | str:
    try:
        return len(control.gres_map(settings.slurm, node)[0])
    except (control.SlurmError, ValueError) as error:
        return str(error)


def _configured(record: NodeRecord | None) -> int | None:
    """`gpu:h100:8(S:0-1),gpu:a100:2` → 10; None when the controller did not say."""
    if record is None:
        return None
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[\w.-]+)*?:(\d+)(?=[(,]|$)", record.gres))


def _dcgm(settings: Settings, journal: Journal | None) -> dict[str, Any]:
    """What `judge_dcgm` wants to know. dcgmi is asked only when an engine answers: otherwise it would start its own."""
    from slurm_gpuhealth.diagnose import dcgmi, engine

    facts: dict[str, Any] = {"answers": False, "error": "", "trouble": "", "version": None, "seen": None, "last": None}
    dcgm = settings.dcgm
    if dcgm.backend == "off":
        return facts
    facts["answers"] = engine.answers(dcgm.host)
    row = journal.one("SELECT detail FROM diagnostic ORDER BY id DESC LIMIT 1") if journal else None
    facts["last"] = json.loads(row[0]).get("version") if row else None
    if dcgm.backend == "pydcgm":
        facts["error"] = _pydcgm(dcgm.pydcgm)
        return facts
    try:
        facts["version"] = dcgmi.program_version(dcgm.dcgmi)
        if facts["answers"]:
            seen = dcgmi.discovered(dcgm)
            facts["seen"], facts["trouble"] = len(seen.gpus), seen.trouble
    except dcgmi.DcgmError as error:
        facts["error"] = str(error)
    return facts


def _pydcgm(folder: str) -> str:
    """Why NVIDIA's bindings can't be imported; "" if they can."""
    import importlib
    import sys

    from slurm_gpuhealth.child import probe

    def load() -> bool:
        sys.path.insert(0, folder)
        return bool(importlib.import_module("pydcgm"))

    probed = probe(load, timeout=SHORT)
    return f"pydcgm in {folder}: {probed.error}" if probed.error else ""
