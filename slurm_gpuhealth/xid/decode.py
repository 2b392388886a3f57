"""Kernel log text → events, from any source: /dev/kmsg, dmesg in any time format, journalctl, syslog, bare messages.

    >>> [(e.line, e.code, e.pci) for e in decode(["[ 12.3] NVRM: Xid (PCI:0000:3B:00): 79, GPU has fallen off"])]
    [(1, 79, '0000:3b:00')]

Only /dev/kmsg proves that the kernel wrote a line (facility 0). In a text log the line's stamp decides: a line that a
program logged under another name than `kernel` is not read, and neither is text that merely contains such a line.
"""

from __future__ import annotations

import json
import re

from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.xid import lines as forms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slurm_gpuhealth.xid.event import Event

REACH = 16
"""An event waits this many lines for its further lines: messages of other CPUs come in between."""

LENGTH = 4096
"""The kernel never writes a longer line; a longer one is hostile."""

KMSG = re.compile(r"(\d+),\d+,(\d+),[^;]*;", re.A)  # Documentation/ABI/testing/dev-kmsg: prio, seq, usec, flags
RING = r"\[\s*(?P<{}>\d+\.\d+)(?:\s*<\s*[\d.]+>)?\]\s*"
CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
HOST = r"(?:\S+ )?kernel(?:\[\d*\])?: "
STAMP = re.compile(
    r"(?:<[0-7]>)?(?:kern\s*:[a-z]+\s*:\s?)?"  # dmesg -r: <4>, facility 0; dmesg -x: `kern  :warn  : `
    r"(?:"
    + RING.format("ring")
    + rf"(?:{HOST})?"  # dmesg; journalctl -o short-monotonic
    + r"|\[(?=[^\]]*\d)[^\]\[]{4,60}\]\s*"  # dmesg -T, -d, -H
    + rf"|\d{{4}}-\d\d-\d\d[T ]{CLOCK}(?:\s?(?:Z|[+-]\w{{1,2}}:?\w{{2}}))?\s+(?:{HOST})?"  # ISO
    # syslog and journalctl: a date in any language, `jan. 29`, `29 janv.`, ` 1月 29`, `Fri 2024-08-30`
    + rf"|(?:\S{{1,12}}\s+){{0,3}}{CLOCK}(?:\s\d{{4}})?(?:\s[A-Z]{{2,5}})?\s+{HOST}"
    + rf"|\d{{9,}}\.\d+\s+{HOST}"  # journalctl -o short-unix
    + r"|1 \d{4}-\S{10,40} \S+ kernel \S+ \S+ (?:-|\[[^\]]*\]) "  # RFC 5424
    + r"|\S{1,80}: kern: +\w+: \[[^\]\[]{4,60}\]: "  # talosctl dmesg
    + rf"|{HOST})?"
    + r"(?:<[0-7]>)?(?:"
    + RING.format("inner")
    + r")?(?:\[\s*[TC]\d+\]\s*)?"  # a second stamp after `kernel:`; the caller's task or CPU
)
# The one message that the driver prints over several lines. Its newlines arrive escaped or as separate lines.
COLOUR = re.compile(r"\x1b\[[\d;]{0,16}m|^\ufeff")  # dmesg --color; a byte order mark
NEWLINE = re.compile(r"\\x0a|#012|\n\s*")


def decode(lines: Iterable[str]) -> Iterator[Event]:
    """The events in `lines`, in input order. An event includes its further lines."""
    held: list[Event] = []
    for number, text, uptime, stamped in _messages(lines):
        while held and number - held[0].line > REACH:
            yield from _done(held.pop(0))
        if text.startswith("NVRM: The NVIDIA GPU "):
            text = NEWLINE.sub(" ", text)
        event = forms.read(text, number, uptime, stamped != "")
        if event is None or (stamped == "kmsg" and event.kind == "xid" and event.pci is None):
            continue  # the driver itself never leaves the address out
        for i in range(len(held) - 1, -1, -1) if event.part else ():
            whole = _join(held[i], event)
            if whole:
                held[i] = whole
                break
        else:
            if held or event.word == "gone-head" or event.kind in ("aer", "sxid"):
                held.append(event)
            else:
                yield event
    for event in held:
        yield from _done(event)


def _messages(lines: Iterable[str]) -> Iterator[tuple[int, str, float | None, str]]:
    """Every line that the kernel may have written: number, text without stamp, uptime, and the kind of stamp ("kmsg",
    "log" or "")."""
    stamped = False
    for number, line in enumerate(lines, 1):
        line = _journal(line) if line.startswith("{") else line[:LENGTH].rstrip("\r\n")
        if "\x1b" in line or line[:1] == "\ufeff":
            line = COLOUR.sub("", line)
        record = KMSG.match(line)
        if record:
            stamped = True
            if int(record[1]) >> 3 == 0:
                yield number, line[record.end() :], int(record[2]) / 1e6, "kmsg"
            continue
        bare = line.lstrip()
        stamp = STAMP.match(bare)
        if stamp is None:
            continue
        text = bare[stamp.end() :]
        if bare != line and not stamp.end() and stamped:
            # The rest of the message above, or a dictionary of /dev/kmsg. So a path with a newline can't forge a line.
            if not text.startswith(("NVRM: (PCI ID:", "NVRM: fallen off the bus", "NVRM: installed in this system")):
                continue
        else:
            stamped = stamp.end() > 0
        seconds = stamp["ring"] or stamp["inner"]
        yield number, text, float(seconds) if seconds else None, "log" if stamp.end() else ""


def _journal(line: str) -> str:
    """The message of a `journalctl -o json` record, if the kernel wrote it; else empty."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    message = record.get("MESSAGE") if record.get("_TRANSPORT") == "kernel" else None
    return message[:LENGTH] if isinstance(message, str) else ""


def _join(event: Event, part: Event) -> Event | None:
    """`event` with what its further line `part` adds; None if `part` belongs to another event."""
    if part.kind == "sxid" and event.kind == "sxid" and (event.code, event.pci) == (part.code, part.pci):
        return replace(event, details={**part.details, **event.details})
    if part.kind == "aer" and event.kind == "aer" and part.pci in (event.pci, event.details.get("source")):
        if part.word != "detail" and "layer" in event.details:
            return None  # the same port's next error
        return replace(
            event,
            fatal=event.fatal if part.fatal is None else part.fatal,
            word=event.word if part.word == "detail" or event.word == "fatal" else part.word,
            meaning=event.meaning + (f": {part.details['name']}" if part.details.get("name") else ""),
            message=f"{event.message}; {part.message.strip()}"[:400],
            details={**event.details, **part.details},
        )
    if part.kind == "fallen_off_bus" and event.word == "gone-head":
        return replace(part, line=event.line, pci=event.pci, part=False, uptime=event.uptime)
    return None


def _done(event: Event) -> Iterator[Event]:
    """What is printed when no more lines can come."""
    yield replace(event, word="other") if event.word == "gone-head" else event
