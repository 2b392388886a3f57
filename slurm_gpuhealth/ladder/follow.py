"""Follows nodes up the ladder from any host, by their records in Slurm: where each stands, and how it ended."""

from __future__ import annotations

import re
import time

from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.ladder import climb, rungs
from slurm_gpuhealth.slurm import control, remark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal, Protocol

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.slurm.node import NodeRecord
    from slurm_gpuhealth.slurm.reason import Reason

    Job = tuple[str, str, float]

    class Screen(Protocol):
        """Where the progress is shown."""

        def say(self, node: str, text: str) -> None:
            """Show an event, once."""

        def now(self, text: str) -> None:
            """Show the state at this moment."""


USUAL = {"L1": 15.0, "L2": 120.0, "L3": 900.0, "L4": 4800.0, "reset": 120.0, "reboot": 600.0}
"""Seconds, on eight GPUs of a recent kind (NVIDIA's documentation of the run levels)."""
FEW = 4
"""Up to so many nodes are read one by one, with the jobs that they wait for."""
POLL = 2.1
EXITS = {"fit": 0, "not fit": 1, "not testable": 2, "not run": 3, "asked": 0}


@frozen
class End:
    """How a request ended, as `gpuhealth-escalate --json` prints it."""

    node: str
    outcome: Literal["fit", "not fit", "not testable", "not run", "asked"]
    message: str
    """For people."""
    rung: str = ""
    gpu: int | None = None
    test: str = ""
    code: str = ""
    """DCGM's error number."""
    next: str = ""
    """What follows: `back`, a rung, or nothing."""
    reason: str = ""
    """The node's reason afterwards."""
    seconds: float = 0.0

    @property
    def exit(self) -> int:
        return EXITS[self.outcome]


@frozen
class Progress:
    """Where a node stands. `what` changes when something happens; `time` goes on."""

    what: str
    time: str = ""


def until_end(
    settings: Settings,
    before: Mapping[str, NodeRecord],
    ends: dict[str, End],
    screen: Screen,
    journal: Journal | None = None,
    no_wait: bool = False,
) -> None:
    """Follow each node of `before`, the records from before the request, until `ends` has its end.

    `journal`: this node's own (--here): then each due step is done at once.
    """
    asked_at = time.time()
    last: dict[str, NodeRecord] = {}
    while waiting := [name for name in before if name not in ends]:
        few = len(waiting) <= FEW
        time.sleep(POLL if few else 3 * POLL)  # at least budget.SETTLE: a claim is read again
        try:
            for record in _look(settings, waiting, last):
                old = last.get(record.name, before[record.name])
                last[record.name] = record
                ended = _tend(settings, journal, record)
                ended = ended or _end(record, before[record.name], asked_at, no_wait)
                if ended:
                    ends[record.name] = ended
                else:
                    _tell(settings, journal, record, old, screen, few)
        except control.SlurmError as error:
            screen.say(waiting[0], f"no answer from Slurm; the ladder on the node goes on: {error}")
        if len(before) > FEW:
            states = [one.ours.state for name, one in last.items() if one.ours and name not in ends]
            counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
            screen.now(", ".join([f"{len(before)} nodes: {len(ends)} at an end", *counts]))


def _look(settings: Settings, names: Sequence[str], last: Mapping[str, NodeRecord]) -> list[NodeRecord]:
    """The records of `names`. If there are many: only new ones, claims, and those with a changed reason."""
    if len(names) > FEW:
        now = {one.node: one.ours for one in control.holds(settings.slurm, ",".join(names))[0]}
        same = {name for name, one in last.items() if one.ours and one.ours == now.get(name) and not _is_claim(one)}
        names = [name for name in names if name not in same]
    return [control.show_node(settings.slurm, name) for name in names]


def _tend(settings: Settings, journal: Journal | None, record: NodeRecord) -> End | None:
    """Settle a claim; returns its end if it was undone. On the node itself: do at once what its check would do."""
    if record.ours is None:
        return None
    if _is_claim(record) and (record.ours.by or not journal):
        from slurm_gpuhealth.ladder import claim

        outcome, why = claim.finish(settings, None, record.name, wait=0)
        return End(record.name, "not run", f"given back: {outcome}: {why}") if why else None
    if journal:
        from slurm_gpuhealth.ladder import worker
        from slurm_gpuhealth.node import held

        found = held.look_at_hold(settings, journal, record.name, time.time())
        worker.tend(settings, journal, record.name, found, time.time())
    return None


def _end(record: NodeRecord, was: NodeRecord, asked_at: float, no_wait: bool) -> End | None:
    if no_wait and record.ours and not _is_claim(record):
        look = f"to see how it goes: gpuhealth ladder {record.name}"
        return End(record.name, "asked", look, reason=record.reason)
    return end(record, was, asked_at)


def _tell(
    settings: Settings, journal: Journal | None, record: NodeRecord, old: NodeRecord, screen: Screen, few: bool
) -> None:
    """Show what happened, and where the node stands."""
    result = remark.read_result(record.extra)
    if result and result != remark.read_result(old.extra):
        screen.say(record.name, f"{result_words(result)}; {result.next or 'nothing'} follows")
    if record.ours is None:
        return
    jobs = control.jobs(settings.slurm, record.name) if few and record.has_job else []
    known = usual(journal, record.ours.rung) if journal else 0.0
    now = progress(record, record.ours, jobs, settings, time.time(), known)
    screen.say(record.name, now.what)
    if few:
        screen.now(f"{record.name}: {now.what}" + (f", {now.time}" if now.time else ""))


def _is_claim(record: NodeRecord) -> bool:
    return record.ours is not None and record.ours.state == "claim"


def progress(
    record: NodeRecord, ours: Reason, jobs: Sequence[Job], settings: Settings, now: float, known: float = 0.0
) -> Progress:
    """Where a held node stands. `known`: seconds that the rung took before; 0 if unknown."""
    age = max(0.0, now - record.reason_time) if record.reason_time else 0.0
    resting = ours.state in ("pass", "manual", "untested") or climb.is_end(ours)
    if ours.state == "claim":
        return Progress("waits for the budget's decision")
    if ours.state == "running":
        again = " again" if ours.attempt > 1 else ""
        most = limit(settings, record, ours.rung)
        takes = min(known or USUAL.get(ours.rung, 0.0), most)
        means = f", usually {span(takes)}" if takes else ""
        return Progress(f"{ours.rung} is running{again}", f"{span(age)}{means}, at most {span(most)}")
    if resting:
        return Progress(climb.due(ours, record, climb.Known(), settings).why)
    rung = ours.next if ours.state == "fail" else ours.rung
    if jobs:
        return Progress(f"{rung} waits for {', '.join(map(_job, jobs))}")
    way = climb.in_the_way(record)
    if not way and "NOT_RESPONDING" in record.flags:
        way = "slurmd does not answer"
    if way:
        return Progress(f"{rung} waits: {way}", span(age))
    within = settings.slurm.request_poll + settings.check.interval
    if age > 2 * within:
        return Progress(f"{rung} has not begun: does the node's health check run? (there: gpuhealth doctor)", span(age))
    return Progress(f"{rung} begins when the node sees it", f"{span(age)} of at most {span(within)}")


def end(record: NodeRecord, was: NodeRecord, asked_at: float) -> End | None:
    """How the request of `asked_at` ended; None while the climb goes on. `was`: the node's record before it."""
    ours, last = record.ours, remark.read_result(record.extra)
    if last and last == remark.read_result(was.extra) and last.at < asked_at // 60 * 60:
        last = None
    if ours and not climb.is_end(ours) and ours.state not in ("pass", "manual", "untested"):
        return None
    outcome, what = _ended(record, ours, last)
    if not last:
        return End(record.name, outcome, what, reason=record.reason)
    return End(
        node=record.name,
        outcome=outcome,
        message=what,
        rung=last.rung,
        gpu=last.gpu,
        test=last.test,
        code=last.code,
        next=last.next,
        reason=record.reason,
    )


def result_words(last: remark.Result) -> str:
    """`L3 fail: GPU3 memory, DCGM error 46`."""
    from slurm_gpuhealth.diagnose import catalogue

    gpu = "" if last.gpu is None else f"GPU{last.gpu} "
    code = int(last.code) if last.code.isdigit() else None
    error = f", DCGM error {last.code} {catalogue.summary(code)}".rstrip() if last.code else ""
    about = f": {gpu}{last.test}{error}" if last.outcome == "fail" and (gpu or last.test or error) else ""
    return f"{last.rung} {last.outcome}{about}"


def limit(settings: Settings, record: NodeRecord, rung: str) -> float:
    """The longest time that a rung may take, by the GPU model in Gres (`gpu:h100:8`): other hosts see no other name."""
    from slurm_gpuhealth.diagnose import tools

    found = re.search(r"(?:^|,)gpu:([^:,()]+):", record.gres)
    model = found[1].upper() if found else ""
    asked = record.ours.tests if record.ours else ""
    others = tools.chosen(settings, rung, asked, model, 1 << 10) if rung.startswith("L") else []
    return rungs.seconds(settings, rung, model) + sum(one.timeout for one in others)


def usual(journal: Journal, rung: str) -> float:
    """The median of the seconds that this rung has taken on this node; 0 if it never ran."""
    rows = journal.rows(
        "SELECT seconds FROM step WHERE rung = ? AND outcome IN ('pass', 'fail') ORDER BY seconds", rung
    )
    found = [float(row[0]) for row in rows]
    return found[len(found) // 2] if found else 0.0


def span(seconds: float) -> str:
    """`45 s`, `12 min`, `1 h 20 min`."""
    minutes = int(seconds) // 60
    if seconds < 120:
        return f"{int(seconds)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _ended(
    record: NodeRecord, ours: Reason | None, last: remark.Result | None
) -> tuple[Literal["fit", "not fit", "not testable", "not run"], str]:
    """Outcome, and the words for it."""
    if not ours and not last:
        return "not run", f"somebody gave it back before there was a result: {_whose(record)}"
    result = result_words(last) if last else ""
    if ours and ours.state == "pass":
        return "fit", f"{result or ours.rung + ' pass'}; drained until you give it back: gpuhealth resume {record.name}"
    if ours and ours.state == "untested":
        return "not testable", f"{result or ours.rung + ' untested'}; it stays drained"
    if ours and (last is None or last.outcome != "fail") and ours.state == "manual":
        return "not run", f"cancelled, or off in the configuration: {ours.rung} must be done by hand"
    if ours:
        rest = f"{ours.rung} must be done by hand" if ours.state == "manual" else "an admin must act, RMA"
        return "not fit", f"{result or ours.rung + ' fail'}; it stays drained: {rest}"
    assert last  # noqa: S101 - for the type checker
    words: dict[str, Literal["fit", "not fit", "not testable"]] = {"pass": "fit", "fail": "not fit"}
    return words.get(last.outcome, "not testable"), f"{result}; {_whose(record)}"


def _whose(record: NodeRecord) -> str:
    if record.owner == "none":
        return f"it is in service ({record.base})"
    return f"it is {'+'.join([record.base, *sorted(record.flags)])}, {record.reason!r}"


def _job(job: Job) -> str:
    number, user, end = job
    until = time.strftime("%m-%d %H:%MZ", time.gmtime(end)) if end else "without a time limit"
    return f"job {number} of {user} (until {until})" if end else f"job {number} of {user} ({until})"
