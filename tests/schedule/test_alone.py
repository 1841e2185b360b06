"""A rank's plan, made alone: what it is to be, and that its making does not grow with the pairs of ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import pytest

from ringattn.core import tiling
from ringattn.core.problem import Problem
from ringattn.planner.choose import plan_of
from ringattn.schedule.content import read_sets_of
from ringattn.schedule.passes import deliveries_of, merged_keys, merged_queries, transpose
from ringattn.schedule.routes import ROUTES, Route, forward_of_rank, route_named, schedule_of
from tests.schedule.test_schedule import by_rows
from tests.schedules import ALL_GATHER, BIDIRECTIONAL, DIRECT, RING
from tests.strategies import Case, covering, simple

IN_ALL = "sub_rings", "ulysses"
"""Schedules of which a rank's part is taken out of that of all ranks."""
ALONE = [name for name in ROUTES if name not in IN_ALL]


@pytest.mark.parametrize("route", [RING, DIRECT, ALL_GATHER, BIDIRECTIONAL], ids=lambda route: route.name)
@covering
def test_what_ranks_deliver_is_what_the_whole_forward_tells(route: Route, case: Case) -> None:
    # `transpose` finds the chains of a whole schedule and weighs each; a rank knows them from the reads.
    there, back = (schedule_of(case.problem, route, backward) for backward in (False, True))
    assert by_rows(transpose(there, deliveries_of(there))) == by_rows(back)


def calls(name: str, ranks: int) -> int:
    """Calls of Python functions in which one rank's two plans are made, as if for the first time."""
    problem: Problem = simple("zigzag", 16 * ranks, ranks, causal=True).problem
    route = replace(
        route_named(name, ranks), prologue="kept" if ROUTES[name.partition(":")[0]].transposed else "fetched"
    )
    for cached in (plan_of, forward_of_rank, schedule_of, read_sets_of, tiling.cut, merged_queries, merged_keys):
        cached.cache_clear()
    count = 0

    def counted(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        for backward in (False, True):
            plan_of(problem, route, ranks // 2, backward)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", ["ulysses_ring:2" if name == "ulysses_ring" else name for name in ALONE])
def test_planning_one_rank_grows_with_its_steps(name: str) -> None:
    # Twice the ranks are twice the steps and messages of one of them. All ranks' would be four times as many.
    few, many = calls(name, 24), calls(name, 48)
    assert many < 2.5 * few, f"{name}: {few} calls at 24 ranks, {many} at 48"
