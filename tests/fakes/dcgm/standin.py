"""What the stand-in DCGM knows: the node's scenario, what a diagnostic of it finds, and how dcgmi writes that down.

The scenario is `scenario.json` in the node's folder, read anew each time. Its section "dcgm":
    version     "4.6.0", "3.3.9": which documents are written and which options known
    order       GPU UUIDs in the order of DCGM's entity ids
    time_scale  how long one of DCGM's seconds lasts here; seconds: {level: how many a diagnostic takes}
    faults      {UUID: {level, test, code, message} or a list of them}: found from that level on
    config      [{code, message, uuid?, level?}]: found by `software`; without uuid in its summary only
    skip        {UUID or "*": [test]}; plugins: false leaves `software` as the only test
    unlisted    {PCI device id: [test]}: the GPUs' model and the tests that it skips unless -c or -p allows them
    nvswitch_module  false: not loaded, and `dcgmi discovery -l` fails after the GPUs
    health      {UUID: [{system, value, text}]}: what the watches see
    hang        "term" or "kill": dcgmi diag never ends, and only this signal helps; kill_engine: true: it dies mid-run
"""

from __future__ import annotations

import json
import os
import socket
import time

HERE = os.path.dirname(os.path.realpath(__file__))
CATALOGUE = os.path.join(HERE, "../../../slurm_gpuhealth/diagnose/errors.json")
SEVERITY = {"NONE": 0, "MONITOR": 1, "ISOLATE": 2, "UNKNOWN": 3, "TRIAGE": 4, "CONFIG": 5, "RESET": 6}
SECONDS = {"1": 2, "2": 120, "3": 900, "4": 3600}
TESTS = (  # level, category, v4's name, v3's name
    (2, "Hardware", "memory", "GPU Memory"),
    (3, "Hardware", "diagnostic", "Diagnostic"),
    (3, "Hardware", "nvbandwidth", None),
    (4, "Hardware", "pulse_test", "Pulse Test"),
    (2, "Integration", "pcie", "PCIe"),
    (4, "Stress", "memtest", "Memtest"),
    (3, "Stress", "memory_bandwidth", "Memory Bandwidth"),
    (3, "Stress", "targeted_stress", "Targeted Stress"),
    (3, "Stress", "targeted_power", "Targeted Power"),
)
DEPLOYMENT = (  # v3's level 1, with the codes that each check reports
    ("Denylist", {23}),
    ("NVML Library", {24}),
    ("CUDA Main Library", {22}),
    ("Permissions and OS Blocks", {18, 20}),
    ("Persistence Mode", {29}),
    ("Environment Variables", {28}),
    ("Page Retirement/Row Remap", {6, 7, 8, 80, 83, 84, 85}),
    ("Graphics Processes", {25}),
    ("Inforom", {9}),
)
PER_GPU = {80, 84, 85, 132}
"""The only `software` errors that leave the other GPUs' status at Pass."""
SKIPS_REST = {6, 7, 80, 83, 84, 85}
WORDS = {
    -1: "Bad parameter passed to function",
    -11: "The timeout has expired for a request",
    -30: "DCGM GPU Diagnostic returned an error",
    -34: "The requested operation could not be completed because the affected resource is in use",
    -53: "The DCGM diagnostic was killed by a signal",
}


def scenario(folder: str) -> dict:
    """The node's scenario, as it is now."""
    with open(os.path.join(folder, "scenario.json"), encoding="utf-8") as file:
        return json.load(file)


def gpus(node: dict) -> dict[int, dict]:
    """Entity id → GPU. A lost one keeps its id but is not there: DCGM's numbers are given when its engine starts."""
    by_uuid = {gpu["uuid"]: gpu for gpu in node["gpus"]}
    order = node.get("dcgm", {}).get("order") or list(by_uuid)
    return {
        entity: by_uuid[uuid] for entity, uuid in enumerate(order) if uuid in by_uuid and not by_uuid[uuid].get("lost")
    }


def seconds(node: dict, count: float) -> float:
    """How long `count` of DCGM's seconds last here."""
    return count * float(node.get("dcgm", {}).get("time_scale", 0.01))


def version(node: dict) -> str:
    """DCGM's version."""
    return node.get("dcgm", {}).get("version", "4.6.0")


def listen_at(folder: str) -> str:
    """Where the node's own host engine listens."""
    return os.path.join(folder, "hostengine.sock")


def ask(address: str, request: dict) -> dict | None:
    """Send one request to the engine and wait for its answer; None when the engine is gone before it gave one."""
    connection = connect(address)
    with connection, connection.makefile("rwb") as stream:
        stream.write(json.dumps(request).encode() + b"\n")
        stream.flush()
        line = stream.readline()
    return json.loads(line) if line else None


def connect(address: str) -> socket.socket:
    """A connection to `unix:///path`, `/path`, `HOST` or `HOST:PORT`. OSError: nobody listens."""
    path = address[7:] if address.startswith("unix://") else address
    if "/" in path:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return connection
    host, _, port = path.partition(":")
    return socket.create_connection((host, int(port or 5555)), 5)


def refusal(node: dict, chosen: list[int] | None, expected: int | None) -> dict | None:
    """Why nvvs would not run at all, as dcgmi says it; None when it would."""
    known = gpus(node)
    if expected is not None and expected != len(known):
        return failed(-1, chosen)
    ids = list(known) if chosen is None else chosen
    missing = [i for i in ids if i not in known]
    if missing and len(ids) > len(missing):
        return {"rc": -23, "error": "Error: Diagnostic can only be performed on a homogeneous group of GPUs."}
    if missing:
        return failed(-30, chosen, "Unable to match GPU set '' to any GPU(s) on the system.")
    if not ids:
        return failed(-30, chosen, "Error: No available testing entities.")
    mig = [i for i, gpu in known.items() if int(gpu.get("mig") or gpu.get("nvml", {}).get("mig") or 0)]
    if mig and len(ids) > 1:
        return failed(
            -30,
            chosen,
            "Cannot run diagnostic: CUDA does not support enumerating GPUs with MIG mode enabled, yet GPU "
            f"{mig[0]} is MIG enabled and the diagnostic is attempting to run on {len(ids)} GPUs.",
        )
    if mig:
        return failed(
            -30,
            chosen,
            "Cannot run diagnostic: MIG is enabled, but no compute instances are configured. CUDA needs to execute on "
            "a compute instance if MIG is enabled.",
        )
    return None


def failed(rc: int, chosen: list[int] | None, more: str = "") -> dict:
    """dcgmi's words for a diagnostic that gave no result."""
    entities = "*,cpu:*" if chosen is None else ",".join(map(str, chosen))
    error = f"Error: Unable to complete diagnostic for entities {entities}. Return: ({rc}) : {WORDS[rc]}\n{more}"
    return {"rc": rc, "error": error}


def allowed(node: dict, request: dict) -> tuple[set[str], str]:
    """The tests that a model off DCGM's list skips even so, and what nvvs says of a parameter that it does not know."""
    (sku, tests), *_ = (node.get("dcgm", {}).get("unlisted") or {"2330": []}).items()
    gated = set(tests)
    for parameter in request.get("parameters") or []:
        name, _, value = parameter.partition("=")
        test, _, key = name.partition(".")
        if key not in ("is_allowed", "test_duration"):
            return gated, f"Invalid Parameter String: test '{test}' has no parameter '{key}'."
        if key == "is_allowed":
            (gated.discard if value.lower() == "true" else gated.add)(test)
    here, test = False, ""
    for line in (request.get("config") or "").splitlines():  # of dcgm-diag-v1 as much as the tests write
        word, _, value = line.strip().removeprefix("- ").partition(":")
        if word in ("name", "id"):
            here = value.strip(" \"'") == sku if word == "id" else False
        elif not value.strip():
            test = word
        elif word == "is_allowed" and here:
            (gated.discard if value.strip().lower() == "true" else gated.add)(test)
    return gated, ""


def result(node: dict, level: int, chosen: list[int] | None, request: dict) -> dict:
    """What a diagnostic finds: tests with a result for each GPU, in neither DCGM's nor Python's words yet."""
    gated, wrong = allowed(node, request)
    if wrong:
        return failed(-30, chosen, wrong)
    known = gpus(node)
    ids = list(known) if chosen is None else chosen
    errors = _errors(node, level, {known[i]["uuid"]: i for i in ids})
    tests = [_software([e for e in errors if e["test"] == "software"], ids)]
    spoilt = {e["gpu"] for e in errors if e["test"] == "software" and e["code"] in SKIPS_REST}
    if node.get("dcgm", {}).get("plugins", True):
        for begins, category, name, old in TESTS:
            if begins <= level:
                own = [e for e in errors if e["test"] == name]
                skip = set(known) if name in gated else _skipped(node, name, known)
                tests.append(_test(category, name, old, own, ids, spoilt | skip))
    isolate = any(e["severity"] == SEVERITY["ISOLATE"] for e in errors)
    return {
        "rc": -51 if isolate else -30 if errors else 0,
        "tests": tests,
        "gpus": {i: known[i].get("serial") for i in ids},
        "version": version(node),
        "driver": node.get("driver", "570.133.20"),
    }


def _errors(node: dict, level: int, ids: dict[str, int]) -> list[dict]:
    with open(CATALOGUE, encoding="utf-8") as file:
        catalogue = json.load(file)["errors"]
    dcgm = node.get("dcgm", {})
    faults = [
        {"uuid": uuid, **fault}
        for uuid, own in dcgm.get("faults", {}).items()
        for fault in (own if isinstance(own, list) else [own])
        if uuid in ids
    ]
    faults += [{"test": "software", **fault} for fault in dcgm.get("config", []) if fault.get("uuid") in {None, *ids}]
    found = []
    for fault in faults:
        if fault.get("level", 1) > level:
            continue
        _, _, summary, classes = catalogue.get(str(fault["code"]), ("", "", "Unknown error code", {"0": "UNKNOWN"}))
        gpu = ids.get(fault.get("uuid") or "")
        text = fault.get("message") or f"{summary} on GPU {gpu}"
        severity = SEVERITY[list(classes.values())[-1]]
        found.append({"test": fault["test"], "gpu": gpu, "code": fault["code"], "text": text, "severity": severity})
    return found


def _software(errors: list[dict], ids: list[int]) -> dict:
    test = _test("Deployment", "software", None, errors, ids, set())
    if any(error["code"] not in PER_GPU for error in errors):
        for one in test["results"]:
            one["status"] = "Fail"
    return test


def _test(category: str, name: str, old: str | None, errors: list[dict], ids: list[int], skip: set[int]) -> dict:
    results = []
    for gpu in ids:
        own = [e for e in errors if e["gpu"] == gpu and gpu not in skip]
        status = "Skip" if gpu in skip else "Fail" if own else "Pass"
        results.append({"gpu": gpu, "status": status, "errors": own})
    statuses = {one["status"] for one in results}
    summary = "Fail" if errors else "Skip" if statuses == {"Skip"} else "Pass"
    return {"category": category, "name": name, "old": old, "results": results, "summary": summary, "errors": errors}


def _skipped(node: dict, test: str, known: dict[int, dict]) -> set[int]:
    skip = node.get("dcgm", {}).get("skip") or {}
    return {i for i, gpu in known.items() if test in skip.get(gpu["uuid"], []) or test in skip.get("*", [])}


def document(found: dict, dcgm_version: str) -> dict:
    """`found` as `dcgmi diag -j` of that version writes it."""
    old = dcgm_version.startswith(("2.", "3."))
    root = "DCGM GPU Diagnostic" if old else "DCGM Diagnostic"
    if "error" in found:
        return {root: {"runtime_error": found["error"], "version": dcgm_version}}
    return (_document_v3 if old else _document_v4)(found, dcgm_version)


def _document_v4(found: dict, dcgm_version: str) -> dict:
    categories: dict[str, list] = {}
    for test in found["tests"]:
        results = []
        for one in test["results"]:
            entity = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": one["gpu"], "status": one["status"]}
            results.append(entity | ({"warnings": _warnings(one["errors"])} if one["errors"] else {}))
        summary = {"status": test["summary"]} | ({"warnings": _warnings(test["errors"])} if test["errors"] else {})
        categories.setdefault(test["category"], []).append(
            {"name": test["name"], "results": results, "test_summary": summary}
        )
    entities = [{"device_id": "2330", "entity_id": int(i), "serial_num": serial} for i, serial in found["gpus"].items()]
    return {
        "DCGM Diagnostic": {"test_categories": [{"category": c, "tests": tests} for c, tests in categories.items()]},
        "entity_groups": [{"entities": entities, "entity_group": "GPU", "entity_group_id": 1}],
        "metadata": {"Driver Version Detected": found["driver"], "version": dcgm_version},
    }


def _document_v3(found: dict, dcgm_version: str) -> dict:
    """dcgmi/Diag.cpp of v3.3.9: level 1 has no GPU but the last error's, as a number, and an odd key for the text."""
    software = []
    for name, codes in DEPLOYMENT:
        own = [e for e in found["tests"][0]["errors"] if e["code"] in codes]
        one: dict = {"status": "Fail" if own else "Pass"}
        if own:
            one["gpu_id"] = -1 if own[-1]["gpu"] is None else own[-1]["gpu"]
            one["warnings"] = [{"warnings": w.pop("warning"), **w} for w in _warnings(own)]
        software.append({"name": name, "results": [one]})
    categories: dict[str, list] = {"Deployment": software}
    for test in found["tests"][1:]:
        if test["old"]:
            results = [
                {"gpu_id": str(one["gpu"]), "status": one["status"]}
                | ({"warnings": _warnings(one["errors"])} if one["errors"] else {})
                for one in test["results"]
            ]
            categories.setdefault(test["category"], []).append({"name": test["old"], "results": results})
    return {
        "DCGM GPU Diagnostic": {"test_categories": [{"category": c, "tests": t} for c, t in categories.items()]},
        "Driver Version Detected": found["driver"],
        "GPU Device IDs": ["2330"] * len(found["gpus"]),
        "GPU Device Serials": {str(i): serial for i, serial in found["gpus"].items()},
        "version": dcgm_version,
    }


def _warnings(errors: list[dict]) -> list[dict]:
    return [
        {"error_category": 15, "error_id": e["code"], "error_severity": e["severity"], "warning": e["text"]}
        for e in errors
    ]


def note(folder: str, name: str, **facts: object) -> None:
    """Append one JSON line to a file of the node's folder; one write, so that lines never mix."""
    with open(os.path.join(folder, name), "ab", buffering=0) as file:
        file.write(json.dumps({"time": time.time(), **facts}).encode() + b"\n")
