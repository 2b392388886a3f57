"""A verdict's evidence as sentences, the strongest first, and what to do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate import context, suspicion
from slurm_gpuhealth.correlate.state import NodeState
from slurm_gpuhealth.correlate.weights import ALIKE, COLUMNS, DAY, growth
from slurm_gpuhealth.outcomes import Term

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import Case, Known
    from slurm_gpuhealth.correlate.testimony import Evidence, Sign
    from slurm_gpuhealth.outcomes import Attempt, Verdict

# Everybody may read these; the log's own words only its owner.
LOG = {
    "hardware": "its log shows a hardware error",
    "application": "its log shows an error of the program itself",
    "communication": "its log shows only that ranks lost each other",
    "infrastructure": "its log shows trouble with storage, network names or another service",
    "user": "its log shows that it was ended from outside",
    "memory": "its log shows that the host's memory ran out",
    "crash": "it died of a signal, without a traceback",
    "numeric": "its log shows NaN or infinite values",
    "thermal": "its log shows heat or throttling",
    "nothing": "its log shows no cause",
}
STATE = {
    "TIMEOUT": "Slurm ended it at its time limit",
    "DEADLINE": "Slurm ended it at its deadline",
    "PREEMPTED": "Slurm ended it for another job",
    "CANCELLED": "it was cancelled",
    "REQUEUED": "it was put back into the queue",
    "REVOKED": "another cluster took it",
    "BOOT_FAIL": "its nodes did not boot",
    "OUT_OF_MEMORY": "it reached its own memory limit",
}
ADVICE = {
    "application": "look at the program: no evidence against the node so far",
    "node": "requeue it as it is",
    "fabric": "requeue it as it is; the network is to be looked at",
    "infrastructure": "requeue it when the service is back",
    "user": "nothing: nobody's fault",
    "unknown": "requeue it once; if it fails on other nodes too, look at the program",
}
HOT = "thermal: a ticket for this node's cooling; the job may be requeued as it is"
UNCONFIRMED = (
    "requeue it once, and have the node tested: its log speaks of hardware, which nothing else bears out so far"
)
CONTRADICTED = (
    "requeue it once, and have {node} tested: either the job used a GPU that was not its own (compare the order in"
    " gres.conf with nvidia-smi, and see ConstrainDevices in cgroup.conf), or two GPUs are bad"
)
KEPT = 6


def explain(verdict: Verdict, case: Case, evidence: Evidence, known: Known) -> Verdict:
    """`verdict` with its terms and advice."""
    first = verdict.node or max(verdict.responsible, key=lambda one: verdict.responsible[one], default="")
    terms = _strongest(list(_terms(case, first, evidence, known)), verdict.masses)
    return verdict._replace(terms=terms, advice=_advice(verdict, case, evidence, known))


def _strongest(found: list[Term], masses: Mapping[str, float]) -> tuple[Term, ...]:
    """At most KEPT; if any speaks against the likeliest cause, one of these is among them."""
    likeliest = max(masses, key=lambda one: masses[one])

    def pull(term: Term) -> float:
        others = [weight for cause, weight in term.weights.items() if cause != likeliest]
        return term.weights.get(likeliest, 0.0) - max(others, default=0.0)

    found.sort(key=lambda one: -abs(pull(one)))
    kept = found[:KEPT]
    against = [one for one in found[KEPT:] if pull(one) < 0]
    if against and not any(pull(one) < 0 for one in kept):
        kept[-1] = against[0]
    return tuple(kept)


def _advice(verdict: Verdict, case: Case, evidence: Evidence, known: Known) -> str:
    hot = any(sign.event.kind == "thermal" for sign in evidence.signs.values()) or case.kind == "thermal"
    if verdict.cause == "node" and hot:
        return HOT
    if verdict.cause == "unknown" and case.kind == "hardware":
        beside = _beside(evidence)
        return CONTRADICTED.format(node=beside[0]) if beside else UNCONFIRMED
    if verdict.cause == "application":
        if case.kind == "hardware":
            return "look at the program: its log speaks of hardware, and on other nodes it dies with the same words"
        if node := next((name for name, one in evidence.signs.items() if one.hard), ""):
            return f"look at the program, and have {node} tested: it reported a hardware fault on a GPU of this job"
        if hot:
            return "look at the program; its node was slowed by heat, which is a ticket for the cooling"
        if _suspected(case, known):
            return "look at the program; its node is suspected too: gpuhealth lemons"
    return ADVICE[verdict.cause]


def _suspected(case: Case, known: Known) -> bool:
    state, s = known.state, known.settings
    return any(
        node in state.nodes and 1 - suspicion.levels(state.nodes[node], case.attempt.end, known.grid, s)[0] >= s.l2
        for node in case.attempt.nodes[:8]
    )


def _terms(case: Case, first: str, evidence: Evidence, known: Known) -> Iterator[Term]:
    """`first`: the node that is blamed most."""
    attempt = case.attempt
    if attempt.state in STATE:
        cause = {"BOOT_FAIL": "infrastructure", "OUT_OF_MEMORY": "application"}.get(attempt.state, "user")
        yield Term(STATE[attempt.state], {one: math.log(0.9 if one == cause else 0.03) for one in COLUMNS})
    else:
        yield from _priors(case, first, evidence, known)
        yield from _together(case, known.settings)
    if case.kind is not None and evidence.log != ALIKE:
        text = LOG[case.kind]
        if case.kind == "hardware" and (beside := _beside(evidence)):
            node, sign = beside
            text += f", and {node} reported {_code(sign)} on GPU {sign.gpu}; but Slurm gave the job other GPUs"
        yield Term(text, {cause: math.log(one) for cause, one in zip(COLUMNS, evidence.log)})
    if attempt.state == "NODE_FAIL":
        named = f", and names {attempt.failed_node}" if attempt.failed_node else ""
        yield Term(f"Slurm says that a node failed{named}", {"node": 0.0, "fabric": -1.6, "application": -9.2})
    for node, sign in sorted(evidence.signs.items(), key=lambda one: -one[1].ratio)[:3]:
        yield Term(_said(node, sign, attempt), {"node": math.log(sign.ratio), "application": 0.0})
    if first in evidence.named:
        yield Term(f"its log singles out {first}", {"node": math.log(evidence.named[first]), "application": 0.0})
    if evidence.repeated > 1:
        what = "iteration" if evidence.repeated > 5 else "rank"
        text = f"the same error at the same {what} on other nodes"
        yield Term(text, {"application": math.log(evidence.repeated), "node": 0.0})


def _priors(case: Case, first: str, evidence: Evidence, known: Known) -> Iterator[Term]:
    alone = ", of late on this node alone" if case.apart else ""
    text = f"this application fails by itself in {evidence.failing:.0%} of its runs{alone}"
    if where := context.of(case.attempt):
        shrink = 1.0 / growth(case.attempt.end, known.settings.half_life)
        runs, failed = context.apart(known.state, case.attempt.nodes, where, 1, shrink)
        said = f"{failed / runs:.0%} fail on other nodes" if runs >= context.RUNS else "hardly any ran on other nodes"
        text += f"; of jobs in {context.words(where)} {said}"
    yield Term(text, {"application": math.log(evidence.failing)})
    if first:
        hours = max(0.0, case.attempt.end - case.attempt.start) / 3600
        bad, chance = _ending(first, case, evidence, known)
        yield Term(
            f"{first} by itself ends {_share(chance)} of jobs of {_long(hours)} (suspicion {bad:.2f})",
            {"node": math.log(max(chance, 1e-6))},
        )


def _ending(node: str, case: Case, evidence: Evidence, known: Known) -> tuple[float, float]:
    """How likely the node is bad by what is known of it without this case, and how likely it ends a job so long."""
    attempt, grid = case.attempt, known.grid
    state = evidence.nodes.get(node) or NodeState()
    levels = suspicion.levels(state, attempt.end, grid, known.settings, evidence.without)
    days = max(0.0, attempt.end - attempt.start) / DAY
    lives = zip(levels, grid.start, grid.hazard)
    return 1 - levels[0], 1 - sum(one * (1 - start) * math.exp(-hazard * days) for one, start, hazard in lives)


def _share(chance: float) -> str:
    return f"{chance:.0%}" if chance >= 0.095 else f"{chance:.1%}" if chance >= 0.001 else "less than 0.1%"


def _long(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min" if hours >= 1 / 30 else f"{hours * 3600:.0f} s"


def _together(case: Case, s: Suspicion) -> Iterator[Term]:
    """What failed at the same time."""
    alike = dict.fromkeys(COLUMNS, 0.0)
    if case.leaves:
        under, minutes = " and ".join(case.leaves), s.leaf_window / 60
        text = f"unrelated jobs under leaf switch {under} failed within {minutes:.0f} min: not by chance"
        yield Term(text, {**alike, "fabric": math.log(s.together / s.fabric)})
    if case.shared:
        text = "jobs of other users on other nodes failed at about the same time, more than usual"
        yield Term(text, {**alike, "infrastructure": math.log1p(s.together * case.shared / s.infrastructure)})


def _beside(evidence: Evidence) -> tuple[str, Sign] | None:
    """A node with a hard event on a GPU that the job did not hold."""
    hard = ((node, one) for node, one in evidence.signs.items() if one.foreign and one.event.kind == "hard")
    return next(hard, None)


def _code(sign: Sign) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in sign.event.code)[:40]


def _said(node: str, sign: Sign, attempt: Attempt) -> str:
    gpu = f" on GPU {sign.gpu}" if sign.gpu is not None else ""
    whose = ", which the job did not hold" if sign.foreign else ""
    kind = {
        "hard": "a hardware fault",
        "weak": "a contained error",
        "application": "an error as programs make them",
        "link": "a link error",
        "thermal": "slowed by heat",
    }[sign.event.kind]
    when = "while it ran"
    if sign.event.time > attempt.end:
        when = f"{sign.event.time - attempt.end:.0f} s after its end"
    elif sign.event.until < attempt.start:
        when = f"{attempt.start - sign.event.until:.0f} s before its start"
    return f"{node} reported {_code(sign)}{gpu} {when}: {kind}{whose}"
