"""What would keep a drained node from climbing the ladder. Judges the facts that look.py gathers. No I/O."""

from __future__ import annotations

from slurm_gpuhealth.doctor.line import Line, first, number
from slurm_gpuhealth.ladder import rungs, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.doctor.line import Config
    from slurm_gpuhealth.doctor.slurm_conf import Entry

BOOT = 600
"""Seconds that a GPU server may need from the reboot order until slurmd registers."""
USUAL = {"L3": 900, "L4": 3600}
"""Seconds: DCGM's documentation says about 15 min for level 3, and longer for level 4."""
NEEDED = {"reset": ("nvidia_smi", "systemctl")}


def judge_slurm_conf(config: Config, settings: Settings, reboot: Entry | None = None) -> Iterator[Line]:
    """What slurm.conf must have for the rungs that are on. `reboot`: its RebootProgram on this node."""
    if settings.reboot.enabled:
        yield from _reboot(config, reboot)
    if "extra_constraints" in ",".join(config.get("SchedulerParameters", ())):
        what = "SchedulerParameters=extra_constraints: Slurm reads a node's Extra as JSON, but gpuhealth writes results"
        yield Line("extra", "warn", f"{what} there: jobs with --extra avoid such a node", _remedy_extra(config))


def _reboot(config: Config, entry: Entry | None) -> Iterator[Line]:
    program, limit = first(config, "RebootProgram"), number(first(config, "ResumeTimeout")) or 60
    if not program:
        what = "reboot.enabled is true, but slurm.conf has no RebootProgram: Slurm reboots nothing"
        yield Line("reboot", "FAIL", what, "in slurm.conf: RebootProgram=/sbin/reboot")
    elif entry and (entry.kind != "file" or not entry.runs):
        what = f"RebootProgram={program} is no program here: slurmd reboots nothing, and says so in its log alone"
        yield Line("reboot", "FAIL", what, f"chmod 755 {entry.path}, or correct the path")
    elif first(config, "ReturnToService") == "2":
        what = (
            "reboot.enabled is true, but ReturnToService=2: Slurm would put a rebooted node into service untested,"
            " so gpuhealth reboots none"
        )
        yield Line("reboot", "FAIL", what, "in slurm.conf: ReturnToService=1")
    elif entry and entry.unsafe:  # Slurm 26.05 looks at the file itself
        what, _, remedy = entry.unsafe[0].rpartition(": ")
        yield Line("reboot", "FAIL", f"RebootProgram={program}: {what}: Slurm 26.05 and later do not start it", remedy)
    elif limit < BOOT:
        what = f"ResumeTimeout is {limit} s: Slurm gives up a node that takes longer to boot (reboot timed out)"
        yield Line("reboot", "warn", what, f"in slurm.conf: ResumeTimeout={2 * BOOT}")
    else:
        yield Line("reboot", "ok", f"Slurm reboots with {program}, and waits {limit} s")


def _remedy_extra(config: Config) -> str:
    words = [one for one in ",".join(config["SchedulerParameters"]).split(",") if one != "extra_constraints"]
    return f"in slurm.conf: SchedulerParameters={','.join(words)}"


def judge_settings(settings: Settings, model: str) -> Iterator[Line]:
    """Settings that are valid but let no node prove itself fit. `model`: the node's GPU model, "" if unknown."""
    tests = settings.sources.dcgm != "off" and settings.dcgm.backend != "off"
    off = [name for name in ("reset", "reboot", "repair", "sweep") if not _is_on(settings, name)]
    if not settings.ladder.tests:
        what = "ladder.tests is false: each drained node waits for an admin"
        yield Line("ladder", "warn", what, "in gpuhealth.toml, [ladder]: tests = true")
    elif not tests:
        what = "DCGM is off: no node can prove that it is fit, and each drained node ends as untested"
        yield Line("ladder", "warn", what, 'in gpuhealth.toml: [sources] dcgm = "enforce", [dcgm] backend = "dcgmi"')
    else:
        yield Line("ladder", "ok", "a drained node tests itself" + (f"; off: {', '.join(off)}" if off else ""))
    for rung, usual in USUAL.items():
        limit = rungs.seconds(settings, rung, model)
        if tests and limit < usual:
            what = f"{rung} is stopped after {limit / 60:g} min, but takes about {usual / 60:g}: it proves nothing"
            remedy = f'in gpuhealth.toml, [ladder]: {rung.lower()} = "{2 * usual // 60}min"'
            yield Line("limits", "warn", what, remedy)
    if settings.sweep.enabled and settings.mode == "enforce" and not sweep.on(settings):
        what = 'sweep.enabled is true, but sources.dcgm is not "enforce": no sweep runs, because it could not drain'
        yield Line("sweep", "warn", what, 'in gpuhealth.toml, [sources]: dcgm = "enforce"')


def _is_on(settings: Settings, name: str) -> bool:
    return settings.sweep.enabled if name == "sweep" else rungs.enabled(settings, name)


def judge_programs(settings: Settings, runs: Mapping[str, bool], unsafe: Sequence[str]) -> Iterator[Line]:
    """`runs`: path → whether root can execute it; `unsafe`: why others can change the repair program."""
    for rung, keys in NEEDED.items():
        for key in keys:
            path = getattr(getattr(settings, rung), key)
            if _is_on(settings, rung) and not runs[path]:
                what = f"{rung}.enabled is true, but {path} is not a program here: the rung fails"
                yield Line("ladder-program", "FAIL", what, f"in gpuhealth.toml, [{rung}]: {key} = the right path")
    for path in settings.repair.command[:1]:
        if not runs[path]:
            what = f"repair.command: {path} is not a program here: the rung fails, and RMA follows"
            yield Line("repair", "FAIL", what, f"chmod 755 {path}, or correct the path")
        elif unsafe:
            what, _, remedy = unsafe[0].rpartition(": ")
            yield Line("repair", "FAIL", f"repair.command is not run: {what}", remedy)
        else:
            yield Line("repair", "ok", f"{path} is called when tests, reset and reboot did not help")


def judge_unit(unit: Mapping[str, str]) -> Iterator[Line]:
    """`unit`: LoadState and KillMode of slurmd.service; empty if there is no systemd."""
    if unit.get("LoadState") != "loaded":
        return
    if unit.get("KillMode") in ("process", "none"):
        yield Line("kill-mode", "ok", "a restart of slurmd leaves a running diagnostic alone (KillMode)")
        return
    what = f"slurmd.service has KillMode={unit.get('KillMode')}: a restart of slurmd ends the ladder's diagnostic"
    yield Line("kill-mode", "FAIL", what, "systemctl edit slurmd: [Service] KillMode=process")


def judge_remarks(comment: str, extra: str, node: str) -> Iterator[Line]:
    """Whether gpuhealth can write an ack and a result beside the site's own text."""
    for key, text in (("Comment", comment), ("Extra", extra)):
        if "\n" in text:
            what = f"the node's {key} has a line break: gpuhealth can write no ack and no result there"
            yield Line("remarks", "warn", what, f"scontrol update NodeName={node} {key}=...")
