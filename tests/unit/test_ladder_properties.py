"""Whatever order faults, kills and admins come in: what the ladder never does, and that it always ends.

A history is a list of events on three nodes. `GPUHEALTH_HISTORIES=10000` plays more of them than a test run does.
"""

import os

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from slurm_gpuhealth import judge, record
from slurm_gpuhealth.findings import RUNGS
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import budget, climb
from slurm_gpuhealth.settings import Drain, Ladder, Paths, Reboot, Repair, Reset, Settings
from slurm_gpuhealth.slurm import reason as reasons
from slurm_gpuhealth.slurm import remark
from slurm_gpuhealth.slurm.node import Hold
from tests import model

HISTORIES = int(os.environ.get("GPUHEALTH_HISTORIES", "300"))
MENDS = ("reset", "reboot", "repair", "")
LIMITS = Drain(floor=1, budget=0.0, per_hour=0.0, lost=0.0, confirmed=0.0)
ON = Settings(
    *("enforce",),
    policy=model.POLICY,
    drain=LIMITS,
    reset=Reset(enabled=True),
    reboot=Reboot(enabled=True),
    repair=Repair(command=("/bin/true",)),
)
SWITCHES = {
    "reset": replace(ON, reset=Reset()),
    "reboot": replace(ON, reboot=Reboot()),
    "repair": replace(ON, repair=Repair()),
    "all": replace(ON, reset=Reset(), reboot=Reboot(), repair=Repair()),
    "tests": replace(ON, ladder=Ladder(tests=False)),
    "give_back": replace(ON, ladder=Ladder(give_back=False)),
}


# ---- what happens


def fault(code):
    def happen(world, node, step=3):
        node.standing.setdefault(code, MENDS[step % 4])

    return happen


def xid(code):
    return lambda world, node, step=0: node.log.append(code)


def weak(world, node, step=3):
    node.weak = MENDS[step % 4] or "never"


def mended(world, node, step=0):
    node.standing.clear()
    node.weak = ""


def silent(world, node, step=0):
    world.down_until = world.now + 40 + 100 * step


def forget(world, node, step=0):
    node.forget()


def drain(world, node, step=0):
    gone(node)
    world.set_drain(node, "PSU, JD")


def resume(world, node, step=0):
    if node.base == "DOWN" or node.flags & {"DRAIN", "FAIL"}:
        gone(node)
        world.end_down(node)


def down(world, node, step=0):
    gone(node)
    world.set_down(node, "PSU, JD", "admin")


def fail(world, node, step=0):
    gone(node)
    node.flags = (node.flags - {"DRAIN"}) | {"FAIL"}
    world.set_text_of(node, "fan, JD")


def retext(world, node, step=0):
    if node.reason:
        gone(node)
        world.set_text_of(node, f"{node.reason} -- JD: leave it")


def comment(world, node, step=0):
    node.comment = f"{model.SITE}, mine"


def undrain(world, node, step=0):
    """`gpuhealth undrain` on an admin's host: the ack first."""
    ours = node.record.ours
    if ours and not node.flags & {"REBOOT_ISSUED", "REBOOT_REQUESTED"}:
        said = remark.read_said(node.comment)
        acks = {**said.acks, ours.fact: world.now + 86400}
        node.comment = remark.write_said(node.comment, replace(said, acks=acks))
        gone(node)
        world.end_drain(node)


def asked(words):
    def happen(world, node, step=0):
        if node.record.owner == "none" and not node.flags:
            node.began()
            world.set_drain(node, f"gpuhealth:asked GPU* {words} by=alice")

    return happen


def slurms(text):
    def happen(world, node, step=0):
        if node.record.owner == "none":
            world.set_drain(node, text)

    return happen


def no_answer(world, node, step=0):
    """slurmd was silent for too long, and is back."""
    if node.base != "DOWN":
        world.set_down(node, node.reason or "Not responding", "slurm")
        if node.reason == "Not responding":
            world.end_down(node)


def job(world, node, step=0):
    if not node.flags and node.base == "IDLE":
        node.job = 7


def job_ends(world, node, step=0):
    node.job = 0


def stays_away(world, node, step=0):
    node.returns = not node.returns


def blind(world, node, step=0):
    node.blind = not node.blind


def plan(what):
    return lambda world, node, step=0: node.plans.append(what)


def switch(name):
    def happen(world, node, step=0):
        node.settings = replace(SWITCHES.get(name, ON), paths=node.settings.paths)

    return happen


def boots(world, node, step=0):
    world.boot(node)


def gone(node):
    """An admin has his own way with the node: what we hold it for is no news any more."""
    if node.record.ours:
        node.acks += 1
        node.old |= node.covered


WORLD = {
    "lost": fault("lost"),
    "remap": fault("remap"),
    "dead": fault("dead"),
    "xid 48": xid("48"),
    "xid 79": xid("79"),
    "weak": weak,
    "mended": mended,
    "slurmctld is silent": silent,
    "journal lost": forget,
    "admin drains": drain,
    "admin resumes": resume,
    "admin sets DOWN": down,
    "admin sets FAIL": fail,
    "admin rewrites": retext,
    "admin comments": comment,
    "undrain": undrain,
    "asked": asked("L3 queued"),
    "asked to L4": asked("L3 queued to=L4"),
    "asked, unsettled": asked("L3 claim"),
    "Prolog error": slurms("Prolog error"),
    "slurmd silent": no_answer,
    "job": job,
    "job ends": job_ends,
    "boots": boots,
    "stays away": stays_away,
    "blind": blind,
    "rung untested": plan("untested"),
    "rung fails": plan("fail"),
    "rung breaks": plan("raise"),
    **{f"off: {name}": switch(name) for name in SWITCHES},
    "all on": switch(""),
}
NESTED = {
    "another check": lambda world, node: world.check(node),
    "another worker": lambda world, node: world.worker(node),
    "a prolog": lambda world, node: world.prolog(node),
    "a check elsewhere": lambda world, node: world.check(other(world, node)),
}
NOT_MEANWHILE = ("off: ", "all on", "stays away", "journal lost", "rung ")


def other(world, node):
    names = sorted(world.nodes)
    return world.nodes[names[(names.index(node.name) + 1) % len(names)]]


PROGRAMS = {
    "check": lambda world, node, cuts: world.check(node, cuts[0], cuts[1]),
    "prolog": lambda world, node, cuts: world.prolog(node, cuts[0]),
    "worker": lambda world, node, cuts: world.worker(node, cuts[0]),
    "round": lambda world, node, cuts: [world.check(one) for one in world.nodes.values()],
}
MEANWHILE = {
    "kill": "kill",
    "lost answer": "lost",
    **{name: what for name, what in WORLD.items() if not name.startswith(NOT_MEANWHILE)},
    **NESTED,
}

# ---- what must never be


class Node(model.Node):
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
        self.top, self.kind, self.proven = -1, "", False

    def forget(self):
        super().forget()
        self.acks = 0


def witness(world, node, verb, text):
    """Told of each order of ours before it is carried out."""
    before = node.record
    ours, broken = before.ours, world.broken.append
    if verb == "remarks":
        return None if model.SITE in text else broken(f"{node}: the site's own text is lost: {text}")
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
    """The rungs of one climb only go up; from what was done by hand it begins anew."""
    rank = RUNGS.index(now.rung)
    if was and (was.state in ("manual", "pass") or was.fact != now.fact):
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
    if not node.proven and ours.fact not in climb.ON_REQUEST:
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
    ours = node.record.ours
    if ours:
        return ours.state in ("pass", "manual") or climb.is_end(ours) or (ours.state == "untested" and ours.attempt > 1)
    return "REBOOT_ISSUED" not in node.flags


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
    """With checks and without news every node ends somewhere."""
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
        if is_overlooked(world, node):
            world.broken.append(f"{node}: left in service although {node.standing} stands")


# ---- histories

EVENT = st.tuples(
    st.sampled_from([*WORLD, *["check"] * 25, *["round"] * 8, *["prolog", "worker"] * 3]),
    st.integers(0, 2),
    st.sampled_from([1, 0, 6, 61, 1500, 9000]),
    st.integers(0, 60),
    st.sampled_from(["", *MEANWHILE, *["kill"] * 10]),
)


@pytest.fixture(scope="session")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
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
    return world


@hypothesis_settings(
    max_examples=HISTORIES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(history=st.lists(EVENT, min_size=5, max_size=30))
def test_whatever_comes_in_whatever_order(nodes, history):
    world = play(nodes, history)
    assert not world.broken, "\n".join([*world.broken, *world.orders, *world.said[-20:]])
