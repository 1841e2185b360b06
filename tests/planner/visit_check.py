"""Which work sets a row of dK or dV first and which adds to it last, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringattn.planner.place import rows_of
from ringattn.planner.plan import LOCAL, Add, AttendOp, AttendReceivedOp, OwnSums, Plan
from ringattn.schedule.content import Content
from ringattn.schedule.ops import Kind

Cells = set[tuple[int, int]]
"""(K/V head, row) of a buffer, or of the own tensors."""


class Touch(NamedTuple):
    """Something that sets rows of a dK/dV buffer, or adds to them."""

    buffer: int
    cells: Cells
    first: bool
    last: bool
    what: str


def check_visits(plan: Plan) -> None:
    """Every row is set before all that adds to it, once, and what is final is not added to."""
    every: dict[int, Cells] = {}
    for touch in _touches(plan):
        if touch.buffer != LOCAL:
            every.setdefault(touch.buffer, cells(rows_of(plan.buffers[touch.buffer])))
    problem = plan.problem
    own = {(head, row) for head in range(problem.kv_heads) for row in range(problem.kv_layout.counts[plan.rank])}
    unset = every | {LOCAL: set() if plan.own_sums is OwnSums.ZEROED else set(own)}
    final: Cells = set()
    for touch in _touches(plan):
        left = unset[touch.buffer]
        if touch.first:
            assert touch.cells <= left, f"{touch.what} is not the first on its rows"
            left -= touch.cells
        else:
            assert not touch.cells & left, f"{touch.what} adds to rows that nothing has set"
        if touch.buffer == LOCAL:
            assert not touch.cells & final, f"{touch.what} adds to rows that are final"
            final |= touch.cells if touch.last else set()
        else:
            assert not touch.last
    assert not any(unset.values()), f"rows that nothing sets: {unset}"
    assert final == (own if plan.own_sums is OwnSums.NONE else set())


def cells(content: Content) -> Cells:
    """Those of a content."""
    return {(head, row) for heads, runs in content for head in heads.members() for run in runs for row in run.members()}


def _touches(plan: Plan) -> Iterator[Touch]:
    for step in plan.steps:
        for zero in step.zeros:
            yield Touch(zero.buffer, cells(zero.rows), True, False, f"step {step.number}: zeros")
        for item in step.work:
            what = f"step {step.number}: {type(item).__name__}"
            if isinstance(item, AttendOp):
                yield Touch(item.dkv, _cells_of(plan, item), item.overwrite, item.last, what)
            elif isinstance(item, AttendReceivedOp):
                rows = {(0, row) for tile in item.tiles for row in tile.k.rows.members()}
                yield Touch(item.dkv, rows, item.overwrite, False, what)
            elif item.into == LOCAL and plan.buffers[item.part].kind is Kind.DKV:
                yield Touch(LOCAL, cells(plan.buffers[item.part].content), item.overwrite, False, what)


def _cells_of(plan: Plan, item: AttendOp) -> Cells:
    found = set()
    for tile in item.tiles:
        heads = {head // plan.problem.group for head in tile.heads.members()}
        if item.owner is None:
            heads = {0}  # every row of a fused buffer has a head of its own
        rows = [item.dkv_row + row * item.dkv_step for row in tile.k.rows.members()]
        found |= {(head, row) for head in heads for row in rows}
    return found


def adds_of(plan: Plan) -> list[tuple[int, int]]:
    """(plan step, place in its work) of what is added to the own tensors."""
    return [
        (now, n)
        for now, step in enumerate(plan.steps)
        for n, item in enumerate(step.work)
        if isinstance(item, Add) and item.into == LOCAL and plan.buffers[item.part].kind is Kind.DKV
    ]
