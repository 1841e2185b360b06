"""From one rank's schedule to its plan: which buffers exist, in which steps each lives, and what reads and fills it.

Glossary of buffers. A buffer lives from the first to the last step of its row, both included:
    name        contents                                               lives
    packed      the rank's own rows, gathered into wire order          first send .. last send
    received    the rows of a message                                  its step .. last read or forward
    restored    eight-bit K/V converted to the compute dtype           one step
    sum         dK/dV of another rank's keys                           first work .. sent to the owner
    fused       several of these as slices of one buffer, so that      first slice filled .. last slice read
                one engine call reads them all (`fused_buffers`)
    LOCAL       no buffer: the caller's q, k, v and gradients
The second half marks which work of a backward pass overwrites the rows of dK/dV instead of adding to them.
Not covered: schedules (`ringattn.schedule`), offsets in the arena (`plan.lay_out`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import EIGHT_BIT, Problem
from ringattn.core.tiling import TileTable
from ringattn.planner.fused_buffers import (
    ONE,
    FusedBuffer,
    ReceivedHeads,
    fused_arrivals,
    packed_rows,
    received_by_step,
    within_runs,
)
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
from ringattn.schedule.passes import is_on_received


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
        result, seed, dkv = (
            used.get(kind, LOCAL) for kind in (Kind.DQ if self.schedule.backward else Kind.OUT, Kind.GRAD_OUT, Kind.DKV)
        )
        tiles = received.tiles(self.problem.group)
        draft.work += [AttendReceivedOp(tiles, used[Kind.Q], used[Kind.KV], result, seed, dkv), *apart]

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
                work[n] = work[n]._replace(first=True)
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
            found[at] = item._replace(first=True)
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
