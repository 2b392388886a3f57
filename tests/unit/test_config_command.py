"""`gpuhealth config`: what it shows of the configuration."""

import json

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.config import config
from slurm_gpuhealth.config import load as configuration
from slurm_gpuhealth.config.check import parse_with_lines

TEXT = """mode = "enforce"
[prolog]
timeout = "20s"
[drain]
budget = "12.5%"
[paths]
state = "/var/{node}"
[[check.command]]
name = "x"
argv = ["/bin/true"]
[[policy]]
finding = "xid:63"
severity = "fault"
rung = "reset"
when = { class = ["hardware", "x"] }
"""


@pytest.fixture
def gpuhealth(tmp_path, monkeypatch):
    path = tmp_path / "gpuhealth.toml"
    monkeypatch.setenv("GPUHEALTH_CONFIG", str(path))
    monkeypatch.setattr(configuration, "unsafe", lambda *_, **__: [])

    def run(text, *arguments):
        path.write_text(text)
        done = CliRunner().invoke(config, arguments, obj="n1")
        return done.exit_code, done.output.replace(str(path), "FILE")

    return run


def test_a_sound_configuration_is_said_to_be_so(gpuhealth):
    assert gpuhealth(TEXT, "check") == (0, "FILE: nothing is wrong\n")


def test_each_problem_has_a_line_of_its_own(gpuhealth):
    code, output = gpuhealth('mode = "x"\n[prolog]\ntimout = "1s"\n', "check")
    assert code == 1
    assert output.splitlines() == [
        'FILE:1: mode: expected "enforce" or "shadow", not "x"',
        "FILE:3: prolog.timout: unknown key; did you mean timeout?",
    ]


def test_as_json_a_problem_is_an_object_with_its_place(gpuhealth):
    code, output = gpuhealth('mode = "x"\n', "check", "--json")
    assert (code, json.loads(output)["key"], json.loads(output)["line"]) == (1, "mode", 1)
    assert gpuhealth(TEXT, "check", "--json") == (0, "")


def test_a_file_and_a_program_that_others_can_write_are_problems(gpuhealth, monkeypatch):
    monkeypatch.setattr(configuration, "unsafe", lambda path, *_, **__: [f"{path}: chmod go-w"])
    code, output = gpuhealth(TEXT, "check")
    assert code == 1
    assert output.splitlines() == [
        "FILE: FILE: chmod go-w",
        "FILE:10: check.command[0].argv: would not be run: /bin/true: chmod go-w",
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('finding = "nvml:temprature"', "so nvml:temprature matches nothing; known: nvml:brake, "),
        ('finding = "nvml:thremal"', "did you mean nvml:thermal?"),
        ('finding = "xxid:79"', 'no source has the name "xxid", so this row matches nothing; did you mean xid:79?'),
        ('finding = "xid:remap"', "its codes are numbers, so xid:remap matches nothing"),
        ('finding = "site:nmve"', "did you mean site:nvme?"),
        (
            'finding = "nvml:hot"\nwhen = { temp = 90 }',
            'nvml:hot has no detail "temp", so this row matches nothing; known: action',
        ),
        ('finding = "xid:79"\nwhen = { clas = "hardware" }', "did you mean class?"),
    ],
)
def test_a_row_that_nothing_can_meet_is_a_problem_with_the_nearest_name(gpuhealth, row, said):
    site = '[[check.command]]\nname = "nvme"\nargv = ["/bin/true"]\n'
    code, output = gpuhealth(f'{site}[[policy]]\nseverity = "warning"\n{row}\n', "check")
    assert (code, said in output, output.count("\n")) == (1, True, 1), output
    assert output.startswith("FILE:6: policy[0].finding: " if "when" not in row else "FILE:7: policy[0].when: ")


@pytest.mark.parametrize(
    "row",
    [
        *('finding = "*"', 'finding = "nvml:*"', 'finding = "*:lost"', 'finding = "xid:6?"', 'finding = "xid:1[34]"'),
        *('finding = "site:nvme"', 'finding = "site:*"\nwhen = { says = "fault" }', 'finding = "dcgm:brand_new"'),
        *('finding = "*"\nwhen = { class = "hardware" }', 'finding = "nvml:*\nwhen = { celsius = 90 }'[:17] + '"'),
    ],
)
def test_what_may_come_passes_also_by_a_pattern_and_from_the_sites_own_check(gpuhealth, row):
    site = '[[check.command]]\nname = "nvme"\nargv = ["/bin/true"]\n'
    assert gpuhealth(f'{site}[[policy]]\nseverity = "warning"\n{row}\n', "check")[0] == 0


def test_only_what_the_file_sets_is_shown_on_request(gpuhealth):
    code, output = gpuhealth(TEXT, "show", "--changed")
    assert code == 0
    assert [line.partition(" = ")[0] for line in output.splitlines()] == [
        *("mode", "paths.state", "prolog.timeout", "check.command[0].name", "check.command[0].argv", "drain.budget"),
        "policy[0]",
    ]
    assert list(json.loads(gpuhealth(TEXT, "show", "--changed", "--json")[1]))[-1] == "policy[0]"


def test_another_file_can_be_checked(gpuhealth, tmp_path):
    (tmp_path / "other.toml").write_text("x = 1")
    code, output = gpuhealth(TEXT, "check", str(tmp_path / "other.toml"))
    assert code == 1
    assert "other.toml:1: x: unknown key" in output


def test_what_is_in_force_is_shown_with_its_origin(gpuhealth):
    code, output = gpuhealth(TEXT, "show")
    lines = {line.partition(" = ")[0]: " ".join(line.partition(" = ")[2].split()) for line in output.splitlines()}
    assert code == 0
    assert lines["mode"] == '"enforce" # FILE:1'
    assert lines["prolog.timeout"] == '"20s" # FILE:3'
    assert lines["prolog.reuse_pass"].startswith('"10min" # default')
    assert lines["drain.budget"] == '"12.5%" # FILE:5'
    assert lines["drain.ack"] == '"7d" # default'
    assert lines["paths.state"] == '"/var/n1" # FILE:7'
    assert lines["check.command[0].argv"] == '["/bin/true"] # FILE:10'
    assert lines["check.command[0].timeout"] == '"10s" # default'
    assert lines["policy[0]"].endswith("# FILE:11")
    assert lines["policy[1]"].endswith("# built in")


def test_the_same_is_there_for_programs(gpuhealth):
    code, output = gpuhealth(TEXT, "show", "--json")
    shown = json.loads(output)
    assert code == 0
    assert shown["prolog.timeout"] == {"value": 20.0, "from": "FILE:3"}
    assert shown["policy[0]"]["value"]["when"] == {"class": ["hardware", "x"]}


def test_what_is_shown_is_a_configuration_of_the_same_meaning(gpuhealth, tmp_path):
    _, output = gpuhealth(TEXT, "show")
    rows = [line.partition(" = ")[2].rpartition(" # ")[0] for line in output.splitlines() if line.startswith("policy[")]
    again = tmp_path / "again.toml"
    again.write_text("policy = [\n" + ",\n".join(rows) + "\n]\n")
    assert len(parse_with_lines(str(again))[0]["policy"]) == len(rows)


def test_a_broken_configuration_is_not_shown_as_if_it_were_in_force(gpuhealth):
    code, output = gpuhealth("x = 1", "show")
    assert code == 1
    assert "FILE:1: x: unknown key" in output


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_password_in_the_stores_address_is_not_shown(gpuhealth, options):
    text = '[store]\nurl = "postgresql://ctl:s3cret@db:5432/health"\n'
    code, output = gpuhealth(text, "show", *options)
    assert (code, "s3cret" in output) == (0, False)
    assert "postgresql://ctl:***@db:5432/health" in output


def test_rows_of_a_table_are_shown_key_by_key(gpuhealth):
    text = '[[ladder.model]]\ngpu = "*B200*"\nl3 = "1h"\nl4 = "4h"\n[[dcgm.model]]\ngpu = "*"\nskips = ["pcie"]\n'
    code, output = gpuhealth(text, "show", "--changed")
    assert code == 0, output
    assert 'ladder.model[0].l3 = "1h"' in output
    assert 'dcgm.model[0].skips = ["pcie"]' in output


def test_a_config_for_dcgm_that_would_not_be_used_is_said_with_its_line(gpuhealth, tmp_path):
    large = tmp_path / "large.yaml"
    large.write_text("x" * 10000)
    code, output = gpuhealth(f'[dcgm]\nconfig = "/nowhere"\n[[dcgm.model]]\ngpu = "*"\nconfig = "{large}"\n', "check")
    assert code == 1
    assert "FILE:2: dcgm.config: dcgm.config is not used: /nowhere" in output
    assert "FILE:5: dcgm.model[0].config: dcgm.config is not used" in output
    missing_on_this_node = '[[dcgm.model]]\ngpu = "*L4*"\nconfig = "/nowhere"\n'
    assert gpuhealth(missing_on_this_node, "check")[0] == 0
