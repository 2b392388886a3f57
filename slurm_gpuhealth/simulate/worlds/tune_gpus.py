"""One GPU of several; what a GPU reports, and what it means on this cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("one GPU", "tune", "GPU 3 of 8 kills a third of the jobs that hold it, and says nothing")
def one_gpu_of_eight(rng: Random) -> World:
    """A third of the jobs with this GPU die without a word, of all users and sizes; jobs beside it complete."""
    site = Site(rng, nodes=8, days=28)
    site.apps = mix(rng, 9, per_day=110)
    site.fault(Fault("gn03", ("quiet", "killed", "segv"), since=6, share=0.3, gpus=(3,)))
    return site.run()


@world("one GPU", "tune", "the GPU that Slurm gives last is bad: only large jobs and busy hours use it")
def last_gpu_given(rng: Random) -> World:
    """Two in five jobs of all eight GPUs die on gn05, and hardly any elsewhere; its many small jobs, on the first GPUs,
    are well. Of a third of the jobs nobody knows the GPUs."""
    site = Site(rng, nodes=6, days=30)
    site.apps = [*mix(rng, 6, per_day=70, gpus=(1, 1, 2)), *mix(rng, 5, per_day=20, gpus=(8,), hours=1.0)]
    site.logs = "class"
    site.unnamed = 0.33
    site.fault(Fault("gn05", ("quiet", "aborted", "illegal"), since=5, share=0.4, gpus=(7,)))
    return site.run()


@world("one GPU", "tune", "nobody is to blame: broken trials run on the first GPU of each node")
def first_gpu_gets_the_trials(rng: Random) -> World:
    """GPU 0 has most of the failures on every node alike, since Slurm gives it first to the short trials of three
    users; their programs fail wherever they run."""
    site = Site(rng, nodes=6, days=24)
    site.logs = ""
    site.apps = mix(rng, 5, per_day=20, gpus=(4, 8), failing=0.04)
    site.apps += mix(rng, 3, per_day=60, gpus=(1,), failing=0.45, hours=0.3)
    return site.run()


@world("contradiction", "tune", "jobs take GPU 0 without being given it: its Xid 48 is not on a GPU of theirs")
def ecc_on_a_gpu_of_nobody(rng: Random) -> World:
    """No cgroup keeps programs from the first GPU. Their logs show an uncorrectable error at the second of an Xid 48 on
    gn02's GPU 0, whichever GPU Slurm gave them."""
    site = Site(rng, nodes=8, days=21)
    site.apps = mix(rng, 8, per_day=80, gpus=(1, 1, 2, 4))
    site.fault(Fault("gn02", ("ecc",), since=8, share=0.12, gpus=(0,), everyone=True, xids=("48",)))
    return site.run()


@world("harmless Xids", "tune", "NVLink errors that no job minds, hundreds of them, and one GPU that is lost")
def xid_74_is_harmless_here(rng: Random) -> World:
    """Jobs run on through 400 Xids 74 on all nodes, and complete. On gn07 a GPU falls off the bus, and its jobs end
    with it, four times or more."""
    site = Site(rng, nodes=12, days=28)
    site.apps = mix(rng, 9, per_day=120)
    site.noise("74", 400)
    site.fault(Fault("gn07", ("lost",), since=9, per_day=3.0, gpus=(6,), xids=("79",)))
    return site.run()


@world("harmless Xids", "tune", "nobody is to blame: a code that jobs run on through, among users' own failures")
def xid_119_is_harmless_here(rng: Random) -> World:
    """300 Xids 119, most of them on the busiest four nodes; the jobs that had them complete. Programs fail as often
    there as elsewhere."""
    site = Site(rng, nodes=10, days=28)
    site.logs = "class"
    site.apps = mix(rng, 10, per_day=110, failing=0.14)
    site.noise("119", 220, site.nodes[:4])
    site.noise("119", 80)
    return site.run()


@world("silent corrupter", "tune", "NaN assertions and cuDNN errors with a traceback, of all users, on one node")
def corrupter(rng: Random) -> World:
    """A fifth of the jobs on gn04 die of NaN, cuDNN or illegal access. Each log looks like the program's, but nine
    users' programs do this there, and hardly anywhere else. A test of level 3 that passes on day 12 does not change
    it."""
    site = Site(rng, nodes=10, days=28)
    site.apps = [one._replace(bugs=(*one.bugs, "nan")) for one in mix(rng, 9, per_day=110)]
    site.event(12, "gn04", "test", "dcgm", level=3, passed=True)
    site.fault(Fault("gn04", ("nan", "nan", "cudnn", "illegal"), since=7, share=0.17))
    return site.run()


@world("silent corrupter", "tune", "nobody is to blame: one program's NaNs, on all nodes")
def one_program_of_nans(rng: Random) -> World:
    """One user's program finds NaN in half of its runs, on whichever node; the other users' runs there are well."""
    site = Site(rng, nodes=8, days=28)
    site.packed = True
    site.apps = mix(rng, 7, per_day=70)
    site.apps.append(App("ivo", "vae", 14, gpus=8, hours=0.8, failing=0.5, bugs=("nan", "nan", "illegal", "cudnn")))
    return site.run()
