"""A faulty node that the budget leaves in service is visible: on the node, and from everywhere in its Extra."""

import json
import time

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import common, ladder, status
from slurm_gpuhealth.findings import Finding, Gpu
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import ask, drain, waits
from slurm_gpuhealth.node import record
from slurm_gpuhealth.slurm import control, remark
from tests.unit.slurm_nodes import FAULT, L3, Slurm

NOW = time.time()
LAST = remark.write_result("rack 7", remark.Result("L3", "pass", 0.0, fact="Xid48", next="back", backs=1))


@pytest.fixture
def slurm(monkeypatch):
    """n1 and n2 are held, and with that the budget is spent; n3 has just lost a GPU."""
    found = Slurm(monkeypatch)
    found.holds = lambda *_: (Slurm.holds(found, None)[0], 3)
    monkeypatch.setattr(control, "holds", found.holds)
    for name in ("n1", "n2"):
        found.add(name, flags="DRAIN", reason=FAULT)
    found.add("n3", extra=LAST)
    return found


@pytest.fixture
def over(settings, journal, slurm):
    gone = Finding(NOW, "xid", "79", "fallen off the bus", Gpu("GPU-3", "0000:61:00", 3))
    record.keep(journal, settings, [gone], NOW)
    assert drain.act(settings, journal, "prolog", "n3", NOW) == "over-budget"
    waits.tell(settings, journal, "n3")


def test_it_stands_in_the_extra_beside_the_last_result_and_is_written_once(settings, journal, slurm, over):
    extra = slurm.nodes["n3"].extra
    assert (remark.read_waits(extra), remark.read_result(extra)) == ("Xid79 GPU3 L3", remark.read_result(LAST))
    assert extra.startswith("rack 7 ")
    waits.tell(settings, journal, "n3")
    assert slurm.orders == ["remarks"]


def test_it_goes_when_the_node_is_drained_for_it(settings, journal, slurm, over):
    slurm.nodes.pop("n1")
    assert drain.act(settings, journal, "check", "n3", NOW) == "drained"
    waits.tell(settings, journal, "n3")
    assert slurm.nodes["n3"].extra == LAST


def test_it_goes_when_the_fault_is_mended(settings, journal, slurm, over):
    journal.write("UPDATE finding SET cleared = ?", NOW)
    waits.tell(settings, journal, "n3")
    assert slurm.nodes["n3"].extra == LAST


def test_a_silent_controller_is_asked_again(settings, journal, slurm, over, monkeypatch):
    journal.write("UPDATE finding SET cleared = ?", NOW)

    def silent(*_, **__):
        raise control.ControllerDown("no answer")

    with monkeypatch.context() as away:
        away.setattr(control, "set_remarks", silent)
        waits.tell(settings, journal, "n3")
    waits.tell(settings, journal, "n3")
    assert slurm.nodes["n3"].extra == LAST


def test_ladder_status_and_escalate_tell_it(settings, journal, slurm, over, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "settings_or_defaults", lambda node: (settings, []))
    monkeypatch.setattr(common, "own_journal", lambda settings: None)
    every = CliRunner().invoke(ladder.ladder, [], obj="n1").output
    assert every.endswith(f"{ladder.OVER}\n  n3: Xid79 GPU3 L3\n")
    one = CliRunner().invoke(ladder.ladder, ["n3"], obj="n1").output
    assert f"{ladder.OVER} Xid79 GPU3 L3" in one
    facts = [json.loads(line) for line in CliRunner().invoke(ladder.ladder, ["--json"], obj="n1").output.splitlines()]
    assert [(one["node"], one["waits"]) for one in facts] == [("n1", None), ("n2", None), ("n3", "Xid79 GPU3 L3")]
    facts = status.gather("n3", settings, journal)
    assert facts["over_budget"]["fault"] == "Xid79 GPU3 L3"
    status.show(facts)
    told = capsys.readouterr().out
    assert "because the budget has no room, and jobs start here: Xid79 GPU3 L3 (2 of 3 nodes are held already" in told
    for name in ("n1", "n2"):
        slurm.add(name, flags="DRAIN", reason=replace(FAULT, fact="row-remap"))
    with pytest.raises(ask.Unchanged, match=r"over budget: .*; its own fault waits too, Xid79 GPU3 L3"):
        slurm.ask(settings, "n3", L3)
