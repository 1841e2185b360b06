"""The rows that each rank reads, and the content of a message or a held block: rows of a shard for some heads.

`ReadSets` describes one problem: the rows that one reader reads, the rows that any of several readers reads (on a
chain: all ranks downstream), and the farthest reader. The *distance* of a reader is (reader - owner) mod ranks: its
position on the owner's chain.
   owner  +1  +2  +3     each relay sends the block to the next rank,
     o -> a -> b -> c     so the hop to distance d carries the rows that d and all farther readers read
A shard consists of key pieces (`tiling.Pieces`), and a reader usually reads one interval of each piece. So most unions
are running minima and maxima over arrays. Where intervals leave a gap, the exact union is taken instead.

A content is a tuple of `HeadRows`, ordered by head; a part's rows are disjoint ranges, as `merge_runs` makes them. Wire
order is part after part, and within a part range after range, with rows outermost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ringattn.core.bounded_cache import bounded
from ringattn.core.geometry import StridedRange
from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints, Pieces, band_of, meeting_pieces, partners, tiles_of

# --- the sets of rows that are read -----------------------------------------------------------------------------------


EMPTY = 1 << 61
"""Start of a query piece that does not exist; its last position is -EMPTY, so it contains no position."""

BLOCK_PIECES = 256
"""Key pieces computed at a time. Temporaries stay small, because fresh memory costs more than the arithmetic."""


Distances = slice | Ints
"""The distances of some readers of one owner."""


class Reads(NamedTuple):
    """The intervals of key pieces that all readers read: arrays with axes (key piece, distance of the reader).

    The reader at distance d reads indices `first[n, d]` to `end[n, d]` - 1 of piece n; (EMPTY, 0) if it reads none. The
    interval is exact if `apart[n, d]` is false; otherwise the reader skips some keys inside it. `nested`: whether all
    reads of a piece are prefixes of it, or all are suffixes.
    """

    first: Ints
    end: Ints
    apart: np.ndarray
    nested: bool


class ReadSets:
    """The rows that each rank reads from each shard in one problem. They are computed at their first use and cached."""

    def __init__(self, problem: Problem) -> None:
        """Create empty caches."""
        self.problem = problem
        self.ranks = problem.world_size
        self._read: dict[tuple[int, int], Content] = {}
        self._tables: dict[int, dict[int, Content]] = {}
        self._unions: dict[tuple[int, bytes], Content] = {}
        self._shared: dict[tuple[int, bytes, bytes], Content] = {}

    def read(self, owner: int, reader: int) -> Content:
        """Return the rows of `owner`'s shard that `reader` reads."""
        distance = (reader - owner) % self.ranks
        if (owner, distance) not in self._read:
            self._read[owner, distance] = self._reads_of(owner, distance)
        return self._read[owner, distance]

    def union_of(self, owner: int, distances: Distances) -> Content:
        """Return the union of the rows that the readers at these distances read."""
        if self._reads is not None:
            first, end, apart = self._of(owner, distances)
            # If the intervals leave no gap, their hull is the union.
            if self._reads[1].nested or not (apart.any() or _gaps(first, end)):
                return self._intervals(owner, first.min(1, initial=EMPTY), end.max(1, initial=0))
        key = owner, np.arange(self.ranks)[distances].tobytes()
        if key not in self._unions:
            readers = (owner + np.arange(self.ranks)[distances]) % self.ranks
            self._unions[key] = union(self.read(owner, reader) for reader in readers.tolist())
        return self._unions[key]

    def reach(self, owner: int, distances: Distances) -> int:
        """Return the number of readers up to and including the last that reads anything; 0 if none does."""
        reading = np.flatnonzero(self._any[owner, distances])
        return int(reading[-1]) + 1 if len(reading) else 0

    def grow(self, owner: int, distances: Distances) -> bool:
        """Return whether in each line of readers every reader reads all rows that the readers before it read.

        A line is a sequence of readers. The owner counts as reading nothing. `distances`: one line, or an array of
        shape (lines, readers), or (lines, readers, ranks) if several ranks together count as one reader.
        """
        if self._reads is not None:
            first, end, _ = self._of(owner, distances)
            if first.ndim == 4:
                first, end = first.min(-1), end.max(-1)
            # If the hulls do not grow, the sets do not grow either. If the hulls grow and the sets may have gaps,
            # compare the sets themselves.
            grown = (first[..., 1:] <= first[..., :-1]).all() and (end[..., 1:] >= end[..., :-1]).all()
            if not grown or self._reads[1].nested:
                return bool(grown)
        lines = np.arange(self.ranks)[distances]
        lines = lines[None] if lines.ndim == 1 else lines
        lines = lines[..., None] if lines.ndim == 2 else lines
        pairs = (pair for line in lines for pair in pairwise(readers[readers > 0] for readers in line))
        return all(contains(self.union_of(owner, far), self.union_of(owner, near)) for near, far in pairs)

    @property
    def heads_alike(self) -> bool:
        """Whether all heads are known to read the same rows."""
        return self._reads is not None

    def owners_read_by(self, reader: int) -> Ints:
        """Return the other ranks whose rows a rank reads."""
        owners = np.arange(self.ranks)
        return owners[self._any[owners, (reader - owners) % self.ranks]]

    def _of(self, owner: int, distances: Distances) -> tuple[Ints, Ints, np.ndarray]:
        """Return `first`, `end` and `apart` of the readers at some distances; axis 0 is the key piece of the owner."""
        assert self._reads is not None
        pieces, reads = slice(*self._slices[owner : owner + 2]), self._reads[1]
        first, end, apart = (table[pieces][:, distances] for table in (reads.first, reads.end, reads.apart))
        if not isinstance(distances, slice) and not distances.all():
            local = distances == 0
            first[:, local], end[:, local], apart[:, local] = EMPTY, 0, False
        return first, end, apart

    @cached_property
    def totals(self) -> tuple[int, int]:
        """Rows times K/V heads that a forward pass sends: (relayed along the chain, directly from each owner).

        An interval with a gap counts as a whole.
        """
        if self._reads is None:
            # There is no interval table for this mask, so add up the contents.
            pairs = [(o, d) for o in range(self.ranks) for d in range(1, self.ranks)]
            relayed = sum(size(self.union_of(o, slice(d, None))) for o, d in pairs)
            return relayed, sum(size(self.read(o, (o + d) % self.ranks)) for o, d in pairs)
        relayed, direct = (
            # Distance 0 is the owner itself, which sends nothing. An empty read is (EMPTY, 0), so its length is
            # negative.
            int(np.maximum(0, end[:, 1:] - first[:, 1:]).sum())
            for first, end in (self._suffixes, (self._reads[1].first, self._reads[1].end))
        )
        return relayed * self.problem.kv_heads, direct * self.problem.kv_heads

    @cached_property
    def _reads(self) -> tuple[Pieces, Reads] | None:
        """The reads as arrays, for one undilated branch with all heads and disjoint keys; None for other masks."""
        # With several branches, head subsets or dilation, or keys of several rectangles, reads are not one interval of
        # a key piece for all heads.
        branches = self.problem.mask.branches
        if len(branches) > 1 or branches[0].heads is not None or branches[0].dilation > 1:
            return None
        if not branches[0].rectangles.keys_disjoint:
            return None
        q, k = meeting_pieces(self.problem, branches[0])
        # Keys that were cut to the stride of the queries are not adjacent in the shard.
        if (k.row_stride > 1).any():
            return None
        return k, _reads(self.ranks, branches[0], q, k)

    @cached_property
    def _any(self) -> np.ndarray:
        """Whether a reader reads anything of a remote shard, as an array with axes (owner, distance of the reader)."""
        any_read = np.zeros((self.ranks, self.ranks), bool)
        if self._reads is None:
            for reader in range(self.ranks):
                for owner in self._table(reader):
                    any_read[owner, (reader - owner) % self.ranks] = True
        elif len(self._reads[0].rank):
            pieces, reads = self._reads
            # Pieces are in the order of their owners, so reduce them to one line for each owner with pieces.
            starts = np.flatnonzero(np.diff(pieces.rank, prepend=-1))
            any_read[pieces.rank[starts]] = np.logical_or.reduceat(reads.end > reads.first, starts)
        any_read[:, 0] = False
        return any_read

    @cached_property
    def _suffixes(self) -> tuple[Ints, Ints]:
        """The hull of all reads at a distance and farther, for each key piece and distance: first and end."""
        assert self._reads is not None
        _, reads = self._reads
        # Accumulate from the largest distance down: column d holds the hull of the reads at d, d + 1, ...
        #    distance       1     2     3
        #    reads         0..9  4..7  6..7
        #    union from d  0..9  4..7  6..7
        first, end = reads.first[:, ::-1], reads.end[:, ::-1]
        return np.minimum.accumulate(first, axis=1)[:, ::-1], np.maximum.accumulate(end, axis=1)[:, ::-1]

    @cached_property
    def _slices(self) -> list[int]:
        """The borders of the owners' key pieces: owner o has pieces _slices[o] to _slices[o + 1] - 1."""
        assert self._reads is not None
        return np.searchsorted(self._reads[0].rank, np.arange(self.ranks + 1)).tolist()

    def _reads_of(self, owner: int, distance: int) -> Content:
        """Return the rows of `owner`'s shard that the reader at a distance reads."""
        if self._reads is not None:
            pieces, reads = slice(*self._slices[owner : owner + 2]), self._reads[1]
            if not reads.apart[pieces, distance].any():
                return self._intervals(owner, reads.first[pieces, distance], reads.end[pieces, distance])
        return self._table((owner + distance) % self.ranks).get(owner, NOTHING)

    def _table(self, reader: int) -> dict[int, Content]:
        """Return the exact rows of a reader by owner, from its tiles. The tiles are made once for all owners."""
        if reader not in self._tables:
            by_owner: dict[int, list[HeadRows]] = {}
            for (k_rank, index), table in tiles_of(self.problem, reader).items():
                part = HeadRows(self.problem.parts[index].kv_heads, merge_runs(table.k_runs()))
                by_owner.setdefault(k_rank, []).append(part)
            self._tables[reader] = {k_rank: tuple(parts) for k_rank, parts in by_owner.items()}
        return self._tables[reader]

    def _intervals(self, owner: int, start: Ints, stop: Ints) -> Content:
        """Return one interval of each of the owner's key pieces as a content."""
        assert self._reads is not None
        key = owner, start.tobytes(), stop.tobytes()  # most distances read the same rows as another distance
        if key not in self._shared:
            filled, row = stop > start, self._reads[0].row[slice(*self._slices[owner : owner + 2])]
            runs = _join_adjacent((row + start)[filled], (row + stop)[filled])
            self._shared[key] = (HeadRows(StridedRange(0, self.problem.kv_heads), runs),) if runs else NOTHING
        return self._shared[key]


def _reads(ranks: int, branch: Branch, q: Pieces, k: Pieces) -> Reads:
    """Return what every rank reads in one branch, for each key piece and distance of the reader."""
    one_sided = bool(branch.rectangles.one_sided.all())
    first = np.full((len(k.rank), ranks), EMPTY)
    end = np.zeros_like(first)
    apart = np.zeros(first.shape, bool)
    layers = _layers(q, len(branch.rectangles), ranks)
    for batch in (slice(n, n + BLOCK_PIECES) for n in range(0, len(k.rank), BLOCK_PIECES)):
        block = Pieces(*(array[batch, None] for array in k))
        lo, hi = band_of(branch, block.segment)
        for starts, lasts in layers:
            q_start, q_last = (readers[k.segment[batch], k.rank[batch]] for readers in (starts, lasts))
            # Compute every rank as reader at the same time: axis 0 is the key piece, axis 1 the distance.
            f, e = partners(block, q_start, q_last, lo, hi)
            overlapping = e > f
            if not one_sided:
                # For a reader with several query pieces, the union of two intervals with a gap is not an interval.
                #    first..end  |----|
                #    f..e                |---|     f > end: apart
                apart[batch] |= overlapping & (end[batch] > 0) & ((f > end[batch]) | (e < first[batch]))
            # Grow the hull in place, but only where this query piece reads something.
            np.minimum(first[batch], f, out=first[batch], where=overlapping)
            np.maximum(end[batch], e, out=end[batch], where=overlapping)
    # A one-sided band reads a prefix or a suffix of each key piece, and prefixes (or suffixes) of a piece are nested.
    return Reads(first, end, apart, one_sided)


def _join_adjacent(start: Ints, end: Ints) -> tuple[StridedRange, ...]:
    """Join disjoint ascending intervals start .. end - 1 into ranges that do not touch."""
    if not len(start):
        return ()
    # An interval that starts where the previous interval ends continues it.
    gaps = np.flatnonzero(start[1:] != end[:-1])
    firsts, stops = [int(start[0]), *start[gaps + 1].tolist()], [*end[gaps].tolist(), int(end[-1])]
    return tuple(map(StridedRange, firsts, map(sub, stops, firsts)))


def _layers(q: Pieces, segments: int, ranks: int) -> list[tuple[Ints, Ints]]:
    """Return the query pieces as pairs (start, last) of arrays by segment, owner and distance of the reader.

    The n-th pair holds the n-th piece of every reader in a segment.
    """
    # Number the pieces of equal (segment, rank) 0, 1, ...: `key` is sorted, so searchsorted returns the index of the
    # first piece with the same key.
    order = np.lexsort((q.rank, q.segment))
    key = (q.segment * ranks + q.rank)[order]
    layer = np.arange(len(key)) - np.searchsorted(key, key)
    matrices = []
    for n in range(int(layer.max(initial=-1)) + 1):
        start = np.full((segments, ranks), EMPTY)
        last = np.full((segments, ranks), -EMPTY)
        pieces = order[layer == n]
        start[q.segment[pieces], q.rank[pieces]] = q.start[pieces]
        last[q.segment[pieces], q.rank[pieces]] = q.last[pieces]
        # Row r of the windows over [x0 .. x(n-1), x0 .. x(n-1)] is x(r), x(r+1), ...:
        # for owner r the readers at distance 0, 1, ...
        by_distance = [sliding_window_view(np.tile(side, 2), ranks, axis=1) for side in (start, last)]
        matrices.append((by_distance[0], by_distance[1]))
    return matrices


def _gaps(first: Ints, end: Ints) -> bool:
    """Return whether the intervals `first` to `end` - 1 in any row of the arrays leave a gap.

    Empty intervals are ignored.
    """
    order = np.argsort(first, axis=1)
    first, end = (np.take_along_axis(side, order, axis=1) for side in (first, end))
    # Empty intervals begin at EMPTY, so they are last.
    gaps = (first[:, 1:] > np.maximum.accumulate(end, axis=1)[:, :-1]) & (first[:, 1:] < EMPTY)
    return bool(gaps.any())


@bounded
def read_sets_of(problem: Problem) -> ReadSets:
    """Return the read sets of a problem, which all of its plans share."""
    return ReadSets(problem)


# --- the content of steps ---------------------------------------------------------------------------------------------


class HeadRows(NamedTuple):
    """Rows of a shard, as disjoint ranges, for some K/V heads."""

    heads: StridedRange
    rows: tuple[StridedRange, ...]

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return sum(run.count for run in self.rows)

    @property
    def dense(self) -> bool:
        """Whether all ranges have stride 1. Then they ascend, with gaps between them."""
        return all(run.stride == 1 for run in self.rows)

    def offsets(self, rows: np.ndarray) -> np.ndarray:
        """Return the packed row of each of these owner rows, as int64 of the same shape.

        The part must be dense and contain all of the rows.
        """
        if len(self.rows) == 1:
            return rows - self.rows[0].start
        starts = np.array([run.start for run in self.rows])
        counts = np.array([run.count for run in self.rows])
        ranges = np.searchsorted(starts, rows, side="right") - 1
        # The packed rows before the range that holds the row, plus the row's index in that range:
        #    rows held  4..6, 10..11    packed 0 1 2 3 4    row 10 -> 3 + (10 - 10)
        return (np.cumsum(counts) - counts)[ranges] + rows - starts[ranges]

    def locate(self, owner_rows: Iterable[StridedRange]) -> Iterator[list[Overlap]]:
        """Yield for each range of owner rows its overlaps with the packed part, one for each held range."""
        dense, starts = self.dense, [run.start for run in self.rows]
        offsets = list(accumulate((run.count for run in self.rows), initial=0))
        for rows in owner_rows:
            # Dense ranges ascend, so bisection finds those that can overlap. Strided ranges interleave, so all are
            # checked.
            near = range(len(self.rows))
            if dense and rows.count:
                near = range(max(0, bisect_right(starts, rows.start) - 1), bisect_right(starts, rows.last))
            yield [overlap for n in near if (overlap := _overlap(rows, self.rows[n], offsets[n]))]


class Overlap(NamedTuple):
    """The rows that a range of owner rows and a part share: `indices` into the range, and `packed` rows of the part."""

    indices: StridedRange
    packed: StridedRange

    def common_rows(self, second: Overlap) -> tuple[StridedRange, StridedRange] | None:
        """Return the packed rows, in this part and in the second, of the members of both overlaps; None without any."""
        both = self.indices.intersect(second.indices)
        if not both.count:
            return None
        # To turn members into indices of an overlap, subtract its first member and divide by its step.
        picks = (StridedRange((both.start - overlap.indices.start) // overlap.indices.stride, both.count,
                     max(1, both.stride // overlap.indices.stride)) for overlap in (self, second))  # fmt: skip
        rows, second_rows = (overlap.packed.pick(pick) for overlap, pick in zip((self, second), picks, strict=True))
        return rows, second_rows


def _overlap(rows: StridedRange, held_range: StridedRange, offset: int) -> Overlap | None:
    """Return the overlap of a range with a held range whose first packed row is `offset`; None if they share no row."""
    shared = _indices(rows, held_range)
    if shared is None:
        return None
    # Indices of the held range: divide by its stride. A single shared row has no stride, so it gets 1.
    first, step = rows.start + shared.start * rows.stride - held_range.start, rows.stride * shared.stride
    stride = step // held_range.stride if shared.count > 1 else 1
    return Overlap(shared, StridedRange(offset + first // held_range.stride, shared.count, stride))


Content = tuple[HeadRows, ...]
NOTHING: Content = ()


def whole(rows: int, heads: Iterable[StridedRange]) -> Content:
    """Return all rows of a shard for the head parts `heads`."""
    return tuple(HeadRows(run, (StridedRange(0, rows),)) for run in heads) if rows else NOTHING


def size(content: Content) -> int:
    """Return the rows of a content times their K/V heads, which is proportional to its bytes."""
    return sum(part.heads.count * part.row_count for part in content)


def union(contents: Iterable[Content]) -> Content:
    """Return everything that is in any of the contents. Head parts with equal heads are the same part."""
    by_heads: dict[StridedRange, list[StridedRange]] = {}
    for content in contents:
        for heads, rows in content:
            by_heads.setdefault(heads, []).extend(rows)
    return merged(by_heads)


def merged(by_heads: dict[StridedRange, list[StridedRange]]) -> Content:
    """Return the union of the ranges of each head part."""
    # Most heads have the same ranges, so merge equal lists only once.
    unions: dict[tuple[StridedRange, ...], tuple[StridedRange, ...]] = {}
    parts = []
    for heads in sorted(by_heads):
        runs = tuple(by_heads[heads])
        if runs not in unions:
            unions[runs] = merge_runs(runs)
        parts.append(HeadRows(heads, unions[runs]))
    return tuple(parts)


def merge_runs(runs: Iterable[StridedRange]) -> tuple[StridedRange, ...]:
    """Return the union as disjoint ranges.

    Ranges of stride 1 ascend and do not touch. Ranges with other strides have no row of a denser range. Equal sets of
    rows in ranges of stride 1 give equal results; with other strides, the result depends on the given ranges too.
    """
    # Ranges of one stride and residue are intervals once divided by the stride, and intervals merge by sorting:
    #    stride 4:  1 5 9     -> residue 1, 0..2      13 17 -> residue 1, 3..4      union: residue 1, 0..4
    by_class: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, count, stride in runs:
        if count:
            # A single row has any stride; with stride 1 it can join its neighbours.
            stride = stride if count > 1 else 1
            by_class.setdefault((stride, start % stride), []).append((start // stride, count))
    merged: list[StridedRange] = []
    # Start with the densest ranges, and cut rows that a smaller stride already has out of the coarser ranges.
    for stride, residue in sorted(by_class):
        joined = [StridedRange(residue + first * stride, n, stride) for first, n in _joined(by_class[stride, residue])]
        denser = sorted(merged) if stride > 1 else []
        for run in joined:
            merged += _without_all(run, denser)
    return tuple(sorted(merged))


def without(outer: Content, inner: Content) -> Content:
    """Return everything that is in `outer` but not in `inner`. Head parts with equal heads are the same part."""
    inner_rows = {part.heads: sorted(part.rows) for part in inner}
    parts = []
    for heads, rows in outer:
        left = [piece for run in rows for piece in _without_all(run, inner_rows.get(heads, []))]
        if left:
            parts.append(HeadRows(heads, tuple(sorted(left))))
    return tuple(parts)


def _without_all(run: StridedRange, removed: list[StridedRange]) -> list[StridedRange]:
    """Return the members of `run` that are in none of the `removed` ranges, which must be sorted by start."""
    left: list[StridedRange] = []
    pieces = [run]
    for hole in removed:
        if hole.last < run.start or hole.start > run.last:
            continue
        # A piece that ends before this range begins overlaps no later range either.
        left += [piece for piece in pieces if piece.last < hole.start]
        pieces = [rest for piece in pieces if piece.last >= hole.start for rest in _without(piece, hole)]
    return left + pieces


def common(outer: Content, inner: Content) -> Content:
    """Return everything that is in both contents; `outer` itself if `inner` contains all of it."""
    return outer if contains(inner, outer) else without(outer, without(outer, inner))


def cut(content: Content, pieces: int) -> tuple[Content, ...]:
    """Cut a packed content into `pieces` consecutive pieces in wire order, of nearly equal size; some may be empty."""
    total = size(content)
    # Ends of the pieces, in rows times heads. A row of a part with several heads is not cut; the piece in which the row
    # starts gets the whole row.
    #    total 10, 3 pieces    ends 3 6 10
    ends = [total * n // pieces for n in range(1, pieces + 1)]
    parts_of: list[list[HeadRows]] = [[] for _ in ends]
    begun, piece = 0, 0
    for heads, rows in content:
        for run in rows:
            first = 0
            while first < run.count:
                while piece < pieces - 1 and begun >= ends[piece]:
                    piece += 1
                count = min(run.count - first, -(-(ends[piece] - begun) // heads.count))
                parts_of[piece].append(HeadRows(heads, (run.pick(StridedRange(first, count)),)))
                first, begun = first + count, begun + count * heads.count
    return tuple(map(chained, parts_of))


def chained(parts: Iterable[HeadRows]) -> Content:
    """Join parts that follow one another in wire order into one content. This is the inverse of `cut`."""
    joined: list[tuple[StridedRange, list[StridedRange]]] = []
    for heads, rows in parts:
        if not joined or joined[-1][0] != heads:
            joined.append((heads, []))
        joined_rows = joined[-1][1]
        for run in rows:
            if joined_rows and joined_rows[-1].stride == run.stride and run.start == joined_rows[-1].last + run.stride:
                joined_rows[-1] = joined_rows[-1]._replace(count=joined_rows[-1].count + run.count)
            else:
                joined_rows.append(run)
    return tuple(HeadRows(heads, tuple(rows)) for heads, rows in joined)


def _joined(intervals: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the union of intervals (start, count) as ascending intervals that do not touch."""
    #    |---|  |-----|
    #      |---|    |---|      sorted by start: extend while they touch or overlap, else yield and start a new interval
    first = stop = None
    for start, count in sorted(intervals):
        if stop is None or start > stop:
            if first is not None and stop is not None:
                yield first, stop - first
            first, stop = start, start + count
        else:
            stop = max(stop, start + count)
    if first is not None and stop is not None:
        yield first, stop - first


def _without(run: StridedRange, removed: StridedRange) -> list[StridedRange]:
    """Return the members of `run` that are not members of `removed`."""
    # In indices of `run` the common members are again a strided range. The remaining members are in three places:
    #    run     0 1 2 3 4 5 6 7 8 9
    #    shared      x     x     x      start 2, stride 3, last 8
    #    ends    . .               .    before the first and after the last
    #    between       . .   . .        one residue class each: 3 6, 4 7
    shared = _indices(run, removed)
    if not shared:
        return [run]
    between = [
        StridedRange(shared.start + n, shared.count - 1, shared.stride)
        for n in range(1, shared.stride if shared.count > 1 else 1)
    ]
    ends = [StridedRange(0, shared.start), StridedRange(shared.last + 1, run.count - shared.last - 1)]
    return [run.pick(indices) for indices in (*ends, *between) if indices.count]


def _indices(run: StridedRange, second: StridedRange) -> StridedRange | None:
    """Return the indices of `run` whose members are members of `second`; None if there are none."""
    both = run.intersect(second)
    if not both.count:
        return None
    # A single common member gets stride 1.
    return StridedRange(
        (both.start - run.start) // run.stride, both.count, both.stride // run.stride if both.count > 1 else 1
    )


def contains(outer: Content, inner: Content) -> bool:
    """Return whether everything in `inner` is in `outer`."""
    by_heads = {part.heads: part for part in outer}
    return all(
        part.heads in by_heads
        and sum(overlap.packed.count for overlaps in by_heads[part.heads].locate(part.rows) for overlap in overlaps)
        == part.row_count
        for part in inner
    )


def piece_of(outer: Content, inner: Content) -> int | None:
    """Return the offset of packed `inner` in packed `outer`, in rows times heads; None if `inner` is not contiguous."""
    if outer == inner:
        return 0
    if len(outer) == len(inner) == len(outer[0].rows) == len(inner[0].rows) == 1:
        # Most blocks are one range, and most messages a piece of it.
        (heads, (block,)), (inner_heads, (run,)) = outer[0], inner[0]
        in_order = block.stride == run.stride == 1 and block.start <= run.start and run.last <= block.last
        if heads == inner_heads and in_order:
            return (run.start - block.start) * heads.count
    sizes = (size((part,)) for part in outer)
    # The offset of each head part in the packed outer content, in rows times heads.
    bases = dict(zip((part.heads for part in outer), accumulate(sizes, initial=0), strict=False))
    by_heads = {part.heads: part for part in outer}
    first = end = None
    for heads, rows in inner:
        if heads not in by_heads:
            return None
        for run, overlaps in zip(rows, by_heads[heads].locate(rows), strict=True):
            # Contiguous means: every row is found, in order, with stride 1, and each overlap begins where the previous
            # one ended.
            overlaps = sorted(overlaps, key=lambda overlap: overlap.indices.start)
            if sum(overlap.packed.count for overlap in overlaps) < run.count:
                return None
            for overlap in overlaps:
                offset = bases[heads] + overlap.packed.start * heads.count
                if end not in (None, offset) or overlap.indices.stride != 1 or overlap.packed.stride != 1:
                    return None
                first, end = offset if first is None else first, offset + overlap.packed.count * heads.count
    return first


def describe(content: Content) -> str:
    """Return the content as text: `rows 0..7,12..15` or, with several head parts, `heads 0..1 rows ...; heads ...`."""
    if not content:
        return "nothing"
    rows = ["rows " + ",".join(map(str, part.rows)) for part in content]
    if len(content) == 1 and content[0].heads.start == 0:
        return rows[0]
    return "; ".join(f"heads {part.heads} {text}" for part, text in zip(content, rows, strict=True))
