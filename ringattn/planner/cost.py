"""What the routes for rows that few ranks need cost, in closed form: from counts of rows, without any schedule.

A segment of a branch that meets in m ranks with R rows sends (m - 1) R rows of K and V by a ring of its own, and 1/m of
that by dealing its heads out, beside as many of queries and of outputs; rows that several branches share are fetched
once. Own keys are attended while the first messages travel. A causal mask halves work and rows alike and is not looked
at. What comes from other nodes crosses the network beside what comes from the rank's own; there every pair counts as
its slowest one, and a ring that leaves a node waits for the slower of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import edges_of, pieces_of
from ringattn.planner.cluster import Cluster
from ringattn.planner.links import LinkClass
from ringattn.planner.plan import record_bytes
from ringattn.planner.work import attention_s
from ringattn.schedule.ops import Kind


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
