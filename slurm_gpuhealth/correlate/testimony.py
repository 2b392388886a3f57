"""The evidence on one failed attempt: what its log, its nodes and its application's other failures say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate import context, harmless, memory, suspicion
from slurm_gpuhealth.correlate.state import NodeState
from slurm_gpuhealth.correlate.tally import Without
from slurm_gpuhealth.correlate.weights import ALIKE, DAY, growth, same_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import Case, Incident, Known, State
    from slurm_gpuhealth.correlate.weights import Row
    from slurm_gpuhealth.outcomes import Attempt, GpuName

CONTAINED, FOREIGN, SHARED = 5.0, 2.0, 15.0  # ratio: a contained error here, a hard one on another's GPU, one GPU twice
LAG = 15.0  # seconds after a job's end in which what its node says has lost half of its weight
AT_END, LATER = 300.0, 0.3  # so long before a job's end; share of those that a fault ends which live on for longer
CUT = 0.05  # how often runs end at their time limit, or are cancelled
FLEET_RUNS = 50  # the fleet's failure rate starts as if so many runs had shown `settings.failing`


class Sign(NamedTuple):
    """What a node reported in the attempt's time."""

    ratio: float
    """Likelihood if the node did it, over that if it did not."""
    hard: bool
    gpu: GpuName | None
    event: Incident
    foreign: bool = False
    """On a GPU that the job did not hold."""


class Evidence(NamedTuple):
    failing: float
    """How often the application fails by itself."""
    log: Row
    """The likelihood of what the log says, under each of COLUMNS."""
    repeated: float
    """Likelihood ratio for the application: it has failed in the same way on other nodes."""
    named: Mapping[str, float]
    """Node → likelihood ratio of being named by the log; "": of the nodes that are not named."""
    nodes: Mapping[str, NodeState]
    without: Without
    """The case, and the time in which an event belongs to it: each node is weighed without them."""
    near: Mapping[str, Sequence[Incident]]
    """Node → its events of that time."""
    signs: Mapping[str, Sign]
    """Node → the strongest of these."""
    shared: bool = False
    """Such an event came on several nodes of a rack or switch at once."""


def gather(case: Case, key: str, known: Known) -> Evidence:
    attempt, s = case.attempt, known.settings
    state_of, shrink = known.state.nodes.get, 1.0 / growth(attempt.end, s.half_life)
    nodes = {node: state_of(node) or NodeState() for node in attempt.nodes}
    without = Without(key, attempt.start - s.before, attempt.end + s.after)
    near = {
        node: found
        for node, state in nodes.items()
        if state.events and (found := suspicion.incidents_in(state, without.start, without.end))
    }
    return Evidence(
        failing=_failing(case, known.state, shrink, s),
        log=_log(case, known, shrink),
        repeated=_repeated(case, key, known.state),
        named=_named(case, s),
        nodes=nodes,
        without=without,
        near=near,
        signs={node: sign for node, found in near.items() if (sign := _sign(case, node, nodes[node], found, known))},
        shared=any(one.kind == memory.SHARED for found in near.values() for one in found),
    )


def _failing(case: Case, state: State, shrink: float, s: Suspicion) -> float:
    """How often the application fails by itself, without this attempt: its own rate, pulled towards the fleet's, or
    the rate of its last few runs if that is higher."""
    everywhere = state.fleet
    failed, runs = max(0.0, everywhere.failed * shrink - case.own), max(0.0, everywhere.runs * shrink - 1)
    mean = (failed + FLEET_RUNS * s.failing) / (runs + FLEET_RUNS)
    where = context.of(case.attempt)
    if where:
        mean = context.rate(state, case.attempt, where, 1, mean, shrink)
    app = state.applications.get(case.application)
    if app is None:
        return max(s.least, mean)
    runs = max(0.0, app.runs * shrink - 1)
    failed = min(runs, max(0.0, app.failed * shrink - case.own))
    lately = 0.0 if case.apart else case.lately * (1 - case.shared)
    expected = app.expected * shrink if app.expected else runs * mean
    usual = min(0.98, mean * (failed + s.runs * mean) / (expected + s.runs * mean))
    if where and where in app.contexts:
        usual = _in_context(app.contexts[where], 1, usual, case.own, shrink, s)
    return max(s.least, min(0.98, max(lately, usual)))


def _in_context(sums: Sequence[float], column: int, usual: float, own: float, shrink: float, s: Suspicion) -> float:
    """An application's rate in a context, pulled towards `usual`, without the attempt."""
    runs, ended = max(0.0, sums[0] * shrink - 1), max(0.0, sums[column] * shrink - own)
    return (min(ended, runs) + s.runs * usual) / (runs + s.runs)


def cut(case: Case, state: State, s: Suspicion) -> float:
    """How often the application ends so, TIMEOUT or CANCELLED, and no node hangs; `least` at least: that it has
    not happened yet says little."""
    shrink, word = 1.0 / growth(case.attempt.end, s.half_life), case.attempt.state
    everywhere, app = state.fleet, state.applications.get(case.application)
    ended = max(0.0, everywhere.cut.get(word, 0.0) * shrink - case.own)
    usual = (ended + FLEET_RUNS * CUT) / (max(0.0, everywhere.runs * shrink - 1) + FLEET_RUNS)
    column, where = context.COLUMN[word], context.of(case.attempt)
    if where:
        usual = context.rate(state, case.attempt, where, column, usual, shrink)
    if app is not None and not case.apart:
        if where and where in app.contexts:
            usual = _in_context(app.contexts[where], column, usual, case.own, shrink, s)
        else:
            ended, runs = max(0.0, app.cut.get(word, 0.0) * shrink - case.own), max(0.0, app.runs * shrink - 1)
            usual = (min(ended, runs) + s.runs * usual) / (runs + s.runs)
    return max(s.least, min(0.98, usual))


def _log(case: Case, known: Known, shrink: float) -> Row:
    """What programs of this cluster write when they fail is learnt from their failures."""
    lost = case.attempt.state == "NODE_FAIL" and case.kind == "hardware" and case.shared
    if case.kind is None or lost:  # where many nodes are lost at once, "NODE FAILURE" in a log is no second witness
        return ALIKE
    s, grid, kinds = known.settings, known.grid, known.state.fleet.kinds
    row = grid.rows[case.kind]
    seen = max(0.0, sum(kinds.values()) * shrink - case.own)
    like_it = max(0.0, kinds.get(case.kind, 0.0) * shrink - case.own)
    learnt = (row[1] / grid.programs * s.log_runs + like_it) / (s.log_runs + seen) * grid.programs
    return (row[0], min(max(learnt, row[1] / 3), row[1] * 5, 1.0), *row[2:])


def _repeated(case: Case, key: str, state: State) -> float:
    """The same error at the same iteration, or of the same rank, on other nodes: the program's own. (Method 6.3.)"""
    app = state.applications.get(case.application) if case.fingerprint else None
    if not app:
        return 1.0
    strongest = 1.0
    for other, _, fingerprint, rank, iteration, nodes in app.prints:
        if other == key or fingerprint != case.fingerprint or not set(nodes).isdisjoint(case.attempt.nodes):
            continue
        if iteration is not None and iteration == case.iteration:
            strongest = max(strongest, 50.0 if rank == case.rank else 20.0)
        elif rank is not None and rank == case.rank and len(case.attempt.nodes) > 1:
            strongest = max(strongest, 4.0)
    return strongest


def _named(case: Case, s: Suspicion) -> dict[str, float]:
    every, named = len(case.attempt.nodes), len(case.hosts)
    if not named or named >= every:
        return {}
    return {"": (1 - s.named) * every / (every - named), **dict.fromkeys(case.hosts, s.named * every / named)}


def _sign(case: Case, node: str, state: NodeState, near: Sequence[Incident], known: Known) -> Sign | None:
    """The strongest of what the node reported while the attempt ran, or shortly before or after."""
    attempt, s, best = case.attempt, known.settings, None
    held = attempt.gpus.get(node) if attempt.gpus else None
    for event in near:
        if event.kind == memory.SHARED:
            continue
        if event.until < attempt.start and _proven(state, event.until, attempt.start):
            continue
        lag = event.time - attempt.end
        if lag > 0 and _of_a_later_job(state, attempt.end, event):
            continue
        own = same_gpu(event.gpu, held)
        benign = harmless.rate(known.state.fleet, event.code, s)
        ratio = _ratio(case, node, state, event, own, benign, s)
        if lag > 0 and ratio > 1:
            ratio = max(1.0, ratio * 2.0 ** (-lag / LAG))
        if best is None or ratio > best.ratio or (ratio == best.ratio and best.event.until < attempt.start):
            best = Sign(
                ratio=ratio,
                hard=event.kind == "hard" and own is not False,
                gpu=event.gpu,
                event=event,
                foreign=own is False,
            )
    return best


def _ratio(
    case: Case, node: str, state: NodeState, event: Incident, own: bool | None, benign: float, s: Suspicion
) -> float:
    """How much likelier the event is if the node ended the attempt. `own`: on a GPU of the job; None: not known.
    `benign`: how often such events come without harm, a day."""
    attempt = case.attempt
    if event.kind == "hard":
        if own is False:
            return FOREIGN
        # How long the job ran says nothing here: the event was as likely to come by chance in that time as by
        # a failure; what counts is how many such events are harmless.
        days = max(0.0, attempt.end - attempt.start) / DAY
        harmless = benign * max(days, 1 / 1440) * (share(attempt, node, state) if own else 1.0)
        ratio = max(1.0, event.strength * s.seen_by_xid / harmless)
        if event.until >= attempt.end - AT_END:  # an event by chance could have come at any time
            ratio *= max(1.0, (1 - LATER) * (attempt.end - attempt.start) / AT_END)
        return ratio
    if own is False:
        return 1.0
    if event.kind in ("weak", "link"):
        return CONTAINED if event.strength >= 0.1 else 1.5
    if event.kind == "application":
        return SHARED if _elsewhere(case, state, event) else 0.7
    return 1.01 if event.kind == "thermal" else 1.0


def _proven(node: NodeState, since: float, until: float) -> bool:
    """Whether the node has passed a test in between; level 1 proves nothing, each prolog runs it."""
    return any(passed and level != "1" and since < when <= until for level, (when, passed) in node.tests.items())


def _of_a_later_job(node: NodeState, end: float, event: Incident) -> bool:
    """Whether another job had begun on the GPU since `end`, when the event came."""
    return any(
        end <= start <= event.time <= until and same_gpu(event.gpu, gpus) is not False
        for start, until, gpus in node.ran
    )


def _elsewhere(case: Case, node: NodeState, event: Incident) -> bool:
    """Whether another user's job of another application had such an error on the same GPU."""
    for other in node.events:
        if other.kind != "application" or other.gpu != event.gpu or event.gpu is None:
            continue
        for record in node.records.values():
            if record.start <= other.time <= record.end + 120 and record.user != case.attempt.user:
                return True
    return False


def share(attempt: Attempt, node: str, state: NodeState) -> float:
    """The share of the node's GPUs that the job held."""
    held = attempt.gpus.get(node) if attempt.gpus else None
    return min(1.0, len(held) / state.width) if held else 1.0
