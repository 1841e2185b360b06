"""Cut an order of items from both ends: each rank takes the first and the last tokens that are left.

In an order, the nodes of a path are adjacent. Last tokens of an item have many keys, and first tokens few, which most
ranks read anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from random import Random

import numpy as np

from ringattn.core.areas import Areas, Pieces, cut_at

SLACK = 0.001
"""Share of a rank's pairs that a cut from both ends may miss."""


def orders(areas: Areas, drawn: int = 0) -> list[np.ndarray]:
    """Return orders of the items, as arrays (start, stop), in which items that read the same items are adjacent.

    An item follows the item that it reads and that reads most others, as a node of a tree follows its parent. Items
    with the same parent are ordered by pairs per token, by tokens, or by position. `drawn`: the number of further
    orders, in which the first two keys are multiplied by random numbers.
    """
    start, stop = areas.edges[:-1], areas.edges[1:]
    parents = _parents(areas.reads)
    tokens, pairs = np.diff(areas.edges).astype(float), np.diff(areas.before).astype(float)
    for item, parent in parents:  # children first
        tokens[parent] += tokens[item]
        pairs[parent] += pairs[item]
    found: dict[bytes, np.ndarray] = {}
    keys = [pairs / tokens, tokens, start] if parents else [pairs / tokens]
    draw = Random(0).random  # and no function of the C library, so that all machines draw the same orders
    for number in range(drawn):
        keys.append(keys[number % 2 if parents else 0] * [0.4 + 2 * draw() for _ in tokens])
    for key in keys:
        order = np.argsort(key, kind="stable")
        if parents:
            order = _depth_first(order, dict(parents))
        found[order.tobytes()] = np.stack([start[order], stop[order]])
    return [*found.values()]


def by_density(areas: Areas, most: int) -> np.ndarray:
    """Return parts of items with at most `most` tokens, ordered by pairs per token, as an array (start, stop).

    Cut from both ends, this order gives even pairs for any mask, and more rows than those of `orders`.
    """
    start, stop = areas.edges[:-1], areas.edges[1:]
    counts = -(-(stop - start) // most)
    item = np.repeat(np.arange(len(start)), counts)
    begin = start[item] + most * (np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts))
    end = np.minimum(begin + most, stop[item])
    density = (areas.pairs_before(end) - areas.pairs_before(begin)) / (end - begin)
    order = np.argsort(density.astype(float), kind="stable")
    return np.stack([begin[order], end[order]])


def _parents(reads: list[int]) -> list[tuple[int, int]]:
    """Return each item that has a parent, and the parent: that with most reads of the items that it reads.

    A parent reads fewer items than its children. Items with most reads are first.
    """
    parents = []
    counts = [bits.bit_count() for bits in reads]
    for item in sorted((item for item, count in enumerate(counts) if count), key=lambda item: (-counts[item], item)):
        bits, parent = reads[item], -1
        while bits:
            other = bits.bit_length() - 1
            bits ^= 1 << other
            if counts[other] < counts[item] and (parent < 0 or counts[other] > counts[parent]):
                parent = other
        if parent >= 0:
            parents.append((item, parent))
    return parents


def _depth_first(order: np.ndarray, parents: dict[int, int]) -> np.ndarray:
    """Return the depth-first order of items; children of an item keep their order."""
    children: dict[int, list[int]] = {}
    for item in reversed(order.tolist()):
        children.setdefault(parents.get(item, -1), []).append(item)
    found, stack = [], children.get(-1, [])
    while stack:
        found.append(stack.pop())
        stack += children.get(found[-1], ())
    return np.array(found)


def cut_from_both_ends(areas: Areas, order: np.ndarray, ranks: int, even: float) -> Pieces:
    """Return a placement in which each rank takes the first and the last tokens that are left, in an order of ranges.

    A rank takes as many of them as its share of pairs allows. If the last tokens have more pairs than the first ones,
    as in a document, this always gives even pairs. A cut moves to an edge of a range if pairs stay even.
    """
    cuts, total = _Cuts(areas, order), int(areas.before[-1])
    share, extra = divmod(areas.length, ranks)
    limit = (1 + even) / 2 * total / ranks  # the other half of the excess is left for the ranks after
    # Positions low .. high - 1 are left, with `left` pairs; before them are `below`, and before `high` are `above`.
    low, high, left, below, above = 0, areas.length, total, 0, total
    lows, highs = [low], [high]
    for rank in range(ranks - 1):
        count = share + (rank < extra)
        end = low + count  # of the first tokens, if no last tokens are taken
        last = cuts.last_tokens(end, high, count, left / (ranks - rank) - above + below)
        rows = cuts.rows(high - last) + cuts.rows(end - last)
        near = [high - edge for edge in cuts.near(high - last)] + [end - edge for edge in cuts.near(end - last)]
        for candidate in near:
            if 0 <= candidate <= count and cuts.rows(high - candidate) + cuts.rows(end - candidate) < rows:
                pairs = above - below + cuts.before(end - candidate) - cuts.before(high - candidate)
                if pairs <= limit and left - pairs <= limit * (ranks - rank - 1):
                    last, rows = candidate, cuts.rows(high - candidate) + cuts.rows(end - candidate)
        low, high = end - last, high - last
        left -= cuts.before(low) - below + above - cuts.before(high)
        below, above = cuts.before(low), cuts.before(high)
        lows.append(low)
        highs.append(high)
    # The last rank takes the rest.
    return _along(order, np.array([*lows, high]), np.array([*highs, high]))


def _along(order: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> Pieces:
    """Return the placement where rank n has the positions lows[n] .. lows[n + 1] - 1 and highs[n + 1] .. highs[n] - 1.

    Positions count along an order of ranges.
    """
    start, stop = order
    ranks = len(lows) - 1
    edges = np.append(0, np.cumsum(stop - start))
    begin, end = np.concatenate([lows[:-1], highs[1:]]), np.concatenate([lows[1:], highs[:-1]])
    source, item, begin, end = cut_at(edges, begin, end)
    shift = start[item] - edges[item]
    return Pieces.joined(begin + shift, end + shift, source % ranks, ranks)


class _Cuts:
    """Pairs and rows of cuts at positions of an order of ranges."""

    def __init__(self, areas: Areas, order: np.ndarray) -> None:
        start, stop = order
        item = np.searchsorted(areas.edges, start, "right") - 1
        slopes = areas.slopes[item]
        depths = areas.depths[item] + slopes * (start - areas.edges[item])
        pairs = areas.pairs_before(stop) - areas.pairs_before(start)
        self.edges = [0, *np.cumsum(stop - start).tolist()]
        self.depths, self.slopes = depths.tolist(), slopes.tolist()
        self.sums = list(accumulate(pairs.tolist(), initial=0))

    def before(self, position: int) -> int:
        """Return the pairs before a position."""
        item = bisect_right(self.edges, position) - 1
        inside = position - self.edges[item]
        if not inside:
            return self.sums[item]
        return self.sums[item] + self.depths[item] * inside + self.slopes[item] * (inside * (inside + 1) // 2)

    def rows(self, position: int) -> int:
        """Return about how many rows a cut costs: the keys that both sides read."""
        item = bisect_right(self.edges, position) - 1
        return self.depths[item] + self.slopes[item] * (position - self.edges[item]) if item < len(self.depths) else 0

    def near(self, position: int) -> list[int]:
        """Return the edges before and after a position."""
        item = bisect_right(self.edges, position) - 1
        return self.edges[item : item + 2]

    def last_tokens(self, low: int, high: int, count: int, goal: float) -> int:
        """Return how many of `count` tokens to take before `high` instead of before `low`, for `goal` pairs.

        `goal`: the pairs before `low`, less those before `high`. Regula falsi in the variant of Illinois.
        """
        before = self.before
        less, more = 0, count
        lack, excess = before(low) - before(high) - goal, before(low - count) - before(high - count) - goal
        slack, side = SLACK * self.sums[-1] / max(1, self.edges[-1]) * count, 0
        while more - less > 1 and lack < 0 < excess:
            last = min(max(less + int((more - less) * (lack / (lack - excess))), less + 1), more - 1)
            pairs = before(low - last) - before(high - last) - goal
            if abs(pairs) <= slack:
                return last
            if pairs > 0:
                more, excess, lack, side = last, pairs, lack / 2 if side > 0 else lack, 1
            else:
                less, lack, excess, side = last, pairs, excess / 2 if side < 0 else excess, -1
        return less if abs(lack) < abs(excess) else more
