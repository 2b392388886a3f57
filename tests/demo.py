"""`make demo`: real Slurm, four stand-in GPU nodes, one good job, one with a bug, one on a GPU that dies."""

from __future__ import annotations

import os
import sys
import time

from tests.daemons import until
from tests.lab import Lab, fresh

GOOD = "echo training on $SLURM_JOB_GPUS of $SLURMD_NODENAME; sleep 2; echo loss 0.42"
BUG = "echo 'RuntimeError: shapes (8, 128) and (64, 8) do not match' >&2; exit 1"
LONG = "echo attempt ${SLURM_RESTART_COUNT:-0} on $SLURMD_NODENAME; sleep 3; echo done on $SLURMD_NODENAME"


def main() -> int:
    lab = Lab(fresh("demo"), nodes=4, gpus=8)
    keep = os.environ.get("KEEP") == "1"
    try:
        say("A real Slurm cluster on loopback: slurmctld, slurmdbd, MariaDB, munge, 4 slurmd, 8 simulated H100s each")
        lab.start()
        for node in lab.names:
            lab.until_checked(node)
        show(lab, "sinfo", "-N", "-p", "gpu", "-o", "%N %t %G %E")
        story(lab)
    except BaseException:
        if not keep:
            lab.stop()
        raise
    if keep:
        say(f"KEEP=1: the cluster stays up. export SLURM_CONF={lab.conf} GPUHEALTH_CONFIG={lab.config}")
        print(f"Break something:  tests/fakes/inject {lab.lab}/nodes/n2 xid 48 --gpu 1")
        print(f"Stop it:          {sys.executable} -m tests.demo stop")
    else:
        lab.stop()
    return 0


def story(lab: Lab) -> None:
    say("1. A good job: level 1 on its GPUs before it, nothing after it")
    good = lab.submit(GOOD, gres="gpu:4", nodelist="n1")
    lab.wait(good, "COMPLETED")
    print(lab.output(good), end="")

    say("2. A job with a bug: it fails, its GPUs are tested at level 2 after it, the node stays in service")
    bug = lab.submit(BUG, gres="gpu:2", nodelist="n3")
    lab.wait(bug, "FAILED")
    tested = "SELECT outcome, count(*) FROM diagnostic WHERE level = 2 GROUP BY outcome"
    until(lambda: lab.rows("n3", tested), "level 2 on n3")
    show(lab, "sacct", "-X", "-j", str(bug), "-o", "JobID,State,ExitCode,NodeList")
    for outcome, gpus in lab.rows("n3", tested):
        print(f"n3: DCGM level 2 on {gpus} GPUs: {outcome}; the node is {lab.state('n3')}")

    say("3. GPU 3 of n2 falls off the bus, just before a job comes to n2")
    lab.inject("n2", "xid", 79, "--gpu", 3)
    moved = lab.submit(LONG, gres="gpu:8", exclude="n1,n3")
    began = time.monotonic()
    lab.until_reason("n2", "gpuhealth:")
    print(f"n2 was drained {time.monotonic() - began:.1f} s later:")
    show(lab, "sinfo", "-R", "-p", "gpu")
    show(lab, "sinfo", "-N", "-p", "gpu", "-o", "%N %t %E")
    lab.wait(moved, "COMPLETED", 120)
    print(f"job {moved} went on elsewhere: {lab.output(moved)!r}")
    show(lab, "sacct", "-X", "-D", "-j", str(moved), "-o", "JobID,State,ExitCode,NodeList,Start,End")

    say("4. What the node knows: gpuhealth status")
    print(lab.gpuhealth("n2", "status"))
    print(lab.gpuhealth("n2", "why", lab.reason("n2")))
    say("5. Nothing else was disturbed")
    show(lab, "sinfo", "-N", "-p", "gpu", "-o", "%N %t %E")


def say(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def show(lab: Lab, *argv: str) -> None:
    print(f"$ {' '.join(argv)}")
    print(lab.run(*argv), end="", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["stop"]:
        from pathlib import Path

        Lab(Path(os.environ.get("GPUHEALTH_LABS", "/srv/gpuhealth-labs")) / "demo").stop()
    else:
        sys.exit(main())
