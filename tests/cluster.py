"""A real Slurm cluster on loopback, for tests and the demo: munged, MariaDB, slurmdbd, slurmctld, N slurmd; one folder.

    with Cluster(Path("/srv/lab"), nodes=4, gpus=8) as cluster:
        job = cluster.submit("sleep 1", gres="gpu:1", nodelist="n2")
        cluster.wait(job, "COMPLETED")

Needs root and Debian's slurm-wlm, slurmdbd, mariadb-server and munge, and uses none of their own configuration,
keys, sockets or services. Everything but slurmdbd (it can't be told) listens on 127.0.0.1 only.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.daemons import MARK, PATH, PATIENCE, Daemons, free_ports, until
from tests.fakes.node import make_node

if TYPE_CHECKING:
    from collections.abc import Iterable

USER = "games"
"""Who submits: an ordinary user that every Debian has."""

SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={lab}/munge/socket,cred_expire={cred_expire}
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/spool/%n
SlurmctldPidFile={lab}/run/slurmctld.own
SlurmdPidFile={lab}/run/slurmd-%n.own
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdLogFile={lab}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
TreeWidth=65533
SlurmdTimeout=30
ReturnToService=1
KillWait=5
MinJobAge=7200
MailProg=/bin/true
GresTypes=gpu
PrologFlags=Alloc,DeferBatch
SchedulerParameters=nohold_on_prolog_fail,batch_sched_delay=1,sched_interval=2,bf_interval=2
"""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={lab}/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={lab}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser=root
LogFile={lab}/log/slurmdbd.log
PidFile={lab}/run/slurmdbd.own
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=x
StorageLoc=slurm_acct
"""
WRAPPER = "#!/bin/sh\n{mark}={lab} GPUHEALTH_CONFIG={config} exec {program}\n"


def release() -> tuple[int, ...]:
    """This machine's Slurm: (22, 5, 8)."""
    said = subprocess.run(["slurmctld", "-V"], env={"PATH": PATH}, capture_output=True, text=True).stdout
    return tuple(map(int, said.split()[-1].split(".")))


class Cluster:
    """One cluster below the folder `lab`. `prolog`, `epilog` and `health` are slurm.conf values; "" leaves them out."""

    def __init__(
        self,
        lab: Path,
        nodes: int = 4,
        gpus: int = 8,
        *,
        dbd: bool = True,
        prolog: str = "",
        epilog: str = "",
        health: str = "",
        health_interval: int = 15,
        extra: str = "",
        cred_expire: int = 5,
    ) -> None:
        """For `cred_expire` + 1 seconds Slurm keeps a requeued job back: here 6, by its own default 121."""
        self.lab = lab.absolute()
        self.names = [f"n{i}" for i in range(1, nodes + 1)]
        self.gpus, self.dbd, self.cred_expire = gpus, dbd, cred_expire
        self.prolog, self.epilog, self.health = prolog, epilog, health
        self.health_interval, self.extra = health_interval, extra
        self.conf = self.lab / "etc/slurm.conf"
        self.env = {"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": "/root", "SLURM_CONF": str(self.conf)}
        self.daemons = Daemons(self.lab, self.env)

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- what tests ask for

    def run(self, *argv: str, timeout: float = PATIENCE, check: bool = True, stdin: str = "") -> str:
        """Run a Slurm client; its standard output. A failure raises with both streams in the message."""
        done = subprocess.run(argv, env=self.env, input=stdin, capture_output=True, text=True, timeout=timeout, cwd="/")
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: str, user: str = USER, **options: str | int | bool) -> int:
        """Submit the shell text `script` as `user`; `gres="gpu:1"` is --gres=gpu:1, `exclusive=True` a bare option."""
        flags = [f"--{k.replace('_', '-')}" + ("" if v is True else f"={v}") for k, v in options.items()]
        text = script if script.startswith("#!") else f"#!/bin/sh\n{script}\n"
        group = pwd.getpwnam(user).pw_gid
        out = [f"--output={self.lab}/out/%j", "--chdir=/tmp", f"--uid={user}", f"--gid={group}", "--parsable"]
        return int(self.run("sbatch", *out, *flags, stdin=text).partition(";")[0])

    def wait(self, job: int, states: str | Iterable[str], timeout: float = PATIENCE) -> str:
        """Poll until the job is in one of `states` (Slurm's words, "RUNNING"); the state."""
        wanted = {states} if isinstance(states, str) else set(states)
        return until(lambda: (s := self.job(job)["JobState"]) in wanted and s, f"job {job} {wanted}", timeout)

    def job(self, job: int) -> dict[str, str]:
        """The job's record, roughly split: for tests, whose job names hold no surprises."""
        words = self.run("scontrol", "-o", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until_begun(self, job: int) -> None:
        """Wait for the word `begun` of the script itself: Slurm says RUNNING as soon as the prolog begins."""
        out = self.lab / "out" / str(job)
        until(lambda: out.exists() and "begun" in out.read_text(), f"the script of job {job}")

    def output(self, job: int) -> str:
        return (self.lab / "out" / str(job)).read_text()

    def node(self, name: str) -> str:
        """`scontrol -o show node`, one line; of every node, where `name` is empty."""
        return self.run("scontrol", "-o", "show", "node", *([name] if name else []))

    def state(self, name: str) -> str:
        """Base state and flags, "IDLE+DRAIN"."""
        return self.node(name).partition(" State=")[2].split()[0]

    def reason(self, name: str) -> str:
        state, _, text = self.run("sinfo", "-h", "-N", "-n", name, "-o", "%T|%E").partition("\n")[0].partition("|")
        return (
            "" if text == "none" or state.rstrip("*") in ("idle", "mixed", "allocated") else text
        )  # 24.11 may keep it

    def sacct(self, job: int, fields: str = "JobID,State,ExitCode,DerivedExitCode,NodeList") -> list[list[str]]:
        """Rows of the job itself, requeued attempts included, once accounting has them."""
        ask = ("sacct", "-X", "-D", "-P", "-n", "-S", "now-7days", "-j", str(job), "-o", fields)
        return until(lambda: [line.split("|") for line in self.run(*ask).splitlines()], f"accounting of job {job}")

    def cancel_all(self, timeout: float = PATIENCE) -> None:
        """Cancel every job and wait until none is left, ending ones included."""

        def gone() -> bool:
            jobs = self.run("squeue", "-h", "-o", "%A", timeout=15, check=False).split()
            self.run("scancel", *jobs, timeout=15, check=False) if jobs else ""
            return not jobs

        until(gone, "an empty queue", timeout)

    def wire(self, venv_bin: Path, config: Path) -> None:
        """Make the installed programs in `venv_bin` this cluster's Prolog, Epilog and HealthCheckProgram.

        Slurm hands no GPUHEALTH_CONFIG on, so each is a wrapper that sets it. Before `start`, or on a running cluster.
        """
        for folder, program in (("prolog.d", "prolog"), ("epilog.d", "epilog"), ("health.d", "check")):
            wrapper = self.lab / folder / "50-gpuhealth"
            wrapper.parent.mkdir(parents=True, exist_ok=True)
            command = venv_bin.absolute() / f"gpuhealth-{program}"
            wrapper.write_text(WRAPPER.format(mark=MARK, lab=self.lab, config=config.absolute(), program=command))
            wrapper.chmod(0o755)
        self.prolog, self.epilog = f"{self.lab}/prolog.d/*", f"{self.lab}/epilog.d/*"
        self.health = f"{self.lab}/health.d/50-gpuhealth"
        if self.conf.exists() and self.daemons.alive("slurmctld"):
            self._write_slurm_conf(json.loads((self.lab / "etc/ports.json").read_text()))
            self.run("scontrol", "reconfigure")

    # ---- up and down

    def start(self) -> None:
        if os.geteuid() != 0:
            raise PermissionError("a Slurm cluster of several nodes on one host needs root: run this as root")
        self.stop()
        for folder in ("etc", "log", "run", "state", "spool", "nodes", "munge", "out"):
            (self.lab / folder).mkdir(parents=True, exist_ok=True)
        (self.lab / "out").chmod(0o1777)
        ports = dict(zip(("ctld", "dbd", "mysql", *self.names), free_ports(3 + len(self.names))))
        (self.lab / "etc/ports.json").write_text(json.dumps(ports))
        self._write_gres_conf()
        self._write_slurm_conf(ports)
        self._start_munge()
        if self.dbd:
            self._start_accounting(ports)
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        until(self._all_ready, f"{len(self.names)} nodes")

    def stop(self) -> None:
        """Stop everything of this lab, also what an earlier run left behind. Never raises for what is already gone."""
        if self.daemons.alive("slurmctld"):
            try:
                self.cancel_all(timeout=10)  # so that no step outlives its slurmd
            except (TimeoutError, subprocess.TimeoutExpired):
                pass
        for first in ("slurmd-", "slurmctld", "slurmdbd", "mariadbd", ""):
            self.daemons.stop(*[name for name in self.daemons.names() if name.startswith(first)])
        self.daemons.kill_strays()

    def start_controller(self) -> None:
        self.daemons.start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        until(lambda: "is UP" in self.run("scontrol", "ping", check=False), "slurmctld")

    def stop_controller(self) -> None:
        self.daemons.stop("slurmctld")

    def start_node(self, name: str, *options: str) -> None:
        """Start the node's slurmd and host engine; with `-b` slurmd says that the node has booted."""
        folder = self.lab / "nodes" / name
        if os.access(folder / "hostengine", os.X_OK):
            self.daemons.start(f"hostengine-{name}", str(folder / "hostengine"), str(folder / "hostengine.sock"))
        self.daemons.start(f"slurmd-{name}", "slurmd", "-D", *options, "-f", str(self.conf), "-N", name)

    def stop_node(self, name: str, sign: int = signal.SIGTERM) -> None:
        """Stop the node's slurmd (SIGKILL: as if it had lost power; its steps go on) and its host engine."""
        self.daemons.stop(f"slurmd-{name}", f"hostengine-{name}", sign=sign)

    # ---- how

    def _write_slurm_conf(self, ports: dict[str, int]) -> None:
        host = socket.gethostname().partition(".")[0]
        values = {"lab": self.lab, "host": host, "cluster": "lab", "cred_expire": self.cred_expire, **ports}
        text = SLURM_CONF.format(**values) + (ACCOUNTING.format(**values) if self.dbd else "")
        text += f"Prolog={self.prolog}\n" if self.prolog else ""
        text += f"Epilog={self.epilog}\n" if self.epilog else ""
        if self.health:
            text += f"HealthCheckProgram={self.health}\nHealthCheckInterval={self.health_interval}\n"
            text += "HealthCheckNodeState=ANY\n"
        text += self.extra + "\n"
        gres = f" Gres=gpu:h100:{self.gpus}" if self.gpus else ""
        for name in self.names:
            where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[name]}"
            text += f"NodeName={name} {where} CPUs=8 RealMemory=4000{gres}\n"
        text += "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU=100\n"
        # A second partition over the same nodes: sinfo then lists each node twice, as on real clusters.
        text += "PartitionName=all Nodes=ALL MaxTime=INFINITE DefMemPerCPU=100\n"
        self.conf.write_text(text)
        (self.lab / "etc/slurmdbd.conf").write_text(SLURMDBD_CONF.format(**values))
        (self.lab / "etc/slurmdbd.conf").chmod(0o600)  # slurmdbd refuses any other mode

    def _write_gres_conf(self) -> None:
        """One line a GPU, in an order that is not the minors': Slurm numbers GPUs by their place in this list."""
        lines = [
            f"NodeName={name} Name=gpu Type=h100 File={self.lab}/nodes/{name}/dev/nvidia{minor}\n"
            for name in self.names
            for minor in self.minors(name)
        ]
        (self.lab / "etc/gres.conf").write_text("".join(lines))

    def minors(self, name: str) -> list[int]:
        """Device minor numbers of the node's GPUs in Slurm's order; makes the node's folder when it is not there."""
        folder = self.lab / "nodes" / name
        if not self.gpus:
            return []
        if not (folder / "scenario.json").exists():
            make_node(folder, name, self.gpus, self.names.index(name))
        gpus = json.loads((folder / "scenario.json").read_text())["gpus"]
        return [gpu["minor"] for gpu in sorted(gpus, key=lambda gpu: gpu["gres"])]

    def _start_munge(self) -> None:
        """A munged of our own: own key, own socket."""
        folder = self.lab / "munge"
        folder.chmod(0o755)
        key = folder / "key"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(os.urandom(128))
        files = [f"--{part}-file={folder}/{part}" for part in ("key", "pid", "seed", "log")]
        self.daemons.start("munged", "munged", "-F", "--force", "--num-threads=10", f"--socket={folder}/socket", *files)
        ping = ["munge", "-n", "-S", f"{folder}/socket"]
        until(lambda: not subprocess.run(ping, env=self.env, capture_output=True).returncode, "munged")

    def _start_accounting(self, ports: dict[str, int]) -> None:
        folder = self.lab / "mysql"
        sock = f"{folder}/sock"
        mysql = pwd.getpwnam("mysql")
        folder.mkdir(exist_ok=True)
        os.chown(folder, mysql.pw_uid, mysql.pw_gid)
        for parent in [self.lab, *self.lab.parents]:  # mariadbd runs as user mysql and must get there
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        if not (folder / "data/mysql").is_dir():
            self.run("cp", "-a", str(self._empty_database()), f"{folder}/data")
        self.daemons.start(
            "mariadbd", "mariadbd", "--no-defaults", "--user=mysql", f"--datadir={folder}/data", f"--socket={sock}",
            f"--pid-file={folder}/own", "--bind-address=127.0.0.1", f"--port={ports['mysql']}", "--skip-log-bin",
            "--innodb-buffer-pool-size=128M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        admin = ["mariadb-admin", "--no-defaults", "-S", sock, "ping"]
        until(lambda: not subprocess.run(admin, env=self.env, capture_output=True).returncode, "MariaDB")
        # The database too: with libmariadb 3.4.10 a slurmdbd that must create it ends ("null result from query").
        grant = "create user if not exists slurm@localhost identified by 'x'; grant all on *.* to slurm@localhost;"
        create = "create database if not exists slurm_acct;"
        self.run("mariadb", "--no-defaults", "-S", sock, "-e", grant + create)
        self.daemons.start("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=sock)
        until(lambda: "lab" in self._sacctmgr("add", "cluster", "lab"), "slurmdbd")
        self._sacctmgr("add", "account", "lab", "Cluster=lab")
        self._sacctmgr("add", "user", "root", USER, "Account=lab")

    def _empty_database(self) -> Path:
        """A new database's folder, made once for all labs beside this one, by this MariaDB: 8 s of CPU each time."""
        program = os.stat("/usr/sbin/mariadbd")
        made = self.lab.parent / f".mysql-{program.st_size}-{program.st_mtime_ns}"
        with (self.lab.parent / ".mysql.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.is_dir():
                half = made.with_suffix(".half")
                shutil.rmtree(half, ignore_errors=True)
                where = ["--user=mysql", f"--datadir={half}", "--auth-root-authentication-method=socket"]
                self.run("mariadb-install-db", "--no-defaults", "--skip-test-db", *where)
                half.rename(made)
        return made

    def _sacctmgr(self, *words: str) -> str:
        return self.run("sacctmgr", "-i", *words, check=False)

    def _all_ready(self) -> bool:
        lines = self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%T").split()
        return len(lines) == len(self.names) and not any(c in line for line in lines for c in ("*", "unk"))
