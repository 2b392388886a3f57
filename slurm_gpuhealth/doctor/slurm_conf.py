"""What in Slurm's configuration would make gpuhealth or Slurm do the wrong thing, each with a remedy. No I/O.

look.py gathers the facts; node.py judges those of the node itself. What is said of Slurm here was measured on 22.05,
24.11, 25.11 and 26.05, unless it names a man page.
"""

from __future__ import annotations

import fnmatch
import os
import re

from slurm_gpuhealth.doctor.line import Line, first, number
from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.slurm.node import EXPEDITES, expand, parse_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Literal

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.doctor.line import Config, Level

    Listing = Mapping[str, Sequence["Entry"]]
    """Each value of Prolog, Epilog and HealthCheckProgram → the files that it names."""


@frozen
class Entry:
    """A file that Slurm runs as a hook, or trips over."""

    path: str
    kind: Literal["file", "folder", "missing"] = "file"
    runs: bool = True
    """Root may execute it."""
    starts: str = ""
    """`prolog`, `epilog` or `check`: which of our programs it starts."""
    lacks: str = ""
    """The program that it starts, if that is missing."""
    unsafe: Sequence[str] = ()
    """Why others can change it (`config.unsafe`)."""
    target: str = ""
    """Where it leads, if it is a link."""

    @property
    def shown(self) -> str:
        return f"{self.path} (a link to {self.target})" if self.target else self.path


PROGRAMS = {"Prolog": "prolog", "Epilog": "epilog", "HealthCheckProgram": "check"}
SAYS_WHAT = {
    "Prolog": "GPUs are not checked before a job starts",
    "Epilog": "which job had which GPU is not known, and no GPU is tested after a failed job",
    "HealthCheckProgram": "faults go unseen, and no drained node is tested",
}
BACKUPS = ("*~", "*.rpmsave", "*.rpmnew", "*.rpmorig", "*.dpkg-*", "*.bak", "*.orig", "*.old", "*.save", "*.swp", "#*#")
NODE_STATES = {  # a word of HealthCheckNodeState → the first Slurm that knows it
    **dict.fromkeys(("ANY", "ALLOC", "IDLE", "MIXED", "CYCLE"), (0, 0)),
    "NONDRAINED_IDLE": (23, 2), "START_ONLY": (25, 11), "REBOOT_ONLY": (26, 5),
}  # fmt: skip
NONE = (0, 65534)
"""Values of Slurm's time-outs that mean no limit (NO_VAL16) or the default."""
SAMPLES = 3
"""A job stands still if it did not work in so many checks: fewer may be by chance, and a check may fail."""
HEALTH_CHECK_LIMIT = 60


def judge_slurm_conf(
    config: Config,
    version: tuple[int, ...],
    settings: Settings,
    listing: Listing | None,
    written: Config | None = None,
    node: str = "",
) -> list[Line]:
    """What is wrong with Slurm's configuration for gpuhealth.

    `listing` is None on a host that is no node: it lacks the hooks' files. `written` is slurm.conf as `parse_written`
    reads it: it has what `scontrol show config` leaves out.
    """
    written = written or {}
    lines: list[Line] = []
    for key in PROGRAMS:
        lines += _program(key, config, listing, written, settings)
    lines += [
        *_node_state(config, version, settings),
        *_interval(config, settings),
        *_prolog_flags(config, version),
        *_scheduler(config, settings),
        *_time_limits(config, settings, written),
        *_expedite(config, version, settings, listing),
        *_power(config, node),
    ]
    user = first(config, "SlurmdUser")
    if user and not user.startswith("root"):
        what = f"slurmd runs as {user}: gpuhealth can't read the kernel log and can't drain"
        lines.append(Line("slurmd-user", "FAIL", what, "in slurm.conf: SlurmdUser=root"))
    return lines


def version_of(config: Config) -> tuple[int, ...]:
    """`SLURM_VERSION = 22.05.8` → (22, 5, 8)."""
    return parse_version(first(config, "SLURM_VERSION"))


def parse_written(text: str) -> dict[str, tuple[str, ...]]:
    """slurm.conf: each key in lower case → its values, one for each line. Does not read included files."""
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("#")[0].partition("=")
        if equals:
            name = key.strip().lower()
            found[name] = (*found.get(name, ()), value.strip())
    return found


def in_order(patterns: Sequence[str], listing: Listing) -> list[Entry]:
    """The files in the order in which Slurm runs them: each glob in reverse alphabetical order, in every release."""
    return [entry for one in patterns for entry in sorted(listing.get(one, ()), key=lambda e: e.path, reverse=True)]


def _program(key: str, config: Config, listing: Listing | None, written: Config, settings: Settings) -> Iterator[Line]:
    """Does `key` run our program, and does any other program there drain the node?"""
    program, check = PROGRAMS[key], key.lower()
    patterns = config.get(key, ())
    health = program == "check"
    wiring = f"{key}=/opt/gpuhealth/bin/gpuhealth-check" if health else f"{key}=/etc/slurm/{program}.d/*"
    wire = f"in slurm.conf: {wiring}"
    if not patterns:
        yield Line(check, "FAIL", f"{key} is not set in slurm.conf: {SAYS_WHAT[key]}", wire)
        return
    if len(written.get(check, ())) > len(patterns):
        what = f"slurm.conf has {len(written[check])} lines {key}=, but this Slurm uses only the last: {patterns[-1]}"
        yield Line(f"{check}-lines", "warn", what, f"keep one line in slurm.conf: {wiring}")
    if listing is None:
        yield Line(check, "skip", f"{key}={','.join(patterns)}: run this on a node to check what that starts")
        return
    entries = in_order(patterns, listing)
    for pattern in patterns:
        if not listing.get(pattern):
            what = f"{key}={pattern} matches nothing: " + (SAYS_WHAT[key] if health else "each job drains its node")
            yield Line(f"{check}-files", "FAIL", what, f"mkdir -p {os.path.dirname(pattern)}; link our script there")
    for entry in entries:
        yield from _hook_file(key, entry)
    ours = [entry for entry in entries if entry.starts == program]
    if not ours:
        script = f"install -m 755 scripts/{program}.d/50-gpuhealth {os.path.dirname(patterns[0])}/"
        what = f"{key}={','.join(patterns)} does not start gpuhealth-{program}: {SAYS_WHAT[key]}"
        yield Line(check, "FAIL", what, wire if health else script)
    for entry in ours[1:]:
        yield Line(check, "warn", f"{key} starts gpuhealth-{program} more than once", f"rm {entry.path}")
    for entry in ours[:1]:
        if entry.lacks:
            what = f"{entry.path} starts {entry.lacks}, which is not there: {SAYS_WHAT[key]}"
            remedy = "/opt/gpuhealth/bin/pip install slurm-gpuhealth, or correct the path in that file"
            yield Line(check, "FAIL", what, remedy)
        else:
            order = ", ".join(os.path.basename(one.path) for one in entries)
            more = f" ({len(entries)} files, run in this order: {order})" if len(entries) > 1 else ""
            yield Line(check, "ok", f"{key} starts gpuhealth-{program} by {entry.path}{more}")


def _hook_file(key: str, entry: Entry) -> Iterator[Line]:
    """What Slurm does with one file of a hook. If a hook fails, Slurm drains the node and holds the job."""
    drains = "the check fails" if key == "HealthCheckProgram" else "each job drains its node"
    check, name = f"{key.lower()}-files", os.path.basename(entry.path)
    if entry.kind == "missing":
        yield Line(
            check, "FAIL", f"{key}: {entry.shown} does not exist: {drains}", f"ls -l {entry.target or entry.path}"
        )
    elif entry.kind == "folder":
        what = f"{key}: {entry.path} is a folder in the glob: {drains}"
        yield Line(check, "FAIL", what, f"mv {entry.path} {os.path.dirname(os.path.dirname(entry.path))}/")
    elif not entry.runs:
        what = f"{key}: {entry.shown} is not executable: {drains}"
        yield Line(check, "FAIL", what, f"chmod 755 {entry.target or entry.path}, or move it away")
    elif any(fnmatch.fnmatchcase(name, pattern) for pattern in BACKUPS):
        yield Line(check, "warn", f"{key}: {entry.path} looks like a backup, but Slurm runs it too", f"rm {entry.path}")
    for one in entry.unsafe[:1]:
        what, _, remedy = one.rpartition(": ")
        level: Level = "warn" if " belongs to " in one else "FAIL"  # many sites give /etc/slurm to SlurmUser
        yield Line(f"{key.lower()}-unsafe", level, f"{key}: root runs {entry.path}, and {what}", remedy)


def _node_state(config: Config, version: tuple[int, ...], settings: Settings) -> Iterator[Line]:
    """HealthCheckNodeState must include the nodes that we hold and the nodes with jobs."""
    text = first(config, "HealthCheckNodeState").upper().replace(" ", "")
    # A word that this Slurm does not know is ignored; with none left the check runs on ANY.
    words = {word for word in text.split(",") if NODE_STATES.get(word, (99, 0)) <= version[:2]}
    remedy = "in slurm.conf: HealthCheckNodeState=ANY"
    if words <= {"CYCLE"} or "ANY" in words:
        yield Line("node-state", "ok", "the health check runs on nodes in any state")
    elif "IDLE" not in words or words & {"START_ONLY", "REBOOT_ONLY"}:
        what = f"HealthCheckNodeState={text} leaves out drained nodes: they can't test themselves, and never come back"
        yield Line("node-state", "FAIL", what, remedy)
    elif settings.reboot.enabled:  # the other words leave out DOWN
        what = f"HealthCheckNodeState={text} leaves out DOWN nodes, but after the ladder's reboot a node is DOWN"
        yield Line("node-state", "FAIL", what, remedy)
    else:
        left = [name for name in ("ALLOC", "MIXED") if name not in words]
        who = f"nodes with jobs ({','.join(left)})" if left else "nodes that are down"
        yield Line("node-state", "warn", f"HealthCheckNodeState={text} leaves out {who}", remedy)


def _interval(config: Config, settings: Settings) -> Iterator[Line]:
    seconds, ours = number(first(config, "HealthCheckInterval")) or 0, settings.check.interval
    if not seconds:
        what = f"HealthCheckInterval is 0: Slurm never runs the health check; {SAYS_WHAT['HealthCheckProgram']}"
        yield Line("interval", "FAIL", what, f"in slurm.conf: HealthCheckInterval={ours:g}")
    elif seconds != ours:
        what = f"HealthCheckInterval is {seconds} s, but check.interval says {ours:g} s: "
        what += "prologs ask the driver again" if seconds > ours else "prologs trust readings that are too old"
        yield Line("interval", "warn", what, f'in gpuhealth.toml, [check]: interval = "{seconds}s"')
    else:
        yield Line("interval", "ok", f"the health check runs every {seconds} s")
    after = settings.hang.after
    if settings.sources.nvml != "off" and SAMPLES * seconds > after:
        what = f"the health check runs every {seconds} s: too seldom to see within hang.after ({after:g} s) that a job"
        yield Line("hang", "warn", f"{what} stands still", f'in gpuhealth.toml, [hang]: after = "{SAMPLES * seconds}s"')


def _prolog_flags(config: Config, version: tuple[int, ...]) -> Iterator[Line]:
    text = ",".join(config.get("PrologFlags", ()))
    flags = {flag.strip().lower() for flag in text.split(",") if flag.strip()}
    rest = [word for word in text.split(",") if word.lower() not in ("", "alloc", "deferbatch", "nohold", "runinjob")]
    remedy = f"in slurm.conf: PrologFlags={','.join(['Alloc', 'DeferBatch', *rest])}"
    # Contain, X11 (man page) and RunInJob (man page) bring Alloc with them; DeferBatch does from 26.05 on.
    alloc = flags & {"alloc", "contain", "x11", "runinjob", "nohold"} or ("deferbatch" in flags and version >= (26, 5))
    if not alloc:
        what = f"PrologFlags={text or '(none)'} without Alloc: the prolog runs only on a job's first node"
        yield Line("prolog-flags", "FAIL", what, remedy)
    elif "deferbatch" not in flags:
        what = f"PrologFlags={text} without DeferBatch: a job's script starts before its other nodes have passed"
        yield Line("prolog-flags", "warn", what, remedy)
    elif "nohold" in flags:
        what = f"PrologFlags={text}: with NoHold salloc does not wait for the prologs"
        yield Line("prolog-flags", "warn", what, remedy)
    else:
        yield Line("prolog-flags", "ok", f"no job starts before all of its nodes have passed (PrologFlags={text})")
    if "runinjob" in flags:
        what = "PrologFlags=RunInJob hides exit codes: the epilog sees 0:0 for a failed batch job, and tests no GPU"
        yield Line("run-in-job", "FAIL", what, remedy)


def _scheduler(config: Config, settings: Settings) -> Iterator[Line]:
    now = ",".join(config.get("SchedulerParameters", ()))
    if "nohold_on_prolog_fail" in now.lower():
        yield Line("nohold", "ok", "a job that a prolog turned away is not held")
        return
    level: Level = "FAIL" if settings.prolog.move_job == "exit" else "warn"
    what = "SchedulerParameters without nohold_on_prolog_fail: "
    what += (
        "each job"
        if level == "FAIL"
        else "a job that can't be requeued gently (srun, several nodes without DeferBatch)"
    )
    what += " on a bad node is held until an admin releases it"
    wanted = ",".join([*filter(None, [now]), "nohold_on_prolog_fail"])
    yield Line("nohold", level, what, f"in slurm.conf: SchedulerParameters={wanted}")


def _time_limits(config: Config, settings: Settings, written: Config) -> Iterator[Line]:
    """Slurm must not end our programs before they end themselves: if it ends a prolog, it drains the node."""
    both = number(first(config, "PrologEpilogTimeout"))
    for key, ours in (("Prolog", settings.prolog.timeout), ("Epilog", settings.epilog.timeout)):
        name = f"{key}Timeout"  # 25.05 and later (man page); a file may have it and `show config` not
        own = number(first(config, name)) or number(first(written, name.lower()))
        limit, source = (own, name) if own not in (None, *NONE) else (both, "PrologEpilogTimeout")
        if limit in (None, *NONE) or limit > ours:
            yield Line(name.lower(), "ok", f"Slurm lets our {key.lower()} have its {ours:g} s")
            continue
        what = f"{source} is {limit} s, but our {key.lower()} may take {ours:g} s: Slurm ends it and drains a good node"
        yield Line(name.lower(), "FAIL", what, f"in slurm.conf: {source}={int(ours) + 30}")
    limit = number(first(config, "HealthCheckTimeout")) or HEALTH_CHECK_LIMIT
    if limit <= settings.check.timeout:
        what = f"Slurm ends a health check after {limit} s, but ours may take {settings.check.timeout:g} s"
        yield Line("check-timeout", "FAIL", what, f'in gpuhealth.toml, [check]: timeout = "{max(1, limit * 3 // 4)}s"')


def _expedite(config: Config, version: tuple[int, ...], settings: Settings, listing: Listing | None) -> Iterator[Line]:
    """Whether Slurm allows --requeue=expedite, and which files do not run after our epilog hands such a job back."""
    if not settings.epilog.expedite:
        return
    if version < EXPEDITES:
        what = "epilog.expedite has no effect: Slurm knows --requeue=expedite from 25.11 on"
    elif "enable_expedited_requeue" not in ",".join(config.get("SlurmctldParameters", ())):
        what = "epilog.expedite has no effect: SlurmctldParameters has no enable_expedited_requeue"
    else:
        entries = in_order(config.get("Epilog", ()), listing or {})
        ours = [place for place, entry in enumerate(entries) if entry.starts == "epilog"]
        later = entries[ours[0] + 1 :] if ours else []
        if later:
            names = ", ".join(os.path.basename(one.path) for one in later)
            what = f"Epilog: after a job of --requeue=expedite that we hand back, Slurm does not run {names}"
            path = entries[ours[0]].path
            folder = os.path.dirname(path)
            alone = path in config["Epilog"]
            yield Line("expedite", "warn", what, "let it run last" if alone else f"mv {path} {folder}/00-gpuhealth")
            return
        what = "a failed job of --requeue=expedite whose GPU is broken starts elsewhere at once"
    yield Line("expedite", "ok", what)


def _power(config: Config, node: str) -> Iterator[Line]:
    """Slurm powers off idle nodes, drained ones among them (man page: SuspendTime), in the middle of a diagnostic."""
    after, program = first(config, "SuspendTime"), first(config, "SuspendProgram")
    if not program or not (number(after) or 0) > 0:
        yield Line("power", "ok", "Slurm powers off no idle node")
        return
    nodes, parts = first(config, "SuspendExcNodes"), first(config, "SuspendExcParts")
    if "DRAIN" in first(config, "SuspendExcStates").upper().split(","):
        yield Line("power", "ok", "Slurm powers off no drained node (SuspendExcStates)")
    elif _names(nodes, node):
        yield Line("power", "ok", f"Slurm does not power off {node} (SuspendExcNodes)")
    else:
        what = f"SuspendTime={after}: Slurm powers off idle nodes, even one that gpuhealth holds and tests"
        excluded = [f"{k}={v}" for k, v in (("SuspendExcNodes", nodes), ("SuspendExcParts", parts)) if v]
        what += f", unless {' or '.join(excluded)} names it" if excluded else ""
        remedy = "in slurm.conf: SuspendExcStates=DRAIN (Slurm 23.02 and later), or the GPU nodes in SuspendExcNodes"
        yield Line("power", "warn" if excluded else "FAIL", what, remedy)


def _names(hostlist: str, node: str) -> bool:
    """Whether `n[1-4],x` names the node for sure. `n[1-9]:2` means any two of them."""
    for part in re.split(r",(?![^\[]*\])", hostlist):
        try:
            if node and ":" not in part and node in expand(part):
                return True
        except ValueError:
            continue
    return False
