"""The configuration as frozen values: one class a table of gpuhealth.toml, with its defaults.

Durations are seconds, shares are fractions of 1, temperatures °C. What each key means to an admin stands in
etc/gpuhealth.toml, from which docs/configuration.md is made; a test holds the two together.
"""

from __future__ import annotations

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, NewType

    Seconds = NewType("Seconds", float)
    Share = NewType("Share", float)
    Path = NewType("Path", str)
    """Absolute; `{node}` stands for the node's name."""
    Mode = Literal["enforce", "shadow"]
    CheckMode = Literal["enforce", "shadow", "off"]


@frozen
class Paths:
    state: Path = "/var/lib/gpuhealth"  # type: ignore[assignment]
    kernel_log: Path = "/dev/kmsg"  # type: ignore[assignment]
    proc: Path = "/proc"  # type: ignore[assignment]
    sys: Path = "/sys"  # type: ignore[assignment]
