"""Place packed documents on ranks: short documents stay whole on one rank, long documents are cut over several ranks.

Every rank gets exactly its share of the tokens, and nearly its share of the causal pairs. Two ways to cut a document
that does not fit are tried, and the faster placement is used:

    zigzag            |-1-|-2-|-3-|-4-|-4-|-3-|-2-|-1-|     each rank has equal work with the keys of every other rank
    from its end      |1|2|--------- 3 --------|-- 2 --|-1-|     fewer rows: fewer ranks read up to its end

This placement is for schedules whose ranks wait for each other in every step; `placed_at_once` is for other schedules.
A rank that takes the last tokens of a document fills its share with whole short documents, or with first tokens of the
same document. The first tokens cost no rows, because the rank reads them anyway.
Guarantees: equal cuts and ranks give equal placements; token counts are those of the contiguous layout.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from random import Random
from typing import NamedTuple

from ringattn.core.bounded_cache import bounded

PAIRS_PER_ROW = 200
"""Number of (q, k) pairs that a rank computes while one row of K and V passes its link. For an H100 with 8 query heads
per K/V head and 128 dimensions in bfloat16: 8 * 512 FLOP per pair at 600 TFLOP/s, 512 bytes per row at 400 GB/s."""
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

Piece = tuple[int, int]
"""Adjacent positions: the first, and the one after the last."""
Shards = tuple[tuple[Piece, ...], ...]
"""The pieces of each rank in ascending order; adjacent pieces are joined."""


class Load(NamedTuple):
    """The load of each rank in a placement: causal pairs, and rows of K and V received and sent.

    A row that several ranks read is sent once for each of them. `in_steps`: the sum over all steps of the pairs of the
    slowest rank in that step. In step s, rank r attends to the keys of rank r - s, and in most schedules no rank is a
    step ahead of the next rank.
    """

    pairs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    in_steps: int

    @property
    def cost(self) -> int:
        """The cost of the whole pass in pairs, if messages travel during the computation."""
        return max(self.in_steps, *(PAIRS_PER_ROW * rows for rows in (*self.received, *self.sent)))


class Item(NamedTuple):
    """The tokens lo .. hi - 1 of the document that starts at `start`, which no rank has yet. Items sort by pairs."""

    pairs: int
    tokens: int
    start: int
    lo: int
    hi: int


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
def placed(cuts: tuple[int, ...], ranks: int) -> Shards:
    """Return a placement of the documents with the boundaries `cuts` (0, ..., length).

    Of the placements whose cost is within 1 % of the lowest, it is the one that sends the fewest rows.
    """
    tried: list[tuple[Load, Shards]] = []
    for choice in CHOICES:
        shards = place(cuts, ranks, choice)
        load = load_of(cuts, shards)
        tried.append((load, shards))
        # For thousands of short documents, the first placement is good enough.
        if 100 * load.cost * ranks <= 101 * sum(load.pairs) and sum(load.sent) <= FEW_ROWS * cuts[-1]:
            break
    least = min(load.cost for load, _ in tried)
    fast = [entry for entry in tried if 100 * entry[0].cost <= 101 * least]
    return min(fast, key=lambda entry: sum(entry[0].sent))[1]


def place(cuts: tuple[int, ...], ranks: int, choice: Choice, most: int | None = None) -> Shards:
    """Return the placement of the documents with the boundaries `cuts` (0, ..., length) that one choice gives.

    All ranks take the same number of pairs; with `most`, they take up to `most` pairs and the last rank takes the rest.
    """
    items = items_of(cuts)
    left = sum(item.pairs for item in items)
    share, extra = divmod(cuts[-1], ranks)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    even_tokens, even_pairs, extra_tokens = [0] * ranks, [0] * ranks, 0
    whole = choice.even * left / ranks
    while items and items[-1].pairs > whole:
        item = items.pop()
        for rank, (lo, mid, end, hi) in enumerate(_zigzag(item.tokens, ranks, extra_tokens)):
            pieces[rank] += [(item.start + a, item.start + b) for a, b in ((lo, mid), (end, hi)) if b > a]
            even_tokens[rank] += mid - lo + hi - end
            even_pairs[rank] += causal_pairs(lo, mid) + causal_pairs(end, hi)
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


def items_of(cuts: tuple[int, ...]) -> list[Item]:
    """Return an item for each document that is not empty, ordered by pairs."""
    spans = [(start, stop - start) for start, stop in pairwise(cuts) if stop > start]
    return sorted(Item(causal_pairs(0, tokens), tokens, start, 0, tokens) for start, tokens in spans)


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


def causal_pairs(lo: int, hi: int) -> int:
    """Return the number of causal pairs of queries lo .. hi - 1 of a document: query q has the keys 0 .. q."""
    return (hi * (hi + 1) - lo * (lo + 1)) // 2


def load_of(cuts: tuple[int, ...], shards: Shards) -> Load:
    """Return the load of each rank in a placement."""
    pairs, received, sent = ([0] * len(shards) for _ in range(3))
    by_document: dict[int, list[tuple[int, int, int]]] = {}  # rank and tokens lo .. hi - 1
    bounds = sorted(set(cuts))
    for rank, shard in enumerate(shards):
        for start, stop in shard:
            document = bisect_left(bounds, start + 1) - 1
            while start < stop:
                lo, end = start - bounds[document], min(stop, bounds[document + 1])
                by_document.setdefault(document, []).append((rank, lo, lo + end - start))
                pairs[rank] += causal_pairs(lo, lo + end - start)
                start, document = end, document + 1
    by_step = [[0] * len(shards) for _ in shards]  # [step][rank]
    for pieces in by_document.values():
        reach: dict[int, int] = {}
        for rank, _, hi in pieces:
            reach[rank] = max(reach.get(rank, 0), hi)
        for owner, lo, hi in pieces if len(reach) > 1 else ():
            for reader, end in reach.items():
                rows = min(end, hi) - lo
                if reader != owner and rows > 0:
                    received[reader] += rows
                    sent[owner] += rows
            for reader, first, stop in pieces:
                if reader != owner and stop > lo:
                    step = (reader - owner) % len(shards)
                    by_step[step][reader] += _pairs_with(first, stop, lo) - _pairs_with(first, stop, hi)
    for rank, whole in enumerate(pairs):
        by_step[0][rank] = whole - sum(step[rank] for step in by_step[1:])
    return Load(tuple(pairs), tuple(received), tuple(sent), sum(map(max, by_step)))


def _pairs_with(lo: int, hi: int, key: int) -> int:
    """Return the number of pairs of queries lo .. hi - 1 with key `key` and all later keys."""
    return causal_pairs(max(lo, key) - key, max(hi, key) - key)


class Filling:
    """The process of filling one rank with items or parts of them.

    `tokens` and `pairs`: the numbers that the rank still has to take.
    """

    def __init__(self, items: list[Item], tokens: int, pairs: int, choice: Choice) -> None:
        """Start with a rank that has no tokens yet."""
        self.items, self.tokens, self.pairs, self.choice = items, tokens, pairs, choice
        self.share = pairs
        self.pieces: list[Piece] = []
        self.reach: dict[int, int] = {}  # start of a document -> the end of this rank's last tokens in it
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
            pairs = causal_pairs(lo, hi)
            self.pieces.append((item.start + lo, item.start + hi))
            self.reach[item.start] = max(self.reach.get(item.start, 0), hi)
            self.tokens, self.pairs, self.taken = self.tokens - hi + lo, self.pairs - pairs, self.taken + pairs

    def _keep_ends(self, item: Item, first: int, last: int) -> None:
        """Give the rank `first` tokens at the start of an item and `last` at its end. Put the rest of the item back."""
        lo, hi = item.lo + first, item.hi - last
        self._keep(item, item.lo, lo)
        self._keep(item, hi, item.hi)
        if hi > lo:
            insort(self.items, Item(causal_pairs(lo, hi), hi - lo, item.start, lo, hi))

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
        last = item.hi - math.isqrt(max(0, item.hi**2 - 2 * ranks * self.pairs))
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
            taken = pairs[whole] + causal_pairs(item.lo, item.lo + first) + causal_pairs(item.hi - last, item.hi)
            if next_first:
                lo = self.items[whole].lo
                taken += causal_pairs(lo, lo + next_first)
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
                first = causal_pairs(item.lo, item.lo + count - last)
                return self.pairs - first - causal_pairs(item.hi - last, item.hi)

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
# Equal cuts and ranks give equal placements; token counts are those of the contiguous layout.


EVEN = 1.005
"""Largest ratio of a rank's pairs to the mean that counts as even. Of all even placements, the one with the fewest rows
is used."""
FILLS = 80000
"""The limit of a search: the number of tries times the number of ranks. Such a search takes about 0.2 s for a hundred
documents.
"""
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
def placed_at_once(cuts: tuple[int, ...], ranks: int, even: float = EVEN, fills: int = FILLS) -> Shards:
    """Return a placement of the documents with the boundaries `cuts` (0, ..., length).

    Of all even placements that the search tries, it is the one that sends the fewest rows. `even`: the largest ratio of
    a rank's pairs to the mean that counts as even. `fills`: the number of tries of the search, times ranks.
    """
    search, tried = Search(cuts, ranks, even), []

    def order(load: Load) -> tuple[float, int]:
        """Return a sort key: even placements by rows, then all others by unevenness."""
        return max(even, max(load.pairs) * ranks / max(1, sum(load.pairs))), sum(load.sent)

    middle = int(search.most * (1 + even) / (2 * even))
    for choice, most in product(STARTING_CHOICES, (None, search.most, middle)):
        shards = place(cuts, ranks, choice, most)
        tried.append((order(load_of(cuts, shards)), shards))
        # For thousands of short documents, the first placement is good enough.
        if tried[-1][0] <= (even, FEW_ROWS * cuts[-1]):
            return shards
    for owners in search.improved([search.owners_of(start) for _, start in tried], fills // ranks)[-LAST:]:
        shards = search.shards(owners)
        tried.append((order(load_of(cuts, shards)), shards))
    return min(tried)[1]


class Search:
    """A search for the best owners of documents.

    It holds the documents, longest first, the number of tokens that each rank gets, and the most pairs that it may get.
    """

    def __init__(self, cuts: tuple[int, ...], ranks: int, even: float) -> None:
        """Prepare the search for the documents with the boundaries `cuts` (0, ..., length)."""
        self.items = items_of(cuts)[::-1]
        self.tokens, self.pairs = [item.tokens for item in self.items], [item.pairs for item in self.items]
        share, extra = divmod(cuts[-1], ranks)
        self.shares = [share + (rank < extra) for rank in range(ranks)]
        self.most = int(even * sum(item.pairs for item in self.items) / ranks)
        self.price = PRICE * ranks / max(1, cuts[-1])

    def owners_of(self, shards: Shards) -> Owners:
        """Return an assignment that approximates a placement.

        The last rank that has a part of a document owns it. A rank whose part ends after the owner's part takes the end
        of this document, or of a longer one.
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
        """Compute the result of an assignment: cut the documents whose ends are taken, then move excess tokens."""
        lack = [share - tokens for share, tokens in zip(self.shares, assignment.tokens, strict=True)]
        room = [self.most - pairs for pairs in assignment.pairs]
        rows, parts, moved = 0, [], []
        last = {document: rank for rank, document in enumerate(assignment.ends) if document >= 0}
        left = {document: (0, self.tokens[document]) for document in last}
        for document in last:
            lack[assignment.owners[document]] += self.tokens[document]
            room[assignment.owners[document]] += self.pairs[document]
        for rank, document in enumerate(assignment.ends):
            if document < 0:
                continue
            lo, hi = left[document]
            count, step = lack[rank], hi - lo - lack[rank]
            if step < 0:
                count, step = hi - lo, 0
            if count > 0:
                # Each of the `count` tokens that is a last instead of a first token adds the same number of pairs.
                fewest = count * lo + count * (count + 1) // 2
                end = min(count, max(0, (room[rank] - fewest) // step)) if step else 0
                parts += [(rank, document, lo, lo + count - end), (rank, document, hi - end, hi)]
                rows += hi - count if end else lo
                lack[rank] -= count
                room[rank] -= fewest + end * step
                lo, hi = left[document] = lo + count - end, hi - end
            if rank == last[document] and lo < hi:
                owner = assignment.owners[document]
                parts.append((owner, document, lo, hi))
                rows += lo
                lack[owner] -= hi - lo
                room[owner] -= causal_pairs(lo, hi)
        takers = [rank for rank, count in enumerate(lack) if count > 0]
        for rank in range(len(lack)):
            while lack[rank] < 0:
                count = min(-lack[rank], lack[takers[-1]])
                moved.append((rank, takers[-1], count))
                rows += count
                lack[rank] += count
                lack[takers[-1]] -= count
                room[rank] += count * (count + 1) // 2
                room[takers[-1]] -= count * (count + 1) // 2
                if not lack[takers[-1]]:
                    takers.pop()
        return Outcome(rows, -sum(pairs for pairs in room if pairs < 0), parts, moved)

    def shards(self, assignment: Owners) -> Shards:
        """Return the placement that an assignment describes.

        `outcome_of` counts the rows and pairs of moved tokens approximately: as if a single document of the rank had
        enough tokens for each move.
        """
        outcome, taken = self.outcome_of(assignment), set(assignment.ends)
        pieces: list[list[Piece]] = [[] for _ in self.shares]
        owned = enumerate(assignment.owners)
        whole = [(rank, document, 0, self.items[document].hi) for document, rank in owned if document not in taken]
        for rank, document, lo, hi in whole + outcome.parts:
            if lo < hi:
                pieces[rank].append((self.items[document].start + lo, self.items[document].start + hi))
        for rank, taker, lack in outcome.moved:
            while lack:
                start, stop = pieces[rank].pop(0)  # the longest whole document; its rest goes to the end of the list
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
        now, current = min(tries, key=lambda entry: entry[0].rows + self.price * entry[0].over)
        best, best_found = now, [current]
        for step in range(steps):
            left = 1 - step / steps
            price = self.price * (1 + DEARER * (1 - left))
            candidate = self.changed(current, draw)
            outcome = self.outcome_of(candidate)
            if outcome.rows + price * outcome.over <= now.rows + price * now.over + WORSE * left * best.rows:
                now, current = outcome, candidate
                if (now.over, now.rows) < (best.over, best.rows):
                    best = now
                    best_found.append(current)
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
        moves = [(first, int(draw() * ranks))]
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
