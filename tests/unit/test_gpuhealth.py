"""The command `gpuhealth` itself."""

import io
import sys

import click
import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import common, resume
from slurm_gpuhealth.commands.gpuhealth import main
from slurm_gpuhealth.slurm import control

ROOTS = "g.toml: can't be read: Permission denied"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *((name, f"which nodes: gpuhealth {name} -w NODESET") for name in ("findings", "jobs", "ladder", "status")),
        ("doctor", "gpuhealth doctor is about the host that it runs on: run it on that node"),
    ],
)
def test_a_node_asked_for_with_the_option_that_names_this_host_is_answered_with_where_to_look(command, words):
    done = CliRunner().invoke(main, [command, "--node", "n2"])
    assert (done.exit_code, "Did you mean" in done.output) == (2, False)
    assert words in done.output
    assert "gpuhealth --node NAME" in done.output


def test_no_color_means_no_color(monkeypatch):
    monkeypatch.setattr(common.sys, "stdout", Terminal())
    common.table(("SEVERITY",), [("fault",)])
    assert "\x1b[31mfault" in common.sys.stdout.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(common.sys, "stdout", Terminal())
    common.table(("SEVERITY",), [("fault",)])
    assert "\x1b" not in common.sys.stdout.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_table_fits_the_terminal_and_elsewhere_it_is_whole(monkeypatch, columns):
    rows = [("n1", "2026-11-20 12:03:00", "x" * 60, "y" * 90), ("n2", "2026-11-20 12:04:00", "x", "")]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(common.sys, "stdout", Terminal())
    common.table(("NODE", "TIME", "WHAT", "MESSAGE"), rows)
    lines = common.sys.stdout.getvalue().splitlines()
    assert max(map(len, lines)) == min(columns, 4 + 19 + 60 + 90 + 6)
    assert lines[1].endswith("…" if columns < 200 else "y")
    assert ("2026-11-20 12:03:00" in lines[1]) == (columns >= 80)
    monkeypatch.setattr(common.sys, "stdout", io.StringIO())
    common.table(("NODE", "TIME", "WHAT", "MESSAGE"), rows)
    assert "x" * 60 + "  " + "y" * 90 in common.sys.stdout.getvalue()


class Bar:
    """In the place of rich's."""

    def __init__(self):
        self.said = []

    def update(self, task, completed, refresh):
        self.said.append((task, completed))

    def stop(self):
        self.said.append("end")


@pytest.mark.parametrize(
    ("terminal", "seconds", "said"),
    [(True, 1.0, [("jobs of 4", 2), ("jobs of 4", 3), ("jobs of 4", 4), "end"]), (True, 0.4, []), (False, 9.0, [])],
)
def test_what_takes_longer_than_two_seconds_shows_a_bar_on_a_terminal(monkeypatch, terminal, seconds, said):
    bar, now = Bar(), [0.0]
    monkeypatch.setattr(common, "_bar", lambda what, total: (bar, f"{what} of {total}"))
    monkeypatch.setattr(common.sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    seen = []
    for number in common.progress(range(4), "jobs", total=4):
        now[0] += seconds
        seen.append(number)
    assert (seen, bar.said) == ([0, 1, 2, 3], said)


def test_without_rich_there_is_no_bar_and_all_else_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(common, "SLOW", 0.0)
    monkeypatch.setattr(common.sys, "stderr", Terminal())
    assert list(common.progress(range(3), "jobs")) == [0, 1, 2]
    assert common.sys.stderr.getvalue() == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],m1", ["m1", "n1", "n2", "n3", "n7"]),
        ("n[01-04]!n02", ["n01", "n03", "n04"]),
        ("n1,n1", ["n1"]),
    ],
)
def test_a_host_list_is_the_same_for_all_commands(settings, text, names):
    assert common.hosts(settings, text) == names
    assert common.hosts(settings, common.fold(names)) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[1-99999999]", "n1;reboot", "n1 n2/x", "-N"])
def test_what_is_no_host_list_is_said(settings, text):
    with pytest.raises(click.BadParameter):
        common.hosts(settings, text)


def test_without_clustershell_slurm_reads_the_host_list(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "ClusterShell.NodeSet", None)
    asked = []
    monkeypatch.setattr(control, "hostnames", lambda slurm, text: asked.append(text) or ["n1", "n2"])
    assert common.hosts(settings, "n[1-2]") == ["n1", "n2"]
    assert (asked, common.fold(["n1", "n2"])) == (["n[1-2]"], "n1,n2")
    with pytest.raises(click.BadParameter, match="ClusterShell knows more"):
        common.hosts(settings, "@rack3")


@pytest.mark.parametrize(("who", "said"), [(1000, ""), (0, f"{ROOTS}; using the defaults\n")])
def test_that_the_configuration_is_roots_is_no_news_to_a_user(monkeypatch, capsys, who, said):
    monkeypatch.setattr(resume.os, "geteuid", lambda: who)
    resume.tell([ROOTS])
    assert capsys.readouterr().err == said
    resume.tell(["g.toml:3: mode: expected"])
    assert "g.toml:3" in capsys.readouterr().err
