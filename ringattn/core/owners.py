"""Search for the best owners of items, for schedules that receive all rows at once.

A long document is cut only from its end, because then few ranks read far. Pairs are equal over the whole pass, not in
each step. The search varies the rank that owns each document and the document whose end a rank takes; everything else
follows from these. The ranks that take the end of a long document do so in rank order: each takes the largest number of
last tokens that its share of pairs allows, and then first tokens of the same document, which cost no rows because the
rank reads them anyway. The owner keeps the rest. Then ranks with too many tokens move first tokens of their documents
to ranks with too few, at a cost of one row per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container
from random import Random
from typing import NamedTuple

import numpy as np

from ringattn.core.areas import Areas, Piece, Shards
from ringattn.core.filling import joined

WORSE = 0.001
"""Share of the rows by which a step of the search may be worse at the beginning. It falls to 0 at the end."""
PRICE = 100
"""At the beginning, a pair above the limit costs as much as `PRICE` rows divided by the tokens of a rank. This cost
grows by a factor of 1 + `DEARER`."""
DEARER = 20
WAYS = 3
"""Number of starts from which the search goes on."""


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
