"""Place the tokens of a mask on ranks: items (`core.areas`) stay whole on one rank, or are cut over several ranks.

An item is a document, a node of a tree, or a range of queries of slices. Every rank gets exactly its share of the
tokens, and nearly its share of the pairs. Two ways to cut an item that does not fit are tried, and the faster placement
is used:

    zigzag            |-1-|-2-|-3-|-4-|-4-|-3-|-2-|-1-|     each rank has equal work with the keys of every other rank
    from its end      |1|2|--------- 3 --------|-- 2 --|-1-|     fewer rows: fewer ranks read up to its end

This placement is for schedules whose ranks wait for each other in every step; `placed_at_once` is for other schedules.
A rank that takes the last tokens of an item fills its share with whole small items, or with first tokens of the same
item. The first tokens cost no rows, because the rank reads them anyway. `cut_from_both_ends` does this along an order
of all items, in which the nodes of a path are adjacent. On several machines, `placed_at_once` runs twice: over the
machines, then over the ranks of each.
Guarantees: equal masks and ranks give equal placements. Token counts are those of the contiguous layout; on several
machines they differ by at most one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterator
from itertools import accumulate, product
from random import Random
from typing import NamedTuple

import numpy as np

from ringattn.core.areas import PAIRS_PER_ROW, Areas, AreasOfPart, Item, Load, Piece, Pieces, Shards, areas_of, cut_at
from ringattn.core.bounded_cache import bounded
from ringattn.core.mask import Mask

MOST_FILLED = 8192
"""Number of ranks times items, with `RANK_ITEMS` more items, up to which ranks are filled item by item and a search
improves placements."""
RANK_ITEMS = 64
DRAWN = 24
"""Number of orders that are drawn in addition to the plain ones, for a search."""
SLACK = 0.001
"""Share of a rank's pairs that a cut from both ends may miss."""
LEAST_EVEN = 1.05
"""Largest ratio of a rank's pairs to the mean in a placement for steps, if any placement has it."""
MUST_GAIN = 0.75
"""An uneven placement for steps is used if the slowest ranks of its steps have at most this part of the pairs that they
have in every even one."""
LEAST_LACK = 0.005
"""Share of a rank's pairs. If fewer are missing, do not try another way to cut a document."""
FEW_ROWS = 0.01
"""Share of all tokens. If fewer rows are sent, do not try another placement."""


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


CHOICES = (
    Choice(0.002, 0.03, 2.0), Choice(0.002, 1.0, 0.0), Choice(0.03, 0.05, 0.0), Choice(0.03, 1.0, 1.0),
    Choice(0.002, 0.03, 2.0, even=1.0), Choice(0.002, 1.0, 0.0, even=3.0),
)  # fmt: skip
"""The choices to try, in order. Selected on randomly drawn documents (see `bench/placement.py`); others save hardly any
rows."""
EACH_ZIGZAG = Choice(0.002, 0.03, 2.0, even=0.0)
"""Each item is cut zigzag over all ranks. It is tried where items read other items, as in trees: there, steps of other
placements are uneven."""


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


@bounded
def placed(mask: Mask, length: int, ranks: int) -> Shards:
    """Return a placement of `length` tokens with this mask.

    Of the placements whose cost is within 1 % of the lowest, it is the one that sends the fewest rows. The cost is the
    number of pairs of the whole pass, if messages travel during the computation.
    """
    areas = areas_of(mask, length)
    tried: list[tuple[int, int, float, Pieces]] = []  # cost, rows, unevenness
    for pieces, load in _loads(areas, ranks, _filled(areas, ranks)):
        pairs = areas.in_steps(pieces) or max(load.pairs)
        cost = max(pairs, *(PAIRS_PER_ROW * rows for rows in (*load.received, *load.sent)))
        tried.append((cost, sum(load.sent), unevenness(load), pieces))
        # For thousands of short documents, the first placement is good enough.
        if 100 * cost * ranks <= 101 * sum(load.pairs) and sum(load.sent) <= FEW_ROWS * length:
            break
    even = [entry for entry in tried if entry[2] <= LEAST_EVEN]
    if any(areas.reads):  # documents may be uneven where their steps are shorter
        tried = even or tried
    least = min(entry[0] for entry in tried)
    return min((entry for entry in tried if 100 * entry[0] <= 101 * least), key=lambda entry: entry[1])[3].shards()


def _filled(areas: Areas, ranks: int) -> Iterator[Pieces]:
    """Yield placements that suit schedules in steps, until the caller has one that is good enough."""
    if _is_small(areas, ranks):
        for choice in (*CHOICES, EACH_ZIGZAG) if any(areas.reads) else CHOICES:
            yield Pieces.of(place(areas, ranks, choice))
    for order in orders(areas):
        yield cut_from_both_ends(areas, order, ranks, EVEN)


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


# --- placement for schedules that receive all rows at once: the fewest rows sent --------------------------------------
# A long document is cut only from its end, because then few ranks read far. Pairs are equal over the whole pass, not in
# each step.
# The search varies the rank that owns each document and the document whose end a rank takes; everything else follows
# from these. The ranks that take the end of a long document do so in rank order: each takes the largest number of last
# tokens that its share of pairs allows, and then first tokens of the same document, which cost no rows because the rank
# reads them anyway. The owner keeps the rest. Then ranks with too many tokens move first tokens of their documents to
# ranks with too few, at a cost of one row per token.


EVEN = 1.005
"""Largest ratio of a rank's pairs to the mean that counts as even. Of all even placements, the one with the fewest rows
is used."""
FILLS = 40000
"""The limit of a search: the number of tries times the number of ranks, from 8 ranks on. Such a search takes 0.1 to
0.6 s for a hundred documents or nodes."""
STARTING_CHOICES = tuple(Choice(*values) for values in product((0.002, 0.03), (0.03, 0.1, 1.0), (0.0, 1.0, 2.0)))
"""The choices whose placements the search starts from. Each gives three placements: with equal pairs on all ranks, with
the most pairs per rank that `EVEN` allows, and with half of this excess.
"""
WORSE = 0.001
"""Share of the rows by which a step of the search may be worse at the beginning. It falls to 0 at the end."""
PRICE = 100
"""At the beginning, a pair above the limit costs as much as `PRICE` rows divided by the tokens of a rank. This cost
grows by a factor of 1 + `DEARER`."""
DEARER = 20
WAYS = 3
"""Number of starts from which the search goes on."""
LAST = 8
"""Number of the best placements whose load is computed exactly."""


class Owners(NamedTuple):
    """An assignment of documents to ranks.

    `owners`: the rank that owns each document. For each rank, `ends`: the document whose end it takes, or -1; `tokens`,
    `pairs`: the tokens and pairs of the documents that it owns.
    """

    owners: list[int]
    ends: list[int]
    tokens: list[int]
    pairs: list[int]


class Outcome(NamedTuple):
    """The result of an assignment.

    `rows`: rows sent. `over`: the sum of the pairs of all ranks beyond the even limit. `parts`: parts of the documents
    whose ends are taken, (rank, document, lo, hi). `moved`: first tokens moved, (from, to, count).
    """

    rows: int
    over: int
    parts: list[tuple[int, int, int, int]]
    moved: list[tuple[int, int, int]]


@bounded
def placed_at_once(
    mask: Mask, length: int, ranks: int, ranks_per_node: int = 0, even: float = EVEN, fills: int = FILLS
) -> Shards:
    """Return a placement of `length` tokens with this mask: over the nodes first, then over the ranks of each node.

    Of all even placements that the search tries, it is the one that sends the fewest rows. Inside one of several nodes,
    the rows of the busiest rank count as much as all rows: its links carry rows for other nodes too.
    `ranks_per_node`: each node has this number of neighbouring ranks; 0 if there is one node. `even`: the largest ratio
    of pairs to the mean that counts as even, of nodes and of the ranks of a node. `fills`: the number of tries of the
    search, times ranks.
    """
    areas = areas_of(mask, length)
    if ranks_per_node in (0, ranks):
        return _at_once(areas, ranks, even, fills).shards()
    nodes = ranks // ranks_per_node
    fills //= nodes + 1
    of_nodes = _at_once(areas, nodes, even, fills).shards()
    parts = [AreasOfPart(areas, of_nodes, node) for node in range(nodes)]
    in_nodes = (part.placed(_at_once(part, ranks_per_node, even, fills, ranks_per_node)) for part in parts)
    return tuple(shard for pieces in in_nodes for shard in pieces.shards())


def _at_once(areas: Areas, ranks: int, even: float, fills: int, busiest: int = 0) -> Pieces:
    """Return the placement of `placed_at_once` without nodes.

    `busiest`: how many times the rows of the rank that sends or receives most count, in addition to all rows.
    """
    tried: list[tuple[tuple[float, int], int, Pieces]] = []

    def order(load: Load) -> tuple[float, int]:
        """Return a sort key: even placements by rows, then all others by unevenness."""
        return max(even, unevenness(load)), sum(load.received) + busiest * max(*load.received, *load.sent)

    for pieces, load in _loads(areas, ranks, _starts(areas, ranks, even)):
        tried.append((order(load), len(tried), pieces))
        # For thousands of short documents, the first placement is good enough.
        if tried[-1][0] <= (even, FEW_ROWS * areas.length):
            return pieces
    if _is_small(areas, ranks):
        search = Search(areas, ranks, even)
        starts = [search.owners_of(pieces.shards()) for _, _, pieces in tried]
        for owners in search.improved(starts, fills // max(8, ranks))[-LAST:]:
            pieces = Pieces.of(search.shards(owners))
            tried.append((order(areas.load(pieces)), len(tried), pieces))
    return min(tried)[2]


def _is_small(areas: Areas, ranks: int) -> bool:
    """Return whether a search takes a fraction of a second."""
    return ranks * (len(areas.slopes) + RANK_ITEMS) <= MOST_FILLED


def _loads(areas: Areas, ranks: int, placements: Iterator[Pieces]) -> Iterator[tuple[Pieces, Load]]:
    """Yield the placements with their loads, and a last one that is even for any mask if none of them is."""
    ratio = math.inf
    for pieces in placements:
        load = areas.load(pieces)
        ratio = min(ratio, unevenness(load))
        yield pieces, load
    if ratio > LEAST_EVEN and areas.length:
        pieces = cut_from_both_ends(areas, by_density(areas, -(-areas.length // ranks)), ranks, EVEN)
        yield pieces, areas.load(pieces)


def unevenness(load: Load) -> float:
    """Return the ratio of the largest number of pairs of a rank to the mean."""
    return max(load.pairs) * len(load.pairs) / max(1, sum(load.pairs))


def _starts(areas: Areas, ranks: int, even: float) -> Iterator[Pieces]:
    """Yield the placements that the search starts from."""
    for order in orders(areas, DRAWN if _is_small(areas, ranks) else 0):
        yield cut_from_both_ends(areas, order, ranks, even)
    if _is_small(areas, ranks):
        most = int(even * int(areas.before[-1]) / ranks)
        middle = int(most * (1 + even) / (2 * even))
        for choice, limit in product(STARTING_CHOICES, (None, most, middle)):
            yield Pieces.of(place(areas, ranks, choice, limit))


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


class Search:
    """A search for the best owners of items.

    It holds the items, largest first, what each reads, the number of tokens that each rank gets, and the most pairs
    that it may get.
    """

    def __init__(self, areas: Areas, ranks: int, even: float) -> None:
        """Prepare the search."""
        order = sorted(range(len(areas.items)), key=areas.items.__getitem__, reverse=True)
        self.items = [areas.items[item] for item in order]
        self.tokens, self.pairs = [item.tokens for item in self.items], [item.pairs for item in self.items]
        self.reads, self._weights = [areas.reads[item] for item in order], dict[int, int]()
        self._own = [1 << item for item in order]
        self._sizes = np.array([item.tokens for item in areas.items], np.int64)
        self.groups = [
            [item, *(other for other, bits in enumerate(self.reads) if bits & own and other != item)]
            for item, own in enumerate(self._own)
        ]
        self.outer = [self.weight(reads & ~own) for reads, own in zip(self.reads, self._own, strict=True)]
        share, extra = divmod(areas.length, ranks)
        self.shares = [share + (rank < extra) for rank in range(ranks)]
        self.most = int(even * sum(self.pairs) / ranks)
        self.price = PRICE * ranks / max(1, areas.length)

    def weight(self, bits: int) -> int:
        """Return the tokens of the items whose bits are set."""
        found = self._weights.get(bits)
        if found is None:
            row = np.frombuffer(bits.to_bytes(len(self._sizes) // 8 + 1, "little"), np.uint8)
            chosen = np.unpackbits(row, count=len(self._sizes), bitorder="little")
            found = self._weights[bits] = int(chosen @ self._sizes)
        return found

    def owners_of(self, shards: Shards) -> Owners:
        """Return an assignment that approximates a placement.

        The last rank that has a part of an item owns it. A rank whose part ends after the owner's part takes the end of
        this item, or of a larger one.
        """
        result = Owners([0] * len(self.items), *([fill] * len(shards) for fill in (-1, 0, 0)))
        by_start = sorted((item.start, document) for document, item in enumerate(self.items))
        reach: list[dict[int, int]] = [{} for _ in self.items]  # by document and rank
        for rank, shard in enumerate(shards):
            for start, stop in shard:
                first = bisect_left(by_start, (start + 1, 0)) - 1
                for begin, document in by_start[first : bisect_left(by_start, (stop, 0))]:
                    reach[document][rank] = min(stop - begin, self.tokens[document])
        for document in reversed(range(len(reach))):
            owner = result.owners[document] = max(reach[document])
            result.tokens[owner] += self.tokens[document]
            result.pairs[owner] += self.pairs[document]
            for rank, end in reach[document].items():
                if end > reach[document][owner]:
                    result.ends[rank] = document
        return result

    def outcome_of(self, assignment: Owners) -> Outcome:
        """Compute the result of an assignment: cut the items whose ends are taken, then move excess tokens."""
        lack = [share - tokens for share, tokens in zip(self.shares, assignment.tokens, strict=True)]
        room = [self.most - pairs for pairs in assignment.pairs]
        parts, moved = [], []
        last = {document: rank for rank, document in enumerate(assignment.ends) if document >= 0}
        left = {document: (0, self.tokens[document]) for document in last}
        # What a rank reads or has: items whole, as bits, and the first tokens of items of which it has a part.
        bits = [0] * len(lack)
        for document, owner in enumerate(assignment.owners):
            if document in last:
                lack[owner] += self.tokens[document]
                room[owner] += self.pairs[document]
            else:
                bits[owner] |= self.reads[document] | self._own[document]
        for rank, document in enumerate(assignment.ends):
            if document < 0:
                continue
            item, (lo, hi) = self.items[document], left[document]
            count, step = lack[rank], item.slope * (hi - lo - lack[rank])
            if hi - lo < lack[rank]:
                count, step = hi - lo, 0
            if count > 0:
                # Each of the `count` tokens that is a last instead of a first token adds the same number of pairs.
                fewest = item.area(lo, lo + count)
                end = min(count, max(0, (room[rank] - fewest) // step)) if step > 0 else 0
                parts += [(rank, document, lo, lo + count - end), (rank, document, hi - end, hi)]
                bits[rank] |= self.reads[document]
                lack[rank] -= count
                room[rank] -= fewest + end * step
                lo, hi = left[document] = lo + count - end, hi - end
            if rank == last[document] and lo < hi:
                owner = assignment.owners[document]
                parts.append((owner, document, lo, hi))
                bits[owner] |= self.reads[document]
                lack[owner] -= hi - lo
                room[owner] -= item.area(lo, hi)
        reach: dict[tuple[int, int], int] = {}
        for rank, document, lo, hi in parts:
            if lo < hi and not bits[rank] & self._own[document]:
                reach[rank, document] = max(hi, reach.get((rank, document), 0))
        rows = sum(map(self.weight, bits)) + sum(reach.values()) - sum(self.shares)
        takers = [rank for rank, count in enumerate(lack) if count > 0]
        for rank in range(len(lack)) if takers else ():
            if lack[rank] < 0:
                source = self._least_outer(assignment, rank, last)
            while lack[rank] < 0:
                count = min(-lack[rank], lack[takers[-1]])
                moved.append((rank, takers[-1], count))
                rows += count
                depth = 0
                if source >= 0:
                    rows += self.weight(self.reads[source] & ~bits[takers[-1]])
                    depth = self.outer[source]
                lack[rank] += count
                lack[takers[-1]] -= count
                room[rank] += depth * count + count * (count + 1) // 2
                room[takers[-1]] -= depth * count + count * (count + 1) // 2
                if not lack[takers[-1]]:
                    takers.pop()
        return Outcome(rows, -sum(pairs for pairs in room if pairs < 0), parts, moved)

    def _least_outer(self, assignment: Owners, rank: int, cut: Container[int]) -> int:
        """Return the whole item of a rank that reads the fewest tokens of others, or -1. Of equals, the largest."""
        owned = (item for item, owner in enumerate(assignment.owners) if owner == rank and item not in cut)
        return min(owned, key=lambda item: (self.outer[item], item), default=-1)

    def shards(self, assignment: Owners) -> Shards:
        """Return the placement that an assignment describes.

        `outcome_of` counts the rows and pairs of moved tokens approximately: as if a single item of the rank had enough
        tokens for each move.
        """
        outcome, taken = self.outcome_of(assignment), set(assignment.ends)
        pieces: list[list[Piece]] = [[] for _ in self.shares]
        whole = [
            (rank, document, 0, self.tokens[document])
            for document, rank in sorted(enumerate(assignment.owners), key=lambda pair: (self.outer[pair[0]], pair))
            if document not in taken
        ]
        for rank, document, lo, hi in whole + outcome.parts:
            if lo < hi:
                pieces[rank].append((self.items[document].start + lo, self.items[document].start + hi))
        for rank, taker, lack in outcome.moved:
            while lack:
                start, stop = pieces[rank].pop(0)  # first tokens of a whole item; its rest goes to the end of the list
                cut = min(start + lack, stop)
                pieces[taker].append((start, cut))
                pieces[rank] += [(cut, stop)] if cut < stop else []
                lack -= cut - start
        return tuple(map(joined, pieces))

    def improved(self, starts: list[Owners], steps: int) -> list[Owners]:
        """Search from the best start with random changes, and return the best assignments, each better than the last.

        The search also accepts slightly worse assignments, fewer and fewer over time, to leave local minima.
        """
        draw = Random(0).random  # the only method that gives the same numbers in every version of Python
        tries = [(self.outcome_of(start), start) for start in starts]
        tries.sort(key=lambda entry: entry[0].rows + self.price * entry[0].over)
        best_found = []
        for now, current in tries[:WAYS]:
            best_found += self._improved(now, current, steps // WAYS, draw)
        best_found.sort(key=lambda entry: (-entry[0].over, -entry[0].rows))
        return [assignment for _, assignment in best_found]

    def _improved(
        self, now: Outcome, current: Owners, steps: int, draw: Callable[[], float]
    ) -> list[tuple[Outcome, Owners]]:
        """Search from one start."""
        best, best_found = now, [(now, current)]
        for step in range(steps):
            left = 1 - step / steps
            price = self.price * (1 + DEARER * (1 - left))
            candidate = self.changed(current, draw)
            outcome = self.outcome_of(candidate)
            if outcome.rows + price * outcome.over <= now.rows + price * now.over + WORSE * left * best.rows:
                now, current = outcome, candidate
                if (now.over, now.rows) < (best.over, best.rows):
                    best = now
                    best_found.append((now, current))
        return best_found

    def changed(self, current: Owners, draw: Callable[[], float]) -> Owners:
        """Return an assignment with one random change. `draw` returns a random number in [0, 1).

        A rank takes another end, a document moves to another rank, or two documents, mostly of similar length, swap.
        """
        owners, ends, tokens, pairs = current.owners[:], current.ends, current.tokens[:], current.pairs[:]
        kind, ranks, first = draw(), len(ends), int(draw() * len(owners))
        if kind < 0.03:
            ends = ends[:]
            ends[int(draw() * ranks)] = int(draw() * (min(len(owners), ranks) + 1)) - 1
            return Owners(owners, ends, tokens, pairs)
        taker = int(draw() * ranks)
        moves = [(first, taker)]
        if kind < 0.15:
            moves = [(document, taker) for document in self.groups[first]]
        if kind > 0.3:
            far = draw()
            second = (first + 1 + int(far * far * far * len(owners))) % len(owners)
            moves = [(first, owners[second]), (second, owners[first])]
        for document, rank in moves:
            tokens[owners[document]] -= self.tokens[document]
            pairs[owners[document]] -= self.pairs[document]
            tokens[rank] += self.tokens[document]
            pairs[rank] += self.pairs[document]
            owners[document] = rank
        return Owners(owners, ends, tokens, pairs)
