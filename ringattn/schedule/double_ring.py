"""Double ring: a ring of nodes, and within each node a ring of its ranks; a block crosses to each node once.

`grid[node][place]` is a rank; n nodes of m ranks. In round r the ranks of a node attend to the blocks of the node r
before it: each rank begins with the block of its own place, and the ring inside the node takes it round.
       grid 2 x 2 (ranks 0 1 | 2 3), the keys that rank 3 attends to and who sends them
       step          0       1       2       3
       round         0               1
       owner         3       2       1       0
       from          -       2>3     1>3     2>3
While a node works on its round, each rank passes the block that it began with to its place in the next node, a piece of
it beside each of the m steps (`spread`). A ring over all ranks waits for the slowest link in each of its n m - 1 steps;
here that link has m times as long for every block.
Guarantees: a schedule that needs no pass, forward or backward.
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
from ringattn.schedule.route import Grid, GridRoute, TreeRoute, Trees, register, square_side


@register(order=6)
@dataclass(frozen=True)
class DoubleRing(GridRoute, TreeRoute):
    """Rings inside nodes, and a ring of nodes."""

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
        """See `Route.inner_steps`: each turn goes round each node."""
        return group

    def why_not(self, problem: Problem, nodes: int) -> str:
        """See `Route.why_not`."""
        return "one node: its hops cross the same links as the ring's" if nodes == 1 else ""


class GridTrees(Trees):
    """From each owner along the nodes by its place, and in every node along the ring inside it.

    In a backward the farthest place of each round is first. The last node's gets the block from its owner, those of
    other nodes from their place in the node that was before; the ring inside the node runs the other way.
    """

    def __init__(self, problem: Problem, grid: Grid) -> None:
        """Asks nothing of the problem yet."""
        super().__init__(problem)
        self.grid = np.array(grid)
        self.nodes, self.places = self.grid.shape
        self._node, self._place = np.empty((2, self.ranks), np.int64)
        for at, ranks in enumerate(grid):
            self._node[list(ranks)], self._place[list(ranks)] = at, range(self.places)
        self._back: dict[int, bool] = {}

    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """Round and step within it are how far the owner's node and place lie before the reader's."""
        turn, inner = self._apart(owner, reader)
        return turn * self.places + inner

    def source(self, owner: int, reader: int) -> int:
        """The rank before in the node; of the block that a round begins with, the place in the node before."""
        _, inner = self._apart(owner, reader)
        return self._beside(reader, 0, -1) if inner else self._beside(reader, -1, 0)

    def content(self, owner: int, reader: int) -> Content:
        """For the rest of the ring in the node; where a round begins, for the nodes that follow too."""
        turn, inner = self._apart(owner, reader)
        distances = self._distances(owner)
        return self.reads.union_of(owner, distances[turn, inner:] if inner else distances[turn:].ravel())

    def source_back(self, owner: int, reader: int) -> int:
        """The rank after it in the node, or its place in the node after, or the owner."""
        if owner not in self._back:
            self._back[owner] = self._relays_back(owner)
        turn, inner = self._apart(owner, reader)
        if not self._back[owner]:
            return owner
        if inner < self.places - 1:
            return self._beside(reader, 0, 1)
        return self._beside(reader, 1, 0) if 0 < turn < self.nodes - 1 else owner

    def neighbors(self, rank: int) -> Iterable[int]:
        """Both in the node, and both in the nodes beside it."""
        return {self._beside(rank, *way) for way in ((0, 1), (0, -1), (1, 0), (-1, 0))}

    def paced(self, part: Schedule, backward: bool) -> Schedule:
        """A block for the next round may travel in every step of this one."""
        last, places = self.steps - 1, self.places

        def window(step: int) -> range:
            if not backward:
                return range(step - places + 1, step + 1)
            # Backward main steps are every second one. The deadline of a round's first block is the last of the round
            # before it; the prologue step, which has no round, is a window of its own.
            done = last - (step - 1) // 2
            begins = step - 2 * (places - 1)
            is_border = step and done and done % places == 0 and begins >= main_step(last, last)
            return range(begins, step + 1, 2) if is_border else range(step, step + 1)

        return spread(part, lambda copy: bool(self._node[copy.src] != self._node[copy.dst]), window)

    def _relays_back(self, owner: int) -> bool:
        """Whether relays send no more than the owner to each: what they hand on is among what they read themselves."""
        distances = self._distances(owner)
        # In each node the farthest place reads all that the others read; and of these, each what those of the nodes
        # nearer to the owner read. The owner's own place needs no message.
        return self.reads.grow(owner, distances) and self.reads.grow(owner, distances[1:, -1])

    def _distances(self, owner: int) -> Ints:
        """Of the readers, round x step within it."""
        return (np.roll(self.grid, (-self._node[owner], -self._place[owner]), (0, 1)) - owner) % self.ranks

    def _apart(self, owner: int | Ints, reader: int) -> tuple[Any, Any]:
        return (
            (self._node[reader] - self._node[owner]) % self.nodes,
            (self._place[reader] - self._place[owner]) % self.places,
        )

    def _beside(self, rank: int, nodes: int, places: int) -> int:
        node, place = self._node[rank] + nodes, self._place[rank] + places
        return int(self.grid[node % self.nodes, place % self.places])
