"""Diagnostics through NVIDIA's Python bindings in `dcgm.pydcgm`, for sites without dcgmi. Never imported here.

The bindings are flat modules with one blocking call, so a child process does all of it. Its answer is turned into the
document that dcgmi would have printed, so one parser judges both.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from time import monotonic

from slurm_gpuhealth import child
from slurm_gpuhealth.diagnose import engine, models, parse
from slurm_gpuhealth.diagnose.dcgmi import all_cpus
from slurm_gpuhealth.frozen import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from slurm_gpuhealth.config.settings import Dcgm
    from slurm_gpuhealth.diagnose.model import Diagnosis

TIMEOUT = -11
STATUS = {0: "Pass", 1: "Skip", 2: "Warn", 3: "Fail", 4: "Not Run"}


def run(level: int, gpus: Sequence[str], settings: Dcgm, timeout: float, *, expected: int = 0) -> Diagnosis:
    """As `dcgmi.run`. After DCGM's time-out the diagnostic goes on in the engine: a separate call stops it."""
    began = monotonic()
    if not os.path.isfile(os.path.join(settings.pydcgm, "pydcgm.py")):
        return engine.nothing("tool-error", level, f"no pydcgm.py in {settings.pydcgm} (dcgm.pydcgm)")
    if not engine.answers(settings.host):
        return engine.nothing("tool-error", level, f"no host engine at {settings.host}")
    limit = max(timeout - engine.STOP - 1, timeout / 2)
    asked = child.probe(lambda: _diagnose(level, gpus, settings, max(1, int(limit - engine.STOP))), timeout=limit)
    if asked.timed_out and not asked.stuck:
        child.probe(lambda: _stop(_connect(settings)), timeout=engine.STOP)
    if asked.value is None:
        return replace(
            engine.nothing("tool-error", level, f"pydcgm: {asked.error}"), seconds=asked.seconds, stuck=asked.stuck
        )
    code, text, known, lost, model = asked.value
    if lost and not text and not code:
        return engine.nothing("not-testable", level, f"DCGM does not see {', '.join(lost)}")
    ids = engine.select(gpus, known)[0] or sorted(known)
    skips = models.settings_for(settings, model).skips
    diagnosis = parse.parse(text, code & 0xFF if code else None, level, ids, skips=skips)
    if code == TIMEOUT:
        diagnosis = engine.explain(diagnosis, models.hangs(level, model, None))
    diagnosis = engine.finish(replace(diagnosis, model=model), known, lost)
    if expected and not gpus and len(known) != expected:
        diagnosis = engine.without(diagnosis, f"DCGM sees {len(known)} GPUs, not the {expected} expected")
    return replace(diagnosis, seconds=monotonic() - began)


def _diagnose(
    level: int, gpus: Sequence[str], settings: Dcgm, seconds: int
) -> tuple[int, str, dict[int, str], list[str], str]:
    """In the child: (return code, document, GPUs that DCGM sees, GPUs asked for that it does not see, model)."""
    os.sched_setaffinity(0, all_cpus())
    handle = _connect(settings)
    discovery = handle.GetSystem().discovery
    seen = {i: discovery.GetGpuAttributes(i).identifiers for i in discovery.GetAllSupportedGpuIds()}
    known = {i: _str(identifiers.uuid) for i, identifiers in seen.items()}
    ids, lost = engine.select(gpus, known)
    if gpus and not ids:
        return 0, "", known, lost, ""
    model = next((_str(getattr(seen[i], "deviceName", "")) for i in ids or sorted(seen)), "")
    settings = models.settings_for(settings, model)
    if refused := models.refused(settings.config):
        raise RuntimeError(refused)
    diagnostic = import_module("DcgmDiag").DcgmDiag(
        gpuIds=ids or sorted(known), testNamesStr=str(level), paramsStr=settings.parameters, timeout=seconds
    )
    if settings.config:
        with open(settings.config, encoding="utf-8") as file:
            diagnostic.SetConfigFileContents(file.read())
    try:
        response = diagnostic.Execute(handle.handle)
    except import_module("dcgm_structs").DCGMError as error:
        code = int(error.value)
        if code == TIMEOUT:
            _stop(handle)
        return code, f"Error: ({code}) {error}", known, lost, model
    return 0, json.dumps(_document(response)), known, lost, model


def _connect(settings: Dcgm) -> Any:
    """A handle on the engine at `dcgm.host`. Always with an address: else an engine would start in this process."""
    sys.path.insert(0, settings.pydcgm)
    pydcgm = import_module("pydcgm")
    if settings.host.startswith(engine.UNIX):
        return pydcgm.DcgmHandle(unixSocketPath=settings.host[len(engine.UNIX) :])
    return pydcgm.DcgmHandle(ipAddress=settings.host)


def _stop(handle: Any) -> None:
    """Stop the engine's diagnostic. The call is public in libdcgm since 4.3, but the bindings do not wrap it."""
    import_module("dcgm_structs")._dcgmGetFunctionPointer("dcgmStopDiagnostic")(handle.handle)


def _document(response: Any) -> dict[str, Any]:
    """dcgmDiagResponse_v11 or v12 (DCGM 4) as `dcgmi diag -j` writes it."""
    if not hasattr(response, "tests"):
        raise RuntimeError('these bindings are older than DCGM 4: set dcgm.backend = "dcgmi"')
    told = set()
    tests = []
    for test in response.tests[: response.numTests]:
        own = list(test.errorIndices[: test.numErrors])
        told.update(own)
        errors = [response.errors[index] for index in own]
        results = [response.results[index] for index in test.resultIndices[: test.numResults]]
        remarks = [response.info[index] for index in getattr(test, "infoIndices", ())[: getattr(test, "numInfo", 0)]]
        summary = {
            "status": STATUS.get(test.result, ""),
            "warnings": list(_warnings(errors)),
            "info": [_str(one.msg) for one in remarks],
        }
        shown = [_result(result, errors) for result in results if result.result != 4]
        tests.append({"name": _str(test.name), "results": shown, "test_summary": summary})
    system = [error for index, error in enumerate(response.errors[: response.numErrors]) if index not in told]
    if system:
        tests.append({"name": "system", "test_summary": {"status": "Fail", "warnings": list(_warnings(system))}})
    entities = [
        {"entity_id": entity.entity.entityId, "serial_num": _str(entity.serialNum)}
        for entity in response.entities[: response.numEntities]
        if _group(entity.entity) == "GPU"
    ]
    return {
        "DCGM Diagnostic": {"test_categories": [{"tests": tests}]},
        "entity_groups": [{"entity_group": "GPU", "entities": entities}],
        "metadata": {"version": _str(response.dcgmVersion)},
    }


def _result(result: Any, errors: Sequence[Any]) -> dict[str, Any]:
    entity = result.entity
    mine = [e for e in errors if (e.entity.entityGroupId, e.entity.entityId) == (entity.entityGroupId, entity.entityId)]
    return {
        "entity_group": _group(entity),
        "entity_id": entity.entityId,
        "status": STATUS.get(result.result, ""),
        "warnings": list(_warnings(mine)),
    }


def _warnings(errors: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for error in errors:
        yield {
            "warning": _str(error.msg),
            "error_id": int(error.code),
            "error_severity": getattr(error, "severity", None),
        }


def _group(entity: Any) -> str:
    return (
        "GPU" if entity.entityGroupId == import_module("dcgm_fields").DCGM_FE_GPU else f"group {entity.entityGroupId}"
    )


def _str(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
