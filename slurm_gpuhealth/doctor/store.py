"""What would keep the correlator from its evidence: the nodes' shipping, the store, and accounting."""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.doctor.line import Line, first, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.doctor.line import Config
    from slurm_gpuhealth.node.journal import Journal

OLD = 3600.0
"""Seconds after which a waiting record should have been shipped."""
ALWAYS = frozenset(("cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"))
"""What Slurm always counts."""
TIMER = 120.0
"""Seconds between two runs of gpuhealth correlate, with the time that a run takes."""
MANY = 100
"""Complete files of all nodes, 4 MiB each, that the controller has not read."""


def examine(settings: Settings, journal: Journal | None, now: float) -> Iterator[Line]:
    """Ask the store whether it would take what this node has; deadline `store.timeout`."""
    if not settings.store.url:
        yield from judge(settings, {}, "", now)
        return
    from slurm_gpuhealth import child

    probed = child.probe(lambda: ask(settings), timeout=settings.store.timeout)
    facts = dict(probed.value or {})
    if journal:
        facts |= journal.get("shipped", {})
        facts["waits"], facts["oldest"] = journal.one("SELECT count(*), min(time) FROM outbox")
    yield from judge(settings, facts, probed.error or "", now)


def ask(settings: Settings) -> dict[str, Any]:
    """Raises OSError or what psycopg raises: then the store would take nothing."""
    store = settings.store
    if not store.url.startswith("postgresql:"):
        return _ask_folder(store.url[len("file://") :], store.timeout)
    from slurm_gpuhealth.ship import postgresql as ship_postgresql

    if store.password_file and os.stat(store.password_file).st_mode & 0o077:
        raise OSError(
            f"PostgreSQL's library refuses a password file that others can read; chmod 600 {store.password_file}"
        )
    with ship_postgresql.connect(settings, "doctor") as db:
        row = db.execute("SELECT has_table_privilege('inbox', 'INSERT')").fetchone()
    return {"writable": bool(row and row[0])}


def _ask_folder(folder: str, seconds: float) -> dict[str, Any]:
    """Also whether a file there is not root's; looks at as many files as it has time for."""
    from slurm_gpuhealth.ship import file as ship_file

    refused, until = "", time.monotonic() + seconds / 2
    names = os.listdir(folder)
    try:
        there = ship_file.open_folder(folder)
        for name in names:
            if name.endswith(ship_file.END) and not name.startswith(".") and time.monotonic() < until:
                refused = refused or _refused(name, there)
    except OSError as error:
        refused = str(error.strerror)
    complete = sum(ship_file.BEFORE_TIME in name for name in names)
    return {"refused": refused, "writable": os.access(folder, os.W_OK | os.X_OK), "complete": complete}


def _refused(name: str, there: int) -> str:
    """Why the controller does not read this file."""
    from slurm_gpuhealth.ship import file as ship_file

    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=there)
        try:
            ship_file.refuse_unless_ours(fd, name)
        finally:
            os.close(fd)
    except FileNotFoundError:  # renamed or taken in meanwhile
        pass
    except OSError as error:
        return f"{name!r} {error.strerror}"
    return ""


def judge(settings: Settings, facts: Mapping[str, Any], error: str, now: float) -> Iterator[Line]:
    """`facts`: what `ask` returns, and the journal's `shipped`, `waits`, `oldest`. `error`: why the store is silent."""
    url = settings.store.url
    if not url:
        yield Line("store", "ok", "store.url is empty: nothing is shipped, nothing waits")
        return
    folder = url[len("file://") :] if url.startswith("file:") else ""
    if error:
        what, _, remedy = error.partition("; ")
        remedy = remedy or (f"ls -ld {folder}" if folder else "psql with store.url, as root on this node")
        yield Line("store", "FAIL", f"the store does not answer: {what}", remedy)
    elif facts.get("refused"):
        what, _, remedy = facts["refused"].partition("; ")
        yield Line("store", "FAIL", f"{folder} is not used: {what}", remedy or f"ls -l {folder}")
    elif not facts.get("writable"):
        remedy = (
            f"chown root: {folder}, and no_root_squash for the nodes"
            if folder
            else "GRANT INSERT ON inbox TO the role of store.url (docs/store.md)"
        )
        yield Line("store", "FAIL", f"{folder or 'PostgreSQL'}: this node may not write there", remedy)
    elif facts.get("complete", 0) > MANY:
        what = f"{facts['complete']} complete files in {folder} wait for the controller"
        yield Line("store", "warn", what, "on the controller: gpuhealth correlate, from its timer")
    else:
        yield Line("store", "ok", f"the store accepts this node's records ({folder or 'PostgreSQL'})")
    yield from _backlog(facts, now)


def _backlog(facts: Mapping[str, Any], now: float) -> Iterator[Line]:
    waits, last = facts.get("waits") or 0, facts.get("time") or 0
    if waits and now - max(last, facts["oldest"]) > OLD:
        why = f": {facts['error']}" if facts.get("error") else ""
        what = f"{waits} records have waited for {(now - max(last, facts['oldest'])) / 3600:.1f} h{why}"
        yield Line("outbox", "warn", what, "journalctl -t gpuhealth -n 20")
    if facts.get("dropped"):
        count = facts["dropped"][0]
        what = f"{count} records were dropped while the store was unreachable: verdicts of that time lack them"
        yield Line("dropped", "warn", what, "in gpuhealth.toml, [store]: a larger outbox_mib")


def examine_controller(settings: Settings, here: bool, now: float) -> Iterator[Line]:
    """On the host of gpuhealth correlate: does it run, and do the nodes ship? `here`: this host is a node too."""
    try:
        ran = os.stat(os.path.join(settings.paths.run, "correlate.lock")).st_mtime
    except OSError:
        ran = 0.0
    if not settings.store.url or (here and not ran):
        return
    from slurm_gpuhealth import child

    probed = (
        child.probe(lambda: silent(settings, now), timeout=settings.store.timeout + settings.slurm.timeout)
        if ran
        else None
    )
    yield from judge_controller(ran, probed.value or {} if probed else {}, probed.error or "" if probed else "", now)


def silent(settings: Settings, now: float) -> dict[str, Any]:
    """What `query.silent` returns."""
    from slurm_gpuhealth.slurm import control
    from slurm_gpuhealth.store import open as opening
    from slurm_gpuhealth.store import query

    try:
        there = control.counted(settings.slurm, settings.drain.nodes)
    except control.SlurmError:
        there = None
    with opening.reading(opening.open_store(settings)) as db:
        return query.silent(db, now, settings.store.heartbeat, there)


def judge_controller(ran: float, facts: Mapping[str, Any], error: str, now: float) -> Iterator[Line]:
    """`ran`: when gpuhealth correlate last began here, 0: never. `facts`: what `silent` returns."""
    if not ran or now - ran > OLD:
        what = (
            f"gpuhealth correlate last ran {(now - ran) / 3600:.1f} h ago" if ran else "gpuhealth correlate never ran"
        )
        remedy = "its timer (docs/correlate.md): systemctl list-timers gpuhealth-correlate.timer"
        yield Line("correlate", "warn", f"{what} on this host: no job is judged", remedy)
    else:
        yield Line("correlate", "ok", f"gpuhealth correlate ran {now - ran:.0f} s ago")
    if error:
        yield Line("shipping", "warn", f"can't tell which nodes ship their records: {error}", "gpuhealth correlate")
    elif facts.get("silent"):
        some = ", ".join(facts["silent"][:8]) + (" ..." if facts["silent"][8:] else "")
        what = f"{len(facts['silent'])} nodes ship no records: {some}"
        yield Line("shipping", "warn", f"{what}: do their hooks run?", "there: gpuhealth doctor")
    elif facts.get("nodes"):
        yield Line("shipping", "ok", f"{facts['nodes']} nodes ship their records")


def judge_slurm_conf(config: Config, settings: Settings) -> Iterator[Line]:
    """Whether accounting tells which jobs held GPUs. Says nothing about a cluster without GPUs."""
    yield from _controller(config, settings)
    if "gpu" not in first(config, "GresTypes").split(","):
        return
    kind = first(config, "AccountingStorageType")
    counted = first(config, "AccountingStorageTRES").split(",")
    if kind != "accounting_storage/slurmdbd":
        if settings.store.url:
            what = f"AccountingStorageType={kind}: without slurmdbd nobody knows how jobs ended, and no job is judged"
            yield Line("accounting", "warn", what, "in slurm.conf: AccountingStorageType=accounting_storage/slurmdbd")
    elif not any(one.partition(":")[0] == "gres/gpu" for one in counted):
        more = ",".join([*(one for one in counted if one and one not in ALWAYS), "gres/gpu"])
        what = "accounting does not count GPUs: failed jobs without GPUs count against nodes too"
        yield Line("accounting", "warn", what, f"in slurm.conf: AccountingStorageTRES={more}; restart slurmctld")
    else:
        yield Line("accounting", "ok", "accounting counts the GPUs of jobs")


def _controller(config: Config, settings: Settings) -> Iterator[Line]:
    """Whether Slurm lets work what is turned on in [correlate]."""
    script = first(config, "EpilogSlurmctld")
    if "gpuhealth" in script and len(script.split()) > 1:
        what = "EpilogSlurmctld has arguments: Slurm takes them for a part of the file's name, and runs nothing"
        yield Line("epilog-slurmctld", "FAIL", what, "in slurm.conf: EpilogSlurmctld= a script without arguments")
    kept, waits = number(first(config, "MinJobAge")) or 0, settings.correlate.settle + TIMER
    if settings.correlate.requeue and 0 < kept < waits:
        what = f"slurmctld forgets a job {kept} s after its end, before gpuhealth judges it: no job is requeued"
        yield Line("min-job-age", "warn", what, f"in slurm.conf: MinJobAge={waits + TIMER:.0f}")
