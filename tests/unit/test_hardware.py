"""`make hardware`: our reading against nvidia-smi's document, field by field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_gpuhealth.config.settings import Nvml, Settings
from slurm_gpuhealth.evidence import nvml
from tests import hardware
from tests.fakes import node

DOCUMENT = (Path(__file__).parents[1] / "corpus/nvidia-smi-q-x.xml").read_text()
SCENARIO = """driver 575.51.02
count 1
gpu.0.uuid GPU-00000000-1111-2222-3333-444444444444
gpu.0.name NVIDIA L40S
gpu.0.vbios 95.02.66.00.02
gpu.0.serial 1650000000001
gpu.0.minor 3
gpu.0.pci 0000:1b:00
gpu.0.temperature 43
gpu.0.pstate 8
gpu.0.mig unsupported
gpu.0.max_pcie_gen 4
gpu.0.replay 7
gpu.0.event_reasons 5
gpu.0.utilization 2
gpu.0.ecc.volatile 7
gpu.0.ecc.aggregate 11
gpu.0.remapped_correctable 1
gpu.0.remapped_uncorrectable 2
gpu.0.remap_pending 1
gpu.0.banks.max 96
gpu.0.banks.high 1
"""


@pytest.fixture
def reading(tmp_path):
    node.make_node(str(tmp_path), "n1", gpus=1)
    with open(tmp_path / "scenario.nvml", "a", encoding="utf-8") as file:
        file.write(SCENARIO)
    return nvml.read(Settings(nvml=Nvml(library=str(tmp_path / node.LIBRARY))), full=True).value


def verdicts(reading, document=DOCUMENT):
    return {(gpu, field): verdict for gpu, field, *_, verdict in hardware.compare(reading, document)}


def test_one_gpu_read_in_both_ways_is_the_same_in_every_field(reading):
    found = verdicts(reading)
    assert "DIFFERS" not in found.values(), list(hardware.compare(reading, DOCUMENT))
    same = {field for (_, field), verdict in found.items() if verdict == "same"}
    assert same >= {"driver", "gpus", "pci", "serial", "minor", "vbios", "ecc", "ecc_volatile", "ecc_aggregate", "rows"}
    assert same >= {"banks", "reasons", "pstate", "replay", "max_gen", "max_width", "recovery", "persistence"}
    assert found["GPU0", "temperature"] == "moves"


@pytest.mark.parametrize(
    ("field", "theirs", "instead"),
    [
        ("ecc_aggregate", "<dram_uncorrectable>8<", "<dram_uncorrectable>9<"),
        ("rows", "pending>Yes<", "pending>No<"),
        ("temperature", ">41 C<", ">61 C<"),
        ("serial", ">1650000000001<", ">1650000000002<"),
        ("max_width", "max_link_width>16x<", "max_link_width>8x<"),
        ("pci", "bus_id>00000000:1B", "bus_id>00000000:1C"),
        ("driver", "575.51.02", "575.51.03"),
    ],
)
def test_what_differs_is_named(reading, field, theirs, instead):
    assert theirs in DOCUMENT
    found = verdicts(reading, DOCUMENT.replace(theirs, instead))
    assert [one for (_, one), verdict in found.items() if verdict == "DIFFERS"] == [field]


def test_what_only_one_of_them_knows_is_no_difference(reading):
    document = re.sub(r"<remapped_rows>.*</remapped_rows>", "<remapped_rows>N/A</remapped_rows>", DOCUMENT, flags=re.S)
    assert verdicts(reading, document)["GPU0", "rows"] == "ours only"


def test_a_gpu_that_one_of_them_does_not_list_is_a_difference(reading):
    assert verdicts({**reading, "gpus": []})["node", "gpus"] == "DIFFERS"


def test_without_a_gpu_it_ends_well_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(hardware.os.path, "exists", lambda path: False)
    assert hardware.main() == 0
    assert capsys.readouterr().out.count("\n") == 1
