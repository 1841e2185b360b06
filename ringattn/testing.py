"""Rings whose ranks are threads of one process, and the dense reference. For tests and first steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange
from ringattn.engine.philox import is_dropped
from ringattn.errors import PeerLostError
from ringattn.masks import AttentionMask, Chunked, GlobalTokens, Prefix
from ringattn.ring import Ring
from ringattn.transport.local import LocalWorld

T = TypeVar("T")


def run_ranks(world_size: int, fn: Callable[[Ring], T], *, timeout_s: float = 60.0, **ring_options: Any) -> list[T]:
    """Run `fn(ring)` on `world_size` threads, each of which is one rank of a ring in this process.

    While it runs, torch uses one intra-op thread, because one thread pool per rank would overload the machine.

    Args:
        world_size: Number of ranks.
        fn: The function that every rank calls with its ring. The ring is closed afterwards.
        timeout_s: The deadline of every wait, in seconds.
        ring_options: Further options of `Ring`, such as engine.

    Returns:
        The results of `fn`, by rank.

    Raises:
        BaseException: The first error that `fn` raised on a rank, except the PeerLostErrors that it caused on other
            ranks.

    Example:
        outs = run_ranks(4, lambda ring: ring.sequence(1000).counts)
    """
    world = LocalWorld(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            with Ring(transport=world.transport(rank), timeout_s=timeout_s, **ring_options) as ring:
                results[rank] = fn(ring)
        except BaseException as error:  # raised in the caller's thread below
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
    mask: AttentionMask | None = None,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
    **softmax: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the reference: attention over whole tensors in float64 on one process, by the definition.

    Memory grows with the square of the number of tokens.

    Args:
        q: Queries of any float dtype.
        k: Keys; q_heads is a multiple of kv_heads.
        v: Values, with the number of heads of k.
        causal: A query attends to the keys at its position and before.
        window: (left, right) keys in addition to the query itself; None or -1 is unbounded. None: no window.
        mask: A mask of `ringattn.masks` in addition to causal and window. None: no mask.
        cu_seqlens: Cumulative document lengths [0, ..., tokens]. None: one sequence.
        scale: Factor of the scores. None: 1 / sqrt(d_k).
        softmax: softcap, sinks, alibi_slopes, dropout_p and dropout_seed, as for `Ring.attention`.

    Shape:
        q: (batch, tokens, q_heads, d_k)
        k: (batch, tokens, kv_heads, d_k)
        v: (batch, tokens, kv_heads, d_v)

    Returns:
        (out, lse): (batch, tokens, q_heads, d_v) and (batch, q_heads, tokens), float64 and differentiable. For a query
        that attends to no key they are 0 and -inf.

    Raises:
        RuntimeError: Raised by torch for shapes that do not fit; the reference has no checks.
    """
    tokens = torch.arange(q.shape[1], device=q.device)
    bounds = torch.tensor([0, q.shape[1]] if cu_seqlens is None else list(cu_seqlens), device=q.device)
    document = torch.searchsorted(bounds[1:], tokens, right=True)
    place = tokens - bounds[document]
    ahead = tokens[None, :] - tokens[:, None]  # key position minus query position
    near = torch.ones_like(ahead, dtype=torch.bool)
    left, right = window or (None, None)
    if left not in (None, -1):
        near &= ahead >= -left
    if right not in (None, -1):
        near &= ahead <= right
    if isinstance(mask, GlobalTokens):
        near |= (place[:, None] < mask.tokens) | (place[None, :] < mask.tokens)
    if causal:
        near &= ahead <= 0
    if isinstance(mask, Prefix):
        counts = mask.tokens if isinstance(mask.tokens, tuple) else (mask.tokens,) * (len(bounds) - 1)
        near |= place < torch.tensor(counts, device=q.device)[document]
    if isinstance(mask, Chunked):
        near &= place[:, None] // mask.tokens == place[None, :] // mask.tokens
    allowed = near & (document[:, None] == document[None, :])
    return _softmax(q, k, v, allowed.double().expand(q.shape[2], -1, -1), place, scale, **softmax)


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
    **softmax: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the reference of dilated attention with offset="mod": a key counts once for each branch that has it.

    Like `dense_attention`, it computes in float64 on one process.

    Args:
        q: Queries of any float dtype.
        k: Keys; q_heads is a multiple of kv_heads.
        v: Values, with the number of heads of k.
        segment_lengths: The number of tokens of a segment, one per branch.
        dilation_rates: The dilation rate r, one per branch: a head keeps one of r tokens.
        causal: A query attends to the keys at its position and before.
        cu_seqlens: Cumulative document lengths [0, ..., tokens]. None: one sequence.
        scale: Factor of the scores. None: 1 / sqrt(d_k).
        softmax: softcap, sinks, alibi_slopes, dropout_p and dropout_seed, as for `Ring.attention`.

    Shape:
        q: (batch, tokens, q_heads, d_k)
        k: (batch, tokens, kv_heads, d_k)
        v: (batch, tokens, kv_heads, d_v)

    Returns:
        (out, lse): (batch, tokens, q_heads, d_v) and (batch, q_heads, tokens), float64 and differentiable.

    Raises:
        ValueError: The numbers of segment lengths and rates differ.
        RuntimeError: Raised by torch for shapes that do not fit.
    """
    tokens = torch.arange(q.shape[1], device=q.device)
    bounds = torch.tensor([0, q.shape[1]] if cu_seqlens is None else list(cu_seqlens), device=q.device)
    place = tokens - bounds[torch.searchsorted(bounds[1:], tokens, right=True)]
    counts = torch.zeros(q.shape[2], len(tokens), len(tokens), dtype=torch.float64, device=q.device)
    for length, rate in zip(segment_lengths, dilation_rates, strict=True):
        segment = tokens - place % length
        for head in range(q.shape[2]):
            kept = place % length % rate == head % rate
            counts[head] += (segment[:, None] == segment[None, :]) & kept[:, None] & kept[None, :]
    return _softmax(q, k, v, counts.tril() if causal else counts, place, scale, **softmax)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, place: Tensor, scale: float | None,
    softcap: float | None = None, sinks: Tensor | None = None, alibi_slopes: Any = None, dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention in float64 in which query i of a head attends to key j `counts[head, i, j]` times.

    `place`: (tokens,) the position of each token in its document.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        slopes = torch.as_tensor(alibi_slopes, dtype=torch.float64, device=q.device)
        scores = scores - slopes[:, None, None] * (place[:, None] - place[None, :]).abs()
    scores = torch.where(counts > 0, scores + counts.clamp(min=1).log(), float("-inf"))
    if sinks is not None:  # an additional key without a value, to which every query attends
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    sees = (lse > float("-inf"))[..., None]
    weights = torch.where(sees, scores.masked_fill(~sees, 0.0).softmax(-1), 0.0)[..., : k.shape[1]]
    if dropout_p:
        assert dropout_seed is not None
        dropped = torch.empty_like(weights, dtype=torch.bool)
        heads, queries, keys = (StridedRange(0, count) for count in weights.shape[1:])
        is_dropped(dropped, heads, queries, keys, dropout_seed, dropout_p)
        weights = weights.masked_fill(dropped, 0.0) / (1 - dropout_p)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse
