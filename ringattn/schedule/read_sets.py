"""Which rows of each shard every rank reads, and the unions that relays must carry.

`ReadSets` answers for one problem: what one reader reads, what all readers from some distance on read together (the
downstream reads), and the distance of the farthest reader. *Distance* of a reader is (reader - owner) mod ranks: its
place on the owner's chain.
   owner  +1  +2  +3     a relay hands the block from each rank to the next,
     o -> a -> b -> c     so the hop to distance d carries what d and all farther readers read
Reads are intervals of key pieces, so most unions are running minima and maxima over arrays; where intervals leave a
gap the exact union is taken instead.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from operator import sub
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ringattn.core.geometry import UNBOUNDED, StridedRange
from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints, Pieces, band_of, edges_of, meeting_pieces, partners, tiles_of
from ringattn.schedule.content import NOTHING, Content, HeadRows, merge_runs, size, union

NOBODY = 1 << 61
"""Start of a query piece that does not exist; its last position is -NOBODY, so it contains no position."""

BLOCK_PIECES = 256
"""Key pieces computed at a time: fresh memory costs more than the arithmetic, so temporaries stay small."""


class Reads(NamedTuple):
    """Key piece x distance: the indices first .. end - 1 of the piece that the reader reads; (NOBODY, 0) for none.

    Those are exact where `apart[n, d]` is false; elsewhere the reader skips some keys in between.
    `joined[n, d]`: the reads of piece n from distance d on form one interval.
    """

    first: Ints
    end: Ints
    apart: np.ndarray
    joined: np.ndarray


class ReadSets:
    """All reads of one problem. Answers are cached; building one is cheap until a union is asked for."""

    def __init__(self, problem: Problem) -> None:
        """Reads nothing yet."""
        self.problem = problem
        self.ranks = problem.world_size
        self._read: dict[tuple[int, int], Content] = {}
        self._tables: dict[int, dict[int, Content]] = {}
        self._beyond: dict[tuple[int, int], Content] = {}
        self._shared: dict[tuple[int, bytes, bytes], Content] = {}

    def read(self, owner: int, reader: int) -> Content:
        """The rows of `owner`'s shard that `reader` reads."""
        distance = (reader - owner) % self.ranks
        if (owner, distance) not in self._read:
            self._read[owner, distance] = self._reads_of(owner, distance)
        return self._read[owner, distance]

    def beyond(self, owner: int, distance: int) -> Content:
        """What the readers at `distance` (at least 1) and farther read together."""
        if distance >= self.ranks:
            return NOTHING
        if (owner, distance) not in self._beyond:
            self._beyond[owner, distance] = self._union(owner, distance)
        return self._beyond[owner, distance]

    def reach(self, owner: int) -> int:
        """The distance of the farthest reader; 0 where no other rank reads."""
        return int(self._reaches[owner])

    def relaying_home_costs_no_more(self, owner: int) -> bool:
        """Whether handing rows from the farthest reader back to the owner sends no more than the owner sending to each.

        A relay back at distance d carries what all nearer readers need too.
        """
        # Only intervals can be compared by their ends; with gaps the sets themselves are compared below.
        if self._reads is not None and not self._reads[1].apart[slice(*self._slices[owner : owner + 2])].any():
            return bool(self._grows[owner])
        # On the way back the rank at distance d receives the union of what it and all nearer readers read. The relay
        # costs
        # no more exactly when that union never exceeds what the rank itself reads.
        nearer: Content = NOTHING
        for distance in range(1, self.reach(owner) + 1):
            own = self.read(owner, (owner + distance) % self.ranks)
            nearer = union((nearer, own))
            if size(nearer) > size(own):
                return False
        return True

    @cached_property
    def totals(self) -> tuple[int, int]:
        """Rows times K/V heads that a forward pass sends (relayed along the chain, straight from each owner).

        Intervals with a gap count whole.
        """
        if self._reads is None:
            # No interval table for this mask: add up the contents themselves.
            spots = [(o, d) for o in range(self.ranks) for d in range(1, self.ranks)]
            relayed = sum(size(self.beyond(o, d)) for o, d in spots)
            return relayed, sum(size(self.read(o, (o + d) % self.ranks)) for o, d in spots)
        relayed, direct = (
            # Distance 0 is the owner itself: nothing is sent. An empty read is (NOBODY, 0), so its length is negative.
            int(np.maximum(0, end[:, 1:] - first[:, 1:]).sum())
            for first, end in (self._suffixes, (self._reads[1].first, self._reads[1].end))
        )
        return relayed * self.problem.kv_heads, direct * self.problem.kv_heads

    @cached_property
    def _grows(self) -> np.ndarray:
        """By owner: does every reader read all that the nearer readers read?"""
        assert self._reads is not None
        pieces, reads = self._reads
        first, end = reads.first[:, 1:], reads.end[:, 1:]
        # The interval at each distance contains that at the distance before; past the farthest reader nothing is
        # required.
        grows = (first[:, 1:] <= first[:, :-1]) & (end[:, 1:] >= end[:, :-1])
        beyond_reach = np.arange(2, self.ranks) > self._reaches[pieces.rank][:, None]
        # Count the offending pieces of each owner.
        shrinks = np.bincount(pieces.rank, ~(grows | beyond_reach).all(axis=1), self.ranks)
        return shrinks == 0

    @cached_property
    def _reads(self) -> tuple[Pieces, Reads] | None:
        """The reads as arrays, for a mask of one branch with all heads, not dilated; None for others."""
        # Several branches, heads or dilation make reads that are not one interval of a key piece for all heads.
        branches = self.problem.mask.branches
        if len(branches) > 1 or branches[0].heads is not None or branches[0].dilation > 1:
            return None
        q, k = meeting_pieces(self.problem, branches[0])
        # Keys that were cut to the stride of the queries are not neighbors in the shard.
        if (k.row_stride > 1).any():
            return None
        return k, _reads(self.ranks, branches[0], q, k)

    @cached_property
    def _reaches(self) -> Ints:
        if self._reads is None:
            return np.array(
                [
                    max((d for d in range(1, self.ranks) if self.read(o, (o + d) % self.ranks)), default=0)
                    for o in range(self.ranks)
                ]
            )
        pieces, reads = self._reads
        reaches = np.zeros(self.ranks, np.int64)
        # argmax on the reversed axis finds the last distance that reads anything of each piece.
        some = reads.end[:, 1:] > reads.first[:, 1:]
        farthest = np.where(some.any(1), self.ranks - 1 - np.argmax(some[:, ::-1], axis=1), 0) if self.ranks > 1 else 0
        # An owner's farthest reader is the maximum over its pieces.
        np.maximum.at(reaches, pieces.rank, farthest)
        return reaches

    @cached_property
    def _suffixes(self) -> tuple[Ints, Ints]:
        """Running union of `_reads` from the far end."""
        assert self._reads is not None
        _, reads = self._reads
        # Accumulate from the greatest distance down: column d holds the hull of the reads at d, d + 1, ...
        #    distance       1     2     3
        #    reads         0..9  4..7  6..7
        #    union from d  0..9  4..7  6..7
        first, end = reads.first[:, ::-1], reads.end[:, ::-1]
        return np.minimum.accumulate(first, axis=1)[:, ::-1], np.maximum.accumulate(end, axis=1)[:, ::-1]

    @cached_property
    def _slices(self) -> list[int]:
        """Key pieces of owner o: _slices[o] .. _slices[o + 1] - 1."""
        assert self._reads is not None
        return np.searchsorted(self._reads[0].rank, np.arange(self.ranks + 1)).tolist()

    def _reads_of(self, owner: int, distance: int) -> Content:
        if self._reads is not None:
            _, reads = self._reads
            if not reads.apart[slice(*self._slices[owner : owner + 2]), distance].any():
                return self._intervals(owner, distance, reads.first, reads.end)
        reader = (owner + distance) % self.ranks
        if reader not in self._tables:
            # Exact rows from the reader's tiles, which are made once for all owners.
            by_owner: dict[int, list[HeadRows]] = {}
            for (k_rank, index), table in tiles_of(self.problem, reader).items():
                part = HeadRows(self.problem.parts[index].kv_heads, merge_runs(table.k_runs()))
                by_owner.setdefault(k_rank, []).append(part)
            self._tables[reader] = {k_rank: tuple(parts) for k_rank, parts in by_owner.items()}
        return self._tables[reader].get(owner, NOTHING)

    def _union(self, owner: int, distance: int) -> Content:
        if self._reads is not None:
            _, reads = self._reads
            # The running hull is the union wherever the intervals leave no gap.
            if reads.joined[slice(*self._slices[owner : owner + 2]), distance].all():
                return self._intervals(owner, distance, *self._suffixes)
        return union(self.read(owner, (owner + d) % self.ranks) for d in range(distance, self.ranks))

    def _intervals(self, owner: int, distance: int, first: Ints, end: Ints) -> Content:
        """One interval of each of the owner's key pieces, as a content."""
        assert self._reads is not None
        at = slice(*self._slices[owner : owner + 2])
        start, stop = first[at, distance], end[at, distance]
        key = owner, start.tobytes(), stop.tobytes()  # most distances read what another one reads
        if key not in self._shared:
            some, row = stop > start, self._reads[0].row[at]
            runs = _join_adjacent((row + start)[some], (row + stop)[some])
            self._shared[key] = (HeadRows(StridedRange(0, self.problem.kv_heads), runs),) if runs else NOTHING
        return self._shared[key]


def _reads(ranks: int, branch: Branch, q: Pieces, k: Pieces) -> Reads:
    """The reads of one branch by every rank, key piece by distance."""
    one_sided = branch.band.lo <= -UNBOUNDED or branch.band.hi >= UNBOUNDED
    first = np.full((len(k.rank), ranks), NOBODY)
    end = np.zeros_like(first)
    apart = np.zeros(first.shape, bool)
    layers = _layers(q, len(edges_of(branch.bounds, branch.segment)) - 1, ranks)
    for at in (slice(n, n + BLOCK_PIECES) for n in range(0, len(k.rank), BLOCK_PIECES)):
        block = Pieces(*(array[at, None] for array in k))
        lo, hi = band_of(branch, block.segment)
        for starts, lasts in layers:
            q_start, q_last = (readers[k.segment[at], k.rank[at]] for readers in (starts, lasts))
            # Every rank as reader at once: axis 0 key piece, axis 1 distance.
            f, e = partners(block, q_start, q_last, lo, hi)
            some = e > f
            if not one_sided:
                # A reader with several query pieces: the union of two intervals with a gap between is no interval.
                #    first[at]..end[at]  |----|
                #    f..e                        |---|     f > end: apart
                apart[at] |= some & (end[at] > 0) & ((f > end[at]) | (e < first[at]))
            # Grow the hull in place, only where this query piece reads something.
            np.minimum(first[at], f, out=first[at], where=some)
            np.maximum(end[at], e, out=end[at], where=some)
    # A one-sided band reads a prefix or a suffix of each key piece, and prefixes (or suffixes) of one piece are nested.
    return Reads(first, end, apart, np.ones_like(apart) if one_sided else _joined(first, end, apart))


def _join_adjacent(start: Ints, end: Ints) -> tuple[StridedRange, ...]:
    """Disjoint ascending intervals start .. end - 1 as ranges that do not touch."""
    if not len(start):
        return ()
    # An interval that starts where the one before ends continues it.
    gaps = np.flatnonzero(start[1:] != end[:-1])
    firsts, stops = [int(start[0]), *start[gaps + 1].tolist()], [*end[gaps].tolist(), int(end[-1])]
    return tuple(map(StridedRange, firsts, map(sub, stops, firsts)))


def _layers(q: Pieces, segments: int, ranks: int) -> list[tuple[Ints, Ints]]:
    """Query pieces as (start, last), each segment x owner x distance: those of the reader at the distance.

    The n-th pair holds every reader's n-th piece of a segment.
    """
    # Number the pieces of equal (segment, rank) 0, 1, ...: `key` is sorted, and searchsorted gives where its value
    # starts.
    order = np.lexsort((q.rank, q.segment))
    key = (q.segment * ranks + q.rank)[order]
    layer = np.arange(len(key)) - np.searchsorted(key, key)
    matrices = []
    for n in range(int(layer.max(initial=-1)) + 1):
        start = np.full((segments, ranks), NOBODY)
        last = np.full((segments, ranks), -NOBODY)
        at = order[layer == n]
        start[q.segment[at], q.rank[at]] = q.start[at]
        last[q.segment[at], q.rank[at]] = q.last[at]
        # Row r of the windows over [x0 .. x(n-1), x0 .. x(n-1)] is x(r), x(r+1), ...:
        # for owner r the readers at distance 0, 1, ...
        by_distance = [sliding_window_view(np.tile(of, 2), ranks, axis=1) for of in (start, last)]
        matrices.append((by_distance[0], by_distance[1]))
    return matrices


def _joined(first: Ints, end: Ints, apart: np.ndarray) -> np.ndarray:
    """For each piece and distance: do the intervals from there on leave no gap?"""
    joined = np.ones_like(apart)
    # From the far end: low..high is the hull so far; a new interval must touch or overlap it.
    low, high = np.full(len(first), NOBODY), np.zeros(len(first), np.int64)
    whole = np.ones(len(first), bool)
    for distance in range(first.shape[1] - 1, 0, -1):
        f, e = first[:, distance], end[:, distance]
        some = e > f
        whole &= ~(some & (apart[:, distance] | ((high > low) & ((f > high) | (e < low)))))
        low, high = np.where(some, np.minimum(low, f), low), np.where(some, np.maximum(high, e), high)
        joined[:, distance] = whole
    return joined


@lru_cache(maxsize=64)
def read_sets_of(problem: Problem) -> ReadSets:
    """The read sets of a problem, shared by all plans that are made for it."""
    return ReadSets(problem)
