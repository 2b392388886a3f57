"""Stand-in for NVIDIA's module of the same name."""

from __future__ import annotations

import dcgm_agent
from dcgm_structs import Struct


class DcgmDiag:
    """A diagnostic to run."""

    def __init__(self, gpuIds=None, cpuIds=None, testNamesStr="", paramsStr="", timeout=0) -> None:
        self.runDiagInfo = Struct(
            validate=int(testNamesStr or 1), gpus=list(gpuIds) if gpuIds else None, timeoutSeconds=timeout
        )

    def Execute(self, handle):
        """Run it; blocks."""
        return dcgm_agent.dcgmActionValidate_v2(handle, self.runDiagInfo)
