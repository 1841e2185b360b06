"""One attention call of an adapter: over the ring of the sequence, or local to this process."""

from __future__ import annotations

import threading
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.options import AttentionKeywords, takes_options
from ringattn.ring import Ring, ring_of_one
from ringattn.sequence import Sequence

__all__ = ["attend"]

UNTRACED = "attention over a ring is not traced; for fullgraph=True use ringattn.adapters.torch_ops.ring_attention"
"""The reason that `torch.compile(fullgraph=True)` reports. Without fullgraph the graph breaks here."""
_thread_local = threading.local()


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
    """Compute attention of this rank's shards over the ring of `seq`, or locally. Inputs are cast by `as_autocast`.

    A local call that torch's scaled_dot_product_attention can express (no window, softcap or sinks, and equal lengths
    of q and k) is passed to that function. Any other local call runs through a ring of one rank.

    Args:
        seq: The sequence that q, k and v are shards of. None: they are whole tensors, and attention is local.
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
        (batch, tokens, q_heads, d_v) in q's dtype, or in autocast's dtype where autocast is on.

    Raises:
        RingError: What `Ring.attention` raises.

    Example:
        out = attend(sequence_of(), q, k, v, causal=True)
    """
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    if seq is None:
        return _attend_locally(q, k, v, kv_seq, **options)
    return seq.ring.attention(q, k, v, seq, kv_seq=kv_seq, **options)


def as_autocast(x: Tensor) -> Tensor:
    """Cast `x` as torch.autocast casts the inputs of scaled_dot_product_attention; differentiable.

    If autocast is on for x's device, floating-point tensors except float64 become its dtype. Others are unchanged.
    """
    kind = x.device.type
    # The meta device has no autocast: `is_autocast_enabled` would raise there. Dynamo of torch 2.11 cannot trace
    # `torch.amp.is_autocast_available`.
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)
    if not is_on or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _attend_locally(
    q: Tensor, k: Tensor, v: Tensor, kv_seq: Sequence | None, **options: Unpack[AttentionKeywords]
) -> Tensor:
    """Return local attention: by torch's function if it takes these options, else over a ring of one rank."""
    # `schedule` has no meaning on one rank, so it does not keep a call from torch's function.
    beyond_torch = {name for name, value in options.items() if value is not None} - {"causal", "scale", "schedule"}
    if beyond_torch or kv_seq is not None or q.shape[1] != k.shape[1]:
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
    """Return a sequence of `length` tokens, with these documents, on this thread's ring of one rank.

    There is one ring per thread, because only one thread at a time may use a ring. The ring stays open. A ring that has
    failed, or belongs to a parent process, is replaced.
    """
    ring: Ring = ring_of_one(getattr(_thread_local, "ring", None))
    _thread_local.ring = ring
    return ring.sequence(length, cu_seqlens=cu_seqlens, layout="contiguous")
