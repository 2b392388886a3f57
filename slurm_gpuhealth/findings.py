"""The vocabulary: a finding, the GPU it is about, and how bad it is. Imports nothing but `frozen`."""

from __future__ import annotations

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    Severity = Literal["info", "warning", "fault"]
    Scalar = str | int | float | bool | None

SEVERITIES = ("info", "warning", "fault")
RUNGS = ("L1", "L2", "L3", "L4", "reset", "reboot", "repair", "RMA")


@frozen
class Gpu:
    """One physical GPU: `uuid` and `pci` identify it; `index` (NVML's) and `serial` are for people."""

    uuid: str | None = None
    """`GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""
    pci: str | None = None
    """Lower case `dddd:bb:dd`, without the function."""
    index: int | None = None
    serial: str | None = None


@frozen
class Finding:
    """One observed fact about a node that may matter. The policy table decides what follows (`judge`)."""

    time: float
    """Seconds since the epoch, UTC."""
    source: str
    """Where it comes from: `xid`, `sxid`, `aer`, `nvml`, `dcgm`, `dcgm-health`, `ib`, `host`, `site`, `driver`,
    `job`."""
    code: str
    """The source's own short name for it, as the policy table and `sinfo -R` show it: `79`, `row-remap-failed`."""
    message: str
    """One line for people: the fact, the cause if known, what to do."""
    gpu: Gpu | None = None
    """None if it is about the whole node."""
    severity: Severity = "info"
    """The source's own opinion, before the policy table."""
    standing: bool = False
    """True for a condition, which is seen again until it is mended; False for an event, which happened once."""
    count: int = 1
    """How many equal events this finding stands for."""
    details: Mapping[str, Scalar] = {}
    """What policy rows may ask for (`action`, `class`, `fatal`, `link`, `test`...) and what `gpuhealth why` shows."""

    @property
    def about_gpus(self) -> bool:
        """False if it concerns only the host, /scratch for example: then a test of the GPUs proves nothing."""
        return self.gpu is not None or self.source not in ("site", "host")

    @property
    def key(self) -> str:
        """`source:code`, the name that policy rows match."""
        return f"{self.source}:{self.code}"
