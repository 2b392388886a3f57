"""The reason that we write on a drained node: writes it, reads it, and distinguishes it from Slurm's and an admin's.

    gpuhealth:<fact> GPU<n> <rung> <state> [pci] [serial=S] [since=MM-DDThh:mmZ] [job=N] [next=RUNG] [to=RUNG]
              [tests=NAME,…] [try=N] [boots=N] [done=RUNG] [by=USER]

    claim      drained, but the budget has not confirmed it yet
    queued     the rung begins when no job is here          untested   the rung could not be done: tried again later
    running    the rung is running                          manual     the rung is off here: an admin must do it
    pass       fit; an admin gives it back                  fail       not fit; `next` follows, or it is the end

`sinfo -R` shows 20 columns of it, slurmdbd keeps 255 bytes, and a newline, `"` or `|` breaks programs that read it.
If a text begins like ours but does not read back exactly, somebody has changed it: it is an admin's.
"""

from __future__ import annotations

from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Literal

    Owner = Literal["us", "slurm", "admin", "none"]

PREFIX = "gpuhealth:"
MAX_FACT = 20 - len(PREFIX)
"""So that a fact fits into the 20 columns of `sinfo -R`: `gpuhealth:Xid79 GPU3`."""
MAX_BYTES = 255
STATES = ("claim", "queued", "running", "pass", "fail", "manual", "untested")
WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
ON_REQUEST = ("asked", "sweep", "suspect")
"""Facts of holds that were not caused by a fault."""
HEX = frozenset("0123456789abcdef")
MAX_USER = 64
MAX_TESTS = 32
TESTS = WORD | {","}

SLURM_OWN = frozenset({
    # slurmctld's and slurmd's texts, as found in the programs of 22.05.8 and the sources of later releases.
    "Not responding", "Prolog error", "Epilog error", "Kill task failed", "batch job complete failure",
    "Duplicate jobid", "Low CPUs", "Low RealMemory", "Low TmpDisk", "Low socket*core*thread count", "Bad core count",
    "NO NETWORK ADDRESS FOUND", "Node unexpectedly rebooted", "ResumeTimeout reached", "Scheduled reboot",
    "Reboot ASAP", "Powered down", "Powered down after SuspendTimeout", "Powered down after resume",
    "reboot requested", "reboot issued", "reboot complete", "reboot timed out",
})  # fmt: skip
SLURM_SHAPES = (
    # Texts with numbers in them: beginning, end.
    ("Low RealMemory (reported:", "of configured:#)"),
    ("gres/", " count reported lower than configured (# < #)"),
    ("gres/", " count too low (# < #)"),
    ("gres/", " count changed and jobs are using them (# != #)"),
)
EXPLAINED = ("Prolog error", "Epilog error", "Kill task failed", "batch job complete failure", "gres/")
"""Slurm's reasons that a GPU fault can cause: a failed hook, a process that can't be killed, a lost GPU."""
SLURM_TAILS = ("reboot requested", "reboot issued", "reboot complete", "reboot timed out", "Reboot ASAP")


@frozen
class Reason:
    """Why we hold a node. `write` raises ValueError for values that do not fit the format."""

    fact: str
    """`Xid79`, `memory`, `asked`: at most 10 of letters, digits, `.`, `_` and `-`."""
    gpu: int | None
    """NVML's index, as in nvidia-smi; None for the whole node (`GPU*`)."""
    rung: str
    state: str
    pci: str = ""
    """Lower case `dddd:bb:dd`."""
    serial: str = ""
    since: str = ""
    """UTC, `MM-DDThh:mmZ` (`stamp`)."""
    job: int | None = None
    next: str = ""
    to: str = ""
    """Up to which rung somebody asked for tests even if nothing is found."""
    tests: str = ""
    """Other tools' tests that somebody asked for: names of `[[test]]` with commas between them, or `all`."""
    attempt: int = 1
    """The number of this try of the rung; written from the second on."""
    boots: int = 0
    """How often our ladder has rebooted the node for this."""
    done: str = ""
    """The highest rung that somebody has done by hand for this."""
    by: str = ""
    """The user who asked: any text; written percent-encoded and cut to 64 bytes."""
    node: bool = False
    """The fault concerns no GPU: `node` is written instead of `GPU*`."""
    tail: tuple[str, ...] = ()
    """What Slurm has appended: ("reboot issued", "reboot complete"). Read, never written."""


def write(reason: Reason) -> str:
    """The line for `scontrol update ... reason=`, at most 255 bytes. Raises ValueError, which names the bad field."""
    for name, good in _checks(reason).items():
        if not good:
            raise ValueError(f"a reason's {name} can't be {getattr(reason, name)!r}")
    parts = [
        PREFIX + reason.fact,
        which(reason),
        reason.rung,
        reason.state,
        reason.pci and f"{reason.pci}.0",
        reason.serial and f"serial={reason.serial}",
        reason.since and f"since={reason.since}",
        "" if reason.job is None else f"job={reason.job}",
        reason.next and f"next={reason.next}",
        reason.to and f"to={reason.to}",
        reason.tests and f"tests={reason.tests}",
        f"try={reason.attempt}" if reason.attempt > 1 else "",
        f"boots={reason.boots}" if reason.boots else "",
        reason.done and f"done={reason.done}",
        reason.by and f"by={_escape(reason.by)}",
    ]
    return " ".join(part for part in parts if part)


def which(reason: Reason) -> str:
    """`GPU3`, `GPU*`, or `node` if it concerns no GPU."""
    return "node" if reason.node else f"GPU{'*' if reason.gpu is None else reason.gpu}"


def parse(text: str) -> Reason | None:
    """Our reason, with what Slurm appended; None if it is not ours or not as we wrote it."""
    ours, *tail = text.split(" : ")
    words = ours.split(" ")
    if not ours.startswith(PREFIX) or len(words) < 4 or not all(part in SLURM_TAILS for part in tail):
        return None
    node = words[1] == "node"
    gpu = "*" if node else words[1][3:]
    fields: dict[str, str] = {}
    for word in words[4:]:
        key, equals, value = word.partition("=")
        fields.update({key: value} if equals else {"pci": word[:-2]})
    job, attempt, boots = (fields.pop(key, "") for key in ("job", "try", "boots"))
    try:
        reason = Reason(
            words[0][len(PREFIX) :], None if gpu == "*" else int(gpu), words[2], words[3],
            **{**fields, "by": _unescape(fields.get("by", ""))}, job=int(job) if job else None,
            attempt=int(attempt or 1), boots=int(boots or 0), node=node, tail=tuple(tail),
        )  # fmt: skip
        # It must be exactly what we would write: nobody has removed, doubled, reordered or added anything.
        return reason if write(reason) == ours else None
    except (ValueError, TypeError):
        return None


def fact(source: str, code: str) -> str:
    """A finding's name, short enough for `sinfo -R`: `Xid79`, `SXid12028`, `row-remap`."""
    names = {"xid": f"Xid{code}", "sxid": f"SXid{code}"}
    text = "".join(c if c in WORD else "-" for c in names.get(source, code))
    return text[:MAX_FACT].strip("-._") or source[:MAX_FACT]


def stamp(now: float) -> str:
    """`MM-DDThh:mmZ` of seconds since the epoch."""
    from time import gmtime, strftime

    return strftime("%m-%dT%H:%MZ", gmtime(now))


def owner(base: str, flags: Container[str], text: str) -> Owner:
    """Who took the node out: we, Slurm, an admin, or nobody (it is in service).

    `base` and `flags` are Slurm's (`IDLE`, {`DRAIN`}). A DOWN without a drain is ours only if our reboot caused it. A
    drain without a reason is an admin's (only an API can make one).
    """
    ours = parse(text)
    if "FAIL" in flags:
        return "admin"
    if "DRAIN" in flags:
        return "us" if ours else "slurm" if is_slurms(text) else "admin"
    if base == "DOWN":
        return "us" if ours and ours.tail else "slurm" if is_slurms(text) else "admin"
    return "none"


def is_slurms(text: str) -> bool:
    """Whether Slurm itself wrote this reason, alone or joined: `Low socket*core*thread count, Low CPUs`."""
    pieces = [piece for part in text.split(" : ") for piece in part.split(", ")]
    return bool(text) and all(piece in SLURM_OWN or _shaped(piece) for piece in pieces)


def explains(text: str) -> bool:
    """Whether a GPU fault may have made Slurm write this reason. Then our reason may replace it."""
    return is_slurms(text) and text.startswith(EXPLAINED)


def _checks(reason: Reason) -> dict[str, bool]:
    date = "".join("9" if c.isdigit() and c.isascii() else c for c in reason.since)
    return {
        "fact": 0 < len(reason.fact) <= MAX_FACT and WORD.issuperset(reason.fact),
        "gpu": reason.gpu is None or (0 <= reason.gpu < 10000 and not reason.node),
        "rung": reason.rung in RUNGS,
        "state": reason.state in STATES,
        "pci": not reason.pci or _is_pci(reason.pci),
        "serial": len(reason.serial) <= 32 and WORD.issuperset(reason.serial),
        "since": not date or date == "99-99T99:99Z",
        "job": reason.job is None or 0 < reason.job < 1 << 64,
        "next": not reason.next or reason.next in RUNGS,
        "to": not reason.to or reason.to in RUNGS,
        "tests": len(reason.tests) <= MAX_TESTS and TESTS.issuperset(reason.tests),
        "attempt": 0 < reason.attempt < 100,
        "boots": 0 <= reason.boots < 100,
        "done": not reason.done or reason.done in RUNGS,
    }


def _is_pci(text: str) -> bool:
    parts = text.split(":")
    sizes = tuple(len(part) for part in parts)
    return len(parts) == 3 and 4 <= sizes[0] <= 8 and sizes[1:] == (2, 2) and all(HEX.issuperset(p) for p in parts)


def _shaped(piece: str) -> bool:
    """Whether `piece` has one of SLURM_SHAPES: `#` stands for a number; between beginning and end is one word."""
    plain = "".join("#" if c.isdigit() else c for c in piece)
    while "##" in plain:
        plain = plain.replace("##", "#")
    return any(
        plain.startswith(begin)
        and plain.endswith(end)
        and (begin != "gres/" or " " not in plain[len(begin) : -len(end)])
        for begin, end in SLURM_SHAPES
    )


def _escape(text: str) -> str:
    """Percent-encode all but letters, digits, `.`, `_`, `-`, as UTF-8; cut between characters."""
    out = ""
    for c in text:
        code = c if c in WORD else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "replace"))
        if len(out) + len(code) > MAX_USER:
            break
        out += code
    return out


def _unescape(text: str) -> str:
    from urllib.parse import unquote

    return unquote(text, errors="strict") if "%" in text else text
