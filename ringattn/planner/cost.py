"""What the routes for rows that few ranks need cost, in closed form: from counts of rows, without any schedule.

A segment of a branch that meets in m ranks with R rows sends (m - 1) R rows of K and V by a ring of its own, and 1/m of
that by dealing its heads out, beside as many of queries and of outputs; rows that several branches share are fetched
once. Own keys are attended while the first messages travel. A causal mask halves work and rows alike and is not looked
at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import edges_of, pieces_of
from ringattn.planner.cluster import Cluster
from ringattn.planner.plan import record_bytes
from ringattn.planner.work import attention_s
from ringattn.schedule.ops import Kind


class Counts(NamedTuple):
    """Of all branches, per rank in the mean: rows times K/V heads that are received, (q, k) pairs times query heads."""

    ring_rows: float
    dealt_rows: float
    members: int
    own_pairs: float
    other_pairs: float


def counts(problem: Problem) -> Counts:
    """Rows and pairs by branch and segment; `members`: of the longest ring."""
    ranks, longest = problem.world_size, 1
    ring = dealt = own = other = 0.0
    for branch in problem.mask.branches:
        q_heads = problem.q_heads if branch.heads is None else branch.heads.count
        kv_heads = max(1, q_heads // problem.group)
        q, k = (_by_segment(problem, branch, keys) for keys in (False, True))
        members = np.maximum(1, ((q > 0) | (k > 0)).sum(1))
        sent = k.sum(1) * (members - 1) * kv_heads
        ring += sent.sum()
        dealt += (sent / members).sum()
        longest = max(longest, int(members.max(initial=1)))
        together = (q * k).sum()
        own += together * q_heads
        other += ((q.sum(1) * k.sum(1)).sum() - together) * q_heads
    return Counts(ring / ranks, dealt / ranks, longest, own / ranks, other / ranks)


def _by_segment(problem: Problem, branch: Branch, keys: bool) -> np.ndarray:
    """Rows of each segment (axis 0) on each rank."""
    pieces = pieces_of(problem.kv_layout if keys else problem.q_layout, branch, keys=keys)
    table = np.zeros((len(edges_of(branch.bounds, branch.segment)), problem.world_size))
    np.add.at(table, (pieces.segment, pieces.rank), pieces.size)
    return table


def forward_seconds(problem: Problem, fetched_rows: float, cluster: Cluster) -> dict[str, float]:
    """Seconds of a forward pass by route. `fetched_rows`: rows times K/V heads that the greatest reader fetches."""
    found, record = counts(problem), record_bytes(problem, problem.kv_dtype)
    own, other = (attention_s(problem, pairs, cluster) for pairs in (found.own_pairs, found.other_pairs))

    def travel(rows: float, record: int = record) -> float:
        return cluster.latency_s + rows * record / cluster.bandwidth

    there = record + problem.group * record_bytes(problem, problem.dtype, Kind.Q)
    back = problem.group * record_bytes(problem, problem.out_wire_dtype or problem.accumulator_dtype, Kind.OUT)

    turns = max(1, found.members - 1)
    hop = travel(found.ring_rows / turns)
    return {
        "all_gather": max(own, travel(fetched_rows)) + other,
        "all_to_all": max(own / 2, travel(found.dealt_rows, there)) + other
        + max(own / 2, travel(found.dealt_rows, back)),
        "sub_rings": max(own, hop) + (turns - 1) * max(other / turns, hop) + other / turns,
    }  # fmt: skip
