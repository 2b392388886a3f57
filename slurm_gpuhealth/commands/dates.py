"""Moments as people type them for --since and --until: an age, or a date as sacct takes it (sacct(1), --starttime)."""

from __future__ import annotations

import re
import time
from calendar import isleap, timegm

import click

SINCE = "Only from then on: 6h, 7d, 2026-11-20, 2026-11-20T14:30, now-2hours."
UNTIL = "Only until then."
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
WORDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604800}
HOURS = {"midnight": 0, "today": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}
CLOCK = r"(?P<hour>\d\d?):(?P<minute>\d\d)(?::(?P<second>\d\d))? ?(?P<half>[AaPp][Mm])?"
DAY = (
    r"(?P<year>\d{4})-(?P<month>\d\d?)-(?P<day>\d\d?)",
    r"(?P<month>\d\d?)[/.](?P<day>\d\d?)(?:[/.](?P<short>\d\d))?",
    r"(?P<month>\d\d)(?P<day>\d\d)(?P<short>\d\d)?",
)
MOMENTS = tuple(re.compile(rf"{one}(?P<utc>Z?)") for one in (CLOCK, *(rf"{day}(?:[T -]{CLOCK})?" for day in DAY)))


def moment(_: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """A callback of click: seconds since the epoch."""
    if text is None:
        return None
    try:
        return parse(text.strip(), time.time())
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r}: an age, 30min, 6h or 7d, or a date as for sacct, 2026-11-20, 2026-11-20T14:30 or now-2hours"
            " (local time; with Z at its end: UTC)"
        ) from None


def parse(text: str, now: float) -> float:
    """`text` as a moment; raises ValueError or OverflowError. Without a year it is the last such day, as for sacct."""
    if found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]+)", text):
        return now - float(found[1]) * (UNITS.get(found[2]) or _unit(found[2]))
    if found := re.fullmatch(r"now(?:([+-])(\d{1,9})([a-z]*))?", text):
        return now + int(f"{found[1] or '+'}{found[2] or 0}") * _unit(found[3] or "seconds")
    today = time.localtime(now)
    if text in HOURS or text == "tomorrow":
        return time.mktime((*today[:2], today[2] + (text == "tomorrow"), HOURS.get(text, 0), 0, 0, 0, 0, -1))
    match = next((match for one in MOMENTS if (match := one.fullmatch(text))), None)
    if match is None:
        raise ValueError(text)
    given = {key: value for key, value in match.groupdict().items() if value}
    if given.get("utc"):
        today = time.gmtime(now)
    month, day = int(given.get("month", today[1])), int(given.get("day", today[2]))
    year = int(given.get("year") or f"20{given['short']}") if given.keys() & {"year", "short"} else today[0]
    if not given.keys() & {"year", "short"}:
        year -= (month, day) > (today[1], today[2])
        while (month, day) == (2, 29) and not isleap(year):
            year -= 1
    hour, minute, second = (int(given.get(key, 0)) for key in ("hour", "minute", "second"))
    if half := given.get("half", "").lower():
        if hour > 12:
            raise ValueError(text)
        hour = hour % 12 + (12 if half == "pm" else 0)
    time.strptime(f"{year} {month} {day} {hour} {minute} {second}", "%Y %m %d %H %M %S")  # mktime takes 31 February
    if given.get("utc"):
        return float(timegm((year, month, day, hour, minute, second)))
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


def _unit(word: str) -> int:
    """Seconds of a unit of sacct's, which may be cut: `min`, `hour`."""
    for name, size in WORDS.items():
        if name.startswith(word):
            return size
    raise ValueError(word)
