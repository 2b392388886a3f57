"""The suite wired into a real Slurm cluster of stand-in GPU nodes: what the integration tests and the demo run on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster import Cluster
from tests.daemons import until

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
INJECT = ROOT / "tests/fakes/inject"

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
conf = "{conf}"
request_poll = "{poll}"

[nvml]
library = "{lab}/nodes/{{node}}/libnvidia-ml.so.1"

[dcgm]
dcgmi = "{lab}/nodes/{{node}}/dcgmi"
host = "unix://{lab}/nodes/{{node}}/hostengine.sock"

[drain]
floor = {floor}

[check]
interval = "{interval}s"
"""


class Lab(Cluster):
    """A cluster with the suite as its Prolog, Epilog and HealthCheckProgram."""

    def __init__(self, lab: Path, *, health_interval: int = 5, floor: int = 2, poll: str = "300s", **options) -> None:
        super().__init__(lab, health_interval=health_interval, **options)
        self.config = self.lab / "etc/gpuhealth.toml"
        self.values = {"floor": floor, "poll": poll, "interval": health_interval}

    def start(self) -> None:
        self.lab.mkdir(parents=True, exist_ok=True)
        (self.lab / "etc").mkdir(exist_ok=True)
        self.configure()
        self.wire(BIN, self.config)
        super().start()

    def configure(self, extra: str = "", **changes: object) -> None:
        """Write gpuhealth.toml: CONFIG with `changes`, and `extra` TOML after it."""
        text = CONFIG.format(lab=self.lab, conf=self.conf, **{**self.values, **changes})
        self.config.write_text(text + extra)
        self.config.chmod(0o600)

    def inject(self, node: str, *what: object) -> None:
        """`tests/fakes/inject NODE FAULT ...`."""
        argv = [sys.executable, str(INJECT), str(self.lab / "nodes" / node), *map(str, what)]
        subprocess.run(argv, check=True, timeout=60)

    def gpuhealth(self, node: str, *argv: str, check: bool = True) -> str:
        """`gpuhealth ...` as an admin on that node."""
        env = {**self.env, "GPUHEALTH_CONFIG": str(self.config), "COLUMNS": "200"}
        done = subprocess.run(
            [str(BIN / "gpuhealth"), "--node", node, *argv], env=env, capture_output=True, text=True, timeout=60
        )
        if check and done.returncode not in (0, 1):
            raise RuntimeError(f"gpuhealth {' '.join(argv)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def hook(self, program: str, node: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run gpuhealth-PROGRAM as slurmd would, outside of Slurm: with its bare environment."""
        bare = {"SLURMD_NODENAME": node, "GPUHEALTH_CONFIG": str(self.config), **env}
        return subprocess.run([str(BIN / f"gpuhealth-{program}")], env=bare, capture_output=True, text=True, timeout=120)

    def until_reason(self, node: str, text: str, timeout: float = 60) -> str:
        """Poll `sinfo -R` until the node's reason holds `text`."""
        return until(lambda: text in (reason := self.reason(node)) and reason, f"{node}: reason with {text!r}", timeout)

    def until_checked(self, node: str, timeout: float = 60) -> None:
        """Wait for a health check that begins after now to end."""
        import time

        now = time.time()
        until(lambda: self.journal(node, "checked", 0) > now, f"{node}: a check", timeout)

    def journal(self, node: str, name: str, default: object = None) -> object:
        """A value of the node's journal."""
        from slurm_gpuhealth.journal import open_journal
        from slurm_gpuhealth.settings import Paths

        home = self.lab / "nodes" / node
        if not (home / "state/journal.db").exists():
            return default
        opened = open_journal(Paths(state=str(home / "state"), run=str(home / "run")))
        try:
            return opened.get(name, default)
        finally:
            opened.db.close()


def fresh(folder: str) -> Path:
    """An empty folder for a lab whose every parent can be entered and written by root alone."""
    path = Path(os.environ.get("GPUHEALTH_LABS", "/srv/gpuhealth-labs")) / folder
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
