"""gpuhealth-escalate NODE: have a node test itself, and follow it until the result is known."""

from __future__ import annotations

import json
import os
import re
import sys
import time

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.commands.resume import settings_or_defaults, tell, why_not
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import ask as asking
from slurm_gpuhealth.ladder import follow
from slurm_gpuhealth.ladder.follow import End
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.ladder.ask import Request
    from slurm_gpuhealth.slurm.node import NodeRecord

MOST = 1000
"""The most nodes in one request; the budget allows far fewer."""
WORST = ("fit", "asked", "not testable", "not run", "not fit")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("node", required=False)
@click.option("--level", type=click.Choice(["3", "4"]), help="DCGM run level [default: 3; with --test: 1].")
@click.option("--through", type=click.Choice(["4"]), help="Test up to this level even if nothing is found.")
@click.option("--test", "names", metavar="NAMES", help="Tests of other tools: nccl,nvbandwidth,... or all.")
@click.option("--gpu", type=click.IntRange(0, 9999), metavar="N", help="Only this GPU (its index in nvidia-smi).")
@click.option("--reason", "text", metavar="TEXT", help="Shown after your name in the node's reason.")
@click.option("--take-over", is_flag=True, help="Also test a node that an admin drained; then put the drain back.")
@click.option("--here", is_flag=True, help="Test this node, as root; the test starts at once.")
@click.option("--no-wait", is_flag=True, help="Ask, and do not wait for the result.")
@click.option("--json", "as_json", is_flag=True, help="At the end, one JSON object per node.")
def command(
    node: str | None,
    level: str | None,
    through: str | None,
    names: str | None,
    gpu: int | None,
    text: str | None,
    take_over: bool,
    here: bool,
    no_wait: bool,
    as_json: bool,
) -> NoReturn:
    """Drain NODE, let its jobs end, have it test itself, and show the progress.

    A good node goes back into service, a bad node stays drained. NODE may be a hostlist, 'n[1-32]'; only as many nodes
    are tested as the budget allows. Needs the right to change nodes in Slurm.

    Exit 0: fit. 1: not fit. 2: not testable. 3: could not run. For several nodes: the worst of these.
    Ctrl-C (exit 130) ends only the display; the test goes on.
    """
    own = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    if not node and not here:
        raise click.UsageError("which node?")
    if here and (os.geteuid() != 0 or node not in (None, own)):
        raise click.UsageError(f"--here is for root, and for this node only: {own} (or set SLURMD_NODENAME)")
    settings, problems = settings_or_defaults(own)
    tell(problems)
    tests = _tests(settings, names or "", gpu)
    request = asking.Request(
        f"L{level or (1 if tests else 3)}",
        f"L{through}" if through else "",
        gpu,
        who(text),
        take_over,
        tests=tests,
    )
    ends = run(settings, hostlist(settings, node or own), request, Screen(), here, no_wait)
    _print(settings, own, ends, as_json)
    raise SystemExit(max(ends, key=lambda one: WORST.index(one.outcome)).exit)


def main() -> None:
    """For a wrong call click exits with 1 or 2, which mean something else here."""
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(3)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


class Screen:
    """Progress on stderr: a line for each event, and on a terminal a last line that is rewritten."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.said: dict[str, str] = {}

    def say(self, node: str, text: str) -> None:
        if self.said.get(node) != text:
            self.said[node] = text
            click.echo(("\r\x1b[K" if self.live else "") + common.safe(f"{node}: {text}"), err=True)

    def now(self, text: str) -> None:
        if self.live:
            import shutil

            width = shutil.get_terminal_size().columns - 1
            click.echo("\r\x1b[K" + common.safe(text)[:width], nl=False, err=True)


def run(
    settings: Settings, names: Sequence[str], request: Request, screen: Screen, here: bool, no_wait: bool
) -> list[End]:
    """Ask and follow; returns one End for each node. Exits with 130 on Ctrl-C."""
    began = time.time()
    before: dict[str, NodeRecord] = {}
    ends: dict[str, End] = {}
    try:
        _ask(settings, names, request, before, ends, screen)
        follow.until_end(settings, before, ends, screen, open_journal(settings.paths) if here else None, no_wait)
    except KeyboardInterrupt:
        left = [name for name in before if name not in ends]
        unsure = [name for name in names if name not in before and name not in ends][:1]  # its order was being sent
        screen.now("")
        which = " ".join(["gpuhealth ladder", *(left + unsure if len(left + unsure) == 1 else [])])
        who = ", ".join(left + [f"perhaps {name} (its order was being sent)" for name in unsure])
        click.echo(
            f"\nNo longer followed; the ladder goes on without you: {common.safe(who) or 'no node was asked'}\n"
            f"Look again: {which}    End it: gpuhealth ladder cancel NODE",
            err=True,
        )
        raise SystemExit(130) from None
    screen.now("")
    return [replace(_as_asked(ends[name], request), seconds=round(time.time() - began, 1)) for name in names]


def _as_asked(end: End, request: Request) -> End:
    """Somebody else's request may have replaced ours in the same moment: passing a lower rung is not what we asked."""
    wanted = max(request.rung, request.through, key=asking.rank)
    if end.outcome != "fit" or not end.rung or asking.rank(end.rung) >= asking.rank(wanted):
        return end
    return replace(end, outcome="not run", message=f"{wanted} did not run, somebody else asked for less: {end.message}")


def _ask(
    settings: Settings,
    names: Sequence[str],
    request: Request,
    before: dict[str, NodeRecord],
    ends: dict[str, End],
    screen: Screen,
) -> None:
    """Ask each node. A node that was asked goes to `before`, any other to `ends`."""
    try:
        holds, total = control.holds(settings.slurm, settings.drain.nodes)
    except control.SlurmError as error:
        text = f"slurmctld does not answer: {error}" if isinstance(error, control.ControllerDown) else str(error)
        ends.update({name: End(name, "not run", text) for name in names})
        return
    for name in names:
        try:
            before[name], text = asking.ask(settings, name, request, holds, total, time.time())
            screen.say(name, text)
        except asking.Unchanged as error:
            ends[name] = End(name, "not run", f"left as it is: {error}")
        except (control.Refused, control.NoProgram) as error:
            ends[name] = End(name, "not run", f"left as it is: {why_not(error)}")
        except control.ControllerDown as error:  # the last order may have been carried out or not
            look = f"look at it later: gpuhealth ladder {name}"
            ends[name] = End(name, "not run", f"slurmctld does not answer: {error}; {look}")


def _print(settings: Settings, own: str, ends: Sequence[End], as_json: bool) -> None:
    rows = [{**one.__dict__, "exit": one.exit, "advice": _advice(one, own)} for one in ends]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    elif len(ends) > 1:
        header = ("NODE", "RESULT", "RUNG", "GPU", "NEXT", "TIME", "MESSAGE")
        common.table(
            header,
            [
                (
                    *(one.node, one.outcome, one.rung or "-", "-" if one.gpu is None else one.gpu, one.next or "-"),
                    *(follow.span(one.seconds), one.message),
                )
                for one in ends
            ],
        )
    else:
        end = ends[0]
        click.echo(common.safe(f"{end.node}: {end.outcome}: {end.message}"))
        for number, step in enumerate(rows[0]["advice"], 1):
            click.echo(common.safe(f"  {number}. {step}"))
        if end.outcome in ("not fit", "not testable"):
            click.echo(common.safe(f"  each step and its evidence: gpuhealth ladder {end.node}, as root on {end.node}"))


def _advice(end: End, own: str) -> list[str]:
    """The runbook's steps for what was found, by DCGM's error if there is one, else by the reason."""
    from slurm_gpuhealth.commands import why

    if end.outcome != "not fit":
        return []
    told = why.explain(f"dcgm {end.code}" if end.code.isdigit() else end.reason, own)
    ours = reasons.parse(end.reason)
    names = {"NODE": end.node, "INDEX": end.gpu, "PCI": f"{ours.pci}.0" if ours and ours.pci else None}
    return [_fill(step, names) for step in (told["codes"][0]["do"] if told["codes"] else [])]


def _fill(step: str, names: Mapping[str, object]) -> str:
    """A step of the runbook; what is known here replaces `NODE`, `PCI` and so on."""
    return re.sub(r"\b[A-Z]+\b", lambda word: word[0] if names.get(word[0]) is None else str(names[word[0]]), step)


def _tests(settings: Settings, text: str, gpu: int | None) -> str:
    """The names of --test as the reason has them. A node may have tests that this host does not know."""
    from slurm_gpuhealth.diagnose import tools

    names = list(dict.fromkeys(one for one in text.replace(" ", ",").split(",") if one))
    if not names and text:
        raise click.UsageError("--test: which tests?")
    if names and gpu is not None:
        raise click.UsageError("--test runs on all GPUs: leave out --gpu")
    unknown = tools.unknown(settings, ",".join(names)) if settings.test else []  # none: our configuration is broken
    if unknown or not reasons.TESTS.issuperset("".join(names)):
        known = ", ".join(dict.fromkeys(test.name for test in settings.test))
        raise click.UsageError(f"--test: {(unknown or names)[0]!r} is no [[test]] here; known: {known}, all")
    joined = ",".join(names)
    if len(joined) > reasons.MAX_TESTS:
        raise click.UsageError(f"--test: the node's reason has room for {reasons.MAX_TESTS} characters; ask for all")
    return joined


def hostlist(settings: Settings, text: str) -> list[str]:
    """The nodes of a name or host list."""
    names = common.hosts(settings, text)
    if len(names) > MOST:
        raise click.ClickException(f"{text!r} is not a hostlist of 1 to {MOST} nodes")
    return names


def who(text: str | None) -> str:
    """Who asks, and why: the reason shows it as `by=`."""
    import pwd

    name = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    if not name:
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            name = str(os.getuid())
    return f"{name}: {text}" if text else name
