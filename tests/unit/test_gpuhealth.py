"""The command `gpuhealth` itself."""

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import resume
from slurm_gpuhealth.commands.gpuhealth import main

ROOTS = "g.toml: can't be read: Permission denied"


@pytest.mark.parametrize("command", ["findings", "status"])
def test_a_node_asked_for_where_it_can_not_be_is_answered_with_where_to_look(command):
    done = CliRunner().invoke(main, [command, "--node", "n2"])
    assert (done.exit_code, "Did you mean" in done.output) == (2, False)
    assert f"gpuhealth {command} is about the host that it runs on: run it on that node" in done.output


@pytest.mark.parametrize(("who", "said"), [(1000, ""), (0, f"{ROOTS}; using the defaults\n")])
def test_that_the_configuration_is_roots_is_no_news_to_a_user(monkeypatch, capsys, who, said):
    monkeypatch.setattr(resume.os, "geteuid", lambda: who)
    resume.tell([ROOTS])
    assert capsys.readouterr().err == said
    resume.tell(["g.toml:3: mode: expected"])
    assert "g.toml:3" in capsys.readouterr().err
