"""Which rows of each shard every rank reads, and the unions that relays must carry.

`ReadSets` answers for one problem: what one reader reads, what several read together (on a chain the downstream reads),
and which of them is the farthest. *Distance* of a reader is (reader - owner) mod ranks: its place on the owner's chain.
   owner  +1  +2  +3     a relay hands the block from each rank to the next,
     o -> a -> b -> c     so the hop to distance d carries what d and all farther readers read
Reads are intervals of key pieces, so most unions are running minima and maxima over arrays; where intervals leave a
gap the exact union is taken instead.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from operator import sub
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ringattn.core.bounded_cache import bounded
from ringattn.core.geometry import UNBOUNDED, StridedRange
from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints, Pieces, band_of, edges_of, meeting_pieces, partners, tiles_of
from ringattn.schedule.content import NOTHING, Content, HeadRows, contains, merge_runs, size, union

NOBODY = 1 << 61
"""Start of a query piece that does not exist; its last position is -NOBODY, so it contains no position."""

BLOCK_PIECES = 256
"""Key pieces computed at a time: fresh memory costs more than the arithmetic, so temporaries stay small."""


Distances = slice | Ints
"""Of some readers of one owner."""


class Reads(NamedTuple):
    """Key piece x distance: the indices first .. end - 1 of the piece that the reader reads; (NOBODY, 0) for none.

    Those are exact where `apart[n, d]` is false; elsewhere the reader skips some keys in between.
    `nested`: the reads of a piece are all prefixes of it, or all suffixes.
    """

    first: Ints
    end: Ints
    apart: np.ndarray
    nested: bool


class ReadSets:
    """All reads of one problem. Answers are cached; building one is cheap until a union is asked for."""

    def __init__(self, problem: Problem) -> None:
        """Reads nothing yet."""
        self.problem = problem
        self.ranks = problem.world_size
        self._read: dict[tuple[int, int], Content] = {}
        self._tables: dict[int, dict[int, Content]] = {}
        self._unions: dict[tuple[int, bytes], Content] = {}
        self._shared: dict[tuple[int, bytes, bytes], Content] = {}

    def read(self, owner: int, reader: int) -> Content:
        """The rows of `owner`'s shard that `reader` reads."""
        distance = (reader - owner) % self.ranks
        if (owner, distance) not in self._read:
            self._read[owner, distance] = self._reads_of(owner, distance)
        return self._read[owner, distance]

    def union_of(self, owner: int, distances: Distances) -> Content:
        """What the readers at these distances read together."""
        if self._reads is not None:
            first, end, apart = self._of(owner, distances)
            # The hull is the union wherever the intervals leave no gap.
            if self._reads[1].nested or not (apart.any() or _gaps(first, end)):
                return self._intervals(owner, first.min(1, initial=NOBODY), end.max(1, initial=0))
        key = owner, np.arange(self.ranks)[distances].tobytes()
        if key not in self._unions:
            readers = (owner + np.arange(self.ranks)[distances]) % self.ranks
            self._unions[key] = union(self.read(owner, reader) for reader in readers.tolist())
        return self._unions[key]

    def reach(self, owner: int, distances: Distances) -> int:
        """How many of these readers come before the last that reads anything, with it; 0 where none does."""
        some = np.flatnonzero(self._some[owner, distances])
        return int(some[-1]) + 1 if len(some) else 0

    def grow(self, owner: int, distances: Distances) -> bool:
        """Whether in each line of readers everyone reads all that those before it read; the owner reads nothing.

        `distances`: of one line, of lines x readers, or of lines x readers x those that count as one reader.
        """
        if self._reads is not None:
            first, end, _ = self._of(owner, distances)
            if first.ndim == 4:
                first, end = first.min(-1), end.max(-1)
            # What does not hold for the hulls does not hold for the sets; where these have gaps, they decide.
            grown = (first[..., 1:] <= first[..., :-1]).all() and (end[..., 1:] >= end[..., :-1]).all()
            if not grown or self._reads[1].nested:
                return bool(grown)
        lines = np.arange(self.ranks)[distances]
        lines = lines[None] if lines.ndim == 1 else lines
        lines = lines[..., None] if lines.ndim == 2 else lines
        spots = (spot for line in lines for spot in pairwise(some[some > 0] for some in line))
        return all(contains(self.union_of(owner, far), self.union_of(owner, near)) for near, far in spots)

    @property
    def heads_alike(self) -> bool:
        """Whether it is known that all heads read the same rows."""
        return self._reads is not None

    def owners_read_by(self, reader: int) -> Ints:
        """The other ranks of which a rank reads something."""
        owners = np.arange(self.ranks)
        return owners[self._some[owners, (reader - owners) % self.ranks]]

    def _of(self, owner: int, distances: Distances) -> tuple[Ints, Ints, np.ndarray]:
        """The reads at some distances, key piece of the owner first."""
        assert self._reads is not None
        at, reads = slice(*self._slices[owner : owner + 2]), self._reads[1]
        first, end, apart = (table[at][:, distances] for table in (reads.first, reads.end, reads.apart))
        if not isinstance(distances, slice) and not distances.all():
            own = distances == 0
            first[:, own], end[:, own], apart[:, own] = NOBODY, 0, False
        return first, end, apart

    @cached_property
    def totals(self) -> tuple[int, int]:
        """Rows times K/V heads that a forward pass sends (relayed along the chain, straight from each owner).

        Intervals with a gap count whole.
        """
        if self._reads is None:
            # No interval table for this mask: add up the contents themselves.
            spots = [(o, d) for o in range(self.ranks) for d in range(1, self.ranks)]
            relayed = sum(size(self.union_of(o, slice(d, None))) for o, d in spots)
            return relayed, sum(size(self.read(o, (o + d) % self.ranks)) for o, d in spots)
        relayed, direct = (
            # Distance 0 is the owner itself: nothing is sent. An empty read is (NOBODY, 0), so its length is negative.
            int(np.maximum(0, end[:, 1:] - first[:, 1:]).sum())
            for first, end in (self._suffixes, (self._reads[1].first, self._reads[1].end))
        )
        return relayed * self.problem.kv_heads, direct * self.problem.kv_heads

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
    def _some(self) -> np.ndarray:
        """Owner x distance: whether that reader reads anything of another's shard."""
        found = np.zeros((self.ranks, self.ranks), bool)
        if self._reads is None:
            for reader in range(self.ranks):
                for owner in self._table(reader):
                    found[owner, (reader - owner) % self.ranks] = True
        elif len(self._reads[0].rank):
            pieces, reads = self._reads
            # Pieces are in the order of their owners: one line for each owner that has any.
            starts = np.flatnonzero(np.diff(pieces.rank, prepend=-1))
            found[pieces.rank[starts]] = np.logical_or.reduceat(reads.end > reads.first, starts)
        found[:, 0] = False
        return found

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
            at, reads = slice(*self._slices[owner : owner + 2]), self._reads[1]
            if not reads.apart[at, distance].any():
                return self._intervals(owner, reads.first[at, distance], reads.end[at, distance])
        return self._table((owner + distance) % self.ranks).get(owner, NOTHING)

    def _table(self, reader: int) -> dict[int, Content]:
        """The exact rows of a reader by owner, from its tiles, which are made once for all owners."""
        if reader not in self._tables:
            by_owner: dict[int, list[HeadRows]] = {}
            for (k_rank, index), table in tiles_of(self.problem, reader).items():
                part = HeadRows(self.problem.parts[index].kv_heads, merge_runs(table.k_runs()))
                by_owner.setdefault(k_rank, []).append(part)
            self._tables[reader] = {k_rank: tuple(parts) for k_rank, parts in by_owner.items()}
        return self._tables[reader]

    def _intervals(self, owner: int, start: Ints, stop: Ints) -> Content:
        """One interval of each of the owner's key pieces, as a content."""
        assert self._reads is not None
        key = owner, start.tobytes(), stop.tobytes()  # most distances read what another one reads
        if key not in self._shared:
            some, row = stop > start, self._reads[0].row[slice(*self._slices[owner : owner + 2])]
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
    return Reads(first, end, apart, one_sided)


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


def _gaps(first: Ints, end: Ints) -> bool:
    """Whether the intervals of a line leave a gap; empty ones count for nothing."""
    order = np.argsort(first, axis=1)
    first, end = (np.take_along_axis(side, order, axis=1) for side in (first, end))
    # Empty ones begin at NOBODY and so are last.
    gaps = (first[:, 1:] > np.maximum.accumulate(end, axis=1)[:, :-1]) & (first[:, 1:] < NOBODY)
    return bool(gaps.any())


@bounded
def read_sets_of(problem: Problem) -> ReadSets:
    """The read sets of a problem, shared by all plans that are made for it."""
    return ReadSets(problem)
