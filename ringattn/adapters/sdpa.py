"""Attention over a ring with the signature of `torch.nn.functional.scaled_dot_product_attention`.

Guarantees: an option that a ring does not compute is refused by name, never ignored; local attention is torch's
function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.adapters.context import sequence_of
from ringattn.adapters.dropout import drawn_seed, refuse_without_seed
from ringattn.adapters.hosts import local_heads
from ringattn.adapters.torch_ops import ring_attention
from ringattn.errors import InputError, UnsupportedError


def ring_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` over the active sequence; differentiable.

    If attention is local (see `adapters.context.sequence_of`), torch's function gets these arguments unchanged. Inside
    torch.compile, local calls are subject to the refusals below as well.

    Args:
        query: This rank's shard of the active sequence, or a DTensor of it with sharded heads.
        key: Like query.
        value: Like query.
        attn_mask: Must be None; a ring takes no mask tensor.
        dropout_p: Probability of dropping each weight. Over a ring, the seed is derived from the activation's seed.
        is_causal: A query attends to keys up to its global position, within its document.
        scale: Factor of the scores. None: 1 / sqrt(head_dim).
        enable_gqa: Key and value may have fewer heads.

    Shape:
        query: (batch, heads, tokens, head_dim)
        key: (batch, kv_heads, tokens, head_dim)
        value: (batch, kv_heads, tokens, value_dim)

    Returns:
        (batch, heads, tokens, value_dim).

    Raises:
        UnsupportedError: There is a mask tensor, tensors are not 4-dimensional, or keys and queries have different
            lengths; or dropout is used inside torch.compile.
        InputError: Head counts do not match, nothing is active while a ring of several ranks is open, or there is
            dropout but the activation has no seed.

    Example:
        with ring.activate(seq):
            out = ring_sdpa(q, k, v, is_causal=True)
    """
    (q, k, v), whole = local_heads((query, key, value), 1)
    seq = None
    # A compiler must not bake the active sequence into its graph: the operator looks it up when it runs.
    if not torch.compiler.is_compiling():
        seq = sequence_of()
        if seq is None:
            return whole(F.scaled_dot_product_attention(
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            ))  # fmt: skip
    _refuse(q, k, v, attn_mask, dropout_p, enable_gqa)
    seed = None
    if dropout_p and seq is not None:
        with seq.ring.refused_by_all():
            refuse_without_seed(f"dropout_p={dropout_p}", "set dropout_p=0.0")
            seed = drawn_seed(seq.ring)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = ring_attention(q, k, v, seq, causal=is_causal, scale=scale, dropout_p=dropout_p, dropout_seed=seed).transpose(
        1, 2
    )
    # Reentrant checkpointing calls this under no_grad and returns the result from its own autograd function. Autograd
    # forbids in-place changes of a view returned there, but allows them on torch's result: so return no view.
    return whole(out if torch.is_grad_enabled() else out.detach())


def _refuse(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool) -> None:
    if attn_mask is not None:
        raise UnsupportedError(
            "attn_mask: a ring takes no mask tensor, which would need rows for all tokens. Use is_causal=True, "
            "documents (ring.sequence(cu_seqlens=...)) or ring.attention(window=...); for a BlockMask of these use "
            "ringattn.adapters.flex.flex_attention"
        )
    if dropout_p and torch.compiler.is_compiling():
        raise UnsupportedError(
            f"dropout_p={dropout_p}: compiled code would use one seed for all its calls; call "
            "ringattn.adapters.torch_ops.ring_attention with dropout_p and dropout_seed, and make the seed an argument "
            "of the compiled function"
        )
    check_heads_first(q, k, v, enable_gqa)


def check_heads_first(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Refuse tensors that are not (batch, heads, tokens, dim), of one sequence, with matching head counts.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        enable_gqa: Key and value may have fewer heads.

    Shape:
        q: (batch, heads, tokens, head_dim)
        k: (batch, kv_heads, tokens, head_dim)
        v: (batch, kv_heads, tokens, value_dim)

    Raises:
        UnsupportedError: A tensor is not 4-dimensional, or keys and queries have different lengths.
        InputError: The head counts do not match.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UnsupportedError(
            f"query, key and value must be (batch, heads, tokens, head_dim), got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}; reshape them first"
        )
    if k.shape[2] != q.shape[2]:
        raise UnsupportedError(
            f"{q.shape[2]} queries and {k.shape[2]} keys on this rank: for attention between two sequences call "
            "ring.attention(..., kv_seq=...)"
        )
    if k.shape[1] != q.shape[1] and not enable_gqa:
        raise InputError(f"query has {q.shape[1]} heads and key has {k.shape[1]}; pass enable_gqa=True to group them")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise InputError(f"enable_gqa: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
