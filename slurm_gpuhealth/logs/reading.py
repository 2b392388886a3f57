"""A log's reading as JSON and back. Every value is checked: its type, its range, and that it is printable."""

from __future__ import annotations

import json

from slurm_gpuhealth.outcomes import CAUSES, Cited, Flight, Reading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KINDS = frozenset(
    ("", "hardware", "application", "communication", "infrastructure", "user", "memory", "crash", "numeric", "thermal")
)


FOUND = frozenset(("", "absent", "mismatch", "stuck", "circle", "unclear"))


def to_dict(reading: Reading) -> dict[str, Any]:
    """As JSON has it. Without dumps there is no `flight`: older versions refuse keys that they don't know."""
    cause = reading.cause and reading.cause._asdict()
    row = {**reading._asdict(), "cause": cause, "collateral": [one._asdict() for one in reading.collateral]}
    flight = row.pop("flight")
    return {**row, "flight": flight._asdict()} if flight else row


def from_dict(row: dict[str, Any]) -> Reading:
    """The Reading that `to_dict` wrote. Raises TypeError for anything else."""
    reading = Reading(**row)
    return reading._replace(
        cause=Cited(**row["cause"]) if row.get("cause") else None,
        collateral=tuple(Cited(**one) for one in row.get("collateral") or ()),
        hosts=tuple(reading.hosts),
        evidence=tuple(reading.evidence),
        flight=Flight(**row["flight"]) if row.get("flight") else None,
    )


def read_reading(text: str) -> Reading | None:
    """A log's reading from JSON; None if it is not one. A node wrote it, so each value is checked: otherwise one odd
    row would make every run fail."""
    try:
        return validated(json.dumps(to_dict(from_dict(json.loads(text)))).encode())
    except (ValueError, TypeError, AttributeError, RecursionError, NotALog):
        return None


class NotALog(Exception):
    """The file exists but is not this job's log; the text says why."""


def validated(answer: bytes) -> Reading | None:
    """A child's answer as a Reading. The child runs with the user's rights, so every value is checked: its type, its
    range, and that it is printable. Raises ValueError; NotALog in the child's own words."""
    try:
        said = json.loads(answer)
    except RecursionError:
        raise ValueError("its reader's answer nests too deep") from None
    if said is None:
        return None
    if not isinstance(said, dict):
        raise ValueError("its reader's answer is none")
    if set(said) == {"error"}:
        raise NotALog(_line(said["error"], 300))
    if {*said, "flight"} != set(Reading._fields) or said["verdict"] not in CAUSES or said["kind"] not in KINDS:
        raise ValueError("its reader's answer is none")
    return Reading(
        said["verdict"],
        _number(said["confidence"], 1.0),
        said["kind"],
        None if said["cause"] is None else _cited(said["cause"]),
        tuple(_cited(one) for one in _list(said["collateral"], 20)),
        tuple(_line(one, 255) for one in _list(said["hosts"], 20)),
        _whole(said["rank"]),
        _whole(said["iteration"]),
        _line(said["error"], 200),
        _line(said["frame"], 200),
        _line(said["fingerprint"], 600),
        tuple(_line(one, 500) for one in _list(said["evidence"], 20)),
        _line(said["advice"], 500),
        None if said.get("flight") is None else _flight(said["flight"]),
    )


def _flight(value: Any) -> Flight:
    if not isinstance(value, dict) or set(value) != set(Flight._fields) or value["found"] not in FOUND:
        raise ValueError("the log reader's answer about the flight recorder is none")
    return Flight(
        value["found"],
        _line(value["op"], 80),
        _line(value["other"], 200),
        _line(value["group"], 200),
        _whole(value["seq"]),
        _whole(value["size"]) or 0,
        _whole(value["waiting"]) or 0,
        None if value["since"] is None else _number(value["since"], 1e11),
        tuple(_whole(one) or 0 for one in _list(value["ranks"], 64)),
        tuple(_whole(one) or 0 for one in _list(value["silent"], 64)),
        tuple(_line(one, 255) for one in _list(value["hosts"], 64)),
        _line(value["frame"], 200),
        _whole(value["dumps"]) or 0,
        _whole(value["world"]) or 0,
        tuple(_line(one, 400) for one in _list(value["unread"], 8)),
    )


def _cited(value: Any) -> Cited:
    if not isinstance(value, dict) or set(value) != set(Cited._fields):
        raise ValueError("its reader's answer cites no line")
    host = None if value["host"] is None else _line(value["host"], 255)
    when = None if value["time"] is None else _number(value["time"], 1e11)
    line = _whole(value["line"]) or 0
    return Cited(line, _line(value["text"], 500), _whole(value["rank"]), host, _whole(value["gpu"]), when)


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"the log reader answered with {type(value).__name__} instead of a list")
    return value[:most]


def _line(value: Any, most: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the log reader answered with {type(value).__name__} instead of a text")
    return "".join(one if one.isprintable() else "?" for one in value[:most])


def _number(value: Any, most: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ValueError(f"the log reader answered with a number outside 0 to {most:g}")
    return float(value)


def _whole(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 53):
        raise ValueError("the log reader answered with something that is not a count")
    return value
