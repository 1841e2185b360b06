"""Ulysses x ring: exact in every factorisation; what crosses between groups, who has which head, what is carried."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from ringattn.errors import PlanError
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import LOCAL, AttendReceivedOp, Plan
from ringattn.ring import Ring
from ringattn.schedule.all_to_all import shares_of
from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import route_named, schedule_of
from ringattn.testing import run_ranks
from tests.planner.placement_verifier import verify_placement
from tests.strategies import simple
from tests.trial import Trial, greatest_error, joined, on_rank, reference

GRIDS = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)]
"""Ranks, and ranks of a group."""


MASKS = {
    "full": Trial(heads=(5, 5), tokens=21),
    "causal": Trial(causal=True, heads=(6, 3), tokens=29, sinks=True, lse=True),
    "window": Trial(window=(9, 0), causal=True, heads=(4, 2), tokens=29, softcap=3.0),
    "documents": Trial(documents=(0, 5, 5, 23, 29), causal=True, heads=(3, 1), tokens=29),
    "one row": Trial(causal=True, heads=(1, 1), tokens=4),
}


@pytest.mark.parametrize(
    ("mask", "layout", "ranks", "group"),
    [
        ("one row", "zigzag", 4, 1), ("causal", "zigzag", 4, 2), ("full", "contiguous", 6, 3),
        ("documents", "per_document", 6, 2),
        ("window", "striped", 4, 4),
    ],
)  # fmt: skip
def test_every_factorisation_is_exact(mask: str, layout: str, ranks: int, group: int) -> None:
    """Also where heads are uneven, and where there are fewer K/V heads than ranks of a group."""
    trial = MASKS[mask]

    def body(ring: Ring):  # type: ignore[no-untyped-def]
        return on_rank(ring, trial, layout, f"ulysses_ring:{group}", torch.float64)

    found = joined(run_ranks(ranks, body, engine="plain", poison=True))
    assert greatest_error(found, reference(trial, torch.float64)) <= 1e-10


@pytest.mark.parametrize(("ranks", "group"), GRIDS)
def test_only_keys_of_the_own_heads_cross_between_groups(ranks: int, group: int) -> None:
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
        # Once to each other group, all rows of all heads.
        times = (ranks // group - 1) * 4 * group
        assert crossing == {(kind, owner): times for kind in kinds for owner in range(ranks)}


def received(plan: Plan) -> list[AttendReceivedOp]:
    """Work on received queries."""
    return [item for step in plan.steps for item in step.work if isinstance(item, AttendReceivedOp)]


def with_result(plan: Plan, at: int, result: int) -> Plan:
    """Another result for the `at`-th work on received queries."""
    changed = {id(received(plan)[at]): received(plan)[at]._replace(result=result)}
    steps = (step._replace(work=tuple(changed.get(id(item), item) for item in step.work)) for step in plan.steps)
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize("backward", [False, True])
def test_received_queries_carry_one_state_over_all_turns(backward: bool) -> None:
    problem = simple("zigzag", 48, 6, heads=2, causal=True).problem
    plan = plan_of(problem, route_named("ulysses_ring:2", 6), 3, backward)
    works = received(plan)
    assert len(works) == 3 and len({item.q for item in works}) == 1 and len({item.kv for item in works}) == 3
    assert [item.result != LOCAL for item in works] == [False, False, True]
    assert [item.seed != LOCAL for item in works] == [backward, False, False]
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
        ((6, 3), 2, [[0, 1, 2], [3, 4, 5]]),  # both have the middle K/V head
        ((8, 2), 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # each K/V head on two of them
        ((2, 2), 3, [[0], [1], []]),
    ],
)
def test_heads_are_shared_by_queries_where_key_heads_do_not_divide(
    heads: tuple[int, int], members: int, shares: list[list[int]]
) -> None:
    problem = replace(simple("contiguous", 8, 2).problem, q_heads=heads[0], kv_heads=heads[1])
    assert shares_of(problem, range(heads[0]), members) == shares
