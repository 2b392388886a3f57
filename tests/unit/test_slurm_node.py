"""Parsing Slurm's records, from real output and from text that tries to mislead."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpuhealth.slurm import node
from slurm_gpuhealth.slurm.reason import parse

CORPUS = Path(__file__).parents[1] / "corpus/slurm"
VERSIONS = ("22.05", "24.11", "25.11", "26.05")
OURS = "gpuhealth:Xid79 GPU3 L1 fail job=1842 next=L3"
LINE = "NodeName=n1 CPUAlloc=0 Gres=gpu:h100:8 OS=Linux 6.1 #1 State={state} BootTime=1795210173 AllocTRES= {rest}"


def record(state="IDLE+DRAIN", rest=f"Reason={OURS} [root@1795211587]"):
    return node.parse_node(LINE.format(state=state, rest=rest), "n1")


@pytest.mark.parametrize("version", VERSIONS)
def test_real_records_of_every_release(version):
    lines = [line for line in (CORPUS / version / "scontrol_show_node_o.txt").read_text().splitlines() if line.strip()]
    n1, n2, n3, n4 = (node.parse_node(line, f"n{i}") for i, line in enumerate(lines, 1))
    assert (n1.base, n1.flags, n1.has_job) == ("IDLE", {"DRAIN"}, False)
    assert n1.reason == "gpuhealth:L2 XID=79 GPU3 uuid=GPU-5d1b8f2e job=123"
    assert (n1.reason_user, n1.gres) == ("root", "gpu:h100:8")
    assert n1.reason_time > n1.boot_time > 1.7e9
    assert (n2.base, n2.flags, n2.reason, n2.owner) == ("DOWN", set(), "admin: PSU", "admin")
    assert (n3.base, n3.flags, n3.has_job) == ("MIXED", {"DRAIN"}, True)
    assert (n4.base, n4.flags, n4.reason, n4.owner) == ("IDLE", set(), "", "none")


@pytest.mark.parametrize(("version", "extra"), [("22.05", ""), ("24.11", "gpuhealth:run=L3;id=42")])
def test_comment_and_extra_are_read(version, extra):
    line = (CORPUS / version / "scontrol_show_node_o.txt").read_text().splitlines()[1]
    found = node.parse_node(line, "n2")
    assert (found.comment, found.extra) == ("gpuhealth:run=L3;id=42", extra)


@pytest.mark.parametrize(
    "reason",
    [
        "State=IDLE Reason=evil",
        "CPUAlloc=8 NodeName=n9",
        "a | b % c $(d) `e` 'f'",
        "swap [bob@2026-01-01] tomorrow",
        "[root@1795211587]",
        "PSU é ✓ 漢",
    ],
)
def test_a_reason_comes_back_whole_and_changes_nothing_else(reason):
    found = record(rest=f"Reason={reason} [alice@1795211587] Comment=c c Extra=e")
    assert (found.reason, found.reason_user, found.reason_time) == (reason, "alice", 1795211587)
    assert (found.base, found.flags, found.alloc_cpus) == ("IDLE", {"DRAIN"}, 0)
    assert (found.comment, found.extra) == ("c c", "e")


def test_a_stamp_in_a_comment_does_not_lengthen_our_reason():
    found = record(rest=f"Reason={OURS} [root@1795211587] Comment=moved [bob@1795211000]")
    assert found.reason == OURS
    assert found.ours


def test_a_reason_with_a_second_line_is_not_ours():
    text = (CORPUS / "22.05/node_newline_in_reason.txt").read_text()
    found = node.parse_node(text, "n2")
    assert "JD leave it" in found.reason
    assert (found.owner, found.ours) == ("admin", None)


def test_a_key_of_a_later_release_ends_the_reason_too():
    assert record(rest=f"Reason={OURS} [root@1795211587] NewThing=1").reason == OURS


def test_slurms_epoch_and_iso_times_are_the_same_time():
    import time

    iso = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1795211587))
    assert record(rest=f"Reason={OURS} [root@{iso}]").reason_time == 1795211587


@pytest.mark.parametrize(
    ("state", "base", "flags"),
    [
        ("IDLE", "IDLE", set()),
        ("DOWN*+DRAIN", "DOWN", {"DRAIN"}),
        ("IDLE+MAINTENANCE+RESERVED", "IDLE", {"MAINTENANCE", "RESERVED"}),
        ("DOWN+DRAIN+REBOOT_ISSUED", "DOWN", {"DRAIN", "REBOOT_ISSUED"}),
    ],
)
def test_state_and_flags(state, base, flags):
    found = record(state=state)
    assert (found.base, found.flags) == (base, flags)


def test_a_node_whose_job_is_ending_still_has_a_job():
    assert record(state="IDLE+COMPLETING+DRAIN").has_job
    assert not record().has_job


@pytest.mark.parametrize("text", ["", "Node n9 not found", "NodeName=n2 State=IDLE", "NodeName=n1"])
def test_what_is_not_this_nodes_record_is_an_error(text):
    with pytest.raises(ValueError, match="n1"):
        node.parse_node(text, "n1")


@given(st.text())
def test_whatever_scontrol_says_it_is_a_record_or_a_value_error(text):
    for read in (lambda: node.parse_node(text, "n1"), lambda: node.parse_job(text, 1), lambda: node.parse_gres(text)):
        try:
            read()
        except ValueError:
            pass


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_real_jobs_of_every_release(version):
    for line in (CORPUS / version / "scontrol_show_job_o.txt").read_text().splitlines():
        job = node.parse_job(line, int(re.match(r"JobId=(\d+)", line)[1]))
        assert job.state == "COMPLETING"
        assert job.requeue
        assert job.num_nodes in (1, 2)
        assert job.batch == ("BatchFlag=1" in line)


def test_a_failed_nodes_name_in_the_record_is_no_trouble():
    line = (CORPUS / "26.05/scontrol_show_job_o.txt").read_text().splitlines()[0]
    number = int(re.match(r"JobId=(\d+)", line)[1])
    for more in ("Dependency=(null) FailedNode=n3", "FailedNode=n3 Dependency=(null)"):
        assert node.parse_job(line.replace("Dependency=(null)", more), number).requeue


def test_a_job_whose_name_forges_its_record_is_not_believed():
    with pytest.raises(ValueError, match="read safely"):
        node.parse_job((CORPUS / "22.05/job_hostile_name.txt").read_text(), 2)


def test_a_comment_with_a_second_record_is_not_believed():
    line = (CORPUS / "22.05/scontrol_show_job_o.txt").read_text().splitlines()[0]
    number = int(re.match(r"JobId=(\d+)", line)[1])
    with pytest.raises(ValueError, match="read safely"):
        node.parse_job(f"{line}\n{line}", number)


@pytest.mark.parametrize(
    ("job", "expected"),
    [(1, True), (5, False), (6, False), (8, False), (9, False)],
    ids=["failed", "ended well", "killed by a signal", "ordinary", "forged"],
)
def test_only_a_job_of_expedited_requeue_that_failed_by_its_exit_code_is_started_anew(job, expected):
    lines = (CORPUS / "26.05/scontrol_json_show_job.jsonl").read_text().splitlines()
    (line,) = (line for line in lines if f'"job_id":{job},' in line)
    assert node.parse_expedited(line, job) is expected
    assert expected or node.parse_expedited(lines[0], 1)
    with pytest.raises(ValueError, match="no record"):
        node.parse_expedited(line, job + 1)


def test_an_answer_in_json_that_is_none_is_no_expedited_job():
    line = (CORPUS / "26.05/scontrol_json_show_job.jsonl").read_text().splitlines()[0]
    twice = json.dumps({"jobs": json.loads(line)["jobs"] * 2})
    for text in ("", "[]", "{}", '{"jobs": [1]}', '{"jobs": [{"job_id": 1}]}', line[:-1], twice):
        with pytest.raises(ValueError, match="job 1: no record"):
            node.parse_expedited(text, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_prolog_is_found_in_every_releases_configuration(version):
    config = node.parse_config((CORPUS / version / "scontrol_show_config.txt").read_text())
    assert [Path(value).name for value in config["Prolog"]] == ["prolog"]
    assert config["PrologFlags"] == ("Alloc",)
    assert config["SuspendProgram"] == ()
    assert config["SLURM_VERSION"][0].startswith(version)


def test_several_prologs_keep_their_order():
    assert node.parse_config("Prolog[0] = /a\nProlog[1] = /b=c\n")["Prolog"] == ("/a", "/b=c")


def test_positions_follow_slurmds_list_and_not_the_number_in_the_name():
    found = node.parse_gres((CORPUS / "22.05/slurmd_G.txt").read_text())
    assert [files[0] for files in found] == [f"/dev/nvidia{minor}" for minor in (3, 0, 5, 2, 7, 4, 1, 6)]


def test_a_slice_of_several_files_is_one_position():
    found = node.parse_gres((CORPUS / "22.05/slurmd_G_multiple_files.txt").read_text())
    assert found[0] == ("/dev/nvidia0", "/dev/nvidia7")
    assert [files[0] for files in found[1:]] == [
        "/dev/nvidia1",
        "/dev/nvidia3",
        "/dev/nvidia4",
        "/dev/nvidia6",
        "/dev/nvidia5",
    ]


def test_shards_of_the_same_file_are_not_counted():
    line = "slurmd: Gres Name={} Type=h100 Count={} Index=7 ID=1 File=/dev/nvidia7 (null)\n"
    assert node.parse_gres(line.format("shard", 10) + line.format("gpu", 1)) == (("/dev/nvidia7",),)
    assert [node.parse_shared(line.format(name, 1)) for name in ("gpu", "shard", "mps")] == [False, True, True]


def test_gpus_without_device_files_are_an_error():
    with pytest.raises(ValueError, match="device files"):
        node.parse_gres("slurmd: Gres Name=gpu Type=(null) Count=2 ID=1 (null)\n")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("/dev/nvidia[0-1,3]", ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia3")),
        ("n[08-10],m", ("n08", "n09", "n10", "m")),
        ("n1", ("n1",)),
    ],
)
def test_lists_with_brackets(text, names):
    assert node.expand(text) == names


def test_an_absurd_range_is_an_error():
    with pytest.raises(ValueError, match="too long"):
        node.expand("n[0-999999999]")


def test_holds_count_each_node_once_and_only_ours():
    text = (
        f"n1|gpu:h100:8|100|drained|{OURS}\nn1|gpu:h100:8|100|drained|{OURS}\nn2|gpu:8|7|draining|admin|x\n"
        f"n3|(null)|101|down*|{OURS}\nn4|craynetwork:4,gpu:8|Unknown|idle*|none\n"
    )
    n1, n3 = (node.Hold(name, parse(OURS), when) for name, when in (("n1", 100.0), ("n3", 101.0)))
    assert node.parse_holds(text, every=False) == ([n1], 3)
    assert node.parse_holds(text, every=True) == ([n1, n3], 4)


def test_the_nodes_that_the_budget_counts_are_those_with_gpus_or_of_the_group():
    text = "n1|gpu:8\nn2|(null)\nn1|gpu:8\nn4|craynetwork:4,gpu:8\n"
    assert node.parse_counted(text, every=False) == {"n1", "n4"}
    assert node.parse_counted(text, every=True) == {"n1", "n2", "n4"}


def test_a_hold_with_an_admins_second_line_is_not_ours():
    lines = (CORPUS / "22.05/sinfo_newline_in_reason.txt").read_text().splitlines(keepends=True)
    timed = [line.replace(":8|", ":8|1795211587|drained|") if line.startswith("n") else line for line in lines]
    holds, total = node.parse_holds("".join(timed), every=False)
    assert ([(one.node, one.time) for one in holds], total) == ([("n4", 1795211587.0)], 4)


def test_a_reason_of_ours_that_outlives_its_drain_is_no_hold():
    holds, total = node.parse_holds((CORPUS / "24.11/sinfo_holds.txt").read_text(), every=False)
    assert ([one.node for one in holds], total) == (["n1", "n2", "n3"], 8)


def test_a_node_that_the_budget_does_not_count_is_told_so():
    text = f"n1|gpu:8|100|drained|{OURS}\nn3|(null)|101|drained|{OURS}\n"
    assert node.parse_holds(text, every=True, one="n3")[1] == 2
    with pytest.raises(ValueError, match="n3 is not among the 1 nodes"):
        node.parse_holds(text, every=False, one="n3")


def test_of_all_nodes_each_is_read_and_one_that_comes_twice_is_believed_neither_time():
    line = "NodeName={} State=IDLE+DRAIN BootTime=1 AllocTRES= Reason={} [root@5] Comment={} \n"
    text = line.format("n1", OURS, "rack 7") + line.format("n2", "JD\nNodeName=n3 State=IDLE", "") + "\n"
    found = node.parse_nodes(text + line.format("n3", OURS, ""))
    assert [(one.name, one.owner, one.comment) for one in found] == [("n1", "us", "rack 7"), ("n2", "admin", "")]
    assert node.parse_nodes("") == node.parse_nodes("nonsense") == []


RECORD = (
    "JobId={id}{kind} JobName=a UserId=games(5) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0"
    " BatchFlag=1 Reboot=0 ExitCode=0:0 NumNodes=1 NumCPUs=8\n"
)


def test_the_last_task_of_an_array_is_not_taken_for_the_whole():
    text = RECORD.format(id=10, kind=" ArrayJobId=10 ArrayTaskId=3") + RECORD.format(
        id=11, kind=" ArrayJobId=10 ArrayTaskId=0"
    )
    assert node.parse_job(text, 10).name == "10_3"
    assert node.parse_job(RECORD.format(id=12, kind=""), 12).name == "12"


def test_a_component_of_a_heterogeneous_job_is_told():
    assert node.parse_job(RECORD.format(id=12, kind=" HetJobId=12 HetJobOffset=0"), 12).het
    assert not node.parse_job(RECORD.format(id=12, kind=""), 12).het


@pytest.mark.parametrize(("version", "up"), [("22.05", 340), ("24.11", 71), ("25.11", 1997), ("26.05", 87)])
def test_how_long_slurmctld_is_up(version, up):
    text = (CORPUS / version / "scontrol_show_config.txt").read_text()
    assert node.parse_up(text) == up
    assert node.parse_up("Configuration data as of 1795307891\nBOOT_TIME               = 1795307890\n") == 1
    assert node.parse_up("") == float("inf")


def test_what_slurmdbd_calls_invalid_is_a_drain_and_a_reasons_second_line_no_event():
    text = "n1|20|Unknown|INVAL|PSU, JD\nn1|5|20|DRAIN*|bay 7\nn1|9|Unknown|IDLE|x\nn1|30|40|DOWN*|a|b\n"
    text += "n1|50|Unknown|BOOT^|x\n"
    found = node.parse_events(text)
    assert [(one.start, one.end, one.state, one.reason) for one in found] == [
        (5.0, 20.0, "DRAIN", "bay 7"),
        (20.0, 0.0, "DRAIN", "PSU, JD"),
        (30.0, 40.0, "DOWN", "a|b"),
        (50.0, 0.0, "BOOT", "x"),
    ]
