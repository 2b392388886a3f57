"""What one attempt died of: prior mass of each cause times the evidence, and what that says of each of its nodes.

    application      how often this application fails by itself, elsewhere and before
    node             for each node: 1 - exp(-its hazard * time), by what is known of it without this attempt
    fabric, infrastructure   by time, and more if unrelated jobs fail just then
    user             Slurm says so

A node's share of the blame (responsibility) goes to its suspicion as the likelihood ratio of each of its levels.
"""

from __future__ import annotations

import math
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate import suspicion, terms, testimony
from slurm_gpuhealth.correlate.state import NodeState
from slurm_gpuhealth.correlate.tally import Without
from slurm_gpuhealth.correlate.weights import ALIKE, COLUMNS, DAY, growth
from slurm_gpuhealth.outcomes import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import Case, State, Weights
    from slurm_gpuhealth.correlate.testimony import Sign
    from slurm_gpuhealth.correlate.weights import Grid

USERS = ("TIMEOUT", "PREEMPTED", "CANCELLED", "DEADLINE", "REQUEUED", "REVOKED")
# Slurm's word decides; a tenth is kept for a hang that the user, or the time limit, ended.
STATES = {
    **{one: {"user": 0.9, "application": 0.04, "node": 0.04, "fabric": 0.01, "infrastructure": 0.01} for one in USERS},
    "BOOT_FAIL": {"infrastructure": 0.85, "node": 0.1, "application": 0.001, "fabric": 0.02, "user": 0.001},
    "OUT_OF_MEMORY": {"application": 0.9, "node": 0.01, "fabric": 0.001, "infrastructure": 0.05, "user": 0.01},
}
# NODE_FAIL: Slurm lost a node. A program hardly brings a node down; a lost network or controller looks the same.
NODE_FAIL = {"application": 2e-5, "fabric": 0.2, "infrastructure": 0.05, "user": 1e-4}
NODE_FAIL_NAMED, NODE_FAIL_OTHER = 0.35, 1e-6
DYING = 600.0  # a node is found dead after SlurmdTimeout: however short its job was, it had that long to die
LEAST = 0.02  # a log weight below this is not kept
NOTHING: Weights = ()


class Judged(NamedTuple):
    verdict: Verdict
    own: float
    """The application's share."""
    failing: float
    """How often the application fails by itself."""
    weights: dict[str, Weights]
    """Node → log likelihood of each level."""
    hard: frozenset[str]
    """Nodes that a hard event, or Slurm, names."""


def judge(case: Case, key: str, state: State, leaves: Leaves, s: Suspicion, g: Grid, explained: bool = True) -> Judged:
    """Pure in `state`: reads it only. `explained`: with its terms, which cost as much as the rest."""
    attempt = case.attempt
    days = max(0.0, attempt.end - attempt.start) / DAY
    if attempt.state == "NODE_FAIL":
        days = max(days, DYING / DAY)
    table, rate = STATES.get(attempt.state), failing(case, state, s)
    nodes = state.nodes.get
    row = _row(case, state, g, s)
    causes = _priors(case, days, rate, leaves, s)
    if table:
        causes = {cause: table[cause] for cause in COLUMNS[1:]}
    told = dict(zip(COLUMNS, row))
    for cause in causes:
        causes[cause] *= told[cause] * (NODE_FAIL[cause] if attempt.state == "NODE_FAIL" else 1.0)
    again = _again(case, key, state)
    causes["application"] *= again
    at = {node: nodes(node) or NodeState() for node in attempt.nodes}
    apart = Without(key, attempt.start - s.before, attempt.end + s.after)
    near = {
        node: found
        for node, known in at.items()
        if known.events and (found := suspicion.incidents_in(known, apart.start, apart.end))
    }
    signs = {node: sign for node, found in near.items() if (sign := testimony.of(case, node, at[node], found, s))}
    where = _named(case, s)
    elsewhere, silent = where.get("", 1.0), 1 - s.seen_by_xid * 0.5 if state.fleet.events else 1.0
    shares: dict[str, float] = {}
    liked: dict[str, Weights] = {}
    likes: dict[tuple[float, float], Weights] = {}
    for node, known in at.items():
        sign = signs.get(node)
        ratio = where.get(node, elsewhere) * (sign.ratio if sign else silent)
        if attempt.state == "NODE_FAIL":
            ratio *= NODE_FAIL_NAMED if attempt.failed_node in (None, node) else NODE_FAIL_OTHER
        if table and not signs:
            shares[node] = 1.0
            continue
        alike = testimony.share(attempt, node, known), ratio
        like = likes.get(alike) or likes.setdefault(alike, _like(days, *alike, told, g))
        levels = suspicion.levels(known, attempt.end, g, s, apart, near.get(node, ()))
        liked[node] = like
        shares[node] = sum(map(mul, levels, like))
    if table:
        _scale(shares, table["node"], told["node"], signs, s)
    total = sum(causes.values()) + sum(shares.values()) or 1.0
    blame = {node: share / total for node, share in shares.items()}
    masses = {"node": sum(blame.values()), **{cause: mass / total for cause, mass in causes.items()}}
    # Heat makes a job slow: a ticket for the cooling, no failure of the node. (Method 6.6.)
    weights = (
        {}
        if table or case.kind == "thermal"
        else {node: _weights(total - shares[node], one, s) for node, one in liked.items()}
    )
    hard = frozenset(node for node, sign in signs.items() if sign.hard and not sign.foreign)
    if attempt.state == "NODE_FAIL" and attempt.failed_node:
        hard |= {attempt.failed_node} & set(attempt.nodes)
    own = masses["application"]
    told_of = case.hosts or attempt.state == "NODE_FAIL" or any(sign.ratio > 1 for sign in signs.values())
    if case.kind == "application" and not told_of:
        masses = _held_back(masses)
    if case.kind == "hardware" and not table and not _met_apart(case, key, state):
        masses = _in_doubt(masses)
    verdict = _verdict(case, masses, blame, signs)
    if explained:
        verdict = terms.explain(verdict, case, state, row, rate, signs, where, again, s)
    return Judged(verdict, own, rate, weights, hard)


class Leaves(NamedTuple):
    """The fabric: node → leaf switch, leaf → how many nodes."""

    of: Mapping[str, str]
    width: Mapping[str, int]


def _row(case: Case, state: State, g: Grid, s: Suspicion) -> tuple[float, ...]:
    """The likelihood of what the log says. What programs leave behind here is learnt from their failures."""
    if case.kind is None:
        return ALIKE
    row = g.rows[case.kind]
    kinds, shrink = state.fleet.kinds, 1.0 / growth(case.attempt.end, s.half_life)
    seen = max(0.0, sum(kinds.values()) * shrink - case.own)
    like_it = max(0.0, kinds.get(case.kind, 0.0) * shrink - case.own)
    learnt = (row[1] / g.programs * s.log_runs + like_it) / (s.log_runs + seen) * g.programs
    return (row[0], min(max(learnt, row[1] / 3), row[1] * 5, 1.0), *row[2:])


def _priors(case: Case, days: float, rate: float, leaves: Leaves, s: Suspicion) -> dict[str, float]:
    by_chance = 1 - math.exp(-s.fabric * days)
    under = {leaves.of[node] for node in case.attempt.nodes if node in leaves.of}
    fabric = by_chance * max(1, len(under)) + s.together * len(case.leaves)
    return {
        "application": rate,
        "fabric": min(fabric, 0.9) * (1.0 if len(case.attempt.nodes) > 1 else 0.3),
        "infrastructure": 1 - math.exp(-s.infrastructure * days) + s.together * case.shared,
        "user": 0.001,
    }


def failing(case: Case, state: State, s: Suspicion) -> float:
    """How often the application fails by itself: its own record, drawn to the fleet's, or, where that is more, what it
    does just now; this attempt left out."""
    shrink = 1.0 / growth(case.attempt.end, s.half_life)
    all_of = state.fleet
    failed, runs = max(0.0, all_of.failed * shrink - case.own), max(0.0, all_of.runs * shrink - 1)
    mean = (failed + 50 * s.failing) / (runs + 50)
    app = state.applications.get(case.application)
    if app is None:
        return max(s.least, mean)
    runs = max(0.0, app.runs * shrink - 1)
    failed = min(runs, max(0.0, app.failed * shrink - case.own))
    lately = 0.0 if case.apart else case.lately * (1 - case.shared)
    return max(s.least, min(0.98, max(lately, (failed + s.runs * mean) / (runs + s.runs))))


def _again(case: Case, key: str, state: State) -> float:
    """The same error at the same iteration, or of the same rank, on nodes apart: the program's own. (Method 6.3.)"""
    app = state.applications.get(case.application)
    if not app or not case.fingerprint:
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
    """Node → likelihood ratio of being singled out by the log; "" for those that are not."""
    every, named = len(case.attempt.nodes), len(case.hosts)
    if not named or named >= every:
        return {}
    return {"": (1 - s.named) * every / (every - named), **dict.fromkeys(case.hosts, s.named * every / named)}


def _like(days: float, share: float, ratio: float, told: Mapping[str, float], g: Grid) -> Weights:
    """The likelihood of each level, of a node of which a job had that share. What a broken one leaves in a log may look
    as if the program had failed."""
    days *= share
    odds = [
        50.0 if hazard * days > 3.9 else min(50.0, math.expm1(hazard * days) + start * share)
        for hazard, start in g.odds
    ]
    node = told["node"] * ratio
    return (*[one * node for one in odds[:-1]], odds[-1] * max(told["application"], told["node"]) * ratio)


def _scale(shares: dict[str, float], mass: float, told: float, signs: Mapping[str, Sign], s: Suspicion) -> None:
    """Where Slurm's word gives the nodes a mass as a whole, it is divided by their hazards, and raised by signs."""
    total = sum(shares.values()) or 1.0
    strongest = max((sign.ratio for sign in signs.values() if not sign.foreign), default=1.0)
    hot = any(sign.event.kind == "thermal" for sign in signs.values())
    factor = max(strongest, s.most / 4 if hot else 1.0) * told
    for node in shares:
        shares[node] *= mass * factor / total


def _weights(rest: float, like: Weights, s: Suspicion) -> Weights:
    """The log likelihood of each level: what else may have ended the attempt, plus this node at that level."""
    base = rest + like[0]
    if base <= 0 or max(like) - min(like) < LEAST / 2 * base:
        return NOTHING
    most, log = s.most * base, math.log
    return tuple([round(log((rest + one if rest + one < most else most) / base), 4) for one in like])


def _held_back(masses: Mapping[str, float]) -> dict[str, float]:
    """Where the log shows an error of the program's own and no node says anything, the node is not called the cause:
    jobs of many may share a broken module. It is suspected all the same, and tested."""
    more = max(0.0, masses["node"] - 0.49)
    return {**masses, "node": masses["node"] - more, "application": masses["application"] + more}


def _in_doubt(masses: Mapping[str, float]) -> dict[str, float]:
    """Where the log shows a hardware error the program is not called the cause, however often it fails by itself: that
    its node did not see it too may only mean that nobody reads its kernel log. Nor is the node: it can't be told."""
    half = (masses["node"] + masses["application"]) / 2
    return {**masses, "node": half, "application": half} if masses["application"] > half else {**masses}


def _met_apart(case: Case, key: str, state: State) -> bool:
    """Whether the application has died of the same error on nodes that have none in common with these."""
    app = state.applications.get(case.application)
    return any(
        other != key and fingerprint == case.fingerprint and set(nodes).isdisjoint(case.attempt.nodes)
        for other, _, fingerprint, _, _, nodes in (app.prints if app and case.fingerprint else ())
    )


def _verdict(case: Case, masses: Mapping[str, float], blame: Mapping[str, float], signs: Mapping[str, Sign]) -> Verdict:
    confidence, likeliest = max(zip(masses.values(), masses))
    first = max(zip(blame.values(), blame))[1] if blame else None
    total = sum(blame.values())
    named = first is not None and blame[first] >= 0.5 * total
    sign = signs.get(first) if first else None
    gpu = sign.gpu if sign and not sign.foreign and sign.event.kind != "application" else None
    if named and first and gpu is None and case.gpu is not None and case.attempt.gpus:
        held = case.attempt.gpus.get(first, ())
        gpu = held[case.gpu] if 0 <= case.gpu < len(held) else None
    return Verdict(
        case.attempt.job,
        case.attempt.attempt,
        likeliest if confidence >= 0.5 else "unknown",  # type: ignore[arg-type]
        confidence,
        first if named and likeliest == "node" else None,
        gpu if named and likeliest == "node" else None,
        dict(masses),
        {node: share for node, share in blame.items() if share >= 0.001},
        (),
        case.fingerprint,
    )
