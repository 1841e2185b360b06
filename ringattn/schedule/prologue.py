"""How a backward pass begins: what hides the fetch of the keys that its first work reads.

A backward begins with the blocks that its forward ended with. They are *fetched* anew, in a step without work; or the
step is filled with a part of the work on the rank's own keys, *split* off what runs beside the last hop; or the forward
pass has *kept* them.
       rank 0 of 4     fetched           split             kept
       prologue         -   | KV0>3       KV0 | KV0>3
       first work      KV1 | KV1>3       KV1 | KV1>3       KV1 | KV1>3
       last hop        KV0 | DKV3@0>3    KV0 | DKV3@0>3    KV0 | DKV3@0>3
Guarantees: what a rank does follows from its own steps, and what its readers keep from their reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from ringattn.core.tiling import TileTable
from ringattn.schedule.content import Content, chained
from ringattn.schedule.ops import INPUTS, AttendGrad, Block, HeadTiles, Merge, Schedule, Step, ordered_step
from ringattn.schedule.passes import RankBlock, is_on_received

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
