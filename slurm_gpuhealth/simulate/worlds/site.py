"""Some weeks of a small site: where jobs run, how they end, and what is reported of it."""

from __future__ import annotations

import heapq
import math
import zlib
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.outcomes import Attempt, Event
from slurm_gpuhealth.simulate.worlds import ends
from slurm_gpuhealth.simulate.worlds.ends import ENDS
from slurm_gpuhealth.simulate.worlds.fates import HOUR, Fate, fate_of
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH, Bad, Truth, World

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from random import Random

    from slurm_gpuhealth.outcomes import GpuName
    from slurm_gpuhealth.simulate.worlds.apps import App, Fault, Held, Incident

NEVER = (math.inf, math.inf)
PATIENCE = 3 * DAY
"""A job that would wait for longer is withdrawn."""
ACCEPTED = {
    "node": ("node",),
    "application": ("application",),
    "user": ("user",),
    "admin": ("user", "infrastructure"),
    "module": ("application", "infrastructure"),
    "leaf": ("fabric", "infrastructure"),
    "power": ("infrastructure", "fabric"),
    "network": ("infrastructure", "fabric"),
    "controller": ("infrastructure", "fabric"),
    "storage": ("infrastructure",),
    "preemption": ("user", "application"),
}
"""A cause in the words of the worlds → verdicts that are right; the first is the best."""


class _Job(NamedTuple):
    """One that waits."""

    submit: float
    id: int
    app: App
    array: int | None
    attempt: int = 0


class Site:
    """Built up by the methods and attributes, then `run` once."""

    def __init__(self, rng: Random, nodes: int = 8, days: float = 28, gpus: int = 8, prefix: str = "gn") -> None:
        self.rng, self.days, self.gpus = rng, days, gpus
        self.nodes = tuple(f"{prefix}{nth:02d}" for nth in range(1, nodes + 1))
        self.end = EPOCH + days * DAY
        self.partitions: dict[str, tuple[str, ...]] = {"gpu": self.nodes}
        self.apps: list[App] = []
        self.faults: dict[str, list[Fault]] = {}
        self.incidents: list[Incident] = []
        self.away: dict[str, tuple[float, float]] = {}
        """Node → days from which, and until which, no job may run there."""
        self.reserved: dict[str, tuple[tuple[str, ...], float, float]] = {}
        """Reservation → its nodes, and its days."""
        self.leaves: dict[str, tuple[str, ...]] = {}
        self.places: dict[str, tuple[str, ...]] = {}
        self.bad_places: tuple[str, ...] = ()
        self.packed = False
        """The first node first, as Slurm does; else any."""
        self.jobs_name, self.events_name = "uuid", "uuid"
        """How GPUs are called in Slurm's record and by their driver: `uuid`, `index`, `""` not at all."""
        self.unnamed = 0.0
        """Share of the attempts of which nobody kept the GPUs."""
        self.reversed = False
        """The driver counts from the other end than Slurm."""
        self.logs = "text"
        """`text`, `class`, `""` nobody looks."""
        self.named = True
        """NODE_FAIL names its node."""
        self.cancels = 0.3
        """Share of the hangs that their users end."""
        self.uuids = {
            node: tuple(f"GPU-{nth:08x}-0000-4000-8000-{gpu:012x}" for gpu in range(gpus))
            for nth, node in enumerate(self.nodes)
        }
        self._events: list[Event] = []
        self._noise: list[tuple[str, int, tuple[str, ...]]] = []
        self._bad: set[Bad] = set()
        self._held: dict[tuple[int, int], Held] = {}
        self._free = {node: [EPOCH] * gpus for node in self.nodes}

    def fault(self, fault: Fault) -> None:
        self.faults.setdefault(fault.node, []).append(fault)
        gpus = tuple(self._names(fault.node, gpu) for gpu in fault.gpus) if self.jobs_name or self.events_name else ()
        self._bad.add(Bad(fault.node, EPOCH + fault.since * DAY, min(self.end, EPOCH + fault.until * DAY), gpus))

    def event(self, day: float, node: str, source: str, code: str, gpu: int | None = None, **detail: object) -> None:
        name = None
        if gpu is not None and self.events_name:
            name = self.gpu(node, self.gpus - 1 - gpu if self.reversed else gpu, self.events_name)
        self._events.append(Event(EPOCH + day * DAY, node, name, source, code, _severity(source, code), detail))

    def noise(self, code: str, times: int, nodes: Sequence[str] = ()) -> None:
        """An Xid that comes so often while jobs run on, and complete."""
        self._noise.append((code, times, tuple(nodes or self.nodes)))

    def racks(self, size: int, kind: str = "rack") -> list[tuple[str, ...]]:
        """Divides the nodes into places of that size."""
        found = [self.nodes[at : at + size] for at in range(0, len(self.nodes), size)]
        self.places |= {f"{kind} {kind[0]}{nth}": nodes for nth, nodes in enumerate(found, 1)}
        return found

    def gpu(self, node: str, gpu: int, how: str) -> GpuName:
        return gpu if how == "index" else self.uuids[node][gpu]

    def _names(self, node: str, gpu: int) -> tuple[GpuName, ...]:
        """All names by which the GPU is told."""
        theirs = self.gpus - 1 - gpu if self.reversed else gpu
        told = ((gpu, self.jobs_name), (theirs, self.events_name))
        return tuple(dict.fromkeys(self.gpu(node, number, how) for number, how in told if how))

    def run(self) -> World:
        attempts: list[Attempt] = []
        truth: dict[tuple[int, int], Truth] = {}
        ids = count(5001)
        arrays: dict[int, int] = {}
        queue = []
        for job in sorted(job for app in self.apps for job in self._submitted(app)):
            number = next(ids)
            array = None if job.array is None else arrays.setdefault(job.array, number)
            queue.append((job.submit, number, 0, job._replace(id=number, array=array)))
        heapq.heapify(queue)
        self._of_incidents()
        while queue:
            _, _, _, job = heapq.heappop(queue)
            placed = self._place(job.app, job.submit)
            if placed is None:
                continue
            start, held = placed
            fate = fate_of(self.rng, job.app, held, start, self.faults, self.incidents, self.cancels)
            for node, gpus in held.items():
                for gpu in gpus:
                    self._free[node][gpu] = fate.time + 5
            if fate.time >= self.end:
                continue
            attempts.append(self._attempt(job, held, start, fate))
            self._held[job.id, job.attempt] = held
            if fate.end:
                key, causes = (job.id, job.attempt), ACCEPTED[fate.cause]
                truth[key] = Truth(*key, causes[0], causes, fate.node)
            if fate.end in ("node-fail", "preempted") and job.attempt < 3:
                again = job._replace(submit=fate.time + 150, attempt=job.attempt + 1)
                heapq.heappush(queue, (again.submit, again.id, again.attempt, again))
        attempts.sort(key=lambda one: one.end)
        self._of_noise(attempts)
        events = sorted((one for one in self._events if EPOCH <= one.time < self.end), key=lambda one: one.time)
        bad = tuple(sorted(self._bad))
        return World(
            self.nodes,
            self.days,
            attempts,
            events,
            self.leaves,
            self.places,
            bad,
            self.bad_places,
            truth,
        )

    def _submitted(self, app: App) -> Iterable[_Job]:
        rng, first, last = self.rng, EPOCH + app.first * DAY, min(self.end, EPOCH + app.last * DAY)
        if app.clock is not None:
            times = [EPOCH + day * DAY + app.clock * HOUR for day in range(math.ceil(self.days))]
            times = [one for one in times if first <= one < last]
        else:
            times, when = [], first
            while app.per_day and (when := when + rng.expovariate(app.per_day / DAY)) < last:
                times.append(when)
        for when in times:
            array = rng.getrandbits(40) if app.array > 1 else None
            for task in range(app.array):
                yield _Job(when + task / 100, rng.getrandbits(40), app, array)

    def _place(self, app: App, submit: float) -> tuple[float, Held] | None:
        """The first nodes that are free, or those that are free first."""
        nodes = app.only or self.partitions[app.partition]
        if not self.packed:
            at = int(self.rng.random() * len(nodes))
            nodes = nodes[at:] + nodes[:at]
        held: Held = {}
        for node in nodes:
            idle = [gpu for gpu, free in enumerate(self._free[node]) if free <= submit]
            if len(idle) >= app.gpus and self._there(app, node, submit):
                held[node] = tuple(idle[: app.gpus])
                if len(held) == app.nodes:
                    return submit, held
        soon = sorted((sorted(self._free[node])[app.gpus - 1], nth) for nth, node in enumerate(nodes))
        for start, _ in soon[app.nodes - 1 :]:
            start = max(start, submit)
            there = [nodes[nth] for free, nth in soon if free <= start and self._there(app, nodes[nth], start)]
            if start < submit + PATIENCE and len(there) >= app.nodes:
                break
        else:
            return None
        chosen = {}
        for node in there[: app.nodes]:
            idle = [gpu for gpu, free in enumerate(self._free[node]) if free <= start]
            chosen[node] = tuple(idle[: app.gpus])
        return start, chosen

    def _there(self, app: App, node: str, time: float) -> bool:
        day = (time - EPOCH) / DAY
        since, until = self.away.get(node, NEVER)
        return not (since <= day < until) and not any(
            node in nodes and name != app.reservation and first <= day < last
            for name, (nodes, first, last) in self.reserved.items()
        )

    def _attempt(self, job: _Job, held: Held, start: float, fate: Fate) -> Attempt:
        rng, app, nodes = self.rng, job.app, tuple(sorted(held))
        host = fate.node or rng.choice(nodes)
        end = ENDS.get(fate.end)
        if end and fate.fault:
            if rng.random() < fate.fault.seen:
                self._xids(host, fate.gpu or 0, fate.time - rng.uniform(1, 15), fate.fault.xids)
        elif end and rng.random() < 0.7:
            self._xids(host, rng.choice(held[host]), fate.time - rng.uniform(0, 3), end.xids)
        name = _fresh_name(app, job.id) if app.fresh else app.name
        log = ends.text(fate.end, rng, app.user, name, job.id, nodes, host, fate.time) if end else None
        gpus: Mapping[str, tuple[GpuName, ...]] | None = None
        if self.jobs_name and not (self.unnamed and rng.random() < self.unnamed):
            gpus = {node: tuple(self.gpu(node, gpu, self.jobs_name) for gpu in held[node]) for node in nodes}
        return Attempt(
            job=job.id,
            attempt=job.attempt,
            user=app.user,
            account=app.account,
            name=name,
            array=job.array,
            state=end.state if end else "COMPLETED",
            exit_code=end.exit_code if end else 0,
            signal=end.signal if end else 0,
            start=round(start),
            end=round(fate.time),
            nodes=nodes,
            gpus=gpus,
            failed_node=host if fate.end == "node-fail" and self.named else None,
            log=log if self.logs == "text" else None,
            log_class=end.log_class if end and self.logs == "class" else None,
            submit=f"{zlib.crc32(f'{app.user} {name} {job.id if app.fresh else app.gpus}'.encode()):08x}",
            partition=app.partition,
            qos=app.qos,
            reservation=app.reservation,
            timelimit=app.limit * HOUR,
            constraint=app.constraint,
        )

    def _xids(self, node: str, gpu: int, when: float, codes: Sequence[str]) -> None:
        for code in codes:
            self.event((when - EPOCH) / DAY, node, "xid", code, gpu)

    def _of_incidents(self) -> None:
        for one in self.incidents:
            for node in one.nodes:
                self._xids(node, self.rng.randrange(self.gpus), one.time + self.rng.uniform(0, 4), one.xids)

    def _of_noise(self, attempts: Sequence[Attempt]) -> None:
        for code, times, nodes in self._noise:
            well = [one for one in attempts if one.state == "COMPLETED" and one.end - one.start > 1800]
            well = [one for one in well if not set(nodes).isdisjoint(one.nodes)]
            for one in self.rng.choices(well, k=times):
                node = self.rng.choice([node for node in one.nodes if node in nodes])
                when = self.rng.uniform(one.start + 60, one.end - 600)
                self._xids(node, self.rng.choice(self._held[one.job, one.attempt][node]), when, (code,))


def _fresh_name(app: App, number: int) -> str:
    """What people call what they try out; the same for all attempts of a job."""
    if number % 3 == 0:
        return "bash"
    return f"{app.name}-" + "".join("aeioufghklmnprst"[number * 7 // 16**place % 16] for place in range(4))


def _severity(source: str, code: str) -> str:
    if source == "xid":
        return "warning" if code in ("13", "31", "43") else "fault"
    return "info"
