"""Fill one rank after the other with items, and cut an item that does not fit into any rank.

A rank that takes the last tokens of an item fills its share with whole small items, or with first tokens of the same
item. The first tokens cost no rows, because the rank reads them anyway.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from ringattn.core.areas import Areas, Item, Piece, Shards

LEAST_LACK = 0.005
"""Share of a rank's pairs. If fewer are missing, do not try another way to cut a document."""


class Choice(NamedTuple):
    """The parameters of a way to fill ranks. The best values depend on the documents.

    `lack`: the share of a rank's pairs that it may miss before a document is cut for it. `light`: a rank that takes the
    end of a long document is filled up with whole documents that have at most this share of the rank's pairs.
    `density`: the mean number of pairs per token that the last part of a cut document should have, relative to the mean
    of the rank. With a larger value, ranks take more first tokens earlier; with 0 they take none. `even`: a document
    with more pairs than this number of ranks' shares is cut zigzag over all ranks, which then have equal work with the
    keys of every other rank.
    """

    lack: float
    light: float
    density: float
    even: float = math.inf


class _Parts(NamedTuple):
    """The numbers of tokens and items with which a rank is filled.

    `last`, `first`: numbers of last and first tokens of the cut item. `whole`: the number of smallest items that are
    taken whole. `next_first`: the number of first tokens of the item after these. `lack`: the pairs that the rank still
    misses afterwards.
    """

    last: int
    first: int
    whole: int
    next_first: int
    lack: int


def place(areas: Areas, ranks: int, choice: Choice, most: int | None = None) -> Shards:
    """Return the placement of the items that one choice gives.

    All ranks take the same number of pairs; with `most`, they take up to `most` pairs and the last rank takes the rest.
    """
    items = sorted(areas.items)
    left = sum(item.pairs for item in items)
    share, extra = divmod(areas.length, ranks)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    even_tokens, even_pairs, extra_tokens = [0] * ranks, [0] * ranks, 0
    whole = choice.even * left / ranks
    while items and items[-1].pairs > whole:
        item = items.pop()
        for rank, (lo, mid, end, hi) in enumerate(_zigzag(item.tokens, ranks, extra_tokens)):
            pieces[rank] += [(item.start + a, item.start + b) for a, b in ((lo, mid), (end, hi)) if b > a]
            even_tokens[rank] += mid - lo + hi - end
            even_pairs[rank] += item.area(lo, mid) + item.area(end, hi)
        extra_tokens += item.tokens % ranks
    for rank in range(ranks):
        # Divide the remaining pairs by the remaining ranks, so all later ranks take the pairs that one rank misses.
        part = left // (ranks - rank) if most is None or rank == ranks - 1 else min(most, left)
        pairs = max(1, part - even_pairs[rank])
        filling = Filling(items, share + (rank < extra) - even_tokens[rank], pairs, choice)
        filling.fill()
        left -= filling.taken + even_pairs[rank]
        pieces[rank] += filling.pieces
    return tuple(map(joined, pieces))


def _zigzag(tokens: int, ranks: int, first_extra: int) -> list[tuple[int, int, int, int]]:
    """Return (lo, mid, end, hi) for each rank: it takes the tokens lo .. mid - 1 and end .. hi - 1 of a document.

    The tokens left over by the division go to the ranks from `first_extra` (modulo `ranks`) on, one each.
    """
    size, extra = divmod(tokens, ranks)
    lo, hi, parts = 0, tokens, []
    for rank in range(ranks):
        count = size + ((rank - first_extra) % ranks < extra)
        mid, end = lo + count // 2, hi - (count - count // 2)
        parts.append((lo, mid, end, hi))
        lo, hi = mid, end
    return parts


class Filling:
    """The process of filling one rank with items or parts of them.

    `tokens` and `pairs`: the numbers that the rank still has to take.
    """

    def __init__(self, items: list[Item], tokens: int, pairs: int, choice: Choice) -> None:
        """Start with a rank that has no tokens yet."""
        self.items, self.tokens, self.pairs, self.choice = items, tokens, pairs, choice
        self.share = pairs
        self.pieces: list[Piece] = []
        self.taken = 0
        # Tokens and pairs of the n smallest items: filling up with these costs the fewest pairs.
        self._tokens, self._pairs = _sums(items)

    def fill(self) -> None:
        """Take all tokens of the rank's share."""
        may_lack = int(self.choice.lack * self.share)
        if self.items and not self._fits(self.items[-1], may_lack):
            self._cut(len(self.items) - 1)
            return
        while self.tokens and self.items:
            index = self._largest_fitting(may_lack)
            # The largest number of pairs that the items up to this one can still provide.
            most = self._pairs[index + 1] - self._least_pairs(max(0, self._tokens[index + 1] - self.tokens))
            if index + 1 < len(self.items) and self.pairs - most > may_lack:
                self._cut(index + 1)
                return
            if index < 0 or self._tokens[index + 1] <= self.tokens:
                break  # all items that fit are among the smallest, which fill up the rank
            item = self.items.pop(index)
            # An item that does not fit now will not fit later, so larger items are not considered again.
            del self._tokens[index + 1 :], self._pairs[index + 1 :]
            self._keep(item, item.lo, item.hi)
        self._take_smallest(bisect_left(self._tokens, self.tokens + 1) - 1)
        self._finish()

    def _least_pairs(self, tokens: int) -> int:
        """Return the pairs of `tokens` tokens of the smallest items, counting the last item in proportion."""
        n = bisect_left(self._tokens, tokens)
        if not n or n == len(self._tokens):
            return self._pairs[n - 1] if n else 0
        over, count = self._tokens[n] - tokens, self._tokens[n] - self._tokens[n - 1]
        return self._pairs[n] - (self._pairs[n] - self._pairs[n - 1]) * over // count

    def _fits(self, item: Item, over: int) -> bool:
        """Return whether the rank can take this item and still has enough pairs for the rest of its tokens.

        `over`: the number of pairs by which the rank may exceed its share.
        """
        rest = self.tokens - item.tokens
        return rest >= 0 and item.pairs + self._least_pairs(rest) <= self.pairs + over

    def _largest_fitting(self, over: int) -> int:
        """Return the index of the last item that fits, -1 if there is none."""
        last = len(self._tokens) - 2
        if last >= 0 and self._fits(self.items[last], over):
            return last  # the common case needs no search
        return _last_true(last, lambda index: self._fits(self.items[index], over), -1)

    def _keep(self, item: Item, lo: int, hi: int) -> None:
        """Give the rank tokens lo .. hi - 1 of an item."""
        if hi > lo:
            pairs = item.area(lo, hi)
            self.pieces.append((item.start + lo, item.start + hi))
            self.tokens, self.pairs, self.taken = self.tokens - hi + lo, self.pairs - pairs, self.taken + pairs

    def _keep_ends(self, item: Item, first: int, last: int) -> None:
        """Give the rank `first` tokens at the start of an item and `last` at its end. Put the rest of the item back."""
        lo, hi = item.lo + first, item.hi - last
        self._keep(item, item.lo, lo)
        self._keep(item, hi, item.hi)
        if hi > lo:
            insort(self.items, item.cut(lo, hi))

    def _take_smallest(self, count: int) -> None:
        """Take the `count` smallest items."""
        for item in self.items[:count]:
            self._keep(item, item.lo, item.hi)
        del self.items[:count]

    def _cut(self, index: int) -> None:
        """Give the rank the last tokens of the item at `index`, then fill up the rank with other tokens."""
        item = self.items.pop(index)
        first = self._first_of(item)
        light = bisect_left(self.items, Item(int(self.choice.light * self.pairs), 0, 0, 0, 0))
        # First tokens of another document cost rows, so they are tried last.
        ways = [(light, False), (len(self.items), False), (len(self.items), True)]
        best = self._parts(item, first, *ways[0])
        for way in ways[1:]:
            if abs(best.lack) > LEAST_LACK * self.share:
                best = min(best, self._parts(item, first, *way), key=lambda parts: abs(parts.lack))
        self._take_smallest(best.whole)
        if best.next_first:
            self._keep_ends(self.items.pop(0), best.next_first, 0)
        self._keep_ends(item, best.first, best.last)
        self._finish()

    def _first_of(self, item: Item) -> int:
        """Return how many first tokens of the item this rank should take.

        The number is such that the last part of the item, after all ranks have cut it, has enough pairs per token.
        """
        ranks = item.pairs // max(1, self.pairs)
        if not ranks or not self.choice.density:
            return 0
        rest = item.pairs - ranks * self.pairs
        pairs = ranks * self.pairs
        last = _last_true(item.tokens, lambda last: item.area(item.hi - last, item.hi) <= pairs, 0)
        return max(0, (item.tokens - last - int(self.tokens * rest / self.pairs / self.choice.density)) // ranks)

    def _parts(self, item: Item, least_first: int, most_whole: int, cut_next: bool) -> _Parts:
        """Return the parts with the largest number of last tokens of the item that do not exceed the rank's pairs.

        `least_first`: the smallest number of first tokens of the item. `most_whole`: the largest number of items taken
        whole. `cut_next`: whether the first tokens of another item may be taken.
        """
        tokens, pairs = _sums(self.items[:most_whole])

        def parts_with(last: int) -> _Parts:
            first = min(least_first, item.tokens - last, self.tokens - last)
            whole = bisect_left(tokens, self.tokens - last - first + 1) - 1
            rest, next_first = self.tokens - last - first - tokens[whole], 0
            if cut_next and whole < len(self.items):
                next_first = min(rest, self.items[whole].tokens)
            else:
                first = min(first + rest, item.tokens - last)
            taken = pairs[whole] + item.area(item.lo, item.lo + first) + item.area(item.hi - last, item.hi)
            if next_first:
                after = self.items[whole]
                taken += after.area(after.lo, after.lo + next_first)
            return _Parts(last, first, whole, next_first, self.pairs - taken)

        return parts_with(_last_true(min(item.tokens, self.tokens), lambda last: parts_with(last).lack >= 0, 0))

    def _finish(self) -> None:
        """Take the tokens that are still missing from the smallest item that has enough."""
        while self.tokens and self.items:
            enough = (item for item in self.items if item.tokens >= self.tokens)
            item = min(enough, key=lambda candidate: candidate.tokens, default=self.items[-1])
            self.items.remove(item)
            count = min(self.tokens, item.tokens)

            def lack(last: int, item: Item = item, count: int = count) -> int:
                first = item.area(item.lo, item.lo + count - last)
                return self.pairs - first - item.area(item.hi - last, item.hi)

            # Taking all tokens at one end costs the fewest rows: as many as the tokens taken, or as the tokens left.
            ends = (0, count) if count < item.tokens - count else (count, 0)
            good = (last for last in ends if abs(lack(last)) <= LEAST_LACK * self.share)
            chosen = next(good, None)
            last = _last_true(count, lambda last: lack(last) >= 0, 0) if chosen is None else chosen
            self._keep_ends(item, count - last, last)


def _sums(items: list[Item]) -> tuple[list[int], list[int]]:
    """Return the tokens and the pairs of the first n items, for n = 0, 1, ..."""
    tokens = list(accumulate((item.tokens for item in items), initial=0))
    return tokens, list(accumulate((item.pairs for item in items), initial=0))


def _last_true(most: int, holds: Callable[[int], bool], least: int) -> int:
    """Return the largest number up to `most` for which `holds` is true, by bisection. `least` is assumed to hold."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Return the pieces in ascending order with adjacent pieces joined."""
    merged: list[Piece] = []
    for start, stop in sorted(pieces):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
