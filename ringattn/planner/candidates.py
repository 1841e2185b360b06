"""Compare the schedules for a call: predicted time and memory of each on a cluster, or the reason to leave it out.

A prediction simulates the plans of all ranks. A schedule whose plans are slow to make is simulated only if a lower
bound on its time allows it to be the fastest. All ranks choose the same schedule, because the choice depends only on
the problem and the cluster. This module also has the closed-form cost of sparse reads and the limit on a plan's size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from textwrap import wrap
from typing import NamedTuple

import numpy as np

from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable, meeting_pieces, pieces_of, spanned, tiles_of
from ringattn.errors import InputError, PlanError
from ringattn.planner.cluster import REFERENCE, Cluster, LinkClass, attention_s, call_work, work_s
from ringattn.planner.plan import Plan, record_bytes
from ringattn.planner.simulate import duration, simulate
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import ROUTES, Route

RING = "ring"
"""The schedule that all others are compared with."""

MUST_GAIN = 0.03
"""Share of the ring's time that another schedule must save. Predictions are not more accurate than this."""

RECOGNISED_MUST_GAIN = 0.1
"""Share of the ring's time that another schedule must save if the cluster is a preset that was recognised, not named by
the user. Predictions rank every pair of published times that differ by at least this share correctly (decision 0023).
"""

STAGE_AT_MOST = 3
"""Limit on the staging buffers, in multiples of a rank's local q, k, v and out: what Ulysses needs on any number of
ranks."""

STAGE_OVER_RING = 1.5
"""A schedule may always stage this many times the ring's bytes."""

PLAYED_RANKS = 16
"""The largest number of ranks for which the choice of a schedule plans every rank. Beyond that, a closed form compares
ring and double ring.
"""

PLACED_RANKS = 8
"""The same limit for schedules that move queries: their plans take a second on this number of ranks."""

SLOW_MUST_GAIN = 0.1
"""On more than four ranks, or with more than `PLACED_TILES`, plan a schedule that moves queries only if the lower bound
on its time is smaller than the best time by this share.
"""

PLACED_TILES = 1 << 13
"""The largest number of single-head tiles for which a schedule that moves queries is planned on a recognised cluster:
its plans take 0.2 s each on four ranks.
"""

PLAYED_PIECES = 1024
"""Most pieces of layouts and documents for which all ranks are planned: the call waits for these plans."""

SENDS_QUERIES = "sends queries, but latents are expanded by the rank that has the queries"
"""Why a schedule does not compute attention over latents."""

PlanOf = Callable[[Problem, Route, int, bool], Plan]


class Candidate(NamedTuple):
    """A schedule that is considered for a call, with its prediction for both passes together.

    `seconds`, `peak_bytes`: time and most staging bytes of a rank; None if the schedule was not planned. `why`: the
    reason not to choose the schedule; empty for the chosen schedule. `elsewhere`: seconds of the same plans on other
    clusters.
    """

    schedule: str
    route: Route
    seconds: float | None
    peak_bytes: int | None
    why: str
    elsewhere: tuple[float, ...] = ()


def is_named(cluster: Cluster) -> bool:
    """Return whether the cluster describes actual machines: any cluster except `REFERENCE`."""
    return cluster.name != REFERENCE.name


def must_gain(cluster: Cluster) -> float:
    """Return the share of the ring's time that another schedule must save to be chosen on this cluster."""
    return RECOGNISED_MUST_GAIN if cluster.recognised else MUST_GAIN


def followed(problem: Problem, cluster: Cluster) -> bool:
    """Return whether "auto" uses predictions; never for packed documents on a recognised cluster (decision 0026)."""
    if not is_named(cluster) or not playable(problem):
        return False
    return not (cluster.recognised and any(len(branch.rectangles) > 1 for branch in problem.mask.branches))


def playable(problem: Problem) -> bool:
    """Return whether the problem is small enough to plan all ranks when a schedule is chosen."""
    pieces = sum(spanned(problem.q_layout, branch.rectangles, keys=False) for branch in problem.mask.branches)
    return problem.world_size <= PLAYED_RANKS and pieces <= PLAYED_PIECES


def ring_is_near(problem: Problem, cluster: Cluster, ring: Route, plan_of: PlanOf) -> bool:
    """Return whether the ring is so close to a lower bound of the time that no schedule can save `must_gain` of it.

    Only the ring is planned.
    """
    (ring_s,), _ = played(problem, ring, (cluster,), plan_of)
    return least_s(problem, cluster) >= (1 - must_gain(cluster)) * ring_s


def candidates(
    problem: Problem,
    cluster: Cluster,
    routed: Callable[[str], Route],
    plan_of: PlanOf,
    others: tuple[Cluster, ...] = (),
) -> tuple[Candidate, ...]:
    """Return all schedules as candidates: the chosen schedule first, then the others by predicted time.

    `routed` returns the route of a schedule name on this cluster. `others`: the clusters of `Candidate.elsewhere`.
    """
    weighed: list[Candidate] = []
    (ring_s,), ring_bytes = played(problem, routed(RING), (cluster,), plan_of)
    best_s, most = ring_s, max(STAGE_AT_MOST * own_bytes(problem), STAGE_OVER_RING * ring_bytes)
    for name in sorted(ROUTES, key=lambda name: (name != RING, ROUTES[name].moves_queries, name)):
        candidate = _weighed(problem, name, (cluster, *others), routed, plan_of, best_s, most)
        weighed.append(candidate)
        if candidate.seconds is not None and not candidate.why:
            best_s = min(best_s, candidate.seconds)
    chosen = _fastest(weighed, (1 - must_gain(cluster)) * ring_s)
    ordered = sorted(
        (candidate for candidate in weighed if candidate is not chosen),
        key=lambda candidate: (candidate.seconds is None, candidate.seconds or 0.0, candidate.schedule),
    )
    return chosen, *(
        candidate if candidate.why else candidate._replace(why=_slower(candidate, chosen, must_gain(cluster)))
        for candidate in ordered
    )


def _fastest(weighed: list[Candidate], most_s: float) -> Candidate:
    """Return the fastest candidate without a reason against it, if it takes less than `most_s`; otherwise the ring."""
    allowed = [candidate for candidate in weighed if not candidate.why and candidate.seconds is not None]
    ring = next(candidate for candidate in weighed if candidate.schedule == RING)
    fastest = min(allowed, key=lambda candidate: (candidate.seconds, candidate.schedule), default=ring)
    return fastest if (fastest.seconds or 0.0) < most_s else ring


def _slower(candidate: Candidate, chosen: Candidate, gain: float) -> str:
    assert candidate.seconds is not None and chosen.seconds is not None
    if not chosen.seconds:
        return "no faster"
    if chosen.schedule == RING and candidate.seconds < chosen.seconds * (1 - MUST_GAIN / 2):
        return f"saves less than {gain:.0%} of the ring"
    slower = candidate.seconds > 1.005 * chosen.seconds
    return f"takes {candidate.seconds / chosen.seconds:.2f} times as long" if slower else "no faster"


def _weighed(
    problem: Problem, name: str, clusters: tuple[Cluster, ...], routed: Callable[[str], Route], plan_of: PlanOf,
    best_s: float, most: float,
) -> Candidate:  # fmt: skip
    """Plan and simulate the schedule `name`, or return the reason to leave it out.

    `clusters`: the cluster that the choice is for, then others to predict times on. `best_s`: the best time so far.
    `most`: the largest number of bytes that a rank may stage.
    """
    route, cluster = ROUTES[name], clusters[0]

    def out(why: str) -> Candidate:
        return Candidate(name, route, None, None, why)

    if problem.world_size == 1 and name != RING:
        return out("a single rank sends nothing")
    if why := route.why_not(problem, len(set(map(cluster.node_of, range(problem.world_size))))):
        return out(why)
    if route.moves_queries and problem.latent_dims:
        return out(SENDS_QUERIES)
    if route.moves_queries:
        least, tiles = least_s(problem, cluster), _single_tiles(problem)
        quick = problem.world_size <= 4 and tiles <= PLACED_TILES
        gain = must_gain(cluster) if quick else max(must_gain(cluster), SLOW_MUST_GAIN)
        if least >= (1 - gain) * best_s:
            return out(f"not planned: takes at least {duration(least)}, too little to gain")
        if cluster.recognised and tiles > PLACED_TILES:
            return out(f"{tiles} tiles of single heads are slow to plan; name this schedule or the cluster")
        if problem.world_size > PLACED_RANKS:
            return out(f"not planned for a choice on more than {PLACED_RANKS} ranks; name this schedule to use it")
    try:
        if too_large := excess(problem, by_head=route.by_head):
            return out(too_large)
        route = routed(name)
        (seconds, *elsewhere), peak = played(problem, route, clusters, plan_of)
    except (InputError, PlanError) as error:  # unlike nodes, heads that cannot be divided
        return out(str(error))
    why = f"stages {peak / own_bytes(problem):.1f} times q, k, v and out" if peak > most else ""
    return Candidate(name, route, seconds, peak, why if name != RING else "", tuple(elsewhere))


def played(
    problem: Problem, route: Route, clusters: tuple[Cluster, ...], plan_of: PlanOf
) -> tuple[tuple[float, ...], int]:
    """Return the predicted seconds on each cluster, forward plus backward, and the most staging bytes of any plan."""
    passes = [
        tuple(plan_of(problem, route, rank, backward) for rank in range(problem.world_size))
        for backward in (False, True)
    ]
    seconds = tuple(sum(simulate(plans, cluster).total_us for plans in passes) / 1e6 for cluster in clusters)
    return seconds, max(plan.arena_bytes for plans in passes for plan in plans)


def how_chosen(weighed: tuple[Candidate, ...], problem: Problem, cluster: Cluster) -> str:
    """Return a short text that says how "auto" chose its schedule."""
    if any(branch.dilation > 1 for branch in problem.mask.branches):
        return "the fastest by a closed form for sparse reads"
    if problem.q_layout.at_once and not weighed:
        return (
            "sends all rows at once, because tokens are placed for that; chosen by mask and bytes if a rank "
            "cannot hold all rows"
        )
    if not is_named(cluster):
        return (
            "chosen by mask and bytes only, because no constants of these machines are known; set Ring(cluster=...) "
            "to a preset or a file of `ringattn calibrate`"
        )
    if not weighed:
        if cluster.recognised and playable(problem):
            return (
                "by mask, bytes and hops: a prediction would delay each pack of documents; Ring(cluster=...) predicts"
            )
        return f"by mask, bytes and hops; calls of up to {PLAYED_RANKS} ranks and {PLAYED_PIECES} pieces are predicted"
    return f"predicted for {cluster.name}, forward and backward"


WIDTH = 100
"""Largest number of columns of text."""


def table_of(weighed: tuple[Candidate, ...], over: tuple[str, ...] = ()) -> list[str]:
    """Return the candidates as lines of text.

    `over`: the transport of each column of times; the first column decides. It is () if there is only one column.
    """
    rows = [("schedule", *(over or ("ms",)), "staged MiB", "")]
    for candidate in weighed:
        times = () if candidate.seconds is None else (candidate.seconds, *candidate.elsewhere)
        cells = [f"{seconds * 1e3:.3f}" for seconds in times] or [""] * max(1, len(over))
        mib = "" if candidate.peak_bytes is None else f"{candidate.peak_bytes / 2**20:.1f}"
        rows.append((candidate.schedule, *cells, mib, candidate.why or "taken"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["ms by transport and reserved SMs; the first column decides:"] if over else []
    for name, *cells, why in rows:
        if any(cells):
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            name = "  ".join((name.ljust(widths[0]), *numbers))
        # A row without numbers prints its reason in their columns.
        line = f"{name.ljust(widths[0])}  {why}".rstrip()
        lines += wrap(line, WIDTH, subsequent_indent=" " * (widths[0] + 2), drop_whitespace=True) if why else [line]
    return lines


def own_bytes(problem: Problem) -> int:
    """Return the mean bytes of q, k, v and out per rank."""
    queries = problem.q_layout.length * problem.q_heads * record_bytes(problem, problem.dtype, Kind.Q)
    keys = problem.kv_layout.length * problem.kv_heads * record_bytes(problem, problem.dtype)
    return max(1, (2 * queries + keys) // problem.world_size)


def least_s(problem: Problem, cluster: Cluster) -> float:
    """Return a lower bound on the seconds of any schedule, forward and backward.

    It counts only the work on all tiles, spread evenly over the ranks.
    """
    seconds = 0.0
    for table, backward in product(_tables(problem), (False, True)):
        work = call_work(problem, table, backward, cluster.block_keys)
        # The number of calls depends on the schedule, so the bound leaves it out.
        seconds += work_s(problem, work._replace(calls=0), cluster, backward)
    return seconds / problem.world_size


def _tables(problem: Problem) -> list[TileTable]:
    """Return the tiles of all ranks."""
    return [table for rank in range(problem.world_size) for table in tiles_of(problem, rank).values()]


def _single_tiles(problem: Problem) -> int:
    """Return the number of tiles of all ranks, counting each query head as its own tile."""
    return sum(int(table.heads.sum()) for table in _tables(problem))


def by_closed_form(problem: Problem, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a forward pass with a ring and with a double ring, for more ranks than can be planned.

    Every block of K/V counts as long as the longest shard.
    """
    ranks = problem.world_size
    nodes = [cluster.node_of(rank) for rank in range(ranks)]
    inner = ranks // len(set(nodes))
    totals = counts(problem)
    halved = 2 if all(branch.rectangles.is_causal for branch in problem.mask.branches) else 1  # a causal mask
    work = attention_s(problem, (totals.local_pairs + totals.remote_pairs) / ranks / halved, cluster)
    block = max(problem.kv_layout.counts) * problem.kv_heads * record_bytes(problem, problem.kv_dtype)
    near = max(cluster.travel_s(kind, block, block) for kind in cluster.classes_inside())
    if len(set(nodes)) == 1:
        return {"ring": ranks * max(work, near)}
    # In a flat ring one rank per node sends to another node. In a double ring all ranks do, but each such message may
    # take a full round of the inner ring.
    flat, across = (cluster.travel_s(LinkClass.NETWORK, shared, block) for shared in (0.0, block))
    seconds = {"ring": ranks * max(work, near, flat)}
    if len({nodes.count(node) for node in set(nodes)}) == 1:
        seconds["double_ring"] = ranks * max(work, near, across / inner)
    return seconds


# --- cost of sparse reads, in closed form ----------------------------------------------------------------------------
# Rows are counted without making a schedule. If a segment of a branch spans m ranks and has R rows, a separate ring for
# it sends (m - 1) R rows of K and V. Partitioning its heads sends 1/m of that, and the same number of query rows and of
# output rows.
# Rows that several branches share are fetched once. Local keys are attended to while the first messages travel.
# A causal mask halves work and rows alike and is ignored.
# Traffic between nodes runs concurrently with traffic inside a node. Each pair of nodes counts as its slowest link. A
# ring over several nodes waits for the slower of the links inside nodes and between nodes.


class Counts(NamedTuple):
    """Mean counts per rank over all branches: received rows times K/V heads, and (q, k) pairs times query heads.

    `ring_rows`: rows that separate rings receive. `partitioned_rows`: rows received if heads are partitioned.
    `members`: ranks of the longest ring. `local_pairs`, `remote_pairs`: pairs with local and with remote keys.
    `partitioned_across`: the share of the partitioned rows whose owner and reader are on different nodes. `leaves`:
    whether the longest rings join several nodes.
    """

    ring_rows: float
    partitioned_rows: float
    members: int
    local_pairs: float
    remote_pairs: float
    partitioned_across: float = 0.0
    leaves: bool = False


def counts(problem: Problem, node_of: Callable[[int], int] = lambda rank: 0) -> Counts:
    """Count the rows and pairs of all branches and segments."""
    ranks, longest = problem.world_size, 1
    ring = partitioned = local = remote = across = 0.0
    nodes = np.array([node_of(rank) for rank in range(ranks)])
    leaves = False
    for branch in problem.mask.branches:
        q_heads = problem.q_heads if branch.heads is None else branch.heads.count
        kv_heads = max(1, q_heads // problem.group)
        q, k = (_by_segment(problem, branch, keys) for keys in (False, True))
        joins = (q > 0) | (k > 0)
        members = np.maximum(1, joins.sum(1))
        sent = k.sum(1) * (members - 1) * kv_heads
        ring += sent.sum()
        partitioned += (sent / members).sum()
        far, crossing = _across(k, joins, nodes)
        across += (far / members).sum() * kv_heads
        most_members = int(members.max(initial=1))
        if most_members >= longest:
            leaves = bool(crossing[members == most_members].any()) or (leaves and most_members == longest)
        longest = max(longest, most_members)
        same_rank = (q * k).sum()
        local += same_rank * q_heads
        remote += ((q.sum(1) * k.sum(1)).sum() - same_rank) * q_heads
    share = float(across / partitioned) if partitioned else 0.0
    return Counts(ring / ranks, partitioned / ranks, longest, local / ranks, remote / ranks, share, leaves)


def _across(k: np.ndarray, joins: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each segment's key rows times readers on other nodes, and whether its ranks are on several nodes.

    `k`: the key rows of each segment on each rank. `joins`: whether each rank has tokens of each segment. `nodes`: the
    node of each rank.
    """
    of_node = np.eye(nodes.max(initial=0) + 1)[nodes]
    owned, readers = k @ of_node, joins @ of_node
    return k.sum(1) * joins.sum(1) - (owned * readers).sum(1), (readers > 0).sum(1) > 1


def _by_segment(problem: Problem, branch: Branch, keys: bool) -> np.ndarray:
    """Return the number of query rows, or key rows if `keys`, of each segment (axis 0) on each rank (axis 1)."""
    pieces = pieces_of(problem.kv_layout if keys else problem.q_layout, branch, keys=keys)
    table = np.zeros((len(branch.rectangles), problem.world_size))
    np.add.at(table, (pieces.segment, pieces.rank), pieces.size)
    return table


def forward_seconds(problem: Problem, fetched: tuple[float, float], cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a forward pass by the routes "all_gather", "ulysses" and "sub_rings", in closed form.

    `fetched`: the most rows times K/V heads that a reader fetches from its node, and from other nodes.
    """
    totals, record = counts(problem, cluster.node_of), record_bytes(problem, problem.kv_dtype)
    local, remote = (attention_s(problem, pairs, cluster) for pairs in (totals.local_pairs, totals.remote_pairs))
    near = cluster.slowest(cluster.classes_inside())
    far = cluster.link(LinkClass.NETWORK if cluster.links is None else cluster.links.outside)

    def travel(near_rows: float, far_rows: float, record: int = record) -> float:
        """Return the seconds of transfers from this node and from other nodes at the same time."""
        return max(_seconds(near, near_rows * record), _seconds(far, far_rows * record) if far_rows else 0.0)

    def ulysses_travel(record: int) -> float:
        """Return the seconds to transfer the partitioned rows, in records of `record` bytes."""
        rows, across = totals.partitioned_rows, totals.partitioned_across
        return travel(rows * (1 - across), rows * across, record)

    qkv_record = record + problem.group * record_bytes(problem, problem.dtype, Kind.Q)
    out_record = problem.group * record_bytes(problem, problem.out_wire_dtype or problem.accumulator_dtype, Kind.OUT)

    turns = max(1, totals.members - 1)
    # In each turn a ring waits for its slowest link.
    hop = max(_seconds(link, totals.ring_rows / turns * record) for link in ([near, far] if totals.leaves else [near]))
    return {
        "all_gather": max(local, travel(*fetched)) + remote,
        "ulysses": max(local / 2, ulysses_travel(qkv_record)) + remote + max(local / 2, ulysses_travel(out_record)),
        "sub_rings": max(local, hop) + (turns - 1) * max(remote / turns, hop) + remote / turns,
    }


def _seconds(link: tuple[float, float], nbytes: float) -> float:
    latency_s, rate = link
    return latency_s + nbytes / rate


# --- size of a plan, counted before the plan is made ------------------------------------------------------------------
# A plan holds ranges, so its size does not grow with the tokens. Many segments, documents or ranks make it large.


MOST_PIECES = 2**18
"""Limit on the pieces of all branches on all ranks. A piece takes some hundred bytes."""

MOST_TILES = 2**18
"""Limit on the tiles of all ranks, counted before a band hides any. A tile takes a kilobyte and a fraction of a
millisecond."""

REMEDY = "plan a sequence whose length, segments and documents are all shorter by one factor, on as few ranks"


def check_extent(problem: Problem, by_head: bool = False, groups: int = 1) -> None:
    """Raise `InputError` with the count if a plan of all ranks would be too large; see `excess`."""
    if too_large := excess(problem, by_head, groups):
        raise InputError(f"{too_large}; {REMEDY}")


def excess(problem: Problem, by_head: bool = False, groups: int = 1) -> str | None:
    """Return a message that says why a plan of all ranks would be too large, or None if the plan can be made.

    `by_head`: whether each head has its own tiles. `groups`: number of groups of ranks; only one group is planned at a
    time.
    """
    name, ranks = problem.q_layout.name, problem.world_size
    pieces = sum(
        spanned(layout, branch.rectangles, keys=keys)
        for branch in problem.mask.branches
        for layout, keys in ((problem.q_layout, False), (problem.kv_layout, True))
    )
    if pieces > 2 * MOST_PIECES:  # queries and keys
        return (
            f"{len(problem.mask.branches)} branches cut the {name} layout of {problem.q_layout.length} tokens on "
            f"{ranks} ranks into {pieces // 2} pieces, but at most {MOST_PIECES} can be planned"
        )
    tiles = 0
    for branch in problem.mask.branches:
        q, k = (pieces.segment for pieces in meeting_pieces(problem, branch))
        segments = max(q.max(initial=0), k.max(initial=0)) + 1
        tile_count = int(np.bincount(q, minlength=segments) @ np.bincount(k, minlength=segments))
        shared = [part.q_heads if branch.heads is None else part.q_heads.intersect(branch.heads)
                  for part in problem.parts]  # fmt: skip
        tiles += tile_count * sum(heads.count if by_head else heads.count > 0 for heads in shared)
    if tiles > MOST_TILES * groups:
        return (
            f"queries and keys of {ranks} ranks in {name} layout form {tiles // groups} tiles"
            f"{f' for each of {groups} groups' if groups > 1 else ''}"
            f"{', one for each head' if by_head else ''}, but at most {MOST_TILES} can be planned"
        )
    return None
