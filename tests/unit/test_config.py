"""The configuration: what an admin writes becomes settings, or an error that names line, key and the remedy."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from slurm_gpuhealth.config import check
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.config.kinds import TOOLS
from slurm_gpuhealth.config.settings import ROWS, ConfigError, Settings
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.slurm import sacct

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "etc/gpuhealth.toml"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "gpuhealth.toml"
        path.write_text(textwrap.dedent(text))
        os.utime(path, (1, 1))
        return str(path)

    return write


def problems(path: str) -> list[tuple[int, str, str]]:
    with pytest.raises(ConfigError) as caught:
        configuration.load(path, "n1")
    assert all(one.file == path for one in caught.value.problems)
    return [(one.line, one.key, one.message) for one in caught.value.problems]


def uncommented() -> str:
    """The shipped file with each `#key = value` switched on; prose and examples begin with `# `."""
    lines = SHIPPED.read_text().splitlines()
    return "\n".join(line[1:] if line.startswith("#") and line[1:2].isalpha() else line for line in lines)


def test_the_shipped_file_as_it_is_says_nothing(write):
    assert replace(configuration.load(write(SHIPPED.read_text()), "n1"), policy=(), test=(), limit=()) == Settings()


def test_the_shipped_file_with_every_key_switched_on_is_the_defaults(write):
    assert replace(configuration.load(write(uncommented()), "n1"), policy=(), test=(), limit=()) == Settings()


def test_the_shipped_file_has_every_key_of_the_settings(write):
    data, _ = check.parse_with_lines(write(uncommented()))
    for table, default in Settings().__dict__.items():
        if hasattr(default, "__dict__"):
            rows = {key for key in default.__dict__ if type(default).__annotations__[key] in ROWS}
            assert data[table].keys() | rows == default.__dict__.keys() | rows, table
    assert "mode" in data


def test_the_examples_in_the_shipped_file_load(write):
    lines = SHIPPED.read_text().splitlines()
    text = "\n".join(line[1:] for line in lines if line.startswith("#    "))
    loaded = configuration.load(write(text), "n1")
    assert loaded.check.command[0].argv[0] == "/usr/local/sbin/check-nvme"
    assert [row.finding for row in loaded.policy[:2]] == ["xid:63", "nvml:thermal"]
    assert [(row.name, row.nodes) for row in loaded.place] == [("rack r7", "gpu[001-016]"), ("pdu r7a", "gpu[001-008]")]
    assert [row.gpu for row in loaded.ladder.model] == ["*B200*"]
    assert [(row.name, row.reads, row.fails) for row in loaded.test[:2]] == [
        ("nccl", "nccl", True),
        ("scratch-read", "pattern", False),
    ]
    assert (loaded.test[0].gpus, loaded.test[1].pattern) == (2, r"read: ([\d.]+) GiB/s")
    assert [(row.name, row.fails) for row in loaded.test[2:3]] == [("nccl", False)]
    assert loaded.limit[0].gpu == "*B200*"
    assert [row.name for row in loaded.test[2:]] == [*TOOLS]
    assert [(row.gpu, row.skips) for row in loaded.dcgm.model] == [("*L40S*", ("memory_bandwidth",))]


def test_the_nodes_name_is_filled_into_the_paths_of_rows(write):
    text = '[[dcgm.model]]\ngpu = "*"\nconfig = "/etc/{node}.yaml"\n'
    assert configuration.load(write(text), "n1").dcgm.model[0].config == "/etc/n1.yaml"


def test_the_documentation_is_made_from_the_shipped_file():
    assert subprocess.run([sys.executable, str(ROOT / "scripts/gen-docs"), "--check"], check=False).returncode == 0


def test_values_are_read_by_their_kind(write):
    loaded = configuration.load(
        write("""
        mode = "enforce"
        [prolog]
        timeout = "1.5min"
        [epilog]
        max_share = "0.5%"
        ask_slurm = true
        [gpus]
        vbios = ["a", "b"]
        [check]
        [[check.command]]
        name = "c"
        argv = ["/bin/c", "-x"]
        """),
        "n1",
    )
    assert (loaded.mode, loaded.prolog.timeout, loaded.epilog.max_share) == ("enforce", 90.0, 0.005)
    assert (loaded.epilog.ask_slurm, loaded.gpus.vbios) == (True, ("a", "b"))
    assert loaded.check.command[0].argv == ("/bin/c", "-x")
    assert loaded.check.command[0].mode == "shadow"


def test_the_node_name_is_filled_into_paths_only(write):
    path = write("""
    [paths]
    state = "/var/{node}/state-{node}"
    [dcgm]
    host = "unix:///run/{node}.sock"
    [host]
    mounts = ["/scratch/{node}"]
    [gpus]
    driver = "{node}"
    """)
    for _ in range(2):  # parsed, then from the cache
        loaded = configuration.load(path, "gpu-1.a_b")
        assert loaded.paths.state == "/var/gpu-1.a_b/state-gpu-1.a_b"
        assert loaded.dcgm.host == "unix:///run/gpu-1.a_b.sock"
        assert loaded.host.mounts == ("/scratch/gpu-1.a_b",)
        assert loaded.gpus.driver == ("{node}",)
    assert configuration.load(path, "other").host.mounts == ("/scratch/other",)


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "a b", "-a", ".a", "a\n", "é", "$x"])
def test_a_node_name_that_is_no_node_name_is_refused(write, name):
    with pytest.raises(ConfigError, match="not a node name"):
        configuration.load(write(""), name)


def test_the_node_name_comes_from_slurmd_where_nobody_gives_it(write, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert configuration.load(write('[paths]\nstate = "/s/{node}"')).paths.state == "/s/n7"


def test_the_path_comes_from_the_environment(write, monkeypatch):
    monkeypatch.setenv("GPUHEALTH_CONFIG", write('mode = "enforce"'))
    assert configuration.load(node="n1").mode == "enforce"


def test_a_missing_file_says_so(tmp_path):
    assert "can't be read" in problems(str(tmp_path / "none.toml"))[0][2]


# fmt: off
ROW = '[[policy]]\nfinding = "xid:1"\nseverity = "info"\n'
FAULT = '[[policy]]\nfinding = "xid:1"\nseverity = "fault"\n'
MODEL = '[[ladder.model]]\ngpu = "*H100*"\nl3 = "10min"\n'
PLACE = '[[place]]\nname = "rack r7"\nnodes = '
TEST = "[[test]]\nname = "
LONG = "a.b=" + "1" * 96
COMMAND = '[[check.command]]\nname = "a"\nargv = ["/a"]\n'
# What it is: the text, the line and the key that the error must name, and a part of what it must say.
WRONG = {
    "unknown key with a near one": ('[prolog]\ntimout = "1s"', 2, "prolog.timout", "did you mean timeout?"),
    "key of another table": ("[prolog]\nmax_nodes = 2", 2, "prolog.max_nodes", "belongs into [epilog]"),
    "key of no table": ("[prolog]\nzzz = 2", 2, "prolog.zzz", "known here: timeout, reuse_pass"),
    "unknown table": ("\n[prolg]\n", 2, "prolg", "did you mean prolog?"),
    "table as a value": ("prolog = 3", 1, "prolog", "expected a table, [prolog], not 3"),
    "value as a table": ("[mode]", 1, "mode", '"enforce" or "shadow"'),
    "number without unit": ("[check]\ntimeout = 30", 2, "check.timeout", '"30s", "10min"'),
    "unknown unit": ('[check]\ntimeout = "1m"', 2, "check.timeout", '"10min"'),
    "negative duration": ('[journal]\nkeep = "-8d"', 2, "journal.keep", "duration"),
    "check that Slurm would kill": ('[check]\ntimeout = "60s"', 2, "check.timeout", "Slurm kills"),
    "prolog that takes for ever": ('[prolog]\ntimeout = "10min"', 2, "prolog.timeout", "a job waits"),
    "share as a number": ("[drain]\nbudget = 5", 2, "drain.budget", '"0%" to "100%"'),
    "share above all": ('[drain]\nbudget = "101%"', 2, "drain.budget", "101%"),
    "negative count": ("[gpus]\ncount = -1", 2, "gpus.count", "0 or more"),
    "boolean as a count": ("[gpus]\ncount = true", 2, "gpus.count", "not true"),
    "count as a boolean": ("[epilog]\nask_slurm = 1", 2, "epilog.ask_slurm", "true or false"),
    "relative path": ('[slurm]\nscontrol = "scontrol"', 2, "slurm.scontrol", "absolute path"),
    "empty path": ('[slurm]\nscontrol = ""', 2, "slurm.scontrol", "absolute path"),
    "unknown braces": ('[paths]\nstate = "/x/{host}"', 2, "paths.state", "{node}"),
    "mode of no kind": ('[sources]\nkernel = "of"', 2, "sources.kernel", 'did you mean "off"?'),
    "fewer modes for the whole": ('mode = "off"', 1, "mode", '"enforce" or "shadow"'),
    "literal": ('[prolog]\nmove_job = "x"', 2, "prolog.move_job", '"gentle" or "exit"'),
    "text for a list": ('[gpus]\nvbios = "x"', 2, "gpus.vbios", "a list"),
    "port of no shape": ('[infiniband]\nports = ["../1"]', 2, "infiniband.ports", "mlx5_0/1"),
    "unit that is an option": ('[host]\nunits = ["--now"]', 2, "host.units", "systemd units"),
    "temperature in Kelvin": ("[nvml]\nmax_temperature = 361", 2, "nvml.max_temperature", "°C"),
    "control character": ('[gpus]\ndriver = "a\\u0007"', 2, "gpus.driver", "text"),
    "host that is an option": ('[dcgm]\nhost = "--x"', 2, "dcgm.host", "HOST:PORT"),
    "nvml slower than the check": ('[check]\ntimeout = "10s"\n[nvml]\ntimeout = "12s"', 4, "nvml.timeout", "below"),
    "keeping less than policy needs": ('[journal]\nkeep = "1d"', 2, "journal.keep", "7d"),
    "command without argv": ('[[check.command]]\nname = "a"', 1, "check.command[0].argv", "missing"),
    "command not absolute": ('[[check.command]]\nname="a"\nargv=["a"]', 3, "check.command[0].argv", "looked up"),
    "two commands of one name": (COMMAND * 2, 5, "check.command[1].name", "an earlier command has"),
    "command name as a path": ('[[check.command]]\nname = "a/b"\nargv = ["/a"]', 2, "check.command[0].name", "letters"),
    "policy without severity": ('[[policy]]\nfinding = "xid:1"', 1, "policy[0].severity", "missing"),
    "unknown severity": ('[[policy]]\nfinding = "xid:1"\nseverity = "bad"', 3, "policy[0].severity", "fault"),
    "finding without source": ('[[policy]]\nfinding = "79"\nseverity = "info"', 2, "policy[0].finding", "SOURCE:CODE"),
    "unknown rung": ('[[policy]]\nfinding = "xid:1"\nseverity = "fault"\nrung = "L5"', 4, "policy[0].rung", '"reboot"'),
    "rung without fault": (ROW + 'rung = "L3"', 4, "policy[0].rung", "only a fault"),
    "never": (ROW + "times = 0", 4, "policy[0].times", "1 or more"),
    "no window": (ROW + 'window = "0s"', 4, "policy[0].window", "1s"),
    "distinct what": (ROW + 'distinct = "x"', 4, "policy[0].distinct", "user"),
    "distinct once": (ROW + 'distinct = "user"', 4, "policy[0].distinct", "times = 2"),
    "window longer than memory": (ROW + 'times = 2\nwindow = "60d"', 5, "policy[0].window", "journal.keep"),
    "level 4 shorter than 3": ('[ladder]\nl4 = "10min"', 2, "ladder.l4", "l4 is shorter than l3"),
    "level 3 longer than 4": ('[ladder]\nl3 = "3h"', 2, "ladder.l3", "l4 is shorter than l3"),
    "model's level 4 shorter": (MODEL + 'l4 = "5min"', 4, "ladder.model[0].l4", "its l3"),
    "model without a limit": (MODEL, 1, "ladder.model[0].l4", "missing"),
    "test of no name": ('[dcgm]\nskips = ["memory_bandwith"]', 2, "dcgm.skips", '"memory_bandwidth"'),
    "level 1 left out": ('[dcgm]\nskips = ["software"]', 2, "dcgm.skips", "tests of levels 2 to 4"),
    "parameter of no shape": ('[dcgm]\nparameters = "memory"', 2, "dcgm.parameters", "dcgmi -p"),
    "file beside parameters": ('[dcgm]\nconfig = "/c"\nparameters = "a.b=1"', 3, "dcgm.parameters", "file of -c"),
    "parameter too long for pydcgm": (f'[dcgm]\nbackend = "pydcgm"\nparameters = "{LONG}"', 3, "dcgm.parameters",
                                      "a.b: pydcgm takes 99"),
    "model's parameter too long": (f'[[dcgm.model]]\ngpu = "*"\nparameters = "{LONG}{LONG}{LONG}"', 3,
                                   "dcgm.model[0].parameters", "dcgmi takes 255"),
    "too many parameters": (f'[dcgm]\nparameters = "{";".join(["a.b=1"] * 100)}"', 2, "dcgm.parameters", "99 at most"),
    "window longer than the journal": ('[ladder]\nwindow = "90d"', 2, "ladder.window", "journal.keep"),
    "sweep longer than the journal": ('[sweep]\ninterval = "90d"', 2, "sweep.interval", "journal.keep"),
    "sweep without end": ('[sweep]\nlevel = 4\ninterval = "1h"', 3, "sweep.interval", "no time is left"),
    "sweep of no level": ("[sweep]\nlevel = 5", 2, "sweep.level", "1 to 4"),
    "repair not absolute": ('[repair]\ncommand = ["mend"]', 2, "repair.command", "looked up"),
    "no reboot at all": ("[reboot]\nmost = 0", 2, "reboot.most", "1 to 20"),
    "service that is an option": ('[reset]\nservices = ["--now"]', 2, "reset.services", "systemd units"),
    "passed on to a lower rung": (FAULT + 'rung = "L4"\npassed = "L3"', 5, "policy[0].passed", "higher rung"),
    "failed without a rung": (FAULT + 'failed = "RMA"', 4, "policy[0].failed", "higher rung"),
    "when of tables": (ROW + "when = { a = { b = 1 } }", 4, "policy[0].when", "one value"),
    "third row": (ROW * 2 + "[[policy]]\n\nx = 1", 9, "policy[2].x", "known"),
    "place without nodes": ('[[place]]\nname = "rack r7"', 1, "place[0].nodes", "missing"),
    "place without a name": ('[[place]]\nname = ""\nnodes = "n1"', 2, "place[0].name", '"rack r7"'),
    "place of one more key": (f'{PLACE}"n1"\nkind = "rack"', 4, "place[0].kind", "known here: name, nodes"),
    "place's nodes as a list": (f'{PLACE}["n1", "n2"]', 3, "place[0].nodes", "text in quotes"),
    "place's nodes apart by spaces": (f'{PLACE}"n1 n2"', 3, "place[0].nodes", 'hostlist without spaces, "gpu[001'),
    "place's nodes unfinished": (f'{PLACE}"n[1-2"', 3, "place[0].nodes", "hostlist"),
    "place's nodes downwards": (f'{PLACE}"n[1-2,16-1]"', 3, "place[0].nodes", "ranges that go up"),
    "place of too many nodes": (f'{PLACE}"n[1-99999999]"', 3, "place[0].nodes", "at most 65536"),
    "two places of one name": (f'{PLACE}"n1"\n{PLACE}"n2"', 5, "place[1].name", "list all its nodes there"),
    "tool's test without command": (f'{TEST}"x"\npattern = "(x)"', 2, "test[0].name", "needs `command`"),
    "tool's test without figure": (f'{TEST}"x"\ncommand = ["/x"]', 2, "test[0].name", "needs `pattern`"),
    "tool's test that is not absolute": (f'{TEST}"nccl"\ncommand = ["x"]', 3, "test[0].command", "looked up"),
    "pattern without a group": (f'{TEST}"nccl"\npattern = "x"', 3, "test[0].pattern", "with one group"),
    "pattern that is none": (f'{TEST}"nccl"\npattern = "("', 3, "test[0].pattern", "regular expression"),
    "tool's test on a rung that tests nothing": (f'{TEST}"nccl"\nrung = "reset"', 3, "test[0].rung", '"asked" or "L1"'),
    "environment of no shape": (f'{TEST}"nccl"\nenvironment = ["X"]', 3, "test[0].environment", "NAME=value"),
    "limit of no model": ('[[limit]]\nfigure = "nccl"', 1, "limit[0].gpu", "missing"),
    "not TOML": ('mode = "shadow"\n[x\n', 2, "", "not TOML"),
    "twice the same": ('mode = "shadow"\nmode = "shadow"\n', 2, "", "not TOML"),
    "unfinished": ('a = """\n\n', 3, "", "not TOML"),
}
# fmt: on


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_an_error_names_line_key_and_what_was_expected(write, case):
    text, line, key, message = case
    found = problems(write(text))
    assert any(one[:2] == (line, key) and message in one[2] for one in found), found


def test_all_errors_are_told_at_once_in_the_file_s_order(write):
    found = problems(
        write("""
        mode = "on"
        [drain]
        budget = 3
        [prolog]
        x = '''
        two
        lines'''
        timeout = 3
        """)
    )
    assert [(line, key) for line, key, _ in found] == [
        (2, "mode"),
        (4, "drain.budget"),
        (6, "prolog.x"),
        (9, "prolog.timeout"),
    ]


def test_lines_are_found_after_multi_line_values_dotted_keys_and_quoted_headers():
    lines = check.line_numbers(
        'a = [\n  1, # ]\n  "x]",\n]\n\nb.c = 1 # d\n["e"]\nf = """\n[g]\nh = 1"""\n[[i.j]]\nk = 1\n[[i.j]]\nk = 2\n'
    )
    assert lines["a",] == 1
    assert lines["b", "c"] == 6
    assert lines["e", "f"] == 8
    assert ("g",) not in lines
    assert (lines["i", "j", 0, "k"], lines["i", "j", 1, "k"]) == (12, 14)


def test_bytes_that_are_no_text_are_a_problem_with_a_line(write):
    path = write("")
    Path(path).write_bytes(b'mode = "shadow"\n#\n# \xff\n')
    assert problems(path) == [(3, "", "not TOML: a byte that is not UTF-8")]


def test_a_file_too_large_to_be_a_configuration_is_not_read(write):
    assert "1 MiB" in problems(write("#" * (1 << 20) + "#"))[0][2]


@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="[]{}=\"'#.ab1\n\\ policychmd", max_size=80))
def test_no_text_is_answered_by_anything_but_settings_or_a_config_error(write, text):
    try:
        configuration.load(write(text), "n1")
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("gpu7", ("gpu7",)),
        ("gpu[001-003,5]", ("gpu001", "gpu002", "gpu003", "gpu5")),
        ("a-[1-2].x,b_1,c-2-1,d", ("a-1.x", "a-2.x", "b_1", "c-2-1", "d")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
    ],
)
def test_what_a_place_may_have_the_controller_understands(write, text, nodes):
    (place,) = configuration.load(write(f'[[place]]\nname = "rack r7"\nnodes = "{text}"'), "n1").place
    assert sorted(sacct.nodes_of(place.nodes)) == sorted(nodes)


def test_a_node_may_be_in_two_racks(write):
    rows = "".join(f'[[place]]\nname = "rack r{nth}"\nnodes = "n[1-8]"\n' for nth in (1, 2))
    assert len(configuration.load(write(rows), "n1").place) == 2


def test_site_rows_come_before_the_built_in_ones(write):
    rows = configuration.load(write('[[policy]]\nfinding = "xid:79"\nseverity = "info"'), "n1").policy
    assert (rows[0].finding, rows[0].severity) == ("xid:79", "info")
    assert len(rows) > 20


@pytest.mark.parametrize(
    ("text", "versions"), [('""', ()), ('"570"', ("570",)), ('["570", "580.95"]', ("570", "580.95"))]
)
def test_several_driver_versions_may_be_expected_during_a_roll_out(write, text, versions):
    assert configuration.load(write(f"[gpus]\ndriver = {text}\n")).gpus.driver == versions
