"""A cluster's past, part by part: what its nodes ship, and what stand-ins for Slurm's programs answer.

ledger = Ledger(folder, store)      # the same past for each seed, whatever the store
ledger.tell(3)                      # the third ten minutes: findings and jobs that ended
run.once(ledger.settings, ledger.now(3))
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from slurm_gpuhealth.config.settings import Accounting, Correlate, Paths, Settings, Slurm, Store
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.ship import outbox as ship
from slurm_gpuhealth.slurm import sacct

if TYPE_CHECKING:
    from pathlib import Path

SPAN = 600
"""Seconds of the cluster's past in each part."""
JOBS, FINDINGS = 100, 40
"""In each part."""
NODES = [f"n{number}" for number in range(1, 41)]
LEMON = "n1"
TELLING = (LEMON, "n2")
"""The nodes that ship: one process for each is started in each part."""
FIELDS = (*sacct.FIELDS, *sacct.HOSTILE)
SACCT = """\
#!/bin/sh
[ "$1" = -e ] && exec echo {fields}
for word; do case $word in --delimiter=*) d=${{word#*=}} ;; esac; done
exec sed "s/|/$d/g" {rows}
"""
SCONTROL = """\
#!/bin/sh
case "$*" in
"show topology")
  echo "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-6]"
  echo "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[7-40]" ;;
"-o show job "*)
  start=$(grep "^$4|" {rows} | cut -d"|" -f11)
  echo "JobId=$4 JobName=x JobState=FAILED Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0" \
    "ExitCode=1:0 StartTime=$start EndTime=$start Deadline=N/A ReqNodeList=(null) ExcNodeList=(null) NodeList=n1" \
    "NumNodes=1 NumCPUs=1" ;;
"requeue "*) echo $2 >>{requeued} ;;
esac
"""
SINFO = """\
#!/bin/sh
for word; do :; done
echo $word | tr , "\\n"
"""
HARDWARE = {"verdict": "node", "confidence": 0.85, "kind": "hardware"}
SAYS = ({"verdict": "application", "confidence": 0.75, "kind": "application", "fingerprint": "KeyError"}, {})
CODES = (("13", "warning"), ("31", "warning"), ("63", "warning"), ("94", "warning"), ("79", "fault"))
ADD = {
    "finding": "INSERT INTO finding (time, seen, source, code, severity, rung, mode, uuid, message, standing, count,"
    " details, job) VALUES (?, ?1, 'xid', ?, ?, '', 'enforce', ?, '', 0, 1, '{}', ?)",
    "job": "INSERT INTO job (job, restart, uid, user, nodes, gpus, started, ended, exit_code, signal, derived, outcome)"
    " VALUES (?, 0, 5, ?, ?, ?, ?, ?, ?, 0, 0, '')",
    "log": "INSERT INTO joblog (job, restart, time, reading) VALUES (?, 0, ?, ?)",
}


class Ledger:
    """`store.url` may be a shared folder or PostgreSQL; `as_node` is what the nodes ship with."""

    def __init__(self, folder: Path, store: Store, as_node: Store, begin: float, seed: int = 5) -> None:
        self.folder, self.begin, self.random, self.job = folder, begin, random.Random(seed), 100  # noqa: S311
        boot = folder / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text("boot\n")
        self.rows, self.requeued = folder / "rows", folder / "requeued"
        self.rows.touch()
        self.requeued.touch()
        programs = {"sacct": SACCT, "scontrol": SCONTROL, "sacctmgr": "#!/bin/sh\n", "sinfo": SINFO}
        for name, text in programs.items():
            (folder / name).write_text(text.format(fields=" ".join(FIELDS), rows=self.rows, requeued=self.requeued))
            (folder / name).chmod(0o755)
        self.settings = Settings(
            paths=self._paths(folder, "controller"),
            store=store,
            slurm=Slurm(scontrol=str(folder / "scontrol"), sinfo=str(folder / "sinfo")),
            accounting=Accounting("sacct", str(folder / "sacct"), str(folder / "sacctmgr")),
            correlate=Correlate(rungs="shadow", requeue=True, settle=0.0),
        )
        self.nodes = {name: Settings(paths=self._paths(folder, name), store=as_node) for name in TELLING}
        self.journals = {name: open_journal(one.paths) for name, one in self.nodes.items()}

    def _paths(self, folder: Path, name: str) -> Paths:
        return Paths(state=f"{folder}/{name}/state", run=f"{folder}/{name}/run", proc=f"{folder}/proc")

    def now(self, part: int) -> float:
        """The time at which everything in the part has ended."""
        return self.begin + (part + 1) * SPAN

    def tell(self, part: int) -> None:
        """Record what happened in the part and ship it; records that can't be shipped now wait."""
        start = self.begin + part * SPAN
        jobs: dict[str, list[tuple[object, ...]]] = {name: [] for name in TELLING}
        ends = sorted(start + self.random.randrange(1, SPAN) for _ in range(JOBS))
        rows = [self._job(end, jobs) for end in ends]
        for name in TELLING:
            journal = self.journals[name]
            more = [self._finding(name, start) for _ in range(FINDINGS // len(TELLING))]
            journal.together(lambda: [journal.write(*one) for one in (*jobs[name], *more)])  # noqa: B023
        self.ship()
        with self.rows.open("a") as file:  # accounting last, as `correlate.settle` sees to
            file.write("".join(rows))

    def ship(self) -> bool:
        """Whether no record waits any more."""
        for name, one in self.nodes.items():
            ship.ship(one, self.journals[name], name, 20)
        return all(journal.one("SELECT count(*) FROM outbox") == (0,) for journal in self.journals.values())

    def _job(self, end: float, jobs: dict[str, list[tuple[object, ...]]]) -> str:
        """A row of accounting. What the job's nodes wrote about the job is added to `jobs`."""
        chance, self.job = self.random, self.job + 1
        nodes = chance.sample(NODES, chance.choice((1, 1, 1, 2)))
        user, start = f"u{chance.randrange(10)}", end - chance.randrange(30, 500)
        bad = LEMON in nodes and chance.random() < 0.3
        failed = bad or chance.random() < 0.15
        for name in set(nodes) & set(TELLING):
            gpus = [f"GPU-{name}-{number}" for number in range(4)]
            jobs[name].append((ADD["job"], self.job, user, len(nodes), ",".join(gpus), start, end, int(failed)))
            if bad and chance.random() < 0.5:
                jobs[name].append((ADD["finding"], end - 1, "79", "fault", gpus[1], self.job))
            if failed and name == nodes[0]:
                jobs[name].append((ADD["log"], self.job, end, json.dumps(HARDWARE if bad else chance.choice(SAYS))))
        state = "FAILED" if failed else "COMPLETED"
        code = f"{int(failed)}:0"
        cells = [
            *(self.job, self.job, "lab", "gpu", user, 5, "lab", state, code, "0:0", int(start), int(end)),
            *(f"gres/gpu={4 * len(nodes)}", ",".join(nodes), "normal", "", 60, ""),
            *(f"run{chance.randrange(3)}", "sbatch x", self.job),
        ]
        return "|".join(map(str, cells)) + "\n"

    def _finding(self, name: str, start: float) -> tuple[object, ...]:
        code, severity = self.random.choices(CODES, (10, 10, 5, 5, 0.05))[0]
        when = start + self.random.random() * SPAN
        return ADD["finding"], when, code, severity, f"GPU-{name}-{self.random.randrange(4)}", None
