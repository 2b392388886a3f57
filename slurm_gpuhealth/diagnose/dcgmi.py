"""Diagnostics through NVIDIA's `dcgmi`. The default back end: a program can be stopped, a library call can't."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from time import monotonic

from slurm_gpuhealth import child
from slurm_gpuhealth.diagnose import engine, models, parse
from slurm_gpuhealth.diagnose.catalogue import number
from slurm_gpuhealth.frozen import frozen, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpuhealth.child import Completed
    from slurm_gpuhealth.config.settings import Dcgm
    from slurm_gpuhealth.diagnose.model import Diagnosis

HEARTBEAT_SINCE = (4, 4, 2)
EXPECTED_SINCE = (3, 3, 8)
"""First version with `-n` and `-t`; older ones would refuse the whole command line."""
SHORT = 10.0
"""Seconds for quick calls of dcgmi; they take 0.05 s."""
BAD_PARAMETER = 255


OUT_OF_TIME = 245


class DcgmError(Exception):
    """dcgmi gave no usable answer; the text says what was asked and what came back."""


@frozen
class Seen:
    """The GPUs that DCGM sees, by DCGM's entity ids."""

    gpus: dict[int, str]
    """UUIDs; a diagnostic's document does not contain them."""
    names: dict[int, str]
    """Models, as the driver names them."""
    trouble: str = ""
    """What went wrong after the GPUs were listed."""

    def model(self, ids: Sequence[int]) -> str:
        """The model of these GPUs (none given: of all). DCGM tests only GPUs of one model at a time."""
        return next((self.names[one] for one in ids or sorted(self.names) if one in self.names), "")


def run(
    level: int,
    gpus: Sequence[str],
    settings: Dcgm,
    timeout: float,
    *,
    expected: int = 0,
    version: str | None = None,
) -> Diagnosis:
    """Run level `level` on `gpus` (DCGM's entity ids or UUIDs; none: all, `expected` of them if that is known).

    `timeout` is the limit for everything. DCGM's own limit (`-t`) comes first, then our SIGTERM, which stops the
    diagnostic in 4 s, and 6 s later SIGKILL, which stops it only if DCGM has the heartbeat (4.4.2). Never raises.
    """
    began = monotonic()
    if not engine.answers(settings.host):
        return engine.nothing("tool-error", level, f"no host engine at {settings.host}")
    try:
        seen = discovered(settings, min(SHORT, timeout / 2))
        version = version or program_version(settings.dcgmi)
    except DcgmError as error:
        return engine.nothing("tool-error", level, str(error))
    known = seen.gpus
    ids, lost = engine.select(gpus, known)
    if gpus and not ids:
        return engine.nothing("not-testable", level, f"DCGM does not see {', '.join(lost)}")
    model = seen.model(ids)
    settings = models.settings_for(settings, model)
    if refused := models.refused(settings.config):
        return engine.nothing("tool-error", level, refused)
    left = timeout - (monotonic() - began)
    limit = max(left - engine.STOP - 1, left / 2)  # when our SIGTERM goes out
    argv = command(level, ids, settings, max(1, int(limit - engine.STOP)), expected, version)
    done = child.run(argv, timeout=limit, grace=engine.STOP, cpus=all_cpus())
    diagnosis = _read(done, level, ids or sorted(known), limit, settings.skips)
    if expected and not gpus and done.rc == BAD_PARAMETER:
        message = f"DCGM sees {len(known)} GPUs, not the {expected} expected"
        diagnosis = replace(engine.nothing("not-testable", level, message), exit_code=done.rc)
    if diagnosis.outcome == "tool-error" and (done.timed_out or done.rc == OUT_OF_TIME):
        diagnosis = engine.explain(diagnosis, models.hangs(level, model, version))
    diagnosis = replace(diagnosis, seconds=done.seconds, stuck=done.stuck, model=model)
    return engine.finish(diagnosis, known, lost)


def command(
    level: int, ids: Sequence[int], settings: Dcgm, seconds: int, expected: int, version: str | None
) -> list[str]:
    """The command line, with the options that dcgmi `version` knows. dcgmi refuses `-n` together with `-i`."""
    spoken = number(version or "")
    argv = [settings.dcgmi, "diag", "--host", settings.host, "-r", str(level), "-j"]
    if ids:
        argv += ["-i", ",".join(map(str, ids))]
    elif expected and spoken >= EXPECTED_SINCE:
        argv += ["-n", f"gpu:{expected}"]
    if spoken >= EXPECTED_SINCE:
        argv += ["-t", str(seconds)]
    if spoken >= HEARTBEAT_SINCE:
        argv.append("--enable-heartbeat")
    if settings.config:
        argv += ["-c", settings.config]
    if settings.parameters:
        argv += ["-p", settings.parameters]
    return argv


def discover(settings: Dcgm, timeout: float = SHORT) -> dict[int, str]:
    """The GPUs that DCGM sees: entity id → UUID. Raises DcgmError."""
    return discovered(settings, timeout).gpus


def discovered(settings: Dcgm, timeout: float = SHORT) -> Seen:
    """The GPUs that DCGM sees. Raises DcgmError.

    If the engine lacks its NvSwitch module, dcgmi lists every GPU, says that it can't list NvSwitches, and exits 223.
    """
    done = child.run([settings.dcgmi, "discovery", "--host", settings.host, "-l"], timeout=timeout, grace=engine.STOP)
    text = done.stdout.decode("utf-8", "replace")
    known = gpus_of(text)
    if done.rc == 0:
        return Seen(known, names_of(text))
    counted = re.match(r"\s*(\d+) GPUs? found", text)
    if done.timed_out or done.rc is None or done.rc < 0 or not known or not counted or int(counted[1]) != len(known):
        raise DcgmError(f"dcgmi discovery {_failed(done, timeout)}")
    after = " ".join(line for line in text.splitlines() if line[:1] not in ("|", "+", "") and "GPU" not in line)
    said = " ".join((done.stderr.decode("utf-8", "replace") + " " + after).split())[:200]
    return Seen(known, names_of(text), f"dcgmi discovery ended with exit code {done.rc}: {said or 'no output'}")


def gpus_of(text: str) -> dict[int, str]:
    """The table of `dcgmi discovery -l`: entity id → UUID."""
    return _column(text, r"Device UUID:\s*(GPU-[0-9A-Fa-f-]+)")


def names_of(text: str) -> dict[int, str]:
    """The same table: entity id → model."""
    return _column(text, r"\|\s*Name:\s*(\S.*?)\s*\|")


def _column(text: str, pattern: str) -> dict[int, str]:
    known: dict[int, str] = {}
    entity = None
    for row in text.splitlines():
        if begins := re.match(r"\|\s*(\d+)\s*\|", row):
            entity = int(begins[1])
        if found := re.search(pattern, row):
            if entity is not None:
                known[entity] = found[1]
        elif row.startswith("+") and known and "Device" not in row:
            entity = None
    return known


@lru_cache(maxsize=4)
def program_version(dcgmi: str) -> str | None:
    """`dcgmi --version` ("dcgmi  version: 4.6.0") → "4.6.0"; None if it does not say. Raises DcgmError."""
    done = child.run([dcgmi, "--version"], timeout=SHORT)
    if done.timed_out or done.rc in (126, 127):
        raise DcgmError(f"dcgmi --version {_failed(done, SHORT)}")
    said = re.search(rb"version\s*:\s*([0-9.]+)", done.stdout)
    return said[1].decode() if said else None


def all_cpus() -> set[int]:
    """Allow all CPUs: with an affinity inherited from a job, DCGM's pcie test fails on good GPUs (NVIDIA/DCGM#253)."""
    return set(range(os.sysconf("SC_NPROCESSORS_CONF")))


def _read(done: Completed, level: int, ids: Sequence[int], limit: float, skips: Sequence[str]) -> Diagnosis:
    """Judges the document; if there is none, says why the program gave none."""
    diagnosis = parse.parse(done.stdout, done.rc, level, ids, skips=skips)
    if diagnosis.gpus or diagnosis.outcome != "tool-error":
        return diagnosis
    if done.timed_out:
        message = f"dcgmi diag did not end within {limit:.0f} s and was stopped"
    elif done.rc in (126, 127) or not done.stdout:
        message = f"dcgmi diag {_failed(done, limit)}"
    else:
        return diagnosis
    return replace(engine.nothing("tool-error", level, message), exit_code=done.rc)


def _failed(done: Completed, limit: float) -> str:
    if done.timed_out:
        return f"did not answer within {limit:.0f} s"
    words = " ".join((done.stderr or done.stdout).decode("utf-8", "replace").split())[:200]
    return f"ended with exit code {done.rc}: {words or 'no output'}"
