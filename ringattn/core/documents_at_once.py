"""Packed documents over ranks with the fewest rows sent, for schedules that bring all rows at once.

Pairs are equal over the whole pass and not step by step, see `ringattn.core.documents` for the other placement.
Guarantees: the same cuts and ranks, the same placement; counts are those of the contiguous layout.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from ringattn.core.documents import Choice, Shards, load_of, place

EVEN = 1.005
"""The greatest share of pairs over the mean that counts as even: of even placements the one with the fewest rows is
taken."""
CHOICES = tuple(Choice(*one) for one in product((0.002, 0.03), (0.03, 0.1, 1.0), (0.0, 1.0, 2.0)))
"""Where the search begins."""


@lru_cache(maxsize=256)
def placed_at_once(cuts: tuple[int, ...], ranks: int) -> Shards:
    """Where documents (0, ..., length) go: of the even placements found, the one with the fewest rows sent."""

    def score(shards: Shards) -> tuple[float, int]:
        load = load_of(cuts, shards)
        return max(EVEN, max(load.pairs) * ranks / max(1, sum(load.pairs))), sum(load.sent)

    return min((place(cuts, ranks, choice) for choice in CHOICES), key=score)
