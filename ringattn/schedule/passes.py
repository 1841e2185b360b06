"""Passes: pure functions from schedule to schedule, for any copy graph.

`prune` cuts every payload down to the rows and heads that some remaining receiver reads; `transpose` turns a pruned
forward schedule into its backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ringattn.core.geometry import StridedRange
from ringattn.schedule.content import NOTHING, Content, HeadRows, merge_runs, size, union
from ringattn.schedule.ops import (
    INPUTS,
    Attend,
    AttendGrad,
    Block,
    Copy,
    HeadTiles,
    Kind,
    Merge,
    Schedule,
    Step,
    Work,
    attend_grad,
    ordered_step,
)

RankBlock = tuple[int, Block]
"""A rank and a block it may hold."""

Delivery = tuple[int, Copy]
"""A K/V copy of the backward, and the forward step whose undoing it runs beside (one past the last: the opening)."""


def rows_read(tiles: tuple[HeadTiles, ...]) -> Content:
    """The rows of the owner's shard that the tiles read."""
    parts = (HeadRows(heads, merge_runs(table.k_runs())) for heads, table in tiles)
    return tuple(part for part in parts if part.rows)


def rows_asked(tiles: tuple[HeadTiles, ...]) -> Content:
    """The query rows of the tiles, for each query head."""
    by_head: dict[int, list[StridedRange]] = defaultdict(list)
    for _, table in tiles:
        single = table.with_single_heads()
        for head, run in zip(single.columns[:, 12].tolist(), single.q_runs(), strict=True):
            by_head[head].append(run)
    return tuple(HeadRows(StridedRange(head, 1), merge_runs(by_head[head])) for head in sorted(by_head))


def is_on_received(item: Attend | AttendGrad) -> bool:
    """Whether the queries were received too, as in remote-head attention: only then are they named by a sub-ring."""
    return item.q.ring is not None


def inputs_of(item: Attend | AttendGrad) -> list[tuple[Block, Content]]:
    """The blocks that a work item reads and that another rank may have sent, with the rows that it reads."""
    found = [(item.kv, rows_read(item.tiles))]
    if is_on_received(item):
        asked = rows_asked(item.tiles)
        found += [(block, asked) for block in ((item.q,) if isinstance(item, Attend) else (item.q, item.seed))]
    return found


def result_of(item: Attend | AttendGrad) -> list[tuple[Block, Content]]:
    """The partial sums that a work item adds to and that may be sent to their owners, with the rows that it adds to."""
    found = [(item.dkv, rows_read(item.tiles))] if isinstance(item, AttendGrad) else []
    if is_on_received(item):
        found.append((item.dq if isinstance(item, AttendGrad) else item.out, rows_asked(item.tiles)))
    return found


def prune(schedule: Schedule) -> Schedule:
    """Drop work without tiles, rows that no remaining receiver reads, and copies left empty.

    One scan from the end: what a rank still needs of a block is what it will read and what it will forward.
       ring of KV0:   step 0: 0 -> 1     step 1: 1 -> 2     step 2: 2 -> 3
       reads                  rows a             rows b             rows c
       payload                a + b + c          b + c              c
    """
    wanted: dict[RankBlock, Content] = defaultdict(tuple)
    steps: list[Step] = []
    for step in reversed(schedule.steps):
        copies = []
        for copy in step.copies:
            # `pop`: what is received in this step need not be held before it.
            if copy.block.kind not in INPUTS:
                copies.append(copy)
            elif content := wanted.pop((copy.dst, copy.block), NOTHING):
                copies.append(copy._replace(content=content))
        # Copies run beside the step's work, so what they send must be held when the step begins: the same as what is
        # read.
        work = tuple(item for item in step.work if isinstance(item, Merge) or item.tiles)
        for copy in copies:
            # The sender needs what it sends, from this step back.
            if copy.block.kind in INPUTS:
                spot = copy.src, copy.block
                wanted[spot] = union((wanted[spot], copy.content))
        for item in work:
            for block, rows in () if isinstance(item, Merge) else inputs_of(item):
                wanted[item.rank, block] = union((wanted[item.rank, block], rows))
        steps.append(Step(tuple(copies), work))
    return replace(schedule, steps=tuple(reversed(steps)))


def transpose(schedule: Schedule, deliveries: Iterable[Delivery] | None = None) -> Schedule:
    """The backward of a pruned forward schedule.

    Forward step s becomes a main step and a merge step; one opening step fetches what the first main step reads.
    A copy of K/V in step s becomes a copy of dK/dV the other way beside main step s, merged right after it. K/V is
    delivered anew: by `deliveries`, or by `deliveries_of` where none are given.
    """
    last = len(schedule.steps) - 1
    # One opening step, then for forward steps last .. 0 a main and a merge step: 1 + 2 * (last + 1).
    copies: list[list[Copy]] = [[] for _ in range(2 * last + 3)]
    work: list[list[Work]] = [[] for _ in copies]
    for s, step in enumerate(schedule.steps):
        main = main_step(s, last)
        for item in step.work:
            assert isinstance(item, Attend)
            work[main].append(attend_grad(item))
        for copy in step.copies:
            # The receiver's sum for these rows is returned along the same edge, and added to the sender's own sum.
            part = copy.block._replace(kind=Kind.DKV, origin=copy.dst)
            copies[main].append(Copy(part, copy.dst, copy.src, copy.content))
            # At the owner all sub-rings add to the one gradient of its own tensor.
            ring = None if copy.src == part.owner else part.ring
            work[main + 1].append(Merge(copy.src, part._replace(origin=copy.src, ring=ring), part))
    for at, copy in deliveries_of(schedule) if deliveries is None else deliveries:
        # `at` is the forward step of which the main step runs beside the delivery; one past the last is the opening
        # step.
        copies[main_step(at, last) if at <= last else 0].append(copy)
    return Schedule(schedule.problem, schedule.name, tuple(map(ordered_step, copies, work)))


def main_step(forward_step: int, last: int) -> int:
    """The backward step that undoes `forward_step`, where `last` is the last forward step."""
    return 1 + 2 * (last - forward_step)


def deliveries_of(schedule: Schedule) -> list[Delivery]:
    """The K/V copies of the backward.

    Where an owner's block was relayed, it goes from its owner to the last receiver and back along the reversed edges if
    that sends no more than its owner sending to every reader, else the owner sends to every reader.
    """
    # In a relay every rank sends a block at most once, so the edges by sender form the chain.
    edges: dict[Block, dict[int, tuple[int, Copy]]] = defaultdict(dict)  # block: {src: (step, copy)}
    reads: dict[Block, list[tuple[int, int, Content]]] = defaultdict(list)  # block: [(step, reader, rows)]
    for s, step in enumerate(schedule.steps):
        for copy in step.copies:
            edges[copy.block][copy.src] = s, copy
        for item in step.work:
            if isinstance(item, (Attend, AttendGrad)) and item.rank != item.kv.owner:
                reads[item.kv].append((s, item.rank, rows_read(item.tiles)))
    found: list[Delivery] = []
    for block, readers in reads.items():
        # The block is read in main step s, so it travels beside the main step before, that of forward step s + 1.
        direct = [(s + 1, Copy(block, block.owner, reader, rows)) for s, reader, rows in readers]
        back = _relay_back(block, edges[block], {reader: rows for _, reader, rows in readers})
        found += back if back and _cost(back) <= _cost(direct) else direct
    return found


def _relay_back(block: Block, edges: dict[int, tuple[int, Copy]], rows: dict[int, Content]) -> list[Delivery]:
    """From the owner to the last receiver of a chain and back to the owner; nothing where the block was not relayed."""
    # Follow the chain from the owner: 0 -> 1 -> 2 -> 3.
    chain, at = [], block.owner
    while at in edges:
        step, copy = edges[at]
        chain.append((step, copy.dst))
        at = copy.dst
    if len(chain) < 2:
        return []
    # Backward undoes the farthest reader first: owner -> 3, then 3 -> 2, 2 -> 1, each carrying what it and all nearer
    # readers read.
    copies, nearer = [], NOTHING
    for index, (step, rank) in enumerate(chain):
        nearer = union((nearer, rows.get(rank, NOTHING)))
        source = chain[index + 1][1] if index + 1 < len(chain) else block.owner
        copies.append((step + 2, Copy(block, source, rank, nearer)))
    return [(at, copy) for at, copy in copies if copy.content]


def _cost(copies: list[Delivery]) -> int:
    return sum(size(copy.content) for _, copy in copies)
