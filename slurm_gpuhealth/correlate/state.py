"""What the correlator remembers: of each node, of each application, and of the cluster. Each goes to JSON and back.

It grows with nodes and applications; what is kept of single jobs and events is bounded in number and in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from slurm_gpuhealth.outcomes import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.weights import Grid
    from slurm_gpuhealth.outcomes import GpuName

    Ratios = tuple[float, ...]
    """The likelihood of each level of the grid, over that of level 0."""

T = TypeVar("T", bound="Kept")
SEEN = 128  # keys of attempts, at the first node of each: what is delivered twice comes again soon
RECORDS = 64
EVENTS = 128
COMPLETED = 4
RAN = 16
SHORT = 2 * 86400.0  # how long an attempt without weight may still be judged again by an event that comes late


class Kept:
    """A dataclass whose JSON is the list of its fields, without those that begin with `_`: there are many of them."""

    def to_json(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dict__ if name[0] != "_"]

    @classmethod
    def from_json(cls: type[T], data: list[Any]) -> T:
        return cls(*data)


class Incident(NamedTuple):
    """An event, as it is kept."""

    time: float
    until: float
    gpu: GpuName | None
    kind: str
    strength: float
    code: str
    days: float = 0.0
    jobs: float = 0.0
    """The node's, at that time."""
    spared: bool = False
    """A job that held the GPU went on for `settings.spared` and completed: it was not so bad."""


@dataclass
class Case(Kept):
    """A failed attempt, as much of it as judging it again takes. It lies at the attempt's first node."""

    attempt: Attempt
    """Without its log: that has been read."""
    application: str
    kind: str | None
    hosts: tuple[str, ...] = ()
    """Nodes of the attempt that its log singles out."""
    fingerprint: str = ""
    rank: int | None = None
    iteration: int | None = None
    gpu: int | None = None
    cause: str = ""
    confidence: float = 0.0
    node: str | None = None
    own: float = 0.0
    """Its application's share of the blame, which stands in `AppState.failed`."""
    blame: float = 0.0
    """Its nodes' share."""
    lately: float = 0.0
    """How much its application failed of late when it ended."""
    shared: float = 0.0
    """How much of what failed just then, elsewhere too, was more than usual."""
    leaves: tuple[str, ...] = ()
    """Leaf switches of its nodes under which other jobs failed at once."""
    apart: bool = False
    """Its application failed on this node alone of late, and has completed elsewhere since it last did."""

    @classmethod
    def from_json(cls, data: list[Any]) -> Case:
        case = cls(*data)
        attempt = Attempt(*data[0])
        gpus = {node: tuple(one) for node, one in attempt.gpus.items()} if attempt.gpus else None
        case.attempt, case.hosts = attempt._replace(nodes=tuple(attempt.nodes), gpus=gpus), tuple(case.hosts)
        case.leaves = tuple(case.leaves)
        return case


class Record(NamedTuple):
    """What a failed attempt says of one of its nodes."""

    start: float
    end: float
    home: str
    """The node at which its case lies."""
    user: str
    application: str
    ratios: Ratios | None = None
    """None: nothing, so far."""
    blame: float = 0.0
    """The node's share, 0 to 1."""
    hard: bool = False
    """Tied to a hard event of this node, or Slurm itself names the node."""
    unexplained: bool = False
    """Its log does not say that the program failed."""
    days: float = 0.0
    jobs: float = 0.0
    """The node's, at its end."""
    apart: bool = False
    """The case's: it does not say again what the user's jobs say everywhere."""
    gpus: tuple[GpuName, ...] | None = None
    """Those that it held of the node."""
    hung: bool = False
    """It reached its time limit, or was cancelled."""


@dataclass
class NodeState(Kept):
    exposure: float = 0.0
    """Days in jobs, decayed: in units of weights.EPOCH, as all that decays."""
    days: float = 0.0
    """The same, not decayed."""
    jobs: float = 0.0
    """So many it had, not decayed."""
    since: float = 0.0
    """When its first job started."""
    failing: float = 0.0
    """Failures that its jobs' own programs made one expect, decayed."""
    width: int = 1
    """GPUs, as far as jobs have shown."""
    repaired: float = 0.0
    changed: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """GPU → when it was replaced, and its past forgotten; the node's days and jobs then."""
    judged: float = 0.0
    """Its suspicion when its cases were last judged."""
    seen: dict[str, float] = field(default_factory=dict)
    """Attempt → its end: those whose first node this is."""
    events: list[Incident] = field(default_factory=list)
    completed: list[tuple[float, float, Any]] = field(default_factory=list)
    """Start, end and GPUs of the last jobs that completed."""
    ran: list[tuple[float, float, Any]] = field(default_factory=list)
    """The same of the last jobs, whatever became of them."""
    tests: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Run level → when last, and whether passed."""
    records: dict[str, Record] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)
    contexts: dict[str, list[float]] = field(default_factory=dict)
    """Where its jobs were sent → runs, failures, TIMEOUT, CANCELLED; decayed."""
    slots: dict[str, list[float]] = field(default_factory=dict)
    """GPU → days and jobs of the jobs that held it, and not all of the node's; not decayed."""
    full: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The same of the jobs that held all."""
    taught: dict[str, int] = field(default_factory=dict)
    """An event's code → on which day jobs ran on through it last."""
    _limit: int = 32
    """Records at which the node is tidied up next."""
    _quiet: float = math.inf
    """No event of the node ended later."""
    _tally: Any = None
    """suspicion.Tally of the evidence."""

    def touched(self) -> None:
        """Its evidence has changed."""
        self._tally = None

    def to_json(self) -> list[Any]:
        row = super().to_json()
        row[CASES] = {key: one.to_json() for key, one in self.cases.items()}
        return row

    @classmethod
    def from_json(cls, data: list[Any]) -> NodeState:
        node = cls(*data)
        node.events = [Incident(*one) for one in node.events]
        node.changed = {gpu: (when, days, jobs) for gpu, (when, days, jobs) in node.changed.items()}
        node.tests = {level: (when, passed) for level, (when, passed) in node.tests.items()}
        node.records = {key: Record(*one) for key, one in node.records.items()}
        node.cases = {key: Case.from_json(one) for key, one in node.cases.items()}  # type: ignore[arg-type]
        return node


CASES = list(NodeState.__dataclass_fields__).index("cases")


@dataclass
class AppState(Kept):
    """A user's application: how often it runs, and fails by itself."""

    runs: float = 0.0
    failed: float = 0.0
    """Sum of its own share of the blame: a lemon does not raise it."""
    lately: float = 0.0
    """The same share over its last few runs: programs fail in bursts."""
    ended: float = 0.0
    """When its last run ended."""
    prints: list[Any] = field(default_factory=list)
    """Its last failures: [case, home, fingerprint, rank, iteration, nodes]."""
    judged: float = 0.0
    """How often it fails by itself, as those were last judged."""
    well: dict[str, float] = field(default_factory=dict)
    """Node → when it last completed there: the last four."""
    died: dict[str, float] = field(default_factory=dict)
    """The same of its failures."""
    alone: float = 0.0
    """When the last of its failures ended that was `Case.apart`; 0: none is any more."""
    expected: float = 0.0
    """How many of its runs one expected to fail, by where they were sent, decayed."""
    stuck: dict[str, float] = field(default_factory=dict)
    """The same of its runs that reached their time limit, or were cancelled."""
    cut: dict[str, float] = field(default_factory=dict)
    """TIMEOUT, CANCELLED → how many of its runs ended so, not for a node, decayed."""
    contexts: dict[str, list[float]] = field(default_factory=dict)
    """Where its runs were sent → runs; failures, TIMEOUT, CANCELLED, not for a node; decayed."""


@dataclass
class FleetState(Kept):
    half_life: float = 0.0
    last: float = 0.0
    runs: float = 0.0
    failed: float = 0.0
    exposure: float = 0.0
    unexplained: float = 0.0
    """Failures whose log does not blame the program, decayed."""
    events: int = 0
    """Hard events ever seen: where there are none, their absence says nothing."""
    kinds: dict[str, float] = field(default_factory=dict)
    """Kind of log → failures of applications that had it, decayed."""
    recent: list[Any] = field(default_factory=list)
    """Unexplained failures of the last hours: [end, user, application, first node, leaves, case]."""
    usual: float = 0.0
    """How many users have such failures at once, on average over a week."""
    counted: float = 0.0
    """When that was."""
    contexts: dict[str, list[float]] = field(default_factory=dict)
    """Where attempts were sent → runs, failures, TIMEOUT, CANCELLED; decayed."""
    cut: dict[str, float] = field(default_factory=dict)
    """The same as an application's, of all."""
    hard: list[Any] = field(default_factory=list)
    """Hard events within the horizon: [time, node], one an hour and node."""
    teachers: dict[str, list[str]] = field(default_factory=dict)
    """An event's code → nodes on which jobs have run on through it: the first three."""
    worths: dict[str, float] = field(default_factory=dict)
    """An event's code → how much it weighs here, 1 if nobody has learnt that it is harmless."""
    lived: dict[str, float] = field(default_factory=dict)
    """An event's code → how often jobs have run on through it and completed, decayed."""


@dataclass
class State:
    """All of it. The mappings may be rows of a database: they are asked for single keys, but by `suspicions`."""

    nodes: MutableMapping[str, NodeState] = field(default_factory=dict)
    applications: MutableMapping[str, AppState] = field(default_factory=dict)
    fleet: FleetState = field(default_factory=FleetState)

    def node(self, name: str) -> NodeState:
        known = self.nodes.get(name)
        if known is None:
            known = self.nodes[name] = NodeState()
        return known


class Leaves(NamedTuple):
    """The leaf switches of the network."""

    of: Mapping[str, str]
    """Node → its leaf switch."""
    width: Mapping[str, int]
    """Leaf switch → how many nodes it has."""

    def above(self, nodes: Iterable[str]) -> set[str]:
        """The leaf switches of these nodes."""
        return {self.of[node] for node in nodes if node in self.of} if self.of else set()


class Known(NamedTuple):
    """All by which a case is judged."""

    state: State
    leaves: Leaves
    settings: Suspicion
    grid: Grid
    """The levels of a node, as the settings describe them."""
