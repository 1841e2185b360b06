"""Tiles to block tables: what one kernel launch needs to consume all tiles of a step.

A table is seen from one side, the queries or the keys: that side's rows are cut into *blocks*, each owned by one
program, and a block lists as *entries* the rows of the other side that it attends to.
Guarantees that every pair of the tiles is in exactly one (block, entry), that no row of a head is in two blocks, that
all rows of a block have the same entries, and that rows of the other side which no row of a block sees are not visited
but for the rest of a block of rows. Positions end here: bands count rows of the block and of the entry, so that a
kernel computes in int32 whatever the length of the sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from ringattn.core.geometry import StridedRange, Tile, TokenRange
from ringattn.engine.base import Softmax
from ringattn.errors import UnsupportedError

Ints = np.ndarray
"""An integer array."""

LIMIT = 1 << 30
"""Rows and banded distances stay below this, so that no sum of two leaves int32."""


class Blocks(NamedTuple):
    """A block table on the host, int32: the columns are those of `ringattn.kernels.launch_call.Table`.

    Blocks with most to do come first.
    """

    blocks: Ints
    entries: Ints
    slots: int
    places: Ints | None = None
    positions: Ints | None = None


class _Part(NamedTuple):
    """A tile seen from the own side: pairs with lo <= own position - other position <= hi.

    `heads`: of the own side. `served`: its query heads, counted from own head * group, which are of the buffer; its
    head 0 is query head `first_head` of the call. `shift`: what ALiBi's distance of a pair is less than own - other.
    """

    own: TokenRange
    other: TokenRange
    lo: int
    hi: int
    heads: StridedRange
    served: StridedRange
    first_head: int = 0
    shift: int = 0


class _Cell(NamedTuple):
    """Rows and heads of the own side that lie in the same parts, each cut down to these rows."""

    rows: StridedRange
    heads: StridedRange
    parts: list[_Part]


def query_blocks(
    tiles: Iterable[Tile], own_rows: int, other_rows: int, *, softmax: Softmax | None = None
) -> Blocks:  # fmt: skip
    """Blocks of at most `own_rows` query rows and of query heads; entries are keys in blocks of `other_rows`.

    `softmax`: of the call, if its options need the places of pairs.
    Raises UnsupportedError where rows or the positions of one tile span more than int32 can count.
    """
    parts = [
        _Part(tile.q, tile.k, *tile.band, heads, StridedRange(0, 1), tile.first_head, _shift(tile, softmax))
        for tile in tiles
        for heads in _unstrided(tile.heads)
    ]
    return _table(parts, own_rows, other_rows, softmax)


def key_blocks(
    tiles: Iterable[Tile], group: int, own_rows: int, other_rows: int, *, unseen: bool = False,
    softmax: Softmax | None = None,
) -> Blocks:  # fmt: skip
    """Blocks of at most `own_rows` key rows and of K/V heads; entries are queries in blocks of `other_rows`.

    `group`: query heads per K/V head. `unseen`: also blocks of rows that no query sees, without entries. `softmax`, and
    what it raises, as for `query_blocks`.
    """
    parts = [
        # lo <= q - k <= hi seen from the keys is -hi <= k - q <= -lo.
        _Part(tile.k, tile.q, -tile.band.hi, -tile.band.lo, kv_heads, served, tile.first_head, -_shift(tile, softmax))
        for tile in tiles
        for heads in _unstrided(tile.heads)
        for kv_heads, served in _kv_heads(heads, group)
    ]
    return _table(parts, own_rows, other_rows, softmax, unseen)


def _shift(tile: Tile, softmax: Softmax | None) -> int:
    return 0 if softmax is None else softmax.shift(tile.q.positions.start)


def _kv_heads(heads: StridedRange, group: int) -> Iterator[tuple[StridedRange, StridedRange]]:
    """K/V heads with the same query heads in a range of stride 1, and these, counted from the K/V head's first."""
    # Whole groups first .. last - 1, and what sticks out on either side:
    #    group 4, query heads 2..9:   . . x x | x x x x | x x . .
    #    K/V head                        0         1         2
    #    served                        2..3      0..3      0..1
    first, last = -(-heads.start // group), heads.stop // group
    # All inside one group.
    if heads.start // group == (heads.stop - 1) // group and last <= first:
        yield StridedRange(heads.start // group, 1), StridedRange(heads.start % group, heads.count)
        return
    if heads.start % group:
        yield StridedRange(first - 1, 1), StridedRange(heads.start % group, group - heads.start % group)
    if first < last:
        yield StridedRange(first, last - first), StridedRange(0, group)
    if heads.stop % group:
        yield StridedRange(last, 1), StridedRange(0, heads.stop % group)


def _unstrided(heads: StridedRange) -> Iterator[StridedRange]:
    """The range itself, or its members one by one."""
    yield from (heads,) if heads.stride == 1 else (StridedRange(head, 1) for head in heads.members())


def _cells(parts: Sequence[_Part]) -> Iterator[_Cell]:
    """The own side cut at every border of heads and rows."""
    for heads, over in _elementary([part.heads for part in parts]):
        # Rows of unequal strides cut each other only where they are members of one residue class.
        stride = lcm(*(parts[i].own.rows.stride for i in over if parts[i].own.rows.count > 1))
        # By residue modulo the common stride; within a class rows are plain integers again: (row - residue) / stride.
        classes: dict[int, list[_Part]] = {}
        for part in (parts[i] for i in over):
            for own in _residues(part.own, stride):
                classes.setdefault(own.rows.start % stride, []).append(part._replace(own=own))
        for residue, held in classes.items():
            # The parts of a class as intervals; cut at all borders, each piece is in the same parts throughout:
            #    part A   |-------------|
            #    part B          |------------|
            #    cells    |--A---|--A,B-|--B--|
            starts = [part.own.rows.start // stride for part in held]
            spans = [StridedRange(start, part.own.rows.count) for start, part in zip(starts, held, strict=True)]
            for span, inside in _elementary(spans):
                cut = [(held[i], held[i].own.pick(span._replace(start=span.start - starts[i]))) for i in inside]
                rows = StridedRange(residue + span.start * stride, span.count, stride)
                yield _Cell(rows, heads, [part._replace(own=own) for part, own in cut])


def _residues(tokens: TokenRange, stride: int) -> Iterator[TokenRange]:
    """The token range cut into ones of the given row stride (a multiple of its own); a single row has any stride."""
    count = tokens.rows.count
    step = stride // tokens.rows.stride if count > 1 else 1
    for first in range(min(step, count)):
        yield tokens.pick(StridedRange(first, (count - first + step - 1) // step, step))


def _elementary(spans: Sequence[StridedRange]) -> Iterator[tuple[StridedRange, list[int]]]:
    """Ranges of stride 1 cut at all their borders: each piece that some hold, and the indices of those that do."""
    borders = sorted({edge for span in spans for edge in (span.start, span.start + span.count)})
    holders: list[list[int]] = [[] for _ in borders]
    for index, span in enumerate(spans):
        # The elementary pieces that this span holds.
        for at in range(bisect_left(borders, span.start), bisect_left(borders, span.start + span.count)):
            holders[at].append(index)
    for (start, end), held in zip(pairwise(borders), holders, strict=False):
        if held:
            yield StridedRange(start, end - start), held


def _table(
    parts: Sequence[_Part], own_rows: int, other_rows: int, softmax: Softmax | None, unseen: bool = False
) -> Blocks:  # fmt: skip
    """The table of the parts."""
    cells = list(_cells(parts))
    rows = np.array([(*_ordered(cell.rows), cell.heads.start, cell.heads.count) for cell in cells], np.int64)
    rows = rows.reshape(-1, 5)
    # Each cell in blocks of at most own_rows rows; all its parts become entries of each of these blocks.
    blocks_of = -(-rows[:, 2] // own_rows)
    pairs = np.array([(at, *_pair(part)) for at, cell in enumerate(cells) for part in cell.parts], np.int64)
    pairs = pairs.reshape(-1, 16)

    cell, first = _unrolled(blocks_of)
    blocks = np.zeros((len(cell), 8), np.int64)
    blocks[:, :5] = rows[cell]
    # Columns: first row, row stride, rows, first head, heads, first entry, one past the last entry, flags.
    # `first` is the block's place in its cell.
    blocks[:, 0] += first * own_rows * blocks[:, 1]
    blocks[:, 2] = np.minimum(own_rows, blocks[:, 2] - first * own_rows)

    # One candidate entry for each (part, block of its cell); the block's index is its cell's first block plus its
    # place.
    pair, local = _unrolled(blocks_of[pairs[:, 0]])
    block = (np.cumsum(blocks_of) - blocks_of)[pairs[pair, 0]] + local
    entries, visits = _entries(pairs[pair, 1:], local * own_rows, blocks[block, 2], other_rows)
    places = positions = entries[:, :0]
    if softmax is not None and softmax.alibi_slopes is not None:
        places = _places(pairs[pair, 1:], local * own_rows, (own_rows, other_rows))
    if softmax is not None and softmax.dropout_p is not None:
        positions = _positions(pairs[pair, 1:], local * own_rows)
    entries, kept = np.hstack((entries, places, positions)), visits > 0
    return _sorted(blocks, entries[kept], block[kept], visits[kept], unseen, places.shape[1])


def _ordered(rows: StridedRange) -> tuple[int, int, int]:
    return rows.start, rows.stride, rows.count


def _pair(part: _Part) -> tuple[int, ...]:
    """What a part tells its entries, counted from the part's first rows.

    The other side's first row, row stride, rows; own step, other step, lo, hi; first query head, query heads; the first
    position and the position stride of either side, own first; the shift and the first head.
    """
    own, other = part.own.positions, part.other.positions
    # Own row i is at own.start + i * own.stride, other row j likewise, so
    #     lo <= offset + i * own.stride - j * other.stride <= hi,    offset = own.start - other.start.
    # Both strides divided by their gcd, lo - offset rounded up and hi - offset rounded down: positions are gone.
    unit = gcd(own.stride, other.stride)
    offset = own.start - other.start
    lo, hi = -((offset - part.lo) // unit), (part.hi - offset) // unit
    steps = own.stride // unit, other.stride // unit
    places = own.start, own.stride, other.start, other.stride, part.shift, part.first_head
    return (*_ordered(part.other.rows), *steps, lo, hi, part.served.start, part.served.count, *places)


def _unrolled(counts: Ints) -> tuple[Ints, Ints]:
    """For items of `counts` blocks each, one after the other: the item of each block, and its place in the item."""
    item = np.repeat(np.arange(len(counts)), counts)
    return item, np.arange(len(item)) - (np.cumsum(counts) - counts)[item]


def _entries(pairs: Ints, first: Ints, rows: Ints, other_rows: int) -> tuple[Ints, Ints]:
    """Entries of blocks of `rows` own rows from row `first` of their part on, and the blocks of rows each visits."""
    count, own, other = pairs[:, 2], pairs[:, 3], pairs[:, 4]
    # Row i of the block is row first + i of the part: move the band by first * own.
    lo, hi = pairs[:, 5] - first * own, pairs[:, 6] - first * own
    reach = (rows - 1) * own  # Row i of the block sees the rows from (i * own - hi) / other to (i * own - lo) / other.
    # Rows that some own row sees: from the first row's lower end to the last row's upper end.
    seen = np.maximum(0, -(hi // other)), np.minimum(count, (reach - lo) // other + 1)
    # Rows that every own row sees: from the last row's lower end to the first row's upper end.
    #     own row 0       x x x x x . . .
    #     own row last    . . . x x x x x
    #     seen            x x x x x x x x
    #     full            . . . x x . . .
    full = -((hi - reach) // other), np.minimum(count, -lo // other + 1)
    # In blocks of other_rows rows: partly seen blocks are visited, only wholly seen ones go without a mask.
    #     start .. full_start masked | full_start .. full_end unmasked | full_end .. end masked
    start, end = seen[0] // other_rows, -(-seen[1] // other_rows)
    full_start = np.clip(-(-full[0] // other_rows), start, np.maximum(start, end))
    full_end = np.clip(full[1] // other_rows, full_start, np.maximum(full_start, end))

    entries = np.zeros((len(pairs), 16), np.int64)
    entries[:, :5] = pairs[:, :5]
    # Bounds beyond all rows change nothing; clipped, they stay in int32.
    entries[:, 5] = np.maximum(lo, -count * other)
    entries[:, 6] = np.minimum(hi, reach)
    entries[:, 7:11] = np.stack((start, full_start, full_end, end), axis=1)
    entries[:, 11:13] = pairs[:, 7:9]
    return entries, np.where(seen[1] > seen[0], end - start, 0)


def _places(pairs: Ints, first: Ints, rows: tuple[int, int]) -> Ints:
    """The columns of `Table.places` of each entry; `first`: of its block's rows, the first in its part."""
    own, own_stride, other, other_stride, shift, first_head = pairs[:, 9:].T
    ahead = own + first * own_stride - other - shift
    reach = own_stride * rows[0], other_stride * (pairs[:, 2] + rows[1])
    farthest = max((int(np.abs(x).max()) for x in (ahead, *reach) if x.size), default=0)
    if farthest >= LIMIT:
        raise UnsupportedError(
            f"positions of a tile lie {farthest:,} apart, more than the kernels' int32 (limit {LIMIT:,}) for ALiBi; "
            "use engine='plain'"
        )
    return np.stack((ahead, own_stride, other_stride, first_head), axis=1)


def _positions(pairs: Ints, first: Ints) -> Ints:
    """The columns of `Table.positions`; arguments as for `_places`."""
    own, own_stride, other, other_stride, _, first_head = pairs[:, 9:].T
    return np.stack((own + first * own_stride, own_stride, other, other_stride, first_head), axis=1)


def _sorted(blocks: Ints, entries: Ints, block: Ints, visits: Ints, unseen: bool, placed: int) -> Blocks:
    """The table of the blocks that have an entry, or of all, the longest first: a light one then fills the end.

    `entries`: with `placed` columns of `Table.places` after the first 16, then those of `Table.positions`.
    """
    # Visited blocks times query heads served.
    work = np.bincount(block, visits * entries[:, 12], len(blocks))
    order = np.argsort(-work, kind="stable")
    order = order[(work[order] > 0) | unseen]
    # place: old index -> new one; entries follow their block and keep their order within it.
    place = np.zeros(len(blocks), np.int64)
    place[order] = np.arange(len(order))
    blocks, block = blocks[order], place[block]
    entries, places, positions = np.split(entries[np.argsort(block, kind="stable")], (16, 16 + placed), axis=1)
    # The entries of block b are ends[b - 1] .. ends[b] - 1.
    ends = np.cumsum(np.bincount(block, minlength=len(blocks)))
    blocks[1:, 5], blocks[:, 6] = ends[:-1], ends
    farthest = max((int(np.abs(x).max()) for x in (blocks, entries, *_products(blocks, entries)) if x.size), default=0)
    if farthest >= LIMIT:
        raise UnsupportedError(
            f"a tile counts rows or strided positions up to {farthest:,}, more than the kernels' int32 (limit "
            f"{LIMIT:,}); use more ranks or engine='plain'"
        )
    slots = int(blocks[:, 4].max()) if len(blocks) else 0
    # A conversion to int32 keeps the low bits.
    more = (one.astype(np.int32) if one.shape[1] else None for one in (places, positions))
    return Blocks(blocks.astype(np.int32), entries.astype(np.int32), slots, *more)


def _products(blocks: Ints, entries: Ints) -> tuple[Ints, ...]:
    """The greatest row and banded distance that a kernel computes for each block and entry."""
    reach = entries[:, 3] * blocks[:, 2].max(initial=0), entries[:, 4] * entries[:, 2]
    return blocks[:, 0] + blocks[:, 1] * blocks[:, 2], entries[:, 0] + entries[:, 1] * entries[:, 2], *reach
