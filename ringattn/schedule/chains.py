"""Trees that are stars or chains: all-gather and direct, ring and bidirectional ring.

       4 ranks, the tree of KV0
       ring           0 > 1 > 2 > 3        a chain, one hop a step
       direct         0 > 1, 0 > 2, 0 > 3  a star, one message a step
       all_gather     0 > 1, 0 > 2, 0 > 3  a star, all in the first step
       bidirectional  0 > 1 > 2, 0 > 3     two chains
With both directions every block arrives everywhere in half the number of steps, and each rank sends half the bytes in
each direction. Use it if links carry both directions at the same time, as on a ring of NVLinks or of network cables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.schedule.content import Content
from ringattn.schedule.route import TreeRoute, Trees, register


@register(order=0)
@dataclass(frozen=True)
class Ring(TreeRoute):
    """A schedule in which each rank sends the block that it received to its neighbour, one hop per step."""

    name: str = "ring"
    by_classes: ClassVar[bool] = True

    def trees(self, problem: Problem) -> Chains:
        """See `TreeRoute.trees`."""
        return Chains(problem, both_ways=False)


@register(order=1)
@dataclass(frozen=True)
class AllGather(TreeRoute):
    """A schedule in which each owner sends its block to every reader in the first step."""

    name: str = "all_gather"
    by_classes: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    arrives_at_once: ClassVar[bool] = True

    def trees(self, problem: Problem) -> Stars:
        """See `TreeRoute.trees`."""
        return Stars(problem, at_once=True)

    def steps(self, ranks: int) -> int:
        """See `Route.steps`."""
        return min(ranks, 2)


@register(order=2)
@dataclass(frozen=True)
class Direct(TreeRoute):
    """A schedule in which each owner sends its block to every reader, one message per step."""

    name: str = "direct"
    by_classes: ClassVar[bool] = True
    halves: ClassVar[bool] = True

    def trees(self, problem: Problem) -> Stars:
        """See `TreeRoute.trees`."""
        return Stars(problem, at_once=False)


@register(order=5)
@dataclass(frozen=True)
class Bidirectional(TreeRoute):
    """Two rings in opposite directions, which share the work of one ring."""

    name: str = "bidirectional"
    by_classes: ClassVar[bool] = True
    halves: ClassVar[bool] = True

    def trees(self, problem: Problem) -> Chains:
        """See `TreeRoute.trees`."""
        return Chains(problem, both_ways=True)

    def steps(self, ranks: int) -> int:
        """See `Route.steps`."""
        return ranks // 2 + 1


class Stars(Trees):
    """Stars: every owner sends to every reader, one message per step, or all in the first step if `at_once`."""

    def __init__(self, problem: Problem, at_once: bool) -> None:
        """Keep the arguments; see `Trees`."""
        super().__init__(problem)
        self.at_once = at_once

    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """Return the reader's distance; with `at_once`, 1 for every reader except the owner."""
        distance = (reader - owner) % self.ranks
        return np.minimum(distance, 1) if self.at_once else distance

    def source(self, owner: int, reader: int) -> int:
        """Return the owner."""
        return owner

    def content(self, owner: int, reader: int) -> Content:
        """Return the rows that the reader reads."""
        return self.reads.read(owner, reader)


class Chains(Trees):
    """A chain from each owner up the ring; with `both_ways`, two chains of half the length: up and down.

    A backward pass begins with the farthest readers. So it sends a block directly to the farthest reader and from there
    back along its chain, if that sends no more than the owner sending to every reader.
    """

    def __init__(self, problem: Problem, both_ways: bool) -> None:
        """Keep the arguments; see `Trees`."""
        super().__init__(problem)
        self.both_ways = both_ways
        self._back: dict[tuple[int, int], int] = {}

    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """Return the distance along the chain."""
        up = (reader - owner) % self.ranks
        return np.minimum(up, self.ranks - up) if self.both_ways else up

    def source(self, owner: int, reader: int) -> int:
        """Return the neighbour that read the block one step earlier."""
        return (reader - self._way(owner, reader)[0]) % self.ranks

    def content(self, owner: int, reader: int) -> Content:
        """Return the rows that the reader and the rest of the chain read."""
        way, distance = self._way(owner, reader)
        return self.reads.union_of(owner, self._chain(way, distance, self._length(way)))

    def source_back(self, owner: int, reader: int) -> int:
        """Return the next rank along the chain if blocks are relayed back along it, otherwise the owner."""
        way, distance = self._way(owner, reader)
        if (owner, way) not in self._back:
            reach = self.reads.reach(owner, self._chain(way, 1, self._length(way)))
            # A relay can only send rows that it reads, so each reader must read all rows of the nearer readers.
            self._back[owner, way] = reach if self.reads.grow(owner, self._chain(way, 1, reach)) else 0
        return (reader + way) % self.ranks if distance < self._back[owner, way] else owner

    def neighbors(self, rank: int) -> Iterable[int]:
        """Return the next rank up and the next rank down the ring."""
        return {(rank + 1) % self.ranks, (rank - 1) % self.ranks}

    def _way(self, owner: int, reader: int) -> tuple[int, int]:
        """Return the direction, up (1) or down (-1), and the distance. The opposite rank is reached on the way up."""
        up = (reader - owner) % self.ranks
        return (-1, self.ranks - up) if self.both_ways and 2 * up > self.ranks else (1, up)

    def _length(self, way: int) -> int:
        """Return the number of readers on the chain in direction `way`: 1 is up, -1 down."""
        if not self.both_ways:
            return self.ranks - 1
        return self.ranks // 2 if way > 0 else (self.ranks - 1) // 2

    def _chain(self, way: int, first: int, last: int) -> slice:
        """Return positions `first` to `last` of the chain in direction `way`, as distances up the ring."""
        return slice(first, last + 1) if way > 0 else slice(self.ranks - first, self.ranks - last - 1, -1)
