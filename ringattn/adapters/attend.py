"""One attention call of an adapter: over the sequence's ring, or on this process alone."""

from __future__ import annotations

import threading
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.options import AttentionKeywords, takes_options
from ringattn.ring import Ring
from ringattn.sequence import Sequence
from ringattn.transport.local import LocalWorld

__all__ = ["attend"]

UNTRACED = "attention over a ring is not traced; ringattn.adapters.torch_ops.ring_attention stands in one graph"
"""What `torch.compile(fullgraph=True)` is told. Without fullgraph the graph ends here and another begins behind it."""
_own = threading.local()


@torch.compiler.disable(reason=UNTRACED)
@takes_options()
def attend(
    seq: Sequence | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kv_seq: Sequence | None = None,
    **options: Unpack[AttentionKeywords],
) -> Tensor:
    """Attention of this rank's shards over the ring of `seq`, or locally. All cast as `as_autocast` does.

    Alone, a call without window, softcap, sinks and other lengths of q and k is torch's scaled_dot_product_attention;
    any other runs through a ring of one rank.

    Args:
        seq: The sequence whose shards q, k and v are. None: they are whole tensors, and attention is local.
        q: Queries.
        k: Keys.
        v: Values.
        kv_seq: Another sequence, for cross attention. None: `seq`.
        options: See `ringattn.options.AttentionOptions`.

    Shape:
        q: (batch, tokens, q_heads, d_k)
        k: (batch, kv_tokens, kv_heads, d_k)
        v: (batch, kv_tokens, kv_heads, d_v)
        sinks: (q_heads,)

    Returns:
        (batch, tokens, q_heads, d_v) in q's dtype, under autocast in its.

    Raises:
        RingError: What `Ring.attention` raises.

    Example:
        out = attend(sequence_of(), q, k, v, causal=True)
    """
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    if seq is None:
        return _alone(q, k, v, kv_seq, **options)
    return seq.ring.attention(q, k, v, seq, kv_seq=kv_seq, **options)


def as_autocast(x: Tensor) -> Tensor:
    """`x` as torch.autocast casts the inputs of scaled_dot_product_attention; differentiable.

    In autocast's dtype for x's device where that is on and x is floating point, but for float64; else as it is.
    """
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # meta has none, and would raise
    if not on or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _alone(q: Tensor, k: Tensor, v: Tensor, kv_seq: Sequence | None, **options: Unpack[AttentionKeywords]) -> Tensor:
    """Return local attention: by torch if its function takes these options, else over a ring of one rank."""
    others = {name for name, value in options.items() if value is not None} - {"causal", "scale", "schedule"}
    if others or kv_seq is not None or q.shape[1] != k.shape[1]:
        seq = lone_sequence(q.shape[1])
        if kv_seq is None and q.shape[1] != k.shape[1]:
            kv_seq = lone_sequence(k.shape[1])
        return seq.ring.attention(q, k, v, seq, kv_seq=kv_seq, **options)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        is_causal=options.get("causal", False), scale=options.get("scale"), enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def lone_sequence(length: int, cu_seqlens: tuple[int, ...] | None = None) -> Sequence:
    """`length` tokens, or these documents, of this thread's own ring of one rank, which stays open."""
    if not hasattr(_own, "ring"):
        _own.ring = Ring(transport=LocalWorld(1).transport(0))
    ring: Ring = _own.ring
    return ring.sequence(length, cu_seqlens=cu_seqlens, layout="contiguous")
