"""What the ranks do for the doctor: meet, exchange messages of two sizes, attend once beside a float64 reference."""

from __future__ import annotations

import os
import platform
import socket
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ringattn.launch.doctor.facts import installed, nccl_library
from ringattn.launch.doctor.network import network, network_facts
from ringattn.planner.cluster import Links
from ringattn.ring import Ring
from ringattn.testing import dense_attention
from ringattn.transport.base import Message
from ringattn.transport.location import order_advice
from ringattn.transport.nodes import NodesTransport

LARGE_BYTES, SMALL_BYTES = 16 * 2**20, 64
MEDIUM_BYTES, LONG_S = 2**20, 0.25
"""Where large messages take longer than that, pairs exchange smaller ones."""
REPEATS = {LARGE_BYTES: 5, SMALL_BYTES: 30}
PAIR_REPEATS = {LARGE_BYTES: 3, MEDIUM_BYTES: 3, SMALL_BYTES: 10}
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 257, 4, 2, 32


def examined(spec: dict[str, Any]) -> dict[str, Any]:
    """One process of a loopback; `spec` has `transport` and `timeout_s`. See `examine`."""
    with Ring(transport=spec["transport"], timeout_s=spec["timeout_s"]) as ring:
        return examine(ring)


def examine(ring: Ring) -> dict[str, Any]:
    """This rank's answer: where it is, bytes/s, microseconds, and its greatest absolute error."""
    large_s, small_s = (_neighbors_s(ring, nbytes) for nbytes in (LARGE_BYTES, SMALL_BYTES))
    here = ring.locations[ring.rank] if ring.locations else None
    return {
        "rank": ring.rank,
        "host": socket.gethostname(),
        "device": str(ring.device),
        "transport": ring.transport.ways if isinstance(ring.transport, NodesTransport) else ring.transport.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ringattn": installed("ringattn"),
        "message_bytes": LARGE_BYTES,
        "bandwidth": None if large_s is None else LARGE_BYTES / large_s,
        "latency_us": None if small_s is None else small_s * 1e6,
        "error": _parity(ring),
        "nics": list(here.nics) if here else [],
        "order": order_advice(ring.locations),
        "pairs": _pairs(ring, large_s),
        "network": _network(ring),
    }


def _network(ring: Ring) -> list[dict[str, Any]]:
    """The findings about the network of this rank's node, from its first rank; rank 0's node is looked at anyway."""
    if ring.links is None or ring.rank == 0 or ring.links.nodes.index(ring.links.nodes[ring.rank]) != ring.rank:
        return []
    return [one._asdict() for one in network(network_facts(), os.environ, nccl_library().version)]


def _neighbors_s(ring: Ring, nbytes: int) -> float | None:
    """Median seconds in which every rank sends `nbytes` to the next one; None for a rank that is alone."""
    if ring.world_size == 1:
        return None
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    return _exchange_s(ring, nbytes, REPEATS[nbytes], after, before)


def _exchange_s(ring: Ring, nbytes: int, repeats: int, after: int | None, before: int | None) -> float | None:
    """Median seconds of an exchange, which all ranks begin together; a rank without peers only waits for the others."""
    transport, times = ring.transport, []
    sent, received = transport.allocate(nbytes), transport.allocate(nbytes)
    for _ in range(1 + repeats):
        ring.barrier()
        if after is None or before is None:
            continue
        with ring.guarded():
            start = perf_counter()
            transport.exchange([Message(after, sent, "doctor")], [Message(before, received, "doctor")]).wait()
            transport.drain()
            times.append(perf_counter() - start)
    return median(times[1:]) if times else None  # the first one connects


def _pairs(ring: Ring, large_s: float | None) -> list[dict[str, Any]]:
    """What this rank measured with ranks of higher number, of each class of link and between neighboring nodes."""
    if ring.links is None or large_s is None:
        return []
    slowest_s = max(map(float, ring.all_gather_text(repr(large_s))))
    nbytes = LARGE_BYTES if slowest_s < LONG_S else MEDIUM_BYTES
    found = []
    for measured in rounds(ring.links):
        peer = next((sum(pair) - ring.rank for pair in measured if ring.rank in pair), None)
        seconds, small_s = (_exchange_s(ring, size, PAIR_REPEATS[size], peer, peer) for size in (nbytes, SMALL_BYTES))
        if seconds is not None and small_s is not None and peer is not None and peer > ring.rank:
            found.append({
                "peer": peer, "link": ring.links.of(ring.rank, peer).value, "bandwidth": nbytes / seconds,
                "latency_us": small_s * 1e6, "across": ring.links.nodes[ring.rank] != ring.links.nodes[peer],
            })  # fmt: skip
    return found


def rounds(links: Links) -> list[list[tuple[int, int]]]:
    """Pairs of ranks that exchange at the same time, each rank in one of them at most.

    First a pair of every node, then one of each class that only some pairs of a node have, then each node with the
    next.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(links.nodes):
        members.setdefault(node, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in members.values() if len(ranks) > 1]
    seen = {links.of(*pair) for pair in inside}
    unlike = {kind: (first, second) for first, second, kind in reversed(links.exceptions) if kind not in seen}
    leaders = [ranks[0] for ranks in members.values()]
    between = list(pairwise(leaders))
    return [one for one in (inside, *([pair] for pair in unlike.values()), between[::2], between[1::2]) if one]


def _parity(ring: Ring) -> float:
    """The greatest absolute error of out, dq, dk and dv: float32, causal, zigzag, against dense float64."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, TOKENS, heads, HEAD_DIM, generator=generator).to(ring.device)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    seq = ring.sequence(TOKENS, layout="zigzag")
    q, k, v = leaves = [seq.shard(x).clone().requires_grad_() for x in whole[:3]]
    out = ring.attention(q, k, v, seq, causal=True)
    assert isinstance(out, torch.Tensor)
    got = [out.detach(), *torch.autograd.grad(out, leaves, seq.shard(whole[3]))]
    ring.synchronize()
    exact = [x.double().requires_grad_() for x in whole[:3]]
    dense, _ = dense_attention(*exact, causal=True)
    want = [dense.detach(), *torch.autograd.grad(dense, exact, whole[3].double())]
    errors = [(mine.double() - seq.shard(reference)).abs().max() for mine, reference in zip(got, want, strict=True)]
    return float(torch.stack(errors).max())
