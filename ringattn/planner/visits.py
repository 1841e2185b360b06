"""Which work of a backward pass is the first on the dK/dV rows that it adds to, and which is the last.

Guarantees: a row is set by exactly one of a `Zero` and a `first` work, before all else that reads it; a work is `first`
where it is so for all of its rows. An engine sets every key row of the tiles of a first work, so a row that no query
sees is zero in the end.
Not covered: which blocks of a kernel these rows are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable
from ringattn.planner.fused_buffers import ONE
from ringattn.planner.plan import LOCAL, Add, AttendOp, AttendReceivedOp, Buffer, OwnSums, Plan, PlanStep
from ringattn.schedule.content import NOTHING, Content, HeadRows, merge_runs, size, union, whole, without
from ringattn.schedule.ops import Kind

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
