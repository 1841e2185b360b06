"""Fused buffers: several blocks as slices of one buffer, so that one engine call reads them all.

If all blocks of a fused buffer have the same heads, the buffer has them too. Otherwise it has a single head, and every
row of every head is a separate buffer row. Example: block A with rows 2..4 of head 0 and rows 0..1 of head 1, and block
B with rows 7..8 of head 0:
    buffer row    0 1 2 | 3 4 | 5 6
    holds         A0    | A1  | B0       starts: A 0, B 5
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import numpy as np

from ringattn.core.geometry import StridedRange, Tile, TokenRange
from ringattn.core.problem import EIGHT_BIT
from ringattn.core.tiling import ROWS_OF_K, ROWS_OF_Q, Ints, TileTable
from ringattn.errors import PlanError
from ringattn.planner.plan import ONE
from ringattn.schedule.content import Content, HeadRows, union
from ringattn.schedule.ops import Attend, AttendGrad, Block, Kind, Merge, Schedule
from ringattn.schedule.passes import inputs_of, is_on_received, result_of

# --- buffers of fused steps -------------------------------------------------------------------------------------------


class FusedBuffer:
    """A buffer for several blocks of one kind.

    `heads`: those of every part of the contents, or `ONE` if each part has a single head, whichever it is.
    """

    def __init__(self, label: str, kind: Kind, contents: Mapping[Block, Content], heads: StridedRange = ONE) -> None:
        """Place the blocks in the order of `contents`."""
        self.label, self.kind, self.contents, self.heads = label, kind, contents, heads
        counts = (sum(part.row_count for part in content) for content in contents.values())
        rows = list(accumulate(counts, initial=0))
        # `rows` has one entry more than there are blocks: the last is the size of the buffer.
        self.starts = dict(zip(contents, rows, strict=False))
        self.content: Content = (HeadRows(heads, (StridedRange(0, rows[-1]),)),)

    def parts(self, block: Block) -> Iterator[tuple[HeadRows, int]]:
        """Yield each part of a block with its first row in the buffer."""
        start = self.starts[block]
        for part in self.contents[block]:
            yield part, start
            # Parts follow one another as in a message, so a message is received directly into the block's slice.
            start += part.row_count

    def tiles(self, items: Iterable[Attend | AttendGrad]) -> TileTable:
        """Return the tiles of all work on the buffer's blocks, with keys as rows of the buffer."""
        tables = []
        for item in items:
            parts = {part.heads: (part, row) for part, row in self.parts(item.kv)}
            for heads, table in item.tiles:
                part, first = parts[heads]
                # Keys become buffer rows: the row in the packed part, plus the part's first row.
                cut = within_runs(table, [part])
                rows, steps = packed_rows(cut, part)
                tables.append(cut.replaced(k_row=rows + first, k_row_stride=steps))
        return TileTable.together(tables)


def has_single_heads(content: Content) -> bool:
    """Return whether every part has exactly one head."""
    return all(part.heads.count == 1 for part in content)


def heads_of_fused(contents: Collection[Content]) -> StridedRange | None:
    """Return the heads of a buffer for all of these contents, or None if no buffer can hold them."""
    if all(map(has_single_heads, contents)):
        return ONE
    heads = {tuple(part.heads for part in content) for content in contents}
    parts = heads.pop()
    # A single block without single heads is already read by one engine call.
    return parts[0] if not heads and len(parts) == 1 and len(contents) > 1 else None


def fused_arrivals(schedule: Schedule, rank: int, sums: Mapping[Block, Content]) -> Iterator[FusedBuffer]:
    """Yield fused buffers for K/V that arrive at `rank` in the same step and are read in the same step.

    In a backward pass, each fused buffer of K/V is followed by the fused buffer of its dK/dV sums, and the rows of each
    block must equal its rows in `sums`, the rows that are returned to the owners.
    """
    steps = schedule.restricted_to(rank).steps
    work = [(now, item) for now, step in enumerate(steps) for item in step.work if not isinstance(item, Merge)]
    # Local keys are read from the caller's tensors; work on received queries has separate fused buffers.
    reads = {item.kv: (now, item) for now, item in work if item.kv.owner != rank and not is_on_received(item)}
    # Kept blocks are present before step 0 and count as received in step -1.
    received = [
        (now, copy.block, copy.content) for now, step in enumerate(steps) for copy in step.copies if copy.dst == rank
    ]
    received += [(-1, block, content) for holder, block, content in schedule.kept if holder == rank]
    # If received dK/dV is merged into a sum before this rank's own work adds to it, the sum has a separate buffer by
    # then, so its block is not fused.
    merged = {item.into: now for now, step in reversed(list(enumerate(steps))) for item in step.work
              if isinstance(item, Merge)}  # fmt: skip
    reads = {
        kv: (now, item) for kv, (now, item) in reads.items()
        if isinstance(item, Attend) or merged.get(item.dkv, now) >= now
    }  # fmt: skip
    messages = Counter(block for _, block, _ in received)
    # Group by (step received, step read): only such blocks live and are read at the same time. A block that arrives in
    # pieces is left out, because no single step receives all of it.
    groups: dict[tuple[int, int], dict[Block, Content]] = defaultdict(dict)
    for arrival, block, content in received:
        if block in reads and messages[block] == 1:
            groups[arrival, reads[block][0]][block] = content
    for (arrival, _), contents in groups.items():
        items = [reads[block][1] for block in contents]
        # Backward reads K/V and adds dK/dV at the same row numbers, so both contents must be equal, block by block.
        grads = {item.dkv: sums.get(item.dkv) for item in items if isinstance(item, AttendGrad)}
        rows_alike = not grads or list(grads.values()) == list(contents.values())
        heads = heads_of_fused(contents.values())
        # Eight-bit blocks with many heads are restored and read one after another, which needs less memory.
        one_by_one = heads != ONE and schedule.problem.kv_dtype in EIGHT_BIT
        if heads is not None and rows_alike and not one_by_one:
            yield FusedBuffer(f"KV of step {arrival}", Kind.KV, contents, heads)
            if grads:
                summed = dict(zip(grads, contents.values(), strict=True))
                yield FusedBuffer(f"DKV of step {arrival}", Kind.DKV, summed, heads)


# --- tiles on packed rows --------------------------------------------------------------------------------------------


def within_runs(table: TileTable, parts: Iterable[HeadRows | None]) -> TileTable:
    """Cut the tiles so that the key rows of each tile are in one range of each of the parts."""
    for part in parts:
        # Contiguous keys are in one of the merged contiguous ranges, so there is nothing to cut.
        if part is not None and not (part.dense and (table.k_row_stride == 1).all()):
            # Make one tile for each held range that has some of the tile's keys.
            by_tile = part.locate(table.k_runs())
            table = TileTable.of(
                [
                    tile._replace(k=tile.k.pick(overlap.indices))
                    for tile, overlaps in zip(table, by_tile, strict=True)
                    for overlap in overlaps
                ]
            )
    return table


def packed_rows(table: TileTable, part: HeadRows | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first key row and the row step of each tile as rows of the part.

    One range of the part must hold all key rows of a tile.
    """
    rows, steps = table.k_row, table.k_row_stride
    if part is None:
        return rows, steps
    # If the part is dense, the first row determines the packed row, and the stride is unchanged. Else the overlap has
    # both.
    if part.dense:
        return part.offsets(rows), steps
    packed = [overlap.packed for (overlap,) in part.locate(table.k_runs())]
    return np.array([run.start for run in packed], np.int64), np.array([run.stride for run in packed], np.int64)


# --- work on received queries ----------------------------------------------------------------------------------------
# Each kind of block that this work reads or makes, local blocks included, has one fused buffer.
# Queries stay for all steps that use them; keys stay for one step:
#       step      1                       2                    3
#       queries   Q0 Q1  state starts     Q0 Q1                Q0 Q1  results OUT0 OUT1
#       keys      KV0 KV1                 KV2 KV3              KV4 KV5


CARRIED = Kind.Q, Kind.GRAD_OUT, Kind.OUT, Kind.DQ
"""Kinds of blocks that have one row per query."""


Blocks = Iterable[tuple[Block, Content]]
"""Blocks that work reads or makes, each with its rows."""


def fused_by_kind(blocks: Blocks, step: int) -> dict[Kind, FusedBuffer]:
    """Return a fused buffer for each kind of block; each block in it has the union of all its listed rows."""
    contents: dict[Block, list[Content]] = defaultdict(list)
    for block, rows in blocks:
        contents[block].append(rows)
    by_kind: dict[Kind, dict[Block, Content]] = defaultdict(dict)
    for block in sorted(contents):
        by_kind[block.kind][block] = union(dict.fromkeys(contents[block]))
        if not has_single_heads(by_kind[block.kind][block]):
            raise PlanError(f"{block} is received, so its content must have a part for every head")
    return {kind: FusedBuffer(f"{kind} received for step {step}", kind, content) for kind, content in by_kind.items()}


@dataclass(frozen=True)
class ReceivedHeads:
    """A rank's work on received queries in one step, and the fused buffers of the blocks that it reads and makes.

    Plan steps `first` to `last` work on the same queries. The queries arrive before the first step. Their state (a
    softmax state, or dQ) is initialized once, and is a result after the last step. `items`: all work of this step.
    """

    items: tuple[Attend | AttendGrad, ...]
    fused: dict[Kind, FusedBuffer]
    first: int
    last: int

    def tiles(self, group: int) -> TileTable:
        """Return all work as tiles of one head on the rows of the fused buffers. `group`: query heads per K/V head.

        `first_head` of a tile is its query head in the call, and its positions are the positions of its tokens.
        """
        tables = [(item, table) for item in self.items for _, table in item.tiles]
        counts = [len(table) for _, table in tables]
        tiles = TileTable.together(table for _, table in tables)
        # Query head h reads K/V head h // group.
        heads, array = tiles.head, tiles.array
        q_blocks, kv_blocks = [item.q for item, _ in tables], [item.kv for item, _ in tables]
        q = PackedRows(self.fused[Kind.Q], q_blocks, counts, heads, array[:, ROWS_OF_Q])
        k = PackedRows(self.fused[Kind.KV], kv_blocks, counts, heads // group, array[:, ROWS_OF_K])
        # The fused buffers have a single head.
        (q_row, q_row_stride), (k_row, k_row_stride) = q.rows.T, k.rows.T
        packed = tiles.replaced(
            q_row=q_row, q_row_stride=q_row_stride, k_row=k_row, k_row_stride=k_row_stride, head=ONE.start,
            heads=ONE.count, first_head=heads,
        )  # fmt: skip
        whole = q.whole & k.whole
        if whole.all():
            return packed
        cuts: Cuts = {}
        pieces = [packed.take(whole)]
        sources = [np.flatnonzero(whole)]
        for index in np.flatnonzero(~whole).tolist():
            (tile,) = tiles.take([index])
            pieces.append(TileTable.of(list(_cut(tile, q.part(index), k.part(index), cuts))))
            sources.append(np.full(len(pieces[-1]), index))
        return TileTable.together(pieces).take(np.argsort(np.concatenate(sources), kind="stable"))


class PackedRows:
    """The rows of tiles in a fused buffer: for each tile the first row and the row stride.

    They are valid where `whole` says that one range of the buffer holds all rows of the tile. Other tiles must be cut
    by their `part`.
    """

    def __init__(
        self, buffer: FusedBuffer, blocks: Sequence[Block], counts: Sequence[int], heads: Ints, rows: Ints
    ) -> None:
        """Look up the tiles. `counts`: tiles of each of `blocks`. `rows`: count, first row and stride of each tile."""
        indices = {block: n for n, block in enumerate(dict.fromkeys(blocks))}
        self._parts = [{part.heads.start: (part, row) for part, row in buffer.parts(block)} for block in indices]
        # Most heads hold the same ranges of rows; look up all tiles with equal ranges in one operation.
        kinds: dict[tuple[StridedRange, ...], int] = {}
        kind, start = np.zeros((2, len(indices), int(heads.max(initial=0)) + 1), np.int64)
        for n, parts in enumerate(self._parts):
            for head, (part, row) in parts.items():
                if head < kind.shape[1]:
                    kind[n, head], start[n, head] = kinds.setdefault(part.rows, len(kinds)), row
        self._block, self._heads = np.repeat([indices[block] for block in blocks], counts), heads
        count, first, stride = rows.T
        last, kind = first + (count - 1) * stride, kind[self._block, heads]
        packed, self.whole = first.copy(), np.zeros(len(rows), bool)
        for ranges, number in kinds.items():
            part, tiles = HeadRows(ONE, ranges), kind == number
            if part.dense:
                packed[tiles] = part.offsets(first[tiles])
                # Ranges do not touch, so rows are missing between any two of them.
                self.whole[tiles] = part.offsets(last[tiles]) - packed[tiles] == last[tiles] - first[tiles]
        self.rows = np.stack([packed + start[self._block, heads], np.where(count > 1, stride, 1)], axis=1)

    def part(self, tile: int) -> tuple[HeadRows, int]:
        """Return the part that the buffer holds of a tile's block and head, and the part's first row in the buffer."""
        return self._parts[self._block[tile]][int(self._heads[tile])]


Cuts = dict[tuple[object, ...], list[tuple[TokenRange, TokenRange]]]
"""The ranges of packed rows that a tile is cut into, by tile and held rows. Most heads share one entry."""


def _cut(tile: Tile, q: tuple[HeadRows, int], k: tuple[HeadRows, int], cuts: Cuts) -> Iterator[Tile]:
    """Yield the tile on packed rows: one tile for each pair of a query range and a key range that hold parts of it.

    `q`, `k`: the parts of the buffers that hold the tile's queries and keys, each with its first row in the buffer.
    """
    (q_part, q_start), (k_part, k_start) = q, k
    key = tile.q, tile.k, tile.band, q_part.rows, k_part.rows
    if key not in cuts:
        # Packed rows are contiguous only within a held range, so a tile may become several:
        #    q rows 0..9, held as 0..3 and 6..9;  k rows held as 0..9   ->   (0..3 x 0..9) and (6..9 x 0..9)
        ranges = product(_packed_ranges(tile.q, q_part), list(_packed_ranges(tile.k, k_part)))
        # Leave out the combinations that are completely outside the band.
        cuts[key] = [pair for pair in ranges if Tile(*pair, tile.band, ONE).area()]
    for q_range, k_range in cuts[key]:
        yield Tile(_moved(q_range, q_start), _moved(k_range, k_start), tile.band, ONE, tile.heads.start)


def _packed_ranges(tokens: TokenRange, part: HeadRows) -> Iterator[TokenRange]:
    (overlaps,) = part.locate([tokens.rows])
    for overlap in overlaps:
        # Positions stay as in the tile, because the band applies to them; rows become rows of the packed part.
        yield TokenRange(tokens.positions.pick(overlap.indices), overlap.packed)


def _moved(tokens: TokenRange, rows: int) -> TokenRange:
    return TokenRange(tokens.positions, tokens.rows._replace(start=tokens.rows.start + rows))


def received_by_step(steps: Mapping[int, tuple[int, Sequence[Attend | AttendGrad]]]) -> dict[int, ReceivedHeads]:
    """Return the work on received queries by plan step. `steps`: for each plan step its schedule number and work.

    Steps that have a block of queries in common work on the same set of queries.
    """
    # Sets of query blocks, each with the steps that work on it.
    sets: list[tuple[set[Block], list[int]]] = []
    for now, (_, items) in steps.items():
        blocks, set_steps = {item.q for item in items}, [now]
        for joined in [entry for entry in sets if entry[0] & blocks]:
            sets.remove(joined)
            blocks, set_steps = blocks | joined[0], joined[1] + set_steps
        sets.append((blocks, sorted(set_steps)))
    touched = {
        now: [pair for item in items for pair in (*inputs_of(item), *result_of(item))]
        for now, (_, items) in steps.items()
    }
    by_step: dict[int, ReceivedHeads] = {}
    for _, set_steps in sets:
        first, last = set_steps[0], set_steps[-1]
        carried = [pair for now in set_steps for pair in touched[now] if pair[0].kind in CARRIED]
        queries = fused_by_kind(carried, steps[first][0])
        for now in set_steps:
            keys = fused_by_kind((pair for pair in touched[now] if pair[0].kind not in CARRIED), steps[now][0])
            by_step[now] = ReceivedHeads(tuple(steps[now][1]), queries | keys, first, last)
    return by_step
