"""What tests measure: kept on the node, shipped, compared on the controller, told to the node, shown."""

import json
import time

import pytest
import sqlalchemy as sql
from click.testing import CliRunner

from slurm_gpuhealth.commands import common
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.config.settings import Sources, Store
from slurm_gpuhealth.controller import ingest, slow
from slurm_gpuhealth.diagnose import model, outputs
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.node import figures, held, journal_sound, record, run_level
from slurm_gpuhealth.ship import outbox
from slurm_gpuhealth.slurm import control, remark
from slurm_gpuhealth.store import schema
from slurm_gpuhealth.store.open import open_store
from tests.unit.slurm_nodes import Slurm

NOW = 1_795_220_000.0
GPUS = [
    {"uuid": f"GPU-{n}0000000-aaaa", "pci": f"0000:0{n}:00", "index": n, "serial": None, "name": "H100"}
    for n in range(2)
]


@pytest.fixture
def journal(journal):
    journal.put("gpus", GPUS)
    return journal


def kept(journal):
    return [tuple(row) for row in journal.rows("SELECT tool, version, gpu, name, value, unit FROM figure ORDER BY id")]


@pytest.mark.parametrize("others", [False, True])
def test_what_dcgm_measured_is_kept_by_gpu_unless_other_jobs_ran(settings, journal, monkeypatch, others):
    """DCGM numbers its GPUs in another order."""
    gpus = (model.GpuResult(0, GPUS[1]["uuid"], None, "pass"), model.GpuResult(1, GPUS[0]["uuid"], None, "pass"))
    measured = tuple(outputs.Figure("dcgm.h2d", 50.0 + entity, "GB/s", entity) for entity in (0, 1, 7))
    done = model.Diagnosis("pass", 3, "4.4.1", gpus, figures=measured)
    monkeypatch.setattr("slurm_gpuhealth.diagnose.diagnose", lambda *_: done)
    deadline = time.monotonic() + 60
    run_level.run_level(settings, journal, "ladder", 3, [], deadline=deadline, reuse=0, everything=True, others=others)
    expected = [("dcgm", "4.4.1", 1, "dcgm.h2d", 50.0, "GB/s"), ("dcgm", "4.4.1", 0, "dcgm.h2d", 51.0, "GB/s")]
    assert kept(journal) == ([] if others else expected)


@pytest.fixture
def shared(settings, tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    store = Store(url=f"file://{folder}", database=str(tmp_path / "store/cluster.db"))
    return replace(settings, store=store, sources=Sources(tools="enforce"))


@pytest.fixture
def store(shared):
    return open_store(shared)


def test_the_largest_figure_that_a_test_can_have_does_not_make_the_journal_look_damaged(journal):
    value = outputs.number("999999999999")
    figures.keep(journal, "site", "", [(None, outputs.Figure("busbw", value, "B/s"))], NOW)
    assert journal.one("SELECT value FROM figure") == (value,)
    assert journal_sound.good("figure", journal.one("SELECT * FROM figure"))
    journal.write("UPDATE figure SET time = ?", value)
    assert not journal_sound.good("figure", journal.one("SELECT * FROM figure"))


def test_a_figure_arrives_in_the_store_as_it_was_measured(shared, store, journal, monkeypatch):
    monkeypatch.setattr("slurm_gpuhealth.ship.file.refuse_unless_ours", lambda *_: None)
    monkeypatch.setattr("slurm_gpuhealth.controller.ingest.refuse_unless_ours", lambda *_: None)
    monkeypatch.setattr("slurm_gpuhealth.config.load.unsafe", lambda *_, **__: [])
    figures.keep(journal, "nccl", "2.18.0", [(None, outputs.Figure("nccl", 470.7, "GB/s"))], NOW)
    figures.keep(journal, "x", "1", [(GPUS[1]["uuid"], outputs.Figure("x.y", 2.0, "us", 1))], NOW + 1)
    outbox.ship(shared, journal, "n1", 30)
    assert ingest.ingest(store, shared, NOW).trouble == ()
    with store.connect() as db:
        rows = db.execute(sql.select(schema.figure).order_by(schema.figure.c.id)).all()
    assert [
        (row.node, row.tool, row.version, row.uuid, row.gpu, row.model, row.name, row.value, row.unit) for row in rows
    ] == [
        ("n1", "nccl", "2.18.0", None, None, "H100", "nccl", 470.7, "GB/s"),
        ("n1", "x", "1", GPUS[1]["uuid"], 1, "H100", "x.y", 2.0, "us"),
    ]


def fleet(store, nodes=8, bad=("n1", 0), values=(50.0, 50.0, 40.0, 41.2), clock=0.0):
    """Four figures of each GPU, and one GPU's own `values`, the newest last."""
    taken = 0
    with store.begin() as db:
        for node in (f"n{number}" for number in range(1, nodes + 1)):
            for gpu in range(2):
                for turn in range(len(values)):
                    taken += 1
                    key = {"node": node, "journal": "j", "id": taken, "sub": taken, "seq": taken, "taken": taken}
                    value = values[turn] if (node, gpu) == bad else 52.0 + 0.1 * gpu
                    row = {"time": NOW + turn, "clock": clock, "tool": "dcgm", "version": "4.4.1", "model": "H100"}
                    row |= {"name": "dcgm.gflops", "value": value, "unit": "TFLOPS", "gpu": gpu}
                    uuid = f"GPU-{gpu}0000000-aaaa" if node == "n1" else f"GPU-{gpu}-{node}"
                    db.execute(schema.figure.insert().values(**key, **row, uuid=uuid))


def test_the_controller_finds_the_slow_gpu_by_its_last_two_figures(store):
    fleet(store)
    (found,) = slow.look(store, NOW + 60)
    assert (found["node"], found["gpu"], found["value"], found["median"], found["percent"]) == (
        "n1",
        0,
        41.2,
        52.1,
        -21,
    )
    assert slow.look(store, NOW + 60) == [found]


def test_nothing_new_is_not_compared_again_and_old_figures_do_not_count(store, monkeypatch):
    fleet(store)
    monkeypatch.setattr(slow.slow, "compare", lambda figures: [] if not list(figures) else pytest.fail("compared"))
    assert slow.look(store, NOW + 91 * 86400) == []
    monkeypatch.setattr(slow.slow, "compare", lambda _: pytest.fail("compared again"))
    assert slow.look(store, NOW) == []


@pytest.fixture
def slurm(monkeypatch):
    slurm = Slurm(monkeypatch)
    slurm.add("n1", extra="rack 7")
    monkeypatch.setattr(control, "known", lambda _, names: {one for one in names if one in slurm.nodes})
    return slurm


def test_the_node_is_told_once_and_once_when_it_is_over(store, shared, slurm):
    fleet(store)
    found = slow.look(store, NOW + 60)
    for _ in range(2):
        slow.tell(store, shared, found)
    assert slurm.orders == ["remarks"]
    assert slurm.nodes["n1"].extra == "rack 7 gpuhealth-slow: GPU-00000000 dcgm.gflops 41.2 52.1 TFLOPS;"
    slow.tell(store, shared, [])
    slow.tell(store, shared, [])
    assert (slurm.orders, slurm.nodes["n1"].extra) == (["remarks", "remarks"], "rack 7")


def test_a_silent_controller_is_asked_again_and_a_node_that_is_gone_is_not(store, shared, slurm, monkeypatch):
    fleet(store)
    found = slow.look(store, NOW + 60)
    show, silent = control.show_node, [True]

    def shown(*words):
        if silent:
            raise control.ControllerDown("down")
        return show(*words)

    monkeypatch.setattr(control, "show_node", shown)
    gone = {**found[0], "node": "n0"}
    slow.tell(store, shared, [gone, *found])
    assert slurm.orders == []
    silent.clear()
    slow.tell(store, shared, [gone, *found])
    assert slurm.orders == ["remarks"]
    monkeypatch.setattr(control, "known", lambda *_: pytest.fail("asked again"))
    slow.tell(store, shared, [gone, *found])


def test_what_the_controller_wrote_is_a_finding_of_the_node_until_it_is_gone(shared, journal, slurm):
    def look(extra):
        slurm.change("n1", extra=extra)
        held.look_at_hold(shared, journal, "n1", NOW)
        return [
            (one.finding.key, one.finding.gpu and one.finding.gpu.index, one.severity, one.finding.message)
            for one in record.select(journal, "source = 'gpu' AND cleared IS NULL")
        ]

    words = "slower than the same model elsewhere: dcgm.gflops 41.2 TFLOPS, fleet 52.1 (-21 %)"
    shared = replace(shared, policy=())
    rows = "GPU-00000000 dcgm.gflops 41.2 52.1 TFLOPS, GPU-99999999 x 1 2 us, node nccl 200 460 GB/s"
    extra = f"rack 7 gpuhealth-slow: {rows};"
    found = look(extra)
    assert found[0] == ("gpu:slow", 0, "warning", words)
    assert [one[1] for one in found] == [0, None]
    assert look(extra) == found
    assert look("rack 7") == []


def test_a_remark_is_read_back_as_it_was_written_and_nonsense_is_not():
    rows = [
        remark.Slow("GPU-5db0a814", "ib-write.mlx5_0/1", 41.25, 391.2, "Gb/s"),
        remark.Slow("node", "x", 1.0, 2.0, "us"),
    ]
    text = remark.write_slow("site: x;", rows)
    assert remark.read_slow(remark.slow_text(text)) == rows
    assert remark.write_slow(text, []) == "site: x;"
    assert remark.read_slow("GPU-1 x one 2 us, GPU-1 x 1 0 us, , a b c") == []
    hostile = remark.write_slow("", [remark.Slow("node", "a;b, c", 1.0, 2.0, "u s")])
    assert hostile.count(";") == 1


def test_lemons_shows_slow_gpus(store, shared, monkeypatch):
    fleet(store)
    slow.look(store, NOW + 60)
    monkeypatch.setattr(common, "settings_of", lambda _: shared)
    monkeypatch.setattr(control, "show_nodes", lambda *_: [])
    done = CliRunner().invoke(main, ["lemons"])
    row = next(line for line in done.output.splitlines() if line.startswith("n1 "))
    assert row.split()[:9] == ["n1", "0", "H100", "dcgm.gflops", "41.2", "TFLOPS", "52.1", "-21", "%"]
    (shown,) = map(json.loads, CliRunner().invoke(main, ["lemons", "--json"]).output.splitlines())
    assert (shown["node"], shown["name"], shown["percent"]) == ("n1", "dcgm.gflops", -21)
