"""Which tests DCGM runs at each level on this node's GPUs, judged by the last runs. No I/O."""

from __future__ import annotations

from slurm_gpuhealth.diagnose import models
from slurm_gpuhealth.doctor.line import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings


def judge(settings: Settings, gpu: str, version: str | None, runs: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """`gpu`: the model, "" if unknown; `version`: dcgmi's; `runs`: the journal's `levels`."""
    dcgm = models.settings_for(settings.dcgm, gpu)
    refused = models.refused(dcgm.config)
    if refused:
        what, _, remedy = refused.rpartition(": ")
        yield Line("dcgm-config", "FAIL", f"{what}: no DCGM level runs", remedy)
    unknown = []
    for level in models.plan(runs, dcgm, version):
        if not level.known:
            unknown.append(f"{level.level}")
        elif level.tests:
            less = f"; not for this model: {', '.join(level.left_out)}" if level.left_out else ""
            yield Line("levels", "ok", f"DCGM level {level.level} runs {', '.join(level.runs)}{less}")
        else:
            cannot = "; ".join(f"{name}: {why}" for name, why in level.cannot)
            what = cannot or f"skips leaves out all its tests: {', '.join(level.left_out)}"
            # Without the ladder nothing asks for levels 3 and 4.
            grade = "FAIL" if settings.ladder.tests or level.level < 3 else "warn"
            what = f"DCGM level {level.level} can't pass on {gpu or 'these GPUs'} and ends as untested: {what}"
            yield Line("levels", grade, what, models.remedy(level, gpu))  # type: ignore[arg-type]
    if unknown:
        what = f"which tests DCGM runs at level {', '.join(unknown)} is known only after a first run"
        yield Line(
            "levels",
            "skip",
            what,
            "dcgmi diag -r 4 -j > FILE; gpuhealth diag plan FILE (takes an hour on an idle node)",
        )
    for row in models.expected(settings.dcgm, gpu, version, runs):
        yield Line("dcgm-trouble", "warn", f"{row.words}: a tool error, not a fault", row.remedy)
