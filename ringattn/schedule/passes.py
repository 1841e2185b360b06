"""Compiler passes: pure functions from schedule to schedule, for any graph of copies.

`prune` reduces every message to the rows and heads that some remaining receiver reads. `transpose` turns a pruned
forward schedule into its backward schedule. `split_local` hides the fetch of the keys that the first work of a backward
pass reads.

A backward pass begins with the blocks that its forward pass read last. There are three prologues. *fetched*: a step
without work fetches them again. *split*: that step also has part of the work on the rank's local keys, split off from
the work during the last hop. *kept*: the forward pass has kept the blocks.
       rank 0 of 4     fetched           split             kept
       prologue         -   | KV0>3       KV0 | KV0>3
       first work      KV1 | KV1>3       KV1 | KV1>3       KV1 | KV1>3
       last hop        KV0 | DKV3@0>3    KV0 | DKV3@0>3    KV0 | DKV3@0>3
Guarantees: a rank derives its own steps from its part of the schedule. It derives the rows that its readers keep from
the rows that they read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ringattn.core.bounded_cache import bounded
from ringattn.core.geometry import StridedRange
from ringattn.core.tiling import HEADS, ROWS_OF_K, ROWS_OF_Q, TileTable
from ringattn.schedule.content import (
    NOTHING,
    Content,
    HeadRows,
    chained,
    common,
    cut,
    merge_runs,
    merged,
    size,
    union,
    without,
)
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

# --- the prologue of a backward pass ----------------------------------------------------------------------------------


Prologue = Literal["fetched", "split", "kept"]

KEY_ROWS = 128
"""The key block of a kernel. Local keys are split at a multiple of it, if there are enough."""

SHARE = 4
"""One in this number of local keys is for the prologue. Under a causal mask the first keys are read most, so they are
1/4 to 1/2 of the work. A hop of K/V in a half type takes half the time of a hop of dK/dV in float32."""


def last_read(schedule: Schedule) -> frozenset[RankBlock]:
    """Return the remote blocks that each rank of a forward schedule reads in the last step in which it works."""
    by_rank: dict[int, list[Block]] = {}
    for step in schedule.steps:
        in_step: dict[int, list[Block]] = defaultdict(list)
        for item in step.work:
            if not isinstance(item, Merge):
                in_step[item.rank] += [item.kv] if item.kv.owner != item.rank else []
        by_rank |= in_step
    return frozenset((rank, block) for rank, blocks in by_rank.items() for block in blocks)


def arrived(schedule: Schedule, only: Iterable[RankBlock] | None = None) -> tuple[tuple[int, Block, Content], ...]:
    """Return the remote inputs that are received in a pass, with the pieces of each block joined.

    `only`: restrict the result to these ranks and blocks; None for all.
    """
    pieces: dict[RankBlock, list[Content]] = defaultdict(list)
    selected = None if only is None else set(only)
    for step in schedule.steps:
        for copy in step.copies:
            if copy.block.kind in INPUTS and (selected is None or (copy.dst, copy.block) in selected):
                pieces[copy.dst, copy.block].append(copy.content)
    return tuple(
        (*key, contents[0] if len(contents) == 1 else chained(part for piece in contents for part in piece))
        for key, contents in sorted(pieces.items())
    )


def split_local(schedule: Schedule) -> Schedule:
    """Split local work of a backward schedule, for ranks that would otherwise wait idle for their first block.

    Part of the work on local keys moves to the step in which the first block is received.
    """
    first: dict[int, int] = {}
    local: dict[int, tuple[int, AttendGrad]] = {}
    for index, step in enumerate(schedule.steps):
        for copy in step.copies:
            if copy.block.kind in INPUTS:
                first.setdefault(copy.dst, index)
        for item in step.work:
            if isinstance(item, AttendGrad) and item.kv.owner == item.rank and not is_on_received(item):
                local[item.rank] = index, item
    steps = list(schedule.steps)
    for rank, start in first.items():
        busy = any(item.rank == rank and not isinstance(item, Merge) for item in steps[start].work)
        if busy or rank not in local or local[rank][0] < start:
            continue
        later, item = local[rank]
        early, late = split_keys(item.tiles, schedule.problem.kv_layout.counts[rank])
        if early and late:
            rest = (item._replace(tiles=late) if work is item else work for work in steps[later].work)
            steps[later] = Step(steps[later].copies, tuple(rest))
            steps[start] = ordered_step(steps[start].copies, [*steps[start].work, item._replace(tiles=early)])
    return replace(schedule, steps=tuple(steps))


def split_keys(parts: tuple[HeadTiles, ...], rows: int) -> tuple[tuple[HeadTiles, ...], tuple[HeadTiles, ...]]:
    """Return the tiles of the first keys of a shard of `rows` rows, and the tiles of the other keys."""
    # Split keys rather than heads or queries. Most queries read the first keys, so an engine still knows which work is
    # the first on each query, and the two work items set different rows of dK and dV.
    row = rows // SHARE // KEY_ROWS * KEY_ROWS or max(1, rows // SHARE)
    sides: tuple[list[HeadTiles], list[HeadTiles]] = [], []
    for heads, table in parts:
        for side, piece in zip(sides, _cut(table, row), strict=True):
            if len(piece):
                side.append(HeadTiles(heads, piece))
    return tuple(sides[0]), tuple(sides[1])


def _cut(table: TileTable, row: int) -> tuple[TileTable, TileTable]:
    """Cut tiles at key row `row`: return the tiles before it and the tiles from it on."""
    before = np.clip(-((table.k_row - row) // table.k_row_stride), 0, table.k_count)
    after = table.k_count - before
    above = table.replaced(
        k_count=after, k_start=table.k_start + before * table.k_stride, k_row=table.k_row + before * table.k_row_stride
    )
    return table.replaced(k_count=before).take(before > 0), above.take(after > 0)


# --- passes -----------------------------------------------------------------------------------------------------------


RankBlock = tuple[int, Block]
"""A rank and a block that it may hold."""

DUAL = {Kind.KV: Kind.DKV, Kind.Q: Kind.DQ}
"""The gradient of each kind of input."""

Delivery = tuple[int, Copy]
"""A forward step, and a K/V copy of a backward pass. The copy is concurrent with the backward step that undoes the
forward step. The number after the last forward step stands for the prologue."""


def rows_read(tiles: tuple[HeadTiles, ...]) -> Content:
    """Return the rows of the owner's shard that the tiles read."""
    parts = (HeadRows(heads, merged_keys(table.array[:, ROWS_OF_K].tobytes())) for heads, table in tiles)
    return tuple(part for part in parts if part.rows)


@bounded
def merged_keys(columns: bytes) -> tuple[StridedRange, ...]:
    """Return the union of the key rows of tiles, given as columns count, first row and stride."""
    rows = np.frombuffer(columns, np.int64).reshape(-1, 3).tolist()
    return merge_runs(StridedRange(row, count, stride) for count, row, stride in rows)


def query_rows(tiles: tuple[HeadTiles, ...]) -> Content:
    """Return the query rows of the tiles, for each query head."""
    # The same queries attend to keys of many owners, so equal tables are read only once.
    tables = ((table.array[:, ROWS_OF_Q].tobytes(), table.array[:, HEADS].tobytes()) for _, table in tiles)
    return merged_queries(tuple(dict.fromkeys(tables)))


@bounded
def merged_queries(tables: tuple[tuple[bytes, bytes], ...]) -> Content:
    """Return the query rows of tables, given as columns (count, first row, stride) and (first head, heads)."""
    by_head: dict[int, dict[StridedRange, None]] = defaultdict(dict)
    for rows, heads in tables:
        for run, (first, head_count) in zip(*(np.frombuffer(columns, np.int64).reshape(-1, n).tolist()
                                        for columns, n in ((rows, 3), (heads, 2))), strict=True):  # fmt: skip
            for head in range(first, first + head_count):
                by_head[head][StridedRange(run[1], run[0], run[2])] = None
    return merged({StridedRange(head, 1): list(runs) for head, runs in by_head.items()})


def is_on_received(item: Attend | AttendGrad) -> bool:
    """Return whether the queries are received too, as in remote-head attention. Only such queries name a sub-ring."""
    return item.q.ring is not None


def inputs_of(item: Attend | AttendGrad) -> list[tuple[Block, Content]]:
    """Return the blocks that a work item reads and that another rank may have sent, with the rows that it reads."""
    inputs = [(item.kv, rows_read(item.tiles))]
    if is_on_received(item):
        rows = query_rows(item.tiles)
        inputs += [(block, rows) for block in ((item.q,) if isinstance(item, Attend) else (item.q, item.inputs))]
    return inputs


def result_of(item: Attend | AttendGrad) -> list[tuple[Block, Content]]:
    """Return the partial sums of a work item that may be sent to their owners, with the rows that it adds to."""
    results = [(item.dkv, rows_read(item.tiles))] if isinstance(item, AttendGrad) else []
    if is_on_received(item):
        results.append((item.dq if isinstance(item, AttendGrad) else item.out, query_rows(item.tiles)))
    return results


def prune(schedule: Schedule) -> Schedule:
    """Drop work without tiles, rows that no remaining receiver reads, and copies that become empty.

    This is one scan from the last step: a rank needs the rows of a block that it will read or forward.
       ring of KV0:   step 0: 0 -> 1     step 1: 1 -> 2     step 2: 2 -> 3
       reads                  rows a             rows b             rows c
       payload                a + b + c          b + c              c
    """
    needed: dict[RankBlock, Content] = defaultdict(tuple)
    steps: list[Step] = []
    for step in reversed(schedule.steps):
        copies = []
        for copy in step.copies:
            if copy.block.kind not in INPUTS:
                copies.append(copy)
                continue
            # Rows that are received in this step need not be held before it. A piece provides only the rows that it
            # contains.
            receiver = copy.dst, copy.block
            rows = needed.pop(receiver, NOTHING)
            if content := common(rows, copy.content):
                copies.append(copy._replace(content=content))
                needed[receiver] = NOTHING if content is rows else without(rows, content)
        # Copies are concurrent with the step's work, so the rows that they send must be held when the step begins, like
        # the rows that the work reads.
        work = tuple(item for item in step.work if isinstance(item, Merge) or item.tiles)
        for copy in copies:
            # The sender must hold the rows that it sends before this step.
            if copy.block.kind in INPUTS:
                sender = copy.src, copy.block
                needed[sender] = union((needed[sender], copy.content))
        for item in work:
            for block, rows in () if isinstance(item, Merge) else inputs_of(item):
                needed[item.rank, block] = union((needed[item.rank, block], rows))
        steps.append(Step(tuple(copies), work))
    return replace(schedule, steps=tuple(reversed(steps)))


def transpose(schedule: Schedule, deliveries: Iterable[Delivery]) -> Schedule:
    """Return the backward schedule of a pruned forward schedule.

    Forward step s becomes a main step and a merge step. One prologue step fetches the blocks that the first main step
    reads. A copy of K/V in step s becomes a copy of dK/dV in the other direction in main step s, which is merged in the
    next step; a copy of Q becomes a copy of dQ in the same way. A copy of OUT becomes a copy of its gradient together
    with Q. `deliveries`: the copies that send K/V again.
    """
    last = len(schedule.steps) - 1
    # One prologue step, then for forward steps last .. 0 a main and a merge step: 1 + 2 * (last + 1).
    copies: list[list[Copy]] = [[] for _ in range(2 * last + 3)]
    work: list[list[Work]] = [[] for _ in copies]
    for s, step in enumerate(schedule.steps):
        main = main_step(s, last)
        # Backward needs no merge of outputs: the gradient of each part is the gradient of the whole.
        work[main] += [attend_grad(item) for item in step.work if isinstance(item, Attend)]
        for copy in step.copies:
            if copy.block.kind is Kind.OUT:
                inputs = (copy.block._replace(kind=kind, origin=None) for kind in (Kind.Q, Kind.GRAD_OUT))
                copies[main] += [Copy(block, copy.dst, copy.src, copy.content) for block in inputs]
                continue
            # The receiver's sum for these rows returns along the same edge, and is added to the sender's sum.
            part = copy.block._replace(kind=DUAL[copy.block.kind], origin=copy.dst)
            copies[main].append(Copy(part, copy.dst, copy.src, copy.content))
            into = owner_sum(part) if copy.src == part.owner else part._replace(origin=copy.src)
            work[main + 1].append(Merge(copy.src, into, part))
    # Gradients of local rows that were computed together with received rows stay separate until all work has ended.
    grads = [item for items in work for item in items if isinstance(item, AttendGrad)]
    results = {block for item in grads for block in ((item.dkv, item.dq) if is_on_received(item) else (item.dkv,))}
    separate = sorted(block for block in results if block.origin == block.owner and block.ring is not None)
    work[-1] += [Merge(block.owner, owner_sum(block), block) for block in separate]
    for forward_step, copy in deliveries:
        # The delivery is concurrent with the main step of `forward_step`; `last` + 1 stands for the prologue step.
        copies[main_step(forward_step, last) if forward_step <= last else 0].append(copy)
    return Schedule(schedule.problem, schedule.name, True, tuple(map(ordered_step, copies, work)))


def owner_sum(part: Block) -> Block:
    """Return the owner's gradient, to which the partial gradients of all ranks and sub-rings are added.

    `part`: one of them.
    """
    return Block(part.kind, part.owner, part.owner if part.kind is Kind.DKV else None)


def main_step(forward_step: int, last: int) -> int:
    """Return the backward step that undoes `forward_step`. `last`: the last forward step."""
    return 1 + 2 * (last - forward_step)


def deliveries_of(schedule: Schedule) -> list[Delivery]:
    """Return the K/V copies of the backward pass.

    A relayed block is sent from its owner to the last receiver, and from there back along the reversed edges, if that
    sends no more than the owner sending to every reader. Otherwise the owner sends to every reader. An owner that sends
    in two directions has one chain in each.
    """
    edges: dict[Block, dict[int, list[tuple[int, Copy]]]] = defaultdict(lambda: defaultdict(list))  # block: {src: ...}
    for s, step in enumerate(schedule.steps):
        for copy in step.copies:
            edges[copy.block][copy.src].append((s, copy))
    deliveries: list[Delivery] = []
    for block, readers in readers_of(schedule).items():
        rows = {reader: content for _, reader, content in readers}
        for first in edges[block][block.owner]:
            chain = _chain(first, edges[block])
            reached = {rank for _, rank in chain}
            # The block is read in the main step of forward step s, so it is sent in the main step before, which is that
            # of forward step s + 1.
            direct = [(s + 1, Copy(block, block.owner, to, content)) for s, to, content in readers if to in reached]
            back = _relay_back(block, chain, rows)
            deliveries += back if back and delivered(back) <= delivered(direct) else direct
    return deliveries


def readers_of(schedule: Schedule) -> dict[Block, list[tuple[int, int, Content]]]:
    """Return for each remote block the steps in which it is read, the readers and the rows."""
    readers: dict[Block, list[tuple[int, int, Content]]] = defaultdict(list)
    for s, step in enumerate(schedule.steps):
        for item in step.work:
            if isinstance(item, (Attend, AttendGrad)) and item.rank != item.kv.owner:
                readers[item.kv].append((s, item.rank, rows_read(item.tiles)))
    return readers


def _chain(first: tuple[int, Copy], edges: dict[int, list[tuple[int, Copy]]]) -> list[tuple[int, int]]:
    """Return the receivers of a block in order, each with the step of its copy: 0 -> 1 -> 2 -> 3.

    `first`: the step and the copy with which the owner sends the block. `edges`: the steps and copies of each sender.
    """
    chain, (step, copy) = [], first
    chain.append((step, copy.dst))
    # A relay sends a block at most once, so its edges form a chain.
    while edges[copy.dst]:
        ((step, copy),) = edges[copy.dst]
        chain.append((step, copy.dst))
    return chain


def _relay_back(block: Block, chain: list[tuple[int, int]], rows: dict[int, Content]) -> list[Delivery]:
    """Return the copies from the owner to the last receiver of a chain and back; empty if the block is not relayed."""
    if len(chain) < 2:
        return []
    # Backward undoes the farthest reader first: owner -> 3, then 3 -> 2, 2 -> 1. Each copy carries the rows that its
    # receiver and all nearer readers read.
    copies, nearer = [], NOTHING
    for index, (step, rank) in enumerate(chain):
        nearer = union((nearer, rows.get(rank, NOTHING)))
        source = chain[index + 1][1] if index + 1 < len(chain) else block.owner
        copies.append((step + 2, Copy(block, source, rank, nearer)))
    return [(step, copy) for step, copy in copies if copy.content]


def delivered(copies: Iterable[Delivery]) -> int:
    """Return the rows times heads that deliveries send."""
    return sum(size(copy.content) for _, copy in copies)


def spread(schedule: Schedule, is_slow: Callable[[Copy], bool], window: Callable[[int], Sequence[int]]) -> Schedule:
    """Cut each K/V copy over a slow link into pieces: a copy in step s becomes one piece in each step of `window(s)`.

    This keeps a slow link busy during several steps of work, and no step waits for a whole block.
       step     0       1       2       3                 step     0       1       2       3
       fast     n>1     1>2     2>3                        fast     n>1     1>2     2>3
       slow                             all of KV  ->      slow     1/4     1/4     1/4     1/4
    """
    copies: list[list[Copy]] = [[] for _ in schedule.steps]
    for index, step in enumerate(schedule.steps):
        for copy in step.copies:
            if copy.block.kind is not Kind.KV or not is_slow(copy):
                copies[index].append(copy)
                continue
            among = window(index)
            for target, content in zip(among, cut(copy.content, len(among)), strict=True):
                if content:
                    copies[target].append(copy._replace(content=content))
    steps = (ordered_step(new, step.work) for new, step in zip(copies, schedule.steps, strict=True))
    return replace(schedule, steps=tuple(steps))
