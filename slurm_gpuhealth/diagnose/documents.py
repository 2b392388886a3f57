"""Brings the documents of DCGM 2 to 4 into one shape. Knows the formats, judges nothing.

v4 (dcgmi/Diag.cpp, nvvs/include/NvvsJsonStrings.h):
    {"DCGM Diagnostic": {"test_categories": [{"tests": [{"name", "results": [{"entity_group", "entity_id", "status",
     "warnings": [{"warning", "error_id"}]}], "test_summary": {"status", "warnings"}}]}]}, "entity_groups", "metadata"}
v2, v3:
    {"DCGM GPU Diagnostic": {"test_categories": [{"category", "tests": [{"name", "results": [{"gpu_id", "status",
     "warnings"}]}]}]}, "version", "GPU Device Serials"}; level 1 is the tests of category Deployment, without GPU
either: {"DCGM...": {"runtime_error": text}}, {"iterations": [document, ...]}, with plain lines before it
"""

from __future__ import annotations

import json
import re

from slurm_gpuhealth.frozen import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
KEY = re.compile(r'"(?:DCGM Diagnostic|DCGM GPU Diagnostic|iterations)"\s*:')
SOFTWARE = "software"
OLD_NAMES = {"gpu_memory": "memory", "eud_test": "eud", "cpu_eud_test": "cpu_eud"}
TRIES = 64
"""How many `{` before a document's first key are tried as its beginning."""
LONGEST = 512
"""DCGM's own limit on a message."""


@frozen
class Warned:
    """An error as written, not yet classed."""

    id: int | None
    text: str
    severity: int | None = None
    """DCGM's number of the class. It means nothing without the version: 3.3.1 renumbered the classes."""


@frozen
class Result:
    """One entity's result. If it is not about a GPU, `gpu` is None and `entity` says what it is about, if known."""

    gpu: int | None
    status: str
    warnings: tuple[Warned, ...] = ()
    entity: str = ""
    info: str = ""
    """DCGM's remarks; one may say why a test was skipped."""


@frozen
class Test:
    """`summary`: the status of the whole test ("" in v3). `warnings`: those that stand only in the summary."""

    name: str
    results: tuple[Result, ...]
    summary: str = ""
    warnings: tuple[Warned, ...] = ()
    info: str = ""


@frozen
class Reading:
    """A document, or why there is none: in DCGM's words (`refused`) or in ours (`unreadable`)."""

    tests: tuple[Test, ...] = ()
    serials: dict[int, str | None] = {}  # noqa: RUF012 - never changed
    version: str | None = None
    refused: str | None = None
    before: str = ""
    """The text before the document: banners, "unable to establish a connection"."""
    unreadable: str = ""
    old: bool = False
    """A document of DCGM 2 or 3."""
    unclassified: str = "UNKNOWN"
    """The class of errors that are in no table."""


def read(text: str) -> Reading:
    """The first DCGM document in `text`, with its iterations merged."""
    document, start = _document(text)
    if document is None:
        cut = any(f'"{root}"' in text for root in ROOTS)
        return Reading(before=text, unreadable="the document is cut short" if cut else "no DCGM document")
    rounds = _list(document.get("iterations")) if "iterations" in document else [document]
    tests: list[Test] = []
    serials: dict[int, str | None] = {}
    version = refused = None
    for one in map(_dict, rounds):
        body = next((_dict(one[root]) for root in ROOTS if root in one), {})
        # Since 2.x the version has been beside the body, inside it, or in "metadata".
        version = version or _text(
            _dict(one.get("metadata")).get("version") or one.get("version") or body.get("version")
        )
        if "runtime_error" in body or "runtime_error" in one:
            refused = refused or _text(body.get("runtime_error") or one.get("runtime_error")) or "no reason given"
        serials.update(_serials(one, body))
        tests += _tests(body)
    if not tests and refused is None:
        return Reading(version=version, before=text[:start], unreadable="the document holds no test")
    old = any(ROOTS[1] in _dict(one) for one in rounds)
    return Reading(tuple(tests), serials, version, refused, text[:start], old=old)


def _document(text: str) -> tuple[dict[str, Any] | None, int]:
    """The object that contains DCGM's first key, and where it starts. The text before it may contain braces.

    Only the first key counts: in a document that was cut short, the inner parts may be whole and all pass.
    """
    decoder = json.JSONDecoder()
    key = KEY.search(text)
    start = key.start() if key else 0
    for _ in range(TRIES):
        start = text.rfind("{", 0, start)
        if start < 0:
            break
        try:
            value, _end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and any(name in value for name in (*ROOTS, "iterations")):
            return value, start
    return None, 0


def _tests(body: dict[str, Any]) -> Iterator[Test]:
    """All tests of a document. The Deployment checks of v2 and v3 become the one test `software`, as in v4."""
    deployment: list[Result] = []
    for category in map(_dict, _list(body.get("test_categories"))):
        software = _text(category.get("category")) == "Deployment"
        for test in map(_dict, _list(category.get("tests"))):
            name = "_".join((_text(test.get("name")) or "").lower().split())
            results = tuple(_result(_dict(result)) for result in _list(test.get("results")) if result is not None)
            if software and "test_summary" not in test and name != SOFTWARE:
                deployment += results
            elif name:
                yield _test(OLD_NAMES.get(name, name), results, _dict(test.get("test_summary")))
    if deployment:
        yield Test(SOFTWARE, tuple(deployment))


def _test(name: str, results: tuple[Result, ...], summary: dict[str, Any]) -> Test:
    """The summary repeats every entity's warnings: the remaining ones are about the node."""
    left = list(_warnings(summary.get("warnings")))
    for own in (warning for result in results for warning in result.warnings):
        same = next((warning for warning in left if (warning.id, warning.text) == (own.id, own.text)), None)
        if same:
            left.remove(same)
    return Test(name, results, _status(summary), tuple(left), _info(summary))


def _result(result: dict[str, Any]) -> Result:
    group = (_text(result.get("entity_group")) or "GPU").upper()
    number = next((n for n in map(_int, map(result.get, ("entity_id", "gpu_id", "gpu_ids"))) if n is not None), None)
    gpu = number if group == "GPU" and number is not None and number >= 0 else None
    entity = "" if group == "GPU" else f"{group} {number}"
    return Result(gpu, _status(result), tuple(_warnings(result.get("warnings"))), entity, _info(result))


def _info(value: dict[str, Any]) -> str:
    """A text in v3, a list of them in v4."""
    info = value.get("info")
    return line("; ".join(one for one in info if isinstance(one, str)) if isinstance(info, list) else info)


def _warnings(value: Any) -> Iterator[Warned]:
    """v4: objects with "warning"; v3's Deployment writes its text under "warnings"; v2 has a bare string."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict):
            text = line(one.get("warning") or one.get("warnings"))
            yield Warned(_int(one.get("error_id")), text, _int(one.get("error_severity")))
        elif isinstance(one, str) and one.strip():
            yield Warned(None, line(one))


def _serials(document: dict[str, Any], body: dict[str, Any]) -> Iterator[tuple[int, str | None]]:
    """The GPUs that the document lists, with their serial numbers if it has them."""
    for group in map(_dict, _list(document.get("entity_groups"))):
        if (_text(group.get("entity_group")) or "").upper() == "GPU":
            for entity in map(_dict, _list(group.get("entities"))):
                number = _int(entity.get("entity_id"))
                if number is not None and number >= 0:
                    yield number, _serial(entity.get("serial_num"))
    for holder in (document, body):
        for key, value in _dict(holder.get("GPU Device Serials")).items():
            number = _int(key)
            if number is not None and number >= 0:
                yield number, _serial(value)


def _serial(value: Any) -> str | None:
    serial = _text(value)
    return serial if serial and "NOT_SUPPORTED" not in serial else None


def _status(value: dict[str, Any]) -> str:
    return (_text(value.get("status")) or "").strip().lower()


def line(value: Any) -> str:
    """Text from outside as one line without control characters."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", _text(value) or "").strip()[:LONGEST]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) else None


def _int(value: Any) -> int | None:
    """DCGM writes numbers both as numbers and as strings."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,9}\s*", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
