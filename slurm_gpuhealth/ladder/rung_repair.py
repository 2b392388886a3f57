"""Rung repair: the site's own program, if tests, reset and reboot did not help; then level 3."""

from __future__ import annotations

from slurm_gpuhealth import child
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.ladder.rungs import Result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.ladder.rungs import Climb

VALUE = 1000
"""The most characters of a value in its environment."""


def run(climb: Climb) -> Result:
    """Run `repair.command` without arguments. Exit 0: it is done, and level 3 must prove that. Other exits: it failed.

    Its environment has PATH and GPUHEALTH_NODE, _FACT, _GPU (NVML's index, empty: the node), _PCI, _UUID, _SERIAL, _JOB
    and _MESSAGE. Raises HoldLost, which ends the program.
    """
    argv, timeout = climb.settings.repair.command, climb.settings.repair.timeout
    if not argv:
        return Result("untested", "repair.command is not set")
    refused = configuration.unsafe_command(argv)
    if refused:
        return Result("untested", f"repair.command was not run: {refused[0]}")
    climb.check_hold()
    done = child.run(argv, timeout=timeout, env=_environment(climb), grace=30.0, limit=64 << 10)
    said = _first_line(done)
    if done.timed_out or done.rc is None:
        return Result("fail", f"{argv[0]} did not end in {timeout:g} s{said and f': {said}'}")
    if done.rc in (126, 127) and done.stderr.startswith(f"{argv[0]}: ".encode()):
        return Result("untested", f"repair.command could not be run: {said}")
    if done.rc:
        return Result("fail", f"{argv[0]}: exit {done.rc}{said and f': {said}'}")
    climb.check_hold()
    from slurm_gpuhealth.ladder import rung_test

    return rung_test.levels(climb, 1 if climb.ours.node else 3)


def _environment(climb: Climb) -> dict[str, str]:
    """What the program must know. Devices and users wrote parts of it, so each value is one printable line."""
    from slurm_gpuhealth.findings import Gpu
    from slurm_gpuhealth.ladder import state

    ours = climb.ours
    gpu = state.blamed(climb.journal, ours) or Gpu()
    worst = next(iter(state.faults(climb.journal, climb.since)), None)
    values = {
        "NODE": climb.node,
        "FACT": ours.fact,
        "GPU": ours.gpu,
        "PCI": gpu.pci,
        "UUID": gpu.uuid,
        "SERIAL": gpu.serial,
        "JOB": ours.job,
        "MESSAGE": worst.message if worst else "",
    }
    return {f"GPUHEALTH_{key}": _clean("" if value is None else str(value)) for key, value in values.items()}


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:VALUE]


def _first_line(done: child.Completed) -> str:
    """The first line of its standard output, or else of its standard error."""
    for stream in (done.stdout, done.stderr):
        for line in stream.decode("utf-8", "replace").splitlines():
            if line.strip():
                return _clean(line.strip())[:200]
    return ""
