"""Rings whose ranks are threads of one process, and the references. For tests and first steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange
from ringattn.engine.philox import is_dropped
from ringattn.errors import PeerLostError
from ringattn.masks import AttentionMask, BidirectionalBlocks, ByHead, Chunked, GlobalTokens, Prefix, Slices, Tree
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
    bounds = torch.tensor([0, q.shape[1]] if cu_seqlens is None else list(cu_seqlens), device=q.device)
    groups = mask.groups if isinstance(mask, ByHead) else [(q.shape[2], mask)]
    allowed = torch.cat([_allowed(bounds, causal, window, one).double().expand(heads, -1, -1) for heads, one in groups])
    tokens = torch.arange(q.shape[1], device=q.device)
    place = tokens - bounds[torch.searchsorted(bounds[1:], tokens, right=True)]
    return _softmax(q, k, v, allowed, place, scale, **softmax)


def _allowed(
    bounds: Tensor, causal: bool, window: tuple[int | None, int | None] | None, mask: AttentionMask | None
) -> Tensor:
    """Return which queries attend to which keys, booleans (tokens, tokens). `bounds`: cumulative document lengths."""
    tokens = torch.arange(int(bounds[-1]), device=bounds.device)
    document = torch.searchsorted(bounds[1:], tokens, right=True)
    place = tokens - bounds[document]
    ahead = tokens[None, :] - tokens[:, None]  # key position minus query position
    if isinstance(mask, Slices):
        allowed = torch.zeros_like(ahead, dtype=torch.bool)
        for q_start, q_stop, k_start, k_stop, lo, hi, *_ in mask.rectangles.array.tolist():
            allowed[q_start:q_stop, k_start:k_stop] |= ((-ahead >= lo) & (-ahead <= hi))[q_start:q_stop, k_start:k_stop]
        return allowed
    if isinstance(mask, Tree):
        # The path of each token: all tokens of its ancestors, and those of its node up to itself.
        node = [number for number, length in enumerate(mask.lengths) for _ in range(length)]
        ahead = torch.ones_like(ahead)  # a key that is not on the path counts as later
        for query, number in enumerate(node):
            on_path, ancestor = [number], mask.parents[number]
            while ancestor >= 0:
                on_path.append(ancestor)
                ancestor = mask.parents[ancestor]
            path = [key for key in range(query + 1) if node[key] in on_path]
            ahead[query, path] = torch.arange(1 - len(path), 1, device=ahead.device)
        causal = True
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
        near |= place < torch.tensor(counts, device=bounds.device)[document]
    if isinstance(mask, BidirectionalBlocks):
        # Block n has the number 2 n + 1, because its tokens are past 2 n + 1 edges.
        block = torch.searchsorted(torch.tensor(mask.edges, device=bounds.device), tokens, right=True)
        near |= (ahead > 0) & (block[:, None] == block[None, :]) & (block % 2 == 1)
    if isinstance(mask, Chunked):
        near &= place[:, None] // mask.tokens == place[None, :] // mask.tokens
    return near & (document[:, None] == document[None, :])


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


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Tensor:
    """Compute the reference of `ShortConvolution` token by token, in float64 on one process.

    Args:
        x: Tokens of any float dtype.
        weight: The taps of each channel; the last one is that of the token itself.
        bias: Added to each channel. None: nothing is added.
        activation: silu, or None.
        cu_seqlens: Cumulative document lengths [0, ..., tokens]. None: one sequence.

    Shape:
        x: (batch, tokens, channels)
        weight: (channels, 1, taps)
        bias: (channels,)

    Returns:
        (batch, tokens, channels), float64 and differentiable.

    Raises:
        RuntimeError: Raised by torch for shapes that do not fit; the reference has no checks.
    """
    taps = weight.shape[-1]
    outputs = []
    for start, token in _tokens(x.shape[1], cu_seqlens):
        out = torch.zeros_like(x[:, 0], dtype=torch.float64) if bias is None else bias.double().expand(x[:, 0].shape)
        for tap in range(max(0, taps - 1 - token + start), taps):
            out = out + x[:, token - (taps - 1 - tap)].double() * weight[:, 0, tap].double()
        outputs.append(out if activation is None else out * out.sigmoid())
    return torch.stack(outputs, 1)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Tensor:
    """Compute the reference of `GatedDeltaRule` token by token, in float64 on one process.

    Args:
        q: Queries of any float dtype.
        k: Keys, with the heads of q.
        v: Values; v_heads is a multiple of heads.
        g: Logarithms of the decay.
        beta: Factors of the update.
        scale: Factor of the outputs. None: 1 / sqrt(d_k).
        cu_seqlens: Cumulative document lengths [0, ..., tokens]. None: one sequence.

    Shape:
        q: (batch, tokens, heads, d_k)
        k: (batch, tokens, heads, d_k)
        v: (batch, tokens, v_heads, d_v)
        g: (batch, tokens, v_heads) or (batch, tokens, v_heads, d_k)
        beta: (batch, tokens, v_heads)

    Returns:
        (batch, tokens, v_heads, d_v), float64 and differentiable.

    Raises:
        RuntimeError: Raised by torch for shapes that do not fit; the reference has no checks.
    """
    q, k = (x.double().repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    v, decay = v.double(), (g if g.dim() == 4 else g[..., None]).double().exp()
    state = empty = v.new_zeros(*v[:, 0].shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for start, token in _tokens(v.shape[1], cu_seqlens):
        state = decay[:, token, ..., None] * (empty if token == start else state)
        error = v[:, token] - torch.einsum("bhk,bhkv->bhv", k[:, token], state)
        update = beta[:, token].double()[..., None] * error
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, token], update)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    return torch.stack(outputs, 1) * (q.shape[-1] ** -0.5 if scale is None else scale)


def selective_state(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Tensor:
    """Compute the reference of `SelectiveState` token by token, in float64 on one process.

    Args:
        x: Inputs of any float dtype.
        dt: Steps, after bias, softplus and limits.
        A: Decay rates.
        B: Input matrices; heads is a multiple of groups.
        C: Output matrices.
        D: Factors of x that are added to the outputs. None: x is not added.
        cu_seqlens: Cumulative document lengths [0, ..., tokens]. None: one sequence.

    Shape:
        x: (batch, tokens, heads, head_dim)
        dt: (batch, tokens, heads)
        A: (heads,)
        B: (batch, tokens, groups, d_state)
        C: (batch, tokens, groups, d_state)
        D: (heads,) or (heads, head_dim)

    Returns:
        (batch, tokens, heads, head_dim), float64 and differentiable.

    Raises:
        RuntimeError: Raised by torch for shapes that do not fit; the reference has no checks.
    """
    x, dt = x.double(), dt.double()
    B, C = (each.double().repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))
    state = empty = x.new_zeros(*x[:, 0].shape, B.shape[-1])
    outputs = []
    for start, token in _tokens(x.shape[1], cu_seqlens):
        decay = (dt[:, token] * A.double()).exp()[..., None, None]
        update = torch.einsum("bhp,bhn,bh->bhpn", x[:, token], B[:, token], dt[:, token])
        state = decay * (empty if token == start else state) + update
        out = torch.einsum("bhpn,bhn->bhp", state, C[:, token])
        outputs.append(out if D is None else out + D.double().view(D.shape[0], -1) * x[:, token])
    return torch.stack(outputs, 1)


def _tokens(tokens: int, cu_seqlens: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return (the first token of the document, the token) for each token."""
    bounds = [0, tokens] if cu_seqlens is None else list(cu_seqlens)
    return [(start, token) for start, stop in pairwise(bounds) for token in range(start, stop)]


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
