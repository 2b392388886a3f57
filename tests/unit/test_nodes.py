"""The whole cluster from one place: nodes, and status, findings and ladder of any node, from the record and Slurm."""

import json
import time

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import common, findings, ladder, nodes, resume, status
from slurm_gpuhealth.config.settings import Store
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.metrics import cluster
from slurm_gpuhealth.outcomes import Suspicion
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.slurm.node import parse_holds
from slurm_gpuhealth.slurm.reason import stamp, write
from slurm_gpuhealth.store import judged, open, schema
from tests.unit.slurm_nodes import FAULT as LOST
from tests.unit.slurm_nodes import Slurm

NOW = time.time()
GPU = "GPU-5d3e7e3c"
FAULT = replace(LOST, since=stamp(NOW - 7200))


@pytest.fixture
def slurm(monkeypatch):
    return Slurm(monkeypatch)


@pytest.fixture
def run(settings, slurm, monkeypatch, tmp_path):
    """Runs a command on a host called `ctl`: exit code, and its lines."""
    site = replace(settings, store=Store(url=f"file://{tmp_path}", database=str(tmp_path / "store/cluster.db")))
    for module in (common, nodes, ladder, resume):
        for name in ("settings_or_defaults", "settings_of"):
            if hasattr(module, name):
                monkeypatch.setattr(
                    module, name, lambda node, pair=name == "settings_or_defaults": (site, []) if pair else site
                )
    monkeypatch.setattr(time, "time", lambda: NOW)
    engine = open.open_store(site)

    def call(command, *argv):
        done = CliRunner().invoke(command, argv, obj="ctl")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output.splitlines()

    call.engine = engine
    yield call
    engine.dispose()


def put(run, table, **row):
    with run.engine.begin() as db:
        db.execute(table.insert().values(**row))


def ship(run, name, journal="ab12", ago=60.0, **about):
    about = {"gpuhealth": "0.1.0", "driver": "580.1", "mode": "enforce", **about}
    heard = None if ago is None else NOW - ago
    put(run, schema.node, node=name, journal=journal, last_shipped=heard, **about)


def find(run, name, seq=1, journal="ab12", ago=100.0, **more):
    row = {"time": NOW - ago, "seen": NOW - ago, "source": "nvml", "code": "lost", "severity": "fault", "gpu": 3}
    row |= {"mode": "enforce", "standing": 1, "count": 1, "uuid": GPU, "message": "it is lost", "clock": 0.0, **more}
    put(run, schema.finding, node=name, journal=journal, id=seq, sub=seq, seq=seq, taken=seq, **row)


def told(run, *argv):
    """The nodes' objects by name, and the summary."""
    *rows, last = map(json.loads, run(nodes.nodes, *argv, "--json")[1])
    return {one["node"]: one for one in rows}, last["summary"]


def test_a_line_a_node_in_natural_order_and_above_it_what_is_held_and_what_differs(run, slurm):
    for number in (10, 2, 1):
        slurm.add(f"n{number}")
        ship(run, f"n{number}", driver="570.9" if number == 2 else "580.1")
    slurm.add("login", gres="")
    slurm.add("n3", flags="DRAIN", reason=FAULT)
    ship(run, "n3")
    find(run, "n3")
    put(run, schema.suspicion, node="n1", time=NOW, p_lemon=0.37, data="{}")
    code, lines = run(nodes.nodes)
    assert (code, [line.split()[0] for line in lines[4:]]) == (0, ["n1", "n2", "n3", "n10"])
    assert lines[0] == "4 nodes: 1 held by gpuhealth, 0 out of service for another reason, 0 silent, 1 suspects"
    assert "lost GPUs 1 of 2" in lines[1]
    assert lines[2] == "driver: 580.1 on 3 nodes, but 570.9 on n2"
    assert lines[4].split()[-8:-5] == ["ago", "37%", "580.1"]
    assert "idle+drain  L3 queued" in lines[6]
    assert "fault nvml:lost GPU3" in lines[6]
    assert "Xid79 on GPU 3. DCGM level 3 comes next." in lines[6]


@pytest.mark.parametrize(
    ("base", "flags", "sinfo"),
    [("IDLE", "DRAIN", "drained"), ("IDLE", "DRAIN FAIL", "drained"), ("IDLE", "FAIL", "fail"), ("DOWN", "", "down*")],
)
def test_the_budget_is_counted_as_a_node_counts_it_before_it_drains(run, slurm, base, flags, sinfo):
    slurm.add("n1", base=base, flags=flags, reason=FAULT)
    slurm.add("n2", reason=FAULT)  # in service: its reason has outlived its drain
    text = f"n1|gpu:8|{NOW}|{sinfo}|{write(FAULT)}\nn2|gpu:8|{NOW}|idle|{write(FAULT)}\n"
    budgets = told(run)[1]["budget"]
    assert budgets["lost"]["used"] == len(parse_holds(text, every=False)[0]) == 1


@pytest.mark.parametrize(("ago", "silent"), [(3 * 1800 - 60, False), (3 * 1800 + 60, True), (None, True)])
def test_a_node_is_silent_after_three_heartbeats(run, slurm, ago, silent):
    slurm.add("n1")
    ship(run, "n1", ago=ago)
    found, summary = told(run)
    assert (found["n1"]["silent"], summary["silent"]) == (silent, ["n1"] if silent else [])
    assert [*told(run, "--silent")[0]] == (["n1"] if silent else [])
    assert any("SILENT" in line for line in run(nodes.nodes)[1]) == silent


def test_a_node_that_never_shipped_is_silent_and_one_of_an_older_version_can_not_be_known_to_be(run, slurm):
    slurm.add("new")
    slurm.add("old")
    ship(run, "old", ago=9e5, gpuhealth="", driver="")
    found, summary = told(run)
    assert [found[name]["silent"] for name in ("new", "old")] == [True, False]
    assert summary["differ"] == {}


def test_the_metrics_call_the_same_nodes_silent(run, slurm, settings):
    for name in ("here", "new", "week", "owes", "older"):
        slurm.add(name)
    slurm.add("login", gres="")
    for name, ago, version in (("here", 60, "1"), ("week", 9e5, "1"), ("owes", 5000, "1"), ("older", 9e5, "")):
        ship(run, name, ago=ago, gpuhealth=version)
    for name in ("gone", "login"):
        ship(run, name, ago=9e5)
    with run.engine.begin() as db:
        judged.keep_suspicions(db, [Suspicion(name, NOW, 0.9, 0.2, 3.0, 0.1, "L4") for name in ("gone", "login")], NOW)
    key = {"cluster": "c", "job": 1, "attempt": 0}
    put(run, schema.attempt, **key, start=NOW - 9000, end=NOW - 4000, gpu_seconds=1.0)
    put(run, schema.attempt_node, **key, node="owes", start=NOW - 9000, end=NOW - 4000)
    found, summary = told(run)
    assert summary["silent"] == [name for name in found if found[name]["silent"]] == ["new", "owes", "week"]
    with open.reading(run.engine) as db:
        values, _ = cluster.gather(db, settings, NOW)
    assert values["gpuhealth_cluster_silent_nodes"] == {(): 3}
    assert values["gpuhealth_cluster_lemon_probability"] == {}


def test_only_what_still_stands_and_what_is_new_counts_and_the_worst_of_it(run, slurm):
    slurm.add("n1")
    ship(run, "n1", journal="old1", ago=1000.0)
    ship(run, "n1")
    find(run, "n1", 1, journal="old1", code="of-a-lost-journal")
    find(run, "n1", 2, code="mended", cleared=NOW)
    find(run, "n1", 3, code="79", source="xid", standing=0, ago=8 * 86400.0)
    find(run, "n1", 4, code="old", mode="old")
    find(run, "n1", 5, code="word", severity="info")
    assert told(run)[0]["n1"]["finding"] is None
    find(run, "n1", 6, code="hot", severity="warning", ago=1.0)
    find(run, "n1", 7, code="ecc", mode="shadow", ago=50 * 86400.0)
    assert told(run)[0]["n1"]["finding"]["code"] == "ecc"
    assert any("fault nvml:ecc GPU3 (shadow)" in line for line in run(nodes.nodes)[1])


def test_filters_and_host_lists_choose_and_an_unknown_node_is_said(run, slurm):
    for name in ("n1", "n2", "n3"):
        slurm.add(name)
        ship(run, name)
    slurm.change("n2", flags=frozenset({"DRAIN"}), reason="gpuhealth:Xid79 GPU3 L3 queued")
    put(run, schema.suspicion, node="n3", time=NOW, p_lemon=0.4, data="{}")
    assert [*told(run, "--held")[0]] == ["n2"]
    assert [*told(run, "--lemon")[0]] == ["n3"]
    assert [*told(run, "-w", "n[2-3]")[0]] == ["n2", "n3"]
    code, lines = run(nodes.nodes, "-w", "n[3-5]")
    assert (code, lines[0]) == (1, "no such node: n[4-5]")
    assert run(nodes.nodes, "-w", "n[3-")[0] == 2


def test_without_slurm_or_without_the_record_the_rest_is_shown_and_what_is_missing_is_said(run, slurm, monkeypatch):
    ship(run, "n1")

    def silent(*_):
        raise control.ControllerDown("no answer in 10 s")

    monkeypatch.setattr(control, "show_nodes", silent)
    code, lines = run(nodes.nodes)
    assert (code, lines[0]) == (0, "Slurm does not answer, states and reasons are not known: no answer in 10 s")
    assert lines[-1].split()[:2] == ["n1", "?"]
    monkeypatch.setattr(common.os.path, "exists", lambda _: False)
    assert run(nodes.nodes)[0] == 1
    slurm.add("n2", flags="DRAIN", reason="PSU")
    monkeypatch.setattr(control, "show_nodes", slurm.show_nodes)
    code, lines = run(nodes.nodes)
    assert (code, lines[0].partition(":")[0], lines[-1].split()[-2:]) == (0, "only what Slurm knows", ["root:", "PSU"])
    assert "0 silent" in lines[1]


def test_status_of_a_node_elsewhere_is_what_it_shipped(run, slurm):
    slurm.add("n1", flags="DRAIN", reason=FAULT)
    ship(run, "n1", dcgm="4.6.0")
    find(run, "n1", 1, acted=1)
    find(run, "n1", 2, ago=90000.0, source="xid", code="79", standing=0, acted=1)
    put(run, schema.gpu, node="n1", uuid="GPU-out", gpu=3, pci="0000:5d:00", first=1.0, last=2.0, taken=1)
    gpu = {"gpu": 3, "pci": "0000:5d:00", "serial": "77", "first": NOW - 7200, "last": NOW, "taken": 2}
    put(run, schema.gpu, node="n1", uuid=GPU, replaces="GPU-out", **gpu)
    key = {"node": "n1", "journal": "ab12", "id": 1, "sub": 0, "seq": 9, "taken": 9, "clock": 0.0}
    put(run, schema.decision, **key, time=NOW - 90, action="drained", reason="lost GPU3", result="")
    put(run, schema.diagnostic, **key, time=NOW - 9000, level=3, uuid=GPU, outcome="pass")
    code, lines = run(status.status, "-w", "n1")
    text = "\n".join(lines)
    assert (code, lines[0].startswith("n1: enforce mode, last check ")) == (1, True)
    assert "last decision: drained lost GPU3" in text
    assert f"GPU 3, {GPU}, replaced GPU-out (2 h ago)" in text
    assert "level 3 pass, 2 h ago" in text
    facts = json.loads(run(status.status, "-w", "n1", "--json")[1][0])
    assert [one["code"] for one in facts["findings"]] == ["lost"]
    assert facts["findings"][0]["decision"] == {"action": "drained", "result": ""}
    assert ([one["uuid"] for one in facts["gpus"]], facts["gpus"][0]["state"]) == ([GPU], "fault nvml:lost")
    assert (facts["hold"]["reason"], facts["dcgm"]) == (slurm.nodes["n1"].reason, "4.6.0")
    code, lines = run(status.status, "-w", "n9")
    assert (code, lines) == (1, ["Error: n9 is no node of this cluster"])


def test_findings_of_any_node_by_time_severity_gpu_and_job(run):
    for number, name in enumerate(("n1", "n2", "n2", "n3"), 1):
        find(run, name, number, ago=number * 86400.0 + 60, standing=0, severity="warning" if number == 3 else "fault")
    find(run, "n3", 9, ago=99 * 86400.0, code="stands", clock=-3600.0)

    def ids(*argv):
        return [json.loads(line)["id"] for line in run(findings.findings, *argv, "--json")[1]]

    assert ids("-w", "n[1-3]") == [1, 2, 3, 4, 9]
    assert ids("-w", "n[2-3]", "--since", "now-3days", "--until", "now-1day") == [2, 9]
    assert ids("-w", "n2", "--severity", "fault") == [2]
    assert ids("-w", "n[1-9]", "--gpu", "3", "--source", "nvml", "--since", "1d") == [9]
    assert ids("-w", "n[1-9]", "--gpu", "²") == []
    assert run(findings.findings, "-w", "n1", "--job", str(10**30))[0] == 2
    assert ids("-w", "n[1-9]", "--gpu", "4") == ids("-w", "n[1-9]", "--job", "7") == ids("-w", "n1", "--shadow") == []
    (one,) = (json.loads(line) for line in run(findings.findings, "-w", "n3", "--since", "1d", "--json")[1])
    assert one["time"] == pytest.approx(NOW - 99 * 86400 + 3600)
    head, *rows = run(findings.findings, "-w", "n[1-3]")[1]
    assert (head.split()[0], [row.split()[0] for row in rows]) == ("NODE", ["n1", "n2", "n2", "n3", "n3"])


def test_many_nodes_are_chosen_as_few_are(run):
    find(run, "n7", 1)
    find(run, "m1", 2)
    assert len(run(findings.findings, "-w", f"n[1-{schema.IN_SQL + 100}]")[1]) == 2


def test_on_the_node_itself_its_journal_is_the_truth(run, journal, settings):
    find(run, "ctl", 1, message="shipped")
    for argv in ((), ("-w", "ctl")):
        assert run(findings.findings, *argv)[1][0].startswith("nothing since ")
    assert json.loads(run(status.status, "-w", "ctl", "--json")[1][0])["journal"] == "ok"


def test_the_ladder_of_several_nodes_has_each_ones_past_from_the_record(run, slurm):
    for name in ("n1", "n2"):
        slurm.add(name, flags="DRAIN", reason=FAULT)
        find(run, name, message=f"lost on {name}")
    text = "\n".join(run(ladder.ladder, "-w", "n[1-2]")[1])
    assert [f"nvml:lost GPU3: lost on {name}" in text for name in ("n1", "n2")] == [True, True]
    rows = [json.loads(line) for line in run(ladder.ladder, "n[1-2]", "--json")[1]]
    assert [(one["node"], len(one["past"]["fault"])) for one in rows] == [("n1", 1), ("n2", 1)]
    rows = [json.loads(line) for line in run(ladder.ladder, "cancel", "n[1-2]", "--json")[1]]
    assert [(one["node"], one["cancelled"]) for one in rows] == [("n1", True), ("n2", True)]


def test_resume_takes_host_lists_and_a_dry_run_changes_nothing(run, slurm):
    slurm.add("n1", flags="DRAIN", reason=FAULT)
    slurm.add("n2", flags="DRAIN", reason="PSU")
    slurm.add("n3")
    code, lines = run(resume.resume, "n[1-3]", "n1", "--dry-run", "--json")
    told = [json.loads(line) for line in lines]
    assert (code, [(one["node"], one["good"]) for one in told]) == (1, [("n1", True), ("n2", False), ("n3", True)])
    assert told[0]["message"].startswith("would be given back (is 'gpuhealth:Xid79 GPU3 L3 queued")
    assert slurm.orders == []
    code, lines = run(resume.resume, "n[1,3]", "--json")
    assert (code, json.loads(lines[0])["message"][:15]) == (0, "back in service")
    assert slurm.orders == ["undrain"]
