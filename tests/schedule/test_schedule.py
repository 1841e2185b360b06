"""Schedules agree with brute force in their messages and steps, and rows are present when they are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

from ringattn import Ring
from ringattn.core import tiling
from ringattn.core.layout import make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.planner.choose import cheapest_prologue, plan_of
from ringattn.planner.cluster import CLUSTERS, REFERENCE, Cluster
from ringattn.planner.plan import live_bytes
from ringattn.schedule.content import read_sets_of, size, whole
from ringattn.schedule.ops import INPUTS, Copy, Kind, Merge, Schedule, Step, ordered_step
from ringattn.schedule.passes import deliveries_of, merged_keys, merged_queries, prune, transpose
from ringattn.schedule.routes import NUMBERED, ROUTES, Route, forward_of_rank, part_of_rank, route_named, schedule_of
from ringattn.schedule.text import grid, to_text
from ringattn.testing import dense_attention, run_ranks
from tests.doc_code import example
from tests.planner.placement_verifier import verify_placement
from tests.schedule import gallery
from tests.schedule.schedule_verifier import verify
from tests.schedules import ALL_GATHER, BIDIRECTIONAL, DIRECT, RING, schedule_params
from tests.strategies import Case, Spots, covering, simple, spots

GOLDEN = Path(__file__).parent / "golden"
Traffic = dict[tuple[int, int, int, int], Spots]
"""The rows that are sent, by (step, owner, src, dst)."""

each_schedule = pytest.mark.parametrize("route", schedule_params(quick=(), **ROUTES))
WHOLE = [RING, ALL_GATHER, DIRECT]
each_route = pytest.mark.parametrize("route", WHOLE, ids=[route.name for route in WHOLE])
"""The routes with one block per owner; test_rings.py and test_moved_queries.py test the others."""


def traffic(schedule: Schedule, kind: Kind = Kind.KV) -> Traffic:
    """Return the rows of all copies of one kind in a schedule."""
    return {
        (index, copy.block.owner, copy.src, copy.dst): spots(copy.content)
        for index, step in enumerate(schedule.steps)
        for copy in step.copies
        if copy.block.kind is kind
    }


def expected(case: Case, route: str) -> Traffic:
    """Return the messages of K/V that the forward pass of a route must send, by brute force."""
    messages = {}
    for owner in range(case.ranks):
        for distance in range(1, case.ranks):
            reader = (owner + distance) % case.ranks
            if route == "ring":
                key = distance - 1, owner, (reader - 1) % case.ranks, reader
                messages[key] = case.reads_beyond(owner, distance)
            else:
                messages[0 if route == "all_gather" else distance - 1, owner, owner, reader] = case.reads(owner, reader)
    return {key: rows for key, rows in messages.items() if rows}


@each_route
@covering
def test_forward_sends_what_is_read_and_nothing_else(route: Route, case: Case) -> None:
    assert traffic(schedule_of(case.problem, route, False)) == expected(case, route.name)


@each_schedule
@covering
def test_both_passes_are_verified(route: Route, case: Case) -> None:
    for backward in (False, True):
        verify(schedule_of(case.problem, route, backward))


@each_schedule
@covering
def test_the_part_of_a_rank_is_its_part_of_the_whole_schedule(route: Route, case: Case) -> None:
    # A message is in the part of its sender and in that of its receiver. Both parts must agree.
    for backward in (False, True):
        whole_schedule = schedule_of(case.problem, route, backward)
        for rank in range(case.ranks):
            assert part_of_rank(case.problem, route, rank, backward) == whole_schedule.restricted_to(rank)


def by_rows(schedule: Schedule) -> list[tuple]:
    """Return the steps with contents as sets, because dilated rows have several representations."""
    return [
        ([copy._replace(content=spots(copy.content)) for copy in step.copies], step.work) for step in schedule.steps
    ]


# --- passes and text -------------------------------------------------------------------------------------------------


def unpruned(schedule: Schedule) -> Schedule:
    """Return the schedule with whole shards in every message of K and V, including rows that no rank reads."""
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
def test_prune_does_not_change_schedules_made_by_rank(route: Route, case: Case) -> None:
    if route.parameter and route.by_head:
        route = replace(route, grid=route.grid_for(case.problem))
    schedule = schedule_of(case.problem, route, False)
    before = hash(schedule.steps)
    assert len(schedule.steps) == route.steps(case.ranks)
    assert by_rows(prune(schedule)) == by_rows(schedule) and hash(schedule.steps) == before
    # Blocks that are sent in pieces, or by head, cannot be widened to whole shards.
    if not (route.parameter or route.moves_queries):
        assert by_rows(prune(unpruned(schedule))) == by_rows(schedule)


def test_prune_keeps_the_rows_of_both_branches_of_a_fork() -> None:
    # Rank 1 does not read KV0. It relays KV0 to rank 2, and here also to rank 3; in a ring, rank 2 would relay it.
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


def test_steps_are_ordered_equally_from_any_input_order() -> None:
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


def test_the_page_of_schedules_is_up_to_date() -> None:
    page = gallery.PAGE.read_text(encoding="utf-8")
    assert page == gallery.renewed(page)  # to renew it: python -m tests.schedule.gallery


# --- the plan of a single rank: it equals its part of the whole, and its cost does not grow with the pairs of ranks ---


IN_ALL = "sub_rings", "ulysses"
"""Schedules in which a rank's part is cut out of the schedule of all ranks."""
ALONE = [name for name in ROUTES if name not in IN_ALL]


@pytest.mark.parametrize("route", [RING, DIRECT, ALL_GATHER, BIDIRECTIONAL], ids=lambda route: route.name)
@covering
def test_deliveries_of_ranks_equal_those_of_the_whole_forward_schedule(route: Route, case: Case) -> None:
    # `transpose` finds the chains of relays in the whole schedule, and compares their costs. A rank derives them from
    # the read sets.
    forward, back = (schedule_of(case.problem, route, backward) for backward in (False, True))
    assert by_rows(transpose(forward, deliveries_of(forward))) == by_rows(back)


def calls(name: str, ranks: int) -> int:
    """Return the number of Python calls that make one rank's two plans with empty caches."""
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


IN_GROUPS = {"ulysses_ring": "ulysses_ring:2", "node_gather": "node_gather:4"}
"""Schedules whose plans grow with the ranks of a group too, with groups of a constant size."""


@pytest.mark.parametrize("name", [IN_GROUPS.get(name, name) for name in ALONE])
def test_planning_one_rank_grows_with_its_steps(name: str) -> None:
    # With twice the ranks, one rank has twice the steps and messages; all ranks together have four times as many.
    few, many = calls(name, 24), calls(name, 48)
    assert many < 2.5 * few, f"{name}: {few} calls at 24 ranks, {many} at 48"


# --- prologues: no rank waits for its first block without work, and kept blocks are not sent again --------------------


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
def test_prologues_are_verified_placed_and_equal_on_each_rank(route: Route, case: Case) -> None:
    whole = schedule_of(case.problem, route, True)
    verify(whole)
    for rank in range(case.ranks):
        part, expected_part = part_of_rank(case.problem, route, rank, True), whole.restricted_to(rank)
        assert by_rows(part) == by_rows(expected_part) and len(part.kept) == len(expected_part.kept)
        plans = [plan_of(case.problem, route, rank, backward) for backward in (False, True)]
        for plan in plans:
            verify_placement(plan)
        kept_forward, kept_backward = (
            [(buffer.kind, buffer.content, buffer.dtype) for buffer in map(plan.buffers.__getitem__, plan.kept)]
            for plan in plans
        )
        assert kept_forward == kept_backward


def idle(schedule: Schedule) -> list[tuple[int, int]]:
    """Return the (step, rank) pairs in which a rank that has local work waits for its first block without work."""
    idle_steps, begun = [], set()
    for index, step in enumerate(schedule.steps):
        busy = {item.rank for item in step.work if not isinstance(item, Merge)}
        waiting = {copy.dst for copy in step.copies if copy.block.kind in INPUTS}
        idle_steps += [(index, rank) for rank in sorted(waiting - busy - begun)]
        begun |= busy | waiting
    return idle_steps


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
        forward, back = (
            plan_of(problem, replace(route, prologue="kept"), rank, backward) for backward in (False, True)
        )
        kept_rows = sum(size(rows) for holder, _, rows in kept.kept if holder == rank)
        assert forward.kept_bytes == back.kept_bytes == row * kept_rows
        without = plan_of(problem, replace(route, prologue="fetched"), rank, True)
        assert live_bytes(back) <= live_bytes(without)


def chosen(cluster: Cluster, tokens: int = 8192, kv_heads: int = 8, ranks: int = 4, route: Route = RING) -> str:
    layout, mask = make_layout("zigzag", tokens, ranks), make_mask(tokens, tokens, causal=True)
    return cheapest_prologue(Problem(layout, layout, mask, 1, 32, kv_heads, 128, 128, "bfloat16"), route, cluster)


def test_blocks_are_kept_if_that_saves_more_time_than_memory() -> None:
    h100 = CLUSTERS["h100"]
    assert chosen(h100, 1 << 20) == chosen(h100, 1 << 20, kv_heads=32) == "split"  # local work hides the fetch
    slow = replace(h100, bandwidth=1e9)
    assert chosen(slow, kv_heads=1) == "kept" and chosen(slow, kv_heads=32) == "split"
    # The constants of the reference describe no real machine, so they do not justify keeping blocks in memory. If a
    # call is expensive, splitting the local work costs more time than it hides.
    assert chosen(replace(REFERENCE, bandwidth=1e9), kv_heads=1) == "split"
    assert chosen(replace(REFERENCE, call_s=1.0)) == "fetched"
    assert chosen(h100, ranks=1) == chosen(h100, route=ROUTES["ulysses"]) == "fetched"
    assert chosen(h100, route=replace(ROUTES["all_gather"], keeps=True)) == "fetched"


# --- schedules by name: known names, refused names, and the needs of a new schedule -----------------------------------


TOLERANCE = 1e-12


@pytest.mark.parametrize(
    "text", ["0", "02", "+2", "-2", "2.0", "2 ", " 2", "\u0662", "\u00b2", "2_0", "0x2", "", "two", "2:2"]
)
@pytest.mark.parametrize("name", NUMBERED)
def test_anything_except_plain_numbers_is_refused(name: str, text: str) -> None:
    with pytest.raises(InputError, match=r"is not known; choose auto or one of .*, or double_ring:M, ulysses_ring:M, "):
        route_named(f"{name}:{text}", 4)


@pytest.mark.parametrize("name", [name for name in ROUTES if name not in NUMBERED])
def test_a_number_is_refused_if_a_schedule_takes_no_number(name: str) -> None:
    with pytest.raises(InputError, match=rf"schedule='{name}:2' is not known"):
        route_named(f"{name}:2", 4)


@pytest.mark.parametrize("name", NUMBERED)
def test_a_number_that_does_not_divide_the_ranks_is_refused(name: str) -> None:
    assert route_named(f"{name}:2", 4) != route_named(name, 4) == ROUTES[name] == route_named(f"{name}:2")
    with pytest.raises(InputError, match=rf"schedule='{name}:3': groups of 3 ranks do not divide 4 ranks"):
        route_named(f"{name}:3", 4)


@pytest.mark.parametrize("name", [None, 3, "", "auto", "Ring", "ring ", "star"])
def test_unknown_names_are_refused(name: Any) -> None:
    with pytest.raises(InputError, match=r"is not known.*; choose auto or one of ring, all_gather, direct") as caught:
        route_named(name)
    assert ("did you mean ring?" in str(caught.value)) == (name in ("Ring", "ring "))


@pytest.fixture
def far_first() -> Iterator[str]:
    """Register the example schedule of CONTRIBUTING.md for one test, and return its name."""
    before = dict(ROUTES)
    names = example("FarFirst")
    assert list(ROUTES) == [*before, "far_first"]
    yield names["FarFirst"]().name
    ROUTES.clear()
    ROUTES.update(before)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_example_of_a_new_schedule_is_exact(far_first: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, 29, 4, 8, dtype=torch.float64, generator=generator)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*leaves, causal=True)[0]
    expected_values = [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]

    def body(ring: Ring) -> tuple[list[Tensor], str]:
        seq = ring.sequence(29, layout=layout)
        local = [seq.shard(x).clone().requires_grad_() for x in (q, k, v)]
        out = ring.attention(*local, seq, causal=True, schedule=far_first)
        grads = torch.autograd.grad(out.sin().sum(), local)
        return [seq.gather(x.detach()) for x in (out, *grads)], str(ring.explain(seq, q=q, schedule=far_first))

    for values, explanation in run_ranks(4, body, poison=True):
        assert "far_first" in explanation
        for value, expected_value in zip(values, expected_values, strict=True):
            assert (value - expected_value).abs().max() < TOLERANCE
