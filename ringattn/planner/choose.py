"""Make plans for a problem: choose the route and the backward prologue, and cache the two plans of each rank."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from ringattn.core.bounded_cache import bounded
from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.errors import InputError
from ringattn.planner.candidates import (
    RING,
    SENDS_QUERIES,
    STAGE_AT_MOST,
    Candidate,
    by_closed_form,
    candidates,
    followed,
    forward_seconds,
    is_named,
    must_gain,
    own_bytes,
    playable,
    played,
    ring_is_near,
)
from ringattn.planner.cluster import REFERENCE, Cluster, attention_s
from ringattn.planner.place import project
from ringattn.planner.plan import Plan, record_bytes
from ringattn.schedule.chains import AllGather
from ringattn.schedule.content import read_sets_of, size
from ringattn.schedule.node_gather import NodeGather
from ringattn.schedule.ops import Attend, Kind, Schedule
from ringattn.schedule.passes import Prologue, arrived, last_read, split_keys
from ringattn.schedule.route import TreeRoute
from ringattn.schedule.routes import (
    ROUTES,
    Route,
    forward_of_rank,
    joined,
    part_of_rank,
    route_named,
    schedule_of,
)

DIRECT_MUST_SAVE = 0.25
"""Share of the ring's rows that `direct` must save before `auto` gives up the ring's neighbor-only traffic."""

_alone = threading.RLock()
"""Threads of one process plan one at a time, so that plans which they share are made once."""
# Another thread may hold the lock while this process is forked.
os.register_at_fork(after_in_child=lambda: globals().update(_alone=threading.RLock()))

KEEP_AT_MOST = 1 / 8
"""Keep received K and V for backward, instead of sending them again, up to this share of a shard's K and V. A ring with
`keep_received` has no such limit.
"""


def choose_route(problem: Problem, schedule: str, cluster: Cluster = REFERENCE) -> Route:
    """Return the schedule called `schedule`, or the best schedule for "auto".

    The ranks of each node of `cluster` form an inner ring of "double_ring", or a group of "ulysses_ring"; for a single
    node see `GridRoute.grid_for`. `cheapest_prologue` decides how a backward pass begins. "auto" chooses

    - on a named or recognised cluster, the fastest schedule that fits, as `candidates` predicts; if there are too many
      ranks or pieces to simulate, a double ring if a closed form predicts enough gain;
    - on unknown machines, the ring, or `direct` if sending each reader only the rows that it reads saves enough;
    - for tokens that are placed for it, `node_gather` if ranks are on several nodes and its gates save rows, otherwise
      `all_gather`, if a rank can hold all rows that it receives, and `double_ring` if it cannot and the tokens are
      placed by node, on unknown machines and for problems too large to simulate;
    - for masks with dilation, the fastest of `all_gather` (if no rank has to hold more than a shard), `ulysses` and
      `sub_rings`, as `forward_seconds` predicts for `cluster`.

    If everything that a forward pass receives is resident at the same time, and is small or to be kept, it is kept.
    Raises `InputError` for an unknown schedule, and for nodes of different sizes if a schedule needs equal sizes.
    """
    cluster.check_ranks(problem.world_size)
    if schedule != "auto":
        route_named(schedule)
    # A look-up does not wait for a plan that another thread is making.
    with nullcontext() if _chosen.holds(problem, schedule, cluster) else _alone:
        return _chosen(problem, schedule, cluster)


@bounded
def _chosen(problem: Problem, schedule: str, cluster: Cluster) -> Route:
    if schedule != "auto":
        route = route_named(schedule, problem.world_size)
        if route.moves_queries and problem.latent_dims:
            raise InputError(f"schedule={schedule!r} {SENDS_QUERIES}; choose auto or a schedule that sends K and V")
        # If no grid is given, group the ranks by node.
        route = route.on_nodes(tuple(map(cluster.node_of, range(problem.world_size))))
    elif any(branch.dilation > 1 for branch in problem.mask.branches):
        route = _fastest(problem, cluster)
    elif problem.world_size > 1 and followed(problem, cluster):
        ring = _chosen(problem, RING, cluster)
        # On a recognised cluster, keep the ring unless the search can gain at least `must_gain`.
        if cluster.recognised and ring_is_near(problem, cluster, ring, plan_once):
            return ring
        return compared(problem, cluster)[0].route
    elif problem.q_layout.at_once and (fitting := _at_once(problem, cluster)):
        route = fitting
    elif problem.q_layout.ranks_per_node:  # placed by node, where a ring of nodes is 2 to 3 times as fast as `direct`
        return _chosen(problem, "double_ring", cluster)
    else:
        relayed, direct = read_sets_of(problem).totals
        route = ROUTES["direct" if direct < (1 - DIRECT_MUST_SAVE) * relayed else RING]
        if is_named(cluster) and route.name == RING:
            seconds = by_closed_form(problem, cluster)
            if seconds.get("double_ring", seconds["ring"]) < (1 - must_gain(cluster)) * seconds["ring"]:
                return _chosen(problem, "double_ring", cluster)
    route = replace(route, keeps=_can_keep_all(problem, route))
    return replace(route, prologue=cheapest_prologue(problem, route, cluster))


@bounded
def latents_are_faster(latent: Problem, expanded: Problem, schedule: str, cluster: Cluster) -> bool:
    """Return whether to send latents and expand them at every reader, or to send the expanded K and V.

    `latent`, `expanded`: the same call with either on the wire. On a named cluster whose ranks can all be planned,
    the predicted times of both are compared; each includes the time of its products with the weights, although messages
    may hide it. Otherwise the smaller records are sent. A ring of one rank sends nothing and expands once.
    A schedule that sends queries needs keys.
    """
    if latent.world_size == 1 or (schedule != "auto" and route_named(schedule).moves_queries):
        return False
    sizes = [problem.kv_heads * record_bytes(problem, problem.kv_dtype) for problem in (latent, expanded)]
    if sizes[0] >= sizes[1]:
        return False
    if not (is_named(cluster) and playable(latent)):
        return True
    with _alone:
        seconds = []
        for problem in (latent, expanded):
            route = _chosen(problem, schedule, cluster)
            (passes_s,), _ = played(problem, route, (cluster,), plan_once)
            seconds.append(passes_s + expansion_s(problem, latent, cluster))
    return seconds[0] < seconds[1]


def expansion_s(problem: Problem, latent: Problem, cluster: Cluster) -> float:
    """Return the seconds that the slowest rank multiplies latents by weights, if `problem` decides what is sent."""
    assert latent.latent_dims is not None
    rope, size = latent.latent_dims
    rows: Sequence[int] = problem.kv_layout.counts
    if problem.latent_dims is not None:
        rows = [count + sum(read) for count, read in zip(rows, _fetched(problem, cluster), strict=True)]
    per_row = 2 * size * latent.q_heads * (latent.head_dim - rope + latent.value_dim) * latent.batch
    # Forward expands, and backward multiplies twice for gradients. Readers of latents also expand them in backward.
    products = 4 if problem.latent_dims is not None else 3
    return max(rows) * per_row * products / cluster.flops


@bounded
def compared(problem: Problem, cluster: Cluster, *others: Cluster) -> tuple[Candidate, ...]:
    """Return all schedules for a call on a cluster, the schedule that "auto" chooses first; see `candidates`."""
    with _alone:
        return candidates(problem, cluster, lambda name: _chosen(problem, name, cluster), plan_once, others)


def _fastest(problem: Problem, cluster: Cluster) -> Route:
    """Return the fastest route for sparse reads by `forward_seconds`; ties go to the first route that it lists."""
    fetched = _fetched(problem, cluster)
    most = max(near for near, _ in fetched), max(far for _, far in fetched)
    seconds = forward_seconds(problem, most, cluster)
    if max(map(sum, fetched)) > min(problem.kv_layout.counts) * problem.kv_heads:
        del seconds["all_gather"]
    return ROUTES[min(seconds, key=seconds.__getitem__)]


def _fetched(problem: Problem, cluster: Cluster) -> list[tuple[int, int]]:
    """Return for each rank the rows times K/V heads that it reads from other ranks of its node and from other nodes."""
    reads, ranks = read_sets_of(problem), range(problem.world_size)
    nodes = [cluster.node_of(rank) for rank in ranks]
    fetched = []
    for reader in ranks:
        rows = {owner: size(reads.read(owner, reader)) for owner in reads.owners_read_by(reader).tolist()}
        near = sum(count for owner, count in rows.items() if nodes[owner] == nodes[reader])
        fetched.append((near, sum(rows.values()) - near))
    return fetched


def _at_once(problem: Problem, cluster: Cluster) -> TreeRoute | None:
    """Return the schedule for tokens that are placed at once, or None if a rank cannot stage all rows."""
    counts = Counter(nodes := tuple(map(cluster.node_of, range(problem.world_size))))
    if len(counts) > 1 and len(set(counts.values())) == 1:
        gather = NodeGather().on_nodes(nodes)
        if gather.has_gates(problem) and _fits_at_once(problem, gather):
            return gather
    return AllGather() if _fits_at_once(problem, AllGather()) else None


def _fits_at_once(problem: Problem, route: TreeRoute) -> bool:
    """Return whether each rank may stage all K and V that it receives, and their gradients, at the same time.

    The answer is counted without making plans.
    """
    record = record_bytes(problem, problem.kv_dtype)
    record += record_bytes(problem, problem.wire_dtype or problem.accumulator_dtype, Kind.DKV)
    return max(_received(problem, route)) * record <= STAGE_AT_MOST * own_bytes(problem)


def _received(problem: Problem, route: TreeRoute) -> list[int]:
    """Return for each rank the rows times K/V heads that it receives in a forward pass, to read or to send on."""
    trees, ranks = route.shared(problem), range(problem.world_size)
    # A rank that sends rows on reads some of them itself.
    read_by = trees.reads.owners_read_by
    return [sum(size(trees.content(owner, rank)) for owner in read_by(rank).tolist()) for rank in ranks]


def _can_keep_all(problem: Problem, route: Route) -> bool:
    """Return whether all that a forward pass receives is resident at once, and small on every rank or to be kept."""
    if problem.world_size == 1 or not route.arrives_at_once:
        return False
    shard_bytes = [
        count * problem.kv_heads * record_bytes(problem, problem.dtype) for count in problem.kv_layout.counts
    ]
    received_bytes = [0] * problem.world_size
    if route.moves_queries:
        for rank, block, content in arrived(schedule_of(problem, route, False)):
            dtype = problem.kv_dtype if block.kind is Kind.KV else problem.dtype
            received_bytes[rank] += size(content) * record_bytes(problem, dtype, block.kind)
    else:
        assert isinstance(route, TreeRoute)
        received_bytes = [rows * record_bytes(problem, problem.kv_dtype) for rows in _received(problem, route)]
    is_small = max(received_bytes) <= KEEP_AT_MOST * min(shard_bytes)
    return any(received_bytes) and (is_small or problem.keep_received)


@bounded
def plan_of(problem: Problem, route: Route, rank: int, backward: bool) -> Plan:
    """Return the plan of one rank, made from the read sets without making the plans of other ranks."""
    return plan_once(problem, route, rank, backward)


def plan_once(problem: Problem, route: Route, rank: int, backward: bool) -> Plan:
    """Return the same plan as `plan_of`, uncached, because a choice of schedule needs each of many plans only once."""
    with _alone:
        return project(part_of_rank(problem, route, rank, backward), rank, route.kept(problem, rank))


def plans_of_passes(
    problem: Problem, route: Route, passes: Sequence[bool]
) -> tuple[tuple[Schedule, ...], tuple[tuple[Plan, ...], ...]]:
    """Return for each pass the schedule of all ranks, and the plans of all ranks. `passes`: True for backward.

    The plans equal those of `plan_of` and the schedules those of `schedule_of`. Each rank's part of a schedule is made
    once and used for both. Nothing is cached, because the plans of many ranks do not fit into the cache.
    """
    parts: list[list[Schedule]] = [[] for _ in passes]
    plans: list[list[Plan]] = [[] for _ in passes]
    with _alone:
        shared = route.shared(problem)  # kept until all ranks are planned
        # Both passes of a rank follow each other, because the backward part is made from the forward part.
        for rank in range(problem.world_size):
            for index, backward in enumerate(passes):
                parts[index].append(part_of_rank(problem, route, rank, backward))
                plans[index].append(project(parts[index][-1], rank, route.kept(problem, rank)))
        del shared
        return tuple(map(joined, parts)), tuple(map(tuple, plans))


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector while plans are made.

    Plans are many small tuples without cycles. Walking them would take a third of the time of planning.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- prologue of the backward pass (decision 0022) -------------------------------------------------------------------
# A backward pass fetches the remote keys again, or splits the work on local keys to hide that fetch, or uses keys kept
# from the forward pass. All ranks choose the same prologue, because the choice depends only on the problem and the
# cluster. It is made for the last rank, which reads the most under a causal mask.


class PrologueFacts(NamedTuple):
    """The facts of the last rank that decide the prologue.

    `early_s`, `all_s`: backward seconds of the work that may be split off, and of all work. `kept_bytes`, `owners`:
    bytes of the blocks that may be kept, and their owners. `messages`, `rows`: messages and rows times heads that the
    rank receives forward.
    """

    early_s: float
    all_s: float
    kept_bytes: float
    owners: tuple[int, ...]
    messages: float
    rows: float


def cheapest_prologue(problem: Problem, route: Route, cluster: Cluster) -> Prologue:
    """Return the prologue of a backward pass.

    It is "kept" if keeping K and V saves a larger share of the pass's time than it adds to the memory that a forward
    pass always saves. Keeping them costs memory in every layer, so it requires a cluster that the user named: not
    `REFERENCE`, which describes no machine, and not a recognised preset. Otherwise the prologue is "split", or
    "fetched" if the additional engine call takes longer than the fetch that it hides.
    """
    facts = prologue_facts(problem, route, cluster)
    return "fetched" if facts is None else cheapest_by(facts, problem, cluster)


def prologue_facts(problem: Problem, route: Route, cluster: Cluster) -> PrologueFacts | None:
    """Return the facts of the last rank, or None if no fetch can be hidden."""
    rank = problem.world_size - 1
    if not rank or route.keeps or not route.transposed:
        return None
    part = forward_of_rank(problem, route, rank)
    kept = arrived(part, (block for block in last_read(part) if block[0] == rank))
    if not kept:
        return None
    work = [item for step in part.steps for item in step.work if isinstance(item, Attend)]
    local_tiles = next((item.tiles for item in work if item.kv.owner == rank), ())
    early_s, all_s = (
        attention_s(problem, sum(table.area() for _, table in tiles), cluster, backward=True)
        for tiles in (
            split_keys(local_tiles, problem.kv_layout.counts[rank])[0],
            [part for item in work for part in item.tiles],
        )
    )
    kept_bytes = sum(size(content) for *_, content in kept) * record_bytes(problem, problem.kv_dtype)
    rows = [size(content) for receiver, _, content in arrived(part) if receiver == rank]
    return PrologueFacts(
        early_s, all_s, kept_bytes, tuple(block.owner for _, block, _ in kept), len(rows), sum(rows)
    )  # fmt: skip


def cheapest_by(facts: PrologueFacts, problem: Problem, cluster: Cluster) -> Prologue:
    """Return the choice of `cheapest_prologue`, given the facts of the last rank."""
    rank, early_s, kept_bytes = problem.world_size - 1, facts.early_s, facts.kept_bytes
    links = (cluster.link(cluster.link_class(owner, rank)) for owner in facts.owners)
    latency_s, rate = max(links, key=lambda link: link[0] + kept_bytes / link[1])
    fetch_s = latency_s + kept_bytes / rate
    exposed_s = max(0.0, fetch_s - early_s) + cluster.call_s
    # The pass takes as long as its work, or as sending K/V and returning dK/dV.
    gradient_bytes = record_bytes(problem, problem.wire_dtype or problem.accumulator_dtype, Kind.DKV)
    hops_s = facts.messages * latency_s + facts.rows * (record_bytes(problem, problem.kv_dtype) + gradient_bytes) / rate
    share = exposed_s / (max(facts.all_s, hops_s) + exposed_s)
    if cluster.name != REFERENCE.name and not cluster.recognised and share > kept_bytes / _saved_bytes(problem, rank):
        return "kept"
    return "split" if min(early_s, fetch_s) > cluster.call_s else "fetched"


def prologue_beyond(fewer: Sequence[tuple[int, PrologueFacts | None]], problem: Problem, cluster: Cluster) -> Prologue:
    """Return the choice of `cheapest_prologue` on more ranks, given the facts on two smaller numbers of ranks.

    Shards have the same length on all these numbers of ranks. The last rank's work and received rows grow linearly with
    the number of ranks, and so does its distance to the last sender.
    """
    facts = facts_beyond(fewer, problem.world_size)
    return "fetched" if facts is None else cheapest_by(facts, problem, cluster)


def facts_beyond(fewer: Sequence[tuple[int, PrologueFacts | None]], world_size: int) -> PrologueFacts | None:
    """Extrapolate `prologue_facts` to more ranks, for `prologue_beyond`."""
    (ranks, smaller), (more, larger) = fewer[:2]
    if smaller is None or larger is None:
        return None
    share = (world_size - ranks) / (more - ranks)

    def grown(a: float, b: float) -> float:
        return a + (b - a) * share

    # If more blocks arrive at once on more ranks, the links to the added owners are like the links to the first owners.
    owners = {round(grown(a, b)) for a, b in zip(smaller.owners, larger.owners, strict=False)}
    return PrologueFacts(
        smaller.early_s, grown(smaller.all_s, larger.all_s), grown(smaller.kept_bytes, larger.kept_bytes),
        tuple(sorted(owners)), grown(smaller.messages, larger.messages), grown(smaller.rows, larger.rows),
    )  # fmt: skip


def _saved_bytes(problem: Problem, rank: int) -> int:
    """Return the bytes that a forward pass always saves for backward: q, k, v, out and lse."""
    queries = problem.q_layout.counts[rank] * problem.q_heads * (problem.head_dim + problem.value_dim)
    keys = problem.kv_layout.counts[rank] * problem.kv_heads * sum(problem.record_dims)
    values = (queries + keys) * ITEM_BYTES[problem.dtype]
    return max(1, problem.batch * (values + queries * ITEM_BYTES[problem.accumulator_dtype]))
