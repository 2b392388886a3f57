"""Messages of programs that run unattended: to syslog, and to stderr, which slurmd logs for a failed hook."""

from __future__ import annotations

import sys
import syslog


def say(message: str, error: bool = False) -> None:
    """Log one line for people. Users and devices wrote parts of it, so each control character becomes `?`."""
    line = "".join(c if c.isprintable() else "?" for c in message)
    try:
        syslog.openlog("gpuhealth", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_ERR if error else syslog.LOG_WARNING, line)
        if sys.stderr:  # with None, print would use standard output
            print(f"gpuhealth: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # our parent closed stderr: syslog has the message
        sys.stderr = None  # otherwise Python tries again when it ends, and exits with 120
