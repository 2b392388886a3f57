"""gpuhealth: what an admin types by hand. Each sub-command is a file of its own beside this one."""

from __future__ import annotations

import importlib
import keyword
import os
import sys

import click

from slurm_gpuhealth import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

COMMANDS = {  # name of the command and of its module here (`import_` for a Python keyword) → line of `gpuhealth --help`
    "nodes": "The whole cluster, a line for each node.",
    "status": "This node: GPUs, findings, hold, last diagnostics.",
    "findings": "What was seen on this node, newest first.",
    "why": "Explain a reason or a finding, and what to do.",
    "resume": "Give back a node that gpuhealth drained.",
    "undrain": "Give back many nodes at once, and acknowledge the fault.",
    "ladder": "Where held nodes stand, and each step; cancel a test.",
    "accept": "Have new nodes prove themselves: level 4, all tests, a certificate.",
    "explain": "What a job died of, from its number or its log alone.",
    "jobs": "The failed jobs, and what they died of.",
    "hung": "The running jobs that stand still, and where to look.",
    "lemons": "The nodes on which more jobs die than on their peers.",
    "correlate": "Judge what is new, on the controller, and act on it.",
    "metrics": "The cluster's figures, as Prometheus reads them.",
    "import": "Write past jobs and events to files for replay.",
    "xid": "Explain an Xid, or decode a kernel log.",
    "diag": "Which DCGM tests run here; what dcgmi diag printed.",
    "simulate": "Compare policies on simulated clusters.",
    "replay": "Try the correlator on recorded jobs and events.",
    "config": "Check or show the configuration.",
    "doctor": "Find what would make gpuhealth or Slurm do the wrong thing.",
}

CONTROLLER = ("sqlalchemy", "ClusterShell")
"""Modules that only the controller needs."""


class Lazy(click.Group):
    """A group that imports a sub-command's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if error.option_name != "--node" or error.ctx is None:
                raise
            name = error.ctx.info_name
            what = f"gpuhealth {name} is about the host that it runs on: run it on that node, as root"
            if any("-w" in one.opts for one in error.ctx.command.params):
                what = f"which nodes: gpuhealth {name} -w NODESET"
            raise click.UsageError(
                f"{what} (if Slurm has another name for this host: gpuhealth --node NAME {name})"
            ) from None
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in CONTROLLER:
                raise
            pip = os.path.join(os.path.dirname(sys.executable), "pip")  # the system's pip refuses (PEP 668)
            what = f"this command needs {error.name}: {pip} install 'slurm-gpuhealth[controller]'"
            raise click.ClickException(what) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(f"slurm_gpuhealth.commands.{name}"), name)
        assert isinstance(command, click.Command)  # noqa: S101 - for the type checker
        return command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", metavar="FILE", help="The configuration [default: /etc/gpuhealth/gpuhealth.toml].")
@click.option("--node", metavar="NAME", help="This node's name in Slurm [default: the host's short name].")
@click.version_option(__version__)
@click.pass_context
def main(context: click.Context, config: str | None, node: str | None) -> None:
    """GPU health of Slurm nodes: why a node was drained, what was found on it, how it comes back."""
    if config:
        os.environ["GPUHEALTH_CONFIG"] = os.path.abspath(config)
    context.color = False if os.environ.get("NO_COLOR") else None
    context.obj = node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
