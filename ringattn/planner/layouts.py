"""The layout of a sequence, and a comparison of layouts for a call by balance and predicted time.

The comparison is advice only: the caller chooses the layout. Placed tokens have two placements
(`ringattn.core.placement`); `suits_at_once` says which of them suits a schedule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ringattn.core.areas import areas_of
from ringattn.core.bounded_cache import bounded
from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS, Layout, causal_documents, make_layout
from ringattn.core.mask import AttentionMask, Mask, make_mask
from ringattn.core.placement import placed_at_once
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.errors import InputError
from ringattn.planner.candidates import RING, excess, is_named, playable, played
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import Cluster
from ringattn.planner.plan import Add, Plan
from ringattn.schedule.routes import Route, route_named

Documents = tuple[int, ...] | None

CLEARLY = 0.95
"""Suggest a layout if its largest share of pairs is below this part of the caller's largest share."""


RECEIVED_AT_MOST = 1.5
"""Most rows, in shards, that the busiest rank may receive for schedule="auto" to place tokens for all rows at once.
Beyond this, schedules that hide their messages behind steps are predicted faster, and many heads do not fit (decision
0025)."""

RECEIVED_UNKNOWN = 1.0
"""The same on unknown machines, where bytes decide. Up to this limit, tokens placed at once send half of the bytes of
tokens placed for steps, in fewer messages (decision 0058)."""


@bounded
def placed_layout(
    name: str,
    length: int,
    ranks: int,
    documents: Documents,
    purpose: str,
    mask: AttentionMask | None,
    schedule: str,
    machines: Cluster,
) -> Layout:
    """Return the layout of `PLACED` for a sequence of `length` tokens; see `Ring.sequence`.

    Raises `InputError` where `make_layout` does, and for a purpose that placing tokens for a mask does not have.
    """
    placed_for = None
    if name == "documents" and documents is not None:
        placed_for = causal_documents(documents)
    elif name == "mask" and mask is not None:
        if purpose not in ("causal", "full"):
            raise InputError(f"for_={purpose!r}: layout='mask' places tokens for causal or full")
        placed_for = make_mask(
            length, length, causal=purpose == "causal" and mask.takes_causal, mask=mask, documents=documents,
            kv_documents=documents, q_heads=mask.q_heads or 1,
        )  # fmt: skip
    at_once = placed_for is not None and suits_at_once(placed_for, length, ranks, schedule, machines)
    ranks_per_node = machines.ranks_of_equal_nodes(ranks) if at_once else 0
    return make_layout(name, length, ranks, documents, purpose, at_once, placed_for, ranks_per_node)


def suits_at_once(mask: Mask, length: int, ranks: int, schedule: str, machines: Cluster) -> bool:
    """Return whether to place tokens for schedules that receive all rows at once.

    For a schedule given by name, return whether that schedule receives all rows at once. For "auto", return whether the
    busiest rank receives few rows, or the machines are known to be several nodes: only tokens placed at once are placed
    by node, and every schedule was predicted faster with them (decision 0056). Raises `InputError` for an unknown name.
    """
    if schedule != "auto":
        return route_named(schedule).at_once
    is_known = is_named(machines)
    if is_known and machines.ranks_of_equal_nodes(ranks):
        return True
    received = areas_of(mask, length).load(placed_at_once(mask, length, ranks)).received
    return max(received) * ranks <= (RECEIVED_AT_MOST if is_known else RECEIVED_UNKNOWN) * length


def misplaced(problem: Problem, route: Route) -> str | None:
    """Return a message if the tokens are placed for other schedules than `route`, otherwise None."""
    if not problem.q_layout.at_once or route.at_once or problem.world_size == 1:
        return None
    return (
        f"tokens are placed for schedules that receive all rows at once; {route.name} gives exact results, but "
        f"its steps are uneven: ring.sequence(..., schedule={route.name!r}) places them for it"
    )


class InLayout(NamedTuple):
    """The predicted seconds of a call in one layout, forward plus backward, and the schedule that takes this time."""

    layout: str
    schedule: str
    seconds: float


def in_layouts(problem: Problem, route: Route, cluster: Cluster) -> tuple[InLayout, ...]:
    """Predict the time of the call in its own layout and in the plain layouts. Its own layout comes first.

    `route`: the route chosen in the call's own layout. In another layout the ring is tried too, and the faster of the
    two counts.
    """
    ring = choose_route(problem, RING, cluster)
    predictions = []
    for name in dict.fromkeys((problem.q_layout.name, "contiguous", "zigzag", "striped")):
        problem_there = _laid_out(problem, name)
        # The best route in the caller's layout need not be the best in another layout.
        routes = (route,) if problem_there is problem or route.name == RING else (route, ring)
        if playable(problem_there):
            seconds, schedule = min(
                (played(problem_there, tried, (cluster,), plan_of)[0][0], tried.name) for tried in routes
            )
            predictions.append(InLayout(name, schedule, seconds))
    return tuple(predictions)


def by_layout(predictions: tuple[InLayout, ...]) -> str:
    """Return the result of `in_layouts` as one line of text."""
    local, *rest = predictions
    alternatives = "".join(f"; {layout.layout} {layout.seconds * 1e3:.3f} ({layout.schedule})" for layout in rest)
    first = f"{local.layout}, which this call has, {local.seconds * 1e3:.3f} ({local.schedule})"
    return f"ms by layout: {first}{alternatives}"


def better_layout(problem: Problem, documents: Documents, route: Route, computed: tuple[int, ...]) -> str | None:
    """Return a layout in which the busiest rank computes clearly fewer pairs, or None.

    Layouts too large to plan are skipped. `computed`: the pairs that each rank computes in the caller's layout
    (`pairs_planned`).
    """
    if problem.world_size == 1:
        return None
    best, most = None, CLEARLY * max(computed)
    least = most
    for name in LAYOUTS:
        if name == problem.q_layout.name or (name in OF_DOCUMENTS and documents is None):
            continue
        problem_there = _laid_out(problem, name, documents)
        if excess(problem_there, by_head=route.by_head):
            continue
        largest = max(pairs_of(problem_there))
        if largest < least:
            best, least = name, largest
    if best is not None and route.moves_queries:
        # Ranks compute pairs of received queries, so the balance is known only from plans: heads may be uneven.
        problem_there = _laid_out(problem, best, documents)
        plans = tuple(plan_of(problem_there, route, rank, False) for rank in range(problem.world_size))
        return best if max(pairs_planned(plans)) < most else None
    return best


def pairs_planned(plans: tuple[Plan, ...]) -> tuple[int, ...]:
    """Return the (q, k) pairs times heads that each rank computes in a forward pass, with local or received queries."""
    return tuple(
        sum(item.tiles.area() for step in plan.steps for item in step.work if not isinstance(item, Add))
        for plan in plans
    )


def pairs_of(problem: Problem) -> tuple[int, ...]:
    """Return the (q, k) pairs times heads of each rank's local queries."""
    return tuple(sum(table.area() for table in tiles_of(problem, rank).values()) for rank in range(problem.world_size))


def _laid_out(problem: Problem, name: str, documents: Documents = None) -> Problem:
    layout = problem.q_layout
    if name == layout.name:
        return problem
    changed: Layout = make_layout(name, layout.length, problem.world_size, documents)
    return replace(problem, q_layout=changed, kv_layout=changed)
