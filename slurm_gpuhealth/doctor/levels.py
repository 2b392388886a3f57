"""Which tests of each run level DCGM runs on this node's GPUs: what the last runs showed, judged. No I/O."""

from __future__ import annotations

from slurm_gpuhealth.diagnose import models
from slurm_gpuhealth.doctor.line import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from slurm_gpuhealth.config.settings import Settings


def judge(settings: Settings, gpu: str, version: str | None, runs: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """`gpu`: the model, "" where unknown; `version`: dcgmi's; `runs`: the journal's `levels`."""
    dcgm = models.settings_for(settings.dcgm, gpu)
    refused = models.refused(dcgm.config)
    if refused:
        what, _, remedy = refused.rpartition(": ")
        yield Line("dcgm-config", "FAIL", f"{what}, and no level is run", remedy)
    unknown = []
    for level in models.plan(runs, dcgm, version):
        if not level.known:
            unknown.append(f"{level.level}")
        elif level.tests:
            less = f"; not for this model: {', '.join(level.left_out)}" if level.left_out else ""
            yield Line("levels", "ok", f"DCGM level {level.level} runs {', '.join(level.runs)}{less}")
        else:
            cannot = "; ".join(f"{name}: {why}" for name, why in level.cannot)
            what = cannot or f"all its tests are in skips: {', '.join(level.left_out)}"
            # Without the ladder nobody asks for the deep ones.
            grade = "FAIL" if settings.ladder.tests or level.level < 3 else "warn"
            what = f"DCGM level {level.level} can't pass on {gpu or 'these GPUs'}, and ends as untested: {what}"
            yield Line("levels", grade, what, models.remedy(level, gpu))  # type: ignore[arg-type]
    if unknown:
        what = f"which tests DCGM runs at level {', '.join(unknown)} is not known before the first run of it"
        yield Line(
            "levels", "skip", what, "dcgmi diag -r 4 -j > FILE; gpuhealth diag plan FILE (an hour, an idle node)"
        )
    for row in models.expected(settings.dcgm, gpu, version, runs):
        yield Line("dcgm-trouble", "warn", f"{row.words}: a tool error, and no fault", row.remedy)
