"""Dumps of PyTorch's flight recorder, as PyTorch writes them: pickles of protocol 2 (pickler.cpp), or JSON.

The fields and their order: FlightRecorder.hpp and FlightRecorderDetail.hpp; before 2.4 TraceUtils.h.
"""

from __future__ import annotations

import collections
import json
import struct
from typing import Any

BEGAN = 1_795_000_000_000_000_000
"""Nanoseconds: when the program in these dumps called its first collective."""
STEP = 20_000_000
FRAMES = tuple(
    {"name": f"layer_{number}", "filename": f"/home/u/model/part_{number % 7}.py", "line": 40 + 13 * number}
    for number in range(16)
)


def pickled(value: object) -> bytes:
    """As `c10d::pickle_str`: each text is written once and then fetched from the memo; so is a dict that is shared."""
    out, memo = bytearray(b"\x80\x02"), dict[object, int]()
    entries = value["entries"] if isinstance(value, dict) else []
    shared = collections.Counter(id(frame) for one in entries for frame in one.get("frames", ()))

    def put(key: object) -> None:
        memo[key] = number = len(memo)
        out.extend(b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))

    def known(key: object) -> bool:
        if key in memo:
            number = memo[key]
            out.extend(b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number))
        return key in memo

    def save(one: Any) -> None:
        if one is None:
            out.extend(b"N")
        elif isinstance(one, bool):
            out.extend(b"\x88" if one else b"\x89")
        elif isinstance(one, int):
            short = 0 <= one < 256, 0 <= one < 65536, -(2**31) <= one < 2**31
            form = (
                (("<sB", b"K"), ("<sH", b"M"), ("<si", b"J"))[short.index(True)]
                if any(short)
                else ("<2sq", b"\x8a\x08")
            )
            out.extend(struct.pack(form[0], form[1], one))
        elif isinstance(one, float):
            out.extend(b"G" + struct.pack(">d", one))
        elif isinstance(one, str):
            if not known(one):
                out.extend(b"X" + struct.pack("<I", len(one.encode())) + one.encode())
                put(one)
        elif isinstance(one, tuple):
            for part in one:
                save(part)
            out.extend(b"\x86")
        elif isinstance(one, list):
            out.extend(b"](")
            for part in one:
                save(part)
            out.extend(b"e")
        elif not known(id(one)):
            out.extend(b"}(")
            for key, part in one.items():
                save(key)
                save(part)
            out.extend(b"u")
            if shared.get(id(one), 0) > 1:
                put(id(one))

    save(value)
    put(None)
    return bytes(out + b".")


def entry(
    version: str,
    record: int,
    seq: int,
    op: str = "all_reduce",
    *,
    group: tuple[str, str] = ("0", "default_pg"),
    state: str = "completed",
    sizes: list[list[int]] | None = None,
    p2p: int = 0,
    time: int | None = None,
) -> dict[str, Any]:
    """One entry of the ring."""
    created = BEGAN + record * STEP if time is None else time
    sizes = [[4096, 1024]] if sizes is None else sizes
    minor = int(version.partition(".")[2])
    ended = created + STEP // 2 if state == "completed" else None
    found = {
        "frames": list(FRAMES),
        "record_id": record,
        "pg_id": int(group[0]) if group[0].isdigit() else 7,
        "process_group": group,
        "thread_name": "pt_main_thread",
        "thread_id": "139872",
        "collective_seq_id": seq,
        "p2p_seq_id": p2p,
        "op_id": record + 1,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": created,
        "input_sizes": sizes,
        "input_dtypes": ["BFloat16"] * len(sizes),
        "output_sizes": sizes,
        "output_dtypes": ["BFloat16"] * len(sizes),
        "state": state,
        "time_discovered_started_ns": created + STEP // 4 if state != "scheduled" else None,
        "time_discovered_completed_ns": ended,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": bool(p2p),
    }
    if minor < 10:
        del found["thread_name"], found["thread_id"]
    if minor < 4:
        del found["timeout_ms"]
    if minor < 3:
        found["frames"] = found.pop("frames")  # the last one
    return found


def dump(
    version: str, entries: list[dict[str, Any]], groups: dict[str, tuple[str, list[int]]], form: str = "pickle"
) -> bytes:
    """The file of one rank. `groups`: name → its description and its ranks."""
    minor = int(version.partition(".")[2])
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()}
    last = entries[-1]["collective_seq_id"] if entries else -1
    kinds = "last_enqueued_collective", "last_started_collective", "last_completed_collective"
    status = {"0": {kind: str(last) if form == "json" else last for kind in kinds}}
    head: dict[str, Any] = {"version": version, "pg_config": config}
    if minor >= 3:
        head["pg_status"] = status
    if minor >= 5:
        head["nccl_version" if minor < 10 else "comm_lib_version"] = "2.21.5"
    whole = {**head, "entries": entries} if minor >= 3 else {"entries": entries, **head}
    if form == "json":  # nlohmann::json sorts its keys; it has no frames, and 0 for no time
        rows = [
            {key: 0 if value is None else value for key, value in one.items() if key != "frames"} for one in entries
        ]
        return json.dumps({**whole, "entries": rows}, sort_keys=True, separators=(",", ":")).encode()
    return pickled(whole)
