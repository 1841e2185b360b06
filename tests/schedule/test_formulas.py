"""The bytes and messages of plans equal those of the formulas in docs/schedules.md, and of others for masks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringattn.planner.choose import plan_of
from ringattn.schedule.route import GridRoute
from ringattn.schedule.routes import NUMBERED, ROUTES, Route, route_named
from tests.schedule.gallery import FORMULAS, quantities
from tests.schedules import ALL_GATHER, DIRECT, DOUBLE_RING, NODE_GATHER, RING
from tests.strategies import simple


def test_every_schedule_has_its_formulas() -> None:
    assert set(FORMULAS) == set(ROUTES)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("ranks", "group", "wire"), [(2, 2, None), (3, 1, None), (4, 2, "bfloat16"), (8, 1, None)])
def test_a_full_mask_sends_what_the_formula_says(name: str, ranks: int, group: int, wire: str | None) -> None:
    # The number of K/V heads equals the number of ranks, and there are enough rows for each piece of a double ring.
    problem = replace(
        simple("contiguous", 4 * ranks, ranks).problem,
        q_heads=group * ranks, kv_heads=ranks, head_dim=16, value_dim=8, batch=2, wire_dtype=wire, out_wire_dtype=wire,
    )  # fmt: skip
    route = ROUTES[name]
    letters = quantities(problem, len(route.grid_for(problem)) if isinstance(route, GridRoute) else 1)
    sent = [
        sum(getattr(plan_of(problem, route, rank, backward), quantity) for rank in range(ranks)) / ranks
        for backward in (False, True)
        for quantity in ("bytes_sent", "messages")
    ]
    assert sent == [eval(formula, {}, letters) for formula in FORMULAS[name]]


@pytest.mark.parametrize("name", NUMBERED)
@pytest.mark.parametrize(("ranks", "inner"), [(4, 1), (4, 4), (6, 3), (8, 4), (8, 2)])
def test_any_grid_sends_what_the_formula_says(name: str, ranks: int, inner: int) -> None:
    problem = replace(simple("zigzag", 16 * ranks, ranks).problem, q_heads=2 * inner, kv_heads=inner)
    letters = quantities(problem, ranks // inner)
    route = route_named(f"{name}:{inner}", ranks)
    for backward in (False, True):
        plans = [plan_of(problem, route, rank, backward) for rank in range(ranks)]
        nbytes, messages = FORMULAS[name][2 * backward : 2 * backward + 2]
        assert {plan.bytes_sent for plan in plans} == {eval(nbytes, {}, letters)}
        assert {plan.messages for plan in plans} == {eval(messages, {}, letters)}
        crossing = sum(
            send.elements * plan.element_bytes(send.buffer)
            for plan in plans for step in plan.steps for send in step.sends
            if send.peer // inner != plan.rank // inner and plan.buffers[send.buffer].kind == "KV"
        )  # fmt: skip
        if not backward:
            assert crossing == ranks * (letters["N"] - 1) * letters["M"]


@pytest.mark.parametrize("route", [RING, ALL_GATHER, DIRECT], ids=lambda route: route.name)
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 20])
def test_a_window_sends_the_rows_before_the_shard(route: Route, window: int) -> None:
    """With a window of W keys, each rank receives the W - 1 rows before its shard, or all rows if there are fewer."""
    ranks, rows = 5, 8
    problem = simple("contiguous", ranks * rows, ranks, window=(window - 1, 0)).problem
    row = quantities(problem, 1)["M"] // rows
    received = [min(window - 1, rank * rows) for rank in range(ranks)]
    for backward, of_row in ((False, row), (True, row + 2 * row)):
        sent = sum(plan_of(problem, route, rank, backward).bytes_sent for rank in range(ranks))
        assert sent == of_row * sum(received)
    messages = sum(plan_of(problem, route, rank, False).messages for rank in range(ranks))
    assert messages == sum(-(-count // rows) for count in received)


@pytest.mark.parametrize("route", [RING, ALL_GATHER, DIRECT, DOUBLE_RING, NODE_GATHER], ids=lambda route: route.name)
def test_a_causal_mask_over_contiguous_shards_sends_half(route: Route) -> None:
    ranks = 6
    problem = simple("contiguous", 4 * ranks, ranks, causal=True).problem
    letters = quantities(problem, 1)
    shards = ranks * (ranks - 1) // 2
    forward, backward = (
        sum(plan_of(problem, route, rank, back).bytes_sent for rank in range(ranks)) for back in (False, True)
    )
    # In these schedules, every rank that relays a block also reads it. In the bidirectional ring, some ranks only
    # relay.
    assert (forward, backward) == (shards * letters["M"], shards * (letters["M"] + letters["G"]))
