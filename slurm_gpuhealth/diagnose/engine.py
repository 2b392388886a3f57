"""Shared by both back ends: does a host engine answer, which GPUs does it know, and UUIDs for the result."""

from __future__ import annotations

import socket

from slurm_gpuhealth.diagnose.model import Diagnosis, advise
from slurm_gpuhealth.frozen import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slurm_gpuhealth.diagnose.model import Outcome
    from slurm_gpuhealth.diagnose.models import Trouble

PORT = 5555
UNIX = "unix://"
STOP = 6.0
"""Seconds that DCGM needs to stop a diagnostic: it sends SIGTERM to nvvs and checks every 4 s."""


def answers(host: str, timeout: float = 1.0) -> bool:
    """Whether something listens at `host` (`HOST`, `HOST:PORT`, `[IPv6]:PORT`, `unix:///path`).

    Always checked first: without an engine, dcgmi waits 5 s and then silently starts an engine of its own.
    """
    try:
        if host.startswith(UNIX):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(timeout)
                connection.connect(host[len(UNIX) :])
        else:
            socket.create_connection(_address(host), timeout).close()
    except (OSError, UnicodeError):
        return False
    return True


def select(gpus: Sequence[str], known: Mapping[int, str]) -> tuple[list[int], list[str]]:
    """Entity ids of `gpus` (entity ids or UUIDs), and those among them that DCGM does not see."""
    by_uuid = {uuid: entity for entity, uuid in known.items()}
    ids = [by_uuid.get(gpu, int(gpu) if gpu.isdecimal() and int(gpu) in known else None) for gpu in gpus]
    return [i for i in ids if i is not None], [gpu for gpu, i in zip(gpus, ids) if i is None]


def finish(diagnosis: Diagnosis, known: Mapping[int, str], lost: Sequence[str] = ()) -> Diagnosis:
    """`diagnosis` with UUIDs. If DCGM does not see some of the GPUs, it is not a pass."""
    gpus = tuple(replace(gpu, uuid=known.get(gpu.entity_id)) for gpu in diagnosis.gpus)
    diagnosis = replace(diagnosis, gpus=gpus)
    return without(diagnosis, f"DCGM does not see {', '.join(lost)}") if lost else diagnosis


def without(diagnosis: Diagnosis, message: str) -> Diagnosis:
    """`diagnosis`, with some of the GPUs not tested."""
    if diagnosis.outcome not in ("pass", "not-testable"):
        return replace(diagnosis, message=f"{diagnosis.message}; {message}")
    return replace(diagnosis, outcome="not-testable", message=message, advice=advise("not-testable", message))


def explain(diagnosis: Diagnosis, trouble: Trouble | None) -> Diagnosis:
    """`diagnosis` with what is known about a test that hangs."""
    if not trouble:
        return diagnosis
    message = f"{diagnosis.message}; {trouble.words}"
    return replace(diagnosis, message=message, advice=advise(diagnosis.outcome, message))


def nothing(outcome: Outcome, level: int, message: str) -> Diagnosis:
    """A diagnosis that did not come about."""
    return Diagnosis(outcome, level, advice=advise(outcome, message), message=message)


def _address(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit() and (":" not in name or name.startswith("[")):
        return name.strip("[]"), int(port)
    return host.strip("[]"), PORT
