"""A node that says nothing: its jobs die with an exit code. And users whose jobs look as if it were so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("silent", "tune", "a quarter of a node's jobs die with nothing but an exit code")
def silent_quarter(rng: Random) -> World:
    """On gn09 twelve users' jobs fail four times as often as the same users' jobs on the eleven other nodes."""
    site = Site(rng, nodes=12, days=28)
    site.apps = mix(rng, 12, per_day=130)
    site.fault(Fault("gn09", ("quiet", "code-255", "killed"), since=4, share=0.25))
    return site.run()


@world("silent", "tune", "the same, and one user submits 60 % of all jobs")
def silent_quarter_of_a_heavy_user(rng: Random) -> World:
    """Most failures on gn02 are those of one user. The same programs complete on the other nodes, and the other users
    fail more on gn02 as well."""
    site = Site(rng, nodes=8, days=28)
    site.apps = mix(rng, 8, per_day=90, heavy=0.6)
    site.fault(Fault("gn02", ("quiet", "killed"), since=3, share=0.25))
    return site.run()


@world("silent", "tune", "the cluster has two users; 54 failures where 20 were expected")
def silent_for_two_users(rng: Random) -> World:
    """Both users' programs fail on gn04 two or three times as often as on the five other nodes, for four weeks."""
    site = Site(rng, nodes=6, days=28)
    site.logs = "class"
    site.apps = mix(rng, 2, per_day=48, failing=0.08)
    site.fault(Fault("gn04", ("quiet", "code-255"), share=0.17))
    return site.run()


@world("silent", "tune", "nobody is to blame: packing sends one user's broken sweeps to one node")
def sweep_by_packing(rng: Random) -> World:
    """Slurm fills gn01 first, so the small sweeps of one user crash there, or on gn02 while gn01 is full, alike. The
    user's large runs of the same name complete. Other users' jobs are as well on gn01 as elsewhere."""
    site = Site(rng, nodes=8, days=28)
    site.packed = True
    site.apps = mix(rng, 8, per_day=45)
    sweep = App("ivo", "train", 1.0, gpus=1, hours=0.1, failing=0.9, bugs=("quiet", "code-255", "segv"), array=8)
    site.apps += [sweep, App("ivo", "train", 7, gpus=8, hours=1.5, failing=0.03)]
    return site.run()


@world("no bad node", "tune", "nobody is to blame: half of the users have a bad fortnight")
def storm_of_bugs(rng: Random) -> World:
    """From day 8 to 22 six of twelve users' programs fail in 60 % of their runs, on all nodes alike."""
    site = Site(rng, nodes=12, days=32)
    site.logs = ""
    apps = mix(rng, 12, per_day=130)
    worst = set(rng.sample(sorted({app.user for app in apps}), 6))
    for app in apps:
        if app.user in worst:
            storm = app._replace(failing=0.6, bugs=(*app.bugs, "quiet", "code-255"))
            site.apps += [app._replace(last=8.0), storm._replace(first=8.0, last=22.0), app._replace(first=22.0)]
        else:
            site.apps.append(app)
    return site.run()


@world("no bad node", "tune", "nobody is to blame: a small cluster where a third of all jobs fail, all along")
def failing_is_usual(rng: Random) -> World:
    """Four nodes, thirty users' first attempts at everything: a third of all runs fail, on each node alike, and no logs
    are kept."""
    site = Site(rng, nodes=4, days=40)
    site.logs = ""
    site.packed = True
    site.apps = mix(rng, 20, per_day=70, failing=0.32, hours=0.7)
    site.apps = [one._replace(bugs=(*one.bugs, "quiet", "killed")) for one in site.apps]
    return site.run()
