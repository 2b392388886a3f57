"""An admin acts between our last check and our write: the admin's change stands afterwards.

Slurm has no compare-and-set, and keeps no record of a `Reason=` alone or of the first of two drains in one second. In
these cases, and at the order of a reboot, the later change stands (docs/how-it-decides.md).
"""

import pytest

from slurm_gpuhealth.config.settings import Paths
from slurm_gpuhealth.frozen import replace
from tests import histories, model

TEXT = "PSU, JD"
ACTIONS = {
    "drain": lambda world, node: world.set_drain(node, TEXT),
    "DOWN": lambda world, node: world.set_down(node, TEXT, "admin"),
    "FAIL": lambda world, node: world.set_fail(node, TEXT),
    "resume": lambda world, node: world.end_down(node),
}
FAULTS = {
    "a weak GPU, fit after L4": lambda node: node.log.append("79"),
    "a lost GPU, fit after a reboot": lambda node: node.standing.update(lost="reboot"),
    "a lost GPU that stays": lambda node: node.standing.update(lost=""),
    "a test that somebody asked for": lambda node: None,
}
KEPT = ("reason", "undrain", "resume", "text", "remarks")
"""The orders after which his word must stand."""


def play(tmp_path, fault, number, action):
    """A climb in which the admin acts just before our order of this number: node, that order's verb, and its program's
    end."""
    orders = []
    seen = {}

    def meanwhile(world, node, verb, text):
        orders.append(verb)
        if len(orders) == number:
            seen.update(verb=verb, held=node.record.ours is not None)
            action(world, node)

    paths = Paths(state=str(tmp_path / "s/n1"), run=str(tmp_path / "r/n1"))
    world = model.Cluster([replace(histories.ON, paths=paths)], meanwhile)
    node = world.nodes["n1"]
    with world.playing():
        world.check(node)
        FAULTS[fault](node)
        if fault.endswith("asked for"):
            world.set_drain(node, "gpuhealth:asked GPU* L3 queued by=alice")
        for _ in range(8):
            world.pass_time(61)
            world.check(node)
            if seen:
                break
    return node, seen, world


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_admin_says_just_before_our_order_stands(tmp_path, fault, name):
    lost, number = [], 0
    while True:
        number += 1
        node, seen, world = play(tmp_path / f"{number}", fault, number, ACTIONS[name])
        if not seen:
            break
        if seen["verb"] not in KEPT or not seen["held"]:
            continue
        out = node.base == "DOWN" or node.flags & {"DRAIN", "FAIL"}
        stands = not out if name == "resume" else out and node.reason == TEXT
        if not stands:
            lost.append((number, seen["verb"], node, world.orders[-4:]))
    assert number > 3
    assert not lost, "\n".join(map(str, lost))
