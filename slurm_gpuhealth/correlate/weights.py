"""How much a log's class, an event and a node's level weigh: the settings' constants, made ready for use."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpuhealth.xid import advise, catalog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.outcomes import Attempt, Event, GpuName, Reading

    Row = tuple[float, ...]
    """Likelihood of one piece of evidence under each of COLUMNS."""

DAY = 86400.0
EPOCH = 1.6e9  # what decays is summed in units of this moment: adding is then all that a success costs
COLUMNS = ("node", "application", "fabric", "infrastructure", "user")
ALIKE = (1.0, 1.0, 1.0, 1.0, 1.0)
KINDS = (
    "hardware",
    "application",
    "communication",
    "infrastructure",
    "user",
    "memory",
    "crash",
    "numeric",
    "thermal",
    "nothing",
)
# What others call our kinds, and our causes. What is not here says nothing.
SYNONYMS = {
    "hardware": "node node_hardware hw hw_hard gpu ecc xid gpu_lost nvlink pcie hardware_error node_fault",
    "application": "app code bug user_code user_error traceback exception python assert cuda_oom gpu_oom import script",
    "communication": "comm fabric network nccl rccl watchdog nccl_timeout timeout_nccl collective ib rdma mpi hang",
    "infrastructure": "infra storage filesystem file_system fs nfs lustre disk dns io system",
    "user": "cancel cancelled canceled preempt preempted preempt_or_user preemption time_limit timelimit scheduler",
    "memory": "oom host_oom oom_kill oomkill out_of_memory oom-kill",
    "crash": "segv segfault sigsegv sigbus signal abort core_dump",
    "numeric": "nan inf loss_nan divergence",
    "thermal": "heat throttle throttling overheat",
    "nothing": "none generic unknown empty other unclassified null",
}
SYNONYM = {word: kind for kind, words in SYNONYMS.items() for word in (kind, *words.split())}
# A job that hangs ends at its time limit, or its user cancels it: so many such for each failure of a bad node.
HANGS = {"TIMEOUT": 0.2, "CANCELLED": 0.1}
CRASH_SIGNALS = (4, 6, 7, 8, 11)
CRASH_CODES = (132, 134, 135, 136, 139)
# NVML's findings that say "the GPU is gone or unusable", whatever severity the file gives them.
GONE = frozenset(("lost", "count", "power", "irq", "remap-fail", "hung"))
HOT = frozenset(("thermal", "slowdown", "brake", "hw_slowdown", "hw_thermal", "power_brake", "throttle"))
SILENT = frozenset((23, 45, 106, 107, 14, 154, 162))  # about another event, or about nothing that failed


class Grid(NamedTuple):
    """The levels of a node, from good to broken: what `settings.Suspicion` says of each."""

    prior: Row
    hazard: Row
    """Failures a day."""
    start: Row
    odds: tuple[tuple[float, float], ...]
    """Of each its hazard, and start as odds."""
    seen: Row
    """log likelihood of a hard event out of any job, over that of level 0."""
    drift: tuple[tuple[float, float, float], ...]
    """Of each its prior, its hazard over level 0's, log(1 - start)."""
    change: float
    """Which share of the nodes changes its level, a second."""
    rows: Mapping[str, Row]
    """The likelihood table of the log's kinds."""
    programs: float
    """What its column of the programs adds up to."""


@lru_cache(maxsize=8)
def grid(s: Suspicion) -> Grid:
    """A hard event comes from a failure that is seen by it, or, at any level alike, from something harmless."""
    rates = [s.benign + s.seen_by_xid * hazard for hazard in s.hazards]
    priors = tuple(one / sum(s.priors) for one in s.priors)
    hung = 1 + sum(HANGS.values())  # a job that went well did not hang either
    worse = tuple((one - s.hazards[0]) * hung for one in s.hazards)
    survive = tuple(math.log1p(-one) for one in s.starts)
    return Grid(
        priors,
        tuple(s.hazards),
        tuple(s.starts),
        tuple((hazard, start / (1 - start)) for hazard, start in zip(s.hazards, s.starts)),
        tuple(math.log(rate / rates[0]) for rate in rates),
        tuple(zip(priors, worse, survive)),
        math.log(2) / s.half_life,
        table := {kind: getattr(s, f"log_{kind}") for kind in KINDS},
        sum(row[1] for row in table.values()),
    )


def growth(time: float, half_life: float) -> float:
    """What one unit at `time` is worth in units of EPOCH."""
    return float(2.0 ** ((time - EPOCH) / half_life))


def kind_of(attempt: Attempt, reading: Reading | None) -> str | None:
    """The row of the likelihood table; None where nobody looked at a log, which is no evidence at all."""
    kind = None
    if reading is not None:
        kind = reading.kind if reading.kind in KINDS else "nothing"
    elif attempt.log_class is not None:
        kind = _synonym(str(attempt.log_class))
    crashed = attempt.signal in CRASH_SIGNALS or attempt.exit_code in CRASH_CODES
    return "crash" if crashed and kind in (None, "nothing") else kind


@lru_cache(maxsize=1024)
def _synonym(word: str) -> str | None:
    return SYNONYM.get(re.sub(r"[\s-]+", "_", word.strip().lower()))


def weigh(event: Event) -> tuple[str, float]:
    """What an event is evidence of, and how much of it.

    `hard` (the node failed), `weak` (contained: only with others), `application` (points to the program unless it
    repeats on the GPU), `link`, `thermal`, `test`, `repair`, or "" for what says nothing of this node's health: a
    consequence, somebody's drain.
    """
    source, code = event.source.lower(), event.code.lower().removeprefix(f"{event.source.lower()}:")
    if source in ("test", "repair"):
        return source, 1.0
    if source in ("xid", "sxid"):
        number = re.search(r"\d+", code)
        if number is None:
            return "", 0.0
        fatal = event.detail.get("fatal")
        told = (event.detail.get("class"), event.detail.get("action"))
        return _of_xid(int(number[0]), told) if source == "xid" else _of_sxid(int(number[0]), fatal)
    if source in ("nvml", "driver", "gpu") and code in HOT:
        return "thermal", 0.0
    if source == "ib":
        return ("link", 0.3) if event.severity == "fault" or code in ("port-down", "port-missing") else ("link", 0.05)
    if source == "aer":
        return ("hard", 0.7) if code == "fatal" or event.severity == "fault" else ("weak", 0.05)
    if source in ("dcgm", "nvml", "driver", "nvrm", "host", "site", "gpu", "dcgm-health"):
        if event.severity == "fault" or (source in ("nvml", "driver") and code in GONE):
            return "hard", 1.0
        return ("weak", 0.1) if event.severity == "warning" and source != "host" else ("", 0.0)
    return "", 0.0


def _of_xid(code: int, told: tuple[object, object]) -> tuple[str, float]:
    row = catalog.xid(code)
    if row is None or code in SILENT:
        return "", 0.0
    cls, action = (str(one or row[key] or "") for one, key in zip(told, ("class", "action")))
    if cls == "application":
        return "application", 0.0
    if cls in ("consequence", "information"):
        return "", 0.0
    if code in (63, 92, 94) or action in ("IGNORE", "RESTART_APP"):
        return "weak", 0.1
    if cls == "hardware" or action in ("RESET_GPU", "RESTART_BM"):
        return "hard", 1.0
    return "weak", 0.1 if cls == "decode" else 0.05


def _of_sxid(code: int, fatal: object) -> tuple[str, float]:
    cls, action, _, _ = advise.on_sxid(code, fatal if isinstance(fatal, bool) else None)
    if action == "RESTART_BM":
        return "hard", 1.0
    return ("weak", 0.1) if cls == "hardware" else ("", 0.0)


def same_gpu(gpu: GpuName | None, held: tuple[GpuName, ...] | None) -> bool | None:
    """Whether `gpu` is one of those that a job held; None where the two are named in different ways, or not at all."""
    if gpu is None or not held:
        return None
    name = plain(gpu)
    names = [plain(one) for one in held]
    if name in names:
        return True
    alike = any(_form(one) == _form(name) for one in names)
    return False if alike else None


def plain(gpu: GpuName) -> str:
    """A GPU's name as all write it: no case, no MIG instance."""
    text = str(gpu).strip().lower()
    return re.sub(r"^mig-(gpu-[^/]+)(/.*)?$", r"\1", text)


def _form(name: str) -> str:
    return "index" if name.isdigit() else "uuid" if name.startswith(("gpu-", "mig-")) else "pci" if ":" in name else ""
