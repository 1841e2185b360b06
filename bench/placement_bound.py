"""A lower bound on the rows that packed documents send: no placement sends fewer.

Ranks have equal shares of the tokens, S or S + 1, and at most M causal pairs each. A rank's reach in a document is the
end of its last token there, and it reads all rows before. With the reaches L = r_0 >= r_1 >= ... >= 0 of all ranks, a
document of L tokens sends r_1 + r_2 + ... rows. Here is why these cannot be small.

Groups. Let m ranks have all tokens from z on of some documents, z one for each. A token at place x of its document has
x + 1 pairs; charge x + 1/2 - p for it, p >= 0 the price of a token. The m ranks are charged m (M - S/2 - p S) at most,
for no rank has fewer than S tokens. They are charged at least, by document of L tokens,
    L^2/2 - p L - max(0, z - p)^2/2   where they have all from z on: the tokens p .. z - 1 are all that it pays to omit;
    a^2/2 - p a, a = min(p, L)        any other: its first tokens are the cheapest, and at p they are worth nothing.
So over these documents the sum of max(0, z - p)^2 is at least K = K(m, p), what is charged too much with z = 0, twice.

One document. The first k ranks in the order of reaches have all from r_k on, so r_k >= p + sqrt(K) where K(k, p) > 0.
And they have no more than their shares: r_k >= L - k (S + 1), or L - k S if shares are even.

Several documents. The first k ranks of each of n documents are n k ranks or fewer; with any others, n k. They have the
ends of all n documents and fill up with the same light tokens: the sum of max(0, r_k - p)^2 is at least K(n k, p). Each
r_k has its bound from below, and L from above. The left side is convex. So where the sum of the r_k is least, all but
one of them may be taken at one of their bounds: else raise one and lower another by as much until one gets there, in
the direction in which the left side does not fall.

Successive reaches. Of the tokens r_k .. r_{k-1} - 1 the k-th rank alone has a share, c, at most, and no rank beyond the
first k has any. So the first k - 1 have all from v = r_{k-1} on, and v - u - c more from u = r_k on. The cheapest of
these are u .. v - c - 1. For v - c > u they can omit less:
    max(0, v - p)^2 - max(0, v - c - p)^2 + max(0, u - p)^2 >= K(k - 1, p),
a least v for each u, lower for a higher u, and from these the least u + v. No reach counts in two such sums.

Rows. Few documents are cut wherever pairs are even. The longest n are free to be cut, which is what the above is for.
The others send r rows together, of price q <= p. One of which a group has H, not all and not nothing, is charged the
least of 0, L^2/2 - p L (whole) and a^2/2 - (p - q) a (its first tokens, each a row), or more, with q for its rows:
    If a rank outside reads farthest, it receives all of H: as many rows, and no tokens are cheaper than the first.
    Else H ends with h tokens that follow all others of the document, and some rank outside receives the rest of H.
    The h are charged nothing or more: without them it is the first tokens again, with fewer rows.
    Or less: then p > L - h/2, so all tokens before them are charged less than nothing, and the whole costs less.
K grows by what all others are charged less 2 q r, and any p and q give a bound. The least of r and the free documents'
rows, over all r, is the bound for n, and the greatest of these over n is taken.

Not in it: documents that are not free are taken in fractions as far as prices allow, and ranks of a group need not be
even among themselves. So no placement may reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise, product

import numpy as np

MOST_FREE = 4
"""Longest documents that the bound takes as cut in any case, up to so many."""
NEARLY = 0.0002
"""Of a least sum: it is found as nearly as this, from below."""


def fewest_rows(cuts: tuple[int, ...], ranks: int, most_pairs: float) -> int:
    """Rows that every placement sends whose ranks have equal shares of tokens, and no rank more causal pairs than that.

    Args:
        cuts: where documents begin, and the end: 0, ..., tokens.
        most_pairs: of the fullest rank, of one head.

    Returns:
        The bound that this module proves, 0 or more.
    """
    lengths = sorted((stop - start for start, stop in pairwise(cuts) if stop > start), reverse=True)
    best = 0
    for free in range(1, min(MOST_FREE, len(lengths)) + 1):
        cut = cache(_Groups(lengths, free, ranks, math.floor(most_pairs)).rows)
        best = max(best, _least_sum(cut, cut(0)))
    return best


class _Groups:
    """What groups of ranks can hold, of documents so long (descending), the first of which are free."""

    def __init__(self, lengths: Sequence[int], free: int, ranks: int, most_pairs: int) -> None:
        self.free, self.ranks = lengths[:free], ranks
        tokens = sum(lengths)
        self.share = -(-tokens // ranks)
        self.prices = np.concatenate([np.arange(0.0, 64.0, 4.0), np.geomspace(64.0, lengths[0] + 65.0, 300)])
        price = self.prices[:, None]
        self._row = price * np.concatenate([[0.0], np.geomspace(0.02, 1.0, 12)])
        others = [np.minimum(_first(n, price - self._row), np.minimum(0, _whole(n, price))) for n in lengths[free:]]
        self._charged = sum(others, sum(_first(n, price) for n in self.free) + 0 * self._row)
        self._most = most_pairs - (tokens // ranks) * (self.prices + 0.5)  # a rank's, at each price

    def rows(self, others: int) -> int:
        """What the free documents send at least, where documents that are not free send so many rows together."""
        charged, alone, least = self.charged(others), 0, []
        for length in self.free:
            lacks = [self._lack(charged, k, (length,)) for k in range(1, self.ranks)]
            by_share = (max(0, length - k * self.share) for k in range(1, self.ranks))
            least.append([max(one, _above(self.prices, lack)) for one, lack in zip(by_share, lacks, strict=True)])
            alone += self._in_order(length, least[-1], lacks)
        by_k = enumerate(zip(*least, strict=True), 1)
        return max(alone, sum(self._together(charged, k, reaches) for k, reaches in by_k))

    def charged(self, others: int) -> np.ndarray:
        """At each price, what a group is charged at least: all of it but the ends that it has in any case."""
        return np.asarray((self._charged - self._row * others).max(axis=1))

    def _lack(self, charged: np.ndarray, ranks: int, lengths: Sequence[int]) -> np.ndarray:
        """K at each price, of so many ranks and the ends of these documents; less 1 for what floats lose."""
        ends = sum(_whole(length, self.prices) - _first(length, self.prices) for length in lengths)
        return 2 * (charged + ends - ranks * self._most) - 1

    def _in_order(self, length: int, least: Sequence[int], lacks: Sequence[np.ndarray]) -> int:
        """The least sum of the reaches r_1, r_2, ... of a document, successive ones taken together where that is more.

        Args:
            least: of each reach.
            lacks: of each reach, K.
        """
        before, total = 0, 0
        for k, reach in enumerate(least):
            both = 0
            # Otherwise the rank between them has all that lies there.
            if k and least[k - 1] - reach > self.share:
                both = before + self._successive(length, reach, least[k - 1], lacks[k - 1])
            before, total = total, max(total + reach, both)
        return total

    def _successive(self, length: int, least_u: int, least_v: int, lack: np.ndarray) -> int:
        """The least u + v."""
        prices, lack = self.prices[lack > 0], lack[lack > 0]
        alone, share = prices + np.sqrt(lack), self.share

        def least(more: int) -> int:
            u = least_u + more
            # With v - c at most u or p nothing is forced on the first ranks; else the condition is linear in v.
            forced = prices + share / 2 + (lack - _square(u - prices)) / (2 * share)
            found = np.where(alone <= np.maximum(u, prices) + share, alone, forced)
            return max(least_v, math.ceil(found.max(initial=0)))

        return least_u + _least_sum(cache(least), length - least_u)

    def _together(self, charged: np.ndarray, k: int, least: Sequence[int]) -> int:
        """The least sum of the reach r_k of all free documents: the mean over groups as large as ranks allow."""
        count = min(len(least), (self.ranks - 1) // k)
        if count < 2:
            return sum(least)
        total = 0
        for chosen in combinations(range(len(least)), count):
            lengths = [self.free[at] for at in chosen]
            lack = self._lack(charged, count * k, lengths)
            total += _least_of_several(self.prices, lack, [least[at] for at in chosen], lengths)
        # Each document is in so many of the groups.
        return max(sum(least), total // math.comb(len(least) - 1, count - 1))


def _whole(length: int, price: np.ndarray) -> np.ndarray:
    return length * length / 2 - price * length


def _first(most: int, price: np.ndarray) -> np.ndarray:
    """The first tokens of a document, as many as are worth it."""
    count = np.clip(price, 0, most)
    return count * count / 2 - price * count


def _square(over: np.ndarray) -> np.ndarray:
    return np.square(np.maximum(0, over))


def _above(prices: np.ndarray, lack: np.ndarray) -> int:
    """The least z with max(0, z - p)^2 >= K at each price."""
    return math.ceil((prices + np.sqrt(np.maximum(0, lack)))[lack > 0].max(initial=0))


def _least_of_several(prices: np.ndarray, lack: np.ndarray, low: Sequence[int], high: Sequence[int]) -> int:
    """The least sum of numbers z, low <= z <= high, the squares of max(0, z - p) of which add up to K: of the prices
    the greatest, for each the least of all choices of which number lies between its bounds, and where the others are.
    """
    best = np.full(len(prices), np.inf)
    for at, _ in enumerate(low):
        bounds = [pair for other, pair in enumerate(zip(low, high, strict=True)) if other != at]
        for others in product(*bounds):
            rest = lack - sum(_square(other - prices) for other in others)
            z = np.where(rest > 0, np.maximum(low[at], prices + np.sqrt(np.maximum(0, rest))), low[at])
            best = np.minimum(best, np.where(z <= high[at], sum(others) + z, np.inf))
    # No such placement: then any number is a bound.
    return math.ceil(best[np.isfinite(best)].max(initial=0))


def _least_sum(cut: Callable[[int], int], most: int) -> int:
    """At most the least r + cut(r) of r = 0, 1, ..., most, and nearly that; `cut` falls."""
    least = found = cut(0)
    spans = [(0, most)]
    while spans:
        lo, hi = spans.pop()
        # From lo to hi no sum is less than this.
        below = lo + cut(hi)
        if below >= found:
            continue
        if hi - lo <= max(1, NEARLY * found):
            least = min(least, below)
            continue
        middle = (lo + hi) // 2
        found = min(found, middle + cut(middle))
        spans += [(lo, middle), (middle, hi)]
    return min(least, found)
