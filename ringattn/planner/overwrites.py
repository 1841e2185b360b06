"""Which work of a backward pass overwrites rows of dK/dV instead of adding to them, and which work finishes them.

Each row is set by exactly one `Zero`, or by one work item marked `overwrite`, before anything else reads it or adds
to it. A work item is marked only if that holds for all of its rows. The engine then sets every key row of the item's
tiles, so a row that no query attends to becomes zero. Kernel blocks are not considered here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable
from ringattn.planner.plan import LOCAL, ONE, Add, AttendOp, AttendReceivedOp, Buffer, OwnSums, Plan, PlanStep
from ringattn.schedule.content import NOTHING, Content, HeadRows, merge_runs, size, union, whole, without
from ringattn.schedule.ops import Kind

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
