"""An attempt as it is judged: its application, and what its log says in a few words."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from slurm_gpuhealth.correlate.state import Case
from slurm_gpuhealth.correlate.weights import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_gpuhealth.outcomes import Attempt, Reading

DEFAULT = ("", "wrap", "sbatch", "srun", "bash", "sh", "interactive", "job", "python", "python#", "run.sh", "job.sh")


def case_of(attempt: Attempt, name: str) -> Case:
    reading = attempt.reading
    if reading is None and attempt.log is not None and attempt.log_class is None:
        from slurm_gpuhealth.logs.read import read_text

        reading = read_text(attempt.log)
    few = len(attempt.nodes) <= 8  # a larger job holds whole nodes
    if attempt.log is not None or reading is not None or not few:
        attempt = attempt._replace(log=None, reading=None, gpus=attempt.gpus if few else None)
    case = Case(attempt, name, kind_of(attempt, reading))
    if reading is not None:
        case.hosts = tuple(sorted(hosts(reading, attempt.nodes)))
        case.fingerprint, case.rank, case.iteration = reading.fingerprint[:200], reading.rank, reading.iteration
        case.gpu = reading.cause.gpu if reading.cause else None
    return case


def same_evidence(case: Case, other: Case) -> bool:
    names = ("attempt", "application", "kind", "hosts", "fingerprint", "rank", "iteration", "gpu")
    return all(getattr(case, name) == getattr(other, name) for name in names)


def hosts(reading: Reading, nodes: Iterable[str]) -> set[str]:
    """The job's nodes that a log names: as written, with a domain, or by the name of a network adapter."""
    short = {node.partition(".")[0].lower(): node for node in nodes}
    found = set()
    for host in reading.hosts:
        name = host.partition(".")[0].lower()
        cut = re.sub(r"[-_](?:ib|hsn|eth|bond|opa|roce|mlx|en|data|mgmt)\w*$", "", name)
        node = short.get(name) or short.get(cut)
        if node:
            found.add(node)
    return found


@lru_cache(maxsize=16384)
def application(user: str, account: str, name: str, submit: str) -> str:
    """The key of a user's application: its name without numbers, and its submit line if the name is a default.

    Each job of a sweep has a submit line of its own: with it in the key nothing would be learnt, and there would be as
    many applications as jobs.
    """
    shown = re.sub(r"\d+", "#", name)[:64]
    return f"{user}|{account}|{shown}|{submit if shown in DEFAULT else ''}"[:200]
