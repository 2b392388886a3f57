"""What is shipped, as lines of JSON."""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Record = dict[str, Any]


def lines(batch: list[Record], before: float, there: float, after: float) -> list[bytes]:
    """The batch as lines. `there`: the store's time, taken between `before` and `after` by our clock."""
    clock = {"clock": round((before + after) / 2 - there, 3)}
    batch[0]["time"] = before
    return [json.dumps({**record, **clock}, separators=(",", ":")).encode() + b"\n" for record in batch]
