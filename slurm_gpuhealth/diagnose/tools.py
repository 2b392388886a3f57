"""Runs another tool's test as DCGM is run: no shell, its own session, a deadline, a fixed PATH; and judges its figures.

A tool that is not installed, crashes, or prints no figure proves nothing: the test is `untested`.
"""

from __future__ import annotations

import os
import socket
import time
from fnmatch import fnmatchcase
from functools import partial

from slurm_gpuhealth import child
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.diagnose import outputs
from slurm_gpuhealth.diagnose.dcgmi import all_cpus
from slurm_gpuhealth.frozen import frozen, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Literal

    from slurm_gpuhealth.child import Child, Completed
    from slurm_gpuhealth.config.settings import Limit, Settings, Test
    from slurm_gpuhealth.diagnose.outputs import Figure

ALL = "all"
"""In a request: every test."""
LIMIT = 4 << 20
GRACE = 5.0
LISTENS = 10.0
"""Seconds that perftest's server may take until it listens."""
BAD = ("wrong", "failed", "slow")


@frozen
class Bad:
    """What counts against a GPU (the tool's number of it), or against the node (None)."""

    device: int | None
    message: str


@frozen
class Ran:
    """How a test ended."""

    test: Test
    outcome: Literal["pass", "slow", "failed", "wrong", "untested"]
    """`wrong`: the tool itself says that results are wrong. `failed`: a site's test says so by its exit code."""
    message: str = ""
    figures: tuple[Figure, ...] = ()
    bad: tuple[Bad, ...] = ()
    version: str = ""
    seconds: float = 0.0
    stuck: Child | None = None
    uuids: tuple[str, ...] = ()
    """By the tool's numbers."""
    absent: bool = False
    """The tool is not installed."""

    def uuid(self, device: int | None) -> str | None:
        """The GPU that the tool means; None: the node."""
        return self.uuids[device] if device is not None and device < len(self.uuids) else None


def chosen(settings: Settings, rung: str, asked: str, model: str, gpus: int) -> list[Test]:
    """The tests that are due at this rung, and those that somebody asked for (`nccl,nvbandwidth`, `all`).

    From its rung on, each deeper level runs a test too. The first row of a name that meets the GPU model counts.
    """
    names = asked.split(",") if asked else []
    found: dict[str, Test] = {}
    for test in settings.test:
        if test.name not in found and fnmatchcase(model, test.gpu):
            found[test.name] = test
    own = settings.sources.tools != "off"
    return [
        test
        for test in found.values()
        if (test.name in names or ALL in names or (own and test.rung <= rung and test.rung != "asked"))
        and (gpus >= test.gpus or test.name in names)
    ]


def unknown(settings: Settings, asked: str) -> list[str]:
    """The names in a request that are no test here."""
    known = {ALL, *(test.name for test in settings.test)}
    return [name for name in asked.split(",") if name and name not in known]


def run(test: Test, uuids: Sequence[str], model: str, ports: Sequence[str], limits: Sequence[Limit]) -> Ran:
    """Run the test on these GPUs; `ports`: those that are up, `mlx5_0/1`. The tool numbers its devices as `uuids` does.

    A test with {device} runs once for each port, within its timeout in all. Raises nothing.
    """
    return replace(_run(test, uuids, model, ports, limits), uuids=tuple(uuids))


def _run(test: Test, uuids: Sequence[str], model: str, ports: Sequence[str], limits: Sequence[Limit]) -> Ran:
    program = test.command[0]
    if not os.path.exists(program):
        return Ran(test, "untested", f"not installed: {program}", absent=True)
    if refused := configuration.unsafe_command(test.command, test.environment):
        return Ran(test, "untested", f"not run: {refused[0]}")
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environment |= dict(one.split("=", 1) for one in test.environment)
    if not any("{device}" in word for word in test.command):
        return _judged(_once(test, _words(test, uuids), environment, test.timeout), model, len(uuids), limits)
    if not ports:
        return Ran(test, "untested", "no InfiniBand or RoCE port is up")
    ran: list[Ran] = []
    for here, there in zip(ports, (*ports[1:], ports[0])):
        one = _once(test, _words(test, uuids, here), environment, test.timeout / len(ports), _words(test, uuids, there))
        named = tuple(replace(figure, name=f"{figure.name}.{here}") for figure in one.figures)
        ran.append(_judged(replace(one, figures=named), model, len(uuids), limits))
        if one.stuck:
            break
    return _merged(test, ran)


def _words(test: Test, uuids: Sequence[str], port: str = "") -> list[str]:
    device, _, number = port.partition("/")
    given = {"{gpus}": str(len(uuids)), "{device}": device, "{port}": number or "1"}
    words = list(test.command)
    for name, value in given.items():
        words = [word.replace(name, value) for word in words]
    return words


def _once(test: Test, argv: list[str], env: Mapping[str, str], timeout: float, server: Sequence[str] = ()) -> Ran:
    """One start of the tool; with `server`, of both ends."""
    first = None
    if test.server:
        port = _free_port()
        argv = [*argv, "-p", str(port), "127.0.0.1"]
        first = partial(_serve, [*server, "-p", str(port)], env, port)
    done = child.run(argv, timeout=timeout, env=env, grace=GRACE, limit=LIMIT, cpus=all_cpus(), first=first)
    return replace(read(test, done, timeout), seconds=done.seconds, stuck=done.stuck)


def read(test: Test, done: Completed, timeout: float) -> Ran:
    """What the program's end and output mean, before the limits."""
    text = done.stdout.decode("utf-8", "replace")
    last = done.stderr.decode("utf-8", "replace") or text[-400:]
    said = " ".join("".join(c if c.isprintable() else " " for c in last).split())[-200:]
    if done.timed_out:
        return Ran(test, "untested", f"did not end within {timeout:.0f} s and was stopped")
    if done.rc in (126, 127):
        return Ran(test, "untested", f"can't be started: {said}")
    output = outputs.read(text, test)
    if output.wrong:
        bad = tuple(Bad(device, what) for device, what in output.wrong)
        return Ran(test, "wrong", bad[0].message, output.figures, bad, output.version)
    if test.reads == "pattern" and done.rc in (1, 2):  # as a site's check
        return Ran(test, "failed", said or f"exit code {done.rc}", output.figures, (Bad(None, said),), output.version)
    if done.rc != 0:
        return Ran(test, "untested", f"ended with exit code {done.rc}: {said or 'no output'}")
    if not output.figures:
        return Ran(test, "untested", output.why)
    return Ran(test, "pass", "", output.figures, version=output.version)


def _judged(ran: Ran, model: str, gpus: int, limits: Sequence[Limit]) -> Ran:
    """The result with the figures that are beyond their limits. A test of GPUs passes if it tested all of them."""
    slow = []
    for figure in ran.figures:
        low, high, source = limit(figure, ran.test, model, gpus, limits)
        if low and figure.value < low:
            slow.append(Bad(figure.device, f"{show(figure)}, at least {low:g} expected{source}"))
        if high and figure.value > high:
            slow.append(Bad(figure.device, f"{show(figure)}, at most {high:g} expected{source}"))
    if ran.outcome != "pass":
        return ran
    if slow:
        return replace(ran, outcome="slow", message=slow[0].message, bad=tuple(slow))
    named = {figure.device for figure in ran.figures if figure.device is not None}
    tested = named - {figure.device for figure in ran.figures if not figure.value}
    if named and len(tested) < gpus:
        return replace(ran, outcome="untested", message=f"{len(tested)} of {gpus} GPUs were tested")
    return ran


def limit(figure: Figure, test: Test, model: str, gpus: int, limits: Iterable[Limit]) -> tuple[float, float, str]:
    """At least, at most (0: none), and where they come from."""
    own = figure.name == test.name or any("{device}" in word for word in test.command)
    if own and (test.at_least or test.at_most):
        return test.at_least, test.at_most, ""
    for one in limits:
        fits = fnmatchcase(figure.name, one.figure) and fnmatchcase(model, one.gpu) and one.gpus in (0, gpus)
        if fits and one.unit in ("", figure.unit):
            return one.at_least, one.at_most, f" ({one.source})" if one.source else ""
    return 0.0, 0.0, ""


def show(figure: Figure) -> str:
    return f"{figure.name} {figure.value:.4g} {figure.unit}".rstrip()


def _merged(test: Test, ran: Sequence[Ran]) -> Ran:
    """The runs on all ports as one: bad if one is bad, untested if one is, else a pass."""
    worst = next((one for word in (*BAD, "untested") for one in ran if one.outcome == word), ran[0])
    return Ran(
        test,
        worst.outcome,
        worst.message,
        tuple(figure for one in ran for figure in one.figures),
        tuple(bad for one in ran for bad in one.bad),
        worst.version,
        sum(one.seconds for one in ran),
        next((one.stuck for one in ran if one.stuck), None),
    )


def _serve(argv: Sequence[str], env: Mapping[str, str], port: int) -> None:
    """Start perftest's server as a child of this process, which becomes the client, and wait until it listens.

    Its output is nobody's. The kernel ends it with the client, however that ends: PR_SET_PDEATHSIG in prctl(2).
    """
    import ctypes
    import signal
    import subprocess

    prctl = ctypes.CDLL(None).prctl
    null = subprocess.DEVNULL
    other = subprocess.Popen(
        argv,
        stdin=null,
        stdout=null,
        stderr=null,
        env={"PATH": child.PATH, "LC_ALL": "C.UTF-8", **env},
        preexec_fn=lambda: prctl(1, signal.SIGKILL),
    )
    until = time.monotonic() + LISTENS
    while not _listens(port) and other.poll() is None and time.monotonic() < until:
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _listens(port: int) -> bool:
    """Whether somebody listens there. A connection would take the server's only turn."""
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as file:
                rows = [line.split() for line in file]
        except OSError:
            continue
        if any(len(row) > 3 and row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows):
            return True
    return False
