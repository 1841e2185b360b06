"""How long a rank works on what a plan tells it: arithmetic, memory traffic, and what calls cost beside them.

A kernel takes keys in blocks, so a row whose keys end inside a block costs the whole block: half a block a row in the
mean. The softmax of a pair costs as much as a few more dimensions of its heads would.
Guarantees: the same formulas for what is predicted and for what constants are fitted to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringattn.core.geometry import Band, StridedRange, count_pairs
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable
from ringattn.planner.cluster import Cluster, LinkClass
from ringattn.planner.plan import LOCAL, Add, AttendReceivedOp, Pack, Plan, PlanStep, buffer_bytes, record_bytes
from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind

FORWARD_FLOPS_PER_DIM = 4
"""Of a pair: two products, a multiplication and an addition each (FlashAttention-2, section 4.1)."""
BACKWARD_OVER_FORWARD = 2.5
"""Five products for two (same place)."""
COPIED, SUMMED = 2, 3
"""How often a byte passes that is copied (read, written), and one that is added to another (both read, one written)."""


class Work(NamedTuple):
    """Of engine calls: pairs that the kernel computes, times query heads and batches; tiles; calls; bytes that pass."""

    pairs: float = 0.0
    tiles: int = 0
    calls: int = 0
    moved_bytes: float = 0.0


def call_work(problem: Problem, tiles: TileTable, backward: bool, block_keys: int) -> Work:
    """Of one call on these tiles, whose results are added to the accumulators of queries, backward of keys too."""
    rows = int(tiles.q_count @ tiles.heads)
    keys = int(tiles.k_count @ np.maximum(1, tiles.heads // problem.group))
    pairs = 0.0
    # Tiles that lie alike to their band are looked at once; there are thousands of tiles and few ways to lie.
    for (q_n, q_step, k_n, k_step, lo, hi, head_count), alike in Counter(_lying(tiles)).items():
        q, k = StridedRange(0, q_n, q_step), StridedRange(0, k_n, k_step)
        pairs += alike * head_count * computed_pairs(q, k, Band(lo, hi), block_keys)
    summed = rows * record_bytes(problem, problem.accumulator_dtype, Kind.DQ)
    if backward:
        summed += keys * record_bytes(problem, problem.accumulator_dtype, Kind.DKV)
    return Work(pairs * problem.batch, len(tiles), 1, SUMMED * summed)


def _lying(tiles: TileTable) -> Iterator[tuple[int, ...]]:
    """Of each tile count and stride of queries and keys, its band seen from the first of both, and heads."""
    # Beyond the farthest pair of a tile a band may end anywhere.
    least, most = (1 - tiles.k_count) * tiles.k_stride, (tiles.q_count - 1) * tiles.q_stride
    lo, hi = (np.minimum(np.maximum(side - tiles.q_start + tiles.k_start, low), high) for side, low, high in
              ((tiles.lo, least, most + 1), (tiles.hi, least - 1, most)))  # fmt: skip
    numbers = tiles.q_count, tiles.q_stride, tiles.k_count, tiles.k_stride, lo, hi, tiles.heads
    return zip(*(column.tolist() for column in numbers), strict=True)


@lru_cache(maxsize=1 << 16)
def computed_pairs(q: StridedRange, k: StridedRange, band: Band, block_keys: int) -> float:
    """Pairs that are computed: those in the band, and half a block, or half the band, at each edge of a row."""
    edges = q.between(k.start + band.lo, k.last + band.lo - 1).count
    edges += q.between(k.start + band.hi + 1, k.last + band.hi).count
    return count_pairs(q, k, band) + edges * min(block_keys, k.count, (band.hi - band.lo) // k.stride + 1) / 2


def attention_s(problem: Problem, pairs: float, cluster: Cluster, backward: bool = False) -> float:
    """Seconds of a pass over so many (q, k) pairs times query heads, in each batch."""
    return pairs * problem.batch * pair_s(problem, cluster, backward)


def pair_s(problem: Problem, cluster: Cluster, backward: bool, received: bool = False) -> float:
    """Seconds of one pair of one head. `received`: of another rank's query."""
    dims = (problem.head_dim + problem.value_dim) / 2 + cluster.softmax_dims
    if backward:
        dims += cluster.received_dims if received else 0.0
        return dims * FORWARD_FLOPS_PER_DIM * BACKWARD_OVER_FORWARD / (cluster.backward_flops or cluster.flops)
    return dims * FORWARD_FLOPS_PER_DIM / cluster.flops


def work_s(problem: Problem, work: Work, cluster: Cluster, backward: bool, received: bool = False) -> float:
    """Seconds of engine calls. `received`: on other ranks' queries."""
    calls = work.calls * cluster.call_s + work.tiles * cluster.tile_s
    # `Work` counts as many passes of the accumulators as torch's kernels make; others carry them in the kernel.
    moved = work.moved_bytes * cluster.state_passes / SUMMED
    return work.pairs * pair_s(problem, cluster, backward, received) + calls + moved_s(moved, cluster)


def moved_s(nbytes: float, cluster: Cluster) -> float:
    """Seconds in which bytes pass through memory."""
    return nbytes / cluster.copy_bytes_s if cluster.copy_bytes_s else 0.0


def packing_s(plan: Plan, step: PlanStep, cluster: Cluster) -> float:
    """Seconds until a step's messages can leave."""
    return moved_s(sum(_packed(plan, pack) for pack in step.packs), cluster)


def step_s(plan: Plan, step: PlanStep, cluster: Cluster) -> float:
    """Seconds of a step's work, which its messages may hide behind."""
    problem, buffers = plan.problem, plan.buffers
    zeroed = sum(size(zero.rows) for zero in step.zeros)
    moved: float = zeroed * record_bytes(problem, problem.accumulator_dtype, Kind.DKV)
    moved += sum(_packed(plan, pack) for pack in step.restores)
    seconds = 0.0
    for item in step.work:
        if isinstance(item, Add):
            moved += SUMMED * buffer_bytes(problem, buffers[item.part])
            continue
        work = call_work(problem, item.tiles, plan.backward, cluster.block_keys)
        seconds += work_s(problem, work, cluster, plan.backward, isinstance(item, AttendReceivedOp))
        if isinstance(item, AttendReceivedOp) and item.result != LOCAL:
            moved += COPIED * buffer_bytes(problem, buffers[item.result])
    return seconds + moved_s(moved, cluster) + exchange_s(plan, step, cluster)


def exchange_s(plan: Plan, step: PlanStep, cluster: Cluster) -> float:
    """Seconds that a step's messages take from its work: their launch, and multiprocessors while they travel."""
    if not (step.sends or step.recvs):
        return 0.0
    if not cluster.message_sms or cluster.sms is None:
        return cluster.sync_s
    travels = []
    for messages in (step.sends, step.recvs):
        by_kind: dict[LinkClass, dict[int, int]] = {}
        for message in messages:
            peers = by_kind.setdefault(cluster.link_class(plan.rank, message.peer), {})
            nbytes = message.elements * plan.element_bytes(message.buffer)
            peers[message.peer] = peers.get(message.peer, 0) + nbytes
        travels += [cluster.travel_s(kind, sum(peers.values()), max(peers.values())) for kind, peers in by_kind.items()]
    return cluster.sync_s + max(travels) * cluster.message_sms / cluster.sms


def _packed(plan: Plan, pack: Pack) -> float:
    """Bytes read and written to fill a buffer."""
    into = plan.buffers[pack.into]
    dtype = plan.problem.dtype if pack.source == LOCAL else plan.buffers[pack.source].dtype
    return buffer_bytes(plan.problem, into) + size(into.content) * record_bytes(plan.problem, dtype, into.kind)
