"""gpuhealth xid: what an Xid or SXid means, and what a kernel log says about GPUs."""

from __future__ import annotations

import os
import re
import sys

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

CODE = re.compile(r"(s?xid)?[ :-]?(\d{1,5})", re.I)
FIRST_SXID = 10000
CHUNK = 1 << 16


@click.command()
@click.argument("what", metavar="[CODE|FILE|-]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each event; its keys stay the same.")
def xid(what: str | None, as_json: bool) -> None:
    """Explain an Xid or SXid by its number (79, sxid20034), or decode a kernel log: a file, or - for standard input.

    A log may come from dmesg in any time format, journalctl, syslog, or /dev/kmsg itself. If a file's name is a number,
    write ./79.
    """
    if what is None:
        if sys.stdin.isatty():
            raise click.UsageError("name an Xid (79), an SXid (sxid20034), a log file, or - for standard input")
        what = "-"
    code = CODE.fullmatch(what)
    if code:
        _explain(int(code[2]), (code[1] or "").lower(), as_json)
    else:
        _decode(what, as_json)


def _explain(code: int, kind: str, as_json: bool) -> None:
    from slurm_gpuhealth.xid import catalog
    from slurm_gpuhealth.xid.advise import on_sxid, on_xid

    kind = kind or ("sxid" if code >= FIRST_SXID else "xid")
    row = catalog.sxid(code) if kind == "sxid" else catalog.xid(code)
    if row is None:
        raise click.ClickException(f"{kind} {code} is not in the catalogue. Xids go to 176, SXids from 10001 to 29999.")
    cls, action, meaning, _ = on_sxid(code, None) if kind == "sxid" else on_xid(code, "", None)
    cls = {"decode": "by the line's words"}.get(row.get("class", cls), cls)
    told = {
        "code": code,
        "kind": kind,
        "name": row["name"],
        "meaning": meaning,
        "class": cls,
        "action": action,
        "advice": catalog.advice(action),
        "investigate": row.get("investigate"),
        "then": catalog.advice(row["investigate"]) if row.get("investigate") else None,
        "causes": row.get("causes"),
        "severity": row.get("severity"),
        "suspect": row.get("suspect"),
        "sources": [catalog.load(f"{kind}s")["sources"][source] for source in row["sources"]],
        "disputed": row.get("disputed"),
    }
    if as_json:
        _print_json(told)
        return
    click.echo(f"{'SXid' if kind == 'sxid' else 'Xid'} {code}: {meaning}.")
    for key, value in told.items():
        if value and key not in ("code", "kind", "meaning", "sources", "disputed", "causes"):
            click.echo(f"  {key:<12} {value}")
    if told["causes"]:
        click.echo(f"  {'causes':<12} {', '.join(told['causes'])}")
    for key in ("disputed", "sources"):
        for line in told[key] or ():
            click.echo(f"  {key:<12} {line}")


def _decode(name: str, as_json: bool) -> None:
    from slurm_gpuhealth.xid.decode import decode
    from slurm_gpuhealth.xid.event import printed
    from slurm_gpuhealth.xid.fold import harmless

    event = None
    for event in decode(_lines(name)):
        if as_json:
            _print_json(printed(event))
            continue
        what = f"{event.kind} {event.code}" if event.code is not None else f"{event.kind} {event.word}".strip()
        who = f" [{event.process or '?'}, pid {event.pid}]" if event.pid is not None else ""
        link = f" link {event.link}" if event.link is not None else ""
        where = f"{event.pci or '-'}{f' MIG {event.mig}' if event.mig is not None else ''}{link}"
        row = f"{event.line:>7}  {what:<18} {where:<24} {event.cls:<12} {event.action or '-':<20} {event.meaning}{who}"
        click.echo(harmless(row))
    if event is None and not as_json:
        click.echo("The log has no event of a GPU, NVSwitch, PCIe port or InfiniBand adapter.")


def _lines(name: str) -> Iterator[str]:
    """The lines of a file of any size; what is not UTF-8 is replaced. Click errors say what is wrong with it."""
    shown = "standard input" if name == "-" else click.format_filename(name)
    try:
        # Non-blocking: /dev/kmsg would wait for ever for the next message.
        fd = sys.stdin.fileno() if name == "-" else os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(fd, name == "-")
        rest, start = b"", True
        while chunk := _read(fd):
            if start and b"\0" in chunk:
                raise click.ClickException(f"{shown} is not text. Unpack it, or pipe it from dmesg or journalctl.")
            start = False
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
            if len(rest) > CHUNK:  # no log has such a line
                rest = rest[:CHUNK]
        if rest:
            yield rest.decode("utf-8", "replace")
    except OSError as error:
        raise click.ClickException(f"{shown} can't be read: {error.strerror}.") from None


def _read(fd: int) -> bytes:
    while True:
        try:
            return os.read(fd, CHUNK)
        except BlockingIOError:  # the end of /dev/kmsg
            return b""
        except BrokenPipeError:  # /dev/kmsg was overwritten while we read; the next read goes on
            continue


def _print_json(row: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(row))
