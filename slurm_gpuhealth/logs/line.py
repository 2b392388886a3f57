"""Splits a line of a job's log into rank, host, GPU and time on one side and the message itself on the other."""

from __future__ import annotations

import calendar
import re
from typing import NamedTuple

LENGTH = 500
ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,16}[ -/]?[@-~]|\][^\x07\x1b]{0,200}\x07?)")
ISO = re.compile(r"\b(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
HOST = r"[A-Za-z][A-Za-z0-9_.-]{0,62}"
IP = r"\d{1,3}(?:\.\d{1,3}){3}"
# Prefixes that launchers and loggers put before a line. Each is removed; some give a rank or a host.
PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # the first KEY patterns tell which process wrote the line
        r"\[rank(?P<rank>\d{1,6})\]:? ?",  # PyTorch
        r"\[default(?P<local>\d{1,3})\]:? ?",  # torchrun --tee
        r"\[\d{1,9},(?P<rank>\d{1,6})\]<std(?:err|out)>:? ?",  # mpirun --tag-output
        r"\([A-Za-z][\w.:<>-]{0,60} (?:rank=(?P<rank>\d{1,6}) )?pid=\d+(?:, ip=(?P<host>[\w.:-]{1,64}))?\) ?",  # Ray
        r"(?P<rank>\d{1,6}): ",  # srun --label
        r"\[(?P<rank>\d{1,6})\]:? ?(?=[A-Za-z\[ ])",  # mpiexec -l, MPICH
        r"\[?[Rr]ank[ :_]?(?P<rank>\d{1,6})\]?[:,]? ",
        rf"(?P<host>{HOST}):\d{{1,8}}:\d{{1,8}} \[(?P<gpu>\d{{1,2}})\] ",  # NCCL
        rf"\[(?P<host>{HOST}):\d{{1,8}}(?::\d+:\d+)?\] ",  # Open MPI, UCX
        r"\[?20\d\d[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?[\]:,]? ?(?:- ?)?",
        r"\[[A-Z]\d{3,4} \d\d:\d\d:\d\d\.\d{1,9} [^\]]{0,80}\] ?",  # glog in PyTorch
        r"\[\d{1,8}\] ?(?=\[)",
        r"\[ {0,8}\d{1,9}\.\d{6}\] ",  # the kernel's clock
        r"(?:kernel|python\d?|slurm_script): ",
        r"\[?(?:ERROR|Error|error|WARNING|INFO|CRITICAL|FATAL|E|W|F)\]?[:|] ?(?=\S)",
        # pdsh, clush, DeepSpeed
        rf"(?P<host>(?!(?:epoch|step|iter|iteration|rank|gpu|cuda|task|worker|fold|layer|device|line|exit)){HOST}?\d"
        r"(?:\.[a-z][\w.-]{0,60})?): ",
    )
)
RANK = re.compile(r"\b[Rr]ank[ :=]{1,3}(\d{1,6})\b|\b[Rr]ank(\d{1,6})\b|\brank      : (\d{1,6})")
GPU = re.compile(r"\b(?:GPU|cuda:|[Dd]evice:? |local_rank[:=] ?)#? ?(\d{1,2})\b(?![:.]\w)")
SRUN = re.compile(rf"(?:srun|slurmstepd)[\w-]*: error: ({HOST}): tasks? (?:(\d{{1,6}}):)?")
ON = re.compile(
    rf"\*\*\* (?:JOB|STEP) \S+ (?:ON|on) ({HOST}) |[Nn]ode failure on ({HOST})|\bon node ({HOST})\b"
    rf"|\bnode[:=]? ({HOST}\d)[,.]?(?:\s|$)|^\s*host +: ({HOST})"
)
PEER = re.compile(
    r"(?:from peer|remote peer|[Cc]onnect(?:ion)? (?:to|from|with|closed by)|recv from|send to|peer) "
    rf"\[?({IP}|{HOST}\d[\w.-]{{0,40}})\]?[<:,\s]"
)
ITERATION = re.compile(r"\b(?:iteration|iter|global_step|step)[ #:=]{1,12}(\d{1,12})\b", re.I)

# Who died, in the words of another: Ray's head, Open MPI's mpirun, the leader of JAX's processes. A word may stand in
# the lines after the message.
DEAD = re.compile(
    rb"node name: ([\w.-]{1,63}) has been marked dead"
    rb"|and (?:address|ip): ([\w.:-]{1,63}) has been marked dead"
    rb"|Worker IP address: ([\w.:-]{1,63})"
    rb"|Remote daemon *: \[\[[\d,]{1,20}\],\d{1,9}\] on node ([\w.-]{1,63})"
    rb"|located on node:\s{1,20}hostname: {1,9}([\w.-]{1,63})"
    rb"|task:(\d{1,6}) heartbeat timeout|Communication error with rank (\d{1,6})"
    rb"|(?:stopped sending heartbeats\):|imed out task names:)\s{0,9}/job:\w{1,63}(?:/replica:\d{1,6})?/task:(\d{1,6})"
)


KEY = 6
# The prefixes by the first character of a line, so that only a few are tried.
SQUARE = tuple(prefix for prefix in PREFIXES if prefix.pattern.startswith(("\\[", "(?P<rank>", "\\[?")))
DIGIT = tuple(prefix for prefix in PREFIXES if prefix.pattern.startswith(("(?P<rank>", "\\[?20")))
ROUND = tuple(prefix for prefix in PREFIXES if prefix.pattern.startswith("\\("))
LETTER = tuple(prefix for prefix in PREFIXES if prefix.pattern.startswith(("(?P<host>", "\\[?", "(?:")))


class Line(NamedTuple):
    message: str
    """Without prefixes."""
    shown: str
    rank: int | None
    host: str | None
    gpu: int | None
    time: float | None
    peer: str | None


def read(raw: bytes) -> Line:
    """`raw` is one line of at most a few thousand bytes."""
    text = raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = ANSI.sub("", text)
    text = text.strip()
    said: dict[str, str] = {}
    rest = text[:2000]
    for _ in range(6):
        first = rest[:1]
        some = SQUARE if first == "[" else DIGIT if first.isdigit() else ROUND if first == "(" else LETTER
        for prefix in some:
            found = prefix.match(rest)
            if found and found.end() < len(rest):
                said.update((key, value) for key, value in found.groupdict().items() if value and key not in said)
                rest = rest[found.end() :]
                break
        else:
            break
    head = text[:LENGTH]
    rank, gpu, host = said.get("rank"), said.get("gpu") or said.get("local"), said.get("host")
    if "error: " in head:
        found = SRUN.search(head)
        if found:
            host, rank = found[1], rank or found[2]
    if rank is None and "ank" in head:
        found = RANK.search(head)
        rank = found and (found[1] or found[2] or found[3])
    if gpu is None and ("GPU" in head or "cuda:" in head or "evice" in head or "local_rank" in head):
        found = GPU.search(head)
        gpu = found and found[1]
    if host is None and ("ode" in head or "***" in head or "host" in head):
        found = ON.search(head)
        host = next((one for one in found.groups() if one), None) if found else None
    peer = PEER.search(head) if "eer" in head or "onnect" in head or "recv from" in head or "send to" in head else None
    shown = head if head.isprintable() else "".join(c if c.isprintable() else "?" for c in head)
    return Line(rest, shown, int(rank) if rank else None, host, int(gpu) if gpu else None, when(text), peer and peer[1])


def dead(block: bytes, start: int, end: int) -> tuple[str | None, int | None] | None:
    """Host and rank of the process that a message between `start` and `end` says has died; None if it names none."""
    found = DEAD.search(block, start, end)
    if not found:
        return None
    host, rank = (next(filter(None, some), b"").decode() for some in (found.groups()[:5], found.groups()[5:]))
    return host or None, int(rank) if rank else None


def when(text: str) -> float | None:
    """Seconds since the epoch, if the line has a full date. Without a time zone the time is read as UTC."""
    found = ISO.search(text, 0, 200) if "20" in text else None
    if not found:
        return None
    year, month, day, hour, minute, second = (int(found[one]) for one in range(1, 7))
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    zone = found[8] or "Z"
    offset = 0 if zone == "Z" else (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 60 + int(zone[-2:])) * 60
    return calendar.timegm((year, month, day, hour, minute, second)) + float(f"0.{found[7] or 0}") - offset
