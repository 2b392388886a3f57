"""A small world and its truth, and the table of all such worlds."""

from __future__ import annotations

import zlib
from random import Random
from typing import TYPE_CHECKING, Callable, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.outcomes import Attempt, Event, GpuName

EPOCH = 1_760_054_400.0  # midnight
DAY = 86400.0


class Bad(NamedTuple):
    """A node that is bad, and when."""

    node: str
    since: float
    until: float
    gpus: tuple[tuple[GpuName, ...], ...] = ()
    """The bad GPUs, each by all its names; () the node as a whole, or the names are told nowhere."""


class Truth(NamedTuple):
    """What an attempt that did not complete really died of."""

    job: int
    attempt: int
    cause: str
    accepted: tuple[str, ...]
    """The causes that count as right."""
    node: str | None = None
    """The bad one; None: no node did it."""


class World(NamedTuple):
    nodes: tuple[str, ...]
    days: float
    attempts: list[Attempt]
    """By their end."""
    events: list[Event]
    """By their time."""
    leaves: Mapping[str, tuple[str, ...]]
    """Leaf switch → its nodes; {} unknown."""
    places: Mapping[str, tuple[str, ...]]
    """`rack r1`, `pdu p2`, `chassis c3` → its nodes, as a site would write it down."""
    bad: tuple[Bad, ...]
    """All other nodes are good."""
    bad_places: tuple[str, ...]
    """Places, or leaf switches, whose feed, switch or router is bad: their nodes are good."""
    truth: Mapping[tuple[int, int], Truth]

    def is_bad(self, node: str, time: float, longer: float = 0.0) -> bool:
        return any(one.node == node and one.since <= time <= one.until + longer for one in self.bad)


class Entry(NamedTuple):
    name: str
    family: str
    group: str
    """`tune`, or `kept`: whoever tunes the correlator does not look at it."""
    about: str
    make: Callable[[Random], World]


ENTRIES: dict[str, Entry] = {}
"""Filled by `every`."""


def world(family: str, group: str, about: str) -> Callable[[Callable[[Random], World]], Callable[[Random], World]]:
    """Puts a function into the table; its name with hyphens is the world's."""

    def enter(make: Callable[[Random], World]) -> Callable[[Random], World]:
        name = make.__name__.replace("_", "-")
        if name in ENTRIES:
            raise ValueError(f"two worlds are called {name!r}")
        ENTRIES[name] = Entry(name, family, group, about, make)
        return make

    return enter


def build(name: str, seed: int = 1) -> World:
    """The same name and seed, the same world."""
    return ENTRIES[name].make(Random(zlib.crc32(f"{name} {seed}".encode())))  # noqa: S311 - must be repeatable
