"""The reference of dilated attention: a dense float64 softmax over counted keys, each count made from the definition.

Guarantees: out and lse are differentiable by autograd; a row without keys gives out 0 and lse -inf, and zero gradients.
Nothing about speed or memory: it holds (branches, heads, tokens, tokens) numbers.
Not covered: anything of ringattn; shards, tiles or kernels; what a ring refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def dilated_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    causal: bool = False,
    offset: str = "mod",
    tail: str = "ragged",
    grad: str = "exact",
    layer: int | None = None,
    documents: Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dilated attention of whole sequences (LongNet, arXiv 2307.02486, equations 3 to 15), computed in float64.

    q (batch, tokens, q_heads, d_k), k (batch, tokens, kv_heads, d_k), v (batch, tokens, kv_heads, d_v), sinks
    (q_heads,). `documents` are bounds [0, ..., tokens]; segments restart in each. A pair that several branches allow
    counts once for each. `alibi_slopes` (q_heads,): a score loses slope * |distance in tokens|. Returns out (batch,
    tokens, q_heads, d_v) and lse (batch, q_heads, tokens), natural log.

    tail="zero_pad": each segment and class is padded with zero keys to ceil(min(w, document) / r) rows, at the
    positions that follow the segment. torchscale moves rows where r does not divide that and segments follow; this does
    not. grad="detached": the weights that mix the branches and the lse carry no gradient. Raises ValueError for a
    rule it does not know and for detached with sinks.
    """
    if tail not in ("ragged", "zero_pad") or grad not in ("exact", "detached"):
        raise ValueError(f"no reference for tail={tail!r}, grad={grad!r}")
    if grad == "detached" and sinks is not None:
        raise ValueError("a sink belongs to no branch: there is no reference for grad='detached' with sinks")
    (tokens, q_heads), kv_heads = q.shape[1:3], k.shape[2]
    kept = coverage(tokens, q_heads, kv_heads, segment_lengths, dilation_rates, offset, layer, documents)
    pairs, zero_keys = _pairs(kept, segment_lengths, dilation_rates, documents)
    if causal:
        pairs = pairs.tril()
    if causal or tail == "ragged":
        zero_keys = torch.zeros_like(zero_keys)

    k, v = (x.double().repeat_interleave(q_heads // kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q.double(), k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        places = torch.arange(tokens)
        scores = scores - alibi_slopes[:, None, None] * (places[:, None] - places).abs()
    if grad == "exact":
        return _softmax(scores, v, pairs.sum(0), zero_keys.sum(0), sinks)

    branches = [_softmax(scores, v, *counts, None) for counts in zip(pairs, zero_keys, strict=True)]
    branch_lse = torch.stack([branch[1] for branch in branches]).detach()
    lse = branch_lse.logsumexp(0)
    shares = (branch_lse - lse).masked_fill(lse.isneginf(), -torch.inf).exp()
    return torch.einsum("ibhn,ibnhd->bnhd", shares, torch.stack([branch[0] for branch in branches])), lse


def coverage(
    length: int,
    q_heads: int,
    kv_heads: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offset: str = "mod",
    layer: int | None = None,
    documents: Sequence[int] | None = None,
) -> Tensor:
    """Which positions each query head keeps in each branch: booleans (branches, q_heads, length)."""
    kept = torch.zeros(len(segment_lengths), q_heads, length, dtype=torch.bool)
    for i, (w, r) in enumerate(zip(segment_lengths, dilation_rates, strict=True)):
        for h in range(q_heads):
            residue = _residue(offset, h, r, q_heads, q_heads // kv_heads, layer)
            for t, (start, _) in enumerate(_homes(length, documents)):
                kept[i, h, t] = (t - start) % w % r == residue
    return kept


def _residue(offset: str, head: int, r: int, q_heads: int, group: int, layer: int | None) -> int:
    """s(h): the class of positions, counted from the segment's start, that a query head keeps."""
    if (layer is not None) != (offset == "layer_rotated"):
        raise ValueError(f"layer={layer} does not go with offset={offset!r}")
    if layer is not None:
        return (head + layer * q_heads) % r
    return {"mod": head % r, "block": head // -(-q_heads // r), "kv_head": head // group % r}[offset]


def _homes(length: int, documents: Sequence[int] | None) -> list[tuple[int, int]]:
    """The document [start, stop) of each position."""
    return [home for home in pairwise([0, length] if documents is None else documents) for _ in range(*home)]


def _pairs(
    kept: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], documents: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Per branch: 1 where query t meets key u (branches, heads, t, u), and the zero keys of t (branches, heads, t)."""
    homes = _homes(kept.shape[2], documents)
    pairs, zero_keys = [], []
    for keeps, w, r in zip(kept, segment_lengths, dilation_rates, strict=True):
        segments = torch.tensor([start + (t - start) // w * w for t, (start, _) in enumerate(homes)])
        meets = keeps[:, :, None] & keeps[:, None, :] & (segments[:, None] == segments)
        rows = torch.tensor([-(-min(w, stop - start) // r) for start, stop in homes])
        pairs.append(meets.double())
        zero_keys.append(keeps * (rows - meets.sum(-1)).double())
    return torch.stack(pairs), torch.stack(zero_keys)


def _softmax(
    scores: Tensor, v: Tensor, pairs: Tensor, zero_keys: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax over `pairs` copies of each key; zero keys (score and value 0) and sinks only take weight."""
    extra = [zero_keys.log()] if sinks is None else [zero_keys.log(), sinks.double()[:, None].expand_as(zero_keys)]
    logits = torch.cat([scores + pairs.log(), *(x[None, :, :, None].expand(*scores.shape[:3], 1) for x in extra)], -1)
    blind = logits.isneginf().all(-1)
    # A finite stand-in for the logarithm of an empty sum: its gradient is then zero instead of nan.
    lse = logits.masked_fill(blind.unsqueeze(-1), 0.0).logsumexp(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1))[..., : v.shape[1]]
    return torch.einsum("bhnm,bmhd->bnhd", weights, v), lse.masked_fill(blind, -torch.inf)
