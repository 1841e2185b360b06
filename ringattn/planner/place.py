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
Not covered: schedules (`ringattn.schedule`), fused buffers (`planner.fused`), which work of a backward pass overwrites
rows (`planner.overwrites`), offsets in the arena (`plan.lay_out`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import EIGHT_BIT, Problem
from ringattn.core.tiling import TileTable
from ringattn.planner.fused import (
    FusedBuffer,
    ReceivedHeads,
    fused_arrivals,
    packed_rows,
    received_by_step,
    within_runs,
)
from ringattn.planner.overwrites import rows_of, with_overwrites
from ringattn.planner.plan import (
    LOCAL,
    Add,
    AttendOp,
    AttendReceivedOp,
    Buffer,
    Inside,
    Pack,
    Plan,
    PlanStep,
    Recv,
    Send,
    Zero,
    lay_out,
    record_elements,
)
from ringattn.schedule.content import Content, HeadRows, chained, piece_of, size, union
from ringattn.schedule.ops import INPUTS, Attend, AttendGrad, Block, Copy, HeadTiles, Kind, Merge, Schedule, Step
from ringattn.schedule.passes import is_on_received


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
