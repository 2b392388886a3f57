"""gpuhealth explain --log: what a job died of, from its log files. Needs neither Slurm nor the cluster's record."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import stat
from typing import TYPE_CHECKING

import click

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.correlate import words
from slurm_gpuhealth.logs import read as logs
from slurm_gpuhealth.logs.reading import to_dict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_gpuhealth.outcomes import Cited, Reading

SHOWN = 8
MEANT = {
    "node": "The log points to hardware. It can't prove it: test the node.",
    "unknown": "The log does not show the cause.",
}


def explain_log(files: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """Print what the files of one job say. A click error names an unreadable file, or says that time ran out."""
    try:
        with deadline(timeout):
            for name in files:
                _refuse_endless(name)
            reading = logs.read_files(files)
    except TimeoutError:
        names = " ".join(map(click.format_filename, files))
        raise click.ClickException(
            f"{names}: not read to the end in {timeout:g} s. Give more time (--timeout), or only the end:"
            " tail -c 50M FILE | gpuhealth explain --log -"
        ) from None
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else files[0]
        raise click.ClickException(f"{click.format_filename(name)} can't be read: {error.strerror}.") from None
    if as_json:
        click.echo(json.dumps(to_dict(reading)))
        return
    for line in told(reading, files):
        click.echo(common.safe(line))


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a body that takes longer: a huge file, or a pipe with a silent writer."""

    def over(*_: object) -> None:
        for process in multiprocessing.active_children():  # each reads a part of a file
            process.kill()
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _refuse_endless(name: str) -> None:
    """A FIFO or device that a user put in place of a log may never end. The shell's pipes, `<(zcat x.gz)`, do."""
    if name == "-" or name.startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin")):
        return
    mode = os.stat(name).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "not a regular file; for a pipe: cat it into gpuhealth explain --log -", name)


def told(reading: Reading, files: tuple[str, ...]) -> list[str]:
    """A reading for people: verdict, the line it rests on, the victims, what to do."""
    cause, evidence = reading.cause, list(reading.evidence)
    if cause is None and not reading.flight:
        return ["The log shows no failure: the job ended well, was killed without a message, or the log is cut short."]
    sure = f"Confidence {words.sure(reading.confidence)} ({reading.confidence:.2f})."
    if cause is None or (reading.flight and reading.error == f"collective {reading.flight.found}"):
        said = evidence.pop(0)
        lines = [f"{said[:1].upper()}{said[1:]}. {sure}"]
    else:
        lines = [MEANT.get(reading.verdict, f"It died of {words.CAUSE[reading.verdict]}.") + f" {sure}"]
    if cause:
        lines += [f"  {_line(cause)}{f' of {files[0]}' if len(files) == 1 else ''}: {cause.text}"]
        place = _place(cause)
        lines += [f"  {place}"] if place else []
    if reading.frame:
        lines.append(f"  in the user's code: {reading.frame}")
    lines += [f"  for: {sentence}" for sentence in evidence]
    if reading.hosts:
        lines.append(f"  singled out: {', '.join(reading.hosts)}")
    if reading.collateral:
        lines.append("  What followed (victims, not causes):")
        lines += [f"    {_line(one)}: {one.text[:140]}" for one in reading.collateral[:SHOWN]]
        if reading.collateral[SHOWN:]:
            lines.append(f"    and {len(reading.collateral) - SHOWN} more")
    return [*lines, f"  What to do: {reading.advice}"] if reading.advice else lines


def _line(cited: Cited) -> str:
    return f"line {cited.line}" if cited.line else "a line after a part that was not read"


def _place(cited: Cited) -> str:
    said = [
        f"rank {cited.rank}" if cited.rank is not None else "",
        f"on {cited.host}" if cited.host else "",
        f"GPU {cited.gpu}" if cited.gpu is not None else "",
    ]
    return ", ".join(one for one in said if one)
