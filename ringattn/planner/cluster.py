"""Clusters as a few constants with units: presets, files, links between ranks, and the time of a step's work.

A preset names the source of its figures; a cluster measured on this machine is marked `calibrated`.

The time of a step is arithmetic, memory traffic and the overhead of calls. A kernel reads keys in blocks, so a row
whose keys end inside a block costs the whole block: on average half a block per row. The softmax of a pair costs as
much as a few additional head dimensions.
Guarantees: predictions and fits of constants use the same formulas.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringattn.core.geometry import Band, StridedRange, count_pairs
from ringattn.core.problem import Problem
from ringattn.core.tiling import ROWS_OF_K, ROWS_OF_Q, Ints, TileTable
from ringattn.errors import InputError
from ringattn.planner.plan import LOCAL, Add, AttendReceivedOp, Pack, Plan, PlanStep, buffer_bytes, record_bytes
from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind
from ringattn.schedule.text import spans

# --- the work of a step -----------------------------------------------------------------------------------------------


FORWARD_FLOPS_PER_DIM = 4
"""FLOPs per pair and head dimension: two products with a multiplication and an addition each (FlashAttention-2, section
4.1)."""
BACKWARD_OVER_FORWARD = 2.5
"""Backward has five products, forward has two (same section)."""
COPIED, SUMMED = 2, 3
"""Memory accesses per byte: a copy reads and writes it; a sum reads both summands and writes one result."""


class Work(NamedTuple):
    """The work of engine calls. `pairs`: computed (q, k) pairs times query heads and batches. `moved_bytes`: memory
    traffic of the accumulators if every tile reads and writes its rows; `row_bytes`: the accumulators' rows, each
    once."""

    pairs: float = 0.0
    tiles: int = 0
    calls: int = 0
    moved_bytes: float = 0.0
    row_bytes: float = 0.0


def call_work(problem: Problem, tiles: TileTable, backward: bool, block_keys: int) -> Work:
    """Return the work of one call on these tiles.

    The call accumulates into the rows of queries, and in backward also into the rows of keys.
    """
    kv_heads = tiles.head // problem.group, np.maximum(1, tiles.heads // problem.group)
    sides = [(Kind.DQ, tiles.array[:, ROWS_OF_Q], tiles.head, tiles.heads)]
    if backward:
        sides.append((Kind.DKV, tiles.array[:, ROWS_OF_K], *kv_heads))
    pairs = summed = once = 0.0
    # Tiles of equal shape are computed once: there are thousands of tiles but few shapes.
    for (q_n, q_step, k_n, k_step, lo, hi, head_count), alike in Counter(_shapes(tiles)).items():
        q, k = StridedRange(0, q_n, q_step), StridedRange(0, k_n, k_step)
        pairs += alike * head_count * computed_pairs(q, k, Band(lo, hi), block_keys)
    for kind, rows, head, heads in sides:
        nbytes = record_bytes(problem, problem.accumulator_dtype, kind)
        summed += nbytes * int(rows[:, 0] @ heads)
        once += nbytes * different_rows(rows, head, heads)
    return Work(pairs * problem.batch, len(tiles), 1, SUMMED * summed, once)


def different_rows(rows: Ints, head: Ints, heads: Ints) -> int:
    """Return the number of different rows times heads in tiles, given the count, first row and stride of each tile.

    Rows count separately if their tiles have other heads or another stride.
    """
    if not len(rows):
        return 0
    count, first, stride = rows.T
    stride = np.where(count > 1, stride, 1)
    # Rows with equal heads, stride and remainder are intervals once divided by the stride. Each such group of tiles has
    # its own range of numbers, so one scan in ascending order finds the union of every group.
    _, group = np.unique(np.stack((head, heads, stride, first % stride)), axis=1, return_inverse=True)
    start = first // stride + group.ravel() * (int(first.max() + count.max()) + 1)
    order = np.argsort(start)
    start, end = start[order], (start + count)[order]
    before = np.maximum.accumulate(np.r_[0, end[:-1]])
    return int(np.maximum(0, end - np.maximum(start, before)) @ heads[order])


def _shapes(tiles: TileTable) -> Iterator[tuple[int, ...]]:
    """Yield the shape of each tile: count and stride of queries and of keys, the band relative to both, and heads."""
    # A band border beyond the farthest pair of a tile has no effect, so clip it.
    least, most = (1 - tiles.k_count) * tiles.k_stride, (tiles.q_count - 1) * tiles.q_stride
    lo, hi = (np.minimum(np.maximum(side - tiles.q_start + tiles.k_start, low), high) for side, low, high in
              ((tiles.lo, least, most + 1), (tiles.hi, least - 1, most)))  # fmt: skip
    numbers = tiles.q_count, tiles.q_stride, tiles.k_count, tiles.k_stride, lo, hi, tiles.heads
    return zip(*(column.tolist() for column in numbers), strict=True)


@lru_cache(maxsize=1 << 16)
def computed_pairs(q: StridedRange, k: StridedRange, band: Band, block_keys: int) -> float:
    """Return the number of computed pairs: the pairs in the band, plus half a block of keys per band edge in a row.

    If the band or the keys of the tile are narrower than a block, half of their width counts instead.
    """
    edges = q.between(k.start + band.lo, k.last + band.lo - 1).count
    edges += q.between(k.start + band.hi + 1, k.last + band.hi).count
    return count_pairs(q, k, band) + edges * min(block_keys, k.count, (band.hi - band.lo) // k.stride + 1) / 2


def attention_s(problem: Problem, pairs: float, cluster: Cluster, backward: bool = False) -> float:
    """Return the seconds of a pass over `pairs` (q, k) pairs times query heads in each batch."""
    return pairs * problem.batch * pair_s(problem, cluster, backward)


def pair_s(problem: Problem, cluster: Cluster, backward: bool, received: bool = False) -> float:
    """Return the seconds of one pair of one head. `received`: whether the query is received from another rank."""
    dims = (problem.head_dim + problem.value_dim) / 2 + cluster.softmax_dims
    if backward:
        dims += cluster.received_dims if received else 0.0
        return dims * FORWARD_FLOPS_PER_DIM * BACKWARD_OVER_FORWARD / (cluster.backward_flops or cluster.flops)
    return dims * FORWARD_FLOPS_PER_DIM / cluster.flops


def work_s(problem: Problem, work: Work, cluster: Cluster, backward: bool, received: bool = False) -> float:
    """Return the seconds of the engine calls in `work`. `received`: whether they work on received queries."""
    calls = work.calls * cluster.call_s + work.tiles * cluster.tile_s
    # Torch's kernels make a pass over the accumulators for each tile; other kernels accumulate all tiles of a row
    # internally.
    once = cluster.state_passes < SUMMED
    moved = cluster.state_passes * (work.row_bytes if once else work.moved_bytes / SUMMED)
    return work.pairs * pair_s(problem, cluster, backward, received) + calls + moved_s(moved, cluster)


def moved_s(nbytes: float, cluster: Cluster) -> float:
    """Return the seconds of reading and writing bytes in memory."""
    return nbytes / cluster.copy_bytes_s if cluster.copy_bytes_s else 0.0


def packing_s(plan: Plan, step: PlanStep, cluster: Cluster) -> float:
    """Return the seconds of packing in a step, before its messages can be sent, and of copying what forward kept."""
    kept = COPIED * plan.kept_bytes if plan.backward and step.number == plan.steps[0].number else 0
    return moved_s(kept + sum(_packed(plan, pack) for pack in step.packs), cluster)


def step_s(plan: Plan, step: PlanStep, cluster: Cluster) -> float:
    """Return the seconds of a step's work, which can hide its messages."""
    problem, buffers = plan.problem, plan.buffers
    zeroed = sum(size(zero.rows) for zero in step.zeros)
    moved: float = zeroed * record_bytes(problem, problem.accumulator_dtype, Kind.DKV)
    moved += sum(_packed(plan, pack) for pack in step.restores)
    if not plan.backward and step.number == plan.steps[-1].number:
        moved += COPIED * plan.kept_bytes
    seconds = 0.0
    for item in step.work:
        if isinstance(item, Add):
            moved += SUMMED * buffer_bytes(problem, buffers[item.part])
            continue
        work = call_work(problem, item.tiles, plan.backward, cluster.block_keys)
        seconds += work_s(problem, work, cluster, plan.backward, isinstance(item, AttendReceivedOp))
        if isinstance(item, AttendReceivedOp) and item.result != LOCAL:
            moved += COPIED * buffer_bytes(problem, buffers[item.result])
    sends, receives = (
        [(message.peer, message.elements * plan.element_bytes(message.buffer)) for message in messages]
        for messages in (step.sends, step.recvs)
    )
    return seconds + moved_s(moved, cluster) + exchange_s(plan.rank, sends, receives, cluster)


def exchange_s(
    rank: int, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], cluster: Cluster
) -> float:
    """Return the seconds that a step's messages add to its work: launches, and the SMs that they occupy in transfer.

    `sends`, `receives`: the peer and the bytes of each message.
    """
    if not (sends or receives):
        return 0.0
    if not cluster.message_sms or cluster.sms is None:
        return cluster.sync_s
    travels = []
    for messages in (sends, receives):
        by_kind: dict[LinkClass, dict[int, int]] = {}
        for peer, nbytes in messages:
            peers = by_kind.setdefault(cluster.link_class(rank, peer), {})
            peers[peer] = peers.get(peer, 0) + nbytes
        travels += [cluster.travel_s(kind, sum(peers.values()), max(peers.values())) for kind, peers in by_kind.items()]
    return cluster.sync_s + max(travels) * cluster.message_sms / cluster.sms


def _packed(plan: Plan, pack: Pack) -> float:
    """Return the bytes read and written to fill a buffer."""
    into = plan.buffers[pack.into]
    dtype = plan.problem.dtype if pack.source == LOCAL else plan.buffers[pack.source].dtype
    return buffer_bytes(plan.problem, into) + size(into.content) * record_bytes(plan.problem, dtype, into.kind)


# --- clusters ---------------------------------------------------------------------------------------------------------


CALIBRATED = "calibrated.json"
"""The default file that `ringattn calibrate` writes in the working directory."""


@dataclass(frozen=True)
class Cluster:
    """The machines as the planner and the simulator describe them.

    `flops`: FLOP/s that the attention kernel of one rank achieves forward; `backward_flops`: backward, None for the
    same. `bandwidth`: bytes/s that one rank sends, and at the same time receives. `latency_s`: seconds of a step's
    messages in addition to their bytes. `call_s`: seconds of one engine call in addition to its arithmetic; `tile_s`:
    the same for each tile of the call. `copy_bytes_s`: bytes/s at which rows are packed, merged and added, counting
    read and written bytes; None: not counted. `cores`: ranks of a machine that compute at full speed at the same time,
    None: all. `ranks_per_node` ranks share a machine, None: all. Messages between machines have `node_bandwidth` and
    `node_latency_s`, None: as inside a machine. `pcie_bandwidth`: between GPUs of a machine without NVLink, None: as
    `bandwidth`. `links`: the link of each pair of ranks; None: derived from `ranks_per_node`.

    `peer_bandwidth`, `node_peer_bandwidth`: bytes/s of messages from one rank to a single other rank, inside a machine
    (not over PCIe) and between machines; None: `bandwidth`, `node_bandwidth`. `sync_s`: seconds of a step with messages
    in addition to the messages and the work: launches, events, waits. `message_sms`: SMs that messages occupy during
    transfer. `state_passes`: number of passes over an accumulator in memory, per engine call if it is less than 3, the
    number of torch's kernels, which make them for each tile. `received_dims`: in
    backward, a pair with a received query costs this number of additional dimensions, because torch's kernels take its
    delta as a column.

    `block_keys`: keys per block of the kernel; if a row's keys begin or end inside a block, the kernel computes all of
    the block. `softmax_dims`: the softmax of a pair costs this number of additional dimensions. `pass_s`: seconds of a
    pass in addition to its steps. `wire_cores`: processors that a rank's messages occupy during transfer; used only if
    `cores` is set. `calibrated`: whether the constants were measured on this machine. `source`: their origin. `sms`:
    SMs of a rank's GPU; None: unknown, or no GPU. `recognised`: whether this is a preset that the user did not name,
    but that fits the GPUs and links that a ring found.
    Raises `InputError` for impossible constants.
    """

    name: str
    flops: float
    bandwidth: float
    latency_s: float
    backward_flops: float | None = None
    call_s: float = 0.0
    copy_bytes_s: float | None = None
    cores: int | None = None
    ranks_per_node: int | None = None
    node_bandwidth: float | None = None
    node_latency_s: float | None = None
    source: str = ""
    tile_s: float = 0.0
    block_keys: int = 0
    softmax_dims: float = 0.0
    pass_s: float = 0.0
    wire_cores: float = 0.0
    calibrated: bool = False
    sms: int | None = None
    pcie_bandwidth: float | None = None
    links: Links | None = None
    peer_bandwidth: float | None = None
    node_peer_bandwidth: float | None = None
    sync_s: float = 0.0
    message_sms: float = 0.0
    state_passes: float = 3.0
    recognised: bool = False
    received_dims: float = 0.0

    def __post_init__(self) -> None:
        """Check that rates and counts are positive and that seconds are not negative."""
        may_be_zero = ("latency_s", "node_latency_s", "call_s", "tile_s", "block_keys", "softmax_dims", "pass_s",
                       "wire_cores", "sync_s", "message_sms", "state_passes", "received_dims")  # fmt: skip
        for key in UNITS:
            value = getattr(self, key)
            if value is not None and not (value > 0 or (value == 0 and key in may_be_zero)):
                least = "must not be negative" if key in may_be_zero else "must be more than 0"
                raise InputError(f"{key}={value}: {least}")

    def joined(self, links: Links | None) -> Cluster:
        """Return these machines with the links of a ring, unless the cluster already describes its nodes."""
        has_nodes = self.links is not None or self.ranks_per_node is not None
        return self if links is None or has_nodes else replace(self, links=links)

    def check_ranks(self, ranks: int) -> None:
        """Raise `InputError` if the links are for another number of ranks."""
        if self.links is not None and len(self.links.nodes) != ranks:
            raise InputError(
                f"cluster={self.name!r}: its links join {len(self.links.nodes)} ranks, but there are {ranks}"
            )

    def node_of(self, rank: int) -> int:
        """Return the machine of a rank."""
        if self.links is not None:
            return self.links.nodes[rank]
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def ranks_of_equal_nodes(self, ranks: int) -> int:
        """Return the number of neighbouring ranks of each node, at least 2; 0 for one node or unequal nodes."""
        nodes = [self.node_of(rank) for rank in range(ranks)]
        size = nodes.count(0)
        return size if 1 < size < ranks and nodes == [rank // size for rank in range(ranks)] and not ranks % size else 0

    def link_class(self, rank: int, peer: int) -> LinkClass:
        """Return the class of the link between two ranks; `UNKNOWN` inside a machine whose links are not described."""
        if self.links is not None:
            return self.links.of(rank, peer)
        return LinkClass.UNKNOWN if self.node_of(rank) == self.node_of(peer) else LinkClass.NETWORK

    def classes_inside(self) -> set[LinkClass]:
        """Return the classes of the links between ranks of the same machine."""
        return (self.links.classes_inside() if self.links is not None else set()) or {LinkClass.UNKNOWN}

    def link(self, kind: LinkClass) -> tuple[float, float]:
        """Return the latency in seconds and the bytes/s of a link. An unknown link counts as one inside a machine."""
        if kind is LinkClass.NETWORK:
            latency_s = self.latency_s if self.node_latency_s is None else self.node_latency_s
            return latency_s, self.node_bandwidth or self.bandwidth
        if kind is LinkClass.PCIE:
            return self.latency_s, self.pcie_bandwidth or self.bandwidth
        return self.latency_s, self.bandwidth

    def travel_s(self, kind: LinkClass, rank_bytes: float, peer_bytes: float) -> float:
        """Return the seconds of a message over a link.

        `rank_bytes`: all bytes that its busier end sends, or receives, over links of this class at the same time.
        `peer_bytes`: the bytes from its sender to its receiver.
        """
        latency_s, bandwidth = self.link(kind)
        to_peer = {LinkClass.NETWORK: self.node_peer_bandwidth, LinkClass.PCIE: None}.get(kind, self.peer_bandwidth)
        return latency_s + max(rank_bytes / bandwidth, peer_bytes / (to_peer or bandwidth))

    def slowest(self, kinds: Iterable[LinkClass]) -> tuple[float, float]:
        """Return the latency in seconds and the bytes/s of the link class with the lowest bytes/s."""
        return min((self.link(kind) for kind in kinds), key=lambda link: (link[1], -link[0]))

    def leaving(self, sm_margin: int) -> Cluster:
        """Return the same machines with `sm_margin` SMs of each GPU reserved for exchanges.

        Raises `InputError` if no SM is left for attention, or if the number of SMs is unknown.
        """
        if not sm_margin:
            return self
        if self.sms is None or not 0 < sm_margin < self.sms:
            total = "of an unknown number" if self.sms is None else f"of {self.sms}"
            raise InputError(f"sm_margin={sm_margin}: cannot reserve this number of SMs {total} ({self.name})")
        share = (self.sms - sm_margin) / self.sms
        backward = None if self.backward_flops is None else self.backward_flops * share
        occupied = max(0.0, self.message_sms - sm_margin)  # messages use the reserved SMs first
        return replace(self, flops=self.flops * share, backward_flops=backward, message_sms=occupied)

    def by_copy_engines(self) -> Cluster:
        """Return the same machines with copy engines for messages inside a node, as transport `peer` uses them."""
        return replace(self, peer_bandwidth=None, message_sms=0.0)


UNITS = {
    "flops": "FLOP/s", "backward_flops": "FLOP/s", "bandwidth": "bytes/s", "node_bandwidth": "bytes/s",
    "pcie_bandwidth": "bytes/s",
    "copy_bytes_s": "bytes/s", "latency_s": "s", "node_latency_s": "s", "call_s": "s", "tile_s": "s", "pass_s": "s",
    "cores": "ranks", "ranks_per_node": "ranks", "block_keys": "keys", "softmax_dims": "dimensions",
    "wire_cores": "processors", "sms": "multiprocessors", "peer_bandwidth": "bytes/s",
    "node_peer_bandwidth": "bytes/s", "sync_s": "s", "message_sms": "multiprocessors", "state_passes": "times",
    "received_dims": "dimensions",
}  # fmt: skip

REFERENCE = Cluster(
    "no machine, but round constants (stated: 600 TFLOP/s, 400 GB/s, 15 us a message)", 600e12, 400e9, 15e-6,
    node_bandwidth=50e9, node_latency_s=30e-6, pcie_bandwidth=63e9,
    source="a stated point of reference, not a measurement of the machine at hand; 50 GB/s and 30 us between nodes, 63 "
    "GB/s over PCIe", sms=132,
)  # fmt: skip

_STATED = "latency and 20 us a step: stated, not measured; NICs: line rate"
_SMS = "SMs of messages: a margin of 4 to 8 frees them (MagiAttention's notes)"
_PAIRS = f"between nodes 16 to 20 GB/s (MagiAttention's charts, documents on B200); {_SMS}"

CLUSTERS: dict[str, Cluster] = {
    "a100": Cluster(
        "A100 SXM 80 GB, 8 a machine, 200G NICs (published)", 230e12, 240e9, 15e-6, backward_flops=196e12,
        copy_bytes_s=2.039e12, ranks_per_node=8, node_bandwidth=25e9, node_latency_s=30e-6, block_keys=128, sms=108,
        sync_s=20e-6, message_sms=8, state_passes=2, peer_bandwidth=195e9, node_peer_bandwidth=21e9,
        source="FlashAttention-2 (arXiv:2307.08691): up to 230 TFLOP/s forward, 63 % of the peak of 312 backward; "
        f"NVLink 3: half of 480 GB/s both ways (NVIDIA/nccl-tests issue 149); memory: A100 datasheet; "
        f"a pair: 195 GB/s (NCCL, li-plus/playground), between nodes 21 (TransformerEngine's ring in BurstEngine's "
        f"table); {_SMS}; {_STATED}",
    ),
    "h100": Cluster(
        "H100 SXM, 8 a machine, 400G NICs (published)", 648e12, 371e9, 15e-6, backward_flops=561e12,
        copy_bytes_s=3.35e12, ranks_per_node=8, node_bandwidth=50e9, node_latency_s=30e-6, block_keys=128, sms=132,
        sync_s=20e-6, message_sms=8, state_passes=2, peer_bandwidth=180e9, node_peer_bandwidth=18e9,
        source="FlashAttention-3 (arXiv:2407.08608), head dimension 128, 16k tokens, no mask; NVLink 4: half of 742 "
        f"GB/s both ways (NVIDIA/nccl issue 1264); memory: H100 datasheet; a pair: 180 GB/s (NVIDIA/nccl-tests issue "
        f"268), {_PAIRS}; {_STATED}",
    ),
    "h200": Cluster(
        "H200 SXM, 8 a machine, 400G NICs (published)", 702e12, 371e9, 15e-6, backward_flops=612e12,
        copy_bytes_s=4.8e12, ranks_per_node=8, node_bandwidth=50e9, node_latency_s=30e-6, block_keys=128, sms=132,
        sync_s=20e-6, message_sms=8, state_passes=2, peer_bandwidth=180e9, node_peer_bandwidth=18e9,
        source="cuDNN 9.19 on H200 (cudnn-frontend's benchmark tables), head dimension 128, 16k tokens, no mask; "
        f"NVLink 4 and a pair: as the H100's; memory: H200 datasheet; {_PAIRS}; {_STATED}",
    ),
    "b200": Cluster(
        "B200, 8 a machine, 400G NICs (published)", 1613e12, 900e9, 15e-6, backward_flops=1070e12,
        copy_bytes_s=8e12, ranks_per_node=8, node_bandwidth=50e9, node_latency_s=30e-6, block_keys=128, sms=148,
        sync_s=20e-6, message_sms=8, state_passes=2, peer_bandwidth=360e9, node_peer_bandwidth=18e9,
        source="FlashAttention-4 (Dao et al. 2026, abstract): up to 1613 TFLOP/s forward; backward: MagiAttention's "
        f"benchmark on 8 to 64 B200; NVLink 5: datasheet's one-way peak, which is never reached; a pair: the "
        f"H100's share of the peak, {_PAIRS}; {_STATED}",
    ),
    "gb200": Cluster(
        "GB200 NVL72, 72 a rack, 400G NICs (published)", 1613e12, 770e9, 15e-6, backward_flops=1070e12,
        copy_bytes_s=8e12, ranks_per_node=72, node_bandwidth=50e9, node_latency_s=30e-6, block_keys=128, sms=148,
        sync_s=20e-6, message_sms=8, state_passes=2, peer_bandwidth=360e9, node_peer_bandwidth=18e9,
        source="arithmetic, memory, multiprocessors and a pair: as the B200's; a rack counts as one node; NVLink 5: "
        f"770 GB/s (nvbandwidth, Azure's AI-benchmarking-guide, issue 7); {_PAIRS}; {_STATED}",
    ),
    "l20": Cluster(
        "L20, 8 a box over PCIe 4, 100G NICs (derived)", 87e12, 8e9, 15e-6, backward_flops=75e12,
        copy_bytes_s=0.864e12, ranks_per_node=8, node_bandwidth=7.9e9, node_latency_s=30e-6, block_keys=128, sms=92,
        sync_s=20e-6, message_sms=8, state_passes=2,
        source="the shares of peak that FlashAttention-2 reaches on an A100 (73 and 63 %), of the datasheet's 119.5 "
        "TFLOP/s, and its memory; 8 GB/s a rank inside and outside the box: stated, because eight cards share the "
        f"host's bridges and memory; {_STATED}",
    ),
    "rtx4090": Cluster(
        "RTX 4090 over PCIe 4, 2 a machine, 100G NICs (derived)", 121e12, 31.5e9, 15e-6, backward_flops=104e12,
        copy_bytes_s=1.008e12, ranks_per_node=2, node_bandwidth=12.5e9, node_latency_s=30e-6, block_keys=128, sms=128,
        sync_s=20e-6, message_sms=8, state_passes=2,
        source="the shares of peak that FlashAttention-2 reaches on an A100 (73 and 63 %), of the 165 TFLOP/s of the "
        f"Ada whitepaper; PCIe 4 x16 after coding, although copies through host memory are slower; {_STATED}",
    ),
    "cpu": Cluster(
        "2 cores of an AMD EPYC, gloo, float32 (measured 2026-11-21)", 6.7e10, 9.8e8, 5.6e-4,
        backward_flops=6.9e10, call_s=2.0e-4, copy_bytes_s=1.6e10, cores=2, tile_s=3.4e-4, block_keys=512,
        softmax_dims=20.0, pass_s=3.7e-3, wire_cores=0.59,
        source="ringattn calibrate on such a machine, quiet, 2 ranks of one thread, torch 2.13; calibrate your own",
    ),
}  # fmt: skip


def machine_named(name: str, known: Collection[str], key: str) -> str:
    """Return `name` if it is one of the `known` machines. Raises `InputError` with the machines that it may mean.

    Names are compared by model: h100-80 and H100-SXM may mean h100. A v100 is another model, although only one letter
    differs.
    """
    if name in known:
        return name
    bare = _bare(name)
    stems = {machine: _bare(machine.partition("-")[0]) for machine in known}
    inside = [stem for stem in stems.values() if stem in bare]
    if inside:  # gb200-nvl72 contains both gb200 and b200: take the longer; an a100 may have 40 or 80 GB
        near = [machine for machine, stem in stems.items() if stem == max(inside, key=len)]
    else:
        near = [machine for machine in known if bare and bare in _bare(machine)]
    if not near and not any(map(str.isdecimal, bare)):
        near = get_close_matches(name.lower(), known, n=1)
    meant = f"did you mean {' or '.join(near)}? " if near else "unknown machine; "
    raise InputError(f"{key}={name}: {meant}one of {', '.join(known)}")


def _bare(name: str) -> str:
    """Return the letters and digits of a name in lower case."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def cluster_of(cluster: Cluster | str) -> Cluster:
    """Return the cluster, which may be given by its name or file. Raises `InputError` if it is neither."""
    if isinstance(cluster, str):
        return cluster_named(cluster)
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster must be a Cluster, the name of a preset or a file, got {cluster!r}")
    return cluster


def cluster_named(name_or_file: str) -> Cluster:
    """Return a preset by its name, or the cluster in a JSON file that `ringattn calibrate` wrote.

    Raises `InputError` with the nearest name of a preset, or with the error in the file.
    """
    path = Path(name_or_file)
    if name_or_file in CLUSTERS or not (path.suffix == ".json" or path.is_file()):
        return CLUSTERS[machine_named(name_or_file, CLUSTERS, "cluster")]
    again = "create it again with `ringattn calibrate`"
    try:
        described: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cluster={path}: {error.strerror}; `ringattn calibrate out={path}` writes one") from error
    except ValueError as error:
        raise InputError(f"cluster={path}: not JSON ({error}); {again}") from error
    constants = described.get("constants") if isinstance(described, dict) else None
    if not isinstance(constants, dict):
        raise InputError(f"cluster={path}: has no constants; {again}")
    kinds = {field.name: str(field.type) for field in fields(Cluster)}
    for key, value in constants.items():
        if key not in kinds:
            raise InputError(f"cluster={path}: {key} is not a constant of a cluster; {again}")
        if not _fits(value, kinds[key]):
            raise InputError(f"cluster={path}: {key}={value!r} should be {kinds[key]}; {again}")
    if missing := [key for key in ("name", "flops", "bandwidth", "latency_s") if key not in constants]:
        raise InputError(f"cluster={path}: {missing[0]} is missing; {again}")
    return Cluster(**constants)


def _fits(value: Any, kind: str) -> bool:
    """Return whether a value read from JSON has a field's type, which is given as text such as "float | None"."""
    if value is None:
        return kind.endswith("None")
    if isinstance(value, (bool, str)):
        return kind == type(value).__name__
    return kind.startswith("float") or (kind.startswith("int") and isinstance(value, int))


# --- links between ranks ---------------------------------------------------------------------------------------------
# The planner, the simulator and `explain` all read these classes. A link that could not be determined is `UNKNOWN`; it
# is never guessed.


class LinkClass(Enum):
    """The medium that bytes between two ranks cross."""

    SAME_GPU = "same GPU"
    NVLINK = "NVLink"
    PCIE = "PCIe"
    MEMORY = "host memory"
    NETWORK = "network"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Links:
    """The links of a ring. `nodes`: the node of each rank; nodes are numbered from 0 in the order of their first rank.

    `inside`: the class of pairs on one node. `exceptions`: pairs (lower rank, higher rank) that have another class;
    few, because a node has few ranks. `outside`: the class of pairs on two nodes, except for those in `exceptions`.
    Raises `InputError` if the nodes are numbered differently.
    """

    nodes: tuple[int, ...]
    inside: LinkClass = LinkClass.UNKNOWN
    exceptions: tuple[tuple[int, int, LinkClass], ...] = ()
    outside: LinkClass = LinkClass.NETWORK

    def __post_init__(self) -> None:
        """Check that the nodes appear in the order of their numbers."""
        if list(dict.fromkeys(self.nodes)) != list(range(len(set(self.nodes)))):
            raise InputError(f"nodes={self.nodes}: number the nodes from 0, in the order of their first rank")
        object.__setattr__(self, "_by_pair", {(first, second): kind for first, second, kind in self.exceptions})
        # The hash is computed once: every call looks up its cached choice by the links.
        object.__setattr__(self, "_hash", hash((self.nodes, self.inside, self.exceptions, self.outside)))

    def __hash__(self) -> int:
        """Return the hash that was computed at creation."""
        return self._hash  # type: ignore[attr-defined]

    def of(self, rank: int, peer: int) -> LinkClass:
        """Return the class of the link between two ranks."""
        plain = self.inside if self.nodes[rank] == self.nodes[peer] else self.outside
        by_pair: dict[tuple[int, int], LinkClass] = self._by_pair  # type: ignore[attr-defined]
        return by_pair.get((min(rank, peer), max(rank, peer)), plain)

    def hops(self) -> tuple[LinkClass, ...]:
        """Return the class of each hop of the ring, from each rank to the next; empty for a single rank."""
        ranks = len(self.nodes)
        return tuple(self.of(rank, (rank + 1) % ranks) for rank in range(ranks)) if ranks > 1 else ()

    def classes_inside(self) -> set[LinkClass]:
        """Return the classes of links between ranks of the same node; empty if every node has a single rank."""
        pairs = [kind for first, second, kind in self.exceptions if self.nodes[first] == self.nodes[second]]
        sizes = Counter(self.nodes).values()
        plain = sum(size * (size - 1) // 2 for size in sizes) > len(pairs)
        return {*pairs, self.inside} if plain else set(pairs)

    @property
    def crossings(self) -> int:
        """Number of hops of the ring, from each rank to the next, that lead to another node."""
        return sum(node != after for node, after in zip(self.nodes, self.nodes[1:] + self.nodes[:1], strict=True))

    @property
    def least_crossings(self) -> int:
        """Number of crossings of a ring that enters each node once."""
        nodes = len(set(self.nodes))
        return nodes if nodes > 1 else 0


def numbered(names: Iterable[str]) -> tuple[int, ...]:
    """Number node names from 0 in the order in which they appear."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def placement(links: Links) -> str:
    """Return a text that says which ranks are on which node, and how often the ring crosses between nodes."""
    groups = []
    for node in range(max(links.nodes) + 1):
        ranks = [rank for rank, rank_node in enumerate(links.nodes) if rank_node == node]
        groups.append(f"{spans(ranks)} on node {node}")
    often = f"the ring crosses between nodes {links.crossings} times"
    least = "" if links.crossings == links.least_crossings else f", but {links.least_crossings} would be enough"
    return f"ranks {'; '.join(groups)}: {often}{least}"


# --- transport and reserved SMs: the current setting and the alternatives --------------------------------------------


DEFAULT_SM_MARGIN = 8
"""Default number of SMs that are reserved for NCCL and that kernels leave free (decision 0018)."""


class Exchange(NamedTuple):
    """A transport and its reserved SMs.

    `transport`: a name that `Ring` accepts, or two names joined by "+" (inside nodes, between nodes).
    """

    transport: str
    sm_margin: int = 0

    def __str__(self) -> str:
        return f"{self.transport}, {self.sm_margin} SMs" if self.transport.endswith("nccl") else self.transport

    def on(self, cluster: Cluster) -> Cluster:
        """Return the machines as a call with this transport uses them.

        Copy engines occupy no SM, and an SM margin slows arithmetic.
        """
        if self.transport.startswith("peer"):
            cluster = cluster.by_copy_engines()
        return cluster.leaving(self.sm_margin) if cluster.sms is not None else cluster


def exchanges(current: Exchange, cluster: Cluster, ranks: int) -> tuple[Exchange, ...]:
    """Return the transports that the constants of a cluster can tell apart, `current` first.

    On GPUs, the alternatives are NCCL with the default margin, NCCL without a margin, and on a single node copy
    engines. On CPUs there is no alternative, because the constants were measured with one transport.
    """
    if cluster.sms is None:
        return (current,)
    nodes = {cluster.node_of(rank) for rank in range(ranks)}
    others = [Exchange("nccl", DEFAULT_SM_MARGIN), Exchange("nccl"), *([Exchange("peer")] if len(nodes) == 1 else [])]
    return current, *(exchange for exchange in others if exchange != current)
