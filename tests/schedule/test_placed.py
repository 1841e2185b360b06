"""Schedules that place each pair of ranks: who works for whom, when, and what travels for it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from ringattn.planner.choose import plan_of
from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind, Merge, Schedule
from ringattn.schedule.routes import Route, schedule_of
from tests.planner.placement_verifier import verify_placement
from tests.schedule.schedule_verifier import verify
from tests.schedules import BALANCED, PASS_Q
from tests.strategies import Case, cases, simple


@settings(max_examples=12)
@given(cases())
def test_verified_and_placed(case: Case) -> None:
    for route in (PASS_Q, BALANCED):
        for backward in (False, True):
            verify(schedule_of(case.problem, route, backward))
            for rank in range(case.ranks):
                verify_placement(plan_of(case.problem, route, rank, backward))


def sent(schedule: Schedule) -> Counter[Kind]:
    """Rows times heads by kind."""
    rows: Counter[Kind] = Counter()
    for step in schedule.steps:
        for copy in step.copies:
            rows[copy.block.kind] += size(copy.content)
    return rows


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_pass_q_moves_queries_and_outputs_and_no_keys(ranks: int) -> None:
    problem = simple("contiguous", 6 * ranks, ranks, heads=4).problem
    rows = ranks * (ranks - 1) * 6 * 4
    assert sent(schedule_of(problem, PASS_Q, False)) == {Kind.Q: rows, Kind.OUT: rows}
    assert sent(schedule_of(problem, PASS_Q, True)) == {Kind.Q: rows, Kind.GRAD_OUT: rows, Kind.DQ: rows}


def pairs(schedule: Schedule) -> list[list[int]]:
    """By step and rank: (q, k) pairs times heads."""
    ranks = schedule.problem.world_size
    found = [[0] * ranks for _ in schedule.steps]
    for at, step in enumerate(schedule.steps):
        for item in step.work:
            if not isinstance(item, Merge):
                found[at][item.rank] += sum(table.area() for _, table in item.tiles)
    return found


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_balanced_takes_half_the_steps_of_a_causal_ring(ranks: int) -> None:
    problem = simple("contiguous", 8 * ranks, ranks, causal=True).problem
    for backward in (False, True):
        work = [step for step in pairs(schedule_of(problem, BALANCED, backward)) if any(step)]
        assert len(work) == ranks // 2 + 1
        # Every rank has a whole block in each step but the first, a triangle, and with an even number half the last.
        assert work[0] == [36] * ranks
        assert all(step == [64] * ranks for step in work[1 : (ranks + 1) // 2])
        assert ranks % 2 or sorted(work[-1]) == [0] * (ranks // 2) + [64] * (ranks // 2)


@pytest.mark.parametrize("route", [PASS_Q, BALANCED], ids=["pass_q", "balanced"])
def test_results_travel_beside_later_work(route: Route) -> None:
    # In every step with results on the way, but the last ones, ranks work.
    schedule = schedule_of(simple("contiguous", 40, 5).problem, route, False)
    busy = [any(not isinstance(item, Merge) for item in step.work) for step in schedule.steps]
    assert busy == [True] * (len(busy) - 2) + [False] * 2
