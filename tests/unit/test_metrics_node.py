"""A node's textfile: what it says, that it is whole at any time, and that its counters only grow."""

import os
import subprocess
import sys
import time

import pytest

from slurm_gpuhealth.findings import Finding
from slurm_gpuhealth.hooks import check
from slurm_gpuhealth.metrics import node, text
from slurm_gpuhealth.metrics.table import CLUSTER, NODE
from slurm_gpuhealth.node import hook, identity, record
from slurm_gpuhealth.node.journal import open_journal
from slurm_gpuhealth.policy.judge import SOURCE_OF
from tests.unit import metered

NOW = time.time()
LOST = 'source="nvml",code="lost",severity="fault",mode="enforce"'


@pytest.fixture
def on(settings, tmp_path):
    (tmp_path / "prom").mkdir()
    return metered.with_textfile(settings, tmp_path / "prom/gpuhealth.prom")


def told(settings, journal, now=NOW):
    node.publish(settings, journal, now, 0.25)
    with open(settings.metrics.textfile) as file:
        return metered.values(file.read())


def test_a_broken_node_tells_of_its_gpu_its_hold_and_its_outbox(on, journal):
    metered.broken(journal, on, NOW)
    found = told(on, journal)
    assert (found["gpuhealth_gpus_expected"], found["gpuhealth_gpus_present"]) == (8, 7)
    assert found['gpuhealth_gpu_present{gpu="3",uuid="GPU-3"}'] == 0
    assert found['gpuhealth_gpu_present{gpu="2",uuid="GPU-2"}'] == 1
    assert found['gpuhealth_gpu_standing_findings{gpu="3",uuid="GPU-3",severity="fault"}'] == 1
    assert found['gpuhealth_gpu_standing_findings{gpu="2",uuid="GPU-2",severity="fault"}'] == 0
    assert found[f"gpuhealth_standing_findings{{{LOST}}}"] == 1
    assert found['gpuhealth_findings_total{source="xid",code="79",severity="fault",mode="enforce"}'] == 1
    assert found['gpuhealth_hold_info{fact="Xid79",gpu="3",rung="L3",state="running",next=""}'] == 1
    assert found["gpuhealth_hold_timestamp_seconds"] == pytest.approx(NOW - 60)
    assert (found["gpuhealth_hold_waits_for_jobs"], found["gpuhealth_budget_waits"]) == (0, 1)
    assert (found["gpuhealth_outbox_records"], found["gpuhealth_outbox_bytes"]) == (1, 400)
    assert found['gpuhealth_gpu_diagnostic_info{gpu="0",uuid="GPU-0",level="2",outcome="pass"}'] == 1
    assert found["gpuhealth_check_duration_seconds"] == 0.25


def test_a_healthy_node_has_no_hold_and_all_gpus(on, journal):
    metered.healthy(journal, NOW)
    found = told(on, journal)
    assert (found["gpuhealth_hold"], found["gpuhealth_gpus_present"], found["gpuhealth_enforcing"]) == (0, 8, 1)
    assert not [name for name in found if name.startswith(("gpuhealth_hold_", "gpuhealth_standing"))]
    assert found['gpuhealth_source_success{source="nvml"}'] == found['gpuhealth_source_success{source="kernel"}'] == 1


def test_a_source_that_failed_and_a_driver_that_was_never_read_are_told(on, journal):
    journal.put("sources", {"nvml": {"time": NOW, "seconds": 15.0, "error": "hung", "whole": False}})
    found = told(on, journal)
    assert found['gpuhealth_source_success{source="nvml"}'] == 0
    assert found['gpuhealth_source_duration_seconds{source="nvml"}'] == 15
    assert "gpuhealth_gpus_present" not in found


def test_the_last_diagnostic_of_each_level_is_told(on, journal):
    metered.healthy(journal, NOW)
    metered.tested(journal, NOW - 99, "fail", 2)
    metered.tested(journal, NOW - 50, "tool-error", 3)
    found = told(on, journal)
    mine = {name for name in found if name.startswith("gpuhealth_gpu_diagnostic_info") and "GPU-5" in name}
    assert {name.partition("level=")[2] for name in mine} == {'"2",outcome="pass"}', '"3",outcome="tool-error"}'}
    assert found['gpuhealth_gpu_diagnostic_timestamp_seconds{gpu="5",uuid="GPU-5",level="2"}'] == pytest.approx(NOW)


def test_the_counter_of_findings_grows_while_their_rows_are_pruned_and_their_numbers_used_again(on, journal):
    total = f"gpuhealth_findings_total{{{LOST}}}"
    for number in range(5):
        metered.see(journal, on, "lost", NOW - 100, gpu=number)
    assert told(on, journal)[total] == 5
    journal.write("DELETE FROM finding WHERE id > 2")
    assert told(on, journal)[total] == 5
    metered.see(journal, on, "lost", NOW, gpu=6)
    assert journal.one("SELECT max(id) FROM finding") == (3,)
    assert told(on, journal)[total] == 6
    assert told(on, journal)[total] == 6


def test_a_finding_that_another_program_makes_while_we_count_is_counted_once(on, journal, monkeypatch):
    def meanwhile(*asked):
        metered.see(journal, on, "lost", NOW, gpu=5)
        return count(*asked)

    count = node._new
    metered.see(journal, on, "lost", NOW, gpu=4)
    monkeypatch.setattr(node, "_new", meanwhile)
    assert told(on, journal)[f"gpuhealth_findings_total{{{LOST}}}"] == 1
    monkeypatch.setattr(node, "_new", count)
    assert told(on, journal)[f"gpuhealth_findings_total{{{LOST}}}"] == 2


def test_a_condition_counts_once_and_an_event_as_often_as_it_came(on, journal):
    for _ in range(5):
        metered.see(journal, on, "lost", NOW)
    record.keep(journal, on, [Finding(NOW, "xid", "13", "m", None, "fault", count=7)], NOW)
    found = told(on, journal)
    assert found[f"gpuhealth_findings_total{{{LOST}}}"] == 1
    assert found['gpuhealth_findings_total{source="xid",code="13",severity="fault",mode="enforce"}'] == 7


def test_a_condition_that_is_mended_stands_no_more(on, journal):
    metered.see(journal, on, "lost", NOW)
    assert told(on, journal)[f"gpuhealth_standing_findings{{{LOST}}}"] == 1
    record.clear(journal, ("nvml",), (), NOW)
    assert f"gpuhealth_standing_findings{{{LOST}}}" not in told(on, journal)


def test_each_source_of_conditions_is_looked_at():
    assert set(node.CONDITIONS) == SOURCE_OF.keys() - {"xid", "sxid", "aer", "nvrm"} | {"site"}


def test_the_counter_begins_anew_with_a_boot_and_leaves_out_what_is_older_than_it(on, journal, monkeypatch):
    total = f"gpuhealth_findings_total{{{LOST}}}"
    metered.see(journal, on, "lost", 1000.0, gpu=1)  # in 1970: long before this boot
    metered.see(journal, on, "lost", NOW, gpu=2)
    assert told(on, journal)[total] == 1
    monkeypatch.setattr(identity, "boot_id", lambda _: "another")
    assert total not in told(on, journal)
    metered.see(journal, on, "lost", NOW, gpu=3)
    assert told(on, journal)[total] == 1


def test_since_when_a_rung_is_what_it_is_moves_only_with_rung_or_state(on, journal):
    def since(words, now):
        journal.put("hold", {"reason": f"gpuhealth:Xid79 GPU3 {words} since=11-20T12:03Z", "since": NOW - 9})
        return told(on, journal, now)["gpuhealth_hold_rung_timestamp_seconds"]

    steps = [("L3 queued", 10), ("L3 queued", 20), ("L3 running", 30), ("L4 running", 40), ("L4 running", 50)]
    assert [since(words, NOW + more) - NOW for words, more in steps] == pytest.approx([10, 10, 30, 40, 40], abs=0.01)
    journal.put("hold", None)
    assert "gpuhealth_hold_rung_timestamp_seconds" not in told(on, journal)


def test_codes_and_gpus_without_end_make_a_bounded_file(on, journal):
    journal.put("gpus", [{**metered.GPUS[0], "uuid": f"GPU-{one}", "index": one} for one in range(500)])
    for number in range(300):
        metered.see(journal, on, f"c{number}", NOW, gpu=None)
    found = told(on, journal)
    kinds = ("gpuhealth_findings_total", "gpuhealth_standing_findings")
    for kind in kinds:
        mine = {name: value for name, value in found.items() if name.startswith(kind)}
        assert len(mine) == node.CODES + 1
        assert sum(mine.values()) == 300
        assert mine[f'{kind}{{source="nvml",code="other",severity="fault",mode="enforce"}}'] == 100
    assert sum(name.startswith("gpuhealth_gpu_info") for name in found) == node.GPUS


def test_each_value_has_the_labels_of_its_metric(on, journal):
    metered.broken(journal, on, NOW)
    kept = node.remember(on, journal, {}, NOW)
    found = node.gather(on, journal, kept, NOW, 0.1)
    assert found.keys() == NODE.keys()
    assert not [name for name, rows in found.items() for labels in rows if len(labels) != len(NODE[name][1])]


def test_no_name_is_both_a_nodes_and_the_clusters():
    assert not NODE.keys() & CLUSTER.keys()


def test_text_of_others_can_not_break_a_line():
    table = {"m": ("gauge", ("a",), "Help.", "")}
    assert text.render(table, {"m": {('x"\n\\y',): 1}}).splitlines()[2:] == [r'm{a="x\"\n\\y"} 1']


# The file


def run_check(settings, journal, monkeypatch, look):
    monkeypatch.setattr(hook, "start", lambda _: (settings, journal))
    monkeypatch.setattr(check, "look", look)
    assert check.check() == 0


def test_a_check_that_found_nothing_renews_the_file_and_everybody_may_read_it(on, journal, monkeypatch):
    path = on.metrics.textfile
    with open(path, "w") as file:
        file.write("old\n")
    before = os.umask(0o077)
    try:
        run_check(on, journal, monkeypatch, lambda *_: None)
    finally:
        os.umask(before)
    with open(path) as file:
        assert metered.values(file.read())["gpuhealth_check_timestamp_seconds"] >= NOW
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert os.listdir(os.path.dirname(path)) == ["gpuhealth.prom"]


def test_where_metrics_are_off_nothing_is_imported_for_them(settings, journal, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("slurm_gpuhealth.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    run_check(settings, journal, monkeypatch, lambda *_: None)
    assert not [name for name in sys.modules if name.startswith("slurm_gpuhealth.metrics")]


def test_a_check_that_is_killed_leaves_the_old_file_whole_and_the_next_one_renews_it(on, journal, monkeypatch):
    told(on, journal, NOW)
    with open(on.metrics.textfile) as file:
        old = file.read()
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "rename", lambda *_: os._exit(9))
        node.publish(on, open_journal(on.paths), NOW + 60, 0.1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with open(on.metrics.textfile) as file:
        assert file.read() == old
    assert told(on, journal, NOW + 120)["gpuhealth_check_timestamp_seconds"] == pytest.approx(NOW + 120)


def test_a_link_in_the_folder_leads_nowhere(on, journal, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("gpuhealth.prom", "gpuhealth.prom.new"):
        os.symlink(victim, tmp_path / "prom" / name)
    told(on, journal)
    assert victim.read_text() == "mine"
    assert not os.path.islink(on.metrics.textfile)


def test_a_folder_that_is_missing_is_told_once_and_again_when_it_is_there(settings, journal, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("slurm_gpuhealth.say.say", lambda what, error=False: said.append((what, error)))
    off = metered.with_textfile(settings, tmp_path / "prom/gpuhealth.prom")
    for _ in range(3):
        node.publish(off, journal, NOW, 0.1)
    assert said == [(f"metrics.textfile {tmp_path}/prom/gpuhealth.prom: No such file or directory", True)]
    (tmp_path / "prom").mkdir()
    for _ in range(2):
        node.publish(off, journal, NOW, 0.1)
    assert said[1:] == [("metrics.textfile: written again", False)]


def test_promtool_finds_nothing_to_say_about_it(on, journal):
    metered.broken(journal, on, NOW)
    told(on, journal)
    with open(on.metrics.textfile) as file:
        done = subprocess.run(["promtool", "check", "metrics"], stdin=file, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
