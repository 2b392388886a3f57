"""A verdict as people read it: what speaks for it and against it, and the one line of an AdminComment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

PREFIX = "gpuhealth: "
SURE = ((0.9, "high"), (0.7, "medium"), (0.5, "low"), (0.0, "none"))
UNSAID = -5.0
"""Log of how likely a cause was before, of which a verdict says nothing: little."""
CAUSE = {
    "application": "the application",
    "node": "the node",
    "fabric": "the network between its nodes",
    "infrastructure": "what the cluster shares: storage, names, services",
    "user": "its user's or the scheduler's doing",
    "unknown": "unknown",
}


def sure(confidence: float) -> str:
    """`high`, `medium`, `low`, `none`: the bands of a confidence."""
    return next(word for least, word in SURE if confidence >= least)


def sides(cause: str, terms: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The sentences for and against `cause`, each the strongest first; what was known before, of one cause alone, last.

    A term speaks for the cause by how much likelier it is under it than under the likeliest other one; what was known
    before, of the causes together.
    """
    if cause == "unknown":
        return [one["text"] for one in terms], []
    before = {name: weight for one in terms if len(one["weights"]) == 1 for name, weight in one["weights"].items()}

    def gain(term: Mapping[str, Any]) -> float:
        weights, least = (term["weights"], 0.0) if len(term["weights"]) > 1 else (before, UNSAID)
        others = [weight for name, weight in weights.items() if name != cause]
        return float(weights.get(cause, least) - max(others, default=least))

    ranked = sorted(terms, key=lambda one: (len(one["weights"]) == 1, -abs(gain(one))))
    return [one["text"] for one in ranked if gain(one) > 0], [one["text"] for one in ranked if gain(one) < 0]


def place(node: str | None, gpu: object, index: int | None = None) -> str:
    """`n7 GPU3`, `n7 GPU-1c3f...`, `n7`, or nothing."""
    if not node:
        return ""
    return f"{node} GPU{index}" if index is not None else node if gpu is None else f"{node} GPU {gpu}"


def gpu(shares: Mapping[str, float]) -> str | None:
    """The GPU that has more than half of a node's suspicion, if there is one."""
    best = max(shares, key=lambda one: shares[one], default=None)
    return best if best is not None and shares[best] > 0.5 else None


def comment(cause: str, confidence: float, where: str, why: Sequence[str]) -> str:
    """One line for an AdminComment, of which slurmdbd keeps 250 characters without quotes."""
    text = (
        f"{PREFIX}{cause} {where}".rstrip() + f" ({confidence:.2f}): {why[0] if why else 'no evidence against others'}"
    )
    return "".join(c if c.isascii() and c.isprintable() and c not in "\"'`\\|=" else " " for c in text)[:250].strip()
