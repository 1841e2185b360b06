"""Tiles cut into rectangles, for kernels whose only masks are "every key" and "causal from the top left corner".

Guarantees: the rectangles of a tile contain each of its pairs exactly once and no other pair. Every row of a rectangle
attends to at least one of its keys. The rectangles are few: one for a full tile, one for a causal square, and for a
window two per stretch of rows. A stretch has at most one row per key of the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ringattn.core.geometry import Band, StridedRange, Tile
from ringattn.engine.base import KV, Sizes, Visit, accumulator_dtype


class Rectangle(NamedTuple):
    """Query rows that attend to key rows, for the query heads `heads`.

    `causal`: the i-th query sees the keys up to the i-th (there are never more keys than queries); else every key.
    `reversed`: both sides are first put in descending order; only set together with `causal`.
    """

    q_rows: StridedRange
    k_rows: StridedRange
    causal: bool
    reversed: bool
    heads: StridedRange


class HeadGroup(NamedTuple):
    """A range of query heads and their K/V heads; each K/V head has the same number of consecutive query heads."""

    q_heads: StridedRange
    kv_heads: StridedRange


class _Block(NamedTuple):
    """A rectangle in indices of the tile's token ranges."""

    rows: StridedRange
    cols: StridedRange
    causal: bool = False
    reversed: bool = False


def rectangles(tile: Tile, square_causal_only: bool = False) -> Iterator[Rectangle]:
    """Yield the rectangles of a tile. `square_causal_only`: no causal rectangle has more queries than keys."""
    if tile.q.rows.count and tile.k.rows.count and tile.is_full():  # most tiles of trees and documents
        yield Rectangle(tile.q.rows, tile.k.rows, False, False, tile.heads)
        return
    for part in tile.aligned():
        for block in _blocks(part.q.positions.count, part.k.positions.count, part.index_band()):
            for piece in _squares(block) if square_causal_only else (block,):
                q_rows, k_rows = part.q.rows.pick(piece.rows), part.k.rows.pick(piece.cols)
                yield Rectangle(q_rows, k_rows, piece.causal, piece.reversed, tile.heads)


def join_rectangles(parts: list[Rectangle]) -> list[Rectangle]:
    """Join rectangles of adjacent rows. The result has the same pairs of the same heads.

    Two causal squares and the full rectangle between them become one causal square (the two ranges of a zigzag shard).
    Full rectangles with equal rows on one side and adjacent rows on the other become one. If a rectangle occurs twice,
    nothing is joined.
    """
    # In a mask of several branches a repeated rectangle counts twice; a dict would drop the repetition.
    rest = dict.fromkeys(parts)
    if len(rest) < len(parts):
        return parts
    grown: Rectangle | None = None
    squares = (r for r in rest if r.causal and not r.reversed and r.q_rows.count == r.k_rows.count)
    for square in sorted(squares, key=lambda r: (r.heads, r.q_rows, r.k_rows)):
        if grown is not None and _continues(grown, square):
            # Two causal squares and the full one below the first and left of the second:
            #     \ .         \
            #     x \    ->   x \       rows of the first and of the second, adjacent on both sides
            between = Rectangle(square.q_rows, grown.k_rows, False, False, grown.heads)
            rows = _both(grown.q_rows, square.q_rows), _both(grown.k_rows, square.k_rows)
            whole = Rectangle(*rows, True, False, grown.heads)
            if between in rest and whole not in rest:
                for part in (grown, square, between):
                    del rest[part]
                square = whole
                rest[square] = None
        grown = square
    full = [r for r in rest if not r.causal]
    return [*(r for r in rest if r.causal), *_join_queries(_join_keys(full))]


@lru_cache
def head_groups(heads: StridedRange, group: int) -> tuple[HeadGroup, ...]:
    """Cut a range of query heads into parts that a kernel with grouped heads can take.

    `group`: query heads per K/V head. A range that starts or ends inside a group gives up to three parts.
    """
    # `shape` of the last part: query heads per K/V head, and stride of the K/V heads.
    start, shape = 0, (0, 0)
    parts: list[HeadGroup] = []
    while start < heads.count:
        # The K/V head of the next query head, and how many of the range's heads share it.
        kv_head = (heads.start + start * heads.stride) // group
        count = heads.between(kv_head * group, kv_head * group + group - 1).count
        grown = parts[-1] if parts else None
        # The part grows while each K/V head has the same number of query heads and the K/V heads are evenly spaced.
        # With a single K/V head any spacing is allowed.
        step = kv_head - grown.kv_heads.last if grown else 0
        if grown and shape[0] == count and shape[1] in (0, step):
            shape = (count, step)
            q_heads = StridedRange(grown.q_heads.start, grown.q_heads.count + count, heads.stride)
            parts[-1] = HeadGroup(q_heads, StridedRange(grown.kv_heads.start, grown.kv_heads.count + 1, step))
        else:
            shape = (count, 0)
            q_heads = heads.pick(StridedRange(start, count))
            parts.append(HeadGroup(q_heads, StridedRange(kv_head, 1)))
        start += count
    return tuple(parts)


def _join_keys(full: list[Rectangle]) -> list[Rectangle]:
    """Join full rectangles that have equal queries and adjacent keys."""
    done: list[Rectangle] = []
    for rectangle in sorted(full, key=lambda r: (r.heads, r.q_rows, r.k_rows)):
        last = done[-1] if done else rectangle
        if (last.heads, last.q_rows) == (rectangle.heads, rectangle.q_rows) and _follows(last.k_rows, rectangle.k_rows):
            done[-1] = last._replace(k_rows=_both(last.k_rows, rectangle.k_rows))
        else:
            done.append(rectangle)
    return done


def _join_queries(full: list[Rectangle]) -> list[Rectangle]:
    """Join full rectangles that have equal keys and adjacent queries."""
    # Swap the sides, join along the keys, swap back.
    swapped = [r._replace(q_rows=r.k_rows, k_rows=r.q_rows) for r in full]
    return [r._replace(q_rows=r.k_rows, k_rows=r.q_rows) for r in _join_keys(swapped)]


def _continues(first: Rectangle, second: Rectangle) -> bool:
    """Return whether the second square has the same heads and starts where the first ends, on both sides."""
    adjacent = _follows(first.q_rows, second.q_rows) and _follows(first.k_rows, second.k_rows)
    return adjacent and first.heads == second.heads


def _follows(first: StridedRange, second: StridedRange) -> bool:
    """Return whether the second range continues the first."""
    return first.stride == second.stride and second.start == first.last + first.stride


def _both(first: StridedRange, second: StridedRange) -> StridedRange:
    return StridedRange(first.start, first.count + second.count, first.stride)


def _blocks(q_count: int, k_count: int, band: Band) -> Iterator[_Block]:
    """Yield blocks that cover the pairs lo <= i - j <= hi with 0 <= i < q_count and 0 <= j < k_count."""
    lo, hi = band
    first, end = max(0, lo), min(q_count, k_count + hi)  # Rows outside see no key.
    if first >= end or lo > hi:
        return
    # Row i sees the keys i - hi .. i - lo. Up to row `hi` the lower end is at or before the first key, and from row
    # `saturated` on the upper end is at or after the last key. Rows that see every key join a neighbouring stretch.
    # Three stretches of rows (x: seen):
    #     first            x x . . . .     left edge: columns all rows see, then a causal edge on the right
    #                      x x x . . .
    #     upper_end        . x x x . .     interior: both ends of the band move
    #                      . . x x x .
    #                      . . . x x x
    #     lower_start      . . . . x x     right edge: a reversed causal edge on the left, then full columns
    saturated = k_count - 1 + lo
    upper_end = max(first, min(hi + 1, end)) if first < saturated else first
    lower_start = min(end, max(saturated + 1, upper_end)) if first < saturated else first
    if first < upper_end:
        # All these rows see the columns before `corner`; from there on each row sees one more than the row above.
        rows, corner = _span(first, upper_end), first - lo
        yield from _beside_edge(rows, _span(0, corner), _span(corner, min(k_count, upper_end - lo)), False)
    yield from _band_interior(upper_end, lower_start, band)
    if lower_start < end:
        # The last row's lower end is end - 1 - hi; all these rows see the columns after it.
        rows, corner = _span(lower_start, end), max(0, end - hi)
        yield from _beside_edge(rows, _span(corner, k_count), _span(max(0, lower_start - hi), corner), True)


def _band_interior(start: int, end: int, band: Band) -> Iterator[_Block]:
    """Yield the blocks of rows whose band ends are both inside the keys, in stretches of at most the band's width.

    A stretch is a causal square at the band's upper end, a reversed square with one row less at its lower end, and full
    columns between them. A stretch as long as the band is wide has no full columns.
    """
    lo, hi = band
    width = hi - lo + 1
    # Band of width 3, one stretch of three rows:
    #     row first      x x c . .     x: reversed causal square of all rows except the last
    #     row first+1    . x c c .     c: causal square of all rows
    #     row first+2    . . c c c
    for first in range(start, end, width):
        stop = min(first + width, end)
        full, edge = _span(stop - 1 - hi, first - lo), _span(first - lo, stop - lo)
        yield from _beside_edge(_span(first, stop), full, edge, False)
        yield from _beside_edge(_span(first, stop - 1), _span(0, 0), _span(first - hi, stop - 1 - hi), True)


def _beside_edge(rows: StridedRange, full: StridedRange, edge: StridedRange, reversed_: bool) -> Iterator[_Block]:
    """Yield a block of the columns `full` and a causal block of `edge`; a single causal column counts as full."""
    # Row i of a causal block sees the columns up to i, so every row sees column 0.
    if edge.count == 1:
        start = min(full.start, edge.start) if full.count else edge.start
        full, edge = StridedRange(start, full.count + 1), StridedRange(0, 0)
    if rows.count and full.count:
        yield _Block(rows, full)
    if rows.count and edge.count:
        yield _Block(rows, edge, True, reversed_)


def _squares(block: _Block) -> Iterator[_Block]:
    """Cut a causal block that has more rows than columns into a causal square and a full block."""
    # The rows past the square see every column. In a reversed block these rows come first: the order is descending.
    spare = block.rows.count - block.cols.count
    if not block.causal or spare == 0:
        yield block
        return
    square, rest = (spare, 0) if block.reversed else (0, block.cols.count)
    yield block._replace(rows=block.rows.pick(StridedRange(square, block.cols.count)))
    yield _Block(block.rows.pick(StridedRange(rest, spare)), block.cols)


def _span(first: int, end: int) -> StridedRange:
    return StridedRange(first, max(0, end - first))


# --- first pieces: the pieces of a pass that overwrite their rows, so that nothing has to be zeroed before it --------
# A piece is first if no earlier piece updates any of its rows. First pieces are used only if every row has one.


class Piece(NamedTuple):
    """Rows of some heads: of queries, or of keys and values."""

    rows: StridedRange
    heads: StridedRange


def as_slice(run: StridedRange) -> slice:
    """Convert a strided range of indices to a slice, so that indexing with it gives a view."""
    return slice(run.start, run.stop, run.stride)


def first_pieces(steps: Sequence[Sequence[Piece]], required: Sequence[Piece]) -> list[tuple[bool, ...]] | None:
    """Return, for each piece of each step in order, whether no earlier piece updates its rows.

    Return None if a piece has both rows that were updated before and rows that were not, or if no piece updates some
    row of `required`.
    """
    every = [*required, *(piece for step in steps for piece in step)]
    # Cut the heads at all borders: between two neighbouring borders a piece has all heads or none.
    borders = sorted({edge for piece in every for run in _unstrided(piece.heads) for edge in (run.start, run.stop)})
    updated = np.zeros((len(borders), max((piece.rows.stop for piece in every), default=0)), bool)

    def cells(piece: Piece) -> list[np.ndarray]:
        spans = (np.searchsorted(borders, (run.start, run.stop)) for run in _unstrided(piece.heads))
        return [updated[first:end, as_slice(piece.rows)] for first, end in spans]

    flags = []
    for step in steps:
        firsts = []
        for piece in step:
            views = cells(piece)
            firsts.append(not any(view.any() for view in views))
            if not firsts[-1] and not all(view.all() for view in views):
                return None
            for view in views:
                view[...] = True
        flags.append(tuple(firsts))
    return flags if all(view.all() for piece in required for view in cells(piece)) else None


def _unstrided(heads: StridedRange) -> Iterator[StridedRange]:
    yield from (heads,) if heads.stride == 1 else (StridedRange(head, 1) for head in heads.members())


def key_pieces(tiles: Iterable[Tile], group: int) -> tuple[Piece, ...]:
    """Return the key rows of the tiles with their ranges of K/V heads, without repetitions. `group`: see `Softmax`."""
    pieces = (Piece(tile.k.rows, part.kv_heads) for tile in tiles for part in head_groups(tile.heads, group))
    return tuple(dict.fromkeys(pieces))


def accumulators(dkv: KV | None, result: KV | None, pieces: Sequence[Piece], visit: Visit) -> KV:
    """Return the tensors in which a step sums dK and dV; if the step overwrites, its rows are set to zero.

    These are `dkv` if given, else the result itself if its dtype is wide enough, else temporary memory.
    """
    if dkv is None:
        assert result is not None
        dkv = result if not narrower(result.k.dtype) else _wide(result, pieces)
    if visit.overwrite:
        for piece in pieces:
            for x in piece_views(dkv, piece):
                x.zero_()
    return dkv


def finish(sums: KV, result: KV | None, pieces: Iterable[Piece]) -> None:
    """Write the sums of a step that is the last on its rows to the step's result, if it has a result."""
    if result is None or result is sums:
        return
    for piece in pieces:
        for x, into in zip(piece_views(sums, piece), piece_views(result, piece), strict=True):
            into.copy_(x)


def temporary_sums_bytes(pieces: Iterable[Piece], visit: Visit, sizes: Sizes) -> int:
    """Return the bytes of the temporary sums of dK and dV, for a step that is both the first and the last on its rows.

    The sums have the accumulator's dtype. `pieces`: the step's pieces of keys.
    """
    if not (visit.overwrite and visit.last and narrower(sizes.dtype)):
        return 0
    rows, heads = _extent(pieces)
    elements = rows * sizes.batch * heads.count * (sizes.head_dim + sizes.value_dim)
    return elements * accumulator_dtype(sizes.dtype).itemsize


def _extent(pieces: Iterable[Piece]) -> tuple[int, StridedRange]:
    """Return the number of rows up to the last row of any piece, and the range of heads that covers all pieces."""
    rows, first, end = 0, 0, 0
    for index, piece in enumerate(pieces):
        rows, end = max(rows, piece.rows.stop), max(end, piece.heads.stop)
        first = min(first, piece.heads.start) if index else piece.heads.start
    return rows, StridedRange(first, end - first)


def narrower(dtype: torch.dtype) -> bool:
    """Return whether the accumulator dtype of `dtype` inputs is wider than `dtype`."""
    return accumulator_dtype(dtype) != dtype


def piece_views(kv: KV, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the views of K and V, or of their gradients, at a piece of keys."""
    # The first head of received K/V may be a later head than 0.
    rows, heads = as_slice(piece.rows), as_slice(piece.heads._replace(start=piece.heads.start - kv.first_head))
    return kv.k[rows, :, heads], kv.v[rows, :, heads]


def _wide(result: KV, pieces: Iterable[Piece]) -> KV:
    rows, heads = _extent(pieces)
    k, v = (
        torch.empty((rows, x.shape[1], heads.count, x.shape[3]), dtype=accumulator_dtype(x.dtype), device=x.device)
        for x in result[:2]
    )
    return KV(k, v, heads.start)
