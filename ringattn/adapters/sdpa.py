"""Attention over a ring with the signature of `torch.nn.functional.scaled_dot_product_attention`.

Guarantees: what a ring does not compute is refused by name, never dropped; local attention is torch's own function.
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
    """`torch.nn.functional.scaled_dot_product_attention` over the active sequence; differentiable.

    Where local attention is asked for (see `adapters.context.sequence_of`) it is torch's function of these arguments;
    inside torch.compile the refusals below hold then too.

    Args:
        query: This rank's shard of the active sequence, or a DTensor of it with sharded heads.
        key: Like query.
        value: Like query.
        attn_mask: None; a ring takes no mask tensor.
        dropout_p: Each weight is dropped with this probability, over a ring by a seed drawn from the activation's.
        is_causal: A query meets the keys at its global position and before, within documents.
        scale: Factor of the scores. None: 1 / sqrt(head_dim).
        enable_gqa: Key and value may have fewer heads.

    Shape:
        query: (batch, heads, tokens, head_dim)
        key: (batch, kv_heads, tokens, head_dim)
        value: (batch, kv_heads, tokens, value_dim)

    Returns:
        (batch, heads, tokens, value_dim).

    Raises:
        UnsupportedError: A mask, other dimensions, or other keys than the queries' are given; or dropout inside
            torch.compile.
        InputError: Heads do not fit each other, or nothing is active while a ring of several ranks is open, or the
            activation names no seed for dropout.

    Example:
        with ring.activate(seq):
            out = ring_sdpa(q, k, v, is_causal=True)
    """
    (q, k, v), whole = local_heads((query, key, value), 1)
    seq = None
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
    # Reentrant checkpointing calls this without gradients and returns the result from an autograd function of its own:
    # a view could then not be changed in place, as torch's result can.
    return whole(out if torch.is_grad_enabled() else out.detach())


def _refuse(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool) -> None:
    if attn_mask is not None:
        raise UnsupportedError(
            "attn_mask: a ring takes no mask tensor, which would need rows for all tokens; is_causal=True, documents "
            "(ring.sequence(cu_seqlens=...)) and ring.attention(window=...) are computed without one, and a BlockMask "
            "of them by ringattn.adapters.flex.flex_attention"
        )
    if dropout_p and torch.compiler.is_compiling():
        raise UnsupportedError(
            f"dropout_p={dropout_p}: compiled code would keep one seed for all its calls; call "
            "ringattn.adapters.torch_ops.ring_attention with dropout_p and a dropout_seed, which the compiled function "
            "takes as an argument"
        )
    check_heads_first(q, k, v, enable_gqa)


def check_heads_first(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Refuse tensors that are not heads first, of one sequence, with heads that fit each other.

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
        UnsupportedError: There are more or fewer dimensions, or other keys than queries.
        InputError: Heads do not fit each other.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UnsupportedError(
            f"query, key and value must be (batch, heads, tokens, head_dim), got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}; join or add dimensions before"
        )
    if k.shape[2] != q.shape[2]:
        raise UnsupportedError(
            f"{q.shape[2]} queries and {k.shape[2]} keys a rank: attention between two sequences is "
            "ring.attention(..., kv_seq=...)"
        )
    if k.shape[1] != q.shape[1] and not enable_gqa:
        raise InputError(f"query has {q.shape[1]} heads and key {k.shape[1]}; enable_gqa=True groups them")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise InputError(f"enable_gqa: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
