"""gpuhealth accept: what is asked, and the certificate of what the node proved."""

import json

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands import accept, common
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Store
from slurm_gpuhealth.controller import certificate
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import claim, follow
from slurm_gpuhealth.slurm import control
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store
from tests.unit.slurm_nodes import NOW, Slurm
from tests.unit.test_figures import fleet

STEP = {"fact": "asked", "rung": "L4", "attempt": 1, "outcome": "pass", "follows": "back", "seconds": 4800.0}


@pytest.fixture
def given(settings, tmp_path):
    return replace(settings, store=Store(database=str(tmp_path / "store/cluster.db")))


@pytest.fixture
def store(given):
    return open_store(given)


def step(store, node="n1", number=1, **changes):
    key = {"node": node, "journal": "j", "id": number, "sub": number, "seq": number, "taken": number}
    with store.begin() as db:
        row = {**STEP, "time": NOW, "message": "level 4: pass; nccl: pass (470.7 GB/s)", **changes}
        db.execute(schema.step.insert().values(**key, **row))
        gpu = {"node": node, "uuid": f"GPU-{number}", "gpu": 0, "pci": "0000:1b:00", "serial": "165<b>"}
        db.execute(schema.gpu.insert().values(**gpu, first=NOW, last=NOW, taken=1))


def made(store, node="n1", since=0.0):
    with store.begin() as db:
        return certificate.made(db, node, since, NOW + 9000)


@pytest.fixture
def measured(store, monkeypatch):
    """n1's two figures, of the time of its step, beside those of seven other nodes."""
    monkeypatch.setattr("tests.unit.test_figures.NOW", NOW)
    fleet(store, values=(50.0, 41.2))


def test_a_certificate_has_each_figure_beside_the_fleets_and_is_kept(store, measured):
    step(store)
    done = made(store)
    assert (done["outcome"], done["gpus"]) == (
        "fit",
        [{"gpu": 0, "uuid": "GPU-1", "pci": "0000:1b:00", "serial": "165<b>"}],
    )
    figures = [
        (one["name"], one["gpu"], one["value"], round(one["fleet"], 2), one["percent"]) for one in done["figures"]
    ]
    assert figures == [("dcgm.gflops", 0, 41.2, 52.05, -21), ("dcgm.gflops", 1, 52.1, 52.05, 0)]
    assert made(store) == done
    with store.connect() as db:
        (row,) = db.execute(sql.select(schema.certificate)).all()
    assert (row.node, row.time, json.loads(row.data)) == ("n1", NOW, done)


def test_only_the_gpus_that_are_there_now_are_certified(store):
    gone = {"node": "n1", "uuid": "GPU-0", "gpu": 0, "pci": "0000:1b:00", "serial": "111"}
    with store.begin() as db:
        db.execute(schema.gpu.insert().values(**gone, first=1.0, last=NOW - 900, taken=1))
    step(store)
    assert [one["uuid"] for one in made(store)["gpus"]] == ["GPU-1"]


def test_a_step_counts_by_the_controllers_clock(store):
    step(store, time=NOW - 300, clock=-320.0)
    step(store, number=2, time=NOW + 900, clock=1000.0)
    done = made(store, since=NOW)
    assert done["time"] == NOW + 20
    assert made(store, since=NOW + 30) is None


@pytest.mark.parametrize(
    ("value", "shown"), [(None, None), (1e308, "far"), (5e-324, "-100 %, far"), (-1.0, "-102 %, far")]
)
def test_a_figure_that_no_gpu_can_have_is_shown_as_it_is(run, store, measured, tmp_path, value, shown):
    step(store)
    with store.begin() as db:
        own = schema.figure.c.node == "n1", schema.figure.c.gpu == 0
        db.execute(schema.figure.update().where(*own).values(value=value))
        db.execute(schema.figure.update().where(schema.figure.c.node == "n5").values(value=value))
    done = run[1]("--certificate", "n1", "--html", str(tmp_path))
    assert done.exit_code == 0
    assert [certificate.differs(one) for one in made(store)["figures"] if one["gpu"] == 0] == ([shown] if shown else [])
    json.loads(json.dumps(made(store), allow_nan=False))


def test_what_can_not_be_written_is_said_after_what_can_be_printed(run, store, tmp_path):
    for number, name in enumerate(("n1", "n2"), 1):
        step(store, node=name, number=number)
    (tmp_path / "n1.html").mkdir()
    done = run[1]("--certificate", "n1", "n2", "--html", str(tmp_path))
    assert (done.exit_code, done.output.count(": fit (")) == (1, 2)
    assert f"Error: {tmp_path}/n1.html can't be written: Is a directory" in done.output


def test_a_small_fleet_is_nothing_to_compare_with(store, monkeypatch):
    monkeypatch.setattr("tests.unit.test_figures.NOW", NOW)
    fleet(store, nodes=3)
    step(store)
    assert {one["fleet"] for one in made(store)["figures"]} == {None}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"outcome": "fail", "follows": "RMA"}, "not fit"),
        ({"outcome": "untested", "follows": ""}, "not testable"),
        ({"outcome": "cancelled"}, "not testable"),
        ({"outcome": "running"}, None),
        ({"rung": "L3"}, None),
        ({"time": NOW - 100}, None),
    ],
)
def test_only_a_level_4_that_has_ended_since_then_counts(store, changes, outcome):
    step(store, **changes)
    done = made(store, since=NOW - 60)
    assert (done and done["outcome"]) == outcome


def test_the_page_is_one_file_in_which_nothing_of_a_node_is_markup(store, measured):
    step(store, message="<script>")
    text = certificate.page(made(store))
    assert "<h1>n1: fit</h1>" in text
    assert ("&lt;script&gt;" in text, "<script" in text, "165&lt;b&gt;" in text, "http" in text) == (
        True,
        False,
        True,
        False,
    )
    assert "<td>dcgm.gflops</td><td>0</td><td>41.2 TFLOPS</td><td>52.05</td><td>-21 %, far</td>" in text


@pytest.fixture
def run(given, store, monkeypatch):
    """The command on a modelled slurmctld; claims are confirmed at the first look."""
    slurm = Slurm(monkeypatch)
    slurm.add("n1")
    slurm.then = [lambda: None] * 3

    def finish(settings, journal, name, wait):
        control.set_reason(None, name, replace(control.show_node(None, name).ours, state="queued"))
        return "drained", ""

    monkeypatch.setattr(claim, "finish", finish)
    monkeypatch.setattr(common, "settings_of", lambda _: given)
    monkeypatch.setattr(follow.time, "sleep", lambda _: slurm.then.pop(0)())
    return slurm, lambda *argv: CliRunner().invoke(main, ["accept", *argv])


def test_a_node_is_asked_for_level_4_and_all_tests(run):
    slurm, accept_ = run
    done = accept_("n1")
    assert done.exit_code == 0, done.output
    assert slurm.nodes["n1"].reason.startswith("gpuhealth:asked GPU* L4 queued since=")
    assert " tests=all by=" in slurm.nodes["n1"].reason
    assert "then: gpuhealth accept --certificate n1" in done.output


def test_a_certificate_is_shown_and_its_outcome_is_the_exit_code(run, store, measured, tmp_path):
    slurm, accept_ = run
    assert accept_("--certificate", "n1").exit_code == 3
    step(store)
    done = accept_("--certificate", "n1", "--html", str(tmp_path))
    assert (done.exit_code, slurm.orders) == (0, [])
    row = next(line for line in done.output.splitlines() if "41.2" in line)
    assert row.split() == ["dcgm.gflops", "0", "41.2", "TFLOPS", "52.05", "-21", "%,", "far", "dcgm", "4.4.1"]
    assert (tmp_path / "n1.html").read_text().startswith("<!DOCTYPE html>")
    step(store, number=2, time=NOW + 10, outcome="fail")
    done = accept_("--certificate", "n1", "--json")
    assert (done.exit_code, json.loads(done.output)["outcome"]) == (1, "not fit")


def test_records_that_are_on_their_way_are_waited_for(store, given, monkeypatch):
    monkeypatch.setattr(common, "settings_of", lambda _: given)
    monkeypatch.setattr(accept.time, "sleep", lambda _: step(store))
    (done,) = accept._certificates("ctl", ["n1"], NOW - 60, 60.0)
    assert done["node"] == "n1"


def test_a_node_that_an_admin_drained_is_asked_only_if_the_admin_says_so(run):
    slurm, accept_ = run
    slurm.add("n1", flags="DRAIN", reason="new, JD")
    for wait in ((), ("--wait",)):
        done = accept_("n1", *wait)
        assert (done.exit_code, "an admin drained it" in done.output, slurm.orders) == (3, True, [])
    accept_("n1", "--take-over")
    assert slurm.nodes["n1"].ours.tests == "all"
