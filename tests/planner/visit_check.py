"""Check row by row which work overwrites a row of dK or dV, and which adds to it last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringattn.planner.overwrites import rows_of
from ringattn.planner.plan import LOCAL, ONE, Add, AttendOp, AttendReceivedOp, OwnSums, Plan
from ringattn.schedule.content import Content
from ringattn.schedule.ops import Kind

Cells = set[tuple[int, int]]
"""A set of (K/V head, row) pairs of a buffer, or of the local tensors."""


class Update(NamedTuple):
    """An operation on rows of a dK/dV buffer. It overwrites them or adds to them.

    `last`: whether it is the last operation on these rows of the local dK and dV.
    """

    buffer: int
    cells: Cells
    overwrite: bool
    last: bool
    label: str


def check_overwrites(plan: Plan) -> None:
    """Assert that each row of dK/dV is overwritten exactly once, before all additions, and not changed when final."""
    all_cells: dict[int, Cells] = {}
    for update in _updates(plan):
        if update.buffer != LOCAL:
            all_cells.setdefault(update.buffer, cells(rows_of(plan.buffers[update.buffer])))
    problem = plan.problem
    local = {(head, row) for head in range(problem.kv_heads) for row in range(problem.kv_layout.counts[plan.rank])}
    unset = all_cells | {LOCAL: set() if plan.own_sums is OwnSums.ZEROED else set(local)}
    final: Cells = set()
    for update in _updates(plan):
        left = unset[update.buffer]
        if update.overwrite:
            assert update.cells <= left, f"{update.label} overwrites rows that are set"
            left -= update.cells
        else:
            assert not update.cells & left, f"{update.label} adds to rows that are not set"
        if update.buffer == LOCAL:
            assert not update.cells & final, f"{update.label} adds to rows that are final"
            final |= update.cells if update.last else set()
        else:
            assert not update.last
    assert not any(unset.values()), f"rows that are never set: {unset}"
    assert final == (local if plan.own_sums is OwnSums.NONE else set())


def cells(content: Content) -> Cells:
    """Return the (K/V head, row) pairs of a content."""
    return {(head, row) for heads, runs in content for head in heads.members() for run in runs for row in run.members()}


def _updates(plan: Plan) -> Iterator[Update]:
    """Yield all operations of the plan on dK and dV, in order."""
    for step in plan.steps:
        for zero in step.zeros:
            yield Update(zero.buffer, cells(zero.rows), True, False, f"step {step.number}: zeros")
        for item in step.work:
            label = f"step {step.number}: {type(item).__name__}"
            if isinstance(item, AttendOp):
                yield Update(item.dkv, _cells_of(plan, item), item.overwrite, item.last, label)
            elif isinstance(item, AttendReceivedOp):
                rows = {(0, row) for tile in item.tiles for row in tile.k.rows.members()}
                yield Update(item.dkv, rows, item.overwrite, False, label)
            elif item.into == LOCAL and plan.buffers[item.part].kind is Kind.DKV:
                yield Update(LOCAL, cells(plan.buffers[item.part].content), item.overwrite, False, label)


def _cells_of(plan: Plan, item: AttendOp) -> Cells:
    """Return the (K/V head, row) pairs of dK and dV that the attention update `item` writes."""
    updated = set()
    for tile in item.tiles:
        heads = {head // plan.problem.group for head in tile.heads.members()}
        if item.owner is None and item.heads == ONE:
            heads = {0}
        rows = [item.dkv_row + row * item.dkv_step for row in tile.k.rows.members()]
        updated |= {(head, row) for head in heads for row in rows}
    return updated


def adds_of(plan: Plan) -> list[tuple[int, int]]:
    """Return (index of the plan's step, index in the step's work) of all additions to the local dK and dV."""
    return [
        (now, n)
        for now, step in enumerate(plan.steps)
        for n, item in enumerate(step.work)
        if isinstance(item, Add) and item.into == LOCAL and plan.buffers[item.part].kind is Kind.DKV
    ]
