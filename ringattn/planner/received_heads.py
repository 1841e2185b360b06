"""What one rank computes on received heads: the blocks that arrived and those that are returned to their owners, each
kind in one fused buffer, and the work on them.

Queries stay for all steps that work on any of them; keys are there for one step.
       step      1                    2                    3
       queries   Q0 Q1  state begins  Q0 Q1                Q0 Q1  its result OUT0 OUT1
       keys      KV0 KV1              KV2 KV3              KV4 KV5
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from ringattn.core.geometry import Band, StridedRange, Tile, TokenRange
from ringattn.core.tiling import TileTable
from ringattn.errors import PlanError
from ringattn.planner.fused_buffers import ONE, FusedBuffer, alone
from ringattn.schedule.content import Content, HeadRows, union
from ringattn.schedule.ops import Attend, AttendGrad, Block, Kind
from ringattn.schedule.passes import inputs_of, result_of

CARRIED = Kind.Q, Kind.GRAD_OUT, Kind.OUT, Kind.DQ
"""Kinds of blocks that have the rows of the queries."""


class ReceivedQueries:
    """Queries that a rank works on in some steps, and what they carry meanwhile: a softmax state, or dQ.

    They come before the `first` of the steps; what they carry is made once, and is a result after the `last`.
    """

    def __init__(self, items: Iterable[Attend | AttendGrad], steps: Sequence[tuple[int, int]]) -> None:
        """`items`: all work on them; `steps`: of the plan with their numbers in the schedule, ascending."""
        (self.first, number), (self.last, _) = steps[0], steps[-1]
        self.fused = fused_by_kind((found for item in items for found in (*inputs_of(item), *result_of(item))
                                    if found[0].kind in CARRIED), number)  # fmt: skip


def fused_by_kind(found: Iterable[tuple[Block, Content]], step: int) -> dict[Kind, FusedBuffer]:
    """A fused buffer for each kind of block, with of each block the union of what was found."""
    contents: dict[Block, list[Content]] = defaultdict(list)
    for block, rows in found:
        contents[block].append(rows)
    by_kind: dict[Kind, dict[Block, Content]] = defaultdict(dict)
    for block in sorted(contents):
        by_kind[block.kind][block] = union(contents[block])
        if not alone(by_kind[block.kind][block]):
            raise PlanError("what is received must have a part for every head")
    return {kind: FusedBuffer(f"{kind} received for step {step}", kind, held) for kind, held in by_kind.items()}


class ReceivedHeads:
    """The inputs and results of a rank's work on received queries in one step: these, and the keys that they meet."""

    def __init__(self, items: Iterable[Attend | AttendGrad], step: int, queries: ReceivedQueries) -> None:
        """`items`: all work of the rank on received queries in the step of this number."""
        self.items, self.queries = tuple(items), queries
        of_keys = fused_by_kind((found for item in self.items for found in (*inputs_of(item), *result_of(item))
                                 if found[0].kind not in CARRIED), step)  # fmt: skip
        self.fused = queries.fused | of_keys

    def tiles(self, group: int) -> TileTable:
        """All work, as tiles of one head on the rows of the fused buffers; `group`: query heads per K/V head.

        A tile says which query head of the call it is, as its positions say which tokens its rows are.
        """
        # By head: the part of the packed block and its first row in the fused buffer.
        parts = {
            block: {part.heads.start: (part, row) for part, row in buffer.parts(block)}
            for buffer in (self.fused[Kind.Q], self.fused[Kind.KV])
            for block in buffer.contents
        }
        return TileTable.together(
            _cut(table, parts[item.q], parts[item.kv], group) for item in self.items for _, table in item.tiles
        )


Parts = Mapping[int, tuple[HeadRows, int]]
"""By head: its part of a packed block, and the part's first row in the fused buffer."""


def _cut(table: TileTable, q: Parts, k: Parts, group: int) -> TileTable:
    """Tiles of single heads on packed rows: one for each run of queries and each run of keys that hold some of one."""
    columns = table.columns
    heads, head_of = np.unique(columns[:, 12], return_inverse=True)
    # A query head reads K/V head h // group. Of heads that are held alike, tiles that lie alike are cut once.
    of_head = [(q[head], k[head // group]) for head in heads.tolist()]
    held = [(q_part.rows, k_part.rows) for (q_part, _), (k_part, _) in of_head]
    first_of = {rows: at for at, rows in reversed(list(enumerate(held)))}
    alike = np.array([first_of[rows] for rows in held], np.int64)[head_of]
    ways, way_of = np.unique(np.column_stack([alike, columns[:, :12]]), axis=0, return_inverse=True)
    way_of = way_of.reshape(-1)
    pieces: list[list[int]] = []
    borders = [0]
    for at, *tile in ways.tolist():
        pieces += _pieces(tile, of_head[at][0][0], of_head[at][1][0])
        borders.append(len(pieces))
    counts = np.diff(borders)[way_of]
    tile_of = np.repeat(np.arange(len(columns)), counts)
    # The n-th piece of tile t is piece borders[way of t] + n; n counts from the first piece of the tile.
    nth = np.arange(len(tile_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty((len(tile_of), columns.shape[1]), np.int64)
    found[:, :10] = np.array(pieces, np.int64).reshape(-1, 10)[np.array(borders)[way_of[tile_of]] + nth]
    found[:, 10:12] = columns[tile_of, 10:12]
    found[:, 12], found[:, 13], found[:, 14] = ONE.start, ONE.count, columns[tile_of, 12]
    for column, starts in ((3, [row for (_, row), _ in of_head]), (8, [row for _, (_, row) in of_head])):
        found[:, column] += np.array(starts, np.int64)[head_of[tile_of]]
    return TileTable(found)


def _pieces(tile: list[int], q_part: HeadRows, k_part: HeadRows) -> list[list[int]]:
    """Of a tile's columns up to its band: those of queries and of keys of its pieces, on the rows of the parts."""
    qs, qss, qn, qr, qrs, ks, kss, kn, kr, krs, lo, hi = tile
    q_ranges = _packed_ranges(TokenRange(StridedRange(qs, qn, qss), StridedRange(qr, qn, qrs)), q_part)
    k_ranges = _packed_ranges(TokenRange(StridedRange(ks, kn, kss), StridedRange(kr, kn, krs)), k_part)
    # Packed rows are contiguous only within a held range, so a tile may become several:
    #    q rows 0..9, held as 0..3 and 6..9;  k rows held as 0..9   ->   (0..3 x 0..9) and (6..9 x 0..9)
    # Some combinations lie wholly outside the band.
    return [
        [number for one in pair for number in (one.positions.start, one.positions.stride, one.positions.count,
                                               one.rows.start, one.rows.stride)]
        for pair in product(q_ranges, list(k_ranges)) if Tile(*pair, Band(lo, hi), ONE).area()
    ]  # fmt: skip


def _packed_ranges(tokens: TokenRange, part: HeadRows) -> Iterator[TokenRange]:
    (overlaps,) = part.locate([tokens.rows])
    for overlap in overlaps:
        # Positions stay those of the tile, for the band; rows become rows of the packed part.
        yield TokenRange(tokens.positions.pick(overlap.indices), overlap.packed)


def received_by_step(steps: Mapping[int, tuple[int, Sequence[Attend | AttendGrad]]]) -> dict[int, ReceivedHeads]:
    """The work on received queries by step of the plan, given with the step's number in the schedule.

    Steps that have a block of queries in common work on the same queries.
    """
    # Blocks of queries, and the steps that work on them.
    sets: list[tuple[set[Block], list[int]]] = []
    for now, (_, items) in steps.items():
        blocks, of_set = {item.q for item in items}, [now]
        for other in [one for one in sets if one[0] & blocks]:
            sets.remove(other)
            blocks, of_set = blocks | other[0], other[1] + of_set
        sets.append((blocks, sorted(of_set)))
    found: dict[int, ReceivedHeads] = {}
    for _, of_set in sets:
        queries = ReceivedQueries(
            (item for now in of_set for item in steps[now][1]), [(now, steps[now][0]) for now in of_set]
        )
        found |= {now: ReceivedHeads(steps[now][1], steps[now][0], queries) for now in of_set}
    return found
