# Kept from whoever tunes the correlator: do not read on if that is you.
"""What nodes share: power, a network. And what only looks so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import Fault, Incident, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH, world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("place", "kept", "a PDU drops out: two to four of its six nodes are lost at once")
def pdu_drops_out(rng: Random) -> World:
    """Six times slurmctld loses two to four of the six nodes of PDU p2 in one minute, with Xids 79 on some; each of the
    six at some time. No other node is ever lost."""
    site = Site(rng, nodes=24, days=32)
    nodes = site.racks(6, "pdu")[1]
    site.bad_places = ("pdu p2",)
    site.apps = mix(rng, 12, per_day=240)
    for _ in range(6):
        when, some = EPOCH + rng.uniform(3, 31) * DAY, rng.sample(nodes, rng.randint(2, 4))
        site.incidents.append(Incident(when, tuple(some), "node-fail", "power"))
        site.incidents.append(Incident(when, tuple(some[:2]), "node-fail", "power", xids=("79",)))
    return site.run()


@world("place", "kept", "one node of a chassis is bad; jobs of two nodes get its good neighbour with it")
def chassis_neighbour(rng: Random) -> World:
    """Two-node jobs always get both nodes of a chassis, so gn05 fails as often as gn06 in these. But jobs on gn06 alone
    die as well, a few with Xids 79, and those on gn05 alone do not."""
    site = Site(rng, nodes=12, days=28)
    pairs = site.racks(2, "chassis")
    site.apps = mix(rng, 8, per_day=70, gpus=(1, 2, 4))
    for pair in pairs:
        twos = mix(rng, 4, per_day=2.5, gpus=(8,), nodes=(2,), hours=2.0)
        site.apps += [one._replace(only=pair) for one in twos]
    site.fault(Fault("gn06", ("nccl", "lost", "quiet"), since=6, share=0.3, xids=("79",), seen=0.1))
    return site.run()


@world("place", "kept", "the storage router of a rack fails for an hour, eight times")
def rack_without_storage(rng: Random) -> World:
    """In eight spells of an hour jobs on all eight nodes of rack r3 die of I/O errors, or without a word, and nobody
    else's do."""
    site = Site(rng, nodes=32, days=28)
    rack = site.racks(8)[2]
    site.bad_places = ("rack r3",)
    site.apps = mix(rng, 12, per_day=330)
    for _ in range(8):
        start = EPOCH + rng.uniform(2, 27) * DAY
        for minute in (0, 15, 30, 45):
            when = start + minute * 60
            site.incidents.append(Incident(when, rack, "storage", "storage", share=0.3))
            site.incidents.append(Incident(when, rack, "quiet", "storage", share=0.15))
    return site.run()


@world("lost nodes", "kept", "a power supply gives in when all GPUs of its node are busy")
def weak_power_supply(rng: Random) -> World:
    """gn04 is lost in a third of its jobs of eight GPUs, which Slurm requeues, and in no smaller ones; no other node is
    ever lost."""
    site = Site(rng, nodes=10, days=28)
    site.logs = ""
    site.apps = mix(rng, 8, per_day=90, gpus=(1, 2, 4, 8, 8))
    site.fault(Fault("gn04", ("node-fail",), since=7, share=0.35, when=lambda app, _: app.gpus == 8))
    return site.run()


@world("lost nodes", "kept", "nobody is to blame: twice the network of ten nodes is gone for minutes")
def network_outage(rng: Random) -> World:
    """On two days ten of twenty nodes are lost within a minute, some of them both times, and come back by themselves.
    Between these days no node is lost."""
    site = Site(rng, nodes=20, days=24)
    site.logs = ""
    site.named = False
    site.apps = [*mix(rng, 10, per_day=150, hours=2.5), *mix(rng, 4, per_day=8, gpus=(8,), nodes=(2, 4), hours=5)]
    for day in (5.4, 12.6):
        nodes = tuple(rng.sample(site.nodes, 10))
        site.incidents.append(Incident(EPOCH + day * DAY, nodes, "node-fail", "network", share=0.9))
    return site.run()
