"""Packed documents over ranks with the fewest rows sent, for schedules that bring all rows at once.

A long document is cut from its end alone, as few ranks read far then, and pairs are equal over the whole pass and not
step by step: `ringattn.core.documents` has the placement for schedules of steps, and fills the ranks.
What is searched is how each rank is filled, one after another. Ranks that take the ends of long documents take as many
pairs as evenness allows, so that few ranks read far.
Guarantees: the same cuts and ranks, the same placement; counts are those of the contiguous layout.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from random import Random
from typing import NamedTuple

from ringattn.core.documents import FEW_ROWS, Choice, Filling, Item, Piece, Shards, items_of, joined

EVEN = 1.005
"""The greatest share of pairs over the mean that counts as even: of even placements the one with the fewest rows is
taken."""
FILLS = 3000
"""Ranks that are filled for a search, all tries together: about 0.2 s for a hundred documents."""
CHOICES = tuple(Choice(*one) for one in product((0.002, 0.03), (0.03, 0.1, 1.0), (0.0, 1.0, 2.0)))
"""Ways to fill a rank. Found on drawn documents, see `ringattn.bench.placement`: others hardly save any rows."""
WORSE = 0.01
"""Share by which a step of the search may be worse at first; in the end none may."""
OVER = 20
"""How many shares of the rows a share of pairs too many costs while the search walks."""


class Way(NamedTuple):
    """How a rank is filled: by which choice, and how many pairs it takes over the mean. 0: its part of what is left."""

    choice: Choice
    pairs: float


class Filled(NamedTuple):
    """Some ranks are filled: what is left of documents, and of pairs; the pairs of the fullest rank; how far ranks read
    in the documents that they have, added up; and the pieces of each rank.
    """

    items: tuple[Item, ...]
    left: int
    most: int
    reach: int
    pieces: tuple[tuple[Piece, ...], ...]


Tried = tuple[float, tuple[Way, ...], list[Filled]]
"""A placement: its cost, how its ranks are filled, and the ranks after each of them."""


@lru_cache(maxsize=256)
def placed_at_once(cuts: tuple[int, ...], ranks: int, even: float = EVEN) -> Shards:
    """Where documents (0, ..., length) go: of the placements tried that are so even, the one with the fewest rows sent.

    Each way is tried for all ranks. From the best of these on one or two ranks at a time get other ways, drawn; what is
    a little worse is kept as well, less and less, so that the search leaves places where no single change helps.
    """
    search = _Search(cuts, ranks, even)
    for choice, pairs in product(CHOICES, (0.0, even, (1 + even) / 2)):
        if search.tried((Way(choice, pairs),) * ranks, 0):
            return search.shards()
    search.current = search.best
    draw = Random(0)  # of its methods `random` alone gives the same numbers in every version of Python
    while search.fills < FILLS and ranks > 2:
        at = int(draw.random() * (ranks - 1))
        ways = list(search.current[1])
        for rank in range(at, at + 1 + (draw.random() < 0.3)):
            pairs = (0.0, even, even, even - 2 * (even - 1) * draw.random())[int(draw.random() * 4)]
            ways[rank] = Way(CHOICES[int(draw.random() * len(CHOICES))], pairs)
        if search.tried(tuple(ways), at):
            break
    return search.shards()


class _Search:
    """The best placement tried, and the one that the search is at."""

    def __init__(self, cuts: tuple[int, ...], ranks: int, even: float) -> None:
        self.length, self.ranks, self.even = cuts[-1], ranks, even
        items = items_of(cuts)
        self.start = Filled(tuple(items), sum(item.pairs for item in items), 0, 0, ())
        self.mean = max(1, self.start.left) / ranks
        self.fills, self.least = 0, (math.inf, math.inf)
        self.best: Tried = (math.inf, (), [])
        self.current: Tried = (math.inf, (), [])

    def tried(self, ways: tuple[Way, ...], first: int) -> bool:
        """Fill the ranks from `first` on, those before as they are; whether that is good enough to stop."""
        steps = self.current[2][:first]
        while len(steps) < self.ranks:
            steps.append(fill(steps[-1] if steps else self.start, self.length, self.ranks, self.mean, ways[len(steps)]))
        self.fills += self.ranks - first
        # All but the tokens that a rank has itself are rows it receives.
        share, rows = steps[-1].most / self.mean, steps[-1].reach - self.length
        cost = rows + OVER * max(0.0, share / self.even - 1) * (rows + self.length)
        if cost <= (1 + WORSE * (1 - self.fills / FILLS)) * self.current[0]:
            self.current = cost, ways, steps
        if (max(self.even, share), rows) < self.least:
            self.least, self.best = (max(self.even, share), rows), (cost, ways, steps)
        # Thousands of short documents are placed well at once.
        return self.least <= (self.even, FEW_ROWS * self.length)

    def shards(self) -> Shards:
        return tuple(joined(list(pieces)) for pieces in self.best[2][-1].pieces)


def fill(before: Filled, length: int, ranks: int, mean: float, way: Way) -> Filled:
    """Fill the next rank."""
    rank, items = len(before.pieces), list(before.items)
    share, extra = divmod(length, ranks)
    # What one lacks all later ones take, and the last one has no choice.
    part = before.left // (ranks - rank)
    pairs = part if not way.pairs or rank == ranks - 1 else min(int(way.pairs * mean), before.left)
    filling = Filling(items, share + (rank < extra), max(1, pairs), way.choice)
    filling.fill()
    return Filled(
        tuple(items), before.left - filling.taken, max(before.most, filling.taken),
        before.reach + sum(filling.reach.values()), (*before.pieces, tuple(filling.pieces)),
    )  # fmt: skip
