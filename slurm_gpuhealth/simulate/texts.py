"""Job logs that look like real ones and say what a simulated attempt's reading says."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_gpuhealth.outcomes import Attempt

LINES = {
    "hardware": (
        "[rank{rank}]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "torch.AcceleratorError: CUDA error: the GPU is lost or has fallen off the bus",
    ),
    "application": (
        'Traceback (most recent call last):\n  File "/home/{user}/work/{file}", line {number}, in {function}\n'
        "    out = self.step(batch)\n{error}: bad value {number} in batch",
    ),
    "numeric": (" iteration {iteration:>8}/  500000 | rank {rank} | lm loss: nan | grad norm: nan |",),
    "communication": (
        "[rank{rank}]:[E{stamp} ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for "
        "600035 milliseconds before timing out.",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, remote process exited or there "
        "was a network error, NCCL version 2.21.5",
    ),
    "infrastructure": (
        "OSError: [Errno 116] Stale file handle: '/scratch/{user}/checkpoint-{number}.pt'",
        "OSError: [Errno 5] Input/output error: '/scratch/{user}/shard-{number}.bin'",
    ),
    "memory": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId={job}.batch. Some of the step tasks have been OOM "
        "Killed.",
    ),
    "crash": ("Segmentation fault (core dumped)", "Bus error (core dumped)"),
    "user": ("slurmstepd: error: *** JOB {job} ON {first} CANCELLED AT {date} ***",),
    "": ("epoch 3: step {number}: loss 2.31",),
}
NAMED = (
    "Root Cause (first observed failure):\n[0]:\n  time      : {date}\n  host      : {host}\n"
    "  rank      : {rank} (local_rank: {local})\n  exitcode  : -9 (pid: 4{number})\n  error_file: <N/A>",
    "srun: error: {host}: task {rank}: Killed",
)


def text(attempt: Attempt) -> str | None:
    """The log of an attempt that has a reading; the same text at each call."""
    reading = attempt.reading
    if reading is None:
        return None
    rng = Random(attempt.job * 7 + attempt.attempt)  # noqa: S311 - the same log each time
    local = rng.randrange(8)
    file, _, function = reading.frame.partition(":")
    words = {
        "user": attempt.user,
        "job": attempt.job,
        "first": attempt.nodes[0],
        "error": reading.error or "RuntimeError",
        "file": file or "train.py",
        "function": function or "main",
        "rank": rng.randrange(8 * len(attempt.nodes)) if reading.rank is None else reading.rank,
        "iteration": reading.iteration or 0,
        "number": rng.randrange(100, 9999),
        "local": local,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(attempt.end)),
        "stamp": time.strftime("%m%d %H:%M:%S.000000000", time.gmtime(attempt.end)),
    }
    lines = [f"epoch 0: step {step}: loss {9 - step / 100:.2f}" for step in (100, 200)]
    lines.append(rng.choice(LINES[reading.kind]).format(**words))
    for host in reading.hosts:
        words["rank"] = attempt.nodes.index(host) * 8 + local if host in attempt.nodes else 0
        lines.append(rng.choice(NAMED).format(host=host, **words))
    return "\n".join(lines)
