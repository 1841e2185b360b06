"""Double, bidirectional and sub-rings send the right messages, in the right numbers and steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.problem import Problem
from ringattn.errors import InputError, PlanError
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import CLUSTERS, Links
from ringattn.planner.plan import LOCAL, Add
from ringattn.schedule.content import chained, contains, cut, size
from ringattn.schedule.ops import Block, Copy, Kind, Schedule
from ringattn.schedule.passes import rows_read
from ringattn.schedule.route import equal_groups, grid_of, square_side
from ringattn.schedule.routes import NUMBERED, ROUTES, Route, route_named, schedule_of
from tests.planner.placement_verifier import verify_placement
from tests.schedule.schedule_verifier import verify
from tests.schedules import DOUBLE_RING, RING, SUB_RINGS, ULYSSES_RING
from tests.strategies import Case, cases, covering, geometric, simple, spots, wire_order

INNER = [(4, 2), (6, 2), (6, 3), (6, 1), (6, 6), (8, 4)]
"""Pairs of the number of ranks and the number of ranks in an inner ring."""


def crossings(schedule: Schedule, inner: int, kinds: tuple[Kind, ...]) -> list[tuple[int, Copy]]:
    """Return (index of the step, copy) for the copies of these kinds between nodes of `inner` ranks."""
    return [
        (index, copy) for index, step in enumerate(schedule.steps) for copy in step.copies
        if copy.block.kind in kinds and copy.src // inner != copy.dst // inner
    ]  # fmt: skip


@pytest.mark.parametrize("name", NUMBERED)
@settings(max_examples=12)
@given(cases(), st.data())
def test_every_grid_is_verified_and_placed(name: str, case: Case, data: st.DataObject) -> None:
    inner = data.draw(st.sampled_from([m for m in range(1, case.ranks + 1) if case.ranks % m == 0]))
    route = route_named(f"{name}:{inner}", case.ranks)
    for backward in (False, True):
        verify(schedule_of(case.problem, route, backward))
        for rank in range(case.ranks):
            verify_placement(plan_of(case.problem, route, rank, backward))


@pytest.mark.parametrize(("ranks", "inner"), INNER)
def test_each_block_crosses_to_each_node_once(ranks: int, inner: int) -> None:
    problem = simple("contiguous", 24 * ranks, ranks).problem
    route, nodes = route_named(f"double_ring:{inner}", ranks), ranks // inner
    for backward in (False, True):
        schedule = schedule_of(problem, route, backward)
        for kind in (Kind.KV, Kind.DKV) if backward else (Kind.KV,):
            rows = Counter()
            for _, copy in crossings(schedule, inner, (kind,)):
                rows[copy.block.owner, copy.dst // inner] += size(copy.content)
            # dK/dV return along the chain of nodes, from the last node to the owner's. So they reach all nodes but the
            # last.
            skipped = {owner: (owner // inner - (kind is Kind.DKV)) % nodes for owner in range(ranks)}
            every = [(owner, node) for owner in range(ranks) for node in range(nodes) if node != skipped[owner]]
            assert rows == dict.fromkeys(every, 24)


@pytest.mark.parametrize(("ranks", "inner"), [(4, 2), (6, 3), (8, 4)])
def test_no_step_sends_more_than_its_share_between_nodes(ranks: int, inner: int) -> None:
    problem = simple("contiguous", 25 * ranks, ranks).problem
    route = route_named(f"double_ring:{inner}", ranks)
    for backward in (False, True):
        most = Counter()
        for step, copy in crossings(schedule_of(problem, route, backward), inner, (Kind.KV,)):
            most[step, copy.src] += size(copy.content)
        # The prologue of a backward pass fetches a block from its owner and may need all of it, see decision 0022.
        assert {rows for (step, _), rows in most.items() if step or not backward} <= {25 // inner, ceil(25 / inner)}
        flat = crossings(schedule_of(problem, RING, backward), inner, (Kind.KV,))
        assert max(size(copy.content) for _, copy in flat) == 25


@pytest.mark.parametrize("name", NUMBERED)
def test_groups_are_the_nodes_of_the_cluster(name: str) -> None:
    problem, cpu = simple("zigzag", 64, 4, heads=6).problem, CLUSTERS["cpu"]
    assert choose_route(problem, name, cpu.joined(Links((0, 1, 0, 1)))).grid == ((0, 2), (1, 3))
    assert choose_route(problem, name, cpu).grid == ()
    unlike = cpu.joined(Links((0, 0, 0, 1)))
    with pytest.raises(InputError, match=rf"same number of ranks on each node, but the nodes have 3, 1;.*'{name}:2'"):
        choose_route(problem, name, unlike)
    assert choose_route(problem, f"{name}:2", unlike).grid == equal_groups(4, 2) == ((0, 1), (2, 3))
    with pytest.raises(InputError, match="groups of 3 ranks do not divide 4 ranks; numbers that do: 1, 2, 4"):
        choose_route(problem, f"{name}:3", cpu)


def test_groups_of_one_node() -> None:
    problem = simple("zigzag", 64, 4, heads=6).problem
    assert DOUBLE_RING.grid_for(problem) == equal_groups(4, square_side(4)) == ULYSSES_RING.grid_for(problem)
    assert ULYSSES_RING.grid_for(replace(problem, q_heads=8, kv_heads=1)) == equal_groups(4, 1)
    assert [square_side(ranks) for ranks in (1, 5, 6, 12, 16)] == [1, 1, 2, 3, 4]
    with pytest.raises(InputError, match=r"the nodes have 4, 4, 4, 4, 4, 4, 4, 4, \.\.\., 1; choose"):
        grid_of((*(rank // 4 for rank in range(400)), 100))


@given(cases(), st.integers(1, 5))
def test_pieces_follow_one_another_in_wire_order(case: Case, pieces: int) -> None:
    contents = {copy.content for step in schedule_of(case.problem, RING, False).steps for copy in step.copies}
    for content in contents:
        parts = cut(content, pieces)
        assert len(parts) == pieces
        assert [row for part in parts for row in wire_order(part)] == wire_order(content)
        joined = chained(head_rows for part in parts for head_rows in part)
        assert wire_order(joined) == wire_order(content) and contains(content, joined)
        most = max((part.heads.count for part in content), default=0)
        assert all(abs(size(part) - size(content) / pieces) < 1 + most for part in parts)


def arriving(route: Route) -> list[tuple[int, int]]:
    """Return (first element in the buffer, number of elements) of each message from rank 2 in a plan of rank 0."""
    plan = plan_of(simple("contiguous", 100, 4).problem, route, 0, False)
    return [(recv.first, recv.elements) for step in plan.steps for recv in step.recvs if recv.peer == 2]


def test_a_receive_in_pieces_fills_one_buffer() -> None:
    (first, begun), (second, rest) = arriving(DOUBLE_RING)
    assert (first, second) == (0, begun) and begun + rest == 25 * 128


def dilated_on_eight() -> Problem:
    """Return a call in which one branch reads keys everywhere and another only nearby keys.

    So a rank receives sums before its work on the same keys.
    """
    documents = (0, 117, 384)
    layout = make_layout("contiguous", 384, 8, documents)
    mask = Dilated((384, 32), (2, 8)).mask(384, 384, documents, documents, 4, 1)
    return Problem(layout, layout, mask, 1, 4, 1, 8, 8, "float64")


def test_a_sum_that_was_merged_into_before_the_local_work_is_kept() -> None:
    # An earlier version overwrote such a sum in a fused buffer, and so lost the sums that other nodes had returned.
    problem = dilated_on_eight()
    for rank in range(8):
        verify_placement(plan_of(problem, DOUBLE_RING, rank, True))


def test_a_sum_that_is_never_sent_is_found() -> None:
    plan = plan_of(simple("contiguous", 100, 4).problem, DOUBLE_RING, 1, True)
    sums = [item.into for step in plan.steps for item in step.work if isinstance(item, Add) and item.into != LOCAL]
    assert sums
    steps = [
        step._replace(sends=tuple(send for send in step.sends if send.buffer != sums[0]),
                      packs=tuple(pack for pack in step.packs if pack.source != sums[0]))
        for step in plan.steps
    ]  # fmt: skip
    with pytest.raises(PlanError, match=r"rank 1: DKV\d@1 in DKV of step 1 is added to and never sent"):
        verify_placement(replace(plan, steps=tuple(steps)))


# --- sub-rings: the messages in each, and that every gradient returns to its owner once -------------------------------


@covering
def test_a_relay_carries_what_later_members_read(case: Case) -> None:
    schedule = schedule_of(case.problem, SUB_RINGS, False)
    reads: dict[tuple[Block, int], frozenset] = {
        (item.kv, item.rank): spots(rows_read(item.tiles)) for step in schedule.steps for item in step.work
    }
    chains: dict[Block, list] = defaultdict(list)
    for step in schedule.steps:
        for copy in step.copies:
            chains[copy.block].append(copy)
    for block, copies in chains.items():
        needed: frozenset = frozenset()
        for copy in reversed(copies):
            needed |= reads.get((block, copy.dst), frozenset())
            assert spots(copy.content) == needed != frozenset()
        assert copies[0].src == block.owner
        assert all(before.dst == after.src for before, after in pairwise(copies))
    assert {block for block, rank in reads if rank != block.owner} == set(chains)


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        # Branch i has rings of m_i ranks and the dilation rate r_i, and a shard has n rows. The m_i - 1 other ranks of
        # the ring send n / r_i rows each: 1024 + 3 * 512 + 7 * 256.
        ("sub_rings", 4352),
        # Rows that several branches read are sent once: the ranks that a branch adds to the previous one send
        # (m_i - m_(i-1)) n / r_i rows.
        ("direct", 3072),
        ("all_gather", 3072),
        # Rows are relayed past ranks that do not read them.
        ("ring", 5376),
    ],
)
def test_the_worked_example(schedule: str, rows: int) -> None:
    """Every rank sends `rows` rows of K and V for each head in forward, and at most three times as much in backward."""
    problem = geometric()
    for rank in (0, 3, 7):
        forward, back = (plan_of(problem, ROUTES[schedule], rank, backward) for backward in (False, True))
        assert forward.bytes_sent == rows * 12 * 2 * 64 * 2
        # Backward sends K and V again, directly to each reader if that is less, and dK and dV in float32.
        assert back.bytes_sent <= 3 * forward.bytes_sent


def test_documents_have_separate_rings() -> None:
    """If each of two documents is on two of four ranks, no message is sent between the pairs of ranks."""
    case = simple("contiguous", 64, 4, (0, 32, 64))
    schedule = schedule_of(case.problem, SUB_RINGS, False)
    edges = {(copy.src, copy.dst) for step in schedule.steps for copy in step.copies}
    assert edges == {(0, 1), (1, 0), (2, 3), (3, 2)}
