"""From a problem to plans: which route, and the two plans of one rank, cached.

Does not know: torch.
"""

from __future__ import annotations

from functools import lru_cache

from ringattn.plan import Plan
from ringattn.planner.place import project
from ringattn.problem import Problem
from ringattn.schedule.content import size
from ringattn.schedule.needs import needs_of
from ringattn.schedule.ops import Schedule
from ringattn.schedule.passes import prune, transpose
from ringattn.schedule.routes import (
    ALL_GATHER,
    DIRECT,
    RING,
    Route,
    backward_of_rank,
    forward,
    forward_of_rank,
    route_named,
)

DIRECT_MUST_SAVE = 0.25
"""Share of the ring's rows that `direct` must save before `auto` gives up the ring's neighbor-only traffic."""


def choose_route(problem: Problem, schedule: str) -> Route:
    """The route called `schedule`; for "auto" the ring, unless sending each reader its own rows saves enough.

    Dilated rows are all fetched in the first step, under the branches that need none of them, unless a rank would hold
    more of others' rows than of its own.
    """
    if schedule != "auto":
        return route_named(schedule)
    if any(branch.dilation > 1 for branch in problem.mask.branches):
        needs, ranks = needs_of(problem), range(problem.world_size)
        fetched = [sum(size(needs.read(owner, reader)) for owner in ranks if owner != reader) for reader in ranks]
        shards = [count * problem.kv_heads for count in problem.kv_layout.counts]
        if all(rows <= max(shards) for rows in fetched):
            return ALL_GATHER
    relayed, direct = needs_of(problem).totals
    return DIRECT if direct < (1 - DIRECT_MUST_SAVE) * relayed else RING


@lru_cache(maxsize=256)
def plan_of(problem: Problem, route: Route, rank: int, backward: bool) -> Plan:
    """The plan of one rank, made from the readers' needs without building the other ranks' plans."""
    make = backward_of_rank if backward else forward_of_rank
    return project(make(problem, route, rank), rank)


def schedule_of(problem: Problem, route: Route, backward: bool) -> Schedule:
    """The whole schedule, for verifying, drawing and simulating."""
    pruned = prune(forward(problem, route))
    return transpose(pruned) if backward else pruned
