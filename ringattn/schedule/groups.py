"""Groups of ranks that divide the heads among their places: which rows each place needs of whom.

So a rank finds its part of Ulysses x ring from the tiles of its own group, and of other groups from what they read.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.schedule.all_to_all import SingleHeads, shares_of
from ringattn.schedule.content import Content, HeadRows, contains, union
from ringattn.schedule.ops import HeadTiles, work_of
from ringattn.schedule.passes import rows_asked, rows_read
from ringattn.schedule.read_sets import read_sets_of
from ringattn.schedule.route import Grid


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
            self._alike[owner, turns] = self.reads.together(owner, distances)
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
