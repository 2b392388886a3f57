"""Stand-in for NVIDIA's module of the same name: a connection to the stand-in host engine.

How long a second lasts comes from the scenario beside the engine's socket.
"""

from __future__ import annotations

import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.realpath(__file__)), ".."))
import dcgm_structs
import standin
from dcgm_structs import DCGM_ST_CONNECTION_NOT_VALID, DCGMError, Struct


class DcgmHandle:
    """A connection; without an address the real one starts an engine in this process."""

    def __init__(self, handle=None, ipAddress=None, opMode=dcgm_structs.DCGM_OPERATION_MODE_AUTO, unixSocketPath=None):
        address = unixSocketPath or ipAddress
        if address is None:
            raise AssertionError("an embedded host engine was started")
        try:
            standin.connect(address).close()
        except OSError as error:
            raise DCGMError(DCGM_ST_CONNECTION_NOT_VALID, str(error)) from error
        folder = os.path.dirname(address) if unixSocketPath else os.environ.get("DCGM_STANDIN", ".")
        scale = standin.seconds(standin.scenario(folder), 1)
        self.handle = Struct(address=address, scale=scale)

    def GetSystem(self) -> DcgmSystem:
        """The system behind the connection."""
        return DcgmSystem(self)


class DcgmSystem:
    """What is on the node."""

    def __init__(self, handle: DcgmHandle) -> None:
        self.discovery = DcgmSystemDiscovery(handle)


class DcgmSystemDiscovery:
    """Which GPUs there are."""

    def __init__(self, handle: DcgmHandle) -> None:
        self._gpus = {gpu["entity"]: gpu for gpu in standin.ask(handle.handle.address, {"op": "discover"})["gpus"]}

    def GetAllSupportedGpuIds(self) -> list[int]:
        """Entity ids."""
        return list(self._gpus)

    def GetGpuAttributes(self, gpuId: int) -> Struct:
        """The attributes of one; only UUID and name are filled in."""
        return Struct(identifiers=Struct(uuid=self._gpus[gpuId]["uuid"], deviceName=self._gpus[gpuId]["name"]))
