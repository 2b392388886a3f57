"""A diagnostic without results: DCGM refused, was busy, was killed, or printed something unreadable.

A broken checker is not a broken node, so none of these is ever a hardware fault.
"""

from __future__ import annotations

import re

from slurm_gpuhealth.diagnose import documents
from slurm_gpuhealth.diagnose.model import Diagnosis, advise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_gpuhealth.diagnose.documents import Reading
    from slurm_gpuhealth.diagnose.model import Outcome

EXITS: dict[int, tuple[Outcome, str]] = {
    **dict.fromkeys((222, 217), ("not-testable", "another diagnostic is running on this host engine")),
    221: ("not-testable", "no GPU to test"),
    233: ("not-testable", "GPUs of different models or an unknown GPU in the list"),
    234: ("not-testable", "DCGM does not support this GPU"),
    250: ("not-testable", "DCGM does not support this here"),
    237: ("warn", "DCGM says that the GPU needs a reset"),
    238: ("warn", "DCGM says that the GPU is lost"),
    199: ("warn", "the driver did not answer DCGM in time"),
    189: ("warn", "the GPUs were detached from the host engine"),
    1: ("tool-error", "dcgmi does not know one of its options"),
    254: ("tool-error", "dcgmi did not accept its command line"),
    255: ("tool-error", "bad parameter, or not as many GPUs as expected"),
    253: ("tool-error", "generic error"),
    251: ("tool-error", "no such group of GPUs"),
    245: ("tool-error", "the diagnostic ran out of time and was stopped"),
    244: ("tool-error", "DCGM's library and its host engine differ in version"),
    235: ("tool-error", "no host engine"),
    204: ("tool-error", "the diagnostic's program nvvs is not installed"),
    203: ("tool-error", "the diagnostic was killed"),
    198: ("tool-error", "the requested test is not installed"),
    190: ("tool-error", "the diagnostic was stopped"),
}
"""Exit code → its meaning. 226 is not here: it can mean anything."""
SAID: tuple[tuple[str, Outcome, str], ...] = (
    (r"\bMIG\b", "not-testable", "MIG is on, and DCGM can't test this layout"),
    (r"No available testing entities|Unable to match GPU set", "not-testable", "no such GPU: DCGM sees none to test"),
    (r"homogeneous", *EXITS[233]),
    (r"Unable to connect to host engine", *EXITS[235]),
)
NO_ENGINE = re.compile("unable to establish a connection")
"""The plain line before the document that means: dcgmi then silently started an engine of its own."""


def judge(reading: Reading, exit_code: int | None, level: int | None) -> Diagnosis:
    """DCGM's own reason decides, else the exit code (or the return code in the text); else it is unreadable."""
    words = documents.line(reading.refused if reading.refused is not None else reading.before)
    returned = re.search(r"\((-[0-9]{1,3})\)", words)
    code = int(returned[1]) & 0xFF if returned and exit_code in (None, 0, 226) else exit_code
    known = _said(reading, words) or EXITS.get(code or 0)
    if known:
        outcome, meaning = known
        told = meaning
    else:
        outcome, meaning = "tool-error", _unknown(reading, code)
        reason = words.rpartition("returned an error ")[2][:200]
        told = f"{meaning}: {reason}" if words else meaning
    return Diagnosis(
        outcome,
        level,
        reading.version,
        advice=advise(outcome, told),
        message=f"{meaning} ({words})" if words else meaning,
        exit_code=exit_code,
        busy=known == EXITS[222],
    )


def _said(reading: Reading, words: str) -> tuple[Outcome, str] | None:
    if NO_ENGINE.search(reading.before):
        return EXITS[235]  # what follows it came from an embedded engine
    return next(((outcome, meaning) for pattern, outcome, meaning in SAID if re.search(pattern, words)), None)


def _unknown(reading: Reading, code: int | None) -> str:
    if code is not None and (code < 0 or 128 < code < 160):
        return f"dcgmi was killed by signal {-code if code < 0 else code - 128}"
    return "DCGM refused to run" if reading.refused is not None else reading.unreadable
