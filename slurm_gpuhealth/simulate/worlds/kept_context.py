# Kept from whoever tunes the correlator: do not read on if that is you.
"""Where jobs are sent is no accident: partitions, QOS, constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("context", "kept", "nobody is to blame: an interactive queue on three nodes")
def interactive_queue(rng: Random) -> World:
    """On the three nodes of this partition shells end by Ctrl-C, by cancelling, by the limit of an hour, and with what
    the last command returned; on all three alike, and of all users. Half of them use the names of their programs."""
    site = Site(rng, nodes=18, days=28)
    site.logs = ""
    site.partitions = {"interactive": site.nodes[:3], "gpu": site.nodes[3:]}
    ended = ("interrupted", "quiet", "killed", "code-255", "segv")
    for app in mix(rng, 12, per_day=120):
        shell = App(app.user, app.name, app.per_day * 0.2, gpus=1, hours=0.5, failing=0.6, cancelled=0.15, limit=1.0)
        site.apps += [app, shell._replace(partition="interactive", fresh=rng.random() < 0.5, bugs=ended)]
    return site.run()


@world("context", "kept", "nobody is to blame: jobs on the two nodes of much memory run out of it")
def big_memory(rng: Random) -> World:
    """Four users' programs end in OUT_OF_MEMORY, or are killed, in half of their large runs on gn09 and gn10, alike;
    small runs of the same name complete elsewhere. Others' jobs on these two nodes are well."""
    site = Site(rng, nodes=10, days=30)
    site.logs = "class"
    site.apps = mix(rng, 8, per_day=90)
    for user in ("ivo", "ada", "otto", "pia"):
        small = App(user, "assembly", 9, gpus=1, hours=0.5, failing=0.03)
        large = small._replace(per_day=2.5, gpus=2, hours=1.2, failing=0.5, bugs=("host-oom", "killed", "quiet"))
        site.apps += [small, large._replace(constraint="bigmem", only=site.nodes[8:])]
    return site.run()


@world("context", "kept", "nobody is to blame: preemptible jobs are thrown out, killed, and requeued")
def preemptible_jobs(rng: Random) -> World:
    """Jobs of QOS scavenger fill what is idle, the last nodes; half of them are preempted, and a fifth dies of the
    signal that announces it. Jobs of normal QOS are well on the same nodes."""
    site = Site(rng, nodes=10, days=24)
    site.logs = ""
    site.packed = True
    site.apps = mix(rng, 8, per_day=70)
    for user in ("ivo", "ada", "otto", "pia"):
        filler = App(user, "mc", 14, gpus=4, hours=1.0, failing=0.2, preempted=0.4, qos="scavenger")
        site.apps.append(filler._replace(bugs=("killed", "aborted"), blames="preemption", only=site.nodes[5:]))
    return site.run()


@world("context", "kept", "nobody can be told to be to blame: the only node of a new model")
def lone_node_of_its_model(rng: Random) -> World:
    """Six users port their programs to the only node of a new partition, and half of the runs there fail without a
    word. The same programs complete on the old model; there is no second node to compare with, nor any sign of
    hardware, and those programs that are ported never fail there."""
    site = Site(rng, nodes=9, days=28)
    site.logs = ""
    site.partitions = {"gpu": site.nodes[:8], "gh": site.nodes[8:]}
    for nth, app in enumerate(mix(rng, 6, per_day=90)):
        port = app._replace(partition="gh", per_day=app.per_day * 0.15, gpus=min(app.gpus, 2), hours=0.3)
        site.apps += [app, port._replace(failing=0.9 if nth % 2 else 0.02, bugs=("quiet", "segv", "aborted"))]
    return site.run()


@world("context", "kept", "root's nightly check fails on one node, which is really slow, and kills some jobs")
def check_tells(rng: Random) -> World:
    """From day 10 the check fails on gn05 in most nights, and elsewhere once in fifty. Of users' jobs on gn05 a sixth
    more fails without a word than elsewhere."""
    site = Site(rng, nodes=10, days=30)
    site.logs = "class"
    site.apps = mix(rng, 9, per_day=90)
    for node in site.nodes:
        check = App("root", "nodecheck", 1, gpus=8, hours=0.1, failing=0.02, bugs=("slow-copy",), clock=3.0)
        site.apps.append(check._replace(only=(node,)))
    site.fault(Fault("gn05", ("slow-copy",), since=10, share=0.8, when=lambda app, _: app.user == "root"))
    site.fault(Fault("gn05", ("quiet", "killed"), since=10, share=0.16, when=lambda app, _: app.user != "root"))
    return site.run()
