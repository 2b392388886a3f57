"""What users submit to a small site, and what breaks there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    Held = dict[str, tuple[int, ...]]

USERS = (
    *("amira", "bo", "chen", "dilan", "eva", "farid", "gita", "hugo", "ines", "jonas", "kofi", "lena", "mei", "nils"),
    *("olga", "pavel", "quinn", "rosa", "sven", "tara", "uma", "vito", "wen", "xenia", "yara", "zoe"),
)
KINDS = ("train", "finetune", "sweep", "eval", "embed", "md", "unet", "render", "asr", "fold")
BUGS = ("value", "value", "shape", "import", "path", "gpu-oom", "arguments", "lammps", "gromacs", "quiet", "segv")
"""What programs die of by themselves, and its shares."""


class App(NamedTuple):
    """A user's program, as it is submitted again and again."""

    user: str
    name: str
    per_day: float
    """Submissions, without an array's further tasks."""
    gpus: int = 8
    """Of each node."""
    nodes: int = 1
    hours: float = 1.5
    """Median; the spread of the logarithm is .6."""
    failing: float = 0.07
    bugs: tuple[str, ...] = BUGS
    cancelled: float = 0.02
    preempted: float = 0.0
    partition: str = "gpu"
    qos: str = "normal"
    reservation: str = ""
    limit: float = 24.0
    """Hours."""
    constraint: str = ""
    only: tuple[str, ...] = ()
    """The nodes to which that sends it; () all of its partition."""
    first: float = 0.0
    last: float = math.inf
    """Days."""
    array: int = 1
    fresh: bool = False
    """Each job has a name and a submit line of its own: `try-fusk`, `bash`."""
    clock: float | None = None
    """Once a day, at that hour."""
    blames: str = "application"
    """What is the cause if it fails by itself."""
    account: str = "lab"


def mix(
    rng: Random,
    users: int,
    per_day: float,
    gpus: Sequence[int] = (1, 1, 2, 4, 8),
    nodes: Sequence[int] = (1,),
    failing: float = 0.07,
    hours: float = 1.5,
    heavy: float = 0.0,
    **more: object,
) -> list[App]:
    """`users` with one to three programs each, some of which submit much more than others. `heavy`: the share of the
    first user."""
    shares = [1 / (1 + nth) ** 0.7 for nth in range(users)]
    if heavy:
        shares = [heavy, *((1 - heavy) * share / sum(shares[1:]) for share in shares[1:])]
    found = []
    for user, share in zip(rng.sample(USERS, users), shares):
        programs = rng.randint(1, 3)
        for kind in rng.sample(KINDS, programs):
            app = App(
                user,
                kind,
                per_day * share / sum(shares) / programs,
                rng.choice(gpus),
                rng.choice(nodes),
                hours * rng.lognormvariate(0, 0.4),
                min(0.6, failing * rng.lognormvariate(0, 0.5)),
                tuple(rng.sample(BUGS, 3)),
                account=f"lab{len(user) % 4}",
            )
            found.append(app._replace(gpus=8) if app.nodes > 1 else app)
    return [one._replace(**more) for one in found]  # type: ignore[arg-type]


class Fault(NamedTuple):
    """What is wrong with a node. Days are those of the world."""

    node: str
    shows: tuple[str, ...]
    """Ends, of which each is as likely; `hang`: until its time limit or its user ends it."""
    since: float = 0.0
    until: float = math.inf
    share: float = 0.0
    """Of the jobs that start there."""
    per_day: float = 0.0
    """Failures per day of running jobs."""
    gpus: tuple[int, ...] = ()
    """Only these are bad."""
    everyone: bool = False
    """Hits jobs that did not get that GPU too: programs that take the first GPU, where no cgroup stops them."""
    xids: tuple[str, ...] = ()
    seen: float = 1.0
    """Share of the failures that leave the Xids."""
    when: Callable[[App, float], bool] | None = None
    """Of the app and the start: whether the fault is felt."""
    early: bool = False
    """It shows within the first minutes."""
    slow: float = 1.0
    """Jobs take so much longer."""


class Incident(NamedTuple):
    """What ends many jobs at once, and is no node's fault."""

    time: float
    nodes: tuple[str, ...]
    end: str
    cause: str
    xids: tuple[str, ...] = ()
    """Each of the nodes reports them."""
    share: float = 1.0
    of: Callable[[App], bool] | None = None
