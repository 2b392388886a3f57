"""The visible signs of an attempt's end in a simulated cluster: Slurm's state, Xids and the job's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from slurm_gpuhealth.outcomes import Attempt, Event, Reading
from slurm_gpuhealth.simulate.cases import APPLICATION_XIDS, DAY, HARD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from random import Random

    from slurm_gpuhealth.simulate.cases import Case, Lemon
    from slurm_gpuhealth.simulate.load import Bug, Job

    Held = Mapping[int, tuple[int, ...]]
    Told = list[tuple[float, Attempt | Event]]

TEXT = {  # what the log is like → what it says by itself
    "hardware": ("node", 0.85),
    "application": ("application", 0.9),
    "numeric": ("application", 0.6),
    "communication": ("unknown", 0.4),
    "infrastructure": ("infrastructure", 0.8),
    "memory": ("application", 0.7),
    "crash": ("unknown", 0.3),
    "user": ("user", 0.95),
    "": ("unknown", 0.0),
}
MIXED = {  # cause → kinds of text and their shares, in jobs of several nodes and of one, beside a hardware error's
    "node": ({"communication": 0.6, "": 0.4}, {"": 0.6, "crash": 0.4}),
    "fabric": ({"communication": 0.9, "": 0.1}, {"": 1.0}),
    "infrastructure": ({"infrastructure": 0.6, "communication": 0.2, "": 0.2}, {"infrastructure": 0.6, "": 0.4}),
    "image": ({"application": 0.8, "": 0.2}, {"application": 0.8, "": 0.2}),
    "application": (
        {"application": 0.72, "memory": 0.03, "communication": 0.12, "crash": 0.06, "": 0.07},
        {"application": 0.72, "memory": 0.03, "crash": 0.1, "": 0.15},
    ),
    "user": ({"user": 0.7, "": 0.3}, {"user": 0.7, "": 0.3}),
}


class Sign(NamedTuple):
    state: str
    attempt_end: float
    """A hang ends later than it begins."""
    gpu: int | None
    told: Told


class Signs:
    """The observer of one world."""

    def __init__(self, case: Case, rng: Random, names: Sequence[str], end: float) -> None:
        self.case, self.rng, self.names, self.end = case, rng, names, end
        self.uuids = [
            tuple(f"GPU-{node:08x}-0000-4000-8000-{gpu:012x}" for gpu in range(case.gpus)) for node in range(len(names))
        ]
        self.skew = [rng.uniform(-case.skew, case.skew) for _ in names]

    def of(
        self, job: Job, attempt: int, held: Held, start: float, end: float, cause: str, node: int, lemon: Lemon | None
    ) -> Sign:
        """Everything that is told of one attempt."""
        case, rng = self.case, self.rng
        told = list(self._benign(held, start, end))
        state, code, signal, gpu, over = "COMPLETED", 0, 0, None, end
        reading = None
        if cause == "node":
            whole = len(held[node]) == case.gpus
            gpu = lemon.gpu if lemon and lemon.gpu is not None else rng.choice(held[node])
            told += self._hard(node, gpu, end, case.lemon_hard if lemon else None)
            state, code, signal = self._node_state(lemon if whole else None, whole)
            if state == "FAILED" and rng.random() < case.hangs:
                state, code, signal = rng.choice(("TIMEOUT", "CANCELLED")), 0, 15
                over = min(self.end, max(end, start + job.seconds))
            reading = self._node_text(held, node, gpu)
        elif cause != "done":
            state, code, signal = self._state(cause)
            reading, state = self._text(cause, job, held, state)
            if cause == "application":
                told += self._application_xids(held, end)
        if job.array is not None and cause == "application" and reading and reading.kind == "application":
            reading = _of_bug(reading, job.app.bugs[job.array % len(job.app.bugs)])
        told += self._attempt(job, attempt, held, start, over, (state, code, signal), node, reading)
        return Sign(state, over, gpu, told)

    def beside(self, lemons: Iterable[Lemon]) -> Told:
        """What happens to nodes outside of jobs: repairs, and a lemon's Xids that killed no job."""
        told: Told = []
        for lemon in lemons:
            if lemon.until < self.end:
                told += self._event(Event(lemon.until, self.names[lemon.node], None, "repair", "admin"))
            when = lemon.since
            while self.case.idle_xids:
                when += self.rng.expovariate(self.case.idle_xids / DAY)
                if when >= lemon.until:
                    break
                gpu = self.rng.randrange(self.case.gpus)
                told += self._xid(lemon.node, gpu, when, self._code(), "fault")
        return told

    def _node_state(self, lemon: Lemon | None, whole: bool) -> tuple[str, int, int]:
        share = self.case.node_fail
        if lemon is not None and self.case.lemon_node_fail is not None:
            share = self.case.lemon_node_fail
        if whole and self.rng.random() < share:
            return "NODE_FAIL", 0, 0
        return self.rng.choice((("FAILED", 1, 0), ("FAILED", 1, 0), ("FAILED", 0, 9), ("FAILED", 0, 6)))

    def _node_text(self, held: Held, node: int, gpu: int) -> Reading:
        case, rng = self.case, self.rng
        kind = "hardware" if rng.random() < case.hardware_text else self._kind("node", held)
        hosts: tuple[str, ...] = ()
        if len(held) > 1 and rng.random() < case.named:
            others = [one for one in held if one != node]
            hosts = (self.names[node if rng.random() < case.named_right else rng.choice(others)],)
        error = "CUDA error: uncorrectable ECC error" if kind == "hardware" else ""
        return _reading(kind, error, "", hosts)

    def _text(self, cause: str, job: Job, held: Held, state: str) -> tuple[Reading, str]:
        rng = self.rng
        kind = self._kind(cause, held)
        hosts: tuple[str, ...] = ()
        if cause == "application" and len(held) > 1 and rng.random() < self.case.misnamed:
            hosts = (self.names[rng.choice(list(held))],)
        if kind == "memory":
            return _reading(kind, "oom-kill", "", hosts), "OUT_OF_MEMORY"
        if kind != "application":
            return _reading(kind, "", "", hosts), state
        if cause == "image":
            return _reading(kind, "ImportError", "__init__.py:<module>", hosts), state
        return _of_bug(_reading(kind, "", "", hosts), rng.choice(job.app.bugs)), state

    def _kind(self, cause: str, held: Held) -> str:
        shares = MIXED[cause][len(held) == 1]
        return self.rng.choices(list(shares), list(shares.values()))[0]

    def _state(self, cause: str) -> tuple[str, int, int]:
        if cause == "user":
            return self.rng.choice((("TIMEOUT", 0, 15), ("CANCELLED", 0, 15), ("CANCELLED", 0, 0)))
        return self.rng.choice((("FAILED", 1, 0), ("FAILED", 1, 0), ("FAILED", 2, 0), ("FAILED", 0, 6)))

    def _attempt(
        self,
        job: Job,
        attempt: int,
        held: Held,
        start: float,
        end: float,
        ended: tuple[str, int, int],
        node: int,
        reading: Reading | None,
    ) -> Told:
        case, app = self.case, job.app
        names = tuple(self.names[one] for one in held)
        gpus: dict[str, Any] | None = None
        if case.gpus_known:
            gpus = {
                self.names[one]: self.uuids[one]
                if len(has) == case.gpus
                else tuple(self.uuids[one][gpu] for gpu in has)
                for one, has in held.items()
            }
        failed = self.names[node] if ended[0] == "NODE_FAIL" else None
        if failed and not case.gpus_known and self.rng.random() < 0.5:
            failed = None
        one = Attempt(
            job.id,
            attempt,
            app.user,
            app.account,
            app.name,
            job.array,
            *ended,
            start,
            end,
            names,
            gpus,
            failed,
            reading=reading,
            submit=app.submit,
        )
        told: Told = [(end, one)]
        if self.rng.random() < case.again:
            told.append((end + self.rng.uniform(0, 3600), one))
        return told

    def _hard(self, node: int, gpu: int, when: float, share: float | None) -> Told:
        rng = self.rng
        if rng.random() >= (self.case.hard if share is None else share):
            return []
        told = self._xid(node, gpu, when - rng.uniform(0, 20), self._code(), "fault")
        for code in ("45", "154"):  # the driver logs these when it tears down the job's channels
            if rng.random() < 0.3:
                told += self._xid(node, gpu, when + rng.uniform(0, 2), code, "info")
        return told

    def _application_xids(self, held: Held, when: float) -> Told:
        rng = self.rng
        if rng.random() >= self.case.app_xid:
            return []
        node = rng.choice(list(held))
        gpu = rng.choice(held[node])
        told = self._xid(node, gpu, when - rng.uniform(0, 3), rng.choice(APPLICATION_XIDS), "warning")
        if rng.random() < 0.3:
            told += self._xid(node, gpu, when + 1, "45", "info")
        return told

    def _benign(self, held: Held, start: float, end: float) -> Told:
        rng = self.rng
        if rng.random() >= self.case.benign * len(held) * (end - start) / DAY:
            return []
        node = rng.choice(list(held))
        return self._xid(node, rng.randrange(self.case.gpus), rng.uniform(start, end), self._code(), "fault")

    def _code(self) -> str:
        return self.rng.choices(list(HARD), list(HARD.values()))[0]

    def _xid(self, node: int, gpu: int, when: float, code: str, severity: str) -> Told:
        uuid = self.uuids[node][gpu] if self.case.gpus_known else None
        return self._event(Event(when + self.skew[node], self.names[node], uuid, "xid", code, severity))

    def _event(self, event: Event) -> Told:
        rng, case = self.rng, self.case
        arrives = event.time + (rng.uniform(0, 7200) if rng.random() < case.late else 0)
        told: Told = [(arrives, event)]
        if rng.random() < case.again:
            told.append((arrives + rng.uniform(0, 3600), event))
        return told


def _reading(kind: str, error: str, frame: str, hosts: tuple[str, ...]) -> Reading:
    verdict, confidence = TEXT[kind]
    fingerprint = f"{error}|{frame}|" if error else ""
    return Reading(verdict, confidence, kind, hosts=hosts, error=error, frame=frame, fingerprint=fingerprint)  # type: ignore[arg-type]


def _of_bug(reading: Reading, bug: Bug) -> Reading:
    return reading._replace(
        kind="numeric" if bug.error == "nan" else "application",
        error=bug.error,
        frame=bug.frame,
        fingerprint=f"{bug.error}|{bug.frame}|",
        rank=bug.rank,
        iteration=bug.iteration,
    )
