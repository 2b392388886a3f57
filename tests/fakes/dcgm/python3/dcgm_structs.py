"""Stand-in for NVIDIA's module of the same name: the part that a diagnostic needs."""

from __future__ import annotations

DCGM_OPERATION_MODE_AUTO = 1
DCGM_DIAG_RESULT_PASS, DCGM_DIAG_RESULT_SKIP, DCGM_DIAG_RESULT_WARN, DCGM_DIAG_RESULT_FAIL, DCGM_DIAG_RESULT_NOT_RUN = (
    range(5)
)
DCGM_ST_TIMEOUT = -11
DCGM_ST_VER_MISMATCH = -12
DCGM_ST_CONNECTION_NOT_VALID = -21
dcgmRunDiag_version10 = 10


class DCGMError(Exception):
    """An error of the library, with its return code."""

    def __init__(self, value: int, info: str = "") -> None:
        super().__init__(info or f"DCGM error {value}")
        self.value = value


class DCGMError_Timeout(DCGMError):
    """-11."""


def _dcgmGetFunctionPointer(name: str):
    """A function of libdcgm by name, called with a raw handle."""
    import standin

    assert name == "dcgmStopDiagnostic", name
    return lambda handle: standin.ask(handle.address, {"op": "stop"})["rc"]


class Struct:
    """A C struct: named fields."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)
