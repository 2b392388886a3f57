"""What slurmd's hooks are told, on four releases of Slurm."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpuhealth.node import environment

CORPUS = Path(__file__).parents[1] / "corpus/slurm"
VERSIONS = ("22.05", "24.11", "25.11", "26.05")
MINIMAL = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
OUTCOMES = {
    "ok": "ok", "srun_ok": "ok", "fail1": "exit 1", "fail137": "exit 137", "sigkill": "signal 9", "segv": "signal 11",
    "abrt": "signal 6", "segv_step": "exit 139", "abrt_step_rc": "exit 134", "derived": "derived 7",
    "multi_rc": "exit 7", "multi_kill": "exit 143", "srun_fail5": "exit 5", "srun_segv": "signal 11",
    "salloc_fail": "exit 3", "two_steps": "exit 4", "overmem": "exit 137", "slowepi": "exit 3",
    "oom_batch": "oom", "oom_step": "oom", "oom_onenode": "oom",
    # What an epilog can't tell from success.
    "cancel": "ok", "cancel2": "ok", "cancel_ign": "ok", "cancel_batchonly": "ok", "scancel_batch_sig": "ok",
    "timeout": "ok", "srun_time": "ok", "nodefail_requeue": "ok",
}  # fmt: skip
BY_VERSION = {
    ("prologfail_srun", "22.05"): "ok",
    ("nodefail_multi", "22.05"): "ok",
    ("nodefail_norequeue", "22.05"): "ok",
    "prologfail_srun": "launch",
    "nodefail_multi": "signal 1",
    "nodefail_norequeue": "signal 1",
}


def samples(hook):
    lines = [(v, json.loads(line)) for v in VERSIONS for line in (CORPUS / v / "hooks.jsonl").read_text().splitlines()]
    return [(v, sample["scenario"], sample["env"]) for v, sample in lines if sample["hook"] == hook]


def read(**env):
    return environment.read({**MINIMAL, **env})


@pytest.mark.parametrize(("version", "scenario", "env"), samples("epilog"))
def test_an_epilog_sees_how_the_job_ended(version, scenario, env):
    job = environment.read(env)
    if scenario == "requeue":  # the requeued attempt reads like a success, the second one exits 2
        assert environment.outcome(job) == ("exit 2" if job.restart and job.exit_code else "ok")
        return
    expected = OUTCOMES.get(scenario) or BY_VERSION.get((scenario, version)) or BY_VERSION[scenario]
    assert environment.outcome(job) == expected
    assert environment.failed(job) == (None if expected in ("ok", "launch") else expected)


@pytest.mark.parametrize(("version", "scenario", "env"), samples("prolog"))
def test_a_prolog_sees_the_job(version, scenario, env):
    job = environment.read(env)
    assert job.context == "prolog_slurmd"
    assert str(job.job_id) == env["SLURM_JOB_ID"]
    assert job.node == env["SLURMD_NODENAME"]
    assert (job.user, job.uid, job.gid, job.account, job.partition) == ("games", 5, 60, "lab", "gpu")
    assert job.nodes.startswith("n")
    assert job.gpus == tuple(int(n) for n in env["SLURM_JOB_GPUS"].split(","))
    assert job.exit_code is None
    assert environment.outcome(job) == "ok"
    assert (job.start is None) == (version == "22.05")


def test_a_job_without_gpus_has_none_of_the_gpu_variables():
    assert read().gpus == ()
    assert not read().has_gpus


@pytest.mark.parametrize(
    ("text", "gpus", "names"),
    [
        ("0,1", (0, 1), ()),
        ("0-3", (0, 1, 2, 3), ()),
        ("[0-1,5]", (0, 1, 5), ()),
        ("3,3", (3,), ()),
        ("", (), ()),
        ("GPU-5d1b8f2e-0000-0000-0000-000000000000,2", (2,), ("GPU-5d1b8f2e-0000-0000-0000-000000000000",)),
        ("MIG-GPU-5d1b8f2e/1/0", (), ("MIG-GPU-5d1b8f2e/1/0",)),
    ],
)
def test_gpus_are_positions_ranges_or_names(text, gpus, names):
    job = read(SLURM_JOB_GPUS=text)
    assert (job.gpus, job.gpu_names) == (gpus, names)


@pytest.mark.parametrize("text", ["0-99999999999", "3-1", "-1", "²", "$(id)", "GPU-\n", "1;2", "0x1", "9" * 5000])
def test_hostile_gpu_lists_are_an_error_that_names_them(text):
    with pytest.raises(ValueError, match="SLURM_JOB_GPUS"):
        read(SLURM_JOB_GPUS=text)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_RESTART_COUNT", "SLURM_JOB_DERIVED_EC"])
@pytest.mark.parametrize("value", ["x", "-1", "1 2", "1" * 40, "\u0661"])
def test_a_number_that_is_none_is_an_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=name):
        read(**{name: value})


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURMD_NODENAME"])
def test_started_by_hand_says_who_starts_it(missing):
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        environment.read({k: v for k, v in MINIMAL.items() if k != missing})


@pytest.mark.parametrize("pair", ["1", "a:b", "1:2:3", ":", "-1:0"])
def test_a_bad_exit_code_is_an_error(pair):
    with pytest.raises(ValueError, match="EXIT_CODE2"):
        read(SLURM_JOB_EXIT_CODE2=pair)


def test_a_job_that_never_started_is_not_a_failed_job():
    for signal in ("53", "54"):
        job = read(SLURM_JOB_EXIT_CODE2=f"0:{signal}")
        assert environment.outcome(job) == "launch"
        assert environment.failed(job) is None


def test_the_raw_status_is_decoded_where_the_pair_is_missing():
    job = read(SLURM_JOB_EXIT_CODE="35072")
    assert (job.exit_code, job.signal) == (137, 0)


def test_a_step_killed_for_memory_shows_in_a_successful_job():
    assert environment.failed(read(SLURM_JOB_EXIT_CODE2="0:0", SLURM_JOB_DERIVED_EC="253")) == "oom"


def test_a_signal_of_a_step_shows_in_a_successful_job():
    assert environment.failed(read(SLURM_JOB_EXIT_CODE2="0:0", SLURM_JOB_DERIVED_EC="139")) == "derived signal 11"


def test_sharing_is_seen_where_slurm_shows_it():
    assert read(SLURM_JOB_GPUS="0", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="3").sharing == "mps"
    assert read(SLURM_JOB_GPUS="0", CUDA_VISIBLE_DEVICES="MIG-5d1b8f2e").sharing == "mig"
    assert read(SLURM_JOB_GPUS="0").sharing == ""


@given(
    st.dictionaries(st.sampled_from([*MINIMAL, "SLURM_JOB_GPUS", "SLURM_JOB_EXIT_CODE2", "SLURM_JOB_UID"]), st.text())
)
def test_whatever_the_environment_holds_it_is_a_job_or_a_value_error(env):
    try:
        environment.read({**MINIMAL, **env})
    except ValueError as error:
        assert "SLURM" in str(error)  # noqa: PT017


def test_reading_the_environment_imports_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, slurm_gpuhealth.node.environment, slurm_gpuhealth.slurm.reason; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True,
                                cwd=Path(__file__).parents[2]).stdout.split())  # fmt: skip
    assert not loaded & {"re", "json", "typing", "dataclasses", "enum", "pathlib", "subprocess", "datetime", "urllib"}


def test_a_users_name_of_any_bytes_can_be_kept():
    job = environment.read({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "SLURM_JOB_USER": "a\udcff"})
    assert job.user.encode() == b"a?"
