# Kept from whoever tunes the correlator: do not read on if that is you.
"""A node that says nothing: its jobs die with an exit code. And users whose jobs look as if it were so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("silent", "kept", "only one user ever runs on the bad node, and on five good ones too")
def only_one_user_there(rng: Random) -> World:
    """The user's programs fail in a quarter of their runs on gn11, and in one of twenty on gn07 to gn10 and gn12, to
    which nobody else may go. The same programs, at the same time: it is the node."""
    site = Site(rng, nodes=12, days=35)
    theirs = site.nodes[6:]
    site.apps = [one._replace(only=site.nodes[:6]) for one in mix(rng, 8, per_day=60)]
    for name in ("train", "eval", "embed"):
        site.apps.append(App("ivo", name, 18, gpus=4, hours=1.2, failing=0.05, constraint="owned", only=theirs))
    site.fault(Fault("gn11", ("quiet", "killed", "code-255"), since=6, share=0.2))
    return site.run()


@world("silent", "kept", "16 nodes, arrays, no logs: a fifth of one node's jobs is killed")
def killed_among_arrays(rng: Random) -> World:
    """On gn13 jobs of all users are killed; the same programs hardly ever are on the other fifteen nodes. Arrays that
    crash as a whole do so on many nodes."""
    site = Site(rng, nodes=16, days=40)
    site.logs = ""
    site.apps = mix(rng, 12, per_day=150)
    for user in ("ivo", "ada"):
        site.apps.append(App(user, "grid", 0.4, gpus=1, hours=0.2, failing=0.85, bugs=("quiet", "segv"), array=40))
    site.fault(Fault("gn13", ("killed", "killed", "quiet"), since=5, share=0.22))
    return site.run()


@world("silent", "kept", "nobody is to blame: a new user learns, on the nodes that Slurm fills first")
def new_user_learns(rng: Random) -> World:
    """From day 10 a new user's jobs fail in seven of ten runs, without logs; Slurm packs them on gn01 and gn02. The
    others' jobs on these nodes are as well as before."""
    site = Site(rng, nodes=8, days=35)
    site.packed = True
    site.logs = ""
    site.apps = mix(rng, 7, per_day=35, gpus=(1, 2, 4))
    for name, bug in (("train", "quiet"), ("test", "killed"), ("prep", "segv")):
        site.apps.append(App("newby", name, 5, gpus=1, hours=0.2, failing=0.7, bugs=(bug,), first=10.0))
    return site.run()


@world("silent", "kept", "nobody is to blame: three users' hard problems are sent to one node by its local disks")
def hard_problems_pinned(rng: Random) -> World:
    """Three users' hard problems need the disks of gn07 and fail there in two fifths of their runs; the easy ones of
    the same name go anywhere, and complete. All other jobs on gn07, most of its jobs, are well."""
    site = Site(rng, nodes=8, days=30)
    site.logs = ""
    site.apps = mix(rng, 9, per_day=90, gpus=(1, 1, 2, 4))
    for user in ("ivo", "ada", "otto"):
        easy = App(user, "fold", 9, gpus=2, hours=0.6, failing=0.03, only=site.nodes[:6])
        hard = App(user, "fold", 2.5, gpus=2, hours=0.8, failing=0.4, bugs=("quiet", "killed", "aborted"))
        site.apps += [easy, hard._replace(constraint="nvme", only=("gn07",))]
    return site.run()


@world("when and how many", "kept", "three of six nodes are bad")
def half_are_bad(rng: Random) -> World:
    """On three nodes all users' jobs fail three or four times as often as on the three others, from day 4, 6 or 8."""
    site = Site(rng, nodes=6, days=32)
    site.apps = mix(rng, 9, per_day=70)
    for node, day in (("gn01", 4), ("gn04", 6), ("gn05", 8)):
        site.fault(Fault(node, ("quiet", "killed", "segv"), since=day, share=0.22))
    return site.run()


@world("no bad node", "kept", "nobody is to blame: forty nodes, six weeks, and only chance")
def only_chance(rng: Random) -> World:
    """Users' programs fail in a seventh of all runs, arrays crash on a few nodes at a time, no logs are kept: some node
    must come out last, but by no more than chance."""
    site = Site(rng, nodes=40, days=40)
    site.logs = ""
    site.apps = mix(rng, 16, per_day=190, failing=0.12)
    for user in ("ivo", "ada", "otto"):
        array = App(user, "sweep", 0.25, gpus=2, hours=0.3, failing=0.9, bugs=("quiet", "killed"), array=24)
        site.apps.append(array)
    return site.run()
