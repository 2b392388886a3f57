"""What TIMEOUT and CANCELLED hide, and nodes that are bad for a while, for some jobs, or in old records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("ended", "tune", "from day 5 every job of every user hangs on one node, until its time limit")
def hangs_from_day_five(rng: Random) -> World:
    """From day 5 no job completes on gn03: all end by their limit, or by their users. Elsewhere hardly any does."""
    site = Site(rng, nodes=8, days=21)
    site.logs = site.jobs_name = ""
    site.apps = mix(rng, 8, per_day=70, hours=1.0, limit=6.0)
    site.fault(Fault("gn03", ("hang",), since=5, share=1.0))
    return site.run()


@world("ended", "tune", "users cancel their jobs on one node, where a third of them makes no progress")
def cancelled_on_one_node(rng: Random) -> World:
    """Users cancel three in ten of their jobs on gn07, and two in a hundred elsewhere."""
    site = Site(rng, nodes=9, days=28)
    site.logs = ""
    site.cancels = 0.9
    site.apps = mix(rng, 10, per_day=90)
    site.fault(Fault("gn07", ("hang",), since=6, share=0.33))
    return site.run()


@world("ended", "tune", "nobody is to blame: one user's limits are always too short")
def limits_too_short(rng: Random) -> World:
    """Half of one user's jobs run into their limit of two hours, on every node; by packing, most of them on gn01 and
    gn02."""
    site = Site(rng, nodes=8, days=28)
    site.packed = True
    site.apps = mix(rng, 8, per_day=60)
    site.apps.append(App("ivo", "md", 16, gpus=4, hours=2.0, limit=2.0, failing=0.05))
    return site.run()


@world("when and how many", "tune", "a bad node is repaired on day 12, and bad again from day 24")
def repaired_and_back(rng: Random) -> World:
    """gn05 kills a third of its jobs until its repair on day 12. It is well for twelve days, then as before."""
    site = Site(rng, nodes=10, days=40)
    site.apps = mix(rng, 10, per_day=110)
    site.fault(Fault("gn05", ("quiet", "segv"), since=3, until=12, share=0.3))
    site.event(12, "gn05", "repair", "admin")
    site.fault(Fault("gn05", ("quiet", "segv"), since=24, share=0.3))
    return site.run()


@world("when and how many", "tune", "a node is bad only in jobs of four and more nodes")
def only_large_jobs(rng: Random) -> World:
    """A third of the large jobs with gn11 die of NCCL, and hardly any without it; small jobs on gn11 are well."""
    site = Site(rng, nodes=16, days=35)
    site.apps = [*mix(rng, 8, per_day=60, gpus=(1, 2, 4)), *mix(rng, 7, per_day=26, gpus=(8,), nodes=(4, 6), hours=2)]
    site.fault(Fault("gn11", ("nccl", "nccl", "aborted"), since=4, share=0.33, when=lambda app, _: app.nodes >= 4))
    return site.run()


@world("old history", "tune", "sacct alone, no logs, no GPUs: a new node is bad from its first day, day 10")
def sacct_alone(rng: Random) -> World:
    """gn08 comes on day 10, and from then on a quarter of its jobs fail, most within minutes, of all users; on the
    seven old nodes one in twelve does."""
    site = Site(rng, nodes=8, days=40)
    site.jobs_name = site.events_name = site.logs = ""
    site.apps = mix(rng, 10, per_day=80)
    site.away = {"gn08": (0, 10)}
    site.fault(Fault("gn08", ("quiet", "killed", "segv"), since=10, share=0.2, early=True))
    return site.run()
