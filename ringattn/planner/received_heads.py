"""What one rank computes on received heads: the blocks that arrived and those that are returned to their owners, each
kind in one fused buffer, and the work on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ringattn.core.geometry import Tile, TokenRange
from ringattn.core.tiling import TileTable
from ringattn.errors import PlanError
from ringattn.planner.fused_buffers import ONE, FusedBuffer, alone
from ringattn.schedule.content import Content, HeadRows, union
from ringattn.schedule.ops import Attend, AttendGrad, Block, Kind
from ringattn.schedule.passes import inputs_of, result_of


class ReceivedHeads:
    """The inputs and results of a rank's work on received queries, a fused buffer for each kind of block."""

    def __init__(self, items: Iterable[Attend | AttendGrad], step: int) -> None:
        """`items`: all work of the rank on received queries in a step."""
        self.items = tuple(items)
        found: dict[Block, list[Content]] = defaultdict(list)
        for item in self.items:
            for block, rows in (*inputs_of(item), *result_of(item)):
                found[block].append(rows)
        # Of each block the union over all work on it.
        contents = {block: union(found[block]) for block in sorted(found)}
        if not all(map(alone, contents.values())):
            raise PlanError("what is received must have a part for every head")
        by_kind: dict[Kind, dict[Block, Content]] = defaultdict(dict)
        for block, rows in contents.items():
            by_kind[block.kind][block] = rows
        self.fused = {
            kind: FusedBuffer(f"{kind} received for step {step}", kind, held) for kind, held in by_kind.items()
        }

    def tiles(self, group: int) -> TileTable:
        """All work, as tiles of one head on the rows of the fused buffers; `group`: query heads per K/V head."""
        # By head: the part of the packed block and its first row in the fused buffer.
        parts = {
            block: {part.heads.start: (part, row) for part, row in buffer.parts(block)}
            for buffer in (self.fused[Kind.Q], self.fused[Kind.KV])
            for block in buffer.contents
        }
        return TileTable.of(
            [
                cut
                for item in self.items
                for _, table in item.tiles
                for tile in table
                # A query head reads K/V head h // group.
                for cut in _cut(tile, parts[item.q][tile.heads.start], parts[item.kv][tile.heads.start // group])
            ]
        )


def _cut(tile: Tile, q: tuple[HeadRows, int], k: tuple[HeadRows, int]) -> Iterator[Tile]:
    """A tile on packed rows: one for each run of queries and each run of keys that hold some of it."""
    # Packed rows are contiguous only within a held range, so a tile may become several:
    #    q rows 0..9, held as 0..3 and 6..9;  k rows held as 0..9   ->   (0..3 x 0..9) and (6..9 x 0..9)
    for q_range in _packed_ranges(tile.q, *q):
        for k_range in _packed_ranges(tile.k, *k):
            cut = Tile(q_range, k_range, tile.band, ONE)
            # Some combinations lie wholly outside the band.
            if cut.area():
                yield cut


def _packed_ranges(tokens: TokenRange, part: HeadRows, start: int) -> Iterator[TokenRange]:
    (overlaps,) = part.locate([tokens.rows])
    for overlap in overlaps:
        rows = overlap.packed
        # Positions stay those of the tile, for the band; rows become rows of the fused buffer.
        yield TokenRange(tokens.positions.pick(overlap.indices), rows._replace(start=rows.start + start))
