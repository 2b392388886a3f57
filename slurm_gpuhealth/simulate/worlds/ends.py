"""The ways in which an attempt ends: Slurm's word, the Xids that go with it, and what the log shows of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

FRAMES = ("train.py", "model/attention.py", "data/loader.py", "trainer.py", "run_eval.py", "losses.py", "nets/unet.py")
FUNCTIONS = ("forward", "training_step", "collate", "main", "evaluate", "compute_loss", "encode")
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/{user}/{name}/{file}", line {line}, in {function}\n'
SLURMD = "slurmstepd: error: *** JOB {job} ON {first} CANCELLED AT {date} "
SRUN = "srun: error: {host}: task {rank}: Exited with exit code {code}"
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId={job}.batch. Some of the step tasks have been OOM Killed."
CUDA = "CUDA kernel errors might be asynchronously reported at some other API call"


class End(NamedTuple):
    state: str
    exit_code: int
    signal: int
    log_class: str
    """What a person who reads the log would call it; a word of docs/replay.md."""
    texts: tuple[str, ...]
    xids: tuple[str, ...] = ()
    """Xids that a program's own error leaves on one of its GPUs, most times."""


def _bug(*errors: str, xids: tuple[str, ...] = (), log_class: str = "application") -> End:
    return End(
        "FAILED", 1, 0, log_class, tuple(f"{TRACEBACK}    out = self.step(batch)\n{one}" for one in errors), xids
    )


def _end(state: str, exit_code: int, signal: int, log_class: str, *texts: str) -> End:
    return End(state, exit_code, signal, log_class, texts)


ENDS = {
    # The program's own.
    "value": _bug(
        "ValueError: operands could not be broadcast together with shapes ({n},64) (64,{n})",
        "KeyError: 'sample_{n}'",
        "IndexError: list index out of range",
        "TypeError: forward() got an unexpected keyword argument 'mask'",
    ),
    "shape": _bug("RuntimeError: mat1 and mat2 shapes cannot be multiplied ({n}x768 and 1024x{n})"),
    "import": _bug("ModuleNotFoundError: No module named 'flash_attn'", "ImportError: cannot import name 'Trainer'"),
    "path": _bug("FileNotFoundError: [Errno 2] No such file or directory: '/scratch/{user}/shard-{n}.tar'"),
    "gpu-oom": _bug(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.{n} GiB. GPU 0 has a total capacity of "
        "79.11 GiB of which 1.06 GiB is free."
    ),
    "kernel": _bug(f"RuntimeError: CUDA error: no kernel image is available for execution on the device\n{CUDA}"),
    "arguments": _end("FAILED", 2, 0, "application", "{name}: error: unrecognized arguments: --lr-warmup {n}"),
    "lammps": _end("FAILED", 1, 0, "application", "ERROR: Lost atoms: original 32000 current {n} (src/thermo.cpp:494)"),
    "gromacs": _end("FAILED", 1, 0, "application", "Fatal error:\nToo many LINCS warnings ({n})"),
    "illegal": _bug(f"RuntimeError: CUDA error: an illegal memory access was encountered\n{CUDA}", xids=("31",)),
    "cudnn": _bug(
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n)`",
    ),
    "nan": _bug(
        "AssertionError: loss is nan at step {n}",
        "ValueError: Expected parameter logits of distribution Categorical to satisfy the constraint, but found "
        "invalid values: tensor([[nan, nan]], device='cuda:0')",
        "FloatingPointError: Loss is nan, stopping training",
    ),
    "segv": _end("FAILED", 139, 0, "crash", "Segmentation fault (core dumped)"),
    "aborted": _end("FAILED", 0, 6, "crash", "terminate called without an active exception\nAborted (core dumped)"),
    "host-oom": _end("OUT_OF_MEMORY", 0, 125, "memory", OOM),
    "check": _end("FAILED", 3, 0, "application", "nodecheck: FAIL /opt/site/lib/libcheck.so.4: cannot open"),
    "interrupted": _end("FAILED", 130, 0, "nothing", ">>> \nKeyboardInterrupt"),
    # Without a word.
    "quiet": _end("FAILED", 1, 0, "nothing", "epoch 2: step {n}: loss 2.31"),
    "killed": _end("FAILED", 0, 9, "nothing", "step {n}/50000 4.1 it/s"),
    "code-255": _end("FAILED", 255, 0, "nothing", "step {n}/50000 4.1 it/s"),
    "slow-copy": _end("FAILED", 3, 0, "nothing", "nodecheck: device to device copy 611 GB/s, limit 1900"),
    # Of the hardware.
    "lost": _end("FAILED", 1, 0, "hardware", "Unable to determine the device handle for GPU{pci}: GPU is lost."),
    "ecc": _end("FAILED", 1, 0, "hardware", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    # Between nodes, and of what they share.
    "nccl": _end(
        "FAILED",
        0,
        6,
        "communication",
        "[rank{rank}]:[E{stamp} ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={n}, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600035 "
        "milliseconds before timing out.",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, remote process exited or there "
        "was a network error, NCCL version 2.21.5",
    ),
    "storage": _end(
        "FAILED",
        1,
        0,
        "infrastructure",
        "OSError: [Errno 116] Stale file handle: '/scratch/{user}/checkpoint-{n}.pt'",
        "OSError: [Errno 5] Input/output error: '/scratch/{user}/shard-{n}.bin'",
    ),
    # Ended from outside.
    "node-fail": _end("NODE_FAIL", 0, 0, "nothing", f"{SLURMD}DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"),
    "cancelled": _end("CANCELLED", 0, 15, "user", f"{SLURMD}***"),
    "limit": _end("TIMEOUT", 0, 15, "user", f"{SLURMD}DUE TO TIME LIMIT ***"),
    "preempted": _end("PREEMPTED", 0, 15, "user", f"{SLURMD}DUE TO PREEMPTION ***"),
}


def text(kind: str, rng: Random, user: str, name: str, job: int, nodes: Sequence[str], host: str, end: float) -> str:
    """A log; where srun started several nodes' tasks, it names the host whose task was the first to end."""
    rank = rng.randrange(8) + 8 * nodes.index(host)
    words = {
        "user": user,
        "name": name,
        "job": job,
        "first": nodes[0],
        "host": host,
        "rank": rank,
        "file": FRAMES[len(user + name) % len(FRAMES)],
        "function": FUNCTIONS[len(name) % len(FUNCTIONS)],
        "line": 20 + len(user) * 31 % 400,
        "n": rng.randrange(100, 9999),
        "code": ENDS[kind].exit_code or 1,
        "pci": f"0000:{rng.randrange(16, 200):02x}:00.0",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(end)),
        "stamp": time.strftime("%m%d %H:%M:%S.000000000", time.gmtime(end)),
    }
    lines = ["step 100: loss 8.01", "step 200: loss 7.02", rng.choice(ENDS[kind].texts)]
    if len(nodes) > 1 and ENDS[kind].state == "FAILED":
        lines.append(SRUN)
    return "\n".join(lines).format(**words)
