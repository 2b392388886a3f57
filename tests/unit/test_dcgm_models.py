"""GPUs that are not on DCGM's list: which tests are allowed, what a level proves without the others, who reports it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_gpuhealth import diagnose
from slurm_gpuhealth.commands.diag import diag
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.config.settings import Dcgm, DcgmModel, Ladder, Settings
from slurm_gpuhealth.diagnose import dcgmi, models, parse
from slurm_gpuhealth.doctor import levels
from slurm_gpuhealth.frozen import replace
from tests.unit.test_dcgm_run import UUIDS, Node

CORPUS = Path(__file__).parents[1] / "corpus" / "dcgm"
GATED = ["memory", "pcie", "diagnostic", "memory_bandwidth", "targeted_stress", "targeted_power", "nvbandwidth"]
CONFIG = """version: "4.6.0"
spec: dcgm-diag-v1
skus:
  - name: NVIDIA L40S
    id: 26b9
    memory:
      is_allowed: true
    pcie:
      is_allowed: true
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node of GPUs that DCGM does not know: it skips all tests but `software` until they are allowed."""
    dcgmi.program_version.cache_clear()
    monkeypatch.setattr(configuration, "unsafe", lambda *_, **__: [])
    made = Node(tmp_path)
    made.gpus = [{**gpu, "name": "NVIDIA L40S"} for gpu in made.gpus]
    made.save(unlisted={"26b9": GATED}, seconds={"2": 9, "3": 9, "4": 9})
    made.start()
    yield made
    made.stop()


def run(node, level, backend="dcgmi", **dcgm):
    settings = Settings(dcgm=replace(node.settings, backend=backend, **dcgm))
    return diagnose.diagnose(level, (), settings, 3000)


@pytest.fixture(params=["dcgmi", "pydcgm"])
def backend(request):
    return request.param


def config(node, text=CONFIG):
    path = node.folder / "l40s.yaml"
    path.write_text(text)
    return str(path)


def test_a_level_whose_tests_are_skipped_is_no_pass(node, backend):
    diagnosis = run(node, 2, backend)
    assert diagnosis.outcome == "not-testable"
    assert {test.name: test.status for test in diagnosis.tests} == {"software": "ran", "memory": "skip", "pcie": "skip"}


@pytest.mark.parametrize("version", ["4.6.0", "3.3.9"])
def test_a_level_whose_tests_are_allowed_by_a_config_passes(node, version):
    node.save(version=version)
    assert run(node, 2, config=config(node)).outcome == "pass"


def test_the_bindings_take_the_same_config(node):
    assert run(node, 2, "pydcgm", config=config(node)).outcome == "pass"


def test_parameters_allow_tests_too(node, backend):
    assert run(node, 2, backend, parameters="memory.is_allowed=True;pcie.is_allowed=True").outcome == "pass"
    assert node.lines()[-1]["parameters"] == ["memory.is_allowed=True", "pcie.is_allowed=True"]


def test_a_config_for_another_model_allows_nothing(node, backend):
    assert run(node, 2, backend, config=config(node, CONFIG.replace("26b9", "2330"))).outcome == "not-testable"


def test_a_parameter_that_dcgm_does_not_know_is_its_refusal_and_no_fault(node):
    diagnosis = run(node, 2, parameters="memory.nosuch=1")
    assert diagnosis.outcome == "tool-error"
    assert "has no parameter 'nosuch'" in diagnosis.message


def test_a_level_passes_without_a_test_that_is_not_for_this_model(node, backend):
    dcgm = {"parameters": "memory.is_allowed=True"}
    assert run(node, 2, backend, **dcgm).outcome == "not-testable"
    assert run(node, 2, backend, **dcgm, skips=("memory_bandwidth",)).outcome == "not-testable"
    diagnosis = run(node, 2, backend, **dcgm, skips=("pcie",))
    assert diagnosis.outcome == "pass"
    assert {gpu.outcome for gpu in diagnosis.gpus} == {"pass"}
    assert diagnosis.message == "software, memory passed on 4 GPUs; skipped: pcie"


def test_a_level_of_which_nothing_is_left_is_no_pass(node, backend):
    diagnosis = run(node, 2, backend, skips=("memory", "pcie"))
    assert diagnosis.outcome == "not-testable"
    assert "level 2 has no test left: memory, pcie in skips" in diagnosis.message


def test_a_skip_on_one_gpu_alone_is_not_the_models(node, backend):
    node.save(unlisted={}, skip={UUIDS[1]: ["pcie"]})
    assert run(node, 2, backend, skips=("pcie",)).outcome == "not-testable"


def test_a_test_that_is_in_skips_and_runs_counts_as_ever(node, backend):
    node.save(unlisted={}, faults={UUIDS[1]: {"level": 2, "test": "pcie", "code": 30}})
    assert run(node, 2, backend, skips=("pcie",)).outcome == "fail"


def test_a_test_in_skips_that_is_not_installed_is_still_missing():
    text = (CORPUS / "diag_r2_no_plugins.json").read_bytes()
    assert parse.parse(text, 0, 2, skips=("pcie", "memory")).outcome == "not-testable"


def test_what_dcgm_has_against_a_gpu_it_skips_is_not_passed_over():
    text = (CORPUS / "diag_r2_skip.json").read_bytes()  # ECC is off
    assert parse.parse(text, 226, 2, skips=("memory",)).outcome == "config"


def test_the_first_row_that_fits_the_model_is_its_own(node, backend):
    rows = (DcgmModel("*H100*", skips=("memory",)), DcgmModel("*L40S*", config=config(node)), DcgmModel("*"))
    assert run(node, 2, backend, parameters="diagnostic.is_allowed=False", model=rows).outcome == "pass"
    assert models.settings_for(Dcgm(parameters="a.b=1", skips=("pcie",), model=rows), "NVIDIA L40S") == Dcgm(
        config=config(node), skips=("pcie",), model=rows
    )


def test_a_config_that_others_can_write_is_not_used(node, backend, monkeypatch):
    monkeypatch.setattr(configuration, "unsafe", lambda path, *_, **__: [f"{path} can be written by others: chmod"])
    diagnosis = run(node, 2, backend, config=config(node))
    assert diagnosis.outcome == "tool-error"
    assert "dcgm.config is not used" in diagnosis.message
    assert node.lines() == []  # no diagnostic was started


@pytest.mark.parametrize("text", [None, "x" * 10000])
def test_a_config_that_dcgm_would_refuse_is_said(node, backend, text):
    path = config(node, text) if text else str(node.folder / "gone.yaml")
    assert "dcgm.config is not used" in run(node, 2, backend, config=path).message


def test_a_real_gb10_whose_tests_are_gated_is_not_testable_and_planned_so():
    gated = (CORPUS / "real/v4_2_3_gb10-level2-plugins-gated.json").read_bytes()
    shown = models.seen(parse.parse(gated, 226, 2), Dcgm())
    _, two, three, _ = models.plan({"2": shown}, Dcgm())
    assert [name for name, _ in two.cannot] == ["memory", "pcie"]
    assert "not on its list" in two.cannot[0][1]
    assert not two.tests
    assert not three.known


# ---- known troubles


def document(test, text, code=50, version="4.5.0"):
    def one(name, *warnings):
        results = [{"entity_group": "GPU", "entity_id": 0, "status": "Fail" if warnings else "Pass"}]
        results[0].update({"warnings": list(warnings)} if warnings else {})
        return {"name": name, "results": results, "test_summary": {"status": results[0]["status"]}}

    names = ("software", "memory", "pcie", "diagnostic", "memory_bandwidth", "targeted_stress", "targeted_power")
    tests = [one(name) for name in names if name != test]
    tests.append(one(test, {"warning": text, "error_id": code, "error_severity": 4}))
    body = {"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}}
    return json.dumps({**body, "metadata": {"version": version}})


BUSY = "The memory copy utilization for the GPU: 14 is greater than 10%. This may affect the results of the test."


def test_nvbandwidth_right_after_diagnostic_is_a_tool_error():
    diagnosis = parse.parse(document("nvbandwidth", BUSY), 226, 3)
    assert (diagnosis.outcome, diagnosis.gpus[0].errors) == ("tool-error", ())
    assert "issues/272" in diagnosis.message


def test_any_other_failure_of_nvbandwidth_counts():
    assert parse.parse(document("nvbandwidth", "wrong bytes", 31), 226, 3).outcome != "tool-error"
    assert parse.parse(document("nvbandwidth", BUSY, 31, "4.4.2"), 226, 3).outcome != "tool-error"


def test_a_time_out_on_a_model_on_which_pcie_hangs_says_so(node):
    node.gpus = [{**gpu, "name": "NVIDIA B200"} for gpu in node.gpus]
    node.save(seconds={"1": 5000, "2": 5000}, unlisted={})
    settings = Settings(dcgm=node.settings)
    two = diagnose.diagnose(2, (), settings, 20)
    assert (two.outcome, "issues/247" in two.message) == ("tool-error", True)
    assert "issues/247" not in diagnose.diagnose(1, (), settings, 20).message


@pytest.mark.parametrize("row", models.troubles(), ids=lambda row: row.test)
def test_a_known_trouble_has_a_source_a_version_and_a_remedy(row):
    assert row.source.startswith("https://github.com/NVIDIA/DCGM/issues/")
    assert row.since >= (4,)
    assert row.why
    assert row.remedy
    assert row.says or row.gpus != ("*",)  # or it would excuse every time-out


# ---- the doctor and the plan


def shown(node, level, **dcgm):
    diagnosis = run(node, level, **dcgm)
    return models.seen(diagnosis, replace(node.settings, **dcgm))


def judged(runs, gpu="NVIDIA L40S", version="4.6.0", ladder=True, **dcgm):
    settings = Settings(dcgm=Dcgm(**dcgm), ladder=Ladder(tests=ladder))
    return [(line.level, line.what, line.remedy) for line in levels.judge(settings, gpu, version, runs)]


def test_the_doctor_says_which_level_can_not_pass_and_why(node):
    (one, two, unknown) = judged({"2": shown(node, 2)})
    assert one == ("ok", "DCGM level 1 runs software", "")
    assert two[0] == "FAIL"
    assert "memory: DCGM skips it: this GPU is not on its list" in two[1]
    assert '[[dcgm.model]] gpu = "NVIDIA L40S"' in two[2]
    assert (unknown[0], "level 3, 4 is known only after" in unknown[1]) == ("skip", True)


def test_a_deeper_run_tells_of_the_levels_above_it(node):
    allowed = ";".join(f"{test}.is_allowed=True" for test in GATED)
    lines = judged({"4": shown(node, 4, parameters=allowed)}, parameters=allowed)
    assert [line[0] for line in lines] == ["ok"] * 4
    assert "nvbandwidth" not in lines[1][1]
    assert "nvbandwidth" in lines[2][1]


def test_what_is_named_in_skips_is_left_out_and_said(node):
    run3 = {"3": shown(node, 3, skips=tuple(GATED[2:]), parameters="memory.is_allowed=True;pcie.is_allowed=True")}
    dcgm = {"skips": tuple(GATED[2:]), "parameters": "memory.is_allowed=True;pcie.is_allowed=True"}
    lines = judged(run3, **dcgm)
    assert [line[0] for line in lines] == ["ok", "ok", "ok", "skip"]
    assert "not for this model: diagnostic, memory_bandwidth" in lines[2][1]
    assert [line[0] for line in judged(run3, **{**dcgm, "skips": ("diagnostic",)})][2] == "FAIL"


def test_a_run_under_another_config_or_dcgm_tells_nothing(node):
    runs = {"2": shown(node, 2)}
    assert [line[0] for line in judged(runs, parameters="memory.is_allowed=True")] == ["skip"]
    assert [line[0] for line in judged(runs, version="4.7.0")] == ["skip"]


def test_tests_that_are_not_installed_are_the_packages(node):
    node.save(plugins=False)
    two = judged({"2": shown(node, 2)})[1]
    assert "its package is not installed" in two[1]
    assert "apt install" in two[2]


def test_levels_that_nobody_asks_for_are_a_warning(node):
    assert [line[0] for line in judged({"3": shown(node, 3)}, ladder=False)] == ["ok", "FAIL", "warn", "skip"]


def test_a_model_with_a_known_trouble_is_warned_of():
    lines = judged({}, gpu="NVIDIA B200")
    assert [line[0] for line in lines] == ["skip", "warn"]
    assert "issues/247" in lines[1][1]


def test_diag_plan_reads_what_dcgmi_printed(tmp_path, monkeypatch):
    path = tmp_path / "gpuhealth.toml"
    path.write_text('[[dcgm.model]]\ngpu = "*GB10*"\nskips = ["pcie", "memory"]\n')
    monkeypatch.setenv("GPUHEALTH_CONFIG", str(path))
    gated = str(CORPUS / "real/v4_2_3_gb10-level2-plugins-gated.json")
    done = CliRunner().invoke(diag, ["plan", gated], obj="n1")
    assert done.exit_code == 1, done.output
    assert "level 1: can pass" in done.output
    assert "level 2: CAN NOT PASS" in done.output
    assert "does not run: memory: DCGM skips it: this GPU is not on its list" in done.output
    assert "level 3: not known" in done.output
    done = CliRunner().invoke(diag, ["plan", gated, "--gpu", "NVIDIA GB10"], obj="n1")
    assert "not for this model: memory, pcie" in done.output
    assert done.exit_code == 1  # nothing is left of level 2
    passed = CliRunner().invoke(diag, ["plan", str(CORPUS / "diag_r4_pass.json")], obj="n1")
    assert passed.exit_code == 0, passed.output
    told = CliRunner().invoke(diag, ["plan", str(CORPUS / "diag_r4_pass.json"), "--json"], obj="n1")
    levels = json.loads(told.output)["levels"]
    assert [(one["level"], one["can_pass"]) for one in levels] == [(number, True) for number in (1, 2, 3, 4)]
