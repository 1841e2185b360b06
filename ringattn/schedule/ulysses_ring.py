"""Ulysses x ring: within each group of ranks by heads, and between the groups in rings.

`grid[group][place]` is a rank; G groups of U ranks. Queries, keys and values of a group go to the ranks of the group by
heads, as in `all_to_all`, and queries stay there. In turn t a group attends to the keys of the group t before it: each
rank passes the keys of its heads on to its place in the next group. Outputs return when all groups' keys have been
seen, so between groups only keys and values travel, and only those of a rank's heads.
       step     0                1                  ...  G                  G + 1               G + 2
       travels  q, k, v in group keys of turn 1                             outputs in group
       work     own keys, 1st h. received, turn 0        received, turn G-1 own keys, 2nd h.    log-sum-exp merge
The backward is the transpose: turns in reverse, dK and dV back along the rings, dQ when all turns are undone.
Guarantees: a schedule that needs no pass, forward or backward.
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
from ringattn.schedule.passes import Delivery, rows_asked, rows_read, transpose
from ringattn.schedule.route import Grid, GridRoute, forward_of_rank, register

RING = 0
"""The name of the sub-ring in which all of it travels: what is received is told from a rank's own by it."""


@register(order=7)
@dataclass(frozen=True)
class UlyssesRing(GridRoute):
    """By heads within groups, and rings between the groups."""

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
        """See `GridRoute.default_group`: the most that divide the ranks and the K/V heads, so that no head has two."""
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
        """See `Route.steps`: a first one, one for each turn, and two for the outputs. It must have its grid."""
        return len(self.grid) + self.extra_steps


def forward_part(groups: Groups, name: str, rank: int) -> Schedule:
    """What a rank does in a forward pass."""
    problem, back = groups.problem, groups.turns + 1
    group, place = groups.at[rank]
    copies: list[list[Copy]] = [[] for _ in range(groups.turns + 3)]
    work: list[list[Work]] = [[] for _ in copies]
    own = work_of(problem, rank).get(rank, ())
    half = -(-len(own) // 2)
    for step, some in ((0, own[:half]), (back, own[half:])):
        work[step] += [attend(rank, rank, some)] if some else []
    for asker in groups.grid[group].tolist():
        for owner, mine in groups.served(asker, place).items():
            if asker != owner:
                q, kv = Block(Kind.Q, asker, ring=RING), Block(Kind.KV, owner, ring=RING)
                item = Attend(rank, q, kv, Block(Kind.OUT, asker, rank, RING), mine)
                work[groups.turn(owner, rank) + 1].append(item)
    # In the group queries go out and outputs return, the same rows.
    for asker, server in [(rank, rank)] + [pair for to in groups.others(rank) for pair in ((rank, to), (to, rank))]:
        out = Block(Kind.OUT, asker, server, RING)
        if rows := groups.asked(asker, groups.at[server][1]):
            if asker != server:
                copies[0].append(Copy(Block(Kind.Q, asker, ring=RING), asker, server, rows))
                copies[back].append(Copy(out, server, asker, rows))
            if asker == rank:
                work[back + 1].append(Merge(rank, Block(Kind.OUT, rank), out))
    for owner, reader in _edges(groups, rank, 1):
        turn = groups.turn(owner, reader)
        source = int(groups.grid[groups.at[reader][0] - 1, groups.at[reader][1]]) if turn else owner
        # For its own group, and for all farther ones.
        rows = groups.read(owner, range(turn, groups.turns), groups.at[reader][1])
        if rank in (source, reader) and rows:
            copies[turn].append(Copy(Block(Kind.KV, owner, ring=RING), source, reader, rows))
    return Schedule(problem, name, False, tuple(map(ordered_step, copies, work)))


def backward_part(groups: Groups, part: Schedule, rank: int) -> Schedule:
    """What a rank does in the transposed schedule of which `part` is its forward.

    Keys of other groups go to the farthest group and back along the rings, or to each: whichever sends less.
    """
    return transpose(part, _deliveries(groups, rank)).restricted_to(rank)


def _deliveries(groups: Groups, rank: int) -> Iterator[Delivery]:
    """The K/V copies of the backward: turn t is undone beside the deliveries for turn t - 1."""
    back: dict[int, bool] = {}
    for owner, reader in _edges(groups, rank, -1):
        turn, (group, place) = groups.turn(owner, reader), groups.at[reader]
        source = owner
        if 0 < turn < groups.turns - 1:
            if owner not in back:
                back[owner] = groups.relays_back(owner)
            source = int(groups.grid[(group + 1) % groups.turns, place]) if back[owner] else owner
        if rank in (source, reader) and (rows := groups.read(owner, range(turn, turn + 1), place)):
            # Read in forward step turn + 1, so there when the step after it is undone.
            yield turn + 2, Copy(Block(Kind.KV, owner, ring=RING), source, reader, rows)


def _edges(groups: Groups, rank: int, way: int) -> Iterator[tuple[int, int]]:
    """(owner, reader) of the messages with keys that a rank may receive or send; others' go on `way` groups farther."""
    ranks = range(groups.problem.world_size)
    group, place = groups.at[rank]
    beside = int(groups.grid[(group + way) % groups.turns, place])
    yield from ((owner, rank) for owner in ranks if owner != rank)
    yield from ((rank, reader) for reader in ranks if reader != rank)
    if beside != rank:
        yield from ((owner, beside) for owner in ranks if owner not in (rank, beside))


# --- groups of ranks that divide the heads among their places: which rows each place needs from whom -----------------
# A rank finds its part of the schedule from the tiles of its own group, and of other groups from what they read.


class Groups:
    """Who asks for what: the tiles of ranks by head, and the rows that each place of a group needs for its heads."""

    def __init__(self, problem: Problem, grid: Grid) -> None:
        """Asks nothing of the problem yet."""
        self.problem, self.grid, self.reads = problem, np.array(grid), read_sets_of(problem)
        self.turns, self.places = self.grid.shape
        self.shares = shares_of(problem, range(problem.q_heads), self.places)
        self.at = {rank: (group, place) for group, ranks in enumerate(grid) for place, rank in enumerate(ranks)}
        self._read: dict[tuple[int, range, int], Content] = {}
        self._alike: dict[tuple[int, range], Content] = {}
        self._single: dict[int, SingleHeads[int]] = {}
        self._served: dict[tuple[int, int], dict[int, tuple[HeadTiles, ...]]] = {}

    def others(self, rank: int) -> list[int]:
        """The other ranks of a rank's group."""
        return [int(other) for other in self.grid[self.at[rank][0]] if other != rank]

    def turn(self, owner: int, reader: int) -> int:
        """How many groups the reader's lies after the owner's."""
        return (self.at[reader][0] - self.at[owner][0]) % self.turns

    def served(self, asker: int, place: int) -> dict[int, tuple[HeadTiles, ...]]:
        """The tiles of a rank's queries that the rank of a place works on, by owner of the keys."""
        if (asker, place) not in self._served:
            if asker not in self._single:
                work = work_of(self.problem, asker)
                tables = {owner: [part.tiles for part in parts] for owner, parts in work.items()}
                self._single[asker] = SingleHeads(self.problem, tables)
            self._served[asker, place] = self._single[asker].of_heads(self.shares[place])
        return self._served[asker, place]

    def asked(self, asker: int, place: int) -> Content:
        """The query rows that the rank of a place works on."""
        tiles = self.served(asker, place)
        return rows_asked(tuple(each for owner in tiles if owner != asker for each in tiles[owner]))

    def read(self, owner: int, turns: range, place: int) -> Content:
        """The key rows that the ranks of a place read in some turns: those of the groups so far after the owner's."""
        key = owner, turns, place
        if key not in self._read:
            self._read[key] = self._rows_read(owner, turns, place)
        return self._read[key]

    def _rows_read(self, owner: int, turns: range, place: int) -> Content:
        if not self.reads.heads_alike:
            askers = self._askers(owner, turns).tolist()
            return union(rows_read(self.served(asker, place).get(owner, ())) for asker in askers)
        # All places read the same rows, each for its heads.
        if (owner, turns) not in self._alike:
            distances = (self._askers(owner, turns) - owner) % self.problem.world_size
            self._alike[owner, turns] = self.reads.union_of(owner, distances)
        heads = sorted({head // self.problem.group for head in self.shares[place]})
        return tuple(HeadRows(StridedRange(head, 1), part.rows) for head in heads for part in self._alike[owner, turns])

    def _askers(self, owner: int, turns: range) -> Ints:
        askers = self._groups(owner, turns).ravel()
        return askers[askers != owner]

    def relays_back(self, owner: int) -> bool:
        """Whether keys that come back along the rings are no more than those that the owner would send to each group.

        So where each group reads all that the groups before it read.
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
        """The ranks that are so many turns after the owner's."""
        group = self.at[owner][0]
        return self.grid.take(range(group + turns.start, group + turns.stop), axis=0, mode="wrap")


_held: WeakValueDictionary[tuple[Problem, Grid], Groups] = WeakValueDictionary()


def groups_of(problem: Problem, grid: Grid) -> Groups:
    """The `Groups` that somebody holds, else new ones: who plans all ranks of a group asks for what they share once."""
    found = _held.get((problem, grid))
    if found is None:
        found = _held[problem, grid] = Groups(problem, grid)
    return found
