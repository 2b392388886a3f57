"""From a reading's values to findings: no library, no child."""

import pytest

from slurm_gpuhealth.child import Child, Probed
from slurm_gpuhealth.config.settings import Gpus, Nvml, Settings
from slurm_gpuhealth.evidence import nvml

UUIDS = [f"GPU-{n}" for n in range(4)]
HEALTHY = {
    "temperature": 40,
    "ecc_volatile": 0,
    "ecc_aggregate": 5,
    "rows": [0, 0, 0, 0],
    "reasons": 1,
    "pstate": 0,
    "utilization": 0,
    "replay": 3,
    "persistence": 1,
    "ecc": 1,
    "mig": 0,
    "recovery": 0,
    "crc_flit": 7,
    "links": [1] * 6,
}
FACTS = {"slowdown": 89, "max_gen": 5, "max_width": 16, "nvlinks": 6, "vbios": "96.00.99", "name": "H100"}


def gpus(full=False, **changes):
    """Four GPUs; `changes` are GPU 2's."""
    found = []
    for index, uuid in enumerate(UUIDS):
        facts = {**FACTS, "pci": f"0000:{index + 1}0:00", "serial": f"s{index}", "minor": 3 - index} if full else {}
        found.append(
            {"index": index, "errors": {}, "uuid": uuid, **facts, **HEALTHY, **(changes if index == 2 else {})}
        )
    return found


def judge(found, baseline=None, previous=None, settings=None, now=60.0, known=()):
    probed = Probed({"driver": "580.95.05", "gpus": found}, None, 0.01)
    return nvml.judge_probed(probed, previous, baseline or {}, known, settings or Settings(), now)


@pytest.fixture
def baseline():
    findings, baseline = judge(gpus(full=True))
    assert findings == []
    return baseline


def codes(findings):
    return [(f.code, f.severity, f.gpu.index if f.gpu else None) for f in findings]


@pytest.mark.parametrize(
    ("change", "code", "severity", "standing"),
    [
        ({"rows": [0, 1, 1, 0]}, "remap-pend", "fault", True),
        ({"rows": [0, 9, 0, 1]}, "remap-fail", "fault", True),
        ({"rows": [0, 8, 0, 0], "banks": [100, 0, 0, 0, 1]}, "remap-left", "warning", True),
        ({"recovery": 1}, "recovery", "fault", True),
        ({"recovery": 77}, "recovery", "warning", True),
        ({"reasons": 0x48}, "thermal", "info", False),
        ({"reasons": 0x88}, "brake", "info", False),
        ({"reasons": 0x08}, "slowdown", "info", False),
        ({"temperature": 88}, "hot", "warning", True),
        ({"temperature": 89}, "hot", "fault", True),
        ({"gen": 3}, "pcie-gen", "warning", True),
        ({"width": 8}, "pcie-width", "warning", True),
        ({"links": [1, 1, 1, 0, 1, 1]}, "nvlink", "warning", True),
        ({"persistence": 0}, "persist", "info", True),
        ({"ecc": 0}, "ecc-off", "info", True),
        ({"mig": 1}, "mig", "info", False),
        ({"ecc_aggregate": 7}, "ecc", "warning", False),
        ({"errors": {"GetTemperature": 15}}, "lost", "fault", True),
        ({"errors": {"GetTemperature": 16}}, "recovery", "fault", True),
        ({"errors": {"GetTemperature": 999}}, "call", "info", True),
    ],
)
def test_a_value_that_is_not_right_is_a_finding_about_that_gpu(baseline, change, code, severity, standing):
    (finding,), _ = judge(gpus(**change), baseline)
    assert (finding.source, finding.code, finding.severity, finding.standing) == ("nvml", code, severity, standing)
    gpu = finding.gpu
    assert (gpu.uuid, gpu.pci, gpu.index, gpu.serial) == ("GPU-2", "0000:30:00", 2, "s2")
    assert len(f"gpuhealth:{code}") <= 20, "sinfo -R shows no more"


@pytest.mark.parametrize(
    "change",
    [
        {"reasons": 0x4},  # software power cap
        {"reasons": 0x20},  # software thermal slowdown
        {"temperature": 87},
        {"temperature": 2**32 - 1},  # no reading
        {"temperature": 0},
        {"rows": [3, 1, 0, 0], "banks": [99, 1, 0, 0, 0]},
        {"gen": 5, "width": 16},
        {"replay": 11},
        {"crc_flit": 5000},
        {"links": [2, 2, 2, 2, 2, 2]},  # asleep to save power
        {"recovery": 0},
    ],
)
def test_what_is_ordinary_is_no_finding(baseline, change):
    before = {"time": 0.0, "gpus": gpus()}
    assert judge(gpus(**change), baseline, before)[0] == []


def test_old_memory_errors_of_a_gpu_seen_for_the_first_time_are_history():
    assert judge(gpus(full=True, ecc_aggregate=900, ecc_volatile=4))[0] == []


def test_memory_errors_are_told_once(baseline):
    (finding,), after = judge(gpus(ecc_volatile=2, ecc_aggregate=7), baseline)
    assert finding.details["new"] == 2
    assert judge(gpus(ecc_volatile=2, ecc_aggregate=7), after)[0] == []


def test_a_volatile_count_that_began_anew_counts_from_zero(baseline):
    _, after = judge(gpus(ecc_volatile=9, ecc_aggregate=14), baseline)
    assert judge(gpus(ecc_volatile=0, ecc_aggregate=14), after)[0] == []
    (finding,), _ = judge(gpus(ecc_volatile=1, ecc_aggregate=15), after)
    assert finding.details["new"] == 1


def test_an_erased_aggregate_count_is_a_new_baseline(baseline):
    findings, after = judge(gpus(ecc_aggregate=0), baseline)
    assert findings == []
    assert after["gpus"]["GPU-2"]["ecc_aggregate"] == 0


@pytest.mark.parametrize(("seconds", "is_news"), [(60, True), (600, False)])
def test_replays_and_link_errors_are_judged_by_their_rate(baseline, seconds, is_news):
    before = {"time": 0.0, "gpus": gpus()}
    now = gpus(replay=3 + 40, crc_flit=7 + 20_000)
    assert [f.code for f in judge(now, baseline, before, now=seconds)[0]] == (["replay", "nvlink-err"] * is_news)


def test_a_link_that_was_up_before_is_missed_until_it_is_back(baseline):
    down = gpus(links=[0, 1, 1, 1, 1, 1])
    for _ in range(3):
        findings, baseline = judge(down, baseline)
        assert codes(findings) == [("nvlink", "warning", 2)]
    assert judge(gpus(), baseline)[0] == []


def test_links_that_nobody_ever_had_are_not_missed():
    found = [{**gpu, "links": [0] * 6} for gpu in gpus(full=True)]
    assert judge(found)[0] == []


def test_all_links_down_everywhere_is_the_fabric_and_no_gpu(baseline):
    (finding,), _ = judge([{**gpu, "links": [0] * 6} for gpu in gpus()], baseline)
    assert (finding.code, finding.gpu, finding.details["class"]) == ("nvlink", None, "config")


def test_a_gpu_in_mig_mode_has_no_links_to_miss(baseline):
    _, after = judge(gpus(mig=1), baseline)
    assert judge(gpus(mig=1, links=[0] * 6), after)[0] == []


def test_gpus_that_are_gone_are_named_and_the_others_keep_their_own_numbers(baseline):
    shrunk = [{**gpu, "index": index} for index, gpu in enumerate(g for g in gpus() if g["uuid"] != "GPU-1")]
    (finding,), after = judge(shrunk, baseline)
    assert (finding.code, finding.gpu.uuid, finding.gpu.index, finding.gpu.serial) == ("lost", "GPU-1", 1, "s1")
    assert after["gpus"]["GPU-2"]["index"] == 1
    assert "GPU-1" in after["gpus"]


def test_a_gpu_without_a_handle_is_named_by_its_index_even_after_others_are_gone(baseline):
    found = [*gpus()[:2], {"index": 2, "errors": {"handle": 999}}, gpus()[3]]
    (finding,), _ = judge(found, baseline)
    assert (finding.code, finding.gpu.uuid, finding.gpu.pci) == ("lost", "GPU-2", "0000:30:00")


def test_on_the_first_look_ever_the_drivers_own_list_names_the_gpu_without_a_handle():
    known = [{"uuid": uuid, "pci": f"0000:{n + 1}0:00", "index": n, "minor": n} for n, uuid in enumerate(UUIDS)]
    found = [*gpus(full=True)[:3], {"index": 3, "errors": {"handle": 15}}]
    (finding,), _ = judge(found, known=known)
    assert (finding.gpu.uuid, finding.gpu.pci, finding.gpu.index) == ("GPU-3", "0000:40:00", 3)


@pytest.mark.parametrize(
    ("code", "word"), [(4, "permission"), (8, "power"), (16, "recovery"), (14, "inforom"), (77, "handle")]
)
def test_each_refusal_of_a_handle_has_its_own_word(baseline, code, word):
    found = [*gpus()[:2], {"index": 2, "errors": {"handle": code}}, gpus()[3]]
    (finding,), _ = judge(found, baseline)
    assert finding.code == word
    assert (finding.severity == "fault") == (code in (8, 16))


def test_a_replaced_gpu_is_not_a_lost_one_and_begins_its_own_baseline(baseline):
    found = gpus(full=True)
    found[1] = {**found[1], "uuid": "GPU-new", "ecc_aggregate": 400}
    findings, after = judge(found, baseline)
    assert findings == []
    assert "GPU-1" not in after["gpus"]
    assert after["gpus"]["GPU-new"]["ecc_aggregate"] == 400


def test_the_configured_number_of_gpus_decides_who_is_missing(baseline):
    three = [gpu for gpu in gpus() if gpu["uuid"] != "GPU-3"]
    findings, after = judge(three, baseline, settings=Settings(gpus=Gpus(count=3)))
    assert (findings, "GPU-3" in after["gpus"]) == ([], False)
    (finding,), _ = judge(gpus(), baseline, settings=Settings(gpus=Gpus(count=8)))
    assert (finding.code, finding.severity, finding.details["present"]) == ("count", "fault", 4)


def test_expected_versions_are_configuration(baseline):
    settings = Settings(gpus=Gpus(driver=("570",), vbios=("96.00.01",)))
    findings, _ = judge(gpus(), baseline, settings=settings)
    assert {finding.code for finding in findings} == {"vbios", "driver"}
    assert all(finding.details["class"] == "config" and finding.severity == "warning" for finding in findings)
    assert (
        judge(gpus(), baseline, settings=Settings(gpus=Gpus(driver=("570", "580.95"), vbios=("1", "96.00.99"))))[0]
        == []
    )


def test_after_a_boot_a_narrow_link_of_before_is_forgotten(baseline):
    _, narrow = judge(gpus(width=8), baseline)
    assert codes(judge(gpus(), narrow)[0]) == [("pcie-width", "warning", 2)]
    assert judge(gpus(full=True), narrow)[0] == []


@pytest.mark.parametrize("slowdown", [0, 2, -2, 2**32 - 2])
def test_a_threshold_that_can_be_none_condemns_no_gpu(slowdown):
    assert judge(gpus(full=True, slowdown=slowdown))[0] == []


def test_the_admins_temperature_limit_may_be_lower_than_the_gpus(baseline):
    (finding,), _ = judge(gpus(temperature=70), baseline, settings=Settings(nvml=Nvml(max_temperature=70)))
    assert (finding.code, finding.severity) == ("hot", "warning")


@pytest.mark.parametrize(
    ("probed", "code"),
    [
        (Probed(None, "no answer in 15 s", 15.0, True, Child(1, 2)), "timeout"),
        (Probed(None, "the probe died (signal 11)", 0.1), "probe"),
    ],
)
def test_our_own_trouble_is_a_tool_error_and_the_baseline_stays(baseline, probed, code):
    (finding,), after = nvml.judge_probed(probed, None, baseline, [], Settings(), 1.0)
    assert (finding.code, finding.severity, finding.details["class"]) == (code, "warning", "tool")
    assert after == baseline


def test_a_child_that_is_still_there_at_the_next_look_is_a_fault_of_the_driver():
    finding = nvml.hung(1.0)
    assert (finding.key, finding.severity, finding.standing) == ("driver:hung", "fault", True)
