"""In any order of faults, kills and admins' actions: what the ladder never does, and that it always ends.

A history is a list of events on three nodes. Each test run plays the same ones; `make soak` plays new ones, and what it
finds becomes a test of its own here. To see it fail, break something: leave out the worker's lock, `is_still`, the
budget, or a check.
"""

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings

from slurm_gpuhealth.config.settings import Paths
from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import budget, climb
from slurm_gpuhealth.node import record
from slurm_gpuhealth.policy import judge
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm.node import Hold
from tests import model, model_slurm
from tests.histories import HISTORY, MEANWHILE, ON, PROGRAMS, WORLD, does_it
from tests.model_slurm import SITE

# ---- what must never be


class Node(model_slurm.Node):
    """What the witness keeps."""

    def __init__(self, name, settings):
        self.acks = 0
        self.began()
        super().__init__(name, settings)
        self.old: set[tuple[int, int, str]] = set()
        """Lines of the kernel log that have had their drain."""
        self.covered: set[tuple[int, int, str]] = set()
        """Those that this hold is about."""

    def began(self):
        self.touched = False
        """By an admin or a boot of its own, since the hold began."""
        self.top, self.kind, self.proven = -1, "", False

    def forget(self):
        super().forget()
        self.acks = 0


def witness(world, node, verb, text):
    """Told of each order of ours before it is carried out."""
    before = node.record
    ours, broken = before.ours, world.broken.append
    if verb == "remarks":
        return None if SITE in text else broken(f"{node}: the site's own text is lost: {text}")
    if world.running[-1].node is not node:
        broken(f"{node}: ordered by another node")
    if verb == "drain":
        if before.owner == "admin" or (before.owner == "slurm" and not reasons.explains(before.reason)):
            broken(f"{node}: drained over what is not ours")
        new = reasons.parse(text)
        if not ours:
            node.began()
            node.kind = budget.kind(new)
            if new.fact.startswith("Xid") and new.fact[3:] not in {line[2] for line in node.read - node.old}:
                broken(f"{node}: drained again for an old event: {text}")
            node.covered = set(node.read)
    elif not ours:
        return broken(f"{node}: {verb} {text!r} on what is not ours")
    if verb in ("drain", "reason", "reboot"):
        rises(world, node, ours, reasons.parse(text))
    if verb == "resume" and node.down_by != "reboot":
        broken(f"{node}: RESUME of a DOWN that {node.down_by} made")
    if verb == "reboot" and (node.job or not node.settings.reboot.enabled):
        broken(f"{node}: reboot with a job, or switched off")
    if verb in ("undrain", "resume") and ours.state != "claim":
        is_fit(world, node, ours)
        node.old |= node.covered
    return None


def rises(world, node, was, now):
    """The rungs of one climb only go up; after work done by hand the climb begins again."""
    rank = RUNGS.index(now.rung)
    by_hand = world.running[-1].name == "escalate"
    if by_hand or (was and (was.state in ("manual", "pass") or was.fact != now.fact)):
        node.top = -1
    if rank < node.top:
        world.broken.append(f"{node}: down to {reasons.write(now)}")
    node.top = max(node.top, rank)


def is_fit(world, node, ours):
    stands = [
        code
        for (code,) in node.journal.rows(
            "SELECT code FROM finding WHERE standing AND severity = 'fault' AND mode = 'enforce' AND cleared IS NULL"
        )
    ]
    acked = {code for (code,) in node.journal.rows("SELECT code FROM finding WHERE mode = 'acked'")}
    stands += (node.seen & node.standing.keys()) - acked
    if stands:
        world.broken.append(f"{node}: given back although {stands} stands")
    if not node.looked:
        world.broken.append(f"{node}: given back without a look after the test")
    if not node.proven and ours.fact not in reasons.ON_REQUEST:
        world.broken.append(f"{node}: given back unproven")


def at_rest(world):
    """After each event, when none of our programs runs."""
    held = [(node, node.record.ours) for node in world.nodes.values() if node.record.ours]
    for kind in ("new", "lost"):
        count = sum(node.kind == budget.kind(one) == kind and one.state != "claim" for node, one in held)
        if count > 1:
            world.broken.append(f"{count} nodes held ({kind}): {held}")
    for node in world.nodes.values():
        taken = node.journal.one("SELECT count(*) FROM decision WHERE result LIKE 'resumed by an admin%'")[0]
        if taken > node.acks:
            world.broken.append(f"{node}: our own give-back was taken for an admin's ack")


def is_settled(world, node):
    """Nothing more is due, no matter how much later."""
    ours = node.record.ours
    done = climb.Known(bundled=node.journal.one("SELECT 1 FROM step WHERE rung = 'RMA'") is not None, age=1e9)
    return climb.due(ours, node.record, done, node.settings).do == "wait" if ours else "REBOOT_ISSUED" not in node.flags


def is_overlooked(world, node):
    """A fault stands, the node is in service, and there is room."""
    if node.record.owner != "none" or not node.standing:
        return False
    if node.journal.one("SELECT 1 FROM finding WHERE mode = 'acked' AND cleared IS NULL"):
        return False
    worst = judge.worst(record.waiting(node.journal).values())
    if worst is None:
        return True
    wanted = reasons.Reason(reasons.fact(worst.finding.source, worst.finding.code), 3, worst.rung, "claim")
    holds, total = world.holds(None)
    return budget.place(Hold(node.name, wanted, 1e12), holds, total, node.settings, world.now).fits


def comes_to_rest(world):
    """With checks but no new events, every node reaches an end."""
    world.down_until = 0.0
    for node in world.nodes.values():
        node.blind, node.job, node.returns = False, 0, True
        node.plans.clear()
    calm, last = 0, None
    for number in range(40):
        world.pass_time(61 if number < 3 else 1300)
        for node in world.nodes.values():
            world.check(node)
        at_rest(world)
        now = [repr(node) for node in world.nodes.values()]
        calm, last = calm + 1 if now == last else 0, now
        if calm >= 4 and all(is_settled(world, node) for node in world.nodes.values()):
            break
    else:
        world.broken.append(f"no rest: {world.nodes}")
    for node in world.nodes.values():
        if node.record.owner == "admin" and reasons.parse(node.reason) and not node.touched:
            world.broken.append(f"{node}: our own reason is read as an admin's")
        if is_overlooked(world, node):
            world.broken.append(f"{node}: left in service although {node.standing} stands")


def hands_end_it(world):
    """With hands that do what `manual` asks for, each climb ends: back, RMA, or not to be tested."""
    asked = {}
    for _ in range(len(climb.BY_HAND) + 1):
        manual = [node for node in world.nodes.values() if (ours := node.record.ours) and ours.state == "manual"]
        manual = [node for node in manual if node.record.ours.rung in climb.BY_HAND and node.settings.ladder.tests]
        if not manual or world.broken:
            return
        for node in manual:
            asked.setdefault(node.name, []).append(node.reason)
            does_it(world, node)
        comes_to_rest(world)
    world.broken.append(f"no end by hand: {asked}")


@pytest.fixture(scope="session")
def nodes(tmp_path_factory):
    return three(tmp_path_factory.mktemp("ladder"))


def three(folder):
    """The settings of three nodes with their files below `folder`."""
    return [replace(ON, paths=Paths(state=str(folder / f"s/n{i}"), run=str(folder / f"r/n{i}"))) for i in (1, 2, 3)]


def play(nodes, history):
    world = model.Cluster(nodes, witness, Node)
    with world.playing():
        for name, which, minutes, step, meanwhile in history:
            world.pass_time(60 * minutes)
            node = list(world.nodes.values())[which]
            if name in WORLD:
                WORLD[name](world, node, step)
            else:
                cut = [(step % 30 + 1, MEANWHILE[meanwhile])] if meanwhile else []
                PROGRAMS[name](world, node, (cut, []) if step < 30 else ([], cut))
            at_rest(world)
            if world.broken:
                break
        else:
            comes_to_rest(world)
            hands_end_it(world)
    return world


@hypothesis_settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
@given(history=HISTORY)
def test_whatever_comes_in_whatever_order(nodes, history):
    ends_well(nodes, history)


def ends_well(nodes, history):
    world = play(nodes, history)
    assert not world.broken, "\n".join([*world.broken, *world.orders, *world.said[-20:]])


# ---- what the long search has found


def test_a_fault_seen_while_somebody_asks_for_a_test_waits_again_when_that_claim_is_undone(nodes):
    """Over budget, the request and the fault's decision were undone together, and nobody asked again."""
    for step in range(10, 20):
        history = [("lost", 0, 1, 0, ""), ("lost", 1, 1, 0, ""), ("asked", 0, 1, 0, "")]
        ends_well(nodes, [*history, ("check", 1, 1, step, "asked, unsettled"), ("check", 1, 1, 0, "")])


def test_a_gpu_gone_for_good_on_the_default_ladder_ends_also_when_all_is_done_by_hand(nodes):
    for fault in ("lost", "remap"):
        ends_well(nodes, [("off: all", 0, 1, 0, ""), (fault, 0, 1, 3, "")])


def test_a_hold_that_an_admin_ended_long_ago_does_not_come_back_when_slurm_drains_the_node(nodes):
    """The acknowledgement had ended too by the time that the node looked again."""
    history = [("dead", 0, 1, 0, ""), ("check", 0, 1, 0, ""), ("check", 0, 1, 0, ""), ("undrain", 0, 1, 0, "")]
    ends_well(nodes, [*history, ("too few GPUs", 0, 1500, 0, "")])
