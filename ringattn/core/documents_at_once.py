"""Packed documents over ranks with the fewest rows sent, for schedules that bring all rows at once.

A long document is cut from its end alone, as few ranks read far then, and pairs are equal over the whole pass and not
step by step: `ringattn.core.documents` has the placement for schedules of steps, and fills the ranks.
Guarantees: the same cuts and ranks, the same placement; counts are those of the contiguous layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ringattn.core.documents import FEW_ROWS, Choice, Filling, Item, Piece, Shards, items_of, joined

EVEN = 1.005
"""The greatest share of pairs over the mean that counts as even: of even placements the one with the fewest rows is
taken."""
FILLS = 4000
"""Ranks that are filled for a try, of all tries: about 0.2 s for a hundred documents."""
CHOICES = tuple(Choice(*one) for one in product((0.002, 0.03), (0.03, 0.1, 1.0), (0.0, 1.0, 2.0)))
"""What is tried. Found on drawn documents, see `ringattn.bench.placement`: others hardly save any rows."""


class Filled(NamedTuple):
    """Some ranks are filled: what is left of documents, and of pairs; the pairs of the fullest rank; how far ranks read
    in the documents that they have, added up; and the pieces of each rank.
    """

    items: tuple[Item, ...]
    left: int
    most: int
    reach: int
    pieces: tuple[tuple[Piece, ...], ...]


@lru_cache(maxsize=256)
def placed_at_once(cuts: tuple[int, ...], ranks: int) -> Shards:
    """Where documents (0, ..., length) go: of the even placements tried, the one with the fewest rows sent.

    Tried are each choice for all ranks, and then, after the first ranks of the best, each for the ranks after them.
    """
    items = items_of(cuts)
    start = Filled(tuple(items), sum(item.pairs for item in items), 0, 0, ())
    best, filled, fills = (math.inf, math.inf), list[Filled](), 0

    def enough(steps: list[Filled]) -> bool:
        """Keep these if they are the best; whether to stop: thousands of short documents are placed well at once."""
        nonlocal best, filled, fills
        fills += len(steps)
        # All but the tokens that a rank has itself are rows it receives.
        found = max(EVEN, steps[-1].most * ranks / max(1, start.left)), steps[-1].reach - cuts[-1]
        if found < best:
            best, filled = found, steps
        return fills > FILLS or best <= (EVEN, FEW_ROWS * cuts[-1])

    over = any(enough(list(fill(start, cuts[-1], ranks, choice))) for choice in CHOICES)
    before = filled
    for rank, choice in product(range(1, 0 if over else ranks - 1), CHOICES):
        if enough([*before[:rank], *fill(before[rank - 1], cuts[-1], ranks, choice)]):
            break
    return tuple(joined(list(pieces)) for pieces in filled[-1].pieces)


def fill(before: Filled, length: int, ranks: int, choice: Choice) -> Iterator[Filled]:
    """Fill the ranks that are left, one after another."""
    share, extra = divmod(length, ranks)
    for rank in range(len(before.pieces), ranks):
        # The share is that of the ranks that are left, so what one lacks all later ones take.
        items = list(before.items)
        filling = Filling(items, share + (rank < extra), max(1, before.left // (ranks - rank)), choice)
        filling.fill()
        before = Filled(
            tuple(items), before.left - filling.taken, max(before.most, filling.taken),
            before.reach + sum(filling.reach.values()), (*before.pieces, tuple(filling.pieces)),
        )  # fmt: skip
        yield before
