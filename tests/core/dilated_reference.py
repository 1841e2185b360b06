"""A reference of dilated attention: `tests.fuzz.reference` with the arguments of `Ring.dilated_attention`.

Guarantees: out and lse are differentiable by autograd; a row without keys gives out 0 and lse -inf, and zero gradients.
It is slow, and it stores (branches, heads, tokens, tokens) numbers.
Not covered: ringattn's own code, shards, tiles, kernels, and calls that a ring refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz import reference


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
    """Return dilated attention of whole sequences (LongNet, arXiv 2307.02486, equations 3 to 15), in float64.

    q (batch, tokens, q_heads, d_k), k (batch, tokens, kv_heads, d_k), v (batch, tokens, kv_heads, d_v), sinks
    (q_heads,). `documents` are bounds [0, ..., tokens]; segments restart in each document. A pair that several branches
    allow counts once for each branch. `alibi_slopes` (q_heads,): slope * |distance in tokens| is subtracted from a
    score. Return out (batch, tokens, q_heads, d_v) and lse (batch, q_heads, tokens), natural logarithm.

    A branch has segments of w tokens and the dilation rate r. With tail="zero_pad", the kept rows of each segment and
    offset are padded with zero keys to ceil(min(w, document) / r) rows, at the positions that follow the segment. If r
    does not divide min(w, document) and more segments follow, torchscale moves rows, but this reference does not. With
    grad="detached", no gradient flows through lse and through the weights that mix the branches. Raises ValueError for
    an unknown `tail` or `grad`, and for "detached" with sinks.
    """
    if tail not in ("ragged", "zero_pad") or grad not in ("exact", "detached"):
        raise ValueError(f"no reference for tail={tail!r}, grad={grad!r}")
    if grad == "detached" and sinks is not None:
        raise ValueError("a sink belongs to no branch: there is no reference for grad='detached' with sinks")
    tokens, heads = q.shape[1], (q.shape[2], k.shape[2])
    _check_layer(offset, layer)
    counts = reference.dilated_counts(
        tokens, documents, heads, segment_lengths, dilation_rates, causal, offset, layer, tail
    )
    positions = reference.places(tokens, documents)
    bias = None if alibi_slopes is None else reference.alibi(alibi_slopes.tolist(), positions, positions)
    return reference.attention(q, k, v, counts, scale, softcap, sinks, grad == "detached", bias=bias)


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
    """Return a mask (branches, q_heads, length) of the positions that each query head keeps in each branch."""
    _check_layer(offset, layer)
    positions, branches = reference.places(length, documents), zip(segment_lengths, dilation_rates, strict=True)
    return torch.stack([reference.kept_rows(positions, (q_heads, kv_heads), w, r, offset, layer) for w, r in branches])


def _check_layer(offset: str, layer: int | None) -> None:
    if (layer is not None) != (offset == "layer_rotated"):
        raise ValueError(f"layer={layer} does not go with offset={offset!r}")
