"""What the ranks do for the doctor: meet, exchange messages of two sizes, attend once beside a float64 reference."""

from __future__ import annotations

import platform
import socket
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ringattn.launch.doctor.facts import installed
from ringattn.ring import Ring
from ringattn.testing import dense_attention
from ringattn.transport.base import Message

LARGE_BYTES, SMALL_BYTES = 16 * 2**20, 64
REPEATS = {LARGE_BYTES: 5, SMALL_BYTES: 30}
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 257, 4, 2, 32


def examined(spec: dict[str, Any]) -> dict[str, Any]:
    """One process of a loopback; `spec` has `transport` and `timeout_s`. See `examine`."""
    with Ring(transport=spec["transport"], timeout_s=spec["timeout_s"]) as ring:
        return examine(ring)


def examine(ring: Ring) -> dict[str, Any]:
    """This rank's answer: where it is, bytes/s, microseconds, and its greatest absolute error."""
    large_s, small_s = (_exchange_s(ring, nbytes) for nbytes in (LARGE_BYTES, SMALL_BYTES))
    return {
        "rank": ring.rank,
        "host": socket.gethostname(),
        "device": str(ring.device),
        "transport": ring.transport.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ringattn": installed("ringattn"),
        "message_bytes": LARGE_BYTES,
        "bandwidth": None if large_s is None else LARGE_BYTES / large_s,
        "latency_us": None if small_s is None else small_s * 1e6,
        "error": _parity(ring),
    }


def _exchange_s(ring: Ring, nbytes: int) -> float | None:
    """Median seconds in which every rank sends `nbytes` to the next one; None for a rank that is alone."""
    if ring.world_size == 1:
        return None
    transport, times = ring.transport, []
    sent, received = transport.allocate(nbytes), transport.allocate(nbytes)
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    for _ in range(1 + REPEATS[nbytes]):
        ring.barrier()
        with ring.guarded():
            start = perf_counter()
            transport.exchange([Message(after, sent, "doctor")], [Message(before, received, "doctor")]).wait()
            transport.drain()
            times.append(perf_counter() - start)
    return median(times[1:])  # the first one connects


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
