"""gpuhealth resume: gives back nodes that gpuhealth holds. Says who drained a node that it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.config.settings import ConfigError, Settings
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import control, hold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.slurm.hold import Change
    from slurm_gpuhealth.slurm.node import NodeRecord

SERVING = ("IDLE", "MIXED", "ALLOCATED")
INVALID = "Invalid node state"
TOO_FEW = (
    "while slurmd reports fewer GPUs than configured (INVALID_REG), Slurm keeps the node drained; mend its GPUs, or"
    " gres.conf and Gres= in slurm.conf, then restart slurmd there"
)
NO_RIGHTS = ("Invalid user id", "Access/permission denied", "access or permission denied")


@click.command()
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node.")
@click.pass_obj
def resume(here: str, nodes: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Give back nodes that gpuhealth drained. Exit 0 when every NODE is in service. NODE may be a host list.

    A fault that was found there is acknowledged: for at most drain.ack it does not drain the node again until it is
    mended. Works on any host of the cluster; needs the right to change nodes in Slurm.
    """
    settings, problems = settings_or_defaults(here)
    tell(problems)
    back = True
    for name in dict.fromkeys(name for text in nodes for name in common.hosts(settings, text)):
        try:
            good, text = would_give_back(settings, name) if dry_run else give_back(settings, name, here)
        except control.ControllerDown as error:
            raise click.ClickException(f"slurmctld does not answer, {name} is as it was: {error}") from None
        shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        if as_json:
            click.echo(json.dumps({"node": name, "good": good, "dry_run": dry_run, "message": text}))
        else:
            click.echo(f"{name}: {shown}", err=not good)
        back = back and good
    raise SystemExit(0 if back else 1)


def settings_or_defaults(node: str) -> tuple[Settings, list[str]]:
    """The settings, or the defaults and why. We run the programs that the file names: root uses no file of others."""
    path = configuration.config_path()
    defaults = Settings()
    if os.environ.get("SLURM_CONF"):
        defaults = replace(defaults, slurm=replace(defaults.slurm, conf=os.environ["SLURM_CONF"]))
    if os.geteuid() == 0 and os.path.exists(path):
        problems = configuration.unsafe(path)
        if problems:
            return defaults, problems
    try:
        return configuration.load(path, node), []
    except ConfigError as error:
        return defaults, [str(one) for one in error.problems]


def tell(problems: list[str]) -> None:
    """Say what is wrong with the configuration; but only to root that it can't be read."""
    for problem in problems:
        if os.geteuid() == 0 or os.strerror(errno.EACCES) not in problem:
            click.echo(f"{problem}; using the defaults", err=True)


def give_back(settings: Settings, name: str, here: str) -> tuple[bool, str]:
    """Whether the node is in service now, and one answer for people. Raises control.ControllerDown."""
    try:
        change = hold.give_back(settings.slurm, name)
    except ValueError as error:
        return False, str(error)
    except (control.Refused, control.NoProgram) as error:
        return False, why_not(error)
    if change.plan.action == "leave":
        return not_ours(change.before)
    good, text = _given_back(change)
    if name == here:
        text += _left_alone(settings, change.after)
    elif good:
        text += f"; its faults do not drain it again until they are mended ({_days(settings)}; there: gpuhealth status)"
    return good, text


def would_give_back(settings: Settings, name: str) -> tuple[bool, str]:
    """The same for --dry-run: changes nothing."""
    try:
        record = control.show_node(settings.slurm, name)
    except ValueError as error:
        return False, str(error)
    except (control.Refused, control.NoProgram) as error:
        return False, why_not(error)
    return (True, f"would be given back (is {record.reason!r})") if record.ours else not_ours(record)


def why_not(error: control.Refused | control.NoProgram) -> str:
    """Slurm's refusal, for people."""
    if isinstance(error, control.Refused) and any(words in error.text for words in NO_RIGHTS):
        return (
            "Slurm does not let you change nodes: be root or have AdminLevel Administrator (sacctmgr show user $USER)"
        )
    said = (error.text if isinstance(error, control.Refused) else "") or str(error)
    return f"{said}: {TOO_FEW}" if INVALID in said else said


def not_ours(record: NodeRecord) -> tuple[bool, str]:
    """Why a node that we do not hold was left alone."""
    if record.owner == "none":
        state = "+".join([record.base, *sorted(record.flags)])
        return record.base in SERVING, f"nothing to give back: gpuhealth does not hold it, and it is {state}"
    when = time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(record.reason_time)) if record.reason_time else "unknown time"
    by = f"{record.reason!r} by {record.reason_user or 'unknown'}, {when}"
    what = "set it DOWN" if record.base == "DOWN" else "drained it"
    who = "Slurm" if record.owner == "slurm" else "an admin"
    return False, f"left alone, {who} {what}: {by}; to end that: scontrol update NodeName={record.name} State=RESUME"


def _given_back(change: Change) -> tuple[bool, str]:
    was = f"was {change.before.reason!r}"
    if not change.done:
        return False, f"Slurm accepted the order, but the node is still drained: {change.after.reason!r}"
    if "DRAIN" in change.after.flags:
        return False, f"drained as it was before gpuhealth tested it: {change.after.reason!r} ({was})"
    if change.after.base not in SERVING:
        end = f"scontrol update NodeName={change.after.name} State=RESUME"
        return False, f"no longer drained ({was}), but {change.after.base}; once it is well: {end}"
    return True, f"back in service ({was})"


def _left_alone(settings: Settings, after: NodeRecord) -> str:
    """On the node itself: note the resume in its journal now, and say which faults still stand."""
    from slurm_gpuhealth.node import held
    from slurm_gpuhealth.node.journal import open_journal

    if os.geteuid() != 0 or not os.path.exists(os.path.join(settings.paths.state, "journal.db")):
        return ""
    journal = open_journal(settings.paths)
    held.look_at_hold(settings, journal, after.name, time.time())
    standing = journal.rows(
        "SELECT source, code, gpu, message FROM finding WHERE standing AND cleared IS NULL AND severity = 'fault'"
        " AND mode = 'acked' ORDER BY time"
    )
    lines = [
        f"\n  still there: {source}:{code}{'' if gpu is None else f' GPU{gpu}'}: {text}"
        for source, code, gpu, text in standing
    ]
    return "".join(lines) + (
        f"\n  these do not drain it again until they are mended ({_days(settings)})" if lines else ""
    )


def _days(settings: Settings) -> str:
    return f"at most {settings.drain.ack / 86400:g} d, drain.ack"
