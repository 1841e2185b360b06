"""The tiling: turn masks on layouts into tiles, for all ranks together.

The ranges of a shard are cut at the rectangles of the mask into *pieces*; a *segment* is the number of a rectangle.
Query and key pieces of the same segment form pairs; each pair is clipped by the band to the rows that have a partner.
Everything is integer arithmetic on arrays, so that 64 ranks and 64 documents take milliseconds. It is exact: a row is
in a clipped piece if and only if some allowed pair needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd, prod
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ringattn.core.bounded_cache import bounded
from ringattn.core.geometry import UNBOUNDED, Band, StridedRange, Tile, TokenRange
from ringattn.core.layout import Layout
from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.rectangles import Rectangles

Ints = np.ndarray
"""An int64 array."""


Numbers = TypeVar("Numbers")


class TileColumns(NamedTuple, Generic[Numbers]):
    """The columns of a table of tiles, or the numbers of a single tile.

    Positions and rows of queries and keys are strided ranges of equal count. `head`, `heads`: the first query head and
    the number of query heads. `first_head`: see `Tile.first_head`.
    """

    q_start: Numbers
    q_stride: Numbers
    q_count: Numbers
    q_row: Numbers
    q_row_stride: Numbers
    k_start: Numbers
    k_stride: Numbers
    k_count: Numbers
    k_row: Numbers
    k_row_stride: Numbers
    lo: Numbers
    hi: Numbers
    head: Numbers
    heads: Numbers
    first_head: Numbers


COLUMN_OF = {name: number for number, name in enumerate(TileColumns._fields)}


class _Column:
    """A descriptor that returns a column of a table as a view."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._number = COLUMN_OF[name]

    def __get__(self, table: TileTable, owner: type) -> Ints:
        return table.array[:, self._number]


ROWS_OF_Q, ROWS_OF_K, HEADS = slice(2, 5), slice(7, 10), slice(12, 14)
"""Adjacent columns: count, first row and row stride (of Q and of K); first head and number of heads."""


class TileTable:
    """An immutable sequence of tiles, kept as one int64 array of shape (tiles, columns); see `TileColumns`."""

    __slots__ = ("array",)

    q_start, q_stride, q_count, q_row, q_row_stride = (_Column() for _ in range(5))
    k_start, k_stride, k_count, k_row, k_row_stride = (_Column() for _ in range(5))
    lo, hi, head, heads, first_head = (_Column() for _ in range(5))

    def __init__(self, array: Ints) -> None:
        """Take ownership of `array`."""
        # Tables are hashed by their bytes and shared between cached plans.
        array.setflags(write=False)
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Tile]:
        # Tiles are made by `map`, column by column: a loop in Python over the rows takes three times as long.
        columns: TileColumns[list[int]] = TileColumns(*self.array.T.tolist())
        q, k = (
            map(TokenRange, map(StridedRange, start, count, stride), map(StridedRange, row, count, row_stride))
            for start, stride, count, row, row_stride in (columns[:5], columns[5:10])
        )
        heads = map(StridedRange, columns.head, columns.heads)
        return map(Tile, q, k, map(Band, columns.lo, columns.hi), heads, columns.first_head)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TileTable) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"TileTable({len(self)} tiles, {self.area()} pairs)"

    def replaced(self, **columns: Ints | int) -> TileTable:
        """Return the same tiles with other values in some columns."""
        array = self.array.copy()
        for name, values in columns.items():
            array[:, COLUMN_OF[name]] = values
        return TileTable(array)

    def k_runs(self) -> list[StridedRange]:
        """Return the K/V rows of each tile."""
        return [StridedRange(row, count, stride) for count, row, stride in self.array[:, ROWS_OF_K].tolist()]

    def area(self) -> int:
        """Return the allowed pairs times query heads, summed over the tiles."""
        counts = self.array[:, [COLUMN_OF[name] for name in ("q_count", "k_count", "heads")]]
        if (self.q_stride % self.k_stride).any() or prod(counts.max(0, initial=1).tolist()) >= 1 << 62:
            return sum(tile.area() for tile in self)
        # The pairs with q - k >= lo, without those with q - k > hi.
        lower, upper = (self._pairs_at_least(bound) for bound in (self.lo, self.hi + 1))
        return sum(np.where(self.lo <= self.hi, (lower - upper) * self.heads, 0).tolist())

    def _pairs_at_least(self, lo: Ints) -> Ints:
        """Return the pairs of each tile with q - k >= lo: `geometry.count_pairs` for whole multiples of the stride."""
        first, last = self.k_start, self.k_start + (self.k_count - 1) * self.k_stride
        # Queries before `part` have no key; queries from `full` on have every key. Between the two, the number of keys
        # grows by `slope` from query to query.
        part = np.clip(-((self.q_start - lo - first) // self.q_stride), 0, self.q_count)
        full = np.clip(-((self.q_start - lo - last) // self.q_stride), part, self.q_count)
        n, slope = full - part, self.q_stride // self.k_stride
        keys = (self.q_start + part * self.q_stride - lo - first) // self.k_stride + 1
        return n * (n - 1) // 2 * slope + n * keys + (self.q_count - full) * self.k_count

    def take(self, index: Ints | list[int]) -> TileTable:
        """Return the tiles at `index`, an array of indices or booleans."""
        return TileTable(self.array[index])

    @staticmethod
    def together(tables: Iterable[TileTable]) -> TileTable:
        """Return the tiles of all tables, in order."""
        return TileTable(np.concatenate([table.array for table in tables]))

    def with_single_heads(self) -> TileTable:
        """Return the same pairs with a separate tile for every query head."""
        counts = self.heads
        repeated = TileTable(self.array.repeat(counts, axis=0))
        # arange - repeat(exclusive cumsum) counts within each tile:
        # counts 3 1 2  ->  arange 0 1 2 | 3 | 4 5  minus  0 0 0 | 3 | 4 4  =  0 1 2 | 0 | 0 1
        within = np.arange(len(repeated)) - np.repeat(np.cumsum(counts) - counts, counts)
        return repeated.replaced(head=repeated.head + within, heads=1)

    def with_joined_heads(self) -> TileTable:
        """Join tiles that differ only in their heads and whose heads are adjacent."""
        rest = [number for name, number in COLUMN_OF.items() if name not in ("head", "heads")]
        # lexsort uses its last key first: order by the other columns, then by the first head.
        order = np.lexsort([self.head, *self.array[:, rest[::-1]].T])
        tiles = self.take(order)
        heads, end = tiles.head, tiles.head + tiles.heads
        # alike[i]: tile i + 1 continues tile i. A group starts after each i for which alike[i] is false.
        same = (tiles.array[1:] == tiles.array[:-1])[:, rest].all(1)
        alike = same & (heads[1:] == end[:-1])
        first = np.flatnonzero(np.r_[True, ~alike][: len(tiles)])
        if not len(first):
            return tiles
        # The last tile of each group has the end of the group's heads.
        ends = end[np.r_[first[1:], len(tiles)] - 1]
        return tiles.take(first).replaced(heads=ends - heads[first])

    @staticmethod
    def of(tiles: list[Tile]) -> TileTable:
        """Return a table of these tiles."""
        rows = [
            (t.q.positions.start, t.q.positions.stride, t.q.positions.count, t.q.rows.start, t.q.rows.stride,
             t.k.positions.start, t.k.positions.stride, t.k.positions.count, t.k.rows.start, t.k.rows.stride,
             t.band.lo, t.band.hi, t.heads.start, t.heads.count, t.first_head)
            for t in tiles
        ]  # fmt: skip
        return TileTable(np.array(rows, np.int64).reshape(-1, len(COLUMN_OF)))


class Pieces(NamedTuple):
    """Ranges of positions, each in one rectangle: arrays of equal length, ordered by rank and first row.

    `segment`: the number of the rectangle.
    """

    rank: Ints
    segment: Ints
    start: Ints
    stride: Ints
    size: Ints
    row: Ints
    row_stride: Ints

    def take(self, index: Ints) -> Pieces:
        """Return the pieces at `index`."""
        return Pieces(*(column[index] for column in self))

    @property
    def last(self) -> Ints:
        """The largest position of each piece."""
        return self.start + (self.size - 1) * self.stride


class Runs(NamedTuple):
    """The ranges of all shards of a layout, ordered by start. `row`: their first row in the shard of `rank`.

    `reach`: the largest last position of a range and of all ranges before it.
    """

    rank: Ints
    start: Ints
    count: Ints  # type: ignore[assignment]  # ranges count members, not occurrences
    stride: Ints
    row: Ints
    reach: Ints


@bounded
def runs_of(layout: Layout) -> Runs:
    """Return the ranges of all shards of `layout`."""
    ranges = [(rank, *run) for rank, shard in enumerate(layout.shards) for run in shard]
    rank, start, count, stride = np.array(ranges, np.int64).reshape(-1, 4).T
    # Rows count from the start of the rank's shard: exclusive cumsum minus the tokens of all earlier ranks.
    row = np.cumsum(count) - count
    row -= np.concatenate([[0], np.cumsum(layout.counts)])[rank]
    order = np.argsort(start, kind="stable")
    rank, start, count, stride, row = (column[order] for column in (rank, start, count, stride, row))
    return Runs(rank, start, count, stride, row, np.maximum.accumulate(start + (count - 1) * stride))


def _between(runs: Runs, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return for each interval start .. stop - 1 the runs (first, end) among which are all that overlap it."""
    return np.searchsorted(runs.reach, start), np.searchsorted(runs.start, stop)


def spanned(layout: Layout, rectangles: Rectangles, *, keys: bool) -> int:
    """Return an upper bound on the number of pieces that `cut` makes, without making them and ignoring dilation."""
    runs, array = runs_of(layout), rectangles.array
    start, stop = array[:, 2:4].T if keys else array[:, :2].T
    copies, period = array[:, 6], array[:, 7]
    first, end = _between(runs, start, stop + (copies - 1) * period)
    # A run overlaps an interval unless it starts after it or ends before it.
    lasts = np.sort(runs.start + (runs.count - 1) * runs.stride)
    total = int((np.searchsorted(runs.start, stop) - np.searchsorted(lasts, start))[copies == 1].sum())
    for n in np.flatnonzero(copies > 1).tolist():
        # A range overlaps the copies from that of its first position to that of its last position.
        met = slice(int(first[n]), int(end[n]))
        range_start = runs.start[met] - start[n]
        range_last = range_start + (runs.count[met] - 1) * runs.stride[met]
        total += int((np.minimum(range_last // period[n], copies[n] - 1)
                      - np.maximum(range_start // period[n], 0) + 1).sum())  # fmt: skip
    return total


@bounded
def cut(layout: Layout, rectangles: Rectangles, dilation: int = 1, offset: int = 0, *, keys: bool = False) -> Pieces:
    """Return the positions of all shards of `layout` that a branch uses (see `Branch`), cut at its rectangles.

    A position is in several pieces if it belongs to several rectangles.
    """
    runs = runs_of(layout)
    start, stop = rectangles.expanded[:, 2:4].T if keys else rectangles.expanded[:, :2].T
    # Rectangle r may overlap the runs first[r] .. end[r] - 1; the others give empty pieces, dropped below.
    #    runs           0..3  4..7  8..11
    #    rectangle          2 . . . 9           first 0, end 3
    #    pieces             2..3  4..7  8..9
    first, end = _between(runs, start, stop)
    spans = np.maximum(0, end - first)
    segment = np.repeat(np.arange(len(spans)), spans)
    source = np.arange(len(segment)) - np.repeat(np.cumsum(spans) - spans - first, spans)
    rank, run_start, count, stride, row, _ = (column[source] for column in runs)
    # Indices into the run: the first member at or past the rectangle's start, and at or past its end.
    # -((a - b) // s) is (b - a) / s rounded up, here and below.
    begin = np.maximum(0, -((run_start - start[segment]) // stride))
    end = np.minimum(count, -((run_start - stop[segment]) // stride))
    step = np.ones_like(stride)
    if dilation > 1:
        # Only every dilation-th position of a rectangle takes part, counted from its start plus the offset.
        begin, step = _dilated_indices(start[segment] + offset - run_start, stride, dilation, begin, end)
    # The number of members from begin to end - 1 at this step, rounded up; zero or negative if there are none.
    size = -((begin - end) // step)
    pieces = Pieces(rank, segment, run_start + begin * stride, stride * step, size, row + begin, step)
    pieces = pieces.take(np.flatnonzero(size > 0))
    return pieces.take(np.lexsort((pieces.segment, pieces.row, pieces.rank)))


def _dilated_indices(target: Ints, stride: Ints, dilation: int, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Solve index * stride = target (modulo dilation) for the indices of range members from `begin` on.

    Return the first solution, or `end` if there is none, and the step from one solution to the next.
    """
    # Solve index * stride = target (mod dilation). With g = gcd(stride, dilation), it has solutions only if g divides
    # target. The solutions are then one residue class modulo dilation / g:
    #     index = (target / g) * (stride / g)^-1   (mod dilation / g)
    common = np.gcd(stride, dilation)
    step = dilation // common
    # A layout has few distinct strides, so look up the modular inverses in a small table.
    strides = stride.tolist()
    inverses = {s: pow(s // gcd(s, dilation), -1, dilation // gcd(s, dilation)) for s in set(strides)}
    inverse = np.array([inverses[s] for s in strides], np.int64)
    residue = target // common % step * inverse % step
    # The first index of that residue class that is at least `begin`.
    first = begin + (residue - begin) % step
    return np.where(target % common == 0, np.minimum(first, end), end), step


def pieces_of(layout: Layout, branch: Branch, *, keys: bool) -> Pieces:
    """Return the pieces of a layout that a branch uses as queries, or with `keys` as keys."""
    return cut(layout, branch.rectangles, branch.dilation, branch.offset, keys=keys)


def meeting_pieces(problem: Problem, branch: Branch) -> tuple[Pieces, Pieces]:
    """Return the pieces of a branch as queries and as keys, with equal strides where a band has two bounds."""
    q, k = pieces_of(problem.q_layout, branch, keys=False), pieces_of(problem.kv_layout, branch, keys=True)
    one_sided = branch.rectangles.one_sided
    if one_sided.all() or problem.q_layout == problem.kv_layout:
        return q, k
    # One of two sequences may be striped and the other not. A narrow band may then miss all positions of a piece, which
    # the ends of its rows do not show. With equal strides this can be computed (see `partners`).
    cut_q, cut_k = (~one_sided[pieces.segment] for pieces in (q, k))
    strides = np.unique(np.concatenate([q.stride[cut_q], k.stride[cut_k]]))
    stride = int(np.lcm.reduce(strides)) if len(strides) else 1
    return _at_stride(q, np.where(cut_q, stride, q.stride)), _at_stride(k, np.where(cut_k, stride, k.stride))


def _at_stride(pieces: Pieces, stride: Ints) -> Pieces:
    """Cut each piece into its residue classes modulo its number in `stride`, a multiple of the piece's stride."""
    times = stride // pieces.stride
    source = np.repeat(np.arange(len(times)), times)
    # The index of a class within its piece: arange minus the exclusive cumsum, as in `cut`.
    nth = np.arange(len(source)) - np.repeat(np.cumsum(times) - times, times)
    rank, segment, start, old, size, row, row_stride = pieces.take(source)
    step = times[source]
    classes = Pieces(
        rank, segment, start + nth * old, old * step, -((nth - size) // step), row + nth * row_stride, row_stride * step
    )
    return classes.take(np.flatnonzero(classes.size > 0))


def tiles_of(problem: Problem, rank: int, *, keys: bool = False) -> dict[tuple[int, int], TileTable]:
    """Return the tiles of `rank`'s queries by (owner of the keys, head part). Key rows are rows of the owner's shard.

    The dict is ordered by owner, then part. It leaves out owners whose keys this rank does not read. With `keys`,
    return the tiles of `rank`'s keys by (owner of the queries, head part) instead; both ranks of a pair compute the
    same tiles.
    """
    tables: dict[tuple[int, int], list[TileTable]] = {}
    for branch in problem.mask.branches:
        for (owner, part, _), table in branch_tiles(problem, branch, rank, by_segment=False, keys=keys).items():
            tables.setdefault((owner, part), []).append(table)
    return {key: TileTable.together(tables[key]) for key in sorted(tables)}


def branch_tiles(
    problem: Problem, branch: Branch, rank: int, by_segment: bool, keys: bool = False
) -> dict[tuple[int, int, int], TileTable]:
    """Return the tiles of one branch as `tiles_of` does, but by (owner, part, segment).

    The segment is 0 unless `by_segment`.
    """
    q, k = meeting_pieces(problem, branch)
    if keys:
        k = k.take(np.flatnonzero(k.rank == rank))
    else:
        q = q.take(np.flatnonzero(q.rank == rank))
    q_owners, owners, segments, tiles = _clipped_pairs(q, k, branch)
    owners = q_owners if keys else owners
    if not len(owners):
        return {}
    sort_keys = np.stack([owners, segments * by_segment], axis=1)
    # Group the tiles by (owner, segment): sort, then split where the sort key changes.
    order = np.lexsort(sort_keys.T[::-1])
    sort_keys, tiles = sort_keys[order], tiles.take(order)
    edges = np.flatnonzero((sort_keys[1:] != sort_keys[:-1]).any(1)) + 1
    groups = list(zip(sort_keys[np.r_[0, edges]].tolist(), np.split(tiles.array, edges), strict=True))
    tables = {}
    for index, part in enumerate(problem.parts):
        heads = part.q_heads if branch.heads is None else part.q_heads.intersect(branch.heads)
        for (owner, segment), block in groups if heads.count else ():
            # Each head part has the same pairs; only the heads differ.
            tables[owner, index, segment] = TileTable(block).replaced(head=heads.start, heads=heads.count)
    return tables


def _clipped_pairs(q: Pieces, k: Pieces, branch: Branch) -> tuple[Ints, Ints, Ints, TileTable]:
    """Pair query pieces with the key pieces of the same segment, and clip the pairs to the band.

    Return the owners of the queries (n,), the owners of the keys (n,), the segments (n,) and the tiles.
    """
    # Join on the segment. Queries are sorted by segment, so those of segment s are first[s] .. first[s + 1] - 1.
    q = q.take(np.argsort(q.segment, kind="stable"))
    first = np.searchsorted(q.segment, np.arange(len(branch.rectangles) + 1))
    partners_of = (first[1:] - first[:-1])[k.segment]
    # Repeat each key piece once for every query piece of its segment; ki and qi index the two sides of a pair:
    #    key piece      A B C     segments of A B C: 0 0 1
    #    query pieces   a b | c   segments of a b c: 0 0 1
    #    ki             A A B B C
    #    qi             a b a b c
    ki = np.repeat(np.arange(len(k.rank)), partners_of)
    qi = np.arange(len(ki)) - np.repeat(np.cumsum(partners_of) - partners_of - first[k.segment], partners_of)
    q, k = q.take(qi), k.take(ki)
    lo, hi = band_of(branch, k.segment)

    k_first, k_end = partners(k, q.start, q.last, lo, hi)
    # Clip the queries to the clipped keys:  k_start + lo <= q <= k_last + hi.
    k_start, k_last = k.start + k_first * k.stride, k.start + (k_end - 1) * k.stride
    q_first = np.maximum(0, -((q.start - k_start - lo) // q.stride))
    q_end = np.minimum(q.size, (k_last + hi - q.start) // q.stride + 1)
    # Heads are filled in by `branch_tiles`.
    ones = np.ones_like(lo)
    columns = TileColumns(
        q.start + q_first * q.stride, q.stride, q_end - q_first, q.row + q_first * q.row_stride, q.row_stride,
        k_start, k.stride, k_end - k_first, k.row + k_first * k.row_stride, k.row_stride, lo, hi, ones, ones, 0 * ones,
    )  # fmt: skip
    keep = k_end > k_first
    return q.rank[keep], k.rank[keep], k.segment[keep], TileTable(np.stack(columns, axis=1)[keep])


def band_of(branch: Branch, segment: Ints) -> tuple[Ints, Ints]:
    """Return the bounds (lo, hi) of q - k for pieces of these segments, in positions."""
    return branch.rectangles.expanded[segment, 4], branch.rectangles.expanded[segment, 5]


def partners(k: Pieces, q_start: Ints, q_last: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """Return the keys that at least one query needs, as indices (first, end) into each key piece.

    There are none if end <= first.

    Queries range from `q_start` to `q_last` with the stride of the key piece (any stride if the band is one-sided). All
    arrays broadcast against each other.
    """
    uniform = k.stride.size > 0 and bool((k.stride == k.stride.flat[0]).all())
    stride = int(k.stride.flat[0]) if uniform else k.stride  # dividing by one number is several times faster
    shape = np.broadcast_shapes(k.start.shape, q_start.shape)
    # lo <= q - k <= hi  <=>  q - hi <= k <= q - lo. The first query bounds the first key, the last query the last key:
    #    keys    k.start . . [first . . . . end) . . .
    #                       q_start - hi     q_last - lo
    first = np.zeros(shape, np.int64)
    # A shift of documents changes lo and hi, so every value far above all token indices counts as unbounded.
    if (hi < UNBOUNDED // 2).any():
        first = np.maximum(0, -((k.start + hi - q_start) // stride))
    end = np.minimum(k.size, (q_last - (k.start + lo)) // stride + 1)
    if (hi - lo + 1 < k.stride).any():
        # A band narrower than the stride may pass between two positions.
        # With equal strides, q - k has only values offset + n * stride; the pair is empty if none of them is in lo..hi.
        offset = (q_start - k.start) % stride
        end = np.where(-((offset - lo) // stride) <= (hi - offset) // stride, end, first)
    return first, end
