"""What a node said of an attempt that ran on it: how much more likely that is if the node ended the attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.correlate.weights import DAY, same_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import Case, Incident, NodeState
    from slurm_gpuhealth.outcomes import Attempt, GpuName

CONTAINED, FOREIGN, SHARED = 5.0, 2.0, 15.0  # ratio: a contained error here, a hard one on another's GPU, one GPU twice
LAG = 15.0  # seconds after a job's end in which what its node says has lost half of its weight
AT_END, LATER = 300.0, 0.3  # so long before a job's end; share of those that a fault ends which live on for longer


class Sign(NamedTuple):
    """What a node said in the attempt's time."""

    ratio: float
    """Likelihood if the node did it, over that if it did not."""
    hard: bool
    gpu: GpuName | None
    event: Incident
    foreign: bool = False


def of(case: Case, node: str, known: NodeState, near: Sequence[Incident], s: Suspicion) -> Sign | None:
    """The strongest that the node itself said while the attempt ran."""
    attempt, best = case.attempt, None
    held = attempt.gpus.get(node) if attempt.gpus else None
    days = max(0.0, attempt.end - attempt.start) / DAY
    for event in near:
        if event.until < attempt.start and _proven(known, event.until, attempt.start):
            continue
        lag = event.time - attempt.end
        if lag > 0 and _of_a_later_job(known, attempt.end, event):
            continue
        own = same_gpu(event.gpu, held)
        ratio = 1.0
        if event.kind == "hard":
            # How long the job ran says nothing here: the event was as likely to come by chance in that time as by
            # a failure; what counts is how many such events are harmless.
            harmless = s.benign * max(days, 1 / 1440) * (share(attempt, node, known) if own else 1.0)
            ratio = FOREIGN if own is False else max(2.0, event.strength * s.seen_by_xid / harmless)
            if own is not False and event.until >= attempt.end - AT_END:  # one by chance could have come at any time
                ratio *= max(1.0, (1 - LATER) * (attempt.end - attempt.start) / AT_END)
        elif event.kind in ("weak", "link") and own is not False:
            ratio = CONTAINED if event.strength >= 0.1 else 1.5
        elif event.kind == "application" and own is not False:
            ratio = SHARED if _elsewhere(case, known, event) else 0.7
        elif event.kind == "thermal" and own is not False:
            ratio = 1.01
        if lag > 0 and ratio > 1:
            ratio = max(1.0, ratio * 2.0 ** (-lag / LAG))
        sign = Sign(ratio, event.kind == "hard" and own is not False, event.gpu, event, own is False)
        if best is None or ratio > best.ratio or (ratio == best.ratio and best.event.until < attempt.start):
            best = sign
    return best


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


def share(attempt: Attempt, node: str, known: NodeState) -> float:
    held = attempt.gpus.get(node) if attempt.gpus else None
    return min(1.0, len(held) / known.width) if held else 1.0
