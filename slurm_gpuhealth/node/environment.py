"""The environment of slurmd's Prolog or Epilog as a value, and how the job ended as far as an epilog can know.

Taken from the hooks' environments of Slurm 22.05, 24.11, 25.11 and 26.05. They have no PATH, HOME or LANG; that of a
HealthCheckProgram has only SLURMD_NODENAME.
"""

from __future__ import annotations

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

MAX_GPUS = 1024
GPU_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-/")
OOM = 125
LAUNCH = (53, 54)
"""Slurm's "signals" for a job that never ran: its output file could not be opened (53), the prolog failed (54)."""


@frozen
class Job:
    """One job on this node, as slurmd describes it to its hooks."""

    job_id: int
    node: str
    """This node's name in Slurm; the host may have another."""
    context: str = ""
    """`prolog_slurmd` or `epilog_slurmd`."""
    restart: int = 0
    uid: int | None = None
    gid: int | None = None
    user: str = ""
    account: str = ""
    partition: str = ""
    nodes: str = ""
    """The hostlist as Slurm writes it, `n[1-4]`."""
    num_nodes: int = 1
    gpus: tuple[int, ...] = ()
    """Positions in slurmd's list of gres (`slurmd -G`): neither minor numbers nor NVML's indices."""
    gpu_names: tuple[str, ...] = ()
    """Names instead of positions: `GPU-…` and `MIG-…`."""
    sharing: Literal["", "mig", "mps"] = ""
    """How a GPU is shared, if the environment says so: a job with a shard of a GPU looks like a job with all of it."""
    batch: bool = False
    stdout: str = ""
    """--output of a batch job, with its patterns, as an absolute path; "" for Slurm's default name."""
    stderr: str = ""
    """--error likewise; "": the same file as stdout."""
    work_dir: str = ""
    start: int | None = None
    """Seconds since the epoch; from 24.11 on."""
    end: int | None = None
    exit_code: int | None = None
    """None in a prolog. A cancelled, timed out or requeued job has 0 here, like a good job."""
    signal: int = 0
    derived_code: int = 0
    """The highest of the steps' exit codes. 0 proves nothing: Slurm before 26.05 loses it when the job ends at once."""
    derived_signal: int = 0

    @property
    def has_gpus(self) -> bool:
        return bool(self.gpus or self.gpu_names)


def read(environ: Mapping[str, str]) -> Job:
    """The job in a hook's environment. Raises ValueError, which names the variable and what is wrong with it."""
    if not environ.get("SLURM_JOB_ID"):
        raise ValueError("SLURM_JOB_ID is not set: only slurmd starts this program, as Prolog or Epilog")
    if not environ.get("SLURMD_NODENAME"):
        raise ValueError(
            "SLURMD_NODENAME is not set: this is not slurmd's Prolog or Epilog (PrologSlurmctld has no node)"
        )
    gpus, names = _gpus(environ.get("SLURM_JOB_GPUS", ""))
    exit_code, signal = _ended(environ)
    derived = _number(environ, "SLURM_JOB_DERIVED_EC") or 0
    num_nodes = _number(environ, "SLURM_JOB_NUM_NODES")
    return Job(
        job_id=_number(environ, "SLURM_JOB_ID") or 0,
        node=environ["SLURMD_NODENAME"],
        context=environ.get("SLURM_SCRIPT_CONTEXT", ""),
        restart=_number(environ, "SLURM_JOB_RESTART_COUNT") or 0,
        uid=_number(environ, "SLURM_JOB_UID"),
        gid=_number(environ, "SLURM_JOB_GID"),
        user=environ.get("SLURM_JOB_USER", "").encode("utf-8", "replace").decode(),
        account=environ.get("SLURM_JOB_ACCOUNT", ""),
        partition=environ.get("SLURM_JOB_PARTITION", ""),
        nodes=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""),  # 22.05 has the second only
        num_nodes=1 if num_nodes is None else num_nodes,
        gpus=gpus,
        gpu_names=names,
        sharing=_sharing(environ, names),
        batch="SLURM_JOB_STDIN" in environ,  # STDOUT is there only with --output
        stdout=environ.get("SLURM_JOB_STDOUT", ""),
        stderr=environ.get("SLURM_JOB_STDERR", ""),
        work_dir=environ.get("SLURM_JOB_WORK_DIR", ""),
        start=_number(environ, "SLURM_JOB_START_TIME"),
        end=_number(environ, "SLURM_JOB_END_TIME"),
        exit_code=exit_code,
        signal=signal,
        derived_code=derived >> 8 & 0xFF,
        derived_signal=derived & 0x7F,
    )


def failed(job: Job) -> str | None:
    """How the job itself failed; None if it did not fail or never ran (`outcome` tells these apart)."""
    said = outcome(job)
    return None if said in ("ok", "launch") else said


def outcome(job: Job) -> str:
    """`ok`, `launch`, `oom`, `exit 137`, `signal 11`, `derived 7` or `derived signal 11`.

    `ok` includes what an epilog can't distinguish from success: cancelled, timed out, requeued, and in 22.05 a failed
    node; with 24.11 and later a failed node gives `signal 1`.
    """
    if not job.exit_code and job.signal in LAUNCH:
        return "launch"
    if OOM in (job.signal, job.derived_signal):
        return "oom"
    for code, words in (
        (job.exit_code, "exit"),
        (job.signal, "signal"),
        (job.derived_code, "derived"),
        (job.derived_signal, "derived signal"),
    ):
        if code:
            return f"{words} {code}"
    return "ok"


def _gpus(text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """`0,2-3` → positions; `GPU-…`, `MIG-…` → names."""
    positions: list[int] = []
    names: list[str] = []
    for item in text.replace("[", "").replace("]", "").split(","):
        first, dash, last = item.strip().partition("-")
        if _is_number(first) and (not dash or _is_number(last)):
            low, high = int(first), int(last or first)
            if not low <= high < MAX_GPUS:
                raise ValueError(f"SLURM_JOB_GPUS={text[:80]!r}: {item[:40]!r} is no range of GPUs below {MAX_GPUS}")
            positions += range(low, high + 1)
        elif item[:4] in ("GPU-", "MIG-") and 4 < len(item) < 128 and GPU_NAME.issuperset(item):
            names.append(item)
        elif item.strip():
            raise ValueError(
                f"SLURM_JOB_GPUS={text[:80]!r}: {item[:40]!r} is neither a number, a range nor a GPU's name"
            )
    return tuple(dict.fromkeys(positions)), tuple(dict.fromkeys(names))


def _sharing(environ: Mapping[str, str], names: tuple[str, ...]) -> Literal["", "mig", "mps"]:
    if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environ:
        return "mps"
    visible = (*names, environ.get("CUDA_VISIBLE_DEVICES", ""))
    return "mig" if any(name.startswith("MIG-") for name in visible) else ""


def _ended(environ: Mapping[str, str]) -> tuple[int | None, int]:
    """Exit code and signal; None, 0 in a prolog. EXIT_CODE2 says "137:0"; EXIT_CODE is the raw wait status, 35072."""
    pair = environ.get("SLURM_JOB_EXIT_CODE2")
    if pair:
        code, _, signal = pair.partition(":")
        if not (_is_number(code) and _is_number(signal)):
            raise ValueError(f"SLURM_JOB_EXIT_CODE2={pair[:40]!r} is not CODE:SIGNAL")
        return int(code), int(signal)
    status = _number(environ, "SLURM_JOB_EXIT_CODE")
    return (None, 0) if status is None else (status >> 8 & 0xFF, status & 0x7F)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable's whole number; None when it is not set. Raises ValueError for anything else."""
    text = environ.get(name)
    if not text:
        return None
    if not _is_number(text):
        raise ValueError(f"{name}={text[:40]!r} is not a number")
    return int(text)


def _is_number(text: str) -> bool:
    """Whether `text` is ASCII digits for 64 bits: `isdigit` also accepts "²", and int() of 10,000 digits is slow."""
    return text.isascii() and text.isdigit() and len(text) < 20
