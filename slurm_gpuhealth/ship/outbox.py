"""Ships new rows of the node's journal to the cluster's record: one line of JSON per row, in order.

A row waits in the outbox until the store surely has it. If the program is killed in between, the row is shipped twice,
and the store keeps it once: (node, journal, id, sub) identifies it, and the higher `seq` wins. Everything that may hang
runs in a child.
"""

from __future__ import annotations

import os
import time
import zlib

from slurm_gpuhealth import __version__, child
from slurm_gpuhealth.config.load import config_path
from slurm_gpuhealth.node import journal_schema, lock
from slurm_gpuhealth.say import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.node.journal import Journal
    from slurm_gpuhealth.ship.line import Record

AT_ONCE = 2 << 20
"""The most bytes that one child writes; the next child writes the rest."""
MARGIN = 1.0
"""Seconds that the health check keeps for its own end."""


def mark(url: str) -> int:
    """The journal's value `ships` while this node ships to `url`; 0: it ships nowhere."""
    return zlib.crc32(url.encode()) if url else 0


def ship(
    settings: Settings, journal: Journal, node: str, seconds: float, beat: int | None = None, lives: bool = False
) -> None:
    """Ship the waiting rows, within `seconds`. If that fails, say so once; the rows wait for the next time.

    `beat`: the number of the heartbeat. With a new one, or with `lives`, the head is shipped even if nothing waits.
    """
    if journal.folder != settings.paths.state:
        return  # in the fallback: its rows get their numbers once the disk works again
    lost = settings.store.url and not journal.get("shipped")  # with a part of a journal that was corrupt
    if lost or journal.get("ships", 0) != mark(settings.store.url):
        _begin(journal, settings.store.url)
    deadline = time.monotonic() + seconds - MARGIN
    error = ""
    try:
        while settings.store.url and deadline - time.monotonic() > 0:
            new = lives or journal.get("beat") != beat
            if not _some(settings, journal, node, deadline, beat if new else None):
                break
            lives = False
    except (OSError, ValueError) as failure:
        error = str(failure)
        _bound(journal, settings.store.outbox_mib << 20)
    shipped = journal.get("shipped", {})
    if error != shipped.get("error", ""):
        journal.put("shipped", {**shipped, "error": error})
    if bool(error) != bool(shipped.get("error")):  # not if only its text differs: it may have a time
        say(f"store: {error}; new records wait in the journal" if error else "store: ships again", error=bool(error))


def _begin(journal: Journal, url: str) -> None:
    """Begin to ship to `url`, which has nothing yet: ship all that the journal has. Without a url, nothing waits."""

    def begin() -> None:
        if url:
            shipped = journal.get("shipped") or {"journal": os.urandom(8).hex(), "seq": 0}
            journal.put("shipped", {**shipped, "size": 0, "gpus": None, "about": None})
        for statement in journal_schema.refill()[: 2 if url else 1]:
            journal.write(statement)
        journal.put("ships", mark(url) or None)

    journal.together(begin)


def _some(settings: Settings, journal: Journal, node: str, deadline: float, beat: int | None) -> bool:
    """Ship the oldest waiting rows, and the heartbeat `beat` if it is new; returns whether there may be more.

    Raises OSError, which says why it failed.
    """
    shipped = journal.get("shipped")
    records, waiting = _waiting(journal)
    if not waiting and beat is None:
        return False
    last = waiting or shipped["seq"]
    gpus = [[gpu["uuid"], gpu.get("index"), gpu.get("pci"), gpu.get("serial")] for gpu in journal.get("gpus", [])]
    head: Record = {"kind": "ship", "seq": last, "dropped": shipped.get("dropped")}
    if gpus != shipped.get("gpus"):
        head["gpus"] = gpus
    about = _about(settings, journal)
    if beat is not None or about != shipped.get("about"):  # each time: an older store may have passed over it
        head["about"] = about
    whose = {"node": node, "journal": shipped["journal"]}
    batch = [{**whose, **record} for record in (head, *records)]
    limit = min(settings.store.timeout, deadline - time.monotonic())

    def start(left: float) -> child.Probed:
        return child.probe(lambda: write(settings, node, batch, shipped["size"]), timeout=left)

    probed = lock.guarded(settings, journal, "store", limit, start)
    if probed is None:
        raise OSError("an earlier child can't be killed: the shared directory, or the network, hangs")
    if probed.error:
        raise OSError(probed.error)
    if probed.value is None:
        say("store: this node's file is shorter than it was: the whole journal is shipped again", error=True)
        _begin(journal, settings.store.url)
        return True

    def acknowledge() -> None:
        what = {"seq": last, "size": probed.value, "time": time.time(), "gpus": gpus, "about": about}
        journal.put("shipped", {**shipped, **what})
        journal.write("DELETE FROM outbox WHERE seq <= ?", last)
        if beat is not None:
            journal.put("beat", beat)

    journal.together(acknowledge)
    return waiting > 0


def _about(settings: Settings, journal: Journal) -> dict[str, str]:
    """What nodes may differ in, as the columns of the store's table `node`; "" where it is not known."""
    import hashlib
    import json

    try:
        with open(config_path(), "rb") as file:
            config = hashlib.sha256(file.read()).hexdigest()[:8]  # as `sha256sum` begins
    except OSError:
        config = ""
    tests = journal.rows("SELECT detail FROM diagnostic ORDER BY id DESC LIMIT 16")
    dcgm = next((version for (detail,) in tests if (version := json.loads(detail).get("version"))), "")
    driver = journal.get("nvml-baseline", {}).get("driver") or ""
    return {"gpuhealth": __version__, "config": config, "mode": settings.mode, "driver": driver, "dcgm": dcgm}


def _waiting(journal: Journal) -> tuple[list[Record], int]:
    """The oldest waiting rows, as records, and the last number among them; 0: nothing waits."""
    records: list[Record] = []
    columns: dict[str, list[str]] = {}
    size = last = 0
    for seq, kind, key, sub, bytes_ in journal.rows(
        "SELECT seq, kind, id, sub, bytes FROM outbox ORDER BY seq LIMIT 5000"
    ):
        if size and size + bytes_ > AT_ONCE:
            break
        shipped = journal_schema.SHIPPED[kind]
        if kind not in columns:
            columns[kind] = [row[1] for row in journal.rows(f"PRAGMA table_info({shipped.table})")]
        which = f"{shipped.id} = ? AND {shipped.sub} = ?".replace("{}", "")
        found = journal.one(f"SELECT * FROM {shipped.table} WHERE {which}", key, sub)  # noqa: S608 - our own names
        if found:
            row = {column: value for column, value in zip(columns[kind], found) if value is not None}
            records.append({"kind": kind, "seq": seq, "id": key, "sub": sub, "row": row})
        size, last = size + bytes_, seq
    return records, last


def _bound(journal: Journal, most: int) -> None:
    """If more than `most` bytes wait, drop the oldest rows, a tenth at once, and count them: the store learns that."""
    size = journal.one("SELECT coalesce(sum(bytes), 0) FROM outbox")[0]
    if size <= most:
        return

    def drop() -> None:
        left, count, times, seq = size, 0, [], 0
        for seq, when, bytes_ in journal.rows("SELECT seq, time, bytes FROM outbox ORDER BY seq"):  # noqa: B007
            left, count = left - bytes_, count + 1
            times.append(when)
            if left <= most * 0.9:
                break
        journal.write("DELETE FROM outbox WHERE seq <= ?", seq)
        shipped = journal.get("shipped")
        before, first, last = shipped.get("dropped") or (0, min(times), max(times))
        dropped = (before + count, min(first, *times), max(last, *times))
        journal.put("shipped", {**shipped, "dropped": dropped})
        say(f"store: {count} records dropped: {size >> 20} MiB wait, and store.outbox_mib is {most >> 20}", error=True)

    journal.together(drop)


def write(settings: Settings, node: str, batch: list[Record], size: int) -> int | None:
    """In a child: write the batch, and return once it is safe there. Returns the size of the node's file (0: no file).

    `size`: the file's size after the last batch. None: the file is shorter now, and has lost records.
    """
    # Our own lock: we may live longer than our parent, and the next child must not write at the same time.
    if lock.take(settings, "store-writer", time.monotonic() + settings.store.timeout, real=True) is None:
        raise TimeoutError("an earlier child still writes")
    if settings.store.url.startswith("postgresql:"):
        from slurm_gpuhealth.ship import postgresql as ship_postgresql

        return ship_postgresql.insert(settings, node, batch)
    from slurm_gpuhealth.ship import file as ship_file

    return ship_file.append(settings.store.url[len("file://") :], node, batch, size)
