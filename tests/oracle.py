"""The reference: dense attention in float64 on one process, and masks from the plainest definitions.

Guarantees nothing about speed or memory. Everything is differentiable by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.masks import AttentionMask, Chunked, GlobalTokens, Prefix


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of (batch, tokens, heads, dim) tensors; K/V may have fewer heads. Computes and returns float64.

    `allowed`: booleans (q tokens, k tokens) or (q heads, q tokens, k tokens). `sinks`: (q heads,), one logit a head
    that takes weight and gives no value. `bias`: (q heads, q tokens, k tokens), added to the scores. `kept`: of
    all weights (batch, q heads, q tokens, k tokens), what they are multiplied with after the softmax. Returns out
    (batch, q tokens, q heads, d_v) and lse (batch, q heads, q tokens). A query with no key gives 0 and lse = -inf (its
    sink, where there are sinks), and finite gradients.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.cat((scores, sink_scores), -1).logsumexp(-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
    else:
        blind = ~allowed.any(-1).expand(scores.shape[:3])
        # A finite stand-in for the empty sum: its gradient is then zero instead of nan.
        finite = scores.masked_fill(blind.unsqueeze(-1), 0.0).logsumexp(-1)
        weights = torch.exp(scores - finite.unsqueeze(-1))
        lse = finite.masked_fill(blind, float("-inf"))
    weights = weights if kept is None else weights * kept
    return torch.einsum("bhnm,bmhd->bnhd", weights, v), lse


def allowed_mask(
    q_tokens: int,
    k_tokens: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: AttentionMask | None = None,
    cu_seqlens: list[int] | None = None,
    kv_cu_seqlens: list[int] | None = None,
) -> Tensor:
    """(q tokens, k tokens) booleans.

    `window=(l, r)`: l keys before and r after the query, besides the key at its own position; None or -1 is unbounded.
    `mask`: a mask of `ringattn.masks`. `cu_seqlens`: document bounds, from 0 to the number of tokens;
    queries see keys of the document with the same index, and positions are counted from each document's start.
    `kv_cu_seqlens`: those of the keys where they differ.
    """
    q_places = _places(q_tokens, cu_seqlens)
    k_places = _places(k_tokens, cu_seqlens if kv_cu_seqlens is None else kv_cu_seqlens)
    left, right = (-1 if bound is None else bound for bound in window or (None, None))
    chunk = mask.tokens if isinstance(mask, Chunked) else None
    prefix = mask.tokens if isinstance(mask, Prefix) else 0
    global_tokens = mask.tokens if isinstance(mask, GlobalTokens) else 0
    allowed = torch.zeros(q_tokens, k_tokens, dtype=torch.bool)
    for i, (q_document, q_position) in enumerate(q_places):
        for j, (k_document, k_position) in enumerate(k_places):
            before, after = q_position - k_position, k_position - q_position
            allowed[i, j] = (
                q_document == k_document
                and (
                    (
                        not (causal and after > 0)
                        and (
                            ((left == -1 or before <= left) and (right == -1 or after <= right))
                            or min(q_position, k_position) < global_tokens
                        )
                    )
                    or k_position < (prefix[k_document] if isinstance(prefix, tuple) else prefix)
                )
                and (chunk is None or q_position // chunk == k_position // chunk)
            )
    return allowed


def alibi(
    slopes: list[float],
    q_tokens: int,
    k_tokens: int,
    cu_seqlens: list[int] | None = None,
    kv_cu_seqlens: list[int] | None = None,
) -> Tensor:
    """(q heads, q tokens, k tokens): what ALiBi adds; positions count from each document's start."""
    q = [position for _, position in _places(q_tokens, cu_seqlens)]
    k = [position for _, position in _places(k_tokens, cu_seqlens if kv_cu_seqlens is None else kv_cu_seqlens)]
    distances = [[float(abs(i - j)) for j in k] for i in q]
    distance = torch.tensor(distances, dtype=torch.float64).view(q_tokens, k_tokens)
    return -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance


def _places(tokens: int, cu_seqlens: list[int] | None) -> list[tuple[int, int]]:
    """The document of each token and its position in the document."""
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens
    return [(d, t - bounds[d]) for d in range(len(bounds) - 1) for t in range(bounds[d], bounds[d + 1])]
