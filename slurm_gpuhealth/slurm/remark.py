"""Writes and reads our part of a node's Comment and Extra; keeps the site's own text. Pure: no I/O.

    Comment   gpuhealth: ack FACT until YYYY-MM-DDThh:mmZ, was TEXT;        what an admin said
    Extra     gpuhealth: L3 pass GPU3 memory 46 at=… fact=Xid79 next=… backs=1 boots=1;     the ladder's last result
              gpuhealth-waits: Xid79 GPU3 L3;     a fault for which the budget has no room
              gpuhealth-slow: GPU-5db0a814 dcgm.gflops 41.2 52.1 TFLOPS;     slower than the fleet

Both survive a resume, a reboot and the loss of the node's journal. Our part begins `gpuhealth: ` and ends with `;`.
"""

from __future__ import annotations

import time

from slurm_gpuhealth.frozen import frozen
from slurm_gpuhealth.slurm import reason as reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "gpuhealth: "
WAITS = "gpuhealth-waits: "
SLOW = "gpuhealth-slow: "
TIME = "%Y-%m-%dT%H:%MZ"
MARKS = "%;,\n"
PLAIN = reasons.WORD | set(" /+")


@frozen
class Result:
    """The last result of the ladder on a node."""

    rung: str
    outcome: str
    """`pass`, `fail`, `untested`, or `cancelled`."""
    at: float
    """Seconds since the epoch, in whole minutes."""
    fact: str = ""
    gpu: int | None = None
    test: str = ""
    code: str = ""
    next: str = ""
    """What follows: a rung, or `back`."""
    backs: int = 0
    """How often the node was given back for this fact on this GPU within the window."""
    boots: int = 0
    """How often our ladder has rebooted the node within the window."""
    bundle: str = ""
    """The name of the evidence file in the node's `paths.state`/bundles."""


@frozen
class Said:
    """What an admin said about a node."""

    acks: Mapping[str, float] = {}
    """fact → until when it is acknowledged, seconds since the epoch."""
    was: str = ""
    """The admin's own reason, which --take-over replaced; put back when the node is given back."""


@frozen
class Slow:
    """A GPU that is slower than the same model elsewhere."""

    gpu: str
    """The begin of its UUID, `GPU-5db0a814`; `node` for a figure of the node."""
    figure: str
    value: float
    median: float
    """The fleet's."""
    unit: str

    def words(self) -> str:
        """`dcgm.gflops 41.2 TFLOPS, fleet 52.1 (-21 %)`."""
        percent = 100 * (self.value / self.median - 1)
        return f"{self.figure} {self.value:.4g} {self.unit}, fleet {self.median:.4g} ({percent:+.0f} %)"


def write_result(extra: str, result: Result) -> str:
    """`extra` with our part replaced."""
    parts = [
        f"{result.rung} {result.outcome} GPU{'*' if result.gpu is None else result.gpu}",
        *(f"{key}={_word(text)}" for key, text in (("test", result.test), ("code", result.code)) if text),
        f"at={stamp(result.at)}",
        *(f"{key}={_word(text)}" for key, text in (("fact", result.fact), ("next", result.next)) if text),
        *(f"{key}={count}" for key, count in (("backs", result.backs), ("boots", result.boots)) if count),
        *([f"bundle={_word(result.bundle)}"] if result.bundle else []),
    ]
    return _put(extra, " ".join(parts))


def read_result(extra: str) -> Result | None:
    """Our part of Extra; None if there is none, or somebody has changed it."""
    words = _find(extra).split(" ")
    fields = dict(word.partition("=")[::2] for word in words[3:])
    try:
        rung, outcome, gpu = words[:3]
        return Result(
            rung=rung,
            outcome=outcome,
            at=read_stamp(fields["at"]),
            fact=fields.get("fact", ""),
            gpu=None if gpu == "GPU*" else int(gpu[3:]),
            test=fields.get("test", ""),
            code=fields.get("code", ""),
            next=fields.get("next", ""),
            backs=int(fields.get("backs", 0)),
            boots=int(fields.get("boots", 0)),
            bundle=fields.get("bundle", ""),
        )
    except (ValueError, KeyError):
        return None


def write_said(comment: str, said: Said) -> str:
    """`comment` with our part replaced."""
    parts = [f"ack {_word(fact)} until {stamp(until)}" for fact, until in sorted(said.acks.items())]
    return _put(comment, ", ".join(parts + ([f"was {_escape(said.was)}"] if said.was else [])))


def read_said(comment: str) -> Said:
    """What an admin said; unreadable parts are ignored."""
    acks, was = {}, ""
    for part in _find(comment).split(", "):
        words = part.split(" ")
        try:
            if words[0] == "ack" and words[2] == "until":
                acks[words[1]] = read_stamp(words[3])
            elif words[0] == "was":
                was = _unescape(part[4:])
        except (ValueError, IndexError):
            continue
    return Said(acks, was)


def write_waits(extra: str, fault: str) -> str:
    """`extra` with the fault that waits for the budget; "": none."""
    return _put(extra, " ".join(word if word == "GPU*" else _word(word) for word in fault.split()), WAITS)


def read_waits(extra: str) -> str:
    """The fault that waits for the budget, `Xid79 GPU3 L3`; "" if none waits."""
    return _find(extra, WAITS)


def write_slow(extra: str, slow: Sequence[Slow]) -> str:
    """`extra` with the slow GPUs; none: without them."""
    rows = (f"{one.gpu} {one.figure} {one.value:.4g} {one.median:.4g} {one.unit}" for one in slow)
    return _put(extra, ", ".join("".join(c if c in PLAIN else "-" for c in row) for row in rows), SLOW)


def slow_text(extra: str) -> str:
    """Our part about slow GPUs; "" if there is none."""
    return _find(extra, SLOW)


def read_slow(text: str) -> list[Slow]:
    """The rows of `slow_text`; unreadable ones are ignored."""
    found = []
    for row in text.split(", "):
        try:
            gpu, figure, value, median, unit = row.split(" ")
            found.append(Slow(gpu, figure, float(value), float(median), unit))
        except ValueError:
            continue
    return [one for one in found if one.median > 0]


def stamp(when: float) -> str:
    """`YYYY-MM-DDThh:mmZ`."""
    return time.strftime(TIME, time.gmtime(when))


def read_stamp(text: str) -> float:
    """Seconds since the epoch; raises ValueError."""
    import calendar

    return float(calendar.timegm(time.strptime(text, TIME)))


def _put(text: str, ours: str, prefix: str = PREFIX) -> str:
    """`text` with our part replaced by `ours`; removed if `ours` is empty."""
    begin = text.find(prefix)
    if begin >= 0:
        head, tail = text[:begin].rstrip(), text[begin:].partition(";")[2].strip()
        text = f"{head} {tail}".strip()
    return f"{text} {prefix}{ours};".strip() if ours else text


def _find(text: str, prefix: str = PREFIX) -> str:
    """Our part without its marks; "" if there is none."""
    begin = text.find(prefix)
    part, end, _ = text[begin + len(prefix) :].partition(";")
    return part.strip() if begin >= 0 and end else ""


def _word(text: str) -> str:
    """Only letters, digits, `.`, `_` and `-`: the text may come from a device or a user."""
    return "".join(c if c in reasons.WORD else "-" for c in text)[:40]


def _escape(text: str) -> str:
    ends = (0, len(text) - 1)
    return "".join(
        "".join(f"%{byte:02X}" for byte in c.encode()) if c in MARKS or (place in ends and c.isspace()) else c
        for place, c in enumerate(text)
    )


def _unescape(text: str) -> str:
    from urllib.parse import unquote

    return unquote(text)
