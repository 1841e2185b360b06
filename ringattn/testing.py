"""Rings inside one process, where every rank is a thread, and the reference. For tests and first steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.errors import PeerLostError
from ringattn.ring import Ring
from ringattn.transport.local import LocalWorld

T = TypeVar("T")


def run_ranks(world_size: int, fn: Callable[[Ring], T], *, timeout_s: float = 60.0, **ring_options: Any) -> list[T]:
    """Run `fn(ring)` on `world_size` threads and return the results by rank.

    The first error of a rank is raised again (the one that caused the others); `ring_options` go to `Ring`. Sets one
    intra-op thread while it runs, because threads that each start a pool of threads crowd the machine.
    """
    world = LocalWorld(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            with Ring(transport=world.transport(rank), timeout_s=timeout_s, **ring_options) as ring:
                results[rank] = fn(ring)
        except BaseException as error:  # reported to the caller below, whatever it is
            failures.append((rank, error))

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(threads_before)
    if failures:
        raise next((error for _, error in failures if not isinstance(error, PeerLostError)), failures[0][1])
    return results


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference: attention over whole tensors in float64 on one process, straight from the definition.

    `q`, `k`, `v`: (batch, tokens, heads, dim), K/V with fewer heads allowed. Returns out (batch, tokens, q_heads, d_v)
    and lse (batch, q_heads, tokens), both float64 and differentiable; rows without a key give 0 and -inf. Memory grows
    with tokens squared.
    """
    tokens = torch.arange(q.shape[1], device=q.device)
    ends = torch.tensor([q.shape[1]] if cu_seqlens is None else list(cu_seqlens)[1:], device=q.device)
    document = torch.searchsorted(ends, tokens, right=True)
    ahead = tokens[None, :] - tokens[:, None]  # key position minus query position
    allowed = document[:, None] == document[None, :]
    if causal:
        allowed &= ahead <= 0
    left, right = window or (None, None)
    if left not in (None, -1):
        allowed &= ahead >= -left
    if right not in (None, -1):
        allowed &= ahead <= right
    return _softmax(q, k, v, allowed.double().expand(q.shape[2], -1, -1), scale)


def dense_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    causal: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """LongNet's dilated attention, as `dense_attention`: a key counts once for each branch that has it."""
    tokens = torch.arange(q.shape[1], device=q.device)
    bounds = torch.tensor([0, q.shape[1]] if cu_seqlens is None else list(cu_seqlens), device=q.device)
    place = tokens - bounds[torch.searchsorted(bounds[1:], tokens, right=True)]
    counts = torch.zeros(q.shape[2], len(tokens), len(tokens), dtype=torch.float64, device=q.device)
    for length, rate in zip(segment_lengths, dilation_rates, strict=True):
        segment = tokens - place % length
        for head in range(q.shape[2]):
            kept = place % length % rate == head % rate
            counts[head] += (segment[:, None] == segment[None, :]) & kept[:, None] & kept[None, :]
    return _softmax(q, k, v, counts.tril() if causal else counts, scale)


def _softmax(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention in float64 in which query i of a head meets `counts[head, i, j]` times key j."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = torch.where(counts > 0, scores + counts.clamp(min=1).log(), float("-inf"))
    sees = (counts > 0).any(2)[..., None]
    weights = torch.where(sees, scores.masked_fill(~sees, 0.0).softmax(-1), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)
