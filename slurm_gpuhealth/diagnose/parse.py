"""Judges what a diagnostic printed. Pure; never raises on any text.

Exit codes are dcgmReturn_t & 0xff. 226 means both "a test failed" and "nvvs refused to run": the document tells which.
A status alone blames nobody: one bad GPU sets `software` to Fail on all GPUs; the guilty one has `warnings`.
"""

from __future__ import annotations

import re

from slurm_gpuhealth.diagnose import catalogue, documents, figures, models, refusal, tables
from slurm_gpuhealth.diagnose.documents import SOFTWARE
from slurm_gpuhealth.diagnose.model import HARDWARE, Diagnosis, Error, GpuResult, TestResult, advise, severity
from slurm_gpuhealth.diagnose.tests import LEVEL_OF, OPTIONAL, REQUIRED
from slurm_gpuhealth.frozen import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from slurm_gpuhealth.diagnose.documents import Reading, Result, Test, Warned
    from slurm_gpuhealth.diagnose.model import Outcome

ORDER: tuple[Outcome, ...] = ("fail", "warn", "config", "tool-error", "not-testable", "pass")
"""Worst first: an error stands even in a run that was cut short."""
FAILED = {"fail", "warn"}
RAN = {"pass", *FAILED}
ISOLATE_EXIT = 205
"""dcgmi's exit code if at least one error has class ISOLATE."""
NEW_CODES = {1: "MONITOR", 2: "ISOLATE", 4: "TRIAGE", 5: "CONFIG", 6: "RESET"}
"""DCGM's numbers of its classes since 3.3.1."""
NODE_REBOOT = 126
"""GPU_RECOVERY_REBOOT: the only error code that neither a test nor a reset can cure."""


def parse(
    text: str | bytes,
    exit_code: int | None = None,
    level: int | None = None,
    expected_gpus: Iterable[int] | None = None,
    expected_tests: Collection[str] | None = None,
    skips: Collection[str] = (),
) -> Diagnosis:
    """What `text`, all that a diagnostic printed, means.

    A test in `skips` that DCGM skips on all GPUs is not meant for this model: it does not count at all.
    With `level` or `expected_tests`, a test that did not run prevents a pass. With `expected_gpus` (DCGM's ids), a GPU
    that is missing in the document does. Without them, the document is taken as all that was asked for.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    reading = documents.read(text)
    if reading.unreadable:
        reading = tables.read(text) or reading
    if reading.refused is not None or reading.unreadable:
        return refusal.judge(reading, exit_code, level)
    # dcgmi reports ISOLATE, but no known error has that class: so it is one of the unclassified errors.
    unclassified = "ISOLATE" if exit_code == ISOLATE_EXIT and not _explained(reading) else "UNKNOWN"
    reading = replace(reading, unclassified=unclassified)
    return _judge(reading, exit_code, level, expected_gpus, expected_tests, skips)


def _judge(
    reading: Reading,
    exit_code: int | None,
    level: int | None,
    expected_gpus: Iterable[int] | None,
    expected_tests: Collection[str] | None,
    skips: Collection[str],
) -> Diagnosis:
    """Makes a diagnosis of the results: errors decide first, then tests that did not run, then pass."""
    known = sorted({*reading.serials, *(expected_gpus or ()), *_seen(reading.tests)})
    asked = set(expected_tests or _up_to(level))
    ran = {test.name for test in reading.tests}
    level = level or max((LEVEL_OF.get(name, 0) for name in ran), default=0) or None
    blamed: dict[int, list[Error]] = {gpu: [] for gpu in known}
    merged = _merged(reading.tests)
    not_for_it = {test.name for test in merged if test.name in skips and _skipped(test)} - {SOFTWARE}
    tests = [_test(test, reading, blamed, not_for_it) for test in merged]
    tests += [TestResult(name, "not-testable", status="missing") for name in sorted(asked - ran)]
    errors = [error for own in blamed.values() for error in own] + [error for test in tests for error in test.errors]
    outcome = _worst([severity(error) for error in errors] + [test.outcome for test in tests])
    trouble = _trouble(reading, exit_code, errors, outcome)
    if trouble:
        outcome = _worst([outcome, "tool-error"])
    if not errors and outcome == "pass" and not known and not any(map(_of_all, reading.tests)):
        outcome, trouble = "not-testable", "no GPU in the document"
    if not_for_it and outcome == "pass" and all(test.name == SOFTWARE or test.status != "ran" for test in tests):
        outcome, trouble = "not-testable", f"level {level} has no test left: {', '.join(sorted(not_for_it))} in skips"
    untested = {gpu: _untested(gpu, reading, asked, not_for_it) for gpu in known}
    if any(untested.values()):
        outcome = _worst([outcome, "not-testable"])
    spoilt: Outcome | None = None
    if trouble or any(test.outcome == "tool-error" for test in tests):
        spoilt = "tool-error" if outcome == "tool-error" else "not-testable"
    gpus = tuple(
        GpuResult(gpu, None, reading.serials.get(gpu), _gpu_outcome(own, spoilt, untested[gpu]), tuple(own))
        for gpu, own in blamed.items()
    )
    message = _message(outcome, gpus, tests, untested, trouble)
    then = _next(errors, level) if outcome == "fail" else None
    advice = advise(outcome, message, then, errors)
    diagnosis = Diagnosis(outcome, level, reading.version, gpus, tuple(tests), then, advice, message, exit_code)
    return replace(diagnosis, figures=figures.of(reading.tests))


def _merged(tests: Sequence[Test]) -> list[Test]:
    """Tests of one name (iterations) as one."""
    merged: dict[str, Test] = {}
    for test in tests:
        old = merged.get(test.name)
        if old:
            summary = test.summary if old.summary in ("pass", "") else old.summary
            warnings = old.warnings + test.warnings
            test = documents.Test(test.name, old.results + test.results, summary, warnings, old.info or test.info)
        merged[test.name] = test
    return list(merged.values())


def _skipped(test: Test) -> bool:
    """Whether DCGM skipped the test on all GPUs and reports no error on any."""
    warned = test.warnings or any(result.warnings for result in test.results)
    return not warned and test.summary in ("skip", "") and {result.status for result in test.results} == {"skip"}


def _test(test: Test, reading: Reading, blamed: dict[int, list[Error]], not_for_it: Collection[str]) -> TestResult:
    """Judge one test. Errors that name a GPU go to `blamed`; the others stay with the test."""
    if test.name in not_for_it:
        return TestResult(test.name, "pass", status="skip", why=_why(test))
    own: list[Error] = []
    mine: list[Error] = []
    trouble = None
    ran = {one.name for one in reading.tests if any(result.status in RAN for result in one.results)}
    for result in test.results:
        for warned, gpu in _blame(test, result, blamed):
            known = models.known_trouble(test.name, warned.text, ran, reading.version)
            if known:
                trouble = known
                continue
            error = _error(test, warned, reading, result.entity)
            place = own if gpu is None else blamed[gpu]
            if error not in place:
                place.append(error)
            mine.append(error)
    for warned in test.warnings:
        known = models.known_trouble(test.name, warned.text, ran, reading.version)
        trouble = known or trouble
        own += [] if known else [_error(test, warned, reading)]
    mine += own
    if trouble and not mine:
        return TestResult(test.name, "tool-error", why=trouble.words)
    if not mine:
        for result in test.results:
            if result.status in FAILED:
                # One bad GPU makes `software` fail on all: without a reason no GPU can be blamed.
                gpu = result.gpu if test.name != SOFTWARE else None
                place = own if gpu is None else blamed[gpu]
                error = _error(test, documents.Warned(None, "failed, and DCGM gives no reason"), reading, result.entity)
                if error not in place:
                    place.append(error)
                mine.append(error)
    statuses = {result.status for result in test.results} - {"not run", "not_run"}
    outcome: Outcome = _worst(severity(error) for error in mine)
    if not mine and test.summary in FAILED:
        outcome = "tool-error"  # every GPU passed: seen with a CPU affinity that breaks libnuma (NVIDIA/DCGM#253)
    elif not mine and not statuses:
        outcome = "tool-error"  # "Skip" without results: the run was cut short, by the end of nvvs or by --fail-early
    elif not mine and not (test.name == SOFTWARE and "pass" in statuses) and statuses - {"pass"}:
        outcome = "pass" if test.name in OPTIONAL and statuses <= {"pass", "skip"} else "not-testable"
    ran_here = mine or statuses - {"skip"} or not test.results
    return TestResult(test.name, outcome, tuple(own), "ran" if ran_here else "skip", "" if ran_here else _why(test))


def _why(test: Test) -> str:
    """DCGM's own words about a test that it skipped."""
    return "; ".join(dict.fromkeys(one for one in (test.info, *(result.info for result in test.results)) if one))


def _blame(test: Test, result: Result, known: Collection[int]) -> Iterable[tuple[Warned, int | None]]:
    """Each warning of a result with the GPU it is about.

    v3's Deployment puts all errors into one result with the last error's GPU. The other errors name theirs in the text.
    """
    for place, warned in enumerate(result.warnings, 1):
        gpu = result.gpu
        if len(result.warnings) > place and gpu is not None and test.name == SOFTWARE and not test.summary:
            named = {int(n) for n in re.findall(r"\bGPU (\d{1,4})\b", warned.text)} & set(known)
            gpu = named.pop() if len(named) == 1 else None
        yield warned, gpu


def _error(test: Test, warned: Warned, reading: Reading, entity: str = "") -> Error:
    cls = _known(catalogue.class_of(warned.id, _speaking(reading)), warned, reading)
    cls = reading.unclassified if cls == "UNKNOWN" else cls
    text = warned.text or catalogue.summary(warned.id) or "no text"
    return Error(test.name, warned.id, catalogue.name(warned.id), cls, f"{entity}: {text}" if entity else text)


def _known(cls: str, warned: Warned, reading: Reading) -> str:
    """`cls`; for a code that is newer than our table, the class in the document (DCGM 4 and later)."""
    return NEW_CODES.get(warned.severity or 0, cls) if cls == "UNKNOWN" and not reading.old else cls


def _speaking(reading: Reading) -> str | None:
    """The version whose classes count. A document of the old form without a version is taken for a late one."""
    return reading.version or ("3.9" if reading.old else None)


def _untested(gpu: int, reading: Reading, asked: set[str], not_for_it: Collection[str]) -> str:
    """Why the requested tests do not add up to a pass for this GPU; empty if they do."""
    missing, seen = [], False
    for test in reading.tests:
        statuses = [r.status for r in test.results if r.gpu == gpu or (r.gpu is None and not r.entity)]
        alike = [r.gpu for r in test.results if r.gpu is not None]
        seen = seen or bool(statuses)
        if (test.name in OPTIONAL and test.name not in asked) or test.name in not_for_it:
            continue
        if test.name == SOFTWARE and "pass" in statuses:
            continue
        if set(statuses) - RAN or (alike and not statuses):
            missing.append(test.name)
        if test.name != SOFTWARE and any(r.gpu == gpu and r.status in FAILED and not r.warnings for r in test.results):
            missing.append(test.name)  # one bad GPU can fail its neighbours (NVIDIA/go-dcgm#52)
    if not seen:
        return "DCGM does not see it"
    return f"{', '.join(dict.fromkeys(missing))} gave no result of its own" if missing else ""


def _gpu_outcome(own: Sequence[Error], spoilt: Outcome | None, untested: str) -> Outcome:
    if own:
        return _worst(severity(error) for error in own)
    return spoilt or ("not-testable" if untested else "pass")


def _trouble(reading: Reading, exit_code: int | None, errors: Sequence[Error], outcome: Outcome) -> str:
    """Why the document can't be trusted fully: an embedded engine, or an exit code that it does not explain."""
    if refusal.NO_ENGINE.search(reading.before):
        return "no host engine answered: dcgmi started one of its own"
    if errors or exit_code in (None, 0):
        return ""
    if exit_code in (226, ISOLATE_EXIT) and outcome != "pass":
        return ""
    meaning = refusal.EXITS.get(exit_code, ("", "its document shows no error"))[1]
    return f"dcgmi ended with exit code {exit_code}: {meaning}"


def _explained(reading: Reading) -> bool:
    warnings = [warned for test in reading.tests for result in test.results for warned in result.warnings]
    warnings += [warned for test in reading.tests for warned in test.warnings]
    classes = (_known(catalogue.dcgm_class(one.id, _speaking(reading)), one, reading) for one in warnings)
    return "ISOLATE" in classes


def _next(errors: Sequence[Error], level: int | None) -> str:
    hardware = [error for error in errors if error.cls in HARDWARE]
    if any(error.id == NODE_REBOOT for error in hardware):
        return "reboot"
    if hardware and all(error.cls == "RESET" for error in hardware):
        return "reset"
    return {3: "L4", 4: "RMA"}.get(level or 0, "L3")


def _message(
    outcome: Outcome, gpus: Sequence[GpuResult], tests: Sequence[TestResult], untested: dict[int, str], trouble: str
) -> str:
    """The first of what decided, in one line."""
    lines = [(f"GPU {gpu.entity_id}", error) for gpu in gpus for error in gpu.errors]
    lines += [("node", error) for test in tests for error in test.errors]
    decisive = [f"{where}: {e.test}: {e.message}" for where, e in lines if severity(e) == outcome] or [
        f"{where}: {e.test}: {e.message}" for where, e in lines
    ]
    if decisive:
        more = f" (and {len(decisive) - 1} more)" if len(decisive) > 1 else ""
        return decisive[0] + more
    if trouble:
        return trouble
    odd = [test.name for test in tests if test.outcome == outcome]
    known = [test.why for test in tests if test.outcome == outcome == "tool-error" and test.why]
    if known:
        return "; ".join(known)
    if outcome == "tool-error":
        return f"{', '.join(odd)} was cut short, or failed without an error on any GPU"
    if outcome == "not-testable":
        gone = [f"GPU {gpu}: {why}" for gpu, why in untested.items() if why]
        return "; ".join(gone) or f"{', '.join(odd)} did not run: is its package installed?"
    passed = [test.name for test in tests if test.status == "ran"]
    skipped = ", ".join(test.name for test in tests if test.status == "skip")
    rest = f"; skipped: {skipped}" if skipped else ""
    return f"{', '.join(passed)} passed on {len(gpus)} GPU{'s'[: len(gpus) != 1]}{rest}"


def _of_all(test: Test) -> bool:
    """Whether the test passed on all GPUs without naming one: v3's level 1 and its "Pass - All"."""
    return any(result.status == "pass" and result.gpu is None and not result.entity for result in test.results)


def _seen(tests: Sequence[Test]) -> set[int]:
    return {result.gpu for test in tests for result in test.results if result.gpu is not None}


def _up_to(level: int | None) -> set[str]:
    return {test for number in range(1, (level or 0) + 1) for test in REQUIRED.get(number, ())}


def _worst(outcomes: Iterable[Outcome]) -> Outcome:
    return min(outcomes, key=ORDER.index, default="pass")
