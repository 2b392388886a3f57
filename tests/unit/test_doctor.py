"""What the doctor says about Slurm's configuration and a node: real output of four releases, and typical mistakes."""

import os
from pathlib import Path

import pytest

from slurm_gpuhealth.config.settings import Check, Dcgm, Epilog, Gpus, Hang, Paths, Prolog, Reboot, Settings, Sources
from slurm_gpuhealth.doctor import look, node, slurm_conf
from slurm_gpuhealth.doctor.slurm_conf import Entry
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm.node import parse_config

CORPUS = Path(__file__).parents[1] / "corpus/slurm"
VERSIONS = ("22.05", "24.11", "25.11", "26.05")
GOOD = """\
Epilog[0] = /etc/slurm/epilog.d/*
HealthCheckInterval = 60 sec
HealthCheckNodeState = ANY
HealthCheckProgram = /opt/gpuhealth/bin/gpuhealth-check
Prolog[0] = /etc/slurm/prolog.d/*
PrologEpilogTimeout = 65534
PrologFlags = Alloc,DeferBatch
SchedulerParameters = bf_interval=30,nohold_on_prolog_fail
SlurmdUser = root(0)
SuspendProgram = (null)
SuspendTime = INFINITE
"""
LISTING = {
    "/etc/slurm/prolog.d/*": [Entry("/etc/slurm/prolog.d/50-gpuhealth", starts="prolog")],
    "/etc/slurm/epilog.d/*": [Entry("/etc/slurm/epilog.d/50-gpuhealth", starts="epilog")],
    "/opt/gpuhealth/bin/gpuhealth-check": [Entry("/opt/gpuhealth/bin/gpuhealth-check", starts="check")],
}


def judge(version=(24, 11, 5), settings=None, listing=LISTING, written=None, **changes):
    """GOOD with `changes` (None takes the key away), judged."""
    config = {**parse_config(GOOD), **{key: value and (value,) for key, value in changes.items()}}
    config = {key: value or () for key, value in config.items()}
    return slurm_conf.judge_slurm_conf(config, version, settings or Settings(), listing, written, "n1")


def prolog(*entries):
    return {**LISTING, "/etc/slurm/prolog.d/*": list(entries)}


def level(lines, check):
    """The worst level that `check` got; "" where it said nothing."""
    order = ["", "skip", "ok", "warn", "FAIL"]
    return max((line.level for line in lines if line.check == check), key=order.index, default="")


def find(lines, check):
    return next(line for line in lines if line.check == check and line.level in ("warn", "FAIL"))


def bad(lines):
    return {line.check: line.level for line in lines if line.level in ("warn", "FAIL")}


@pytest.mark.parametrize("version", VERSIONS)
def test_real_configurations_of_every_release(version):
    config = parse_config((CORPUS / version / "scontrol_show_config.txt").read_text())
    assert slurm_conf.version_of(config)[:2] == tuple(map(int, version.split(".")))
    files = {key: config[key][0] for key in slurm_conf.PROGRAMS}
    listing = {path: [Entry(path, starts=slurm_conf.PROGRAMS[key])] for key, path in files.items()}
    lines = slurm_conf.judge_slurm_conf(config, slurm_conf.version_of(config), Settings(), listing, {}, "n1")
    assert bad(lines) == {"prolog-flags": "warn", "nohold": "warn", "interval": "warn"}
    assert {line.check for line in lines} > {"prolog", "epilog", "healthcheckprogram", "power", "node-state"}


def test_nothing_is_wrong_with_the_recommended_configuration():
    assert bad(judge()) == {}
    assert all(line.level == "ok" for line in judge())


def test_what_the_install_guide_says_to_wire_is_what_the_doctor_wants():
    guide = (Path(__file__).parents[2] / "docs/install.md").read_text()
    wiring = guide.partition("```conf\n")[2].partition("```")[0]
    config = {key: (value,) for key, _, value in (line.partition("=") for line in wiring.split())}
    assert bad(slurm_conf.judge_slurm_conf(config, (22, 5), Settings(), LISTING)) == {}


@pytest.mark.parametrize("line", judge(listing=prolog(), PrologFlags=None, HealthCheckInterval="0 sec"))
def test_whatever_is_wrong_comes_with_a_remedy(line):
    assert line.remedy or line.level == "ok"


@pytest.mark.parametrize("key", ["Prolog", "Epilog", "HealthCheckProgram"])
def test_a_program_that_is_not_wired_fails(key):
    line = find(judge(**{key: None}), key.lower())
    assert line.level == "FAIL"
    assert line.remedy.startswith(f"in slurm.conf: {key}=/")
    other = {pattern: [Entry("/x/50-other")] for pattern in LISTING}
    assert level(judge(listing=other), key.lower()) == "FAIL"


def test_off_the_nodes_the_files_are_not_judged():
    lines = judge(listing=None)
    assert {line.check for line in lines if line.level == "skip"} == {"prolog", "epilog", "healthcheckprogram"}
    assert bad(lines) == {}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (Entry("/etc/slurm/prolog.d/10-site"), ""),
        (Entry("/etc/slurm/prolog.d/10-site", runs=False), "FAIL"),
        (Entry("/etc/slurm/prolog.d/old", "folder"), "FAIL"),
        (Entry("/etc/slurm/prolog.d/10-site", "missing"), "FAIL"),
        (Entry("/etc/slurm/prolog.d/10-site~"), "warn"),
        (Entry("/etc/slurm/prolog.d/10-site.rpmsave"), "warn"),
        (Entry("/etc/slurm/prolog.d/10-site.dpkg-old"), "warn"),
    ],
)
def test_files_beside_ours_that_drain_nodes(entry, expected):
    ours = LISTING["/etc/slurm/prolog.d/*"][0]
    lines = judge(listing=prolog(ours, entry))
    assert level(lines, "prolog-files") == expected
    assert level(lines, "prolog") == "ok"


def test_an_empty_glob_drains_nodes():
    line = find(judge(listing=prolog()), "prolog-files")
    assert (line.level, "each job drains its node" in line.what) == ("FAIL", True)


def test_the_order_is_told_as_slurm_runs_it():
    names = ("10-a", "30-c", "50-gpuhealth", "9-z", "A-cap")
    entries = [Entry(f"/d/{name}", starts="prolog" if name == "50-gpuhealth" else "") for name in names]
    line = next(line for line in judge(listing=prolog(*entries)) if line.check == "prolog")
    assert "A-cap, 9-z, 50-gpuhealth, 30-c, 10-a" in line.what


def test_ours_twice_and_ours_without_a_program():
    ours = LISTING["/etc/slurm/prolog.d/*"][0]
    assert (
        level(judge(listing=prolog(ours, Entry("/etc/slurm/prolog.d/60-gpuhealth", starts="prolog"))), "prolog")
        == "warn"
    )
    lines = judge(listing=prolog(replace(ours, lacks="/opt/gpuhealth/bin/python")))
    assert "/opt/gpuhealth/bin/python, which is not there" in find(lines, "prolog").what


@pytest.mark.parametrize(
    ("unsafe", "expected"),
    [
        ("/d/x can be written by others (mode 0777): chmod go-w /d/x", "FAIL"),
        ("/d belongs to uid 64030, who can change it: chown root /d", "warn"),
    ],
)
def test_a_hook_that_others_can_change(unsafe, expected):
    line = find(judge(listing=prolog(Entry("/d/x", starts="prolog", unsafe=(unsafe,)))), "prolog-unsafe")
    assert (line.level, line.remedy) == (expected, unsafe.rpartition(": ")[2])


def test_slurm_that_heeds_only_the_last_of_several_lines():
    written = slurm_conf.parse_written("Prolog=/a/*\nprolog = /etc/slurm/prolog.d/*  # ours\n#Prolog=/c\n")
    assert written == {"prolog": ("/a/*", "/etc/slurm/prolog.d/*")}
    assert level(judge(written=written), "prolog-lines") == "warn"
    assert level(judge(written={"prolog": ("/a",)}), "prolog-lines") == ""


@pytest.mark.parametrize(
    ("version", "heeded", "expected"),
    [("22.05", ("/bin/t*e",), "warn"), ("26.05", ("/bin/true", "/bin/t*e"), "")],
)
@pytest.mark.parametrize("key", ["Prolog", "Epilog"])
def test_no_line_and_two_lines_as_each_release_tells_of_them(version, heeded, expected, key):
    def told(how, written):
        config = parse_config((CORPUS / version / f"scontrol_show_config_prolog_{how}.txt").read_text())
        lines = slurm_conf.judge_slurm_conf(config, slurm_conf.version_of(config), Settings(), {}, written, "n1")
        return config.get(key, ()), lines

    none, lines = told("none", {})
    assert none == ()
    assert f"{key} is not set" in find(lines, key.lower()).what
    assert level(lines, f"{key.lower()}-lines") == ""
    assert level(lines, "prolog-flags") == "ok"
    two, lines = told("two", {key.lower(): ("/bin/true", "/bin/t*e")})
    assert two == heeded
    assert level(lines, f"{key.lower()}-lines") == expected


@pytest.mark.parametrize(
    ("states", "version", "expected"),
    [
        ("ANY", (22, 5), "ok"),
        ("CYCLE,ANY", (22, 5), "ok"),
        ("CYCLE", (22, 5), "ok"),
        (None, (22, 5), "ok"),
        ("NONDRAINED_IDLE", (22, 5), "ok"),
        ("IDLE,NONDRAINED_IDLE", (22, 5), "warn"),
        ("NONDRAINED_IDLE", (24, 11), "FAIL"),
        ("START_ONLY", (24, 11), "ok"),
        ("START_ONLY", (26, 5), "FAIL"),
        ("IDLE", (24, 11), "warn"),
        ("IDLE,ALLOC,MIXED", (24, 11), "warn"),
        ("ALLOC,MIXED", (24, 11), "FAIL"),
        ("CYCLE,ALLOC", (24, 11), "FAIL"),
    ],
)
def test_node_states_that_leave_drained_nodes_out(states, version, expected):
    assert level(judge(version, HealthCheckNodeState=states), "node-state") == expected


@pytest.mark.parametrize(
    ("text", "version", "expected"),
    [
        ("Alloc,DeferBatch", (22, 5), "ok"),
        ("DeferBatch", (22, 5), "FAIL"),
        ("DeferBatch", (24, 11), "FAIL"),
        ("DeferBatch", (26, 5), "ok"),
        ("Alloc", (26, 5), "warn"),
        ("Contain", (24, 11), "warn"),
        ("Contain,DeferBatch", (24, 11), "ok"),
        ("Serial", (24, 11), "FAIL"),
        ("Alloc,DeferBatch,NoHold", (24, 11), "warn"),
        (None, (24, 11), "FAIL"),
    ],
)
def test_prolog_flags(text, version, expected):
    assert level(judge(version, PrologFlags=text), "prolog-flags") == expected


@pytest.mark.parametrize(
    ("version", "parameters", "files", "expected", "words"),
    [
        ((24, 11, 5), "enable_expedited_requeue", ("10-site", "50-gpuhealth"), "ok", "has no effect: Slurm knows"),
        ((25, 11), None, ("50-gpuhealth",), "ok", "has no effect: SlurmctldParameters"),
        ((25, 11), "enable_configless,enable_expedited_requeue", ("50-gpuhealth", "90-site"), "ok", "starts elsewhere"),
        ((26, 5, 5), "enable_expedited_requeue", ("10-a", "20-b", "50-gpuhealth"), "warn", "does not run 20-b, 10-a"),
    ],
)
def test_jobs_of_expedited_requeue(version, parameters, files, expected, words):
    entries = [Entry(f"/e/{name}", starts="epilog" if "gpuhealth" in name else "") for name in files]
    listing = {**LISTING, "/etc/slurm/epilog.d/*": entries}
    (line,) = (
        one for one in judge(version, listing=listing, SlurmctldParameters=parameters) if one.check == "expedite"
    )
    assert (line.level, words in line.what) == (expected, True)
    off = judge(version, Settings(epilog=Epilog(expedite=False)), listing, SlurmctldParameters=parameters)
    assert level(off, "expedite") == ""


@pytest.mark.parametrize(("states", "expected"), [("ANY", "ok"), ("IDLE,ALLOC,MIXED", "FAIL")])
def test_a_node_that_the_ladder_reboots_comes_back_down_and_must_be_looked_at(states, expected):
    settings = Settings(reboot=Reboot(enabled=True))
    assert level(judge(settings=settings, HealthCheckNodeState=states), "node-state") == expected


def test_the_flags_that_are_there_stay_in_the_line_to_paste():
    assert find(judge(PrologFlags="Serial,X11"), "prolog-flags").remedy.endswith("=Alloc,DeferBatch,Serial,X11")
    assert find(judge(SchedulerParameters="a=1,b"), "nohold").remedy.endswith("=a=1,b,nohold_on_prolog_fail")
    assert find(judge(SchedulerParameters=None), "nohold").remedy.endswith("=nohold_on_prolog_fail")


def test_run_in_job_hides_exit_codes():
    assert level(judge(PrologFlags="Alloc,DeferBatch,RunInJob"), "run-in-job") == "FAIL"


def test_held_jobs_are_worse_where_every_job_is_moved_by_an_exit_code():
    assert level(judge(SchedulerParameters="x"), "nohold") == "warn"
    exits = Settings(prolog=Prolog(move_job="exit"))
    assert level(judge(settings=exits, SchedulerParameters="x"), "nohold") == "FAIL"


@pytest.mark.parametrize(
    ("changes", "prolog", "epilog"),
    [
        ({"PrologEpilogTimeout": "65534"}, "ok", "ok"),
        ({"PrologEpilogTimeout": "60"}, "ok", "FAIL"),
        ({"PrologEpilogTimeout": "30"}, "FAIL", "FAIL"),
        ({"PrologEpilogTimeout": "20", "EpilogTimeout": "600 sec"}, "FAIL", "ok"),
        ({"PrologTimeout": "20"}, "FAIL", "ok"),
        ({"PrologTimeout": "0 sec"}, "ok", "ok"),
    ],
)
def test_slurm_ends_our_programs_too_early(changes, prolog, epilog):
    lines = judge(**changes)
    assert (level(lines, "prologtimeout"), level(lines, "epilogtimeout")) == (prolog, epilog)


def test_a_limit_that_only_the_file_tells():
    assert level(judge(written={"epilogtimeout": ("100",)}), "epilogtimeout") == "FAIL"
    assert level(judge(written={"epilogtimeout": ("100",)}, settings=Settings(epilog=Epilog(timeout=50.0))), "x") == ""


def test_checks_that_are_too_far_apart_to_see_jobs_that_stand_still():
    for every, after, off, said in (
        (200, 600, "", ""),
        (300, 600, "", "warn"),
        (300, 900, "", ""),
        (300, 600, "off", ""),
    ):
        given = Settings(hang=Hang(after=float(after)), sources=Sources(nvml=off or "enforce"))
        lines = judge(settings=given, HealthCheckInterval=f"{every} sec")
        assert level(lines, "hang") == said
        assert all('after = "900s"' in one.remedy for one in lines if one.check == "hang")


def test_a_health_check_that_slurm_never_runs_or_ends_too_early():
    assert level(judge(HealthCheckInterval="0 sec"), "interval") == "FAIL"
    assert level(judge(HealthCheckInterval="300 sec"), "interval") == "warn"
    assert level(judge(HealthCheckTimeout="0 sec"), "check-timeout") == ""
    assert level(judge(HealthCheckTimeout="30 sec"), "check-timeout") == "FAIL"
    assert level(judge(settings=Settings(check=Check(timeout=60.0))), "check-timeout") == "FAIL"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "FAIL"),
        ({"SuspendTime": "INFINITE"}, "ok"),
        ({"SuspendTime": "-1"}, "ok"),
        ({"SuspendProgram": None}, "ok"),
        ({"SuspendExcStates": "DOWN,DRAIN"}, "ok"),
        ({"SuspendExcNodes": "x,n[1-3]"}, "ok"),
        ({"SuspendExcNodes": "n[1-3]:2"}, "warn"),
        ({"SuspendExcNodes": "n[1-99999]"}, "warn"),
        ({"SuspendExcParts": "gpu"}, "warn"),
    ],
)
def test_power_saving_that_could_take_a_held_node(changes, expected):
    base = {"SuspendTime": "300 sec", "SuspendProgram": "/sbin/off"}
    assert level(judge(**{**base, **changes}), "power") == expected


def test_slurmd_must_be_roots():
    assert level(judge(SlurmdUser="slurm(64030)"), "slurmd-user") == "FAIL"


# ---- the node


def test_a_refused_configuration_names_the_command_that_mends_it():
    unsafe = "/etc/gpuhealth can be written by others (mode 0777): chmod go-w /etc/gpuhealth"
    broken = "/etc/gpuhealth/gpuhealth.toml:3: slurm.timeout: expected a duration, not 5"
    first, second = node.judge_configuration("/x", [unsafe, broken], Settings())
    assert (first.level, first.remedy) == ("FAIL", "chmod go-w /etc/gpuhealth")
    assert (second.level, second.remedy) == ("FAIL", "gpuhealth config check")
    assert "expected a duration, not 5" in second.what


def test_shadow_and_sources_that_are_off_are_told():
    assert bad(node.judge_configuration("/x", [], Settings())) == {"mode": "warn"}
    settings = Settings(mode="enforce", sources=Sources(kernel="off"))
    assert bad(node.judge_configuration("/x", [], settings)) == {"sources": "warn"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [("No such file", "warn"), ((5, 0o40700), "FAIL"), ((0, 0o40755), "warn"), ((0, 0o40700), "ok")],
)
def test_the_journals_folder(found, expected):
    assert node.judge_folder("state", "/s", found).level == expected


NOW = 1_800_000_000.0
WELL = {"trouble": "", "checked": NOW - 20, "failure": None, "sources": {}, "gres": None, "stuck": None}


@pytest.mark.parametrize(
    ("changes", "check", "expected"),
    [
        ({}, "checked", "ok"),
        ({"checked": None}, "checked", "FAIL"),
        ({"checked": NOW - 3600}, "checked", "FAIL"),
        ({"checked": NOW + 3600}, "checked", "warn"),
        ({"trouble": "journal in /s: disk full"}, "journal", "FAIL"),
        ({"failure": {"program": "gpuhealth-check", "time": NOW, "error": "KeyError"}}, "failure", "warn"),
        ({"sources": {"ib": {"error": "could not be read"}}}, "source", "warn"),
        ({"sources": {"ib": {"error": ""}}}, "source", ""),
        ({"stuck": {"nvml": ("boot", 1, 2)}}, "stuck", "FAIL"),
        ({"gres": {"error": "slurmd -G: no", "uuids": []}}, "positions", "warn"),
    ],
)
def test_what_the_journal_tells(changes, check, expected):
    assert level(list(node.judge_journal({**WELL, **changes}, Settings(), NOW)), check) == expected


@pytest.mark.parametrize(
    ("error", "mode", "root", "expected"),
    [
        ("", "enforce", True, "ok"),
        ("EPERM", "enforce", True, "FAIL"),
        ("EPERM", "enforce", False, "skip"),
        ("", "off", True, "skip"),
    ],
)
def test_the_kernel_log(error, mode, root, expected):
    assert node.judge_kernel_log("/dev/kmsg", error, mode, root).level == expected


@pytest.mark.parametrize(
    ("offered", "driven", "configured", "expected"),
    [
        (8, 8, 8, {}),
        (8, 8, None, {}),
        (8, 7, 8, {"gres": "FAIL"}),
        (7, 7, 8, {"gres": "FAIL"}),
        (0, "no library", 0, {}),
        (8, "no library", 8, {"nvml": "FAIL"}),
        ("no answer in 10 s", 8, 8, {"gres": "FAIL"}),
        (4, 4, 4, {"gres": "warn"}),
    ],
)
def test_gpus_that_slurm_and_the_driver_have(offered, driven, configured, expected):
    settings = Settings(gpus=Gpus(count=8))
    assert bad(node.judge_gpus(offered, driven, configured, settings)) == expected


def test_a_node_that_registers_with_less_than_configured_is_told():
    assert bad(node.judge_registered({"DRAIN", "INVALID_REG"})) == {"registered": "FAIL"}
    assert bad(node.judge_registered(())) == {}


ENGINE = {"answers": True, "error": "", "version": "4.4.1", "seen": 8, "last": "4.4.1"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"answers": False, "seen": None}, {"host-engine": "FAIL"}),
        ({"version": "5.0.1"}, {"dcgm-version": "warn", "dcgm-mismatch": "warn"}),
        ({"version": "1.7.2", "last": None}, {"dcgm-version": "warn"}),
        ({"version": "3.3.9", "last": "3.3.9"}, {}),
        ({"version": None}, {}),
        ({"seen": 7}, {"dcgm-gpus": "FAIL"}),
        ({"error": "dcgmi: no such file"}, {"dcgm": "FAIL"}),
        ({"trouble": "dcgmi discovery ended with exit code 223"}, {"dcgm-discovery": "warn"}),
    ],
)
def test_dcgm(changes, expected):
    assert bad(node.judge_dcgm(Dcgm(), {**ENGINE, **changes}, 8)) == expected


def test_dcgm_that_is_off_is_not_judged():
    assert [line.level for line in node.judge_dcgm(Dcgm(backend="off"), {}, 8)] == ["skip"]


def test_several_slurmd_need_a_journal_each():
    shared = Settings(paths=Paths(state="/var/lib/gpuhealth/n1"))
    assert "/run/gpuhealth" in node.judge_slurmds(2, "n1", shared).what
    assert node.judge_slurmds(1, "n1", shared) is None
    own = Settings(paths=Paths(state="/var/lib/gpuhealth/n1", run="/run/gpuhealth/n1"))
    assert node.judge_slurmds(2, "n1", own) is None


# ---- what is gathered


def test_hooks_are_listed_as_slurm_finds_them(tmp_path):
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/python3")
    hooks = tmp_path / "prolog.d"
    hooks.mkdir()
    for name, text, mode in (
        ("50-gpuhealth", f"#!/bin/sh\n{python} -I -c '\nfrom slurm_gpuhealth.hooks.prolog import main\n'\n", 0o755),
        ("60-before", f"#!/bin/sh\n{python} -I -c '\nfrom slurm_gpuhealth.{'commands'}.prolog import main'\n", 0o755),
        ("40-gone", "#!/bin/sh\nexec /nowhere/bin/gpuhealth-prolog\n", 0o755),
        ("30-comment", "#!/bin/sh\n# exec /opt/gpuhealth/bin/gpuhealth-prolog\n", 0o755),
        ("20-off", "#!/bin/sh\n", 0o644),
        (".hidden", "#!/bin/sh\n", 0o755),
    ):
        (hooks / name).write_text(text)
        (hooks / name).chmod(mode)
    (hooks / "folder").mkdir()
    (hooks / "dangling").symlink_to("/nowhere")
    os.mkfifo(hooks / "pipe", 0o755)
    found = {os.path.basename(one.path): one for one in look.list_hooks(f"{hooks}/*")}
    assert set(found) == {"60-before", "50-gpuhealth", "40-gone", "30-comment", "20-off", "folder", "dangling", "pipe"}
    assert (found["50-gpuhealth"].starts, found["50-gpuhealth"].lacks) == ("prolog", "")
    assert (found["60-before"].starts, found["60-before"].lacks) == ("prolog", "")
    assert (found["40-gone"].starts, found["40-gone"].lacks) == ("prolog", "/nowhere/bin/gpuhealth-prolog")
    assert found["30-comment"].starts == ""
    assert (found["20-off"].runs, found["folder"].kind, found["dangling"].kind) == (False, "folder", "missing")
    assert [one.kind for one in look.list_hooks("/nowhere/hook")] == ["missing"]
    lines = list(judge(listing=prolog(found["dangling"])))
    line = next(one for one in lines if "does not exist" in one.what)
    assert "dangling (a link to /nowhere) does not exist" in line.what
    assert line.remedy == "ls -l /nowhere"


def test_folders_of_a_node_that_are_not_there_are_named_and_no_traceback_is_the_answer(tmp_path):
    settings = Settings(paths=Paths(proc=str(tmp_path / "n7/proc"), sys=str(tmp_path), dev=str(tmp_path)))
    (line,) = look._node(settings, "n7", None)
    assert (line.level, line.check) == ("FAIL", "paths")
    assert f"proc = {tmp_path}/n7/proc in [paths] does not exist" in line.what
    assert "--node NAME" in line.remedy


@pytest.mark.parametrize("program", ["prolog", "epilog"])
def test_our_own_scripts_are_known_as_ours(program):
    script = Path(__file__).parents[2] / f"scripts/{program}.d/50-gpuhealth"
    entry = look.list_hooks(str(script))[0]
    assert (entry.starts, entry.runs) == (program, True)
    assert entry.lacks in ("", "/opt/gpuhealth/bin/python")


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:h100:8", 8),
        ("gpu:8(S:0-1)", 8),
        ("gpu:a100:2(S:0),gpu:h100:4(S:1),mps:200", 6),
        ("", 0),
        ("gpu:1g.10gb:14", 14),
    ],
)
def test_gpus_of_a_node_record(gres, count):
    from slurm_gpuhealth.slurm.node import NodeRecord

    assert look._configured(NodeRecord("n1", "IDLE", frozenset(), gres=gres)) == count
