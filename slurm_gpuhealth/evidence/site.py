"""The site's own checks: the programs of `[[check.command]]`.

Exit 0: well; 1: warning; 2: fault. Any other exit, or none in time: the check itself is broken, which says nothing
about the node. The first line that it prints is the message; or it prints JSON findings, as a list or one per line:

    {"code": "nvme", "severity": "warning", "message": "nvme0 has used 96% of its life", "gpu": 3}
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.findings import SEVERITIES, Finding, Gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_gpuhealth.child import Completed
    from slurm_gpuhealth.config.settings import Command, Settings

BY_EXIT = {0: "info", 1: "warning", 2: "fault"}
OUTPUT_LIMIT = 64 << 10
MESSAGE_LIMIT = 300
SAID_LIMIT = 64
"""The most findings of one check."""
GRACE = 2.0
PASSED_ON = ("SLURMD_NODENAME",)


def collect(settings: Settings, last_runs: dict[str, Any], now: float) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of the site's checks, and the state for the next call's `last_runs` ({} at first).

    A check runs when it is due (`every`); until then its last findings stand and are returned again. All checks
    together take at most half of check.timeout; checks that do not fit come first the next time. Raises nothing.
    """
    commands = [one for one in settings.check.command if one.mode != "off"]
    if not commands:
        return [], {}
    state = {one.name: last_runs[one.name] for one in commands if one.name in last_runs}
    left = settings.check.timeout / 2
    for command in sorted(commands, key=lambda one: _last(state, one)):
        # A clock that was set back must not prevent a check.
        if 0 <= now - _last(state, command) < command.every or left < command.timeout:
            continue
        began = time.monotonic()
        state[command.name] = {"time": now, **_run(command, state.get(command.name, {}))}
        left -= time.monotonic() - began
    return [
        one for command in commands if command.name in state for one in _findings(command, state[command.name])
    ], state


def _last(state: dict[str, Any], command: Command) -> float:
    return float(state.get(command.name, {}).get("time", 0.0))


def _run(command: Command, last: dict[str, Any]) -> dict[str, Any]:
    """Run it: {"said": [[severity, message, gpu, standing], ...], "stuck": [pid, start] if it can't be killed}."""
    from slurm_gpuhealth import child
    from slurm_gpuhealth.config import load as configuration

    stuck = last.get("stuck")
    if stuck and child.alive(child.Child(*stuck)):
        return {"said": [_broken("an earlier run can't be killed, so no other is started")], "stuck": stuck}
    refused = configuration.unsafe_command(command.argv)
    if refused:
        return {"said": [_broken(f"not run: {refused[0]}")]}
    env = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
    done = child.run(command.argv, timeout=command.timeout, env=env, grace=GRACE, limit=OUTPUT_LIMIT)
    left = {"stuck": [done.stuck.pid, done.stuck.start]} if done.stuck else {}
    return {"said": read(done, command.timeout), **left}


def read(done: Completed, timeout: float) -> list[list[Any]]:
    """A run's findings: [severity, message, gpu, standing] each; none if all is well."""
    if done.timed_out:
        return [_broken(f"no end in {timeout:g} s")]
    text = done.stdout.decode("utf-8", "replace")
    first = next((line for line in text.splitlines() if line.strip()), "")
    if done.rc not in BY_EXIT:
        words = first or done.stderr.decode("utf-8", "replace")
        how = f"signal {-done.rc}" if done.rc is not None and done.rc < 0 else f"exit {done.rc}"
        return [_broken(f"{how}{': ' if words.strip() else ''}{words}")]
    if first.lstrip().startswith(("{", "[")):
        try:
            said = _from_json(text)
        except (ValueError, RecursionError) as error:
            return [_broken(f"prints JSON that is not as expected: {error}")]
        if said or not done.rc:
            return said
        first = ""
    return [[BY_EXIT[done.rc], _plain(first) or f"exit {done.rc} without a message", None, True]] if done.rc else []


def _from_json(text: str) -> list[list[Any]]:
    """A list of objects, or one object per line. One finding for each GPU: the worst severity, all messages."""
    import json

    try:
        whole = json.loads(text)
    except ValueError:
        whole = [json.loads(line) for line in text.splitlines() if line.strip()]
    said: dict[Any, list[Any]] = {}
    for one in whole if isinstance(whole, list) else [whole]:
        if (
            not isinstance(one, dict)
            or one.get("severity") not in SEVERITIES
            or not isinstance(one.get("message"), str)
        ):
            raise ValueError(f'each needs "severity" ({", ".join(SEVERITIES)}) and "message"')
        gpu = one.get("gpu")
        if gpu is not None and not (isinstance(gpu, str) or (type(gpu) is int and gpu >= 0)):
            raise ValueError('"gpu" is an index, a UUID or a PCI address')
        message = ": ".join(_plain(str(part)) for part in (one.get("code"), one["message"]) if part)
        if gpu not in said and len(said) < SAID_LIMIT:
            said[gpu] = [one["severity"], message, gpu, True]
        elif gpu in said:
            worst = max(said[gpu][0], one["severity"], key=SEVERITIES.index)
            said[gpu][:2] = worst, _plain(f"{said[gpu][1]}; {message}")
    return list(said.values())


def _broken(why: str) -> list[Any]:
    return ["info", _plain(f"the check itself is broken: {why}"), None, True]


def _findings(command: Command, state: dict[str, Any]) -> list[Finding]:
    return [
        Finding(
            state["time"],
            "site",
            command.name,
            f"{command.name}: {message}",
            _gpu(gpu),
            severity,
            standing,
            details={"check": command.name, "says": severity, **({"gpu": False} if gpu is None else {})},
        )
        for severity, message, gpu, standing in state["said"]
    ]


def _gpu(name: str | int | None) -> Gpu | None:
    if isinstance(name, int):
        return Gpu(index=name)
    if not name:
        return None
    # The kernel's name of a device has a function, ours does not; NVML writes the domain with eight digits.
    return Gpu(uuid=name) if name.startswith("GPU-") else Gpu(pci=name.lower().partition(".")[0][-10:])


def _plain(text: str) -> str:
    """One line of limited length, without control characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 3] + "..."
