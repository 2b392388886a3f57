"""Events on a modelled cluster, between our programs' calls and in the middle of them."""

from __future__ import annotations

import contextlib

from hypothesis import strategies as st

from slurm_gpuhealth.config.settings import Drain, Ladder, Reboot, Repair, Reset, Settings
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import ask, climb
from slurm_gpuhealth.slurm import control, remark
from tests import model
from tests.model_slurm import SITE

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


def silent_and_drained(world, node, step=0):
    silent(world, node)
    world.due.append((world.now + 30, node, lambda one: drain(world, one)))


silent.anywhere = silent_and_drained.anywhere = True  # also between a check and an order: the order then fails


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
    world.set_fail(node, "fan, JD")


def retext(world, node, step=0):
    if node.reason:
        gone(node)
        world.set_text_of(node, f"{node.reason} -- JD: leave it")


def comment(world, node, step=0):
    node.comment = f"{SITE}, mine"


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
        if node.record.owner == "none" and not node.flags - {"INVALID_REG"}:
            node.began()
            node.comment = remark.write_said(node.comment, replace(remark.read_said(node.comment), was=""))
            world.set_drain(node, f"gpuhealth:asked GPU* {words} by=alice")

    return happen


def take_over(world, node, step=0):
    """`gpuhealth-escalate --take-over` on an admin's drain."""
    if node.record.owner == "admin" and node.base != "DOWN" and "DRAIN" in node.flags:
        node.began()
        node.comment = remark.write_said(node.comment, replace(remark.read_said(node.comment), was=node.reason))
        world.set_text_of(node, "gpuhealth:asked GPU* L3 queued by=alice")


def left_over(world, node, step=0):
    """A text that an earlier take-over has left in Comment."""
    if not node.record.ours:
        node.comment = remark.write_said(node.comment, replace(remark.read_said(node.comment), was="fan, JD"))


def too_few(world, node, step=0):
    """slurmd reports fewer GPUs than configured, or all of them again."""
    node.flags ^= {"INVALID_REG"}
    if "INVALID_REG" in node.flags and node.record.owner == "none":
        world.set_drain(node, "gres/gpu count reported lower than configured (7 < 8)")


def slurms(text):
    def happen(world, node, step=0):
        if node.record.owner == "none":
            world.set_drain(node, text)

    return happen


def no_answer(world, node, step=0):
    """slurmd was silent for too long and is back now."""
    if node.base != "DOWN":
        node.touched = True
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
    node.touched = True
    world.boot(node)


def asks_again(world, node, step=0):
    """`gpuhealth-escalate`, run on an admin's host, for a node that we hold."""
    if node.record.ours:
        request = ask.Request("L3", by="alice", tests="nccl")
        with contextlib.suppress(ask.Unchanged, control.SlurmError):
            ask.ask(node.settings, node.name, request, [], len(world.nodes), world.now)


def does_it(world, node, step=0):
    """An admin does by hand what the reason asks for. If that leaves no trace, the admin asks for a test afterwards."""
    ours = node.record.ours
    if ours and ours.state == "manual" and ours.rung == "reboot":
        boots(world, node)
    elif ours and ours.state == "manual" and ours.rung in climb.BY_HAND:
        world.mend(node, ours.rung)
        world.run(node, "escalate", lambda: asks_again(world, node))


def gone(node):
    """An admin takes charge of the node: the faults that we hold it for are known from now on."""
    node.touched = True
    if node.record.ours:
        node.acks += 1
        if node.journal.get("hold"):  # a check that was killed between the order and its note knows of no drain
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
    "take over": take_over,
    "a text is left over": left_over,
    "too few GPUs": too_few,
    "Prolog error": slurms("Prolog error"),
    "slurmd silent": no_answer,
    "job": job,
    "job ends": job_ends,
    "boots": boots,
    "done by hand": does_it,
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
NOT_MEANWHILE = ("done by hand", "off: ", "all on", "stays away", "journal lost", "rung ")


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
    "silent, and an admin drains": silent_and_drained,
    **{name: what for name, what in WORLD.items() if not name.startswith(NOT_MEANWHILE)},
    **NESTED,
}

EVENT = st.tuples(
    st.sampled_from([*WORLD, *["check"] * 25, *["round"] * 8, *["prolog", "worker"] * 3]),
    st.integers(0, 2),
    st.sampled_from([1, 0, 6, 61, 1500, 9000]),
    st.integers(0, 60),
    st.sampled_from(["", *MEANWHILE, *["kill"] * 10]),
)
HISTORY = st.lists(EVENT, min_size=5, max_size=30)
