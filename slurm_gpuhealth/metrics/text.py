"""Prometheus' text format, by hand: its client library takes longer to import than the whole health check."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.metrics.table import Table

    Samples = Mapping[str, Mapping[tuple[object, ...], float]]
    """Metric → the values of its labels, in the table's order → value."""


def render(table: Table, samples: Samples) -> str:
    """The metrics of `table` that have samples. A float has digits enough for a time in microseconds."""
    lines = []
    for name, (kind, labels, says, _) in table.items():
        rows = samples.get(name)
        if not rows:
            continue
        lines += [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
        for values, number in rows.items():
            given = ",".join([f'{label}="{_escape(str(value))}"' for label, value in zip(labels, values)])
            lines.append(f"{name}{{{given}}} {number}" if given else f"{name} {number}")
    return "\n".join(lines) + "\n"


def write(path: str, text: str) -> None:
    """Replace the file as a whole, readable by everybody. Raises OSError.

    The folder may belong to Prometheus: our new file follows no link that somebody has put there.
    """
    new = f"{path}.new"  # node_exporter reads only *.prom
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(new, flags, 0o600)
    except FileExistsError:  # left by a program that was killed
        os.unlink(new)
        fd = os.open(new, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
            os.fchmod(fd, 0o644)
        os.rename(new, path)
    except BaseException:
        os.unlink(new)
        raise


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
