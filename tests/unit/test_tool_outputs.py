"""Every sample of another tool's output gets the expected reading; a run that was cut short gets no figure."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpuhealth.config import settings
from slurm_gpuhealth.diagnose import outputs
from slurm_gpuhealth.diagnose.parse import parse

CORPUS = Path(__file__).parents[1] / "corpus" / "tools"
READS = {"nccl": "nccl", "nvbandwidth": "nvbandwidth", "ib": "perftest", "gpu": "gpu-burn"}
SAMPLES = sorted(path.name for path in CORPUS.iterdir() if path.name != "SOURCES.txt" and path.name[:4] != "dcgm")
SMALL = 0.001


def reading(name, text=None):
    reads = READS[name.partition("_")[0]]
    text = (CORPUS / name).read_text() if text is None else text
    return outputs.read(text, settings.Test("x", reads=reads))


def values(output):
    return {(one.name, one.device): (pytest.approx(one.value, SMALL), one.unit) for one in output.figures}


# What each sample holds: figures (name, device) → (value, unit) as far as they are looked at, their number, version.
FIGURES = {
    "nccl_2.10_a100.txt": ({("x", None): (235.26, "GB/s")}, 1, ""),
    "nccl_h100.txt": ({("x", None): (196.52, "GB/s")}, 1, ""),
    "nccl_2.18_rtx5090.txt": ({("x", None): (2.33, "GB/s")}, 1, "2.18.0 with NCCL 22907"),
    "nvbandwidth_0.2_rtx4090.txt": (
        {("x.host_to_device_memcpy_ce", 2): (23.90, "GB/s"), ("x.device_to_host_memcpy_ce", 7): (26.83, "GB/s")},
        16,
        "v0.2",
    ),
    "nvbandwidth_0.6_gh200.txt": ({("x.device_to_host_memcpy_ce", 1): (312.11, "GB/s")}, None, "v0.6"),
    "nvbandwidth_0.8_a6000.txt": (
        {
            ("x.device_to_device_memcpy_read_ce", 0): (22.64, "GB/s"),
            ("x.device_to_device_memcpy_read_ce", 5): (22.67, "GB/s"),
        },
        6,
        "v0.8",
    ),
    "nvbandwidth_json.json": (
        {("x.host_to_device_memcpy_ce", 0): (12.3964, "GB/s"), ("x.host_device_latency_sm", 0): (649.879, "ns")},
        None,
        "v0.5",
    ),
    "ib_write_bw_8m.txt": ({("x", None): (24056.72 * 8 * 1.048576 / 1000, "Gb/s")}, 1, ""),
    "ib_write_bw_all.txt": ({}, 1, ""),
    "ib_write_bw_gbits.txt": ({("x", None): (0.48, "Gb/s")}, 1, ""),
    "ib_read_lat_cx4.txt": ({("x", None): (6.74, "us")}, 1, ""),
    "ib_read_lat_rdmacm.txt": ({("x", None): (2.69, "us")}, 1, ""),
    "ib_read_lat_wr.txt": ({("x", None): (4.83, "us")}, 1, ""),
    "gpu_burn_2022_a100.txt": ({("x.gflops", 0): (16942.0, "GFLOPS"), ("x.celsius", 0): (62, "C")}, 16, ""),
    "gpu_burn_2022_a6000.txt": ({("x.gflops", 0): (15251.5, "GFLOPS"), ("x.celsius", 0): (45, "C")}, 2, ""),
}
WRONG = {
    "nccl_dcgm_wrong.txt": [(None, "2 wrong values")],
    "nvbandwidth_0.7_wrong.txt": [(None, "Invalid value when checking the pattern at 0x70a640000000")],
    "gpu_burn_2019_faulty.txt": [(device, "calculates wrong results") for device in range(16)],
}
NOTHING = {
    "nccl_dcgm_pass.txt": "its output has no figure: # Collective test concluded: all_reduce_perf",  # of one GPU
    "gpu_burn_2023_died.txt": "it did not end: No clients are alive!  Aborting",
    "gpu_burn_2025_nothing.txt": "its output has no figure: GPU 0: OK",
}


def test_every_sample_is_looked_at():
    assert sorted([*FIGURES, *WRONG, *NOTHING]) == SAMPLES


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_a_sample_are_read_by_gpu_and_unit(name):
    expected, count, version = FIGURES[name]
    output = reading(name)
    assert expected.items() <= values(output).items()
    assert len(output.figures) == (count or len(output.figures))
    assert (output.version, output.why, output.wrong) == (version, "", ())


@pytest.mark.parametrize("name", WRONG)
def test_what_a_tool_itself_calls_wrong_is_no_figure(name):
    output = reading(name)
    assert (list(output.wrong), output.figures) == (WRONG[name], ())


@pytest.mark.parametrize("name", NOTHING)
def test_an_output_without_a_figure_says_why(name):
    output = reading(name)
    assert (output.why, output.figures, output.wrong) == (NOTHING[name], (), ())


@pytest.mark.parametrize("name", ["nccl_h100.txt", "gpu_burn_2022_a100.txt"])
def test_a_run_that_was_cut_short_measured_nothing(name):
    text = (CORPUS / name).read_text()
    output = reading(name, text[: int(len(text) * 0.6)])
    assert output.why.startswith("it did not end")
    assert output.figures == ()


def test_a_json_that_was_cut_short_measured_nothing():
    text = (CORPUS / "nvbandwidth_json.json").read_text()
    assert reading("nvbandwidth_json.json", text[:3000]).figures == ()


def test_megabytes_of_older_perftests_and_mebibytes_of_newer_ones_are_one_unit():
    text = (CORPUS / "ib_write_bw_8m.txt").read_text()
    assert values(reading("ib_x", text)) == values(reading("ib_x", text.replace("MB/sec", "MiB/sec")))


def test_a_counter_that_has_overflown_is_no_figure():
    text = (CORPUS / "ib_write_bw_gbits.txt").read_text().replace("0.48 ", "-0.48")
    assert reading("ib_x", text).figures == ()


def test_the_error_of_nvbandwidth_is_why_there_is_no_figure():
    text = '{"nvbandwidth": {"error": "CUDA error: CUDA_ERROR_OUT_OF_MEMORY", "version": "v0.8"}}'
    assert reading("nvbandwidth_x", text).why == "CUDA error: CUDA_ERROR_OUT_OF_MEMORY"


def bandwidths(*cases):
    rows = [{"name": name, "status": status, "bandwidth_matrix": matrix} for name, status, matrix in cases]
    return json.dumps({"nvbandwidth": {"version": "v0.8", "testcases": rows}})


def test_a_gpu_without_any_bandwidth_has_the_figure_0():
    host = bandwidths(("host_to_device_memcpy_ce", "Passed", [["50.0", "0.00"]]), ("other", "Waived", None))
    assert [(one.device, one.value) for one in reading("nvbandwidth_x", host).figures] == [(0, 50.0), (1, 0.0)]
    links = bandwidths(("device_to_device_memcpy_read_ce", "Passed", [["0.00", "20.0"], ["20.0", "0.00"]]))
    assert {one.value for one in reading("nvbandwidth_x", links).figures} == {20.0}


def test_a_part_that_failed_is_why_nvbandwidth_measured_nothing():
    good = "host_to_device_memcpy_ce", "Passed", [["50.0"]]
    output = reading("nvbandwidth_x", bandwidths(good, ("device_to_host_memcpy_ce", "Failed", [["1.0"]])))
    assert (output.why, output.figures) == ("device_to_host_memcpy_ce: status Failed", ())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpu_x", "proc'd: 1 (9 Gflop/s)   errors: 0\nGPU {}: OK\n"),
        ("gpu_x", "proc'd: 1 ({} Gflop/s)   errors: 0\nGPU 0: OK\n"),
        ("nccl_x", "# Out of bounds values : {} FAILED\n"),
        ("nvbandwidth_x", '{{"nvbandwidth": {{"testcases": [{}]}}}}'),
    ],
)
def test_a_number_of_any_length_is_read_or_is_none(name, text):
    output = reading(name, text.format("9" * 5000))
    assert all(one.value == 0 for one in output.figures)
    assert output.wrong == ()


def test_of_a_sites_own_pattern_the_last_match_counts():
    test = settings.Test("scratch", pattern=r"read: ([\d.]+)", unit="GB/s")
    assert outputs.read("read: 1.5\nread: 3.25 GiB/s\n", test).figures == (outputs.Figure("scratch", 3.25, "GB/s"),)
    assert outputs.read("no disk", test).why == "its output has no figure: no disk"


@given(st.text(), st.sampled_from(sorted(outputs.READERS)))
def test_no_text_raises(text, reads):
    output = outputs.read(text, settings.Test("x", reads=reads, pattern="(x)"))
    assert output.figures or output.wrong or output.why


@given(st.sampled_from(SAMPLES), st.integers(0, 5000), st.text(max_size=8))
def test_no_damaged_sample_raises(name, place, text):
    whole = (CORPUS / name).read_text()
    reading(name, whole[:place] + text + whole[place + 3 :])


# DCGM's own remarks


def test_the_remarks_of_dcgm_3_are_figures():
    figures = {
        one.name: (one.device, one.value, one.unit) for one in parse((CORPUS / "dcgm_3_info.json").read_text()).figures
    }
    assert figures == {
        "dcgm.d2h": (0, 24.02, "GB/s"),
        "dcgm.h2d": (0, 25.93, "GB/s"),
        "dcgm.bidir": (0, 39.32, "GB/s"),
        "dcgm.d2h-latency": (0, 3.024, "us"),
        "dcgm.h2d-latency": (0, 3.715, "us"),
        "dcgm.bidir-latency": (0, 5.019, "us"),
        "dcgm.gflops": (0, 21688.18, "GFLOPS"),
        "dcgm.stress": (0, 1929.0, "GFLOPS"),
        "dcgm.power-max": (0, 251.0, "W"),
        "dcgm.power": (0, 247.8, "W"),
    }


def test_of_dcgm_4_the_gpus_whose_remarks_it_kept_have_figures():
    diagnosis = parse((CORPUS / "dcgm_4_info.json").read_text())
    assert [(one.name, one.device, one.value) for one in diagnosis.figures] == [
        ("dcgm.gflops", 0, 859.08),
        ("dcgm.gflops", 1, 859.08),
    ]
    assert (diagnosis.dcgm_version, len(diagnosis.gpus)) == ("4.1.1", 8)
