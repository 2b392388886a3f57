"""What would keep the correlator from its evidence: what nodes ship, the store asked in a child, and accounting."""

from __future__ import annotations

import os

from slurm_gpuhealth.doctor.line import Line, first, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.doctor.line import Config
    from slurm_gpuhealth.node.journal import Journal

OLD = 3600.0
"""Seconds after which what waits should have been shipped."""
ALWAYS = frozenset(("cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"))
"""What Slurm counts without being told."""
TIMER = 120.0
"""Seconds between two runs of gpuhealth correlate, and what one takes."""
MANY = 100
"""Complete files of all nodes, 4 MiB each, that nobody has taken in."""


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
        from slurm_gpuhealth.ship.file import BEFORE_TIME

        folder = store.url[len("file://") :]
        complete = sum(BEFORE_TIME in name for name in os.listdir(folder))
        return {"mode": os.stat(folder).st_mode, "writable": os.access(folder, os.W_OK | os.X_OK), "complete": complete}
    from slurm_gpuhealth.ship import postgresql as ship_postgresql

    if store.password_file and os.stat(store.password_file).st_mode & 0o077:
        raise OSError(f"PostgreSQL's library reads no password file that others can; chmod 600 {store.password_file}")
    with ship_postgresql.connect(settings, "doctor") as db:
        row = db.execute("SELECT has_table_privilege('inbox', 'INSERT')").fetchone()
    return {"writable": bool(row and row[0])}


def judge(settings: Settings, facts: Mapping[str, Any], error: str, now: float) -> Iterator[Line]:
    """`facts`: of `ask`, and the journal's `shipped`, `waits`, `oldest`. `error`: why the store gave no answer."""
    url = settings.store.url
    if not url:
        yield Line("store", "ok", "store.url is empty: nothing is shipped, nothing waits")
        return
    folder = url[len("file://") :] if url.startswith("file:") else ""
    if error:
        what, _, remedy = error.partition("; ")
        remedy = remedy or (f"ls -ld {folder}" if folder else "psql with store.url, as root on this node")
        yield Line("store", "FAIL", f"the store does not answer: {what}", remedy)
    elif facts.get("mode", 0) & 0o002:
        what = f"{folder}: anybody can write there, also in a node's name: it is not used"
        yield Line("store", "FAIL", what, f"chown root: {folder}; chmod 700 {folder}")
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
        yield Line("store", "ok", f"the store takes what this node saw ({folder or 'PostgreSQL'})")
    yield from _backlog(facts, now)


def _backlog(facts: Mapping[str, Any], now: float) -> Iterator[Line]:
    waits, last = facts.get("waits") or 0, facts.get("time") or 0
    if waits and now - max(last, facts["oldest"]) > OLD:
        why = f": {facts['error']}" if facts.get("error") else ""
        what = f"{waits} records have waited for {(now - max(last, facts['oldest'])) / 3600:.1f} h{why}"
        yield Line("outbox", "warn", what, "journalctl -t gpuhealth -n 20")
    if facts.get("dropped"):
        count = facts["dropped"][0]
        what = f"{count} records were dropped while the store was away: verdicts of that time lack them"
        yield Line("dropped", "warn", what, "in gpuhealth.toml, [store]: a larger outbox_mib")


def judge_slurm_conf(config: Config, settings: Settings) -> Iterator[Line]:
    """Whether accounting tells which jobs held GPUs. Of a cluster without GPUs it says nothing."""
    yield from _controller(config, settings)
    if "gpu" not in first(config, "GresTypes").split(","):
        return
    kind = first(config, "AccountingStorageType")
    counted = first(config, "AccountingStorageTRES").split(",")
    if kind != "accounting_storage/slurmdbd":
        if settings.store.url:
            what = f"AccountingStorageType={kind}: without slurmdbd nobody knows how jobs ended, and none is judged"
            yield Line("accounting", "warn", what, "in slurm.conf: AccountingStorageType=accounting_storage/slurmdbd")
    elif not any(one.partition(":")[0] == "gres/gpu" for one in counted):
        more = ",".join([*(one for one in counted if one and one not in ALWAYS), "gres/gpu"])
        what = "accounting does not count GPUs: which jobs held some is not known, and others count against nodes too"
        yield Line("accounting", "warn", what, f"in slurm.conf: AccountingStorageTRES={more}; restart slurmctld")
    else:
        yield Line("accounting", "ok", "accounting counts the GPUs of jobs")


def _controller(config: Config, settings: Settings) -> Iterator[Line]:
    """Whether what is turned on in [correlate] can come to anything."""
    script = first(config, "EpilogSlurmctld")
    if "gpuhealth" in script and len(script.split()) > 1:
        what = "EpilogSlurmctld has arguments, which Slurm takes for a part of the name: nothing runs"
        yield Line("epilog-slurmctld", "FAIL", what, "in slurm.conf: EpilogSlurmctld= a script of its own")
    kept, waits = number(first(config, "MinJobAge")) or 0, settings.correlate.settle + TIMER
    if settings.correlate.requeue and 0 < kept < waits:
        what = f"slurmctld forgets a job {kept} s after its end, before it is judged: none is requeued"
        yield Line("min-job-age", "warn", what, f"in slurm.conf: MinJobAge={waits + TIMER:.0f}")
