"""Messages without a number: a short name and a meaning for the texts of the NVIDIA and Mellanox drivers."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    Table = tuple[tuple[str, str, str], ...]

QUIET = re.compile(  # what a healthy driver says when it is loaded or asked
    r"NVRM: +(?:loading|unloading|Persistence mode|nvidia_init|The NVIDIA driver|Dynamic|vgpu|PAT configuration"
    r"|GPU \S+: (?:PMU|Tesla|request_mem)|objClInit|nvAudio|os_dump|testIfDsm"
    r"|\(PCI ID: \S+\) installed in this system has$)",
    re.I,
)
# name, pattern of the message, meaning; the first row that is found counts
NVRM = (
    ("rate-limit", r"rate.?limit\w*|callbacks suppressed", "The driver holds messages back: events may be missing"),
    (
        "gsp-timeout",
        r"_?kgsp\w*:|heartbeat timed out|\bGSP\b.*(?:time|fail)",
        "The GPU's system processor (GSP) does not answer",
    ),
    (
        "init-failed",
        r"RmInitAdapter|rm_init_adapter|probe routine failed|None of the NVIDIA (?:graphics|devices)|not supported by",
        "The driver could not take a GPU into service",
    ),
    ("memory-subsystem", r"CheckMemSubsysError|Memory Subsystem Error", "GPU memory subsystem error"),
    ("locked-up", r"RC watchdog|probably locked|bad state", "The driver's watchdog takes a GPU for hung"),
    ("lost", r"GPU is lost|GPU_IS_LOST|lost from the bus", "The driver can no longer reach a GPU"),
    ("reset-required", r"NV_ERR_RESET_REQUIRED", "The driver refuses work until the GPU is reset"),
    ("reboot-required", r"requiring os reboot", "The driver asks for a reboot of the node"),
)
MLX = (
    ("power", r"insufficient power", "The PCIe slot gives the adapter less power than it needs"),
    ("link-down", r"link (?:is )?down\b|Link (?:POLLING|DISABLED)", "A port of the adapter lost its link"),
    ("link", r"Port: \d+ Link|link (?:is )?up\b", "A port of the adapter changed its link state"),
    (
        "command",
        r"command .*(?:fail|timeout|timed out)|cmd_|wait_func|MLX5_CMD|leak of a command",
        "The adapter's firmware refused or did not answer a command",
    ),
    (
        "module",
        r"module event\[error\]|module \d+, (?:high temp|unknown|bad|power|.*error)",
        "Cable or transceiver fault",
    ),
    ("temperature", r"temperature", "The adapter is too hot"),
    (
        "health",
        r"health|assert_|fw_ver|hw_id|irisc|synd|raw |rfr|severity|^time\b|internal error|reset|fatal",
        "The adapter's firmware reports or suffers an internal error",
    ),
)
# A message that no row knows but that sounds like trouble is shown ("other") and not judged.
TROUBLE = re.compile(r"error|fail|time(?:d )?out|module event", re.I)


def named(table: Table, message: str, beyond: int = 0) -> tuple[str, str] | None:
    """Name and meaning of the first row of `table` that matches `message` and ends after position `beyond`."""
    for name, says, meaning in table:
        found = re.search(says, message, re.I)
        if found and found.end() > beyond:
            return name, meaning
    return None
