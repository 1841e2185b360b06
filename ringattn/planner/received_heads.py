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
    """What a rank's work on received queries reads and makes, a fused buffer of each kind."""

    def __init__(self, items: Iterable[Attend | AttendGrad]) -> None:
        """`items`: all work of the rank on received queries."""
        self.items = tuple(items)
        found: dict[Block, list[Content]] = defaultdict(list)
        for item in self.items:
            for block, rows in (*inputs_of(item), *result_of(item)):
                found[block].append(rows)
        contents = {block: union(found[block]) for block in sorted(found)}
        if not all(map(alone, contents.values())):
            raise PlanError("what is received must have a part for every head")
        by_kind: dict[Kind, dict[Block, Content]] = defaultdict(dict)
        for block, rows in contents.items():
            by_kind[block.kind][block] = rows
        self.fused = {kind: FusedBuffer(f"{kind} received", kind, held) for kind, held in by_kind.items()}

    def tiles(self, group: int) -> TileTable:
        """All work, as tiles of one head on the rows of the fused buffers; `group`: query heads per K/V head."""
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
                for cut in _cut(tile, parts[item.q][tile.heads.start], parts[item.kv][tile.heads.start // group])
            ]
        )


def _cut(tile: Tile, q: tuple[HeadRows, int], k: tuple[HeadRows, int]) -> Iterator[Tile]:
    """A tile on packed rows: one for each run of queries and each run of keys that hold some of it."""
    for q_strip in _strips(tile.q, *q):
        for k_strip in _strips(tile.k, *k):
            cut = Tile(q_strip, k_strip, tile.band, ONE)
            if cut.area():
                yield cut


def _strips(strip: TokenRange, part: HeadRows, start: int) -> Iterator[TokenRange]:
    (spots,) = part.locate([strip.rows])
    for spot in spots:
        rows = spot.packed
        yield TokenRange(strip.positions.pick(spot.indices), rows._replace(start=rows.start + start))
