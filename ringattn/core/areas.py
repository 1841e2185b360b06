"""Areas and reads of a mask: pairs per query and keys per range of queries, the load of a placement, and a bound.

The tokens of a sequence are cut into *items*: ranges in which the number of keys of a query is a linear function of its
position. A document is one item, and so is a node of a tree. The pairs of any range of queries, the rows that a rank
reads, and the lower bound on rows are computed from the rectangles of the mask, without an array per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ringattn.core.bounded_cache import bounded
from ringattn.core.mask import Mask

Piece = tuple[int, int]
"""Adjacent positions: the first, and the one after the last."""
Shards = tuple[tuple[Piece, ...], ...]
"""The pieces of each rank in ascending order; adjacent pieces are joined."""

ACROSS = 7
"""A row that leaves a node takes as long as this number of rows inside it: on a node of H100, a GPU has 371 GB/s of
NVLink and 50 GB/s of network."""
PAIRS_PER_ROW = 200
"""Number of (q, k) pairs that a rank computes while one row of K and V passes its link. For an H100 with 8 query heads
per K/V head and 128 dimensions in bfloat16: 8 * 512 FLOP per pair at 600 TFLOP/s, 512 bytes per row at 400 GB/s."""
MOST_READS = 1 << 18
"""Number of items, summed over rectangles, up to which the reads of items are listed."""
MOST_MEETINGS = 1 << 17
"""Number of pairs of pieces up to which the load of each step is computed."""


class Item(NamedTuple):
    """The tokens lo .. hi - 1 of the range that starts at `start`, which no rank has yet. Items sort by pairs.

    Token x of the range attends to `depth + slope * (x + 1)` keys. A document has depth 0 and slope 1; a node of a tree
    has the number of tokens of its ancestors as depth.
    """

    pairs: int
    tokens: int
    start: int
    lo: int
    hi: int
    depth: int = 0
    slope: int = 1

    def area(self, lo: int, hi: int) -> int:
        """Return the number of pairs of tokens lo .. hi - 1 of the range."""
        return self.depth * (hi - lo) + self.slope * causal_pairs(lo, hi)

    def cut(self, lo: int, hi: int) -> Item:
        """Return the item of tokens lo .. hi - 1 of the same range."""
        return Item(self.area(lo, hi), hi - lo, self.start, lo, hi, self.depth, self.slope)


def causal_pairs(lo: int, hi: int) -> int:
    """Return the number of causal pairs of queries lo .. hi - 1 of a document: query q has the keys 0 .. q."""
    return (hi * (hi + 1) - lo * (lo + 1)) // 2


class Load(NamedTuple):
    """The load of each rank in a placement: pairs, and rows of K and V received and sent.

    A row that several ranks read is sent once for each of them. Pairs of a mask per head are summed over its heads.
    """

    pairs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]


class Pieces(NamedTuple):
    """The pieces of a placement on `ranks` ranks as arrays, in ascending order of positions."""

    start: np.ndarray
    stop: np.ndarray
    rank: np.ndarray
    ranks: int

    @staticmethod
    def of(shards: Shards) -> Pieces:
        """Return the pieces of all ranks."""
        pieces = sorted((start, stop, rank) for rank, shard in enumerate(shards) for start, stop in shard)
        start, stop, rank = np.array(pieces, np.int64).reshape(-1, 3).T
        return Pieces(start, stop, rank, len(shards))

    @staticmethod
    def joined(start: np.ndarray, stop: np.ndarray, rank: np.ndarray, ranks: int) -> Pieces:
        """Return the pieces that are not empty in ascending order, with adjacent pieces of a rank joined."""
        order = np.argsort(start, kind="stable")
        order = order[(start < stop)[order]]
        start, stop, rank = start[order], stop[order], rank[order]
        apart = np.append(True, (stop[:-1] != start[1:]) | (rank[:-1] != rank[1:]))[: len(start)]
        last = np.append(np.flatnonzero(apart)[1:], len(start)) - 1
        return Pieces(start[apart], stop[last[: apart.sum()]], rank[apart], ranks)

    def shards(self) -> Shards:
        """Return the pieces of each rank."""
        shards: list[list[Piece]] = [[] for _ in range(self.ranks)]
        for start, stop, rank in zip(self.start.tolist(), self.stop.tolist(), self.rank.tolist(), strict=True):
            shards[rank].append((start, stop))
        return tuple(map(tuple, shards))


def cut_at(
    edges: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut ranges of positions at ascending edges; the first and the last edge are outside of all ranges.

    Return for each part the index of its range, the number of the edge before it, its first position and the one after
    its last. Empty ranges have no parts.
    """
    first, after = np.searchsorted(edges, start, "right") - 1, np.searchsorted(edges, stop)
    counts = np.where(start < stop, after - first, 0)
    source = np.repeat(np.arange(len(start)), counts)
    edge = first[source] + np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    return source, edge, np.maximum(start[source], edges[edge]), np.minimum(stop[source], edges[edge + 1])


class Areas(ABC):
    """Items in order of their positions: item n is edges[n] .. edges[n + 1] - 1, and `edges` ends with `length`.

    Token x of item n attends to depths[n] + slopes[n] * (x + 1) keys.
    """

    length: int
    edges: np.ndarray
    depths: np.ndarray
    slopes: np.ndarray

    @cached_property
    def items(self) -> list[Item]:
        """The items in order of their positions."""
        columns = (self.edges[:-1], np.diff(self.edges), self.depths, self.slopes)
        return [
            Item(0, tokens, start, 0, tokens, depth, slope).cut(0, tokens)
            for start, tokens, depth, slope in zip(*(column.tolist() for column in columns), strict=True)
        ]

    @cached_property
    def before(self) -> np.ndarray:
        """The pairs of all items before each item, and of all items. Python's integers if they may exceed 64 bits."""
        most = float((self.depths + np.abs(self.slopes) * self.length).max(initial=0))
        tokens = np.diff(self.edges).astype(np.int64 if most * self.length < 1 << 62 else object)
        pairs = self.depths * tokens + self.slopes * (tokens * (tokens + 1) // 2)
        return np.append(0 * self.edges[:1], np.cumsum(pairs))

    def pairs_before(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of pairs of all queries before each position."""
        item = np.searchsorted(self.edges, positions, "right") - 1
        item = np.minimum(item, len(self.slopes) - 1)
        inside = (positions - self.edges[item]).astype(self.before.dtype)
        return self.before[item] + self.depths[item] * inside + self.slopes[item] * (inside * (inside + 1) // 2)

    def pairs_by_rank(self, placement: Pieces) -> np.ndarray:
        """Return the number of pairs of each rank in a placement."""
        start, stop, rank, ranks = placement
        pairs = np.zeros(ranks, self.before.dtype)
        np.add.at(pairs, rank, self.pairs_before(stop) - self.pairs_before(start))
        return pairs

    @property
    @abstractmethod
    def reads(self) -> list[int]:
        """For each item the items that it reads, as the bits of a number; its own bit if a token reads later tokens.

        An item counts whole if a part of it is read. If the list would be too long, items read nothing.
        """

    @abstractmethod
    def load(self, placement: Pieces | Shards) -> Load:
        """Return the load of each rank in a placement."""


class AreasOfMask(Areas):
    """The items of a mask over `length` tokens. Made by `areas_of`."""

    def __init__(self, mask: Mask, length: int) -> None:
        """Compute the items."""
        self.mask, self.length = mask, length
        # q, q_stop, k, k_stop, lo, hi of each rectangle. Bounds beyond the sequence are clipped to avoid overflows.
        tables = [branch.rectangles.expanded for branch in mask.branches]
        self.rows = np.concatenate(tables)
        self.rows[:, 4:] = self.rows[:, 4:].clip(-length - 1, length + 1)
        heads = [1 if branch.heads is None else branch.heads.count for branch in mask.branches]
        self.heads = weight = np.repeat(heads, [len(table) for table in tables])
        q, q_stop, k, k_stop, lo, hi = self.rows.T
        # A query attends to the keys k .. q - lo of a causal rectangle. The number of keys grows where q - lo is in
        # k .. k_stop - 1, and stays the same after. The keys that a window excludes are counted in the same way.
        parts = [
            (np.maximum(q, k + lo), np.minimum(q_stop, k_stop + lo), weight, weight * (1 - lo - k)),
            (np.maximum(q, k_stop + lo), q_stop, 0 * weight, weight * (k_stop - k)),
            (np.maximum(q, k + hi + 1), np.minimum(q_stop, k_stop + hi + 1), -weight, weight * (hi + k)),
            (np.maximum(q, k_stop + hi + 1), q_stop, 0 * weight, weight * (k - k_stop)),
        ]
        start, stop, slope, value = (np.concatenate(column) for column in zip(*parts, strict=True))
        used = start < stop
        start, stop, slope, value = (column[used] for column in (start, stop, slope, value))
        edges = np.concatenate([[0, length], start, stop, k, k_stop])
        self.edges = np.unique(edges[(edges >= 0) & (edges <= length)])
        slopes, values = (np.zeros(len(self.edges), np.int64) for _ in range(2))
        for sums, change in ((slopes, slope), (values, value)):
            np.add.at(sums, np.searchsorted(self.edges, start), change)
            np.subtract.at(sums, np.searchsorted(self.edges, stop), change)
        first, slopes = self.edges[:-1], np.cumsum(slopes)[:-1]
        self.slopes, self.depths = slopes, np.cumsum(values)[:-1] + slopes * first - slopes

    def meeting(self, start: np.ndarray, stop: np.ndarray, *, keys: bool = False) -> tuple[np.ndarray, ...]:
        """Cut ascending ranges of positions at the rectangles.

        Return for each part its rectangle, the index of its range, and its first position and the one after its last.
        """
        q, q_stop = self.rows[:, 2:4].T if keys else self.rows[:, :2].T
        first, end = np.searchsorted(stop, q, "right"), np.searchsorted(start, q_stop)
        counts = np.maximum(0, end - first)
        row = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        return row, index, np.maximum(start[index], q[row]), np.minimum(stop[index], q_stop[row])

    def read(self, row: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key, and the one after the last, of queries start .. stop - 1 in rectangle `row`."""
        _, _, k, k_stop, lo, hi = self.rows[row].T
        return np.maximum(k, start - hi), np.minimum(k_stop, stop - lo)

    @cached_property
    def reads(self) -> list[int]:
        """See `Areas.reads`."""
        start, stop = self.edges[:-1], self.edges[1:]
        reads = [0] * len(start)
        q, q_stop = self.rows[:, :2].T
        if (np.searchsorted(start, q_stop) - np.searchsorted(stop, q, "right")).clip(0).sum() > MOST_READS:
            return reads
        row, index, first, end = self.meeting(start, stop)
        k, k_stop = self.read(row, first, end)
        later = self.rows[row, 4] < 0
        used = k < k_stop
        low, high = np.searchsorted(stop, k, "right"), np.searchsorted(start, k_stop)
        for item, a, b, whole in zip(*(column[used].tolist() for column in (index, low, high, later)), strict=True):
            excluded = 0 if whole else 1 << item
            reads[item] |= ((1 << b) - (1 << a)) & ~excluded
        return reads

    def load(self, placement: Pieces | Shards) -> Load:
        """See `Areas.load`."""
        pieces = placement if isinstance(placement, Pieces) else Pieces.of(placement)
        start, stop, rank, ranks = pieces
        wide = self.length + 1
        pairs = self.pairs_by_rank(pieces)
        row, index, first, end = self.meeting(start, stop)
        k, k_stop = self.read(row, first, end)
        used = k < k_stop
        # The rows that a rank reads or has: the union of intervals. Ranks are kept apart by an offset.
        offset = np.concatenate([rank[index[used]], rank]) * wide
        low, high = np.concatenate([k[used], start]) + offset, np.concatenate([k_stop[used], stop]) + offset
        order = np.argsort(low, kind="stable")
        low, high = low[order], np.maximum.accumulate(high[order])
        begins = np.flatnonzero(np.append(True, low[1:] > high[:-1])) if len(low) else np.empty(0, int)
        reader = low[begins] // wide
        low, high = low[begins] - reader * wide, high[np.append(begins[1:], len(high))[: len(begins)] - 1]
        high = high - reader * wide
        owned = np.zeros(ranks, np.int64)
        np.add.at(owned, rank, stop - start)
        received, sent = -owned, -owned
        np.add.at(received, reader, high - low)
        # How often each position is read or owned, summed up to a position x.
        low, high = np.sort(low), np.sort(high)
        lows, highs = (np.append(0, np.cumsum(ends)) for ends in (low, high))

        def covered(x: np.ndarray) -> np.ndarray:
            n, m = np.searchsorted(low, x), np.searchsorted(high, x)
            return n * x - lows[n] - (m * x - highs[m])

        np.add.at(sent, rank, covered(stop) - covered(start))
        return Load(*(tuple(column.tolist()) for column in (pairs, received, sent)))

    def in_steps(self, placement: Pieces | Shards) -> int | None:
        """Return the sum over all steps of the pairs of the slowest rank in that step, or None for too many pieces.

        In step s, rank r attends to the keys of rank r - s, and in most schedules no rank is a step ahead of the next.
        """
        between = self.pairs_between(placement)
        if between is None:
            return None
        reader = np.arange(len(between))
        return int(sum(between[reader, (reader - step) % len(between)].max() for step in reader.tolist()))

    def pairs_between(self, placement: Pieces | Shards) -> np.ndarray | None:
        """Return the pairs of the queries of each rank and the keys of each rank, or None for too many pieces."""
        start, stop, rank, ranks = placement if isinstance(placement, Pieces) else Pieces.of(placement)
        row, index, a, b = self.meeting(start, stop)
        k_row, k_index, c, d = self.meeting(start, stop, keys=True)
        counts = np.bincount(k_row, minlength=len(self.rows))
        if counts[row].sum() > MOST_MEETINGS:
            return None
        # Join the parts of queries and keys of the same rectangle.
        first = np.cumsum(counts) - counts
        source = np.repeat(np.arange(len(row)), counts[row])
        partner = np.arange(len(source)) - np.repeat(np.cumsum(counts[row]) - counts[row] - first[row], counts[row])
        a, b, c, d = a[source], b[source], c[partner], d[partner]
        _, _, _, _, lo, hi = self.rows[row[source]].T
        pairs = sum(
            sign * (_triangle(b - bound - side) - _triangle(a - bound - side))
            for bound, outer in ((lo, 1), (hi + 1, -1))
            for side, sign in ((c, outer), (d, -outer))
        )
        between = np.zeros((ranks, ranks), np.int64)  # [rank of queries, rank of keys]
        np.add.at(between, (rank[index[source]], rank[k_index[partner]]), pairs * self.heads[row[source]])
        return between


class AreasOfPart(Areas):
    """The items of one node in a placement over nodes: its tokens are numbered from 0 on in the order of positions."""

    def __init__(self, whole: Areas, tokens: tuple[Piece, ...], others: Shards) -> None:
        """Cut the items of `whole` at the edges of the node's tokens. `others`: the tokens of other nodes."""
        start, stop = np.array(tokens, np.int64).reshape(-1, 2).T
        _, self._item, self._first, end = cut_at(whole.edges, start, stop)
        self.whole, self.edges = whole, np.append(0, np.cumsum(end - self._first))
        self.length, self.slopes = int(self.edges[-1]), whole.slopes[self._item]
        self.depths = whole.depths[self._item] + self.slopes * (self._first - whole.edges[self._item])
        self.others = Pieces.of(others)

    @cached_property
    def reads(self) -> list[int]:
        """See `Areas.reads`. Parts of an item do not count as reading each other."""
        items, reads, parts = self._item.tolist(), self.whole.reads, dict[int, int]()
        for part, item in enumerate(items):
            parts[item] = parts.get(item, 0) | 1 << part
        return [
            sum(bits for other, bits in parts.items() if reads[item] >> other & 1) if reads[item] else 0
            for item in items
        ]

    def load(self, placement: Pieces | Shards) -> Load:
        """See `Areas.load`. Rows from other nodes count as received, and rows to other nodes as sent to each once.

        A row that leaves the node counts `ACROSS` times.
        """
        ours = self.placed(placement if isinstance(placement, Pieces) else Pieces.of(placement))
        others = self.others._replace(rank=self.others.rank + ours.ranks)
        start, stop, rank = (np.concatenate(columns) for columns in zip(ours[:3], others[:3], strict=True))
        load = self.whole.load(Pieces.joined(start, stop, rank, ours.ranks + others.ranks))
        inside = self.whole.load(ours).sent
        sent = (near + ACROSS * (both - near) for near, both in zip(inside, load.sent, strict=False))
        return Load(load.pairs[: ours.ranks], load.received[: ours.ranks], tuple(sent))

    def placed(self, placement: Pieces) -> Pieces:
        """Return a placement of this part as positions of the whole."""
        source, item, start, stop = cut_at(self.edges, placement.start, placement.stop)
        shift = self._first[item] - self.edges[item]
        return Pieces.joined(start + shift, stop + shift, placement.rank[source], placement.ranks)


def _triangle(n: np.ndarray) -> np.ndarray:
    """Return 1 + 2 + ... + n, or 0 for a negative n."""
    n = np.maximum(n, 0)
    return n * (n + 1) // 2


@bounded
def areas_of(mask: Mask, length: int) -> AreasOfMask:
    """Return the areas and reads of a mask whose queries and keys are the same `length` tokens."""
    return AreasOfMask(mask, length)


def fewest_rows(mask: Mask, length: int, ranks: int, even: float) -> int:
    """Return a lower bound on the rows of any placement in which no rank has more than `even` times the mean pairs.

    Ranks have the tokens of the contiguous layout. docs/masks.md has the proof. It takes memory for each token.
    """
    areas = areas_of(mask, length)
    most_pairs = even * int(areas.before[-1]) / ranks
    share, extra = divmod(length, ranks)
    # The pairs of the n lightest queries, for n = 0, 1, ...
    inside = np.arange(length) - np.repeat(areas.edges[:-1], np.diff(areas.edges)) + 1
    keys_of = np.repeat(areas.depths, np.diff(areas.edges)) + np.repeat(areas.slopes, np.diff(areas.edges)) * inside
    lightest = np.append(0, np.cumsum(np.sort(keys_of)))
    most_readers = np.ones(length, np.int64)
    for branch in mask.branches:  # a key of several branches counts for the one with most readers
        tokens, pairs = np.zeros(length, np.int64), np.zeros(length)
        for q, q_stop, k, k_stop, lo, hi in branch.rectangles.expanded.tolist():
            keys = np.arange(k, k_stop)
            first = np.clip(keys + lo, q, q_stop)
            end = np.clip(keys + hi + 1, first, q_stop)
            tokens[k:k_stop] += end - first
            pairs[k:k_stop] += (areas.pairs_before(end) - areas.pairs_before(first)).astype(float)
        readers, possible = np.ones(length, np.int64), np.zeros(length, bool)
        for n in range(1, ranks):
            most_tokens, least_tokens = n * share + min(n, extra), n * share + max(0, n + extra - ranks)
            others = lightest[np.maximum(0, least_tokens - tokens)]
            possible |= (tokens <= most_tokens) & (pairs + others <= n * most_pairs * (1 + 1e-12))
            readers += ~possible
        most_readers = np.maximum(most_readers, readers)
    return int(most_readers.sum()) - length
