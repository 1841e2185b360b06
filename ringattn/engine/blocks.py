"""Block tables: the tiles of a step as the input of a single kernel launch.

A table belongs to one side, the queries or the keys, called its *own* side. The own rows are cut into *blocks*, each
processed by one program, and a block lists as *entries* the rows of the other side that it attends to.
Guarantees: every pair of the tiles is in exactly one (block, entry). No row of a head is in two blocks. All rows of a
block have the same entries. A kernel visits the other side in blocks of rows, and skips blocks without any pair that
the band allows. Tables contain no positions: bands count rows of the block and of the entry, so a kernel computes in
int32 whatever the length of the sequence.
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
from ringattn.kernels.launch import FIRST, LAST, BlockColumn, EntryColumn

Ints = np.ndarray
"""An integer array."""

LIMIT = 1 << 30
"""Rows and banded distances are below this limit, so that the sum of two fits into int32."""


class Blocks(NamedTuple):
    """A block table on the host, int32. The columns are those of `ringattn.kernels.launch.Table`.

    The blocks with the most work come first.
    """

    blocks: Ints
    entries: Ints
    slots: int
    places: Ints | None = None
    positions: Ints | None = None


class _Part(NamedTuple):
    """A tile with one side as the own side: the pairs with lo <= own position - other position <= hi.

    `heads`: the heads of the own side. `served`: the query heads of each own head, counted from own head * group in the
    buffer, whose head 0 is query head `first_head` of the call. ALiBi's distance of a pair is own - other - `shift`.
    """

    own: TokenRange
    other: TokenRange
    lo: int
    hi: int
    heads: StridedRange
    served: StridedRange
    first_head: int = 0
    shift: int = 0


class _Pairs(NamedTuple):
    """The parts of all cells as arrays, an element per part, with rows counted from the part's first rows.

    `cell`: the index of the cell. `row`, `row_stride`, `rows`: the first row, row stride and number of rows of the
    other side. A pair of rows i and j is allowed if lo <= i * own_step - j * other_step <= hi. `first_q_head`,
    `q_heads`: start and count of the part's `served`. `own`, `own_stride`, `other`, `other_stride`: the first positions
    of the two sides and the strides of positions. `shift`, `first_head`: as in `_Part`.
    """

    cell: Ints
    row: Ints
    row_stride: Ints
    rows: Ints
    own_step: Ints
    other_step: Ints
    lo: Ints
    hi: Ints
    first_q_head: Ints
    q_heads: Ints
    own: Ints
    own_stride: Ints
    other: Ints
    other_stride: Ints
    shift: Ints
    first_head: Ints

    def take(self, indices: Ints) -> _Pairs:
        """Return the elements of all arrays at these indices."""
        return _Pairs(*(column[indices] for column in self))


class _Cell(NamedTuple):
    """Rows and heads of the own side that belong to the same parts, with each part reduced to these rows."""

    rows: StridedRange
    heads: StridedRange
    parts: list[_Part]


def query_blocks(
    tiles: Iterable[Tile], own_rows: int, other_rows: int, *, softmax: Softmax | None = None
) -> Blocks:  # fmt: skip
    """Return blocks of query heads and at most `own_rows` query rows; entries are keys in blocks of `other_rows`.

    `softmax`: the softmax of the call; required if its options need the positions of pairs.
    Raises UnsupportedError if rows or the positions of a tile exceed the range of int32.
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
    """Return blocks of K/V heads and at most `own_rows` key rows; entries are queries in blocks of `other_rows`.

    `group`: query heads per K/V head. `unseen`: whether to include blocks of rows that no query attends to; they have
    no entries. `softmax` and Raises: as for `query_blocks`.
    """
    parts = [
        # lo <= q - k <= hi is -hi <= k - q <= -lo for the keys.
        _Part(tile.k, tile.q, -tile.band.hi, -tile.band.lo, kv_heads, served, tile.first_head, -_shift(tile, softmax))
        for tile in tiles
        for heads in _unstrided(tile.heads)
        for kv_heads, served in _kv_heads(heads, group)
    ]
    return _table(parts, own_rows, other_rows, softmax, unseen)


def _shift(tile: Tile, softmax: Softmax | None) -> int:
    return 0 if softmax is None else softmax.shift(tile.q.positions.start)


def _kv_heads(heads: StridedRange, group: int) -> Iterator[tuple[StridedRange, StridedRange]]:
    """Yield the K/V heads of a range of query heads of stride 1, each with its query heads in the range.

    K/V heads whose query heads are the same, counted from the first of the group, are yielded together.
    """
    # Whole groups first .. last - 1, and an incomplete group on either side:
    #    group 4, query heads 2..9:   . . x x | x x x x | x x . .
    #    K/V head                        0         1         2
    #    served                        2..3      0..3      0..1
    first, last = -(-heads.start // group), heads.stop // group
    # The range is inside a single group.
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
    """Yield the range itself if its stride is 1, else each member as a range."""
    yield from (heads,) if heads.stride == 1 else (StridedRange(head, 1) for head in heads.members())


def _cells(parts: Sequence[_Part]) -> Iterator[_Cell]:
    """Yield the cells of the own side, which is cut at every border of heads and rows."""
    for heads, indices in _elementary([part.heads for part in parts]):
        # Rows of unequal strides overlap only within a residue class of the common stride.
        stride = lcm(*(parts[i].own.rows.stride for i in indices if parts[i].own.rows.count > 1))
        # The parts by residue. Within a class, rows become consecutive integers: (row - residue) / stride.
        classes: dict[int, list[_Part]] = {}
        for part in (parts[i] for i in indices):
            for own in _residues(part.own, stride):
                classes.setdefault(own.rows.start % stride, []).append(part._replace(own=own))
        for residue, members in classes.items():
            # The parts of a class are intervals. Cut at all borders, each piece belongs to the same parts throughout:
            #    part A   |-------------|
            #    part B          |------------|
            #    cells    |--A---|--A,B-|--B--|
            starts = [part.own.rows.start // stride for part in members]
            spans = [StridedRange(start, part.own.rows.count) for start, part in zip(starts, members, strict=True)]
            for span, inside in _elementary(spans):
                cut = [(members[i], members[i].own.pick(span._replace(start=span.start - starts[i]))) for i in inside]
                rows = StridedRange(residue + span.start * stride, span.count, stride)
                yield _Cell(rows, heads, [part._replace(own=own) for part, own in cut])


def _residues(tokens: TokenRange, stride: int) -> Iterator[TokenRange]:
    """Yield the token range cut into ranges of row stride `stride`, which is a multiple of its own row stride.

    A range of one row fits any stride.
    """
    count = tokens.rows.count
    step = stride // tokens.rows.stride if count > 1 else 1
    for first in range(min(step, count)):
        yield tokens.pick(StridedRange(first, (count - first + step - 1) // step, step))


def _elementary(spans: Sequence[StridedRange]) -> Iterator[tuple[StridedRange, list[int]]]:
    """Cut ranges of stride 1 at all their borders. Yield each piece with the indices of the ranges that contain it."""
    borders = sorted({edge for span in spans for edge in (span.start, span.start + span.count)})
    holders: list[list[int]] = [[] for _ in borders]
    for index, span in enumerate(spans):
        # The elementary pieces that this span contains.
        for piece in range(bisect_left(borders, span.start), bisect_left(borders, span.start + span.count)):
            holders[piece].append(index)
    for (start, end), indices in zip(pairwise(borders), holders, strict=False):
        if indices:
            yield StridedRange(start, end - start), indices


def _table(
    parts: Sequence[_Part], own_rows: int, other_rows: int, softmax: Softmax | None, unseen: bool = False
) -> Blocks:  # fmt: skip
    """Return the block table of the parts."""
    cells = list(_cells(parts))
    rows = np.array([(*_ordered(cell.rows), cell.heads.start, cell.heads.count) for cell in cells], np.int64)
    rows = rows.reshape(-1, 5)
    # Cut each cell into blocks of at most own_rows rows; all its parts become entries of each of these blocks.
    blocks_of = -(-rows[:, 2] // own_rows)
    of_cells = [(index, *_pair(part)) for index, cell in enumerate(cells) for part in cell.parts]
    pairs = _Pairs(*np.array(of_cells, np.int64).reshape(-1, len(_Pairs._fields)).T)

    cell, first = _unrolled(blocks_of)
    blocks = np.zeros((len(cell), BlockColumn.COUNT), np.int64)
    # First row, row stride, rows, first head, heads.
    blocks[:, : BlockColumn.FIRST_ENTRY] = rows[cell]
    # `first` is the block's index in its cell.
    blocks[:, BlockColumn.FIRST_ROW] += first * own_rows * blocks[:, BlockColumn.ROW_STRIDE]
    blocks[:, BlockColumn.ROWS] = np.minimum(own_rows, blocks[:, BlockColumn.ROWS] - first * own_rows)

    # A candidate entry for each (part, block of its cell). The block's index is the index of its cell's first block
    # plus its number within the cell.
    pair, local = _unrolled(blocks_of[pairs.cell])
    of_entries = pairs.take(pair)
    block = (np.cumsum(blocks_of) - blocks_of)[of_entries.cell] + local
    entries, visits = _entries(of_entries, local * own_rows, blocks[block, BlockColumn.ROWS], other_rows)
    places = positions = entries[:, :0]
    if softmax is not None and softmax.alibi_slopes is not None:
        places = _places(of_entries, local * own_rows, (own_rows, other_rows))
    if softmax is not None and softmax.dropout_p is not None:
        positions = _positions(of_entries, local * own_rows)
    entries, kept = np.hstack((entries, places, positions)), visits > 0
    return _sorted(blocks, entries[kept], block[kept], visits[kept], unseen, places.shape[1])


def _ordered(rows: StridedRange) -> tuple[int, int, int]:
    return rows.start, rows.stride, rows.count


def _pair(part: _Part) -> tuple[int, ...]:
    """Return the columns of `_Pairs` after `cell`, for one part."""
    own, other = part.own.positions, part.other.positions
    # Own row i has position own.start + i * own.stride, and other row j likewise, so
    #     lo <= offset + i * own.stride - j * other.stride <= hi,    offset = own.start - other.start.
    # To remove the positions, divide by the gcd of the strides; lo - offset is rounded up and hi - offset down.
    unit = gcd(own.stride, other.stride)
    offset = own.start - other.start
    lo, hi = -((offset - part.lo) // unit), (part.hi - offset) // unit
    steps = own.stride // unit, other.stride // unit
    places = own.start, own.stride, other.start, other.stride, part.shift, part.first_head
    return (*_ordered(part.other.rows), *steps, lo, hi, part.served.start, part.served.count, *places)


def _unrolled(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for consecutive items of `counts` blocks each, the item of each block and its number within the item."""
    item = np.repeat(np.arange(len(counts)), counts)
    return item, np.arange(len(item)) - (np.cumsum(counts) - counts)[item]


def _entries(pairs: _Pairs, first: Ints, rows: Ints, other_rows: int) -> tuple[Ints, Ints]:
    """Return an entry for each element of `pairs`, and how many blocks of `other_rows` other rows each entry visits.

    The entry belongs to a block of `rows` own rows, which starts at row `first` of the element's part.
    """
    count, own_step, other_step = pairs.rows, pairs.own_step, pairs.other_step
    # Row i of the block is row first + i of the part: shift the band by first * own_step.
    lo, hi = pairs.lo - first * own_step, pairs.hi - first * own_step
    # Row i of the block sees the rows from (i * own_step - hi) / other_step to (i * own_step - lo) / other_step.
    reach = (rows - 1) * own_step
    # Rows that some own row sees: from the first row's lower end to the last row's upper end.
    seen = np.maximum(0, -(hi // other_step)), np.minimum(count, (reach - lo) // other_step + 1)
    # Rows that every own row sees: from the last row's lower end to the first row's upper end.
    #     own row 0       x x x x x . . .
    #     own row last    . . . x x x x x
    #     seen            x x x x x x x x
    #     full            . . . x x . . .
    full = -((hi - reach) // other_step), np.minimum(count, -lo // other_step + 1)
    # In blocks of other_rows rows: partly seen blocks are visited with a mask, wholly seen blocks without one.
    #     start .. full_start masked | full_start .. full_end unmasked | full_end .. end masked
    start, end = seen[0] // other_rows, -(-seen[1] // other_rows)
    full_start = np.clip(-(-full[0] // other_rows), start, np.maximum(start, end))
    full_end = np.clip(full[1] // other_rows, full_start, np.maximum(full_start, end))

    columns = {
        EntryColumn.FIRST_ROW: pairs.row,
        EntryColumn.ROW_STRIDE: pairs.row_stride,
        EntryColumn.ROWS: count,
        EntryColumn.OWN_STEP: own_step,
        EntryColumn.OTHER_STEP: other_step,
        # Clip bounds that no row reaches: this changes no result and keeps them in int32.
        EntryColumn.LO: np.maximum(lo, -count * other_step),
        EntryColumn.HI: np.minimum(hi, reach),
        EntryColumn.FIRST_VISIBLE: start,
        EntryColumn.FIRST_FULL: full_start,
        EntryColumn.END_FULL: full_end,
        EntryColumn.END_VISIBLE: end,
        EntryColumn.FIRST_Q_HEAD: pairs.first_q_head,
        EntryColumn.Q_HEADS: pairs.q_heads,
    }
    entries = np.zeros((len(count), EntryColumn.COUNT), np.int64)
    for number, column in columns.items():
        entries[:, number] = column
    return entries, np.where(seen[1] > seen[0], end - start, 0)


def _places(pairs: _Pairs, first: Ints, rows: tuple[int, int]) -> Ints:
    """Return the columns of `Table.places` for each entry, from which the kernels compute ALiBi's distances.

    `first`: the block's first row, counted in its part. `rows`: the rows of a block on each side.
    """
    ahead = pairs.own + first * pairs.own_stride - pairs.other - pairs.shift
    reach = pairs.own_stride * rows[0], pairs.other_stride * (pairs.rows + rows[1])
    farthest = max((int(np.abs(x).max()) for x in (ahead, *reach) if x.size), default=0)
    if farthest >= LIMIT:
        raise UnsupportedError(
            f"positions of a tile are {farthest:,} apart, too far for the kernels' int32 arithmetic of ALiBi (limit "
            f"{LIMIT:,}); use engine='plain'"
        )
    return np.stack((ahead, pairs.own_stride, pairs.other_stride, pairs.first_head), axis=1)


def _positions(pairs: _Pairs, first: Ints) -> Ints:
    """Return the columns of `Table.positions` for each entry, from which the kernels compute the dropout mask.

    `first`: the block's first row, counted in its part.
    """
    own_position = pairs.own + first * pairs.own_stride
    return np.stack((own_position, pairs.own_stride, pairs.other, pairs.other_stride, pairs.first_head), axis=1)


def _sorted(blocks: Ints, entries: Ints, block: Ints, visits: Ints, unseen: bool, placed: int) -> Blocks:
    """Return the table of the blocks that have an entry, or of all blocks if `unseen`.

    Blocks with more work come first, so that light blocks balance the end of a launch. `entries` has the columns of
    `EntryColumn`, then `placed` columns of `Table.places`, then the columns of `Table.positions`. For each entry,
    `block` is the index of its block, and `visits` the number of blocks of other rows that it visits.
    """
    # The work of a block: visited blocks times query heads.
    work = np.bincount(block, visits * entries[:, EntryColumn.Q_HEADS], len(blocks))
    order = np.argsort(-work, kind="stable")
    order = order[(work[order] > 0) | unseen]
    # `rank` maps the old index of a block to its new one. The entries of a block keep their order.
    rank = np.zeros(len(blocks), np.int64)
    rank[order] = np.arange(len(order))
    blocks, block = blocks[order], rank[block]
    borders = EntryColumn.COUNT, EntryColumn.COUNT + placed
    entries, places, positions = np.split(entries[np.argsort(block, kind="stable")], borders, axis=1)
    # The entries of block b are ends[b - 1] .. ends[b] - 1.
    ends = np.cumsum(np.bincount(block, minlength=len(blocks)))
    blocks[1:, BlockColumn.FIRST_ENTRY], blocks[:, BlockColumn.END_ENTRY] = ends[:-1], ends
    farthest = max((int(np.abs(x).max()) for x in (blocks, entries, *_products(blocks, entries)) if x.size), default=0)
    if farthest >= LIMIT:
        raise UnsupportedError(
            f"rows or strided positions of a tile reach {farthest:,}, too many for the kernels' int32 arithmetic "
            f"(limit {LIMIT:,}); use more ranks or engine='plain'"
        )
    slots = int(blocks[:, BlockColumn.HEADS].max()) if len(blocks) else 0
    # Conversion to int32 keeps the low bits.
    more = (columns.astype(np.int32) if columns.shape[1] else None for columns in (places, positions))
    return Blocks(blocks.astype(np.int32), entries.astype(np.int32), slots, *more)


def _products(blocks: Ints, entries: Ints) -> tuple[Ints, ...]:
    """Return numbers that bound what a kernel computes from each block and entry: its rows and its banded distances.

    They are compared with the limit of int32.
    """
    first_row, stride, rows = blocks.T[[BlockColumn.FIRST_ROW, BlockColumn.ROW_STRIDE, BlockColumn.ROWS]]
    other_row, other_stride, other_rows = entries.T[[EntryColumn.FIRST_ROW, EntryColumn.ROW_STRIDE, EntryColumn.ROWS]]
    own_reach = entries[:, EntryColumn.OWN_STEP] * rows.max(initial=0)
    other_reach = entries[:, EntryColumn.OTHER_STEP] * other_rows
    return first_row + stride * rows, other_row + other_stride * other_rows, own_reach, other_reach


# --- flags: the first and the last launch of a pass that updates a query row ------------------------------------------
# The first launch need not read the softmax state, and the last need not store it. Flags are set only if they are valid
# for whole blocks and every row has a first and a last block. Then nothing has to be initialised before the pass or
# converted after it. Otherwise no flag is set.


def set_flags(steps: Sequence[Blocks], rows: int, heads: int) -> bool:
    """Set the flags in the query tables of a pass's steps, in order, and return True; return False if none are set.

    `rows`, `heads`: the numbers of rows and heads of the queries. Flags are set only if blocks update all of them.
    """
    # Cut the heads at the borders of all blocks: a block has all heads of a piece or none.
    #    heads     0 1 2 3 4 5 6 7
    #    block A   |-------|
    #    block B       |---------|      borders 0 2 4 7 8
    borders = sorted({0, heads, *(edge for step in steps for edge in _edges(step.blocks))})
    # For each (piece of heads, row): the first and the last step that updates it. If none: first = steps, last = -1.
    first = np.full((len(borders) - 1, rows), len(steps))
    last = np.full_like(first, -1)
    for number, step in enumerate(steps):
        for piece, updated, _ in _updated_rows(step.blocks, borders):
            first[piece, updated] = np.minimum(first[piece, updated], number)
            last[piece, updated] = number
    flags_of_steps = []
    for number, step in enumerate(steps):
        flags = np.zeros((2, len(step.blocks)), np.int64)
        for piece, updated, block in _updated_rows(step.blocks, borders):
            # For each block count the (piece, row) for which this step is the first, and the last.
            for which, history in enumerate((first, last)):
                np.add.at(flags[which], block, history[piece, updated] == number)
        flags_of_steps.append(flags)
    # A flag must be valid for a whole block: for all of its (piece, row) or for none.
    sizes = [_heads(step.blocks, borders) * step.blocks[:, BlockColumn.ROWS] for step in steps]
    whole = all(((flags == 0) | (flags == size)).all() for flags, size in zip(flags_of_steps, sizes, strict=True))
    if not whole or not rows or (last < 0).any():
        return False
    for flags, step in zip(flags_of_steps, steps, strict=True):
        step.blocks[:, BlockColumn.FLAGS] = FIRST * (flags[0] > 0) + LAST * (flags[1] > 0)
    return True


def _edges(blocks: Ints) -> set[int]:
    first, end = _head_range(blocks)
    return set(np.unique(first).tolist()) | set(np.unique(end).tolist())


def _head_range(blocks: Ints) -> tuple[Ints, Ints]:
    """Return the first head of each block, and one past its last."""
    first = blocks[:, BlockColumn.FIRST_HEAD]
    return first, first + blocks[:, BlockColumn.HEADS]


def _heads(blocks: Ints, borders: Sequence[int]) -> Ints:
    """Return, for each block, into how many pieces the borders cut its heads."""
    first, end = _head_range(blocks)
    return np.searchsorted(borders, end) - np.searchsorted(borders, first)


def _updated_rows(blocks: Ints, borders: Sequence[int]) -> Iterator[tuple[int, Ints, Ints]]:
    """Yield for each piece of heads: its number, the rows that its blocks update, and the block of each row."""
    first, end = _head_range(blocks)
    for piece in range(len(borders) - 1):
        holds = (first <= borders[piece]) & (borders[piece] < end)
        chosen = np.flatnonzero(holds)
        counts = blocks[chosen, BlockColumn.ROWS]
        block = np.repeat(chosen, counts)
        # Rows of a block: first row + within * row stride, counted up within each block.
        within = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        yield piece, blocks[block, BlockColumn.FIRST_ROW] + within * blocks[block, BlockColumn.ROW_STRIDE], block
