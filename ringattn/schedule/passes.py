"""Passes: pure functions from schedule to schedule, for any copy graph.

`prune` cuts every payload down to the rows and heads that some remaining receiver reads; `transpose` turns a pruned
forward schedule into its backward. `prologue` gives a backward pass its start, which hides the fetch of the keys that
its first work reads.

A backward pass begins with the blocks that its forward pass ended with. They are *fetched* again in a step without
work; or that step is filled with a part of the work on the rank's own keys, *split* off what runs during the last hop;
or the forward pass has *kept* them.
       rank 0 of 4     fetched           split             kept
       prologue         -   | KV0>3       KV0 | KV0>3
       first work      KV1 | KV1>3       KV1 | KV1>3       KV1 | KV1>3
       last hop        KV0 | DKV3@0>3    KV0 | DKV3@0>3    KV0 | DKV3@0>3
Guarantees: a rank derives its steps from its own schedule, and what its readers keep from their reads.
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
"""A kernel's key block: own keys are split at a multiple of it, if there are so many."""

SHARE = 4
"""Of so many own keys one is for the prologue. A causal mask sees them most, so they are 1/4 to 1/2 of the work; and a
hop of K/V in a half type is half of one of dK/dV in float32."""


def last_read(schedule: Schedule) -> frozenset[RankBlock]:
    """Of a forward schedule: the others' blocks that each rank reads in the last step in which it works."""
    found: dict[int, list[Block]] = {}
    for step in schedule.steps:
        now: dict[int, list[Block]] = defaultdict(list)
        for item in step.work:
            if not isinstance(item, Merge):
                now[item.rank] += [item.kv] if item.kv.owner != item.rank else []
        found |= now
    return frozenset((rank, block) for rank, blocks in found.items() for block in blocks)


def arrived(schedule: Schedule, only: Iterable[RankBlock] | None = None) -> tuple[tuple[int, Block, Content], ...]:
    """The others' inputs that come in a pass, a block's pieces together; of all, or of some ranks and blocks."""
    pieces: dict[RankBlock, list[Content]] = defaultdict(list)
    wanted = None if only is None else set(only)
    for step in schedule.steps:
        for copy in step.copies:
            if copy.block.kind in INPUTS and (wanted is None or (copy.dst, copy.block) in wanted):
                pieces[copy.dst, copy.block].append(copy.content)
    return tuple(
        (*spot, some[0] if len(some) == 1 else chained(part for piece in some for part in piece))
        for spot, some in sorted(pieces.items())
    )


def split_local(schedule: Schedule) -> Schedule:
    """A backward schedule in which ranks that would only wait for their first block work on some own keys meanwhile."""
    first: dict[int, int] = {}
    own: dict[int, tuple[int, AttendGrad]] = {}
    for at, step in enumerate(schedule.steps):
        for copy in step.copies:
            if copy.block.kind in INPUTS:
                first.setdefault(copy.dst, at)
        for item in step.work:
            if isinstance(item, AttendGrad) and item.kv.owner == item.rank and not is_on_received(item):
                own[item.rank] = at, item
    steps = list(schedule.steps)
    for rank, at in first.items():
        busy = any(item.rank == rank and not isinstance(item, Merge) for item in steps[at].work)
        if busy or rank not in own or own[rank][0] < at:
            continue
        there, item = own[rank]
        early, late = split_keys(item.tiles, schedule.problem.kv_layout.counts[rank])
        if early and late:
            rest = (item._replace(tiles=late) if one is item else one for one in steps[there].work)
            steps[there] = Step(steps[there].copies, tuple(rest))
            steps[at] = ordered_step(steps[at].copies, [*steps[at].work, item._replace(tiles=early)])
    return replace(schedule, steps=tuple(steps))


def split_keys(parts: tuple[HeadTiles, ...], rows: int) -> tuple[tuple[HeadTiles, ...], tuple[HeadTiles, ...]]:
    """The tiles of the first keys of a shard of so many rows, and of the others."""
    # Keys rather than heads or queries: the first keys are what most queries see, so an engine that knows which work is
    # the first on each query still does; and the two works set different rows of dK and dV.
    row = rows // SHARE // KEY_ROWS * KEY_ROWS or max(1, rows // SHARE)
    sides: tuple[list[HeadTiles], list[HeadTiles]] = [], []
    for heads, table in parts:
        for side, piece in zip(sides, _cut(table, row), strict=True):
            if len(piece):
                side.append(HeadTiles(heads, piece))
    return tuple(sides[0]), tuple(sides[1])


def _cut(table: TileTable, row: int) -> tuple[TileTable, TileTable]:
    """The tiles with the key rows before `row`, and with the others."""
    before = np.clip(-((table.k_row - row) // table.k_row_stride), 0, table.k_count)
    after = table.k_count - before
    above = table.replaced(
        k_count=after, k_start=table.k_start + before * table.k_stride, k_row=table.k_row + before * table.k_row_stride
    )
    return table.replaced(k_count=before).take(before > 0), above.take(after > 0)


# --- passes -----------------------------------------------------------------------------------------------------------


RankBlock = tuple[int, Block]
"""A rank and a block it may hold."""

DUAL = {Kind.KV: Kind.DKV, Kind.Q: Kind.DQ}
"""Of the inputs their gradients."""

Delivery = tuple[int, Copy]
"""A K/V copy of the backward, and the forward step whose undoing it runs beside (one past the last: the prologue)."""


def rows_read(tiles: tuple[HeadTiles, ...]) -> Content:
    """The rows of the owner's shard that the tiles read."""
    parts = (HeadRows(heads, merged_keys(table.array[:, ROWS_OF_K].tobytes())) for heads, table in tiles)
    return tuple(part for part in parts if part.rows)


@bounded
def merged_keys(columns: bytes) -> tuple[StridedRange, ...]:
    """The union of the key rows of some tiles, by their columns count, first row and stride."""
    rows = np.frombuffer(columns, np.int64).reshape(-1, 3).tolist()
    return merge_runs(StridedRange(row, count, stride) for count, row, stride in rows)


def rows_asked(tiles: tuple[HeadTiles, ...]) -> Content:
    """The query rows of the tiles, for each query head."""
    # Keys of many owners are asked by the same queries: alike tables are looked at once.
    tables = ((table.array[:, ROWS_OF_Q].tobytes(), table.array[:, HEADS].tobytes()) for _, table in tiles)
    return merged_queries(tuple(dict.fromkeys(tables)))


@bounded
def merged_queries(tables: tuple[tuple[bytes, bytes], ...]) -> Content:
    """The query rows of some tables, by their columns count, first row and stride, and first head and heads."""
    by_head: dict[int, dict[StridedRange, None]] = defaultdict(dict)
    for rows, heads in tables:
        for run, (first, held) in zip(*(np.frombuffer(one, np.int64).reshape(-1, n).tolist()
                                        for one, n in ((rows, 3), (heads, 2))), strict=True):  # fmt: skip
            for head in range(first, first + held):
                by_head[head][StridedRange(run[1], run[0], run[2])] = None
    return merged({StridedRange(head, 1): list(runs) for head, runs in by_head.items()})


def is_on_received(item: Attend | AttendGrad) -> bool:
    """Whether the queries were received too, as in remote-head attention: only then are they named by a sub-ring."""
    return item.q.ring is not None


def inputs_of(item: Attend | AttendGrad) -> list[tuple[Block, Content]]:
    """The blocks that a work item reads and that another rank may have sent, with the rows that it reads."""
    found = [(item.kv, rows_read(item.tiles))]
    if is_on_received(item):
        asked = rows_asked(item.tiles)
        found += [(block, asked) for block in ((item.q,) if isinstance(item, Attend) else (item.q, item.inputs))]
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
            if copy.block.kind not in INPUTS:
                copies.append(copy)
                continue
            # What is received in this step need not be held before it. A piece brings its own rows only.
            spot = copy.dst, copy.block
            asked = wanted.pop(spot, NOTHING)
            if content := common(asked, copy.content):
                copies.append(copy._replace(content=content))
                wanted[spot] = NOTHING if content is asked else without(asked, content)
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


def transpose(schedule: Schedule, deliveries: Iterable[Delivery]) -> Schedule:
    """The backward of a pruned forward schedule.

    Forward step s becomes a main step and a merge step; one prologue step fetches what the first main step reads.
    A copy of K/V in step s becomes a copy of dK/dV the other way beside main step s, merged right after it; so does one
    of Q. A copy of OUT becomes one of its gradient, with Q beside it. K/V is delivered again, by `deliveries`.
    """
    last = len(schedule.steps) - 1
    # One prologue step, then for forward steps last .. 0 a main and a merge step: 1 + 2 * (last + 1).
    copies: list[list[Copy]] = [[] for _ in range(2 * last + 3)]
    work: list[list[Work]] = [[] for _ in copies]
    for s, step in enumerate(schedule.steps):
        main = main_step(s, last)
        # A merge of outputs is no part of the backward: each part has the gradient of the whole.
        work[main] += [attend_grad(item) for item in step.work if isinstance(item, Attend)]
        for copy in step.copies:
            if copy.block.kind is Kind.OUT:
                came = (copy.block._replace(kind=kind, origin=None) for kind in (Kind.Q, Kind.GRAD_OUT))
                copies[main] += [Copy(block, copy.dst, copy.src, copy.content) for block in came]
                continue
            # The receiver's sum for these rows is returned along the same edge, and added to the sender's own sum.
            part = copy.block._replace(kind=DUAL[copy.block.kind], origin=copy.dst)
            copies[main].append(Copy(part, copy.dst, copy.src, copy.content))
            into = own_sum(part) if copy.src == part.owner else part._replace(origin=copy.src)
            work[main + 1].append(Merge(copy.src, into, part))
    # What is made of own rows beside received ones lies apart, until nothing more is added to it.
    grads = [item for items in work for item in items if isinstance(item, AttendGrad)]
    made = {block for item in grads for block in ((item.dkv, item.dq) if is_on_received(item) else (item.dkv,))}
    alone = sorted(block for block in made if block.origin == block.owner and block.ring is not None)
    work[-1] += [Merge(block.owner, own_sum(block), block) for block in alone]
    for at, copy in deliveries:
        # `at` is the forward step of which the main step runs beside the delivery; one past the last is the prologue
        # step.
        copies[main_step(at, last) if at <= last else 0].append(copy)
    return Schedule(schedule.problem, schedule.name, True, tuple(map(ordered_step, copies, work)))


def own_sum(part: Block) -> Block:
    """The owner's own gradient, to which its parts of all ranks and sub-rings are added."""
    return Block(part.kind, part.owner, part.owner if part.kind is Kind.DKV else None)


def main_step(forward_step: int, last: int) -> int:
    """The backward step that undoes `forward_step`, where `last` is the last forward step."""
    return 1 + 2 * (last - forward_step)


def deliveries_of(schedule: Schedule) -> list[Delivery]:
    """The K/V copies of the backward.

    Where an owner's block was relayed, it goes from its owner to the last receiver and back along the reversed edges if
    that sends no more than its owner sending to every reader, else the owner sends to every reader. An owner that sends
    in two directions has a chain in each.
    """
    edges: dict[Block, dict[int, list[tuple[int, Copy]]]] = defaultdict(lambda: defaultdict(list))  # block: {src: ...}
    for s, step in enumerate(schedule.steps):
        for copy in step.copies:
            edges[copy.block][copy.src].append((s, copy))
    found: list[Delivery] = []
    for block, readers in readers_of(schedule).items():
        rows = {reader: content for _, reader, content in readers}
        for first in edges[block][block.owner]:
            chain = _chain(first, edges[block])
            reached = {rank for _, rank in chain}
            # The block is read in main step s, so it travels beside the main step before, that of forward step s + 1.
            direct = [(s + 1, Copy(block, block.owner, to, content)) for s, to, content in readers if to in reached]
            back = _relay_back(block, chain, rows)
            found += back if back and delivered(back) <= delivered(direct) else direct
    return found


def readers_of(schedule: Schedule) -> dict[Block, list[tuple[int, int, Content]]]:
    """By block of another rank: the steps in which it is read, the readers and the rows."""
    found: dict[Block, list[tuple[int, int, Content]]] = defaultdict(list)
    for s, step in enumerate(schedule.steps):
        for item in step.work:
            if isinstance(item, (Attend, AttendGrad)) and item.rank != item.kv.owner:
                found[item.kv].append((s, item.rank, rows_read(item.tiles)))
    return found


def _chain(first: tuple[int, Copy], edges: dict[int, list[tuple[int, Copy]]]) -> list[tuple[int, int]]:
    """The receivers of a block one after another, each with the step of its copy: 0 -> 1 -> 2 -> 3."""
    chain, (step, copy) = [], first
    chain.append((step, copy.dst))
    # A relay sends a block at most once, so its edges form a chain.
    while edges[copy.dst]:
        ((step, copy),) = edges[copy.dst]
        chain.append((step, copy.dst))
    return chain


def _relay_back(block: Block, chain: list[tuple[int, int]], rows: dict[int, Content]) -> list[Delivery]:
    """From the owner to the last receiver of a chain and back to the owner; nothing where the block was not relayed."""
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


def delivered(copies: Iterable[Delivery]) -> int:
    """Rows times heads that deliveries send."""
    return sum(size(copy.content) for _, copy in copies)


def spread(schedule: Schedule, is_slow: Callable[[Copy], bool], window: Callable[[int], Sequence[int]]) -> Schedule:
    """Cut each K/V copy over a slow link into pieces, one for each step of `window(step)` of its own step.

    So a slow link is busy beside several steps of work, and no step waits for all of a block.
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
            for at, content in zip(among, cut(copy.content, len(among)), strict=True):
                if content:
                    copies[at].append(copy._replace(content=content))
    steps = (ordered_step(new, step.work) for new, step in zip(copies, schedule.steps, strict=True))
    return replace(schedule, steps=tuple(steps))
