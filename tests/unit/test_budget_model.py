"""A thousand modelled nodes decide at once, against a slurmctld with delays: the real budget, the real order of calls.

Time is virtual. slurmctld carries out a call at one instant; the answer arrives later and is old by then.
"""

# ruff: noqa: S311 - no secrets here

import heapq
from random import Random

import pytest

from slurm_gpuhealth.config.settings import Drain, Settings, Sweep
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.ladder import budget, claim
from slurm_gpuhealth.slurm.node import Hold
from slurm_gpuhealth.slurm.reason import Reason, stamp

START = 1795176000.3
KILLING = 5000
"""Seconds in which programs are killed."""
FACTS = {
    "new": Reason("Xid48", 3, "L3", "queued"),
    "lost": Reason("lost", 3, "reboot", "queued"),
    "confirmed": Reason("dead", 3, "RMA", "queued"),
    "sweep": Reason("sweep", None, "L2", "queued"),
}
WIDE = Drain(budget=0.05, floor=2, per_hour=1.0, lost=0.05, confirmed=0.2)


class World:
    """Nodes with one fault each, slurmctld's record of them, and all coming events."""

    def __init__(self, seed, kinds, drain=WIDE, *, delay=0.5, interval=60, kill=0.0, skew=0.0, back=0.0, splay=2.0):
        self.random, self.now, self.events, self.count = Random(seed), START, [], 0
        self.settings = Settings(drain=drain, sweep=Sweep(budget=0.02))
        self.kinds = {f"n{number:04}": kind for number, kind in enumerate(kinds)}
        self.delay, self.interval, self.kill, self.back, self.splay = delay, interval, kill, back, splay
        self.skews = {node: self.random.uniform(-skew, skew) for node in self.kinds}
        self.holds, self.confirmed, self.most, self.written, self.undone = {}, {}, {}, 0, 0
        self.calm = START
        for node in self.kinds:
            self.at(self.random.uniform(0, interval), self.check, node)

    def at(self, seconds, what, *args):
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, what, args))

    def run(self, seconds):
        end = START + seconds
        while self.events and self.events[0][0] <= end:
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)
        self.now = end
        return self

    def check(self, node):
        """A node's health check, repeated each interval while there is something to do."""
        held = self.holds.get(node)
        if held and held.ours.state != "claim":
            return
        clock = lambda: self.now + self.skews[node]  # noqa: E731
        wanted = replace(FACTS[self.kinds[node]], state="claim", since=stamp(clock()))
        steps = claim.settling(node, self.settings, clock) if held else None
        steps = steps or claim.claiming(node, wanted, self.settings, clock)
        self.at(0 if held else self.random.uniform(0, self.splay), self.next, node, wanted, steps, None)

    def next(self, node, wanted, steps, answer):
        if self.now < START + KILLING and self.random.random() < self.kill:
            self.at(max(self.interval, 1), self.check, node)
            return
        try:
            verb, _ = steps.send(answer)
        except StopIteration as end:
            if end.value[0] != "drained":
                self.at(300, self.check, node)
            return
        if verb == "wait":
            self.at(budget.SETTLE, self.next, node, wanted, steps, None)
        else:
            self.at(self.travel(), self.arrive, node, wanted, steps, verb)

    def travel(self):
        return self.random.random() ** 4 * self.delay

    def arrive(self, node, wanted, steps, verb):
        """slurmctld carries out the call at this instant."""
        answer = self.do(node, wanted, verb)
        self.calm = self.calm if verb == "count" else self.now
        self.at(self.travel(), self.next, node, wanted, steps, answer)

    def do(self, node, wanted, verb):
        held = self.holds.get(node)
        if verb == "count":
            return list(self.holds.values()), len(self.kinds)
        if verb == "claim":
            self.written += 1
            self.holds[node] = Hold(node, wanted, self.second())
            return True
        if held is None or held.ours.state != "claim":
            return False
        if verb == "renew":
            self.holds[node] = replace(held, time=self.second())
        elif verb == "undo":
            self.undone += 1
            del self.holds[node]
        else:
            ours = replace(held.ours, state="queued", since=stamp(held.time))
            self.holds[node] = Hold(node, ours, self.second())
            now = self.standing()
            self.most = {kind: max(now[kind], self.most.get(kind, 0)) for kind in now}
        return True

    def second(self):
        """slurmctld's clock keeps whole seconds; now and then it is set back."""
        return float(int(self.now - (self.back if (self.now - START) % 40 > 20 else 0)))

    def standing(self):
        found = [self.kinds[hold.node] for hold in self.holds.values() if hold.ours.state != "claim"]
        return {kind: found.count(kind) for kind in FACTS}

    def claims(self):
        return sum(hold.ours.state == "claim" for hold in self.holds.values())


@pytest.mark.parametrize("splay", [0.0, 2.0])
@pytest.mark.parametrize("interval", [0.0, 5.0, 60.0])
def test_a_thousand_nodes_at_once_end_with_exactly_the_budget(interval, splay):
    world = World(7, ["new"] * 1000, interval=interval, splay=splay, delay=2.0).run(interval + 30)
    assert world.most["new"] == world.standing()["new"] == 50
    assert world.claims() == 0
    assert world.calm - START < interval + 15


def test_the_splay_keeps_most_nodes_of_a_wave_from_writing_at_all():
    at_once, spread = (World(7, ["new"] * 1000, interval=0, splay=splay, delay=0.1).run(60) for splay in (0, 2))
    assert spread.written < at_once.written / 3


@pytest.mark.parametrize("seed", range(2))
def test_of_several_kinds_none_exceeds_its_own_limit(seed):
    kinds = Random(seed).choices(list(FACTS), k=1000)
    world = World(seed, kinds, interval=10, delay=3.0, kill=0.02, skew=250).run(1200)
    assert world.most == world.standing() == {"new": 50, "lost": 50, "confirmed": 200, "sweep": 20}
    assert world.claims() == 0


def test_never_more_in_an_hour_than_that_limit_allows():
    limits = replace(WIDE, per_hour=0.03)
    world = World(3, Random(3).choices(["new", "lost"], k=1000), limits, interval=10).run(1800)
    assert sum(world.standing().values()) == 30


def small(seed):
    """A small world in which everything that can go wrong does."""
    dice = Random(seed)
    limits = replace(WIDE, budget=0.0, lost=0.0, confirmed=0.0, floor=dice.randint(0, 3))
    kinds = dice.choices(["new", "lost", "confirmed"], (8, 1, 1), k=dice.randint(1, 12))
    more = {"delay": dice.choice([0.1, 1.0, 8.0]), "interval": dice.choice([0.0, 1.0, 3.0, 20.0, 300.0])}
    return World(seed, kinds, limits, kill=dice.choice([0.0, 0.1, 0.4]), skew=dice.choice([0, 250]), **more)


def test_killed_between_any_steps_and_late_never_too_many_and_always_an_end():
    for seed in range(300):  # `make soak`: new ones
        assert not breaks(seed), seed


def breaks(seed):
    """What goes wrong in that small world."""
    world = small(seed)
    floor = world.settings.drain.floor
    world.run(KILLING + 2000)
    wanted = {kind: min(floor, list(world.kinds.values()).count(kind)) for kind in ("new", "lost", "confirmed")}
    if any(world.most.get(kind, 0) > floor for kind in FACTS):
        return f"too many held: {world.most}, and the floor is {floor}"
    if {kind: world.standing()[kind] for kind in wanted} != wanted:
        return f"{world.standing()} are held in the end, and not {wanted}"
    return f"{world.claims()} claims are left" if world.claims() else ""


def test_without_the_wait_or_the_order_some_would_be_too_many(monkeypatch):
    """The model would see it."""

    def exceeded(seeds):
        worlds = (small(seed).run(1000) for seed in range(seeds))
        return sum(max(world.most.values(), default=0) > world.settings.drain.floor for world in worlds)

    with monkeypatch.context() as patch:
        patch.setattr(budget, "SETTLE", 0.0)
        assert exceeded(500) > 0
    with monkeypatch.context() as patch:
        patch.setattr(budget, "_before", lambda hold, mine, now: hold.ours.state != "claim")
        assert exceeded(100) > 0
    assert exceeded(500) == 0


def test_a_claim_of_a_node_that_died_over_it_does_not_bar_others_for_ever():
    world = World(1, ["new"] * 40, replace(WIDE, floor=2, budget=0.0), interval=10)
    for number in range(2):
        world.kinds[f"dead{number}"] = "new"
        world.holds[f"dead{number}"] = Hold(f"dead{number}", replace(FACTS["new"], state="claim"), float(int(START)))
    assert world.run(900).standing()["new"] == 0
    assert world.run(3000).standing()["new"] == 2
    for number in range(2):  # they come back: too late
        world.skews[f"dead{number}"] = 0.0
        world.at(1, world.check, f"dead{number}")
    world.run(3300)
    assert (world.standing()["new"], world.most["new"], world.claims()) == (2, 2, 0)


def test_a_clock_of_slurmctld_that_is_set_back_alone_makes_no_node_too_many():
    for seed in range(200):
        world = World(seed, ["new"] * 30, replace(WIDE, floor=3, budget=0.0), interval=60, back=5.0, delay=0.1).run(500)
        assert world.most["new"] <= 3, seed
