"""The reference (`tests.fuzz.reference`) with boolean masks and with the masks of `ringattn.masks`.

`tests/fuzz/test_reference.py` compares it with torch's attention and with hand-written masks.
"""

from __future__ import annotations

from torch import Tensor

from ringattn.masks import AttentionMask
from tests.fuzz import reference


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
    """Return `reference.attention` over `allowed`: booleans (q tokens, k tokens) or (q heads, q tokens, k tokens)."""
    counts = reference.Counts(allowed.double()[None] if allowed.ndim == 3 else allowed.double()[None, None])
    return reference.attention(q, k, v, counts, scale, softcap, sinks, bias=bias, kept=kept)


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
    """Return which queries attend to which keys; see `reference.plain_counts`.

    The result has the shape (q tokens, k tokens), or (heads, q tokens, k tokens) for a mask of several groups of heads.

    `cu_seqlens`: document bounds, from 0 to the number of tokens; `kv_cu_seqlens`: those of the keys if they differ.
    """
    kv_cuts = cu_seqlens if kv_cu_seqlens is None else kv_cu_seqlens
    text = None if mask is None else mask.text
    pairs = reference.plain_counts(q_tokens, cu_seqlens, k_tokens, kv_cuts, causal, window, text).pairs[0].bool()
    return pairs[0] if len(pairs) == 1 else pairs


def alibi(
    slopes: list[float],
    q_tokens: int,
    k_tokens: int,
    cu_seqlens: list[int] | None = None,
    kv_cu_seqlens: list[int] | None = None,
) -> Tensor:
    """Return the bias that ALiBi adds to scores, (q heads, q tokens, k tokens). Positions count within documents."""
    kv_cuts = cu_seqlens if kv_cu_seqlens is None else kv_cu_seqlens
    return reference.alibi(slopes, reference.places(q_tokens, cu_seqlens), reference.places(k_tokens, kv_cuts))
