"""gpuhealth explain JOBID: what each attempt of a job died of, what speaks for and against it, and what was done."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import click

from slurm_gpuhealth.commands import common

if TYPE_CHECKING:
    from typing import Any

SURE = ((0.9, "high"), (0.7, "medium"), (0.5, "low"), (0.0, "none"))
WORDS = {
    "application": "the application",
    "node": "the node",
    "fabric": "the network between the nodes",
    "infrastructure": "what the cluster shares: file system, name service, power",
    "user": "its user's or the scheduler's doing",
    "unknown": "unknown",
}


def explain_job(node: str, job: int, as_json: bool) -> None:
    """Print the verdict of each attempt. Raises click.ClickException where there is none, and says why."""
    from slurm_gpuhealth.store import judged

    with common.store(node) as db:
        attempts = judged.explained(db, job)
        actions = judged.actions(db, job)
    if not attempts:
        raise click.ClickException(
            f"job {job} is not in the store: it has not ended, or gpuhealth correlate has not run since"
            " (it judges correlate.settle after the end)"
        )
    may_read = _may_read(attempts[-1]["user"])
    for one in attempts:
        one["actions"] = [each for each in actions if each["attempt"] == one["attempt"]]
        if not may_read and one["reading"]:
            one["reading"] = {**one["reading"], "cause": None, "collateral": []}
        if as_json:
            click.echo(json.dumps(one))
        else:
            _print(one, len(attempts))


def _print(one: dict[str, Any], attempts: int) -> None:
    head = f"Job {one['job']}" + (f", attempt {one['attempt'] + 1} of {attempts}" if attempts > 1 else "")
    nodes = ", ".join(one["nodes"][:8]) + (" …" if one["nodes"][8:] else "")
    ended = f"{one['state']}, {common.utc(one['end'])} UTC, on {nodes}"
    say(f"{head} of {one['user']}, {one['name']!r}: {ended}")
    verdict = one["verdict"]
    if verdict is None:
        say("  It ended well." if one["state"] == "COMPLETED" else "  Not judged yet: gpuhealth correlate does it.")
        return
    sure = next(word for least, word in SURE if verdict["confidence"] >= least)
    what = WORDS[verdict["cause"]]
    where = "".join((f": {verdict['node']}" if verdict["node"] else "", _gpu(verdict["gpu"])))
    say(f"  It died of {what}{where}. Confidence {sure} ({verdict['confidence']:.2f}).")
    supports, against = sides(verdict)
    for label, terms in (("for", supports[:3]), ("against", against[:1])):
        for term in terms:
            say(f"    {label:>7}: {term['text']}")
    cited = (one["reading"] or {}).get("cause")
    if cited:
        say(f"  Its log, line {cited['line']}: {cited['text']}")
    for action in one["actions"]:
        say(f"  Done {common.ago(time.time(), action['time'])}: {action['kind']}: {action['result']}")
    if verdict["advice"]:
        say(f"  What to do: {verdict['advice']}")


def sides(verdict: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The terms for and against the verdict, each the strongest first.

    A term speaks for the cause by how much likelier it is under it than under the likeliest other one.
    """
    cause = verdict["cause"]
    if cause == "unknown":
        return list(verdict["terms"]), []

    def gain(term: dict[str, Any]) -> float:
        others = [weight for name, weight in term["weights"].items() if name != cause]
        return float(term["weights"].get(cause, 0.0) - max(others, default=0.0))

    ranked = sorted(verdict["terms"], key=gain, reverse=True)
    return [one for one in ranked if gain(one) > 0], [one for one in reversed(ranked) if gain(one) < 0]


def _gpu(gpu: str | int | None) -> str:
    return f" GPU {gpu}" if gpu is not None else ""


def _may_read(user: str) -> bool:
    """Whether who asks may see the log's lines: root, the job's user, or an operator (sudo names who asks)."""
    asks = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    return asks is None or asks in (user, "root")


def say(text: str) -> None:
    click.echo(common.safe(text))
