"""Tiles cut into rectangles, for kernels that know only "every key" and "causal from the top left corner".

Guarantees that the rectangles of a tile hold each of its pairs exactly once and no other pair, that every row of a
rectangle sees at least one of its keys, and that there are few of them: a full tile and a causal square are one
rectangle each, a window is two for every stretch of rows as long as the window is wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ringattn.core.geometry import Band, StridedRange, Tile
from ringattn.engine.base import KV, Sizes, Visit, accumulator_dtype


class Rectangle(NamedTuple):
    """Query rows and key rows that attend to each other, for the query heads `heads`.

    `causal`: the i-th query sees the keys up to the i-th (there are never more keys than queries); else every key.
    `reversed`: both sides are taken in descending order first; only set together with `causal`.
    """

    q_rows: StridedRange
    k_rows: StridedRange
    causal: bool
    reversed: bool
    heads: StridedRange


class HeadGroup(NamedTuple):
    """Query heads of which each K/V head serves the same number of consecutive ones."""

    q_heads: StridedRange
    kv_heads: StridedRange


class _Block(NamedTuple):
    """A rectangle in indices of the tile's token ranges."""

    rows: StridedRange
    cols: StridedRange
    causal: bool = False
    reversed: bool = False


def rectangles(tile: Tile, square_causal_only: bool = False) -> Iterator[Rectangle]:
    """The rectangles of a tile. `square_causal_only`: no causal one has more queries than keys."""
    for part in tile.aligned():
        for block in _blocks(part.q.positions.count, part.k.positions.count, part.index_band()):
            for piece in _squares(block) if square_causal_only else (block,):
                q_rows, k_rows = part.q.rows.pick(piece.rows), part.k.rows.pick(piece.cols)
                yield Rectangle(q_rows, k_rows, piece.causal, piece.reversed, tile.heads)


def joined(found: list[Rectangle]) -> list[Rectangle]:
    """The same pairs of the same heads in fewer rectangles, where the rows of several tiles lie side by side.

    Two causal squares and the full one between them become one causal square (the two ranges of a zigzag shard); full
    ones with equal rows on one side and adjacent rows on the other become one. Repeated rectangles are all kept.
    """
    # Repeated rectangles count twice in a mask of several branches; a dict would lose them.
    rest = dict.fromkeys(found)
    if len(rest) < len(found):
        return found
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
    return [*(r for r in rest if r.causal), *_joined_queries(_joined_keys(full))]


def head_groups(heads: StridedRange, group: int) -> Iterator[HeadGroup]:
    """A range of query heads cut so that each part can go to a kernel that understands grouped heads.

    `group`: query heads per K/V head. A range that starts or ends inside a group gives up to three parts.
    """
    start, shape = 0, (0, 0)  # Of the part being grown: its first index, heads per K/V head and K/V stride.
    parts: list[HeadGroup] = []
    while start < heads.count:
        # The K/V head of the next query head, and how many of the range's heads share it.
        kv_head = (heads.start + start * heads.stride) // group
        served = heads.between(kv_head * group, kv_head * group + group - 1).count
        grown = parts[-1] if parts else None
        # The part grows while each K/V head serves equally many and K/V heads are evenly spaced (unknown for a first
        # one).
        step = kv_head - grown.kv_heads.last if grown else 0
        if grown and shape[0] == served and shape[1] in (0, step):
            shape = (served, step)
            q_heads = StridedRange(grown.q_heads.start, grown.q_heads.count + served, heads.stride)
            parts[-1] = HeadGroup(q_heads, StridedRange(grown.kv_heads.start, grown.kv_heads.count + 1, step))
        else:
            shape = (served, 0)
            q_heads = heads.pick(StridedRange(start, served))
            parts.append(HeadGroup(q_heads, StridedRange(kv_head, 1)))
        start += served
    yield from parts


def _joined_keys(full: list[Rectangle]) -> list[Rectangle]:
    """Full rectangles joined where their queries are equal and their keys adjacent."""
    done: list[Rectangle] = []
    for one in sorted(full, key=lambda r: (r.heads, r.q_rows, r.k_rows)):
        last = done[-1] if done else one
        if (last.heads, last.q_rows) == (one.heads, one.q_rows) and _follows(last.k_rows, one.k_rows):
            done[-1] = last._replace(k_rows=_both(last.k_rows, one.k_rows))
        else:
            done.append(one)
    return done


def _joined_queries(full: list[Rectangle]) -> list[Rectangle]:
    """Full rectangles joined where their keys are equal and their queries adjacent."""
    # Exchange the sides, join along the keys, exchange back.
    turned = [r._replace(q_rows=r.k_rows, k_rows=r.q_rows) for r in full]
    return [r._replace(q_rows=r.k_rows, k_rows=r.q_rows) for r in _joined_keys(turned)]


def _continues(first: Rectangle, second: Rectangle) -> bool:
    """Whether the second square is of the same heads and goes on where the first ends, on both sides."""
    beside = _follows(first.q_rows, second.q_rows) and _follows(first.k_rows, second.k_rows)
    return beside and first.heads == second.heads


def _follows(first: StridedRange, second: StridedRange) -> bool:
    """Whether the second range goes on where the first ends."""
    return first.stride == second.stride and second.start == first.last + first.stride


def _both(first: StridedRange, second: StridedRange) -> StridedRange:
    return StridedRange(first.start, first.count + second.count, first.stride)


def _blocks(q_count: int, k_count: int, band: Band) -> Iterator[_Block]:
    """The pairs lo <= i - j <= hi with 0 <= i < q_count, 0 <= j < k_count."""
    lo, hi = band
    first, end = max(0, lo), min(q_count, k_count + hi)  # Rows outside see no key.
    if first >= end or lo > hi:
        return
    # Row i sees the keys i - hi .. i - lo. Up to row `hi` the lower end lies at or before the first key, and from row
    # `saturated` on the upper end lies at or after the last key. Rows where neither matters join a piece beside them.
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
        # Columns before `corner` are seen by all these rows; from there each row sees one more.
        rows, corner = _span(first, upper_end), first - lo
        yield from _beside_edge(rows, _span(0, corner), _span(corner, min(k_count, upper_end - lo)), False)
    yield from _band_interior(upper_end, lower_start, band)
    if lower_start < end:
        # The last row's lower end is end - 1 - hi; columns from one past it on are seen by all these rows.
        rows, corner = _span(lower_start, end), max(0, end - hi)
        yield from _beside_edge(rows, _span(corner, k_count), _span(max(0, lower_start - hi), corner), True)


def _band_interior(start: int, end: int, band: Band) -> Iterator[_Block]:
    """Rows of which both ends of the band lie inside the keys: stretches of at most the band's width.

    A stretch is a causal square at the band's upper end, a reversed one with a row less at its lower end, and between
    them full columns, of which a stretch as long as the band is wide has none.
    """
    lo, hi = band
    width = hi - lo + 1
    # Band of width 3, one stretch of three rows:
    #     row first      x x c . .     x: reversed causal square of the rows but the last
    #     row first+1    . x c c .     c: causal square of all rows
    #     row first+2    . . c c c
    for first in range(start, end, width):
        stop = min(first + width, end)
        full, edge = _span(stop - 1 - hi, first - lo), _span(first - lo, stop - lo)
        yield from _beside_edge(_span(first, stop), full, edge, False)
        yield from _beside_edge(_span(first, stop - 1), _span(0, 0), _span(first - hi, stop - 1 - hi), True)


def _beside_edge(rows: StridedRange, full: StridedRange, edge: StridedRange, reversed_: bool) -> Iterator[_Block]:
    """The columns `full`, seen by all rows, beside the causal columns `edge`; one causal column is a full one."""
    # A causal square of one column is seen by all rows: row i sees columns up to i, so column 0 always.
    if edge.count == 1:
        start = min(full.start, edge.start) if full.count else edge.start
        full, edge = StridedRange(start, full.count + 1), StridedRange(0, 0)
    if rows.count and full.count:
        yield _Block(rows, full)
    if rows.count and edge.count:
        yield _Block(rows, edge, True, reversed_)


def _squares(block: _Block) -> Iterator[_Block]:
    """A causal block with rows below its square, as the square and a full block."""
    # Causal with more rows than columns: the rows past the square see every column.
    # In a reversed block these rows come first, as the order is descending.
    spare = block.rows.count - block.cols.count
    if not block.causal or spare == 0:
        yield block
        return
    square, rest = (spare, 0) if block.reversed else (0, block.cols.count)
    yield block._replace(rows=block.rows.pick(StridedRange(square, block.cols.count)))
    yield _Block(block.rows.pick(StridedRange(rest, spare)), block.cols)


def _span(first: int, end: int) -> StridedRange:
    return StridedRange(first, max(0, end - first))


# --- which pieces of a pass are the first on their rows, so that no row has to be zeroed before ----------------------
# A piece is called first only if every wanted row has a first piece, and none of its rows was updated before.


class Piece(NamedTuple):
    """Rows of some heads: of queries, or of keys and values."""

    rows: StridedRange
    heads: StridedRange


def as_slice(run: StridedRange) -> slice:
    """A strided range of indices as a slice, so that indexing with it gives a view."""
    return slice(run.start, run.stop, run.stride)


def first_pieces(steps: Sequence[Sequence[Piece]], wanted: Sequence[Piece]) -> list[tuple[bool, ...]] | None:
    """For each piece of each step, in their order, whether no other met its rows before.

    None where some piece meets rows of both kinds, or none meets a `wanted` row.
    """
    every = [*wanted, *(piece for step in steps for piece in step)]
    # Heads cut at all borders: a piece holds all heads between two or none.
    borders = sorted({edge for piece in every for run in _unstrided(piece.heads) for edge in (run.start, run.stop)})
    met = np.zeros((len(borders), max((piece.rows.stop for piece in every), default=0)), bool)

    def cells(piece: Piece) -> list[np.ndarray]:
        spans = (np.searchsorted(borders, (run.start, run.stop)) for run in _unstrided(piece.heads))
        return [met[first:end, as_slice(piece.rows)] for first, end in spans]

    found = []
    for step in steps:
        firsts = []
        for piece in step:
            mine = cells(piece)
            firsts.append(not any(one.any() for one in mine))
            if not firsts[-1] and not all(one.all() for one in mine):
                return None
            for one in mine:
                one[...] = True
        found.append(tuple(firsts))
    return found if all(one.all() for piece in wanted for one in cells(piece)) else None


def _unstrided(heads: StridedRange) -> Iterator[StridedRange]:
    yield from (heads,) if heads.stride == 1 else (StridedRange(head, 1) for head in heads.members())


def key_pieces(tiles: Iterable[Tile], group: int) -> tuple[Piece, ...]:
    """The key rows of the tiles, each once for every range of K/V heads that read it. `group`: as in `Softmax`."""
    pieces = (Piece(tile.k.rows, part.kv_heads) for tile in tiles for part in head_groups(tile.heads, group))
    return tuple(dict.fromkeys(pieces))


def accumulators(dkv: KV | None, result: KV | None, pieces: Sequence[Piece], visit: Visit) -> KV:
    """Where a step sums dK and dV: `dkv`, else the result itself or memory of its own; a first one's rows are zero."""
    if dkv is None:
        assert result is not None
        dkv = result if not narrower(result.k.dtype) else _wide(result, pieces)
    if visit.overwrite:
        for piece in pieces:
            for x in held_by(dkv, piece):
                x.zero_()
    return dkv


def finish(sums: KV, result: KV | None, pieces: Iterable[Piece]) -> None:
    """Write the sums of a last step to its result, if it has one."""
    if result is None or result is sums:
        return
    for piece in pieces:
        for x, into in zip(held_by(sums, piece), held_by(result, piece), strict=True):
            into.copy_(x)


def own_sums_bytes(pieces: Iterable[Piece], visit: Visit, sizes: Sizes) -> int:
    """Bytes of the memory of its own in which a step sums that is the first and the last on its rows."""
    if not (visit.overwrite and visit.last and narrower(sizes.dtype)):
        return 0
    rows, heads = _extent(pieces)
    elements = rows * sizes.batch * heads.count * (sizes.head_dim + sizes.value_dim)
    return elements * accumulator_dtype(sizes.dtype).itemsize


def _extent(pieces: Iterable[Piece]) -> tuple[int, StridedRange]:
    """Rows from the first one to the last of any piece, and heads from the least to the greatest of all."""
    rows, first, end = 0, 0, 0
    for at, piece in enumerate(pieces):
        rows, end = max(rows, piece.rows.stop), max(end, piece.heads.stop)
        first = min(first, piece.heads.start) if at else piece.heads.start
    return rows, StridedRange(first, end - first)


def narrower(dtype: torch.dtype) -> bool:
    """Whether sums of `dtype` inputs are held in a wider one."""
    return accumulator_dtype(dtype) != dtype


def held_by(kv: KV, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, or of their gradients, at a piece of keys."""
    # Received K/V may begin at a later head than 0.
    rows, heads = as_slice(piece.rows), as_slice(piece.heads._replace(start=piece.heads.start - kv.first_head))
    return kv.k[rows, :, heads], kv.v[rows, :, heads]


def _wide(result: KV, pieces: Iterable[Piece]) -> KV:
    rows, heads = _extent(pieces)
    k, v = (
        torch.empty((rows, x.shape[1], heads.count, x.shape[3]), dtype=accumulator_dtype(x.dtype), device=x.device)
        for x in result[:2]
    )
    return KV(k, v, heads.start)
