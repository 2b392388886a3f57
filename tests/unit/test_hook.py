"""How the programs that Slurm starts end: only a decision leads to an exit code other than 0."""

import signal
import subprocess
import sys
import time

import pytest

RUN = "from slurm_gpuhealth.node import hook; from slurm_gpuhealth import say; {}; hook.run(body)"
WAITS = "import time\ndef body():\n    print('up', flush=True); time.sleep(60)"


def run(body, **options):
    return subprocess.run([sys.executable, "-c", f"{body}\n{RUN.format('pass')}"], timeout=20, **options)


def test_the_verdict_is_the_exit_code_and_a_bug_is_0():
    assert run("def body(): return 1").returncode == 1
    assert run("def body(): return 1 // 0", stderr=subprocess.DEVNULL).returncode == 0
    assert run("def body(): raise SystemExit(143)", stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("stream", ["/dev/full", None])
def test_what_can_not_be_said_changes_no_exit_code(stream):
    body = "def body():\n    say.say('something'); say.say('more'); return 0"
    if stream:
        with open(stream, "w") as full:
            assert run(body, stderr=full, stdout=full).returncode == 0
    else:
        assert run(body, preexec_fn=lambda: [__import__("os").close(fd) for fd in (0, 1, 2)]).returncode == 0


def test_slurmd_that_loses_patience_is_no_verdict():
    program = subprocess.Popen(
        [sys.executable, "-c", f"{WAITS}\n{RUN.format('pass')}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    program.stdout.readline()
    time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    assert program.wait(5) == 0


@pytest.mark.parametrize("program", ["prolog", "epilog", "check"])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_who_asks_for_help_gets_it_and_nothing_is_run(program, word, tmp_path):
    start = f"from slurm_gpuhealth.hooks.{program} import main; main()"
    env = {"GPUHEALTH_CONFIG": str(tmp_path / "none.toml"), "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}
    done = subprocess.run([sys.executable, "-c", start, word], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")  # to run would say that there is no configuration
    assert done.stdout.startswith(f"gpuhealth-{program}: ")
    assert "it takes no options" in done.stdout
