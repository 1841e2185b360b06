"""Node gather: all-gather over several nodes in which a row enters a node once.

`grid[node][place]` is a rank. The owner of a block sends the union of the rows that the ranks of a node read to one of
them, the *gate*, which sends each of the others its rows. The gate is the reader at the place of the owner, or the
next reader after that place, so the gates of a node's blocks are different ranks. Inside its node the owner sends to
every reader.
       grid 2 x 2 (ranks 0 1 | 2 3), the block of rank 0 in a forward pass
       step 0    0 > 1, 0 > 2    the message to the gate 2 carries the rows that 2 and 3 read
       step 1    2 > 3           ranks 1 and 2 work meanwhile
       step 2                    rank 3 works
A relay adds a step to the pass, so the owner sends to every reader of a node unless the gate saves enough. Without a
gate, all messages are those of `all_gather`.

The gradients of a block return along the same edges, and the gate adds those of its readers to its own. In the prologue
of a backward pass, owners send K/V to the readers that read them in step 1. The gates send K/V on in the first main
step, which undoes an empty forward step.
Guarantees: the schedules of both passes are already pruned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.schedule.content import Content, size
from ringattn.schedule.route import Grid, GridRoute, GroupedTrees, TreeRoute, register, square_side

MUST_SAVE = 1 / 8
"""Share of a shard that a gate must save between two nodes. Its readers wait for two messages instead of one."""

MOST_STEPS = 4
"""Steps 0 to 2 of a forward pass, and an empty step. Its main step in a backward pass sends K/V from the gates."""


@register(order=10)
@dataclass(frozen=True)
class NodeGather(GridRoute, TreeRoute):
    """A schedule in which each owner sends its block once to every other node, and a rank there sends it on."""

    name: str = "node_gather"
    at_once: ClassVar[bool] = True
    arrives_at_once: ClassVar[bool] = True
    parameter: ClassVar[str] = "M"

    def default_group(self, problem: Problem) -> int:
        """See `GridRoute.default_group`."""
        return square_side(problem.world_size)

    def trees(self, problem: Problem) -> NodeStars:
        """See `TreeRoute.trees`."""
        return NodeStars(problem, self.grid_for(problem))

    def has_gates(self, problem: Problem) -> bool:
        """Return whether any block is sent to a gate. Otherwise all messages are those of `all_gather`."""
        trees, ranks = self.shared(problem), range(problem.world_size)
        return any(
            trees.step(owner, rank) == 2 for rank in ranks for owner in trees.reads.owners_read_by(rank).tolist()
        )

    def steps(self, ranks: int) -> int:
        """See `Route.steps`."""
        return min(ranks, MOST_STEPS)

    def why_not(self, problem: Problem, nodes: int) -> str:
        """See `Route.why_not`."""
        return "one node: its messages are those of all_gather" if nodes == 1 else ""


class NodeStars(GroupedTrees):
    """The trees of a node gather: a star from each owner to its node and to the gates, and one from each gate."""

    def __init__(self, problem: Problem, grid: Grid) -> None:
        """Keep the arguments; see `GroupedTrees`."""
        super().__init__(problem, grid)
        self._gates: dict[tuple[int, int], int | None] = {}

    @property
    def steps(self) -> int:
        """See `Trees.steps`. Fewer than four ranks have no node with a gate and a second reader."""
        return min(self.ranks, MOST_STEPS)

    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """Return 1 if the owner sends to the reader and 2 if a gate does."""
        if isinstance(owner, np.ndarray):
            return np.array([self.step(rank, reader) for rank in owner.tolist()], np.int64)
        return 0 if owner == reader else 1 if self.source(owner, reader) == owner else 2

    def last_step(self, reader: int) -> int:
        """See `Trees.last_step`. Under a dense mask, the first owners already have gates."""
        if reader not in self._last_steps:
            owners = self.reads.owners_read_by(reader).tolist()
            self._last_steps[reader] = (
                2 if any(self.step(owner, reader) == 2 for owner in owners) else min(1, len(owners))
            )
        return self._last_steps[reader]

    def source(self, owner: int, reader: int) -> int:
        """Return the gate of the reader's node, or the owner for the gate itself and in a node without a gate."""
        gate = self._gate(owner, reader)
        return owner if gate is None or gate == reader else gate

    def content(self, owner: int, reader: int) -> Content:
        """Return the rows that the reader reads; for a gate, the rows that the ranks of its node read."""
        if self._gate(owner, reader) == reader:
            return self.reads.union_of(owner, self._distances(owner, reader))
        return self.reads.read(owner, reader)

    def source_back(self, owner: int, reader: int) -> int:
        """Return the sender of the forward pass."""
        return self.source(owner, reader)

    def delivery(self, owner: int, reader: int, keeps_last: bool) -> tuple[int, Content]:
        """Return the prologue for messages of owners, and the step that undoes the empty step for those of gates.

        With `keeps_last`, the readers of gates have kept their blocks, so gates send nothing on.
        """
        if keeps_last:
            return super().delivery(owner, reader, keeps_last)
        return MOST_STEPS - (self.step(owner, reader) == 2), self.content(owner, reader)

    def neighbors(self, rank: int) -> Iterable[int]:
        """Return the other ranks of the node."""
        return (peer for peer in self.grid[self._node[rank]].tolist() if peer != rank)

    def _gate(self, owner: int, reader: int) -> int | None:
        """Return the rank of the reader's node that receives the owner's block for it; None if the owner sends."""
        node = int(self._node[reader])
        if (owner, node) not in self._gates:
            self._gates[owner, node] = self._chosen_gate(owner, reader)
        return self._gates[owner, node]

    def _chosen_gate(self, owner: int, reader: int) -> int | None:
        """Return the same as `_gate`, without its cache."""
        if self._node[owner] == self._node[reader]:
            return None
        distances = self._distances(owner, reader)
        ranks = ((owner + distances) % self.ranks).tolist()
        counts = [size(self.reads.read(owner, rank)) for rank in ranks]
        saved = sum(counts) - size(self.reads.union_of(owner, distances))
        if saved == 0 or saved < MUST_SAVE * self.problem.kv_layout.counts[owner] * self.problem.kv_heads:
            return None
        return next(rank for rank, count in zip(ranks, counts, strict=True) if count)

    def _distances(self, owner: int, reader: int) -> Ints:
        """Return the distances from the owner to the ranks of the reader's node, from the owner's place on."""
        return (np.roll(self.grid[self._node[reader]], -self._place[owner]) - owner) % self.ranks
