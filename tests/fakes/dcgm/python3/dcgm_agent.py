"""Stand-in for NVIDIA's module of the same name: one blocking call, whose time-out leaves the diagnostic running."""

from __future__ import annotations

import threading

import dcgm_fields
import dcgm_structs
import standin
from dcgm_structs import DCGM_ST_TIMEOUT, DCGMError, DCGMError_Timeout, Struct

RESULTS = {"Pass": 0, "Skip": 1, "Fail": 3}


def dcgmActionValidate_v2(handle, info, version=dcgm_structs.dcgmRunDiag_version10):
    """Run a diagnostic: a dcgmDiagResponse_v12."""
    request = {
        "op": "diag",
        "level": info.validate,
        "gpus": info.gpus,
        "client": "pydcgm",
        "timeout": info.timeoutSeconds,
        "config": info.configFileContents,
        "parameters": info.testParms,
    }
    answer: list = []
    asking = threading.Thread(target=lambda: answer.append(standin.ask(handle.address, request)), daemon=True)
    asking.start()
    asking.join(info.timeoutSeconds * handle.scale if info.timeoutSeconds else None)
    if not answer:
        raise DCGMError_Timeout(DCGM_ST_TIMEOUT, "Timeout")
    found = answer[0] or {"rc": dcgm_structs.DCGM_ST_CONNECTION_NOT_VALID, "error": "Host engine connection invalid"}
    if "error" in found:
        raise DCGMError(found["rc"], found["error"].partition(" : ")[2].strip() or found["error"])
    return _response(found)


def _response(found: dict) -> Struct:
    """Index arrays, as in the C struct: tests point at results and errors."""
    tests, results, errors = [], [], []
    for number, test in enumerate(found["tests"]):
        first_result, first_error = len(results), len(errors)
        results += [
            Struct(entity=_entity(one["gpu"]), result=RESULTS[one["status"]], testId=number) for one in test["results"]
        ]
        for error in test["errors"]:
            entity = _entity(error["gpu"])
            errors.append(Struct(entity=entity, code=error["code"], msg=error["text"].encode(), testId=number))
        own_results, own_errors = range(first_result, len(results)), range(first_error, len(errors))
        tests.append(
            Struct(
                name=test["name"].encode(),
                result=RESULTS[test["summary"]],
                numResults=len(own_results),
                resultIndices=list(own_results),
                numErrors=len(own_errors),
                errorIndices=list(own_errors),
            )
        )
    entities = [
        Struct(entity=_entity(int(gpu)), serialNum=(serial or "").encode()) for gpu, serial in found["gpus"].items()
    ]
    counts = {
        "numTests": len(tests),
        "numResults": len(results),
        "numErrors": len(errors),
        "numEntities": len(entities),
    }
    lists = {"tests": tests, "results": results, "errors": errors, "entities": entities}
    return Struct(**counts, **lists, dcgmVersion=found["version"].encode(), driverVersion=found["driver"].encode())


def _entity(gpu) -> Struct:
    group = dcgm_fields.DCGM_FE_NONE if gpu is None else dcgm_fields.DCGM_FE_GPU
    return Struct(entityGroupId=group, entityId=gpu or 0)
