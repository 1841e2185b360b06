"""Schedules that place each pair of ranks: who works for whom, when, and what travels for it."""

from __future__ import annotations

import pytest

from ringattn.schedule.ops import Merge, Schedule
from ringattn.schedule.routes import Route, schedule_of
from tests.schedules import BALANCED, PASS_Q
from tests.strategies import simple


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
