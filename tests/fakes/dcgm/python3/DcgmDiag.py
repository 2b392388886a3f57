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
        self.runDiagInfo.configFileContents = ""
        self.runDiagInfo.testParms = paramsStr.split(";") if paramsStr else []
        for parameter in self.runDiagInfo.testParms:
            if len(parameter) >= 100:
                raise ValueError(f"DcgmDiag cannot add parameter '{parameter}' because it exceeds max length 100.")

    def SetConfigFileContents(self, configFileContents: str) -> None:
        """What dcgmi's -c reads from a file."""
        if len(configFileContents) >= 10000:
            raise ValueError("Dcgm Diag cannot set config file contents")
        self.runDiagInfo.configFileContents = configFileContents

    def Execute(self, handle):
        """Run it; blocks."""
        return dcgm_agent.dcgmActionValidate_v2(handle, self.runDiagInfo)
