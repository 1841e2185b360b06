"""Ulysses x ring: partition heads within each group of ranks, and run rings between the groups.

`grid[group][place]` is a rank; G groups of U ranks. Within a group, queries, keys and values are sent to the owners of
their heads, as in `all_to_all`; the queries stay there. In turn t a group attends to the keys of the group t positions
before it: each rank sends the keys of its heads on to the same place in the next group. Outputs are returned after the
work on the keys of all groups, so only keys and values are sent between groups, and each rank sends only the keys and
values of its heads.
       step     0                 1                  ...  G                   G + 1                G + 2
       sent     q, k, v in group  keys of turn 1                              outputs in group
       work     local keys, 1/2   received, turn 0        received, turn G-1  local keys, 2/2      log-sum-exp merge
The backward pass is the transpose. It undoes the turns in reverse order, sends dK and dV back along the rings, and
returns dQ when all turns are undone.
Guarantees: the schedules of both passes are already pruned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.schedule.all_to_all import SingleHeads, shares_of
from ringattn.schedule.content import Content, HeadRows, contains, read_sets_of, union
from ringattn.schedule.ops import (
    Attend,
    Block,
    Copy,
    HeadTiles,
    Kind,
    Merge,
    Schedule,
    Work,
    attend,
    ordered_step,
    work_of,
)
from ringattn.schedule.passes import Delivery, query_rows, rows_read, transpose
from ringattn.schedule.route import Grid, GridRoute, forward_of_rank, register

RING = 0
"""The name of the sub-ring for all messages. It distinguishes received blocks from a rank's local blocks."""


@register(order=7)
@dataclass(frozen=True)
class UlyssesRing(GridRoute):
    """A schedule that partitions heads within groups of ranks and runs rings between the groups."""

    name: str = "ulysses_ring"
    by_classes: ClassVar[bool] = True
    group_lines: ClassVar[tuple[int, int, int, int]] = (2, 2, 3, 2)
    least_groups: ClassVar[int] = 12
    parameter: ClassVar[str] = "M"
    by_head: ClassVar[bool] = True
    moves_queries: ClassVar[bool] = True
    transposed: ClassVar[bool] = False
    extra_steps: ClassVar[int] = 3

    def default_group(self, problem: Problem) -> int:
        """See `GridRoute.default_group`: the greatest common divisor of ranks and K/V heads. No head has two owners."""
        return gcd(problem.world_size, problem.kv_heads)

    def shared(self, problem: Problem) -> Groups:
        """See `Route.shared`."""
        return groups_of(problem, self.grid_for(problem))

    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.forward_part`."""
        return forward_part(self.shared(problem), self.name, rank)

    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.backward_part`."""
        return backward_part(self.shared(problem), forward_of_rank(problem, self, rank), rank)

    def steps(self, ranks: int) -> int:
        """See `Route.steps`: a first step, one step per turn, and two steps for the outputs. The grid must be set."""
        return len(self.grid) + self.extra_steps


def forward_part(groups: Groups, name: str, rank: int) -> Schedule:
    """Return a rank's part of a forward pass."""
    problem, back = groups.problem, groups.turns + 1
    group, place = groups.at[rank]
    copies: list[list[Copy]] = [[] for _ in range(groups.turns + 3)]
    work: list[list[Work]] = [[] for _ in copies]
    local = work_of(problem, rank).get(rank, ())
    half = -(-len(local) // 2)
    for step, parts in ((0, local[:half]), (back, local[half:])):
        work[step] += [attend(rank, rank, parts)] if parts else []
    for q_owner in groups.grid[group].tolist():
        for owner, tiles in groups.tiles(q_owner, place).items():
            if q_owner != owner:
                q, kv = Block(Kind.Q, q_owner, ring=RING), Block(Kind.KV, owner, ring=RING)
                item = Attend(rank, q, kv, Block(Kind.OUT, q_owner, rank, RING), tiles)
                work[groups.turn(owner, rank) + 1].append(item)
    # Within the group, the outputs that are returned have the same rows as the queries that were sent.
    for q_owner, worker in [(rank, rank)] + [pair for to in groups.peers(rank) for pair in ((rank, to), (to, rank))]:
        out = Block(Kind.OUT, q_owner, worker, RING)
        if rows := groups.query_rows(q_owner, groups.at[worker][1]):
            if q_owner != worker:
                copies[0].append(Copy(Block(Kind.Q, q_owner, ring=RING), q_owner, worker, rows))
                copies[back].append(Copy(out, worker, q_owner, rows))
            if q_owner == rank:
                work[back + 1].append(Merge(rank, Block(Kind.OUT, rank), out))
    for owner, reader in _edges(groups, rank, 1):
        turn = groups.turn(owner, reader)
        source = int(groups.grid[groups.at[reader][0] - 1, groups.at[reader][1]]) if turn else owner
        # The message has the rows for the reader's group and for all later groups.
        rows = groups.read(owner, range(turn, groups.turns), groups.at[reader][1])
        if rank in (source, reader) and rows:
            copies[turn].append(Copy(Block(Kind.KV, owner, ring=RING), source, reader, rows))
    return Schedule(problem, name, False, tuple(map(ordered_step, copies, work)))


def backward_part(groups: Groups, part: Schedule, rank: int) -> Schedule:
    """Return a rank's part of the backward pass. `part`: its part of the forward pass.

    Keys of other groups are sent to the farthest group and from there back along the rings, or from the owner to each
    group, whichever sends less.
    """
    return transpose(part, _deliveries(groups, rank)).restricted_to(rank)


def _deliveries(groups: Groups, rank: int) -> Iterator[Delivery]:
    """Yield the K/V copies of the backward pass. Deliveries for turn t - 1 are concurrent with undoing turn t."""
    back: dict[int, bool] = {}
    for owner, reader in _edges(groups, rank, -1):
        turn, (group, place) = groups.turn(owner, reader), groups.at[reader]
        source = owner
        if 0 < turn < groups.turns - 1:
            if owner not in back:
                back[owner] = groups.relays_back(owner)
            source = int(groups.grid[(group + 1) % groups.turns, place]) if back[owner] else owner
        if rank in (source, reader) and (rows := groups.read(owner, range(turn, turn + 1), place)):
            # The rows are read in forward step turn + 1, so they are sent while the next forward step is undone.
            yield turn + 2, Copy(Block(Kind.KV, owner, ring=RING), source, reader, rows)


def _edges(groups: Groups, rank: int, way: int) -> Iterator[tuple[int, int]]:
    """Yield (owner, reader) of the key messages that a rank may receive or send.

    The rank relays keys to the same place in the group `way` positions after its own group.
    """
    ranks = range(groups.problem.world_size)
    group, place = groups.at[rank]
    neighbor = int(groups.grid[(group + way) % groups.turns, place])
    yield from ((owner, rank) for owner in ranks if owner != rank)
    yield from ((rank, reader) for reader in ranks if reader != rank)
    if neighbor != rank:
        yield from ((owner, neighbor) for owner in ranks if owner not in (rank, neighbor))


# --- groups of ranks that partition the heads among their places: the rows that each place needs ----------------------
# A rank derives its part of the schedule from the tiles of its group, and from the read sets of other groups.


class Groups:
    """The tiles of ranks by head, and the rows that each place of a group needs for its heads."""

    def __init__(self, problem: Problem, grid: Grid) -> None:
        """Compute the share of heads of each place, and nothing else yet."""
        self.problem, self.grid, self.reads = problem, np.array(grid), read_sets_of(problem)
        self.turns, self.places = self.grid.shape
        self.shares = shares_of(problem, range(problem.q_heads), self.places)
        self.at = {rank: (group, place) for group, ranks in enumerate(grid) for place, rank in enumerate(ranks)}
        self._read: dict[tuple[int, range, int], Content] = {}
        self._alike: dict[tuple[int, range], Content] = {}
        self._single: dict[int, SingleHeads[int]] = {}
        self._tiles: dict[tuple[int, int], dict[int, tuple[HeadTiles, ...]]] = {}

    def peers(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's group."""
        return [int(peer) for peer in self.grid[self.at[rank][0]] if peer != rank]

    def turn(self, owner: int, reader: int) -> int:
        """Return the distance from the owner's group to the reader's group."""
        return (self.at[reader][0] - self.at[owner][0]) % self.turns

    def tiles(self, q_owner: int, place: int) -> dict[int, tuple[HeadTiles, ...]]:
        """Return the tiles of `q_owner`'s queries that the rank at a place computes, by owner of the keys."""
        if (q_owner, place) not in self._tiles:
            if q_owner not in self._single:
                work = work_of(self.problem, q_owner)
                tables = {owner: [part.tiles for part in parts] for owner, parts in work.items()}
                self._single[q_owner] = SingleHeads(self.problem, tables)
            self._tiles[q_owner, place] = self._single[q_owner].of_heads(self.shares[place])
        return self._tiles[q_owner, place]

    def query_rows(self, q_owner: int, place: int) -> Content:
        """Return the rows of `q_owner`'s queries that the rank at a place works on."""
        tiles = self.tiles(q_owner, place)
        return query_rows(tuple(part for owner in tiles if owner != q_owner for part in tiles[owner]))

    def read(self, owner: int, turns: range, place: int) -> Content:
        """Return the key rows of `owner` that the ranks at a place read in some turns."""
        key = owner, turns, place
        if key not in self._read:
            self._read[key] = self._rows_read(owner, turns, place)
        return self._read[key]

    def _rows_read(self, owner: int, turns: range, place: int) -> Content:
        """Return the same as `read`, without its cache."""
        if not self.reads.heads_alike:
            q_owners = self._q_owners(owner, turns).tolist()
            return union(rows_read(self.tiles(q_owner, place).get(owner, ())) for q_owner in q_owners)
        # All places read the same rows, each place for its heads.
        if (owner, turns) not in self._alike:
            distances = (self._q_owners(owner, turns) - owner) % self.problem.world_size
            self._alike[owner, turns] = self.reads.union_of(owner, distances)
        heads = sorted({head // self.problem.group for head in self.shares[place]})
        return tuple(HeadRows(StridedRange(head, 1), part.rows) for head in heads for part in self._alike[owner, turns])

    def _q_owners(self, owner: int, turns: range) -> Ints:
        """Return the ranks whose queries attend to `owner`'s keys in some turns, without the owner."""
        q_owners = self._groups(owner, turns).ravel()
        return q_owners[q_owners != owner]

    def relays_back(self, owner: int) -> bool:
        """Return whether relaying keys back along the rings sends no more than the owner sending to each group.

        This holds if each group reads all rows that the groups before it read.
        """
        if self.reads.heads_alike:
            return self.reads.grow(
                owner, (self._groups(owner, range(1, self.turns))[None] - owner) % self.problem.world_size
            )
        return all(
            contains(self.read(owner, range(turn, turn + 1), place), self.read(owner, range(turn - 1, turn), place))
            for place in range(self.places)
            for turn in range(2, self.turns)
        )

    def _groups(self, owner: int, turns: range) -> Ints:
        """Return the ranks of the groups at these distances from the owner's group."""
        group = self.at[owner][0]
        return self.grid.take(range(group + turns.start, group + turns.stop), axis=0, mode="wrap")


_cache: WeakValueDictionary[tuple[Problem, Grid], Groups] = WeakValueDictionary()


def groups_of(problem: Problem, grid: Grid) -> Groups:
    """Return the `Groups` of a problem: the cached object if a caller still references it, otherwise a new one.

    A caller that plans all ranks of a group keeps a reference, so that the shared tables are computed once.
    """
    groups = _cache.get((problem, grid))
    if groups is None:
        groups = _cache[problem, grid] = Groups(problem, grid)
    return groups
