"""`gpuhealth why`: reasons and codes as people have them, on the node itself and elsewhere."""

import json
import os

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.why import why
from slurm_gpuhealth.config.check import built_in
from slurm_gpuhealth.config.settings import Paths, Row, Settings, Sources
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.node.record import keep

POLICY = tuple(Row(**row) for row in built_in())


@pytest.fixture
def ask(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUHEALTH_CONFIG", str(tmp_path / "gpuhealth.toml"))
    access = os.access  # this host may have a journal of its own
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(tmp_path)) and access(path, mode))

    def ask(*text, node="n3"):
        done = CliRunner().invoke(why, [*text, "--json"], obj=node)
        plain = CliRunner().invoke(why, list(text), obj=node)
        assert plain.exit_code == done.exit_code
        told = json.loads(done.output)
        return done.exit_code, told, plain.output

    return ask


@pytest.fixture
def node(tmp_path):
    """This node's journal: Xid 79 on GPU 3, and the hold that followed."""
    state = tmp_path / "state"
    (tmp_path / "gpuhealth.toml").write_text(f'mode = "enforce"\n[paths]\nstate = "{state}"\nrun = "{tmp_path}/run"\n')
    journal = open_journal(Paths(state=str(state), run=str(tmp_path / "run")))
    gpu = {"uuid": "GPU-3", "pci": "0000:5d:00", "index": 3, "serial": "1652"}
    journal.put("gpus", [gpu])
    settings = Settings(mode="enforce", sources=Sources(), policy=POLICY)
    found = Finding(1.7e9, "xid", "79", "Xid 79 on 0000:5d:00", Gpu(pci="0000:5d:00"), details={"class": "hardware"})
    keep(journal, settings, [found], 1.7e9)
    journal.put("hold", {"reason": "gpuhealth:Xid79 GPU3 L3 queued since=11-20T12:03Z", "since": 1.7e9})
    journal.db.close()


def test_a_reason_is_explained_where_there_is_neither_journal_nor_configuration(ask):
    code, told, text = ask("gpuhealth:Xid79 GPU3 L3 queued since=11-20T12:03Z job=1842 next=reset by=al%20ice")
    assert (code, told["owner"], told["here"]["journal"]) == (0, "us", False)
    assert told["says"] == (
        "gpuhealth drained the node: Xid79, GPU 3 (its index in nvidia-smi). DCGM level 3 comes next, then a reset of"
        " the GPU. Since 11-20T12:03Z (month-day, UTC). Seen by job 1842. Asked for by al ice."
    )
    one = told["codes"][0]
    assert (one["finding"], one["class"]) == ("xid:79", "hardware")
    assert "RESTART_BM" in one["nvidia"]
    assert [(row["severity"], row["rung"]) for row in one["policy"]] == [("fault", "L3")]
    assert one["mode"] == {"mode": "shadow", "by": 'mode = "shadow"'}
    assert "built-in policy" in told["policy_from"]
    assert "scontrol reboot ASAP NODE" in text
    assert "gpuhealth resume NODE" in one["gives_back"]


@pytest.mark.parametrize(
    ("text", "name", "now", "you"),
    [
        ("L3 claim", "claim", "the budget decides", "Nothing"),
        ("L3 queued", "queued", "DCGM level 3 begins once no job is left", "squeue -w n7"),
        ("L4 running try=2", "running", "DCGM level 4 is running", "gpuhealth ladder cancel n7"),
        ("L3 pass", "pass", "give_back is false", "gpuhealth resume n7"),
        ("L1 fail next=L3", "fail", "DCGM level 1 did not pass; DCGM level 3 follows by itself", "Nothing yet"),
        ("reboot manual", "manual", "A reboot of the node waits for you", "gpuhealth-escalate n7"),
        ("repair manual", "manual", "The site's repair waits for you", "steps below"),
        ("L3 untested", "untested", "says nothing about the GPU", "gpuhealth doctor"),
        ("L4 fail next=RMA", "end", "stays out", "gpuhealth-escalate n7"),
        ("RMA fail", "end", "stays out", "part is replaced"),
    ],
)
def test_each_state_says_what_happens_now_and_what_is_the_readers(ask, text, name, now, you):
    code, told, plain = ask(f"gpuhealth:Xid79 GPU3 {text} root 2026-11-20T12:03:22 n7")
    assert (code, told["owner"], told["state"]["name"]) == (0, "us", name)
    assert now in told["state"]["now"]
    assert you in told["state"]["do"]
    assert f"now: {told['state']['now']}" in plain
    assert ("  do:" in plain) == (name in ("pass", "manual", "untested", "end"))


def test_what_no_finding_asked_for_is_told_as_a_request(ask):
    _, told, text = ask("gpuhealth:sweep GPU* L2 running since=11-20T12:03Z")
    assert [one["finding"] for one in told["codes"]] == ["request:sweep"]
    assert "policy:" not in text
    _, told, text = ask("gpuhealth:asked GPU* L3 queued to=L4 boots=1 by=alice")
    assert "Tests were asked for up to L4, even if nothing is found. Reboots by the ladder: 1." in told["says"]


@pytest.mark.parametrize(
    ("text", "code", "gpu"),
    [
        ("gpuhealth:Xid79 GPU3", "xid:79", 3),
        ("gpuhealth:SXid20034 ", "sxid:20034", None),
        ("gpuhealth:targeted_s", "dcgm:targeted_stress", None),
        ("gpuhealth:remap-fail", "nvml:remap-fail", None),
        ("gpuhealth:lost GPU11", "nvml:lost", 11),
        ("gpuhealth:port-missi GPU* L3 queued", "ib:port-missing", None),
        ("gpuhealth:asked GPU* L3 queued by=bob", "request:asked", None),
    ],
)
def test_a_reason_as_sinfo_cuts_it_names_its_code(ask, text, code, gpu):
    status, told, _ = ask(text)
    assert (status, told["owner"], told["reason"]["gpu"]) == (0, "us", gpu)
    assert [one["finding"] for one in told["codes"]] == [code]


def test_a_short_name_of_several_sources_means_in_a_reason_the_one_that_can_drain(ask):
    assert {one["finding"] for one in ask("lost")[1]["codes"]} == {"nvml:lost", "nvrm:lost"}
    assert [one["finding"] for one in ask("gpuhealth:lost GPU3 L3 queued")[1]["codes"]] == ["nvml:lost"]
    assert [one["finding"] for one in ask("gpuhealth:memory GPU3 L4 fail next=RMA")[1]["codes"]] == ["dcgm:memory"]


def test_a_line_of_sinfo_or_scontrol_may_be_pasted_whole(ask):
    _, told, _ = ask("gpuhealth:Xid79 GPU3 root      2026-11-20T12:03:22 n7")
    assert (told["owner"], told["reason"]["fact"], told["reason"]["gpu"]) == ("us", "Xid79", 3)
    assert "scontrol reboot ASAP n7" in " ".join(told["codes"][0]["do"])
    _, told, _ = ask("Kill task failed     root      2026-11-20T12:03:22 n[2-3]")
    assert (told["owner"], told["slurm"]["do"][0].partition(" on ")[2][:5]) == ("slurm", "NODE.")
    _, told, _ = ask("   Reason=gpuhealth:Xid79 GPU3 L3 queued [root@2026-11-20T12:03:22]")
    assert told["reason"]["rung"] == "L3"


def test_a_reason_of_ours_that_somebody_has_added_to_is_an_admins(ask):
    code, told, text = ask("gpuhealth:Xid79 GPU3 L3 queued, swapped the riser, bob")
    assert (code, told["owner"]) == (0, "admin")
    assert "Somebody has added to this reason" in text
    assert told["codes"][0]["finding"] == "xid:79"


def test_on_the_node_itself_the_gpu_is_named_and_the_steps_are_filled_in(ask, node):
    _, told, text = ask("gpuhealth:Xid79 GPU3")
    found = told["here"]["findings"][0]
    assert (told["here"]["this_node"], found["uuid"], found["serial"]) == (True, "GPU-3", "1652")
    assert "n3, 2023-11-14 22:13:20 UTC: GPU 3, 0000:5d:00, GPU-3, serial 1652: fault L3, enforce" in text
    assert "scontrol reboot ASAP n3" in text
    assert "lspci -vs 0000:5d:00.0" in text
    assert told["codes"][0]["mode"] == {"mode": "enforce", "by": 'sources.kernel = "enforce"'}


def test_another_nodes_gpu_is_not_taken_for_ours(ask, node):
    for text in ("gpuhealth:Xid79 GPU3 root 2026-11-20T12:03:22 n7", "gpuhealth:Xid79 GPU5 L3 queued"):
        told = ask(text)[1]
        assert (told["here"]["this_node"], told["here"]["findings"]) == (False, []), text


@pytest.mark.parametrize(
    "text", ["xid:79", "Xid79", "xid 79", "79", "nvml:lost", "DCGM_FR_NVLINK_DOWN", "dcgm 45", "SXid20034", "20034"]
)
def test_a_code_may_be_written_as_people_write_it(ask, text):
    code, told, _ = ask(*text.split())
    assert code == 0
    assert len(told["codes"]) == 1
    assert told["codes"][0]["means"]


def test_an_error_of_dcgm_is_judged_by_its_class(ask):
    one = ask("dcgm", "29")[1]["codes"][0]
    assert "DCGM_FR_PERSISTENCE_MODE" in one["means"]
    assert (one["class"], [row["severity"] for row in one["policy"]]) == ("CONFIG", ["warning"])


def test_an_xid_that_its_line_decides_shows_every_row_that_may(ask):
    rows = ask("154")[1]["codes"][0]["policy"]
    assert [row["rung"] for row in rows if row["severity"] == "fault"] == ["reboot", "reset", "L3"]
    assert rows[0]["words"] == "fault, rung reboot, where action is RESTART_BM"


def test_a_repetition_is_told_with_what_happens_before_it_is_reached(ask):
    assert [row["words"] for row in ask("13")[1]["codes"][0]["policy"]] == [
        "fault, rung L3 (then L4 even if it passes), seen 3 times in 7 d on one GPU by different users",
        "info",
    ]


def test_a_row_of_the_site_comes_first(ask, tmp_path):
    (tmp_path / "gpuhealth.toml").write_text(
        '[[policy]]\nfinding = "nvml:hot"\nseverity = "fault"\nrung = "L3"\nwhy = "our room"\n'
        '[[check.command]]\nname = "nvme"\nargv = ["/bin/true"]\nmode = "off"\n'
    )
    row = ask("nvml:hot")[1]["codes"][0]["policy"][0]
    assert (row["severity"], row["why"]) == ("fault", "our room")
    assert ask("gpuhealth:nvme GPU*")[1]["codes"][0]["mode"] == {"mode": "off", "by": 'check.command nvme = "off"'}


def test_a_broken_configuration_is_said_and_the_built_in_policy_shown(ask, tmp_path):
    (tmp_path / "gpuhealth.toml").write_text("mode = 3\n")
    code, told, _ = ask("xid:79")
    assert code == 0
    assert "gpuhealth.toml:1" in told["policy_from"]


def test_slurms_own_reasons_are_explained_and_an_admins_are_said_not_to_be_ours(ask):
    code, told, text = ask("Prolog", "error")
    assert (code, told["owner"], told["codes"]) == (0, "slurm", [])
    assert "Prolog= glob" in text
    code, told, text = ask("bad DIMM, ticket 4711")
    assert (code, told["owner"]) == (0, "admin")
    assert "leaves such a node alone" in text
    assert ask("NHC: check_hw_ib failed")[1]["owner"] == "admin"


def test_an_unknown_word_is_an_error_and_the_nearest_codes_are_named(ask):
    code, told, text = ask("nvml:lots")
    assert (code, told["owner"]) == (1, None)
    assert "nvml:lost" in told["nearest"]
    assert "nvml:lost" in text


def test_nothing_that_a_terminal_obeys_is_printed(ask):
    assert "\x1b" not in ask("x\x1b[2Jy")[2]
    assert "\x1b" not in ask("gpuhealth:Xid79 GPU3 L3 queued by=%1B%5B2J")[2]
