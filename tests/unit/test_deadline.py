"""A hook ends in time, whatever is slow or does not answer: otherwise slurmd ends it and drains a good node."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm_gpuhealth import child, deadline
from slurm_gpuhealth.config.settings import Paths, Row, Settings
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.hooks import fitness
from slurm_gpuhealth.node import lock, record
from slurm_gpuhealth.node.environment import Job
from slurm_gpuhealth.node.journal import open_journal
from tests.fakes import node
from tests.lab import ROOT

SOAK = os.environ.get("GPUHEALTH_SOAK")
SECONDS, GRACE = (30.0, 0.0) if SOAK else (3.0, 5.0)
"""The limit, by default 30 s; and what a busy machine may take longer in the short form."""
SLOW = (2, 4, 6, 8, 10, 12, 60) if SOAK else (0.02, 0.3, 60)
"""Seconds of a call to Slurm. The longest is a controller that is away."""
SHORT = "child.KILL_WAIT, engine.STOP, control.GRACE, budget.SETTLE, claim.ROOM = 0.1, 0.3, 0.1, 0.2, 0.3"
HOOK = """\
from slurm_gpuhealth import child
from slurm_gpuhealth.config import load as config
from slurm_gpuhealth.diagnose import engine
config.refuse_if_writable_by_others = lambda path: None
from slurm_gpuhealth.ladder import budget, claim
from slurm_gpuhealth.slurm import control
{short}
import atexit, time
began = time.monotonic()
atexit.register(lambda: print(time.monotonic() - began))
from slurm_gpuhealth.hooks.{hook} import main
main()
"""
CONFIG = """\
mode = "enforce"
[paths]
state = "{folder}/state"
run = "{folder}/run"
kernel_log = "{folder}/kmsg"
proc = "{folder}/proc"
sys = "{folder}/sys"
dev = "{folder}/dev"
[slurm]
scontrol = "{folder}/scontrol"
sinfo = "{folder}/sinfo"
slurmd = "/bin/false"
[nvml]
library = "{folder}/libnvidia-ml.so.1"
[dcgm]
dcgmi = "{folder}/dcgmi"
host = "unix://{folder}/hostengine.sock"
[prolog]
timeout = "{seconds}s"
[epilog]
timeout = "{seconds}s"
ask_slurm = true
"""
SCONTROL = """\
#!/bin/sh
sleep {slow}
cd {folder} || exit 1
case "$*" in
*"show node"*) echo "NodeName=n1 State=$(cat node) BootTime=1 AllocTRES= $(cat reason)" ;;
*show*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
*UNDRAIN*) echo IDLE > node; : > reason ;;
*DRAIN*) echo IDLE+DRAIN > node; echo "$4 [root@$(date +%s)]" > reason ;;
*update*) echo "$3 [root@$(date +%s)]" > reason ;;
esac
"""
SINFO = """\
#!/bin/sh
sleep {slow}
sed 's/^Reason=//; s/\\(.*\\) .root@\\([0-9]*\\).$/n1|gpu:8|\\2|drained|\\1/' {folder}/reason | grep . ||
  echo 'n1|gpu:8|0|idle|none'
for i in 2 3 4 5 6 7 8 9; do echo "n$i|gpu:8|0|idle|none"; done
"""


def environment(folder, hook):
    job = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "SLURM_JOB_UID": "5", "SLURM_JOB_USER": "games"}
    job |= {"SLURM_NODELIST": "n1", "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7", "SLURM_JOB_NUM_NODES": "1"}
    if hook == "epilog":
        job |= {"SLURM_JOB_EXIT_CODE": "256", "SLURM_JOB_EXIT_CODE2": "1:0", "SLURM_JOB_DERIVED_EC": "0"}
    return {**job, "SLURM_SCRIPT_CONTEXT": f"{hook}_slurmd", "GPUHEALTH_CONFIG": str(folder / "gpuhealth.toml")}


def run(folder, hook, slow, deaf):
    """The hook of a failed job on a node with a fault that waits."""
    scenario = node.make_node(str(folder), "n1", seed=7)
    programs = {"scontrol": SCONTROL, "sinfo": SINFO, "dcgmi": "#!/bin/sh\ntrap '' TERM\nsleep {deaf}\nexit 1\n"}
    for name, text in programs.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text.format(folder=folder, slow=slow, deaf=60 if "dcgmi" in deaf else 0))
        (folder / name).chmod(0o755)
    (folder / "node").write_text("IDLE\n")
    (folder / "reason").write_text("")
    (folder / "gpuhealth.toml").write_text(CONFIG.format(folder=folder, seconds=SECONDS))
    if "nvml" in deaf:
        node.inject(folder, "hang")
    paths = Paths(state=f"{folder}/state", run=f"{folder}/run")
    found = Settings(mode="enforce", paths=paths, policy=(Row("*", "fault", rung="L3"),))
    fault = Finding(time.time(), "xid", "79", "fallen off the bus", Gpu(uuid=scenario["gpus"][3]["uuid"]))
    record.keep(open_journal(found.paths), found, [fault], time.time())
    return subprocess.run(
        [sys.executable, "-c", HOOK.format(hook=hook, short="" if SOAK else SHORT)],
        cwd=ROOT,
        env=environment(folder, hook),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_whatever_is_slow_or_deaf_a_hook_ends_in_its_time(hook, tmp_path):
    cases = [(slow, deaf) for slow in SLOW for deaf in ((), ("nvml",), ("dcgmi",), ("nvml", "dcgmi"))]
    ends = {}

    def play(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run(folder, hook, *cases[number])
        ends[cases[number]] = (done, "DRAIN" in (folder / "node").read_text())

    with ThreadPoolExecutor(len(cases)) as pool:  # most of them wait
        list(pool.map(play, range(len(cases))))
    for (slow, deaf), (done, drained) in ends.items():
        told = f"{slow} {deaf}: {done.stdout} {done.stderr}"
        assert float(done.stdout) < SECONDS + GRACE, told
        assert "a bug of this program" not in told
        assert done.returncode == 0 or (hook == "prolog" and drained), told
        assert drained or "undecided" in told, told
        assert not (drained and slow == 60), told
    assert any(drained for _, drained in ends.values())


def test_a_child_for_which_there_is_no_time_is_not_started(monkeypatch, tmp_path):
    monkeypatch.setattr(deadline, "ends", time.monotonic() + 1)
    done = child.run(["/bin/touch", str(tmp_path / "there")], timeout=60, grace=0.5)
    assert (done.rc, done.timed_out, done.stuck) == (None, True, None)
    assert not os.listdir(tmp_path)


def test_a_child_and_a_lock_are_waited_for_no_longer_than_there_is_time(settings, monkeypatch):
    monkeypatch.setattr(child, "KILL_WAIT", 0.1)
    monkeypatch.setattr(deadline, "ends", time.monotonic() + 0.5)
    held = lock.take(settings, "diagnostic")
    assert child.run(["/bin/sleep", "60"], timeout=60, grace=0.1).timed_out
    assert lock.take(settings, "diagnostic", time.monotonic() + 60) is None
    assert deadline.left() < 0.5
    os.close(held)


def test_level_1_has_most_of_a_prologs_time_where_nothing_waits_for_slurm(settings, journal, monkeypatch):
    """dcgmi needs 2 x 6 s of its time to stop: a third less, and level 1 would have 3 s of 30."""
    given = []
    monkeypatch.setattr(fitness, "_read_nvml", lambda *_: None)
    monkeypatch.setattr(fitness, "_gpus", lambda *_: ["GPU-1"])
    monkeypatch.setattr(fitness.run_level, "run_level", lambda *_, deadline, **__: given.append(deadline) or "pass")
    ends = time.monotonic() + settings.prolog.timeout
    monkeypatch.setattr(deadline, "ends", ends)
    job = Job(7, "n1")
    assert fitness.before_job(settings, journal, job, ends) == 0
    assert given == [ends - 1]
    assert deadline.ends == ends


def test_time_to_ask_for_a_hold_that_may_be_lost_is_kept_though_level_1_hangs(settings, journal, monkeypatch):
    given = []
    journal.put("hold", {"reason": "gpuhealth:Xid79 GPU3 L3 queued", "since": 0.0, "seen": 0.0})
    monkeypatch.setattr(fitness, "_read_nvml", lambda *_: None)
    monkeypatch.setattr(fitness, "_gpus", lambda *_: ["GPU-1"])
    monkeypatch.setattr(fitness, "_held_still", lambda *_: "undecided")
    monkeypatch.setattr(
        fitness.run_level, "run_level", lambda *_, deadline, **__: given.append(deadline) or "tool-error"
    )
    ends = time.monotonic() + settings.prolog.timeout
    monkeypatch.setattr(deadline, "ends", ends)
    assert fitness.before_job(settings, journal, Job(7, "n1"), ends) == 0
    assert given == [pytest.approx(ends - settings.prolog.timeout / 3)]
