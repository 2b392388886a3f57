"""The suite wired into a real Slurm cluster of stand-in GPU nodes: what the integration tests and the demo run on."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import marshal
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_gpuhealth.node.journal_file import seal
from tests.cluster import Cluster
from tests.daemons import PATIENCE, until
from tests.fakes import node as fakes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LABS = Path(os.environ.get("GPUHEALTH_LABS", "/srv/gpuhealth-labs"))
PULSE = 1.0
"""Seconds between the checks of a node for which a test waits."""

CONFIG = """\
mode = "enforce"

[paths]
state = "{lab}/nodes/{{node}}/state"
run = "{lab}/nodes/{{node}}/run"
kernel_log = "{lab}/nodes/{{node}}/kmsg"
proc = "{lab}/nodes/{{node}}/proc"
sys = "{lab}/nodes/{{node}}/sys"
dev = "{lab}/nodes/{{node}}/dev"

[slurm]
scontrol = "{lab}/nodes/{{node}}/bin/scontrol"
sinfo = "{lab}/nodes/{{node}}/bin/sinfo"
conf = "{conf}"
request_poll = "{poll}"

[nvml]
library = "{lab}/nodes/{{node}}/libnvidia-ml.so.1"

[dcgm]
dcgmi = "{lab}/nodes/{{node}}/dcgmi"
host = "unix://{lab}/nodes/{{node}}/hostengine.sock"

[ladder]
bug_report = "{lab}/nodes/{{node}}/nvidia-bug-report.sh"

[reset]
enabled = {reset}
nvidia_smi = "{lab}/nodes/{{node}}/nvidia-smi"
systemctl = "{lab}/nodes/{{node}}/systemctl"

[reboot]
enabled = {reboot}

[drain]
floor = {floor}

[check]
interval = "{interval}s"
"""


COUNTED = """\
#!/bin/sh
echo "{program} $*" >>{home}/calls
exec /usr/bin/{program} "$@"
"""


class Lab(Cluster):
    """A cluster with the suite as its Prolog, Epilog and HealthCheckProgram."""

    def __init__(self, lab: Path, *, health_interval: int = 10, floor: int = 3, poll: str = "10s", **options) -> None:
        """`health_interval`: slurmd's own. While a test waits (`until`), its nodes check each PULSE, and poll as often
        unless `poll` is not the default."""
        super().__init__(lab, health_interval=health_interval, **options)
        self.config = self.lab / "etc/gpuhealth.toml"
        self.values = {"floor": floor, "poll": poll, "interval": max(5, health_interval)}
        self.values |= {"reset": "false", "reboot": "false"}
        self.extra += f"\nRebootProgram={ROOT}/tests/fakes/reboot\n"
        self.touched: set[str] = set()
        self.stale: set[str] = set()
        """Nodes on which a check may still run that has read the configuration of before."""
        self.pulses: dict[str, tuple[float, subprocess.Popen[bytes]]] = {}
        """node → when its last check was started by us, and that."""

    def start(self) -> None:
        self.lab.mkdir(parents=True, exist_ok=True)
        (self.lab / "etc").mkdir(exist_ok=True)
        self.configure()
        self.refuse_bad_configuration()
        self.wire(BIN, self.config)
        for node in self.names:
            for program in ("scontrol", "sinfo", "sacctmgr"):
                wrapper = self.lab / "nodes" / node / "bin" / program
                wrapper.parent.mkdir(parents=True, exist_ok=True)
                wrapper.write_text(COUNTED.format(program=program, home=wrapper.parent.parent))
                wrapper.chmod(0o755)
        super().start()

    def configure(self, extra: str = "", **changes: object) -> None:
        """Write gpuhealth.toml: CONFIG with `changes`, and `extra` TOML after it."""
        values = {**self.values, **changes}
        self.hurried = values["poll"] == "10s"
        text = CONFIG.format(lab=self.lab, conf=self.conf, **values)
        self.config.write_text(text + extra)
        self.config.chmod(0o600)
        self.stale = set(self.names)

    def refuse_bad_configuration(self) -> None:
        """Raise RuntimeError with the reason, at once: the hooks would only say it in syslog, and do nothing."""
        ask = [str(BIN / "gpuhealth"), "--config", str(self.config), "--node", self.names[0], "config", "check"]
        done = subprocess.run(ask, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(
                f"gpuhealth refuses the lab's configuration:\n{done.stdout}{done.stderr}"
                f"Labs are kept below {LABS}. Another folder, which root alone can write: GPUHEALTH_LABS=FOLDER"
            )

    def inject(self, node: str, *what: object) -> None:
        """`tests/fakes/inject NODE FAULT ...`, once no check runs there that has read an earlier configuration."""
        self._newly_configured(node)
        self.touched.add(node)
        fakes.inject(self.lab / "nodes" / node, *what)

    def inject_all(self, nodes: Iterable[str], *what: object) -> None:
        """The same on every GPU of these nodes, for a node at once: what NVML answers is GPU 0's."""
        for node in nodes:
            self.inject(node, *what)
            scenario = fakes.load(str(self.lab / "nodes" / node))
            for gpu in scenario["gpus"]:
                gpu["nvml"] = dict(scenario["gpus"][0]["nvml"])
            fakes.save(str(self.lab / "nodes" / node), scenario)

    @contextlib.contextmanager
    def unchecked(self, node: str) -> Iterator[None]:
        """No health check runs on the node: its next fault is the prolog's to find, or the epilog's."""
        self._newly_configured(node)
        with (self.lab / f"nodes/{node}/run/check.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _newly_configured(self, node: str) -> None:
        if node in self.stale:
            self.check(node)
            self.stale.discard(node)

    def heal(self) -> None:
        """Every node healthy, in service, without a past or a job, and checked."""
        self.configure()
        self.cancel_all()
        self.at_rest()
        records = {line.split()[0][len("NodeName=") :]: line for line in self.node("").splitlines()}
        for node in self.names:
            if node not in self.touched and " State=IDLE " in records[node] and " Reason=" not in records[node]:
                continue
            self.touched.add(node)
            scenario = fakes.load(str(self.lab / "nodes" / node))
            for gpu in scenario["gpus"]:  # new GPUs: a reboot does not heal a failed row remapping
                gpu.pop("nvml", None)
                gpu.pop("lost", None)
                gpu.pop("for_good", None)
            scenario["dcgm"]["faults"] = {}
            for how in ("boot", "broken", "reset", "bug_report"):
                scenario.pop(how, None)
            fakes.save(str(self.lab / "nodes" / node), scenario)
            fakes.inject(self.lab / "nodes" / node, "reboot")
            self.forget(node)
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
            self.run("scontrol", "update", f"NodeName={node}", "Extra=", "Comment=")  # what outlives the hold
        for node in sorted(self.touched):
            self.until(lambda: self.state(node) == "IDLE" and self.journal(node, "checked"), f"{node} healed")  # noqa: B023
        self.at_rest()
        self.stale -= self.touched
        self.touched.clear()

    def forget(self, node: str, *folders: str) -> None:
        """The node loses its journal and what it keeps until the next boot, or these `folders` alone, all at once.

        A program that runs there keeps its open files, and may close and remove them while we remove them too.
        """
        for folder in folders or ("state", "run"):
            lost = Path(tempfile.mkdtemp(prefix="lost-", dir=self.lab / "nodes" / node))
            with contextlib.suppress(FileNotFoundError):
                (self.lab / "nodes" / node / folder).rename(lost / folder)
            shutil.rmtree(lost, ignore_errors=True)

    def until(self, ask: Callable[[], object], what: str, *nodes: str):
        """Poll `ask`, as `daemons.until` does. Meanwhile `nodes`, or those that a test has touched, keep checking."""

        def asked() -> object:
            for node in nodes or sorted(self.touched):
                self._pulse(node)
            return ask()

        return until(asked, what)

    def _pulse(self, node: str) -> None:
        """Start the node's health check, as slurmd does, unless one that we started runs or has just begun."""
        if not self.daemons.alive(f"slurmd-{node}"):  # it reboots: nothing of ours runs there
            return
        began, check = self.pulses.get(node, (0.0, None))
        busy = sum(one.poll() is None for _, one in self.pulses.values())
        if (check is None or check.poll() is not None) and time.monotonic() - began > PULSE and busy < 4:
            for name in ("polled", "put-off") if self.hurried else ():
                self.change(node, "UPDATE state SET value = ? WHERE name = ?", seal(name, 0), name)
            program = [str(self.lab / "health.d/50-gpuhealth")]
            log = (self.lab / f"log/check-{node}.out").open("ab")
            with log:
                check = subprocess.Popen(
                    program, env={"SLURMD_NODENAME": node}, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            self.pulses[node] = time.monotonic(), check

    def at_rest(self) -> None:
        """No check that we started runs."""
        for _, check in self.pulses.values():
            check.wait(PATIENCE)

    def stop(self) -> None:
        super().stop()
        for _, check in self.pulses.values():  # kill_strays has ended what hung
            check.wait(PATIENCE)

    def calls(self, node: str) -> list[str]:
        """The questions and orders of the node's programs to the controller since the last time."""
        log = self.lab / "nodes" / node / "calls"
        text = log.read_text() if log.exists() else ""
        log.write_text("")
        return text.splitlines()

    def gpuhealth(self, node: str, *argv: str, check: bool = True) -> str:
        """`gpuhealth ...` as an admin on that node."""
        env = {**self.env, "GPUHEALTH_CONFIG": str(self.config), "COLUMNS": "200"}
        done = subprocess.run(
            [str(BIN / "gpuhealth"), "--node", node, *argv], env=env, capture_output=True, text=True, timeout=PATIENCE
        )
        if check and done.returncode not in (0, 1):
            raise RuntimeError(f"gpuhealth {' '.join(argv)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def hook(self, program: str, node: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run gpuhealth-PROGRAM as slurmd would, outside of Slurm: with its bare environment."""
        bare = {"SLURMD_NODENAME": node, "GPUHEALTH_CONFIG": str(self.config), **env}
        return subprocess.run(
            [str(BIN / f"gpuhealth-{program}")], env=bare, capture_output=True, text=True, timeout=PATIENCE
        )

    def until_reason(self, node: str, text: str) -> str:
        """Poll `sinfo -R` until the node's reason holds `text` and is no claim any more."""

        def found() -> str:
            reason = self.reason(node)
            return reason if text in reason and " claim" not in reason else ""

        return self.until(found, f"{node}: reason with {text!r}", node)

    def check(self, *nodes: str) -> None:
        """A health check of each node that begins after now, to its end."""
        now = time.time()
        self.until(lambda: all(self.journal(node, "checked", 0) > now for node in nodes), f"a check of {nodes}", *nodes)

    def journal(self, node: str, name: str, default: Any = None) -> Any:
        """A value of the node's journal."""
        found = self.rows(node, "SELECT value FROM state WHERE name = ?", name)
        return marshal.loads(found[0][0]) if found else default

    def change(self, node: str, sql: str, *values: object) -> None:
        """Change the node's journal, as if time had passed."""
        self.rows(node, sql, *values)

    def rows(self, node: str, sql: str, *values: object) -> list[Any]:
        """Rows of the node's journal."""
        path = self.lab / "nodes" / node / "state/journal.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(path, timeout=10)) as db:
            if not db.execute("PRAGMA user_version").fetchone()[0]:  # its first program is just making it
                return []
            with db:
                return db.execute(sql, values).fetchall()


@contextlib.contextmanager
def running(lab: Cluster) -> Iterator[Cluster]:
    """The cluster up, its nodes checked; then down, and its folder gone, unless KEEP is set."""
    with lab:
        if isinstance(lab, Lab):
            until(lambda: all(lab.journal(node, "checked") for node in lab.names), "the first checks")
        yield lab
    if not os.environ.get("KEEP"):
        shutil.rmtree(lab.lab)


def fresh(name: str) -> Path:
    """An empty folder for a lab, whose every parent can be entered and written by root alone.

    It is this process's until it ends: a second run at the same time gets NAME-2. What an earlier run left there,
    running or not, is stopped and removed.
    """
    folders = (LABS / (f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
    folder = next(folder for folder in folders if _locked(folder))
    Cluster(folder).stop()
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def _locked(folder: Path) -> bool:
    """Whether the folder is now this process's, until it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(LABS / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return True
