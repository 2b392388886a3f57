"""A modelled cluster on which the real programs run: slurmctld, nodes with faults, virtual time.

It replaces `slurm.control`, the sources, the rungs' own work and the clock; the journal, the locks and all deciding
code are real. A program is one call. Its steps are its calls to Slurm, checks, sleeps and journal writes. Events are
injected at these steps: a kill at any step, actions of others at steps that read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import time
import types
from collections import deque

from slurm_gpuhealth.config.settings import Row, Settings
from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.hooks import check
from slurm_gpuhealth.ladder import drain, rung_test, rungs, worker
from slurm_gpuhealth.ladder.rungs import Result
from slurm_gpuhealth.node import hook, identity, record, run_level, watch
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm import reason as reasons
from tests.model_slurm import BEGIN, GPU, Node, Slurmctld, Steps

POLICY = (
    Row("nvml:lost", "fault", rung="L3", failed="reboot"),
    Row("nvml:remap", "fault", rung="reset"),
    Row("nvml:dead", "fault", rung="RMA"),
    Row("xid:48", "fault", rung="reset"),
    Row("xid:*", "fault", rung="L3", passed="L4"),
    Row("dcgm:*", "fault", rung="L3"),
)

PARSE = functools.lru_cache(10000)(reasons.parse)
"""Cached: it is pure and takes a third of a history's time."""
ENDLESS = 3000
"""Steps of one program; a climb to the end takes some hundreds."""
CLIMB = worker.climb


class Killed(BaseException):
    """`kill -9`: the program does nothing more from here on."""


class Process:
    def __init__(self, node: Node, name: str, plan=()) -> None:
        self.node, self.name, self.steps, self.dead = node, name, 0, False
        self.plan = sorted(plan, key=lambda one: one[0])
        """(step, what): `kill`, `lost` (an answer), or a function of the cluster and the node."""


class Cluster(Slurmctld):
    """Nodes n1, n2, … with these settings."""

    def __init__(self, settings: list[Settings], on_write=lambda *_: None, node=Node) -> None:
        super().__init__(on_write)
        self.now, self.down_until = BEGIN, 0.0
        self.nodes = {f"n{i}": node(f"n{i}", one) for i, one in enumerate(settings, 1)}
        self.workers: deque[str] = deque()
        """Nodes whose check has started a worker."""
        self.said: list[str] = []
        self.broken: list[str] = []
        """Broken rules, as sentences."""

    # ---- programs

    def run(self, node: Node, name: str, body, plan=()) -> Process:
        """Runs one of our programs on the node until it ends or is killed, then the workers that it started."""
        process = Process(node, name, plan)
        self.running.append(process)
        before = os.environ.get("SLURMD_NODENAME")
        os.environ["SLURMD_NODENAME"] = node.name
        try:
            body()
        except Killed:
            pass
        except Planned:
            pass
        finally:
            self.running.pop()
            os.environ.pop("SLURMD_NODENAME", None)
            if before:
                os.environ["SLURMD_NODENAME"] = before
        return process

    def check(self, node: Node, plan=(), worker_plan=()) -> None:
        """The health check and the worker that it may start."""
        self.run(node, "check", check.check, plan)
        while self.workers:
            name = self.workers.popleft()
            self.worker(self.nodes[name], worker_plan if name == node.name else ())

    def worker(self, node: Node, plan=()) -> None:
        self.run(node, "worker", worker.main, plan)

    def prolog(self, node: Node, plan=()) -> None:
        """What a prolog does when it sees a fault."""
        self.run(
            node, "prolog", lambda: drain.act(node.settings, node.journal, "prolog", node.name, time.time(), 7), plan
        )

    def step(self, kind: str) -> Process | None:
        """One step of the running program: the event planned for this step happens now."""
        process = self.running[-1] if self.running else None
        if process is None:
            return None
        if any(one.dead for one in self.running):
            raise Killed
        process.steps += 1
        if process.steps > ENDLESS:
            self.broken.append(f"{process.name} on {process.node} does not end")
            raise Killed
        waits = []
        while process.plan and process.plan[0][0] <= process.steps:
            at, what = process.plan.pop(0)
            if what == "kill":
                process.dead = True
                raise Killed
            if what == "lost":
                if kind == "order":
                    process.lost = True
                else:
                    waits.append((at, what))
            elif kind == "read" or (kind == "order" and hasattr(what, "anywhere")):
                what(self, process.node)
            else:
                waits.append((at, what))
        process.plan = waits + process.plan
        return process

    # ---- time

    def sleep(self, seconds: float) -> None:
        self.step("read")
        self.pass_time(seconds)
        if any(one.dead for one in self.running):
            raise Killed

    def pass_time(self, seconds: float) -> None:
        end = self.now + max(0.0, seconds)
        while self.due and min(self.due, key=lambda one: one[0])[0] <= end:
            first = min(self.due, key=lambda one: one[0])
            self.due.remove(first)
            self.now = max(self.now, first[0])
            first[2](first[1])
        self.now = end

    # ---- what the node sees

    def kernel(self, settings, journal, now: float) -> list:
        self.step("read")
        node, cursor = journal.node, journal.get("kernel")
        first = cursor is None
        seen = cursor[1] if cursor and cursor[0] == node.boots else 0
        found = [
            Finding(now, "xid", code, f"Xid {code}", GPU, details={"old": True} if first else {})
            for code in node.log[seen:]
        ]

        def keep() -> list:
            judged = record.keep(journal, settings, found, now) if found else []
            journal.put("kernel", (node.boots, len(node.log)))
            return judged

        judged = journal.together(keep)
        node.read |= {(node.boots, seen + number, one.code) for number, one in enumerate(found)}
        return judged

    def look(self, settings, journal, now: float, timeout: float):
        self.step("read")
        node = journal.node
        node.looked = True
        if node.blind:
            raise OSError("can't be read")
        node.seen = set(node.standing)
        found = [Finding(now, "nvml", code, code, GPU, standing=True) for code in node.standing]
        return found, True, {}

    def rung(self, climb) -> Result:
        """A rung's own work: it takes some time, mends what it can, and sees the remaining faults."""
        node = self.nodes[climb.node]
        for _ in range(2):
            time.sleep(climb.seconds / 3)
            climb.check_hold()
        plan = node.plans.popleft() if node.plans else ""
        if plan == "raise":
            raise Planned
        if plan == "untested":
            return Result("untested", "busy")
        if climb.rung == "RMA":
            return Result("fail", "gathered", bundle="/b/rma.tar.gz")
        if plan == "together":
            return Result("fail", "2 GPUs fail together, but none of them alone")
        self.mend(node, climb.rung)
        return self.levels(climb, 3, broken=plan == "fail")

    def levels(self, climb, level: int, index=None, broken: bool = False) -> Result:
        """A DCGM level."""
        node, journal = self.nodes[climb.node], climb.journal
        self.step("read")
        broken = broken or bool(node.weak)
        now = time.time()
        found = [Finding(now, "dcgm", "memory", "bad", GPU, standing=True, details={"level": 3})] if broken else []
        judged = record.keep(journal, climb.settings, found, now)
        record.clear(journal, ("dcgm",), judged, now, [GPU.uuid], 4)
        node.proven, node.looked = not broken, False
        return Result("fail", "bad", GPU, "dcgm:memory", "46") if broken else Result("pass", "fine")

    def mend(self, node: Node, how: str) -> None:
        for fault in [one for one, mends in node.standing.items() if mends == how]:
            del node.standing[fault]
        node.weak = "" if node.weak == how else node.weak

    # ---- the patches

    @contextlib.contextmanager
    def playing(self):
        """The real programs run on this cluster."""
        assert isinstance(time.sleep, types.BuiltinFunctionType), "an earlier test has left its own time.sleep there"
        mine = {
            time: {
                "time": lambda: self.now,
                "monotonic": lambda: self.now,
                "sleep": lambda seconds: self.sleep(seconds),
                "clock_gettime": lambda _: self.now - (self.running[-1].node.boot_time if self.running else 0),
            },
            control: {
                name: getattr(self, name)
                for name in (
                    *("show_node", "holds", "config", "up", "drain", "set_reason", "set_text", "set_remarks"),
                    *("undrain", "resume", "reboot", "cancel_reboot", "events", "put_out"),
                )
            }
            | {"_ask": None},
            worker: {"start": self.workers.append, "climb": self._climb},
            watch: {
                "kernel": self.kernel,
                "SOURCES": {"nvml": (("nvml",), 0, self.look)},
            },
            reasons: {"parse": PARSE},
            identity: {
                "boot_id": lambda settings: str(self.nodes[os.path.basename(settings.paths.run)].boots),
                "doubtful": lambda *_: False,
                "learn": lambda *_, **__: None,
            },
            run_level: {"run_level": lambda *_, **__: "pass"},
            hook: {"start": lambda name: (self.nodes[name].settings, self.nodes[name].journal)},
            Steps: {"world": self},
        }
        for module in {rung.module for rung in rungs.LADDER.values()} - {"rung_reboot"}:
            mine[importlib.import_module(f"slurm_gpuhealth.ladder.{module}")] = {"run": self.rung}
        mine[rung_test]["levels"] = self.levels
        for name, module in list(sys.modules.items()):
            if name.startswith("slurm_gpuhealth.") and hasattr(module, "say") and not name.endswith(".say"):
                mine.setdefault(module, {})["say"] = lambda text, error=False: self.said.append(text)
        was = [(where, name, getattr(where, name)) for where, names in mine.items() for name in names]
        for where, names in mine.items():
            for name, value in names.items():
                setattr(where, name, value)
        try:
            yield self
        finally:
            for where, name, value in was:
                setattr(where, name, value)

    def _climb(self, settings, journal, name: str) -> None:
        """The real function; two must never run at once."""
        node = self.nodes[name]
        node.climbing += 1
        if node.climbing > 1:
            self.broken.append(f"two workers at once on {name}")
        try:
            CLIMB(settings, journal, name)
        finally:
            node.climbing -= 1


class Planned(Exception):
    """A fault in a rung's own code."""
