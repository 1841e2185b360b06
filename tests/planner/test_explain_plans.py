"""`explain` makes each rank's part of a schedule once, and uses it for the rank's plan and for the whole schedule.

Its figures must equal those of plans and schedules that are made one by one, as an attention call makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ringattn import Ring, masks
from ringattn.core.problem import Problem
from ringattn.explain import Explanation
from ringattn.planner.choose import plan_of
from ringattn.planner.cluster import CLUSTERS
from ringattn.planner.plan import Plan
from ringattn.schedule.ops import Schedule
from ringattn.schedule.routes import ROUTES, Route, schedule_of
from ringattn.testing import run_ranks

RANKS, TOKENS = 8, 67
"""The ranks and tokens of the calls. The tokens are not divisible by the ranks, so shards have two lengths."""
TWO_NODES = replace(CLUSTERS["h100"], ranks_per_node=4)
CALLS: dict[str, dict[str, Any]] = {
    "contiguous": {"window": (9, 3)},
    "zigzag": {"causal": True},
    "striped": {"causal": True, "mask": masks.prefix(10)},
}
"""For each layout, the mask options of the call."""
SCHEDULES = [*ROUTES, "double_ring:2"]


def one_by_one(
    problem: Problem, route: Route, passes: Sequence[bool]
) -> tuple[tuple[Schedule, ...], tuple[tuple[Plan, ...], ...]]:
    """Return the schedules and plans that `plans_of_passes` returns, made without sharing anything between them."""
    schedules = tuple(schedule_of(problem, route, backward) for backward in passes)
    ranks = range(problem.world_size)
    return schedules, tuple(tuple(plan_of(problem, route, rank, backward) for rank in ranks) for backward in passes)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", CALLS)
def test_figures_equal_those_of_plans_that_are_made_one_by_one(
    schedule: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explained(ring: Ring) -> Explanation | None:
        if ring.rank:
            return None
        seq = ring.sequence(TOKENS, layout=layout)
        return ring.explain(
            seq, q_heads=4, kv_heads=4, head_dim=16, schedule=schedule, cluster=TWO_NODES, **CALLS[layout]
        )

    fast = run_ranks(RANKS, explained)[0]
    monkeypatch.setattr("ringattn.explain.plans_of_passes", one_by_one)
    slow = run_ranks(RANKS, explained)[0]
    assert fast is not None and slow is not None
    assert fast.text(all_ranks=True) == slow.text(all_ranks=True)
    assert fast.summary() == slow.summary()
    assert (fast.forward, fast.backward, fast.plans) == (slow.forward, slow.backward, slow.plans)
