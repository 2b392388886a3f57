"""Other tools' tests on this node: which are due, their figures into the journal, their findings to the judge.

They share DCGM's lock: no two tests run at once.
"""

from __future__ import annotations

import os
import time

from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.node import figures, lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.config.settings import Settings, Test
    from slurm_gpuhealth.diagnose.tools import Ran
    from slurm_gpuhealth.node.journal import Journal

WAIT = 600.0
"""Seconds to wait for a DCGM diagnostic of another program."""
ROOM = 60.0
"""Seconds beyond a test's own limit, until it is ended."""


def run(settings: Settings, journal: Journal, rung: str, asked: str = "") -> list[Ran]:
    """Run the tests that are due at this rung, and those in `asked`. Keeps figures and findings; raises nothing else
    than what ends the program."""
    from slurm_gpuhealth.diagnose import tools

    reading = journal.get("nvml", {}).get("gpus", [])
    split = {gpu.get("uuid") for gpu in reading if gpu.get("mig")}
    gpus = [gpu for gpu in journal.get("gpus", []) if gpu["uuid"] not in split]
    uuids = [gpu["uuid"] for gpu in gpus]
    model = str(gpus[0].get("name") or "") if gpus else ""
    due = tools.chosen(settings, rung, asked, model, len(uuids))
    if not due or not uuids:  # of a GPU in MIG mode a tool sees one instance
        return []
    turn = lock.take(settings, "diagnostic", time.monotonic() + WAIT)
    if turn is None:
        return [tools.Ran(test, "untested", "another diagnostic is running") for test in due]
    try:
        return [_run(settings, journal, test, uuids, model) for test in due]
    finally:
        os.close(turn)


def _run(settings: Settings, journal: Journal, test: Test, uuids: list[str], model: str) -> Ran:
    from slurm_gpuhealth.diagnose import tools

    now = time.time()
    ports = _ports(settings) if any("{device}" in word for word in test.command) else []
    try:
        ran: Ran | None = lock.guarded(
            settings,
            journal,
            "tool",
            test.timeout + ROOM,
            lambda _: tools.run(test, uuids, model, ports, settings.limit),
        )
    except TimeoutError as error:
        ran = tools.Ran(test, "untested", str(error))
    ran = ran or tools.Ran(test, "untested", "an earlier test can't be killed")
    _keep(settings, journal, ran, now)
    return ran


def _keep(settings: Settings, journal: Journal, ran: Ran, now: float) -> None:
    """The figures, and a finding for each GPU that is wrong or slow; what is well again is mended."""
    from slurm_gpuhealth.node import record

    def keep() -> None:
        figures.keep(journal, ran.test.name, ran.version, [(ran.uuid(one.device), one) for one in ran.figures], now)
        record.keep(journal, settings, found, now)
        if ran.outcome != "untested":
            blamed = {one.gpu.uuid if one.gpu else "" for one in found}
            # The GPUs that are in the node, but not in this run, may be as bad as before.
            unseen = {gpu["uuid"] for gpu in journal.get("gpus", [])} - {ran.uuid(one.device) for one in ran.figures}
            for number, uuid in journal.rows(
                "SELECT id, coalesce(uuid, '') FROM finding"
                " WHERE source = 'tool' AND code = ? AND standing AND cleared IS NULL",
                ran.test.name,
            ):
                if uuid not in blamed | unseen:
                    journal.write("UPDATE finding SET cleared = ? WHERE id = ?", now, number)

    said: dict[str | None, list[str]] = {}
    for bad in ran.bad:
        said.setdefault(ran.uuid(bad.device), []).append(bad.message)
    found = [
        Finding(
            now,
            "tool",
            ran.test.name,
            f"{ran.test.name}: {'; '.join(messages)}",
            Gpu(uuid) if uuid else None,
            "warning",
            standing=True,
            details={"outcome": ran.outcome},
        )
        for uuid, messages in said.items()
    ]
    journal.together(keep)


def _ports(settings: Settings) -> list[str]:
    """The InfiniBand and RoCE ports that are up."""
    from slurm_gpuhealth import child
    from slurm_gpuhealth.evidence import infiniband

    root = f"{settings.paths.sys}/class/infiniband"
    probed = child.probe(lambda: infiniband.read_ports(root), timeout=infiniband.READ_TIMEOUT)
    return sorted(port for port, one in (probed.value or {}).items() if one["state"] == "ACTIVE")
