"""What a message or a held block contains: for some heads, some rows of the owner's shard.

A content is a tuple of `HeadRows`, ordered by head; a part's rows are disjoint ranges, as `merge_runs` makes them. Wire
order is part after part, in each range after range, rows outermost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ringattn.core.geometry import StridedRange


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
