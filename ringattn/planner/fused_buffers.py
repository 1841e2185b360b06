"""Fused buffers: several blocks as slices of one buffer, so that one engine call reads them all.

Each row of a head is a row of the buffer, which has a single head.

Block A with head 0 rows 2..4 and head 1 rows 0..1, and block B with head 0 rows 7..8:
    buffer row    0 1 2 | 3 4 | 5 6
    holds         A0    | A1  | B0       starts: A 0, B 5
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import numpy as np

from ringattn.core.geometry import StridedRange, Tile, TokenRange
from ringattn.core.tiling import ROWS_OF_K, ROWS_OF_Q, Ints, TileTable
from ringattn.errors import PlanError
from ringattn.schedule.content import Content, HeadRows, size, union
from ringattn.schedule.ops import Attend, AttendGrad, Block, Kind, Merge, Schedule
from ringattn.schedule.passes import inputs_of, is_on_received, result_of

# A row of a fused buffer is a row of one head already, so the buffer has a single head.
ONE = StridedRange(0, 1)


class FusedBuffer:
    """Blocks of one kind whose contents have a part for every head."""

    def __init__(self, label: str, kind: Kind, contents: Mapping[Block, Content]) -> None:
        """They lie in the order of `contents`."""
        self.label, self.kind, self.contents = label, kind, contents
        # Every part has one head, so a content's size is its number of buffer rows.
        rows = list(accumulate(map(size, contents.values()), initial=0))
        # `rows` has one border more than there are blocks: the last is the size of the buffer.
        self.starts = dict(zip(contents, rows, strict=False))
        self.content: Content = (HeadRows(ONE, (StridedRange(0, rows[-1]),)),)

    def parts(self, block: Block) -> Iterator[tuple[HeadRows, int]]:
        """Each part of a block with its first row in the buffer."""
        start = self.starts[block]
        for part in self.contents[block]:
            yield part, start
            # Parts follow one another as in a message, so what arrives fills the block's slice in place.
            start += part.row_count

    def tiles(self, items: Iterable[Attend | AttendGrad]) -> TileTable:
        """The tiles of all work on the buffer's blocks, keys as its rows."""
        tables = []
        for item in items:
            parts = {part.heads: (part, row) for part, row in self.parts(item.kv)}
            for heads, table in item.tiles:
                part, first = parts[heads]
                # Keys become buffer rows: their place in the packed part, plus the part's first row.
                cut = within_runs(table, [part])
                rows, steps = packed_rows(cut, part)
                tables.append(cut.replaced(k_row=rows + first, k_row_stride=steps))
        return TileTable.together(tables)


def alone(content: Content) -> bool:
    """Whether every part has one head."""
    return all(part.heads.count == 1 for part in content)


def fused_arrivals(schedule: Schedule, rank: int, sums: Mapping[Block, Content]) -> Iterator[FusedBuffer]:
    """K/V that arrives at `rank` in one step and is read in one step, and in a backward pass the sums for it.

    Only where every part has one head and `sums`, what is returned to the owner of each, take the same rows.
    """
    steps = schedule.restricted_to(rank).steps
    work = [(at, item) for at, step in enumerate(steps) for item in step.work if not isinstance(item, Merge)]
    # Own keys are read in the caller's tensors; work on received queries has fused buffers of its own.
    reads = {item.kv: (at, item) for at, item in work if item.kv.owner != rank and not is_on_received(item)}
    # Kept blocks are there before step 0 and count as received in step -1.
    received = [
        (at, copy.block, copy.content) for at, step in enumerate(steps) for copy in step.copies if copy.dst == rank
    ]
    received += [(-1, block, content) for holder, block, content in schedule.kept if holder == rank]
    # A sum that others were merged into before the own work on it lies alone; it cannot begin in a fused buffer.
    merged = {item.into: at for at, step in reversed(list(enumerate(steps))) for item in step.work
              if isinstance(item, Merge)}  # fmt: skip
    reads = {
        kv: (at, item) for kv, (at, item) in reads.items()
        if isinstance(item, Attend) or merged.get(item.dkv, at) >= at
    }  # fmt: skip
    messages = Counter(block for _, block, _ in received)
    # Grouped by (step received, step read): only those live and are attended together. Of pieces no step brings all.
    groups: dict[tuple[int, int], dict[Block, Content]] = defaultdict(dict)
    for arrival, block, content in received:
        if block in reads and messages[block] == 1:
            groups[arrival, reads[block][0]][block] = content
    for (arrival, _), contents in groups.items():
        items = [reads[block][1] for block in contents]
        # Backward reads K/V and adds dK/dV at the same row numbers, so both contents must be equal, block by block.
        made = {item.dkv: sums.get(item.dkv) for item in items if isinstance(item, AttendGrad)}
        if all(map(alone, contents.values())) and (not made or list(made.values()) == list(contents.values())):
            yield FusedBuffer(f"KV of step {arrival}", Kind.KV, contents)
            if made:
                yield FusedBuffer(f"DKV of step {arrival}", Kind.DKV, dict(zip(made, contents.values(), strict=True)))


# --- tiles on packed rows --------------------------------------------------------------------------------------------


def within_runs(table: TileTable, places: Iterable[HeadRows | None]) -> TileTable:
    """The tiles cut so that the key rows of each lie in one run of each of the parts."""
    for part in places:
        # Contiguous keys lie in one of the merged contiguous ranges: nothing to cut.
        if part is not None and not (part.dense and (table.k_row_stride == 1).all()):
            # One tile for each held range that has some of its keys.
            found = part.locate(table.k_runs())
            table = TileTable.of(
                [
                    tile._replace(k=tile.k.pick(spot.indices))
                    for tile, spots in zip(table, found, strict=True)
                    for spot in spots
                ]
            )
    return table


def packed_rows(table: TileTable, part: HeadRows | None) -> tuple[np.ndarray, np.ndarray]:
    """The first key row of each tile and their step as rows of the part, of which one run holds them all."""
    rows, steps = table.k_row, table.k_row_stride
    if part is None:
        return rows, steps
    # Dense: the first row fixes the place, and the stride is kept. Else the overlap gives both.
    if part.dense:
        return part.offsets(rows), steps
    packed = [spot.packed for (spot,) in part.locate(table.k_runs())]
    return np.array([run.start for run in packed], np.int64), np.array([run.stride for run in packed], np.int64)


# --- work on received queries ----------------------------------------------------------------------------------------
# Each kind of block that this work reads or makes, the local blocks included, has one fused buffer.
# Queries stay for all steps that use them; keys are there for one step:
#       step      1                       2                    3
#       queries   Q0 Q1  state starts     Q0 Q1                Q0 Q1  results OUT0 OUT1
#       keys      KV0 KV1                 KV2 KV3              KV4 KV5


CARRIED = Kind.Q, Kind.GRAD_OUT, Kind.OUT, Kind.DQ
"""Kinds of blocks that have the rows of the queries."""


Blocks = Iterable[tuple[Block, Content]]
"""What work reads and makes, with the rows."""


def fused_by_kind(found: Blocks, step: int) -> dict[Kind, FusedBuffer]:
    """A fused buffer for each kind of block, with of each block the union of what was found."""
    contents: dict[Block, list[Content]] = defaultdict(list)
    for block, rows in found:
        contents[block].append(rows)
    by_kind: dict[Kind, dict[Block, Content]] = defaultdict(dict)
    for block in sorted(contents):
        by_kind[block.kind][block] = union(dict.fromkeys(contents[block]))
        if not alone(by_kind[block.kind][block]):
            raise PlanError("what is received must have a part for every head")
    return {kind: FusedBuffer(f"{kind} received for step {step}", kind, held) for kind, held in by_kind.items()}


@dataclass(frozen=True)
class ReceivedHeads:
    """A rank's work on received queries in one step, and the fused buffers of what it reads and makes.

    The queries are worked on in plan steps `first` to `last`: they arrive before the first, what they carry (a softmax
    state, or dQ) is made once, and is a result after the last. `items`: all work of the step on them.
    """

    items: tuple[Attend | AttendGrad, ...]
    fused: dict[Kind, FusedBuffer]
    first: int
    last: int

    def tiles(self, group: int) -> TileTable:
        """All work, as tiles of one head on the rows of the fused buffers; `group`: query heads per K/V head.

        A tile says which query head of the call it is, as its positions say which tokens its rows are.
        """
        every = [(item, table) for item in self.items for _, table in item.tiles]
        counts = [len(table) for _, table in every]
        tiles = TileTable.together(table for _, table in every)
        # A query head reads K/V head h // group.
        heads, array = tiles.head, tiles.array
        q = PackedRows(self.fused[Kind.Q], [item.q for item, _ in every], counts, heads, array[:, ROWS_OF_Q])
        k = PackedRows(self.fused[Kind.KV], [item.kv for item, _ in every], counts, heads // group, array[:, ROWS_OF_K])
        # What the buffers hold has a single head.
        (q_row, q_row_stride), (k_row, k_row_stride) = q.rows.T, k.rows.T
        packed = tiles.replaced(
            q_row=q_row, q_row_stride=q_row_stride, k_row=k_row, k_row_stride=k_row_stride, head=ONE.start,
            heads=ONE.count, first_head=heads,
        )  # fmt: skip
        whole = q.whole & k.whole
        if whole.all():
            return packed
        known: Cuts = {}
        found = [packed.take(whole)]
        places = [np.flatnonzero(whole)]
        for at in np.flatnonzero(~whole).tolist():
            (tile,) = tiles.take([at])
            found.append(TileTable.of(list(_cut(tile, q.part(at), k.part(at), known))))
            places.append(np.full(len(found[-1]), at))
        return TileTable.together(found).take(np.argsort(np.concatenate(places), kind="stable"))


class PackedRows:
    """The rows of tiles in a fused buffer: of each the first and how far apart, `whole` where they are one range of it.

    Those of other tiles mean nothing; they are cut by `part`.
    """

    def __init__(
        self, buffer: FusedBuffer, blocks: Sequence[Block], counts: Sequence[int], heads: Ints, rows: Ints
    ) -> None:
        """So many tiles (`counts`) of each of the `blocks`; of each tile the head, and count, first and stride."""
        at = {block: n for n, block in enumerate(dict.fromkeys(blocks))}
        self._parts = [{part.heads.start: (part, row) for part, row in buffer.parts(block)} for block in at]
        # Most heads hold the same ranges of rows, and those are looked up together.
        kinds: dict[tuple[StridedRange, ...], int] = {}
        kind, start = np.zeros((2, len(at), int(heads.max(initial=0)) + 1), np.int64)
        for n, parts in enumerate(self._parts):
            for head, (part, row) in parts.items():
                if head < kind.shape[1]:
                    kind[n, head], start[n, head] = kinds.setdefault(part.rows, len(kinds)), row
        self._of, self._heads = np.repeat([at[block] for block in blocks], counts), heads
        count, first, stride = rows.T
        last, kind = first + (count - 1) * stride, kind[self._of, heads]
        packed, self.whole = first.copy(), np.zeros(len(rows), bool)
        for held, number in kinds.items():
            part, mine = HeadRows(ONE, held), kind == number
            if part.dense:
                packed[mine] = part.offsets(first[mine])
                # Ranges do not touch, so from one to the next some rows are missing.
                self.whole[mine] = part.offsets(last[mine]) - packed[mine] == last[mine] - first[mine]
        self.rows = np.stack([packed + start[self._of, heads], np.where(count > 1, stride, 1)], axis=1)

    def part(self, tile: int) -> tuple[HeadRows, int]:
        """What is held of a tile's block and head, and its first row in the buffer."""
        return self._parts[self._of[tile]][int(self._heads[tile])]


Cuts = dict[tuple[object, ...], list[tuple[TokenRange, TokenRange]]]
"""Of a tile and the rows that are held: the ranges of packed rows that it becomes. Most heads have the same."""


def _cut(tile: Tile, q: tuple[HeadRows, int], k: tuple[HeadRows, int], known: Cuts) -> Iterator[Tile]:
    """A tile on packed rows: one for each run of queries and each run of keys that hold some of it."""
    (q_part, q_start), (k_part, k_start) = q, k
    spot = tile.q, tile.k, tile.band, q_part.rows, k_part.rows
    if spot not in known:
        # Packed rows are contiguous only within a held range, so a tile may become several:
        #    q rows 0..9, held as 0..3 and 6..9;  k rows held as 0..9   ->   (0..3 x 0..9) and (6..9 x 0..9)
        ranges = product(_packed_ranges(tile.q, q_part), list(_packed_ranges(tile.k, k_part)))
        # Some combinations lie wholly outside the band.
        known[spot] = [pair for pair in ranges if Tile(*pair, tile.band, ONE).area()]
    for q_range, k_range in known[spot]:
        yield Tile(_moved(q_range, q_start), _moved(k_range, k_start), tile.band, ONE, tile.heads.start)


def _packed_ranges(tokens: TokenRange, part: HeadRows) -> Iterator[TokenRange]:
    (overlaps,) = part.locate([tokens.rows])
    for overlap in overlaps:
        # Positions stay those of the tile, for the band; rows become rows of the packed part.
        yield TokenRange(tokens.positions.pick(overlap.indices), overlap.packed)


def _moved(tokens: TokenRange, rows: int) -> TokenRange:
    return TokenRange(tokens.positions, tokens.rows._replace(start=tokens.rows.start + rows))


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
    touched = {
        now: [one for item in items for one in (*inputs_of(item), *result_of(item))]
        for now, (_, items) in steps.items()
    }
    found: dict[int, ReceivedHeads] = {}
    for _, of_set in sets:
        first, last = of_set[0], of_set[-1]
        carried = [pair for now in of_set for pair in touched[now] if pair[0].kind in CARRIED]
        queries = fused_by_kind(carried, steps[first][0])
        for now in of_set:
            keys = fused_by_kind((pair for pair in touched[now] if pair[0].kind not in CARRIED), steps[now][0])
            found[now] = ReceivedHeads(tuple(steps[now][1]), queries | keys, first, last)
    return found
