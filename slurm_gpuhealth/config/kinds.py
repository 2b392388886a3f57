"""Which values the annotation of a settings field allows, which are impossible, and which contradict each other."""

from __future__ import annotations

import ast
import difflib
import re

from slurm_gpuhealth.config.settings import Settings, Suspicion
from slurm_gpuhealth.findings import RUNGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MODES = {"Mode": ("enforce", "shadow"), "SourceMode": ("enforce", "shadow", "off")}
DAY = 86400.0
TESTS = (
    *("cpu_eud", "diagnostic", "eud", "memory", "memory_bandwidth", "memtest", "nccl_tests", "nvbandwidth", "pcie"),
    *("pulse_test", "sm_stress", "targeted_power", "targeted_stress"),
)
TOOLS = ("nccl", "nccl-net", "nvbandwidth", "ib-write", "ib-lat", "gpu-burn")
"""The built-in tests of other tools (diagnose/tools.toml)."""
RANGE = r"\d{1,9}(?:-\d{1,9})?"
HOSTS = rf"[A-Za-z0-9_](?:[\w.-]|\[{RANGE}(?:,{RANGE})*\])*"
MOST_HOSTS = 65536  # as Slurm's MAX_SLURM_NODES
PARAMETERS = 100
LONGEST = {"dcgmi": 256, "pydcgm": 100, "off": 256}
"""DCGM_MAX_TEST_PARMS and DCGM_MAX_TEST_PARMS_LEN_V2; DcgmDiag.py (4.6) still has the older, shorter limit."""


class Wrong(Exception):
    """A value is wrong; the text says what was expected."""


def scalar(kind: str, value: Any) -> Any:
    """The TOML `value` as the field's `kind` (its annotation) wants it; raises Wrong."""
    choices = MODES.get(kind) or (ast.literal_eval(f"({kind[8:-1]},)") if kind.startswith("Literal[") else None)
    if choices:
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, 1)
            raise Wrong(" or ".join(f'"{one}"' for one in choices) + (f' (did you mean "{near[0]}"?)' if near else ""))
        return value
    return KINDS[kind](value)


def _seconds(value: Any) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", value) if isinstance(value, str) else None
    if not found or found[2] not in UNITS:
        raise Wrong('a duration with its unit, "30s", "10min", "6h" or "7d"')
    return float(found[1]) * UNITS[found[2]]


def _share(value: Any) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value) if isinstance(value, str) else None
    if not found or float(found[1]) > 100:
        raise Wrong('a share, "0%" to "100%"')
    return float(found[1]) / 100


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise Wrong("a whole number, 0 or more")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise Wrong("a number, 0 or more")
    return float(value)


def _celsius(value: Any) -> int:
    if type(value) is not int or not 20 <= value <= 150:
        raise Wrong("a temperature in whole °C, 20 to 150")
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise Wrong("true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise Wrong('a text in quotes, "..."')
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(one) for one in (value if isinstance(value, list) else [value]) if one != "")


def _file(value: Any) -> str:
    if not _text(value).startswith("/"):
        raise Wrong("an absolute path, /...")
    if "{" in value.replace("{node}", ""):
        raise Wrong("a path in which only {node} stands in braces")
    return str(value)


def _argv(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and "\0" not in one for one in value):
        raise Wrong('a list, ["/absolute/path", "argument"]')
    if not value or not value[0].startswith("/"):
        raise Wrong('["/absolute/path", "argument"]: a program is not looked up in PATH')
    return tuple(value)


def _address(value: Any) -> str:
    if not re.fullmatch(r"unix://\S+|[\[A-Za-z0-9{][\w.:{}\[\]-]*", _text(value)):
        raise Wrong("HOST, HOST:PORT or unix:///PATH")
    return str(value)


def _when(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong('a table of details, { action = "RESET_GPU" }')
    for one in value.values():
        if not all(isinstance(each, (str, int, float, bool)) for each in (one if isinstance(one, list) else [one])):
            raise Wrong("one value, or a list of values, for each detail")
    return {key: tuple(one) if isinstance(one, list) else one for key, one in value.items()}


KINDS: dict[str, Callable[[Any], Any]] = {
    "Seconds": _seconds,
    "Share": _share,
    "Celsius": _celsius,
    "Number": _number,
    "int": _integer,
    "bool": _boolean,
    "str": _text,
    "Texts": _texts,
    "File": _file,
    "Address": _address,
    "Argv": _argv,
    "Mapping[str, Scalar | tuple[Scalar, ...]]": _when,
}


def _between(low: float, high: float, text: str) -> Callable[[Any], None]:
    def check(value: float) -> None:
        if not low <= value <= high:
            raise Wrong(text)

    return check


def _like(pattern: str, text: str) -> Callable[[Any], None]:
    def check(value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise Wrong(text)

    return check


def _test(value: str) -> None:
    if value not in TESTS:
        near = difflib.get_close_matches(value, TESTS, 1)
        raise Wrong(f'"{near[0]}"' if near else f"tests of levels 2 to 4: {', '.join(TESTS)}")


def _hostlist(value: str) -> None:
    """Slurm's own, whether ClusterShell is here or not: a node's answer is the controller's."""
    if not re.fullmatch(rf"{HOSTS}(,{HOSTS})*", value):
        raise Wrong('a hostlist without spaces, "gpu[001-016,020]"')
    for low, high in re.findall(r"(\d+)-(\d+)", " ".join(re.findall(r"\[(.*?)\]", value))):
        if not int(low) <= int(high) < int(low) + MOST_HOSTS:
            raise Wrong(f"ranges that go up, over at most {MOST_HOSTS} nodes")


def _one_group(value: str) -> None:
    try:
        groups = re.compile(value).groups if value else 1
    except re.error as error:
        raise Wrong(f"a regular expression ({error})") from None
    if groups != 1:
        raise Wrong("a regular expression with one group, the figure")


_parameters = _like(
    r"|[a-z][a-z0-9_]*(\.\w+)+=[^;\s]+(;[a-z][a-z0-9_]*(\.\w+)+=[^;\s]+)*",
    'parameters as for dcgmi -p, "memory.is_allowed=True;pcie.is_allowed=True"',
)
_check_deadline = _between(1, 59, "1s to 59s: Slurm kills a health check at 60 s")
# (class of settings.py, field) → a further check on a value of the right kind. For a list: on each of its items.
CHECKS: dict[tuple[str, str], Callable[[Any], None]] = {
    ("Slurm", "timeout"): _check_deadline,
    ("Slurm", "request_poll"): _between(10, DAY, "10s to 1d"),
    ("Prolog", "timeout"): _between(1, 300, "1s to 5min: a job waits for it"),
    ("Epilog", "timeout"): _between(1, 3600, "1s to 1h: until then the node takes no other job"),
    ("Check", "interval"): _between(1, DAY, "1s to 1d"),
    ("Check", "timeout"): _check_deadline,
    ("Command", "name"): _like(r"[A-Za-z0-9][\w.-]{0,31}", "up to 32 letters, digits, '.', '_' and '-'"),
    ("Command", "timeout"): _check_deadline,
    ("Command", "every"): _between(1, 30 * DAY, "1s to 30d"),
    ("Nvml", "timeout"): _check_deadline,
    ("Hang", "after"): _between(10, DAY, "10s to 1d"),
    ("Hang", "power"): _between(0.05, 0.95, '"5%" to "95%"'),
    ("Hang", "start"): _between(10, 30 * DAY, "10s to 30d"),
    ("Slow", "after"): _between(60, DAY, "1min to 1d"),
    ("Slow", "clock"): _between(0.1, 0.99, '"10%" to "99%"'),
    ("Dcgm", "health_every"): _between(30, DAY, "30s to 1d: DCGM itself looks only every 30 s"),
    ("Dcgm", "parameters"): _parameters,
    ("Dcgm", "skips"): _test,
    ("DcgmModel", "gpu"): _like(r"\S.*", 'a GPU model as `nvidia-smi -L` names it, "*L40S*"'),
    ("DcgmModel", "parameters"): _parameters,
    ("DcgmModel", "skips"): _test,
    ("Host", "full"): _between(0.01, 1, '"1%" to "100%"'),
    ("Host", "units"): _like(r"[A-Za-z0-9][\w@:.\\-]*", "names of systemd units"),
    ("Host", "d_state_tasks"): _between(1, 1e6, "1 or more"),
    ("Infiniband", "ports"): _like(r"[A-Za-z0-9][\w.-]*/\d+", 'ports as DEVICE/PORT, "mlx5_0/1"'),
    ("Infiniband", "error_growth"): _between(1, 1e9, "1 or more"),
    ("Model", "gpu"): _like(r"\S.*", 'a GPU model as `nvidia-smi -L` names it, "*H100*"'),
    ("Model", "l3"): _between(60, DAY, "1min to 1d"),
    ("Model", "l4"): _between(60, DAY, "1min to 1d"),
    ("Ladder", "window"): _between(3600, 365 * DAY, "1h to 365d"),
    ("Ladder", "retry"): _between(60, 30 * DAY, "1min to 30d"),
    ("Ladder", "l2"): _between(10, DAY, "10s to 1d"),
    ("Ladder", "l3"): _between(10, DAY, "10s to 1d"),
    ("Ladder", "l4"): _between(10, DAY, "10s to 1d"),
    ("Reset", "services"): _like(r"[A-Za-z0-9][\w@:.\\-]*", "names of systemd units"),
    ("Reset", "timeout"): _between(10, DAY, "10s to 1d"),
    ("Reboot", "most"): _between(1, 20, "1 to 20"),
    ("Repair", "timeout"): _between(1, 30 * DAY, "1s to 30d"),
    ("Sweep", "interval"): _between(60, 365 * DAY, "1min to 365d"),
    ("Sweep", "level"): _between(1, 4, "1 to 4"),
    ("Drain", "nodes"): _like(r"([A-Za-z0-9][^\s;|&]*)?", 'a hostlist without spaces, "gpu[001-128]"'),
    ("Journal", "keep"): _between(7 * DAY, 3650 * DAY, '"7d" or more: the built-in policy looks back 7 days'),
    ("JobLog", "timeout"): _between(1, 300, "1s to 5min: until then the node takes no other job"),
    ("JobLog", "head_mib"): _between(0, 1024, "0 to 1024"),
    ("JobLog", "tail_mib"): _between(1, 1024, "1 to 1024"),
    ("JobLog", "flight"): _like(
        r"(?:/[^\\]*[^/\\])?", 'an absolute path without \\: "/scratch/fr/%j/nccl_trace_rank_"'
    ),
    ("Store", "url"): _like(r"|file:///\S+|postgresql://\S+", "file:///FOLDER or postgresql://USER@HOST/DATABASE"),
    ("Store", "timeout"): _check_deadline,
    ("Store", "heartbeat"): _between(60, DAY, "1min to 1d"),
    ("Store", "outbox_mib"): _between(1, 65536, "1 to 65536"),
    ("Store", "keep"): _between(28 * DAY, 36500 * DAY, '"28d" or more: suspicion looks back 28 days'),
    ("Accounting", "timeout"): _between(1, 3600, "1s to 1h"),
    ("Accounting", "first"): _between(0, 3650 * DAY, "0s to 3650d"),
    ("Correlate", "requeue_most"): _between(1, 100, "1 to 100"),
    ("Correlate", "settle"): _between(0, DAY, "0s to 1d"),
    ("Suspicion", "hazards"): _between(1e-9, 100, "failures a day, above 0, for each level"),
    ("Suspicion", "starts"): _between(0, 0.99, "shares of 0 to 0.99"),
    ("Suspicion", "priors"): _between(1e-9, 1, "shares above 0, for each level"),
    ("Suspicion", "half_life"): _between(DAY, 3650 * DAY, '"1d" or more'),
    ("Suspicion", "horizon"): _between(DAY, 365 * DAY, "1d to 365d"),
    ("Suspicion", "same_user"): _between(60, 365 * DAY, "1min to 365d"),
    ("Suspicion", "failing"): _between(0.001, 0.99, "0.001 to 0.99"),
    ("Suspicion", "runs"): _between(0.1, 1e6, "0.1 or more"),
    ("Suspicion", "least"): _between(1e-6, 0.5, "0.000001 to 0.5"),
    ("Suspicion", "together"): _between(0, 0.99, "0 to 0.99"),
    ("Suspicion", "leaf_window"): _between(1, DAY, "1s to 1d"),
    ("Suspicion", "leaf_alarm"): _between(1e-9, 1, "above 0, at most 1"),
    ("Suspicion", "seen_by_xid"): _between(0.01, 0.99, "0.01 to 0.99"),
    ("Suspicion", "benign"): _between(1e-9, 10, "events a day, above 0"),
    ("Suspicion", "named"): _between(0.01, 0.99, "0.01 to 0.99"),
    ("Suspicion", "most"): _between(2, 1e9, "2 or more"),
    ("Suspicion", "recall"): _between(0, 0.999, "0 to 0.999"),
    ("Suspicion", "specificity"): _between(0.5, 0.9999, "0.5 to 0.9999"),
    ("Suspicion", "repaired"): _between(0.001, 0.9, "0.001 to 0.9"),
    ("Suspicion", "fresh"): _between(0.01, 1, "0.01 to 1"),
    **{("Suspicion", one): _between(0, 1, "0 to 1") for one in ("l2", "l3", "l4", "rma")},
    **{
        ("Suspicion", one): _between(1e-9, 1, "likelihoods, above 0, at most 1")
        for one in Suspicion.__annotations__
        if one.startswith("log_") and one != "log_runs"
    },
    ("Place", "name"): _like(r"\S(.{0,62}\S)?", 'a name of up to 64 characters, "rack r7"'),
    ("Place", "nodes"): _hostlist,
    ("Test", "name"): _like(r"[A-Za-z0-9][\w-]{0,31}", "up to 32 letters, digits, '_' and '-'"),
    ("Test", "environment"): _like(r"[A-Za-z_]\w*=.*", "NAME=value"),
    ("Test", "pattern"): _one_group,
    ("Test", "timeout"): _between(1, DAY, "1s to 1d"),
    ("Test", "gpu"): _like(r"\S.*", 'a GPU model as `nvidia-smi -L` names it, "*H100*"'),
    ("Limit", "figure"): _like(r"\S+", 'a figure, "nccl" or "nvbandwidth.*"'),
    ("Limit", "gpu"): _like(r"\S.*", 'a GPU model as `nvidia-smi -L` names it, "*H100*"'),
    ("Row", "finding"): _like(r"\*|[a-z*?][a-z0-9*?-]*:\S+", 'SOURCE:CODE, "xid:79", with * and ? as in file names'),
    ("Row", "rung"): _like("|".join(("", *RUNGS)), " or ".join(f'"{one}"' for one in RUNGS)),
    ("Row", "passed"): _like("|".join(("", *RUNGS)), " or ".join(f'"{one}"' for one in RUNGS)),
    ("Row", "failed"): _like("|".join(("", *RUNGS)), " or ".join(f'"{one}"' for one in RUNGS)),
    ("Row", "times"): _between(1, 1e6, "1 or more"),
    ("Row", "window"): _between(1, 3650 * DAY, "1s or more"),
    ("Row", "distinct"): _like("job|user|", '"job", "user" or nothing'),
}


def compare(data: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Values that are possible alone, but not together: (place, message). `data` has the right kinds."""
    check = {**Settings.check.__dict__, **data.get("check", {})}
    keep = {**Settings.journal.__dict__, **data.get("journal", {})}["keep"]
    limit = f"must be below check.timeout ({check['timeout']:g} s): otherwise the check ends before it"
    for table in ("nvml", "slurm"):
        if {**getattr(Settings, table).__dict__, **data.get(table, {})}["timeout"] >= check["timeout"]:
            yield (table, "timeout"), limit
    named: set[str] = set()
    for index, one in enumerate(data.get("place", ())):
        if one["name"] in named:
            yield ("place", index, "name"), f'an earlier place has the name "{one["name"]}"; list all its nodes there'
        named.add(one["name"])
    names = [one["name"] for one in check["command"]]
    for index, one in enumerate(check["command"]):
        here = ("check", "command", index)
        if names.index(one["name"]) != index:
            yield (
                (*here, "name"),
                f'an earlier command has the name "{one["name"]}"; each needs its own, for its findings',
            )
        if one.get("timeout", 10) > check["timeout"] / 2:
            yield (
                (*here, "timeout"),
                f"is more than half of check.timeout ({check['timeout']:g} s), which is all that the commands may take",
            )
    yield from _compare_dcgm({**Settings.dcgm.__dict__, **data.get("dcgm", {})})
    yield from _compare_ladder(data, keep)
    yield from _compare_suspicion(data.get("suspicion", {}))
    for index, row in enumerate(data.get("test", ())):
        if row["name"] not in TOOLS and not row.get("command"):
            yield ("test", index, "name"), f"no built-in test has this name ({', '.join(TOOLS)}), so it needs `command`"
        if row["name"] not in TOOLS and row.get("reads", "pattern") == "pattern" and not row.get("pattern"):
            yield (
                ("test", index, "name"),
                "needs `pattern`, or `reads` with the tool's name: otherwise it has no figure",
            )
    for index, row in enumerate(data.get("policy", ())):
        row = {"rung": "", "passed": "", "failed": "", "times": 1, "distinct": "", "window": DAY, **row}
        if row["rung"] and row["severity"] != "fault":
            yield ("policy", index, "rung"), "only a fault queues a rung; remove this key"
        for key in ("passed", "failed"):
            if row[key] and (not row["rung"] or RUNGS.index(row[key]) <= RUNGS.index(row["rung"])):
                yield ("policy", index, key), "must be a higher rung than `rung`: otherwise the ladder has no end"
        if row["distinct"] and row["times"] < 2:
            yield ("policy", index, "distinct"), "has no effect without times = 2 or more"
        if row["window"] > keep:
            yield (
                ("policy", index, "window"),
                f"is longer than journal.keep ({keep / DAY:g} d): the journal forgets older findings",
            )


def _compare_dcgm(dcgm: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What dcgmi would ignore without an error, and what NVIDIA's Python modules can't take."""
    rows = [(("dcgm", "model", index), row) for index, row in enumerate(dcgm["model"])]
    for where, row in [(("dcgm",), dcgm), *rows]:
        given = row.get("parameters", "").split(";")
        if row.get("config") and row.get("parameters"):
            yield (
                (*where, "parameters"),
                "dcgmi ignores the file of -c if -p is given: write these parameters into the config file",
            )
        if len(given) >= PARAMETERS:
            yield (*where, "parameters"), f"DCGM takes {PARAMETERS - 1} at most; a config file takes more"
        backend, limit = dcgm["backend"], LONGEST[dcgm["backend"]]
        for one in given:
            if len(one) >= limit:
                what = (
                    f"{one.partition('=')[0]}: {backend} takes {limit - 1} characters at most; a config file takes more"
                )
                yield (*where, "parameters"), what


def _compare_ladder(data: dict[str, Any], keep: float) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """A deeper level needs at least as much time, and the journal must remember for as long as things count."""
    ladder = {**Settings.ladder.__dict__, **data.get("ladder", {})}
    sweep = {**Settings.sweep.__dict__, **data.get("sweep", {})}
    for level, deeper in (("l2", "l3"), ("l3", "l4")):
        if ladder[deeper] < ladder[level]:
            wrong = deeper if deeper in data.get("ladder", {}) else level
            yield ("ladder", wrong), f"{deeper} is shorter than {level}, but the deeper level runs those tests too"
    for index, row in enumerate(ladder["model"]):
        if row["l4"] < row["l3"]:
            yield ("ladder", "model", index, "l4"), "is shorter than its l3, but level 4 runs those tests too"
    if ladder["window"] > keep:
        yield ("ladder", "window"), f"is longer than journal.keep ({keep / DAY:g} d): the journal forgets older returns"
    if sweep["interval"] > keep:
        yield (
            ("sweep", "interval"),
            f"is longer than journal.keep ({keep / DAY:g} d): the journal forgets the last test",
        )
    longest = ladder[f"l{max(2, sweep['level'])}"]
    if sweep["interval"] <= longest:
        yield (
            ("sweep", "interval"),
            f"must be longer than one test may take ({longest:g} s): otherwise no time is left for jobs",
        )


def _compare_suspicion(data: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Lists that belong together have the same length, and the levels grow."""
    table = {**Settings.suspicion.__dict__, **data}
    for key in ("starts", "priors"):
        if len(table[key]) != len(table["hazards"]) or len(table[key]) < 2:
            yield ("suspicion", key if key in data else "hazards"), "must have as many values as hazards, at least two"
    if abs(sum(table["priors"]) - 1) > 0.01:
        yield ("suspicion", "priors"), f"their sum is {sum(table['priors']):g}, not 1"
    if list(table["hazards"]) != sorted(table["hazards"]):
        yield ("suspicion", "hazards"), "must grow: each level is worse than the level before it"
    if len(table["recall"]) != 4:
        yield ("suspicion", "recall"), "four values, for run levels 1 to 4"
    if not table["l2"] <= table["l3"] <= table["l4"] <= table["rma"]:
        wrong = next((one for one in ("rma", "l4", "l3", "l2") if one in data), "l2")
        yield ("suspicion", wrong), "l2, l3, l4 and rma must grow"
    for key in data:
        if key.startswith("log_") and key != "log_runs" and len(table[key]) != 5:
            yield ("suspicion", key), "five values: node, application, fabric, infrastructure, user"
