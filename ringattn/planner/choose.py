"""From a problem to plans: the route, the prologue of its backward pass, and the two plans of one rank, cached."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ringattn.core.bounded_cache import bounded
from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.planner.candidates import (
    RING,
    STAGE_AT_MOST,
    Candidate,
    by_closed_form,
    candidates,
    followed,
    forward_seconds,
    known,
    must_gain,
    own_bytes,
    ring_is_near,
)
from ringattn.planner.cluster import REFERENCE, Cluster, attention_s
from ringattn.planner.place import project
from ringattn.planner.plan import Plan, record_bytes
from ringattn.schedule.content import read_sets_of, size
from ringattn.schedule.ops import Attend, Kind
from ringattn.schedule.passes import Prologue, arrived, last_read, split_keys
from ringattn.schedule.routes import (
    ROUTES,
    Route,
    forward_of_rank,
    part_of_rank,
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
    `GridRoute.grid_for`. `prologue_cost` decides how a backward pass begins. "auto" chooses

    - on a known cluster, the fastest schedule that fits, as `candidates` predicts it; for more ranks or pieces than it
      plays, a double ring if a closed form predicts enough gain;
    - on unknown machines, the ring, or `direct` if sending each reader its own rows saves enough;
    - `all_gather` for documents that are placed for it, if a rank can hold what it brings, on unknown machines and for
      more than is played;
    - for dilated rows, the fastest of `all_gather` (if no rank has to hold more than a shard), `ulysses` and
      `sub_rings`, as `forward_seconds` predicts for `cluster`.

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
    return replace(route, prologue=cheapest_prologue(problem, route, cluster))


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
    with _alone:
        return project(part_of_rank(problem, route, rank, backward), rank, route.kept(problem, rank))


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


# --- prologue of the backward pass (decision 0022) -------------------------------------------------------------------
# Remote keys are fetched again, own work is split to hide that fetch, or the keys are kept from the forward pass.
# All ranks choose the same, because the choice follows from the problem and the cluster alone. It is made for the last
# rank, which reads the most under a causal mask.


class PrologueFacts(NamedTuple):
    """What the last rank does, as far as it counts: backward seconds of the work that may be split off, and of all.

    `kept_bytes`, `owners`: what may be kept, all of it and whose it is; `messages`, `rows`: what it receives forward,
    rows times heads.
    """

    early_s: float
    all_s: float
    kept_bytes: float
    owners: tuple[int, ...]
    messages: float
    rows: float


def cheapest_prologue(problem: Problem, route: Route, cluster: Cluster) -> Prologue:
    """Kept where that saves a greater share of the pass's time than it adds to what a forward pass saves anyway.

    Memory of every layer is not spent on the word of `REFERENCE`, which describes no machine, nor of a preset that
    nobody named. Else split, unless the call of its own takes longer than what it hides.
    """
    facts = prologue_facts(problem, route, cluster)
    return "fetched" if facts is None else cheapest_by(facts, problem, cluster)


def prologue_facts(problem: Problem, route: Route, cluster: Cluster) -> PrologueFacts | None:
    """None where nothing can be hidden."""
    rank = problem.world_size - 1
    if not rank or route.keeps or not route.transposed:
        return None
    part = forward_of_rank(problem, route, rank)
    kept = arrived(part, (one for one in last_read(part) if one[0] == rank))
    if not kept:
        return None
    work = [item for step in part.steps for item in step.work if isinstance(item, Attend)]
    own = next((item.tiles for item in work if item.kv.owner == rank), ())
    early_s, all_s = (
        attention_s(problem, sum(table.area() for _, table in tiles), cluster, backward=True)
        for tiles in (split_keys(own, problem.kv_layout.counts[rank])[0], [one for item in work for one in item.tiles])
    )
    kept_bytes = sum(size(content) for *_, content in kept) * record_bytes(problem, problem.kv_dtype)
    rows = [size(content) for at, _, content in arrived(part) if at == rank]
    return PrologueFacts(
        early_s, all_s, kept_bytes, tuple(block.owner for _, block, _ in kept), len(rows), sum(rows)
    )  # fmt: skip


def cheapest_by(facts: PrologueFacts, problem: Problem, cluster: Cluster) -> Prologue:
    """`cheapest_prologue` of what is known of the last rank."""
    rank, early_s, kept_bytes = problem.world_size - 1, facts.early_s, facts.kept_bytes
    links = (cluster.link(cluster.link_class(owner, rank)) for owner in facts.owners)
    latency_s, rate = max(links, key=lambda link: link[0] + kept_bytes / link[1])
    fetch_s = latency_s + kept_bytes / rate
    exposed_s = max(0.0, fetch_s - early_s) + cluster.call_s
    # The pass takes as long as its work, or as K/V there and dK/dV back.
    back = record_bytes(problem, problem.wire_dtype or problem.accumulator_dtype, Kind.DKV)
    hops_s = facts.messages * latency_s + facts.rows * (record_bytes(problem, problem.kv_dtype) + back) / rate
    share = exposed_s / (max(facts.all_s, hops_s) + exposed_s)
    if cluster.name != REFERENCE.name and not cluster.recognised and share > kept_bytes / _saved_bytes(problem, rank):
        return "kept"
    return "split" if min(early_s, fetch_s) > cluster.call_s else "fetched"


def prologue_beyond(fewer: Sequence[tuple[int, PrologueFacts | None]], problem: Problem, cluster: Cluster) -> Prologue:
    """`cheapest_prologue` on more ranks, with shards as long, from what is known of two smaller numbers of ranks.

    What the last rank works and receives grows evenly with ranks; so does the distance to who sends it last.
    """
    facts = facts_beyond(fewer, problem.world_size)
    return "fetched" if facts is None else cheapest_by(facts, problem, cluster)


def facts_beyond(fewer: Sequence[tuple[int, PrologueFacts | None]], world_size: int) -> PrologueFacts | None:
    """`prologue_facts` on more ranks, for `prologue_beyond`."""
    (ranks, here), (more, there) = fewer[:2]
    if here is None or there is None:
        return None
    share = (world_size - ranks) / (more - ranks)

    def beyond(a: float, b: float) -> float:
        return a + (b - a) * share

    # Of more that arrives at once than before, links to the first are as those to the others.
    owners = {round(beyond(a, b)) for a, b in zip(here.owners, there.owners, strict=False)}
    return PrologueFacts(
        here.early_s, beyond(here.all_s, there.all_s), beyond(here.kept_bytes, there.kept_bytes), tuple(sorted(owners)),
        beyond(here.messages, there.messages), beyond(here.rows, there.rows),
    )  # fmt: skip


def _saved_bytes(problem: Problem, rank: int) -> int:
    """What a forward pass saves for its backward in any case: q, k, v, out and lse."""
    dims = problem.head_dim + problem.value_dim
    queries = problem.q_layout.counts[rank] * problem.q_heads
    keys = problem.kv_layout.counts[rank] * problem.kv_heads
    values = (queries + keys) * dims * ITEM_BYTES[problem.dtype]
    return max(1, problem.batch * (values + queries * ITEM_BYTES[problem.accumulator_dtype]))
