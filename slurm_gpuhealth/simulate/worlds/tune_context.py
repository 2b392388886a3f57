"""Where jobs are sent is no accident: partitions, reservations, constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_gpuhealth.simulate.worlds.apps import App, Fault, mix
from slurm_gpuhealth.simulate.worlds.site import Site
from slurm_gpuhealth.simulate.worlds.world import world

if TYPE_CHECKING:
    from random import Random

    from slurm_gpuhealth.simulate.worlds.world import World


@world("context", "tune", "nobody is to blame: everybody tries out broken code on the two nodes of a debug partition")
def debug_partition(rng: Random) -> World:
    """Eleven users' programs fail in three quarters of their short runs on gn01 and gn02, alike, and complete later in
    the other partition. No job of that partition runs on these two, and no node says anything."""
    site = Site(rng, nodes=14, days=28)
    site.logs = ""
    site.partitions = {"debug": site.nodes[:2], "gpu": site.nodes[2:]}
    for app in mix(rng, 11, per_day=90):
        attempt = app._replace(partition="debug", limit=0.5, hours=0.1, per_day=app.per_day * 0.2, failing=0.75)
        site.apps += [app, attempt._replace(gpus=min(2, app.gpus))]
    return site.run()


@world("context", "tune", "one of the two nodes of a debug partition is really bad")
def bad_node_in_a_debug_partition(rng: Random) -> World:
    """All fail much in this partition, but on gn02 nearly all runs, half of them without a word, and on gn01, with the
    same users and programs, a third, with tracebacks."""
    site = Site(rng, nodes=10, days=28)
    site.logs = "class"
    site.partitions = {"debug": site.nodes[:2], "gpu": site.nodes[2:]}
    tries = mix(rng, 9, per_day=50, gpus=(1, 1, 2), hours=0.15, failing=0.3)
    tries = [
        one._replace(partition="debug", limit=0.5, fresh=True, bugs=("value", "import", "shape", "path"))
        for one in tries
    ]
    site.apps = [*mix(rng, 9, per_day=70), *tries]
    site.fault(Fault("gn02", ("quiet", "code-255", "killed"), since=8, share=0.5))
    return site.run()


@world("context", "tune", "nobody is to blame: a course with broken exercises on four reserved nodes, for two weeks")
def course_in_a_reservation(rng: Random) -> World:
    """The course's users fail on each of the four nodes alike. Some try the exercises in the open partition too, where
    they had been prepared, and complete. Before and after the course other users' jobs are well on the four nodes."""
    site = Site(rng, nodes=16, days=35)
    site.logs = ""
    nodes = site.nodes[8:12]
    site.apps = mix(rng, 9, per_day=90)
    site.reserved = {"ml-course": (nodes, 10, 24)}
    for number in range(14):
        ready = App(
            f"course{number:02d}", f"exercise{number % 3}", 2, gpus=1, hours=0.3, failing=0.05, account="course"
        )
        lesson = ready._replace(per_day=5, hours=0.2, failing=0.6, bugs=("value", "import", "quiet", "segv"), limit=1.0)
        lesson = lesson._replace(reservation="ml-course", only=nodes, first=10.0, last=24.0)
        site.apps += [lesson, ready._replace(only=site.nodes[:8], last=24.0)] if number % 2 else [lesson]
    return site.run()


@world("context", "tune", "nobody is to blame: new containers have no kernels for the oldest model of GPU")
def no_kernels_for_the_old_model(rng: Random) -> World:
    """From day 12 half of the users' programs die at once on the three nodes of the old model, whichever of them; with
    older containers, users' jobs are well there."""
    site = Site(rng, nodes=24, days=30)
    site.logs = ""
    old, new = site.nodes[21:], site.nodes[:21]
    for nth, app in enumerate(mix(rng, 10, per_day=170)):
        broken = app._replace(failing=0.9, bugs=("kernel",), hours=0.2) if nth % 2 else app
        site.apps += [
            app._replace(constraint="h100", only=new, per_day=app.per_day * 0.85),
            app._replace(constraint="v100", only=old, per_day=app.per_day * 0.15, last=12.0),
            broken._replace(constraint="v100", only=old, per_day=app.per_day * 0.15, first=12.0),
        ]
    return site.run()


@world("context", "tune", "nobody is to blame: root's nightly check is broken, on every node, by an update")
def nightly_check_is_broken(rng: Random) -> World:
    """From day 9 root's check fails each night on most nodes, with the same exit code; the users' jobs are well."""
    site = Site(rng, nodes=12, days=21)
    site.logs = ""
    site.apps = mix(rng, 8, per_day=60)
    for node in site.nodes:
        check = App("root", "nodecheck", 1, gpus=8, hours=0.1, failing=0.01, bugs=("check",), clock=3.0, only=(node,))
        site.apps += [check._replace(last=9.0), check._replace(first=9.0, failing=0.85)]
    return site.run()
