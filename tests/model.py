"""A modelled cluster on which the real programs run: slurmctld as measured, nodes with faults, virtual time.

It stands in for `slurm.control`, the sources, the rungs' own work and the clock; the journal, the locks and all that
decides are real. A program is one call; what comes between is injected at its steps, which are its calls to Slurm, its
looks, sleeps and journal writes: a kill at any of them, what others do at those that read.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections import deque
from types import SimpleNamespace

from slurm_gpuhealth import act, diagnostic, hook, identity, record, watch
from slurm_gpuhealth.commands import check
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.journal import Journal, memory
from slurm_gpuhealth.ladder import rungs, test, worker
from slurm_gpuhealth.ladder.rungs import Result
from slurm_gpuhealth.settings import Row, Settings
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm.node import Hold, NodeRecord

BEGIN = 1_790_000_000.0
GPU = Gpu("GPU-3", "0000:5d:00", 3, "1652823055571")
SITE = "rack 7"
POLICY = (
    Row("nvml:lost", "fault", rung="L3", failed="reboot"),
    Row("nvml:remap", "fault", rung="reset"),
    Row("nvml:dead", "fault", rung="RMA"),
    Row("xid:48", "fault", rung="reset"),
    Row("xid:*", "fault", rung="L3", passed="L4"),
    Row("dcgm:*", "fault", rung="L3"),
)

BOOT, RESUME_TIMEOUT = 120.0, 600.0


class Killed(BaseException):
    """`kill -9`: from here on the program does nothing any more."""


class Node:
    """A node as slurmctld keeps it, and as it is."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.base, self.flags, self.reason, self.reason_time = "IDLE", set(), "", 0
        self.comment = self.extra = SITE
        self.job = 0
        self.down_by = ""
        """Who made it DOWN: `reboot` is ours."""
        self.boots = self.reboots = self.boot_time = 0
        self.returns = True
        """Whether it comes back from a reboot."""
        self.standing: dict[str, str] = {}
        """Fault → the rung that mends it."""
        self.log: list[str] = []
        """Xids in the kernel log of this boot."""
        self.read: set[tuple[int, int, str]] = set()
        """(boot, line, Xid): what our programs have read of it."""
        self.weak = ""
        """What only a test sees: the rung that mends it."""
        self.blind = False
        self.plans: deque[str] = deque()
        """What becomes of the next rungs, otherwise than the node's faults say: `untested`, `fail`, `raise`."""
        self.climbing = 0
        self.seen: set[str] = set()
        """Standing faults that the last look saw."""
        self.proven = False
        """Whether the last test passed."""
        self.forget()

    def forget(self) -> None:
        """The journal is gone."""
        self.journal = Steps(self)
        self.seen = set()

    @property
    def record(self) -> NodeRecord:
        base = "ALLOCATED" if self.job and self.base == "IDLE" else self.base
        return NodeRecord(
            *(self.name, base, frozenset(self.flags), self.reason, "root", float(self.reason_time)),
            *(self.comment, self.extra, "gpu:8", float(self.boot_time), 8 * bool(self.job)),
        )

    def __repr__(self) -> str:
        return f"{self.name} {'+'.join([self.base, *sorted(self.flags)])} {self.reason!r}"


class Steps(Journal):
    """A journal in memory each of whose writes is a step."""

    world: Cluster

    def __init__(self, node: Node) -> None:
        super().__init__(memory(), "", node.settings.paths.run)
        self.node = node
        self.put("gpus", [{"uuid": GPU.uuid, "pci": GPU.pci, "index": GPU.index, "serial": GPU.serial, "name": "H100"}])

    def write(self, sql: str, *values: object) -> int:
        self.world.step("write")
        return super().write(sql, *values)

    world = SimpleNamespace(step=lambda kind: None)  # type: ignore[assignment]


class Process:
    def __init__(self, node: Node, name: str, plan=()) -> None:
        self.node, self.name, self.steps, self.dead = node, name, 0, False
        self.plan = sorted(plan, key=lambda one: one[0])
        """(step, what): `kill`, `lost` (an answer), or a function of the cluster and the node."""


class Cluster:
    """`settings(name)`: of each node. `on_write(node, verb, text)` is told of each change that we order, before it."""

    def __init__(self, settings: list[Settings], on_write=lambda *_: None, node=Node) -> None:
        self.now, self.offset = BEGIN, 0.0
        self.down_until = 0.0
        self.nodes = {f"n{i}": node(f"n{i}", one) for i, one in enumerate(settings, 1)}
        self.on_write = on_write
        self.running: list[Process] = []
        self.due: list[tuple[float, Node, object]] = []
        """(time, node, what): what happens by itself."""
        self.workers: deque[str] = deque()
        self.said: list[str] = []
        self.broken: list[str] = []
        """What must never be, as sentences."""
        self.asked = 0
        """Questions and orders to slurmctld."""
        self.orders: list[str] = []
        """What we ordered, for people."""

    # ---- programs

    def run(self, node: Node, name: str, body, plan=()) -> Process:
        """One program of ours on the node, to its end, however that comes; then the workers that it started."""
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
        """The health check, and the worker that it may start."""
        self.run(node, "check", check.check, plan)
        while self.workers:
            name = self.workers.popleft()
            self.worker(self.nodes[name], worker_plan if name == node.name else ())

    def worker(self, node: Node, plan=()) -> None:
        self.run(node, "worker", worker.main, plan)

    def prolog(self, node: Node, plan=()) -> None:
        """What a prolog does when it sees a fault."""
        self.run(
            node, "prolog", lambda: act.act(node.settings, node.journal, "prolog", node.name, time.time(), 7), plan
        )

    def step(self, kind: str, free: bool = True) -> Process | None:
        """One step of the program that runs: what was planned for it happens now."""
        process = self.running[-1] if self.running else None
        if process is None:
            return None
        if any(one.dead for one in self.running):
            raise Killed
        process.steps += 1
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
            elif kind == "read":
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

    # ---- slurmctld, as measured on 22.05.8

    def ask(self, kind: str) -> Process | None:
        self.now += 0.01
        self.asked += 1
        process = self.step(kind)
        if self.now < self.down_until:
            self.pass_time(10)
            raise control.ControllerDown("no answer")
        return process

    def order(self, verb: str, name: str, text: str, change) -> None:
        process = self.ask("order")
        node = self.nodes[name]
        self.on_write(self, node, verb, text)
        self.orders.append(f"{self.now - BEGIN:.0f} {process and process.name} {name} {verb} {text}")
        change(node)
        if getattr(process, "lost", False):
            process.lost = False
            raise control.ControllerDown("no answer")

    def show_node(self, slurm, name: str) -> NodeRecord:
        self.ask("read")
        return self.nodes[name].record

    def holds(self, slurm, group: str = "", name: str = "") -> tuple[list[Hold], int]:
        self.ask("read")
        read = {one.name: reasons.parse(one.reason) for one in self.nodes.values()}
        return [Hold(one, ours, self.nodes[one].reason_time) for one, ours in read.items() if ours], len(self.nodes)

    def drain(self, slurm, name: str, reason) -> None:
        text = reasons.write(reason)
        self.order("drain", name, text, lambda node: self.set_drain(node, text))

    def set_reason(self, slurm, name: str, reason) -> None:
        text = reasons.write(reason)
        self.order("reason", name, text, lambda node: self.set_text_of(node, text))

    def set_text(self, slurm, name: str, text: str) -> None:
        self.order("text", name, text, lambda node: self.set_text_of(node, text))

    def undrain(self, slurm, name: str) -> None:
        self.order("undrain", name, "", self.end_drain)

    def resume(self, slurm, name: str) -> None:
        self.order("resume", name, "", self.end_down)

    def set_remarks(self, slurm, name: str, **texts: str) -> None:
        self.order("remarks", name, str(texts), lambda node: node.__dict__.update(texts))

    def reboot(self, slurm, name: str, reason) -> None:
        text = reasons.write(reason)
        self.order("reboot", name, text, lambda node: self.begin_reboot(node, text))

    def cancel_reboot(self, slurm, name: str) -> None:
        if "REBOOT_REQUESTED" not in self.nodes[name].flags:
            raise control.Refused("scontrol cancel_reboot", 1, "too late")
        self.order("cancel", name, "", lambda node: node.flags.discard("REBOOT_REQUESTED"))

    def config(self, slurm) -> dict[str, tuple[str, ...]]:
        self.ask("read")
        return {"RebootProgram": ("/sbin/reboot",), "ResumeTimeout": ("600 sec",), "ReturnToService": ("1",)}

    def set_text_of(self, node: Node, text: str) -> None:
        """On a node in service it is dropped; the same text keeps its time."""
        if (node.flags & {"DRAIN", "FAIL"} or node.base == "DOWN") and text and text != node.reason:
            node.reason, node.reason_time = text, int(self.now + self.offset)

    def set_drain(self, node: Node, text: str) -> None:
        node.flags = (node.flags - {"FAIL"}) | {"DRAIN"}
        self.set_text_of(node, text)

    def end_drain(self, node: Node) -> None:
        node.flags -= {"DRAIN", "FAIL"}
        if node.base != "DOWN":
            node.reason, node.reason_time = "", 0

    def end_down(self, node: Node) -> None:
        node.flags -= {"DRAIN", "FAIL", "REBOOT_REQUESTED", "REBOOT_ISSUED"}
        node.base, node.reason, node.reason_time, node.down_by = "IDLE", "", 0, ""

    def set_down(self, node: Node, text: str, by: str) -> None:
        node.base, node.down_by, node.job = "DOWN", by, 0
        self.set_text_of(node, text)

    def begin_reboot(self, node: Node, text: str) -> None:
        node.flags |= {"DRAIN", "REBOOT_REQUESTED"}
        self.set_text_of(node, text)
        self.due.append((self.now + 1, node, self.issue_reboot))

    def issue_reboot(self, node: Node) -> None:
        if "REBOOT_REQUESTED" not in node.flags or node.job:
            return
        node.flags = (node.flags - {"REBOOT_REQUESTED"}) | {"REBOOT_ISSUED"}
        node.base, node.down_by = "DOWN", "reboot"
        self.set_text_of(node, f"{node.reason} : reboot issued")
        node.reboots += 1
        number = node.reboots
        timed_out = lambda one: one.reboots == number and self.end_reboot(one, "timed out")  # noqa: E731
        self.due.append((self.now + RESUME_TIMEOUT, node, timed_out))
        if node.returns:
            self.due.append((self.now + BOOT, node, self.boot))

    def boot(self, node: Node) -> None:
        """The machine boots: what runs on it dies."""
        for process in self.running:
            process.dead = process.dead or process.node is node
        node.boots += 1
        node.boot_time, node.log, node.job = int(self.now), [], 0
        self.mend(node, "reboot")
        if "REBOOT_ISSUED" in node.flags:
            self.end_reboot(node, "complete")
        else:
            self.set_down(node, node.reason or "Node unexpectedly rebooted", node.down_by or "boot")

    def end_reboot(self, node: Node, how: str) -> None:
        if "REBOOT_ISSUED" in node.flags:
            node.flags -= {"REBOOT_ISSUED", "DRAIN"}
            self.set_text_of(node, f"{node.reason} : reboot {how}")

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
        if node.blind:
            raise OSError("can't be read")
        node.seen = set(node.standing)
        found = [Finding(now, "nvml", code, code, GPU, standing=True) for code in node.standing]
        return found, True, {}

    def rung(self, climb) -> Result:
        """A rung's own work: it takes a while, mends what it can, and sees what is there."""
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
        node.proven = not broken
        return Result("fail", "bad", GPU, "dcgm:memory", "46") if broken else Result("pass", "fine")

    def mend(self, node: Node, how: str) -> None:
        for fault in [one for one, mends in node.standing.items() if mends == how]:
            del node.standing[fault]
        node.weak = "" if node.weak == how else node.weak

    # ---- the patches

    @contextlib.contextmanager
    def playing(self):
        """The real programs run on this cluster."""
        mine = {
            time: {
                "time": lambda: self.now,
                "monotonic": lambda: self.now,
                "sleep": self.sleep,
                "clock_gettime": lambda _: self.now - (self.running[-1].node.boot_time if self.running else 0),
            },
            control: {
                name: getattr(self, name)
                for name in (
                    *("show_node", "holds", "config", "drain", "set_reason", "set_text", "set_remarks"),
                    *("undrain", "resume", "reboot", "cancel_reboot"),
                )
            }
            | {"_ask": None},
            worker: {"start": self.workers.append, "climb": self._climb},
            watch: {
                "kernel": self.kernel,
                "boot_id": lambda settings: str(self.nodes[os.path.basename(settings.paths.run)].boots),
                "SOURCES": {"nvml": (("nvml",), 0, self.look)},
            },
            identity: {"doubtful": lambda *_: False, "learn": lambda *_, **__: None},
            diagnostic: {"run_level": lambda *_, **__: "pass"},
            hook: {"start": lambda name: (self.nodes[name].settings, self.nodes[name].journal)},
            Steps: {"world": self},
        }
        for module in {rung.module for rung in rungs.LADDER.values()} - {"reboot"}:
            mine[importlib.import_module(f"slurm_gpuhealth.ladder.{module}")] = {"run": self.rung}
        mine[test]["levels"] = self.levels
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
        """The real one; two at once are never."""
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


CLIMB = worker.climb
