"""One event that the kernel logged about a GPU, an NVSwitch, a PCIe port or an InfiniBand adapter."""

from __future__ import annotations

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.findings import Scalar


@frozen
class Event:
    line: int
    """1-based number of the (first) input line."""
    kind: str
    """`xid`, `sxid`, `fallen_off_bus`, `gpu_uuid`, `gpu_serial`, `aer`, `nvrm` or `mlx5`."""
    code: int | None = None
    pci: str | None = None
    """`dddd:bb:dd`, a GPU, or `dddd:bb:dd.f`, a switch, port or adapter; lower case."""
    pid: int | None = None
    process: str | None = None
    """As the user named it: hostile text."""
    mig: int | None = None
    """The GPU instance."""
    fatal: bool | None = None
    link: int | None = None
    previous: int | None = None
    """The Xid that this one follows from."""
    cls: str = "information"
    """`hardware`, `application`, `driver`, `consequence` or `information`."""
    action: str | None = None
    """NVIDIA's bucket."""
    meaning: str = ""
    message: str = ""
    """The line's text after number and process."""
    uptime: float | None = None
    """Seconds since boot by the line's own stamp."""
    part: bool = False
    """This is one of the further lines that some events have. Read alone, it still is an event."""
    word: str = ""
    """A short name for an event without a number: `gsp-timeout`, `corrected`, `link-down`."""
    count: int = 1
    """How many equal lines this event stands for, if a flood was only counted."""
    details: Mapping[str, Scalar] = {}


KEYS = (
    "line",
    "kind",
    "code",
    "pci",
    "pid",
    "process",
    "mig",
    "fatal",
    "link",
    "previous",
    "class",
    "action",
    "meaning",
)


def printed(event: Event) -> dict[str, Scalar]:
    """The event as `gpuhealth xid --json` prints it; the keys are a promise."""
    return {key: getattr(event, "cls" if key == "class" else key) for key in KEYS}
