"""How a backward begins: no rank waits for its first block without work, and what is kept does not travel again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings

from ringattn.core.layout import make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.planner.choose import cheapest_prologue, plan_of
from ringattn.planner.cluster import CLUSTERS, REFERENCE, Cluster
from ringattn.planner.plan import live_bytes
from ringattn.schedule.content import size
from ringattn.schedule.ops import INPUTS, Merge, Schedule
from ringattn.schedule.routes import ROUTES, Route, part_of_rank, schedule_of
from tests.planner.placement_verifier import verify_placement
from tests.schedule.schedule_verifier import verify
from tests.schedule.test_schedule import by_rows
from tests.schedules import RING
from tests.strategies import Case, covering, simple

TRANSPOSED = [route for route in ROUTES.values() if route.transposed]
PROLOGUES = [
    pytest.param(replace(route, prologue=prologue), id=f"{route.name}-{prologue}",
                 marks=() if route.name in ("ring", "double_ring") else pytest.mark.slow)
    for route in TRANSPOSED for prologue in ("split", "kept")
]  # fmt: skip
each_prologue = pytest.mark.parametrize("route", PROLOGUES)


@each_prologue
@settings(max_examples=3)
@covering
def test_verified_placed_and_found_by_each_rank(route: Route, case: Case) -> None:
    whole = schedule_of(case.problem, route, True)
    verify(whole)
    for rank in range(case.ranks):
        mine, theirs = part_of_rank(case.problem, route, rank, True), whole.restricted_to(rank)
        assert by_rows(mine) == by_rows(theirs) and len(mine.kept) == len(theirs.kept)
        plans = [plan_of(case.problem, route, rank, backward) for backward in (False, True)]
        for plan in plans:
            verify_placement(plan)
        handed, begun = (
            [(one.kind, one.content, one.dtype) for one in map(plan.buffers.__getitem__, plan.kept)] for plan in plans
        )
        assert handed == begun


def idle(schedule: Schedule) -> list[tuple[int, int]]:
    """(step, rank) in which a rank that has own keys to work on waits for its first block without work."""
    found, begun = [], set()
    for at, step in enumerate(schedule.steps):
        busy = {item.rank for item in step.work if not isinstance(item, Merge)}
        waiting = {copy.dst for copy in step.copies if copy.block.kind in INPUTS}
        found += [(at, rank) for rank in sorted(waiting - busy - begun)]
        begun |= busy | waiting
    return found


@each_prologue
@pytest.mark.parametrize("ranks", [2, 6])
@pytest.mark.parametrize(("layout", "causal"), [("contiguous", False), ("zigzag", True), ("contiguous", True)])
def test_no_rank_waits_for_its_first_block_without_work(route: Route, ranks: int, layout: str, causal: bool) -> None:
    problem = simple(layout, 8 * ranks, ranks, causal=causal).problem
    assert idle(schedule_of(problem, replace(route, prologue="fetched"), True))
    assert not idle(schedule_of(problem, route, True))


@pytest.mark.parametrize("route", TRANSPOSED, ids=lambda route: route.name)
def test_kept_blocks_are_those_read_last_and_are_not_sent_again(route: Route) -> None:
    ranks, rows = 6, 8
    problem = simple("zigzag", rows * ranks, ranks, causal=True).problem
    fetched, kept = (schedule_of(problem, replace(route, prologue=way), True) for way in ("fetched", "kept"))
    count, row = {}, 64 * 2 * 2
    for name, schedule in (("fetched", fetched), ("kept", kept)):
        copies = [copy for step in schedule.steps for copy in step.copies if copy.block.kind in INPUTS]
        count[name] = sum(size(copy.content) for copy in copies)
    assert count["fetched"] - count["kept"] == sum(size(content) for *_, content in kept.kept) > 0
    for rank in range(ranks):
        there, back = (plan_of(problem, replace(route, prologue="kept"), rank, backward) for backward in (False, True))
        assert there.kept_bytes == back.kept_bytes == row * sum(size(rows) for at, _, rows in kept.kept if at == rank)
        without = plan_of(problem, replace(route, prologue="fetched"), rank, True)
        assert live_bytes(back) <= live_bytes(without)


def chosen(cluster: Cluster, tokens: int = 8192, kv_heads: int = 8, ranks: int = 4, route: Route = RING) -> str:
    layout, mask = make_layout("zigzag", tokens, ranks), make_mask(tokens, tokens, causal=True)
    return cheapest_prologue(Problem(layout, layout, mask, 1, 32, kv_heads, 128, 128, "bfloat16"), route, cluster)


def test_memory_is_spent_where_it_saves_more_time() -> None:
    h100 = CLUSTERS["h100"]
    assert chosen(h100, 1 << 20) == chosen(h100, 1 << 20, kv_heads=32) == "split"  # own work hides the fetch
    slow = replace(h100, bandwidth=1e9)
    assert chosen(slow, kv_heads=1) == "kept" and chosen(slow, kv_heads=32) == "split"
    # Not on the word of constants that describe no machine; and a call may cost more than it hides.
    assert chosen(replace(REFERENCE, bandwidth=1e9), kv_heads=1) == "split"
    assert chosen(replace(REFERENCE, call_s=1.0)) == "fetched"
    assert chosen(h100, ranks=1) == chosen(h100, route=ROUTES["ulysses"]) == "fetched"
    assert chosen(h100, route=replace(ROUTES["all_gather"], keeps=True)) == "fetched"
