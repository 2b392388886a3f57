"""gpuhealth doctor on a real cluster: quiet on a good one, and each thing that is broken is found with its remedy."""

import contextlib
import json
import os
import subprocess
import time

from slurm_gpuhealth.config import load as configuration
from tests.cluster import USER, release
from tests.daemons import PATIENCE, until
from tests.lab import BIN, ROOT

LAB = {"nodes": 2, "dbd": False, "floor": 2, "poll": "300s"}
OPEN = "".join(configuration.unsafe(str(BIN / "gpuhealth-check"))[:1]).partition(":")[0]
"""A folder above this clone that others can write: of the programs in it the doctor rightly says so."""


def doctor(lab, node="n1", config=None, **options):
    """Exit code, and level, text and remedy by check (the last line of each)."""
    env = {**lab.env, "GPUHEALTH_CONFIG": str(config or lab.config)}
    argv = [str(BIN / "gpuhealth"), "--node", node, "doctor", "--json"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE, **options)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0)
    lines = {line["check"]: line for line in found["lines"] if not (OPEN and OPEN in line["what"])}
    return int(any(line["level"] == "FAIL" for line in lines.values())), lines


@contextlib.contextmanager
def slurm_conf(lab, *changes):
    """slurm.conf with each (old, new) replaced, or the line added where old is empty; put back afterwards."""
    before = text = lab.conf.read_text()
    for old, new in changes:
        assert not old or old in text
        text = text.replace(old, new) if old else f"{text}{new}\n"
    try:
        lab.conf.write_text(text)
        lab.run("scontrol", "reconfigure")
        yield
    finally:
        lab.conf.write_text(before)
        lab.run("scontrol", "reconfigure")


@contextlib.contextmanager
def hook(lab, name, text="#!/bin/sh\n", mode=0o755):
    path = lab.lab / "prolog.d" / name
    path.write_text(text)
    path.chmod(mode)
    try:
        yield path
    finally:
        path.unlink()


def test_a_well_wired_node_has_nothing_to_mend(lab):
    code, lines = doctor(lab)
    wrong = {check: line for check, line in lines.items() if line["level"] != "ok"}
    assert wrong.keys() == {"levels"}, wrong  # which no diagnostic has shown yet
    assert code == 0
    assert {"prolog", "epilog", "healthcheckprogram", "kernel-log", "gres", "host-engine", "checked"} <= lines.keys()


def test_a_line_for_people_has_level_fact_and_remedy(lab):
    with hook(lab, "10-site", mode=0o644) as path:
        text = lab.gpuhealth("n1", "doctor")
    assert f"FAIL  Prolog: {path} is not executable: each job drains its node — chmod 755 {path}" in text


def test_what_slurm_makes_of_its_configuration_is_judged(lab):
    changes = [
        ("PrologFlags=Alloc,DeferBatch", "PrologFlags=DeferBatch"),
        ("nohold_on_prolog_fail,", ""),
        ("HealthCheckNodeState=ANY", "HealthCheckNodeState=ALLOC,MIXED,NONDRAINED_IDLE"),
        ("", "PrologEpilogTimeout=20"),
        ("", "SuspendTime=600\nSuspendProgram=/bin/true\nResumeProgram=/bin/true"),
    ]
    with slurm_conf(lab, *changes):
        code, lines = doctor(lab)
    assert code == 1
    wrong = {check: line["level"] for check, line in lines.items() if line["level"] != "ok"}
    flags = {} if release() >= (26, 5) else {"prolog-flags": "FAIL"}  # in 26.05 DeferBatch brings Alloc with it
    assert wrong == {
        **flags,
        "nohold": "warn",
        "node-state": "FAIL",
        "prologtimeout": "FAIL",
        "epilogtimeout": "FAIL",
        "power": "FAIL",
        "levels": "skip",
    }
    assert all(line["remedy"] for check, line in lines.items() if check in wrong)


def test_of_two_prolog_lines_those_that_slurm_heeds_are_judged(lab):
    with slurm_conf(lab, ("", "Prolog=/bin/true")):
        _, lines = doctor(lab)
        several = "Prolog[1]" in lab.run("scontrol", "show", "config")
    if several:  # 24.11 and later
        assert "prolog-lines" not in lines
        assert (lines["prolog"]["level"], "50-gpuhealth, true" in lines["prolog"]["what"]) == ("ok", True)
        return
    assert lines["prolog-lines"]["level"] == "warn"
    assert (lines["prolog"]["level"], "does not start gpuhealth-prolog" in lines["prolog"]["what"]) == ("FAIL", True)


def test_the_order_told_is_the_order_in_which_slurm_runs_the_files(lab):
    seen = lab.lab / "order"
    with contextlib.ExitStack() as files:
        for name in ("10-a", "30-c", "9-z", "A-cap", "a-low"):
            files.enter_context(hook(lab, name, f"#!/bin/sh\necho {name} >>{seen}\n"))
        lab.wait(lab.submit("true", nodelist="n1"), "COMPLETED")
        told = doctor(lab)[1]["prolog"]["what"].rpartition(": ")[2].rstrip(")").split(", ")
    assert seen.read_text().split() == [name for name in told if name != "50-gpuhealth"]


def test_a_dead_controller_is_one_line_and_the_rest_goes_on(lab):
    lab.stop_controller()
    try:
        began = time.monotonic()
        code, lines = doctor(lab)
        assert time.monotonic() - began < 30
    finally:
        lab.start_controller()
    assert (code, lines["controller"]["level"]) == (1, "FAIL")
    assert "prolog-flags" not in lines
    assert [lines[check]["level"] for check in ("kernel-log", "host-engine", "gres", "checked")] == ["ok"] * 4


def test_a_missing_host_engine_is_found_and_dcgmi_starts_none(lab):
    lab.daemons.stop("hostengine-n2")
    lab.check("n2")
    home = lab.lab / "nodes/n2"
    own = home / "embedded.jsonl"
    before = own.read_text() if own.exists() else ""
    code, lines = doctor(lab, "n2")
    assert (code, lines["host-engine"]["level"]) == (1, "FAIL")
    assert (own.read_text() if own.exists() else "") == before


def test_a_configuration_that_others_can_write_is_refused(lab):
    lab.config.chmod(0o666)
    try:
        code, lines = doctor(lab)
    finally:
        lab.config.chmod(0o600)
    assert (code, lines["configuration"]["level"]) == (1, "FAIL")
    assert lines["configuration"]["remedy"] == f"chmod go-w {lab.config}"


def test_a_broken_configuration_is_told_and_does_not_end_the_doctor(lab):
    good = lab.config.read_text()
    lab.config.write_text(good + "\n[prolog]\ntimeuot = 3\n")
    try:
        code, lines = doctor(lab)
    finally:
        lab.config.write_text(good)
    assert (code, lines["configuration"]["level"]) == (1, "FAIL")
    assert "timeuot" in lines["configuration"]["what"]
    assert "prolog-flags" in lines


def test_rungs_that_are_on_need_what_they_call(lab):
    mend = lab.lab / "mend"
    lab.configure(f'[repair]\ncommand = ["{mend}"]\n', reboot="true", reset="true")
    try:
        lines = doctor(lab)[1]
        assert {check: lines[check]["level"] for check in ("reboot", "repair", "ladder")} == {
            "reboot": "warn",
            "repair": "FAIL",
            "ladder": "ok",
        }
        mend.write_text("#!/bin/sh\n")
        mend.chmod(0o777)
        with slurm_conf(lab, ("", "ResumeTimeout=900")):
            lines = doctor(lab)[1]
        assert (lines["reboot"]["level"], lines["repair"]["remedy"]) == ("ok", f"chmod go-w {mend}")
    finally:
        lab.configure()


def test_off_the_nodes_slurm_conf_alone_is_judged(lab):
    code, lines = doctor(lab, "login1", config="/nowhere")
    assert lines["node"]["level"] == lines["prolog"]["level"] == "skip"
    assert lines["prolog-flags"]["level"] == "ok"
    assert not {"configuration", "kernel-log", "gres"} & lines.keys()
    assert code == 0


def test_an_ordinary_user_is_told_what_only_root_can_see(lab):
    code, lines = doctor(lab, config=lab.config, user=USER)
    assert (code, lines["configuration"]["level"], lines["prolog-flags"]["level"]) == (0, "skip", "ok")


def test_a_driver_that_hangs_does_not_hang_the_doctor(lab):
    lab.inject("n2", "hang", "--gpu", 1)
    began = time.monotonic()
    code, lines = doctor(lab, "n2")
    assert time.monotonic() - began < 45
    assert (code, lines["nvml"]["level"]) == (1, "FAIL")


def test_the_scripts_to_be_linked_work_on_a_real_node(lab):
    """As installed, but for two paths: where the programs are, and the configuration."""
    for kind in ("prolog", "epilog"):
        text = (ROOT / f"scripts/{kind}.d/50-gpuhealth").read_text()
        text = text.replace("/opt/gpuhealth/bin/python", str(BIN / "python"))
        (lab.lab / f"{kind}.d/50-gpuhealth").write_text(text.replace("/etc/gpuhealth/gpuhealth.toml", str(lab.config)))
    assert doctor(lab)[1]["prolog"]["level"] == doctor(lab)[1]["epilog"]["level"] == "ok"
    job = lab.submit("echo ran", gres="gpu:1", nodelist="n1")
    lab.wait(job, "COMPLETED")
    ended = "SELECT outcome FROM job WHERE job = ? AND ended IS NOT NULL"
    until(lambda: lab.rows("n1", ended, job) == [("ok",)], "the job in the journal")
    assert os.path.exists(lab.lab / "out" / str(job))
