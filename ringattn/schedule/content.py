"""Which rows each rank reads, and what a message or a held block contains: for some heads, some rows of a shard.

`ReadSets` describes one problem: the rows that one reader reads, the union of several readers (on a chain: all ranks
downstream), and the farthest of them. The *distance* of a reader is (reader - owner) mod ranks: its position on the
owner's chain.
   owner  +1  +2  +3     each relay sends the block to the next rank,
     o -> a -> b -> c     so the hop to distance d carries what d and all farther readers read
Reads are intervals of key pieces, so most unions are running minima and maxima over arrays. Where intervals leave a
gap, the exact union is taken instead.

A content is a tuple of `HeadRows`, ordered by head; a part's rows are disjoint ranges, as `merge_runs` makes them. Wire
order is part after part, in each range after range, rows outermost.
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
from ringattn.core.geometry import UNBOUNDED, StridedRange
from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints, Pieces, band_of, edges_of, meeting_pieces, partners, tiles_of

# --- the sets of rows that are read -----------------------------------------------------------------------------------


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


# --- the content of steps ---------------------------------------------------------------------------------------------


class HeadRows(NamedTuple):
    """Rows of some K/V heads."""

    heads: StridedRange
    rows: tuple[StridedRange, ...]

    @property
    def row_count(self) -> int:
        """Rows."""
        return sum(run.count for run in self.rows)

    @property
    def dense(self) -> bool:
        """Whether all ranges have stride 1, and so ascend with gaps between them."""
        return all(run.stride == 1 for run in self.rows)

    def offsets(self, rows: np.ndarray) -> np.ndarray:
        """Where the given owner rows (each a member) lie in the packed part, if it is dense: int64, same shape."""
        starts = np.array([run.start for run in self.rows])
        counts = np.array([run.count for run in self.rows])
        at = np.searchsorted(starts, rows, side="right") - 1
        # Packed rows before the range that holds the row, plus the row's place in it:
        #    rows held  4..6, 10..11    packed 0 1 2 3 4    row 10 -> 3 + (10 - 10)
        return (np.cumsum(counts) - counts)[at] + rows - starts[at]

    def locate(self, wanted: Iterable[StridedRange]) -> Iterator[list[Overlap]]:
        """For each range of owner rows its overlaps with the packed part, one for each held range."""
        dense, starts = self.dense, [run.start for run in self.rows]
        offsets = list(accumulate((run.count for run in self.rows), initial=0))
        for rows in wanted:
            # Dense ranges ascend, so bisection finds those that can overlap; strided ones interleave, and all are
            # tried.
            near = range(len(self.rows))
            if dense and rows.count:
                near = range(max(0, bisect_right(starts, rows.start) - 1), bisect_right(starts, rows.last))
            yield [spot for n in near if (spot := _overlap(rows, self.rows[n], offsets[n]))]


class Overlap(NamedTuple):
    """Some members of a range of owner rows, as `indices` into it, and the `packed` rows of a part that hold them."""

    indices: StridedRange
    packed: StridedRange

    def common_rows(self, other: Overlap) -> tuple[StridedRange, StridedRange] | None:
        """The packed rows, here and there, of the members in both overlaps; None for none."""
        both = self.indices.intersect(other.indices)
        if not both.count:
            return None
        # From members to places in each of the two: subtract its first, divide by its step.
        picks = (StridedRange((both.start - one.indices.start) // one.indices.stride, both.count,
                     max(1, both.stride // one.indices.stride)) for one in (self, other))  # fmt: skip
        here, there = (one.packed.pick(pick) for one, pick in zip((self, other), picks, strict=True))
        return here, there


def _overlap(rows: StridedRange, held: StridedRange, offset: int) -> Overlap | None:
    met = _indices(rows, held)
    if met is None:
        return None
    # In the held range's own numbering: divide by its stride; one shared row has no stride, so 1.
    first, step = rows.start + met.start * rows.stride - held.start, rows.stride * met.stride
    stride = step // held.stride if met.count > 1 else 1
    return Overlap(met, StridedRange(offset + first // held.stride, met.count, stride))


Content = tuple[HeadRows, ...]
NOTHING: Content = ()


def whole(rows: int, heads: Iterable[StridedRange]) -> Content:
    """All rows of a shard, for head parts `heads`."""
    return tuple(HeadRows(run, (StridedRange(0, rows),)) for run in heads) if rows else NOTHING


def size(content: Content) -> int:
    """Rows times K/V heads: proportional to bytes."""
    return sum(part.heads.count * part.row_count for part in content)


def union(contents: Iterable[Content]) -> Content:
    """What is in any of them. Head parts of equal start are the same part."""
    found: dict[StridedRange, list[StridedRange]] = {}
    for content in contents:
        for heads, rows in content:
            found.setdefault(heads, []).extend(rows)
    return merged(found)


def merged(found: dict[StridedRange, list[StridedRange]]) -> Content:
    """The union of the ranges of each head part."""
    # Most heads have the same ranges, which are merged once.
    once: dict[tuple[StridedRange, ...], tuple[StridedRange, ...]] = {}
    parts = []
    for heads in sorted(found):
        runs = tuple(found[heads])
        if runs not in once:
            once[runs] = merge_runs(runs)
        parts.append(HeadRows(heads, once[runs]))
    return tuple(parts)


def merge_runs(runs: Iterable[StridedRange]) -> tuple[StridedRange, ...]:
    """The union, as disjoint ranges: of stride 1 in order and not touching, others without what denser ones have.

    Equal sets of ranges of stride 1 give equal values; with other strides the values depend on the ranges as well.
    """
    # Ranges of one stride and residue are intervals once divided by the stride, and intervals merge by sorting:
    #    stride 4:  1 5 9     -> residue 1, 0..2      13 17 -> residue 1, 3..4      union: residue 1, 0..4
    by_class: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, count, stride in runs:
        if count:
            # A single row belongs to any stride; as stride 1 it can join its neighbours.
            stride = stride if count > 1 else 1
            by_class.setdefault((stride, start % stride), []).append((start // stride, count))
    merged: list[StridedRange] = []
    # Densest first: what a smaller stride holds already is cut out of the coarser ranges.
    for stride, residue in sorted(by_class):
        joined = [StridedRange(residue + at * stride, n, stride) for at, n in _joined(by_class[stride, residue])]
        denser = sorted(merged) if stride > 1 else []
        for run in joined:
            merged += _without_all(run, denser)
    return tuple(sorted(merged))


def without(outer: Content, inner: Content) -> Content:
    """What is in `outer` and not in `inner`, for head parts of equal start."""
    inner_rows = {part.heads: sorted(part.rows) for part in inner}
    found = []
    for heads, rows in outer:
        left = [piece for run in rows for piece in _without_all(run, inner_rows.get(heads, []))]
        if left:
            found.append(HeadRows(heads, tuple(sorted(left))))
    return tuple(found)


def _without_all(run: StridedRange, others: list[StridedRange]) -> list[StridedRange]:
    """The members of `run` that are in none of the others, which are in order of their starts."""
    left: list[StridedRange] = []
    pieces = [run]
    for other in others:
        if other.last < run.start or other.start > run.last:
            continue
        # A piece that ends before this one begins meets no later one either.
        left += [piece for piece in pieces if piece.last < other.start]
        pieces = [rest for piece in pieces if piece.last >= other.start for rest in _without(piece, other)]
    return left + pieces


def common(outer: Content, inner: Content) -> Content:
    """What is in both, for head parts of equal start; `outer` itself where all of it is."""
    return outer if contains(inner, outer) else without(outer, without(outer, inner))


def cut(content: Content, pieces: int) -> tuple[Content, ...]:
    """A packed content as `pieces` that follow one another in wire order, of nearly equal size; some may be empty."""
    total = size(content)
    # Ends of the pieces, in rows times heads. A row of a part with several heads is not cut: it goes with its start.
    #    total 10, 3 pieces    ends 3 6 10
    ends = [total * n // pieces for n in range(1, pieces + 1)]
    found: list[list[HeadRows]] = [[] for _ in ends]
    begun, piece = 0, 0
    for heads, rows in content:
        for run in rows:
            first = 0
            while first < run.count:
                while piece < pieces - 1 and begun >= ends[piece]:
                    piece += 1
                count = min(run.count - first, -(-(ends[piece] - begun) // heads.count))
                found[piece].append(HeadRows(heads, (run.pick(StridedRange(first, count)),)))
                first, begun = first + count, begun + count * heads.count
    return tuple(map(chained, found))


def chained(parts: Iterable[HeadRows]) -> Content:
    """Parts that follow one another in wire order as one content: puts together what `cut` has cut."""
    found: list[tuple[StridedRange, list[StridedRange]]] = []
    for heads, rows in parts:
        if not found or found[-1][0] != heads:
            found.append((heads, []))
        held = found[-1][1]
        for run in rows:
            if held and held[-1].stride == run.stride and run.start == held[-1].last + run.stride:
                held[-1] = held[-1]._replace(count=held[-1].count + run.count)
            else:
                held.append(run)
    return tuple(HeadRows(heads, tuple(rows)) for heads, rows in found)


def _joined(intervals: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The union of intervals (start, count) as ascending ones that do not touch."""
    #    |---|  |-----|
    #      |---|    |---|      sorted by start: extend while they touch or overlap, else yield and begin anew
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


def _without(run: StridedRange, other: StridedRange) -> list[StridedRange]:
    """The members of `run` that are not members of `other`."""
    # In indices of `run` the common members are again a strided range; what is left is in three places:
    #    run     0 1 2 3 4 5 6 7 8 9
    #    met         x     x     x      start 2, stride 3, last 8
    #    ends    . .               .    before the first and after the last
    #    between       . .   . .        one residue class each: 3 6, 4 7
    met = _indices(run, other)
    if not met:
        return [run]
    between = [
        StridedRange(met.start + n, met.count - 1, met.stride) for n in range(1, met.stride if met.count > 1 else 1)
    ]
    ends = [StridedRange(0, met.start), StridedRange(met.last + 1, run.count - met.last - 1)]
    return [run.pick(indices) for indices in (*ends, *between) if indices.count]


def _indices(run: StridedRange, other: StridedRange) -> StridedRange | None:
    """The indices of `run` whose members are members of `other`; None for none."""
    both = run.intersect(other)
    if not both.count:
        return None
    # A single common member is given stride 1.
    return StridedRange(
        (both.start - run.start) // run.stride, both.count, both.stride // run.stride if both.count > 1 else 1
    )


def contains(outer: Content, inner: Content) -> bool:
    """Whether everything in `inner` is in `outer`."""
    by_heads = {part.heads: part for part in outer}
    return all(
        part.heads in by_heads
        and sum(spot.packed.count for spots in by_heads[part.heads].locate(part.rows) for spot in spots)
        == part.row_count
        for part in inner
    )


def piece_of(outer: Content, inner: Content) -> int | None:
    """Where packed `inner` lies inside packed `outer`, in rows times heads, if it lies there in one piece."""
    if outer == inner:
        return 0
    sizes = (size((part,)) for part in outer)
    # Where each head part begins in the packed outer content, in rows times heads.
    bases = dict(zip((part.heads for part in outer), accumulate(sizes, initial=0), strict=False))
    by_heads = {part.heads: part for part in outer}
    first = end = None
    for heads, rows in inner:
        if heads not in by_heads:
            return None
        for run, spots in zip(rows, by_heads[heads].locate(rows), strict=True):
            # In one piece: every row found, in order, each overlap beginning where the one before ended, without gaps
            # of stride.
            spots = sorted(spots, key=lambda spot: spot.indices.start)
            if sum(spot.packed.count for spot in spots) < run.count:
                return None
            for spot in spots:
                at = bases[heads] + spot.packed.start * heads.count
                if end not in (None, at) or spot.indices.stride != 1 or spot.packed.stride != 1:
                    return None
                first, end = at if first is None else first, at + spot.packed.count * heads.count
    return first


def describe(content: Content) -> str:
    """Text form: `rows 0..7,12..15` or, with several head parts, `heads 0..1 rows ...; heads ...`."""
    if not content:
        return "nothing"
    rows = ["rows " + ",".join(map(str, part.rows)) for part in content]
    if len(content) == 1 and content[0].heads.start == 0:
        return rows[0]
    return "; ".join(f"heads {part.heads} {text}" for part, text in zip(content, rows, strict=True))
