"""One rank's schedule to a plan: which buffers exist, when each lives, and what is done with them.

Does not know: routes, where buffers lie (see `arena`), torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ringattn.geometry import Run
from ringattn.plan import (
    HOME,
    Add,
    Buffer,
    Fold,
    Inside,
    Pack,
    Plan,
    PlanStep,
    Recv,
    Send,
    Serve,
    record_elements,
)
from ringattn.planner.arena import lay_out
from ringattn.planner.bundles import ONE, Bundle, alone
from ringattn.planner.guests import Guests
from ringattn.problem import EIGHT_BIT, Problem
from ringattn.schedule.content import Content, Part, piece_of, size, union
from ringattn.schedule.ops import INPUTS, Attend, AttendGrad, Block, Copy, Kind, Merge, PartTiles, Schedule, Step
from ringattn.schedule.passes import serves
from ringattn.sweep import TileTable


def project(schedule: Schedule, rank: int, keeps: bool = False) -> Plan:
    """The plan of `rank`: its steps of the schedule, with every buffer placed.

    `keeps`: a forward pass hands what came on to its backward.
    """
    return _Projection(schedule.problem, schedule.restricted_to(rank), rank).plan(keeps)


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
        work = [item for _, step in self.steps for item in step.work if not isinstance(item, Merge)]
        self.guests = Guests(item for item in work if serves(item))
        self.bundles = {block: bundle for bundle in self._bundles() for block in bundle.contents}
        self.bundled: dict[str, int] = {}

    def plan(self, keeps: bool) -> Plan:
        """The finished plan."""
        for _, block, content in self.schedule.kept:
            self.held[block] = self._arriving(block, content, f"{block} kept", 0)
        kept = [self.held[block] for _, block, _ in self.schedule.kept]
        steps = tuple(self._step(now, index, step) for now, (index, step) in enumerate(self.steps))
        if keeps and not self.backward:
            came = [block for rank, block, _ in self.schedule.arrivals() if rank == self.rank]
            kept = [self._use(self.held[block], len(steps) - 1) for block in came]
        buffers, arena_bytes = lay_out(self.problem, self.buffers)
        name = self.schedule.name
        return Plan(self.problem, name, self.rank, self.backward, steps, buffers, arena_bytes, tuple(kept))

    def _step(self, now: int, index: int, step: Step) -> PlanStep:
        packs: list[Pack] = []
        sends = [self._send(copy, now, packs) for copy in step.copies if copy.src == self.rank]
        recvs = [self._recv(copy, now) for copy in step.copies if copy.dst == self.rank]
        zeros: list[int] = []
        restores: list[Pack] = []
        work: list[Fold | Serve | Add] = []
        met: set[Bundle] = set()
        if any(not isinstance(item, Merge) and serves(item) for item in step.work):
            work.append(self._serve(now, packs, zeros, restores))
        for item in step.work:
            if isinstance(item, Merge):
                part = self._use(self.held[item.part], now)
                work.append(Add(part, self._sum(item.into, now, zeros)))
            elif not serves(item) and (bundle := self._bundle_of(item)) is not None:
                if bundle not in met:
                    met.add(bundle)
                    fellows = [one for one in step.work if not isinstance(one, Merge) and one.kv in bundle.contents]
                    work.append(self._fold_bundle(fellows, now, zeros, restores))
            elif not serves(item):
                kv = HOME if item.kv.owner == self.rank else self._readable(item.kv, now, restores)
                dkv = self._sum(item.dkv, now, zeros) if isinstance(item, AttendGrad) else HOME
                if kv == dkv == HOME and len(item.tiles) > 1:
                    tiles = TileTable.together(table for _, table in item.tiles).with_joined_heads()
                    work.append(Fold(self.rank, Run(0, self.problem.kv_heads), tiles, HOME))
                else:
                    work += [fold for tiles in item.tiles for fold in self._folds(item, tiles, kv, dkv)]
        done = tuple(packs), tuple(sends), tuple(recvs), tuple(zeros), tuple(restores), tuple(work)
        return PlanStep(index, *done)

    def _serve(self, now: int, packs: list[Pack], zeros: list[int], restores: list[Pack]) -> Serve:
        """The work on queries that came; what is the rank's own is put beside what came, as if it had come."""
        for kind, bundle in self.guests.bundles.items():
            for block, content in bundle.contents.items():
                if kind not in INPUTS:
                    self.held[block] = self._inside(block, content, now)
                elif block.owner == self.rank:  # rounded as what is sent, so that all keys of a head are alike
                    packs.append(Pack(HOME, own := self._arriving(block, content, f"{block} coded", now)))
                    self._in_bundle(block, own, now, restores)
                else:
                    self._in_bundle(block, self.held[block], now, restores)
        buffers = {kind: self.bundled[bundle.label] for kind, bundle in self.guests.bundles.items()}
        if self.backward:
            zeros.append(buffers[Kind.DKV])
        result = buffers[Kind.DQ if self.backward else Kind.OUT]
        more = (buffers[Kind.SEED], buffers[Kind.DKV]) if self.backward else ()
        return Serve(self.guests.tiles(self.problem.group), buffers[Kind.Q], buffers[Kind.KV], result, *more)

    def _bundles(self) -> Iterator[Bundle]:
        """What comes in one step and is read in one step lies together, and so do the sums for it.

        If every part has one head, and if the sums take the same rows.
        """
        yield from self.guests.bundles.values()
        reads = {item.kv: (now, item) for now, item in self._work() if item.kv.owner != self.rank}
        came = [(now, copy.block, copy.content) for now, (_, step) in enumerate(self.steps) for copy in step.copies
                if copy.dst == self.rank]  # fmt: skip
        came += [(-1, block, content) for _, block, content in self.schedule.kept]
        groups: dict[tuple[int, int], dict[Block, Content]] = defaultdict(dict)
        for arrival, block, content in came:
            if block in reads and not serves(reads[block][1]):
                groups[arrival, reads[block][0]][block] = content
        for (arrival, _), contents in groups.items():
            items = {block: reads[block][1] for block in contents}
            sums = {item.dkv: self.sums.get(item.dkv) for item in items.values() if isinstance(item, AttendGrad)}
            if all(map(alone, contents.values())) and (not sums or list(sums.values()) == list(contents.values())):
                yield Bundle(f"KV of step {arrival}", Kind.KV, contents)
                if sums:
                    sent = zip(sums, contents.values(), strict=True)
                    yield Bundle(f"DKV of step {arrival}", Kind.DKV, dict(sent))

    def _work(self) -> Iterator[tuple[int, Attend | AttendGrad]]:
        """All work but merges, with its plan step."""
        return ((now, item) for now, (_, step) in enumerate(self.steps) for item in step.work
                if not isinstance(item, Merge))  # fmt: skip

    def _bundle_of(self, item: Attend | AttendGrad) -> Bundle | None:
        """The bundle whose rows a fold reads, where one is."""
        return self.bundles.get(item.kv) if item.kv.owner != self.rank else None

    def _fold_bundle(
        self, items: list[Attend | AttendGrad], now: int, zeros: list[int], restores: list[Pack]
    ) -> Fold:
        """One fold for all work on a bundle."""
        bundle = self.bundles[items[0].kv]
        for item in items:
            self._in_bundle(item.kv, self.held[item.kv], now, restores)
        dkv = HOME
        if isinstance(items[0], AttendGrad):
            sums = self.bundles[items[0].dkv]
            for block, content in sums.contents.items():
                self.held[block] = self._inside(block, content, now)
            dkv = self.bundled[sums.label]
            zeros.append(dkv)
        tiles = []
        for item in items:
            parts = {part.heads: (part, row) for part, row in bundle.parts(item.kv)}
            for heads, table in item.tiles:
                part, first = parts[heads]
                cut = _within_runs(table, [part])
                rows, steps = _packed_rows(cut, part)
                tiles.append(cut.with_k_rows(rows + first, steps))
        return Fold(None, ONE, TileTable.together(tiles), self.bundled[bundle.label], dkv=dkv)

    def _in_bundle(self, block: Block, held: int, now: int, restores: list[Pack]) -> None:
        """What came is read in its bundle, where it lies already or is restored to from eight bits."""
        self._use(held, now)
        if self.buffers[held].inside is None:
            restores.append(Pack(held, self._inside(block, self.buffers[held].content, now)))

    def _inside(self, block: Block, content: Content, now: int) -> int:
        """A new buffer for a block, in its bundle."""
        bundle = self.bundles[block]
        dtype = self._held_dtype(block.kind)
        if bundle.label not in self.bundled:
            self.bundled[bundle.label] = self._new(bundle.label, bundle.content, dtype, now, block.kind)
        place = Inside(self._use(self.bundled[bundle.label], now), bundle.starts[block])
        return self._new(f"{block} in {bundle.label}", content, dtype, now, block.kind, place)

    def _held_dtype(self, kind: Kind) -> str:
        """What the work on a block reads or makes."""
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
        """What is packed once of the own inputs, in each ring: all rows that are ever sent."""
        sent: dict[Block, list[Content]] = defaultdict(list)
        for _, step in self.steps:
            for copy in step.copies:
                if copy.src == copy.block.owner == self.rank and copy.block.kind in INPUTS:
                    sent[copy.block].append(copy.content)
        return {block: union(dict.fromkeys(contents)) for block, contents in sent.items()}

    def _send(self, copy: Copy, now: int, packs: list[Pack]) -> Send:
        label = f"{copy.block} to rank {copy.dst}"
        kind = copy.block.kind
        dtype = self._sent_dtype(kind)
        if kind not in INPUTS:
            source = self._use(self.held[copy.block], now)
        elif copy.block.owner == self.rank:
            source = self._packed_own(copy, now, packs)
        else:
            source = self.held[copy.block]
        first = piece_of(self.buffers[source].content, copy.content) if source != HOME else None
        if first is None or self.buffers[source].dtype != dtype:
            packs.append(Pack(source, self._new(f"{copy.block} packed", copy.content, dtype, now, kind)))
            source, first = packs[-1].into, 0
        self._use(source, now)
        elements = record_elements(self.problem, dtype, kind)
        return Send(copy.dst, source, first * elements, size(copy.content) * elements, label)

    def _packed_own(self, copy: Copy, now: int, packs: list[Pack]) -> int:
        """The buffer with all own rows that travel, packed at its first use; HOME where this copy is no piece of it."""
        block, own = copy.block, self.own[copy.block]
        if piece_of(own, copy.content) is None:
            return HOME
        if block not in self.held:
            self.held[block] = self._new(f"{block} packed", own, self._sent_dtype(block.kind), now, block.kind)
            packs.append(Pack(HOME, self.held[block]))
        return self.held[block]

    def _recv(self, copy: Copy, now: int) -> Recv:
        label = f"{copy.block} from rank {copy.src}"
        self.held[copy.block] = self._arriving(copy.block, copy.content, label, now)
        return Recv(copy.src, self.held[copy.block], label)

    def _arriving(self, block: Block, content: Content, label: str, now: int) -> int:
        """The buffer for what comes of a block: where it is served, if it needs no restoring."""
        dtype = self._sent_dtype(block.kind)
        if block.kind in INPUTS and block in self.bundles and dtype == self._held_dtype(block.kind):
            return self._inside(block, content, now)
        return self._new(label, content, dtype, now, block.kind)

    def _sum(self, block: Block, now: int, zeros: list[int]) -> int:
        """The accumulator of a partial dK/dV sum, zeroed at its first use; HOME for the own block."""
        if block.owner == self.rank:
            return HOME
        if block not in self.held:
            dtype = self._held_dtype(block.kind)
            self.held[block] = self._new(f"{block} sum", self.sums[block], dtype, now, block.kind)
            zeros.append(self.held[block])
        return self._use(self.held[block], now)

    def _folds(self, item: Attend | AttendGrad, tiles: PartTiles, kv: int, dkv: int) -> Iterable[Fold]:
        """One fold for each distance between a key's row in `kv` and in `dkv`: one, but where contents differ."""
        alike = isinstance(item, Attend) or kv == dkv
        alike = alike or (HOME not in (kv, dkv) and self.buffers[kv].content == self.buffers[dkv].content)
        places = [self._part(buffer, tiles) for buffer in ((kv,) if alike else (kv, dkv))]
        table = _within_runs(tiles.tiles, places)
        rows, steps = _packed_rows(table, places[0])
        owner, heads = item.kv.owner, tiles.heads
        if alike:
            yield Fold(
                owner, heads, table.with_k_rows(rows, steps), kv, 0, dkv if isinstance(item, AttendGrad) else HOME
            )
            return
        dkv_rows, dkv_steps = _packed_rows(table, places[1])
        even = steps == dkv_steps
        for distance in np.unique((dkv_rows - rows)[even]).tolist():
            at = even & (dkv_rows - rows == distance)
            base = int(rows[at].min())
            yield Fold(
                owner, heads, table.take(at).with_k_rows(rows[at] - base, steps[at]), kv, base, dkv, base + distance
            )
        for one in np.flatnonzero(~even).tolist():
            alone, ends = table.take([one]).with_k_rows(np.zeros(1, np.int64), np.ones(1, np.int64)), (rows, dkv_rows)
            row, dkv_row = (int(end[one]) for end in ends)
            yield Fold(owner, heads, alone, kv, row, dkv, dkv_row, int(steps[one]), int(dkv_steps[one]))

    def _part(self, buffer: int, tiles: PartTiles) -> Part | None:
        """The part of a buffer's content that the tiles read; None for HOME, which holds every row at its own place."""
        if buffer == HOME:
            return None
        return next(part for part in self.buffers[buffer].content if part.heads == tiles.heads)


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
