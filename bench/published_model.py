"""Times of others' context-parallel attention in closed form, from the constants of a `Cluster` and what they launch.

A ring's step takes as long as its work or its hop, whichever is longer; collectives are not hidden. These are not our
plans: others keep unmerged outputs, send whole shards, or gather before they attend.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.bench.published_points import Implementation, Kernel
from ringattn.planner.cluster import Cluster, LinkClass
from ringattn.planner.work import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM, moved_s

ITEM = 2
"""Bytes of a number in bf16."""


class Call(NamedTuple):
    """`tokens` of all `ranks`. `share`: pairs over those of the mask without documents."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int = 128
    causal: bool = False
    batch: int = 1
    share: float = 1.0

    @property
    def pairs(self) -> float:
        """(q, k) pairs of all ranks, times heads and batches."""
        return self.share * self.tokens**2 * self.heads * self.batch / (2 if self.causal else 1)

    @property
    def q_elements(self) -> float:
        """Of one rank's queries."""
        return self.tokens / self.ranks * self.heads * self.dim * self.batch

    @property
    def kv_elements(self) -> float:
        """Of one rank's keys, and of its values."""
        return self.tokens / self.ranks * self.kv_heads * self.dim * self.batch

    def flops(self, backward: bool) -> float:
        """Of one rank in the mean."""
        return self.pairs * self.dim * FORWARD_FLOPS_PER_DIM * (BACKWARD_OVER_FORWARD if backward else 1) / self.ranks


def kernel_s(
    cluster: Cluster, kernel: Kernel, flops: float, elements: float, backward: bool,
    causal: bool = False, dim: int = 128,
) -> float:  # fmt: skip
    """One call of a kernel; `causal`: its tiles lie on the diagonal."""
    flops *= (1 + kernel.softmax_dims / dim) / (1 + kernel.softmax_dims / 128)
    if backward:
        rate = kernel.backward * (kernel.causal_backward if causal else 1)
        return flops / rate + kernel.launches_s + moved_s(kernel.back_row_bytes * elements, cluster)
    rate = kernel.forward * (kernel.causal if causal else 1)
    return max(kernel.call_s, flops / rate + moved_s(kernel.row_bytes * elements, cluster))


def ring_s(
    call: Call, cluster: Cluster, kernel: Kernel, made: Implementation, backward: bool, layout: str = "zigzag",
    inside: bool | None = None, inner: int = 1, rails: bool = False,
) -> float:  # fmt: skip
    """A ring of shards.

    `inside`: whether its hops stay on a node, None: where all ranks do. `inner`: ranks of a node's ring in a double
    ring, whose other hops have as many steps for them. `rails`: every rank of a node sends across in a step.
    """
    steps, causal = call.ranks, call.causal
    flops = call.flops(backward) / steps
    # Of a zigzag shard half of the queries, or half of the keys, take part in a step off the diagonal.
    part = 0.75 if causal and layout == "zigzag" else 1.0
    elements = call.q_elements * part
    merged = made.dq_bytes * (elements + 2 * call.kv_elements) if backward else made.out_bytes * elements

    def step_s(flops: float, diagonal: bool) -> float:
        taken = kernel_s(cluster, kernel, flops, elements, backward, diagonal, call.dim) + moved_s(merged, cluster)
        return max(made.host_s, taken + made.sync_s)

    if inside is None:
        inside = call.ranks <= (cluster.ranks_per_node or call.ranks)
    nbytes = 2 * call.kv_elements * ITEM * (made.backward_messages if backward else 1)
    # Of a flat ring one rank a node sends across, so no other shares its network cards.
    shared = nbytes if rails or inner > 1 else 0.0
    near = cluster.travel_s(LinkClass.UNKNOWN, nbytes, nbytes)
    hop = near if inside else max(near, cluster.travel_s(LinkClass.NETWORK, shared, nbytes) / inner)
    if causal and layout == "contiguous":
        # The last rank attends to everything: all steps but its own block are full.
        whole = 2 * flops
        return max(step_s(flops, True), hop) + (steps - 2) * max(step_s(whole, False), hop) + step_s(whole, False)
    each, first = step_s(flops, layout == "striped"), step_s(flops, causal)
    return max(first, hop) + (steps - 2) * max(each, hop) + each if steps > 1 else first


def collective_s(cluster: Cluster, ranks: int, nbytes: float, gathered: bool = False, spread: bool = False) -> float:
    """So many bytes that each rank receives from `ranks` - 1 others, evenly.

    `gathered`: what crosses to a node comes once, over the links of all of its ranks. `spread`: every rank is on a node
    of its own.
    """
    node = 1 if spread else cluster.ranks_per_node or ranks
    across = nbytes * max(0, ranks - node) / max(1, ranks - 1)
    far = cluster.travel_s(LinkClass.NETWORK, across / (node if gathered else 1), 0) if across else 0.0
    near = cluster.travel_s(LinkClass.UNKNOWN, nbytes if gathered else nbytes - across, 0) if not spread else 0.0
    return max(near, far)


def gather_s(call: Call, cluster: Cluster, kernel: Kernel, backward: bool) -> float:
    """All K and V gathered before, two kernels, one for each half of a zigzag shard; then gradients scattered."""
    received = 2 * call.kv_elements * ITEM * (call.ranks - 1)
    half = kernel_s(cluster, kernel, call.flops(backward) / 2, call.q_elements / 2, backward, call.causal, call.dim)
    exchanges = collective_s(cluster, call.ranks, received, gathered=True)
    if backward:  # and float32 gradients the other way, of each rank for all keys
        exchanges += 2 * collective_s(cluster, call.ranks, received, gathered=True)
        exchanges += moved_s(6 * received, cluster)
    return exchanges + 2 * half


def heads_s(
    call: Call, cluster: Cluster, kernel: Kernel, made: Implementation, backward: bool, degree: int | None = None,
    ring_inside: bool = False,
) -> float:  # fmt: skip
    """Ulysses over `degree` ranks, all if None, and a ring of the rest; nothing of the all-to-alls is hidden."""
    degree = degree or call.ranks
    rings = call.ranks // degree
    copies = max(1.0, degree / call.kv_heads)  # K/V heads are replicated where there are fewer than ranks
    sent = 2 * (call.q_elements + call.kv_elements * copies) * ITEM * (degree - 1) / degree
    exchange = collective_s(cluster, degree, sent, spread=ring_inside)
    # Packed and unpacked, once each.
    exchange += moved_s(4 * sent, cluster)
    if rings == 1:
        return exchange + kernel_s(
            cluster, kernel, call.flops(backward), call.q_elements, backward, call.causal, call.dim
        )
    # The ring sees a share of the heads of as many more tokens.
    part = call._replace(ranks=rings, kv_heads=max(1, call.kv_heads // degree), heads=call.heads // degree)
    near = ring_inside or call.ranks <= (cluster.ranks_per_node or call.ranks)
    return exchange + ring_s(part, cluster, kernel, made, backward, inside=near, rails=True)
