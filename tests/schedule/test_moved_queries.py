"""Schedules that send queries send the right rows and bytes, and compute every pair of query and key once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.engine.plain import PlainEngine
from ringattn.errors import PlanError
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import LOCAL, AttendReceivedOp, Plan
from ringattn.ring import Ring
from ringattn.schedule.all_to_all import shares_of
from ringattn.schedule.content import size
from ringattn.schedule.ops import Attend, AttendGrad, Kind, Merge, Schedule
from ringattn.schedule.passes import is_on_received
from ringattn.schedule.routes import Route, route_named, schedule_of
from ringattn.schedule.text import grid
from ringattn.testing import run_ranks
from tests.planner.placement_verifier import verify_placement
from tests.schedules import BALANCED, PASS_Q, ULYSSES
from tests.strategies import Case, geometric, simple


def received_work(case: Case, backward: bool) -> list[Attend | AttendGrad]:
    """Return all work of Ulysses on received queries."""
    steps = schedule_of(case.problem, ULYSSES, backward).steps
    return [item for step in steps for item in step.work if not isinstance(item, Merge) and is_on_received(item)]


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_the_worked_example(wire: str | None) -> None:
    """Ulysses sends the bytes that are computed by hand for a dilated example.

    In a branch whose segments are on m ranks, a fraction (m - 1) / m of the rows of Q, K, V and out is sent. For the
    three branches these are 2048 + 1536 + 896 rows for each head and rank on average, over the four tensors.
    """
    problem = replace(geometric(), out_wire_dtype=wire)
    sent = [plan_of(problem, ULYSSES, rank, False).bytes_sent for rank in range(8)]
    out = 64 * (2 if wire else 4) + 4  # bytes of an output row with its lse
    tensors = 12 * (2048 + 1536 + 896)
    assert sum(sent) == 8 * (tensors * 3 // 4 * 64 * 2 + tensors // 4 * out)

    def rank_bytes(longest: int) -> int:
        """Return the bytes that a rank sends: Q, K and V of the heads that others own, and outputs of its own heads.

        `longest`: the number of heads that the rank owns in the longest branch.
        """
        branches = ((1024, 2, 6), (512, 4, 3), (256, 8, longest))  # rows, members, owned heads
        return sum(rows * (3 * (12 - owned) * 128 + owned * (members - 1) * out) for rows, members, owned in branches)

    assert Counter(sent) == {rank_bytes(1): 4, rank_bytes(2): 4}  # twelve heads on eight ranks


@pytest.mark.parametrize(("heads", "ranks"), [(1, 4), (3, 4), (4, 4), (10, 4), (12, 8)])
def test_heads_are_partitioned_evenly(heads: int, ranks: int) -> None:
    case = simple("contiguous", 4 * ranks, ranks, heads=heads)
    owners = Counter(head for head in range(heads) for rank in range(ranks)
                     if any(head == part.start for item in received_work(case, False) if item.rank == rank
                            for part, _ in item.tiles))  # fmt: skip
    assert owners == Counter(range(heads))
    owned = Counter(item.rank for item in received_work(case, False) for _ in item.tiles)
    shares = [owned[rank] // (ranks * (ranks - 1)) for rank in range(ranks)]
    assert max(shares) - min(shares) <= 1 and sum(shares) == heads


class Recording(PlainEngine):
    """The plain engine, which also records the arguments of `prepare`."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[int, bool]] = []

    def prepare(self, *args: Any, more: bool = False, **others: Any) -> Any:
        """Record the number of query heads and `more`, then prepare as usual. See `Engine.prepare`."""
        self.heads.append((args[3], more))
        return super().prepare(*args, more=more, **others)


def test_engines_learn_which_outputs_are_partial() -> None:
    """An engine learns (by `more`) which out and dQ must keep the accumulator dtype.

    These are the ones to which other work adds, or which are returned to their owners.
    """
    prepared: dict[str, Any] = {}

    def body(ring: Ring) -> None:
        seq = ring.sequence(12)
        x = torch.randn(1, seq.counts[ring.rank], 2, 4, requires_grad=True)
        for schedule in ("ring", "all_to_all"):
            ring.engine = engine = Recording()
            ring.attention(x, x, x, seq, schedule=schedule).sum().backward()
            if ring.rank == 0:
                prepared[schedule] = engine.heads

    run_ranks(2, body)
    assert prepared == {
        "ring": [(2, False), (2, False)],
        "all_to_all": [(2, True), (1, True), (2, True), (1, True)],  # local and received, forward and backward
    }


def test_received_work_is_a_word_in_the_grid() -> None:
    lines = grid(schedule_of(simple("contiguous", 8, 2, heads=2).problem, ULYSSES, False)).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["0", "KV0", "|", "KV0/0>1", "Q0/0>1", "KV1", "|", "KV1/0>0", "Q1/0>0"],
        ["1", "Q0,1xKV0,1/0", "Q0,1xKV0,1/0"],
        ["2", "-", "|", "OUT1@0/0>1", "-", "|", "OUT0@1/0>0"],
        ["3", "+OUT0@0/0", "+OUT0@1/0", "+OUT1@0/0", "+OUT1@1/0"],
    ]


# --- ulysses x ring: exact in every factorisation; messages between groups, owners of heads, carried states -----------


GRIDS = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)]
"""Pairs of the number of ranks and the number of ranks in a group."""


@pytest.mark.parametrize(("ranks", "group"), GRIDS)
def test_only_keys_of_a_ranks_heads_cross_between_groups(ranks: int, group: int) -> None:
    problem = replace(simple("contiguous", 4 * ranks, ranks).problem, q_heads=2 * group, kv_heads=group)
    route = route_named(f"ulysses_ring:{group}", ranks)
    for backward in (False, True):
        crossing = Counter(
            (copy.block.kind, copy.block.owner)
            for step in schedule_of(problem, route, backward).steps
            for copy in step.copies if copy.src // group != copy.dst // group
            for _ in range(size(copy.content))
        )  # fmt: skip
        kinds = (Kind.KV, Kind.DKV) if backward else (Kind.KV,)
        # All rows of all heads are sent once to each other group.
        times = (ranks // group - 1) * 4 * group
        assert crossing == {(kind, owner): times for kind in kinds for owner in range(ranks)}


def received(plan: Plan) -> list[AttendReceivedOp]:
    """Return all work of the plan on received queries."""
    return [item for step in plan.steps for item in step.work if isinstance(item, AttendReceivedOp)]


def with_result(plan: Plan, index: int, result: int) -> Plan:
    """Return the plan in which operation `index` on received queries writes its result to the buffer `result`."""
    changed = {id(received(plan)[index]): received(plan)[index]._replace(result=result)}
    steps = (step._replace(work=tuple(changed.get(id(item), item) for item in step.work)) for step in plan.steps)
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize("backward", [False, True])
def test_received_queries_carry_one_state_over_all_turns(backward: bool) -> None:
    problem = simple("zigzag", 48, 6, heads=2, causal=True).problem
    plan = plan_of(problem, route_named("ulysses_ring:2", 6), 3, backward)
    works = received(plan)
    assert len(works) == 3 and len({item.q for item in works}) == 1 and len({item.kv for item in works}) == 3
    assert [item.result != LOCAL for item in works] == [False, False, True]
    assert [item.inputs != LOCAL for item in works] == [backward, False, False]
    result = works[-1].result
    with pytest.raises(PlanError, match=r"received for step \d+ is read too early"):
        verify_placement(with_result(plan, 2, LOCAL))
    with pytest.raises(PlanError, match=r"received for step \d+ have their result"):
        verify_placement(with_result(with_result(plan, 2, LOCAL), 1, result))


@pytest.mark.parametrize(
    ("heads", "members", "shares"),
    [
        ((6, 6), 4, [[0, 1], [2], [3, 4], [5]]),
        ((8, 4), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((6, 3), 2, [[0, 1, 2], [3, 4, 5]]),  # both members have the middle K/V head
        ((8, 2), 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # each K/V head is on two members
        ((2, 2), 3, [[0], [1], []]),
    ],
)
def test_query_heads_are_divided_if_kv_heads_cannot_be_divided(
    heads: tuple[int, int], members: int, shares: list[list[int]]
) -> None:
    problem = replace(simple("contiguous", 8, 2).problem, q_heads=heads[0], kv_heads=heads[1])
    assert shares_of(problem, range(heads[0]), members) == shares


# --- schedules that place each pair of ranks: the work and messages of each step --------------------------------------


def pairs(schedule: Schedule) -> list[list[int]]:
    """Return the number of (query, key) pairs over all heads that each rank computes in each step."""
    ranks = schedule.problem.world_size
    counts = [[0] * ranks for _ in schedule.steps]
    for index, step in enumerate(schedule.steps):
        for item in step.work:
            if not isinstance(item, Merge):
                counts[index][item.rank] += sum(table.area() for _, table in item.tiles)
    return counts


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_balanced_takes_half_the_steps_of_a_causal_ring(ranks: int) -> None:
    problem = simple("contiguous", 8 * ranks, ranks, causal=True).problem
    for backward in (False, True):
        work = [step for step in pairs(schedule_of(problem, BALANCED, backward)) if any(step)]
        assert len(work) == ranks // 2 + 1
        # Every rank computes a triangle in the first step, and a whole block in each later step. With an even number of
        # ranks, only half of the ranks work in the last step.
        assert work[0] == [36] * ranks
        assert all(step == [64] * ranks for step in work[1 : (ranks + 1) // 2])
        assert ranks % 2 or sorted(work[-1]) == [0] * (ranks // 2) + [64] * (ranks // 2)


@pytest.mark.parametrize("route", [PASS_Q, BALANCED], ids=["pass_q", "balanced"])
def test_results_are_sent_during_later_work(route: Route) -> None:
    # Ranks work in every step except the last two, which send and merge the last results.
    schedule = schedule_of(simple("contiguous", 40, 5).problem, route, False)
    busy = [any(not isinstance(item, Merge) for item in step.work) for step in schedule.steps]
    assert busy == [True] * (len(busy) - 2) + [False] * 2
