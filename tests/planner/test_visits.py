"""First and last works on dK/dV: the savings by hand, and flags broken on purpose, which `check_visits` finds.

That every plan passes it is in test_place.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ringattn.planner.choose import plan_of
from ringattn.planner.plan import LOCAL, AttendOp, OwnSums, Plan
from ringattn.schedule.content import HeadRows, StridedRange, size, without
from ringattn.schedule.routes import ROUTES
from tests.planner.visit_check import adds_of, check_visits
from tests.strategies import simple

RANKS = 4


def plans(layout: str, route: str, ranks: int = RANKS, **mask: object) -> list[Plan]:
    """The backward plans of all ranks."""
    problem = simple(layout, 64, ranks, heads=4, **mask).problem  # type: ignore[arg-type]
    return [plan_of(problem, ROUTES[route], rank, True) for rank in range(ranks)]


def zeroed(plan: Plan) -> int:
    """Rows times K/V heads that begin at zero, in buffers."""
    return sum(size(zero.rows) for step in plan.steps for zero in step.zeros)


@pytest.mark.parametrize("route", ["ring", "all_gather", "sub_rings", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_no_own_row_begins_at_zero(layout: str, route: str) -> None:
    """And the keys of the last rank, which causal masks keep to it in a contiguous layout, have no accumulators."""
    ends = OwnSums.NONE if layout == "contiguous" else OwnSums.UNSET
    assert [plan.own_sums for plan in plans(layout, route, causal=True)] == [OwnSums.UNSET] * (RANKS - 1) + [ends]


def test_own_rows_begin_at_zero_where_a_work_meets_set_and_unset_ones() -> None:
    """Others read the first keys of rank 0 of a zigzag, and their sums arrive before it attends to all of its own."""
    found = [plan.own_sums for plan in plans("zigzag", "direct", causal=True)]
    assert found == [OwnSums.ZEROED] + [OwnSums.UNSET] * (RANKS - 1)


def test_a_rank_alone_has_no_sums() -> None:
    (plan,) = plans("contiguous", "ring", ranks=1, causal=True)
    assert plan.own_sums is OwnSums.NONE and zeroed(plan) == 0


def test_a_relay_zeroes_only_what_it_adds_nothing_to() -> None:
    """Rank 3 of a zigzag sees the first half of the blocks of ranks 1 and 2 and relays all: 8 rows each of 4 heads."""
    assert [zeroed(plan) for plan in plans("zigzag", "ring", causal=True)] == [0, 0, 4 * 8, 2 * 4 * 8]
    assert [zeroed(plan) for plan in plans("contiguous", "ring", causal=True)] == [0] * RANKS


def test_what_a_content_lacks_of_another() -> None:
    def part(*runs: tuple[int, int, int]) -> HeadRows:
        return HeadRows(StridedRange(0, 2), tuple(StridedRange(*run) for run in runs))

    assert without((part((0, 10, 1)),), (part((2, 3, 2)),)) == (part((0, 2, 1), (3, 2, 2), (7, 3, 1)),)
    assert without((part((0, 4, 1)),), (part((0, 4, 1)),)) == ()
    assert without((part((0, 4, 1)),), ()) == (part((0, 4, 1)),)


def changed(plan: Plan, change: Callable[[AttendOp], AttendOp], only_own: bool = False) -> Plan:
    """The plan with its attention updates changed."""
    steps = [
        step._replace(work=tuple(
            change(item) if isinstance(item, AttendOp) and (item.dkv == LOCAL or not only_own) else item
            for item in step.work
        ))
        for step in plan.steps
    ]  # fmt: skip
    return replace(plan, steps=tuple(steps))


def test_a_first_flag_that_is_missing() -> None:
    plan = changed(plans("zigzag", "ring", causal=True)[1], lambda item: item._replace(first=False))
    with pytest.raises(AssertionError, match="adds to rows that nothing has set"):
        check_visits(plan)


def test_a_first_flag_too_late() -> None:
    """On the sum that arrives for rows to which the own work has added."""
    plan = plans("zigzag", "ring", causal=True)[1]
    ((now, n),) = adds_of(plan)
    work = list(plan.steps[now].work)
    work[n] = work[n]._replace(first=True)
    steps = (*plan.steps[:now], plan.steps[now]._replace(work=tuple(work)), *plan.steps[now + 1 :])
    with pytest.raises(AssertionError, match="Add is not the first on its rows"):
        check_visits(replace(plan, steps=steps))


def test_a_last_flag_too_early() -> None:
    plan = changed(plans("zigzag", "ring", causal=True)[1], lambda item: item._replace(last=True), only_own=True)
    with pytest.raises(AssertionError, match="Add adds to rows that are final"):
        check_visits(plan)


def test_rows_that_are_left_unset() -> None:
    plan = plans("zigzag", "ring", causal=True)[3]
    steps = tuple(step._replace(zeros=()) for step in plan.steps)
    with pytest.raises(AssertionError, match="rows that nothing"):
        check_visits(replace(plan, steps=steps))
