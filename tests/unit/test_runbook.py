"""The runbook has an entry for everything that our sources can report and that Slurm writes."""

import ast
from fnmatch import fnmatchcase
from pathlib import Path

from slurm_gpuhealth.config.check import built_in
from slurm_gpuhealth.config.settings import Row
from slurm_gpuhealth.diagnose import parse as dcgm_parse
from slurm_gpuhealth.diagnose import refusal
from slurm_gpuhealth.evidence import infiniband, nvml, nvml_rules
from slurm_gpuhealth.measure import clocks
from slurm_gpuhealth.policy import runbook
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.xid import catalog, words

PACKAGE = Path(runbook.__file__).parents[1]
POLICY = tuple(Row(**row) for row in built_in())

MAKERS = {"Finding": (1, 2), "_found": (None, 0), "_config": (None, 0), "_tool": (0, 1)}
"""Functions that make a finding: where in their arguments source and code stand (None: the module's own source)."""
SOURCE = {"nvml_rules": "nvml", "nvml": "nvml", "inventory": "inventory", "host": "host", "infiniband": "ib"}
SOURCE["leftovers"] = "leftover"
YIELDERS = ("host", "infiniband", "leftovers")
"""Modules whose rules yield tuples; the code stands first, or wherever `_judge` and the like say."""
COMPUTED = {
    # A code that is no literal: (module, its expression) → the values it can have. An unknown one fails the test.
    ("fold", "group.source, group.code"): [
        *(f"xid:{code}" for code in catalog.load("xids")["xids"]),
        *(f"sxid:{code}" for code in catalog.load("sxids")["sxids"]),
        *(f"aer:{word}" for word in ("corrected", "uncorrected", "fatal")),
        *(f"nvrm:{name}" for name, _, _ in words.NVRM),
        "nvrm:peermem",
        *(f"ib:{name}" for name, _, _ in words.MLX),
        "host:machine-check",
    ],
    ("dcgm_health", "'dcgm-health', system.split()[0].lower() if system.split() else 'unknown'"): ["dcgm-health:any"],
    ("model", "'dcgm', code"): [
        f"dcgm:{'driver' if outcome == 'warn' else outcome}" for outcome, _ in refusal.EXITS.values()
    ],
    ("model", "'dcgm', error.test"): [
        *(f"dcgm:{name}" for name in {*dcgm_parse.LEVEL_OF, *dcgm_parse.OPTIONAL}),
        "dcgm:a_test_of_tomorrow",
    ],
    ("site", "'site', command.name"): ["site:any"],
    ("tools", "'tool', ran.test.name"): ["tool:any"],
    ("nvml", "'nvml', word"): [f"nvml:{word}" for _, word, _ in nvml.HANDLE.values()] + ["nvml:handle"],
    ("nvml", "source, code"): [f"{source}:{code}" for source, code, _ in nvml.NOT_READY.values()] + ["nvml:init"],
    ("nvml", "'nvml', code"): ["nvml:timeout", "nvml:probe"],
    ("nvml_rules", "code"): [
        *(f"nvml:{code}" for _, code, _ in nvml_rules.REASONS),
        "nvml:pcie-gen",
        "nvml:pcie-width",
    ],
    ("nvml_rules", "'nvml', code"): [f"nvml:{code}" for _, code, _ in nvml_rules.MODES],
    ("host", "'host', code"): [],  # what its rules yield
    ("host", "code"): ["host:memory", "host:memory-corrected"],
    ("infiniband", "'ib', code"): [],  # what _judge yields
    ("infiniband", "name"): [f"ib:{name}" for name in (*infiniband.ONCE, *infiniband.MANY)],
    ("leftovers", "'leftover', code"): [],  # what _held and _changed yield
    ("record", "source, code"): [],  # read back
    ("samples", "'job', code"): ["job:stalled", "job:never-started"],
}
PASSES_ON = ("_tool", "_config", "_found", "found")
"""Functions whose own call to a maker has the code from their caller, where it is looked at."""


def emitted() -> set[str]:
    """Every `source:code` that the package can make."""
    return {
        key
        for path in sorted(PACKAGE.rglob("*.py"))
        if "Finding(" in path.read_text() or "_found(" in path.read_text()
        for key in of_module(path)
    }


def of_module(path: Path) -> set[str]:
    name, keys = path.stem, set()
    for function in [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.FunctionDef)]:
        if function.name in PASSES_ON:
            continue
        for node in own_nodes(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKERS:
                keys |= of_call(name, node)
            elif name in YIELDERS and isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                keys |= values(name, [node.value.elts[0]])
            elif (
                name == "nvml" and isinstance(node, ast.Dict) and "code" in [getattr(k, "value", 0) for k in node.keys]
            ):
                code = node.values[[getattr(k, "value", 0) for k in node.keys].index("code")]
                keys |= {"nvml:lost", "nvml:recovery"} if ast.unparse(code) == "word" else values(name, [code])
    return keys


def own_nodes(function: ast.FunctionDef):
    """The nodes of a function without those of functions inside it."""
    todo = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        todo += [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.FunctionDef)]


def of_call(module: str, call: ast.Call) -> set[str]:
    places = [place for place in MAKERS[call.func.id] if place is not None]
    if ast.unparse(call).endswith("**found)"):
        return set()  # made by _found
    arguments = call.args
    if isinstance(arguments[0], ast.Starred):
        arguments = arguments[0].value.elts
    return values(module, [arguments[place] for place in places])


def values(module: str, expressions: list) -> set[str]:
    """The keys that source and code (or the code alone) of a finding can be."""
    if all(isinstance(one, ast.Constant) for one in expressions):
        parts = [one.value for one in expressions]
        return {":".join([SOURCE[module], *parts] if len(parts) == 1 else parts)}
    text = ", ".join(map(ast.unparse, expressions))
    assert (module, text) in COMPUTED, (
        f"{module}.py makes findings of the code `{text}`: say in COMPUTED what it can be"
    )
    return set(COMPUTED[module, text])


def test_the_enumeration_sees_codes_of_every_source():
    keys = emitted()
    assert {key.partition(":")[0] for key in keys} == {
        *("xid", "sxid", "aer", "nvrm", "nvml", "driver", "inventory", "dcgm", "dcgm-health", "ib", "host", "site"),
        *("kernel", "leftover", "tool", "gpu", "job"),
    }
    assert {
        *("nvml:lost", "nvml:ecc", "nvml:thermal", "nvml:remap-fail", "nvml:nvlink", "driver:hung", "driver:mismatch"),
        *("host:oom", "kernel:flood", "ib:VL15_dropped", "ib:port-down", "leftover:mps", "leftover:locked"),
        *("inventory:vbios-mix", "dcgm:untestable", "dcgm:tool-error", "dcgm:memtest", "nvml:call", "nvml:power"),
    } <= keys


def test_every_code_that_a_source_can_give_has_an_entry_of_its_own_name():
    by_number_or_glob = ("xid", "sxid", "site", "tool")
    named = runbook.named()
    loose = {"dcgm:a_test_of_tomorrow", "dcgm-health:any"}
    missing = {key for key in emitted() - loose if key.partition(":")[0] not in by_number_or_glob and key not in named}
    assert missing == set()
    assert [key for key in emitted() if runbook.entry(key, {}) is None] == []


def test_the_runbook_explains_no_code_that_nobody_gives():
    assert {key for key in runbook.named() if not key.startswith("request:")} - emitted() == set()


def test_every_row_of_the_policy_speaks_of_something_that_the_runbook_explains():
    keys = emitted() | set(runbook.named())
    assert [row.finding for row in POLICY if not any(fnmatchcase(key, row.finding) for key in keys)] == []


def test_every_entry_is_the_first_one_for_something():
    keys = [*(runbook.codes(key)[0] for key in emitted())]
    keys += [runbook.Code("dcgm", "x", says={"class": one}) for one in ("ISOLATE", "RESET", "CONFIG", "UNKNOWN")]
    keys += [
        runbook.Code("xid", "154", says={"action": "DRAIN_P2P"}),
        *map(runbook.of_key, ("request:asked", "request:suspect", "request:sweep")),
    ]
    keys += [runbook.Code("gpu", "slow", says={"reason": name}) for _, name in clocks.REASONS]
    keys += [runbook.of_key(key) for key in ("dcgm:a_test_of_tomorrow", "dcgm-health:any", "site:any")]
    used = {id(runbook.entry(one.key, {**one.details, **one.says})) for one in keys}
    assert [one.finding for one in runbook.load() if id(one) not in used] == []


def test_every_action_of_the_catalogue_has_steps_of_its_own_unless_there_is_nothing_to_do():
    actions = {row["action"] for row in catalog.load("xids")["xids"].values()} - {"CHECK_APP/CUDA"}
    plain = runbook.entry("xid:0", {})
    without = {action for action in actions if runbook.entry("xid:0", {"action": action, "class": "hardware"}) is plain}
    assert without <= {"IGNORE", None, "WORKFLOW_XID_48"}
    assert runbook.entry("xid:48", runbook.codes("48")[0].says).when == {"action": "RESET_GPU"}


def test_every_reason_that_slurm_writes_is_explained():
    whole = [*reasons.SLURM_OWN, "gres/gpu count reported lower than configured (7 < 8)", "Low CPUs, Low RealMemory"]
    whole += ["Low RealMemory (reported:1000 < 100.00% of configured:2000)", "gres/gpu:h100 count too low (7 < 8)"]
    assert [text for text in whole if runbook.of_slurm(text) is None] == []
    assert [text for text in whole if len(text) > 20 and runbook.of_slurm(text[:20].strip()) is None] == []


def test_every_state_of_a_reason_is_explained_and_so_is_every_fact_that_no_finding_makes():
    states = runbook.document()["states"]
    assert set(states) == {*reasons.STATES, "end"}
    assert all(len(one) == 2 for one in states.values())
    assert {f"request:{fact}" for fact in reasons.ON_REQUEST} <= set(runbook.named())


def test_each_step_is_a_line_without_a_name_that_is_left_open():
    for one in (*runbook.load(), *runbook.load("slurm")):
        for text in (one.means, *one.do, one.gives_back):
            assert "@" not in text
            assert "\n" not in text
        assert one.do
