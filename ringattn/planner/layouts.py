"""What other layouts would give a call: balance and predicted time, as advice. The layout is the caller's.

Of packed documents there are two placements (`ringattn.core.documents`); `suits_at_once` says
which of them goes with a schedule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ringattn.core.documents import load_of, placed_at_once
from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS, Layout, make_layout
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.planner.candidates import RING, excess, known, playable, played
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import Cluster
from ringattn.planner.plan import Add, Plan
from ringattn.schedule.routes import Route, route_named

Documents = tuple[int, ...] | None

CLEARLY = 0.95
"""A greatest share of pairs below this part of the caller's is worth a word."""


RECEIVED_AT_MOST = 1.5
"""Shards of rows that the busiest rank may receive where documents are placed for all rows at once and nobody named a
schedule: beyond, schedules of steps that hide their messages are predicted faster, and many heads do not fit (0025)."""


def suits_at_once(cuts: tuple[int, ...], ranks: int, schedule: str, machines: Cluster) -> bool:
    """Whether to place documents for schedules that bring all rows at once.

    For those by name; for "auto" where machines are known and that is little. Raises `InputError` for an unknown name.
    """
    if schedule != "auto":
        return route_named(schedule).at_once
    if not known(machines):
        return False
    received = load_of(cuts, placed_at_once(cuts, ranks)).received
    return max(received) * ranks <= RECEIVED_AT_MOST * cuts[-1]


def misplaced(problem: Problem, route: Route) -> str | None:
    """Why these documents suit another schedule better than this one, or None."""
    if not problem.q_layout.at_once or route.at_once or problem.world_size == 1:
        return None
    return (
        f"documents are placed for schedules that bring all rows at once: {route.name} is exact, and its steps are "
        f"uneven; ring.sequence(..., schedule={route.name!r}) places them for it"
    )


class InLayout(NamedTuple):
    """Predicted seconds of a call in a layout, forward and backward, and the schedule that takes them."""

    layout: str
    schedule: str
    seconds: float


def in_layouts(problem: Problem, route: Route, cluster: Cluster) -> tuple[InLayout, ...]:
    """The plain layouts, the caller's first: the faster of `route`, the one that was chosen there, and the ring."""
    ring = choose_route(problem, RING, cluster)
    found = []
    for name in dict.fromkeys((problem.q_layout.name, "contiguous", "zigzag", "striped")):
        other = _laid_out(problem, name)
        # What was chosen in the caller's layout need not be the best in another.
        routes = (route,) if other is problem or route.name == RING else (route, ring)
        if playable(other):
            seconds, schedule = min((played(other, one, (cluster,), plan_of)[0][0], one.name) for one in routes)
            found.append(InLayout(name, schedule, seconds))
    return tuple(found)


def by_layout(found: tuple[InLayout, ...]) -> str:
    """The same as a line of text."""
    own, *others = found
    told = "".join(f"; {one.layout} {one.seconds * 1e3:.3f} ({one.schedule})" for one in others)
    return f"ms by layout: {own.layout}, which this call has, {own.seconds * 1e3:.3f} ({own.schedule}){told}"


def better_layout(problem: Problem, documents: Documents, route: Route, computed: tuple[int, ...]) -> str | None:
    """A layout with a clearly lower greatest share of pairs, or None. Layouts too large to plan are passed over.

    `computed`: pairs by rank as the call is (`pairs_planned`).
    """
    if problem.world_size == 1:
        return None
    best, most = None, CLEARLY * max(computed)
    least = most
    for name in LAYOUTS:
        if name == problem.q_layout.name or (name in OF_DOCUMENTS and documents is None):
            continue
        other = _laid_out(problem, name, documents)
        if excess(other, by_head=route.by_head):
            continue
        greatest = max(pairs_of(other))
        if greatest < least:
            best, least = name, greatest
    if best is not None and route.moves_queries:
        # Ranks do not compute the pairs of their own queries, so only plans tell: heads may be what is uneven.
        other = _laid_out(problem, best, documents)
        plans = tuple(plan_of(other, route, rank, False) for rank in range(problem.world_size))
        return best if max(pairs_planned(plans)) < most else None
    return best


def pairs_planned(plans: tuple[Plan, ...]) -> tuple[int, ...]:
    """(q, k) pairs times heads that each rank computes in a forward pass, of whichever rank the queries are."""
    return tuple(
        sum(item.tiles.area() for step in plan.steps for item in step.work if not isinstance(item, Add))
        for plan in plans
    )


def pairs_of(problem: Problem) -> tuple[int, ...]:
    """(q, k) pairs times heads of the queries of each rank."""
    return tuple(sum(table.area() for table in tiles_of(problem, rank).values()) for rank in range(problem.world_size))


def _laid_out(problem: Problem, name: str, documents: Documents = None) -> Problem:
    own = problem.q_layout
    if name == own.name:
        return problem
    layout: Layout = make_layout(name, own.length, problem.world_size, documents)
    return replace(problem, q_layout=layout, kv_layout=layout)
