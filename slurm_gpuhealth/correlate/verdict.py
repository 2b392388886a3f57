"""What one attempt died of: the prior probability of each cause times the evidence, and what that says of its nodes.

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

from slurm_gpuhealth.correlate import slots, terms, testimony
from slurm_gpuhealth.correlate.suspicion import levels
from slurm_gpuhealth.correlate.weights import ALIKE, COLUMNS, DAY, HANGS, plain
from slurm_gpuhealth.outcomes import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import Case, Known, Ratios, State
    from slurm_gpuhealth.correlate.testimony import Evidence, Sign
    from slurm_gpuhealth.correlate.weights import Grid, Row
    from slurm_gpuhealth.outcomes import GpuName

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
SHARED = 3.0  # weight of a place that is bad, against all other causes
WAITED = 600.0  # a job that is cancelled within so many seconds says nothing
DYING = 600.0  # a node is found dead after SlurmdTimeout: however short its job was, it had that long to die
LEAST = 0.02  # likelihood ratios that are all this near to 1 are not kept
NOTHING: Ratios = ()


class Judged(NamedTuple):
    verdict: Verdict
    own: float
    """The application's share."""
    failing: float
    """How often the application fails by itself."""
    ratios: dict[str, Ratios]
    """Node → what it says of its levels."""
    hard: set[str]
    """Nodes that a hard event, or Slurm, names."""


def judge(case: Case, key: str, known: Known, explained: bool = True) -> Judged:
    """Pure in `known.state`: reads it only. `explained`: with its terms, which cost as much as the rest."""
    evidence = testimony.gather(case, key, known)
    hangs = HANGS.get(case.attempt.state) if not evidence.signs and _may_hang(case) else None
    if hangs and case.kind == "user":  # the log of a job that hung says no more than Slurm: it was ended from outside
        evidence = evidence._replace(log=ALIKE)
    causes = _other_causes(case, evidence, known)
    likelihoods = _likelihoods(case, evidence, known)
    if hangs:
        usual = testimony.cut(case, known.state, known.settings)
        causes = {cause: mass * usual for cause, mass in causes.items()}
        likelihoods = {node: tuple(hangs * one / (1 + one) for one in row) for node, row in likelihoods.items()}
    shares = _shares(case, evidence, likelihoods, known, bool(hangs))
    total = sum(causes.values()) + sum(shares.values()) or 1.0
    blame = {node: share / total for node, share in shares.items()}
    masses = {"node": sum(blame.values()), **{cause: mass / total for cause, mass in causes.items()}}
    verdict = _verdict(case, _cautious(masses, case, key, evidence, known.state), blame, evidence.signs, known)
    if explained:
        verdict = terms.explain(verdict, case, evidence, known)
    return Judged(
        verdict=verdict,
        own=masses["user"] if case.attempt.state in HANGS else masses["application"],
        failing=evidence.failing,
        ratios=_of_levels(case, likelihoods, shares, total, bool(hangs), known.settings),
        hard=_hard(case, evidence.signs),
    )


def _may_hang(case: Case) -> bool:
    """Nobody could call a hang what was cancelled within minutes."""
    return case.attempt.state != "CANCELLED" or case.attempt.end - case.attempt.start >= WAITED


def _other_causes(case: Case, evidence: Evidence, known: Known) -> dict[str, float]:
    """Cause, but the nodes → its prior probability times the evidence; not yet adding up to 1."""
    state = case.attempt.state
    priors, likelihoods = STATES.get(state) or _priors(case, evidence.failing, known), zip(COLUMNS, evidence.log)
    next(likelihoods)  # the nodes'
    if state == "NODE_FAIL":
        causes = {cause: priors[cause] * (likelihood * NODE_FAIL[cause]) for cause, likelihood in likelihoods}
        # Where much fails at once, what did it may well take nodes for lost: a network, a controller.
        causes["infrastructure"] *= max(1.0, NODE_FAIL_NAMED * case.shared / NODE_FAIL["infrastructure"])
    else:
        causes = {cause: priors[cause] * likelihood for cause, likelihood in likelihoods}
    causes["application"] *= evidence.repeated
    if evidence.shared:
        causes["infrastructure"] = max(causes["infrastructure"], SHARED)
    return causes


def _priors(case: Case, failing: float, known: Known) -> dict[str, float]:
    s, days, nodes = known.settings, _days(case), case.attempt.nodes
    fabric = (1 - math.exp(-s.fabric * days)) * max(1, len(known.leaves.above(nodes))) + s.together * len(case.leaves)
    return {
        "application": failing,
        "fabric": min(fabric, 0.9) * (1.0 if len(nodes) > 1 else 0.3),
        "infrastructure": 1 - math.exp(-s.infrastructure * days) + s.together * case.shared,
        "user": 0.001,
    }


def _days(case: Case) -> float:
    days = max(0.0, case.attempt.end - case.attempt.start) / DAY
    return max(days, DYING / DAY) if case.attempt.state == "NODE_FAIL" else days


def _likelihoods(case: Case, evidence: Evidence, known: Known) -> dict[str, Row]:
    """Node → how likely it ends the attempt in this way, at each of its levels."""
    days, ratios = _days(case), _ratios(case, evidence, known)
    found: dict[str, Row] = {}
    same: dict[tuple[float, float], Row] = {}  # most nodes of a large job are alike
    for node, state in evidence.nodes.items():
        alike = testimony.share(case.attempt, node, state), ratios[node]
        if alike not in same:
            same[alike] = _likelihood(days, *alike, evidence.log, known.grid)
        found[node] = same[alike]
    return found


def _ratios(case: Case, evidence: Evidence, known: Known) -> dict[str, float]:
    """Node → likelihood ratio of what it, the log and Slurm say of it."""
    attempt, named, signs = case.attempt, evidence.named, evidence.signs
    silent = 1 - known.settings.seen_by_xid * 0.5 if known.state.fleet.events else 1.0
    unnamed = named.get("", 1.0)
    ratios = dict.fromkeys(attempt.nodes, unnamed * silent)
    for node in {*case.hosts, *signs}:
        ratios[node] = named.get(node, unnamed) * (signs[node].ratio if node in signs else silent)
    if attempt.state == "NODE_FAIL":
        for node in ratios:
            ratios[node] *= NODE_FAIL_NAMED if attempt.failed_node in (None, node) else NODE_FAIL_OTHER
    return ratios


def _likelihood(days: float, share: float, ratio: float, log: Row, grid: Grid) -> Row:
    """Level by level, of a node of which the job had that share. What a broken node leaves in a log may look as if the
    program had failed."""
    days *= share
    odds = [
        50.0 if hazard * days > 3.9 else min(50.0, math.expm1(hazard * days) + start * share)
        for hazard, start in grid.odds
    ]
    node, application = log[:2]
    likely = node * ratio
    return (*[one * likely for one in odds[:-1]], odds[-1] * max(application, node) * ratio)


def _shares(
    case: Case, evidence: Evidence, likelihoods: Mapping[str, Row], known: Known, hangs: bool
) -> dict[str, float]:
    """Node → its share of the blame, not yet adding up to 1."""
    attempt, signs, grid, s = case.attempt, evidence.signs, known.grid, known.settings
    table, near, without = None if hangs else STATES.get(attempt.state), evidence.near, evidence.without
    if table and not signs:
        shares = dict.fromkeys(evidence.nodes, 1.0)
    else:
        shares = {
            node: sum(map(mul, levels(state, attempt.end, grid, s, without, near.get(node, ())), likelihoods[node]))
            for node, state in evidence.nodes.items()
        }
    if table:
        _scale(shares, table["node"], evidence.log[0], signs, s)
    return shares


def _scale(shares: dict[str, float], mass: float, log: float, signs: Mapping[str, Sign], s: Suspicion) -> None:
    """Where Slurm's word gives the nodes a mass as a whole, it is divided by their hazards, and raised by signs."""
    total = sum(shares.values()) or 1.0
    strongest = max((sign.ratio for sign in signs.values() if not sign.foreign), default=1.0)
    hot = any(sign.event.kind == "thermal" for sign in signs.values())
    factor = max(strongest, s.most / 4 if hot else 1.0) * log
    for node in shares:
        shares[node] *= mass * factor / total


def _cautious(
    masses: Mapping[str, float], case: Case, key: str, evidence: Evidence, state: State
) -> Mapping[str, float]:
    """The masses as they are told, where the log alone contradicts the rest."""
    attempt = case.attempt
    if case.kind == "application":
        accused = case.hosts or attempt.state == "NODE_FAIL" or any(one.ratio > 1 for one in evidence.signs.values())
        return masses if accused else _held_back(masses)
    if case.kind == "hardware" and attempt.state not in STATES and not _met_apart(case, key, state):
        return _in_doubt(masses)
    return masses


def _held_back(masses: Mapping[str, float]) -> dict[str, float]:
    """Where the log shows an error of the program's own and no node says anything, the node is not called the cause:
    the jobs of many users may share a broken module. The node is suspected all the same, and tested."""
    more = max(0.0, masses["node"] - 0.49)
    return {**masses, "node": masses["node"] - more, "application": masses["application"] + more}


def _in_doubt(masses: Mapping[str, float]) -> Mapping[str, float]:
    """Where the log shows a hardware error the program is not called the cause, however often it fails by itself: that
    its node did not see it too may only mean that nobody reads its kernel log. Nor is the node: it can't be told."""
    half = (masses["node"] + masses["application"]) / 2
    return {**masses, "node": half, "application": half} if masses["application"] > half else masses


def _met_apart(case: Case, key: str, state: State) -> bool:
    """Whether the application has died of the same error on nodes that have none in common with these."""
    app = state.applications.get(case.application)
    return any(
        other != key and fingerprint == case.fingerprint and set(nodes).isdisjoint(case.attempt.nodes)
        for other, _, fingerprint, _, _, nodes in (app.prints if app and case.fingerprint else ())
    )


def _verdict(
    case: Case, masses: Mapping[str, float], blame: Mapping[str, float], signs: Mapping[str, Sign], known: Known
) -> Verdict:
    confidence, likeliest = max(zip(masses.values(), masses))
    first = max(zip(blame.values(), blame))[1] if blame else None
    named = first if likeliest == "node" and first is not None and blame[first] >= 0.5 * sum(blame.values()) else None
    return Verdict(
        job=case.attempt.job,
        attempt=case.attempt.attempt,
        cause=likeliest if confidence >= 0.5 else "unknown",  # type: ignore[arg-type]
        confidence=confidence,
        node=named,
        gpu=_gpu(case, named, signs.get(named), known) if named else None,
        masses=dict(masses),
        responsible={node: share for node, share in blame.items() if share >= 0.001},
        fingerprint=case.fingerprint,
    )


def _gpu(case: Case, node: str, sign: Sign | None, known: Known) -> GpuName | None:
    """The node's GPU that did it: by its own report; by the log, which counts the job's GPUs; or by other jobs."""
    if sign and sign.gpu is not None and not sign.foreign and sign.event.kind != "application":
        return sign.gpu
    held = case.attempt.gpus.get(node, ()) if case.attempt.gpus else ()
    if case.gpu is not None and 0 <= case.gpu < len(held):
        return held[case.gpu]
    slot = slots.worst(known.state.node(node), case.attempt.end, known.grid, known.settings) if held else None
    bad = slot.gpu if slot and slot.alone and 1 - slot.levels[0] >= known.settings.l2 else None
    return next((one for one in held if bad is not None and plain(one) == plain(bad)), None)


def _of_levels(
    case: Case, likelihoods: Mapping[str, Row], shares: Mapping[str, float], total: float, hangs: bool, s: Suspicion
) -> dict[str, Ratios]:
    """Node → what the case says of its levels. Heat makes a job slow: a ticket for the cooling, no failure of the node.
    (Method 6.6.)"""
    if case.kind == "thermal" or (case.attempt.state in STATES and not hangs):
        return {}
    found = {node: _of_level(total - shares[node], one, s) for node, one in likelihoods.items()}
    if hangs:  # the job counts as one that the node let live: take that back
        found = {
            node: tuple(min(s.most, one / (1 - start)) for one, start in zip(row, s.starts))
            for node, row in found.items()
            if row
        }
    return found


def _of_level(rest: float, likelihood: Row, s: Suspicion) -> Ratios:
    """Level by level: what else may have ended the attempt, plus this node at that level."""
    base = rest + likelihood[0]
    if base <= 0 or max(likelihood) - min(likelihood) < LEAST * base:
        return NOTHING
    most = s.most * base
    # As round(..., 4), which takes five times as long.
    return 1.0, *[int((rest + one if rest + one < most else most) / base * 1e4 + 0.5) / 1e4 for one in likelihood[1:]]


def _hard(case: Case, signs: Mapping[str, Sign]) -> set[str]:
    attempt = case.attempt
    found = {node for node, sign in signs.items() if sign.hard and not sign.foreign}
    if attempt.state == "NODE_FAIL" and attempt.failed_node and attempt.failed_node in attempt.nodes:
        found.add(attempt.failed_node)
    return found
