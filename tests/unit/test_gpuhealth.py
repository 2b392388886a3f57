"""The command `gpuhealth` itself."""

import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands.gpuhealth import main


@pytest.mark.parametrize("command", ["findings", "status"])
def test_a_node_asked_for_where_it_can_not_be_is_answered_with_where_to_look(command):
    done = CliRunner().invoke(main, [command, "--node", "n2"])
    assert (done.exit_code, "Did you mean" in done.output) == (2, False)
    assert f"gpuhealth {command} is about the host that it runs on: run it on that node" in done.output
