"""Which nodes and GPUs a simulated job gets. Pods are filled first; a job waits if too few nodes are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random


class Cluster:
    """Free nodes by pod, and free GPUs of shared nodes. Nodes and GPUs are indices."""

    def __init__(self, nodes: int, pod: int, gpus: int, kept: Iterable[int], rng: Random) -> None:
        self.pod, self.gpus, self.rng = pod, gpus, rng
        self.kept = set(kept)
        """Taken by name only."""
        self.free: list[list[int]] = [[] for _ in range((nodes + pod - 1) // pod)]
        for node in range(nodes):
            if node not in self.kept:
                self.free[node // pod].append(node)
        self.total = sum(map(len, self.free))
        self.idle = set(self.kept)
        self.partly: dict[int, list[int]] = {}

    def take(self, count: int, gpus: int, node: int | None = None) -> dict[int, tuple[int, ...]] | None:
        """Node → its GPUs; None: not now."""
        everything = tuple(range(self.gpus))
        if node is not None:
            if node not in self.idle:
                return None
            self.idle.discard(node)
            return {node: everything}
        if count == 1 and gpus < self.gpus:
            return self._share(gpus)
        if count > self.total:
            return None
        return dict.fromkeys(self._whole(count), everything)

    def give(self, taken: dict[int, tuple[int, ...]]) -> None:
        for node, gpus in taken.items():
            if node in self.kept:
                self.idle.add(node)
                continue
            if node in self.partly:
                gpus = (*self.partly.pop(node), *gpus)
                if len(gpus) < self.gpus:
                    self.partly[node] = list(gpus)
                    continue
            elif len(gpus) < self.gpus:
                self.partly[node] = list(gpus)
                continue
            self.free[node // self.pod].append(node)
            self.total += 1

    def _whole(self, count: int) -> list[int]:
        enough = [pod for pod in self.free if len(pod) >= count]
        if enough:
            return self._some(min(enough, key=len), count)
        taken: list[int] = []
        for pod in sorted(self.free, key=len, reverse=True):
            taken += self._some(pod, min(len(pod), count - len(taken)))
            if len(taken) == count:
                break
        return taken

    def _some(self, pod: list[int], count: int) -> list[int]:
        taken = []
        for _ in range(count):
            at = int(self.rng.random() * len(pod))
            pod[at], pod[-1] = pod[-1], pod[at]
            taken.append(pod.pop())
        self.total -= count
        return taken

    def _share(self, gpus: int) -> dict[int, tuple[int, ...]] | None:
        fitting = [node for node, free in self.partly.items() if len(free) >= gpus]
        if fitting:
            node = min(fitting, key=lambda node: (len(self.partly[node]), node))
            free = self.partly.pop(node)
        elif self.total:
            (node,) = self._whole(1)
            free = list(range(self.gpus))
        else:
            return None
        self.rng.shuffle(free)
        if len(free) > gpus:
            self.partly[node] = free[gpus:]
        return {node: tuple(sorted(free[:gpus]))}
