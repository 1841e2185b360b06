"""Packed documents over ranks with the fewest rows sent, for schedules that bring all rows at once.

A long document is cut from its end alone, as few ranks read far then, and pairs are equal over the whole pass and not
step by step: `ringattn.core.documents` has the placement for schedules of steps, and those that a search starts from.
What is searched is the rank at which each document is at home. The rest follows: some ranks take the end of a long
document, in their order as many last tokens as their pairs allow, and fill up with its first ones, which cost no rows:
they read these anyway. What is left of it stays at its home. Then ranks that have too many tokens give first tokens
of their documents to those that lack some, for a row each.
Guarantees: the same cuts and ranks, the same placement; counts are those of the contiguous layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import product
from random import Random
from typing import NamedTuple

from ringattn.core.bounded_cache import bounded
from ringattn.core.documents import (
    FEW_ROWS,
    Choice,
    Load,
    Piece,
    Shards,
    causal_pairs,
    items_of,
    joined,
    load_of,
    place,
)

EVEN = 1.005
"""The greatest share of pairs over the mean that counts as even: of even placements the one with the fewest rows is
taken."""
FILLS = 80000
"""Work of a search: tries times ranks, about 0.2 s for a hundred documents."""
CHOICES = tuple(Choice(*one) for one in product((0.002, 0.03), (0.03, 0.1, 1.0), (0.0, 1.0, 2.0)))
"""Placements to start from, each with equal pairs, with as many as evenness allows, and between."""
WORSE = 0.001
"""Share of the rows by which a step of the search may be worse at first; in the end none may."""
PRICE = 100
"""Rows that a pair too many costs at first, times the tokens of a rank; in the end `DEARER` times as many."""
DEARER = 20
LAST = 8
"""So many of the best ones found are counted exactly."""


class Homes(NamedTuple):
    """By document: the rank where it is at home; by rank: the document whose end it takes, or -1, and the tokens and
    pairs of the documents that are at home there."""

    homes: list[int]
    ends: list[int]
    tokens: list[int]
    pairs: list[int]


class Dealt(NamedTuple):
    """What follows: rows sent; pairs that ranks have beyond what is even, added up; parts of the documents whose ends
    are taken, (rank, document, lo, hi); and first tokens given, (from, to, count)."""

    rows: int
    over: int
    parts: list[tuple[int, int, int, int]]
    given: list[tuple[int, int, int]]


@bounded
def placed_at_once(cuts: tuple[int, ...], ranks: int, even: float = EVEN, fills: int = FILLS) -> Shards:
    """Where documents (0, ..., length) go: of the placements tried that are so even, the one with the fewest rows sent.

    `fills`: tries of the search, times ranks.
    """
    search, found = Search(cuts, ranks, even), []

    def order(load: Load) -> tuple[float, int]:
        return max(even, max(load.pairs) * ranks / max(1, sum(load.pairs))), sum(load.sent)

    middle = int(search.most * (1 + even) / (2 * even))
    for choice, most in product(CHOICES, (None, search.most, middle)):
        shards = place(cuts, ranks, choice, most)
        found.append((order(load_of(cuts, shards)), shards))
        # Thousands of short documents are placed well at once.
        if found[-1][0] <= (even, FEW_ROWS * cuts[-1]):
            return shards
    for homes in search.walked([search.homes_of(one) for _, one in found], fills // ranks)[-LAST:]:
        shards = search.shards(homes)
        found.append((order(load_of(cuts, shards)), shards))
    return min(found)[1]


class Search:
    """The documents, longest first, and what each rank has of tokens exactly and of pairs at most."""

    def __init__(self, cuts: tuple[int, ...], ranks: int, even: float) -> None:
        self.items = items_of(cuts)[::-1]
        self.tokens, self.pairs = [item.tokens for item in self.items], [item.pairs for item in self.items]
        share, extra = divmod(cuts[-1], ranks)
        self.shares = [share + (rank < extra) for rank in range(ranks)]
        self.most = int(even * sum(item.pairs for item in self.items) / ranks)
        self.price = PRICE * ranks / max(1, cuts[-1])

    def homes_of(self, shards: Shards) -> Homes:
        """As nearly as can be told: the last rank that has a part of a document is its home, and a rank that reads
        farther takes its end, or that of a longer document."""
        homes = Homes([0] * len(self.items), *([fill] * len(shards) for fill in (-1, 0, 0)))
        by_start = sorted((item.start, at) for at, item in enumerate(self.items))
        reach: list[dict[int, int]] = [{} for _ in self.items]  # by document and rank
        for rank, shard in enumerate(shards):
            for start, stop in shard:
                first = bisect_left(by_start, (start + 1, 0)) - 1
                for begin, at in by_start[first : bisect_left(by_start, (stop, 0))]:
                    reach[at][rank] = min(stop - begin, self.tokens[at])
        for at in reversed(range(len(reach))):
            home = homes.homes[at] = max(reach[at])
            homes.tokens[home] += self.tokens[at]
            homes.pairs[home] += self.pairs[at]
            for rank, end in reach[at].items():
                if end > reach[at][home]:
                    homes.ends[rank] = at
        return homes

    def dealt(self, homes: Homes) -> Dealt:
        """Deal out the documents whose ends are taken, then what ranks have too many."""
        lack = [share - tokens for share, tokens in zip(self.shares, homes.tokens, strict=True)]
        room = [self.most - pairs for pairs in homes.pairs]
        rows, parts, given = 0, [], []
        last = {at: rank for rank, at in enumerate(homes.ends) if at >= 0}
        left = {at: (0, self.tokens[at]) for at in last}
        for at in last:
            lack[homes.homes[at]] += self.tokens[at]
            room[homes.homes[at]] += self.pairs[at]
        for rank, at in enumerate(homes.ends):
            if at < 0:
                continue
            lo, hi = left[at]
            count, step = lack[rank], hi - lo - lack[rank]
            if step < 0:
                count, step = hi - lo, 0
            if count > 0:
                # Of `count` tokens the pairs grow by the same with each one that is a last and not a first one.
                fewest = count * lo + count * (count + 1) // 2
                end = min(count, max(0, (room[rank] - fewest) // step)) if step else 0
                parts += [(rank, at, lo, lo + count - end), (rank, at, hi - end, hi)]
                rows += hi - count if end else lo
                lack[rank] -= count
                room[rank] -= fewest + end * step
                lo, hi = left[at] = lo + count - end, hi - end
            if rank == last[at] and lo < hi:
                home = homes.homes[at]
                parts.append((home, at, lo, hi))
                rows += lo
                lack[home] -= hi - lo
                room[home] -= causal_pairs(lo, hi)
        takers = [rank for rank, count in enumerate(lack) if count > 0]
        for rank in range(len(lack)):
            while lack[rank] < 0:
                count = min(-lack[rank], lack[takers[-1]])
                given.append((rank, takers[-1], count))
                rows += count
                lack[rank] += count
                lack[takers[-1]] -= count
                room[rank] += count * (count + 1) // 2
                room[takers[-1]] -= count * (count + 1) // 2
                if not lack[takers[-1]]:
                    takers.pop()
        return Dealt(rows, -sum(one for one in room if one < 0), parts, given)

    def shards(self, homes: Homes) -> Shards:
        """The pieces. Of what ranks give, `dealt` knows rows and pairs if each time a document has enough tokens."""
        dealt, taken = self.dealt(homes), set(homes.ends)
        pieces: list[list[Piece]] = [[] for _ in self.shares]
        whole = [(rank, at, 0, self.items[at].hi) for at, rank in enumerate(homes.homes) if at not in taken]
        for rank, at, lo, hi in whole + dealt.parts:
            if lo < hi:
                pieces[rank].append((self.items[at].start + lo, self.items[at].start + hi))
        for rank, taker, lack in dealt.given:
            while lack:
                start, stop = pieces[rank].pop(0)  # the longest whole document; what is left of it is the last choice
                cut = min(start + lack, stop)
                pieces[taker].append((start, cut))
                pieces[rank] += [(cut, stop)] if cut < stop else []
                lack -= cut - start
        return tuple(map(joined, pieces))

    def walked(self, starts: list[Homes], steps: int) -> list[Homes]:
        """The best ones met, each better than those before: from the best start on, changes as drawn. What is a little
        worse is kept as well, less and less, so that the search leaves places where no single change helps."""
        draw = Random(0).random  # the only method that gives the same numbers in every version of Python
        tries = [(self.dealt(one), one) for one in starts]
        now, homes = min(tries, key=lambda one: one[0].rows + self.price * one[0].over)
        best, found = now, [homes]
        for step in range(steps):
            left = 1 - step / steps
            price = self.price * (1 + DEARER * (1 - left))
            other = self.changed(homes, draw)
            dealt = self.dealt(other)
            if dealt.rows + price * dealt.over <= now.rows + price * now.over + WORSE * left * best.rows:
                now, homes = dealt, other
                if (now.over, now.rows) < (best.over, best.rows):
                    best = now
                    found.append(homes)
        return found

    def changed(self, now: Homes, draw: Callable[[], float]) -> Homes:
        """One change: a rank takes another end, a document moves, or two, mostly of like length, change places."""
        homes, ends, tokens, pairs = now.homes[:], now.ends, now.tokens[:], now.pairs[:]
        kind, ranks, at = draw(), len(ends), int(draw() * len(homes))
        if kind < 0.03:
            ends = ends[:]
            ends[int(draw() * ranks)] = int(draw() * (min(len(homes), ranks) + 1)) - 1
            return Homes(homes, ends, tokens, pairs)
        moves = [(at, int(draw() * ranks))]
        if kind > 0.3:
            far = draw()
            other = (at + 1 + int(far * far * far * len(homes))) % len(homes)
            moves = [(at, homes[other]), (other, homes[at])]
        for one, rank in moves:
            tokens[homes[one]] -= self.tokens[one]
            pairs[homes[one]] -= self.pairs[one]
            tokens[rank] += self.tokens[one]
            pairs[rank] += self.pairs[one]
            homes[one] = rank
        return Homes(homes, ends, tokens, pairs)
