"""`make demo`: real Slurm and four simulated GPU nodes; good and bad jobs, a GPU that dies, one to reset, a hang.

KEEP=1 leaves the cluster running, also after a failure; `python -m tests.demo stop FOLDER` stops it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.daemons import until
from tests.fakes import node as fakes
from tests.lab import BIN, Lab, fresh

GOOD = "echo training on GPUs $SLURM_JOB_GPUS of $SLURMD_NODENAME; sleep 1; echo loss 0.42"
BUG = """
python3 - <<'END'
def forward(batch):
    raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({batch}x128 and 64x8)")
forward(8)
END
"""
DIES = "echo step 1; sleep 5; echo 'RuntimeError: CUDA error: uncorrectable ECC error encountered' >&2; exit 1"
LONG = "echo restart ${SLURM_RESTART_COUNT:-0} on $SLURMD_NODENAME; sleep 1; echo done"
CORRELATOR = """
[store]
url = "file://{lab}/shared"
database = "{lab}/controller/cluster.db"
[joblog]
enabled = true
[accounting]
first = "1d"
[correlate]
settle = "0s"
[hang]
after = "10s"
"""
NODES = ("sinfo", "-N", "-p", "gpu", "-o", "%N %t %E")


def main() -> int:
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.default_int_handler)
    lab, code, keep = None, 1, os.environ.get("KEEP") == "1"
    try:
        if os.geteuid():
            raise PermissionError("several Slurm nodes on one host need root: run it as root")
        lab = Lab(fresh("demo"), nodes=4, gpus=8, health_interval=3, floor=3, poll="10s")
        lab.values |= {"reset": "true", "reboot": "true"}
        story(lab)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        if lab:
            print(f"What it left: {' '.join(map(str, left(lab)))}", file=sys.stderr)
    finally:
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sign, signal.SIG_IGN)  # the cluster is stopped completely, even if Ctrl-C comes again
        if lab and code != 130 and keep and lab.daemons.names():
            print(KEPT.format(bin=BIN, lab=lab.lab, conf=lab.conf, config=lab.config))
        elif lab:
            lab.stop()
            print("\nEverything that the demo started is stopped.", file=sys.stderr)
            if code != 1:
                shutil.rmtree(lab.lab)
    return code


KEPT = """
== The cluster stays up (KEEP=1)
To use it, as on n1:  export SLURM_CONF={conf} GPUHEALTH_CONFIG={config} SLURMD_NODENAME=n1 PATH={bin}:$PATH
Look:                 sinfo -N; {bin}/gpuhealth --node n2 status
Run a job:            sbatch --uid games --chdir /tmp --gres gpu:2 --wrap hostname
Break something:      tests/fakes/inject {lab}/nodes/n1 xid 48 --gpu 1
Mend it, give back:   tests/fakes/inject {lab}/nodes/n2 reboot; {bin}/gpuhealth --node n2 resume n2
Stop it:              {bin}/python -m tests.demo stop {lab}"""


def stop(folder: Path) -> int:
    """Stop the cluster of that folder and remove it; 1 if there is none."""
    if not (folder / "etc/slurm.conf").exists():
        print(f"{folder}: no cluster of the demo is there", file=sys.stderr)
        return 1
    Lab(folder).stop()
    shutil.rmtree(folder)
    return 0


def left(lab: Lab) -> list[Path]:
    """The files to read after a failure, as far as they exist."""
    there = [lab.lab / "log", *sorted(lab.lab.glob("nodes/*/state"))]
    return [one for one in there if one.exists()] or [lab.lab]


def story(lab: Lab) -> None:
    say("A real Slurm cluster on loopback: slurmctld, slurmdbd, MariaDB, munge, 4 slurmd, 8 simulated H100s each")
    lab.start()
    (lab.lab / "shared").mkdir()
    lab.configure(CORRELATOR.format(lab=lab.lab))
    for node in lab.names:
        lab.check(node)
        faster(lab, node)
    show(lab, *NODES)

    say("1. A good job: DCGM level 1 before it, nothing after it")
    good = lab.submit(GOOD, gres="gpu:4", nodelist="n1")
    lab.wait(good, "COMPLETED")
    print(lab.output(good), end="")

    say("2. A job with a bug: it fails, its GPUs are tested at level 2, the node stays in service")
    bug = lab.submit(BUG, gres="gpu:2", nodelist="n3")
    lab.wait(bug, "FAILED")
    print(lab.output(bug), end="")
    tested = "SELECT outcome, count(*) FROM diagnostic WHERE level = 2 GROUP BY outcome"
    for outcome, gpus in until(lambda: lab.rows("n3", tested), "level 2 on n3"):
        print(f"n3: DCGM level 2 on its {gpus} GPUs: {outcome}; the node is {lab.state('n3')}")

    say("3. GPU 3 of n2 falls off the bus, just before a job comes to n2")
    lab.inject("n2", "xid", 79, "--gpu", 3, "--for-good")
    moved = lab.submit(LONG, gres="gpu:8", exclude="n1,n3")
    began = time.monotonic()
    lab.until_reason("n2", "gpuhealth:")
    print(f"n2 was drained {time.monotonic() - began:.1f} s later:")
    show(lab, "sinfo", "-R", "-p", "gpu")
    print(f"job {moved} is in the queue again, and runs elsewhere:")
    lab.wait(moved, "COMPLETED")
    print(lab.output(moved), end="")
    ended = "sacct -X -D -n -P -o State -j"
    until(lambda: "COMPLETED" in lab.run(*ended.split(), str(moved)), "accounting")
    show(lab, "sacct", "-X", "-D", "-j", str(moved), "-o", "JobID,State,NodeList")

    say("4. n2 climbs the ladder by itself: level 3, a reboot; the GPU stays lost, so an admin must act")
    lab.until_reason("n2", "next=RMA")
    until(lambda: lab.rows("n2", "SELECT 1 FROM step WHERE bundle != ''"), "the evidence")
    show(lab, *NODES)
    print(f"n2$ gpuhealth ladder n2\n{lab.gpuhealth('n2', 'ladder', 'n2')}")
    reason = lab.reason("n2")
    print(f"n2$ gpuhealth why '{reason}'\n{lab.gpuhealth('n2', 'why', reason).rstrip()}", flush=True)

    say("5. Memory of GPU 1 of n3 fails under a job: the job dies, n3 resets the GPU, tests it, and comes back")
    died = lab.submit(DIES, gres="gpu:8", nodelist="n3", job_name="train")
    until(lambda: (lab.lab / f"out/{died}").exists() and "step 1" in lab.output(died), "its first step", 60)
    lab.inject("n3", "xid", 48, "--gpu", 1)
    lab.wait(died, "FAILED")
    print(lab.until_reason("n3", "gpuhealth:"))
    until(lambda: lab.state("n3") == "IDLE" and "reset pass" in lab.node("n3"), "n3 back in service", 90)
    print("n3 is back:", lab.node("n3").partition(" Extra=")[2].strip())

    say("6. An admin asks for a test of n1")
    print("$ gpuhealth-escalate n1", flush=True)
    env = {**lab.env, "GPUHEALTH_CONFIG": str(lab.config), "SLURMD_NODENAME": "n1"}
    subprocess.run([str(BIN / "gpuhealth-escalate"), "n1"], env=env, timeout=120, check=True)

    say("7. Nothing else was disturbed")
    show(lab, *NODES)

    # For step 9: it works meanwhile.
    hangs = lab.submit("sleep 600", gres="gpu:8", nodes=2, nodelist="n1,n4", job_name="llm")
    lab.wait(hangs, "RUNNING")
    lab.inject_all(("n1", "n4"), "works")

    say("8. What did the failed jobs die of, and which nodes are lemons?")
    until(lambda: explained(lab).count(" FAILED ") == 2, "verdicts on both")
    for job in (bug, died):
        print(f"$ gpuhealth explain {job}\n{lab.gpuhealth('n1', 'explain', str(job))}")
    print(f"$ gpuhealth lemons\n{lab.gpuhealth('n1', 'lemons').rstrip()}", flush=True)

    say("9. A job of 16 GPUs works on n1 and n4, until GPU 5 of n4 does not go on: the others wait for it")
    lab.until(lambda: min(map(len, worked(lab, "n1", "n4"))) >= 3, "its usual power", "n1", "n4")
    lab.inject_all(("n1", "n4"), "spins")
    lab.inject("n4", "idles", "--gpu", 5)
    lab.inject("n4", "ecc", 2, "--gpu", 5)
    began = time.monotonic()
    lab.until(lambda: len(stalled(lab, "n1") + stalled(lab, "n4")) == 16, "the nodes' word", "n1", "n4")
    lab.gpuhealth("n1", "correlate")
    print(f"found {time.monotonic() - began:.1f} s later (hang.after is 10 s here, 10 min as installed):")
    print(f"$ gpuhealth hung\n{lab.gpuhealth('n1', 'hung').rstrip()}", flush=True)
    lab.run("scancel", str(hangs))


def worked(lab: Lab, *nodes: str) -> list[list[int]]:
    """The powers at which each GPU of a job has worked."""
    jobs = [job for node in nodes for job in (lab.journal(node, "use") or {}).values()]
    return [gpu["worked"] for job in jobs for gpu in job["gpus"].values()] if len(jobs) == len(nodes) else [[]]


def stalled(lab: Lab, node: str) -> list[object]:
    return lab.rows(node, "SELECT id FROM finding WHERE source = 'job' AND code = 'stalled' AND cleared IS NULL")


def explained(lab: Lab) -> str:
    """The output of `gpuhealth jobs` after a new correlation."""
    lab.gpuhealth("n1", "correlate")
    return lab.gpuhealth("n1", "jobs")


def faster(lab: Lab, node: str) -> None:
    """Level 3 takes 4 s here, not 15 min."""
    folder = str(lab.lab / "nodes" / node)
    scenario = fakes.load(folder)
    scenario["dcgm"]["time_scale"] = 0.004
    fakes.save(folder, scenario)


def say(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def show(lab: Lab, *argv: str) -> None:
    print("$", *(f"'{word}'" if " " in word else word for word in argv))
    print(lab.run(*argv), end="", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stop"]:
        sys.exit(stop(Path(sys.argv[2]).absolute()))
    else:
        sys.exit(main())
