"""What nodes share: power, a switch. And what only looks so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import Fault, Incident, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH, world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("place", "tune", "a rack browns out: each time two to four of its nodes lose a GPU with an Xid 79")
def rack_brown_outs(rng: Random) -> World:
    """Seven times, two to four of rack r2's eight nodes report an Xid 79 in the same seconds, each time others; no node
    of other racks does. It is the rack's power."""
    site = Site(rng, nodes=32, days=30)
    rack = site.racks(8)[1]
    site.bad_places = ("rack r2",)
    site.apps = mix(rng, 14, per_day=260)
    for _ in range(7):
        nodes = tuple(rng.sample(rack, rng.randint(2, 4)))
        site.incidents.append(Incident(EPOCH + rng.uniform(2, 29) * DAY, nodes, "lost", "power", xids=("79",)))
    return site.run()


@world("place", "tune", "a leaf switch flaps: jobs of several nodes below it die of NCCL")
def leaf_switch_flaps(rng: Random) -> World:
    """Five times, the jobs of several nodes under leaf2 die at once of watchdogs; those on one node run on. Most nodes
    below it tell of their port in that second."""
    site = Site(rng, nodes=24, days=28)
    site.logs = "class"
    site.leaves = {f"leaf{nth}": site.nodes[nth * 8 : nth * 8 + 8] for nth in range(3)}
    site.bad_places = ("leaf2",)
    site.apps = [*mix(rng, 8, per_day=60), *mix(rng, 6, per_day=24, gpus=(8,), nodes=(2, 4), hours=4)]
    for _ in range(5):
        day = rng.uniform(2, 27)
        for node in rng.sample(site.leaves["leaf2"], 5):
            site.event(day, node, "ib", "port-down")
        flap = Incident(EPOCH + day * DAY, site.leaves["leaf2"], "nccl", "leaf", of=lambda app: app.nodes > 1)
        site.incidents.append(flap)
    return site.run()


@world("place", "tune", "seven nodes in all racks are really bad, each by itself")
def seven_bad_nodes(rng: Random) -> World:
    """On each of the seven one GPU kills its job about every other day, most times with an Xid. They share no rack, and
    no moment."""
    site = Site(rng, nodes=42, days=35)
    racks = site.racks(6)
    site.apps = mix(rng, 14, per_day=330)
    for rack, code in zip(racks, ("79", "48", "95", "79", "119", "48", "79")):
        shows = ("ecc", "quiet") if code in ("48", "95") else ("lost", "quiet")
        node, gpu = rng.choice(rack), rng.randrange(3)
        site.fault(Fault(node, shows, since=rng.uniform(1, 12), per_day=2.0, gpus=(gpu,), xids=(code,), seen=0.6))
    return site.run()


@world("lost nodes", "tune", "slurmctld loses one node again and again")
def lost_again_and_again(rng: Random) -> World:
    """NODE_FAIL of gn06 every two or three days, whoever's jobs run there; no other node is lost."""
    site = Site(rng, nodes=12, days=28)
    site.apps = mix(rng, 9, per_day=120)
    site.fault(Fault("gn06", ("node-fail",), since=6, per_day=0.5))
    return site.run()


@world("lost nodes", "tune", "nobody is to blame: after a failover the new controller takes all nodes for lost")
def controller_failover(rng: Random) -> World:
    """On two nights, two thirds of all running jobs end as NODE_FAIL in one minute, all over the cluster."""
    site = Site(rng, nodes=16, days=21)
    site.apps = [*mix(rng, 9, per_day=110, hours=3), *mix(rng, 3, per_day=6, gpus=(8,), nodes=(2, 4), hours=6)]
    for day in (6.1, 13.9):
        site.incidents.append(Incident(EPOCH + day * DAY, site.nodes, "node-fail", "controller", share=0.65))
    return site.run()
