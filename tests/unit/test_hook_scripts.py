"""The scripts that Slurm runs: only a decision of ours may drain a node, and no environment is obeyed."""

import importlib
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def hook(tmp_path):
    """Run the script `kind`.d/50-gpuhealth with a `main` that does `body`, installed below tmp_path."""

    def run(kind, body, **env):
        home = tmp_path / "venv"
        hooks = home / "lib/slurm_gpuhealth/hooks"
        hooks.mkdir(parents=True, exist_ok=True)
        (home / "bin").mkdir(exist_ok=True)
        for package in (hooks.parent, hooks):
            (package / "__init__.py").write_text("")
        (hooks / f"{kind}.py").write_text(body)
        # -I heeds no PYTHONPATH, so the stand-in for a venv's python adds its own packages
        python = home / "bin/python"
        path = f"import sys; sys.path.insert(0, {str(home / 'lib')!r})"
        python.write_text(f'#!/bin/sh\n[ "$1" = -I ] || exit 99\nexec /usr/bin/python3 -I -c "{path}\n$3"\n')
        python.chmod(0o755)
        script = tmp_path / "50-gpuhealth"
        script.write_text((SCRIPTS / f"{kind}.d/50-gpuhealth").read_text().replace("/opt/gpuhealth", str(home)))
        script.chmod(0o755)
        return subprocess.run(
            [str(script)], env={"SLURM_JOB_GPUS": "0", **env}, capture_output=True, text=True, timeout=30
        )

    return run


def exits(code):
    return f"import sys\ndef main():\n    sys.exit({code})\n"


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
@pytest.mark.parametrize(
    "body", [exits(0), exits(2), exits(143), "import nothing_there\n", "def main(:\n", "main = None\n"]
)
def test_a_program_that_fails_drains_no_node(hook, kind, body):
    assert hook(kind, body).returncode == 0


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_decision_of_ours_reaches_slurm(hook, kind):
    assert hook(kind, exits(1)).returncode == 1


def test_a_job_without_gpus_starts_no_program(hook, tmp_path):
    body = f"def main():\n    open({str(tmp_path / 'started')!r}, 'w')\n"
    assert hook("prolog", body, SLURM_JOB_GPUS="").returncode == 0
    assert not (tmp_path / "started").exists()
    assert hook("prolog", body).returncode == 0
    assert (tmp_path / "started").exists()


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_copy_of_the_script_that_names_the_module_of_before_still_starts_the_program(kind):
    before = importlib.import_module(f"slurm_gpuhealth.commands.{kind}")
    assert before.main is importlib.import_module(f"slurm_gpuhealth.hooks.{kind}").main


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_missing_program_drains_no_node(kind):
    script = SCRIPTS / f"{kind}.d/50-gpuhealth"
    text = script.read_text().replace("/opt/gpuhealth", "/nowhere")
    assert (
        subprocess.run(["/bin/sh", "-c", text], env={"SLURM_JOB_GPUS": "0"}, timeout=30, capture_output=True).returncode
        == 0
    )


def test_a_killed_program_drains_no_node(hook):
    assert hook("prolog", "import os\ndef main():\n    os.kill(os.getpid(), 9)\n").returncode == 0


def test_the_environment_is_not_obeyed(hook, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(42)\n")
    body = "import os, sys\ndef main():\n    print(os.environ['GPUHEALTH_CONFIG'], sys.argv[0])\n"
    done = hook("prolog", body, PYTHONPATH=str(tmp_path), PYTHONHOME="/nowhere", GPUHEALTH_CONFIG="/tmp/evil.toml")
    assert (done.returncode, done.stdout) == (0, "/etc/gpuhealth/gpuhealth.toml gpuhealth-prolog\n")


@pytest.mark.parametrize("kind", ["prolog", "epilog", "check"])
def test_a_program_that_slurm_starts_begins_without_what_pip_would_import(kind):
    script = SCRIPTS / f"gpuhealth-{kind}"
    start = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS.parent)!r}); sys.argv[1:] = ['--help']\n"
        f"try: exec(open({str(script)!r}).read())\n"
        "finally: print('re' in sys.modules)\n"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", start], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.startswith(f"gpuhealth-{kind}: ")
    assert done.stdout.endswith("\nFalse\n")
    project = (SCRIPTS.parent / "pyproject.toml").read_text()
    assert f'"scripts/{script.name}"' in project
    assert f"{script.name} =" not in project
