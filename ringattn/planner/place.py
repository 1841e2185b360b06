"""From one rank's schedule to its plan: which buffers exist, in which steps each lives, and what reads and fills it.

Glossary of buffers. A buffer lives from the first to the last step of its row, both included:
    name        contents                                               lives
    packed      the rank's own rows, gathered into wire order          first send .. last send
    received    the rows of a message                                  its step .. last read or forward
    restored    eight-bit K/V converted to the compute dtype           one step
    sum         dK/dV of another rank's keys                           first work .. sent to the owner
    fused       several of these as slices of one buffer, so that      first slice filled .. last slice read
                one engine call reads them all
    LOCAL       no buffer: the caller's q, k, v and gradients
In a fused buffer each row of a head is a row, and the buffer has a single head. Block A with rows 2..4 of head 0 and
rows 0..1 of head 1, and block B with rows 7..8 of head 0, lie so:
    buffer row    0 1 2 | 3 4 | 5 6
    holds         A0    | A1  | B0       starts: A 0, B 5
The second half marks which work of a backward pass overwrites the rows of dK/dV instead of adding to them.
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


# --- placement of a pass ----------------------------------------------------------------------------------------------


def project(schedule: Schedule, rank: int, keeps: Collection[Block] = ()) -> Plan:
    """The plan of `rank`: its steps of the schedule, with every buffer placed.

    `keeps`: received blocks that a forward pass hands on to its backward pass.
    """
    return _Projection(schedule.problem, schedule.restricted_to(rank), rank).plan(keeps)


@dataclass
class _Draft:
    """A step of the plan being built; see `PlanStep`."""

    now: int
    packs: list[Pack] = field(default_factory=list)
    zeros: list[Zero] = field(default_factory=list)
    restores: list[Pack] = field(default_factory=list)
    work: list[AttendOp | AttendReceivedOp | Add] = field(default_factory=list)

    def done(self, number: int, sends: list[Send], recvs: list[Recv]) -> PlanStep:
        """The step."""
        return PlanStep(
            number, tuple(self.packs), tuple(sends), tuple(recvs), tuple(self.zeros), tuple(self.restores),
            tuple(self.work),
        )  # fmt: skip


class _Projection:
    """Walks one rank's steps once and collects buffers and their lifetimes."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.problem, self.schedule, self.rank = problem, schedule, rank
        # Steps without a part of this rank are left out. Lifetimes count what is left; labels keep the number.
        self.steps = [(i, step) for i, step in enumerate(schedule.steps) if step.copies or step.work]
        self.buffers: list[Buffer] = []
        # The buffer with a block's rows at this point of the walk; a later one takes the place of an earlier.
        self.held: dict[Block, int] = {}
        copies = [copy for _, step in self.steps for copy in step.copies]
        # The rows of each dK/dV sum that this rank returns: the size of its accumulator. Pieces return in reverse.
        self.sums = _rows_by_block(
            copy for copy in reversed(copies) if copy.block.kind is Kind.DKV and copy.src == rank
        )
        # All rows of each input block that arrive, in one message or in pieces.
        self.arrivals = _rows_by_block(copy for copy in copies if copy.block.kind in INPUTS and copy.dst == rank)
        # All rows of each own input block that are ever sent: they are packed once.
        own = (copy for copy in copies if copy.block.kind in INPUTS and copy.src == copy.block.owner == rank)
        self.own = _rows_by_block(own, lambda contents: union(dict.fromkeys(contents)))
        self.received = received_by_step({
            now: (index, items)
            for now, (index, step) in enumerate(self.steps)
            if (items := [item for item in step.work if not isinstance(item, Merge) and is_on_received(item)])
        })  # fmt: skip
        # Known before the walk, so that a message can be received inside its fused buffer at once.
        fused = [buffer for received in self.received.values() for buffer in received.fused.values()]
        fused += fused_arrivals(schedule, rank, self.sums)
        self.fused = {block: buffer for buffer in fused for block in buffer.contents}
        self.fused_index: dict[str, int] = {}
        self.parts: dict[int, list[int]] = defaultdict(list)  # of each fused buffer

    def plan(self, keeps: Collection[Block]) -> Plan:
        """The finished plan."""
        # What the forward pass kept is in the arena from the first step on.
        for _, block, content in self.schedule.kept:
            self.held[block] = self._arriving(block, content, f"{block} kept", 0)
        # Their order is that of the bytes which the forward pass hands on.
        kept = [self.held[block] for _, block, _ in self.schedule.kept]
        steps = tuple(self._step(now, index, step) for now, (index, step) in enumerate(self.steps))
        if not self.schedule.backward:
            # Read once more when the pass ends, to be copied out.
            kept = [self._use(self.held[block], len(steps) - 1) for block in keeps]
        # Offsets come last: only now is the end of every life known.
        buffers, arena_bytes = lay_out(self.problem, self.buffers)
        name = self.schedule.name
        plan = Plan(self.problem, name, self.rank, self.schedule.backward, steps, buffers, arena_bytes, tuple(kept))
        return with_visits(plan) if self.schedule.backward else plan

    def _step(self, now: int, index: int, step: Step) -> PlanStep:
        draft = _Draft(now)
        # Sends first: `_recv` enters a new buffer for its block in `held`.
        sends = [self._send(copy, draft) for copy in step.copies if copy.src == self.rank]
        recvs = [self._recv(copy, now) for copy in step.copies if copy.dst == self.rank]
        work = [item for item in step.work if not isinstance(item, Merge)]
        # Received queries of all ranks are one call of the engine, with rows of its own.
        if now in self.received:
            self._attend_received(self.received[now], draft)
        # dict.fromkeys: each fused buffer once, in the order of the work.
        fused = dict.fromkeys(self.fused[item.kv] for item in work if self._is_fused(item))
        for buffer in fused:
            self._attend_fused(buffer, [item for item in work if item.kv in buffer.contents], draft)
        for item in work:
            if not is_on_received(item) and not self._is_fused(item):
                self._attend(item, draft)
        # The received part is read for the last time here.
        for merge in (item for item in step.work if isinstance(item, Merge)):
            draft.work.append(Add(self._use(self.held[merge.part], now), self._sum(merge.into, draft)))
        return draft.done(index, sends, recvs)

    def _is_fused(self, item: Attend | AttendGrad) -> bool:
        # Own keys are read in the caller's tensors, never in a fused buffer.
        return not is_on_received(item) and item.kv.owner != self.rank and item.kv in self.fused

    def _attend_received(self, received: ReceivedHeads, draft: _Draft) -> None:
        """The work on received queries; the rank's own rows are put beside the received ones in the same buffers."""
        now, apart, used = draft.now, list[Add](), dict[Kind, int]()
        for kind, buffer in received.fused.items():
            # Queries stay; what they carry begins from the output gradients and is a result in the last step.
            if (kind is Kind.GRAD_OUT and now > received.first) or (
                kind in (Kind.OUT, Kind.DQ) and now < received.last
            ):
                continue
            for block, content in buffer.contents.items() if kind is not Kind.Q or now == received.first else ():
                # Results are made here, so their parts need a place and no source.
                if kind not in INPUTS:
                    made = self._inside(block, content, now)
                    # Sums of more rows than are read here lie by themselves.
                    if self.sums.get(block, content) == content:
                        self.held[block] = made
                    else:
                        apart.append(Add(made, self._sum(block, draft)))
                elif block.owner == self.rank:  # rounded as what is sent, so that all keys of a head are alike
                    own = self._arriving(block, content, f"{block} coded", now)
                    draft.packs.append(Pack(LOCAL, own))
                    self._in_fused(block, own, draft)
                else:
                    self._in_fused(block, self.held[block], draft)
            used[kind] = self._use(self.fused_index[buffer.label], now)
            for part in self.parts[used[kind]]:
                self._use(part, now)
        if self.schedule.backward:
            draft.zeros.append(self._zeroed(used[Kind.DKV]))
        result, inputs, dkv = (
            used.get(kind, LOCAL) for kind in (Kind.DQ if self.schedule.backward else Kind.OUT, Kind.GRAD_OUT, Kind.DKV)
        )
        tiles = received.tiles(self.problem.group)
        draft.work += [AttendReceivedOp(tiles, used[Kind.Q], used[Kind.KV], result, inputs, dkv), *apart]

    def _attend_fused(self, buffer: FusedBuffer, items: list[Attend | AttendGrad], draft: _Draft) -> None:
        """One attention update for all work on a fused buffer."""
        for item in items:
            self._in_fused(item.kv, self.held[item.kv], draft)
        dkv = LOCAL
        if isinstance(items[0], AttendGrad):
            sums = self.fused[items[0].dkv]
            for block, content in sums.contents.items():
                self.held[block] = self._inside(block, content, draft.now)
            dkv = self.fused_index[sums.label]
            # The sums are slices of one buffer: it is zeroed once, whole.
            draft.zeros.append(self._zeroed(dkv))
        # Owner None: rows of several owners, each of a single head, named by the tiles.
        draft.work.append(AttendOp(None, ONE, buffer.tiles(items), self.fused_index[buffer.label], dkv=dkv))

    def _attend(self, item: Attend | AttendGrad, draft: _Draft) -> None:
        """Attention updates with local K/V, or with one received block."""
        kv = LOCAL if item.kv.owner == self.rank else self._readable(item.kv, draft)
        dkv = self._sum(item.dkv, draft) if isinstance(item, AttendGrad) else LOCAL
        # Local rows are the same for all heads, so tiles of all parts fit one update of all heads.
        if kv == dkv == LOCAL and len(item.tiles) > 1:
            tiles = TileTable.together(table for _, table in item.tiles).with_joined_heads()
            draft.work.append(AttendOp(self.rank, StridedRange(0, self.problem.kv_heads), tiles, LOCAL))
        else:
            draft.work += [op for tiles in item.tiles for op in self._attend_ops(item, tiles, kv, dkv)]

    def _in_fused(self, block: Block, held: int, draft: _Draft) -> None:
        """Have a received block read in its fused buffer: it lies there, or is packed or restored into it."""
        self._use(held, draft.now)
        # It was received outside: in eight bits, packed from the own tensors, or with rows that are only relayed.
        if self.buffers[held].inside is None:
            draft.restores.append(Pack(held, self._inside(block, self.fused[block].contents[block], draft.now)))

    def _inside(self, block: Block, content: Content, now: int) -> int:
        """A new buffer for a block, inside its fused buffer."""
        buffer = self.fused[block]
        dtype = self._held_dtype(block.kind)
        if buffer.label not in self.fused_index:
            self.fused_index[buffer.label] = self._new(buffer.label, buffer.content, dtype, now, block.kind)
        # A part of the fused buffer from its first row on; the arena derives its offset.
        place = Inside(self._use(self.fused_index[buffer.label], now), buffer.starts[block])
        self.parts[place.buffer].append(self._new(f"{block} in {buffer.label}", content, dtype, now, block.kind, place))
        return self.parts[place.buffer][-1]

    def _held_dtype(self, kind: Kind) -> str:
        """The dtype in which work reads or makes a block."""
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
        return len(self.buffers) - 1

    def _use(self, buffer: int, now: int) -> int:
        # Steps are walked in order, so the last use seen is the end of the buffer's life.
        if self.buffers[buffer].last != now:
            self.buffers[buffer] = self.buffers[buffer]._replace(last=now)
        return buffer

    def _readable(self, block: Block, draft: _Draft) -> int:
        """The buffer in which this step's work reads an arrived block: where it lies, or restored from eight bits."""
        held = self._use(self.held[block], draft.now)
        if self.buffers[held].dtype not in EIGHT_BIT:
            return held
        # For this step alone: one block at a time is there in the compute dtype.
        restored = self._new(f"{block} restored", self.buffers[held].content, self.problem.dtype, draft.now)
        draft.restores.append(Pack(held, restored))
        return restored

    def _send(self, copy: Copy, draft: _Draft) -> Send:
        label = f"{copy.block} to rank {copy.dst}"
        kind = copy.block.kind
        dtype = self._sent_dtype(kind)
        # A result is sent by the rank that made or summed it, an input by its owner or by a relay that holds it.
        if kind not in INPUTS:
            source = self.held[copy.block]
        elif copy.block.owner == self.rank:
            source = self._packed_own(copy, draft)
        else:
            source = self.held[copy.block]
        # Send in place where the rows are contiguous in what is held, in the dtype of the wire; else pack a copy:
        #    held rows  [0..3 | 8..11 | 16..19]     send 8..11,16..19: one slice     send 0..3,16..19: packed
        first = piece_of(self.buffers[source].content, copy.content) if source != LOCAL else None
        if first is None or self.buffers[source].dtype != dtype:
            # The pack reads the source in this step, so it lives until now.
            if source != LOCAL:
                self._use(source, draft.now)
            draft.packs.append(Pack(source, self._new(f"{copy.block} packed", copy.content, dtype, draft.now, kind)))
            source, first = draft.packs[-1].into, 0
        self._use(source, draft.now)
        elements = record_elements(self.problem, dtype, kind)
        return Send(copy.dst, source, first * elements, size(copy.content) * elements, label)

    def _packed_own(self, copy: Copy, draft: _Draft) -> int:
        """The buffer with all own rows that travel, packed at its first use; LOCAL where it is no piece of it."""
        block, own = copy.block, self.own[copy.block]
        # All own rows that travel are packed once, and each message is a slice of that buffer.
        if piece_of(own, copy.content) is None:
            return LOCAL
        if block not in self.held:
            self.held[block] = self._new(f"{block} packed", own, self._sent_dtype(block.kind), draft.now, block.kind)
            draft.packs.append(Pack(LOCAL, self.held[block]))
        return self.held[block]

    def _recv(self, copy: Copy, now: int) -> Recv:
        label = f"{copy.block} from rank {copy.src}"
        block, whole = copy.block, self.arrivals.get(copy.block, copy.content)
        # The first piece of a block makes the buffer for all of them. Sums are merged piece by piece.
        if whole == copy.content or block not in self.held:
            self.held[block] = self._arriving(block, whole, label, now)
        buffer = self._use(self.held[block], now)
        first = piece_of(whole, copy.content)
        assert first is not None  # `passes.spread` cuts in wire order
        elements = record_elements(self.problem, self.buffers[buffer].dtype, block.kind)
        return Recv(copy.src, buffer, first * elements, size(copy.content) * elements, label)

    def _arriving(self, block: Block, content: Content, label: str, now: int) -> int:
        """The buffer for what arrives of a block: in the fused buffer, if all of it is read and needs no restoring."""
        dtype, fused = self._sent_dtype(block.kind), self.fused.get(block)
        is_whole = fused is not None and fused.contents[block] == content
        if block.kind in INPUTS and is_whole and dtype == self._held_dtype(block.kind):
            return self._inside(block, content, now)
        return self._new(label, content, dtype, now, block.kind)

    def _sum(self, block: Block, draft: _Draft) -> int:
        """The accumulator of a partial dK/dV sum, zeroed at its first use; LOCAL for the own block."""
        if block.owner == self.rank:
            return LOCAL
        if block not in self.held:
            dtype = self._held_dtype(block.kind)
            self.held[block] = self._new(f"{block} sum", self.sums[block], dtype, draft.now, block.kind)
            draft.zeros.append(self._zeroed(self.held[block]))
        return self._use(self.held[block], draft.now)

    def _zeroed(self, buffer: int) -> Zero:
        # All rows: `with_visits` takes out what the first work on them sets.
        return Zero(buffer, rows_of(self.buffers[buffer]))

    def _attend_ops(self, item: Attend | AttendGrad, tiles: HeadTiles, kv: int, dkv: int) -> Iterable[AttendOp]:
        """An attention update for each distance between a key's rows in `kv` and `dkv`: one, if contents are alike."""
        # A tile reads K/V and adds to dK/dV with one row number and one stride; the two may begin at different rows.
        alike = isinstance(item, Attend) or kv == dkv
        alike = alike or (LOCAL not in (kv, dkv) and self.buffers[kv].content == self.buffers[dkv].content)
        places = [self._part(buffer, tiles) for buffer in ((kv,) if alike else (kv, dkv))]
        # Cut the tiles until each lies in one range of both contents.
        table = within_runs(tiles.tiles, places)
        rows, steps = packed_rows(table, places[0])
        owner, heads = item.kv.owner, tiles.heads
        # Equal contents: a packed row has the same number on both sides.
        dkv_rows, dkv_steps = (rows, steps) if alike else packed_rows(table, places[1])
        # Equal steps: tiles with the same distance between the two rows go together, bases subtracted:
        #    kv rows   4 5 6 7      base 4, tile rows 0 1 2 3
        #    dkv rows  9 10 11 12   base 4 + 5
        even = steps == dkv_steps
        for distance in [0] if alike else np.unique((dkv_rows - rows)[even]).tolist():
            at = even & (dkv_rows - rows == distance)
            # Counted from the least row, so that no row of the view is negative.
            base = 0 if alike else int(rows[at].min())
            part = table.take(at).replaced(k_row=rows[at] - base, k_row_stride=steps[at])
            yield AttendOp(owner, heads, part, kv, base, dkv, base + distance)
        # Unequal steps: each tile alone, on views of every steps-th row.
        for n in np.flatnonzero(~even).tolist():
            alone = table.take([n]).replaced(k_row=0, k_row_stride=1)
            yield AttendOp(
                owner, heads, alone, kv, int(rows[n]), dkv, int(dkv_rows[n]), int(steps[n]), int(dkv_steps[n])
            )

    def _part(self, buffer: int, tiles: HeadTiles) -> HeadRows | None:
        """The part of a buffer's content that the tiles read; None for LOCAL, where each row has its own place."""
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
# Each row is set by exactly one `Zero` or one work marked `first`, before anything else reads or adds to it. A work is
# `first` only if that holds for all of its rows. An engine sets every key row of the tiles of a first work, so a row
# that no query attends to becomes zero. Kernel blocks are not considered here.


Work = AttendOp | AttendReceivedOp | Add


def rows_of(buffer: Buffer) -> Content:
    """All rows of a buffer, counted in the buffer."""
    return tuple(part for held in buffer.content for part in whole(held.row_count, [held.heads]))


def with_visits(plan: Plan) -> Plan:
    """The backward plan with its first and last works marked, and only those rows zeroed that no first one sets."""
    steps = [_with_buffers(plan, step) for step in plan.steps]
    return _with_own(replace(plan, steps=tuple(steps)))


def _with_buffers(plan: Plan, step: PlanStep) -> PlanStep:
    """The step with the first works on the buffers that it zeroes."""
    work, zeros = list(step.work), []
    for zero in step.zeros:
        # Sums that arrive are added after the step's own work, never first.
        at = [n for n, item in enumerate(work) if not isinstance(item, Add) and item.dkv == zero.buffer]
        set_rows = [_rows_set(plan.problem, work[n]) for n in at]
        together = union(set_rows)
        # Two works on one row: neither can be the first for the whole of its rows, whatever their order.
        if sum(map(size, set_rows)) == size(together):
            for n in at:
                work[n] = work[n]._replace(overwrite=True)
            zero = zero._replace(rows=without(zero.rows, together))
        if zero.rows:
            zeros.append(zero)
    return step._replace(zeros=tuple(zeros), work=tuple(work))


def _with_own(plan: Plan) -> Plan:
    """The plan with the first and last works on the rank's own rows, if the first ones set them all."""
    problem, met, alone = plan.problem, NOTHING, True
    works = {
        (now, n): item for now, step in enumerate(plan.steps) for n, item in enumerate(step.work)
        if _adds_to_own(plan, item)
    }  # fmt: skip
    adds = [
        plan.buffers[item.part].content if isinstance(item, Add) else _rows_set(problem, item)
        for item in works.values()
    ]
    found: dict[tuple[int, int], Work] = {}
    for (at, item), rows in zip(works.items(), _with_equal_parts(adds), strict=True):
        both = union((met, rows))
        if size(both) == size(met) + size(rows):
            found[at] = item._replace(overwrite=True)
        elif size(both) > size(met):
            return plan  # it meets rows that are set and rows that are not
        alone, met = alone and at in found and isinstance(item, AttendOp), both
    if size(met) < problem.kv_layout.counts[plan.rank] * problem.kv_heads:
        return plan
    if alone:
        found = {at: item._replace(last=True) for at, item in found.items()}  # type: ignore[call-arg]
    steps = [
        step._replace(work=tuple(found.get((now, n), item) for n, item in enumerate(step.work)))
        for now, step in enumerate(plan.steps)
    ]
    return replace(plan, steps=tuple(steps), own_sums=OwnSums.NONE if alone else OwnSums.UNSET)


def _with_equal_parts(contents: list[Content]) -> Iterator[Content]:
    """The same rows, with head parts cut at the borders of all."""
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


def _adds_to_own(plan: Plan, item: Work) -> bool:
    if isinstance(item, Add):
        return item.into == LOCAL and plan.buffers[item.part].kind is Kind.DKV
    return isinstance(item, AttendOp) and item.dkv == LOCAL


def _rows_set(problem: Problem, item: Work) -> Content:
    """The rows of its dK/dV buffer that the tiles of a work name, for the head parts of the buffer."""
    assert not isinstance(item, Add)
    if isinstance(item, AttendReceivedOp):
        return _content([(ONE, item.tiles)])
    first, step = item.dkv_row, item.dkv_step
    tiles = item.tiles
    moved = tiles.replaced(k_row=first + tiles.k_row * step, k_row_stride=tiles.k_row_stride * step)
    if item.owner is None or item.dkv != LOCAL:
        return _content([(item.heads, moved)])
    # Tiles in the own tensors may be of several parts, each of which reads its K/V heads whole (`Mask.parts`).
    heads, end = tiles.head, tiles.head + tiles.heads
    return _content(
        (part.kv_heads, moved.take(np.flatnonzero((heads < part.q_heads.stop) & (end > part.q_heads.start))))
        for part in problem.parts
    )


def _content(parts: Iterable[tuple[StridedRange, TileTable]]) -> Content:
    found = (HeadRows(heads, merge_runs(table.k_runs())) for heads, table in parts)
    return tuple(part for part in found if part.rows)
