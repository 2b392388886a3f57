"""DCGM's diagnostics, run levels 1 to 4: two back ends (dcgmi, pydcgm) behind one result model."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.config.settings import Settings
    from slurm_gpuhealth.diagnose.model import Diagnosis as Diagnosis
    from slurm_gpuhealth.findings import Finding


def diagnose(level: int, gpus: Sequence[str], settings: Settings, timeout: float) -> Diagnosis:
    """Run DCGM level `level` on `gpus` (UUIDs; none: all GPUs of the node) in at most `timeout` seconds in total.

    Never raises. Takes no lock and stores nothing: the caller must run only one diagnostic at a time on a node. A
    `busy` diagnosis (somebody else's is running) is worth another try within the caller's deadline.
    """
    from slurm_gpuhealth.diagnose import model

    if settings.dcgm.backend == "off":
        message = "DCGM is switched off (dcgm.backend)"
        return model.Diagnosis("not-testable", level, advice=message + ".", message=message)
    if settings.dcgm.backend == "pydcgm":
        from slurm_gpuhealth.diagnose import pydcgm

        return pydcgm.run(level, gpus, settings.dcgm, timeout, expected=settings.gpus.count)
    from slurm_gpuhealth.diagnose import dcgmi

    return dcgmi.run(level, gpus, settings.dcgm, timeout, expected=settings.gpus.count)


def findings(diagnosis: Diagnosis, now: float) -> list[Finding]:
    """What a diagnosis means to the judge: `model.findings`."""
    from slurm_gpuhealth.diagnose import model

    return model.findings(diagnosis, now)
