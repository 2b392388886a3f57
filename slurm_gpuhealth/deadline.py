"""When this program must be done: a hook says it once, and each child, wait and lock keeps to it.

slurmd ends a prolog or an epilog that takes too long, and drains a good node. What does not fit is not begun.
"""

from __future__ import annotations

import time

ends = float("inf")
"""Monotonic time; infinite but in a hook."""


def left() -> float:
    """Seconds until then."""
    return ends - time.monotonic()
