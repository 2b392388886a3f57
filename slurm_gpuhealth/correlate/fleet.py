"""What only the whole fleet shows: failures that come together, and how many nodes may look bad by chance."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Any

from slurm_gpuhealth.correlate.weights import DAY, growth

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from slurm_gpuhealth.config.settings import Suspicion
    from slurm_gpuhealth.correlate.state import Case, FleetState

UNEXPLAINED = (None, "nothing", "communication", "crash", "infrastructure")
RECENT = 4 * 3600.0
MOST = 512
SURGE = 1800.0
ABRUPT = 60.0
WEEK = 7 * DAY
COUNT = 300.0  # seconds from one look at what is usual to the next


def unexplained(case: Case) -> bool:
    """Whether nothing in the job says why it failed. A failed switch, file system or power supply looks like this."""
    return case.kind in UNEXPLAINED or case.attempt.state == "NODE_FAIL"


def remember(fleet: FleetState, case: Case, key: str, leaves: Iterable[str], half_life: float) -> None:
    """Note a failure, for others that come at about the same time."""
    attempt = case.attempt
    if not unexplained(case):
        return
    end = attempt.end
    insort(fleet.recent, [end, attempt.user, case.application, attempt.nodes[0], sorted(leaves), key])
    del fleet.recent[: bisect_left(fleet.recent, [fleet.recent[-1][0] - RECENT])]
    del fleet.recent[:-MOST]
    fleet.unexplained += growth(end, half_life)
    if end > fleet.counted + COUNT:
        together = len(_users(fleet, end, SURGE, ()))
        fleet.usual += (together - fleet.usual) * (1 - 2.0 ** (-(end - fleet.counted) / WEEK)) if fleet.counted else 0.0
        fleet.counted = end


def co_failing(fleet: FleetState, case: Case, leaf: str, width: int, leaves: int, s: Suspicion) -> float:
    """The chance that so many unrelated jobs under `leaf` fail within `leaf_window`.

    1 where it is this job alone. Expected: the fleet's own rate of such failures, by nodes. (Correlator method 6.5.)
    """
    end = case.attempt.end
    near = [one for one in _around(fleet, end, s.leaf_window) if leaf in one[4]]
    unrelated = {(one[1], one[2]) for one in near} | {(case.attempt.user, case.application)}
    if len(unrelated) < 2 or len({one[3] for one in near} | {case.attempt.nodes[0]}) < 2:
        return 1.0
    rate = fleet.unexplained / fleet.exposure if fleet.exposure > 0 else 0.0
    expected = rate * width * s.leaf_window / DAY
    return poisson_tail(len(unrelated), expected) * max(1, leaves) * DAY / s.leaf_window


def surge(fleet: FleetState, case: Case) -> float:
    """How much of what fails now, on other nodes and of other users, is more than usual: 0 to 1.

    Power, a file system, a broken image: three users at least, on nodes apart, and not by chance. What a leaf switch
    explains is left out.
    """
    most = 0.0
    for window, least in ((SURGE, 3), (ABRUPT, 2)):
        users = _users(fleet, case.attempt.end, window, case.attempt.nodes, case.leaves) - {case.attempt.user}
        expected = max(fleet.usual, 0.5) * window / SURGE
        # Within two standard deviations it is no rare chance.
        if len(users) >= max(least, expected + 2 * math.sqrt(expected)) and poisson_tail(len(users), expected) <= 1e-3:
            most = max(most, 1 - expected / len(users))
    return most


def beside(fleet: FleetState, case: Case) -> list[tuple[str, str]]:
    """The failures of about that time: the case, and the node at which it lies."""
    return [(one[5], one[3]) for one in _around(fleet, case.attempt.end, SURGE)]


def under(fleet: FleetState, case: Case, leaf: str, window: float) -> list[tuple[str, str]]:
    """The same, only of jobs that have nodes under the leaf switch."""
    return [(one[5], one[3]) for one in _around(fleet, case.attempt.end, window) if leaf in one[4]]


def _users(
    fleet: FleetState, time: float, window: float, nodes: Iterable[str], leaves: tuple[str, ...] = ()
) -> set[str]:
    near, apart = _around(fleet, time, window), set(nodes)
    if leaves:
        near = [one for one in near if not any(leaf in one[4] for leaf in leaves)]
    return {one[1] for one in near if one[3] not in apart}


def _around(fleet: FleetState, time: float, window: float) -> list[Any]:
    recent = fleet.recent
    return recent[bisect_left(recent, [time - window]) : bisect_right(recent, [time + window, "\U0010ffff"])]


def poisson_tail(count: int, expected: float) -> float:
    """P(Poisson(expected) >= count)."""
    if count <= 0:
        return 1.0
    if expected <= 0:
        return 0.0
    if expected > count + 20 * math.sqrt(expected):
        return 1.0
    term = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))
    total, k = 0.0, count
    while term > 1e-17 * total or k <= expected:
        total += term
        k += 1
        term *= expected / k
    return min(1.0, total)


def discoveries(chances: Mapping[str, float], tested: int, rate: float) -> set[str]:
    """Benjamini and Hochberg (1995): those of `tested` nodes whose chance is small enough that at most `rate` of them
    are false."""
    ranked = sorted(chances.items(), key=lambda one: (one[1], one[0]))
    last = 0
    for place, (_, chance) in enumerate(ranked, 1):
        if chance <= rate * place / max(1, tested):
            last = place
    return {name for name, _ in ranked[:last]}
