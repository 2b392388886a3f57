"""Processes that a test lab starts, identified by pid and start time, so that no other process is ever signalled."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
MARK = "GPUHEALTH_LAB"
"""In the environment of every process that a lab starts: it identifies what a crashed run left behind."""


class Daemons:
    """The daemons of the folder `lab`, each with lab/run/NAME.pid ("PID STARTTIME") and lab/log/NAME.out."""

    def __init__(self, lab: Path, env: dict[str, str]) -> None:
        self.lab, self.env = lab, env
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *argv: str, **env: str) -> None:
        """Start a program that stays in the foreground, in its own session: Ctrl-C reaches only the test."""
        if self.alive(name):
            raise RuntimeError(f"{name} runs already, pid {self.pid(name)}")
        program = shutil.which(argv[0], path=PATH)
        if not program:
            raise FileNotFoundError(f"{argv[0]} is not in {PATH}: run scripts/setup, which installs it")
        with (self.lab / f"log/{name}.out").open("ab") as log:
            self.children[name] = child = subprocess.Popen(
                [program, *argv[1:]],
                env={**self.env, MARK: str(self.lab), **env},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.lab / f"run/{name}.pid").write_text(f"{child.pid} {_started(child.pid)}\n")

    def names(self) -> list[str]:
        return sorted(file.stem for file in (self.lab / "run").glob("*.pid"))

    def pid(self, name: str) -> int:
        """The daemon's pid if it is still the process that we started, else 0."""
        try:
            pid, start = map(int, (self.lab / f"run/{name}.pid").read_text().split())
        except (OSError, ValueError):
            return 0
        return pid if _started(pid) == start else 0

    def alive(self, name: str) -> bool:
        if name in self.children:
            self.children[name].poll()  # reaps it
        return bool(self.pid(name))

    def send(self, name: str, sign: int = signal.SIGTERM) -> None:
        if self.alive(name):
            os.kill(self.pid(name), sign)

    def stop(self, *names: str, sign: int = signal.SIGTERM, timeout: float = 20) -> None:
        """Stop all daemons at once: send `sign`, and SIGKILL to those still running after `timeout` seconds."""
        for name in names:
            self.send(name, sign)
        for name in names:
            try:
                until(lambda name=name: not self.alive(name), name, timeout)
            except TimeoutError:
                self.send(name, signal.SIGKILL)
                until(lambda name=name: not self.alive(name), name, 5)
            self.children.pop(name, None)
            (self.lab / f"run/{name}.pid").unlink(missing_ok=True)

    def kill_strays(self) -> None:
        """Kill steps, hooks and workers that outlived the lab until none is left: they may start others meanwhile."""
        until(lambda: not self._strays(), "the end of what the lab started")

    def _strays(self) -> int:
        """Kill them; returns how many there were. slurmstepd overwrites its environment: its log tells."""
        found = 0
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                ours = f"{MARK}={self.lab}".encode() in (folder / "environ").read_bytes().split(b"\0")
                if not ours and (folder / "comm").read_text().strip() == "slurmstepd":
                    ours = any(os.readlink(fd).startswith(f"{self.lab}/") for fd in (folder / "fd").iterdir())
                if ours:
                    os.kill(int(folder.name), signal.SIGKILL)
                    found += 1
            except OSError:
                continue
        return found


PATIENCE = 240.0
"""Seconds that anything may take on a busy machine. This limit ends a hang; it measures nothing."""


def until(ask: Callable[[], object], what: str, timeout: float = PATIENCE):
    """Poll `ask` until it returns something true, and return that. Raises TimeoutError naming `what`."""
    end = time.monotonic() + timeout
    while not (answer := ask()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.1)
    return answer


_claims: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """TCP ports that are free, below the range that the kernel uses for outgoing connections. They stay this process's
    until it ends, also between a daemon's end and its next start: several labs start at the same time."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(15000, 31000)  # noqa: S311
        if _claim(port):
            found.append(port)
    return found


def _claim(port: int) -> bool:
    """Claim a port with an abstract socket of its name: every process of this network sees that, in any root."""
    claim, probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket()
    try:
        claim.bind(f"\0gpuhealth-port-{port}")
        probe.bind(("0.0.0.0", port))  # noqa: S104
    except OSError:
        claim.close()
        return False
    finally:
        probe.close()
    _claims.append(claim)
    return True


def _started(pid: int) -> int:
    """Start time of the process in clock ticks since boot; 0 if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
