"""One attention call of an adapter: over the sequence's ring, or on this process alone."""

from __future__ import annotations

import threading
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.ring import Ring
from ringattn.runtime.spec import AttentionOptions
from ringattn.sequence import Sequence
from ringattn.transport.local import LocalWorld

__all__ = ["attend"]

UNTRACED = "attention over a ring is not traced; ringattn.adapters.torch_ops.ring_attention stands in one graph"
"""What `torch.compile(fullgraph=True)` is told. Without fullgraph the graph ends here and another begins behind it."""
_own = threading.local()


@torch.compiler.disable(reason=UNTRACED)
def attend(seq: Sequence | None, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """Attention of this rank's shards over the ring of `seq`, or locally. All cast as `as_autocast` does.

    Alone, a call without window, softcap, sinks and other lengths of q and k is torch's scaled_dot_product_attention;
    any other runs through a ring of one rank.

    Args:
        seq: The sequence whose shards q, k and v are. None: they are whole tensors, and attention is local.
        q: Queries.
        k: Keys.
        v: Values.
        causal: As in `Ring.attention`, and so are the other options.
        window: (left, right) keys besides the query. None or -1: unbounded.
        sinks: Logits that take weight and give no value, one for each query head.
        mask: A mask of `ringattn.masks` besides causal and window. None: that of `seq`, if it has one.
        kv_seq: Another sequence, for cross attention. None: `seq`.
        scale: Factor of the scores. None: 1 / sqrt(d_k).
        softcap: Scores become softcap * tanh(score / softcap). None: no cap.
        alibi_slopes: ALiBi, one number for each query head; see `ringattn.attention`. None: no bias.
        dropout_p: Each weight is dropped with this probability; see `ringattn.attention`.
        dropout_seed: With dropout_p: what is dropped follows from it and from the places of pairs.
        schedule: How blocks travel.

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
        return _alone(q, k, v, **options)
    return seq.ring.attention(q, k, v, seq, **options)


def as_autocast(x: Tensor) -> Tensor:
    """`x` as torch.autocast casts the inputs of scaled_dot_product_attention; differentiable.

    In autocast's dtype for x's device where that is on and x is floating point, but for float64; else as it is.
    """
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # meta has none, and would raise
    if not on or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _alone(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    kept = {name for name, value in options.items() if value is not None} - {"causal", "scale", "schedule"}
    if kept or q.shape[1] != k.shape[1]:
        seq = lone_sequence(q.shape[1])
        if q.shape[1] != k.shape[1]:
            options.setdefault("kv_seq", lone_sequence(k.shape[1]))
        return seq.ring.attention(q, k, v, seq, **options)
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
