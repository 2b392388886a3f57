"""More partitions, queues and limits: where nearly all worlds of real sites are innocent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, Incident, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import DAY, EPOCH, world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


def _shells(rng: Random, users: int, per_day: float, **more: object) -> list[App]:
    """Interactive shells: they end with the last command's exit code, with their limit, or cancelled."""
    shells = mix(rng, users, per_day=per_day, gpus=(1,), hours=1.5, failing=0.45, limit=4.0, cancelled=0.2)
    return [one._replace(name="bash", fresh=True, bugs=("code-255", "quiet"), **more) for one in shells]  # type: ignore[arg-type]


@world("context", "tune", "nobody is to blame: one node for interactive shells, which end with any exit code")
def shells_on_one_node(rng: Random) -> World:
    """Each shell on gn01 ends as its user's last command did; no other node takes shells."""
    site = Site(rng, nodes=10, days=28)
    site.logs = ""
    site.partitions = {"interactive": site.nodes[:1], "gpu": site.nodes[1:]}
    site.apps = [*mix(rng, 10, per_day=80), *_shells(rng, 10, 24, partition="interactive", qos="interactive")]
    return site.run()


@world("context", "tune", "nobody is to blame: three nodes for interactive shells, hanging until their limits")
def shells_until_the_limit(rng: Random) -> World:
    """Most shells on gn01 to gn03 end by their limit of four hours, or cancelled; batch jobs hardly ever do."""
    site = Site(rng, nodes=12, days=28)
    site.logs = ""
    site.partitions = {"interactive": site.nodes[:3], "gpu": site.nodes[3:]}
    shells = [one._replace(hours=5.0, failing=0.15) for one in _shells(rng, 10, 24, partition="interactive")]
    site.apps = [*mix(rng, 10, per_day=80), *shells]
    return site.run()


@world("context", "tune", "nobody is to blame: a partition of one node, where a group tries out broken code")
def partition_of_one(rng: Random) -> World:
    """The group of four runs on gn08 alone, and half of its jobs fail with tracebacks or none."""
    site = Site(rng, nodes=8, days=28)
    site.partitions = {"gpu": site.nodes[:7], "own": site.nodes[7:]}
    own = mix(rng, 4, per_day=14, gpus=(1, 2, 8), failing=0.4, hours=0.7)
    site.apps = [*mix(rng, 8, per_day=70), *(one._replace(partition="own", account="own") for one in own)]
    return site.run()


@world("context", "tune", "one node has a partition of its own, and is bad: programs that complete elsewhere die there")
def bad_partition_of_one(rng: Random) -> World:
    """The same users run the same programs in both partitions; on gn08 half of the runs die without a word."""
    site = Site(rng, nodes=8, days=28)
    site.logs = "class"
    site.partitions = {"gpu": site.nodes[:7], "new": site.nodes[7:]}
    apps = mix(rng, 8, per_day=70)
    site.apps = [*apps, *(one._replace(partition="new", per_day=one.per_day / 6) for one in apps)]
    site.fault(Fault("gn08", ("quiet", "killed"), since=6, share=0.5))
    return site.run()


@world("context", "tune", "nobody is to blame: the preemptible QOS fails more, on the nodes that it gets")
def preemptible(rng: Random) -> World:
    """What runs with QOS scavenge is preempted, cancelled and broken; packing gives it the last nodes."""
    site = Site(rng, nodes=10, days=28)
    site.packed = True
    site.logs = "class"
    scavenge = mix(rng, 6, per_day=60, gpus=(1, 2), failing=0.25, hours=2)
    scavenge = [one._replace(qos="scavenge", cancelled=0.15, preempted=0.3, only=site.nodes[6:]) for one in scavenge]
    site.apps = [*mix(rng, 9, per_day=70), *scavenge]
    return site.run()


@world("silent", "tune", "a third of the jobs on one node die with an exit code; programs fail anyway")
def silent_among_failing(rng: Random) -> World:
    """Programs fail in a quarter of their runs everywhere, and in half on gn06."""
    site = Site(rng, nodes=10, days=28)
    site.logs = "class"
    site.apps = mix(rng, 10, per_day=110, failing=0.22)
    site.fault(Fault("gn06", ("quiet", "code-255"), since=5, share=0.33))
    return site.run()


@world("silent", "tune", "nobody is to blame: two users' programs fail at times in bursts, wherever they are just then")
def bursts(rng: Random) -> World:
    """Two users' arrays crash as a whole, four times in the month, on the nodes that were free."""
    site = Site(rng, nodes=8, days=28)
    site.logs = ""
    site.packed = True
    site.apps = mix(rng, 8, per_day=60)
    for user in ("ivo", "lea"):
        for day in (3, 9, 16, 23):
            crash = App(user, f"grid{day}", 6, gpus=1, hours=0.2, failing=0.95, bugs=("quiet", "segv"), array=6)
            site.apps.append(crash._replace(first=day, last=day + 1.0))
    return site.run()


@world("one GPU", "tune", "one GPU hangs jobs until their limit; the other seven are well")
def one_gpu_hangs(rng: Random) -> World:
    """Four in ten of the jobs that hold GPU 2 of gn05 end by their limit; of those that hold others hardly any."""
    site = Site(rng, nodes=9, days=28)
    site.logs = ""
    site.apps = mix(rng, 9, per_day=110, gpus=(1, 1, 2), hours=1.0, limit=8.0)
    site.fault(Fault("gn05", ("hang",), since=6, share=0.45, gpus=(2,)))
    return site.run()


@world("place", "tune", "one PDU feeds two half racks; it drops three times, and one of its nodes is bad besides")
def pdu_and_a_bad_node(rng: Random) -> World:
    """Thrice, three or four of the PDU's six nodes report an Xid 79 at once; gn02 does so again and again, alone."""
    site = Site(rng, nodes=24, days=30)
    pdu = site.racks(6, "pdu")[0]
    site.bad_places = ("pdu p1",)
    site.apps = mix(rng, 12, per_day=200)
    for _ in range(3):
        nodes = tuple(rng.sample(pdu, rng.randint(3, 4)))
        site.incidents.append(Incident(EPOCH + rng.uniform(2, 29) * DAY, nodes, "lost", "power", xids=("79",)))
    site.fault(Fault("gn02", ("lost",), since=6, per_day=1.5, gpus=(1,), xids=("79",)))
    return site.run()


@world(
    "harmless Xids",
    "tune",
    "nobody is to blame: contained ECC errors that jobs run on through",
)
def contained_errors_are_usual(rng: Random) -> World:
    """200 Xids 63 and 150 Xids 94 on jobs that complete, most of them on some busy GPUs; no job dies of them."""
    site = Site(rng, nodes=10, days=28)
    site.logs = "class"
    site.apps = mix(rng, 10, per_day=110)
    site.noise("63", 200, site.nodes[:5])
    site.noise("94", 150)
    return site.run()


@world("harmless Xids", "tune", "nobody is to blame: the GPUs of the events are not named, nor those of the jobs")
def harmless_without_names(rng: Random) -> World:
    """250 Xids 119 on nodes whose jobs complete; nobody names GPUs."""
    site = Site(rng, nodes=8, days=28)
    site.logs = site.jobs_name = site.events_name = ""
    site.apps = mix(rng, 8, per_day=80)
    site.noise("119", 250)
    return site.run()


@world(
    "harmless Xids",
    "tune",
    "nobody is to blame: a harmless Xid, and GPUs in another order than Slurm's",
)
def harmless_by_another_index(rng: Random) -> World:
    """250 Xids 119, named by an index that is not Slurm's; the jobs that had them complete."""
    site = Site(rng, nodes=8, days=28)
    site.jobs_name = site.events_name = "index"
    site.reversed = True
    site.apps = mix(rng, 8, per_day=80)
    site.noise("119", 250)
    return site.run()


@world("place", "tune", "nobody knows the racks: thrice several nodes lose a GPU in the same seconds")
def unknown_place(rng: Random) -> World:
    """Three times, four nodes report an Xid 79 within seconds of each other, and never else."""
    site = Site(rng, nodes=20, days=28)
    site.apps = mix(rng, 12, per_day=160)
    for _ in range(3):
        nodes = tuple(rng.sample(site.nodes[:8], 4))
        site.incidents.append(Incident(EPOCH + rng.uniform(2, 27) * DAY, nodes, "lost", "power", xids=("79",)))
    return site.run()
