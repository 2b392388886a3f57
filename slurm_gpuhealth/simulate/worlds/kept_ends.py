# Kept from whoever tunes the correlator: do not read on if that is you.
"""What TIMEOUT and CANCELLED hide, and nodes that are bad for a while, for some jobs, or in old records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, Incident, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH, world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("ended", "kept", "a throttled node takes thrice as long, so that its jobs run into their limits")
def slow_node(rng: Random) -> World:
    """From day 7 jobs on gn02 take three times as long as the same programs elsewhere, and half of them end by their
    limit; elsewhere one in fifty does."""
    site = Site(rng, nodes=9, days=28)
    site.apps = [one._replace(limit=one.hours * 3.5) for one in mix(rng, 9, per_day=80, hours=1.2)]
    site.fault(Fault("gn02", ("limit",), since=7, slow=3.0))
    return site.run()


@world("ended", "kept", "two fifths of a node's jobs hang; half of these their users cancel; sacct alone")
def some_hang(rng: Random) -> World:
    """On gn08, without logs or GPUs, two fifths of all jobs end by their limit or are cancelled, of all users; on the
    other nodes one in thirty."""
    site = Site(rng, nodes=12, days=28)
    site.jobs_name = site.events_name = site.logs = ""
    site.cancels = 0.5
    site.apps = mix(rng, 10, per_day=110, hours=1.0, limit=8.0)
    site.fault(Fault("gn08", ("hang",), since=5, share=0.4))
    return site.run()


@world("ended", "kept", "nobody is to blame: admins cancel all jobs of a rack each week, and a reservation ends")
def maintenance(rng: Random) -> World:
    """On four Mondays an admin cancels all jobs on the same four nodes, within seconds; on day 20 a reservation of four
    other nodes ends, and all jobs in it with TIMEOUT."""
    site = Site(rng, nodes=12, days=30)
    site.logs = ""
    site.apps = mix(rng, 9, per_day=110, hours=2.5)
    site.reserved = {"deadline": (site.nodes[8:], 6, 20)}
    for user in ("ivo", "ada"):
        rush = App(user, "rush", 24, gpus=4, hours=6.0, reservation="deadline", only=site.nodes[8:], limit=48.0)
        site.apps.append(rush._replace(first=6.0, last=20.0))
    for day in (3.35, 10.35, 17.35, 24.35):
        site.incidents.append(Incident(EPOCH + day * DAY, site.nodes[:4], "cancelled", "admin"))
    ends = Incident(EPOCH + 20 * DAY, site.nodes[8:], "limit", "admin", of=lambda app: app.reservation != "")
    site.incidents.append(ends)
    return site.run()


@world("when and how many", "kept", "a node is bad by day, when its room is warm")
def bad_by_day(rng: Random) -> World:
    """Nearly half of the jobs that start on gn04 between 10 and 18 o'clock fail, of all users, and few of those that
    start at other hours; on other nodes the hour makes no difference."""
    site = Site(rng, nodes=8, days=35)
    site.logs = "class"
    site.apps = mix(rng, 9, per_day=90)
    warm = Fault("gn04", ("quiet", "segv", "illegal"), since=6, share=0.4)
    site.fault(warm._replace(when=lambda _, start: 10 <= (start - EPOCH) % DAY / 3600 < 18))
    return site.run()


@world("old history", "kept", "requeued jobs of several nodes, and nobody says which node was lost")
def requeued(rng: Random) -> World:
    """sacct alone: jobs of two to four nodes end as NODE_FAIL and are requeued. gn10 is in all of them, no other node
    in more than half; small jobs on gn10 are lost as well."""
    site = Site(rng, nodes=14, days=40)
    site.jobs_name = site.events_name = site.logs = ""
    site.named = False
    site.apps = [*mix(rng, 8, per_day=70), *mix(rng, 6, per_day=22, gpus=(8,), nodes=(2, 3, 4), hours=3)]
    site.fault(Fault("gn10", ("node-fail",), since=9, per_day=0.9))
    return site.run()
