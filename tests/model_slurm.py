"""A model of slurmctld, as measured on 22.05.8, and of nodes: slurmctld's record of them and their true state."""

from __future__ import annotations

import sqlite3
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slurm_gpuhealth.findings import Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node.journal import Journal
from slurm_gpuhealth.node.journal_file import memory
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm.node import Event, Hold, NodeRecord

if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings

BEGIN = 1_790_000_000.0
GPU = Gpu("GPU-3", "0000:5d:00", 3, "1652823055571")
SITE = "rack 7"
EMPTY = memory()
BOOT, RESUME_TIMEOUT = 120.0, 600.0


class Node:
    """A node: slurmctld's record of it and its true state."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.base, self.flags, self.reason, self.reason_time = "IDLE", set(), "", 0
        self.comment = self.extra = SITE
        self.job = 0
        self.down_by = ""
        """Who set it DOWN; `reboot`: we did."""
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
        """A fault that only a test sees: the rung that mends it."""
        self.blind = False
        self.plans: deque[str] = deque()
        """Results of the next rungs, whatever the faults: `untested`, `fail`, `together`, `raise`."""
        self.climbing = 0
        self.seen: set[str] = set()
        """Standing faults that the last check saw."""
        self.proven = False
        """Whether the last test passed."""
        self.looked = True
        """Whether every source was read since then."""
        self.forget()

    def forget(self) -> None:
        """The journal is lost."""
        self.journal = Steps(self)
        self.seen = set()

    @property
    def record(self) -> NodeRecord:
        base = "ALLOCATED" if self.job and self.base == "IDLE" else self.base
        return NodeRecord(
            *(self.name, base, frozenset(self.flags), self.reason, "root", float(self.reason_time)),
            *(self.comment, self.extra, "gpu:8"),
            boot_time=float(self.boot_time),
            alloc_cpus=8 * bool(self.job),
        )

    def __repr__(self) -> str:
        return f"{self.name} {'+'.join([self.base, *sorted(self.flags)])} {self.reason!r}"


class Steps(Journal):
    """A journal in memory; each write is a step."""

    world: Any

    def __init__(self, node: Node) -> None:
        db = sqlite3.connect(":memory:", isolation_level=None)
        EMPTY.backup(db)
        super().__init__(db, "", node.settings.paths.run)
        self.node = node
        self.put("gpus", [{"uuid": GPU.uuid, "pci": GPU.pci, "index": GPU.index, "serial": GPU.serial, "name": "H100"}])

    def write(self, sql: str, *values: object) -> int:
        self.world.step("write")
        return super().write(sql, *values)

    def settled(self) -> None:
        """Does nothing: the model's kernel log has its own cursor."""

    world = SimpleNamespace(step=lambda kind: None)  # type: ignore[assignment]


class Slurmctld:
    """The calls of `slurm.control`. `Cluster` has the nodes, the time, and who calls."""

    now: float
    down_until: float
    nodes: dict[str, Node]
    step: Any
    pass_time: Any
    mend: Any

    def __init__(self, on_write=lambda *_: None) -> None:
        self.on_write = on_write
        """Called with (cluster, node, verb, text) before each change that we order."""
        self.started = 0.0
        self.rows: dict[tuple[str, float], Event] = {}
        """slurmdbd's record of who was out of service."""
        self.running: list[Any] = []
        self.due: list[tuple[float, Node, Any]] = []
        """(time, node, what): events that happen by themselves."""
        self.asked = 0
        """The number of questions and orders."""
        self.orders: list[str] = []
        """What we ordered, for people."""
        self.texts: list[str] = []
        """Every reason that a node has had."""

    def ask(self, kind: str) -> Any:
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

    def up(self, slurm) -> float:
        self.ask("read")
        return self.now - self.started

    def events(self, slurm, names) -> list[Event]:
        """As on 22.05.8: a row for each `State=` with a reason, none for a `Reason=` alone; at most one per second."""
        return sorted((row for row in self.rows.values() if row.node in names), key=lambda row: row.start)

    def put_out(self, slurm, name: str, state: str, text: str) -> None:
        put = {"DRAIN": self.set_drain, "DOWN": lambda *words: self.set_down(*words, "admin"), "FAIL": self.set_fail}
        self.order("put_out", name, f"{state} {text}", lambda node: put[state](node, text))

    def note(self, node: Node, state: str = "", text: str = "") -> None:
        """In slurmdbd, the open row ends and another begins."""
        now = float(int(self.now))
        for key, row in self.rows.items():
            if row.node == node.name and not row.end:
                self.rows[key] = replace(row, end=now)
        if state and text:
            self.rows[node.name, now] = Event(node.name, now, 0.0, state, text)

    def set_fail(self, node: Node, text: str) -> None:
        node.flags = (node.flags - {"DRAIN"}) | {"FAIL"}
        self.set_text_of(node, text)
        self.note(node, "FAIL", text)

    def set_text_of(self, node: Node, text: str) -> None:
        """slurmctld drops the reason of a node in service; a reason with the same text keeps its time."""
        if (node.flags & {"DRAIN", "FAIL"} or node.base == "DOWN") and text and text != node.reason:
            node.reason, node.reason_time = text, int(self.now)
            self.texts.append(text)

    def set_drain(self, node: Node, text: str) -> None:
        node.flags = (node.flags - {"FAIL"}) | {"DRAIN"}
        self.set_text_of(node, text)
        self.note(node, "DRAIN", text)

    def end_drain(self, node: Node) -> None:
        node.flags -= {"DRAIN", "FAIL"}
        self.note(node)
        if node.base != "DOWN":
            node.reason, node.reason_time = "", 0

    def end_down(self, node: Node) -> None:
        node.flags -= {"DRAIN", "FAIL", "REBOOT_REQUESTED", "REBOOT_ISSUED"}
        self.note(node)
        node.base, node.reason, node.reason_time, node.down_by = "IDLE", "", 0, ""

    def set_down(self, node: Node, text: str, by: str) -> None:
        node.base, node.down_by, node.job = "DOWN", by, 0
        self.set_text_of(node, text)
        self.note(node, "DOWN", text)

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
        """The machine boots: everything that runs on it dies."""
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
