"""One rank's schedule to a plan: which buffers exist, when each lives, and where it lies in the arena.

Double buffering is not a mechanism here but a result: a buffer lives from the step that fills it to the last step that
reads or sends it, both included, and buffers that live together lie apart.
Does not know: routes, torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from ringattn.errors import PlanError
from ringattn.plan import (
    ALIGNMENT_BYTES,
    HOME,
    Add,
    Buffer,
    Fold,
    Pack,
    Plan,
    PlanStep,
    Recv,
    Send,
    buffer_bytes,
    record_elements,
)
from ringattn.problem import EIGHT_BIT, Problem
from ringattn.schedule.content import Content, Part, piece_of, size, union
from ringattn.schedule.ops import Attend, AttendGrad, Block, Copy, Kind, Merge, PartTiles, Schedule, Step
from ringattn.sweep import TileTable


def project(schedule: Schedule, rank: int) -> Plan:
    """The plan of `rank`: its steps of the schedule, with every buffer placed."""
    return _Projection(schedule.problem, schedule.restricted_to(rank), rank).plan()


class _Projection:
    """Walks one rank's steps once and collects buffers and their lifetimes."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.problem, self.schedule, self.rank = problem, schedule, rank
        self.steps = [(i, step) for i, step in enumerate(schedule.steps) if step.copies or step.work]
        self.backward = any(isinstance(item, AttendGrad) for _, step in self.steps for item in step.work) or any(
            copy.block.kind is Kind.DKV for _, step in self.steps for copy in step.copies
        )
        self.buffers: list[Buffer] = []
        self.held: dict[Block, int] = {}
        self.sums = {
            copy.block: copy.content
            for _, step in self.steps
            for copy in step.copies
            if copy.block.kind is Kind.DKV and copy.src == rank
        }
        self.own = self._own_blocks()

    def plan(self) -> Plan:
        """The finished plan."""
        steps = tuple(self._step(now, index, step) for now, (index, step) in enumerate(self.steps))
        buffers, arena_bytes = _lay_out(self.problem, self.buffers)
        return Plan(self.problem, self.schedule.name, self.rank, self.backward, steps, buffers, arena_bytes)

    def _step(self, now: int, index: int, step: Step) -> PlanStep:
        packs: list[Pack] = []
        sends = [self._send(copy, now, packs) for copy in step.copies if copy.src == self.rank]
        recvs = [self._recv(copy, now) for copy in step.copies if copy.dst == self.rank]
        zeros: list[int] = []
        restores: list[Pack] = []
        work: list[Fold | Add] = []
        for item in step.work:
            if isinstance(item, Merge):
                part = self._use(self.held[item.part], now)
                work.append(Add(part, self._sum(item.into, now, zeros)))
            else:
                kv = HOME if item.kv.owner == self.rank else self._readable(item.kv, now, restores)
                dkv = self._sum(item.dkv, now, zeros) if isinstance(item, AttendGrad) else HOME
                if kv == dkv == HOME and len(item.tiles) > 1:
                    tiles = TileTable.together(table for _, table in item.tiles).with_joined_heads()
                    work.append(Fold(self.rank, None, tiles, HOME))
                else:
                    work += [fold for tiles in item.tiles for fold in self._folds(item, tiles, kv, dkv)]
        done = tuple(packs), tuple(sends), tuple(recvs), tuple(zeros), tuple(restores), tuple(work)
        return PlanStep(index, *done)

    def _new(self, label: str, content: Content, dtype: str, now: int, last: int | None = None) -> int:
        self.buffers.append(Buffer(label, content, dtype, now, now if last is None else last))
        return len(self.buffers) - 1

    def _use(self, buffer: int, now: int) -> int:
        self.buffers[buffer] = self.buffers[buffer]._replace(last=now)
        return buffer

    def _readable(self, block: Block, now: int, restores: list[Pack]) -> int:
        """The buffer in which this step's work reads an arrived block: where it lies, or restored from eight bits."""
        held = self._use(self.held[block], now)
        if self.buffers[held].dtype not in EIGHT_BIT:
            return held
        restored = self._new(f"{block} restored", self.buffers[held].content, self.problem.dtype, now)
        restores.append(Pack(held, restored))
        return restored

    def _own_blocks(self) -> dict[Block, Content]:
        """What is packed once of the own K/V, in each ring: all rows that are ever sent."""
        sent: dict[Block, list[Content]] = defaultdict(list)
        for _, step in self.steps:
            for copy in step.copies:
                if copy.src == copy.block.owner == self.rank and copy.block.kind is Kind.KV:
                    sent[copy.block].append(copy.content)
        return {block: union(dict.fromkeys(contents)) for block, contents in sent.items()}

    def _send(self, copy: Copy, now: int, packs: list[Pack]) -> Send:
        label = f"{copy.block} to rank {copy.dst}"
        dtype = self.problem.kv_dtype
        if copy.block.kind is Kind.DKV:
            source = self._use(self.held[copy.block], now)
            dtype = self.problem.wire_dtype or self.problem.accumulator_dtype
        elif copy.block.owner == self.rank:
            source = self._packed_own(copy, now, packs)
        else:
            source = self.held[copy.block]
        first = piece_of(self.buffers[source].content, copy.content) if source != HOME else None
        if first is None or self.buffers[source].dtype != dtype:
            packs.append(Pack(source, self._new(f"{copy.block} packed", copy.content, dtype, now)))
            source, first = packs[-1].into, 0
        self._use(source, now)
        elements = record_elements(self.problem, dtype)
        return Send(copy.dst, source, first * elements, size(copy.content) * elements, label)

    def _packed_own(self, copy: Copy, now: int, packs: list[Pack]) -> int:
        """The buffer with all own rows that travel, packed at its first use; HOME where this copy is no piece of it."""
        block, own = copy.block, self.own[copy.block]
        if piece_of(own, copy.content) is None:
            return HOME
        if block not in self.held:
            self.held[block] = self._new(f"{block} packed", own, self.problem.kv_dtype, now)
            packs.append(Pack(HOME, self.held[block]))
        return self.held[block]

    def _recv(self, copy: Copy, now: int) -> Recv:
        dtype = self.problem.kv_dtype
        if copy.block.kind is Kind.DKV:
            dtype = self.problem.wire_dtype or self.problem.accumulator_dtype
        self.held[copy.block] = self._new(f"{copy.block} from rank {copy.src}", copy.content, dtype, now)
        return Recv(copy.src, self.held[copy.block], f"{copy.block} from rank {copy.src}")

    def _sum(self, block: Block, now: int, zeros: list[int]) -> int:
        """The accumulator of a partial dK/dV sum, zeroed at its first use; HOME for the own block."""
        if block.owner == self.rank:
            return HOME
        if block not in self.held:
            self.held[block] = self._new(f"{block} sum", self.sums[block], self.problem.accumulator_dtype, now)
            zeros.append(self.held[block])
        return self._use(self.held[block], now)

    def _folds(self, item: Attend | AttendGrad, tiles: PartTiles, kv: int, dkv: int) -> Iterable[Fold]:
        """One fold for each distance between a key's row in `kv` and in `dkv`: one, but where contents differ."""
        alike = isinstance(item, Attend) or kv == dkv
        alike = alike or (HOME not in (kv, dkv) and self.buffers[kv].content == self.buffers[dkv].content)
        places = [self._part(buffer, tiles) for buffer in ((kv,) if alike else (kv, dkv))]
        table = _within_runs(tiles.tiles, places)
        rows, steps = _packed_rows(table, places[0])
        owner, part = item.kv.owner, tiles.part
        if alike:
            yield Fold(
                owner, part, table.with_k_rows(rows, steps), kv, 0, dkv if isinstance(item, AttendGrad) else HOME
            )
            return
        dkv_rows, dkv_steps = _packed_rows(table, places[1])
        even = steps == dkv_steps
        for distance in np.unique((dkv_rows - rows)[even]).tolist():
            at = even & (dkv_rows - rows == distance)
            base = int(rows[at].min())
            yield Fold(
                owner, part, table.take(at).with_k_rows(rows[at] - base, steps[at]), kv, base, dkv, base + distance
            )
        for one in np.flatnonzero(~even).tolist():
            alone, ends = table.take([one]).with_k_rows(np.zeros(1, np.int64), np.ones(1, np.int64)), (rows, dkv_rows)
            row, dkv_row = (int(end[one]) for end in ends)
            yield Fold(owner, part, alone, kv, row, dkv, dkv_row, int(steps[one]), int(dkv_steps[one]))

    def _part(self, buffer: int, tiles: PartTiles) -> Part | None:
        """The part of a buffer's content that the tiles read; None for HOME, which holds every row at its own place."""
        if buffer == HOME:
            return None
        heads = self.problem.parts[tiles.part].kv_heads
        return next(part for part in self.buffers[buffer].content if part.heads == heads)


def _within_runs(table: TileTable, places: Iterable[Part | None]) -> TileTable:
    """The tiles cut so that the key rows of each lie in one run of each of the parts."""
    for part in places:
        if part is not None and not (part.dense and (table.columns[:, 9] == 1).all()):
            found = part.locate(table.k_runs())
            table = TileTable.of(
                [
                    tile._replace(k=tile.k.pick(spot.indices))
                    for tile, spots in zip(table, found, strict=True)
                    for spot in spots
                ]
            )
    return table


def _packed_rows(table: TileTable, part: Part | None) -> tuple[np.ndarray, np.ndarray]:
    """The first key row of each tile and their step as rows of the part, of which one run holds them all."""
    rows, steps = table.k_rows, table.columns[:, 9]
    if part is None:
        return rows, steps
    if part.dense:
        return part.offsets(rows), steps
    packed = [spot.packed for (spot,) in part.locate(table.k_runs())]
    return np.array([run.start for run in packed], np.int64), np.array([run.stride for run in packed], np.int64)


def _lay_out(problem: Problem, buffers: list[Buffer]) -> tuple[tuple[Buffer, ...], int]:
    """Offsets by first fit in order of birth, and the arena's bytes."""
    placed = list(buffers)
    live: list[tuple[int, int, int]] = []  # (offset, end, last step)
    peak = 0
    for index in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        buffer = buffers[index]
        nbytes = -(-buffer_bytes(problem, buffer.content, buffer.dtype) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        live = sorted(entry for entry in live if entry[2] >= buffer.first)
        offset = 0
        for start, end, _ in live:
            if offset + nbytes <= start:
                break
            offset = max(offset, end)
        live.append((offset, offset + nbytes, buffer.last))
        placed[index] = buffer._replace(offset_bytes=offset)
        peak = max(peak, offset + nbytes)
    return tuple(placed), peak


def verify_placement(plan: Plan) -> None:
    """Raise `PlanError` if a buffer is read before it is filled or past its end, or overwritten while it lives.

    Lifetimes are derived again, from the steps alone.
    """
    written: dict[int, int] = {}
    used: dict[int, int] = defaultdict(int)

    def write(buffer: int, now: int) -> None:
        if buffer in written:
            raise PlanError(f"rank {plan.rank}, step {now}: {plan.buffers[buffer].label} is filled twice")
        written[buffer] = used[buffer] = now

    def read(buffer: int, now: int, after: int = 0) -> None:
        if buffer != HOME:
            if written.get(buffer, now + 1) > now - after:
                raise PlanError(f"rank {plan.rank}, step {now}: {plan.buffers[buffer].label} is read too early")
            used[buffer] = now

    for now, step in enumerate(plan.steps):
        received = {recv.buffer for recv in step.recvs}
        for pack in step.packs:
            read(pack.source, now)
            write(pack.into, now)
        for send in step.sends:
            read(send.buffer, now, after=send.buffer in received)
            sent = plan.buffers[send.buffer]
            held = size(sent.content) * record_elements(plan.problem, sent.dtype)
            if not 0 <= send.first <= send.first + send.elements <= held:
                raise PlanError(f"rank {plan.rank}, step {now}: the message {send.label} ends outside its buffer")
        for recv in step.recvs:
            write(recv.buffer, now)
        for zero in step.zeros:
            write(zero, now)
        for pack in step.restores:
            read(pack.source, now, after=pack.source in received)
            write(pack.into, now)
        for item in step.work:
            sources = (item.part, item.into) if isinstance(item, Add) else (item.kv, item.dkv)
            if isinstance(item, Fold) and item.kv != HOME and plan.buffers[item.kv].dtype in EIGHT_BIT:
                raise PlanError(f"rank {plan.rank}, step {now}: {plan.buffers[item.kv].label} is not restored")
            for source in sources:
                read(source, now, after=source in received)
    spans = [
        (plan.buffers[b].offset_bytes, buffer_bytes(plan.problem, plan.buffers[b].content, plan.buffers[b].dtype), b)
        for b in written
    ]
    for n, (start, nbytes, one) in enumerate(spans):
        if start < 0 or start + nbytes > plan.arena_bytes:
            raise PlanError(f"rank {plan.rank}: {plan.buffers[one].label} lies outside the arena")
        for other_start, other_bytes, other in spans[:n]:
            together = written[one] <= used[other] and written[other] <= used[one]
            if together and start < other_start + other_bytes and other_start < start + nbytes:
                labels = f"{plan.buffers[one].label} and {plan.buffers[other].label}"
                raise PlanError(f"rank {plan.rank}: {labels} live at the same time in the same bytes")
