"""Double ring: a ring of nodes, and within each node a ring of its ranks; a block is sent to each node once.

`grid[node][place]` is a rank; n nodes of m ranks. In round r the ranks of a node attend to the blocks of the node r
positions before it. Each rank begins with the block of the rank at its own place in that node, and the inner ring
circulates these blocks.
       grid 2 x 2 (ranks 0 1 | 2 3), the keys that rank 3 attends to and the messages that bring them
       step          0       1       2       3
       round         0               1
       owner         3       2       1       0
       from          -       2>3     1>3     2>3
During a round, each rank sends the block that it began with to the same place in the next node, one piece in each of
the m steps (`spread`). A ring over all ranks waits for the slowest link in each of its n m - 1 steps; here a block has
m times as long to cross that link.
Guarantees: the schedules of both passes are already pruned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.schedule.content import Content
from ringattn.schedule.ops import Schedule
from ringattn.schedule.passes import main_step, spread
from ringattn.schedule.route import Grid, GridRoute, GroupedTrees, TreeRoute, register, square_side


@register(order=6)
@dataclass(frozen=True)
class DoubleRing(GridRoute, TreeRoute):
    """A schedule with a ring inside each node and a ring of nodes."""

    name: str = "double_ring"
    by_classes: ClassVar[bool] = True
    group_lines: ClassVar[tuple[int, int, int, int]] = (1, 1, 2, 1)
    least_groups: ClassVar[int] = 8
    parameter: ClassVar[str] = "M"

    def default_group(self, problem: Problem) -> int:
        """See `GridRoute.default_group`."""
        return square_side(problem.world_size)

    def trees(self, problem: Problem) -> GridTrees:
        """See `TreeRoute.trees`."""
        return GridTrees(problem, self.grid_for(problem))

    def inner_steps(self, group: int) -> int:
        """See `Route.inner_steps`: each turn is one full circle within every node."""
        return group

    def why_not(self, problem: Problem, nodes: int) -> str:
        """See `Route.why_not`."""
        return "one node: its hops cross the same links as the ring's" if nodes == 1 else ""


class GridTrees(GroupedTrees):
    """The trees of a double ring: from each owner to the same place in every node, then along the inner ring.

    A backward pass begins each round at the farthest place. In the last node, the farthest place receives the block
    from its owner; in other nodes, from the same place in the next node. The inner ring runs in the other direction.
    """

    def __init__(self, problem: Problem, grid: Grid) -> None:
        """Keep the arguments; see `GroupedTrees`."""
        super().__init__(problem, grid)
        self.nodes, self.places = self.grid.shape
        self._back: dict[int, bool] = {}
        self._apart_from: dict[int, Ints] = {}

    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """Return the step: its round and inner step are the distances in nodes and in places from owner to reader."""
        turn, inner = self._apart(owner, reader)
        return turn * self.places + inner

    def source(self, owner: int, reader: int) -> int:
        """Return the previous rank in the node; for the first block of a round, the same place in the previous node."""
        _, inner = self._apart(owner, reader)
        return self._neighbor(reader, 0, -1) if inner else self._neighbor(reader, -1, 0)

    def content(self, owner: int, reader: int) -> Content:
        """Return the rows for the rest of the inner ring; at the start of a round, also for the nodes that follow."""
        turn, inner = self._apart(owner, reader)
        distances = self._distances(owner)
        return self.reads.union_of(owner, distances[turn, inner:] if inner else distances[turn:].ravel())

    def source_back(self, owner: int, reader: int) -> int:
        """Return the next rank in the node, or the same place in the next node, or the owner."""
        if owner not in self._back:
            self._back[owner] = self._relays_back(owner)
        turn, inner = self._apart(owner, reader)
        if not self._back[owner]:
            return owner
        if inner < self.places - 1:
            return self._neighbor(reader, 0, 1)
        return self._neighbor(reader, 1, 0) if 0 < turn < self.nodes - 1 else owner

    def neighbors(self, rank: int) -> Iterable[int]:
        """Return both neighbours in the node, and the same place in both neighbouring nodes."""
        return {self._neighbor(rank, *way) for way in ((0, 1), (0, -1), (1, 0), (-1, 0))}

    def paced(self, part: Schedule, backward: bool) -> Schedule:
        """Return `part` with each block for the next round spread over all steps of the current round."""
        last, places = self.steps - 1, self.places

        def window(step: int) -> range:
            if not backward:
                return range(step - places + 1, step + 1)
            # Every second backward step is a main step. A round's first block must arrive by the last main step of the
            # previous round. The prologue step belongs to no round, so its window is that step only.
            done = last - (step - 1) // 2
            begins = step - 2 * (places - 1)
            is_border = step and done and done % places == 0 and begins >= main_step(last, last)
            return range(begins, step + 1, 2) if is_border else range(step, step + 1)

        return spread(part, lambda copy: bool(self._node[copy.src] != self._node[copy.dst]), window)

    def _relays_back(self, owner: int) -> bool:
        """Return whether relays send no more than the owner sending to every reader.

        This holds if relays read all rows that they send on.
        """
        distances = self._distances(owner)
        # In each node, each rank must read all rows that the ranks before it on the inner ring read. The rank at the
        # farthest place must also read all rows that the ranks at the farthest places of nodes nearer to the owner
        # read. The owner itself needs no message.
        return self.reads.grow(owner, distances) and self.reads.grow(owner, distances[1:, -1])

    def _distances(self, owner: int) -> Ints:
        """Return the distances of the readers by round and step within the round."""
        if owner not in self._apart_from:
            grid = np.roll(self.grid, (-self._node[owner], -self._place[owner]), (0, 1))
            self._apart_from[owner] = (grid - owner) % self.ranks
        return self._apart_from[owner]

    def _apart(self, owner: int | Ints, reader: int) -> tuple[Any, Any]:
        """Return the distances from owner to reader in nodes and in places."""
        return (
            (self._node[reader] - self._node[owner]) % self.nodes,
            (self._place[reader] - self._place[owner]) % self.places,
        )

    def _neighbor(self, rank: int, nodes: int, places: int) -> int:
        """Return the rank at this distance in nodes and places."""
        node, place = self._node[rank] + nodes, self._place[rank] + places
        return int(self.grid[node % self.nodes, place % self.places])
