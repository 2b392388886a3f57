"""gpuhealth explain JOBID: what each attempt of a job died of, what speaks for and against it, and what was done."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.correlate import words
from slurm_gpuhealth.measure import picture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from sqlalchemy import Connection

SHORT = 180.0
"""Seconds. Of a shorter job there are one or two samples: no picture of it."""
MOST = 16
"""GPUs of a job whose use is shown."""
BEFORE = {"TIMEOUT": "its time limit", "CANCELLED": "it was cancelled"}


def explain_job(node: str, job: int, as_json: bool) -> None:
    """Print the verdict of each attempt. Raises click.ClickException if there is none, and says why."""
    from slurm_gpuhealth.controller import hung
    from slurm_gpuhealth.store import judged

    settings = common.settings_of(node)
    with common.store(node) as db:
        attempts = judged.explained(db, job)
        actions = judged.actions(db, job)
        for one in attempts:
            one["uses"] = _uses(db, one["uses"])
            ended = one["state"] != "COMPLETED"
            one["stood"] = hung.before_end(db, settings, job, one["attempt"], one["end"]) if ended else None
    if not attempts:
        raise click.ClickException(
            f"job {job} is not in the cluster's record: it has not ended, or gpuhealth correlate has not run since"
            " (it judges a job correlate.settle after its end)"
        )
    may_read = common.may_read(node)
    for one, later in zip(attempts, [*attempts[1:], None]):
        if later and one["verdict"]:  # the advice is out of date: the job ran again
            one["verdict"] = {**one["verdict"], "advice": _ran_again(later, attempts[-1])}
        one["actions"] = [each for each in actions if each["attempt"] == one["attempt"]]
        if not may_read(one["user"]):
            one["reading"] = None
            one["verdict"] = one["verdict"] and {**one["verdict"], "fingerprint": ""}
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
        _print_stood(one)
        _print_uses(one)
        say("  It ended well." if one["state"] == "COMPLETED" else "  Not judged yet: gpuhealth correlate does that.")
        return
    where = words.place(verdict["node"], verdict["gpu"], one["gpu_index"])
    what = words.CAUSE[verdict["cause"]] + (f", {where}" if where else "")
    if verdict["cause"] == "unknown":
        likely = sorted(verdict["masses"].items(), key=lambda each: -each[1])[:2]
        place = {"node": f" {where}".rstrip()}
        odds = " or ".join(f"{words.CAUSE[cause]}{place.get(cause, '')} ({mass:.2f})" for cause, mass in likely)
        say(f"  The cause can't be told: {odds or 'there is no evidence for any'}.")
    else:
        say(f"  It died of {what}. Confidence {words.sure(verdict['confidence'])} ({verdict['confidence']:.2f}).")
    supports, against = words.sides(verdict["cause"], verdict["terms"])
    for label, sentences in (("for", supports[:3]), ("against", against[:1])):
        for sentence in sentences:
            say(f"    {label:>7}: {sentence}")
    cited = (one["reading"] or {}).get("cause")
    if cited:
        where = f"line {cited['line']}" if cited["line"] else "after a part that was not read"
        say(f"  Its log, {where}: {cited['text']}")
    elif not one["reading"]:
        say("  Its log was not read.")
    if (one["reading"] or {}).get("flight"):
        say(f"  Its flight recorder: {one['reading']['evidence'][0]}.")
    _print_stood(one)
    _print_uses(one)
    for action in one["actions"]:
        say(f"  Done {common.ago(time.time(), action['time'])}: {action['kind']}: {action['result']}")
    if verdict["advice"]:
        say(f"  What to do: {verdict['advice']}")


def _print_stood(one: dict[str, Any]) -> None:
    """That it stood still before its end, and where. This is no part of the verdict: what ended the job is another
    question than what it waited for."""
    stood = one["stood"]
    if not stood:
        return
    before = BEFORE.get(one["state"], "its end")
    length = picture.duration(max(0.0, one["end"] - stood["since"]))
    others = [words.place(each["node"], each["uuid"], each["gpu"]) for each in stood["different"]]
    rest = f", {', '.join(others[:4])}{' ...' if others[4:] else ''} did not" if others else ""
    waited = f"{stood['waiting']} of {stood['gpus']} GPUs waited{rest}"
    say(f"  It had stood still since {common.utc(stood['since'])} UTC, {length} before {before}; {waited}.")
    for sentence in stood["why"]:
        say(f"    then: {sentence}")
    if stood["cause"] != "unknown":
        where = words.place(stood["node"], stood["gpu"], stood["gpu_index"])
        counts = "; the verdict above does not count the stop itself" if one["verdict"] else ""
        say(f"    It points to {words.CAUSE[stood['cause']]}" + (f", {where}" if where else "") + f"{counts}.")


def _uses(db: Connection, uses: Mapping[str, str]) -> list[dict[str, Any]]:
    """How each GPU was used, in the order of nodes and GPUs."""
    from slurm_gpuhealth.store import judged

    found = [
        {"node": node, "uuid": uuid, "gpu": judged.gpu_index(db, node, uuid), **one}
        for node, text in sorted(uses.items())
        for uuid, one in picture.read(text).items()
    ]
    return sorted(found, key=lambda one: (one["node"], one["gpu"] is None, one["gpu"] or 0))


def _print_uses(attempt: dict[str, Any]) -> None:
    if attempt["end"] - (attempt["start"] or 0.0) < SHORT:
        return
    uses = attempt["uses"]
    for one in uses[:MOST]:
        say(f"  {words.place(one['node'], one['uuid'], one['gpu'])} {picture.line(one)}")
    if uses[MOST:]:
        say(f"  ... and {len(uses) - MOST} more GPUs: --json")


def _ran_again(later: dict[str, Any], last: dict[str, Any]) -> str:
    if last["state"] == "COMPLETED":
        return f"nothing more: attempt {last['attempt'] + 1} ended well"
    return f"it ran again: see attempt {later['attempt'] + 1}"


def say(text: str) -> None:
    click.echo(common.safe(text))
