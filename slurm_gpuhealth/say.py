"""What a program that nobody watches has to say: to syslog, and to stderr, which slurmd logs for a failed hook."""

from __future__ import annotations

import sys
import syslog


def say(message: str, error: bool = False) -> None:
    """One line for people. Control characters are shown, never sent: parts of it come from users and devices."""
    line = "".join(c if c.isprintable() else "?" for c in message)
    try:
        syslog.openlog("gpuhealth", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_ERR if error else syslog.LOG_WARNING, line)
        if sys.stderr:  # None would be standard output
            print(f"gpuhealth: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # stderr closed by whoever started us: syslog has it
        sys.stderr = None  # else Python tries again at its end, and exits with 120
