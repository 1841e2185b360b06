"""From a problem to plans: which route, and the two plans of one rank, cached.

Does not know: torch.
"""

from __future__ import annotations

from functools import lru_cache

from ringattn.plan import Plan
from ringattn.planner.place import project
from ringattn.problem import Problem
from ringattn.schedule.needs import needs_of
from ringattn.schedule.ops import Schedule
from ringattn.schedule.passes import prune, transpose
from ringattn.schedule.routes import DIRECT, RING, Route, backward_of_rank, forward, forward_of_rank, route_named

DIRECT_MUST_SAVE = 0.25
"""Share of the ring's rows that `direct` must save before `auto` gives up the ring's neighbor-only traffic."""


def choose_route(problem: Problem, schedule: str) -> Route:
    """The route called `schedule`; for "auto" the ring, unless sending each reader its own rows saves enough."""
    if schedule != "auto":
        return route_named(schedule)
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
