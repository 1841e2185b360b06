"""Compare schedules for a call: predicted seconds and bytes of each on a cluster, or why it is left out.

The predictions play the plans of all ranks in the simulator. A schedule whose plans take long to make is played only
if a bound says that it could be the fastest. All ranks choose the same, because the choice follows from the problem and
the cluster alone. Also here: the cost of sparse reads in closed form, and the limit on the size of a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from textwrap import wrap
from typing import NamedTuple

import numpy as np

from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable, edges_of, meeting_pieces, pieces_of, spanned, tiles_of
from ringattn.errors import InputError, PlanError
from ringattn.planner.cluster import REFERENCE, Cluster, LinkClass, attention_s, call_work, work_s
from ringattn.planner.plan import Plan, record_bytes
from ringattn.planner.simulate import duration, simulate
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import ROUTES, Route

RING = "ring"
"""The schedule that others are compared with."""

MUST_GAIN = 0.03
"""Share of the ring's time that another schedule must save: predictions are no nearer than that."""

RECOGNISED_MUST_GAIN = 0.1
"""The same on a preset that nobody named: of two published times this far apart, predictions order all (0023)."""

STAGE_AT_MOST = 3
"""How often a rank's own q, k, v and out its staging may hold: as much as Ulysses needs, whatever the ranks."""

STAGE_OVER_RING = 1.5
"""How much more than the ring it may stage in any case."""

PLAYED_RANKS = 16
"""Up to here all ranks are planned for a choice; beyond, a closed form compares ring and double ring."""

PLACED_RANKS = 8
"""The same for schedules that move queries, whose plans take a second on as many ranks."""

SLOW_MUST_GAIN = 0.1
"""Share of the best time that these must be able to save at all, to be planned on more than four ranks or with more
tiles."""

PLACED_TILES = 1 << 13
"""Tiles of single heads up to which they are planned where nobody asked for predictions: 0.2 s each on four ranks."""

PLAYED_PIECES = 1024
"""Pieces of layouts and documents up to which all ranks are planned: a call waits for it."""

PlanOf = Callable[[Problem, Route, int, bool], Plan]


class Candidate(NamedTuple):
    """A schedule for a call, forward and backward. `seconds`, `peak_bytes`: None where it was not planned.

    `why`: why it is not taken; empty for the one that is. `elsewhere`: seconds of the same plans on other clusters.
    """

    schedule: str
    route: Route
    seconds: float | None
    peak_bytes: int | None
    why: str
    elsewhere: tuple[float, ...] = ()


def known(cluster: Cluster) -> bool:
    """Whether somebody said which machines these are."""
    return cluster.name != REFERENCE.name


def must_gain(cluster: Cluster) -> float:
    """Share of the ring's time that another schedule must save there."""
    return RECOGNISED_MUST_GAIN if cluster.recognised else MUST_GAIN


def followed(problem: Problem, cluster: Cluster) -> bool:
    """Whether "auto" goes by predictions; where nobody named the machines, not for packed documents (decision 0026)."""
    if not known(cluster) or not playable(problem):
        return False
    return not (cluster.recognised and any(len(branch.bounds) > 2 for branch in problem.mask.branches))


def playable(problem: Problem) -> bool:
    """Whether a choice may plan all ranks."""
    pieces = sum(spanned(problem.q_layout, branch.bounds, branch.segment) for branch in problem.mask.branches)
    return problem.world_size <= PLAYED_RANKS and pieces <= PLAYED_PIECES


def ring_is_near(problem: Problem, cluster: Cluster, ring: Route, plan_of: PlanOf) -> bool:
    """Whether no schedule can save enough of the ring's time: only the ring is planned to know that."""
    (ring_s,), _ = played(problem, ring, (cluster,), plan_of)
    return least_s(problem, cluster) >= (1 - must_gain(cluster)) * ring_s


def candidates(
    problem: Problem,
    cluster: Cluster,
    routed: Callable[[str], Route],
    plan_of: PlanOf,
    others: tuple[Cluster, ...] = (),
) -> tuple[Candidate, ...]:
    """All schedules, the chosen one first, then by time.

    `routed`: the route of a name on this cluster. `others`: those of `Candidate.elsewhere`.
    """
    found: list[Candidate] = []
    (ring_s,), ring_bytes = played(problem, routed(RING), (cluster,), plan_of)
    best_s, most = ring_s, max(STAGE_AT_MOST * own_bytes(problem), STAGE_OVER_RING * ring_bytes)
    for name in sorted(ROUTES, key=lambda name: (name != RING, ROUTES[name].moves_queries, name)):
        candidate = _weighed(problem, name, (cluster, *others), routed, plan_of, best_s, most)
        found.append(candidate)
        if candidate.seconds is not None and not candidate.why:
            best_s = min(best_s, candidate.seconds)
    chosen = _fastest(found, (1 - must_gain(cluster)) * ring_s)
    ordered = sorted(
        (one for one in found if one is not chosen),
        key=lambda one: (one.seconds is None, one.seconds or 0.0, one.schedule),
    )
    return chosen, *(one if one.why else one._replace(why=_slower(one, chosen, must_gain(cluster))) for one in ordered)


def _fastest(found: list[Candidate], most_s: float) -> Candidate:
    """The fastest that may be taken, if it takes less than `most_s`; else the ring."""
    may = [one for one in found if not one.why and one.seconds is not None]
    ring = next(one for one in found if one.schedule == RING)
    fastest = min(may, key=lambda one: (one.seconds, one.schedule), default=ring)
    return fastest if (fastest.seconds or 0.0) < most_s else ring


def _slower(one: Candidate, chosen: Candidate, gain: float) -> str:
    assert one.seconds is not None and chosen.seconds is not None
    if not chosen.seconds:
        return "no faster"
    if chosen.schedule == RING and one.seconds < chosen.seconds * (1 - MUST_GAIN / 2):
        return f"saves less than {gain:.0%} of the ring"
    slower = one.seconds > 1.005 * chosen.seconds
    return f"takes {one.seconds / chosen.seconds:.2f} times as long" if slower else "no faster"


def _weighed(
    problem: Problem, name: str, clusters: tuple[Cluster, ...], routed: Callable[[str], Route], plan_of: PlanOf,
    best_s: float, most: float,
) -> Candidate:  # fmt: skip
    """A schedule by its plans, or why it has none."""
    route, cluster = ROUTES[name], clusters[0]

    def out(why: str) -> Candidate:
        return Candidate(name, route, None, None, why)

    if problem.world_size == 1 and name != RING:
        return out("one rank sends nothing")
    if why := route.why_not(problem, len(set(map(cluster.node_of, range(problem.world_size))))):
        return out(why)
    if route.moves_queries:
        least, tiles = least_s(problem, cluster), _single_tiles(problem)
        quick = problem.world_size <= 4 and tiles <= PLACED_TILES
        gain = must_gain(cluster) if quick else max(must_gain(cluster), SLOW_MUST_GAIN)
        if least >= (1 - gain) * best_s:
            return out(f"not planned: takes at least {duration(least)}, too little to gain")
        if cluster.recognised and tiles > PLACED_TILES:
            return out(f"{tiles} tiles of single heads take long to plan; name it, or the machines")
        if problem.world_size > PLACED_RANKS:
            return out(f"not planned for a choice on more than {PLACED_RANKS} ranks; name it")
    try:
        if found := excess(problem, by_head=route.by_head):
            return out(found)
        route = routed(name)
        (seconds, *elsewhere), peak = played(problem, route, clusters, plan_of)
    except (InputError, PlanError) as error:  # unlike nodes, heads that cannot be divided
        return out(str(error))
    why = f"stages {peak / own_bytes(problem):.1f} times q, k, v and out" if peak > most else ""
    return Candidate(name, route, seconds, peak, why if name != RING else "", tuple(elsewhere))


def played(
    problem: Problem, route: Route, clusters: tuple[Cluster, ...], plan_of: PlanOf
) -> tuple[tuple[float, ...], int]:
    """Seconds on each cluster and staging bytes, forward and backward."""
    passes = [
        tuple(plan_of(problem, route, rank, backward) for rank in range(problem.world_size))
        for backward in (False, True)
    ]
    seconds = tuple(sum(simulate(plans, cluster).total_us for plans in passes) / 1e6 for cluster in clusters)
    return seconds, max(plan.arena_bytes for plans in passes for plan in plans)


def how_chosen(found: tuple[Candidate, ...], problem: Problem, cluster: Cluster) -> str:
    """How "auto" came to its schedule, in a few words."""
    if any(branch.dilation > 1 for branch in problem.mask.branches):
        return "the fastest by a closed form for rows that few ranks need"
    if problem.q_layout.at_once and not found:
        return "all rows at once, as its documents are placed for, or by mask and bytes where a rank cannot hold them"
    if not known(cluster):
        return (
            "by mask and bytes alone, for no constants of these machines are known; Ring(cluster=...) names a preset "
            "or a file of `ringattn calibrate`"
        )
    if not found:
        if cluster.recognised and playable(problem):
            return "by mask, bytes and hops, for each pack of documents would wait; Ring(cluster=...) predicts"
        return f"by mask, bytes and hops; up to {PLAYED_RANKS} ranks and {PLAYED_PIECES} pieces all are predicted"
    return f"predicted for {cluster.name}, forward and backward"


WIDTH = 100
"""Columns of text at most."""


def table_of(found: tuple[Candidate, ...], over: tuple[str, ...] = ()) -> list[str]:
    """Candidates as lines of text. `over`: what their times hold for, the chosen one's first; () where that is one."""
    rows = [("schedule", *(over or ("ms",)), "staged MiB", "")]
    for one in found:
        times = () if one.seconds is None else (one.seconds, *one.elsewhere)
        cells = [f"{seconds * 1e3:.3f}" for seconds in times] or [""] * max(1, len(over))
        mib = "" if one.peak_bytes is None else f"{one.peak_bytes / 2**20:.1f}"
        rows.append((one.schedule, *cells, mib, one.why or "taken"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["ms by what carries messages, and SMs left to it; chosen by the first:"] if over else []
    for name, *cells, why in rows:
        if any(cells):
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            name = "  ".join((name.ljust(widths[0]), *numbers))
        # A reason without numbers takes their place.
        told = f"{name.ljust(widths[0])}  {why}".rstrip()
        lines += wrap(told, WIDTH, subsequent_indent=" " * (widths[0] + 2), drop_whitespace=True) if why else [told]
    return lines


def own_bytes(problem: Problem) -> int:
    """Of q, k, v and out, on a rank in the mean."""
    queries = problem.q_layout.length * problem.q_heads * record_bytes(problem, problem.dtype, Kind.Q)
    keys = problem.kv_layout.length * problem.kv_heads * record_bytes(problem, problem.dtype)
    return max(1, (2 * queries + keys) // problem.world_size)


def least_s(problem: Problem, cluster: Cluster) -> float:
    """Less than any schedule takes, forward and backward: work on all tiles, evenly over the ranks and nothing else."""
    seconds = 0.0
    for table, backward in product(_tables(problem), (False, True)):
        work = call_work(problem, table, backward, cluster.block_keys)
        # How many calls there are is the schedule's affair.
        seconds += work_s(problem, work._replace(calls=0), cluster, backward)
    return seconds / problem.world_size


def _tables(problem: Problem) -> list[TileTable]:
    """The tiles of all ranks."""
    return [table for rank in range(problem.world_size) for table in tiles_of(problem, rank).values()]


def _single_tiles(problem: Problem) -> int:
    """Tiles of all ranks, one for each query head."""
    return sum(int(table.heads.sum()) for table in _tables(problem))


def by_closed_form(problem: Problem, cluster: Cluster) -> dict[str, float]:
    """Seconds of a forward pass by ring and by double ring, of full shards: for more ranks than are planned."""
    ranks = problem.world_size
    nodes = [cluster.node_of(rank) for rank in range(ranks)]
    inner = ranks // len(set(nodes))
    found = counts(problem)
    halved = 2 if all(branch.band.lo >= 0 for branch in problem.mask.branches) else 1  # keys before the query only
    work = attention_s(problem, (found.own_pairs + found.other_pairs) / ranks / halved, cluster)
    block = max(problem.kv_layout.counts) * problem.kv_heads * record_bytes(problem, problem.kv_dtype)
    near = max(cluster.travel_s(kind, block, block) for kind in cluster.classes_inside())
    if len(set(nodes)) == 1:
        return {"ring": ranks * max(work, near)}
    # Of a flat ring one rank a node sends across; of a double ring all do, and have a round of the node's ring for it.
    flat, across = (cluster.travel_s(LinkClass.NETWORK, shared, block) for shared in (0.0, block))
    taken = {"ring": ranks * max(work, near, flat)}
    if len({nodes.count(node) for node in set(nodes)}) == 1:
        taken["double_ring"] = ranks * max(work, near, across / inner)
    return taken


# --- cost of sparse reads, in closed form ----------------------------------------------------------------------------
# Counts rows without making a schedule. A segment of a branch that spans m ranks and has R rows sends (m - 1) R rows of
# K and V if it has a ring of its own. Distributing its heads sends 1/m of that, and equally many query and output rows.
# Rows that several branches share are fetched once. Local keys are attended to while the first messages travel.
# A causal mask halves work and rows alike and is ignored.
# Traffic between nodes runs concurrently with traffic inside a node. Each pair of nodes counts as its slowest link, and
# a ring that leaves a node waits for the slower of both.


class Counts(NamedTuple):
    """Of all branches, per rank in the mean: rows times K/V heads that are received, (q, k) pairs times query heads.

    `members`: of the longest ring. `dealt_across`: the share of the dealt rows whose owner is on another node than
    their reader; `leaves`: whether the longest rings join several nodes.
    """

    ring_rows: float
    dealt_rows: float
    members: int
    own_pairs: float
    other_pairs: float
    dealt_across: float = 0.0
    leaves: bool = False


def counts(problem: Problem, node_of: Callable[[int], int] = lambda rank: 0) -> Counts:
    """Rows and pairs by branch and segment."""
    ranks, longest = problem.world_size, 1
    ring = dealt = own = other = across = 0.0
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
        dealt += (sent / members).sum()
        far, crossing = _across(k, joins, nodes)
        across += (far / members).sum() * kv_heads
        greatest = int(members.max(initial=1))
        if greatest >= longest:
            leaves = bool(crossing[members == greatest].any()) or (leaves and greatest == longest)
        longest = max(longest, greatest)
        together = (q * k).sum()
        own += together * q_heads
        other += ((q.sum(1) * k.sum(1)).sum() - together) * q_heads
    share = float(across / dealt) if dealt else 0.0
    return Counts(ring / ranks, dealt / ranks, longest, own / ranks, other / ranks, share, leaves)


def _across(k: np.ndarray, joins: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each segment: rows times readers on another node than their owner, and whether its ranks are on several."""
    of_node = np.eye(nodes.max(initial=0) + 1)[nodes]
    owned, readers = k @ of_node, joins @ of_node
    return k.sum(1) * joins.sum(1) - (owned * readers).sum(1), (readers > 0).sum(1) > 1


def _by_segment(problem: Problem, branch: Branch, keys: bool) -> np.ndarray:
    """Rows of each segment (axis 0) on each rank."""
    pieces = pieces_of(problem.kv_layout if keys else problem.q_layout, branch, keys=keys)
    table = np.zeros((len(edges_of(branch.bounds, branch.segment)), problem.world_size))
    np.add.at(table, (pieces.segment, pieces.rank), pieces.size)
    return table


def forward_seconds(problem: Problem, fetched: tuple[float, float], cluster: Cluster) -> dict[str, float]:
    """Seconds of a forward pass by route.

    `fetched`: rows times K/V heads that the greatest readers fetch, from their own node and from others.
    """
    found, record = counts(problem, cluster.node_of), record_bytes(problem, problem.kv_dtype)
    own, other = (attention_s(problem, pairs, cluster) for pairs in (found.own_pairs, found.other_pairs))
    near = cluster.slowest(cluster.classes_inside())
    far = cluster.link(LinkClass.NETWORK if cluster.links is None else cluster.links.outside)

    def travel(near_rows: float, far_rows: float, record: int = record) -> float:
        """From this node and from others at once."""
        return max(_seconds(near, near_rows * record), _seconds(far, far_rows * record) if far_rows else 0.0)

    def dealt(record: int) -> float:
        return travel(found.dealt_rows * (1 - found.dealt_across), found.dealt_rows * found.dealt_across, record)

    there = record + problem.group * record_bytes(problem, problem.dtype, Kind.Q)
    back = problem.group * record_bytes(problem, problem.out_wire_dtype or problem.accumulator_dtype, Kind.OUT)

    turns = max(1, found.members - 1)
    # A ring waits at each of its turns for the slowest of its links.
    hop = max(_seconds(link, found.ring_rows / turns * record) for link in ([near, far] if found.leaves else [near]))
    return {
        "all_gather": max(own, travel(*fetched)) + other,
        "ulysses": max(own / 2, dealt(there)) + other + max(own / 2, dealt(back)),
        "sub_rings": max(own, hop) + (turns - 1) * max(other / turns, hop) + other / turns,
    }


def _seconds(link: tuple[float, float], nbytes: float) -> float:
    latency_s, rate = link
    return latency_s + nbytes / rate


# --- size of a plan, counted before any of it is made ----------------------------------------------------------------
# A plan holds ranges, so its size does not grow with the tokens. Many segments, documents or ranks make it large.


MOST_PIECES = 2**18
"""Of all branches, on all ranks: some hundred bytes each."""

MOST_TILES = 2**18
"""Of all ranks, before a band hides any: a kilobyte each, and a fraction of a millisecond."""

REMEDY = "plan a sequence whose length, segments and documents are all shorter by one factor, on as few ranks"


def check_extent(problem: Problem, by_head: bool = False, groups: int = 1) -> None:
    """Raise `InputError` with the count if a plan of all ranks would be too large; see `excess`."""
    if found := excess(problem, by_head, groups):
        raise InputError(f"{found}; {REMEDY}")


def excess(problem: Problem, by_head: bool = False, groups: int = 1) -> str | None:
    """What a plan of all ranks would have too many of; None if it can be made.

    `by_head`: each head has its tiles. `groups`: of so many groups of ranks one is planned at a time.
    """
    name, ranks = problem.q_layout.name, problem.world_size
    pieces = sum(
        spanned(layout, bounds, branch.segment)
        for branch in problem.mask.branches
        for layout, bounds in ((problem.q_layout, branch.bounds), (problem.kv_layout, branch.kv_bounds))
    )
    if pieces > 2 * MOST_PIECES:  # queries and keys
        return (
            f"{len(problem.mask.branches)} branches cut the {name} layout of {problem.q_layout.length} tokens on "
            f"{ranks} ranks into {pieces // 2} pieces, and {MOST_PIECES} can be planned"
        )
    tiles = 0
    for branch in problem.mask.branches:
        q, k = (pieces.segment for pieces in meeting_pieces(problem, branch))
        least = max(q.max(initial=0), k.max(initial=0)) + 1
        meetings = int(np.bincount(q, minlength=least) @ np.bincount(k, minlength=least))
        shared = [part.q_heads if branch.heads is None else part.q_heads.intersect(branch.heads)
                  for part in problem.parts]  # fmt: skip
        tiles += meetings * sum(heads.count if by_head else heads.count > 0 for heads in shared)
    if tiles > MOST_TILES * groups:
        return (
            f"queries and keys of {ranks} ranks in {name} layout meet in {tiles // groups} tiles"
            f"{f' for each of {groups} groups' if groups > 1 else ''}"
            f"{', one for each head,' if by_head else ''} and {MOST_TILES} can be planned"
        )
    return None
