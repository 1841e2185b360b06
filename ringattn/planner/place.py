"""Make one rank's plan from its schedule: which buffers exist, in which steps each lives, and what fills and reads it.

Glossary of buffers. A buffer lives from the first to the last step that its row names, both included:
    name        contents                                               lives
    packed      the rank's local rows, gathered into wire order        first send .. last send
    received    the rows of a message                                  its step .. last read or relay
    restored    eight-bit K/V converted to the compute dtype           one step
    sum         dK/dV of another rank's keys                           first work .. sent to the owner
    fused       several of these as slices of one buffer, so that      first slice filled .. last slice read
                one engine call reads them all
    LOCAL       no buffer: the caller's q, k, v and gradients
If all blocks of a fused buffer have the same heads, the buffer has them too. Otherwise it has a single head, and every
row of every head is a separate buffer row. Example: block A with rows 2..4 of head 0 and rows 0..1 of head 1, and block
B with rows 7..8 of head 0:
    buffer row    0 1 2 | 3 4 | 5 6
    holds         A0    | A1  | B0       starts: A 0, B 5
The last part of the module marks which work of a backward pass overwrites rows of dK/dV instead of adding to them.
Not covered: schedules (`ringattn.schedule`), offsets in the arena (`plan.lay_out`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product

import numpy as np

from ringattn.core.geometry import StridedRange, Tile, TokenRange
from ringattn.core.problem import EIGHT_BIT, Problem
from ringattn.core.tiling import ROWS_OF_K, ROWS_OF_Q, Ints, TileTable
from ringattn.errors import PlanError
from ringattn.planner.plan import (
    LOCAL,
    ONE,
    Add,
    AttendOp,
    AttendReceivedOp,
    Buffer,
    Inside,
    OwnSums,
    Pack,
    Plan,
    PlanStep,
    Recv,
    Send,
    Zero,
    lay_out,
    record_elements,
)
from ringattn.schedule.content import (
    NOTHING,
    Content,
    HeadRows,
    chained,
    merge_runs,
    piece_of,
    size,
    union,
    whole,
    without,
)
from ringattn.schedule.ops import INPUTS, Attend, AttendGrad, Block, Copy, HeadTiles, Kind, Merge, Schedule, Step
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


# --- placement of a pass ----------------------------------------------------------------------------------------------


def project(schedule: Schedule, rank: int, keeps: Collection[Block] = ()) -> Plan:
    """Return the plan of `rank`: its steps of the schedule, with every buffer placed.

    `keeps`: received blocks that a forward pass keeps for its backward pass.
    """
    return _Projection(schedule.problem, schedule.restricted_to(rank), rank).plan(keeps)


@dataclass
class _Draft:
    """A plan step under construction; see `PlanStep`."""

    now: int
    packs: list[Pack] = field(default_factory=list)
    zeros: list[Zero] = field(default_factory=list)
    restores: list[Pack] = field(default_factory=list)
    work: list[AttendOp | AttendReceivedOp | Add] = field(default_factory=list)

    def done(self, number: int, sends: list[Send], recvs: list[Recv]) -> PlanStep:
        """Return the finished step."""
        return PlanStep(
            number, tuple(self.packs), tuple(sends), tuple(recvs), tuple(self.zeros), tuple(self.restores),
            tuple(self.work),
        )  # fmt: skip


class _Projection:
    """A walk over one rank's steps that collects its buffers and their lifetimes."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.problem, self.schedule, self.rank = problem, schedule, rank
        # Skip the steps in which this rank does nothing. Lifetimes count the remaining steps; labels keep the number of
        # the step in the schedule.
        self.steps = [(i, step) for i, step in enumerate(schedule.steps) if step.copies or step.work]
        self.buffers: list[Buffer] = []
        # The last step so far that uses each buffer.
        self.last: list[int] = []
        # The buffer with a block's rows at this point of the walk; a later buffer replaces an earlier one.
        self.held: dict[Block, int] = {}
        copies = [copy for _, step in self.steps for copy in step.copies]
        # The rows of each dK/dV sum that this rank returns to the owner. The accumulator of the sum has the same rows.
        # The pieces of a sum are sent in reverse order.
        self.sums = _rows_by_block(
            copy for copy in reversed(copies) if copy.block.kind is Kind.DKV and copy.src == rank
        )
        # All rows of each input block that arrive, in one message or in pieces.
        self.arrivals = _rows_by_block(copy for copy in copies if copy.block.kind in INPUTS and copy.dst == rank)
        # All rows of each local input block that are ever sent: they are packed once.
        sent = (copy for copy in copies if copy.block.kind in INPUTS and copy.src == copy.block.owner == rank)
        self.sent = _rows_by_block(sent, lambda contents: union(dict.fromkeys(contents)))
        self.received = received_by_step({
            now: (index, items)
            for now, (index, step) in enumerate(self.steps)
            if (items := [item for item in step.work if not isinstance(item, Merge) and is_on_received(item)])
        })  # fmt: skip
        # Collect the fused buffers before the walk, so that a message can be received directly into its fused buffer.
        fused = [buffer for received in self.received.values() for buffer in received.fused.values()]
        fused += fused_arrivals(schedule, rank, self.sums)
        self.fused = {block: buffer for buffer in fused for block in buffer.contents}
        self.fused_index: dict[FusedBuffer, int] = {}
        self.parts: dict[int, list[int]] = defaultdict(list)  # of each fused buffer

    def plan(self, keeps: Collection[Block]) -> Plan:
        """Walk all steps and return the finished plan."""
        # In backward, the blocks that the forward pass kept are in the arena from the first step.
        for _, block, content in self.schedule.kept:
            self.held[block] = self._arriving(block, content, f"{block} kept", 0)
        # The order must be the order in which the forward pass keeps the blocks.
        kept = [self.held[block] for _, block, _ in self.schedule.kept]
        steps = tuple(self._step(now, index, step) for now, (index, step) in enumerate(self.steps))
        if not self.schedule.backward:
            # The kept blocks are read again at the end of the pass, when they are copied out of the arena.
            kept = [self._use(self.held[block], len(steps) - 1) for block in keeps]
        # Offsets are assigned last, because only now is the last step of every buffer known.
        used = [buffer._replace(last=last) for buffer, last in zip(self.buffers, self.last, strict=True)]
        buffers, arena_bytes = lay_out(self.problem, used)
        name = self.schedule.name
        plan = Plan(self.problem, name, self.rank, self.schedule.backward, steps, buffers, arena_bytes, tuple(kept))
        return with_overwrites(plan) if self.schedule.backward else plan

    def _step(self, now: int, index: int, step: Step) -> PlanStep:
        draft = _Draft(now)
        # Sends come first, because `_recv` replaces the buffer of its block in `held`.
        sends = [self._send(copy, draft) for copy in step.copies if copy.src == self.rank]
        recvs = [self._recv(copy, now) for copy in step.copies if copy.dst == self.rank]
        work = [item for item in step.work if not isinstance(item, Merge)]
        # A single engine call works on the received queries of all ranks, each in separate rows.
        if now in self.received:
            self._attend_received(self.received[now], draft)
        # dict.fromkeys: each fused buffer once, in the order of the work.
        fused = dict.fromkeys(self.fused[item.kv] for item in work if self._is_fused(item))
        for buffer in fused:
            self._attend_fused(buffer, [item for item in work if item.kv in buffer.contents], draft)
        for item in work:
            if not is_on_received(item) and not self._is_fused(item):
                self._attend(item, draft)
        # A merge is the last read of a received partial result.
        for merge in (item for item in step.work if isinstance(item, Merge)):
            draft.work.append(Add(self._use(self.held[merge.part], now), self._sum(merge.into, draft)))
        return draft.done(index, sends, recvs)

    def _is_fused(self, item: Attend | AttendGrad) -> bool:
        # Local keys are read from the caller's tensors, never from a fused buffer.
        return not is_on_received(item) and item.kv.owner != self.rank and item.kv in self.fused

    def _attend_received(self, received: ReceivedHeads, draft: _Draft) -> None:
        """Add the work on received queries. Local rows are copied into the same buffers, next to the received rows."""
        now, adds, used = draft.now, list[Add](), dict[Kind, int]()
        for kind, buffer in received.fused.items():
            # Queries stay in their buffer. Output gradients are read only in the first step, and results are made only
            # in the last step.
            if (kind is Kind.GRAD_OUT and now > received.first) or (
                kind in (Kind.OUT, Kind.DQ) and now < received.last
            ):
                continue
            for block, content in buffer.contents.items() if kind is not Kind.Q or now == received.first else ():
                # Results are made here, so their parts need a buffer but no source.
                if kind not in INPUTS:
                    result = self._inside(block, content, now)
                    # A sum that has more rows than this work needs a separate buffer.
                    if self.sums.get(block, content) == content:
                        self.held[block] = result
                    else:
                        adds.append(Add(result, self._sum(block, draft)))
                elif block.owner == self.rank:  # round local rows like sent rows, so that all keys of a head are alike
                    local = self._arriving(block, content, f"{block} coded", now)
                    draft.packs.append(Pack(LOCAL, local))
                    self._in_fused(block, local, draft)
                else:
                    self._in_fused(block, self.held[block], draft)
            used[kind] = self._use(self.fused_index[buffer], now)
            for part in self.parts[used[kind]]:
                self._use(part, now)
        if self.schedule.backward:
            draft.zeros.append(self._zeroed(used[Kind.DKV]))
        result, inputs, dkv = (
            used.get(kind, LOCAL) for kind in (Kind.DQ if self.schedule.backward else Kind.OUT, Kind.GRAD_OUT, Kind.DKV)
        )
        tiles = received.tiles(self.problem.group)
        draft.work += [AttendReceivedOp(tiles, used[Kind.Q], used[Kind.KV], result, inputs, dkv), *adds]

    def _attend_fused(self, buffer: FusedBuffer, items: list[Attend | AttendGrad], draft: _Draft) -> None:
        """Add one attention update for all work on a fused buffer."""
        for item in items:
            self._in_fused(item.kv, self.held[item.kv], draft)
        dkv = LOCAL
        if isinstance(items[0], AttendGrad):
            sums = self.fused[items[0].dkv]
            for block, content in sums.contents.items():
                self.held[block] = self._inside(block, content, draft.now)
            dkv = self.fused_index[sums]
            # The sums are slices of one buffer, which is zeroed once as a whole.
            draft.zeros.append(self._zeroed(dkv))
        # Owner None: the tiles name rows of several owners.
        draft.work.append(AttendOp(None, buffer.heads, buffer.tiles(items), self.fused_index[buffer], dkv=dkv))

    def _attend(self, item: Attend | AttendGrad, draft: _Draft) -> None:
        """Add attention updates with local K/V, or with one received block."""
        kv = LOCAL if item.kv.owner == self.rank else self._readable(item.kv, draft)
        dkv = self._sum(item.dkv, draft) if isinstance(item, AttendGrad) else LOCAL
        # Local rows are the same for all heads, so one update of all heads can have the tiles of all parts.
        if kv == dkv == LOCAL and len(item.tiles) > 1:
            tiles = TileTable.together(table for _, table in item.tiles).with_joined_heads()
            draft.work.append(AttendOp(self.rank, StridedRange(0, self.problem.kv_heads), tiles, LOCAL))
        else:
            draft.work += [op for tiles in item.tiles for op in self._attend_ops(item, tiles, kv, dkv)]

    def _in_fused(self, block: Block, held: int, draft: _Draft) -> None:
        """Make a received block readable in its fused buffer: pack or restore it there unless it is there already."""
        self._use(held, draft.now)
        # A block is outside its fused buffer if it is in eight bits, is packed from the local tensors, or has rows that
        # are only relayed.
        if self.buffers[held].inside is None:
            draft.restores.append(Pack(held, self._inside(block, self.fused[block].contents[block], draft.now)))

    def _inside(self, block: Block, content: Content, now: int) -> int:
        """Return a new buffer for a block, inside its fused buffer."""
        buffer = self.fused[block]
        dtype = self._held_dtype(block.kind)
        if buffer not in self.fused_index:
            self.fused_index[buffer] = self._new(buffer.label, buffer.content, dtype, now, block.kind)
        # The new buffer begins at the block's first record in the fused buffer; `lay_out` derives its offset.
        inside = Inside(self._use(self.fused_index[buffer], now), buffer.starts[block] * buffer.heads.count)
        label = f"{block} in {buffer.label}"
        self.parts[inside.buffer].append(self._new(label, content, dtype, now, block.kind, inside))
        return self.parts[inside.buffer][-1]

    def _held_dtype(self, kind: Kind) -> str:
        """Return the dtype in which work reads or makes a block."""
        return self.problem.dtype if kind in INPUTS else self.problem.accumulator_dtype

    def _sent_dtype(self, kind: Kind) -> str:
        if kind is Kind.KV:
            return self.problem.kv_dtype
        narrower = {Kind.DKV: self.problem.wire_dtype, Kind.OUT: self.problem.out_wire_dtype}
        return narrower.get(kind) or self._held_dtype(kind)

    def _new(
        self, label: str, content: Content, dtype: str, now: int, kind: Kind = Kind.KV, inside: Inside | None = None
    ) -> int:
        self.buffers.append(Buffer(label, content, dtype, now, now, kind=kind, inside=inside))
        self.last.append(now)
        return len(self.buffers) - 1

    def _use(self, buffer: int, now: int) -> int:
        # Steps are walked in order, so the latest use is the end of the buffer's life.
        self.last[buffer] = now
        return buffer

    def _readable(self, block: Block, draft: _Draft) -> int:
        """Return the buffer in which this step's work reads a received block: a restored copy of eight-bit K/V."""
        held = self._use(self.held[block], draft.now)
        if self.buffers[held].dtype not in EIGHT_BIT:
            return held
        # The copy lives for this step only, so that at most one block at a time exists in the compute dtype.
        restored = self._new(f"{block} restored", self.buffers[held].content, self.problem.dtype, draft.now)
        draft.restores.append(Pack(held, restored))
        return restored

    def _send(self, copy: Copy, draft: _Draft) -> Send:
        label = f"{copy.block} to rank {copy.dst}"
        kind = copy.block.kind
        dtype = self._sent_dtype(kind)
        # A result is sent by the rank that computed or summed it; an input by its owner or by a relay that holds it.
        if kind not in INPUTS:
            source = self.held[copy.block]
        elif copy.block.owner == self.rank:
            source = self._packed_own(copy, draft)
        else:
            source = self.held[copy.block]
        # Send in place if the rows are contiguous in the held buffer and in the dtype of the wire; else pack a copy:
        #    held rows  [0..3 | 8..11 | 16..19]     send 8..11,16..19: one slice     send 0..3,16..19: packed
        first = piece_of(self.buffers[source].content, copy.content) if source != LOCAL else None
        if first is None or self.buffers[source].dtype != dtype:
            # The pack reads the source in this step, so the source lives at least until this step.
            if source != LOCAL:
                self._use(source, draft.now)
            draft.packs.append(Pack(source, self._new(f"{copy.block} packed", copy.content, dtype, draft.now, kind)))
            source, first = draft.packs[-1].into, 0
        self._use(source, draft.now)
        elements = record_elements(self.problem, dtype, kind)
        return Send(copy.dst, source, first * elements, size(copy.content) * elements, label)

    def _packed_own(self, copy: Copy, draft: _Draft) -> int:
        """Return the buffer with all local rows of a block that are sent, or LOCAL if the copy is not a slice of it."""
        block, rows = copy.block, self.sent[copy.block]
        # All local rows that are sent are packed once, at the first use. Each message is a slice of that buffer.
        if piece_of(rows, copy.content) is None:
            return LOCAL
        if block not in self.held:
            self.held[block] = self._new(f"{block} packed", rows, self._sent_dtype(block.kind), draft.now, block.kind)
            draft.packs.append(Pack(LOCAL, self.held[block]))
        return self.held[block]

    def _recv(self, copy: Copy, now: int) -> Recv:
        label = f"{copy.block} from rank {copy.src}"
        block, whole = copy.block, self.arrivals.get(copy.block, copy.content)
        # The first piece of a block creates the buffer for all pieces. Sums are merged piece by piece.
        if whole == copy.content or block not in self.held:
            self.held[block] = self._arriving(block, whole, label, now)
        buffer = self._use(self.held[block], now)
        first = piece_of(whole, copy.content)
        assert first is not None  # `passes.spread` cuts in wire order
        elements = record_elements(self.problem, self.buffers[buffer].dtype, block.kind)
        return Recv(copy.src, buffer, first * elements, size(copy.content) * elements, label)

    def _arriving(self, block: Block, content: Content, label: str, now: int) -> int:
        """Return the buffer for a received block.

        It is inside the fused buffer if all of its rows are read and need no restoring.
        """
        dtype, fused = self._sent_dtype(block.kind), self.fused.get(block)
        is_whole = fused is not None and fused.contents[block] == content
        if block.kind in INPUTS and is_whole and dtype == self._held_dtype(block.kind):
            return self._inside(block, content, now)
        return self._new(label, content, dtype, now, block.kind)

    def _sum(self, block: Block, draft: _Draft) -> int:
        """Return the accumulator of a partial dK/dV sum, zeroed at its first use; LOCAL for the local block."""
        if block.owner == self.rank:
            return LOCAL
        if block not in self.held:
            dtype = self._held_dtype(block.kind)
            self.held[block] = self._new(f"{block} sum", self.sums[block], dtype, draft.now, block.kind)
            draft.zeros.append(self._zeroed(self.held[block]))
        return self._use(self.held[block], draft.now)

    def _zeroed(self, buffer: int) -> Zero:
        # Zero all rows; `with_overwrites` later removes the rows that the first work overwrites.
        return Zero(buffer, rows_of(self.buffers[buffer]))

    def _attend_ops(self, item: Attend | AttendGrad, tiles: HeadTiles, kv: int, dkv: int) -> Iterable[AttendOp]:
        """Yield an attention update for each distance between a key's rows in `kv` and `dkv`.

        If the two contents are equal, there is only one update.
        """
        # A tile reads K/V and adds to dK/dV with one row number and one stride; the two may begin at different rows.
        alike = isinstance(item, Attend) or kv == dkv
        alike = alike or (LOCAL not in (kv, dkv) and self.buffers[kv].content == self.buffers[dkv].content)
        parts = [self._part(buffer, tiles) for buffer in ((kv,) if alike else (kv, dkv))]
        # Cut the tiles so that each is in one range of both contents.
        table = within_runs(tiles.tiles, parts)
        rows, steps = packed_rows(table, parts[0])
        owner, heads = item.kv.owner, tiles.heads
        # With equal contents, a packed row has the same number in both buffers.
        if alike:
            yield AttendOp(owner, heads, table.replaced(k_row=rows, k_row_stride=steps), kv, dkv=dkv)
            return
        dkv_rows, dkv_steps = packed_rows(table, parts[1])
        # If the steps are equal, all tiles with the same distance between the two rows form one update, with rows
        # counted from the base:
        #    kv rows   4 5 6 7      base 4, tile rows 0 1 2 3
        #    dkv rows  9 10 11 12   base 4 + 5
        even = steps == dkv_steps
        for distance in np.unique((dkv_rows - rows)[even]).tolist():
            chosen = even & (dkv_rows - rows == distance)
            # Rows count from the smallest row, so that no row of the view is negative.
            base = int(rows[chosen].min())
            part = table.take(chosen).replaced(k_row=rows[chosen] - base, k_row_stride=steps[chosen])
            yield AttendOp(owner, heads, part, kv, base, dkv, base + distance)
        # With unequal steps, each tile is a separate update on views of every steps-th row.
        for n in np.flatnonzero(~even).tolist():
            single = table.take([n]).replaced(k_row=0, k_row_stride=1)
            yield AttendOp(
                owner, heads, single, kv, int(rows[n]), dkv, int(dkv_rows[n]), int(steps[n]), int(dkv_steps[n])
            )

    def _part(self, buffer: int, tiles: HeadTiles) -> HeadRows | None:
        """Return the part of a buffer's content that the tiles read; None for LOCAL, whose rows are not packed."""
        if buffer == LOCAL:
            return None
        return next(part for part in self.buffers[buffer].content if part.heads == tiles.heads)


def _pieces_in_order(contents: list[Content]) -> Content:
    return contents[0] if len(contents) == 1 else chained(part for content in contents for part in content)


def _rows_by_block(
    copies: Iterable[Copy], joined: Callable[[list[Content]], Content] = _pieces_in_order
) -> dict[Block, Content]:
    """Return the rows of each block that these copies carry."""
    contents: dict[Block, list[Content]] = defaultdict(list)
    for copy in copies:
        contents[copy.block].append(copy.content)
    return {block: joined(pieces) for block, pieces in contents.items()}


# --- which work of a backward pass overwrites dK/dV rows, and which finishes them ------------------------------------
# Each row is set by exactly one `Zero`, or by one work item marked `overwrite`, before anything else reads it or adds
# to it. A work item is marked only if that holds for all of its rows. The engine then sets every key row of the item's
# tiles, so a row that no query attends to becomes zero. Kernel blocks are not considered here.


Work = AttendOp | AttendReceivedOp | Add


def rows_of(buffer: Buffer) -> Content:
    """Return all rows of a buffer, counted from the buffer's first row."""
    return tuple(whole_part for part in buffer.content for whole_part in whole(part.row_count, [part.heads]))


def with_overwrites(plan: Plan) -> Plan:
    """Mark the work items of a backward plan that overwrite dK/dV rows or add to them last.

    Only the rows that no work item overwrites are zeroed.
    """
    steps = [_mark_buffers(plan, step) for step in plan.steps]
    return _mark_local(replace(plan, steps=tuple(steps)))


def _mark_buffers(plan: Plan, step: PlanStep) -> PlanStep:
    """Mark the work items of a step that overwrite rows of the buffers that the step zeroes."""
    if not step.zeros:
        return step
    work, zeros = list(step.work), []
    for zero in step.zeros:
        # Received sums are added after the step's attention work, so they never overwrite.
        writers = [n for n, item in enumerate(work) if not isinstance(item, Add) and item.dkv == zero.buffer]
        set_rows = [_rows_set(plan.problem, work[n]) for n in writers]
        all_set = union(set_rows)
        # If two work items share a row, neither can overwrite all of its rows, in whatever order they run.
        if sum(map(size, set_rows)) == size(all_set):
            for n in writers:
                work[n] = work[n]._replace(overwrite=True)
            zero = zero._replace(rows=without(zero.rows, all_set))
        if zero.rows:
            zeros.append(zero)
    return step._replace(zeros=tuple(zeros), work=tuple(work))


def _mark_local(plan: Plan) -> Plan:
    """Mark the work items that overwrite the rank's local dK/dV rows, if such items set all local rows.

    If all work on local rows is attention updates that overwrite, each of them is also the last on its rows.
    """
    problem, already_set, only_overwrites = plan.problem, NOTHING, True
    works = {
        (now, n): item for now, step in enumerate(plan.steps) for n, item in enumerate(step.work)
        if _adds_to_local(plan, item)
    }  # fmt: skip
    adds = [
        plan.buffers[item.part].content if isinstance(item, Add) else _rows_set(problem, item)
        for item in works.values()
    ]
    marked: dict[tuple[int, int], Work] = {}
    for (key, item), rows in zip(works.items(), _with_equal_parts(adds), strict=True):
        both = union((already_set, rows))
        if size(both) == size(already_set) + size(rows):
            marked[key] = item._replace(overwrite=True)
        elif size(both) > size(already_set):
            return plan  # this work touches both rows that are set and rows that are not
        only_overwrites, already_set = only_overwrites and key in marked and isinstance(item, AttendOp), both
    if size(already_set) < problem.kv_layout.counts[plan.rank] * problem.kv_heads:
        return plan
    if only_overwrites:
        marked = {key: item._replace(last=True) for key, item in marked.items()}  # type: ignore[call-arg]
    steps = [
        step._replace(work=tuple(marked.get((now, n), item) for n, item in enumerate(step.work)))
        for now, step in enumerate(plan.steps)
    ]
    return replace(plan, steps=tuple(steps), own_sums=OwnSums.NONE if only_overwrites else OwnSums.UNSET)


def _with_equal_parts(contents: list[Content]) -> Iterator[Content]:
    """Yield the same rows with the head parts of each content cut at the borders of all contents."""
    #    content A   heads |0 1|2 3|
    #    content B   heads |0|1 2 3|       parts 0, 1, 2..3
    borders = sorted({edge for content in contents for heads, _ in content for edge in (heads.start, heads.stop)})
    for content in contents:
        yield tuple(
            HeadRows(StridedRange(first, end - first), rows)
            for heads, rows in content
            for first, end in pairwise(borders)
            if heads.start <= first < heads.stop
        )


def _adds_to_local(plan: Plan, item: Work) -> bool:
    """Return whether a work item adds to the rank's local dK and dV."""
    if isinstance(item, Add):
        return item.into == LOCAL and plan.buffers[item.part].kind is Kind.DKV
    return isinstance(item, AttendOp) and item.dkv == LOCAL


def _rows_set(problem: Problem, item: Work) -> Content:
    """Return the rows of the dK/dV buffer that the tiles of a work item contain, for each head part of the buffer."""
    assert not isinstance(item, Add)
    if isinstance(item, AttendReceivedOp):
        return _content([(ONE, item.tiles)])
    first, step = item.dkv_row, item.dkv_step
    tiles = item.tiles
    moved = tiles.replaced(k_row=first + tiles.k_row * step, k_row_stride=tiles.k_row_stride * step)
    if item.owner is None or item.dkv != LOCAL:
        return _content([(item.heads, moved)])
    # Tiles on local tensors may belong to several head parts; each part reads its K/V heads whole (`Mask.parts`).
    heads, end = tiles.head, tiles.head + tiles.heads
    return _content(
        (part.kv_heads, moved.take(np.flatnonzero((heads < part.q_heads.stop) & (end > part.q_heads.start))))
        for part in problem.parts
    )


def _content(parts: Iterable[tuple[StridedRange, TileTable]]) -> Content:
    merged = (HeadRows(heads, merge_runs(table.k_runs())) for heads, table in parts)
    return tuple(part for part in merged if part.rows)
