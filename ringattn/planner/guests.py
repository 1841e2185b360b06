"""Where one rank serves: the blocks that came and those that go home, each kind in one bundle, and the work on them.

Does not know: routes, lifetimes, torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ringattn.errors import PlanError
from ringattn.geometry import Strip, Tile
from ringattn.planner.bundles import ONE, Bundle, alone
from ringattn.schedule.content import Content, Part, union
from ringattn.schedule.ops import Attend, AttendGrad, Block, Kind
from ringattn.schedule.passes import inputs_of, result_of
from ringattn.sweep import TileTable


class Guests:
    """What one rank's serving reads and makes, a bundle of each kind."""

    def __init__(self, items: Iterable[Attend | AttendGrad]) -> None:
        """`items`: all work of the rank on queries that came."""
        self.items = tuple(items)
        found: dict[Block, list[Content]] = defaultdict(list)
        for item in self.items:
            for block, rows in (*inputs_of(item), *result_of(item)):
                found[block].append(rows)
        contents = {block: union(found[block]) for block in sorted(found)}
        if not all(map(alone, contents.values())):
            raise PlanError("what is served must have a part for every head")
        by_kind: dict[Kind, dict[Block, Content]] = defaultdict(dict)
        for block, rows in contents.items():
            by_kind[block.kind][block] = rows
        self.bundles = {kind: Bundle(f"{kind} served", kind, held) for kind, held in by_kind.items()}

    def tiles(self, group: int) -> TileTable:
        """All work, as tiles of one head on the rows of the bundles; `group`: query heads per K/V head."""
        parts = {
            block: {part.heads.start: (part, row) for part, row in bundle.parts(block)}
            for bundle in (self.bundles[Kind.Q], self.bundles[Kind.KV])
            for block in bundle.contents
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


def _cut(tile: Tile, q: tuple[Part, int], k: tuple[Part, int]) -> Iterator[Tile]:
    """A tile on packed rows: one for each run of queries and each run of keys that hold some of it."""
    for q_strip in _strips(tile.q, *q):
        for k_strip in _strips(tile.k, *k):
            cut = Tile(q_strip, k_strip, tile.band, ONE)
            if cut.area():
                yield cut


def _strips(strip: Strip, part: Part, start: int) -> Iterator[Strip]:
    (spots,) = part.locate([strip.rows])
    for spot in spots:
        rows = spot.packed
        yield Strip(strip.positions.pick(spot.indices), rows._replace(start=rows.start + start))
