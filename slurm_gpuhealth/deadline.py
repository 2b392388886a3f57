"""When this program must be done. A hook sets it once; each child, wait and lock respects it.

slurmd ends a prolog or an epilog that takes too long, and drains a good node. A step that does not fit is not begun.
"""

from __future__ import annotations

import time

ends = float("inf")
"""Monotonic time; infinite except in a hook."""


def left() -> float:
    """Seconds until then."""
    return ends - time.monotonic()
