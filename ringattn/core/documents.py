"""Packed documents over ranks: short documents whole on one rank, long ones cut over as many ranks as they need.

Every rank has its share of the tokens exactly, and of the causal pairs as nearly as a few rows are worth. Two ways to
cut a document that does not fit are tried, and the faster one is taken:

    zigzag            |-1-|-2-|-3-|-4-|-4-|-3-|-2-|-1-|     each rank has equal work with the keys of each other
    from its end      |1|2|--------- 3 --------|-- 2 --|-1-|     fewer rows: fewer ranks read as far as its end

This placement is for schedules whose ranks wait for each other in every step; `placed_at_once` is for others.
A rank that takes the last tokens fills up with whole short documents, or with first tokens of the same document, which
cost no rows: it reads these anyway.
Guarantees: the same cuts and ranks, the same placement; counts are those of the contiguous layout.
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
"""(q, k) pairs that a rank attends while a row of K and V passes its link: an H100 with 8 query heads a K/V head, of
128 dimensions in bfloat16: 8 * 512 FLOP a pair at 600 TFLOP/s, 512 bytes a row at 400 GB/s."""
LEAST_LACK = 0.005
"""Of a rank's pairs: less than this is not worth another way to cut a document."""
FEW_ROWS = 0.01
"""Of all tokens: fewer rows sent are not worth another try."""


class Choice(NamedTuple):
    """How ranks are filled; which way is best depends on the documents.

    `lack`: of its share of pairs, what a rank may do without before a document is cut for it. `light`: of its share of
    pairs, what a whole document has at most that is taken beside the end of a long one. `density`: how many times the
    mean pairs of a token the last part of a cut document should have; more takes more first tokens before. 0: none.
    `even`: documents with more pairs than so many ranks' shares lie zigzag over all ranks, which then have equal work
    with every other rank's keys.
    """

    lack: float
    light: float
    density: float
    even: float = math.inf


CHOICES = (
    Choice(0.002, 0.03, 2.0), Choice(0.002, 1.0, 0.0), Choice(0.03, 0.05, 0.0), Choice(0.03, 1.0, 1.0),
    Choice(0.002, 0.03, 2.0, even=1.0), Choice(0.002, 1.0, 0.0, even=3.0),
)  # fmt: skip
"""What is tried, in order. Found on drawn documents, see `ringattn.bench.placement`: others hardly save any rows."""

Piece = tuple[int, int]
"""The positions from, to."""
Shards = tuple[tuple[Piece, ...], ...]
"""The pieces of each rank, ascending; neighbors are one."""


class Load(NamedTuple):
    """Of a placement, by rank: causal pairs; rows of K and V received, and sent, each once to each reader.

    `in_steps`: pairs of the slowest rank in each step, added up; in step s a rank attends to the keys of the rank s
    before it, and in most schedules no rank is a step ahead of the next.
    """

    pairs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    in_steps: int

    @property
    def cost(self) -> int:
        """Of the whole pass, whose messages hide behind its work, in pairs."""
        return max(self.in_steps, *(PAIRS_PER_ROW * rows for rows in (*self.received, *self.sent)))


class Item(NamedTuple):
    """What is left of a document that starts at `start`: its tokens lo .. hi - 1. Ordered by pairs."""

    pairs: int
    tokens: int
    start: int
    lo: int
    hi: int


class _Parts(NamedTuple):
    """What a rank takes of an item and beside it: its last and its first tokens, how many of the smallest items whole,
    first tokens of the next one; and pairs that it lacks then."""

    last: int
    first: int
    whole: int
    next_first: int
    lack: int


@bounded
def placed(cuts: tuple[int, ...], ranks: int) -> Shards:
    """Where documents (0, ..., length) go: of the choices the fastest, and of those within 1 % the fewest rows."""
    found: list[tuple[Load, Shards]] = []
    for choice in CHOICES:
        shards = place(cuts, ranks, choice)
        load = load_of(cuts, shards)
        found.append((load, shards))
        # Thousands of short documents are placed well at once.
        if 100 * load.cost * ranks <= 101 * sum(load.pairs) and sum(load.sent) <= FEW_ROWS * cuts[-1]:
            break
    least = min(load.cost for load, _ in found)
    fast = [one for one in found if 100 * one[0].cost <= 101 * least]
    return min(fast, key=lambda one: sum(one[0].sent))[1]


def place(cuts: tuple[int, ...], ranks: int, choice: Choice, most: int | None = None) -> Shards:
    """Where documents (0, ..., length) go by one choice. Ranks take equal pairs, or `most` and the last the rest."""
    items = items_of(cuts)
    left = sum(item.pairs for item in items)
    share, extra = divmod(cuts[-1], ranks)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    own, even_pairs, dealt = [0] * ranks, [0] * ranks, 0
    whole = choice.even * left / ranks
    while items and items[-1].pairs > whole:
        item = items.pop()
        for rank, (lo, mid, end, hi) in enumerate(_zigzag(item.tokens, ranks, dealt)):
            pieces[rank] += [(item.start + a, item.start + b) for a, b in ((lo, mid), (end, hi)) if b > a]
            own[rank] += mid - lo + hi - end
            even_pairs[rank] += causal_pairs(lo, mid) + causal_pairs(end, hi)
        dealt += item.tokens % ranks
    for rank in range(ranks):
        # The share is that of the ranks that are left, so what one lacks all later ones take.
        part = left // (ranks - rank) if most is None or rank == ranks - 1 else min(most, left)
        pairs = max(1, part - even_pairs[rank])
        filling = Filling(items, share + (rank < extra) - own[rank], pairs, choice)
        filling.fill()
        left -= filling.taken + even_pairs[rank]
        pieces[rank] += filling.pieces
    return tuple(map(joined, pieces))


def items_of(cuts: tuple[int, ...]) -> list[Item]:
    """The documents that have tokens, whole, by their pairs."""
    spans = [(start, stop - start) for start, stop in pairwise(cuts) if stop > start]
    return sorted(Item(causal_pairs(0, tokens), tokens, start, 0, tokens) for start, tokens in spans)


def _zigzag(tokens: int, ranks: int, dealt: int) -> list[tuple[int, int, int, int]]:
    """Two parts of a document for each rank, lo .. mid - 1 and end .. hi - 1; extra tokens go on at rank `dealt`."""
    size, extra = divmod(tokens, ranks)
    lo, hi, found = 0, tokens, []
    for rank in range(ranks):
        count = size + ((rank - dealt) % ranks < extra)
        mid, end = lo + count // 2, hi - (count - count // 2)
        found.append((lo, mid, end, hi))
        lo, hi = mid, end
    return found


def causal_pairs(lo: int, hi: int) -> int:
    """Pairs of the queries lo .. hi - 1 of a document: query q has the keys 0 .. q."""
    return (hi * (hi + 1) - lo * (lo + 1)) // 2


def load_of(cuts: tuple[int, ...], shards: Shards) -> Load:
    """What a placement means for each rank."""
    pairs, received, sent = ([0] * len(shards) for _ in range(3))
    held: dict[int, list[tuple[int, int, int]]] = {}  # by document: rank and tokens lo .. hi - 1
    bounds = sorted(set(cuts))
    for rank, shard in enumerate(shards):
        for start, stop in shard:
            at = bisect_left(bounds, start + 1) - 1
            while start < stop:
                lo, end = start - bounds[at], min(stop, bounds[at + 1])
                held.setdefault(at, []).append((rank, lo, lo + end - start))
                pairs[rank] += causal_pairs(lo, lo + end - start)
                start, at = end, at + 1
    by_step = [[0] * len(shards) for _ in shards]  # [step][rank]
    for pieces in held.values():
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
    """Pairs of the queries lo .. hi - 1 with this key and all after it."""
    return causal_pairs(max(lo, key) - key, max(hi, key) - key)


class Filling:
    """One rank, while it takes items or parts of them; `tokens` and `pairs` are what it still has to take."""

    def __init__(self, items: list[Item], tokens: int, pairs: int, choice: Choice) -> None:
        self.items, self.tokens, self.pairs, self.choice = items, tokens, pairs, choice
        self.share = pairs
        self.pieces: list[Piece] = []
        self.reach: dict[int, int] = {}  # by the start of a document: how far in it this rank has tokens
        self.taken = 0
        # Of the n smallest items: to fill up with these costs the fewest pairs.
        self._tokens, self._pairs = _sums(items)

    def fill(self) -> None:
        """Take all."""
        may_lack = int(self.choice.lack * self.share)
        if self.items and not self._fits(self.items[-1], may_lack):
            self._cut(len(self.items) - 1)
            return
        while self.tokens and self.items:
            at = self._largest_fitting(may_lack)
            # The most pairs that the items up to this one can still bring.
            most = self._pairs[at + 1] - self._least_pairs(max(0, self._tokens[at + 1] - self.tokens))
            if at + 1 < len(self.items) and self.pairs - most > may_lack:
                self._cut(at + 1)
                return
            if at < 0 or self._tokens[at + 1] <= self.tokens:
                break  # all that fits is among the smallest, which fill up
            item = self.items.pop(at)
            # What does not fit now will not fit later: larger items are not looked at again.
            del self._tokens[at + 1 :], self._pairs[at + 1 :]
            self._keep(item, item.lo, item.hi)
        self._take_smallest(bisect_left(self._tokens, self.tokens + 1) - 1)
        self._finish()

    def _least_pairs(self, tokens: int) -> int:
        """Pairs of so many tokens of the smallest items, the last one in proportion."""
        at = bisect_left(self._tokens, tokens)
        if not at or at == len(self._tokens):
            return self._pairs[at - 1] if at else 0
        over, count = self._tokens[at] - tokens, self._tokens[at] - self._tokens[at - 1]
        return self._pairs[at] - (self._pairs[at] - self._pairs[at - 1]) * over // count

    def _fits(self, item: Item, over: int) -> bool:
        """Whether this item leaves pairs enough for the tokens that lack then."""
        rest = self.tokens - item.tokens
        return rest >= 0 and item.pairs + self._least_pairs(rest) <= self.pairs + over

    def _largest_fitting(self, over: int) -> int:
        """The last item that fits, -1 for none."""
        last = len(self._tokens) - 2
        if last >= 0 and self._fits(self.items[last], over):
            return last  # often, and found without a search
        return _last_true(last, lambda at: self._fits(self.items[at], over), -1)

    def _keep(self, item: Item, lo: int, hi: int) -> None:
        if hi > lo:
            pairs = causal_pairs(lo, hi)
            self.pieces.append((item.start + lo, item.start + hi))
            self.reach[item.start] = max(self.reach.get(item.start, 0), hi)
            self.tokens, self.pairs, self.taken = self.tokens - hi + lo, self.pairs - pairs, self.taken + pairs

    def _keep_ends(self, item: Item, first: int, last: int) -> None:
        """Keep these tokens of an item, and put the rest of it back."""
        lo, hi = item.lo + first, item.hi - last
        self._keep(item, item.lo, lo)
        self._keep(item, hi, item.hi)
        if hi > lo:
            insort(self.items, Item(causal_pairs(lo, hi), hi - lo, item.start, lo, hi))

    def _take_smallest(self, count: int) -> None:
        for item in self.items[:count]:
            self._keep(item, item.lo, item.hi)
        del self.items[:count]

    def _cut(self, at: int) -> None:
        """Take the last tokens of an item, and fill up."""
        item = self.items.pop(at)
        first = self._first_of(item)
        light = bisect_left(self.items, Item(int(self.choice.light * self.pairs), 0, 0, 0, 0))
        # First tokens of another document cost rows, so they come last.
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
        """First tokens to take, so that what is left of the item in the end has enough pairs for its tokens."""
        ranks = item.pairs // max(1, self.pairs)
        if not ranks or not self.choice.density:
            return 0
        rest = item.pairs - ranks * self.pairs
        last = item.hi - math.isqrt(max(0, item.hi**2 - 2 * ranks * self.pairs))
        return max(0, (item.tokens - last - int(self.tokens * rest / self.pairs / self.choice.density)) // ranks)

    def _parts(self, item: Item, least_first: int, most_whole: int, cut_next: bool) -> _Parts:
        """As many last tokens of the item as the pairs allow beside what fills up."""
        tokens, pairs = _sums(self.items[:most_whole])

        def beside(last: int) -> _Parts:
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

        return beside(_last_true(min(item.tokens, self.tokens), lambda last: beside(last).lack >= 0, 0))

    def _finish(self) -> None:
        """Take the tokens that still lack, of the smallest item that has them."""
        while self.tokens and self.items:
            enough = (item for item in self.items if item.tokens >= self.tokens)
            item = min(enough, key=lambda one: one.tokens, default=self.items[-1])
            self.items.remove(item)
            count = min(self.tokens, item.tokens)

            def lack(last: int, item: Item = item, count: int = count) -> int:
                first = causal_pairs(item.lo, item.lo + count - last)
                return self.pairs - first - causal_pairs(item.hi - last, item.hi)

            # All at one end costs the fewest rows: as many as are taken, or as many as are left.
            ends = (0, count) if count < item.tokens - count else (count, 0)
            good = (last for last in ends if abs(lack(last)) <= LEAST_LACK * self.share)
            chosen = next(good, None)
            last = _last_true(count, lambda last: lack(last) >= 0, 0) if chosen is None else chosen
            self._keep_ends(item, count - last, last)


def _sums(items: list[Item]) -> tuple[list[int], list[int]]:
    """Tokens and pairs of the first n items, n = 0, 1, ..."""
    tokens = list(accumulate((item.tokens for item in items), initial=0))
    return tokens, list(accumulate((item.pairs for item in items), initial=0))


def _last_true(most: int, holds: Callable[[int], bool], none: int) -> int:
    """The last number up to `most` that holds, by bisection from `none`, which is taken for granted."""
    low, high = none, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for start, stop in sorted(pieces):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


# --- placement for schedules that bring all rows at once: the fewest rows sent ---------------------------------------
# A long document is cut from its end alone, because few ranks read far then, and pairs are equal over the whole pass,
# not step by step.
# The search is over the rank at which each document is at home; the rest follows. Some ranks take the end of a long
# document: in their order, the most last tokens that their share of pairs allows. They fill up with its first tokens,
# which cost no rows because these ranks read them anyway. The remainder stays at home. Then ranks with too many tokens
# give first tokens of their documents to ranks with too few, for one row each.
# The same cuts and ranks give the same placement; counts are those of the contiguous layout.


EVEN = 1.005
"""The greatest share of pairs over the mean that counts as even: of even placements the one with the fewest rows is
taken."""
FILLS = 80000
"""Work of a search: tries times ranks, about 0.2 s for a hundred documents."""
STARTING_CHOICES = tuple(Choice(*one) for one in product((0.002, 0.03), (0.03, 0.1, 1.0), (0.0, 1.0, 2.0)))
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
    for choice, most in product(STARTING_CHOICES, (None, search.most, middle)):
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
