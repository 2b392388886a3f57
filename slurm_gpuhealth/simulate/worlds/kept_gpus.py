# Kept from whoever tunes the correlator: do not read on if that is you.
"""One GPU of several; what a GPU reports, and what it means on this cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("one GPU", "kept", "a bad GPU of four, which Slurm calls 2 and the driver by its UUID")
def one_of_four_by_index(rng: Random) -> World:
    """Two fifths of the jobs with GPU 2 of gn03 die, some with an Xid 95 of gn03 in that second; jobs on its other GPUs
    are well."""
    site = Site(rng, nodes=10, days=24, gpus=4)
    site.jobs_name = "index"
    site.apps = mix(rng, 8, per_day=110, gpus=(1, 1, 2, 4))
    site.fault(Fault("gn03", ("ecc", "quiet", "quiet"), since=6, share=0.4, gpus=(2,), xids=("95",), seen=0.1))
    return site.run()


@world("one GPU", "kept", "GPU 6 is bad, and only jobs of several whole nodes use it")
def one_gpu_in_large_jobs(rng: Random) -> World:
    """A third of the jobs of two and three nodes with gn08 die of NCCL, one or two with an Xid 79 on GPU 6; without
    gn08, one in fifteen. Its small jobs, on the first GPUs, are well."""
    site = Site(rng, nodes=12, days=30)
    site.apps = [*mix(rng, 7, per_day=60, gpus=(1, 2)), *mix(rng, 6, per_day=24, gpus=(8,), nodes=(2, 3), hours=2)]
    site.fault(Fault("gn08", ("nccl", "nccl", "killed"), since=5, share=0.35, gpus=(6,), xids=("79",), seen=0.06))
    return site.run()


@world("one GPU", "kept", "nobody is to blame: one user's fragile server is tied to one node, and gets its first GPU")
def server_tied_to_a_node(rng: Random) -> World:
    """One user's server, sent to gn04 by name, dies in half of its runs without a word, mostly on GPU 0. It runs
    nowhere else; everybody else's jobs on gn04, on that GPU too, are well."""
    site = Site(rng, nodes=6, days=30)
    site.logs = ""
    site.apps = mix(rng, 8, per_day=60)
    server = App("ivo", "serve", 9, gpus=1, hours=0.6, failing=0.5, bugs=("quiet", "killed", "segv"))
    site.apps.append(server._replace(only=("gn04",)))
    return site.run()


@world("contradiction", "kept", "Slurm and the driver count GPUs from different ends, and both say a number")
def counted_from_both_ends(rng: Random) -> World:
    """Jobs on what Slurm calls GPU 1 of gn06 die of an uncorrectable error, each at the second of an Xid 48 of GPU 6:
    always this pair."""
    site = Site(rng, nodes=8, days=28)
    site.jobs_name = site.events_name = "index"
    site.reversed = True
    site.apps = mix(rng, 9, per_day=90, gpus=(1, 1, 2, 4))
    site.fault(Fault("gn06", ("ecc", "ecc", "quiet"), since=7, share=0.25, gpus=(1,), xids=("48",)))
    return site.run()


@world("contradiction", "kept", "nobody is to blame: a neighbour's program leaves Xids 31 on shared nodes, all day")
def neighbours_xids(rng: Random) -> World:
    """One user's program fails everywhere with illegal accesses and Xids 31 on its own GPU. Neighbours' jobs that fail
    in the same minutes do so of their own errors, as often as elsewhere."""
    site = Site(rng, nodes=5, days=28)
    site.packed = True
    site.apps = mix(rng, 8, per_day=80, gpus=(1, 1, 2), failing=0.12)
    site.apps.append(App("ivo", "kernelbench", 30, gpus=1, hours=0.2, failing=0.6, bugs=("illegal",)))
    return site.run()


@world("harmless Xids", "kept", "one model of GPU logs Xid 119 for nothing; on one such node it kills")
def xid_119_of_one_model(rng: Random) -> World:
    """On all six nodes of the model jobs run on through 240 Xids 119. On gn14 such an Xid ends the job a few seconds
    later, and it does so every day."""
    site = Site(rng, nodes=14, days=28)
    model = site.nodes[8:]
    site.noise("119", 240, model)
    for nth, app in enumerate(mix(rng, 10, per_day=140)):
        site.apps.append(app._replace(constraint="a30", only=model) if nth % 2 else app._replace(only=site.nodes[:8]))
    site.fault(Fault("gn14", ("quiet", "lost"), since=8, per_day=2.0, xids=("119",)))
    return site.run()


@world("harmless Xids", "kept", "nobody is to blame: on a maintenance day an admin injects Xids on drained nodes")
def xids_injected_by_an_admin(rng: Random) -> World:
    """All 12 nodes are drained for day 10; that day each reports Xids 79, 48 and 95 while no job runs there, and passes
    level 3 in the evening. Jobs are well before and after."""
    site = Site(rng, nodes=12, days=24)
    site.logs = "class"
    site.apps = mix(rng, 9, per_day=120)
    for node in site.nodes:
        site.away[node] = (9.5, 10.9)
        site.event(9.5, node, "drain", "drain", reason="driver update", user="root")
        for code in ("79", "48", "95"):
            site.event(10.4 + rng.uniform(0, 0.1), node, "xid", code, rng.randrange(8))
        site.event(10.8 + rng.uniform(0, 0.05), node, "test", "dcgm", level=3, passed=True)
    return site.run()


@world("silent corrupter", "kept", "one GPU makes the programs of all users fail with illegal accesses and Xids 31")
def corrupter_of_one_gpu(rng: Random) -> World:
    """On GPU 1 of gn02 a third of the jobs die of illegal access, cuDNN or NaN, of eight users; on no other GPU does
    more than one user have this."""
    site = Site(rng, nodes=8, days=28)
    site.apps = mix(rng, 8, per_day=100)
    shows = ("illegal", "illegal", "cudnn", "nan")
    site.fault(Fault("gn02", shows, since=8, share=0.33, gpus=(1,), xids=("31",), seen=0.4))
    return site.run()


@world("silent corrupter", "kept", "nobody is to blame: for two days a shared module breaks every second program")
def broken_module(rng: Random) -> World:
    """From day 9 to 11 half of all users' jobs die of cuDNN and illegal access, on all nodes; most run on the first
    nodes, as Slurm fills these first."""
    site = Site(rng, nodes=9, days=24)
    site.packed = True
    for app in mix(rng, 10, per_day=110):
        broken = app._replace(failing=0.5, bugs=("cudnn", "illegal"), blames="module")
        site.apps += [app._replace(last=9.0), broken._replace(first=9.0, last=11.0), app._replace(first=11.0)]
    return site.run()
