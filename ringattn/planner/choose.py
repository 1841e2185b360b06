"""From a problem to plans: which route, and the two plans of one rank, cached."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ringattn.core.bounded_cache import bounded
from ringattn.core.problem import Problem
from ringattn.planner.candidates import (
    RING,
    STAGE_AT_MOST,
    Candidate,
    by_closed_form,
    candidates,
    followed,
    known,
    must_gain,
    own_bytes,
    ring_is_near,
)
from ringattn.planner.cluster import REFERENCE, Cluster
from ringattn.planner.cost import forward_seconds
from ringattn.planner.opening_cost import cheapest_opening
from ringattn.planner.place import project
from ringattn.planner.plan import Plan, record_bytes
from ringattn.schedule.content import size
from ringattn.schedule.opening import arrived
from ringattn.schedule.ops import Kind
from ringattn.schedule.read_sets import read_sets_of
from ringattn.schedule.routes import (
    ROUTES,
    Route,
    backward_of_rank,
    forward_of_rank,
    kept_of_rank,
    route_named,
    schedule_of,
)

DIRECT_MUST_SAVE = 0.25
"""Share of the ring's rows that `direct` must save before `auto` gives up the ring's neighbor-only traffic."""

_alone = threading.RLock()
"""Ranks that are threads plan one after another, so that what they share is made once."""

KEEP_AT_MOST = 1 / 8
"""Share of a shard's K and V that may be kept for a backward pass instead of being sent again."""


def choose_route(problem: Problem, schedule: str, cluster: Cluster = REFERENCE) -> Route:
    """Return the schedule called `schedule`, or choose one for "auto".

    "double_ring" has an inner ring, and "ulysses_ring" a group, in each node of `cluster`; on one node see
    `GridRoute.grid_for`. `opening_cost` decides how a backward pass begins. "auto" chooses

    - on a known cluster, the fastest schedule that fits, as `candidates` predicts it; for more ranks or pieces than it
      plays, a double ring if a closed form predicts enough gain;
    - on unknown machines, the ring, or `direct` if sending each reader its own rows saves enough;
    - `all_gather` for documents that are placed for it, if a rank can hold what it brings, on unknown machines and for
      more than is played;
    - for dilated rows, the fastest of `all_gather` (if no rank has to hold more than a shard), `ulysses` and
      `sub_rings`, as `planner.cost` predicts for `cluster`.

    If all that a forward pass receives is there at the same time and it is little, it is kept for the backward pass.
    Raises `InputError` for an unknown schedule, and for nodes of different sizes where a schedule needs equal ones.
    """
    cluster.check_ranks(problem.world_size)
    if schedule != "auto":
        route_named(schedule)
    with _alone:
        return _chosen(problem, schedule, cluster)


@bounded
def _chosen(problem: Problem, schedule: str, cluster: Cluster) -> Route:
    if schedule != "auto":
        route = route_named(schedule, problem.world_size)
        # If no grid is given, group the ranks by node.
        route = route.on_nodes(tuple(map(cluster.node_of, range(problem.world_size))))
    elif any(branch.dilation > 1 for branch in problem.mask.branches):
        route = _fastest(problem, cluster)
    elif problem.world_size > 1 and followed(problem, cluster):
        ring = _chosen(problem, RING, cluster)
        # Where nobody named the machines, no call waits for a choice that can gain nothing.
        if cluster.recognised and ring_is_near(problem, cluster, ring, plan_once):
            return ring
        return compared(problem, cluster)[0].route
    elif problem.q_layout.at_once and _fits_at_once(problem):
        route = ROUTES["all_gather"]
    else:
        relayed, direct = read_sets_of(problem).totals
        route = ROUTES["direct" if direct < (1 - DIRECT_MUST_SAVE) * relayed else RING]
        if known(cluster) and route.name == RING:
            seconds = by_closed_form(problem, cluster)
            if seconds.get("double_ring", seconds["ring"]) < (1 - must_gain(cluster)) * seconds["ring"]:
                return _chosen(problem, "double_ring", cluster)
    route = replace(route, keeps=_little_comes(problem, route))
    return replace(route, opening=cheapest_opening(problem, route, cluster))


@bounded
def compared(problem: Problem, cluster: Cluster, *others: Cluster) -> tuple[Candidate, ...]:
    """All schedules for a call on a cluster, the one that "auto" takes first; see `candidates`."""
    with _alone:
        return candidates(problem, cluster, lambda name: _chosen(problem, name, cluster), plan_once, others)


def _fastest(problem: Problem, cluster: Cluster) -> Route:
    """Of the routes for rows that few need; of equals the one that sends each reader its own rows, then the fewest."""
    fetched = _fetched(problem, cluster)
    most = max(near for near, _ in fetched), max(far for _, far in fetched)
    seconds = forward_seconds(problem, most, cluster)
    if max(map(sum, fetched)) > min(problem.kv_layout.counts) * problem.kv_heads:
        del seconds["all_gather"]
    return ROUTES[min(seconds, key=seconds.__getitem__)]


def _fetched(problem: Problem, cluster: Cluster) -> list[tuple[int, int]]:
    """By rank: rows times K/V heads that it reads from other ranks of its node, and from other nodes."""
    reads, ranks = read_sets_of(problem), range(problem.world_size)
    nodes = [cluster.node_of(rank) for rank in ranks]
    found = []
    for reader in ranks:
        rows = {owner: size(reads.read(owner, reader)) for owner in ranks if owner != reader}
        near = sum(count for owner, count in rows.items() if nodes[owner] == nodes[reader])
        found.append((near, sum(rows.values()) - near))
    return found


def _fits_at_once(problem: Problem) -> bool:
    """Whether a rank may stage all K and V that it reads, and their gradients, at once; read without plans."""
    record = record_bytes(problem, problem.kv_dtype)
    record += record_bytes(problem, problem.wire_dtype or problem.accumulator_dtype, Kind.DKV)
    return max(map(sum, _fetched(problem, REFERENCE))) * record <= STAGE_AT_MOST * own_bytes(problem)


def _little_comes(problem: Problem, route: Route) -> bool:
    """Whether everything that a forward pass brings lies there at once, on every rank in little memory."""
    if problem.world_size == 1 or not route.arrives_at_once:
        return False
    held = [count * problem.kv_heads * record_bytes(problem, problem.dtype) for count in problem.kv_layout.counts]
    came = [0] * problem.world_size
    if route.moves_queries:
        for rank, block, content in arrived(schedule_of(problem, route, False)):
            dtype = problem.kv_dtype if block.kind is Kind.KV else problem.dtype
            came[rank] += size(content) * record_bytes(problem, dtype, block.kind)
    else:
        came = [rows * record_bytes(problem, problem.kv_dtype) for rows in map(sum, _fetched(problem, REFERENCE))]
    return any(came) and max(came) <= KEEP_AT_MOST * min(held)


@bounded
def plan_of(problem: Problem, route: Route, rank: int, backward: bool) -> Plan:
    """The plan of one rank, made from the readers' reads without building the other ranks' plans."""
    return plan_once(problem, route, rank, backward)


def plan_once(problem: Problem, route: Route, rank: int, backward: bool) -> Plan:
    """`plan_of`, not kept: a choice, or who learns from many ranks, looks at a plan once."""
    make = backward_of_rank if backward else forward_of_rank
    with _alone:
        return project(make(problem, route, rank), rank, kept_of_rank(problem, route, rank))


@contextmanager
def without_collector() -> Iterator[None]:
    """Planning makes many small tuples, which live on and form no circles: to walk them takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
