"""Schedules against brute force: what travels, when, and that it is there when it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringattn.schedule.content import whole
from ringattn.schedule.ops import Attend, Copy, Kind, Schedule, Step, ordered_step
from ringattn.schedule.passes import deliveries_of, prune, transpose
from ringattn.schedule.routes import ROUTES, Route, part_of_rank, schedule_of
from ringattn.schedule.text import grid, to_text
from tests.schedule import gallery
from tests.schedule.schedule_verifier import verify
from tests.schedules import ALL_GATHER, DIRECT, RING, schedule_params
from tests.strategies import Case, Spots, covering, simple, spots

GOLDEN = Path(__file__).parent / "golden"
Traffic = dict[tuple[int, int, int, int], Spots]
"""(step, owner, src, dst): the rows that travel."""

each_schedule = pytest.mark.parametrize("route", schedule_params(**ROUTES))
WHOLE = [RING, ALL_GATHER, DIRECT]
each_route = pytest.mark.parametrize("route", WHOLE, ids=[route.name for route in WHOLE])
"""Those with one block for each owner; for the others see test_sub_rings.py and test_all_to_all.py."""


def traffic(schedule: Schedule, kind: Kind = Kind.KV) -> Traffic:
    """All copies of one kind."""
    return {
        (at, copy.block.owner, copy.src, copy.dst): spots(copy.content)
        for at, step in enumerate(schedule.steps)
        for copy in step.copies
        if copy.block.kind is kind
    }


def expected(case: Case, route: str) -> Traffic:
    """What the forward of a route has to send, and when."""
    found = {}
    for owner in range(case.ranks):
        for distance in range(1, case.ranks):
            reader = (owner + distance) % case.ranks
            if route == "ring":
                key = distance - 1, owner, (reader - 1) % case.ranks, reader
                found[key] = case.reads_beyond(owner, distance)
            else:
                found[0 if route == "all_gather" else distance - 1, owner, owner, reader] = case.reads(owner, reader)
    return {key: rows for key, rows in found.items() if rows}


@each_route
@covering
def test_forward_sends_what_is_read_and_nothing_else(route: Route, case: Case) -> None:
    assert traffic(schedule_of(case.problem, route, False)) == expected(case, route.name)


@each_schedule
@covering
def test_verified(route: Route, case: Case) -> None:
    for backward in (False, True):
        verify(schedule_of(case.problem, route, backward))


@each_schedule
@covering
def test_a_rank_finds_its_own_part(route: Route, case: Case) -> None:
    # A message is in the parts of both its ranks: they must say the same.
    for backward in (False, True):
        in_all = schedule_of(case.problem, route, backward)
        for rank in range(case.ranks):
            assert part_of_rank(case.problem, route, rank, backward) == in_all.restricted_to(rank)


def by_rows(schedule: Schedule) -> list[tuple]:
    """The steps with contents as sets: dilated rows may be written in several ways."""
    return [
        ([copy._replace(content=spots(copy.content)) for copy in step.copies], step.work) for step in schedule.steps
    ]


# --- known volumes ---------------------------------------------------------------------------------------------------


# --- passes and text -------------------------------------------------------------------------------------------------


def unpruned(schedule: Schedule) -> Schedule:
    """The same with whole shards in every message of keys."""
    problem = schedule.problem
    heads = [part.kv_heads for part in problem.parts]

    def widened(copy: Copy) -> Copy:
        return copy._replace(content=whole(problem.kv_layout.counts[copy.block.owner], heads))

    steps = (
        step._replace(copies=tuple(widened(copy) if copy.block.kind is Kind.KV else copy for copy in step.copies))
        for step in schedule.steps
    )
    return replace(schedule, steps=tuple(steps))


@each_schedule
@covering
def test_prune_leaves_what_ranks_find_alone(route: Route, case: Case) -> None:
    if route.parameter and route.by_head:
        route = replace(route, grid=route.grid_for(case.problem))
    found = schedule_of(case.problem, route, False)
    before = hash(found.steps)
    assert len(found.steps) == route.steps(case.ranks)
    assert by_rows(prune(found)) == by_rows(found) and hash(found.steps) == before
    # A block in pieces, or by head, is not in whole shards.
    if not (route.parameter or route.moves_queries):
        assert by_rows(prune(unpruned(found))) == by_rows(found)


def test_prune_keeps_what_both_branches_of_a_fork_want() -> None:
    # Rank 1 has no use for KV0 and hands it to 2 and, in place of 2, to 3.
    case = simple("striped", 7, 4, (0, 3, 5, 7))
    steps = list(unpruned(schedule_of(case.problem, RING, False)).steps)
    turned = next(copy for copy in steps[2].copies if copy.block.owner == 0)
    steps[2] = steps[2]._replace(copies=tuple(copy for copy in steps[2].copies if copy is not turned))
    work = tuple(item for item in steps[1].work if item.rank != 1)
    steps[1] = Step((*steps[1].copies, turned._replace(src=1)), work)
    pruned = prune(Schedule(case.problem, "fork", False, tuple(steps)))
    sent = {(src, dst): rows for (_, owner, src, dst), rows in traffic(pruned).items() if owner == 0}
    readers = [case.reads(0, reader) for reader in range(4)]
    assert sent == {(0, 1): readers[2] | readers[3], (1, 2): readers[2], (1, 3): readers[3]}
    assert readers[2] - readers[3] and readers[3] - readers[2]


def test_steps_are_ordered_the_same_whoever_lists_them() -> None:
    step = schedule_of(simple("zigzag", 24, 4).problem, DIRECT, True).steps[1]
    rng = np.random.default_rng(0)
    for _ in range(5):
        copies, work = ([x[i] for i in rng.permutation(len(x))] for x in (step.copies, step.work))
        assert ordered_step(copies, work) == step


@pytest.mark.parametrize("name", ["ring_causal_contiguous", "zigzag_grids"])
def test_golden(name: str) -> None:
    if name == "ring_causal_contiguous":
        schedule = schedule_of(simple("contiguous", 7, 3, causal=True).problem, RING, False)
        text = to_text(schedule) + "\n\n" + to_text(transpose(schedule, deliveries_of(schedule)))
    else:
        problem = simple("zigzag", 16, 4, causal=True).problem
        text = "\n\n".join(grid(schedule_of(problem, RING, backward)) for backward in (False, True))
    assert text + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_grid_marks_a_cell() -> None:
    schedule = schedule_of(simple("contiguous", 7, 3, causal=True).problem, RING, False)
    assert isinstance(schedule.steps[1].work[0], Attend)
    marked = grid(schedule, mark=(1, 2)).splitlines()
    assert [line.count(">>") for line in marked] == [0, 0, 0, 1, 0] and ">>KV1" in marked[3]
    assert ">>rank 1" in grid(schedule, mark=(-1, 1)).splitlines()[0]


def test_the_page_of_schedules_is_what_they_are() -> None:
    page = gallery.PAGE.read_text(encoding="utf-8")
    assert page == gallery.renewed(page)  # else: python -m tests.schedule.gallery
